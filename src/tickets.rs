//! Locks for editors: taken when a user opens a document, renewed by its page, and freed when the
//! user closes it. Needs the feature `axum`.
//!
//! An edit lasts for minutes, and its requests are short. So the lock is a [ticket](crate::Ticket)
//! in between, which the page of the user keeps and renews. A page that is closed, or crashes,
//! renews nothing, and the document is free after [`RENEW_WITHIN`].
//!
//! ```
//! # use axum::{Extension, Router, extract::Path, routing::put};
//! # use tower_lock::{HeldLock, LockLayer, LockManager, key};
//! # use tower_lock::tickets::{self, Access, EDIT_WITHIN, RENEW_WITHIN};
//! # #[derive(Clone)] struct User { name: String, is_editor: bool }
//! # async fn save(_: HeldLock) {}
//! fn document(id: u64) -> (&'static str, u64) {
//!     ("document", id)
//! }
//!
//! # fn app(locks: &LockManager) -> Router {
//! // `User` is what your login has inserted.
//! let access = |(Path(id), Extension(user)): (Path<u64>, Extension<User>)| match user.is_editor {
//!     true => Access::Edit { key: document(id).into(), user: user.name },
//!     false => Access::Denied,
//! };
//! let save_under_ticket = LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| document(id)))
//!     .tickets(RENEW_WITHIN, EDIT_WITHIN);
//! Router::new()
//!     .route("/documents/{id}", put(save).route_layer(save_under_ticket))
//!     .nest("/documents/{id}/lock", tickets::router(locks, access))
//! # }
//! ```
//!
//! | request | response |
//! |---|---|
//! | `GET` | 200 with the [holder](#the-holder) |
//! | `POST` | 201 with `ticket` and `renew_within_ms`; 409 with the holder, if the key is locked |
//! | `PUT` with `Lock-Ticket` | 200: the ticket holds the key for another [`RENEW_WITHIN`] |
//! | `DELETE` with `Lock-Ticket` | 204: the key is free |
//! | `POST /take-over` | 201 with a new ticket, as `POST`: the earlier one has ended |
//!
//! A ticket that does not hold the key (any more) gets 409, and one that is none of the key 400. An
//! edit ends after [`EDIT_WITHIN`]: its ticket is renewed until then. While a request with the
//! ticket runs, as that which saves the document, the ticket is in use: a renewal gets 409, and the
//! page tries again.
//!
//! All but `GET` need the header `Sec-Fetch-Site: same-origin`, which browsers send to their own
//! origin over HTTPS, or `x-tower-lock: 1`: a page of another site can send neither. The routes
//! that need the ticket, as that which saves, are those of the application, under its own
//! protection.
//!
//! # The holder
//!
//! `locked` says whether there is one. `by` is the name of the user, `since_unix_ms` the time at
//! which the edit has begun, and `left_ms` how long its ticket holds the key without a renewal.
//! While a request works under the lock, or the key is blocked after one, `by` is null.

use std::time::{Duration, UNIX_EPOCH};

