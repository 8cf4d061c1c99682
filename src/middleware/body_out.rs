//! The body on its way out: a finished answer has given its lock back, a streaming one carries it.

use std::{
    collections::VecDeque,
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tower::BoxError;

use super::{rejection::RejectionBody, section::Section};
use crate::defaults::{LOOK_BYTES, LOOK_FRAMES};

pin_project! {
    /// The body of a response that went through a [`LockLayer`](crate::LockLayer).
    ///
    /// Its size hint is exact where that of the inner body was, and trailers go through.
    pub struct ResponseBody<B> {
        #[pin]
        state: State<B>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<B> {
        /// No lock was needed, or it is given back already.
        Passing { #[pin] inner: B },
        /// Complete before the head was sent; the lock is given back already.
        Complete { frames: VecDeque<Frame<Bytes>>, exact: bool, error: Option<BoxError> },
        /// Under the lock.
        Streaming { stream: Box<Stream<B>> },
        /// The answer to a request that was turned away.
        Rejected { body: RejectionBody },
    }
}

struct Stream<B> {
    inner: Pin<Box<B>>,
    /// Seen before the head was sent.
    ahead: VecDeque<Frame<Bytes>>,
    phase: Phase,
}

enum Phase {
    /// Frames pass as they come.
    Flowing(Section),
    /// The inner body has ended. Its last frame waits for the lock to be given back: whoever has it knows the end.
    Ending { section: Pin<Box<dyn Future<Output = ()> + Send>>, last: Option<Frame<Bytes>> },
    /// Nothing is left but the last frame.
    Ended { last: Option<Frame<Bytes>> },
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
    /// The answer to `HEAD`, a 204 or a 304: what the body says, nobody will ask.
    pub(super) async fn without_content(inner: B, section: Section) -> Self {
        section.end().await;
        Self::passing(inner)
    }

    /// Looks at the body before the head is sent. If it is complete, the lock is given back first; then head and body go
    /// out together, and no client, however slow, holds a lock on a finished answer.
    pub(super) async fn under(section: Section, inner: B) -> Self {
        if inner.is_end_stream() {
            return Self::without_content(inner, section).await;
        }
        let exact = inner.size_hint().exact().is_some();
        let mut inner = Box::pin(inner);
        let mut frames = VecDeque::with_capacity(1);
        let mut bytes = 0;
        loop {
            // One poll and no wait: what is not at hand is a stream. (An inner error need not be `Send`; a boxed one is.)
            let next = poll_fn(|cx| Poll::Ready(inner.as_mut().poll_frame(cx).map_err(Into::into))).await;
            let frame = match next {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(None) => break section.end().await,
                Poll::Ready(Some(Err(error))) => {
                    drop(section);
                    return Self { state: State::Complete { frames, exact, error: Some(error) } };
                }
                Poll::Pending => return Self::streaming(inner, frames, section),
            };
            // The first frame may be of any size: it is in memory already.
            if !frames.is_empty() {
                bytes += frame.data_ref().map_or(0, Bytes::len);
            }
            let is_last = frame.is_trailers() || inner.is_end_stream();
            frames.push_back(frame);
            if is_last {
                break section.end().await;
            }
            if frames.len() > LOOK_FRAMES || bytes > LOOK_BYTES {
                return Self::streaming(inner, frames, section);
            }
        }
        Self { state: State::Complete { frames, exact, error: None } }
    }

    fn streaming(inner: Pin<Box<B>>, ahead: VecDeque<Frame<Bytes>>, section: Section) -> Self {
        let stream = Stream { inner, ahead, phase: Phase::Flowing(section) };
        Self { state: State::Streaming { stream: Box::new(stream) } }
    }
}

impl<B> Stream<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            match &mut self.phase {
                // ## Flowing => (Flowing | Ending | Ended)
                Phase::Flowing(_) => {
                    let next = match self.ahead.pop_front() {
                        Some(frame) => Some(Ok(frame)),
                        None => ready!(self.inner.as_mut().poll_frame(cx)),
                    };
                    match next {
                        Some(Ok(frame)) => {
                            let is_last = frame.is_trailers() || (self.ahead.is_empty() && self.inner.is_end_stream());
                            if !is_last {
                                return Poll::Ready(Some(Ok(frame)));
                            }
                            self.end(Some(frame));
                        }
                        None => self.end(None),
                        Some(Err(error)) => {
                            // The section falls, and gives its lock back.
                            self.phase = Phase::Ended { last: None };
                            return Poll::Ready(Some(Err(error.into())));
                        }
                    }
                }
                // ## Ending => Ended
                Phase::Ending { section, last } => {
                    ready!(section.as_mut().poll(cx));
                    self.phase = Phase::Ended { last: last.take() };
                }
                // ## Ended
                Phase::Ended { last } => return Poll::Ready(last.take().map(Ok)),
            }
        }
    }

    fn end(&mut self, last: Option<Frame<Bytes>>) {
        let phase = std::mem::replace(&mut self.phase, Phase::Ended { last: None });
        if let Phase::Flowing(section) = phase {
            self.phase = Phase::Ending { section: Box::pin(section.end()), last };
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.phase, Phase::Ended { last: None })
    }

    /// What the inner body will say, and what of it is in our hands.
    fn size_hint(&self) -> SizeHint {
        let last = match &self.phase {
            Phase::Flowing(_) => None,
            Phase::Ending { last, .. } | Phase::Ended { last } => last.as_ref(),
        };
        let in_hand = data_len(self.ahead.iter().chain(last));
        let inner = self.inner.size_hint();
        let mut hint = SizeHint::new();
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper.saturating_add(in_hand));
        }
        hint.set_lower(inner.lower().saturating_add(in_hand));
        hint
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
            StateProj::Complete { frames, error, .. } => {
                Poll::Ready(frames.pop_front().map(Ok).or_else(|| error.take().map(Err)))
            }
            StateProj::Streaming { stream } => stream.poll_frame(cx),
            StateProj::Rejected { body } => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            State::Passing { inner } => inner.is_end_stream(),
            State::Complete { frames, error, .. } => frames.is_empty() && error.is_none(),
            State::Streaming { stream } => stream.is_end_stream(),
            State::Rejected { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            State::Passing { inner } => inner.size_hint(),
            // Not made exact where it was not: hyper would send a `Content-Length`, and then no trailers.
            State::Complete { frames, exact, .. } => {
                let mut hint = SizeHint::new();
                hint.set_lower(data_len(frames));
                if *exact {
                    hint.set_exact(data_len(frames));
                }
                hint
            }
            State::Streaming { stream } => stream.size_hint(),
            State::Rejected { body } => body.size_hint(),
        }
    }
}

fn data_len<'a>(frames: impl IntoIterator<Item = &'a Frame<Bytes>>) -> u64 {
    frames.into_iter().filter_map(Frame::data_ref).map(|data| data.len() as u64).sum()
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
