//! The idle timeout and the minimum rate of a peer: a client that sends a request body, or reads a
//! response.

use std::time::Duration;

use tokio::time::Instant;

use crate::policy::LockPolicy;

/// Measures how long the peer is waited for, and how many bytes it moves. Pure: time is an
/// argument.
///
/// The time in which the peer is not waited for does not count: a producer that is idle, a handler
/// that does something else. The rate is measured in windows of as much *waiting* as the idle
/// timeout. Each window counts by itself: bytes that buffers accepted at first are no credit for
/// later windows.
#[derive(Debug)]
pub(crate) struct Pace {
    idle: Duration,
    /// In each window.
    min_bytes: u64,
    /// The peer has been waited for since this instant.
    waiting_since: Option<Instant>,
    /// The waiting since the last byte.
    idle_for: Duration,
    /// The waiting in this window.
    waited: Duration,
    /// The bytes in this window.
    moved: u64,
    /// The start of this window.
    window_start: Option<Instant>,
    /// Final once it is set.
    verdict: Option<TooSlow>,
}

/// Why the peer is not waited for any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TooSlow {
    /// No byte moved for the idle timeout.
    #[error("no byte was transferred for `body_idle_timeout`")]
    Idle,
    /// Too few bytes moved in a window.
    #[error("fewer bytes were transferred than `min_body_rate` requires")]
    BelowRate,
}

/// A window that lasts more than this many times its waiting is not judged: the peer was seldom
/// waited for.
const MAX_WINDOW_FACTOR: u32 = 4;

impl Pace {
    pub(crate) fn new(idle: Duration, bytes_per_second: u64) -> Self {
        let least = u128::from(bytes_per_second).saturating_mul(idle.as_millis()) / 1000;
        Self {
            idle,
            min_bytes: u64::try_from(least).unwrap_or(u64::MAX),
            waiting_since: None,
            idle_for: Duration::ZERO,
            waited: Duration::ZERO,
            moved: 0,
            window_start: None,
            verdict: None,
        }
    }

    pub(crate) fn from_policy(policy: &LockPolicy) -> Self {
        Self::new(policy.idle_timeout(), policy.min_rate())
    }

    /// The peer is waited for from now on, if it was not already.
    pub(crate) fn start_waiting(&mut self, now: Instant) {
        self.waiting_since.get_or_insert(now);
        self.window_start.get_or_insert(now);
    }

    /// The peer has moved bytes and is not waited for any more.
    pub(crate) fn record(&mut self, now: Instant, bytes: u64) {
        self.add_waiting(now);
        self.waiting_since = None;
        if bytes > 0 {
            self.idle_for = Duration::ZERO;
        }
        self.moved = self.moved.saturating_add(bytes);
        self.evaluate(now);
    }

    /// Whether the peer has been too slow, and how.
    pub(crate) fn check(&mut self, now: Instant) -> Option<TooSlow> {
        if self.waiting_since.is_some() {
            self.add_waiting(now);
            self.waiting_since = Some(now);
            self.evaluate(now);
        }
        self.verdict
    }

    /// The time of the next check if no byte moves. `None`: the peer is not waited for, or the time
    /// is later than any instant.
    pub(crate) fn next_check(&self) -> Option<Instant> {
        let left = (self.idle.saturating_sub(self.idle_for)).min(self.idle.saturating_sub(self.waited));
        self.waiting_since?.checked_add(left)
    }

    /// Discards all measurements.
    pub(crate) fn reset(&mut self) {
        *self = Self {
            waiting_since: None,
            idle_for: Duration::ZERO,
            waited: Duration::ZERO,
            moved: 0,
            window_start: None,
            ..*self
        };
    }

    fn add_waiting(&mut self, now: Instant) {
        let Some(since) = self.waiting_since else { return };
        let waited = now.saturating_duration_since(since);
        self.idle_for = self.idle_for.saturating_add(waited);
        self.waited = self.waited.saturating_add(waited);
    }

