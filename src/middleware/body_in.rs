//! A body that is read for its key: once, within the route's limit, and given on as it came.

use std::{
    convert::Infallible,
    error::Error,
    mem,
    pin::Pin,
    task::{Context, Poll},
};

use axum::{RequestExt, body::Body, extract::Request};
use bytes::Bytes;
use http::{HeaderMap, StatusCode, request::Parts};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::rejection::Rejection;
use crate::defaults::BODY_BYTES;

/// The bytes and trailers of a body, for the key and then, again, for the inner service.
#[derive(Clone, Debug)]
pub struct Buffered {
    pub(super) data: Bytes,
    trailers: Option<HeaderMap>,
    /// Whether the sender said how long it would be.
    announced: bool,
}

/// Reads the body within the limit that the handler's extractors have: `DefaultBodyLimit`, 2 MB if nothing is set, and
/// 64 MiB where it was disabled.
pub(super) async fn read(request: Request) -> Result<(Parts, Buffered), Rejection> {
    let announced = request.body().size_hint();
    let (parts, body) = request.with_limited_body().into_parts();
    // Axum keeps the limit to itself; that it caps the size hint is how to learn it.
    let limit = body.size_hint().upper().unwrap_or(BODY_BYTES).min(BODY_BYTES);
    // Before the first poll: that is when hyper would ask for the body with `100 Continue`.
    if announced.lower() > limit {
        return Err(Rejection::BodyTooLarge);
    }
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let body = Limited::new(body, limit).collect().await.map_err(|error| unreadable(&*error))?;
    let trailers = body.trailers().cloned();
    // One frame, the usual case, is not copied.
    Ok((parts, Buffered { data: body.to_bytes(), trailers, announced: announced.exact().is_some() }))
}

/// A limit that a layer outside has set shows in the same error.
fn unreadable(error: &(dyn Error + 'static)) -> Rejection {
    let mut causes = std::iter::successors(Some(error), |&error| error.source());
    if causes.any(<dyn Error>::is::<LengthLimitError>) {
        Rejection::BodyTooLarge
    } else {
        Rejection::BadKey { status: StatusCode::BAD_REQUEST }
    }
}

impl From<Buffered> for Body {
    fn from(body: Buffered) -> Self {
        Self::new(body)
    }
}

impl http_body::Body for Buffered {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = if self.data.is_empty() {
            self.trailers.take().map(Frame::trailers)
        } else {
            Some(Frame::data(mem::take(&mut self.data)))
        };
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    /// Exact, but for trailers behind a body of unannounced size: a proxy that is told the size sends a
    /// `Content-Length`, and then no trailers.
    fn size_hint(&self) -> SizeHint {
        let len = self.data.len() as u64;
        if self.trailers.is_none() || self.announced {
            return SizeHint::with_exact(len);
        }
        let mut at_least = SizeHint::new();
        at_least.set_lower(len);
        at_least
    }
}
