//! Permits and readers.

use super::*;
use crate::{
    limits::{LOCAL_HANDOFF_SECTIONS, LOCAL_HANDOFF_TIME, MAX_HOLDERS, STORE_CALL_TIMEOUT},
    proto::{attempt::BLOCK_GRACE, lease::Lease},
};

const READER: Sharing = Sharing::Reader;

impl Harness {
    /// A request that waits and shares the key.
    fn share(&mut self, waiter: u32, sharing: Sharing) -> u64 {
        self.send(LockRequest { wait: WAIT, sharing, ..request_of(waiter) })
    }

    fn share_at_once(&mut self, waiter: u32, sharing: Sharing) {
        self.send(LockRequest { sharing, ..request_of(waiter) });
    }

    fn share_as(&mut self, owner: &Owner, waiter: u32, sharing: Sharing) {
        self.send(LockRequest { owner: Some(owner.clone()), sharing, ..request_of(waiter) });
    }

    /// A waiter gets a share by a call of the store.
    fn hold_share(&mut self, waiter: u32, sharing: Sharing) -> Arc<Section<NoDriver>> {
        self.share(waiter, sharing);
        self.reply(GRANTED);
        self.expect_grant(waiter)
    }

    fn expect_busy(&mut self, waiter: u32) {
        match self.results.remove(0) {
            (rejected, Err(LockError::Busy { .. })) if rejected == waiter => {}
            other => panic!("{other:?}"),
        }
    }

    fn held(&self) -> usize {
        self.table.held_count()
    }
}

fn permit(limit: u16) -> Sharing {
    Sharing::permit(limit)
}

#[test]
fn each_permit_has_a_grant_of_its_own() {
    let mut h = harness();
    h.share(1, permit(2));
    h.share(2, permit(2));
    assert_eq!(h.sent_acquire().id.max_holders(), 2);
    h.reply(GRANTED);
    let first = h.expect_grant(1);
    assert_eq!((h.tracked, h.sent_acquire().id != first.grant.id), (1, true), "the next one asks at once");
    h.reply(GRANTED);
    let second = h.expect_grant(2);
    assert_eq!(h.held(), 2);
    assert_eq!(h.end_guard(&first, GuardEnd::Released), None);
    assert_eq!(h.sent_release().id, first.grant.id);
    h.reply_freed();
    assert!(matches!(h.outcomes[..], [Ok(ReleaseOutcome::Released)]));
    assert!(!second.remaining(h.now).is_zero() && h.held() == 1);
    h.end_guard(&second, GuardEnd::Released);
    h.finish();
    h.hold_share(3, READER);
    h.share(4, permit(8));
    assert_eq!(h.sent_acquire().id.max_holders(), 8, "not under the grant of a reader");
}

/// A permit of one is the whole key: its waiters take it over without a call.
#[test]
fn permit_of_one_is_the_whole_key() {
    let mut h = harness();
    let first = h.hold_share(1, permit(1));
    assert_eq!(first.grant.id.max_holders(), 1);
    h.share(2, permit(1));
    assert_eq!(h.end_guard(&first, GuardEnd::Released), Some(ReleaseOutcome::HandedOff));
}

/// Guarantee: G22.
#[test]
fn key_with_all_permits_here_is_busy_without_a_call() {
    let mut h = harness();
    let _held: Vec<_> = (0..2).map(|waiter| h.hold_share(waiter, permit(2))).collect();
    h.share_at_once(2, permit(2));
    h.expect_busy(2);
    h.request(3, false);
    h.expect_busy(3);
    assert!(h.calls.is_empty());
    h.share_at_once(4, permit(3));
    assert_eq!(h.sent_acquire().id.max_holders(), 3, "a larger limit may fit");
}

/// Guarantee: G23.
#[test]
fn readers_share_a_grant_until_a_waiter_comes() {
    let mut h = harness();
    let first = h.hold_share(1, READER);
    h.share_at_once(2, READER);
    let second = h.expect_grant(2);
    assert!(Arc::ptr_eq(&first.grant, &second.grant) && h.calls.is_empty());
    assert!(first.token < second.token);
    assert_eq!(h.end_guard(&first, GuardEnd::Released), Some(ReleaseOutcome::StillHeld));
    assert_eq!((first.end_reason(), second.end_reason()), (Some(LockLost::Released), None));
    h.request(3, true);
    let writer = h.take_call();
    h.share(4, READER);
    assert!(h.results.is_empty() && h.calls.is_empty(), "behind the writer");
    assert_eq!(h.end_guard(&second, GuardEnd::Released), None);
    h.reply_freed();
    h.handle(Event::Acquired(writer.number, Ok(GRANTED)));
    let writer = h.expect_grant(3);
    h.end_guard(&writer, GuardEnd::Released);
    assert_eq!(h.sent_release().id, writer.grant.id, "a reader does not run under the grant of a writer");
    h.reply_freed();
    assert_eq!(h.sent_acquire().id.max_holders(), MAX_HOLDERS);
}

