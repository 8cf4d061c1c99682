//! A lower estimate of the server's clock. Pure.

use std::time::Duration;

use crate::{
    clock::{BootInstant, usable_part},
    limits::DRIFT_DIVISOR,
};

/// A lower estimate of the offset between the server's clock and the local one. A call that has
/// expired by the server's clock has then expired by the local one, too.
///
/// The server reads the time in a reply before the reply arrives, so its offset is at least the
/// difference. The largest difference is the best estimate. The estimate is reduced with its age,
/// because clocks run at different rates, and is dropped after a while, because a clock can be set
/// back.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerClock {
    /// In microseconds.
    offset_us: Option<i64>,
    observed_at: BootInstant,
}

impl ServerClock {
    const MAX_AGE: Duration = Duration::from_secs(10);

    /// Records the server's time in a reply that has just arrived.
    pub fn observe(&mut self, server_us: i64, now: BootInstant) {
        if now.saturating_duration_since(self.observed_at) > Self::MAX_AGE
            || self.estimate(now).is_none_or(|estimate| server_us >= estimate)
        {
            *self = Self { offset_us: Some(server_us.saturating_sub(micros(now))), observed_at: now };
        }
    }

    /// The server's time at which a call expires. `None`: no reply has arrived yet.
    #[must_use]
    pub fn expires_at(&self, called: BootInstant, valid_for: Duration) -> Option<i64> {
        let valid_for = i64::try_from(usable_part(valid_for).as_micros()).unwrap_or(i64::MAX);
        Some(self.estimate(called)?.saturating_add(valid_for))
    }

    /// The least time of the server's clock at this local instant.
    fn estimate(&self, instant: BootInstant) -> Option<i64> {
        let aged = i64::try_from(instant.saturating_duration_since(self.observed_at).as_micros()).unwrap_or(i64::MAX)
            / i64::from(DRIFT_DIVISOR);
        Some(micros(instant).saturating_add(self.offset_us?).saturating_sub(aged))
    }
}

fn micros(instant: BootInstant) -> i64 {
    i64::try_from(instant.as_nanos() / 1_000).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> BootInstant {
        BootInstant::from_nanos(ms * 1_000_000)
    }

    const LATER: Duration = Duration::from_millis(500);

    #[test]
    fn server_clock_is_never_overestimated() {
        let mut clock = ServerClock::default();
        assert_eq!(clock.expires_at(at(1), LATER), None);
        // The server is 1,000 s ahead; replies take 300, 5 and 400 ms.
        for (sent_at, received_at) in [(0_i64, 300), (1_000, 1_005), (2_000, 2_400)] {
            clock.observe(1_000_000_000 + sent_at * 1_000, at(received_at));
            let expires_at = clock.expires_at(at(2_500), LATER).expect("observed");
            assert!(expires_at <= 1_000_000_000 + 3_000_000, "{expires_at}");
        }
        // The fastest reply is the best: 5 ms of delay, 1.5 s old, and half a second with its
        // drift.
        assert_eq!(clock.expires_at(at(2_505), LATER), Some(1_000_000_000 + 2_500_000 - 15_000 + 493_000));
    }

    /// A server whose clock is slow by 1 %: without the reduction, an old estimate would be too
    /// large.
    #[test]
    fn expiry_by_the_server_clock_implies_local_expiry() {
        let server = |ms: i64| 5_000_000 + ms * 990;
        for observed in [0, 100, 9_000] {
            let mut clock = ServerClock::default();
            clock.observe(server(observed), at(observed.unsigned_abs()));
            for called in (observed..observed + 10_000).step_by(100) {
                let expires_at = clock.expires_at(at(called.unsigned_abs()), LATER).expect("observed");
                assert!(expires_at <= server(called + 500), "observed at {observed}, called at {called}: {expires_at}");
            }
        }
    }

    #[test]
    fn clock_step_of_the_server_is_followed() {
        let mut clock = ServerClock::default();
        clock.observe(60_000_000, at(0));
        clock.observe(65_000_000, at(1_000));
        assert_eq!(clock.estimate(at(1_000)), Some(65_000_000), "forward: at once");
        clock.observe(10_000_000, at(2_000));
        assert_eq!(clock.estimate(at(2_000)), Some(65_990_000), "back: not yet, it may have been slow");
        clock.observe(20_000_000, at(12_000));
        assert_eq!(clock.estimate(at(12_000)), Some(20_000_000));
    }
}
