//! What time it is at the server, as far as it can be told from here. Pure.

use std::time::Duration;

use crate::clock::Moment;

/// How far the server's clock is ahead of ours: a lower estimate, so that what is void by its own clock is void by ours, too.
///
/// An answer that says `now` was made before it came: the server is ahead by at least the difference. The largest of those
/// differences is the closest. It is believed for a while only, because a clock can be set back.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerClock {
    /// In microseconds.
    ahead: Option<i64>,
    since: Moment,
}

impl ServerClock {
    const BELIEVED_FOR: Duration = Duration::from_secs(10);

    /// The server has said what time it is; its answer has just come.
    pub fn said(&mut self, server_us: i64, now: Moment) {
        let ahead = server_us.saturating_sub(micros(now));
        if self.ahead.is_none_or(|best| ahead >= best) || now.since(self.since) > Self::BELIEVED_FOR {
            *self = Self { ahead: Some(ahead), since: now };
        }
    }

    /// What the server's clock says at this moment of ours, at the most. `None`: it never said a word.
    pub fn at(&self, moment: Moment) -> Option<i64> {
        Some(micros(moment).saturating_add(self.ahead?))
    }
}

fn micros(moment: Moment) -> i64 {
    i64::try_from(moment.as_nanos() / 1_000).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn the_server_is_never_thought_to_be_further_than_it_is() {
        let mut clock = ServerClock::default();
        assert_eq!(clock.at(at(1)), None);
        // It is 1 000 s ahead; answers take 300, 5 and 400 ms to come.
        for (made, came) in [(0, 300), (1_000, 1_005), (2_000, 2_400)] {
            clock.said(1_000_000_000 + made * 1_000, at(u64::try_from(came).expect("positive")));
            let thought = clock.at(at(3_000)).expect("it has said so");
            assert!(thought <= 1_000_000_000 + 3_000_000, "{thought}");
        }
        assert_eq!(clock.at(at(3_000)), Some(1_000_000_000 + 3_000_000 - 5_000), "the quickest answer is the best");
    }

    #[test]
    fn a_clock_that_was_set_is_followed() {
        let mut clock = ServerClock::default();
        clock.said(60_000_000, at(0));
        clock.said(65_000_000, at(1_000));
        assert_eq!(clock.at(at(1_000)), Some(65_000_000), "forward: at once");
        clock.said(10_000_000, at(2_000));
        assert_eq!(clock.at(at(2_000)), Some(66_000_000), "back: not yet, it may have been slow");
        clock.said(20_000_000, at(12_000));
        assert_eq!(clock.at(at(12_000)), Some(20_000_000));
    }
}
