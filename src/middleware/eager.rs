//! Reads the frames of a response body that are ready before its head is sent.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::{runtime::Handle, time::timeout};
use tower::BoxError;

use super::{complete_body::data_len, request_locks::RequestLocks};
use crate::{
    error::LockLost,
    limits::{EAGER_BYTES, EAGER_FRAMES, KEPT_BYTES_PER_FRAME, RELEASE_WAIT},
};

pub(super) enum ReadAhead<B> {
    /// The body has ended and was dropped.
    Complete { frames: VecDeque<Frame<Bytes>>, error: Option<BoxError> },
    /// More frames follow.
    Incomplete { inner: Pin<Box<B>>, frames: VecDeque<Frame<Bytes>> },
}

/// Reads frames until the body ends, or until the next one is not ready. `length` is the length
/// that the head announces, in bytes. Fails if a lock is lost meanwhile.
pub(super) async fn read_ready<B>(
    locks: &mut RequestLocks,
    mut inner: Pin<Box<B>>,
    length: Option<u64>,
) -> Result<ReadAhead<B>, LockLost>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send,
{
    let keep_up_to = locks.recorder().map_or(0, |recorder| recorder.keep_up_to());
    let max_bytes = keep_up_to.max(EAGER_BYTES);
    let max_frames = (keep_up_to / KEPT_BYTES_PER_FRAME).max(EAGER_FRAMES);
    let locks = &*locks;
    let mut frames = VecDeque::with_capacity(1);
    let mut bytes = 0;
    let error = loop {
        // Polls once and does not wait: a frame that is not ready makes the body a stream. The
        // error is boxed here because an inner error need not be `Send`.
        let mut next = Poll::Pending;
        let mut poll = |cx: &mut Context<'_>| {
            // I6
            if locks.abort_reason().is_none() {
                next = locks.as_owner(|| inner.as_mut().poll_frame(cx)).map_err(Into::into);
            }
            next.is_ready() || locks.abort_reason().is_some()
        };
        let is_ready = poll_fn(|cx| Poll::Ready(poll(cx))).await;
        // All announced bytes are ready. The end of the body (a commit, trailers) gets a short
        // time, because hyper does not poll for it over HTTP/1.1.
        if !is_ready && length == Some(data_len(&frames)) {
            let end = poll_fn(|cx| if poll(cx) { Poll::Ready(()) } else { Poll::Pending });
            if Handle::try_current().is_err() || timeout(RELEASE_WAIT, end).await.is_err() {
                break None;
            }
        }
        if let Some(why) = locks.abort_reason() {
            return Err(why);
        }
        let frame = match next {
            Poll::Ready(Some(Ok(frame))) => frame,
            Poll::Ready(None) => break None,
            Poll::Ready(Some(Err(error))) => break Some(error),
            Poll::Pending => return Ok(ReadAhead::Incomplete { inner, frames }),
        };
        // The first frame may have any size: it is in memory already.
        if !frames.is_empty() {
            bytes += frame.data_ref().map_or(0, Bytes::len);
        }
        let is_last = frame.is_trailers() || inner.is_end_stream();
        frames.push_back(frame);
        if is_last {
            break None;
        }
        if frames.len() > max_frames || bytes > max_bytes {
            return Ok(ReadAhead::Incomplete { inner, frames });
        }
    };
    // Drops the resources of the body before the next section starts.
    drop(inner);
    match locks.abort_reason() {
        Some(why) => Err(why),
        None => Ok(ReadAhead::Complete { frames, error }),
    }
}
