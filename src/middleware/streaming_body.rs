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
    request_locks::RequestLocks,
    shared_body::{AbortReason, LockedBody, SharedBody},
    stall_monitor::{StallMonitor, monitor},
};
use crate::{body::pace::Pace, error::LockLost, limits::RELEASE_WAIT};

/// Frames pass as they come; the last one waits until the locks are given back: whoever has it finds the keys free.
///
/// The server that sends it polls it, and does not while its client does not read. So a *keeper*, a task of its own, cuts it where it stands when a
/// lock is lost or the reader has stalled.
pub(super) struct StreamingBody<B> {
    shared: Arc<SharedBody<B>>,
    /// Seen before the head was sent.
    read_ahead: VecDeque<Frame<Bytes>>,
    /// What the inner body said before it was first polled, less what has been handed out: what it says later is of what *it* has left.
    hint: SizeHint,
    /// How many of the bytes that the head announces have not been seen yet.
    unseen: Option<u64>,
    phase: Phase,
    monitor: StallMonitor,
}

enum Phase {
    /// Frames pass.
    Streaming,
    /// All that was announced is there; the last of it is kept back until the inner body has ended, too. That has a moment for it: hyper
    /// would not even ask for it over HTTP/1.1.
    HoldingLastFrame(Frame<Bytes>, Pin<Box<Sleep>>),
    /// The inner body has ended. What is left waits for the locks to be given back.
    Releasing(Pin<Box<dyn Future<Output = ()> + Send>>, Tail),
    /// Nothing is left but this.
    Done(Tail),
}

/// What comes last: frames, or an error.
type Tail = VecDeque<Result<Frame<Bytes>, BoxError>>;

