//! When a refused client may try again.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::limits::{INITIAL_HOLD_ESTIMATE, RETRY_AFTER_FLOOR, RETRY_AFTER_MAX};

/// How long a route usually holds its locks: a moving average over about the last eight.
///
/// A lease says little: it is 30 seconds long around a section of 40 milliseconds.
#[derive(Debug, Default)]
pub(crate) struct UsualHold {
    /// Microseconds; zero before the first one.
    average_us: AtomicU64,
}

impl UsualHold {
    pub(crate) fn add(&self, hold: Duration) {
        let hold = u64::try_from(hold.as_micros()).unwrap_or(u64::MAX).max(1);
        let average = self.average_us.load(Ordering::Relaxed);
        let average = if average == 0 { hold } else { average - average / 8 + hold / 8 };
        // Two at once may count as one: it is an estimate.
        self.average_us.store(average.max(1), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Duration {
        match self.average_us.load(Ordering::Relaxed) {
            0 => INITIAL_HOLD_ESTIMATE,
            average => Duration::from_micros(average),
        }
    }
}

/// The smaller of what is left of the holder's lease and the usual hold for each one ahead, at most five seconds. A lease that is
/// over says nothing: its holder is overdue.
///
/// `die` is in 0..1 and spreads it by a fifth to either side, so that those who were refused together do not come back together.
pub(crate) fn retry_after(lease_left: Duration, usual_hold: Duration, ahead: usize, die: f64) -> Duration {
    let ahead = u32::try_from(ahead).unwrap_or(u32::MAX);
    let lease_left = if lease_left.is_zero() { RETRY_AFTER_MAX } else { lease_left };
    let estimate = lease_left.min(usual_hold.saturating_mul(ahead)).min(RETRY_AFTER_MAX);
    estimate.mul_f64(0.8 + 0.4 * die).clamp(RETRY_AFTER_FLOOR, RETRY_AFTER_MAX)
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
        assert_eq!(retry_after(ms(100), ms(40), 10, 0.5), ms(100), "the lease ends sooner");
        assert_eq!(retry_after(ms(30_000), ms(40), usize::MAX, 0.5), RETRY_AFTER_MAX);
        assert_eq!(
            retry_after(ms(30_000), Duration::MAX, 2, 0.99),
            RETRY_AFTER_MAX,
            "the cap holds for the jitter, too"
        );
        assert_eq!(retry_after(ms(0), ms(40), 1, 0.5), ms(40), "a holder past its lease is overdue, not gone");
        assert_eq!(retry_after(ms(30_000), Duration::from_micros(1), 1, 0.5), RETRY_AFTER_FLOOR, "never at once");
    }

    #[test]
    fn retry_after_is_spread() {
        assert_eq!(retry_after(ms(30_000), ms(1000), 1, 0.0), ms(800));
        assert_eq!(retry_after(ms(30_000), ms(1000), 1, 1.0), ms(1200));
    }

    #[test]
    fn hold_estimate_follows_measured_holds() {
        let usual = UsualHold::default();
        assert_eq!(usual.get(), INITIAL_HOLD_ESTIMATE, "nothing was measured yet");
        usual.add(ms(40));
        assert_eq!(usual.get(), ms(40));
        for _ in 0..100 {
            usual.add(ms(400));
        }
        assert!(usual.get() > ms(390) && usual.get() <= ms(400), "{:?}", usual.get());
        usual.add(Duration::MAX);
        usual.add(Duration::MAX);
        assert!(usual.get() > ms(400), "no overflow");
    }
}
