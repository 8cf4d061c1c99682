use std::{convert::Infallible, fmt};

use axum::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::{Method, StatusCode, request::Parts};

use crate::{lock::HeldLock, middleware::service::Unlocked, telemetry::route::Route};

/// Rejection of [`HeldLock`] as an extractor: the request holds no lock.
///
/// The text names the reason and its remedy.
#[derive(Clone, Debug)]
pub struct MissingLock {
    /// `None`: no `LockLayer` is around the handler.
    unlocked: Option<Unlocked>,
    method: Method,
    route: Route,
}

/// Extracts the innermost lock of the request.
///
/// ```
/// # use axum::Json;
/// # use tower_lock::HeldLock;
/// async fn claim(lock: HeldLock) -> String {
///     format!("under {} until {:?} from now", lock.fencing_token(), lock.remaining())
/// }
/// async fn either_way(lock: Option<HeldLock>) -> &'static str {
///     if lock.is_some() { "alone" } else { "perhaps not alone" }
/// }
/// ```
///
/// # Errors
///
/// Rejects with 500 if the request holds no lock. The response names the reason: no layer is around
/// the handler, or the layer skipped the request. An `Option<HeldLock>` is never rejected.
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> FromRequestParts<S> for HeldLock {
    type Rejection = MissingLock;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, MissingLock> {
        parts.extensions.get().cloned().ok_or_else(|| MissingLock::of(parts))
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> OptionalFromRequestParts<S> for HeldLock {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

impl MissingLock {
    fn of(head: &Parts) -> Self {
        Self {
            unlocked: head.extensions.get().copied(),
            method: head.method.clone(),
            route: Route::from_extensions(&head.extensions, None),
        }
    }

    /// Returns the status, 500.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        StatusCode::INTERNAL_SERVER_ERROR
    }

    /// Returns the text of the response: the error and its remedy.
    #[must_use]
    pub fn body_text(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for MissingLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request holds no lock for `HeldLock`: ")?;
        f.write_str(match self.unlocked {
            None => {
                "no `LockLayer` is around this handler. Put one on its route: \
                 `post(handler).route_layer(LockLayer::new(&locks, key::from_fn(..)))`. A layer covers only the methods \
                 and routes that were added before it: on a method router, call `.route_layer(..)` after `.put(..)` and \
                 `.merge(..)`, and `.layer(..)` to cover a fallback, too; on a router, call either one after \
                 `.route(..)`. A `LockManagerLayer` acquires no lock. If the handler may run without a lock, use \
                 `Option<HeldLock>`."
            }
            Some(Unlocked::Skipped) => {
                "the `LockLayer` of this route skipped it (`.skip(..)` or `.skip_methods(..)`). Use `Option<HeldLock>`, \
                 or do not skip requests to this handler."
            }
            Some(Unlocked::NoKey) => {
                "the key function of this route returned `None` for it. Use `Option<HeldLock>`, or return a key for \
                 each request to this handler."
            }
        })
    }
}

impl std::error::Error for MissingLock {}

impl IntoResponse for MissingLock {
    fn into_response(self) -> Response {
        self.route.log_error(&self.method, &self);
        (self.status(), self.body_text()).into_response()
    }
}
