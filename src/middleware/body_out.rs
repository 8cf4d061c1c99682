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
use crate::{
    defaults::{LOOK_BYTES, LOOK_FRAMES},
    lock::LockLost,
};

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
        /// No lock was needed.
        Passing { #[pin] inner: B },
        /// Complete before the head was sent; the lock is given back already.
        Complete { complete: Complete },
        /// Under the lock.
        Streaming { stream: Box<Stream<B>> },
        /// The answer to a request that was turned away.
        Rejected { body: RejectionBody },
    }
}

/// What is left of a body that is not needed any more.
struct Complete {
    frames: VecDeque<Frame<Bytes>>,
    /// What comes after the frames.
    error: Option<BoxError>,
    /// What the body announced, less what has been sent of it. Where it broke its word (an error, too few bytes), so do we:
    /// the client must not take a part for the whole.
    announced: Option<u64>,
    /// Where nobody asks for content (`HEAD`): whether the body said that it had none.
    had_none: Option<bool>,
}

struct Stream<B> {
    /// Seen before the head was sent.
    ahead: VecDeque<Frame<Bytes>>,
    phase: Phase<B>,
}

enum Phase<B> {
    /// Frames pass as they come. In drop order: what the body owns (a transaction, a file) is gone before the next section begins.
    Flowing { inner: Pin<Box<B>>, lost: Pin<Box<dyn Future<Output = LockLost> + Send>>, section: Section },
    /// The inner body has ended. Its last frame waits for the lock to be given back: whoever has it knows the end.
    Ending { section: Pin<Box<dyn Future<Output = ()> + Send>>, last: Last },
    /// Nothing is left but the last frame.
    Ended { last: Last },
}

