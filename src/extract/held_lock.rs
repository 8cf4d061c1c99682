use std::convert::Infallible;

use axum::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::{StatusCode, request::Parts};

use crate::lock::HeldLock;

/// Rejection of [`HeldLock`] as an extractor: the request holds no lock.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "the request holds no lock for `HeldLock`. Put a `LockLayer` on this route, outside of the handler: \
     `post(handler).route_layer(LockLayer::new(&locks, key::from_fn(..)))`; on a router, call `.layer(..)` or \
     `.route_layer(..)` after `.route(..)`. If the layer skips some requests, or if its key function returns \
     `None`, use `Option<HeldLock>`."
)]
#[non_exhaustive]
pub struct MissingLock;

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
/// Rejects with 500 if the request holds no lock. The response names the missing layer and its
/// position. An `Option<HeldLock>` is never rejected.
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> FromRequestParts<S> for HeldLock {
    type Rejection = MissingLock;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, MissingLock> {
        parts.extensions.get().cloned().ok_or(MissingLock)
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

impl IntoResponse for MissingLock {
    fn into_response(self) -> Response {
        // The reader of the response may not be the operator of the service.
        #[cfg(feature = "tracing")]
        tracing::error!(target: "tower_lock", "{self}");
        (self.status(), self.body_text()).into_response()
    }
}
