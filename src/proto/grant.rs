//! What is known of one grant of the store: until when it can be counted on.

use std::{
    sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    time::Duration,
};

use super::{
    DriverTypes,
    deadline::{AtomicDeadline, Deadline},
    lease::usable_part,
};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::LockLost,
    fencing::FencingToken,
    limits::{
        RECHECK_INTERVAL, RENEWAL_BATCH_WINDOWS_PER_LEASE, RENEWAL_RETRIES_PER_LEASE, RENEWAL_RETRY_MIN,
        RENEWALS_PER_LEASE,
    },
    lock_key::LockKey,
};

/// One grant: shared by the conversation about its key, the sections that run under it, and the watchdog.
#[derive(Debug)]
pub struct Grant<D: DriverTypes> {
    /// What is locked.
    pub key: LockKey,
    /// Who has it.
    pub id: AcquisitionId,
    /// The token of the first section under the newest fence.
    token: AtomicU64,
    /// I4: nothing but the store's word moves it on. Nanoseconds; the [code](LockLost::code) of a reason once it is over, for ever (I5).
    deadline: AtomicDeadline,
    /// When the section that runs is over, whatever the store says; `FAR_FUTURE` if it has no such end.
    limit: AtomicU64,
    /// What the store is asked for: as much as its sections need. It only grows, because one id
    /// never counts on less than before.
    lease: AtomicU64,
    /// When to look whether the section that runs was taken by all callers it was sent to.
    delivery_check_at: AtomicU64,
    /// How long the store keeps the key beyond the lease.
    lock_delay: AtomicU64,
    /// When the watchdog asks the store for more.
    renew_at: AtomicU64,
    /// When the store was last asked because of a message.
    verified_at: AtomicU64,
    /// The next renewal is sent early because of a message.
    is_early: AtomicBool,
    /// A message says that it is over, and no answer since says that it is not.
    in_doubt: AtomicBool,
    /// Whether an answer to that is awaited: [`IDLE`](Self::IDLE), [`ASKING`](Self::ASKING) or [`AGAIN`](Self::AGAIN).
    renewal: AtomicU8,
    warned: AtomicBool,
    /// Of the driver.
    pub data: D::GrantData,
}

/// What a grant needs at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextCheck {
    /// Nothing before this moment.
    Sleep(BootInstant),
    /// To be renewed; and to be looked at again at this moment, if no answer has come.
    Renew(BootInstant),
    /// The section that runs has reached its limit, or it is time to look at its delivery.
    CheckSection,
    /// Nothing more: it is over.
    Ended,
}

impl<D: DriverTypes> Grant<D> {
    /// No renewal is under way.
    const IDLE: u8 = 0;
    /// One is.
    const IN_FLIGHT: u8 = 1;
    /// One is, and was sent before the newest doubt: its answer may be older.
    const REPEAT: u8 = 2;

    /// Granted by an answer to what was asked at this moment (I3).
    pub(super) fn new(
        key: LockKey,
        owner: AcquisitionId,
        token: FencingToken,
        lease: Duration,
        lock_delay: Duration,
        asked: BootInstant,
    ) -> Self {
        Self {
            lease: AtomicU64::new(nanos(lease)),
            key,
            id: owner,
            token: AtomicU64::new(token.as_u64()),
            deadline: AtomicDeadline::new(asked.saturating_add(usable_part(lease))),
            limit: AtomicU64::new(BootInstant::FAR_FUTURE.as_nanos()),
            delivery_check_at: AtomicU64::new(BootInstant::FAR_FUTURE.as_nanos()),
            lock_delay: AtomicU64::new(nanos(lock_delay)),
            renew_at: AtomicU64::new(asked.saturating_add(lease / RENEWALS_PER_LEASE).as_nanos()),
            verified_at: AtomicU64::new(0),
            is_early: AtomicBool::new(false),
            in_doubt: AtomicBool::new(false),
            renewal: AtomicU8::new(Self::IDLE),
            warned: AtomicBool::new(false),
            data: D::GrantData::default(),
        }
    }

