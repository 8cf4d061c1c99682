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
//! # use tower_lock::tickets::{self, Access, RENEW_WITHIN};
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
//!     .tickets(RENEW_WITHIN, 600 * RENEW_WITHIN);
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
//! | `POST /take-over` | 201 as of `POST`: the ticket of the other user has ended |
//!
//! A ticket that does not hold the key (any more) gets 409, and one that is none of the key 400.
//! While a request with the ticket runs, as that which saves the document, the ticket is in use: a
//! renewal gets 409, and the page tries again. All but `GET` need the header `Sec-Fetch-Site:
//! same-origin`, which browsers send to their own origin over HTTPS, or `x-tower-lock: 1`: a page
//! of another site can send neither.
//!
//! # The holder
//!
//! `locked` says whether there is one. `by` is the name of the user, `since_unix_ms` the time at
//! which the edit has begun, and `left_ms` how long its ticket holds the key without a renewal.
//! While a request works under the lock, `by` is null.

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
    lock::{LockGuard, LockManager, LockStatus, TicketError, take_over},
    lock_key::LockKey,
    middleware::acquire::ticket_of,
    origin::is_same_origin,
    rejection::{Rejection, retry_after::HoldEstimate},
};

/// How long a ticket of this router holds its key without a renewal: 60 seconds. A page renews
/// three times as often.
pub const RENEW_WITHIN: Duration = Duration::from_secs(60);

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
        user: String,
    },
    /// The same, and take it from another user. A user may do that with an own ticket anyway.
    TakeOver {
        /// The key.
        key: LockKey,
        /// The name of the user.
        user: String,
    },
}

/// One request that is permitted.
struct Call {
    locks: LockManager,
    key: LockKey,
    user: String,
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
        let (key, user, may_take_over) = match access {
            Access::Edit { key, user } => (key, user, false),
            Access::TakeOver { key, user } => (key, user, true),
            Access::Denied => return Err(StatusCode::FORBIDDEN.into_response()),
        };
        if action != Action::Show && !is_same_origin(headers) {
            return Err(StatusCode::FORBIDDEN.into_response());
        }
        let ends = user.char_indices().map(|(at, c)| at + c.len_utf8());
        let end = ends.take_while(|end| *end <= MAX_TICKET_LABEL_BYTES).last().unwrap_or_default();
        Ok(Self { locks: locks.clone(), key, user: user[..end].to_owned(), may_take_over })
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
                released.map_err(|error| refused(LockError::Store(error).into()))?;
                Ok(StatusCode::NO_CONTENT.into_response())
            }
            Action::TakeOver => self.take_over().await,
        }
    }

    async fn status(&self) -> Result<LockStatus, Response> {
        let status = self.locks.inspect(self.key.clone()).await;
        status.map_err(|error| refused(LockError::Store(error).into()))
    }

    async fn redeem(&self, headers: &HeaderMap) -> Result<LockGuard, Response> {
        let ticket = ticket_of(headers, &self.key).map_err(IntoResponse::into_response)?;
        let ticket = ticket.ok_or(StatusCode::BAD_REQUEST.into_response())?;
        self.locks.redeem(&ticket).await.map_err(refused)
    }

    async fn take(&self) -> Done {
        match self.locks.try_lock(self.key.clone()).await {
            Ok(guard) => self.keep(guard).await,
            Err(LockError::Busy { .. }) => Err(holder(StatusCode::CONFLICT, &self.status().await?)),
            Err(error) => Err(refused(error.into())),
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
        if !self.may_take_over && by != *self.user {
            return Err(holder(StatusCode::FORBIDDEN, &status));
        }
        let guard = match take_over(&self.locks, &self.key, id, RENEW_WITHIN).await {
            Ok(guard) => guard,
            // The other user has just renewed, saved or closed the document.
            Err(TicketError::NotHeld) => return Err(holder(StatusCode::CONFLICT, &self.status().await?)),
            Err(error) => return Err(refused(error)),
        };
        let taken = self.keep(guard).await?;
        let (user, by) = (self.user.escape_debug(), by.escape_debug());
        tracing::info!(target: "tower_lock::audit", key = self.locks.shown(&self.key), %user, %by, "lock taken over");
        Ok(taken)
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

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn refused(error: TicketError) -> Response {
    let rejection = match error {
        TicketError::NotHeld => Rejection::TicketNotHeld,
        TicketError::Lock(error) => Rejection::from_lock_error(error, &HoldEstimate::default(), StatusCode::CONFLICT),
    };
    rejection.into_response()
}
