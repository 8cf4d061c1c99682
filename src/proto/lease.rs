//! How long a lock is held, and which part of a lease may be relied on.

use std::time::Duration;

use crate::limits::{DRIFT_DIVISOR, DRIFT_ROUNDING};

/// How long a lock is held if nobody gives it back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lease {
    /// As long as its holder lives: the watchdog renews it every third of the
    /// [lease](crate::LockManagerBuilder::lease), 30 seconds by default. Redisson's `lock()`.
    #[default]
    AutoRenew,
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

/// What a store is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseBounds {
    /// For a section that has no end of its own.
    pub longest: Duration,
    /// How long one call of the store may take.
    pub call_timeout: Duration,
}

/// I3: what can be counted on of a lease, from the moment *before* the request that asked for it was sent.
pub(crate) fn usable_part(lease: Duration) -> Duration {
    lease.saturating_sub(lease / DRIFT_DIVISOR).saturating_sub(DRIFT_ROUNDING)
}

impl LeaseBounds {
    /// What the store is asked for, for a section that lasts so long at the most: the least lease
    /// whose [safe part](safe_part) does not end before it, though the answer takes as long as a
    /// call may. What is longer is renewed.
    pub(crate) fn for_section(self, section: Duration) -> Duration {
        let safe = section.saturating_add(self.call_timeout).saturating_add(DRIFT_ROUNDING);
        safe.saturating_add(safe / (DRIFT_DIVISOR - 1)).saturating_add(Duration::from_nanos(1)).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_lease_covers_the_section_and_no_more() {
        let call_timeout = Duration::from_millis(500);
        let bounds = LeaseBounds { longest: Duration::from_secs(600), call_timeout };
        for ms in [0, 1, 99, 1_000, 5_000, 29_999, 500_000] {
            let section = Duration::from_millis(ms);
            let lease = bounds.for_section(section);
            assert!(usable_part(lease) >= section + call_timeout, "{section:?} under {lease:?}");
            assert!(
                usable_part(lease) <= section + call_timeout + Duration::from_millis(1),
                "{section:?} under {lease:?}"
            );
        }
        assert_eq!(bounds.for_section(Duration::MAX), bounds.longest);
    }

    #[test]
    fn drift_is_subtracted_from_a_lease() {
        assert_eq!(usable_part(Duration::from_secs(30)), Duration::from_millis(29_698));
        assert_eq!(usable_part(Duration::from_millis(1)), Duration::ZERO, "nothing can be counted on");
    }
}
