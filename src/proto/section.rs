//! One critical section under a grant.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{
    DriverTypes,
    deadline::{AtomicDeadline, Deadline},
    grant::{Grant, nanos},
    hold_limits::HoldLimits,
};
#[cfg(feature = "test-util")]
use crate::{acquisition::AcquisitionId, lock_key::LockKey};
use crate::{clock::BootInstant, error::LockLost, fencing::FencingToken, store::ReleaseReply, trace::SectionTrace};

/// Outcome of the release of a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The key is free, or blocked for the rest of its `min_hold`.
    Released,
    /// The key was handed off to the next waiter.
    HandedOff,
    /// Other guards of the same owner, or other readers of this process, still hold the key.
    StillHeld,
    /// The lock was not held any more: it was lost, or an earlier attempt of this release reached
    /// the store.
    NotHeld,
}

/// One critical section, shared by its guards and their views.
#[derive(Debug)]
pub struct Section<D: DriverTypes> {
    /// The grant that the section runs under.
    pub grant: Arc<Grant<D>>,
    /// The token of the writes of this section.
    pub token: FencingToken,
    /// In nanoseconds: each held key has a section.
    lock_delay: u64,
    /// In nanoseconds, from the start.
    min_hold: AtomicU64,
    pub(crate) started_at: BootInstant,
    /// The limit of this section. Its grant may continue with another section.
    deadline: AtomicDeadline,
    /// The number of waiters that the section was sent to and that have not received it.
    undelivered: AtomicU32,
    /// How long after the start a newer request waited for the end, in milliseconds. Zero: none
    /// does. Set once.
    superseded_after: AtomicU32,
    /// That of its request.
    pub(super) trace: Option<SectionTrace>,
    /// That of the section before, which has handed the key off.
    pub after: Option<SectionTrace>,
    /// The value of the driver.
    pub data: D::SectionData,
}

impl From<ReleaseReply> for ReleaseOutcome {
    fn from(reply: ReleaseReply) -> Self {
        match reply {
            ReleaseReply::Freed | ReleaseReply::RecordedBefore => Self::Released,
            ReleaseReply::HandedOff => Self::HandedOff,
            ReleaseReply::NotHolder => Self::NotHeld,
        }
    }
}

impl<D: DriverTypes> Section<D> {
    /// Starts a section, and sets its limit in the grant.
    pub(super) fn new(grant: Arc<Grant<D>>, token: FencingToken, limits: HoldLimits, now: BootInstant) -> Self {
        grant.set_section_limit(BootInstant::FAR_FUTURE);
        Self::beside(grant, token, limits, now)
    }

    /// Starts a section beside others under the same grant, and lowers the limit in the grant.
    pub(super) fn beside(grant: Arc<Grant<D>>, token: FencingToken, limits: HoldLimits, now: BootInstant) -> Self {
        let limit = limits.end_at(now);
        grant.lower_limit(limit);
        Self {
            grant,
            token,
            lock_delay: nanos(limits.lock_delay),
            min_hold: AtomicU64::new(nanos(limits.min_hold)),
            started_at: now,
            deadline: AtomicDeadline::new(limit),
            undelivered: AtomicU32::new(0),
            superseded_after: AtomicU32::new(0),
            trace: None,
            after: None,
            data: D::SectionData::default(),
        }
    }

    /// Sets its trace, and that of the section before.
    pub(super) fn traced(self, trace: Option<SectionTrace>, after: Option<SectionTrace>) -> Self {
        Self { trace, after, ..self }
    }

    /// A section of no key, and without a limit.
    #[cfg(feature = "test-util")]
    pub(crate) fn detached(key: LockKey, token: FencingToken, id: AcquisitionId) -> Self {
        let grant = Grant::new(key, id, token, Duration::ZERO, Duration::ZERO, BootInstant::FAR_FUTURE);
        Self::new(Arc::new(grant), token, HoldLimits::default(), BootInstant::default())
    }

