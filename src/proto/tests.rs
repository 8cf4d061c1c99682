//! Tests of the transitions, event by event.

use std::{error::Error, time::Duration};

use bytes::Bytes;

use super::{calls::Numbered, grant::NextCheck, hold_limits::HoldLimits, sharing::Sharing, table::LockTable, *};
use crate::{
    clock::usable_part,
    error::QueueBound,
    fencing::FencingToken,
    limits::{
        self, FIRST_WAITER_RESERVE, MAX_PENDING_RECORD_BYTES, MAX_RELEASES_UNDER_WAY, MAX_UNCLAIMED_OFFER_RELEASES,
        MAX_WAITERS_PER_KEY, MAX_WAITERS_PER_PROCESS, OFFER_TTL, STORE_TIMEOUT,
    },
    owner::Owner,
    store::{AcquireRequest, Demand, IfBusy, ReleaseRequest, StoreErrorKind, YieldRequest},
};

mod shares;
mod newest;
mod tickets;

type Outcome = Result<Arc<Section<NoDriver>>, LockError>;

/// A request of the store, with its number.
#[derive(Debug)]
struct StoreCall {
    number: u64,
    op: StoreOp,
}

#[derive(Debug)]
enum StoreOp {
    Acquire(AcquireRequest),
    Yield(YieldRequest),
    Release(ReleaseRequest),
}

impl StoreCall {
    fn id(&self) -> AcquisitionId {
        match &self.op {
            StoreOp::Acquire(request) => request.id.clone(),
            StoreOp::Yield(request) => request.id.clone(),
            StoreOp::Release(request) => request.id.clone(),
        }
    }
}

/// A table, and the actions that it has returned. A test executes them by hand.
struct Harness {
    table: LockTable<NoDriver>,
    ids: AcquisitionIds,
    now: BootInstant,
    key: LockKey,
    calls: Vec<StoreCall>,
    results: Vec<(u32, Outcome)>,
    recorded: Vec<(u32, Arc<Record>)>,
    recalled: Vec<(u32, LockError)>,
    wakeups: Vec<BootInstant>,
    resumed: Vec<LockKey>,
    /// The losses that were reported, with the fences of their sections.
    lost: Vec<(FencingToken, LockLost)>,
    records_lost: Vec<FencingToken>,
    outcomes: Vec<Result<ReleaseOutcome, StoreError>>,
    tracked: usize,
    verifications: usize,
    /// The sections for whose end a newer request waits.
    superseded: Vec<FencingToken>,
    /// The store grants and frees keys without a call ..
    has_free_keys: bool,
    /// .. and grants the next request with this fence.
    free_fence: Option<u64>,
    /// The ids that have freed a key without a call.
    freed: Vec<AcquisitionId>,
}

fn harness() -> Harness {
    Harness {
        table: LockTable::default(),
        ids: AcquisitionIds::new("test", 1),
        now: BootInstant::from_nanos(1 << 40),
        key: LockKey::from(("n", 1)),
        calls: Vec::new(),
        results: Vec::new(),
        recorded: Vec::new(),
        recalled: Vec::new(),
        wakeups: Vec::new(),
        resumed: Vec::new(),
        lost: Vec::new(),
        records_lost: Vec::new(),
        outcomes: Vec::new(),
        tracked: 0,
        verifications: 0,
        superseded: Vec::new(),
        has_free_keys: false,
        free_fence: None,
        freed: Vec::new(),
    }
}

fn request_of(waiter: u32) -> LockRequest<u32> {
    let (wait, limits) = (Duration::ZERO, HoldLimits::default());
    LockRequest {
        waiter,
        wait,
        owner: None,
        parent: None,
        limits,
        demand: Demand::new(),
        sharing: Sharing::Alone,
        trace: None,
    }
}

/// A key that waiter 1 holds.
fn holding() -> (Harness, Arc<Section<NoDriver>>) {
    let mut h = harness();
    let section = h.hold(1);
    (h, section)
}

/// A key that waiter 1 has requested, and the number of the request.
fn requesting() -> (Harness, u64) {
    let mut h = harness();
    let number = h.request(1, true);
    (h, number)
}

/// The same, and the acquire that was sent.
fn acquiring() -> (Harness, StoreCall) {
    let (mut h, _) = requesting();
    let call = h.take_call();
    (h, call)
}

/// The same without a reply to the acquire, which may still be executed.
fn in_doubt() -> (Harness, u64) {
    let (mut h, number) = requesting();
    h.fail(unavailable());
    (h, number)
}

/// The first section has used up the batch, and a second waiter is queued: a yield is in flight.
fn yielding() -> (Harness, Arc<Section<NoDriver>>, StoreCall) {
    let (mut h, section) = holding();
    h.request(2, true);
    h.pass(ms(110));
    h.end_guard(&section, GuardEnd::Released);
    let call = h.take_call();
    (h, section, call)
}

impl Harness {
    fn execute(&mut self, actions: Actions<NoDriver>) {
        let Actions { list, calls: Calls { releases, acquires, yields } } = actions;
        let releases = releases
            .into_iter()
            .flat_map(Numbered::into_requests)
            .map(|((_, number), op)| (number, StoreOp::Release(op)));
        let acquires = acquires
            .into_iter()
            .flat_map(Numbered::into_requests)
            .map(|((_, number), op)| (number, StoreOp::Acquire(op)));
        let yields =
            yields.into_iter().flat_map(Numbered::into_requests).map(|((_, number), op)| (number, StoreOp::Yield(op)));
        let calls = releases.chain(acquires).chain(yields);
        self.calls.extend(calls.map(|(number, op)| StoreCall { number, op }));
        for action in list {
            match action {
                Action::Grant(waiter, section) => self.results.push((waiter, Ok(section))),
                Action::Reject(waiter, error) => self.results.push((waiter, Err(error))),
                Action::Recorded(waiter, record) => self.recorded.push((waiter, record)),
                Action::Recall(waiter, error) => self.recalled.push((waiter, error)),
                Action::WakeAt(_, at) => self.wakeups.push(at),
                Action::Track(_) => self.tracked += 1,
                Action::SendWaiting(key) => self.resumed.push(key),
                Action::Verify(_) => self.verifications += 1,
                Action::Lost(section, why) => self.lost.push((section.token, why)),
                Action::RecordLost(section) => self.records_lost.push(section.token),
                Action::ReleaseOutcome(_, outcome) => self.outcomes.push(outcome),
                Action::Superseded(section) => self.superseded.push(section.token),
                Action::Untrack(_) | Action::SectionEnded(_) => {}
            }
        }
    }

