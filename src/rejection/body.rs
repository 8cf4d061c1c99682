use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use tower::BoxError;

/// Body of the response to a rejected request.
pub struct RejectionBody(Kind);

enum Kind {
    /// The built-in response, without a box.
    Full(Full<Bytes>),
    Boxed(UnsyncBoxBody<Bytes, BoxError>),
}

impl RejectionBody {
    pub(crate) fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self(Kind::Boxed(body.map_err(Into::into).boxed_unsync()))
    }

    pub(crate) fn full(bytes: impl Into<Bytes>) -> Self {
        Self(Kind::Full(Full::new(bytes.into())))
    }

    #[cfg(feature = "axum")]
    pub(crate) fn into_axum(self) -> axum::body::Body {
        axum::body::Body::new(self)
    }
}

impl Body for RejectionBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Kind::Full(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
            Kind::Boxed(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Full(body) => body.is_end_stream(),
            Kind::Boxed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Full(body) => body.size_hint(),
            Kind::Boxed(body) => body.size_hint(),
        }
    }
}

impl fmt::Debug for RejectionBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RejectionBody").finish_non_exhaustive()
    }
}
