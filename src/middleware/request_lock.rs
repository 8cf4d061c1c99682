//! One lock of a request, and the record of its hold.

use std::{future::pending, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until};

use super::abort::{AbortAt, AbortSignal};
use crate::{
    error::LockLost,
    lock::{HeldLock, LockGuard, ReleaseFuture},
    policy::LockPolicy,
    rejection::retry_after::HoldEstimate,
    telemetry::span::LockSpan,
};

/// One lock of a request. Dropped, it is given back as a dropped guard is: after its lock-delay.
#[derive(Debug)]
pub(crate) struct RequestLock {
    // Field order is drop order: what is noted, is noted before the next one has its turn.
    pub(super) note: LockRecord,
    guard: LockGuard,
    abort_at: AbortAt,
}

#[derive(Debug)]
pub(super) struct LockRecord {
    pub(super) span: LockSpan,
    usual_hold: Arc<HoldEstimate>,
    granted: Instant,
    /// For so long the key stays taken, however soon the work is done.
    min_hold: Duration,
}

impl RequestLock {
    pub(super) fn new(guard: LockGuard, span: LockSpan, usual_hold: Arc<HoldEstimate>, policy: &LockPolicy) -> Self {
        let granted = Instant::now();
        let note = LockRecord { span, usual_hold, granted, min_hold: Duration::ZERO };
        let stops = if policy.continues_when_lost() {
            AbortAt::Deadline(granted.checked_add(policy.request_max_hold()))
        } else {
            AbortAt::Loss
        };
        Self { note, guard, abort_at: stops }
    }

    pub(crate) fn held_lock(&self) -> HeldLock {
        self.guard.held_lock()
    }

    /// Whether what runs in here is to be broken off now, and why.
    pub(super) fn abort_reason(&self) -> Option<LockLost> {
        match self.abort_at {
            AbortAt::Loss => self.guard.held_lock().ensure_remaining(Duration::ZERO).err(),
            AbortAt::Deadline(end) => {
                end.is_some_and(|end| end <= Instant::now()).then_some(LockLost::HoldLimitReached)
            }
        }
    }

    /// Ready when it is.
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

    /// Nobody is there for whom it was granted. Nothing has run in it, so nothing keeps its key.
    pub(super) fn cancel(self) {
        self.note.span.disconnected();
        drop(self.release(true));
    }

    /// Begins to give the lock back.
    pub(super) fn release(self, has_failed: bool) -> (ReleaseFuture, LockRecord) {
        let Self { mut note, guard, .. } = self;
        if !has_failed {
            note.min_hold = guard.min_hold();
        }
        (if has_failed { guard.release_after_failure() } else { guard.release() }, note)
    }
}

impl Drop for LockRecord {
    fn drop(&mut self) {
        let hold: Duration = self.granted.elapsed();
        self.usual_hold.record(hold.max(self.min_hold));
        self.span.ended(hold);
    }
}
