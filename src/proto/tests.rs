//! The state machine, event by event.

use std::{error::Error, time::Duration};

use super::{grant::NextCheck, hold_limits::HoldLimits, table::LockTable, *};
use crate::{
    error::QueueBound,
    limits::{
        FIRST_WAITER_RESERVE, MAX_PENDING_RELEASES, MAX_UNCLAIMED_OFFER_RELEASES, MAX_WAITERS_PER_KEY,
        MAX_WAITERS_PER_PROCESS, OFFER_TTL, STORE_TIMEOUT,
    },
    owner::Owner,
    store::StoreErrorKind,
};

type Outcome = Result<Arc<Section<NoDriver>>, LockError>;

/// A table, and what it wants done, without anything that does it.
struct World {
    table: LockTable<NoDriver>,
    ids: AcquisitionIds,
    now: BootInstant,
    key: LockKey,
    calls: Vec<StoreCall>,
    told: Vec<(u32, Outcome)>,
    recalled: Vec<(u32, LockError)>,
    alarms: Vec<BootInstant>,
    watched: usize,
    doubts: usize,
}

fn world() -> World {
    World {
        table: LockTable::default(),
        ids: AcquisitionIds::new("test", 1),
        now: BootInstant::from_nanos(1 << 40),
        key: LockKey::from(("n", 1)),
        calls: Vec::new(),
        told: Vec::new(),
        recalled: Vec::new(),
        alarms: Vec::new(),
        watched: 0,
        doubts: 0,
    }
}

impl World {
    fn act(&mut self, actions: Actions<NoDriver>) {
        for action in actions {
            match action {
                Action::Send(call) => self.calls.push(call),
                Action::Grant(who, section) => self.told.push((who, Ok(section))),
                Action::Reject(who, error) => self.told.push((who, Err(error))),
                Action::Recall(who, error) => self.recalled.push((who, error)),
                Action::WakeAt(at) => self.alarms.push(at),
                Action::Track(_) => self.watched += 1,
                Action::Verify(_) => self.doubts += 1,
                Action::Untrack(_) | Action::SectionEnded(_) | Action::ReleaseOutcome(..) => {}
            }
        }
    }

    fn on(&mut self, event: Event<NoDriver>) {
        let mut actions = Actions::new();
        self.table.handle_event(&self.key, &LazyNow::fixed(self.now), &self.ids, event, &mut actions);
        self.act(actions);
    }

    fn ask(&mut self, who: u32, waits: bool) -> u64 {
        self.ask_for(who, if waits { WAIT } else { Duration::ZERO }, None)
    }

    fn ask_for(&mut self, who: u32, wait: Duration, owner: Option<&Owner>) -> u64 {
        let owner = owner.cloned();
        let request = LockRequest { waiter: who, wait, owner, parent: None, limits: HoldLimits::default() };
        let mut actions = Actions::new();
        let place = self.table.request(&self.key, &LazyNow::fixed(self.now), &self.ids, request, &mut actions);
        self.act(actions);
        place
    }

    fn leave(&mut self, place: u64) -> Option<QueuePosition> {
        let mut actions = Actions::new();
        let ahead = self.table.cancel(&self.key, &LazyNow::fixed(self.now), &self.ids, place, &mut actions);
        self.act(actions);
        ahead
    }

    fn end(&mut self, section: &Arc<Section<NoDriver>>, ending: GuardEnd) -> Option<ReleaseOutcome> {
        let mut actions = Actions::new();
        let said = self.table.end_guard(&LazyNow::fixed(self.now), &self.ids, section, ending, &mut actions);
        self.act(actions);
        said
    }

    /// The one call that is under way.
    fn call(&mut self) -> StoreCall {
        assert_eq!(self.calls.len(), 1, "{:?}", self.calls);
        self.calls.remove(0)
    }

    fn answer(&mut self, answer: AcquireReply) {
        let call = self.call();
        self.on(Event::Acquired(call.number, Ok(answer)));
    }

    /// This one is told that it is its turn, and nobody else is told anything.
    fn turn(&mut self, who: u32) -> Arc<Section<NoDriver>> {
        assert_eq!(self.told.len(), 1, "{:?}", self.told);
        match self.told.remove(0) {
            (told, Ok(section)) if told == who => section,
            other => panic!("{other:?}"),
        }
    }

    fn later(&mut self, by: Duration) {
        self.now = self.now.saturating_add(by);
        while let Some(at) = self.alarms.iter().position(|at| *at <= self.now) {
            let at = self.alarms.remove(at);
            self.on(Event::Timer(at));
        }
    }

