//! Pages for the operator of a service: who holds which key, who waits, and revocation. Needs the
//! feature `console`.
//!
//! ```
//! # use axum::Router;
//! # use tower_lock::{LockManager, console::{self, Access}};
//! # fn is_operator(_: &http::HeaderMap) -> bool { true }
//! # fn app(locks: &LockManager) -> Router {
//! let console = console::router(locks, |head| {
//!     if is_operator(&head.headers) { Access::Read } else { Access::Denied }
//! });
//! Router::new().nest("/ops/locks", console)
//! # }
//! ```
//!
//! The page [console](crate::guide::console) of the guide shows the views, and has the rules for a
//! revocation.

mod audit;
mod call;
mod page;
mod text;
mod views;

use axum::{Router, body::Body, extract::Request, response::Response, routing::any};
use http::{
    HeaderName, HeaderValue, StatusCode,
    header::{
        ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION, REFERRER_POLICY, RETRY_AFTER,
        X_CONTENT_TYPE_OPTIONS,
    },
    request::Parts,
};
use http_body_util::{BodyExt, Limited};
use serde::Serialize;
use serde_json::json;
use tokio::time::timeout;

pub use self::call::Access;
use self::{
    audit::Audit,
    call::{Refusal, View},
    page::Frame,
    views::{Done, KeyPage, KeyRow, KeyView, KeysView, ProcessView, age},
};
use crate::{
    acquisition::AcquisitionId,
    limits::{BODY_IDLE_TIMEOUT, MAX_CONSOLE_FORM_BYTES, MAX_CONSOLE_ROWS},
    lock::LockManager,
    lock_key::LockKey,
    origin::is_same_origin,
    policy::LogKey,
    store::{ListEntry, ListRequest},
};