impl<B> StreamingBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    /// `hint`: of the whole body. `length`: what the head announces, in bytes.
    pub(super) fn new(
        inner: Pin<Box<B>>,
        ahead: VecDeque<Frame<Bytes>>,
        hint: SizeHint,
        length: Option<u64>,
        duty: RequestLocks,
    ) -> Self
    where
        B: Send + 'static,
    {
        let stops = duty.abort_signals();
        let idle = duty.context().policy().idle_timeout();
        let mut pace = Pace::from_policy(duty.context().policy());
        // The head goes out now; then it is the reader's turn.
        pace.start_waiting(Instant::now());
        let slot = duty.context().clone();
        let flow = Arc::new(SharedBody::new(LockedBody { inner, locks: duty }, pace));
        let keeper = StallMonitor(slot.spawn(monitor(Arc::downgrade(&flow), stops, idle)));
        Self { shared: flow, read_ahead: ahead, hint, unseen: length, phase: Phase::Streaming, monitor: keeper }
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let next = ready!(self.poll_next(cx));
        if let Some(Ok(frame)) = &next {
            self.hint = reduced(self.hint, data_len([frame]));
        }
        Poll::Ready(next)
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            match &mut self.phase {
                Phase::Streaming | Phase::HoldingLastFrame(..) => {
                    let mut flow = match self.shared.start_poll(cx.waker()) {
                        Ok(flow) => flow,
                        Err(cut) => return Poll::Ready(Some(Err(self.abort(cut)))),
                    };
                    // I6
                    if let Some(why) = flow.locks.abort_reason() {
                        return Poll::Ready(Some(Err(self.abort_lost(*flow, why))));
                    }
                    let next = match self.read_ahead.pop_front() {
                        Some(frame) => Poll::Ready(Some(Ok(frame))),
                        None => flow.locks.as_owner(|| flow.inner.as_mut().poll_frame(cx)),
                    };
                    // What took too long was not done under the lock.
                    if let Some(why) = flow.locks.abort_reason() {
                        return Poll::Ready(Some(Err(self.abort_lost(*flow, why))));
                    }
                    let Poll::Ready(next) = next else {
                        if self.hold_elapsed(cx) {
                            self.emit(None, flow);
                            continue;
                        }
                        self.shared.finish_poll(flow, None);
                        return Poll::Pending;
                    };
                    if let Some(frame) = self.emit(next, flow) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                Phase::Releasing(end, rest) => {
                    ready!(end.as_mut().poll(cx));
                    self.phase = Phase::Done(mem::take(rest));
                }
                Phase::Done(rest) => return Poll::Ready(rest.pop_front()),
            }
        }
    }

    /// What is to be handed out now. `None`: something is kept back, or it ends.
    fn emit(&mut self, next: Option<Result<Frame<Bytes>, B::Error>>, flow: Box<LockedBody<B>>) -> Option<Frame<Bytes>> {
        let parked = match mem::replace(&mut self.phase, Phase::Streaming) {
            Phase::HoldingLastFrame(frame, _) => Some(Ok(frame)),
            _ => None,
        };
        let frame = match next {
            Some(Ok(frame)) => frame,
            None => {
                self.finish(*flow, parked.into_iter().collect());
                return None;
            }
            // All bytes were there, but what should have followed them (a commit, perhaps) has failed: the client must not think that all is well.
            Some(Err(error)) => {
                self.finish(*flow, VecDeque::from([Err(error.into())]));
                return None;
            }
        };
        if let (Some(left), Some(data)) = (&mut self.unseen, frame.data_ref()) {
            *left = left.saturating_sub(data.len() as u64);
        }
        let is_end = frame.is_trailers() || (self.read_ahead.is_empty() && flow.inner.is_end_stream());
        // Where no runtime is, nothing can be waited for.
        let has_all = self.unseen == Some(0) && frame.is_data() && Handle::try_current().is_ok();
        if is_end {
            self.finish(*flow, parked.into_iter().chain([Ok(frame)]).collect());
            None
        } else if parked.is_some() {
            // More than was announced: nobody will ask for it.
            self.finish(*flow, parked.into_iter().collect());
            None
        } else if has_all {
            self.phase = Phase::HoldingLastFrame(frame, Box::pin(sleep(RELEASE_WAIT)));
            self.shared.finish_poll(flow, None);
            None
        } else {
            self.shared.finish_poll(flow, Some(data_len([&frame])));
            Some(frame)
        }
    }

    /// Whether what is kept back has been so for long enough.
    fn hold_elapsed(&mut self, cx: &mut Context<'_>) -> bool {
        match &mut self.phase {
            Phase::HoldingLastFrame(_, timer) => timer.as_mut().poll(cx).is_ready(),
            _ => false,
        }
    }

    /// The inner body has ended. First what it owns, then its locks; then the rest is sent.
    fn finish(&mut self, flow: LockedBody<B>, rest: Tail) {
        let LockedBody { inner, locks: mut duty } = flow;
        drop(inner);
        self.stop();
        if rest.iter().any(Result::is_err) {
            duty.set_failed();
        }
        self.phase = Phase::Releasing(Box::pin(duty.release_all()), rest);
    }

    fn abort_lost(&mut self, flow: LockedBody<B>, why: LockLost) -> BoxError {
        let LockedBody { inner, locks: duty } = flow;
        drop(inner);
        duty.lost(why);
        self.abort(AbortReason::Lost(why))
    }

    fn abort(&mut self, cut: AbortReason) -> BoxError {
        self.stop();
        self.phase = Phase::Done(VecDeque::new());
        cut.into()
    }

    fn stop(&mut self) {
        self.monitor.0.take().inspect(AbortHandle::abort);
        self.shared.finish();
        self.read_ahead.clear();
    }

    pub(super) fn is_end_stream(&self) -> bool {
        matches!(&self.phase, Phase::Done(rest) if rest.is_empty())
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.hint
    }
}

fn reduced(hint: SizeHint, bytes: u64) -> SizeHint {
    let mut less = SizeHint::new();
    if let Some(upper) = hint.upper() {
        less.set_upper(upper.saturating_sub(bytes));
    }
    less.set_lower(hint.lower().saturating_sub(bytes));
    less
}