    fn released(&mut self) {
        let call = self.call();
        assert!(matches!(call.op, StoreOp::Release { .. }), "{call:?}");
        self.on(Event::Released(call.number, Ok(ReleaseReply::Freed)));
    }
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const WAIT: Duration = Duration::from_secs(600);
const HELD: AcquireReply = AcquireReply::Busy { lease_left: ms(20_000) };
const IN_LINE: AcquireReply = AcquireReply::Queued { ahead: 0, lease_left: ms(20_000) };
const GRANTED: AcquireReply = AcquireReply::Granted { fence: 7 };

#[test]
fn impossible_fence_is_an_error_and_its_grant_is_released() {
    let mut w = world();
    w.ask(1, true);
    w.answer(AcquireReply::Granted { fence: u64::MAX });
    assert!(
        matches!(&w.told[..], [(1, Err(LockError::Store(e)))] if e.kind() == StoreErrorKind::Protocol),
        "{:?}",
        w.told
    );
    w.released();
}

/// Less than a quarter of the lease is left: what would begin now would not get far.
#[test]
fn grant_that_arrives_too_late_is_released_and_retried() {
    let mut w = world();
    w.ask(1, true);
    w.now = w.now.saturating_add(Duration::from_secs(23));
    w.answer(GRANTED);
    assert!(w.told.is_empty());
    let first = w.calls[0].id.clone();
    w.released();
    let again = w.call();
    assert!(matches!(again.op, StoreOp::Acquire { .. }) && again.id != first, "under an id of its own");
    w.on(Event::Acquired(again.number, Ok(GRANTED)));
    w.turn(1);
}

/// Their calls may never be polled again. A call that does not wait is answered by the store
/// alone.
#[test]
fn timed_out_waiters_are_skipped_at_a_handoff() {
    let (mut w, owner) = (world(), Owner::new());
    w.ask(0, true);
    w.answer(GRANTED);
    let section = w.turn(0);
    w.ask_for(1, ms(10), None);
    w.ask_for(2, ms(21), Some(&owner));
    w.ask_for(3, ms(20), Some(&owner));
    w.ask_for(4, ms(10), None);
    w.ask_for(5, ms(30), None);
    w.now = w.now.saturating_add(ms(20));
    assert_eq!(w.end(&section, GuardEnd::Released), Some(ReleaseOutcome::HandedOff));
    let (1, Err(LockError::TimedOut { lease_left, ahead: 1, .. })) = w.told.remove(0) else { panic!("{:?}", w.told) };
    assert_eq!(lease_left, section.grant.remaining(w.now));
    let section = w.turn(2);
    assert_eq!(w.table.hold_count_of(&section, w.now), 1, "not the later one of its owner");
    assert_eq!(w.end(&section, GuardEnd::Released), Some(ReleaseOutcome::HandedOff));
    let late: Vec<_> = w.told.drain(..2).map(|(who, told)| (who, told.is_err())).collect();
    assert_eq!(late, [(3, true), (4, true)]);
    let section = w.turn(5);
    w.ask_for(6, ms(10), None);
    w.now = w.now.saturating_add(ms(10));
    assert_eq!(w.end(&section, GuardEnd::Released), None, "nobody waits for it any more");
    assert!(matches!(&w.told[..], [(6, Err(LockError::TimedOut { .. }))]), "{:?}", w.told);
    w.released();
    assert!(w.table.is_empty());
}

#[test]
fn timed_out_waiters_send_no_acquire() {
    let mut w = world();
    w.ask(0, true);
    w.answer(GRANTED);
    let section = w.turn(0);
    w.ask_for(1, ms(10), None);
    assert_eq!(w.end(&section, GuardEnd::Dropped), None);
    w.now = w.now.saturating_add(ms(10));
    w.released();
    assert!(matches!(&w.told[..], [(1, Err(LockError::TimedOut { ahead: 1, .. }))]), "{:?}", w.told);
    assert!(w.table.is_empty() && w.calls.is_empty(), "{:?}", w.calls);
    w.told.clear();
    // The wait of the only waiter ends while the store is asked.
    w.ask_for(2, ms(10), None);
    w.now = w.now.saturating_add(ms(10));
    w.answer(GRANTED);
    assert!(matches!(&w.told[..], [(2, Err(LockError::TimedOut { ahead: 1, .. }))]), "{:?}", w.told);
    w.released();
    assert!(w.table.is_empty());
}

/// All timers of a process that was stopped fire at once, behind the answer of the store.
#[test]
fn stopped_process_skips_only_timed_out_waiters() {
    let mut w = world();
    w.ask_for(1, Duration::ZERO, None);
    w.ask_for(2, ms(500), None);
    w.ask_for(3, ms(1_500), None);
    w.now = w.now.saturating_add(ms(1_000));
    w.answer(GRANTED);
    let section = w.turn(1);
    w.end(&section, GuardEnd::Released);
    assert!(matches!(w.told.remove(0), (2, Err(LockError::TimedOut { .. }))));
    w.turn(3);
}

/// H24 of the protocol: a place would be lost by a question that does not ask for it.
#[test]
fn queued_attempt_keeps_requesting_queue() {
    let mut w = world();
    w.ask(1, false);
    let call = w.call();
    assert!(matches!(call.op, StoreOp::Acquire { if_busy: IfBusy::Fail, .. }));
    w.ask(2, true);
    w.on(Event::Acquired(call.number, Ok(HELD)));
    assert!(matches!(w.told.remove(0), (1, Err(LockError::Busy { .. }))));
    let call = w.call();
    assert!(matches!(call.op, StoreOp::Acquire { if_busy: IfBusy::Enqueue, .. }), "somebody waits");
    w.on(Event::Acquired(call.number, Ok(IN_LINE)));
    w.later(ms(1_200));
    assert!(matches!(w.call().op, StoreOp::Acquire { if_busy: IfBusy::Enqueue, .. }), "and checks in");
}

/// I7: an answer that was on its way may be older than the hint.
#[test]
fn hint_during_a_store_call_is_not_lost() {
    let mut w = world();
    w.ask(1, true);
    let call = w.call();
    w.on(Event::Offered(call.id.clone()));
    w.on(Event::Offered(call.id.clone()));
    assert!(w.calls.is_empty(), "one call at a time");
    w.on(Event::Acquired(call.number, Ok(IN_LINE)));
    w.answer(GRANTED);
    w.turn(1);
}

/// I7, I8: what is offered to an id that is long forgotten is given on, and not waited for.
#[test]
fn offer_without_a_waiter_is_released() {
    let mut w = world();
    let gone = w.ids.next();
    w.on(Event::Offered(gone.clone()));
    assert_eq!(w.calls[0].id, gone);
    w.on(Event::Offered(gone));
    w.released();
    assert!(w.table.is_empty());
}

/// Anybody who can send messages can offer: what is asked of the store because of it has a bound.
#[test]
fn offers_to_forgotten_ids_are_released_a_few_at_a_time() {
    let mut w = world();
    for n in 0..1_000 {
        w.key = LockKey::from(("n", n));
        let gone = w.ids.next();
        w.on(Event::Offered(gone));
    }
    assert_eq!((w.calls.len(), w.table.len()), (MAX_UNCLAIMED_OFFER_RELEASES, MAX_UNCLAIMED_OFFER_RELEASES));
    for (n, call) in std::mem::take(&mut w.calls).into_iter().enumerate() {
        w.key = LockKey::from(("n", n));
        // Without an answer the lease of the offer ends it.
        let answer = if n % 2 == 0 { Ok(ReleaseReply::NotHolder) } else { Err(lost_answer()) };
        w.on(Event::Released(call.number, answer));
    }
    assert!(w.table.is_empty());
    let gone = w.ids.next();
    w.on(Event::Offered(gone));
    w.released();
}

/// I7: whoever can send messages cannot end what runs.
#[test]
fn revocation_message_is_verified_and_ends_nothing() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let section = w.turn(1);
    let other = w.ids.next();
    w.on(Event::Revoked(other));
    assert_eq!(w.doubts, 0, "of somebody else");
    w.on(Event::Revoked(section.grant.id.clone()));
    assert_eq!(w.doubts, 1);
    assert!(w.calls.is_empty() && !section.remaining(w.now).is_zero());
    w.on(Event::Lost(section.grant.id.clone(), LockLost::Revoked));
    assert!(section.remaining(w.now).is_zero(), "the store has said so");
}

