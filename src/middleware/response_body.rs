//! The response body: passed through, complete, streaming or rejected.

use std::{
    fmt,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tower::BoxError;

use super::{
    complete_body::{CompleteBody, Frames, data_len},
    eager::{EagerBody, ReadAhead, read_ready},
    request_locks::RequestLocks,
    streaming_body::StreamingBody,
};
use crate::{error::LockLost, rejection::RejectionBody, replay::keep::Ending};

pin_project! {
    /// Response body of a [`LockLayer`](crate::LockLayer) or a
    /// [`LockManagerLayer`](crate::LockManagerLayer).
    ///
    /// The size hint is exact if that of the inner body is. Trailers are passed through.
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
        /// Without a lock, or after its release.
        PassThrough { #[pin] inner: B },
        /// Complete before the head was sent. The lock is released.
        Complete { complete: CompleteBody },
        /// Holds the lock.
        Streaming { stream: Box<StreamingBody<B>> },
        /// The response to a rejected request.
        Rejected { body: RejectionBody },
    }
}

/// Needed by outer layers that create responses, such as the timeout of `tower-http`.
impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::pass_through(B::default())
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn pass_through(inner: B) -> Self {
        Self { state: State::PassThrough { inner } }
    }

    /// A body that is complete in memory.
    pub(super) fn replayed(body: Bytes) -> Self {
        let announced = Some(body.len() as u64);
        let frames: Frames = (!body.is_empty()).then(|| Frame::data(body)).into_iter().collect();
        let frames = frames.into_iter();
        Self { state: State::Complete { complete: CompleteBody { frames, error: None, announced, was_empty: None } } }
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
    /// The body of a response to `HEAD`, a 204 or a 304: it is not read. Its size is kept for the
    /// head.
    pub(super) async fn without_content(inner: B, mut locks: RequestLocks) -> Self {
        let complete = CompleteBody {
            frames: Frames::new().into_iter(),
            error: None,
            announced: inner.size_hint().exact(),
            was_empty: Some(inner.is_end_stream()),
        };
        drop(inner);
        locks.set_record(|recorder| recorder.complete(&[]));
        locks.release_all().await;
        Self { state: State::Complete { complete } }
    }

    /// Reads the part of the body that is ready before the head is sent. If the body is complete,
    /// releases the lock first and sends head and body together: a slow client holds no lock while
    /// it reads a complete response.
    ///
    /// `length` is the length that the head announces, in bytes. Fails if a lock is lost meanwhile:
    /// nothing has been sent then.
    pub(super) async fn from_handler(
        mut locks: RequestLocks,
        inner: B,
        length: Option<u64>,
    ) -> Result<Self, (RequestLocks, LockLost)>
    where
        B: Send,
    {
        if inner.is_end_stream() {
            return Ok(Self::without_content(inner, locks).await);
        }
        let hint = inner.size_hint();
        let read = match read_ready(&mut locks, EagerBody::new(inner), length).await {
            Ok(read) => read,
            Err(why) => return Err((locks, why)),
        };
        match read {
            ReadAhead::Complete { frames, error } => {
                if error.is_some() {
                    locks.set_failed();
                } else if length.is_none_or(|length| length == data_len(&frames)) {
                    locks.set_record(|recorder| recorder.complete(&frames));
                } else {
                    // A body of another length than its head announces is not what its client gets.
                    locks.set_record(|recorder| recorder.without_body(Ending::Streamed));
                }
                locks.release_all().await;
                let frames = frames.into_iter();
                let complete = CompleteBody { frames, error, announced: hint.exact(), was_empty: None };
                Ok(Self { state: State::Complete { complete } })
            }
            ReadAhead::Incomplete { inner, frames } => {
                let is_unread = locks.recorder().is_some() && locks.context().is_detached();
                let mut stream = Box::new(StreamingBody::new(inner, frames.into_iter(), hint, length, locks));
                if is_unread {
                    // The client has disconnected, and its retry asks for the record. The end of
                    // the stream leaves it.
                    while let Some(Ok(_)) = poll_fn(|cx| stream.poll_frame(cx)).await {}
                }
                Ok(Self { state: State::Streaming { stream } })
            }
        }
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
            StateProj::PassThrough { inner } => inner.poll_frame(cx).map_err(Into::into),
            StateProj::Complete { complete } => Poll::Ready(complete.next_frame()),
            StateProj::Streaming { stream } => stream.poll_frame(cx),
            StateProj::Rejected { body } => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            State::PassThrough { inner } => inner.is_end_stream(),
            State::Complete { complete } => complete.is_end_stream(),
            State::Streaming { stream } => stream.is_end_stream(),
            State::Rejected { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            State::PassThrough { inner } => inner.size_hint(),
            State::Complete { complete } => complete.size_hint(),
            State::Streaming { stream } => stream.size_hint(),
            State::Rejected { body } => body.size_hint(),
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            State::PassThrough { .. } => "ResponseBody(pass-through)",
            State::Complete { .. } => "ResponseBody(complete)",
            State::Streaming { .. } => "ResponseBody(streaming)",
            State::Rejected { .. } => "ResponseBody(rejected)",
        })
    }
}
