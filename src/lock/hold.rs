//! What is known of one grant while its section runs.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    task::Poll,
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, Sleep, sleep_until},
};

use crate::{
    defaults::{LEASE, RENEWAL_RETRIES_PER_LEASE, RENEWALS_PER_LEASE},
    key::LockKey,
    lease::{FencingToken, OwnerId, safe_part},
};

/// One grant: shared by the guard, its views and the watchdog.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) key: LockKey,
    pub(super) owner: OwnerId,
    pub(super) token: FencingToken,
    /// What the two moments below count from.
    granted: Instant,
    /// I4: nothing but the store's word moves it on. Nanoseconds; zero once it is over, for ever (I5).
    deadline: AtomicU64,
    /// When the watchdog asks the store for more. Nanoseconds.
    renew_at: AtomicU64,
    warned: AtomicBool,
    over: Notify,
}

/// What a hold needs at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// Nothing before this moment.
    Rest(Instant),
    /// To be renewed; and to be looked at again at this moment, if no answer has come.
    Renewal(Instant),
    /// Nothing more: it is over.
    Nothing,
}

impl Hold {
    /// Granted by an answer to what was asked at this moment (I3).
    pub(super) fn new(key: LockKey, owner: OwnerId, token: FencingToken, asked: Instant) -> Self {
        Self {
            key,
            owner,
            token,
            granted: asked,
            deadline: AtomicU64::new(nanos(safe_part(LEASE))),
            renew_at: AtomicU64::new(nanos(LEASE / RENEWALS_PER_LEASE)),
            warned: AtomicBool::new(false),
            over: Notify::new(),
        }
    }

    /// I4: whether it can be claimed at this moment that the store keeps it for us.
    pub(super) fn remaining(&self, now: Instant) -> Duration {
        loop {
            let deadline = self.deadline.load(Ordering::Acquire);
            let left = deadline.saturating_sub(self.since(now));
            if left > 0 || deadline == 0 {
                return Duration::from_nanos(left);
            }
            if self.ends_at(deadline) {
                tell(self, "its lease is over, and nobody has renewed it");
                return Duration::ZERO;
            }
            // A renewal came in between: what is said of it is said of what stands now (I5).
        }
    }

    /// The store has renewed it, asked at this moment. Too late is too late: what is over stays so.
    pub(super) fn extend(&self, asked: Instant, now: Instant) {
        let deadline = self.since(asked).saturating_add(nanos(safe_part(LEASE)));
        let now = self.since(now);
        let extended = self
            .deadline
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| (now < old).then_some(old.max(deadline)));
        if extended.is_ok() {
            self.renew_at.store(self.since(asked).saturating_add(nanos(LEASE / RENEWALS_PER_LEASE)), Ordering::Relaxed);
            self.warned.store(false, Ordering::Relaxed);
        }
    }

    /// Its section has ended.
    pub(super) fn end(&self) {
        self.deadline.store(0, Ordering::Release);
        self.over.notify_waiters();
    }

    /// The store says that it is not ours.
    pub(super) fn lose(&self) {
        if self.ends_at(self.deadline.load(Ordering::Acquire)) {
            tell(self, "the store has given it to somebody else, or has forgotten it");
        }
    }

    /// Whether it was this that ended it: nobody has given it back, and no renewal has come in the meantime.
    fn ends_at(&self, deadline: u64) -> bool {
        let ended =
            deadline != 0 && self.deadline.compare_exchange(deadline, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if ended {
            self.over.notify_waiters();
        }
        ended
    }

    /// Completes when it is over: by a timer of its own, because the watchdog may run on a runtime that nobody drives (I5).
    pub(super) async fn ended(&self) {
        let mut over = pin!(self.over.notified());
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|cx| {
            loop {
                // The clock is asked at each poll: whoever polls this before something else never polls that too late (I6).
                // And once more behind the notification, which counts from its first poll on.
                if self.remaining(Instant::now()).is_zero() || over.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(());
                }
                let now = Instant::now();
                let left = self.remaining(now);
                if left.is_zero() {
                    return Poll::Ready(());
                }
                let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(now + left)));
                if timer.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                // It was renewed since the timer was set.
                timer.as_mut().reset(now + left);
            }
        })
        .await;
    }

    /// What the watchdog has to do for it now. An answer that does not come is asked for again soon.
    pub(super) fn need(&self, now: Instant) -> Need {
        let left = self.remaining(now);
        if left.is_zero() {
            return Need::Nothing;
        }
        let renew_at = self.granted + Duration::from_nanos(self.renew_at.load(Ordering::Relaxed));
        if now < renew_at {
            return Need::Rest(renew_at.min(now + left));
        }
        let again = LEASE / RENEWAL_RETRIES_PER_LEASE;
        self.renew_at.store(self.since(now).saturating_add(nanos(again)), Ordering::Relaxed);
        Need::Renewal(now + again.min(left))
    }

    /// Tells that its renewal is late: once, until it has come.
    pub(super) fn tell_if_late(&self, now: Instant) {
        if self.is_late(now) {
            tell(self, "less than a third of its lease is left, and the store does not answer");
        }
    }

    fn is_late(&self, now: Instant) -> bool {
        let left = self.remaining(now);
        // Of what is over, nothing is left to be late.
        !left.is_zero() && left < LEASE / RENEWALS_PER_LEASE && !self.warned.swap(true, Ordering::Relaxed)
    }

    fn since(&self, moment: Instant) -> u64 {
        nanos(moment.saturating_duration_since(self.granted))
    }
}