/// A flood of messages must not keep it from beginning.
#[test]
fn repeated_revocation_messages_cost_one_verification() {
    let mut w = world();
    w.ask(1, true);
    let call = w.call();
    w.on(Event::Revoked(call.id.clone()));
    w.on(Event::Acquired(call.number, Ok(GRANTED)));
    let call = w.call();
    w.on(Event::Revoked(call.id.clone()));
    w.on(Event::Acquired(call.number, Ok(GRANTED)));
    w.turn(1);
    assert_eq!(w.doubts, 1, "and is asked about while it runs");
}

/// The same for a process that has gone on after a yield.
#[test]
fn revocation_message_during_a_yield_is_verified() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.ask(2, true);
    w.now = w.now.saturating_add(ms(110));
    w.end(&section, GuardEnd::Released);
    let call = w.call();
    w.on(Event::Revoked(call.id.clone()));
    w.on(Event::Yielded(call.number, Ok(YieldReply::Extended { fence: 8 })));
    w.turn(2);
    assert_eq!(w.doubts, 1);
}

/// It may be older than the yield or newer, and only the answer to the yield tells which.
#[test]
fn refused_renewal_during_a_yield_waits_for_the_yield_reply() {
    for is_lost in [false, true] {
        let mut w = world();
        w.ask(1, true);
        w.answer(GRANTED);
        let section = w.turn(1);
        w.ask(2, true);
        w.now = w.now.saturating_add(ms(110));
        w.end(&section, GuardEnd::Released);
        let call = w.call();
        w.on(Event::Lost(call.id.clone(), LockLost::Revoked));
        let answer = if is_lost { YieldReply::Extended { fence: 8 } } else { YieldReply::NotHolder(IN_LINE) };
        w.on(Event::Yielded(call.number, Ok(answer)));
        // Refused after it was extended, it is lost, and nothing begins under it.
        let loss = section.grant.end_reason().filter(|why| why.is_loss());
        assert_eq!(loss, is_lost.then_some(LockLost::Revoked));
        assert!(w.told.is_empty(), "{:?}", w.told);
        if is_lost {
            w.released();
        }
        w.later(ms(1_300));
        w.answer(AcquireReply::Granted { fence: 9 });
        w.turn(2);
    }
}

/// I7: the message ends nothing, and no other section begins before the store has said that it
/// is false.
#[test]
fn doubted_grant_is_handed_off_after_the_store_reply() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.ask(2, true);
    w.ask(3, true);
    section.grant.verify(w.now);
    w.end(&section, GuardEnd::Released);
    let call = w.call();
    assert!(matches!(call.op, StoreOp::Yield { .. }), "{call:?}");
    w.on(Event::Yielded(call.number, Ok(YieldReply::Extended { fence: 8 })));
    let section = w.turn(2);
    w.end(&section, GuardEnd::Released);
    w.turn(3);
}

/// However many keys are held, a gap is for those that wait.
#[test]
fn gap_rechecks_only_keys_queued_in_the_store() {
    let mut w = world();
    for n in 0..100 {
        w.key = LockKey::from(("held", n));
        w.ask(1, true);
        w.answer(GRANTED);
        w.turn(1);
    }
    w.key = LockKey::from(("n", 1));
    w.ask(1, true);
    w.answer(IN_LINE);
    assert_eq!(w.table.lagged(w.now), [w.key.clone()]);
    w.on(Event::Lagged);
    w.answer(GRANTED);
    w.turn(1);
    assert_eq!(w.table.lagged(w.now), []);
    w.key = LockKey::from(("n", 2));
    w.ask(1, true);
    w.now = w.now.saturating_add(ms(1));
    assert_eq!(w.table.lagged(w.now), [], "it is asked at this moment");
    w.answer(IN_LINE);
    w.answer(IN_LINE);
    assert!(w.calls.is_empty(), "once more, because its answer may be older than the gap");
}

