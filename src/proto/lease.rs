//! The lease of a lock, and the part of it that a holder may rely on.

use std::time::Duration;

use crate::limits::{DRIFT_DIVISOR, DRIFT_ROUNDING};

/// Time that a lock is held if its guard does not release it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lease {
    /// Renewed while the process lives.
    ///
    /// The watchdog extends the lock by a full [lease](crate::LockManagerBuilder::lease) after each
    /// third of it. The lease is 30 seconds by default.
    #[default]
    AutoRenew,
    /// Held for this time and no longer. Then the lock is lost.
    ///
    /// For sections that must not take longer, and for sections that must not block other callers
    /// for long after a crash. The lease in the store is this time plus one call timeout (half a
    /// second), 1 % for the drift of clocks, and the lock-delay. It is never longer than the lease
    /// of `AutoRenew`. A holder that crashes under a fixed lease of 5 seconds therefore blocks its
    /// key for at most 6.6 seconds, and under `AutoRenew` for 31. `max_hold` does not change the
    /// lease in the store.
    ///
    /// If the next section in the same process needs another lease, the handoff to it costs store
    /// calls: a yield for a longer lease, a release and an acquire for a shorter one.
    Fixed(Duration),
}

/// The leases that calls of the store request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseBounds {
    /// The lease of a section without a limit, and the longest of all.
    pub longest: Duration,
    /// The limit of one store call.
    pub call_timeout: Duration,
}

impl LeaseBounds {
    /// The lease of a section with this limit: the shortest one whose [usable
    /// part](crate::clock::usable_part) covers the section, even if the reply takes as long as a
    /// call may. A longer section is renewed.
    pub(crate) fn for_section(self, section: Duration) -> Duration {
        let usable = section.saturating_add(self.call_timeout).saturating_add(DRIFT_ROUNDING);
        usable.saturating_add(usable / (DRIFT_DIVISOR - 1)).saturating_add(Duration::from_nanos(1)).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::usable_part;

    #[test]
    fn a_lease_covers_its_section_and_little_more() {
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
}