    /// How long the section counts as alone. Once the result is zero, it stays zero.
    pub fn remaining(&self, now: BootInstant) -> Duration {
        let Deadline::At(limit) = self.deadline.get() else { return Duration::ZERO };
        let remaining = limit.saturating_duration_since(now);
        if remaining.is_zero() {
            self.end(LockLost::HoldLimitReached);
            return Duration::ZERO;
        }
        remaining.min(self.grant.remaining(now))
    }

    /// Has the limits count from now: the section is one of several, and its work starts when the
    /// last of them has its key. Its first limits must not end earlier. A driver tracks the grant
    /// anew, as after an [`Action::Track`](super::Action::Track).
    pub(crate) fn restart_limits(&self, limits: HoldLimits, now: BootInstant) {
        let limit = limits.end_at(now);
        self.deadline.lower(limit);
        self.grant.set_limit(limit);
        let waited = now.saturating_duration_since(self.started_at);
        self.min_hold.store(nanos(limits.min_hold.saturating_add(waited)), Ordering::Relaxed);
    }

    /// The trace that the section leaves to those that wait for its end.
    pub(super) fn ended_trace(&self, now: BootInstant) -> Option<SectionTrace> {
        Some(self.trace.as_ref()?.ended(now.saturating_duration_since(self.started_at)))
    }

    pub(super) fn lock_delay(&self) -> Duration {
        Duration::from_nanos(self.lock_delay)
    }

    pub(crate) fn min_hold(&self) -> Duration {
        Duration::from_nanos(self.min_hold.load(Ordering::Relaxed))
    }

    /// The limit, or an instant in the past after the end.
    pub(super) fn limit(&self) -> BootInstant {
        self.deadline.at()
    }

    /// The rest of `min_hold`.
    pub(super) fn min_hold_remaining(&self, now: BootInstant) -> Duration {
        self.started_at.saturating_add(self.min_hold()).saturating_duration_since(now)
    }

    /// Counts one more waiter that the section is sent to. Returns the number before.
    pub(super) fn deliver(&self) -> u32 {
        // `Relaxed`: the counter guards no data. Whether a waiter has received the section is
        // decided by its oneshot.
        self.undelivered.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts one waiter that has received the section, or never will.
    pub fn delivered(&self) {
        self.undelivered.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn is_delivered(&self) -> bool {
        self.undelivered.load(Ordering::Relaxed) == 0
    }

    /// A newer request waits for the end from now on.
    pub(super) fn supersede(&self, now: BootInstant) {
        let after = now.saturating_duration_since(self.started_at).as_millis();
        let after = u32::try_from(after).unwrap_or(u32::MAX).max(1);
        let _ = self.superseded_after.compare_exchange(0, after, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Since how long a newer request waits for the end.
    pub(crate) fn superseded_for(&self, now: BootInstant) -> Option<Duration> {
        let after = Some(self.superseded_after.load(Ordering::Acquire)).filter(|after| *after != 0)?;
        let since = self.started_at.saturating_add(Duration::from_millis(after.into()));
        Some(now.saturating_duration_since(since))
    }

    /// The reason of the end, or `None` while the section runs.
    pub fn end_reason(&self) -> Option<LockLost> {
        self.deadline.end_reason().or_else(|| self.grant.end_reason())
    }

    /// Why the section has ended. Only for a section without remaining time.
    pub fn loss_reason(&self) -> LockLost {
        self.end_reason().unwrap_or(LockLost::Expired)
    }

    /// Why the section has ended, if no time remains. Once there is a reason, it stays.
    pub fn loss(&self, now: BootInstant) -> Option<LockLost> {
        self.remaining(now).is_zero().then(|| self.loss_reason())
    }

    /// Ends the section, unless it has ended.
    pub(super) fn end(&self, reason: LockLost) {
        self.deadline.end(reason);
    }
}
