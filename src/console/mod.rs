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

mod call;
mod page;
mod revocation;
mod text;
mod views;

use axum::{Router, body::Body, extract::Request, response::Response, routing::any};
use http::{
    HeaderName, HeaderValue, StatusCode,
    header::{
        ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, RETRY_AFTER,
        X_CONTENT_TYPE_OPTIONS,
    },
    request::Parts,
};
use serde_json::{Value, json};

pub use self::call::Access;
use self::{call::Refusal, text::text};
use crate::{lock::LockManager, lock_key::LockKey, policy::LogKey};

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
            prefix: call::prefix(&head.extensions, &head.uri),
            keys_redacted: !shows_keys(&locks),
            is_json: head.uri.path().starts_with("/api/"),
            locks: locks.clone(),
            head,
        };
        async move { console.respond(body).await }
    };
    call::PATHS
        .split(' ')
        .fold(Router::new(), |router, path| router.route(path, any(handler.clone())))
        .fallback(handler)
}

/// Fails closed: a layer that redacts its keys redacts those of the console.
fn shows_keys(locks: &LockManager) -> bool {
    locks.policy().log_key_setting().map_or(!locks.driver().redacts_keys(), |setting| setting == LogKey::Full)
}

/// The console for one request.
struct Console {
    locks: LockManager,
    head: Parts,
    access: Access,
    /// The path of the console, without a slash at its end.
    prefix: String,
    keys_redacted: bool,
    is_json: bool,
}

impl Console {
    async fn respond(&self, body: Body) -> Response {
        let mut response = self.reply(body).await.unwrap_or_else(|refusal| self.refused(&refusal));
        for (name, value) in HEADERS {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }

    async fn reply(&self, body: Body) -> Result<Response, Refusal> {
        // Before anything is called.
        call::check(&self.access, &self.head)?;
        let query = self.head.uri.query().unwrap_or_default();
        Ok(match self.head.uri.path().trim_start_matches("/api") {
            "/style.css" => response("text/css; charset=utf-8", include_str!("style.css")),
            "/keys" => self.keys(query).await?,
            "/key" => self.key(query).await?,
            "/revoke" => self.revoke(query, body).await?,
            _ => self.process(),
        })
    }

    /// A view as JSON or as its page.
    fn shown(&self, view: &Value, page: impl FnOnce() -> String) -> Response {
        if self.is_json {
            return response("application/json", view.to_string());
        }
        response("text/html; charset=utf-8", page())
    }

    fn refused(&self, Refusal(status, message): &Refusal) -> Response {
        let title = status.canonical_reason().unwrap_or("Refused");
        let page = || self.page(title, format!("<p id=\"answer\">{}</p>\n", text(message)));
        let mut response = self.shown(&json!({ "error": message }), page);
        *response.status_mut() = *status;
        let header = match *status {
            StatusCode::METHOD_NOT_ALLOWED => (ALLOW, call::methods(self.head.uri.path())),
            StatusCode::SERVICE_UNAVAILABLE => (RETRY_AFTER, "1"),
            _ => return response,
        };
        response.headers_mut().insert(header.0, HeaderValue::from_static(header.1));
        response
    }

    /// The key as the page may show it.
    fn redact(&self, key: &LockKey) -> LockKey {
        if self.keys_redacted { LockKey::from_composed(&key.redacted()) } else { key.clone() }
    }
}

fn response(kind: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