#[test]
fn readers_in_the_queue_start_together() {
    let mut h = harness();
    for waiter in 1..=3 {
        h.share(waiter, READER);
    }
    h.request(4, true);
    h.share(5, READER);
    h.reply(GRANTED);
    let sections: Vec<_> = h.results.drain(..).collect();
    assert_eq!(sections.iter().map(|(waiter, _)| *waiter).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!((h.held(), h.tracked), (3, 1));
    assert_eq!(h.sent_acquire().id.max_holders(), 1, "the writer is next");
}

/// Guarantee: G23.
#[test]
fn grant_of_readers_is_shared_for_a_bounded_time() {
    let mut h = harness();
    let first = h.hold_share(1, READER);
    h.pass(LOCAL_HANDOFF_TIME);
    let second = h.hold_share(2, READER);
    assert!(first.grant.id != second.grant.id);
    h.share(3, READER);
    assert!(Arc::ptr_eq(&h.expect_grant(3).grant, &second.grant), "the newest one");
    for waiter in 4..4 + u32::from(LOCAL_HANDOFF_SECTIONS) - 2 {
        h.share(waiter, READER);
        let section = h.expect_grant(waiter);
        h.end_guard(&section, GuardEnd::Released);
    }
    assert!(h.calls.is_empty());
    h.share(2_000, READER);
    assert_eq!(h.calls.len(), 1, "too many sections");
}

/// I7
///
/// Guarantee: G23.
#[test]
fn readers_do_not_join_a_grant_in_doubt() {
    for doubt in 0..3 {
        let mut h = harness();
        let first = h.hold_share(1, READER);
        let id = first.grant.id.clone();
        match doubt {
            0 => {
                h.handle(Event::Revoked(id));
                assert_eq!(h.verifications, 1);
                // As the driver does.
                first.grant.verify(h.now);
            }
            1 => h.table.doubt(h.now),
            _ => {}
        }
        h.share(2, READER);
        assert_eq!(h.calls.len(), usize::from(doubt < 2), "{doubt}");
    }
}

/// A request with another lease or a longer lock-delay has a grant of its own.
#[test]
fn reader_with_another_lease_has_its_own_grant() {
    let default = HoldLimits::default();
    for (limits, joins) in [
        (default, true),
        (HoldLimits { lock_delay: ms(5_000), ..default }, false),
        (HoldLimits { lease: Lease::Fixed(ms(2_000)), ..default }, false),
    ] {
        let mut h = harness();
        h.hold_share(1, READER);
        h.send(LockRequest { wait: WAIT, limits, sharing: READER, ..request_of(2) });
        assert_eq!(h.calls.is_empty(), joins, "{limits:?}");
    }
}

/// Guarantee: G23.
#[test]
fn owner_joins_what_it_holds_and_an_upgrade_never_waits() {
    let (mut h, owner) = (harness(), Owner::new());
    h.share_as(&owner, 1, permit(4));
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    for (waiter, sharing) in [(2, permit(4)), (3, READER)] {
        h.share_as(&owner, waiter, sharing);
        assert!(Arc::ptr_eq(&h.expect_grant(waiter), &section));
    }
    assert_eq!((h.table.hold_count(&h.key.clone(), &owner, h.now), h.held()), (3, 1));
    h.request_with(4, WAIT, Some(&owner));
    h.request_with(5, Duration::ZERO, Some(&owner));
    for waiter in [4, 5] {
        let (rejected, result) = h.results.remove(0);
        assert!(rejected == waiter && matches!(result, Err(LockError::WouldDeadlock)), "{result:?}");
    }
    for outcome in [Some(ReleaseOutcome::StillHeld), Some(ReleaseOutcome::StillHeld), None] {
        assert_eq!(h.end_guard(&section, GuardEnd::Released), outcome);
    }
    h.finish();

    h.request_with(6, WAIT, Some(&owner));
    h.reply(GRANTED);
    let whole = h.expect_grant(6);
    h.share_as(&owner, 7, READER);
    assert!(Arc::ptr_eq(&h.expect_grant(7), &whole), "under the whole key everything joins");
}

/// Guarantee: G23.
#[test]
fn lock_that_is_queued_behind_the_read_of_its_owner_is_rejected() {
    let (mut h, owner) = (harness(), Owner::new());
    h.share_as(&owner, 1, READER);
    h.request_with(2, WAIT, Some(&owner));
    h.share(3, READER);
    h.reply(GRANTED);
    let (rejected, result) = h.results.remove(0);
    assert!(rejected == 1 && result.is_ok(), "{result:?}");
    let (rejected, result) = h.results.remove(0);
    assert!(rejected == 2 && matches!(result, Err(LockError::WouldDeadlock)), "{result:?}");
    h.expect_grant(3);
}

/// Guarantee: G6.
#[test]
fn waiter_that_is_not_polled_any_more_blocks_no_share() {
    let mut h = harness();
    h.hold_share(1, permit(4));
    h.request_with(2, ms(1_000), None);
    h.reply(QUEUED);
    h.share(3, permit(4));
    for _ in 0..3 {
        h.advance(ms(1_200));
        if let Some(2) = h.results.first().map(|(waiter, _)| *waiter) {
            break;
        }
        h.reply(QUEUED);
    }
    let (rejected, result) = h.results.remove(0);
    assert!(rejected == 2 && matches!(result, Err(LockError::TimedOut { .. })), "{result:?}");
    h.reply_freed();
    assert_eq!(h.sent_acquire().id.max_holders(), 4, "the next one asks");
    h.reply(GRANTED);
    h.expect_grant(3);
}

/// The id has its number of holders: a waiter never runs under the grant of another kind.
#[test]
fn attempt_ends_if_the_next_waiter_shares_otherwise() {
    for replied in [false, true] {
        let mut h = harness();
        let reader = h.share(1, READER);
        h.request(2, true);
        if replied {
            h.reply(QUEUED);
        }
        h.cancel(reader);
        if !replied {
            h.reply(GRANTED);
        }
        assert_eq!(h.sent_release().id.max_holders(), MAX_HOLDERS);
        h.reply_freed();
        assert!(h.results.is_empty());
        assert_eq!(h.sent_acquire().id.max_holders(), 1);
    }
}

/// A reader would keep the others out.
#[test]
fn reader_does_not_run_under_the_grant_of_a_lock() {
    let mut h = harness();
    h.request_with(1, ms(100), None);
    h.share(2, READER);
    h.pass(ms(200));
    h.reply(GRANTED);
    let (rejected, result) = h.results.remove(0);
    assert!(rejected == 1 && result.is_err() && h.results.is_empty(), "{result:?}");
    h.reply_freed();
    assert_eq!(h.sent_acquire().id.max_holders(), MAX_HOLDERS);
}

#[test]
fn busy_reply_rejects_those_that_cannot_fit_either() {
    let mut h = harness();
    h.request(1, false);
    h.share_at_once(2, READER);
    h.reply(BUSY);
    h.expect_busy(1);
    assert!(h.results.is_empty(), "the other one may fit");
    assert_eq!(h.sent_acquire().id.max_holders(), MAX_HOLDERS);
    h.reply(GRANTED);
    h.expect_grant(2);
}

/// Guarantee: G22.
#[test]
fn lost_share_ends_its_sections_and_no_other() {
    let mut h = harness();
    let permit = h.hold_share(1, permit(4));
    let reader = h.hold_share(2, READER);
    h.share(3, READER);
    let other = h.expect_grant(3);
    h.handle(Event::Lost(reader.grant.id.clone(), LockLost::Revoked));
    assert_eq!(h.lost.len(), 2);
    assert!(reader.remaining(h.now).is_zero() && other.remaining(h.now).is_zero());
    assert_eq!((h.held(), permit.end_reason()), (1, None));
    assert_eq!((h.sent_release().id.clone(), h.sent_release().block_for), (reader.grant.id.clone(), LOCK_DELAY));
    assert_eq!(h.end_guard(&other, GuardEnd::Released), Some(ReleaseOutcome::NotHeld));
    assert_eq!(h.calls.len(), 1, "released once");
}

/// Guarantee: G23.
#[test]
fn dropped_reader_blocks_the_key_after_the_others() {
    let mut h = harness();
    let first = h.hold_share(1, READER);
    h.share(2, READER);
    let second = h.expect_grant(2);
    h.end_guard(&first, GuardEnd::Dropped);
    h.pass(ms(300));
    h.end_guard(&second, GuardEnd::Released);
    assert_eq!(h.sent_release().block_for, LOCK_DELAY - ms(300));
}

/// The end of a block sends no message.
#[test]
fn queued_attempt_asks_at_the_end_of_a_block_of_its_process() {
    let mut h = harness();
    let held = h.hold_share(1, permit(2));
    h.share(2, permit(2));
    h.reply(QUEUED);
    h.end_guard(&held, GuardEnd::Dropped);
    h.reply_freed();
    h.advance(LOCK_DELAY);
    assert!(h.calls.is_empty());
    h.advance(BLOCK_GRACE);
    assert_eq!(h.calls.len(), 1);
}

/// Guarantee: G23.
#[test]
fn limit_of_one_reader_ends_its_section_alone() {
    let mut h = harness();
    let first = h.hold_share(1, READER);
    let limits = HoldLimits { max_hold: Some(ms(10)), ..HoldLimits::default() };
    h.send(LockRequest { limits, sharing: READER, ..request_of(2) });
    let limited = h.expect_grant(2);
    let longer = HoldLimits { max_hold: Some(ms(20)), ..limits };
    h.send(LockRequest { limits: longer, sharing: READER, ..request_of(3) });
    let last = h.expect_grant(3);
    for section in [&first, &limited, &last] {
        section.delivered();
    }
    // Before any renewal.
    assert_eq!((h.tracked, first.grant.next_check_at()), (2, h.now.saturating_add(ms(10))));
    h.pass(ms(10));
    assert_eq!(first.grant.next_check(h.now, h.now), NextCheck::CheckSection);
    h.handle(Event::CheckSection(first.grant.id.clone()));
    assert_eq!((h.lost.len(), limited.end_reason()), (1, Some(LockLost::HoldLimitReached)));
    assert!(first.end_reason().is_none() && h.calls.is_empty() && h.tracked == 3);
    assert_eq!(first.grant.next_check_at(), h.now.saturating_add(ms(10)), "the next limit");
    assert_eq!(h.end_guard(&limited, GuardEnd::Dropped), Some(ReleaseOutcome::NotHeld));
    h.end_guard(&last, GuardEnd::Released);
    h.end_guard(&first, GuardEnd::Released);
    assert_eq!(h.sent_release().block_for, LOCK_DELAY, "of the section that was lost");
}

#[test]
fn share_that_is_not_received_is_recalled() {
    let mut h = harness();
    let first = h.hold_share(1, READER);
    first.delivered();
    h.share(2, READER);
    let second = h.expect_grant(2);
    for _ in 0..2 {
        h.pass(OFFER_TTL);
        h.handle(Event::CheckSection(first.grant.id.clone()));
    }
    assert!(matches!(&h.recalled[..], [(2, LockError::TimedOut { .. })]), "{:?}", h.recalled);
    assert_eq!(h.end_guard(&second, GuardEnd::Undelivered), Some(ReleaseOutcome::StillHeld));
}

/// I8: the acquire in doubt may be executed after the release.
#[test]
fn doubt_of_the_attempt_stays_with_its_share() {
    let mut h = harness();
    h.share(1, permit(2));
    h.fail(unavailable());
    h.advance(ms(100));
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.end_guard(&section, GuardEnd::Released);
    h.reply_freed();
    assert!(!h.table.is_empty());
    h.advance(STORE_CALL_TIMEOUT);
    assert_eq!(h.sent_release().id, section.grant.id, "once more");
}

/// I7: a delayed offer to an id that has become a share frees nothing.
#[test]
fn late_offer_to_a_share_changes_nothing() {
    let mut h = harness();
    let section = h.hold_share(1, permit(2));
    h.handle(Event::Offered(section.grant.id.clone()));
    assert!(h.calls.is_empty());
}

/// The store keeps the place for less than the next waiter needs.
#[test]
fn share_with_a_short_lease_is_extended_before_its_section() {
    let mut h = harness();
    let limits = HoldLimits { lease: Lease::Fixed(ms(2_000)), ..HoldLimits::default() };
    let first = h.send(LockRequest { wait: WAIT, limits, sharing: permit(2), ..request_of(1) });
    h.share(2, permit(2));
    let short = h.sent_acquire().clone();
    h.cancel(first);
    h.reply(GRANTED);
    assert!(h.results.is_empty());
    assert_eq!((&h.sent_acquire().id, h.sent_acquire().lease > short.lease), (&short.id, true));
    h.reply(GRANTED);
    h.expect_grant(2);
}

#[test]
fn shutdown_waits_for_shares() {
    let mut h = harness();
    let section = h.hold_share(1, READER);
    let keys = h.table.shut_down();
    assert_eq!(keys.len(), 1);
    h.handle(Event::Shutdown);
    h.share(2, READER);
    assert!(matches!(h.results.remove(0), (2, Err(LockError::ShuttingDown))));
    assert!(!h.table.is_empty());
    h.end_guard(&section, GuardEnd::Released);
    h.finish();
}
