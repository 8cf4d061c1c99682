//! The local view of one grant of the store: its deadline, its renewal and its doubt.

use std::{
    sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    time::Duration,
};

use super::{
    DriverTypes,
    deadline::{AtomicDeadline, Deadline},
};
use crate::{
    acquisition::AcquisitionId,
    clock::{BootInstant, usable_part},
    error::LockLost,
    fencing::FencingToken,
    limits::{
        RECHECK_INTERVAL, RENEWAL_BATCH_WINDOWS_PER_LEASE, RENEWAL_RETRIES_PER_LEASE, RENEWAL_RETRY_MIN,
        RENEWALS_PER_LEASE,
    },
    lock_key::LockKey,
};

/// One grant, shared by the entry of its key, its sections and the watchdog.
#[derive(Debug)]
pub struct Grant<D: DriverTypes> {
    /// The key that is held.
    pub key: LockKey,
    /// The acquisition that holds it.
    pub id: AcquisitionId,
    /// The token of the first section under the current fence.
    token: AtomicU64,
    /// I4: extended only by replies of the store. After the end it is final (I5).
    deadline: AtomicDeadline,
    /// The limit of the active section; `FAR_FUTURE` without one.
    limit: AtomicU64,
    /// The lease that renewals request. It never shrinks, because an id never relies on less than
    /// before.
    lease: AtomicU64,
    /// The instant of the next check whether all waiters have received the active section.
    delivery_check_at: AtomicU64,
    /// How long the store keeps the key beyond the lease.
    lock_delay: AtomicU64,
    /// The instant of the next renewal.
    renew_at: AtomicU64,
    /// The instant of the last renewal that a message caused.
    verified_at: AtomicU64,
    /// The next renewal is sent early because of a message.
    is_early: AtomicBool,
    /// A revocation message came, and no reply since has confirmed the grant.
    in_doubt: AtomicBool,
    /// The renewal in flight: [`IDLE`](Self::IDLE), [`IN_FLIGHT`](Self::IN_FLIGHT) or
    /// [`REPEAT`](Self::REPEAT).
    renewal: AtomicU8,
    warned: AtomicBool,
    /// The value of the driver.
    pub data: D::GrantData,
}

/// What the driver has to do for a grant now, and when to call [`Grant::next_check`] again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextCheck {
    /// Do nothing before this instant.
    Sleep(BootInstant),
    /// Send a renewal, and call [`Grant::renewal_finished`] after its reply. Check again at this
    /// instant, whether the reply has come or not.
    Renew(BootInstant),
    /// Feed in [`Event::CheckSection`](super::Event::CheckSection): the limit of the active section
    /// has passed, or its delivery is due for a check. The grant is tracked again by the actions of
    /// that event.
    CheckSection,
    /// Feed in [`Event::Lost`](super::Event::Lost) and stop the checks: the grant has ended.
    Ended,
}

impl<D: DriverTypes> Grant<D> {
    /// No renewal is in flight.
    const IDLE: u8 = 0;
    /// A renewal is in flight.
    const IN_FLIGHT: u8 = 1;
    /// A renewal is in flight that was sent before the newest message. Its reply may be older, so
    /// another renewal follows.
    const REPEAT: u8 = 2;

    /// Creates a grant by the reply to a call that was sent at `sent_at` (I3).
    pub(super) fn new(
        key: LockKey,
        id: AcquisitionId,
        token: FencingToken,
        lease: Duration,
        lock_delay: Duration,
        sent_at: BootInstant,
    ) -> Self {
        Self {
            lease: AtomicU64::new(nanos(lease)),
            key,
            id,
            token: AtomicU64::new(token.as_u64()),
            deadline: AtomicDeadline::new(sent_at.saturating_add(usable_part(lease))),
            limit: AtomicU64::new(BootInstant::FAR_FUTURE.as_nanos()),
            delivery_check_at: AtomicU64::new(BootInstant::FAR_FUTURE.as_nanos()),
            lock_delay: AtomicU64::new(nanos(lock_delay)),
            renew_at: AtomicU64::new(sent_at.saturating_add(lease / RENEWALS_PER_LEASE).as_nanos()),
            verified_at: AtomicU64::new(0),
            is_early: AtomicBool::new(false),
            in_doubt: AtomicBool::new(false),
            renewal: AtomicU8::new(Self::IDLE),
            warned: AtomicBool::new(false),
            data: D::GrantData::default(),
        }
    }

