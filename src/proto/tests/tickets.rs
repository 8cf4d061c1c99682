//! Keys that are left to a ticket, and sections in its place.

use super::*;
use crate::{
    limits::{LEASE, STORE_CALL_TIMEOUT},
    proto::lease::Lease,
};

impl Harness {
    /// The key is granted in place of a ticket, by a call that was sent so long ago.
    fn redeem(&mut self, ago: Duration) -> (AcquisitionId, Option<Arc<Section<NoDriver>>>) {
        self.redeem_with(ago, HoldLimits::default())
    }

    fn redeem_with(&mut self, ago: Duration, limits: HoldLimits) -> (AcquisitionId, Option<Arc<Section<NoDriver>>>) {
        let id = self.ids.next();
        let sent_at = self.now;
        self.pass(ago);
        let redeemed = Redeemed { id: id.clone(), fence: 9, sent_at, owner: None, limits, trace: None };
        let section = self.drive(|table, key, cx, actions| table.redeem(key, cx, redeemed, &ticket(), actions));
        (id, section)
    }

    fn sent_heir(&self) -> Option<&Heir> {
        self.sent_release().heir.as_deref()
    }
}

fn ticket() -> Arc<Heir> {
    Arc::new(Heir::new(AcquisitionId::of_ticket("test", "ab", 1), ms(60_000)))
}

fn kept() -> GuardEnd {
    GuardEnd::Kept(ticket())
}

/// Guarantee: G24.
#[test]
fn redeemed_section_starts_beside_a_queued_attempt() {
    let mut h = harness();
    h.request(1, true);
    h.reply(QUEUED);
    let (id, section) = h.redeem(Duration::ZERO);
    let section = section.expect("enough of the lease is left");
    assert_eq!((&section.grant.id, section.token.as_u64() >> 10, h.tracked), (&id, 9, 1));
    h.request(2, false);
    assert!(matches!(h.results.remove(0), (2, Err(LockError::Busy { .. }))));
    assert_eq!(h.end_guard(&section, kept()), None);
    assert_eq!((&h.sent_release().id, h.sent_heir()), (&id, Some(&*ticket())));
    h.reply_freed();
    assert!(matches!(h.outcomes[..], [Ok(ReleaseOutcome::Released)]));
    h.advance(ms(2_000));
    h.reply(GRANTED);
    h.expect_grant(1);
}

/// I8: the call may be executed after the first release.
/// Guarantee: G24.
#[test]
fn key_goes_back_to_its_ticket_again_after_the_doubt() {
    let (mut h, until) = (harness(), STORE_CALL_TIMEOUT);
    let (id, until) = (h.ids.next(), h.now.saturating_add(until));
    h.drive(|table, key, cx, actions| table.leave_to_ticket(key, cx, id.clone(), &ticket(), until, actions));
    for is_last in [false, true] {
        assert_eq!((&h.sent_release().id, h.sent_heir()), (&id, Some(&*ticket())), "{is_last}");
        if is_last {
            h.finish();
        } else {
            h.fail(unavailable());
            h.advance(ms(100));
            assert_eq!(h.sent_heir(), Some(&*ticket()), "after an error");
            h.reply_freed();
            h.advance(STORE_CALL_TIMEOUT);
        }
    }
}

/// Guarantee: G24.
#[test]
fn last_guard_leaves_the_key_unless_one_was_dropped() {
    for (ends, is_kept) in [
        ([kept(), GuardEnd::Released], false),
        ([GuardEnd::Released, kept()], true),
        ([GuardEnd::ReleasedAfterFailure, kept()], true),
        ([GuardEnd::Dropped, kept()], false),
        ([kept(), GuardEnd::Dropped], false),
        ([GuardEnd::Recorded(new_record()), kept()], false),
    ] {
        let (mut h, owner) = (harness(), Owner::new());
        h.request_with(1, WAIT, Some(&owner));
        h.reply(GRANTED);
        let section = h.expect_grant(1);
        h.request_with(2, WAIT, Some(&owner));
        h.expect_grant(2);
        h.request(3, true);
        let [first, last] = ends.clone();
        assert_eq!(h.end_guard(&section, first), Some(ReleaseOutcome::StillHeld));
        let outcome = h.end_guard(&section, last);
        if outcome == Some(ReleaseOutcome::HandedOff) {
            assert!(!is_kept, "{ends:?}");
            continue;
        }
        let release = h.sent_release();
        assert_eq!(release.heir.is_some(), is_kept, "{ends:?}");
        assert_eq!(release.record.is_some(), matches!(ends[0], GuardEnd::Recorded(_)), "the record wins: {ends:?}");
        let is_blocked = ends.contains(&GuardEnd::Dropped);
        assert_eq!(release.block_for.is_zero(), !is_blocked, "{ends:?}");
    }
}

/// Guarantee: G24.
#[test]
fn redeemed_key_with_too_little_lease_left_goes_back() {
    let mut h = harness();
    let (id, section) = h.redeem(LEASE / 4 * 3);
    assert!(section.is_none() && h.tracked == 0);
    assert_eq!((&h.sent_release().id, h.sent_heir()), (&id, Some(&*ticket())));
    h.finish();
    let (id, section) = h.redeem(LEASE / 2);
    let section = section.expect("enough is left");
    h.end_guard(&section, GuardEnd::Dropped);
    assert_eq!((&h.sent_release().id, h.sent_heir(), h.sent_release().block_for), (&id, None, limits::LOCK_DELAY));
}

/// I7: an operator revokes the key while the reply that grants it is on its way.
#[test]
fn key_that_was_revoked_before_its_reply_does_not_start() {
    let mut h = harness();
    let ids = AcquisitionIds::new("test", 1);
    let [id, other] = [ids.next(), ids.next()];
    h.handle(Event::Revoked(id.clone()));
    let (redeemed, section) = h.redeem(Duration::ZERO);
    assert!(redeemed == id && section.is_none());
    assert_eq!((&h.sent_release().id, h.sent_heir()), (&id, Some(&*ticket())));
    h.finish();
    h.handle(Event::Revoked(id));
    let (redeemed, section) = h.redeem(Duration::ZERO);
    assert!(redeemed == other && section.is_some());
}

/// A section with a limit needs its whole time.
#[test]
fn redeemed_section_has_the_whole_time_of_its_fixed_lease() {
    let mut h = harness();
    let limits = HoldLimits { lease: Lease::Fixed(ms(4_000)), ..HoldLimits::default() };
    let (_, section) = h.redeem_with(STORE_CALL_TIMEOUT, limits);
    assert_eq!(section.map(|section| section.remaining(h.now)), Some(ms(4_000)));
    let (id, section) = h.redeem_with(ms(600), limits);
    assert!(section.is_none());
    assert_eq!((&h.sent_release().id, h.sent_heir()), (&id, Some(&*ticket())));
}

/// I8: an acquire in doubt that is executed after the work has ended must not be taken for the
/// section that has left the key to its ticket.
/// Guarantee: G24.
#[test]
fn key_is_left_to_a_ticket_when_no_acquire_is_in_doubt() {
    let (mut h, _) = in_doubt();
    h.advance(ms(20));
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    assert_eq!(h.end_guard(&section, kept()), None);
    assert!(h.calls.is_empty(), "{:?}", h.calls);
    h.advance(ms(479));
    assert!(h.calls.is_empty(), "{:?}", h.calls);
    h.advance(ms(2));
    assert_eq!(h.sent_heir(), Some(&*ticket()));
    h.finish();
}
