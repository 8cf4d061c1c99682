//! One lock of a request, and the record of its hold.

use std::{
    future::{Future, pending},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use smallvec::SmallVec;
use tokio::time::{Instant, sleep_until};

use crate::{
    error::LockLost,
    lock::{HeldLock, LockGuard, ReleaseFuture},
    policy::LockPolicy,
    rejection::retry_after::HoldEstimate,
    store::NewRecord,
    telemetry::span::LockSpan,
};

/// One lock of a request. Its drop releases it after the lock-delay, as the drop of a guard does.
#[derive(Debug)]
pub(crate) struct RequestLock {
    pub(crate) span: LockSpan,
    hold_estimate: Arc<HoldEstimate>,
    /// `None` after the release.
    guard: Option<LockGuard>,
    abort_at: AbortAt,
}

/// Resolves when the work under a lock must be aborted.
pub(super) type AbortSignal = Pin<Box<dyn Future<Output = LockLost> + Send>>;

pub(super) type AbortSignals = SmallVec<[AbortSignal; 1]>;

/// When the work under a lock is aborted.
#[derive(Clone, Copy, Debug)]
enum AbortAt {
    /// When the lock is lost.
    Loss,
    /// At this instant, also if the lock is still held. `None`: later than any instant of the
    /// clock.
    Deadline(Option<Instant>),
}

impl RequestLock {
    pub(super) fn new(guard: LockGuard, span: LockSpan, hold_estimate: Arc<HoldEstimate>, policy: &LockPolicy) -> Self {
        let abort_at = if policy.continues_when_lost() {
            AbortAt::Deadline(Instant::now().checked_add(policy.request_max_hold()))
        } else {
            AbortAt::Loss
        };
        Self { span, hold_estimate, guard: Some(guard), abort_at }
    }

    fn guard(&self) -> &LockGuard {
        self.guard.as_ref().expect("a lock that is not released")
    }

    pub(crate) fn held_lock(&self) -> HeldLock {
        self.guard().held_lock()
    }

    /// The reason to abort the work under this lock, if there is one now.
    pub(super) fn abort_reason(&self) -> Option<LockLost> {
        match self.abort_at {
            AbortAt::Loss => self.guard().loss(),
            AbortAt::Deadline(end) => {
                end.is_some_and(|end| end <= Instant::now()).then_some(LockLost::HoldLimitReached)
            }
        }
    }

    /// Resolves when there is one.
    pub(super) fn abort_signal(&self) -> AbortSignal {
        let view = self.held_lock();
        match self.abort_at {
            AbortAt::Loss => Box::pin(async move { view.lost().await }),
            AbortAt::Deadline(None) => Box::pin(pending()),
            AbortAt::Deadline(Some(end)) => Box::pin(async move {
                sleep_until(end).await;
                LockLost::HoldLimitReached
            }),
        }
    }

    /// Releases the lock of a client that disconnected. Nothing ran under it: no time blocks the
    /// key.
    pub(super) fn cancel(self) {
        self.span.disconnected();
        self.release_unused();
    }

    /// Releases a lock under which nothing ran.
    pub(crate) fn release_unused(self) {
        drop(self.release(true));
    }

    /// Starts the release. Also returns the rest of this lock, for the result in its span.
    pub(super) fn release(mut self, has_failed: bool) -> (ReleaseFuture, Self) {
        let guard = self.end(!has_failed);
        (if has_failed { guard.release_after_failure() } else { guard.release() }, self)
    }

    /// Starts the release, and leaves a record for retries.
    pub(super) fn release_with_record(mut self, answer: NewRecord) -> (ReleaseFuture, Self) {
        (self.end(false).release_with_record(answer), self)
    }

    /// Records the hold, before the guard ends and the next section starts. The key stays blocked
    /// for the `min_hold`, also if the work ends earlier.
    fn end(&mut self, keeps_min_hold: bool) -> LockGuard {
        let guard = self.guard.take().expect("a lock that is not released");
        let hold = guard.held_for();
        self.hold_estimate.record(if keeps_min_hold { hold.max(guard.min_hold()) } else { hold });
        self.span.ended(hold);
        guard
    }
}

/// Polls all signals. Ready with the reason of the first one that is ready.
pub(super) fn poll_any(signals: &mut AbortSignals, cx: &mut Context<'_>) -> Poll<LockLost> {
    let ready = signals.iter_mut().find_map(|signal| match signal.as_mut().poll(cx) {
        Poll::Ready(why) => Some(why),
        Poll::Pending => None,
    });
    ready.map_or(Poll::Pending, Poll::Ready)
}

impl Drop for RequestLock {
    fn drop(&mut self) {
        if self.guard.is_some() {
            drop(self.end(false));
        }
    }
}