#[test]
fn task_is_rejected_if_its_request_holds_or_awaits_the_key() {
    let mut w = world();
    let (parent, other) = (Owner::new(), Owner::new());
    let ask = |w: &mut World, who, owner: Option<&Owner>, parent: Option<&Owner>, waits| {
        let (owner, parent) = (owner.cloned(), parent.cloned());
        let wait = if waits { WAIT } else { Duration::ZERO };
        let request = LockRequest { waiter: who, wait, owner, parent, limits: HoldLimits::default() };
        let mut actions = Actions::new();
        w.table.request(&w.key, &LazyNow::fixed(w.now), &w.ids, request, &mut actions);
        w.act(actions);
    };
    ask(&mut w, 1, Some(&parent), None, true);
    ask(&mut w, 2, None, Some(&parent), true);
    assert!(matches!(w.told.remove(0), (2, Err(LockError::WouldDeadlock))), "it waits for it");
    w.answer(GRANTED);
    let section = w.turn(1);
    ask(&mut w, 3, None, Some(&parent), true);
    assert!(matches!(w.told.remove(0), (3, Err(LockError::WouldDeadlock))), "it has it");
    ask(&mut w, 4, None, Some(&parent), false);
    assert!(matches!(w.told.remove(0), (4, Err(LockError::Busy { .. }))), "it does not wait");
    ask(&mut w, 5, None, Some(&other), true);
    assert!(w.told.is_empty(), "another request's task");
    parent.close();
    ask(&mut w, 6, None, Some(&parent), true);
    assert!(w.told.is_empty(), "the request is over");
    w.end(&section, GuardEnd::Released);
    w.turn(5);
}

#[test]
fn timeout_during_a_failing_release_reports_the_store_error() {
    let mut w = world();
    w.ask(1, false);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.end(&section, GuardEnd::Released);
    let call = w.call();
    let place = w.ask(2, true);
    w.on(Event::Released(call.number, Err(lost_answer())));
    let ahead = w.leave(place).expect("it waits");
    assert!(ahead.store_error.is_some() && !ahead.is_contended, "{ahead:?}");
}

/// As the watchdog does: whenever the grant wants to be looked at.
fn look_after(w: &mut World, section: &Arc<Section<NoDriver>>, by: Duration) {
    let end = w.now.saturating_add(by);
    while section.grant.next_check_at() <= end && section.grant.end_reason().is_none() {
        w.now = w.now.max(section.grant.next_check_at());
        match section.grant.next_check(w.now, w.now) {
            NextCheck::CheckSection => w.on(Event::CheckSection(section.grant.id.clone())),
            NextCheck::Renew(_) => section.grant.extend(section.grant.lease(), w.now, w.now),
            NextCheck::Sleep(_) | NextCheck::Ended => {}
        }
    }
    w.now = w.now.max(end);
}

#[test]
fn grant_not_taken_within_the_offer_ttl_goes_on() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.ask(2, true);
    look_after(&mut w, &section, OFFER_TTL - ms(1));
    assert!(w.recalled.is_empty(), "{:?}", w.recalled);
    look_after(&mut w, &section, ms(1));
    assert!(matches!(w.recalled.remove(0), (1, LockError::TimedOut { ahead: 1, .. })));
    assert_eq!(w.end(&section, GuardEnd::Undelivered), Some(ReleaseOutcome::HandedOff));
    // More than a tenth of a second has passed: other processes have their turn first.
    let call = w.call();
    w.on(Event::Yielded(call.number, Ok(YieldReply::Extended { fence: 8 })));
    w.turn(2);
}

#[test]
fn call_without_wait_that_misses_its_grant_is_busy() {
    let mut w = world();
    w.ask(1, false);
    w.answer(GRANTED);
    let section = w.turn(1);
    look_after(&mut w, &section, OFFER_TTL);
    assert!(matches!(w.recalled.remove(0), (1, LockError::Busy { ahead: 0, .. })));
    assert_eq!(w.end(&section, GuardEnd::Undelivered), None);
    w.released();
    assert!(w.table.is_empty());
}

#[test]
fn taken_grant_is_not_recalled_or_checked_again() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let section = w.turn(1);
    section.delivered();
    look_after(&mut w, &section, OFFER_TTL - ms(1_000));
    assert!(
        section.grant.next_check_at() >= w.now.saturating_add(Duration::from_secs(7)),
        "nothing before its renewal"
    );
    look_after(&mut w, &section, Duration::from_secs(300));
    assert!(w.recalled.is_empty() && !section.remaining(w.now).is_zero());
}

/// It was stopped: what it was sent before gets the rest of the time once more.
#[test]
fn stopped_process_gets_time_to_take_its_grants() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.now = w.now.saturating_add(Duration::from_secs(20));
    look_after(&mut w, &section, STORE_TIMEOUT - ms(1));
    assert!(w.recalled.is_empty(), "{:?}", w.recalled);
    look_after(&mut w, &section, ms(1));
    assert_eq!(w.recalled.len(), 1);
}

/// Each caller of one owner counts as one hold, whenever it was sent its section.
#[test]
fn only_callers_that_miss_their_grant_are_recalled() {
    let mut w = world();
    let owner = Owner::new();
    let ask = |w: &mut World, who| {
        let owner = Some(owner.clone());
        let request = LockRequest { waiter: who, wait: WAIT, owner, parent: None, limits: HoldLimits::default() };
        let mut actions = Actions::new();
        w.table.request(&w.key, &LazyNow::fixed(w.now), &w.ids, request, &mut actions);
        w.act(actions);
    };
    ask(&mut w, 1);
    ask(&mut w, 2);
    w.answer(GRANTED);
    assert_eq!(w.told.len(), 2);
    let Ok(section) = w.told.remove(0).1 else { panic!("its turn") };
    w.told.clear();
    look_after(&mut w, &section, OFFER_TTL - ms(500));
    ask(&mut w, 3);
    w.turn(3);
    assert_eq!(w.table.hold_count_of(&section, w.now), 3);
    look_after(&mut w, &section, ms(500));
    let recalled: Vec<_> = w.recalled.drain(..).map(|(who, _)| who).collect();
    assert_eq!(recalled, [1, 2], "not the one that was sent its section later");
    // The first one took it in the meantime.
    section.delivered();
    assert_eq!(w.end(&section, GuardEnd::Undelivered), Some(ReleaseOutcome::StillHeld));
    look_after(&mut w, &section, OFFER_TTL);
    let recalled: Vec<_> = w.recalled.drain(..).map(|(who, _)| who).collect();
    assert_eq!(recalled, [3]);
    assert_eq!(w.end(&section, GuardEnd::Undelivered), Some(ReleaseOutcome::StillHeld));
    assert_eq!((w.table.hold_count_of(&section, w.now), w.calls.len()), (1, 0));
    for _ in 0..1_000 {
        ask(&mut w, 4);
        section.delivered();
    }
    w.told.clear();
    look_after(&mut w, &section, OFFER_TTL);
    assert!(w.recalled.is_empty(), "all were taken");
}