    /// Passes an event to the table.
    fn drive<T>(
        &mut self,
        event: impl FnOnce(&mut LockTable<NoDriver>, &LockKey, EventContext<'_>, &mut Actions<NoDriver>) -> T,
    ) -> T {
        let mut actions = Actions::new();
        let now = LazyNow::fixed(self.now);
        let cx = EventContext { now: &now, ids: &self.ids, frees_keys: self.has_free_keys };
        let result = event(&mut self.table, &self.key, cx, &mut actions);
        self.execute(actions);
        result
    }

    fn handle(&mut self, event: Event<NoDriver>) {
        self.drive(|table, key, cx, actions| table.handle_event(key, cx, event, actions));
    }

    /// Returns the number of the request, unless it is granted at once.
    fn send(&mut self, request: LockRequest<u32>) -> u64 {
        let waiter = request.waiter;
        let request = request.map_waiter(|waiter| move || waiter);
        let fence = self.free_fence.take().filter(|_| !request.demand.takes_record());
        let free = fence.map(|fence| FreeKey { id: self.ids.next(), fence, sent_at: self.now });
        match self.drive(|table, key, cx, actions| table.request(key, cx, request, free, actions)) {
            Requested::Waiting(number, _) => number,
            Requested::Granted(section) => {
                self.results.push((waiter, Ok(section)));
                0
            }
        }
    }

    /// A waiter gets the key by a call of the store.
    fn hold(&mut self, waiter: u32) -> Arc<Section<NoDriver>> {
        self.request(waiter, true);
        self.reply(GRANTED);
        self.expect_grant(waiter)
    }

    fn request(&mut self, waiter: u32, waits: bool) -> u64 {
        self.request_with(waiter, if waits { WAIT } else { Duration::ZERO }, None)
    }

    fn request_with(&mut self, waiter: u32, wait: Duration, owner: Option<&Owner>) -> u64 {
        self.send(LockRequest { wait, owner: owner.cloned(), ..request_of(waiter) })
    }

    fn cancel(&mut self, number: u64) -> Option<QueuePosition> {
        self.drive(|table, key, cx, actions| table.cancel(key, cx, number, actions))
    }

    fn end_guard(&mut self, section: &Arc<Section<NoDriver>>, end: GuardEnd) -> Option<ReleaseOutcome> {
        let outcome = self.drive(|table, _, cx, actions| table.end_guard(cx, section, end, actions));
        if outcome == Some(ReleaseOutcome::Released) {
            self.freed.push(section.grant.id.clone());
        }
        outcome
    }

    /// Releases as many keys as may be released at the same time, and takes the calls.
    fn fill_releases(&mut self) -> Vec<StoreCall> {
        let release = |n| {
            self.key = LockKey::from(("n", n));
            let section = self.hold(1);
            self.end_guard(&section, GuardEnd::Released);
            self.take_call()
        };
        (0..MAX_RELEASES_UNDER_WAY).map(release).collect()
    }

    /// The acquire that waits for its reply first.
    fn sent_acquire(&self) -> &AcquireRequest {
        match &self.calls[..] {
            [StoreCall { op: StoreOp::Acquire(request), .. }, ..] => request,
            other => panic!("{other:?}"),
        }
    }

    /// The same for a release.
    fn sent_release(&self) -> &ReleaseRequest {
        match &self.calls[..] {
            [StoreCall { op: StoreOp::Release(request), .. }, ..] => request,
            other => panic!("{other:?}"),
        }
    }

    /// Removes the only call in flight.
    fn take_call(&mut self) -> StoreCall {
        assert_eq!(self.calls.len(), 1, "{:?}", self.calls);
        self.calls.remove(0)
    }

    fn reply(&mut self, reply: AcquireReply) {
        let call = self.take_call();
        self.handle(Event::Acquired(call.number, Ok(reply)));
    }

    fn reply_yielded(&mut self, reply: YieldReply) {
        let call = self.take_call();
        assert!(matches!(call.op, StoreOp::Yield(_)), "{call:?}");
        self.handle(Event::Yielded(call.number, Ok(reply)));
    }

    /// The only call in flight gets this error.
    fn fail(&mut self, error: StoreError) {
        let call = self.take_call();
        self.handle(match call.op {
            StoreOp::Acquire(_) => Event::Acquired(call.number, Err(error)),
            StoreOp::Yield(_) => Event::Yielded(call.number, Err(error)),
            StoreOp::Release(_) => Event::Released(call.number, Err(error)),
        });
    }

    /// Expects that the store has rejected this waiter, and that no other result is left.
    fn expect_store_error(&mut self, waiter: u32, kind: StoreErrorKind) {
        assert_eq!(self.results.len(), 1, "{:?}", self.results);
        match self.results.remove(0) {
            (rejected, Err(LockError::Store(error))) if rejected == waiter => assert_eq!(error.kind(), kind),
            other => panic!("{other:?}"),
        }
    }

    /// Expects that this waiter got the key, and that no other result is left.
    fn expect_grant(&mut self, waiter: u32) -> Arc<Section<NoDriver>> {
        assert_eq!(self.results.len(), 1, "{:?}", self.results);
        match self.results.remove(0) {
            (granted, Ok(section)) if granted == waiter => section,
            other => panic!("{other:?}"),
        }
    }

    /// The time passes, and the timers fire later.
    fn pass(&mut self, by: Duration) {
        self.now = self.now.saturating_add(by);
    }

    fn advance(&mut self, by: Duration) {
        self.pass(by);
        while let Some(at) = self.wakeups.iter().position(|at| *at <= self.now) {
            let at = self.wakeups.remove(at);
            self.handle(Event::Timer(at));
        }
    }

    fn reply_freed(&mut self) {
        let call = self.take_call();
        assert!(matches!(call.op, StoreOp::Release(_)), "{call:?}");
        self.handle(Event::Released(call.number, Ok(ReleaseReply::Freed)));
    }

    /// The only call in flight frees the key, and nothing is left.
    fn finish(&mut self) {
        self.reply_freed();
        assert!(self.table.is_empty());
    }
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const WAIT: Duration = Duration::from_secs(600);
const BUSY: AcquireReply = AcquireReply::Busy { lease_left: ms(20_000), held_by: None };
const QUEUED: AcquireReply = AcquireReply::Queued { ahead: 0, lease_left: ms(20_000), poll_in: None, held_by: None };
const GRANTED: AcquireReply = AcquireReply::Granted { fence: 7, after: None };

#[test]
fn an_invalid_reply_is_an_error_and_its_grant_is_released() {
    let unasked = AcquireReply::Recorded(new_record().record.clone());
    for reply in [AcquireReply::Granted { fence: u64::MAX, after: None }, BUSY, unasked] {
        let (mut h, _) = requesting();
        h.reply(reply);
        h.expect_store_error(1, StoreErrorKind::Protocol);
        h.reply_freed();
    }
}

/// Less than a quarter of the lease is left.
#[test]
fn a_grant_that_arrives_late_is_released_and_requested_again() {
    let (mut h, _) = requesting();
    h.pass(Duration::from_secs(23));
    h.reply(GRANTED);
    assert!(h.results.is_empty());
    let first = h.calls[0].id();
    h.reply_freed();
    let second = h.take_call();
    assert!(matches!(second.op, StoreOp::Acquire(_)) && second.id() != first, "under another id");
    h.handle(Event::Acquired(second.number, Ok(GRANTED)));
    h.expect_grant(1);
}

/// Their calls may never be polled again. A request without a wait gets the reply of the store,
/// however late it is.
#[test]
fn timed_out_waiters_are_skipped_when_a_section_starts() {
    let (mut h, owner) = (harness(), Owner::new());
    let section = h.hold(0);
    h.request_with(1, ms(10), None);
    h.request_with(2, ms(21), Some(&owner));
    h.request_with(3, ms(20), Some(&owner));
    h.request_with(4, ms(10), None);
    h.request_with(5, ms(30), None);
    h.pass(ms(20));
    assert_eq!(h.end_guard(&section, GuardEnd::Released), Some(ReleaseOutcome::HandedOff));
    let (1, Err(LockError::TimedOut { lease_left, ahead: 1, .. })) = h.results.remove(0) else {
        panic!("{:?}", h.results)
    };
    assert_eq!(lease_left, section.grant.remaining(h.now));
    let section = h.expect_grant(2);
    assert_eq!(h.table.hold_count_of(&section, h.now), 1, "the second request of the owner has timed out");
    assert_eq!(h.end_guard(&section, GuardEnd::Released), Some(ReleaseOutcome::HandedOff));
    let timed_out: Vec<_> = h.results.drain(..2).map(|(waiter, result)| (waiter, result.is_err())).collect();
    assert_eq!(timed_out, [(3, true), (4, true)]);
    let section = h.expect_grant(5);
    h.request_with(6, ms(10), None);
    h.pass(ms(10));
    assert_eq!(h.end_guard(&section, GuardEnd::Released), None, "no waiter is left");
    assert!(matches!(&h.results[..], [(6, Err(LockError::TimedOut { .. }))]), "{:?}", h.results);
    h.finish();
}

#[test]
fn no_acquire_is_sent_for_timed_out_waiters() {
    let mut h = harness();
    let section = h.hold(0);
    h.request_with(1, ms(10), None);
    assert_eq!(h.end_guard(&section, GuardEnd::Dropped), None);
    h.pass(ms(10));
    h.reply_freed();
    assert!(matches!(&h.results[..], [(1, Err(LockError::TimedOut { ahead: 1, .. }))]), "{:?}", h.results);
    assert!(h.table.is_empty() && h.calls.is_empty(), "{:?}", h.calls);
    h.results.clear();
    // The wait of the only waiter ends while the acquire is in flight.
    h.request_with(2, ms(10), None);
    h.pass(ms(10));
    h.reply(GRANTED);
    assert!(matches!(&h.results[..], [(2, Err(LockError::TimedOut { ahead: 1, .. }))]), "{:?}", h.results);
    h.finish();
}

/// After a stop, the timers of all waits fire behind the reply of the store.
/// Guarantee: G6.
#[test]
fn a_resumed_process_skips_only_timed_out_waiters() {
    let mut h = harness();
    h.request_with(1, Duration::ZERO, None);
    h.request_with(2, ms(500), None);
    h.request_with(3, ms(1_500), None);
    h.pass(ms(1_000));
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.end_guard(&section, GuardEnd::Released);
    assert!(matches!(h.results.remove(0), (2, Err(LockError::TimedOut { .. }))));
    h.expect_grant(3);
}

/// An acquire without enqueue would remove the queue entry.
#[test]
fn a_queued_attempt_keeps_requesting_a_queue_entry() {
    let mut h = harness();
    h.request(1, false);
    assert_eq!(h.sent_acquire().if_busy, IfBusy::Fail);
    h.request(2, true);
    h.reply(BUSY);
    assert!(matches!(h.results.remove(0), (1, Err(LockError::Busy { .. }))));
    assert_eq!(h.sent_acquire().if_busy, IfBusy::Enqueue, "a waiter has joined");
    h.reply(QUEUED);
    h.advance(ms(1_200));
    assert_eq!(h.sent_acquire().if_busy, IfBusy::Enqueue, "the poll");
}

/// I7: the reply that is awaited may be older than the offer.
#[test]
fn an_offer_during_an_acquire_is_not_lost() {
    let (mut h, call) = acquiring();
    h.handle(Event::Offered(call.id()));
    h.handle(Event::Offered(call.id()));
    assert!(h.calls.is_empty(), "one call at a time");
    h.handle(Event::Acquired(call.number, Ok(QUEUED)));
    h.reply(GRANTED);
    h.expect_grant(1);
}

/// I7, I8: no waiter is left under this id. The release lets the store offer the key to the next
/// one.
#[test]
fn an_offer_to_an_unknown_id_is_released() {
    let mut h = harness();
    let unknown_id = h.ids.next();
    h.handle(Event::Offered(unknown_id.clone()));
    assert_eq!(h.calls[0].id(), unknown_id);
    h.handle(Event::Offered(unknown_id));
    h.finish();
}

/// Offers can be forged: the releases that they cause have a bound.
/// Guarantee: G15.
#[test]
fn releases_of_offers_to_unknown_ids_are_bounded() {
    let mut h = harness();
    for n in 0..1_000 {
        h.key = LockKey::from(("n", n));
        let unknown_id = h.ids.next();
        h.handle(Event::Offered(unknown_id));
    }
    assert_eq!((h.calls.len(), h.table.len()), (MAX_UNCLAIMED_OFFER_RELEASES, MAX_UNCLAIMED_OFFER_RELEASES));
    for (n, call) in std::mem::take(&mut h.calls).into_iter().enumerate() {
        h.key = LockKey::from(("n", n));
        // Without a reply, the short lease of the offer expires.
        let reply = if n % 2 == 0 { Ok(ReleaseReply::NotHolder) } else { Err(unavailable()) };
        h.handle(Event::Released(call.number, reply));
    }
    assert!(h.table.is_empty());
    let unknown_id = h.ids.next();
    h.handle(Event::Offered(unknown_id));
    h.reply_freed();
}

/// I7: a forged message does not end a section.
#[test]
fn a_revocation_message_is_verified_and_ends_nothing() {
    let (mut h, section) = holding();
    let other = h.ids.next();
    h.handle(Event::Revoked(other));
    assert_eq!(h.verifications, 0, "the id of another acquisition");
    h.handle(Event::Revoked(section.grant.id.clone()));
    assert_eq!(h.verifications, 1);
    assert!(h.calls.is_empty() && !section.remaining(h.now).is_zero());
    h.handle(Event::Lost(section.grant.id.clone(), LockLost::Revoked));
    assert!(section.remaining(h.now).is_zero(), "a reply of the store");
}

/// A flood of messages does not keep a section from starting.
#[test]
fn repeated_revocation_messages_delay_a_grant_by_one_acquire() {
    let (mut h, call) = acquiring();
    h.handle(Event::Revoked(call.id()));
    h.handle(Event::Acquired(call.number, Ok(GRANTED)));
    let call = h.take_call();
    h.handle(Event::Revoked(call.id()));
    h.handle(Event::Acquired(call.number, Ok(GRANTED)));
    h.expect_grant(1);
    assert_eq!(h.verifications, 1, "verified while the section runs");
}

/// Guarantee: G5.
#[test]
fn offer_of_an_acquire_outlasts_two_calls() {
    let offer = |call_timeout| queue_of_acquire(ms(call_timeout)).offer_ttl;
    assert_eq!([50, 500, 1_500, 5_000].map(offer), [1_000, 1_000, 3_000, 4_000].map(ms));
    let (h, _) = requesting();
    assert_eq!(h.sent_acquire().queue.offer_ttl, ms(1_000));
}

/// I7: a grant that was confirmed once is confirmed again before a later section.
#[test]
fn each_section_after_a_revocation_message_is_confirmed() {
    let (mut h, call) = acquiring();
    let id = call.id();
    h.handle(Event::Revoked(id.clone()));
    h.handle(Event::Acquired(call.number, Ok(GRANTED)));
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.request(2, true);
    h.pass(ms(110));
    h.end_guard(&section, GuardEnd::Released);
    h.handle(Event::Revoked(id));
    h.reply_yielded(YieldReply::Extended { fence: 8 });
    assert!(h.results.is_empty(), "another yield confirms it first: {:?}", h.results);
    h.reply_yielded(YieldReply::Extended { fence: 9 });
    h.expect_grant(2);
}

#[test]
fn revocations_during_a_yield_delay_a_section_by_one_yield() {
    for is_revoked in [false, true] {
        let (mut h, _, call) = yielding();
        h.handle(Event::Revoked(call.id()));
        h.handle(Event::Yielded(call.number, Ok(YieldReply::Extended { fence: 8 })));
        assert!(h.results.is_empty(), "a yield is sent first");
        let again = h.take_call();
        assert!(
            matches!(again.op, StoreOp::Yield(YieldRequest { fence: 8, .. })) && again.id() == call.id(),
            "{again:?}"
        );
        h.handle(Event::Revoked(call.id()));
        if is_revoked {
            h.handle(Event::Yielded(again.number, Ok(YieldReply::NotHolder(QUEUED))));
            assert!(h.results.is_empty(), "{:?}", h.results);
        } else {
            h.handle(Event::Yielded(again.number, Ok(YieldReply::Extended { fence: 9 })));
            h.expect_grant(2);
            assert_eq!(h.verifications, 1, "verified while the section runs");
        }
    }
}

/// I7: each id has an acquire of its own that confirms it. The message about the old one may be
/// followed by a revocation of the new one during the confirmation.
#[test]
fn a_revocation_of_the_old_id_does_not_confirm_the_next() {
    for of_next in [false, true] {
        let (mut h, _, call) = yielding();
        let StoreOp::Yield(YieldRequest { next_id, .. }) = &call.op else { panic!("{call:?}") };
        h.handle(Event::Revoked(if of_next { next_id.clone() } else { call.id() }));
        h.handle(Event::Yielded(call.number, Ok(YieldReply::NotHolder(GRANTED))));
        assert_eq!(h.results.is_empty(), of_next, "{:?}", h.results);
        if of_next {
            h.reply(GRANTED);
        }
        h.expect_grant(2);
    }
}

/// The refusal may be older or newer than the yield. Only the reply to the yield tells which.
#[test]
fn a_renewal_refused_during_a_yield_waits_for_the_yield_reply() {
    for is_lost in [false, true] {
        let (mut h, section, call) = yielding();
        h.handle(Event::Lost(call.id(), LockLost::Revoked));
        let reply = if is_lost { YieldReply::Extended { fence: 8 } } else { YieldReply::NotHolder(QUEUED) };
        h.handle(Event::Yielded(call.number, Ok(reply)));
        // A refusal after the extension is a loss: no section starts under the grant.
        let loss = section.grant.end_reason().filter(|why| why.is_loss());
        assert_eq!(loss, is_lost.then_some(LockLost::Revoked));
        assert!(h.results.is_empty(), "{:?}", h.results);
        if is_lost {
            h.reply_freed();
        }
        h.advance(ms(1_300));
        h.reply(AcquireReply::Granted { fence: 9, after: None });
        h.expect_grant(2);
    }
}

/// An operator is alarmed once for each section that did not run alone, and for nothing else.
#[test]
fn each_lost_section_is_reported_once() {
    let (mut h, section) = holding();
    h.advance(ms(60_000));
    assert_eq!(h.end_guard(&section, GuardEnd::Released), Some(ReleaseOutcome::NotHeld));
    h.handle(Event::Lost(section.grant.id.clone(), LockLost::Expired));
    assert_eq!(h.lost, [(section.token, LockLost::Expired)]);
    // The same during a yield, under which no section runs.
    let (mut h, section, call) = yielding();
    h.advance(ms(60_000));
    h.handle(Event::Lost(section.grant.id.clone(), LockLost::Expired));
    h.handle(Event::Yielded(call.number, Err(StoreError::new("test", "yield", StoreErrorKind::Timeout))));
    assert_eq!(section.grant.end_reason(), Some(LockLost::Expired));
    assert_eq!(h.lost, []);
}

/// I7: the message ends nothing, but no section starts before the store has confirmed the grant.
#[test]
fn a_grant_in_doubt_is_handed_off_after_a_store_reply() {
    let (mut h, section) = holding();
    h.request(2, true);
    h.request(3, true);
    section.grant.verify(h.now);
    h.end_guard(&section, GuardEnd::Released);
    h.reply_yielded(YieldReply::Extended { fence: 8 });
    let section = h.expect_grant(2);
    h.end_guard(&section, GuardEnd::Released);
    h.expect_grant(3);
}

/// The cost of a gap does not depend on the number of held keys.
/// Guarantee: G15.
#[test]
fn lost_messages_recheck_only_keys_in_the_store_queue() {
    let mut h = harness();
    for n in 0..100 {
        h.key = LockKey::from(("held", n));
        h.hold(1);
    }
    h.key = LockKey::from(("n", 1));
    h.request(1, true);
    h.reply(QUEUED);
    assert_eq!(h.table.lagged(h.now), [h.key.clone()]);
    h.handle(Event::Lagged);
    h.reply(GRANTED);
    h.expect_grant(1);
    assert_eq!(h.table.lagged(h.now), []);
    h.handle(Event::Lagged);
    assert!(h.calls.is_empty(), "a holder does not send an acquire");
    h.key = LockKey::from(("n", 2));
    h.request(1, true);
    h.pass(ms(1));
    assert_eq!(h.table.lagged(h.now), [], "an acquire is in flight");
    h.reply(QUEUED);
    h.reply(QUEUED);
    assert!(h.calls.is_empty(), "the acquire is repeated: its reply may be older than the loss");
}

/// Guarantee: G12.
#[test]
fn a_task_whose_parent_holds_or_awaits_the_key_is_rejected() {
    let mut h = harness();
    let (parent, other) = (Owner::new(), Owner::new());
    let request = |h: &mut Harness, waiter, owner: Option<&Owner>, parent: Option<&Owner>, waits| {
        let (owner, parent) = (owner.cloned(), parent.cloned());
        let wait = if waits { WAIT } else { Duration::ZERO };
        h.send(LockRequest { wait, owner, parent, ..request_of(waiter) });
    };
    request(&mut h, 1, Some(&parent), None, true);
    request(&mut h, 2, None, Some(&parent), true);
    assert!(matches!(h.results.remove(0), (2, Err(LockError::WouldDeadlock))), "the parent waits");
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    request(&mut h, 3, None, Some(&parent), true);
    assert!(matches!(h.results.remove(0), (3, Err(LockError::WouldDeadlock))), "the parent holds the key");
    request(&mut h, 4, None, Some(&parent), false);
    assert!(matches!(h.results.remove(0), (4, Err(LockError::Busy { .. }))), "the request does not wait");
    request(&mut h, 5, None, Some(&other), true);
    assert!(h.results.is_empty(), "the parent is another request");
    parent.close();
    request(&mut h, 6, None, Some(&parent), true);
    assert!(h.results.is_empty(), "the parent is closed");
    h.end_guard(&section, GuardEnd::Released);
    h.expect_grant(5);
}

#[test]
fn a_timeout_during_a_failing_release_names_the_store_error() {
    let (mut h, section) = holding();
    h.end_guard(&section, GuardEnd::Released);
    let call = h.take_call();
    let number = h.request(2, true);
    h.handle(Event::Released(call.number, Err(unavailable())));
    let position = h.cancel(number).expect("it waits");
    assert!(position.store_error.is_some() && !position.is_contended, "{position:?}");
}

#[test]
fn a_wait_shorter_than_a_call_is_no_failure_of_the_store() {
    for (waited, is_overdue) in [(499, false), (500, true)] {
        let (mut h, number) = requesting();
        h.pass(ms(waited));
        assert_eq!(h.cancel(number).expect("it waits").store_error.is_some(), is_overdue, "{waited} ms");
    }
}

/// Checks the grant whenever it is due, like the watchdog.
fn run_watchdog(h: &mut Harness, section: &Arc<Section<NoDriver>>, by: Duration) {
    let end = h.now.saturating_add(by);
    while section.grant.next_check_at() <= end && section.grant.end_reason().is_none() {
        h.now = h.now.max(section.grant.next_check_at());
        match section.grant.next_check(h.now, h.now) {
            NextCheck::CheckSection => h.handle(Event::CheckSection(section.grant.id.clone())),
            NextCheck::Renew(_) => {
                section.grant.extend(section.grant.lease(), h.now, h.now);
                section.grant.renewal_finished(h.now);
            }
            NextCheck::Sleep(_) | NextCheck::Ended => {}
        }
    }
    h.now = h.now.max(end);
}

#[test]
fn an_undelivered_grant_goes_to_the_next_waiter() {
    let (mut h, section) = holding();
    h.request(2, true);
    run_watchdog(&mut h, &section, OFFER_TTL - ms(1));
    assert!(h.recalled.is_empty(), "{:?}", h.recalled);
    run_watchdog(&mut h, &section, ms(1));
    assert!(matches!(h.recalled.remove(0), (1, LockError::TimedOut { ahead: 1, .. })));
    assert_eq!(h.end_guard(&section, GuardEnd::Undelivered), Some(ReleaseOutcome::HandedOff));
    // More than 100 ms have passed: the key is offered to other processes first.
    h.reply_yielded(YieldReply::Extended { fence: 8 });
    h.expect_grant(2);
}

#[test]
fn an_undelivered_grant_without_a_wait_is_rejected_as_busy() {
    let mut h = harness();
    h.request(1, false);
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    run_watchdog(&mut h, &section, OFFER_TTL);
    assert!(matches!(h.recalled.remove(0), (1, LockError::Busy { ahead: 0, .. })));
    assert_eq!(h.end_guard(&section, GuardEnd::Undelivered), None);
    h.finish();
}

#[test]
fn a_delivered_grant_is_neither_recalled_nor_checked_again() {
    let (mut h, section) = holding();
    section.delivered();
    run_watchdog(&mut h, &section, OFFER_TTL - ms(1_000));
    assert!(
        section.grant.next_check_at() >= h.now.saturating_add(Duration::from_secs(7)),
        "the next check is the renewal"
    );
    run_watchdog(&mut h, &section, Duration::from_secs(300));
    assert!(h.recalled.is_empty() && !section.remaining(h.now).is_zero());
}

/// After a stop, the delivery gets the rest of its time once more.
/// Guarantee: G6.
#[test]
fn a_resumed_process_gets_time_to_take_its_grants() {
    let (mut h, section) = holding();
    h.pass(Duration::from_secs(20));
    run_watchdog(&mut h, &section, STORE_TIMEOUT - ms(1));
    assert!(h.recalled.is_empty(), "{:?}", h.recalled);
    run_watchdog(&mut h, &section, ms(1));
    assert_eq!(h.recalled.len(), 1);
}

/// Each request of an owner counts as one hold, and has a delivery check of its own.
/// Guarantee: G6.
#[test]
fn only_undelivered_holds_of_one_owner_are_recalled() {
    let mut h = harness();
    let owner = Owner::new();
    let request = |h: &mut Harness, waiter| h.request_with(waiter, WAIT, Some(&owner));
    request(&mut h, 1);
    request(&mut h, 2);
    h.reply(GRANTED);
    assert_eq!(h.results.len(), 2);
    let Ok(section) = h.results.remove(0).1 else { panic!("a grant") };
    h.results.clear();
    run_watchdog(&mut h, &section, OFFER_TTL - ms(500));
    request(&mut h, 3);
    h.expect_grant(3);
    assert_eq!(h.table.hold_count_of(&section, h.now), 3);
    run_watchdog(&mut h, &section, ms(500));
    let recalled: Vec<_> = h.recalled.drain(..).map(|(waiter, _)| waiter).collect();
    assert_eq!(recalled, [1, 2], "the third was sent later");
    // The first waiter received its grant in the meantime.
    section.delivered();
    assert_eq!(h.end_guard(&section, GuardEnd::Undelivered), Some(ReleaseOutcome::StillHeld));
    run_watchdog(&mut h, &section, OFFER_TTL);
    let recalled: Vec<_> = h.recalled.drain(..).map(|(waiter, _)| waiter).collect();
    assert_eq!(recalled, [3]);
    assert_eq!(h.end_guard(&section, GuardEnd::Undelivered), Some(ReleaseOutcome::StillHeld));
    assert_eq!((h.table.hold_count_of(&section, h.now), h.calls.len()), (1, 0));
    for _ in 0..1_000 {
        request(&mut h, 4);
        section.delivered();
    }
    h.results.clear();
    run_watchdog(&mut h, &section, OFFER_TTL);
    assert!(h.recalled.is_empty(), "all were delivered");
}

/// A message during the call may be newer than its reply.
#[test]
fn a_key_freed_during_an_acquire_is_asked_for_again() {
    let (mut h, _) = requesting();
    h.handle(Event::Freed);
    assert_eq!(h.calls.len(), 1, "one call at a time");
    h.reply(QUEUED);
    h.sent_acquire();
}

/// I7: messages may be forged, and arrive during each call.
#[test]
fn freed_messages_repeat_an_acquire_ten_times_a_second() {
    let (mut h, _) = requesting();
    h.reply(QUEUED);
    h.handle(Event::Freed);
    assert_eq!(h.calls.len(), 1, "the first one is asked for at once");
    let mut asked = 0;
    for _ in 0..1_000 {
        h.handle(Event::Freed);
        if !h.calls.is_empty() {
            asked += 1;
            h.reply(QUEUED);
        }
        h.advance(ms(1));
    }
    assert!((8..=11).contains(&asked), "{asked} calls in a second");
}

/// I8: the acquire may still be executed. The second release is sent when it cannot be any more.
#[test]
fn an_acquire_without_a_reply_is_released_twice() {
    let (mut h, number) = in_doubt();
    assert!(h.cancel(number).is_some_and(|position| position.store_error.is_some()), "the holder is unknown");
    h.reply_freed();
    assert!(!h.table.is_empty(), "the release is pending");
    h.advance(ms(499));
    assert!(h.calls.is_empty());
    h.advance(ms(2));
    h.finish();
}

fn unavailable() -> StoreError {
    StoreError::new("test", "acquire", StoreErrorKind::Unavailable)
}

fn overloaded() -> StoreError {
    StoreError::new("test", "acquire", StoreErrorKind::Overloaded)
}

#[test]
fn an_acquire_that_was_not_sent_leaves_nothing_to_release() {
    let mut h = harness();
    h.request(1, false);
    while h.results.is_empty() {
        h.advance(ms(50));
        for call in std::mem::take(&mut h.calls) {
            assert!(matches!(call.op, StoreOp::Acquire(_)), "{call:?}");
            h.handle(Event::Acquired(call.number, Err(overloaded())));
        }
    }
    h.expect_store_error(1, StoreErrorKind::Overloaded);
    assert!(h.calls.is_empty() && h.table.is_empty(), "no release");
}

#[test]
fn sent_acquire_is_released_although_its_repeat_was_not_sent() {
    let (mut h, number) = in_doubt();
    h.advance(ms(20));
    h.fail(overloaded());
    h.cancel(number);
    h.sent_release();
}

/// I8: the acquire in doubt may be executed after a release that was sent during the doubt.
#[test]
fn a_release_sent_while_an_acquire_is_in_doubt_is_repeated() {
    let (mut h, _) = in_doubt();
    h.advance(ms(20));
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.end_guard(&section, GuardEnd::Released);
    h.pass(ms(600));
    h.reply_freed();
    assert!(!h.table.is_empty(), "the first acquire may have been executed after it");
    h.advance(ms(2));
    h.finish();
}

#[test]
fn a_busy_reply_does_not_end_an_earlier_acquire_in_doubt() {
    let mut h = harness();
    h.request(1, false);
    h.fail(unavailable());
    h.advance(ms(20));
    h.pass(ms(490));
    h.reply(BUSY);
    assert!(matches!(h.results.remove(0), (1, Err(LockError::Busy { .. }))));
    h.reply_freed();
    assert!(h.table.is_empty(), "this release was sent after the doubt");
}

#[test]
fn a_yield_does_not_end_an_earlier_acquire_in_doubt() {
    let (mut h, _) = in_doubt();
    h.advance(ms(20));
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.request(2, true);
    h.pass(ms(110));
    h.end_guard(&section, GuardEnd::Released);
    let call = h.take_call();
    h.pass(ms(450));
    let old = call.id();
    h.handle(Event::Yielded(call.number, Ok(YieldReply::NotHolder(QUEUED))));
    h.advance(ms(2));
    assert_eq!(h.calls.remove(0).id(), old);
}

/// I7: an operator revokes the key while the reply that grants it is on its way.
#[test]
fn a_grant_revoked_before_its_reply_does_not_start() {
    let (mut h, call) = acquiring();
    h.handle(Event::Revoked(call.id()));
    h.handle(Event::Acquired(call.number, Ok(GRANTED)));
    assert!(h.results.is_empty(), "an acquire is sent first");
    h.reply(QUEUED);
    h.handle(Event::Offered(call.id()));
    h.reply(AcquireReply::Granted { fence: 8, after: None });
    h.expect_grant(1);
}

/// The revoked id is the next id of a yield.
#[test]
fn a_grant_revoked_before_its_yield_reply_does_not_start() {
    let (mut h, _, call) = yielding();
    let StoreOp::Yield(YieldRequest { next_id, fence: 7, .. }) = call.op else { panic!("{call:?}") };
    h.handle(Event::Revoked(next_id));
    h.handle(Event::Yielded(call.number, Ok(YieldReply::NotHolder(AcquireReply::Granted { fence: 8, after: None }))));
    assert!(h.results.is_empty(), "an acquire is sent first");
    h.reply(AcquireReply::Granted { fence: 8, after: None });
    h.expect_grant(2);
}

/// The store was down when the key was released. A later request gets the state of the key now, not
/// the error of that release.
#[test]
fn a_request_after_the_store_timeout_ignores_a_pending_release() {
    let (mut h, section) = holding();
    h.end_guard(&section, GuardEnd::Released);
    h.fail(unavailable());
    h.wakeups.clear();
    h.pass(ms(1_500));
    h.request(2, false);
    assert!(h.results.is_empty(), "an acquire is sent");
    h.reply(AcquireReply::Granted { fence: 8, after: None });
    h.expect_grant(2);
    // The store replies again: the failed release is repeated at once.
    h.sent_release();
}

/// The store may have become silent since its last reply.
#[test]
fn a_request_sends_an_acquire_if_the_last_reply_is_old() {
    let (mut h, _) = requesting();
    h.reply(QUEUED);
    h.pass(ms(499));
    h.request(2, true);
    assert!(h.calls.is_empty(), "the last reply is recent");
    h.pass(ms(1));
    h.request(3, true);
    h.request(4, true);
    assert_eq!(h.sent_acquire().if_busy, IfBusy::Enqueue, "one acquire for all requests");
}

/// I4, I5: a grant is tracked from its first section on, whichever reply started it.
#[test]
fn a_grant_that_yields_before_its_first_section_is_tracked() {
    let mut h = harness();
    let first = h.request(1, true);
    let limits = HoldLimits { lock_delay: ms(5_000), ..HoldLimits::default() };
    h.send(LockRequest { wait: WAIT, limits, ..request_of(2) });
    h.cancel(first);
    h.reply(GRANTED);
    assert!(h.results.is_empty() && h.tracked == 0, "the yield extends the lock-delay first");
    h.reply_yielded(YieldReply::Extended { fence: 8 });
    h.expect_grant(2);
    assert_eq!(h.tracked, 1);
}

/// The box of an entry that has ended is that of the next new one.
#[test]
fn a_timer_of_an_ended_key_is_not_one_of_the_next_key() {
    let mut h = harness();
    for waiter in [1, 2] {
        h.key = LockKey::from(("n", waiter));
        h.wakeups.clear();
        let number = h.request(waiter, true);
        h.reply(QUEUED);
        assert_eq!(h.wakeups.len(), 1, "the next poll");
        h.cancel(number);
        h.finish();
        h.pass(ms(500));
    }
}

/// The watchdog has nothing to check between two sections.
#[test]
fn a_section_limit_does_not_outlive_its_section() {
    let mut h = harness();
    let limits = HoldLimits { max_hold: Some(ms(200)), ..HoldLimits::default() };
    h.send(LockRequest { wait: WAIT, limits, ..request_of(1) });
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.request(2, true);
    h.pass(ms(150));
    h.end_guard(&section, GuardEnd::Released);
    assert!(matches!(h.take_call().op, StoreOp::Yield(_)));
    assert!(section.grant.next_check_at() > h.now.saturating_add(ms(60)), "the next check is the renewal");
}

/// Invariant I2.
#[test]
fn a_release_waits_while_too_many_are_under_way() {
    let mut h = harness();
    let held_key = LockKey::from(("held",));
    h.key = held_key.clone();
    let section = h.hold(1);
    let first = h.fill_releases().remove(0);
    assert_eq!(h.end_guard(&section, GuardEnd::Released), None);
    assert!(h.calls.is_empty() && h.resumed.is_empty(), "{:?}", h.calls);
    h.key = LockKey::from(("n", 0));
    h.handle(Event::Released(first.number, Ok(ReleaseReply::Freed)));
    assert_eq!(h.resumed, std::slice::from_ref(&held_key));
    h.key = held_key;
    h.handle(Event::MaySendRelease);
    assert_eq!(h.take_call().id(), section.grant.id);
}

/// Invariant I2.
/// Guarantee: G6.
#[test]
fn the_bound_of_pending_releases_names_the_last_store_error() {
    let mut h = harness();
    let first = h.fill_releases().remove(0).number;
    let rejected = |h: &mut Harness| {
        h.key = LockKey::from(("one", "more"));
        h.request(1, true);
        assert!(h.calls.is_empty(), "no release could be reserved");
        let (1, Err(error)) = h.results.remove(0) else { panic!("{:?}", h.results) };
        let chain = std::iter::successors(Some(&error as &dyn Error), |&e| e.source());
        chain.map(ToString::to_string).collect::<Vec<_>>()
    };
    let texts = rejected(&mut h);
    let [call, bound] = &texts[..] else { panic!("no release has failed yet: {texts:?}") };
    assert!(call.contains("acquire") && !call.contains("release"), "{call}");
    assert!(bound.starts_with(&format!("{MAX_RELEASES_UNDER_WAY} releases have not reached the store")), "{bound}");
    assert_eq!(h.table.len(), MAX_RELEASES_UNDER_WAY);
    let error = StoreError::new("test", "release", StoreErrorKind::Unavailable);
    h.key = LockKey::from(("n", 0));
    h.handle(Event::Released(first, Err(error.with_source(std::io::Error::other("no route")))));
    let texts = rejected(&mut h);
    let [_, _, last, cause] = &texts[..] else { panic!("{texts:?}") };
    assert!(last.contains("the test store") && last.contains("release"), "{last}");
    assert_eq!(cause, "no route");
    for n in 1..texts.len() {
        assert!(!texts[..n].iter().any(|text| text.contains(&texts[n])), "repeated: {texts:?}");
    }
}

/// Each call fails, for this long. Returns the number of calls.
fn reply_failing(h: &mut Harness, kind: StoreErrorKind, mut remaining: Duration) -> usize {
    let mut calls = 0;
    while !remaining.is_zero() {
        while !h.calls.is_empty() {
            h.sent_acquire();
            calls += 1;
            h.fail(StoreError::new("test", "acquire", kind));
        }
        h.advance(ms(10));
        remaining = remaining.saturating_sub(ms(10));
    }
    calls
}

/// Guarantee: G6.
#[test]
fn a_waiting_request_is_retried_throughout_an_outage() {
    use StoreErrorKind::{Failover, Overloaded, Timeout, Unavailable};
    for kind in [Failover, Overloaded, Timeout, Unavailable] {
        let (mut h, number) = requesting();
        let calls = reply_failing(&mut h, kind, Duration::from_secs(20));
        assert!(h.results.is_empty(), "{:?}", h.results);
        assert!((20..40).contains(&calls), "a bounded backoff: {calls}");
        assert!(h.cancel(number).is_some_and(|position| position.store_error.is_some_and(|e| e.kind() == kind)));
        let mut h = harness();
        h.request(2, true);
        reply_failing(&mut h, kind, Duration::from_secs(5));
        while h.calls.is_empty() {
            h.advance(ms(10));
        }
        h.reply(GRANTED);
        h.expect_grant(2);
    }
}

/// Guarantee: G6.
#[test]
fn a_non_waiting_request_outlasts_only_a_short_outage() {
    use StoreErrorKind::Unavailable;
    let mut h = harness();
    h.request(1, false);
    reply_failing(&mut h, Unavailable, ms(990));
    assert!(h.results.is_empty(), "{:?}", h.results);
    h.request(2, true);
    reply_failing(&mut h, Unavailable, ms(500));
    h.expect_store_error(1, Unavailable);
    h.request(3, false);
    reply_failing(&mut h, Unavailable, ms(1_200));
    h.expect_store_error(3, Unavailable);
    h.advance(ms(1_000));
    h.reply(GRANTED);
    h.expect_grant(2);
}

/// The waiter sends an acquire of its own and is not rejected.
/// Guarantee: G6.
#[test]
fn a_waiter_survives_an_outage_of_the_preceding_release() {
    let (mut h, section) = holding();
    h.end_guard(&section, GuardEnd::Released);
    h.fail(unavailable());
    h.request(2, true);
    h.request(3, false);
    h.pass(ms(1_001));
    h.advance(ms(0));
    h.expect_store_error(3, StoreErrorKind::Unavailable);
    let at = h.calls.iter().position(|call| matches!(call.op, StoreOp::Acquire(_))).expect("an acquire");
    let call = h.calls.remove(at);
    h.handle(Event::Acquired(call.number, Ok(AcquireReply::Granted { fence: 8, after: None })));
    h.expect_grant(2);
}

/// I9, I11: the release is repeated until the lease and the queue entry have expired, and no
/// longer.
/// Guarantee: G3.
#[test]
fn a_release_is_retried_until_its_lease_has_expired() {
    let mut h = harness();
    h.request(1, false);
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.end_guard(&section, GuardEnd::Dropped);
    let (start, mut attempts) = (h.now, 0);
    while !h.table.is_empty() {
        if !h.calls.is_empty() {
            assert_eq!(h.sent_release().block_for, ms(1000), "the same lock-delay each time");
            attempts += 1;
            h.fail(unavailable());
        }
        h.advance(ms(10));
    }
    let elapsed = h.now.saturating_duration_since(start);
    assert!(
        elapsed > Duration::from_secs(41) && elapsed < Duration::from_secs(43) && attempts < 60,
        "{elapsed:?}, {attempts}"
    );
}

/// I10: another section starts only after the lock-delay.
#[test]
fn no_handoff_follows_an_abnormal_end() {
    let (mut h, section) = holding();
    h.request(2, true);
    assert_eq!(h.end_guard(&section, GuardEnd::Dropped), None);
    assert_eq!(h.sent_release().block_for, ms(1000));
    assert!(h.results.is_empty());
    h.reply_freed();
    assert_eq!(h.sent_acquire().lease, Duration::from_secs(31), "lease and lock-delay");
}

/// I1, I9: events of an ended section do not change a later grant.
#[test]
fn a_lost_section_does_not_end_a_later_one() {
    let mut h = harness();
    let lost = h.hold(1);
    h.request(2, true);
    let id = lost.grant.id.clone();
    h.handle(Event::Lost(id.clone(), LockLost::Revoked));
    h.handle(Event::Lost(id, LockLost::Revoked));
    h.reply_freed();
    h.reply(AcquireReply::Granted { fence: 8, after: None });
    let next = h.expect_grant(2);
    assert_eq!(h.end_guard(&lost, GuardEnd::Dropped), Some(ReleaseOutcome::NotHeld));
    assert!(h.calls.is_empty() && !next.remaining(h.now).is_zero() && lost.remaining(h.now).is_zero());
}

#[test]
fn a_yielded_key_is_awaited_under_a_new_id_in_the_same_order() {
    let mut h = harness();
    let first = h.hold(1);
    h.request(2, true);
    h.request(3, true);
    h.pass(ms(100));
    assert_eq!(h.end_guard(&first, GuardEnd::Released), Some(ReleaseOutcome::HandedOff));
    let call = h.take_call();
    let StoreOp::Yield(YieldRequest { next_id, .. }) = call.op else { panic!("{call:?}") };
    h.request(4, false);
    assert!(
        matches!(h.results.remove(0), (4, Err(LockError::Busy { ahead: 3, .. }))),
        "no section runs, and it is taken"
    );
    h.handle(Event::Yielded(call.number, Ok(YieldReply::NotHolder(QUEUED))));
    h.handle(Event::Offered(next_id.clone()));
    assert_eq!(h.calls[0].id(), next_id);
    h.reply(AcquireReply::Granted { fence: 9, after: None });
    let second = h.expect_grant(2);
    assert!(second.token > first.token);
    h.end_guard(&second, GuardEnd::Released);
    assert!(h.expect_grant(3).token > second.token, "a local handoff");
    assert!(h.calls.is_empty());
}

/// Guarantee: G11.
#[test]
fn no_local_section_starts_before_a_doubtful_store_has_replied() {
    let (mut h, _) = requesting();
    h.request(2, true);
    h.request(3, true);
    // A reply to a call that was sent before shows nothing.
    h.table.doubt(h.now);
    h.reply(GRANTED);
    let first = h.expect_grant(1);
    h.pass(ms(1));
    h.end_guard(&first, GuardEnd::Released);
    h.reply_yielded(YieldReply::Extended { fence: 9 });
    let second = h.expect_grant(2);
    h.end_guard(&second, GuardEnd::Released);
    assert!(h.expect_grant(3).token > second.token, "a local handoff");
    assert!(h.calls.is_empty());
}

/// Holds a key and adds waiters until one is rejected. Returns the number of waiters and the bound
/// that rejected the last.
fn fill_queue(h: &mut Harness, n: usize) -> (usize, QueueBound) {
    h.key = LockKey::from(("n", n));
    h.hold(0);
    for waiting in 0.. {
        h.request(1, true);
        if let Some((_, result)) = h.results.pop() {
            let Err(LockError::QueueFull { ahead, bound }) = result else { panic!("{result:?}") };
            assert_eq!(ahead, waiting + 1);
            return (waiting, bound);
        }
    }
    unreachable!("the queue is bounded")
}

/// Guarantee: G15.
#[test]
fn the_queue_is_bounded_for_a_key_and_for_the_process() {
    let mut h = harness();
    assert_eq!(fill_queue(&mut h, 0), (MAX_WAITERS_PER_KEY, QueueBound::Key));
    let mut before = MAX_WAITERS_PER_KEY;
    let mut keys = 1;
    while h.table.waiting() < MAX_WAITERS_PER_PROCESS {
        let (waiting, bound) = fill_queue(&mut h, keys);
        assert!(waiting <= before && waiting > 0, "{waiting} after {before}");
        assert_eq!(bound == QueueBound::Key, waiting == MAX_WAITERS_PER_KEY);
        before = waiting;
        keys += 1;
    }
    assert!(keys > FIRST_WAITER_RESERVE, "{keys} keys had a waiter");
    assert_eq!(fill_queue(&mut h, keys), (0, QueueBound::Process), "the process is full");
}

/// Guarantee: G15.
#[test]
fn a_flood_on_a_thousand_keys_leaves_capacity_for_the_next() {
    // First one key after the other, then all of them alternately.
    let mut h = harness();
    for n in 0..1_000 {
        fill_queue(&mut h, n);
    }
    assert!(fill_queue(&mut h, 1_000).0 > 0, "{} wait", h.table.waiting());

    let mut h = harness();
    for n in 0..1_000 {
        h.key = LockKey::from(("n", n));
        h.hold(0);
    }
    for n in (0..1_000).cycle().take(20_000) {
        h.key = LockKey::from(("n", n));
        h.request(1, true);
    }
    h.results.clear();
    let (capacity, bound) = fill_queue(&mut h, 1_000);
    assert!(capacity > 0 && bound == QueueBound::Process, "{capacity}: {} wait", h.table.waiting());
}

/// The first request of a key sends an acquire even if the process is full: the key may be free.
/// Guarantee: G15.
#[test]
fn a_full_process_rejects_waiters_of_keys_held_elsewhere() {
    let mut h = harness();
    let mut keys = 0;
    while h.table.waiting() < MAX_WAITERS_PER_PROCESS {
        fill_queue(&mut h, keys);
        keys += 1;
    }
    for n in 0..3 {
        h.key = LockKey::from(("elsewhere", n));
        h.request(5, true);
        h.reply(QUEUED);
        assert!(matches!(h.results.remove(0), (5, Err(LockError::QueueFull { ahead: 1, bound: QueueBound::Process }))));
        h.reply_freed();
        h.hold(6);
    }
    assert_eq!(h.table.waiting(), MAX_WAITERS_PER_PROCESS);
}

#[test]
fn a_full_store_queue_rejects_with_queue_full() {
    let (mut h, _) = requesting();
    h.request(2, true);
    h.reply(AcquireReply::QueueFull { lease_left: ms(20_000), waiting: 1_024 });
    for (waiter, ahead) in [(1, 1025), (2, 1026)] {
        let (rejected, Err(LockError::QueueFull { ahead: n, bound })) = h.results.remove(0) else {
            panic!("{:?}", h.results)
        };
        assert_eq!((rejected, n, bound), (waiter, ahead, QueueBound::Store));
    }
}

/// A request without a wait is not rejected because of a release of its own process.
/// Guarantee: G10.
#[test]
fn a_request_during_a_release_gets_the_store_reply() {
    let (mut h, section) = holding();
    h.end_guard(&section, GuardEnd::Released);
    h.request(2, false);
    h.request(3, false);
    assert!(h.results.is_empty());
    h.reply_freed();
    h.reply(GRANTED);
    assert!(matches!(h.results.pop(), Some((3, Err(LockError::Busy { .. })))), "one acquire serves both");
    h.expect_grant(2);
}

// === records ===

impl Harness {
    /// A waiter gets the key that has no record.
    fn hold_claim(&mut self, waiter: u32) -> Arc<Section<NoDriver>> {
        self.claim(waiter, WAIT);
        self.reply(GRANTED);
        self.expect_grant(waiter)
    }

    /// Requests the key unless it has a record.
    fn claim(&mut self, waiter: u32, wait: Duration) {
        self.send(LockRequest { wait, ..claim_of(waiter) });
    }

    fn claim_for(&mut self, waiter: u32, owner: &Owner) {
        self.send(LockRequest { owner: Some(owner.clone()), ..claim_of(waiter) });
    }

    fn reply_released(&mut self, reply: Result<ReleaseReply, StoreError>) {
        let number = self.take_call().number;
        self.handle(Event::Released(number, reply));
    }

    /// The waiters that got this record.
    fn take_recorded(&mut self, record: &Record) -> Vec<u32> {
        self.recorded
            .drain(..)
            .map(|(waiter, got)| (got.as_ref() == record).then_some(waiter).expect("record"))
            .collect()
    }
}

fn claim_of(waiter: u32) -> LockRequest<u32> {
    LockRequest { wait: WAIT, demand: Demand::new().unless_recorded(), ..request_of(waiter) }
}

/// A key without a record that waiter 1 holds.
fn claiming() -> (Harness, Arc<Section<NoDriver>>) {
    let mut h = harness();
    let section = h.hold_claim(1);
    (h, section)
}

fn new_record() -> Arc<NewRecord> {
    Arc::new(NewRecord { record: Record::new("head", None), keep_for: ms(60_000) })
}

/// Guarantee: G18.
#[test]
fn one_reply_with_a_record_answers_all_local_duplicates() {
    let mut h = harness();
    h.claim(1, WAIT);
    h.claim(2, Duration::ZERO);
    h.claim(3, WAIT);
    let record = new_record().record.clone();
    h.reply(AcquireReply::Recorded(record.clone()));
    assert_eq!(h.take_recorded(&record), [1, 2, 3]);
    assert!(h.calls.is_empty() && h.table.is_empty(), "nothing is held: {:?}", h.calls);
}

/// Guarantee: G18.
#[test]
fn duplicates_of_a_section_get_its_record_without_a_call() {
    let (mut h, section) = claiming();
    for waiter in 2..1_000 {
        h.claim(waiter, WAIT);
    }
    let new = new_record();
    assert_eq!(h.end_guard(&section, GuardEnd::Recorded(Arc::clone(&new))), None);
    assert!(h.recorded.is_empty(), "the record does not stand yet");
    // Without a wait: the section has ended, so the key is not busy.
    h.claim(1_000, Duration::ZERO);
    assert_eq!(h.sent_release().record.as_ref(), Some(&new));
    h.reply_released(Ok(ReleaseReply::Freed));
    assert_eq!(h.take_recorded(&new.record), (2..=1_000).collect::<Vec<_>>());
    assert!(h.calls.is_empty() && h.table.is_empty());
}

/// Guarantee: G18.
#[test]
fn duplicates_run_after_a_section_without_a_record() {
    let (mut h, section) = claiming();
    h.claim(2, WAIT);
    assert_eq!(h.end_guard(&section, GuardEnd::ReleasedAfterFailure), Some(ReleaseOutcome::HandedOff));
    h.expect_grant(2);
    assert!(h.recorded.is_empty() && h.calls.is_empty());
}

/// Guarantee: G18.
#[test]
fn a_record_that_was_not_left_answers_no_request() {
    let (mut h, section) = claiming();
    h.claim(2, WAIT);
    h.end_guard(&section, GuardEnd::Recorded(new_record()));
    h.reply_released(Ok(ReleaseReply::NotHolder));
    assert!(h.recorded.is_empty());
    h.reply(GRANTED);
    h.expect_grant(2);
}

/// The release is repeated with its record, and the duplicates wait for it.
/// Guarantee: G18.
#[test]
fn a_record_is_sent_again_after_an_error() {
    let (mut h, section) = claiming();
    h.claim(2, WAIT);
    let new = new_record();
    h.end_guard(&section, GuardEnd::Recorded(Arc::clone(&new)));
    h.reply_released(Err(StoreError::new("test", "release", StoreErrorKind::Timeout)));
    assert!(h.recorded.is_empty());
    h.now = *h.wakeups.last().expect("a retry");
    h.handle(Event::Timer(h.now));
    assert!(h.sent_release().record.is_some());
    h.reply_released(Ok(ReleaseReply::RecordedBefore));
    assert_eq!(h.take_recorded(&new.record), [2]);
}

/// While the release with the record fails, the lease is renewed: no other process runs. The
/// section has ended, and `max_hold` ends the renewals.
/// Guarantee: G18.
#[test]
fn lease_is_renewed_until_its_record_is_left() {
    for max_hold in [None, Some(limits::LEASE * 2)] {
        let mut h = harness();
        let limits = HoldLimits { max_hold, ..HoldLimits::default() };
        h.send(LockRequest { wait: WAIT, limits, demand: Demand::new().unless_recorded(), ..request_of(1) });
        h.reply(GRANTED);
        let section = h.expect_grant(1);
        let began = h.now;
        h.end_guard(&section, GuardEnd::Recorded(new_record()));
        assert_eq!(section.loss(h.now), Some(LockLost::Released));
        while section.grant.end_reason().is_none() {
            h.reply_released(Err(unavailable()));
            run_watchdog(&mut h, &section, ms(1_000));
            h.advance(ms(1));
        }
        let renewed_for = h.now.saturating_duration_since(began);
        let limit = max_hold.unwrap_or(limits::MAX_HOLD);
        assert!(renewed_for >= limit && renewed_for < limit + ms(2_000), "{renewed_for:?}");
        assert_eq!(h.records_lost, [], "the release is repeated until the lease has expired");
        h.reply_released(Ok(ReleaseReply::RecordedBefore));
        assert!(h.table.is_empty() && h.records_lost.is_empty());
    }
}

/// The guard that leaves a record has the outcome of a later call, if the first ones fail.
/// Guarantee: G18.
#[test]
fn guard_with_a_record_waits_for_a_repeated_release() {
    let (mut h, section) = claiming();
    h.end_guard(&section, GuardEnd::Recorded(new_record()));
    for _ in 0..5 {
        h.reply_released(Err(unavailable()));
        assert!(h.outcomes.is_empty());
        h.now = *h.wakeups.last().expect("a retry");
        h.handle(Event::Timer(h.now));
    }
    h.pass(limits::RECORD_WAIT);
    h.reply_released(Err(unavailable()));
    assert!(matches!(h.outcomes[..], [Err(_)]), "{:?}", h.outcomes);
}

/// A lost section leaves no record, although its guard ends with one.
/// Guarantee: G18.
#[test]
fn a_lost_section_leaves_no_record() {
    let (mut h, section) = claiming();
    h.handle(Event::Lost(section.grant.id.clone(), LockLost::Revoked));
    assert_eq!(h.end_guard(&section, GuardEnd::Recorded(new_record())), Some(ReleaseOutcome::NotHeld));
    assert!(h.sent_release().record.is_none());
}

/// Each record that a section leaves ends in the store, or in one report of its loss.
/// Guarantee: G18.
#[test]
fn each_lost_record_is_reported_once() {
    /// Ends a guard with a record, and loses it.
    type Loses = fn(&mut Harness, &Arc<Section<NoDriver>>);
    let not_left: [Loses; 4] = [
        // Before the guard ends.
        |h, section| {
            h.handle(Event::Lost(section.grant.id.clone(), LockLost::Revoked));
            h.end_guard(section, GuardEnd::Recorded(new_record()));
        },
        // The lease has ended before the release reaches the store.
        |h, section| {
            h.end_guard(section, GuardEnd::Recorded(new_record()));
            h.reply_released(Ok(ReleaseReply::NotHolder));
        },
        // The same after a call that failed.
        |h, section| {
            h.end_guard(section, GuardEnd::Recorded(new_record()));
            h.reply_released(Err(unavailable()));
            h.now = *h.wakeups.last().expect("a retry");
            h.handle(Event::Timer(h.now));
            h.reply_released(Ok(ReleaseReply::NotHolder));
        },
        // No call has a reply before the lease has ended.
        |h, section| {
            h.end_guard(section, GuardEnd::Recorded(new_record()));
            h.reply_released(Err(unavailable()));
            h.handle(Event::Lost(section.grant.id.clone(), LockLost::Expired));
            h.pass(Duration::from_secs(1_000));
            h.handle(Event::Timer(h.now));
        },
    ];
    for (number, loses) in not_left.into_iter().enumerate() {
        let mut h = harness();
        let section = h.hold_claim(1);
        loses(&mut h, &section);
        assert_eq!(h.records_lost, [section.token], "{number}");
    }
    for reply in [ReleaseReply::Freed, ReleaseReply::HandedOff, ReleaseReply::RecordedBefore] {
        let mut h = harness();
        let section = h.hold_claim(1);
        h.end_guard(&section, GuardEnd::Recorded(new_record()));
        h.reply_released(Ok(reply));
        assert_eq!(h.records_lost, [], "{reply:?}");
    }

    // Another guard of the owner holds the key until it is lost.
    let (mut h, owner) = (harness(), Owner::new());
    h.request_with(1, WAIT, Some(&owner));
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.request_with(2, Duration::ZERO, Some(&owner));
    h.expect_grant(2);
    assert_eq!(h.end_guard(&section, GuardEnd::Recorded(new_record())), Some(ReleaseOutcome::StillHeld));
    h.handle(Event::Lost(section.grant.id.clone(), LockLost::Revoked));
    h.end_guard(&section, GuardEnd::Released);
    assert_eq!(h.records_lost, [section.token]);
}

/// A grant that ignored records is no answer to a request that asks for one.
#[test]
fn a_plain_grant_is_not_handed_to_a_duplicate() {
    let (mut h, _) = requesting();
    assert_eq!(h.sent_acquire().demand, Demand::new());
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.claim(2, WAIT);
    h.request(3, true);
    h.end_guard(&section, GuardEnd::Released);
    h.reply_freed();
    assert_eq!(h.sent_acquire().demand, Demand::new().unless_recorded());
    let record = new_record().record.clone();
    h.reply(AcquireReply::Recorded(record.clone()));
    assert_eq!(h.take_recorded(&record), [2]);
    assert_eq!(h.sent_acquire().demand, Demand::new());
    h.reply(GRANTED);
    h.expect_grant(3);
}

/// Guarantee: G15.
#[test]
fn bodies_of_records_that_wait_for_the_store_are_bounded() {
    let mut h = harness();
    let body = Bytes::from(vec![0; MAX_PENDING_RECORD_BYTES / 2]);
    let new = Arc::new(NewRecord { record: Record::new("head", Some(body)), keep_for: ms(60_000) });
    let mut bodies = Vec::new();
    for key in 0..4 {
        h.key = LockKey::from(("n", key));
        let section = h.hold_claim(key);
        h.end_guard(&section, GuardEnd::Recorded(Arc::clone(&new)));
        bodies.push(h.sent_release().record.as_ref().expect("a record").record.body.is_some());
        h.calls.clear();
    }
    assert_eq!(bodies, [true, true, false, false]);
}

/// The release of the first section has no reply for the store timeout, and another attempt is
/// queued in the store when it gets one.
#[test]
fn an_attempt_is_released_when_its_last_waiter_gets_a_record() {
    let (mut h, section) = claiming();
    let new = new_record();
    h.end_guard(&section, GuardEnd::Recorded(Arc::clone(&new)));
    let release = h.take_call();
    h.pass(STORE_TIMEOUT);
    h.claim(2, WAIT);
    h.reply(QUEUED);
    h.handle(Event::Released(release.number, Ok(ReleaseReply::RecordedBefore)));
    assert_eq!(h.take_recorded(&new.record), [2]);
    assert_ne!(h.calls[0].id(), release.id());
    h.finish();
}

/// A yield would queue the duplicate behind the waiters of other processes.
#[test]
fn a_used_up_batch_of_a_plain_grant_is_released_for_a_duplicate() {
    let (mut h, section) = holding();
    h.claim(2, WAIT);
    h.pass(ms(110));
    h.end_guard(&section, GuardEnd::Released);
    h.reply_freed();
    assert_eq!(h.sent_acquire().demand, Demand::new().unless_recorded());
}

/// It gets the record of the section, or runs after it.
#[test]
fn a_duplicate_does_not_join_the_section_of_its_owner() {
    let (mut h, owner) = (harness(), Owner::new());
    let section = h.hold(0);
    h.request_with(1, WAIT, Some(&owner));
    h.claim_for(2, &owner);
    h.end_guard(&section, GuardEnd::Released);
    let section = h.expect_grant(1);
    assert_eq!(h.table.hold_count_of(&section, h.now), 1);
    // Its handler would wait for itself.
    h.claim_for(3, &owner);
    assert!(matches!(&h.results[..], [(3, Err(LockError::WouldDeadlock))]), "{:?}", h.results);
}

/// The waiter that the acquire was for has left while the call was in flight.
#[test]
fn a_grant_for_a_plain_waiter_is_not_given_to_a_duplicate() {
    let (mut h, number) = requesting();
    h.claim(2, WAIT);
    assert!(h.cancel(number).is_some());
    h.reply(GRANTED);
    assert!(h.results.is_empty());
    h.reply_freed();
    assert_eq!(h.sent_acquire().demand, Demand::new().unless_recorded());
}

/// The store grants the next request without a call.
fn harness_with_free_keys() -> Harness {
    Harness { has_free_keys: true, free_fence: Some(8), ..harness() }
}

#[test]
fn a_free_key_is_held_and_freed_without_a_call() {
    let mut h = harness_with_free_keys();
    for (number, end) in
        [GuardEnd::Released, GuardEnd::ReleasedAfterFailure, GuardEnd::Undelivered].into_iter().enumerate()
    {
        h.free_fence = Some(8);
        h.request(1, number == 0);
        let section = h.expect_grant(1);
        assert_eq!((section.token.fence(), section.grant.lease()), (8, limits::LEASE));
        assert!(section.grant.end_reason().is_none() && section.is_delivered());
        assert_eq!(h.end_guard(&section, end), Some(ReleaseOutcome::Released));
        assert_eq!(section.grant.end_reason(), Some(LockLost::Released));
        assert_eq!(h.freed.get(number), Some(&section.grant.id));
        assert!(h.table.is_empty() && h.calls.is_empty() && h.wakeups.is_empty(), "{:?}", h.calls);
    }
}

#[test]
fn an_owner_reenters_a_key_that_is_held_without_a_call() {
    let (mut h, owner) = (harness_with_free_keys(), Owner::new());
    h.request_with(1, Duration::ZERO, Some(&owner));
    let section = h.expect_grant(1);
    h.request_with(2, Duration::ZERO, Some(&owner));
    assert!(Arc::ptr_eq(&h.expect_grant(2), &section));
    h.request_with(3, Duration::ZERO, None);
    assert!(matches!(h.results.remove(0), (3, Err(LockError::Busy { .. }))));
    assert_eq!(h.end_guard(&section, GuardEnd::Released), Some(ReleaseOutcome::StillHeld));
    assert_eq!(h.end_guard(&section, GuardEnd::Released), Some(ReleaseOutcome::Released));
    assert_eq!(h.freed.len(), 1);
}

#[test]
fn a_key_in_use_is_not_granted_without_a_call() {
    let released = |h: &mut Harness| {
        let StoreCall { number, op } = h.calls.pop().expect("a call");
        assert!(matches!(op, StoreOp::Release(_)), "{op:?}");
        h.handle(Event::Released(number, Ok(ReleaseReply::Freed)));
    };
    // Its release has no reply.
    let (mut h, section) = holding();
    h.end_guard(&section, GuardEnd::Dropped);
    h.free_fence = Some(8);
    h.request(2, true);
    released(&mut h);
    assert!(h.results.is_empty() && h.calls.len() == 1, "{:?}", h.results);

    // Another request waits for its acquire.
    let (mut h, _) = requesting();
    h.free_fence = Some(8);
    h.request(2, true);
    released(&mut h);
    assert!(h.results.is_empty() && h.calls.len() == 1, "{:?}", h.results);

    // The request takes a record in its place.
    let mut h = harness_with_free_keys();
    h.send(LockRequest { demand: Demand::new().unless_recorded(), ..request_of(1) });
    assert!(h.results.is_empty() && h.calls.len() == 1, "{:?}", h.results);

    let mut h = harness_with_free_keys();
    h.table.shut_down();
    h.request(1, false);
    assert!(matches!(h.results.remove(0), (1, Err(LockError::ShuttingDown))));
    released(&mut h);
    assert!(h.table.is_empty());
}

#[test]
fn a_fence_without_a_token_is_released() {
    let mut h = harness();
    h.free_fence = Some(1 << 60);
    h.request(1, false);
    let released = h.calls.remove(0);
    let call = h.take_call();
    assert!(matches!((&released.op, &call.op), (StoreOp::Release(_), StoreOp::Acquire(_))), "{released:?}");
    assert!(h.results.is_empty() && released.id() != call.id());
}

/// Another process waits, or has revoked the lock.
#[test]
fn a_key_that_is_not_freed_without_a_call_is_released_by_one() {
    let mut h = harness_with_free_keys();
    h.request(1, false);
    let section = h.expect_grant(1);
    assert_eq!(h.end_guard(&section, GuardEnd::Released), Some(ReleaseOutcome::Released));
    h.request(2, false);
    assert_eq!(h.calls.len(), 1, "another request has come meanwhile");
    h.handle(Event::NotFreed(Arc::clone(&section)));
    assert!(matches!(&h.calls[1].op, StoreOp::Release(request) if request.id == section.grant.id), "{:?}", h.calls);

    // Its last guard ends with the delivery, in the middle of another event.
    let (mut h, owner) = (harness_with_free_keys(), Owner::new());
    h.request_with(1, Duration::ZERO, Some(&owner));
    let section = h.expect_grant(1);
    h.request_with(2, Duration::ZERO, Some(&owner));
    h.expect_grant(2);
    assert_eq!(h.end_guard(&section, GuardEnd::Released), Some(ReleaseOutcome::StillHeld));
    h.handle(Event::GuardEnded(Arc::clone(&section), GuardEnd::Undelivered));
    h.reply_freed();
    assert!(h.table.is_empty());
}

/// Others have to wait, or have to learn of the end.
#[test]
fn a_release_that_leaves_something_is_a_call() {
    let limits = HoldLimits { min_hold: ms(500), ..HoldLimits::default() };
    for (limits, end) in [
        (HoldLimits::default(), GuardEnd::Dropped),
        (HoldLimits::default(), GuardEnd::Recorded(new_record())),
        (limits, GuardEnd::Released),
    ] {
        let mut h = harness_with_free_keys();
        h.send(LockRequest { limits, ..request_of(1) });
        let section = h.expect_grant(1);
        assert_eq!(h.end_guard(&section, end), None);
        assert!(h.freed.is_empty());
        h.finish();
    }
    let mut h = harness_with_free_keys();
    h.request(1, false);
    let section = h.expect_grant(1);
    h.request(2, true);
    assert_eq!(h.end_guard(&section, GuardEnd::Released), Some(ReleaseOutcome::HandedOff));
    assert!(h.freed.is_empty());
    h.expect_grant(2);
}

/// I8: the acquire in doubt may be executed after the release.
#[test]
fn a_release_while_an_acquire_is_in_doubt_is_a_call() {
    let (mut h, _) = in_doubt();
    h.advance(ms(100));
    h.reply(GRANTED);
    let section = h.expect_grant(1);
    h.has_free_keys = true;
    assert_eq!(h.end_guard(&section, GuardEnd::Released), None);
    assert!(h.freed.is_empty() && h.calls.len() == 1, "{:?}", h.calls);
}

/// The memory of an entry that has ended is that of the next one.
#[test]
fn a_held_key_does_not_poll_for_an_ended_one() {
    let (mut h, number) = requesting();
    h.reply(QUEUED);
    h.cancel(number);
    h.reply_freed();
    h.wakeups.clear();
    (h.key, h.free_fence) = (LockKey::from(("n", 2)), Some(8));
    h.request(2, false);
    h.expect_grant(2);
    h.request(3, true);
    assert!(h.wakeups.is_empty(), "{:?}", h.wakeups);
}

#[test]
fn a_yield_keeps_its_lease_while_nothing_waits() {
    let (mut h, section) = holding();
    section.delivered();
    let number = h.request(2, true);
    // The timers of the acquire fire, and the batch is used up.
    h.advance(ms(2_000));
    h.end_guard(&section, GuardEnd::Released);
    let call = h.take_call();
    assert!(h.cancel(number).is_some());
    h.request(3, true);
    h.handle(Event::Yielded(call.number, Ok(YieldReply::Extended { fence: 8 })));
    assert_eq!(h.expect_grant(3).grant.remaining(h.now), usable_part(limits::LEASE));
}

#[test]
fn a_key_that_is_only_held_needs_no_queue() {
    let (mut h, section) = holding();
    assert_eq!(h.table.with_extra(), 1, "it is not delivered");
    section.delivered();
    // The watchdog checks the delivery once.
    h.pass(ms(3_000));
    h.handle(Event::CheckSection(section.grant.id.clone()));
    assert_eq!(h.table.with_extra(), 0);
    h.request(2, true);
    assert_eq!(h.table.with_extra(), 1, "a request waits");
}

#[test]
fn a_held_key_gets_no_queue_of_an_ended_one() {
    let (mut h, section) = holding();
    h.end_guard(&section, GuardEnd::Released);
    h.finish();
    h.free_fence = Some(8);
    h.request(2, false);
    h.expect_grant(2);
    assert_eq!(h.table.with_extra(), 0);
}
