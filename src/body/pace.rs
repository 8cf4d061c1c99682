//! How long a peer may keep us waiting: for the next bytes of a request, or for room in its connection for those of an answer.

use std::{error::Error, fmt, time::Duration};

use tokio::time::Instant;

use crate::policy::LockPolicy;

/// Counts the time that the peer makes us wait, and what it moves meanwhile. Pure: time is an argument.
///
/// Our own time counts for nothing: a producer that has nothing to say, a handler that does something else. The rate is taken in windows of as much
/// *waiting* as the idle limit, each by itself: what the buffers on the way swallowed at first gives no credit for later.
#[derive(Debug)]
pub(crate) struct Pace {
    idle: Duration,
    /// In each window.
    least: u64,
    /// It is the peer's turn since then.
    since: Option<Instant>,
    /// How long we have waited since it last moved.
    quiet: Duration,
    /// How long we have waited in this window.
    waited: Duration,
    /// What it moved in this window.
    moved: u64,
    /// When this window began.
    began: Option<Instant>,
    /// It is not forgiven.
    verdict: Option<TooSlow>,
}

/// Why nobody waits for the peer any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TooSlow {
    /// Nothing moved for so long.
    Idle,
    /// Too little moved in so long.
    BelowRate,
}

/// A window that takes so many times as long as its waiting says nothing of the peer: it was mostly our turn.
const OURS: u32 = 4;

impl Pace {
    pub(crate) fn new(idle: Duration, bytes_per_second: u64) -> Self {
        let least = u128::from(bytes_per_second).saturating_mul(idle.as_millis()) / 1000;
        Self {
            idle,
            least: u64::try_from(least).unwrap_or(u64::MAX),
            since: None,
            quiet: Duration::ZERO,
            waited: Duration::ZERO,
            moved: 0,
            began: None,
            verdict: None,
        }
    }

    pub(crate) fn of(policy: &LockPolicy) -> Self {
        Self::new(policy.longest_idle(), policy.least_rate())
    }

    /// It is the peer's turn, from now on if it was not already.
    pub(crate) fn waits(&mut self, now: Instant) {
        self.since.get_or_insert(now);
        self.began.get_or_insert(now);
    }

    /// The peer has moved so many bytes, and it is our turn.
    pub(crate) fn moved(&mut self, now: Instant, bytes: u64) {
        self.fold(now);
        self.since = None;
        if bytes > 0 {
            self.quiet = Duration::ZERO;
        }
        self.moved = self.moved.saturating_add(bytes);
        self.judge(now);
    }

    /// Whether the peer was too slow by now, and how.
    pub(crate) fn verdict(&mut self, now: Instant) -> Option<TooSlow> {
        if self.since.is_some() {
            self.fold(now);
            self.since = Some(now);
            self.judge(now);
        }
        self.verdict
    }

    /// When to look again, if nothing moves until then. `None`: it is not the peer's turn, or later than any clock.
    pub(crate) fn look_at(&self) -> Option<Instant> {
        let left = (self.idle.saturating_sub(self.quiet)).min(self.idle.saturating_sub(self.waited));
        self.since?.checked_add(left)
    }

    /// Nothing counts by now: it was not our matter.
    pub(crate) fn forget(&mut self) {
        *self = Self { since: None, quiet: Duration::ZERO, waited: Duration::ZERO, moved: 0, began: None, ..*self };
    }

    fn fold(&mut self, now: Instant) {
        let Some(since) = self.since else { return };
        let waited = now.saturating_duration_since(since);
        self.quiet = self.quiet.saturating_add(waited);
        self.waited = self.waited.saturating_add(waited);
    }

    fn judge(&mut self, now: Instant) {
        if self.verdict.is_some() {
            return;
        }
        let lasts = self.began.map_or(Duration::ZERO, |began| now.saturating_duration_since(began));
        if self.quiet >= self.idle {
            self.verdict = Some(TooSlow::Idle);
        } else if self.waited >= self.idle {
            if self.moved < self.least && lasts <= self.idle.saturating_mul(OURS) {
                self.verdict = Some(TooSlow::BelowRate);
            }
            (self.waited, self.moved, self.began) = (Duration::ZERO, 0, Some(now));
        }
    }
}