    /// I4: for how long it can be claimed at this moment that the store keeps it for us. What is past its deadline is over, for
    /// everybody, from this question on.
    pub fn remaining(&self, now: BootInstant) -> Duration {
        loop {
            let Deadline::At(deadline) = self.deadline.get() else { return Duration::ZERO };
            let left = deadline.saturating_duration_since(now);
            if !left.is_zero() {
                return left;
            }
            self.deadline.end_if(deadline, LockLost::Expired);
            // Or a renewal came in between: what is said of it is said of what stands now (I5).
        }
    }

    /// The store has renewed it for this lease, asked at this moment. Too late is too late: what is
    /// over stays so.
    ///
    /// `lease` is the one of the call that was answered. A renewal that was sent before the lease
    /// grew got the shorter one: to count on the longer one would be to let two in.
    pub fn extend(&self, lease: Duration, asked: BootInstant, now: BootInstant) {
        if self.deadline.extend(asked.saturating_add(usable_part(lease)), now) {
            self.renew_at.store(asked.saturating_add(lease / RENEWALS_PER_LEASE).as_nanos(), Ordering::Relaxed);
            self.warned.store(false, Ordering::Relaxed);
            // An answer to a question that is older than the doubt says nothing about it.
            if self.renewal.load(Ordering::Acquire) != Self::REPEAT {
                self.in_doubt.store(false, Ordering::Release);
            }
        }
    }

    /// A section begins under it.
    pub(super) fn set_section_limit(&self, limit: BootInstant) {
        self.limit.store(limit.as_nanos(), Ordering::Relaxed);
        self.set_delivery_check(BootInstant::FAR_FUTURE);
    }

    /// When the delivery of the section that runs is looked at.
    pub(super) fn set_delivery_check(&self, at: BootInstant) {
        self.delivery_check_at.store(at.as_nanos(), Ordering::Relaxed);
    }

    /// The same, if it is not looked at sooner.
    pub(super) fn lower_delivery_check(&self, at: BootInstant) {
        self.delivery_check_at.fetch_min(at.as_nanos(), Ordering::Relaxed);
    }

    pub(super) fn lock_delay(&self) -> Duration {
        Duration::from_nanos(self.lock_delay.load(Ordering::Relaxed))
    }

    /// What the store is asked for.
    pub fn lease(&self) -> Duration {
        Duration::from_nanos(self.lease.load(Ordering::Relaxed))
    }

    /// What the store is asked for when it is renewed for this lease: it, and the lock-delay that
    /// only the store knows of (I10).
    pub fn store_lease(&self, lease: Duration) -> Duration {
        lease.saturating_add(self.lock_delay())
    }

    /// It is over, for this reason; if it is not yet.
    pub fn end(&self, why: LockLost) {
        self.deadline.end(why);
    }

    /// Why it is over; `None` while it is not.
    pub fn end_reason(&self) -> Option<LockLost> {
        self.deadline.end_reason()
    }

    /// Under which fence it is, or was.
    pub(crate) fn fence(&self) -> u64 {
        self.token.load(Ordering::Relaxed)
    }

    /// The store has given it a new fence and this lease, and was asked to keep the key for this
    /// long beyond it.
    pub(super) fn set_fence(&self, token: FencingToken, lease: Duration, lock_delay: Duration) {
        self.token.store(token.as_u64(), Ordering::Relaxed);
        self.lease.fetch_max(nanos(lease), Ordering::Relaxed);
        self.lock_delay.store(nanos(lock_delay), Ordering::Relaxed);
    }

