use std::{convert::Infallible, error::Error, fmt};

use axum::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::{StatusCode, request::Parts};

use crate::lock::HeldLock;

/// The request holds no lock, and the handler wanted it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MissingLock;

/// The innermost lock of this request.
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
/// 500 where no lock is held; the text says which layer is missing, and where. An `Option` of it never fails.
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
    /// 500: the routes are put together wrongly.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        StatusCode::INTERNAL_SERVER_ERROR
    }

    /// What is wrong, and how to mend it.
    #[must_use]
    pub fn body_text(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for MissingLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "`HeldLock` found no lock on this request. Put a `LockLayer` on this route, outside of the handler: \
             `post(handler).route_layer(LockLayer::new(&locks, by(..)))`; on a router, call `.layer(..)` or `.route_layer(..)` \
             after `.route(..)`. Where the layer skips some requests, or its key function answers `None`, take `Option<HeldLock>`.",
        )
    }
}

impl Error for MissingLock {}

impl IntoResponse for MissingLock {
    fn into_response(self) -> Response {
        // Whoever reads the answer may not be who can mend it.
        #[cfg(feature = "tracing")]
        tracing::error!(target: "tower_lock", "{self}");
        (self.status(), self.body_text()).into_response()
    }
}