#[test]
fn gap_in_the_events_rechecks_all_waiting_keys() {
    let mut w = world();
    w.ask(1, true);
    w.answer(IN_LINE);
    w.on(Event::Lagged);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.on(Event::Lagged);
    assert!(w.calls.is_empty(), "who holds it does not ask");
    w.end(&section, GuardEnd::Released);
    w.released();
    assert!(w.table.is_empty());
}

/// I8: what got no answer may be done yet; the second give-back comes when it cannot.
#[test]
fn unanswered_acquire_is_released_again_when_expired() {
    let mut w = world();
    let place = w.ask(1, true);
    let call = w.call();
    let error = || StoreError::new("test", "acquire", StoreErrorKind::Unavailable);
    w.on(Event::Acquired(call.number, Err(error())));
    assert!(w.leave(place).is_some_and(|ahead| ahead.store_error.is_some()), "nobody knows whose it is");
    w.released();
    assert!(!w.table.is_empty(), "not forgotten yet");
    w.later(ms(499));
    assert!(w.calls.is_empty());
    w.later(ms(2));
    w.released();
    assert!(w.table.is_empty());
}

fn lost_answer() -> StoreError {
    StoreError::new("test", "acquire", StoreErrorKind::Unavailable)
}

/// I8: it was sent before that, so that it may have been done before, too, however late its answer comes.
#[test]
fn release_sent_before_an_acquire_expires_is_not_final() {
    let mut w = world();
    w.ask(1, true);
    let call = w.call();
    w.on(Event::Acquired(call.number, Err(lost_answer())));
    w.later(ms(20));
    w.answer(GRANTED);
    let section = w.turn(1);
    w.end(&section, GuardEnd::Released);
    w.now = w.now.saturating_add(ms(600));
    w.released();
    assert!(!w.table.is_empty(), "the first acquire may have been done after it");
    w.later(ms(2));
    w.released();
    assert!(w.table.is_empty());
}

/// I8: the same, where the store says that somebody else has it.
#[test]
fn busy_reply_before_an_acquire_expires_does_not_settle_it() {
    let mut w = world();
    w.ask(1, false);
    let call = w.call();
    w.on(Event::Acquired(call.number, Err(lost_answer())));
    w.later(ms(20));
    w.now = w.now.saturating_add(ms(490));
    w.answer(HELD);
    assert!(matches!(w.told.remove(0), (1, Err(LockError::Busy { .. }))));
    w.released();
    assert!(w.table.is_empty(), "and this one was sent when it was void");
}

/// I8: the same, where others have their turn.
#[test]
fn yield_before_an_acquire_expires_does_not_settle_it() {
    let mut w = world();
    w.ask(1, true);
    let call = w.call();
    w.on(Event::Acquired(call.number, Err(lost_answer())));
    w.later(ms(20));
    w.answer(GRANTED);
    let section = w.turn(1);
    w.ask(2, true);
    w.now = w.now.saturating_add(ms(110));
    w.end(&section, GuardEnd::Released);
    let call = w.call();
    w.now = w.now.saturating_add(ms(450));
    let old = call.id.clone();
    w.on(Event::Yielded(call.number, Ok(YieldReply::NotHolder(IN_LINE))));
    w.later(ms(2));
    assert_eq!(w.calls.remove(0).id, old);
}

/// I7: an operator takes the key away while the answer that grants it is on its way.
#[test]
fn key_revoked_before_its_grant_arrives_does_not_start() {
    let mut w = world();
    w.ask(1, true);
    let call = w.call();
    w.on(Event::Revoked(call.id.clone()));
    w.on(Event::Acquired(call.number, Ok(GRANTED)));
    assert!(w.told.is_empty(), "the store is asked first");
    w.answer(IN_LINE);
    w.on(Event::Offered(call.id));
    w.answer(AcquireReply::Granted { fence: 8 });
    w.turn(1);
}

/// The same, where the one that is taken away from is the next one of a yield.
#[test]
fn key_revoked_before_its_yield_reply_does_not_start() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.ask(2, true);
    w.now = w.now.saturating_add(ms(110));
    w.end(&section, GuardEnd::Released);
    let call = w.call();
    let StoreOp::Yield { next_id: next, fence: 7, .. } = call.op else { panic!("{call:?}") };
    w.on(Event::Revoked(next));
    w.on(Event::Yielded(call.number, Ok(YieldReply::NotHolder(AcquireReply::Granted { fence: 8 }))));
    assert!(w.told.is_empty(), "the store is asked first");
    w.answer(AcquireReply::Granted { fence: 8 });
    w.turn(2);
}