/// To whoever operates the service; without a key, which may be redacted.
#[cfg(feature = "tracing")]
fn tell(hold: &Hold, what: &'static str) {
    tracing::warn!(target: "tower_lock", fence = hold.token.as_u64(), "a lock is lost or about to be: {what}");
}

#[cfg(not(feature = "tracing"))]
fn tell(_: &Hold, _: &'static str) {}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::OwnerIds;

    fn hold(asked: Instant) -> Hold {
        let token = FencingToken::of_grant(1).expect("small");
        Hold::new(LockKey::from(("n", 1)), OwnerIds::new(0).next(), token, asked)
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn it_is_renewed_every_third_of_its_lease_and_asked_again_soon_while_no_answer_comes() {
        let asked = Instant::now();
        let hold = hold(asked);
        assert_eq!(hold.need(asked), Need::Rest(asked + s(10)));
        assert_eq!(hold.need(asked + s(10)), Need::Renewal(asked + s(11)));
        assert_eq!(hold.need(asked + s(10)), Need::Rest(asked + s(11)), "asked; not twice");
        assert_eq!(hold.need(asked + s(11)), Need::Renewal(asked + s(12)), "no answer came");
        hold.extend(asked + s(11), asked + s(12));
        assert_eq!(hold.need(asked + s(12)), Need::Rest(asked + s(21)), "a third after it was asked for");
        assert_eq!(hold.remaining(asked + s(12)), s(11) + safe_part(LEASE) - s(12));
    }

    /// I5
    #[test]
    fn it_is_looked_at_again_at_its_deadline_whatever_was_asked() {
        let asked = Instant::now();
        let (hold, deadline) = (hold(asked), asked + safe_part(LEASE));
        assert_eq!(hold.need(asked + s(29)), Need::Renewal(deadline), "sooner than the next question");
        assert_eq!(hold.need(asked + s(29)), Need::Rest(deadline));
        assert_eq!(hold.need(deadline), Need::Nothing);
    }

    /// I5
    #[test]
    fn what_is_over_is_never_held_again() {
        let asked = Instant::now();
        for given_back in [false, true] {
            let hold = hold(asked);
            let late = asked + s(30);
            if given_back {
                hold.end();
            } else {
                assert_eq!(hold.need(late), Need::Nothing, "past its deadline");
            }
            hold.extend(asked + s(29), late);
            hold.extend(late, late);
            assert_eq!(hold.remaining(late), Duration::ZERO);
            assert_eq!(hold.need(asked), Need::Nothing, "not even for a clock that steps back");
        }
    }

    /// Nobody has looked since: the answer that comes after the deadline comes too late all the same.
    #[test]
    fn a_renewal_that_is_answered_after_the_deadline_is_lost() {
        let asked = Instant::now();
        let hold = hold(asked);
        hold.extend(asked + s(29), asked + s(30));
        assert_eq!(hold.remaining(asked + s(30)), Duration::ZERO);
    }

    #[test]
    fn an_older_answer_takes_nothing_back() {
        let asked = Instant::now();
        let hold = hold(asked);
        hold.extend(asked + s(12), asked + s(13));
        let left = hold.remaining(asked + s(14));
        hold.extend(asked + s(11), asked + s(14));
        assert_eq!(hold.remaining(asked + s(14)), left);
    }

    #[test]
    fn a_late_renewal_is_told_of_once_until_it_has_come() {
        let asked = Instant::now();
        let hold = hold(asked);
        assert!(!hold.is_late(asked + s(19)));
        assert!(hold.is_late(asked + s(20)));
        assert!(!hold.is_late(asked + s(21)));
        hold.extend(asked + s(21), asked + s(22));
        assert!(!hold.is_late(asked + s(23)) && hold.is_late(asked + s(42)));
        hold.extend(asked + s(42), asked + s(42));
        hold.end();
        assert!(!hold.is_late(asked + s(70)), "what is given back is not late");
    }

    /// I5: the answer comes in the very moment in which somebody finds it over. It is one or the other, for everybody.
    #[test]
    fn nobody_is_told_that_it_is_over_before_it_is_held_again() {
        let asked = Instant::now();
        let deadline = asked + safe_part(LEASE);
        let holds: Vec<_> = (0..20_000).map(|_| hold(asked)).collect();
        // Both go for the same one at the same moment.
        let (at, go) = (AtomicU64::new(0), AtomicU64::new(0));
        /// So that a failure is one, and the other one does not wait for ever.
        struct GoOn<'a>(&'a AtomicU64);
        impl Drop for GoOn<'_> {
            fn drop(&mut self) {
                self.0.store(u64::MAX, Ordering::Release);
            }
        }
        std::thread::scope(|scope| {
            let _go_on = GoOn(&go);
            scope.spawn(|| {
                for (n, hold) in (1..).zip(&holds) {
                    at.store(n, Ordering::Release);
                    let mut spins = 0;
                    while go.load(Ordering::Acquire) < n {
                        spins += 1;
                        // Close at first; and, if the other one does not run, out of its way.
                        if spins < 1_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
                    }
                    hold.extend(asked + s(20), deadline - Duration::from_nanos(1));
                }
            });
            for (n, hold) in (1..).zip(&holds) {
                while at.load(Ordering::Acquire) < n {
                    std::thread::yield_now();
                }
                go.store(n, Ordering::Release);
                // The other one hears of it a little later: somewhere in here they meet.
                (0..n % 256).for_each(|_| std::hint::spin_loop());
                let first = hold.remaining(deadline);
                let later = hold.remaining(deadline);
                assert!(!first.is_zero() || later.is_zero(), "over, and held again");
            }
        });
    }
}