use axum::{
    Router,
    extract::FromRequestParts,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use http::{
    HeaderMap, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};
use serde_json::{Value, json};

use crate::{
    acquisition::AcquisitionId,
    error::LockError,
    limits::MAX_TICKET_LABEL_BYTES,
    lock::{LockGuard, LockManager, LockStatus, TicketError, TicketTerms, UNNAMED, take_over, whole_ms},
    lock_key::LockKey,
    middleware::acquire::ticket_of,
    origin::is_same_origin,
    rejection::{Rejection, retry_after::HoldEstimate},
};

/// How long a ticket of this router holds its key without a renewal: 60 seconds. A page renews
/// three times as often.
pub const RENEW_WITHIN: Duration = Duration::from_secs(60);

/// The longest edit: 10 hours after it has begun, its ticket cannot be renewed any more. A page
/// that is never closed does not keep its document for ever.
pub const EDIT_WITHIN: Duration = Duration::from_secs(10 * 60 * 60);

/// What the client of a request may do, and with which key.
#[derive(Clone, Debug)]
pub enum Access {
    /// Nothing: the response is 403.
    Denied,
    /// Take, renew and free the lock of this key, and see who has it.
    Edit {
        /// The key, that of the layer on the routes which need the ticket.
        key: LockKey,
        /// The name of the user, for the others. At most 64 bytes are shown.
        ///
        /// A user may take the key over from an own ticket: one with the same name, of 1 to 60
        /// bytes, and not `ticket`. So each user has another name.
        user: String,
    },
    /// The same, and take it from another user.
    TakeOver {
        /// The key.
        key: LockKey,
        /// The name of the user.
        user: String,
    },
}

const TERMS: TicketTerms = TicketTerms { gap: RENEW_WITHIN, total: EDIT_WITHIN };

const DENIED: &str = "You may not use this lock. Sign in as a user who may.";
const OTHER_ORIGIN: &str = "Send this request from a page of the same origin over HTTPS, or with `x-tower-lock: 1`.";
const NO_TICKET: &str = "Send the ticket of the response to `POST` in the header `lock-ticket`.";

/// One request that is permitted.
struct Call {
    locks: LockManager,
    key: LockKey,
    user: String,
    /// Whether no other user has the name.
    is_named: bool,
    may_take_over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    Show,
    Take,
    Renew,
    Free,
    TakeOver,
}

/// A response, or that to a request that is refused.
type Done = Result<Response, Response>;

/// Creates the routes of the locks of documents, below any path.
///
/// `access` decides for each request, from what it extracts: one extractor, or a tuple of them. A
/// rejection of an extractor is the response.
///
/// # Panics
///
/// Panics if the store has no [tickets](crate::store::StoreTraits::tickets).
#[track_caller]
pub fn router<S, T>(locks: &LockManager, access: impl Fn(T) -> Access + Clone + Send + Sync + 'static) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
    T: FromRequestParts<S> + Send + 'static,
{
    if let Some(why) = locks.driver().tickets_refused(false) {
        panic!("`tickets::router` needs another store: {why}");
    }
    let handler = |action: Action| {
        let (locks, access) = (locks.clone(), access.clone());
        move |asked: T, headers: HeaderMap| {
            let call = Call::new(&locks, action, access(asked), &headers);
            async move { async { call?.run(action, &headers).await }.await.unwrap_or_else(|refused| refused) }
        }
    };
    let lock = get(handler(Action::Show)).post(handler(Action::Take)).put(handler(Action::Renew));
    Router::new().route("/", lock.delete(handler(Action::Free))).route("/take-over", post(handler(Action::TakeOver)))
}

impl Call {
    fn new(locks: &LockManager, action: Action, access: Access, headers: &HeaderMap) -> Result<Self, Response> {
        let (key, mut user, may_take_over) = match access {
            Access::Edit { key, user } => (key, user, false),
            Access::TakeOver { key, user } => (key, user, true),
            Access::Denied => return Err((StatusCode::FORBIDDEN, DENIED).into_response()),
        };
        if action != Action::Show && !is_same_origin(headers) {
            return Err((StatusCode::FORBIDDEN, OTHER_ORIGIN).into_response());
        }
        // A longer name may look like the rest of one that was cut.
        let is_named = (1..=MAX_TICKET_LABEL_BYTES - 4).contains(&user.len()) && user != UNNAMED;
        while user.len() > MAX_TICKET_LABEL_BYTES {
            user.pop();
        }
        Ok(Self { locks: locks.clone(), key, user, is_named, may_take_over })
    }

    async fn run(&self, action: Action, headers: &HeaderMap) -> Done {
        match action {
            Action::Show => Ok(holder(StatusCode::OK, &self.status().await?)),
            Action::Take => self.take().await,
            Action::Renew => {
                self.keep(self.redeem(headers).await?).await?;
                Ok(StatusCode::OK.into_response())
            }
            Action::Free => {
                let released = self.redeem(headers).await?.release().await;
                released.map_err(LockError::Store).map_err(refused)?;
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            Action::TakeOver => self.take_over().await,
        }
    }

    async fn status(&self) -> Result<LockStatus, Response> {
        self.locks.inspect(self.key.clone()).await.map_err(LockError::Store).map_err(refused)
    }

    async fn redeem(&self, headers: &HeaderMap) -> Result<LockGuard, Response> {
        let ticket = ticket_of(headers, &self.key).map_err(IntoResponse::into_response)?;
        let ticket = ticket.ok_or((StatusCode::BAD_REQUEST, NO_TICKET).into_response())?;
        self.locks.redeem_on(Some(TERMS), &ticket).await.map_err(refused)
    }

    async fn take(&self) -> Done {
        match self.locks.try_lock(self.key.clone()).await {
            Ok(guard) => self.keep(guard).await,
            Err(LockError::Busy { .. }) => Err(holder(StatusCode::CONFLICT, &self.status().await?)),
            Err(error) => Err(refused(error)),
        }
    }

    async fn keep(&self, guard: LockGuard) -> Done {
        let ticket = guard.into_ticket_as(&self.user, RENEW_WITHIN).await.map_err(refused)?;
        Ok(json(StatusCode::CREATED, &json!({ "ticket": ticket, "renew_within_ms": whole_ms(RENEW_WITHIN) })))
    }

    async fn take_over(&self) -> Done {
        let status = self.status().await?;
        let Some(id) = ticket_in(&status) else { return self.take().await };
        let by = id.ticket_label();
        if !(self.may_take_over || self.is_named && by == *self.user) {
            return Err(holder(StatusCode::FORBIDDEN, &status));
        }
        let guard = match take_over(&self.locks, &self.key, id, RENEW_WITHIN).await {
            Ok(guard) => guard,
            // The other user has just renewed, saved or closed the document.
            Err(TicketError::NotHeld) => return Err(holder(StatusCode::CONFLICT, &self.status().await?)),
            Err(error) => return Err(refused(error)),
        };
        // Before the next call: the client may disconnect in it.
        let (user, by) = (self.user.escape_debug(), by.escape_debug());
        tracing::info!(target: "tower_lock::audit", key = self.locks.shown(&self.key), %user, %by, "lock taken over");
        self.keep(guard).await
    }
}

/// The ticket that holds a key.
fn ticket_in(status: &LockStatus) -> Option<&AcquisitionId> {
    status.holder().map(|holder| &holder.id).filter(|id| id.is_of_ticket())
}

/// The response with the holder of a key.
fn holder(code: StatusCode, status: &LockStatus) -> Response {
    let id = ticket_in(status);
    let granted = status.holder().and_then(|holder| holder.since?.duration_since(UNIX_EPOCH).ok());
    let holder = json!({
        "locked": !status.remaining.is_zero(),
        "by": id.map(AcquisitionId::ticket_label),
        "since_unix_ms": id.map(AcquisitionId::sequence).or(granted.map(whole_ms)),
        "left_ms": whole_ms(status.remaining),
    });
    json(code, &holder)
}

fn json(code: StatusCode, body: &Value) -> Response {
    (code, [(CACHE_CONTROL, "no-store"), (CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn refused(error: impl Into<TicketError>) -> Response {
    let rejection = match error.into() {
        TicketError::NotHeld => Rejection::TicketNotHeld,
        TicketError::Lock(error) => Rejection::from_lock_error(error, &HoldEstimate::default(), StatusCode::CONFLICT),
    };
    rejection.into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::Body;
    use http::Request;
    use tower::ServiceExt;

    use super::*;
    use crate::{
        MemoryStore, Ticket,
        proto::QUEUE,
        store::{AcquireRequest, IfBusy, LockStore},
    };

    /// A renewal every 20 seconds would hold the key for ever.
    /// Guarantee: G24.
    #[tokio::test]
    async fn edit_is_not_renewed_after_its_longest_time() {
        for (minutes, status) in [(599, StatusCode::OK), (601, StatusCode::CONFLICT)] {
            let (store, key) = (Arc::new(MemoryStore::new()), LockKey::from(("document", 7)));
            let locks = LockManager::new(Arc::clone(&store));
            let guard = locks.lock(key.clone()).await.expect("free");
            let ticket = guard.held_lock().keep(RENEW_WITHIN).expect("the store has tickets");
            guard.release_after_failure().await.expect("held");
            // An earlier start, in a ticket that the store has.
            let start = ticket.id().sequence();
            let earlier = ticket.to_string().replace(&start.to_string(), &(start - minutes * 60_000).to_string());
            let id = earlier.parse::<Ticket>().expect("a ticket").id();
            let lease = AcquireRequest::new(key.clone(), id, RENEW_WITHIN, IfBusy::Fail, QUEUE, RENEW_WITHIN);
            store.acquire(lease.into()).into_single().await.expect("it is up");
            let access = move |()| Access::Edit { key: key.clone(), user: "Ann".to_owned() };
            let renewal = Request::put("/").header("lock-ticket", earlier).header("x-tower-lock", "1");
            let router = router::<(), ()>(&locks, access);
            let renewed = router.oneshot(renewal.body(Body::empty()).expect("a request")).await;
            assert_eq!(renewed.expect("infallible").status(), status, "after {minutes} minutes");
        }
    }
}