    /// What the watchdog has to do for it now. An answer that does not come is asked for again soon.
    ///
    /// `soon`: what is due before this moment is done now, with what is due already.
    pub fn next_check(&self, now: BootInstant, soon: BootInstant) -> NextCheck {
        let left = self.remaining(now);
        if left.is_zero() {
            return NextCheck::Ended;
        }
        let [limit, delivery_at] = [&self.limit, &self.delivery_check_at]
            .map(|moment| BootInstant::from_nanos(moment.load(Ordering::Relaxed)));
        let limit = limit.min(delivery_at);
        if limit <= now {
            return NextCheck::CheckSection;
        }
        let end = now.saturating_add(left).min(limit);
        let renew_at = BootInstant::from_nanos(self.renew_at.load(Ordering::Relaxed));
        // A hurried one is not sent before its pause is over, though others are due already.
        let not_before = self.not_before();
        // A short lease waits for others for a short time: one that has just begun is not renewed.
        let soon = soon.min(now.saturating_add(self.lease() / RENEWAL_BATCH_WINDOWS_PER_LEASE));
        if soon < renew_at || now < not_before {
            return NextCheck::Sleep(renew_at.max(not_before).min(end));
        }
        self.renewal.store(Self::IN_FLIGHT, Ordering::Release);
        // Only a renewal that a message has caused delays the next one. After a periodic renewal
        // the section would run on, although its lock was revoked.
        if self.is_early.swap(false, Ordering::AcqRel) {
            self.verified_at.store(now.as_nanos(), Ordering::Relaxed);
        }
        let again = now.saturating_add((self.lease() / RENEWAL_RETRIES_PER_LEASE).max(RENEWAL_RETRY_MIN));
        self.renew_at.store(again.as_nanos(), Ordering::Relaxed);
        NextCheck::Renew(again.min(end))
    }

    /// A message says that it is over. Messages can be forged, so the store is asked (I7): at once, but once at a time, and after a pause.
    /// Whether the watchdog has to look at it earlier for that.
    pub fn verify(&self, now: BootInstant) -> bool {
        self.in_doubt.store(true, Ordering::Release);
        let again = |asking| (asking != Self::IDLE).then_some(Self::REPEAT);
        self.renewal.fetch_update(Ordering::AcqRel, Ordering::Acquire, again).is_err() && self.renew_soon(now)
    }

    /// Whether the store is to confirm it before another section begins under it.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.in_doubt.load(Ordering::Acquire)
    }

    /// The renewal that was [needed](Need::Renewal) has ended, whatever came of it. Whether the watchdog has to look at it earlier.
    pub fn renewal_finished(&self, now: BootInstant) -> bool {
        self.renewal.swap(Self::IDLE, Ordering::AcqRel) == Self::REPEAT && self.renew_soon(now)
    }

    fn renew_soon(&self, now: BootInstant) -> bool {
        self.is_early.store(true, Ordering::Release);
        let at = now.max(self.not_before()).as_nanos();
        self.renew_at.fetch_min(at, Ordering::AcqRel) > at
    }

    fn not_before(&self) -> BootInstant {
        match self.verified_at.load(Ordering::Relaxed) {
            0 => BootInstant::default(),
            asked => BootInstant::from_nanos(asked).saturating_add(RECHECK_INTERVAL),
        }
    }

    /// When the watchdog has to look at it next.
    pub fn next_check_at(&self) -> BootInstant {
        let [limit, delivery_at, renew_at] = [&self.limit, &self.delivery_check_at, &self.renew_at]
            .map(|moment| BootInstant::from_nanos(moment.load(Ordering::Relaxed)));
        self.deadline.at().min(limit).min(delivery_at).min(renew_at)
    }

    /// Whether its renewal is late: once, until it has come.
    pub(crate) fn take_late_warning(&self, now: BootInstant) -> bool {
        let left = self.remaining(now);
        // Of what is over, nothing is left to be late; and where the section ends first, nothing is
        // to be renewed.
        let end = BootInstant::from_nanos(self.limit.load(Ordering::Relaxed));
        let is_late = !left.is_zero() && left < self.lease() / RENEWALS_PER_LEASE && now.saturating_add(left) < end;
        is_late && !self.warned.swap(true, Ordering::Relaxed)
    }
}