    /// I4: how long the grant still counts as held. If its deadline has passed, the grant ends
    /// here, for all callers (I5).
    pub fn remaining(&self, now: BootInstant) -> Duration {
        loop {
            let Deadline::At(deadline) = self.deadline.get() else { return Duration::ZERO };
            let remaining = deadline.saturating_duration_since(now);
            if !remaining.is_zero() {
                return remaining;
            }
            self.deadline.end_if(deadline, LockLost::Expired);
            // If a renewal has extended the deadline in between, the new deadline decides.
        }
    }

    /// Extends the deadline after a renewal with this lease that was sent at `sent_at`. A grant
    /// that has ended stays ended.
    ///
    /// `lease` is the one that the call requested. The lease of the grant may have grown since: to
    /// rely on the longer one would let two holders in.
    pub fn extend(&self, lease: Duration, sent_at: BootInstant, now: BootInstant) {
        if self.deadline.extend(sent_at.saturating_add(usable_part(lease)), now) {
            self.renew_at.store(sent_at.saturating_add(lease / RENEWALS_PER_LEASE).as_nanos(), Ordering::Relaxed);
            self.warned.store(false, Ordering::Relaxed);
            // A reply to a call that was sent before the message does not end the doubt.
            if self.renewal.load(Ordering::Acquire) != Self::REPEAT {
                self.in_doubt.store(false, Ordering::Release);
            }
        }
    }

    /// Sets the limit of a section that starts.
    pub(super) fn set_section_limit(&self, limit: BootInstant) {
        self.set_limit(limit);
        self.set_delivery_check(BootInstant::FAR_FUTURE);
    }

    /// Sets the limit of the active section.
    pub(super) fn set_limit(&self, limit: BootInstant) {
        self.limit.store(limit.as_nanos(), Ordering::Relaxed);
    }

    /// Lowers the limit of the sections.
    pub(super) fn lower_limit(&self, limit: BootInstant) {
        self.limit.fetch_min(limit.as_nanos(), Ordering::Relaxed);
    }

    /// Has the lease be renewed beyond the section, until its limit or this instant.
    pub(super) fn keep_until(&self, end: BootInstant) {
        self.lower_limit(end);
        self.set_delivery_check(BootInstant::FAR_FUTURE);
    }

    /// Sets the instant of the next delivery check.
    pub(super) fn set_delivery_check(&self, at: BootInstant) {
        self.delivery_check_at.store(at.as_nanos(), Ordering::Relaxed);
    }

    /// Sets the instant of the next delivery check, unless an earlier one is set.
    pub(super) fn lower_delivery_check(&self, at: BootInstant) {
        self.delivery_check_at.fetch_min(at.as_nanos(), Ordering::Relaxed);
    }

    pub(super) fn lock_delay(&self) -> Duration {
        Duration::from_nanos(self.lock_delay.load(Ordering::Relaxed))
    }

    /// The lease that renewals request, without the lock-delay.
    pub fn lease(&self) -> Duration {
        Duration::from_nanos(self.lease.load(Ordering::Relaxed))
    }

    /// The lease that the store receives in a renewal with `lease`: the lock-delay is added, which
    /// only the store knows (I10).
    pub fn store_lease(&self, lease: Duration) -> Duration {
        lease.saturating_add(self.lock_delay())
    }

    /// Ends the grant, unless it has ended.
    pub fn end(&self, reason: LockLost) {
        self.deadline.end(reason);
    }

    /// The reason of the end, or `None` before it.
    pub fn end_reason(&self) -> Option<LockLost> {
        self.deadline.end_reason()
    }

    /// The current fence, or the last one.
    pub(crate) fn fence(&self) -> u64 {
        self.token.load(Ordering::Relaxed)
    }

