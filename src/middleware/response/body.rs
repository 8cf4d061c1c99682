//! The response body: passed through, complete, streaming or rejected.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tower::BoxError;

use super::{
    eager::{Frames, data_len},
    streaming::StreamingBody,
};
use crate::rejection::RejectionBody;

pin_project! {
    /// Response body of a [`LockLayer`](crate::LockLayer) or a
    /// [`LockManagerLayer`](crate::LockManagerLayer).
    ///
    /// The size hint is exact if that of the inner body is. Trailers are passed through.
    pub struct ResponseBody<B> {
        #[pin]
        state: State<B>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<B> {
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

/// A body that was complete before its head was sent.
struct CompleteBody {
    frames: <Frames as IntoIterator>::IntoIter,
    /// Follows the frames.
    error: Option<BoxError>,
    /// The length that the body announced, less the bytes that were sent. A body that is shorter
    /// than announced, or that failed, must not look complete to the client.
    announced: Option<u64>,
    /// For a response without content (`HEAD`): whether the inner body was empty.
    was_empty: Option<bool>,
}

/// Needed by outer layers that create responses, such as the timeout of `tower-http`.
impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::pass_through(B::default())
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn pass_through(inner: B) -> Self {
        Self { state: State::PassThrough { inner } }
    }

    /// A body that is complete in memory.
    pub(crate) fn replayed(body: Bytes) -> Self {
        let hint = SizeHint::with_exact(body.len() as u64);
        Self::complete((!body.is_empty()).then(|| Frame::data(body)).into_iter().collect(), None, hint)
    }

    /// A body that was read to its end, or to an error. Its head and body are sent together: a slow
    /// client holds no lock while it reads a complete response.
    pub(super) fn complete(frames: Frames, error: Option<BoxError>, hint: SizeHint) -> Self {
        let complete = CompleteBody { frames: frames.into_iter(), error, announced: hint.exact(), was_empty: None };
        Self { state: State::Complete { complete } }
    }

    pub(crate) fn rejected(body: RejectionBody) -> Self {
        Self { state: State::Rejected { body } }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>>> ResponseBody<B> {
    /// The body of a response without content, for example to `HEAD`: it is not read. Its size is
    /// kept for the head.
    pub(super) fn without_content(inner: &B) -> Self {
        let complete = CompleteBody {
            frames: Frames::new().into_iter(),
            error: None,
            announced: inner.size_hint().exact(),
            was_empty: Some(inner.is_end_stream()),
        };
        Self { state: State::Complete { complete } }
    }

    pub(super) fn streaming(stream: Box<StreamingBody<B>>) -> Self {
        Self { state: State::Streaming { stream } }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>>> Body for ResponseBody<B> {
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

impl CompleteBody {
    fn next_frame(&mut self) -> Option<Result<Frame<Bytes>, BoxError>> {
        let frame = self.frames.next();
        if let (Some(announced), Some(data)) = (&mut self.announced, frame.as_ref().and_then(Frame::data_ref)) {
            *announced = announced.saturating_sub(data.len() as u64);
        }
        frame.map(Ok).or_else(|| self.error.take().map(Err))
    }

    fn is_end_stream(&self) -> bool {
        let nothing_left =
            self.frames.as_slice().is_empty() && self.error.is_none() && self.announced.unwrap_or(0) == 0;
        self.was_empty.unwrap_or(nothing_left)
    }

    fn size_hint(&self) -> SizeHint {
        // Not exact if it was not before: hyper would send a `Content-Length`, and then no
        // trailers.
        self.announced.map_or_else(
            || {
                let mut at_least = SizeHint::new();
                at_least.set_lower(data_len(self.frames.as_slice()));
                at_least
            },
            SizeHint::with_exact,
        )
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
