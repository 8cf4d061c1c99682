//! The limits of one section.

use std::time::Duration;

use super::lease::{Lease, LeaseBounds};
use crate::{
    clock::BootInstant,
    limits::{LOCK_DELAY, MIN_REMAINING_DIVISOR},
};

/// The limits that a request sets for its section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldLimits {
    /// See [`LockPolicy::lease`](crate::LockPolicy::lease).
    pub lease: Lease,
    /// See [`LockPolicy::max_hold`](crate::LockPolicy::max_hold). `None`: no limit.
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
    /// The end of a section that starts now, whether the store keeps the key for longer or not.
    #[inline]
    pub(super) fn end_at(&self, now: BootInstant) -> BootInstant {
        let fixed = match self.lease {
            Lease::AutoRenew => BootInstant::FAR_FUTURE,
            Lease::Fixed(lease) => now.saturating_add(lease),
        };
        fixed.min(self.max_hold.map_or(BootInstant::FAR_FUTURE, |max| now.saturating_add(max)))
    }

    /// The lease of the section in the store: no longer than it needs, because a crash blocks the
    /// key for as long.
    #[inline]
    pub(super) fn store_lease(&self, bounds: LeaseBounds) -> Duration {
        match self.lease {
            Lease::AutoRenew => bounds.longest,
            Lease::Fixed(lease) => bounds.for_section(lease),
        }
    }

    /// The lease, and the lock-delay after it, of an acquire for this section alone.
    #[inline]
    pub fn lease_and_lock_delay(&self, bounds: LeaseBounds) -> (Duration, Duration) {
        (self.store_lease(bounds), self.lock_delay.max(LOCK_DELAY))
    }

    /// The part of a lease that must be left when the section starts. A section with a limit needs
    /// its whole time; any other section is renewed.
    pub(super) fn min_remaining(&self, bounds: LeaseBounds) -> Duration {
        match self.lease {
            Lease::Fixed(lease) if bounds.for_section(lease) < bounds.longest => lease,
            _ => bounds.longest / MIN_REMAINING_DIVISOR,
        }
    }
}