    /// Sets the fence, lease and lock-delay of a yield that has extended the grant.
    pub(super) fn set_fence(&self, token: FencingToken, lease: Duration, lock_delay: Duration) {
        self.token.store(token.as_u64(), Ordering::Relaxed);
        self.lease.fetch_max(nanos(lease), Ordering::Relaxed);
        self.lock_delay.store(nanos(lock_delay), Ordering::Relaxed);
    }

    /// Returns what the driver has to do at `now`. A renewal without a reply is repeated soon.
    ///
    /// A renewal that is due before `batch_until` is due now, so that the driver sends it in one
    /// call with others.
    pub fn next_check(&self, now: BootInstant, batch_until: BootInstant) -> NextCheck {
        let remaining = self.remaining(now);
        if remaining.is_zero() {
            return NextCheck::Ended;
        }
        let [limit, delivery_check_at] = [&self.limit, &self.delivery_check_at]
            .map(|instant| BootInstant::from_nanos(instant.load(Ordering::Relaxed)));
        let limit = limit.min(delivery_check_at);
        if limit <= now {
            return NextCheck::CheckSection;
        }
        let end = now.saturating_add(remaining).min(limit);
        let renew_at = BootInstant::from_nanos(self.renew_at.load(Ordering::Relaxed));
        // An early renewal keeps its distance to the one before, even if a batch is sent now.
        let not_before = self.not_before();
        // A short lease allows only a short batch window: a grant is not renewed right after its
        // start.
        let batch_until = batch_until.min(now.saturating_add(self.lease() / RENEWAL_BATCH_WINDOWS_PER_LEASE));
        if batch_until < renew_at || now < not_before {
            return NextCheck::Sleep(renew_at.max(not_before).min(end));
        }
        let retry_at = now.saturating_add((self.lease() / RENEWAL_RETRIES_PER_LEASE).max(RENEWAL_RETRY_MIN));
        // A renewal in flight may wait for its turn.
        if self.renewal.load(Ordering::Acquire) != Self::IDLE {
            self.renew_at.store(retry_at.as_nanos(), Ordering::Relaxed);
            return NextCheck::Sleep(retry_at.min(end));
        }
        self.renewal.store(Self::IN_FLIGHT, Ordering::Release);
        // Only renewals that a message has caused keep this distance. A periodic renewal right
        // before a revocation must not delay its detection.
        if self.is_early.swap(false, Ordering::AcqRel) {
            self.verified_at.store(now.as_nanos(), Ordering::Relaxed);
        }
        self.renew_at.store(retry_at.as_nanos(), Ordering::Relaxed);
        NextCheck::Renew(retry_at.min(end))
    }

    /// Records a revocation message. It may be forged, so the store decides (I7): a renewal is sent
    /// at once, but only one at a time, and at a bounded rate. Returns `true` if the next check is
    /// earlier than before.
    pub fn verify(&self, now: BootInstant) -> bool {
        self.in_doubt.store(true, Ordering::Release);
        let repeat = |renewal| (renewal != Self::IDLE).then_some(Self::REPEAT);
        self.renewal.fetch_update(Ordering::AcqRel, Ordering::Acquire, repeat).is_err() && self.renew_soon(now)
    }

    /// Returns `true` if the store has to confirm the grant before another section starts under it.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.in_doubt.load(Ordering::Acquire)
    }

    /// Records the end of the renewal that [`NextCheck::Renew`] has caused, with or without a
    /// reply. Returns `true` if the next check is earlier than before.
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
            sent_at => BootInstant::from_nanos(sent_at).saturating_add(RECHECK_INTERVAL),
        }
    }

    /// The instant of the next check.
    pub fn next_check_at(&self) -> BootInstant {
        let [limit, delivery_check_at, renew_at] = [&self.limit, &self.delivery_check_at, &self.renew_at]
            .map(|instant| BootInstant::from_nanos(instant.load(Ordering::Relaxed)));
        self.deadline.at().min(limit).min(delivery_check_at).min(renew_at)
    }

    /// Returns `true` once if a renewal is late, until one has succeeded.
    pub(crate) fn take_late_warning(&self, now: BootInstant) -> bool {
        let remaining = self.remaining(now);
        // An ended grant is not late. A grant whose section ends before the deadline needs no
        // renewal.
        let end = BootInstant::from_nanos(self.limit.load(Ordering::Relaxed));
        let is_late = !remaining.is_zero()
            && remaining < self.lease() / RENEWALS_PER_LEASE
            && now.saturating_add(remaining) < end;
        is_late && !self.warned.swap(true, Ordering::Relaxed)
    }
}

