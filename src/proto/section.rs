//! One section: what runs under a grant, alone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use super::{
    DriverTypes,
    deadline::{AtomicDeadline, Deadline},
    grant::Grant,
    hold_limits::HoldLimits,
};
#[cfg(feature = "test-util")]
use crate::{acquisition::AcquisitionId, lock_key::LockKey};
use crate::{clock::BootInstant, error::LockLost, fencing::FencingToken, store::ReleaseReply};

/// The outcome of releasing a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The key is free, or blocked for the rest of its `min_hold`.
    Released,
    /// The next waiter holds the key.
    HandedOff,
    /// Other guards of the same owner still hold the key.
    StillHeld,
    /// The lock was lost before it was released, or an earlier attempt of this release reached the store.
    NotHeld,
}

/// Shared by its guards and their views.
#[derive(Debug)]
pub struct Section<D: DriverTypes> {
    /// What it runs under.
    pub grant: Arc<Grant<D>>,
    /// What it writes with.
    pub token: FencingToken,
    pub(crate) limits: HoldLimits,
    pub(crate) started_at: BootInstant,
    /// Its own end, whatever the store says. Its grant may go on with the next one.
    deadline: AtomicDeadline,
    /// To how many callers it was sent that have not taken it yet.
    undelivered: AtomicU32,
    /// Of the driver.
    pub data: D::SectionData,
}

impl From<ReleaseReply> for ReleaseOutcome {
    fn from(reply: ReleaseReply) -> Self {
        match reply {
            ReleaseReply::Freed => Self::Released,
            ReleaseReply::HandedOff => Self::HandedOff,
            ReleaseReply::NotHolder => Self::NotHeld,
        }
    }
}

impl<D: DriverTypes> Section<D> {
    /// Begins now.
    pub(super) fn new(grant: Arc<Grant<D>>, token: FencingToken, terms: HoldLimits, now: BootInstant) -> Self {
        let limit = terms.end_at(now);
        grant.set_section_limit(limit);
        Self {
            grant,
            token,
            limits: terms,
            started_at: now,
            deadline: AtomicDeadline::new(limit),
            undelivered: AtomicU32::new(0),
            data: D::SectionData::default(),
        }
    }

    /// Of no key, and without an end.
    #[cfg(feature = "test-util")]
    pub(crate) fn detached(key: LockKey, token: FencingToken, owner: AcquisitionId) -> Self {
        let grant = Grant::new(key, owner, token, Duration::ZERO, Duration::ZERO, BootInstant::FAR_FUTURE);
        Self::new(Arc::new(grant), token, HoldLimits::default(), BootInstant::default())
    }

    /// For how long it can be claimed at this moment that it is alone. Zero is for ever.
    pub fn remaining(&self, now: BootInstant) -> Duration {
        let Deadline::At(limit) = self.deadline.get() else { return Duration::ZERO };
        let left = limit.saturating_duration_since(now);
        if left.is_zero() {
            self.end(LockLost::HoldLimitReached);
            return Duration::ZERO;
        }
        left.min(self.grant.remaining(now))
    }

    /// It is sent to one more caller. How many had not taken it yet.
    pub(super) fn deliver(&self) -> u32 {
        // A count and nothing else: whether one caller has taken it is decided where it was sent to.
        self.undelivered.fetch_add(1, Ordering::Relaxed)
    }

    /// A caller has taken it, or never will.
    pub fn delivered(&self) {
        self.undelivered.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn is_delivered(&self) -> bool {
        self.undelivered.load(Ordering::Relaxed) == 0
    }

    /// Why it is over; `None` while it is not.
    pub fn end_reason(&self) -> Option<LockLost> {
        self.deadline.end_reason().or_else(|| self.grant.end_reason())
    }

    /// It is over, for this reason; if it is not yet.
    pub(super) fn end(&self, why: LockLost) {
        self.deadline.end(why);
    }
}
