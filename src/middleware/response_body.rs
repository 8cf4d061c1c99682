//! The body on its way out: a finished answer has given its lock back, a streaming one carries it.

use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::{runtime::Handle, time::timeout};
use tower::BoxError;

use super::{
    complete_body::{Complete, data_len},
    request_locks::Duty,
    streaming_body::Stream,
};
use crate::{
    error::LockLost,
    limits::{EAGER_BYTES, EAGER_FRAMES, RELEASE_WAIT},
    rejection::RejectionBody,
};

pin_project! {
    /// The body of a response that went through a [`LockLayer`](crate::LockLayer).
    ///
    /// Its size hint is exact where that of the inner body was, and trailers go through.
    pub struct ResponseBody<B>
    where
        B: 'static,
    {
        #[pin]
        state: State<B>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<B>
    where
        B: 'static,
    {
        /// No lock was needed, or it is given back.
        Passing { #[pin] inner: B },
        /// Complete before the head was sent; the lock is given back already.
        Complete { complete: Complete },
        /// Under the lock.
        Streaming { stream: Box<Stream<B>> },
        /// The answer to a request that was turned away.
        Rejected { body: RejectionBody },
    }
}

/// For layers outside that answer by themselves: a timeout of `tower-http` does.
impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::passing(B::default())
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn passing(inner: B) -> Self {
        Self { state: State::Passing { inner } }
    }

    pub(super) fn rejected(body: RejectionBody) -> Self {
        Self { state: State::Rejected { body } }
    }
}

impl<B> ResponseBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    /// The answer to `HEAD`, a 204 or a 304: what the body says, nobody will ask. Its size is kept, for the head.
    pub(super) async fn without_content(inner: B, duty: Duty) -> Self {
        let complete = Complete {
            frames: VecDeque::new(),
            error: None,
            announced: inner.size_hint().exact(),
            had_none: Some(inner.is_end_stream()),
        };
        drop(inner);
        duty.end().await;
        Self { state: State::Complete { complete } }
    }

    /// Looks at the body before the head is sent. If it is complete, the lock is given back first; then head and body go
    /// out together, and no client, however slow, holds a lock on a finished answer.
    ///
    /// `length`: what the head announces, in bytes. An error: a lock was lost while the body was looked at. Nothing has been sent yet.
    pub(super) async fn under(mut duty: Duty, inner: B, length: Option<u64>) -> Result<Self, (Duty, LockLost)>
    where
        B: Send,
    {
        if inner.is_end_stream() {
            return Ok(Self::without_content(inner, duty).await);
        }
        let hint = inner.size_hint();
        let mut inner = Box::pin(inner);
        let mut frames = VecDeque::with_capacity(1);
        let mut bytes = 0;
        let error = loop {
            // One poll and no wait: what is not at hand is a stream. (An inner error need not be `Send`; a boxed one is.)
            let mut next = Poll::Pending;
            let mut poll = |cx: &mut Context<'_>| {
                // I6
                if duty.must_stop().is_none() {
                    next = duty.as_owner(|| inner.as_mut().poll_frame(cx)).map_err(Into::into);
                }
                next.is_ready() || duty.must_stop().is_some()
            };
            let is_there = poll_fn(|cx| Poll::Ready(poll(cx))).await;
            // Where all that was announced is there, what follows (a commit, trailers) has a moment: hyper would not ask for it over HTTP/1.1.
            if !is_there && length == Some(data_len(&frames)) {
                let behind = poll_fn(|cx| if poll(cx) { Poll::Ready(()) } else { Poll::Pending });
                if Handle::try_current().is_err() || timeout(RELEASE_WAIT, behind).await.is_err() {
                    break None;
                }
            }
            if let Some(why) = duty.must_stop() {
                return Err((duty, why));
            }
            let frame = match next {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(None) => break None,
                Poll::Ready(Some(Err(error))) => break Some(error),
                Poll::Pending => return Ok(Self::streaming(Stream::new(inner, frames, hint, length, duty))),
            };
            // The first frame may be of any size: it is in memory already.
            if !frames.is_empty() {
                bytes += frame.data_ref().map_or(0, Bytes::len);
            }
            let is_last = frame.is_trailers() || inner.is_end_stream();
            frames.push_back(frame);
            if is_last {
                break None;
            }
            if frames.len() > EAGER_FRAMES || bytes > EAGER_BYTES {
                return Ok(Self::streaming(Stream::new(inner, frames, hint, length, duty)));
            }
        };
        // What the body owns is gone before the next section begins.
        drop(inner);
        if let Some(why) = duty.must_stop() {
            return Err((duty, why));
        }
        if error.is_some() {
            duty.has_failed();
        }
        duty.end().await;
        Ok(Self {
            state: State::Complete { complete: Complete { frames, error, announced: hint.exact(), had_none: None } },
        })
    }

    fn streaming(stream: Stream<B>) -> Self {
        Self { state: State::Streaming { stream: Box::new(stream) } }
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().state.project() {
            StateProj::Passing { inner } => inner.poll_frame(cx).map_err(Into::into),
            StateProj::Complete { complete } => Poll::Ready(complete.next()),
            StateProj::Streaming { stream } => stream.poll_frame(cx),
            StateProj::Rejected { body } => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            State::Passing { inner } => inner.is_end_stream(),
            State::Complete { complete } => complete.is_end_stream(),
            State::Streaming { stream } => stream.is_end_stream(),
            State::Rejected { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            State::Passing { inner } => inner.size_hint(),
            State::Complete { complete } => complete.size_hint(),
            State::Streaming { stream } => stream.size_hint(),
            State::Rejected { body } => body.size_hint(),
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            State::Passing { .. } => "ResponseBody(passing)",
            State::Complete { .. } => "ResponseBody(complete)",
            State::Streaming { .. } => "ResponseBody(streaming)",
            State::Rejected { .. } => "ResponseBody(rejected)",
        })
    }
}