    fn evaluate(&mut self, now: Instant) {
        if self.verdict.is_some() {
            return;
        }
        let lasts = self.window_start.map_or(Duration::ZERO, |began| now.saturating_duration_since(began));
        if self.idle_for >= self.idle {
            self.verdict = Some(TooSlow::Idle);
        } else if self.waited >= self.idle {
            if self.moved < self.min_bytes && lasts <= self.idle.saturating_mul(MAX_WINDOW_FACTOR) {
                self.verdict = Some(TooSlow::BelowRate);
            }
            (self.waited, self.moved, self.window_start) = (Duration::ZERO, 0, Some(now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    /// Repeatedly moves so many bytes after so much waiting. Returns when the peer was too slow,
    /// and how.
    fn moves(pace: &mut Pace, bytes: u64, each: Duration, of_ours: Duration) -> Option<(Duration, TooSlow)> {
        let start = Instant::now();
        let mut now = start;
        for _ in 0..1000 {
            pace.start_waiting(now);
            let end = now + each;
            while let Some(at) = pace.next_check().filter(|at| *at < end) {
                if let Some(why) = pace.check(at) {
                    return Some((at - start, why));
                }
            }
            pace.record(end, bytes);
            if let Some(why) = pace.check(end) {
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
        pace.start_waiting(start);
        assert_eq!(pace.next_check(), Some(start + 10 * S));
        assert_eq!(pace.check(start + 9 * S), None);
        assert_eq!(pace.next_check(), Some(start + 10 * S), "not delayed by a check");
        pace.record(start + 9 * S, 0);
        pace.start_waiting(start + 9 * S);
        assert_eq!(pace.check(start + 10 * S), Some(TooSlow::Idle), "nothing is no byte");
        pace.record(start + 10 * S, 1 << 20);
        assert_eq!(pace.check(start + 11 * S), Some(TooSlow::Idle), "it is not forgiven");
    }

    /// 16 kB every 8 s.
    #[test]
    fn minimum_rate_applies_to_each_window() {
        assert_eq!(moves(&mut Pace::new(10 * S, 16 << 10), 16_000, 8 * S, S), Some((11 * S, TooSlow::BelowRate)));
        assert_eq!(moves(&mut Pace::new(10 * S, 0), 16_000, 8 * S, S), None, "no rate is required");
        assert_eq!(moves(&mut Pace::new(10 * S, 16 << 10), 16 << 10, S, Duration::ZERO), None, "just as fast");
        let (after, why) = moves(&mut Pace::new(10 * S, 16 << 10), (16 << 10) - 1, S, S).expect("too slow");
        assert_eq!((after, why), (19 * S, TooSlow::BelowRate), "ten of them are of the peer");
    }

    #[test]
    fn bytes_of_one_window_give_no_credit_in_the_next() {
        let mut pace = Pace::new(10 * S, 16 << 10);
        let start = Instant::now();
        pace.start_waiting(start);
        pace.record(start + S, 100 << 20);
        assert_eq!(moves(&mut pace, 1, S, Duration::ZERO), Some((19 * S, TooSlow::BelowRate)));
    }

    /// An event of twenty bytes each second, which the connection accepts after 200 ms.
    #[test]
    fn sparse_producer_is_not_a_slow_peer() {
        let delay = Duration::from_millis(200);
        assert_eq!(moves(&mut Pace::new(10 * S, 16 << 10), 20, delay, S), None);
        assert_eq!(moves(&mut Pace::new(S, u64::MAX), 20, delay, 3600 * S), None);
    }

    #[test]
    fn reset_progress_does_not_count() {
        let start = Instant::now();
        let mut pace = Pace::new(10 * S, 0);
        pace.start_waiting(start);
        pace.reset();
        assert_eq!((pace.next_check(), pace.check(start + 60 * S)), (None, None));
        pace.start_waiting(start + 60 * S);
        assert_eq!(pace.next_check(), Some(start + 70 * S));
    }

    #[test]
    fn any_duration_is_accepted() {
        let start = Instant::now();
        let mut pace = Pace::new(Duration::MAX, u64::MAX);
        pace.start_waiting(start);
        assert_eq!((pace.next_check(), pace.check(start + 1000 * S)), (None, None));
    }
}
