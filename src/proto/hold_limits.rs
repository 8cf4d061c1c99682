//! On which terms one section is held.

use std::time::Duration;

use super::lease::{Lease, LeaseBounds};
use crate::{
    clock::BootInstant,
    limits::{LOCK_DELAY, MIN_REMAINING_DIVISOR},
};

/// What was agreed on when the lock was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldLimits {
    /// See [`LockPolicy::lease`](crate::LockPolicy::lease).
    pub lease: Lease,
    /// See [`LockPolicy::max_hold`](crate::LockPolicy::max_hold). `None`: without end.
    pub max_hold: Option<Duration>,
    /// See [`LockPolicy::min_hold`](crate::LockPolicy::min_hold).
    pub min_hold: Duration,
    /// See [`LockPolicy::lock_delay`](crate::LockPolicy::lock_delay).
    pub lock_delay: Duration,
}

impl Default for HoldLimits {
    fn default() -> Self {
        Self { lease: Lease::AutoRenew, max_hold: None, min_hold: Duration::ZERO, lock_delay: LOCK_DELAY }
    }
}

impl HoldLimits {
    /// When a section that begins now is over, whatever the store says.
    pub(super) fn end_at(&self, now: BootInstant) -> BootInstant {
        let fixed = match self.lease {
            Lease::AutoRenew => BootInstant::FAR_FUTURE,
            Lease::Fixed(lease) => now.saturating_add(lease),
        };
        fixed.min(self.max_hold.map_or(BootInstant::FAR_FUTURE, |max| now.saturating_add(max)))
    }

    /// What the store is asked for: no more than the section needs, so that a crash costs no more.
    pub(super) fn store_lease(&self, bounds: LeaseBounds) -> Duration {
        match self.lease {
            Lease::AutoRenew => bounds.longest,
            Lease::Fixed(lease) => bounds.for_section(lease),
        }
    }

    /// With how much of a lease left the section may begin: what cuts it short is its own end, or
    /// it is renewed.
    pub(super) fn min_remaining(&self, bounds: LeaseBounds) -> Duration {
        match self.lease {
            Lease::Fixed(lease) if bounds.for_section(lease) < bounds.longest => lease,
            _ => bounds.longest / MIN_REMAINING_DIVISOR,
        }
    }

    /// How much of the least hold is left of a section that began then.
    pub(super) fn min_hold_remaining(&self, began: BootInstant, now: BootInstant) -> Duration {
        began.saturating_add(self.min_hold).saturating_duration_since(now)
    }
}
