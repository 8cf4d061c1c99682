//! One lock of a request, and the record of its hold.

use std::{future::pending, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until};

use super::abort::{Stop, StopsAt};
use crate::{
    error::LockLost,
    lock::{HeldLock, LockGuard, ReleaseFuture},
    policy::LockPolicy,
    rejection::retry_after::UsualHold,
    telemetry::span::LockSpan,
};

/// One lock of a request. Dropped, it is given back as a dropped guard is: after its lock-delay.
#[derive(Debug)]
pub(crate) struct Section {
    // Field order is drop order: what is noted, is noted before the next one has its turn.
    pub(super) note: Note,
    guard: LockGuard,
    stops: StopsAt,
}

#[derive(Debug)]
pub(super) struct Note {
    pub(super) span: LockSpan,
    usual_hold: Arc<UsualHold>,
    granted: Instant,
    /// For so long the key stays taken, however soon the work is done.
    at_least: Duration,
}

impl Section {
    pub(super) fn new(guard: LockGuard, span: LockSpan, usual_hold: Arc<UsualHold>, policy: &LockPolicy) -> Self {
        let granted = Instant::now();
        let note = Note { span, usual_hold, granted, at_least: Duration::ZERO };
        let stops = if policy.goes_on_when_lost() {
            StopsAt::At(granted.checked_add(policy.longest_hold()))
        } else {
            StopsAt::WhenLost
        };
        Self { note, guard, stops }
    }

    pub(crate) fn view(&self) -> HeldLock {
        self.guard.held_lock()
    }

    /// Whether what runs in here is to be broken off now, and why.
    pub(super) fn must_stop(&self) -> Option<LockLost> {
        match self.stops {
            StopsAt::WhenLost => self.guard.held_lock().ensure_remaining(Duration::ZERO).err(),
            StopsAt::At(end) => end.is_some_and(|end| end <= Instant::now()).then_some(LockLost::HoldLimitReached),
        }
    }

    /// Ready when it is.
    pub(super) fn stop(&self) -> Stop {
        let view = self.view();
        match self.stops {
            StopsAt::WhenLost => Box::pin(async move { view.lost().await }),
            StopsAt::At(None) => Box::pin(pending()),
            StopsAt::At(Some(end)) => Box::pin(async move {
                sleep_until(end).await;
                LockLost::HoldLimitReached
            }),
        }
    }

    /// Nobody is there for whom it was granted. Nothing has run in it, so nothing keeps its key.
    pub(super) fn unheard(self) {
        self.note.span.unheard();
        drop(self.release(true));
    }

    /// Begins to give the lock back.
    pub(super) fn release(self, has_failed: bool) -> (ReleaseFuture, Note) {
        let Self { mut note, guard, .. } = self;
        if !has_failed {
            note.at_least = guard.min_hold();
        }
        (if has_failed { guard.release_after_failure() } else { guard.release() }, note)
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        let hold: Duration = self.granted.elapsed();
        self.usual_hold.add(hold.max(self.at_least));
        self.span.ended(hold);
    }
}
