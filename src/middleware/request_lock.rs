//! One lock of a request, and the record of its hold.

use std::{future::pending, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until};

use super::abort::{AbortAt, AbortSignal};
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
    // Fields are dropped in order: the record is written before the next section starts.
    pub(super) record: LockRecord,
    guard: LockGuard,
    abort_at: AbortAt,
}

#[derive(Debug)]
pub(super) struct LockRecord {
    pub(super) span: LockSpan,
    hold_estimate: Arc<HoldEstimate>,
    granted: Instant,
    /// The time for which the key stays blocked, also if the work ends earlier.
    min_hold: Duration,
}

impl RequestLock {
    pub(super) fn new(guard: LockGuard, span: LockSpan, hold_estimate: Arc<HoldEstimate>, policy: &LockPolicy) -> Self {
        let granted = Instant::now();
        let record = LockRecord { span, hold_estimate, granted, min_hold: Duration::ZERO };
        let signals = if policy.continues_when_lost() {
            AbortAt::Deadline(granted.checked_add(policy.request_max_hold()))
        } else {
            AbortAt::Loss
        };
        Self { record, guard, abort_at: signals }
    }

    pub(crate) fn held_lock(&self) -> HeldLock {
        self.guard.held_lock()
    }

    /// The reason to abort the work under this lock, if there is one now.
    pub(super) fn abort_reason(&self) -> Option<LockLost> {
        match self.abort_at {
            AbortAt::Loss => self.guard.held_lock().loss(),
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
        self.record.span.disconnected();
        drop(self.release(true));
    }

    /// Starts the release.
    pub(super) fn release(self, has_failed: bool) -> (ReleaseFuture, LockRecord) {
        let Self { mut record, guard, .. } = self;
        if !has_failed {
            record.min_hold = guard.min_hold();
        }
        (if has_failed { guard.release_after_failure() } else { guard.release() }, record)
    }

    /// Starts the release, and leaves a record for retries.
    pub(super) fn release_with_record(self, answer: NewRecord) -> (ReleaseFuture, LockRecord) {
        let Self { record, guard, .. } = self;
        (guard.release_with_record(answer), record)
    }
}

impl Drop for LockRecord {
    fn drop(&mut self) {
        let hold: Duration = self.granted.elapsed();
        self.hold_estimate.record(hold.max(self.min_hold));
        self.span.ended(hold);
    }
}
