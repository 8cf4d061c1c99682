//! What time it is at the server, as far as it can be told from here. Pure.

use std::time::Duration;

use crate::{clock::BootInstant, limits::DRIFT_DIVISOR, proto::lease::usable_part};

/// How far the server's clock is ahead of ours: a lower estimate, so that what is void by its clock is void by ours, too.
///
/// An answer that says `now` was made before it came: the server is ahead by at least the difference. The largest of those
/// differences is the closest. With its age it is worth less, because clocks run at different rates; and it is believed for a while only,
/// because a clock can be set back.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerClock {
    /// In microseconds.
    offset_us: Option<i64>,
    observed_at: BootInstant,
}

impl ServerClock {
    const MAX_AGE: Duration = Duration::from_secs(10);

    /// The server has said what time it is; its answer has just come.
    pub fn observe(&mut self, server_us: i64, now: BootInstant) {
        if now.saturating_duration_since(self.observed_at) > Self::MAX_AGE
            || self.estimate(now).is_none_or(|thought| server_us >= thought)
        {
            *self = Self { offset_us: Some(server_us.saturating_sub(micros(now))), observed_at: now };
        }
    }

    /// By which time of the server's clock a call is void that was made at this moment of ours, and is void so much later: when it is by the
    /// server's clock, it is by ours. `None`: the server never said a word.
    pub fn expires_at(&self, called: BootInstant, valid_for: Duration) -> Option<i64> {
        let valid_for = i64::try_from(usable_part(valid_for).as_micros()).unwrap_or(i64::MAX);
        Some(self.estimate(called)?.saturating_add(valid_for))
    }

    /// What the server's clock says at this moment of ours, at least.
    fn estimate(&self, moment: BootInstant) -> Option<i64> {
        let aged = i64::try_from(moment.saturating_duration_since(self.observed_at).as_micros()).unwrap_or(i64::MAX)
            / i64::from(DRIFT_DIVISOR);
        Some(micros(moment).saturating_add(self.offset_us?).saturating_sub(aged))
    }
}

fn micros(moment: BootInstant) -> i64 {
    i64::try_from(moment.as_nanos() / 1_000).unwrap_or(i64::MAX)
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
        // It is 1 000 s ahead; answers take 300, 5 and 400 ms to come.
        for (made, came) in [(0_i64, 300), (1_000, 1_005), (2_000, 2_400)] {
            clock.observe(1_000_000_000 + made * 1_000, at(came));
            let until = clock.expires_at(at(2_500), LATER).expect("it has said so");
            assert!(until <= 1_000_000_000 + 3_000_000, "{until}");
        }
        // The quickest answer was the best: 5 ms on its way, 1.5 s old, and half a second with its drift.
        assert_eq!(clock.expires_at(at(2_505), LATER), Some(1_000_000_000 + 2_500_000 - 15_000 + 493_000));
    }

    /// A server whose clock is slow by a hundredth: what was said long ago is too much by now.
    #[test]
    fn expiry_by_the_server_clock_implies_local_expiry() {
        let server = |ms: i64| 5_000_000 + ms * 990;
        for said in [0, 100, 9_000] {
            let mut clock = ServerClock::default();
            clock.observe(server(said), at(said.unsigned_abs()));
            for called in (said..said + 10_000).step_by(100) {
                let until = clock.expires_at(at(called.unsigned_abs()), LATER).expect("it has said so");
                assert!(until <= server(called + 500), "said at {said}, called at {called}: {until}");
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