/// The store was down when the key was given back. Whoever comes later is not told of that, but whose the key is now.
#[test]
fn request_after_a_silent_release_acquires_anew() {
    let mut w = world();
    w.ask(1, false);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.end(&section, GuardEnd::Released);
    let unanswered = || StoreError::new("test", "release", StoreErrorKind::Unavailable);
    let call = w.call();
    w.on(Event::Released(call.number, Err(unanswered())));
    w.alarms.clear();
    w.now = w.now.saturating_add(ms(1_500));
    w.ask(2, false);
    assert!(w.told.is_empty(), "the store is asked");
    w.answer(AcquireReply::Granted { fence: 8 });
    w.turn(2);
    // And it is there again: what it did not answer is asked for at once.
    assert!(matches!(w.call().op, StoreOp::Release { .. }));
}

/// A store may have fallen silent since it said last where we stand.
#[test]
fn request_that_joins_a_silent_queue_acquires_at_once() {
    let mut w = world();
    w.ask(1, true);
    w.answer(IN_LINE);
    w.now = w.now.saturating_add(ms(499));
    w.ask(2, true);
    assert!(w.calls.is_empty(), "it was said just now");
    w.now = w.now.saturating_add(ms(1));
    w.ask(3, true);
    w.ask(4, true);
    assert!(matches!(w.call().op, StoreOp::Acquire { if_busy: IfBusy::Enqueue, .. }), "once for all of them");
}

/// I4, I5: who would watch a grant under which nothing has begun yet?
#[test]
fn grant_that_yields_before_its_first_section_is_watched() {
    let mut w = world();
    w.ask(1, true);
    let terms = HoldLimits { lock_delay: ms(5_000), ..HoldLimits::default() };
    let request = LockRequest { waiter: 2, wait: WAIT, owner: None, parent: None, limits: terms };
    let mut actions = Actions::new();
    let place = w.table.request(&w.key, &LazyNow::fixed(w.now), &w.ids, request, &mut actions);
    w.act(actions);
    w.leave(place - 1);
    w.answer(GRANTED);
    assert!(w.told.is_empty() && w.watched == 0, "the store is to keep it for longer first");
    let call = w.call();
    w.on(Event::Yielded(call.number, Ok(YieldReply::Extended { fence: 8 })));
    w.turn(2);
    assert_eq!(w.watched, 1);
}

/// The limit of a section goes with it: the watchdog has nothing to look for in between.
#[test]
fn max_hold_between_two_sections_ends_neither() {
    let mut w = world();
    let terms = HoldLimits { max_hold: Some(ms(200)), ..HoldLimits::default() };
    let request = LockRequest { waiter: 1, wait: WAIT, owner: None, parent: None, limits: terms };
    let mut actions = Actions::new();
    w.table.request(&w.key, &LazyNow::fixed(w.now), &w.ids, request, &mut actions);
    w.act(actions);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.ask(2, true);
    w.now = w.now.saturating_add(ms(150));
    w.end(&section, GuardEnd::Released);
    assert!(matches!(w.call().op, StoreOp::Yield { .. }));
    assert!(section.grant.next_check_at() > w.now.saturating_add(ms(60)), "nothing before its renewal");
}

/// I2
#[test]
fn no_acquire_while_too_many_releases_are_pending() {
    let mut w = world();
    for n in 0..MAX_PENDING_RELEASES {
        w.key = LockKey::from(("n", n));
        w.ask(1, false);
        w.answer(GRANTED);
        let section = w.turn(1);
        w.end(&section, GuardEnd::Released);
        w.calls.clear();
    }
    w.key = LockKey::from(("one", "more"));
    w.ask(1, true);
    assert!(w.calls.is_empty(), "its way back could not be walked");
    let (1, Err(LockError::Store(error))) = w.told.remove(0) else { panic!("{:?}", w.told) };
    assert_eq!((error.operation(), error.kind()), ("acquire", StoreErrorKind::Unavailable));
    let bound = error.source().expect("the bound is named");
    assert!(
        bound.to_string().starts_with(&format!("{MAX_PENDING_RELEASES} releases have not reached the store")),
        "{bound}"
    );
    assert!(bound.source().is_none(), "no release has failed yet");
    assert_eq!(w.table.len(), MAX_PENDING_RELEASES);
}

#[test]
fn pending_release_limit_reports_the_last_store_error() {
    let mut w = world();
    for n in 0..MAX_PENDING_RELEASES {
        w.key = LockKey::from(("n", n));
        w.ask(1, false);
        w.answer(GRANTED);
        let section = w.turn(1);
        w.end(&section, GuardEnd::Released);
        let call = w.call();
        if n == 0 {
            let cause = std::io::Error::other("no route");
            let error = StoreError::new("test", "release", StoreErrorKind::Unavailable).with_source(cause);
            w.on(Event::Released(call.number, Err(error)));
        }
    }
    w.key = LockKey::from(("one", "more"));
    w.ask(1, true);
    let (1, Err(error)) = w.told.remove(0) else { panic!("{:?}", w.told) };
    let chain = std::iter::successors(Some(&error as &dyn Error), |&e| e.source());
    let texts: Vec<_> = chain.map(ToString::to_string).collect();
    let [_, call, bound, last, cause] = &texts[..] else { panic!("{texts:?}") };
    assert!(call.contains("acquire") && !call.contains("release"), "{call}");
    assert!(bound.contains("releases have not reached the store yet"), "{bound}");
    assert!(last.contains("the test store") && last.contains("release"), "{last}");
    assert_eq!(cause, "no route");
    for n in 1..texts.len() {
        assert!(!texts[..n].iter().any(|text| text.contains(&texts[n])), "repeated: {texts:?}");
    }
}

fn failover() -> StoreError {
    StoreError::new("test", "acquire", StoreErrorKind::Failover)
}