fn nanos(duration: Duration) -> u64 {
    BootInstant::default().saturating_add(duration).as_nanos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{acquisition::AcquisitionIds, limits::LEASE, proto::lease::LeaseBounds};

    const START: BootInstant = BootInstant::from_nanos(1 << 40);
    const BOUNDS: LeaseBounds = LeaseBounds { longest: LEASE, call_timeout: Duration::from_millis(500) };

    type Grant = crate::proto::grant::Grant<crate::proto::NoDriver>;

    fn grant() -> Grant {
        let token = FencingToken::from_fence(1).expect("small");
        Grant::new(LockKey::from(("n", 1)), AcquisitionIds::new("test", 0).next(), token, LEASE, s(2), START)
    }

    fn at(seconds: u64) -> BootInstant {
        START.saturating_add(s(seconds))
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn need(grant: &Grant, seconds: u64) -> NextCheck {
        grant.next_check(at(seconds), at(seconds))
    }

    #[test]
    fn renewed_each_third_and_retried_soon_without_reply() {
        let grant = grant();
        assert_eq!(need(&grant, 0), NextCheck::Sleep(at(10)));
        assert_eq!(grant.next_check_at(), at(10));
        assert_eq!(need(&grant, 10), NextCheck::Renew(at(11)));
        assert_eq!(need(&grant, 10), NextCheck::Sleep(at(11)), "asked; not twice");
        assert_eq!(need(&grant, 11), NextCheck::Renew(at(12)), "no answer came");
        grant.extend(grant.lease(), at(11), at(12));
        assert_eq!(need(&grant, 12), NextCheck::Sleep(at(21)), "a third after it was asked for");
        assert_eq!(
            grant.next_check(START.saturating_add(Duration::from_millis(20_500)), at(21)),
            NextCheck::Renew(START.saturating_add(Duration::from_millis(21_500))),
            "with those that are due already"
        );
        assert_eq!(grant.remaining(at(12)), s(11) + usable_part(LEASE) - s(12));
    }

    #[test]
    fn section_with_max_hold_is_renewed_and_not_late_early() {
        let token = FencingToken::from_fence(1).expect("small");
        let lease = BOUNDS.for_section(s(5));
        let grant =
            Grant::new(LockKey::from(("n", 1)), AcquisitionIds::new("test", 0).next(), token, lease, s(2), START);
        grant.set_section_limit(at(5));
        assert!(grant.remaining(START) > s(5) && grant.remaining(START) < s(6), "its own end is first");
        let third = START.saturating_add(lease / 3);
        assert!(matches!(grant.next_check(third, third), NextCheck::Renew(_)), "so that a revocation is noticed");
        assert_eq!(grant.store_lease(grant.lease()), lease + s(2));
        assert!(!grant.take_late_warning(START.saturating_add(Duration::from_millis(4_900))));
    }

    /// I5
    #[test]
    fn grant_is_checked_at_its_deadline() {
        let (grant, deadline) = (grant(), START.saturating_add(usable_part(LEASE)));
        assert_eq!(need(&grant, 29), NextCheck::Renew(deadline), "sooner than the next question");
        assert_eq!(need(&grant, 29), NextCheck::Sleep(deadline));
        assert_eq!(grant.next_check(deadline, deadline), NextCheck::Ended);
        assert_eq!(grant.end_reason(), Some(LockLost::Expired));
    }

    #[test]
    fn grant_is_checked_when_max_hold_is_reached() {
        let grant = grant();
        grant.set_section_limit(at(4));
        assert_eq!((need(&grant, 0), grant.next_check_at()), (NextCheck::Sleep(at(4)), at(4)));
        assert_eq!(need(&grant, 4), NextCheck::CheckSection);
        grant.set_section_limit(BootInstant::FAR_FUTURE);
        assert_eq!(
            (need(&grant, 4), grant.store_lease(grant.lease())),
            (NextCheck::Sleep(at(10)), s(32)),
            "the next one has another"
        );
    }

    /// I5
    #[test]
    fn ended_grant_is_never_extended() {
        for why in [None, Some(LockLost::Released), Some(LockLost::Revoked)] {
            let grant = grant();
            let late = at(30);
            match why {
                Some(why) => grant.end(why),
                None => assert_eq!(need(&grant, 30), NextCheck::Ended, "past its deadline"),
            }
            grant.extend(grant.lease(), at(29), late);
            grant.extend(grant.lease(), late, late);
            grant.end(LockLost::HoldLimitReached);
            assert_eq!(grant.remaining(late), Duration::ZERO);
            assert_eq!(need(&grant, 0), NextCheck::Ended, "not even for a clock that steps back");
            assert_eq!(grant.end_reason(), Some(why.unwrap_or(LockLost::Expired)), "and the first reason stays");
        }
    }

    /// The lease grew between: of the two calls, each counts for what it asked for, and the longer
    /// one stays.
    #[test]
    fn renewal_counts_for_the_lease_it_requested() {
        let token = FencingToken::from_fence(1).expect("small");
        let grant =
            Grant::new(LockKey::from(("n", 1)), AcquisitionIds::new("test", 0).next(), token, s(3), s(1), START);
        grant.extend(LEASE, at(1), at(2));
        grant.set_fence(FencingToken::from_fence(2).expect("small"), LEASE, s(1));
        let left = grant.remaining(at(2));
        assert_eq!(left, s(1) + usable_part(LEASE) - s(2));
        grant.extend(s(3), START.saturating_add(Duration::from_millis(1_500)), at(2));
        assert_eq!(grant.remaining(at(2)), left);
        grant.set_fence(FencingToken::from_fence(3).expect("small"), s(3), s(1));
        assert_eq!(grant.lease(), LEASE, "it only grows");
    }

    /// Nobody has looked since: the answer that comes after the deadline comes too late all the same.
    #[test]
    fn renewal_reply_after_the_deadline_is_ignored() {
        let grant = grant();
        grant.extend(grant.lease(), at(29), at(30));
        assert_eq!(grant.remaining(at(30)), Duration::ZERO);
    }

    #[test]
    fn older_renewal_reply_does_not_shorten_the_lease() {
        let grant = grant();
        grant.extend(grant.lease(), at(12), at(13));
        let left = grant.remaining(at(14));
        grant.extend(grant.lease(), at(11), at(14));
        assert_eq!(grant.remaining(at(14)), left);
    }

    /// I7: what messages say is asked about, and a flood of them costs ten questions a second.
    #[test]
    fn doubted_grant_is_verified_once_at_a_time_with_a_pause() {
        let (grant, ms) = (grant(), |ms| START.saturating_add(Duration::from_millis(ms)));
        let need = |at| grant.next_check(at, at.saturating_add(Duration::from_millis(500)));
        assert!(grant.verify(ms(1_000)), "to be looked at now");
        assert!(!grant.verify(ms(1_000)), "it is listed for that already");
        assert!(matches!(need(ms(1_000)), NextCheck::Renew(_)));
        for _ in 0..1_000 {
            assert!(!grant.verify(ms(1_010)), "the answer is awaited");
        }
        grant.extend(grant.lease(), ms(1_000), ms(1_020));
        assert!(grant.renewal_finished(ms(1_020)), "the answer may be older than the doubt");
        assert_eq!(grant.next_check_at(), ms(1_100), "once more, after a pause");
        assert_eq!(need(ms(1_020)), NextCheck::Sleep(ms(1_100)), "others are due, and it is not");
        assert!(matches!(need(ms(1_100)), NextCheck::Renew(_)));
        grant.extend(grant.lease(), ms(1_100), ms(1_120));
        assert!(!grant.renewal_finished(ms(1_120)), "nobody has doubted it since");
        assert_eq!(need(ms(1_120)), NextCheck::Sleep(ms(11_100)));
    }

    /// Of each length: a third of it, and not at once, though the watchdog collects what is due
    /// within half a second.
    #[test]
    fn any_lease_is_renewed_after_a_third() {
        for lease in [Duration::from_millis(510), s(2), LEASE, s(600)] {
            let token = FencingToken::from_fence(1).expect("small");
            let grant =
                Grant::new(LockKey::from(("n", 1)), AcquisitionIds::new("test", 0).next(), token, lease, s(1), START);
            let need = |at: BootInstant| grant.next_check(at, at.saturating_add(Duration::from_millis(500)));
            let third = START.saturating_add(lease / 3);
            assert_eq!(need(START), NextCheck::Sleep(third), "{lease:?}");
            assert!(matches!(need(third), NextCheck::Renew(_)), "{lease:?}");
            assert!(
                !grant.take_late_warning(START.saturating_add(lease / 2))
                    && grant.take_late_warning(START.saturating_add(lease / 4 * 3)),
                "{lease:?}"
            );
            grant.extend(grant.lease(), third, third);
            assert_eq!(grant.remaining(third), usable_part(lease), "{lease:?}: what was granted, and no more");
        }
    }

    #[test]
    fn revocation_right_after_a_renewal_is_verified_at_once() {
        let (grant, ms) = (grant(), |ms| START.saturating_add(Duration::from_millis(ms)));
        assert!(matches!(need(&grant, 10), NextCheck::Renew(_)));
        grant.extend(grant.lease(), at(10), at(10));
        assert!(!grant.renewal_finished(at(10)));
        assert!(grant.verify(ms(10_001)));
        assert!(matches!(grant.next_check(ms(10_001), ms(10_001)), NextCheck::Renew(_)));
    }

    #[test]
    fn late_renewal_is_warned_of_once_until_it_arrives() {
        let grant = grant();
        assert!(!grant.take_late_warning(at(19)));
        assert!(grant.take_late_warning(at(20)));
        assert!(!grant.take_late_warning(at(21)));
        grant.extend(grant.lease(), at(21), at(22));
        assert!(!grant.take_late_warning(at(23)) && grant.take_late_warning(at(42)));
        grant.extend(grant.lease(), at(42), at(42));
        grant.end(LockLost::Released);
        assert!(!grant.take_late_warning(at(70)), "what is given back is not late");
    }

    /// I5: the answer comes in the very moment in which somebody finds it over. It is one or the other, for everybody.
    #[test]
    fn end_is_notified_before_the_next_section_starts() {
        let deadline = START.saturating_add(usable_part(LEASE));
        let grants: Vec<_> = (0..20_000).map(|_| grant()).collect();
        // Both go for the same one at the same moment.
        let (arrived, go) = (AtomicU64::new(0), AtomicU64::new(0));
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
                for (n, grant) in (1..).zip(&grants) {
                    arrived.store(n, Ordering::Release);
                    let mut spins = 0;
                    while go.load(Ordering::Acquire) < n {
                        spins += 1;
                        // Close at first; and, if the other one does not run, out of its way.
                        if spins < 1_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
                    }
                    grant.extend(grant.lease(), at(20), BootInstant::from_nanos(deadline.as_nanos() - 1));
                }
            });
            for (n, grant) in (1..).zip(&grants) {
                while arrived.load(Ordering::Acquire) < n {
                    std::thread::yield_now();
                }
                go.store(n, Ordering::Release);
                // The other one hears of it a little later: somewhere in here they meet.
                (0..n % 256).for_each(|_| std::hint::spin_loop());
                let first = grant.remaining(deadline);
                let later = grant.remaining(deadline);
                assert!(!first.is_zero() || later.is_zero(), "over, and held again");
            }
        });
    }
}
