//! The answer of a request, in the transaction of its handler, as an argument.

use std::fmt;

use axum::{
    extract::FromRequestParts,
    response::{IntoResponse, Response},
};
use http::{Method, StatusCode, request::Parts};

use crate::{
    replay::{AnswerError, Once, OnceAnswer, Unrecorded},
    telemetry::route::Route,
};

/// Rejection of [`Once`] as an extractor: the request has no idempotency key.
///
/// The text names the reason and its remedy.
#[derive(Clone, Debug)]
pub struct MissingOnce {
    /// `None`: no layer is around the handler.
    unrecorded: Option<Unrecorded>,
    method: Method,
    route: Route,
}

/// Extracts the idempotency key of the request.
///
/// # Errors
///
/// Rejects with 500 if no [`ReplayLayer`](crate::ReplayLayer) is around the handler, or if the
/// request has no key and the layer does not require one.
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl<S: Send + Sync> FromRequestParts<S> for Once {
    type Rejection = MissingOnce;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, MissingOnce> {
        parts.extensions.get().cloned().ok_or_else(|| MissingOnce {
            unrecorded: parts.extensions.get().copied(),
            method: parts.method.clone(),
            route: Route::from_extensions(&parts.extensions, None),
        })
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl IntoResponse for OnceAnswer {
    fn into_response(self) -> Response {
        self.to_response().map(axum::body::Body::from)
    }
}

#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl IntoResponse for AnswerError {
    /// 500: the handler made an answer that cannot be kept.
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

impl fmt::Display for MissingOnce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the request has no record for `Once`: ")?;
        f.write_str(match self.unrecorded {
            None => {
                "no `ReplayLayer` is around this handler. Put one on its route: \
                 `post(handler).route_layer(ReplayLayer::new(&locks, scope).required())`."
            }
            Some(Unrecorded::Method) => {
                "the `ReplayLayer` of this route does not apply to its method. Add the method to `.methods(..)`."
            }
            Some(Unrecorded::NoKey) => {
                "it has no idempotency key. Call `.required()` on the `ReplayLayer` of this route."
            }
            Some(Unrecorded::NoScope) => {
                "the scope of the `ReplayLayer` of this route returned `None` for it. Return a scope for each request \
                 to this handler."
            }
        })
    }
}

impl std::error::Error for MissingOnce {}

impl IntoResponse for MissingOnce {
    fn into_response(self) -> Response {
        self.route.log_error(&self.method, &self);
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}