/// Answers each call with a failover, for this long.
fn fail_over(w: &mut World, mut left: Duration) -> usize {
    let mut calls = 0;
    while !left.is_zero() {
        while let Some(call) = w.calls.pop() {
            assert!(matches!(call.op, StoreOp::Acquire { .. }), "{call:?}");
            calls += 1;
            w.on(Event::Acquired(call.number, Err(failover())));
        }
        w.later(ms(10));
        left = left.saturating_sub(ms(10));
    }
    calls
}

#[test]
fn waiting_call_is_retried_until_its_own_timeout() {
    let mut w = world();
    let place = w.ask(1, true);
    let calls = fail_over(&mut w, Duration::from_secs(20));
    assert!(w.told.is_empty(), "{:?}", w.told);
    assert!((20..40).contains(&calls), "a bounded backoff: {calls}");
    assert!(w.leave(place).is_some_and(|ahead| ahead.store_error.is_some_and(|e| e.is_failover())));
    let mut w = world();
    w.ask(2, true);
    fail_over(&mut w, Duration::from_secs(5));
    while w.calls.is_empty() {
        w.later(ms(10));
    }
    w.answer(GRANTED);
    w.turn(2);
}

#[test]
fn call_without_wait_fails_after_the_store_timeout() {
    let mut w = world();
    w.ask(1, false);
    fail_over(&mut w, ms(990));
    assert!(w.told.is_empty(), "{:?}", w.told);
    w.ask(2, true);
    fail_over(&mut w, ms(500));
    assert!(matches!(&w.told[..], [(1, Err(LockError::Store(e)))] if e.is_failover()), "{:?}", w.told);
    w.told.clear();
    w.ask(3, false);
    fail_over(&mut w, ms(1_200));
    assert!(matches!(&w.told[..], [(3, Err(LockError::Store(e)))] if e.is_failover()), "{:?}", w.told);
    w.told.clear();
    w.later(ms(1_000));
    w.answer(GRANTED);
    w.turn(2);
}

/// The server that was being promoted does not answer any more: that is an outage.
#[test]
fn outage_ends_retries_after_the_store_timeout() {
    let mut w = world();
    w.ask(1, true);
    fail_over(&mut w, Duration::from_secs(3));
    w.later(ms(1_000));
    let began = w.now;
    while w.told.is_empty() {
        if let Some(call) = w.calls.pop() {
            w.on(Event::Acquired(call.number, Err(lost_answer())));
        }
        w.later(ms(10));
    }
    let took = w.now.saturating_duration_since(began);
    assert!(matches!(&w.told[..], [(1, Err(LockError::Store(e)))] if !e.is_failover()), "{:?}", w.told);
    assert!(took >= ms(900) && took < ms(1_200), "{took:?}");
}

/// Its own release failed over: the waiter asks for the key itself, and is not rejected.
#[test]
fn waiter_outlives_a_failover_that_delays_a_release() {
    let mut w = world();
    w.ask(1, false);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.end(&section, GuardEnd::Released);
    let call = w.call();
    let error = StoreError::new("test", "release", StoreErrorKind::Failover);
    w.on(Event::Released(call.number, Err(error)));
    w.ask(2, true);
    w.ask(3, false);
    w.now = w.now.saturating_add(ms(1_001));
    w.later(ms(0));
    assert!(matches!(&w.told[..], [(3, Err(LockError::Store(e)))] if e.is_failover()), "{:?}", w.told);
    w.told.clear();
    let asks = w.calls.iter().position(|call| matches!(call.op, StoreOp::Acquire { .. })).expect("asked");
    let call = w.calls.remove(asks);
    w.on(Event::Acquired(call.number, Ok(AcquireReply::Granted { fence: 8 })));
    w.turn(2);
}

/// I9, I11: asked for until the lease and the place are over anyway, and no longer.
#[test]
fn pending_release_is_repeated_until_the_lease_ends() {
    let mut w = world();
    w.ask(1, false);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.end(&section, GuardEnd::Dropped);
    let (began, mut repeats) = (w.now, 0);
    while !w.table.is_empty() {
        if let Some(call) = w.calls.pop() {
            assert!(matches!(call.op, StoreOp::Release { block_for } if block_for == ms(1000)), "the same each time");
            repeats += 1;
            w.on(Event::Released(call.number, Err(StoreError::new("t", "release", StoreErrorKind::Unavailable))));
        }
        w.later(ms(10));
    }
    let took = w.now.saturating_duration_since(began);
    assert!(took > Duration::from_secs(41) && took < Duration::from_secs(43) && repeats < 60, "{took:?}, {repeats}");
}

/// I10: no hand-over from a section that ended badly.
#[test]
fn aborted_section_is_not_handed_off() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.ask(2, true);
    assert_eq!(w.end(&section, GuardEnd::Dropped), None);
    let call = w.call();
    assert!(matches!(call.op, StoreOp::Release { block_for } if block_for == ms(1000)));
    assert!(w.told.is_empty());
    w.on(Event::Released(call.number, Ok(ReleaseReply::Freed)));
    let call = w.call();
    assert!(matches!(call.op, StoreOp::Acquire { lease, .. } if lease == Duration::from_secs(31)), "and its delay");
}

/// I1, I9: whatever is said of a section that is over ends nobody else's.
#[test]
fn lost_section_ends_no_other_section() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let lost = w.turn(1);
    w.ask(2, true);
    let owner = lost.grant.id.clone();
    w.on(Event::Lost(owner.clone(), LockLost::Revoked));
    w.on(Event::Lost(owner, LockLost::Revoked));
    w.released();
    w.answer(AcquireReply::Granted { fence: 8 });
    let next = w.turn(2);
    assert_eq!(w.end(&lost, GuardEnd::Dropped), Some(ReleaseOutcome::NotHeld));
    assert!(w.calls.is_empty() && !next.remaining(w.now).is_zero() && lost.remaining(w.now).is_zero());
}