impl fmt::Display for TooSlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "no byte moved for longer than `body_idle_timeout`",
            Self::BelowRate => "fewer bytes moved than `min_body_rate` asks for",
        })
    }
}

impl Error for TooSlow {}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    /// So many bytes after so much waiting, over and over; when it was too slow, and how.
    fn moves(pace: &mut Pace, bytes: u64, each: Duration, of_ours: Duration) -> Option<(Duration, TooSlow)> {
        let start = Instant::now();
        let mut now = start;
        for _ in 0..1000 {
            pace.waits(now);
            let end = now + each;
            while let Some(at) = pace.look_at().filter(|at| *at < end) {
                if let Some(why) = pace.verdict(at) {
                    return Some((at - start, why));
                }
            }
            pace.moved(end, bytes);
            if let Some(why) = pace.verdict(end) {
                return Some((end - start, why));
            }
            now = end + of_ours;
        }
        None
    }

    #[test]
    fn idle_peer_is_too_slow_after_the_idle_timeout() {
        let start = Instant::now();
        let mut pace = Pace::new(10 * S, 0);
        pace.waits(start);
        assert_eq!(pace.look_at(), Some(start + 10 * S));
        assert_eq!(pace.verdict(start + 9 * S), None);
        assert_eq!(pace.look_at(), Some(start + 10 * S), "not put off by a look");
        pace.moved(start + 9 * S, 0);
        pace.waits(start + 9 * S);
        assert_eq!(pace.verdict(start + 10 * S), Some(TooSlow::Idle), "nothing is no byte");
        pace.moved(start + 10 * S, 1 << 20);
        assert_eq!(pace.verdict(start + 11 * S), Some(TooSlow::Idle), "it is not forgiven");
    }

    /// 16 kB each 8 s: a sign of life, and no more.
    #[test]
    fn minimum_rate_applies_to_each_window() {
        assert_eq!(moves(&mut Pace::new(10 * S, 16 << 10), 16_000, 8 * S, S), Some((11 * S, TooSlow::BelowRate)));
        assert_eq!(moves(&mut Pace::new(10 * S, 0), 16_000, 8 * S, S), None, "none is asked for");
        assert_eq!(moves(&mut Pace::new(10 * S, 16 << 10), 16 << 10, S, Duration::ZERO), None, "just as fast");
        let (after, why) = moves(&mut Pace::new(10 * S, 16 << 10), (16 << 10) - 1, S, S).expect("too slow");
        assert_eq!((after, why), (19 * S, TooSlow::BelowRate), "ten of them are of the peer");
    }

    #[test]
    fn bytes_of_one_window_give_no_credit_in_the_next() {
        let mut pace = Pace::new(10 * S, 16 << 10);
        let start = Instant::now();
        pace.waits(start);
        pace.moved(start + S, 100 << 20);
        assert_eq!(moves(&mut pace, 1, S, Duration::ZERO), Some((19 * S, TooSlow::BelowRate)));
    }

    /// An event of twenty bytes each second, and each time a moment until the connection takes it.
    #[test]
    fn sparse_producer_is_not_a_slow_peer() {
        let moment = Duration::from_millis(200);
        assert_eq!(moves(&mut Pace::new(10 * S, 16 << 10), 20, moment, S), None);
        assert_eq!(moves(&mut Pace::new(S, u64::MAX), 20, moment, 3600 * S), None);
    }

    #[test]
    fn reset_progress_does_not_count() {
        let start = Instant::now();
        let mut pace = Pace::new(10 * S, 0);
        pace.waits(start);
        pace.forget();
        assert_eq!((pace.look_at(), pace.verdict(start + 60 * S)), (None, None));
        pace.waits(start + 60 * S);
        assert_eq!(pace.look_at(), Some(start + 70 * S));
    }

    #[test]
    fn any_duration_is_accepted() {
        let start = Instant::now();
        let mut pace = Pace::new(Duration::MAX, u64::MAX);
        pace.waits(start);
        assert_eq!((pace.look_at(), pace.verdict(start + 1000 * S)), (None, None));
    }
}
