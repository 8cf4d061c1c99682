//! The body of a rejection as a type, for clients in Rust.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Either, Full, combinators::UnsyncBoxBody};
use tower::BoxError;

/// Body of the response to a rejected request.
pub struct RejectionBody(
    /// The built-in response has no box.
    Either<Full<Bytes>, UnsyncBoxBody<Bytes, BoxError>>,
);

impl RejectionBody {
    pub(crate) fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self(Either::Right(body.map_err(Into::into).boxed_unsync()))
    }

    pub(crate) fn full(bytes: impl Into<Bytes>) -> Self {
        Self(Either::Left(Full::new(bytes.into())))
    }
}

impl Body for RejectionBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

impl fmt::Debug for RejectionBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RejectionBody").finish_non_exhaustive()
    }
}