#[test]
fn yielded_waiters_keep_their_order_under_a_new_id() {
    let mut w = world();
    w.ask(1, true);
    w.answer(GRANTED);
    let first = w.turn(1);
    w.ask(2, true);
    w.ask(3, true);
    w.now = w.now.saturating_add(ms(100));
    assert_eq!(w.end(&first, GuardEnd::Released), Some(ReleaseOutcome::HandedOff));
    let call = w.call();
    let StoreOp::Yield { next_id: next, .. } = call.op else { panic!("{call:?}") };
    w.ask(4, false);
    assert!(matches!(w.told.remove(0), (4, Err(LockError::Busy { ahead: 3, .. }))), "no section runs, and it is taken");
    w.on(Event::Yielded(call.number, Ok(YieldReply::NotHolder(IN_LINE))));
    w.on(Event::Offered(next.clone()));
    assert_eq!(w.calls[0].id, next);
    w.answer(AcquireReply::Granted { fence: 9 });
    let second = w.turn(2);
    assert!(second.token > first.token);
    w.end(&second, GuardEnd::Released);
    assert!(w.turn(3).token > second.token, "no round trip");
    assert!(w.calls.is_empty());
}

/// So many wait for this key now, which is held, until one is rejected: by which bound.
fn flood(w: &mut World, n: usize) -> (usize, QueueBound) {
    w.key = LockKey::from(("n", n));
    w.ask(0, true);
    w.answer(GRANTED);
    w.turn(0);
    for waiting in 0.. {
        w.ask(1, true);
        if let Some((_, told)) = w.told.pop() {
            let Err(LockError::QueueFull { ahead, bound }) = told else { panic!("{told:?}") };
            assert_eq!(ahead, waiting + 1);
            return (waiting, bound);
        }
    }
    unreachable!("it has an end")
}

#[test]
fn queue_is_bounded_per_key_and_per_process() {
    let mut w = world();
    assert_eq!(flood(&mut w, 0), (MAX_WAITERS_PER_KEY, QueueBound::Key));
    let mut before = MAX_WAITERS_PER_KEY;
    let mut keys = 1;
    while w.table.waiting() < MAX_WAITERS_PER_PROCESS {
        let (waiting, bound) = flood(&mut w, keys);
        assert!(waiting <= before && waiting > 0, "{waiting} after {before}");
        assert_eq!(bound == QueueBound::Key, waiting == MAX_WAITERS_PER_KEY);
        before = waiting;
        keys += 1;
    }
    assert!(keys > FIRST_WAITER_RESERVE, "{keys} keys had a waiter");
    assert_eq!(flood(&mut w, keys), (0, QueueBound::Process), "the process is full");
}

#[test]
fn flood_on_many_keys_leaves_capacity_for_the_next_key() {
    // One key after the other, and all of them in turn.
    let mut w = world();
    for n in 0..1_000 {
        flood(&mut w, n);
    }
    assert!(flood(&mut w, 1_000).0 > 0, "{} wait", w.table.waiting());

    let mut w = world();
    for n in 0..1_000 {
        w.key = LockKey::from(("n", n));
        w.ask(0, true);
        w.answer(GRANTED);
        w.turn(0);
    }
    for n in (0..1_000).cycle().take(20_000) {
        w.key = LockKey::from(("n", n));
        w.ask(1, true);
    }
    w.told.clear();
    let (places, bound) = flood(&mut w, 1_000);
    assert!(places > 0 && bound == QueueBound::Process, "{places}: {} wait", w.table.waiting());
}

/// The first caller of a key asks the store, however many wait: the key may be free.
#[test]
fn full_process_rejects_the_first_waiter_of_a_busy_key() {
    let mut w = world();
    let mut keys = 0;
    while w.table.waiting() < MAX_WAITERS_PER_PROCESS {
        flood(&mut w, keys);
        keys += 1;
    }
    for n in 0..3 {
        w.key = LockKey::from(("elsewhere", n));
        w.ask(5, true);
        w.answer(IN_LINE);
        assert!(matches!(w.told.remove(0), (5, Err(LockError::QueueFull { ahead: 1, bound: QueueBound::Process }))));
        w.released();
        w.ask(6, true);
        w.answer(GRANTED);
        w.turn(6);
    }
    assert_eq!(w.table.waiting(), MAX_WAITERS_PER_PROCESS);
}

#[test]
fn full_store_queue_is_reported() {
    let mut w = world();
    w.ask(1, true);
    w.ask(2, true);
    w.answer(AcquireReply::QueueFull { lease_left: ms(20_000), waiting: 1_024 });
    for (who, ahead) in [(1, 1025), (2, 1026)] {
        let (told, Err(LockError::QueueFull { ahead: n, bound })) = w.told.remove(0) else { panic!("{:?}", w.told) };
        assert_eq!((told, n, bound), (who, ahead, QueueBound::Store));
    }
}

#[test]
fn store_that_rejects_an_enqueue_is_an_error_and_no_loop() {
    let mut w = world();
    w.ask(1, true);
    w.answer(HELD);
    assert!(
        matches!(&w.told[..], [(1, Err(LockError::Store(e)))] if e.kind() == StoreErrorKind::Protocol),
        "{:?}",
        w.told
    );
    w.released();
}

/// Who does not wait and comes while the key is given back is not refused because of it.
#[test]
fn request_during_a_release_gets_the_store_reply() {
    let mut w = world();
    w.ask(1, false);
    w.answer(GRANTED);
    let section = w.turn(1);
    w.end(&section, GuardEnd::Released);
    w.ask(2, false);
    w.ask(3, false);
    assert!(w.told.is_empty());
    w.released();
    w.answer(GRANTED);
    assert!(matches!(w.told.pop(), Some((3, Err(LockError::Busy { .. })))), "one is enough");
    w.turn(2);
}
