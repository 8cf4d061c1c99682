//! Reads the frames of a response body that are ready before its head is sent.

use std::{
    any::Any,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use http_body_util::Full;
use smallvec::SmallVec;
use tokio::{runtime::Handle, time::timeout};
use tower::BoxError;

use crate::{
    error::LockLost,
    limits::{EAGER_BYTES, EAGER_FRAMES, KEPT_BYTES_PER_FRAME, RELEASE_WAIT},
    middleware::request_locks::RequestLocks,
};

/// The frames that were read before the head was sent: mostly one, without allocation.
pub(super) type Frames = SmallVec<[Frame<Bytes>; 1]>;

pub(super) enum ReadAhead<B> {
    /// The body has ended and was dropped.
    Complete { frames: Frames, error: Option<BoxError> },
    /// More frames follow.
    Incomplete { inner: Pin<Box<B>>, frames: Frames },
}

/// A body before its end or its first pending frame. Only a stream needs a box, unless the body
/// must not move once it was polled.
pub(super) enum EagerBody<B> {
    Movable(B),
    Boxed(Pin<Box<B>>),
}

/// Reads frames until the body ends, or until the next one is not ready. `length` is the length
/// that the head announces, in bytes. Fails if a lock is lost meanwhile. The caller has just
/// checked that all are held (I6).
pub(super) async fn read_ready<B>(
    locks: &mut RequestLocks,
    mut inner: EagerBody<B>,
    length: Option<u64>,
) -> Result<ReadAhead<B>, LockLost>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let keep_up_to = locks.recorder().map_or(0, |recorder| recorder.keep_up_to());
    let max_bytes = keep_up_to.max(EAGER_BYTES);
    let max_frames = (keep_up_to / KEPT_BYTES_PER_FRAME).max(EAGER_FRAMES);
    let locks = &*locks;
    let mut frames = Frames::new();
    let mut bytes = 0;
    let error = loop {
        // Polls once and does not wait: a frame that is not ready makes the body a stream. The
        // error is boxed here because an inner error need not be `Send`.
        let mut next = poll_fn(|cx| Poll::Ready(locks.as_owner(|| inner.poll_frame(cx)))).await;
        // All announced bytes are ready. The end of the body (a commit, trailers) gets a short
        // time, because hyper does not poll for it over HTTP/1.1.
        if next.is_pending() && length == Some(data_len(&frames)) {
            let end = poll_fn(|cx| {
                // I6
                if locks.abort_reason().is_none() {
                    next = locks.as_owner(|| inner.poll_frame(cx));
                }
                if next.is_ready() || locks.abort_reason().is_some() { Poll::Ready(()) } else { Poll::Pending }
            });
            if Handle::try_current().is_err() || timeout(RELEASE_WAIT, end).await.is_err() {
                break None;
            }
        }
        let frame = match next {
            Poll::Ready(Some(Ok(frame))) => frame,
            Poll::Ready(None) => break None,
            Poll::Ready(Some(Err(error))) => break Some(error),
            Poll::Pending => {
                return match locks.abort_reason() {
                    Some(why) => Err(why),
                    None => Ok(ReadAhead::Incomplete { inner: inner.boxed(), frames }),
                };
            }
        };
        // The first frame may have any size: it is in memory already.
        if !frames.is_empty() {
            bytes += frame.data_ref().map_or(0, Bytes::len);
        }
        let is_last = frame.is_trailers() || inner.is_end_stream();
        frames.push(frame);
        if is_last {
            break None;
        }
        // I6, for the next poll.
        if let Some(why) = locks.abort_reason() {
            return Err(why);
        }
        if frames.len() > max_frames || bytes > max_bytes {
            return Ok(ReadAhead::Incomplete { inner: inner.boxed(), frames });
        }
    };
    // Drops the resources of the body before the next section starts.
    drop(inner);
    match locks.abort_reason() {
        // Work that a newer request replaces had the lock to its end.
        None | Some(LockLost::Superseded) => Ok(ReadAhead::Complete { frames, error }),
        Some(why) => Err(why),
    }
}

pub(super) fn data_len<'a>(frames: impl IntoIterator<Item = &'a Frame<Bytes>>) -> u64 {
    frames.into_iter().filter_map(Frame::data_ref).map(|data| data.len() as u64).sum()
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + 'static> EagerBody<B> {
    pub(super) fn new(mut body: B) -> Self {
        match movable(&mut body) {
            Some(_) => Self::Movable(body),
            None => Self::Boxed(Box::pin(body)),
        }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self {
            Self::Movable(body) => movable(body).expect("as it was when it was created").poll(cx),
            Self::Boxed(body) => body.as_mut().poll_frame(cx).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Movable(body) => body.is_end_stream(),
            Self::Boxed(body) => body.is_end_stream(),
        }
    }

    fn boxed(self) -> Pin<Box<B>> {
        match self {
            Self::Movable(body) => Box::pin(body),
            Self::Boxed(body) => body,
        }
    }
}

/// A body that may be moved between two polls.
trait MovableBody {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>>;
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> MovableBody for B {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(self).poll_frame(cx).map_err(Into::into)
    }
}

/// The body, if its type is one of the usual ones, which are `Unpin`.
fn movable(body: &mut dyn Any) -> Option<&mut dyn MovableBody> {
    #[cfg(feature = "axum")]
    if body.is::<axum::body::Body>() {
        return body.downcast_mut::<axum::body::Body>().map(|body| body as _);
    }
    body.downcast_mut::<Full<Bytes>>().map(|body| body as _)
}
