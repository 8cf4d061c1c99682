//! On which terms one section is held.

use std::time::Duration;

use crate::{
    clock::Moment,
    defaults::{LOCK_DELAY, MIN_RUN_DIVISOR},
    lease::LeaseBounds,
};

/// How long a lock is held if nobody gives it back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lease {
    /// As long as its holder lives: the watchdog renews it every third of the
    /// [lease](crate::LocksBuilder::lease), 30 seconds by default. Redisson's `lock()`.
    #[default]
    Watched,
    /// So long and no longer: then it is lost, whatever its holder does. Redisson's `lock(leaseTime)`.
    ///
    /// For sections that must not take longer, and for sections that must not block others for long
    /// after a crash. The store is asked for this time, the time of one call (half a second), 1 %
    /// for the clocks and the lock-delay, and never for more than a watched lease. So a holder that
    /// crashes under a fixed lease of 5 seconds blocks its key for at most 6.6 seconds; a watched
    /// one blocks it for 31. A `max_hold` does not change what the store is asked for.
    ///
    /// A handoff within a process costs a round trip where the next section needs another lease: a
    /// yield for a longer one, a release and an acquire for a shorter one.
    Fixed(Duration),
}

/// What was agreed on when the lock was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// See [`Policy::lease`](crate::Policy::lease).
    pub lease: Lease,
    /// See [`Policy::max_hold`](crate::Policy::max_hold). `None`: without end.
    pub max_hold: Option<Duration>,
    /// See [`Policy::hold_at_least`](crate::Policy::hold_at_least).
    pub hold_at_least: Duration,
    /// See [`Policy::lock_delay`](crate::Policy::lock_delay).
    pub lock_delay: Duration,
}

impl Default for Terms {
    fn default() -> Self {
        Self { lease: Lease::Watched, max_hold: None, hold_at_least: Duration::ZERO, lock_delay: LOCK_DELAY }
    }
}

impl Terms {
    /// When a section that begins now is over, whatever the store says.
    pub(super) fn limit(&self, now: Moment) -> Moment {
        let fixed = match self.lease {
            Lease::Watched => Moment::NEVER,
            Lease::Fixed(lease) => now.after(lease),
        };
        fixed.min(self.max_hold.map_or(Moment::NEVER, |max| now.after(max)))
    }

    /// What the store is asked for: no more than the section needs, so that a crash costs no more.
    pub(super) fn store_lease(&self, bounds: LeaseBounds) -> Duration {
        match self.lease {
            Lease::Watched => bounds.longest,
            Lease::Fixed(lease) => bounds.of_section(lease),
        }
    }

    /// With how much of a lease left the section may begin: what cuts it short is its own end, or
    /// it is renewed.
    pub(super) fn least_run(&self, bounds: LeaseBounds) -> Duration {
        match self.lease {
            Lease::Fixed(lease) if bounds.of_section(lease) < bounds.longest => lease,
            _ => bounds.longest / MIN_RUN_DIVISOR,
        }
    }

    /// How much of the least hold is left of a section that began then.
    pub(super) fn still_to_hold(&self, began: Moment, now: Moment) -> Duration {
        began.after(self.hold_at_least).since(now)
    }
}
