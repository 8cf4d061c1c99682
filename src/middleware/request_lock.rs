//! One lock of a request, of one key or of several, and the record of its hold.

use std::{future::pending, sync::Arc, time::Duration};

use http::HeaderName;
use smallvec::SmallVec;
use tokio::time::{Instant, sleep, sleep_until};

use super::holder_limit::Grace;
use crate::{
    error::LockLost,
    lock::{HeldLock, HeldLocks, LockGuard, LossSignal, ReleaseFuture, Ticket},
    policy::LockPolicy,
    proto::GuardEnd,
    rejection::retry_after::HoldEstimate,
    telemetry::span::LockSpan,
};

/// One lock of a request. Its drop releases it after the lock-delay, as the drop of a guard does.
#[derive(Debug)]
pub(crate) struct RequestLock {
    /// In the order of the keys. Empty after the release.
    guards: SmallVec<[LockGuard; 1]>,
    pub(crate) span: LockSpan,
    hold_estimate: Arc<HoldEstimate>,
    abort_at: AbortAt,
    /// Under `newest_wins`: how long the work has for its end.
    grace: Option<Grace>,
}

/// The header of a ticket, in requests and in responses.
pub(crate) const LOCK_TICKET: HeaderName = HeaderName::from_static("lock-ticket");

/// Resolve when the work under a lock must be aborted.
pub(super) type AbortSignals = SmallVec<[LossSignal; 1]>;

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
    pub(super) fn new(
        guards: SmallVec<[LockGuard; 1]>,
        span: LockSpan,
        hold_estimate: Arc<HoldEstimate>,
        policy: &LockPolicy,
        grace: Option<Grace>,
    ) -> Self {
        let abort_at = if policy.continues_when_lost() {
            AbortAt::Deadline(Instant::now().checked_add(policy.request_max_hold()))
        } else {
            AbortAt::Loss
        };
        Self { guards, span, hold_estimate, abort_at, grace }
    }

    /// The ticket that the key is left to, if the lock is released in this way. Only a layer with
    /// tickets sends it.
    pub(super) fn ticket_after(&self, end: &GuardEnd) -> Option<Ticket> {
        self.guards.first()?.ticket_after(end)
    }

    pub(crate) fn views(&self) -> impl Iterator<Item = HeldLock> {
        self.guards.iter().map(LockGuard::held_lock)
    }

    /// The reason to abort the work under this lock, if there is one now.
    pub(super) fn abort_reason(&self) -> Option<LockLost> {
        self.loss().or_else(|| {
            let grace = self.grace?;
            let waits_for = self.guards.first()?.held_lock().superseded_for()?;
            (waits_for >= grace.into()).then_some(LockLost::Superseded)
        })
    }

    /// Whether a newer request replaces this one, and its work has no lock-delay.
    pub(super) fn is_replaceable(&self) -> bool {
        self.views().any(|lock| lock.acquisition_id().is_replaceable())
    }

    /// The reason to abort it with a lock-delay.
    fn loss(&self) -> Option<LockLost> {
        match self.abort_at {
            AbortAt::Loss => self.guards.iter().find_map(LockGuard::loss),
            AbortAt::Deadline(end) => {
                end.is_some_and(|end| end <= Instant::now()).then_some(LockLost::HoldLimitReached)
            }
        }
    }

    /// Resolves when there is one.
    pub(super) fn abort_signal(&self) -> LossSignal {
        let loss = self.loss_signal();
        let (Some(grace), Some(guard)) = (self.grace, self.guards.first()) else { return loss };
        let (lock, grace) = (guard.held_lock(), Duration::from(grace));
        Box::pin(async move {
            let superseded = async {
                lock.superseded().await;
                while let Some(left) = grace.checked_sub(lock.superseded_for().unwrap_or_default())
                    && !left.is_zero()
                {
                    sleep(left).await;
                }
            };
            tokio::select! {
                biased;
                why = loss => why,
                () = superseded => LockLost::Superseded,
            }
        })
    }

    fn loss_signal(&self) -> LossSignal {
        match self.abort_at {
            AbortAt::Loss => match &*self.guards {
                [guard] => guard.held_lock().into_loss_signal(),
                _ => HeldLocks::new(self.views()).into_loss_signal(),
            },
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
        drop(self.release(GuardEnd::ReleasedAfterFailure));
    }

    /// Starts the release. Also returns the rest of this lock, for the result in its span.
    pub(super) fn release(mut self, end: GuardEnd) -> (ReleaseFuture, Self) {
        self.record_hold(end == GuardEnd::Released);
        (LockGuard::end_all(std::mem::take(&mut self.guards), end), self)
    }

    /// Records the hold, before the guards end and the next section starts. The key stays blocked
    /// for the `min_hold`, also if the work ends earlier.
    fn record_hold(&self, keeps_min_hold: bool) {
        // From the last grant on.
        let least = |of: fn(&LockGuard) -> Duration| self.guards.iter().map(of).min().unwrap_or_default();
        let hold = least(LockGuard::held_for);
        self.hold_estimate.record(if keeps_min_hold { hold.max(least(LockGuard::min_hold)) } else { hold });
        self.span.ended(hold);
    }
}

impl Drop for RequestLock {
    fn drop(&mut self) {
        if !self.guards.is_empty() {
            self.record_hold(false);
        }
    }
}
