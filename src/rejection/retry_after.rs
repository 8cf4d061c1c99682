//! When a rejected client may retry.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::limits::{INITIAL_HOLD_ESTIMATE, LOCK_DELAY, RETRY_AFTER_FLOOR, RETRY_AFTER_MAX};

/// How long a route holds its locks: a moving average over about eight holds.
///
/// The lease says little about it: it is 30 seconds for a section of 40 milliseconds.
#[derive(Debug, Default)]
pub(crate) struct HoldEstimate {
    /// Microseconds. Zero before the first hold.
    average_us: AtomicU64,
}

impl HoldEstimate {
    pub(crate) fn record(&self, hold: Duration) {
        let hold = u64::try_from(hold.as_micros()).unwrap_or(u64::MAX).max(1);
        let average = self.average_us.load(Ordering::Relaxed);
        let average = if average == 0 { hold } else { average - average / 8 + hold / 8 };
        // Concurrent holds may be counted as one: this is an estimate.
        self.average_us.store(average.max(1), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Duration {
        match self.average_us.load(Ordering::Relaxed) {
            0 => INITIAL_HOLD_ESTIMATE,
            average => Duration::from_micros(average),
        }
    }
}

/// The smaller of the remaining lease of the holder and the usual hold time for each request ahead,
/// at most five seconds. An expired lease is ignored: its holder is overdue. Of a lease that is not
/// longer than the lock-delay only the block of the key is left: its end is known.
///
/// `jitter` is in 0..1 and varies the result by a fifth in both directions, so that clients that
/// were rejected together do not retry together. A known end is only made later.
pub(crate) fn retry_after(lease_left: Duration, hold_estimate: Duration, ahead: usize, jitter: f64) -> Duration {
    if !lease_left.is_zero() && lease_left <= LOCK_DELAY {
        return lease_left.mul_f64(1.0 + 0.2 * jitter).max(RETRY_AFTER_FLOOR);
    }
    let ahead = u32::try_from(ahead).unwrap_or(u32::MAX);
    let lease_left = if lease_left.is_zero() { RETRY_AFTER_MAX } else { lease_left };
    let estimate = lease_left.min(hold_estimate.saturating_mul(ahead)).min(RETRY_AFTER_MAX);
    estimate.mul_f64(0.8 + 0.4 * jitter).clamp(RETRY_AFTER_FLOOR, RETRY_AFTER_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn retry_after_is_the_estimate_per_waiter_up_to_the_lease() {
        assert_eq!(retry_after(ms(30_000), ms(40), 1, 0.5), ms(40));
        assert_eq!(retry_after(ms(30_000), ms(40), 10, 0.5), ms(400));
        assert_eq!(retry_after(ms(2_000), ms(400), 10, 0.5), ms(2_000), "the lease ends sooner");
        assert_eq!(retry_after(ms(1_000), ms(40), 1, 0.0), ms(1_000), "blocked until then");
        assert_eq!(retry_after(ms(1_000), ms(40), 1, 1.0), ms(1_200), "and spread");
        assert_eq!(retry_after(ms(30_000), ms(40), usize::MAX, 0.5), RETRY_AFTER_MAX);
        assert_eq!(
            retry_after(ms(30_000), Duration::MAX, 2, 0.99),
            RETRY_AFTER_MAX,
            "the cap holds for the jitter, too"
        );
        assert_eq!(retry_after(ms(0), ms(40), 1, 0.5), ms(40), "a holder past its lease is overdue");
        assert_eq!(retry_after(ms(30_000), Duration::from_micros(1), 1, 0.5), RETRY_AFTER_FLOOR, "never at once");
    }

    #[test]
    fn retry_after_is_spread() {
        assert_eq!(retry_after(ms(30_000), ms(1000), 1, 0.0), ms(800));
        assert_eq!(retry_after(ms(30_000), ms(1000), 1, 1.0), ms(1200));
    }

    #[test]
    fn hold_estimate_follows_measured_holds() {
        let usual = HoldEstimate::default();
        assert_eq!(usual.get(), INITIAL_HOLD_ESTIMATE, "nothing was measured yet");
        usual.record(ms(40));
        assert_eq!(usual.get(), ms(40));
        for _ in 0..100 {
            usual.record(ms(400));
        }
        assert!(usual.get() > ms(390) && usual.get() <= ms(400), "{:?}", usual.get());
        usual.record(Duration::MAX);
        usual.record(Duration::MAX);
        assert!(usual.get() > ms(400), "no overflow");
    }
}
