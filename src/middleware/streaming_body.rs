//! A body that streams under its locks.

use std::{
    collections::VecDeque,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::{
    runtime::Handle,
    task::AbortHandle,
    time::{Instant, Sleep, sleep},
};
use tower::BoxError;

use super::{
    complete_body::data_len,
    request_locks::Duty,
    shared_body::{Cut, Flow, Shared},
    stall_monitor::{Keeper, keep},
};
use crate::{body::pace::Pace, error::LockLost, limits::RELEASE_WAIT};

/// Frames pass as they come; the last one waits until the locks are given back: whoever has it finds the keys free.
///
/// The server that sends it polls it, and does not while its client does not read. So a *keeper*, a task of its own, cuts it where it stands when a
/// lock is lost or the reader has stalled.
pub(super) struct Stream<B> {
    flow: Arc<Shared<B>>,
    /// Seen before the head was sent.
    ahead: VecDeque<Frame<Bytes>>,
    /// What the inner body said before it was first polled, less what has been handed out: what it says later is of what *it* has left.
    hint: SizeHint,
    /// How many of the bytes that the head announces have not been seen yet.
    left: Option<u64>,
    phase: Phase,
    keeper: Keeper,
}

enum Phase {
    /// Frames pass.
    Flowing,
    /// All that was announced is there; the last of it is kept back until the inner body has ended, too. That has a moment for it: hyper
    /// would not even ask for it over HTTP/1.1.
    Parked(Frame<Bytes>, Pin<Box<Sleep>>),
    /// The inner body has ended. What is left waits for the locks to be given back.
    Ending(Pin<Box<dyn Future<Output = ()> + Send>>, Rest),
    /// Nothing is left but this.
    Ended(Rest),
}

/// What comes last: frames, or an error.
type Rest = VecDeque<Result<Frame<Bytes>, BoxError>>;

impl<B> Stream<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    /// `hint`: of the whole body. `length`: what the head announces, in bytes.
    pub(super) fn new(
        inner: Pin<Box<B>>,
        ahead: VecDeque<Frame<Bytes>>,
        hint: SizeHint,
        length: Option<u64>,
        duty: Duty,
    ) -> Self
    where
        B: Send + 'static,
    {
        let stops = duty.stops();
        let idle = duty.slot().policy().longest_idle();
        let mut pace = Pace::of(duty.slot().policy());
        // The head goes out now; then it is the reader's turn.
        pace.waits(Instant::now());
        let slot = duty.slot().clone();
        let flow = Arc::new(Shared::new(Flow { inner, duty }, pace));
        let keeper = Keeper(slot.spawn(keep(Arc::downgrade(&flow), stops, idle)));
        Self { flow, ahead, hint, left: length, phase: Phase::Flowing, keeper }
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let next = ready!(self.poll_next(cx));
        if let Some(Ok(frame)) = &next {
            self.hint = less(self.hint, data_len([frame]));
        }
        Poll::Ready(next)
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            match &mut self.phase {
                Phase::Flowing | Phase::Parked(..) => {
                    let mut flow = match self.flow.take(cx.waker()) {
                        Ok(flow) => flow,
                        Err(cut) => return Poll::Ready(Some(Err(self.cut(cut)))),
                    };
                    // I6
                    if let Some(why) = flow.duty.must_stop() {
                        return Poll::Ready(Some(Err(self.lose(*flow, why))));
                    }
                    let next = match self.ahead.pop_front() {
                        Some(frame) => Poll::Ready(Some(Ok(frame))),
                        None => flow.duty.as_owner(|| flow.inner.as_mut().poll_frame(cx)),
                    };
                    // What took too long was not done under the lock.
                    if let Some(why) = flow.duty.must_stop() {
                        return Poll::Ready(Some(Err(self.lose(*flow, why))));
                    }
                    let Poll::Ready(next) = next else {
                        if self.has_waited(cx) {
                            self.pass(None, flow);
                            continue;
                        }
                        self.flow.put(flow, None);
                        return Poll::Pending;
                    };
                    if let Some(frame) = self.pass(next, flow) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Phase::Ending(end, rest) => {
                    ready!(end.as_mut().poll(cx));
                    self.phase = Phase::Ended(mem::take(rest));
                }
                Phase::Ended(rest) => return Poll::Ready(rest.pop_front()),
            }
        }
    }

    /// What is to be handed out now. `None`: something is kept back, or it ends.
    fn pass(&mut self, next: Option<Result<Frame<Bytes>, B::Error>>, flow: Box<Flow<B>>) -> Option<Frame<Bytes>> {
        let parked = match mem::replace(&mut self.phase, Phase::Flowing) {
            Phase::Parked(frame, _) => Some(Ok(frame)),
            _ => None,
        };
        let frame = match next {
            Some(Ok(frame)) => frame,
            None => {
                self.end(*flow, parked.into_iter().collect());
                return None;
            }
            // All bytes were there, but what should have followed them (a commit, perhaps) has failed: the client must not think that all is well.
            Some(Err(error)) => {
                self.end(*flow, VecDeque::from([Err(error.into())]));
                return None;
            }
        };
        if let (Some(left), Some(data)) = (&mut self.left, frame.data_ref()) {
            *left = left.saturating_sub(data.len() as u64);
        }
        let is_end = frame.is_trailers() || (self.ahead.is_empty() && flow.inner.is_end_stream());
        // Where no runtime is, nothing can be waited for.
        let has_all = self.left == Some(0) && frame.is_data() && Handle::try_current().is_ok();
        if is_end {
            self.end(*flow, parked.into_iter().chain([Ok(frame)]).collect());
            None
        } else if parked.is_some() {
            // More than was announced: nobody will ask for it.
            self.end(*flow, parked.into_iter().collect());
            None
        } else if has_all {
            self.phase = Phase::Parked(frame, Box::pin(sleep(RELEASE_WAIT)));
            self.flow.put(flow, None);
            None
        } else {
            self.flow.put(flow, Some(data_len([&frame])));
            Some(frame)
        }
    }

    /// Whether what is kept back has been so for long enough.
    fn has_waited(&mut self, cx: &mut Context<'_>) -> bool {
        match &mut self.phase {
            Phase::Parked(_, timer) => timer.as_mut().poll(cx).is_ready(),
            _ => false,
        }
    }

    /// The inner body has ended. First what it owns, then its locks; then the rest is sent.
    fn end(&mut self, flow: Flow<B>, rest: Rest) {
        let Flow { inner, mut duty } = flow;
        drop(inner);
        self.is_over();
        if rest.iter().any(Result::is_err) {
            duty.has_failed();
        }
        self.phase = Phase::Ending(Box::pin(duty.end()), rest);
    }

    fn lose(&mut self, flow: Flow<B>, why: LockLost) -> BoxError {
        let Flow { inner, duty } = flow;
        drop(inner);
        duty.lost(why);
        self.cut(Cut::Lost(why))
    }

    fn cut(&mut self, cut: Cut) -> BoxError {
        self.is_over();
        self.phase = Phase::Ended(VecDeque::new());
        cut.into()
    }

    fn is_over(&mut self) {
        self.keeper.0.take().inspect(AbortHandle::abort);
        self.flow.over();
        self.ahead.clear();
    }

    pub(super) fn is_end_stream(&self) -> bool {
        matches!(&self.phase, Phase::Ended(rest) if rest.is_empty())
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.hint
    }
}

fn less(hint: SizeHint, bytes: u64) -> SizeHint {
    let mut less = SizeHint::new();
    if let Some(upper) = hint.upper() {
        less.set_upper(upper.saturating_sub(bytes));
    }
    less.set_lower(hint.lower().saturating_sub(bytes));
    less
}