/// The nanoseconds of a duration, which use half the memory.
pub(super) fn nanos(duration: Duration) -> u64 {
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

    fn next_check(grant: &Grant, seconds: u64) -> NextCheck {
        grant.next_check(at(seconds), at(seconds))
    }

    #[test]
    fn a_grant_is_renewed_every_third_of_its_lease() {
        let grant = grant();
        assert_eq!(next_check(&grant, 0), NextCheck::Sleep(at(10)));
        assert_eq!(grant.next_check_at(), at(10));
        assert_eq!(next_check(&grant, 10), NextCheck::Renew(at(11)));
        assert_eq!(next_check(&grant, 10), NextCheck::Sleep(at(11)), "the renewal is in flight");
        assert_eq!(next_check(&grant, 11), NextCheck::Sleep(at(12)), "it may wait for its turn");
        grant.renewal_finished(at(11));
        assert_eq!(next_check(&grant, 12), NextCheck::Renew(at(13)), "no reply");
        grant.extend(grant.lease(), at(11), at(12));
        grant.renewal_finished(at(12));
        assert_eq!(next_check(&grant, 12), NextCheck::Sleep(at(21)), "a third of the lease after the request");
        assert_eq!(
            grant.next_check(START.saturating_add(Duration::from_millis(20_500)), at(21)),
            NextCheck::Renew(START.saturating_add(Duration::from_millis(21_500))),
            "in one batch with renewals that are due"
        );
        assert_eq!(grant.remaining(at(12)), s(11) + usable_part(LEASE) - s(12));
    }

    #[test]
    fn a_grant_of_a_bounded_section_is_renewed_and_never_late() {
        let token = FencingToken::from_fence(1).expect("small");
        let lease = BOUNDS.for_section(s(5));
        let grant =
            Grant::new(LockKey::from(("n", 1)), AcquisitionIds::new("test", 0).next(), token, lease, s(2), START);
        grant.set_section_limit(at(5));
        assert!(
            grant.remaining(START) > s(5) && grant.remaining(START) < s(6),
            "the deadline is behind the end of the section"
        );
        let third = START.saturating_add(lease / 3);
        assert!(matches!(grant.next_check(third, third), NextCheck::Renew(_)), "a renewal detects a revocation");
        assert_eq!(grant.store_lease(grant.lease()), lease + s(2));
        assert!(!grant.take_late_warning(START.saturating_add(Duration::from_millis(4_900))));
    }

    /// Invariant I5.
    #[test]
    fn a_grant_is_checked_at_its_deadline() {
        let (grant, deadline) = (grant(), START.saturating_add(usable_part(LEASE)));
        assert_eq!(next_check(&grant, 29), NextCheck::Renew(deadline), "before the retry of the renewal");
        assert_eq!(next_check(&grant, 29), NextCheck::Sleep(deadline));
        assert_eq!(grant.next_check(deadline, deadline), NextCheck::Ended);
        assert_eq!(grant.end_reason(), Some(LockLost::Expired));
    }

    #[test]
    fn a_grant_is_checked_at_the_limit_of_its_section() {
        let grant = grant();
        grant.set_section_limit(at(4));
        assert_eq!((next_check(&grant, 0), grant.next_check_at()), (NextCheck::Sleep(at(4)), at(4)));
        assert_eq!(next_check(&grant, 4), NextCheck::CheckSection);
        grant.set_section_limit(BootInstant::FAR_FUTURE);
        assert_eq!(
            (next_check(&grant, 4), grant.store_lease(grant.lease())),
            (NextCheck::Sleep(at(10)), s(32)),
            "the next section has no limit"
        );
    }

    /// Invariant I5.
    #[test]
    fn an_ended_grant_is_never_extended() {
        for reason in [None, Some(LockLost::Released), Some(LockLost::Revoked)] {
            let grant = grant();
            let late = at(30);
            match reason {
                Some(reason) => grant.end(reason),
                None => assert_eq!(next_check(&grant, 30), NextCheck::Ended, "expired"),
            }
            grant.extend(grant.lease(), at(29), late);
            grant.extend(grant.lease(), late, late);
            grant.end(LockLost::HoldLimitReached);
            assert_eq!(grant.remaining(late), Duration::ZERO);
            assert_eq!(next_check(&grant, 0), NextCheck::Ended, "even if the clock steps back");
            assert_eq!(grant.end_reason(), Some(reason.unwrap_or(LockLost::Expired)), "the first reason is final");
        }
    }

    /// The lease grew between the two calls. Each reply counts for the lease that its call
    /// requested.
    #[test]
    fn a_renewal_extends_by_the_lease_that_it_requested() {
        let token = FencingToken::from_fence(1).expect("small");
        let grant =
            Grant::new(LockKey::from(("n", 1)), AcquisitionIds::new("test", 0).next(), token, s(3), s(1), START);
        grant.extend(LEASE, at(1), at(2));
        grant.set_fence(FencingToken::from_fence(2).expect("small"), LEASE, s(1));
        let remaining = grant.remaining(at(2));
        assert_eq!(remaining, s(1) + usable_part(LEASE) - s(2));
        grant.extend(s(3), START.saturating_add(Duration::from_millis(1_500)), at(2));
        assert_eq!(grant.remaining(at(2)), remaining);
        grant.set_fence(FencingToken::from_fence(3).expect("small"), s(3), s(1));
        assert_eq!(grant.lease(), LEASE, "the lease never shrinks");
    }

    /// No check has noticed the deadline before the reply comes.
    #[test]
    fn a_renewal_reply_after_the_deadline_is_too_late() {
        let grant = grant();
        grant.extend(grant.lease(), at(29), at(30));
        assert_eq!(grant.remaining(at(30)), Duration::ZERO);
    }

    #[test]
    fn an_older_renewal_reply_does_not_shorten_a_grant() {
        let grant = grant();
        grant.extend(grant.lease(), at(12), at(13));
        let remaining = grant.remaining(at(14));
        grant.extend(grant.lease(), at(11), at(14));
        assert_eq!(grant.remaining(at(14)), remaining);
    }

    /// I7: a flood of messages costs at most ten renewals per second.
    #[test]
    fn a_grant_in_doubt_is_verified_at_once_at_a_bounded_rate() {
        let (grant, ms) = (grant(), |ms| START.saturating_add(Duration::from_millis(ms)));
        let next_check = |at| grant.next_check(at, at.saturating_add(Duration::from_millis(500)));
        assert!(grant.verify(ms(1_000)), "due now");
        assert!(!grant.verify(ms(1_000)), "scheduled already");
        assert!(matches!(next_check(ms(1_000)), NextCheck::Renew(_)));
        for _ in 0..1_000 {
            assert!(!grant.verify(ms(1_010)), "a renewal is in flight");
        }
        grant.extend(grant.lease(), ms(1_000), ms(1_020));
        assert!(grant.renewal_finished(ms(1_020)), "the reply may be older than the doubt");
        assert_eq!(grant.next_check_at(), ms(1_100), "repeated after a pause");
        assert_eq!(
            next_check(ms(1_020)),
            NextCheck::Sleep(ms(1_100)),
            "not sent with a batch before the pause has passed"
        );
        assert!(matches!(next_check(ms(1_100)), NextCheck::Renew(_)));
        grant.extend(grant.lease(), ms(1_100), ms(1_120));
        assert!(!grant.renewal_finished(ms(1_120)), "no message came since");
        assert_eq!(next_check(ms(1_120)), NextCheck::Sleep(ms(11_100)));
    }

    /// The batch window of the watchdog, half a second, does not renew a short lease right after
    /// its start.
    #[test]
    fn any_lease_is_renewed_after_a_third() {
        for lease in [Duration::from_millis(510), s(2), LEASE, s(600)] {
            let token = FencingToken::from_fence(1).expect("small");
            let grant =
                Grant::new(LockKey::from(("n", 1)), AcquisitionIds::new("test", 0).next(), token, lease, s(1), START);
            let next_check = |at: BootInstant| grant.next_check(at, at.saturating_add(Duration::from_millis(500)));
            let third = START.saturating_add(lease / 3);
            assert_eq!(next_check(START), NextCheck::Sleep(third), "{lease:?}");
            assert!(matches!(next_check(third), NextCheck::Renew(_)), "{lease:?}");
            assert!(
                !grant.take_late_warning(START.saturating_add(lease / 2))
                    && grant.take_late_warning(START.saturating_add(lease / 4 * 3)),
                "{lease:?}"
            );
            grant.extend(grant.lease(), third, third);
            assert_eq!(grant.remaining(third), usable_part(lease), "{lease:?}");
        }
    }

    #[test]
    fn a_revocation_right_after_a_renewal_is_verified_at_once() {
        let (grant, ms) = (grant(), |ms| START.saturating_add(Duration::from_millis(ms)));
        assert!(matches!(next_check(&grant, 10), NextCheck::Renew(_)));
        grant.extend(grant.lease(), at(10), at(10));
        assert!(!grant.renewal_finished(at(10)));
        assert!(grant.verify(ms(10_001)));
        assert!(matches!(grant.next_check(ms(10_001), ms(10_001)), NextCheck::Renew(_)));
    }

    #[test]
    fn a_late_renewal_is_warned_about_once() {
        let grant = grant();
        assert!(!grant.take_late_warning(at(19)));
        assert!(grant.take_late_warning(at(20)));
        assert!(!grant.take_late_warning(at(21)));
        grant.extend(grant.lease(), at(21), at(22));
        assert!(!grant.take_late_warning(at(23)) && grant.take_late_warning(at(42)));
        grant.extend(grant.lease(), at(42), at(42));
        grant.end(LockLost::Released);
        assert!(!grant.take_late_warning(at(70)), "a released grant is not late");
    }

    /// I5: a reply races with a check at the deadline. All callers see the same result.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "it runs without Tokio")]
    fn a_grant_observed_as_ended_is_never_extended() {
        let deadline = START.saturating_add(usable_part(LEASE));
        let grants: Vec<_> = (0..20_000).map(|_| grant()).collect();
        // Both threads work on the same grant at the same time.
        let (arrived, gate) = (AtomicU64::new(0), AtomicU64::new(0));
        /// Opens the gate if the test panics, so that the other thread ends.
        struct OpenGate<'a>(&'a AtomicU64);
        impl Drop for OpenGate<'_> {
            fn drop(&mut self) {
                self.0.store(u64::MAX, Ordering::Release);
            }
        }
        std::thread::scope(|scope| {
            let _open_gate = OpenGate(&gate);
            scope.spawn(|| {
                for (n, grant) in (1..).zip(&grants) {
                    arrived.store(n, Ordering::Release);
                    let mut spins = 0;
                    while gate.load(Ordering::Acquire) < n {
                        spins += 1;
                        // Yields if the other thread does not run.
                        if spins < 1_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
                    }
                    grant.extend(grant.lease(), at(20), BootInstant::from_nanos(deadline.as_nanos() - 1));
                }
            });
            let began = std::time::Instant::now();
            for (n, grant) in (1..).zip(&grants) {
                // Beside other load each round waits for a turn of each thread.
                if began.elapsed() > Duration::from_secs(2) {
                    break;
                }
                while arrived.load(Ordering::Acquire) < n {
                    std::thread::yield_now();
                }
                gate.store(n, Ordering::Release);
                // The other thread sees the gate a little later. The delays vary so that both meet.
                (0..n % 256).for_each(|_| std::hint::spin_loop());
                let first = grant.remaining(deadline);
                let later = grant.remaining(deadline);
                assert!(!first.is_zero() || later.is_zero(), "ended, then held again");
            }
        });
    }
}
