//! On which terms one section is held.

use std::time::Duration;

use super::lease::{Lease, LeaseBounds};
use crate::{
    clock::Moment,
    limits::{LOCK_DELAY, MIN_RUN_DIVISOR},
};

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