/// What comes last: a frame, an error, or nothing.
type Last = Option<Result<Frame<Bytes>, BoxError>>;

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
    pub(super) async fn without_content(inner: B, section: Section) -> Self {
        let complete = Complete {
            frames: VecDeque::new(),
            error: None,
            announced: inner.size_hint().exact(),
            had_none: Some(inner.is_end_stream()),
        };
        drop(inner);
        section.end().await;
        Self { state: State::Complete { complete } }
    }

    /// Looks at the body before the head is sent. If it is complete, the lock is given back first; then head and body go
    /// out together, and no client, however slow, holds a lock on a finished answer.
    ///
    /// An error: the lock was lost while it was looked at. Nothing has been sent yet.
    pub(super) async fn under(mut section: Section, inner: B) -> Result<Self, (Section, LockLost)> {
        if inner.is_end_stream() {
            return Ok(Self::without_content(inner, section).await);
        }
        let announced = inner.size_hint().exact();
        let mut inner = Box::pin(inner);
        let mut frames = VecDeque::with_capacity(1);
        let mut bytes = 0;
        let error = loop {
            // I6
            if let Some(why) = section.is_lost() {
                return Err((section, why));
            }
            // One poll and no wait: what is not at hand is a stream. (An inner error need not be `Send`; a boxed one is.)
            let next = poll_fn(|cx| {
                let next = section.as_owner(|| inner.as_mut().poll_frame(cx));
                Poll::Ready(next.map_err(Into::into))
            })
            .await;
            let frame = match next {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(None) => break None,
                Poll::Ready(Some(Err(error))) => break Some(error),
                Poll::Pending => return Ok(Self::streaming(inner, frames, section)),
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
            if frames.len() > LOOK_FRAMES || bytes > LOOK_BYTES {
                return Ok(Self::streaming(inner, frames, section));
            }
        };
        // What the body owns is gone before the next section begins.
        drop(inner);
        if let Some(why) = section.is_lost() {
            return Err((section, why));
        }
        if error.is_some() {
            section.has_failed();
        }
        section.end().await;
        Ok(Self { state: State::Complete { complete: Complete { frames, error, announced, had_none: None } } })
    }

    fn streaming(inner: Pin<Box<B>>, ahead: VecDeque<Frame<Bytes>>, section: Section) -> Self {
        let view = section.view();
        let lost = Box::pin(async move { view.lost().await });
        let stream = Stream { ahead, phase: Phase::Flowing { inner, lost, section } };
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
                Phase::Flowing { inner, lost, section } => {
                    // I6
                    if let Poll::Ready(why) = lost.as_mut().poll(cx) {
                        return self.lose(why);
                    }
                    let next = match self.ahead.pop_front() {
                        Some(frame) => Some(Ok(frame)),
                        None => ready!(section.as_owner(|| inner.as_mut().poll_frame(cx))),
                    };
                    // What took too long was not done under the lock.
                    if let Some(why) = section.is_lost() {
                        return self.lose(why);
                    }
                    match next {
                        Some(Ok(frame)) => {
                            let is_last = frame.is_trailers() || (self.ahead.is_empty() && inner.is_end_stream());
                            if !is_last {
                                return Poll::Ready(Some(Ok(frame)));
                            }
                            self.end(Some(Ok(frame)));
                        }
                        None => self.end(None),
                        Some(Err(error)) => self.end(Some(Err(error.into()))),
                    }
                }
                // ## Ending => Ended
                Phase::Ending { section, last } => {
                    ready!(section.as_mut().poll(cx));
                    self.phase = Phase::Ended { last: last.take() };
                }
                // ## Ended
                Phase::Ended { last } => return Poll::Ready(last.take()),
            }
        }
    }

    fn lose(&mut self, why: LockLost) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Phase::Flowing { inner, section, .. } = self.take_phase() {
            drop(inner);
            section.lost(why);
        }
        Poll::Ready(Some(Err(why.into())))
    }

    fn end(&mut self, last: Last) {
        if let Phase::Flowing { inner, mut section, .. } = self.take_phase() {
            drop(inner);
            if matches!(last, Some(Err(_))) {
                section.has_failed();
            }
            self.phase = Phase::Ending { section: Box::pin(section.end()), last };
        }
    }

    fn take_phase(&mut self) -> Phase<B> {
        self.ahead.clear();
        std::mem::replace(&mut self.phase, Phase::Ended { last: None })
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.phase, Phase::Ended { last: None })
    }

    /// What the inner body will say, and what of it is in our hands.
    fn size_hint(&self) -> SizeHint {
        let (to_come, last) = match &self.phase {
            Phase::Flowing { inner, .. } => (inner.size_hint(), None),
            Phase::Ending { last, .. } | Phase::Ended { last } => {
                (SizeHint::with_exact(0), last.as_ref().and_then(|last| last.as_ref().ok()))
            }
        };
        let in_hand = data_len(self.ahead.iter().chain(last));
        let mut hint = SizeHint::new();
        if let Some(upper) = to_come.upper() {
            hint.set_upper(upper.saturating_add(in_hand));
        }
        hint.set_lower(to_come.lower().saturating_add(in_hand));
        hint
    }
}

impl Complete {
    fn next(&mut self) -> Option<Result<Frame<Bytes>, BoxError>> {
        let frame = self.frames.pop_front();
        if let (Some(announced), Some(data)) = (&mut self.announced, frame.as_ref().and_then(Frame::data_ref)) {
            *announced = announced.saturating_sub(data.len() as u64);
        }
        frame.map(Ok).or_else(|| self.error.take().map(Err))
    }

    fn is_end_stream(&self) -> bool {
        let nothing_left = self.frames.is_empty() && self.error.is_none() && self.announced.unwrap_or(0) == 0;
        self.had_none.unwrap_or(nothing_left)
    }

    fn size_hint(&self) -> SizeHint {
        // Not made exact where it was not: hyper would send a `Content-Length`, and then no trailers.
        self.announced.map_or_else(
            || {
                let mut at_least = SizeHint::new();
                at_least.set_lower(data_len(&self.frames));
                at_least
            },
            SizeHint::with_exact,
        )
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