/// Of each response.
const HEADERS: [(HeaderName, &str); 4] = [
    (
        CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (CACHE_CONTROL, "no-store"),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    // A key is in the URL of its page.
    (REFERRER_POLICY, "no-referrer"),
];

/// Each is a route, so that one of the application for all paths does not win. The fallback has the
/// others below the address of the console.
const PATHS: &str = "/ /keys /key /revoke /style.css /api/holding /api/keys /api/key /api/revoke";

/// Creates the pages of the locks of this manager, for `nest`, `nest_service` or `merge`. Needs the
/// feature `console`.
///
/// `access` decides for each request what its client may do. There is no default: a service has its
/// own authentication, or its operators reach another port. [`Access::Denied`] is 403, so put a
/// layer outside that asks a browser for a login.
///
/// `GET` and `HEAD` change nothing. A revocation is a `POST` by [`Access::Revoke`], from a page of
/// the same origin (`Sec-Fetch-Site`) or with the header `x-tower-lock: 1`. Each one writes an
/// event with the target `tower_lock::audit`.
///
/// Keys are shown as [`log_key`](crate::LockPolicy::log_key) says. They are redacted if this
/// manager, a handle or a layer of it redacts them, unless `locks` has
/// [`LogKey::Full`].
///
/// The router has a fallback. An application with a fallback of its own nests it: Axum panics if
/// both are merged.
pub fn router<S>(locks: &LockManager, access: impl Fn(&Parts) -> Access + Clone + Send + Sync + 'static) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let locks = locks.clone();
    let handler = move |request: Request| {
        let (head, body) = request.into_parts();
        let console = Console {
            access: access(&head),
            frame: Frame { prefix: call::prefix(&head.extensions, &head.uri), keys_redacted: !shows_keys(&locks) },
            is_json: head.uri.path().starts_with("/api/"),
            locks: locks.clone(),
            head,
        };
        async move { console.respond(body).await }
    };
    PATHS.split(' ').fold(Router::new(), |router, path| router.route(path, any(handler.clone()))).fallback(handler)
}

/// Fails closed: a layer that redacts its keys redacts those of the console.
fn shows_keys(locks: &LockManager) -> bool {
    match locks.policy().log_key_setting() {
        Some(setting) => setting == LogKey::Full,
        None => !locks.driver().redacts_keys(),
    }
}

/// The console for one request.
struct Console {
    locks: LockManager,
    head: Parts,
    access: Access,
    frame: Frame,
    is_json: bool,
}

impl Console {
    async fn respond(&self, body: Body) -> Response {
        let Parts { method, uri, headers, .. } = &self.head;
        let reply = match call::permitted(&self.access, method, uri.path(), headers) {
            Ok(view) => self.reply(view, uri.query().unwrap_or_default(), body).await,
            Err(refusal) => Err(refusal),
        };
        let mut response = reply.unwrap_or_else(|refusal| self.refused(refusal));
        for (name, value) in HEADERS {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }

    async fn reply(&self, view: View, query: &str, body: Body) -> Result<Response, Refusal> {
        Ok(match view {
            View::Style => response("text/css; charset=utf-8", include_str!("style.css")),
            View::Process => {
                let view = self.process();
                self.shown(&view, || self.frame.process(&view))
            }
            View::Keys => {
                let view = self.keys(query).await?;
                self.shown(&view, || self.frame.keys(&view))
            }
            View::Key => {
                let key = call::key(query)?;
                let status = self.locks.inspect(key.clone()).await?;
                let may_revoke = matches!(self.access, Access::Revoke { .. });
                let row = KeyRow { key: self.redact(&key), status };
                let view = KeyView { keys_redacted: self.frame.keys_redacted, may_revoke, row };
                let done = call::field(query, "done").filter(|_| is_same_origin(&self.head.headers));
                let done = done.and_then(|code| Done::from_code(&code));
                self.shown(&view, || self.frame.key(&view, &key.as_query(), done))
            }
            View::Revoke => {
                let form = form(query, body).await?;
                self.revoke(call::key(&form)?, call::field(&form, "holder")).await?
            }
        })
    }

    /// A view as JSON or as its page.
    fn shown(&self, view: &impl Serialize, page: impl FnOnce() -> String) -> Response {
        if self.is_json {
            return response("application/json", serde_json::to_string(view).expect("texts and numbers"));
        }
        response("text/html; charset=utf-8", page())
    }

    fn refused(&self, Refusal { status, message, allow }: Refusal) -> Response {
        let title = status.canonical_reason().unwrap_or("Refused");
        let mut response = self.shown(&json!({ "error": message }), || self.frame.refusal(title, &message));
        *response.status_mut() = status;
        if let Some(allow) = allow {
            response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }

    /// The key as the page may show it.
    fn redact(&self, key: &LockKey) -> LockKey {
        if self.frame.keys_redacted { LockKey::from_composed(&key.redacted()) } else { key.clone() }
    }

    fn process(&self) -> ProcessView {
        let driver = self.locks.driver();
        let (mut holding, mut waits) = (self.locks.holding(), driver.waits.list());
        let held = holding.len();
        holding.truncate(MAX_CONSOLE_ROWS);
        let keys = holding.iter_mut().map(|held| &mut held.key).chain(waits.iter_mut().map(|wait| &mut wait.key));
        keys.for_each(|key| *key = self.redact(key));
        ProcessView {
            instance: driver.instance().to_owned(),
            shutting_down: self.locks.is_shutting_down(),
            keys_redacted: self.frame.keys_redacted,
            held,
            holding,
            waits,
        }
    }

    async fn keys(&self, query: &str) -> Result<KeysView, Refusal> {
        let busy = "This process lists keys for another request. Try again.";
        let busy = |_| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, busy);
        let _listing = self.locks.driver().listing.try_acquire().map_err(busy)?;
        let is_next = call::field(query, "after").is_some();
        let is_of_contended = call::field(query, "contended").is_some();
        let contended = if is_of_contended || !is_next { Some(self.list(query, true).await?) } else { None };
        let all = if is_of_contended { None } else { Some(self.list(query, false).await?) };
        Ok(KeysView { keys_redacted: self.frame.keys_redacted, contended, all })
    }

    async fn list(&self, query: &str, contended_only: bool) -> Result<KeyPage, Refusal> {
        let mut request = ListRequest::new(MAX_CONSOLE_ROWS).contended_only(contended_only);
        request.after = call::cursor(query);
        let has_cursor = request.after.is_some();
        let page = self.locks.list(request).await.map_err(|error| call::listing_failed(error, has_cursor))?;
        let row = |ListEntry { key, status }| {
            let status = self.locks.driver().status_of(&key, status);
            KeyRow { key: self.redact(&key), status }
        };
        let next = page.next.map(|next| next.as_str().to_owned());
        Ok(KeyPage { keys: page.entries.into_iter().map(row).collect(), next })
    }

    async fn revoke(&self, key: LockKey, holder: Option<String>) -> Result<Response, Refusal> {
        let Access::Revoke { operator } = &self.access else { unreachable!("refused before") };
        let mut audit = Audit::start(operator, self.redact(&key), holder.as_deref());
        // Before the revocation, because the store forgets the times of its grants.
        if let Ok(status) = self.locks.inspect(key.clone()).await {
            let is_meant = |id: &AcquisitionId| holder.as_ref().is_none_or(|holder| *holder == id.to_string());
            let holders = status.holders.iter().filter(|holder| is_meant(&holder.id));
            audit.held = holders.filter_map(age).max();
        }
        let reply = match &holder {
            Some(holder) => self.locks.revoke(key.clone(), &AcquisitionId::from_text(holder)).await,
            None => self.locks.force_release(key.clone()).await,
        };
        audit.replied(&reply);
        let reply = reply.map_err(|error| {
            let refusal = Refusal::from(error);
            Refusal { message: format!("{}. The lock may have been revoked.", refusal.message), ..refusal }
        })?;
        let done = Done::of(&reply);
        let mut response = self.shown(&done.as_json(&reply), String::new);
        if !self.is_json {
            let page = format!("{}/key?{}&done={}", self.frame.prefix, key.as_query(), done.code());
            *response.status_mut() = StatusCode::SEE_OTHER;
            response.headers_mut().extend(HeaderValue::try_from(page).ok().map(|page| (LOCATION, page)));
        }
        Ok(response)
    }
}

/// The fields of a request: those of its query come first.
async fn form(query: &str, body: Body) -> Result<String, Refusal> {
    let body = timeout(BODY_IDLE_TIMEOUT, Limited::new(body, MAX_CONSOLE_FORM_BYTES).collect()).await;
    let body = body.map_err(|_| Refusal::new(StatusCode::REQUEST_TIMEOUT, "The form did not arrive in time."))?;
    let body = body.map_err(|_| Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "The form is too long."))?.to_bytes();
    Ok(format!("{query}&{}", String::from_utf8_lossy(&body)))
}

fn response(kind: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
