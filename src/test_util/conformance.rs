//! Test suite for every clause of the contract of [`LockStore`]. What the
//! [`traits`](LockStore::traits) of a store exclude is not required of it.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! # use tower_lock::{MemoryStore, test_util::conformance};
//! let store = MemoryStore::new();             // your store
//! conformance::check(store).await;            // panics with the violated clause
//! # }
//! ```
//!
//! The suite takes some seconds, because leases of a real store expire in real time. The store may
//! contain other keys. Those of the suite begin with `conformance`, and expire.

use std::{
    future::Future,
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, Demand, EventSink, ForceReleaseReply, ForceReleaseRequest,
        IfBusy, KeyStatus, ListRequest, LockStore, QueueConfig, Record, ReleaseReply, ReleaseRequest, RenewReply,
        RenewRequest, StoreError, StoreErrorKind, StoreEvent, StoreFuture, StoreTraits, YieldReply, YieldRequest,
    },
    sync::Mutex,
};

/// The leases of the suite: a busy machine may delay a call by seconds.
const LEASE: Duration = Duration::from_secs(8);
const OFFER_TTL: Duration = Duration::from_secs(4);
/// The time in which a store must notice a closed sink.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(3);
/// The time in which an event must arrive.
const EVENT_TIMEOUT: Duration = Duration::from_secs(5);

type Clause = fn(World) -> Pin<Box<dyn Future<Output = ()> + Send>>;

type ForTraits = fn(StoreTraits) -> bool;

macro_rules! clauses {
    ($($clause:ident),* $(,)?) => { &[$((stringify!($clause), |world| Box::pin($clause(world)))),*] };
}

/// The clauses, and the traits of the stores that they are for.
const CLAUSES: &[(ForTraits, &[(&str, Clause)])] = &[
    (
        |_| true,
        clauses![
            key_has_one_holder_until_it_is_released,
            repeated_acquire_finds_its_grant,
            release_of_others_and_second_release_change_nothing,
            lease_expires_and_late_release_changes_nothing,
            only_the_holder_renews_and_replies_are_in_order,
            renewal_and_repeated_acquire_never_shorten_a_lease,
            fences_rise_and_stay_below_the_limit,
            holder_has_the_time_of_its_grant,
            released_key_can_stay_blocked,
            yield_without_waiters_extends_under_a_new_fence,
            yield_of_a_lost_key_is_an_acquire,
            inspect_reports_holder_and_waiters,
            copy_of_a_yield_changes_nothing,
            revoked_key_stays_blocked_and_its_holder_is_notified,
            listing_has_each_key_that_is_held_blocked_or_waited_for,
            requests_of_one_call_have_replies_of_their_own
        ],
    ),
    (
        |traits| traits.ordered,
        clauses![
            release_offers_the_key_to_the_first_waiter,
            accepted_offer_has_a_full_lease_and_its_own_fence,
            offer_that_expires_goes_to_the_next_waiter,
            expired_key_is_offered_to_the_first_waiter,
            repeated_acquire_keeps_its_queue_position,
            release_leaves_the_queue_and_passes_an_offer_on,
            queue_has_a_capacity,
            yield_offers_the_key_and_enqueues_the_next_id,
            yield_to_a_queued_next_id_grants_or_keeps_one_entry,
            force_release_frees_a_blocked_key_for_the_queue
        ],
    ),
    (|traits| !traits.ordered, clauses![free_key_goes_to_the_first_acquire]),
    (|traits| traits.receivers_counted, clauses![connection_of_the_holder_is_known]),
    (|traits| traits.ordered && traits.receivers_counted, clauses![dead_process_is_skipped]),
    (|traits| traits.ordered && !traits.receivers_counted, clauses![dead_process_delays_the_next_by_an_offer]),
    (
        |traits| traits.records,
        clauses![
            record_stands_in_place_of_a_grant,
            only_the_holder_leaves_a_record_and_a_copy_changes_nothing,
            record_is_returned_while_the_key_is_held_or_blocked,
            yield_of_a_lost_key_finds_the_record,
            yield_to_a_waiter_finds_the_record,
            deleted_record_stands_for_nothing
        ],
    ),
    (
        |traits| traits.ordered && traits.records,
        clauses![waiters_get_the_record_and_pass_their_offers_on, offer_that_expires_goes_on_with_a_record],
    ),
    (|traits| !traits.records, clauses![request_for_a_record_is_refused]),
];

/// The clauses that run after the others, one by one. Requests that share a call may expire with
/// the first one, and a store may still connect at first.
const ALONE: &[(&str, Clause)] = clauses![expired_call_is_not_executed, store_that_replies_is_healthy];

/// Checks every clause. Most of them run at the same time, each with its own keys.
///
/// # Panics
///
/// Panics if a clause is violated. The message names the clause.
pub async fn check(store: impl LockStore) {
    let store: Arc<dyn LockStore> = Arc::new(store);
    let run = RandomState::new().hash_one(0);
    let traits = store.traits();
    let clauses = CLAUSES.iter().filter(|(applies, _)| applies(traits)).flat_map(|(_, clauses)| *clauses);
    let check = |(name, clause): &(&'static str, Clause)| {
        let key = LockKey::from(("conformance", format!("{run:x}"), *name));
        clause(World { store: Arc::clone(&store), key, clause: name })
    };
    join_all(clauses.map(check)).await;
    for clause in ALONE {
        check(clause).await;
    }
}

/// The environment of one clause.
#[derive(Clone)]
struct World {
    store: Arc<dyn LockStore>,
    key: LockKey,
    clause: &'static str,
}

/// One process: its ids, and its events.
struct Process {
    ids: AcquisitionIds,
    events: Arc<Mutex<Vec<StoreEvent>>>,
    alive: Arc<()>,
}

impl World {
    fn process(&self) -> Process {
        let ids = AcquisitionIds::new("conformance", RandomState::new().hash_one(1));
        let (events, alive) = (Arc::new(Mutex::new(Vec::new())), Arc::new(()));
        let received = Arc::clone(&events);
        let receive = move |_: &Arc<()>, event| received.lock().push(event);
        self.store.subscribe(EventSink::new(Arc::clone(ids.manager()), &alive, receive));
        Process { ids, events, alive }
    }

    async fn acquire(&self, id: &AcquisitionId, if_busy: IfBusy) -> AcquireReply {
        let request = AcquireRequest::new(self.key.clone(), id.clone(), LEASE, if_busy, queue_config(), EVENT_TIMEOUT);
        self.send(request).await.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    fn send(&self, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.store.acquire(request.into()).into_single()
    }

    fn send_release(&self, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.store.release(request.into()).into_single()
    }

    async fn granted(&self, id: &AcquisitionId) -> u64 {
        match self.acquire(id, IfBusy::Enqueue).await {
            AcquireReply::Granted { fence } => fence,
            other => panic!("{}: not granted, but {other:?}", self.clause),
        }
    }

    /// Enqueues. Returns the number of waiters ahead.
    async fn queued(&self, id: &AcquisitionId) -> usize {
        match self.acquire(id, IfBusy::Enqueue).await {
            AcquireReply::Queued { ahead, .. } => ahead,
            other => panic!("{}: not queued, but {other:?}", self.clause),
        }
    }

    async fn busy(&self, id: &AcquisitionId) -> Duration {
        match self.acquire(id, IfBusy::Fail).await {
            AcquireReply::Busy { lease_left } => lease_left,
            other => panic!("{}: not busy, but {other:?}", self.clause),
        }
    }

    async fn release(&self, id: &AcquisitionId, block_for: Duration) -> ReleaseReply {
        let request = ReleaseRequest::new(self.key.clone(), id.clone(), block_for, queue_config());
        self.send_release(request).await.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    /// Acquires unless the key has a record. Returns that.
    async fn recorded(&self, id: &AcquisitionId, if_busy: IfBusy) -> Option<Record> {
        let request = AcquireRequest::new(self.key.clone(), id.clone(), LEASE, if_busy, queue_config(), EVENT_TIMEOUT);
        let reply = self.send(request.demand(Demand::new().unless_recorded())).await;
        match reply.unwrap_or_else(|error| panic!("{}: {error}", self.clause)) {
            AcquireReply::Recorded(record) => Some(record),
            _ => None,
        }
    }

    /// Releases, and leaves a record.
    async fn complete(&self, id: &AcquisitionId, record: &Record, keep_for: Duration) -> ReleaseReply {
        let request = ReleaseRequest::new(self.key.clone(), id.clone(), Duration::ZERO, queue_config());
        let reply = self.send_release(request.record(record.clone(), keep_for)).await;
        reply.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    async fn renew(&self, ids: &[&AcquisitionId]) -> Vec<RenewReply> {
        let requests = ids.iter().map(|id| RenewRequest::new(self.key.clone(), (*id).clone(), LEASE)).collect();
        self.store.renew(requests).await.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    async fn yields(&self, id: &AcquisitionId, fence: u64, next: &AcquisitionId) -> YieldReply {
        let request =
            YieldRequest::new(self.key.clone(), id.clone(), fence, next.clone(), LEASE, queue_config(), EVENT_TIMEOUT);
        self.store.yield_to_queue(request).await.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    async fn yields_unless_recorded(&self, id: &AcquisitionId, fence: u64, next: &AcquisitionId) -> YieldReply {
        let request =
            YieldRequest::new(self.key.clone(), id.clone(), fence, next.clone(), LEASE, queue_config(), EVENT_TIMEOUT);
        let reply = self.store.yield_to_queue(request.demand(Demand::new().unless_recorded())).await;
        reply.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    /// The number of waiters that the store shows if there are this many.
    fn waiting(&self, waiters: usize) -> usize {
        if self.store.traits().ordered { waiters } else { 0 }
    }

    async fn delete_record(&self) -> DeleteRecordReply {
        let reply = self.store.delete_record(self.key.clone()).await;
        reply.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    async fn inspect(&self) -> KeyStatus {
        self.store.inspect(self.key.clone()).await.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    /// Waits for an offer to this acquisition.
    async fn offered(&self, process: &Process, id: &AcquisitionId) {
        self.received(process, &StoreEvent::Offered { key: self.key.clone(), id: id.clone() }).await;
    }

    async fn received(&self, process: &Process, event: &StoreEvent) {
        if !self.store.traits().events {
            // The waiter polls: the offer is a grant.
            if let StoreEvent::Offered { id, .. } = event {
                let holder = self.inspect().await.holder().map(|holder| holder.id.clone());
                self.same(holder.as_ref(), Some(id), "offered");
            }
            return;
        }
        let began = Instant::now();
        while !process.events.lock().contains(event) {
            assert!(began.elapsed() < EVENT_TIMEOUT, "{}: did not receive {event:?}", self.clause);
            sleep(Duration::from_millis(5)).await;
        }
    }

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "the reply of a call")]
    fn unsupported<T: std::fmt::Debug>(&self, reply: Result<T, StoreError>) {
        let is_unsupported = reply.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Unsupported);
        assert!(is_unsupported, "{}: not refused as unsupported, but {reply:?}", self.clause);
    }

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "same shape as `assert_eq!`")]
    fn same<T: PartialEq + std::fmt::Debug>(&self, is: T, should: T, why: &str) {
        assert!(is == should, "{}: {why}: {is:?}, and not {should:?}", self.clause);
    }
}

fn queue_config() -> QueueConfig {
    QueueConfig::new(OFFER_TTL, 4 * LEASE, 3)
}

async fn key_has_one_holder_until_it_is_released(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    let left = w.busy(&b).await;
    assert!(left <= LEASE && left > Duration::ZERO, "{}: a lease of {left:?}", w.clause);
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "no waiter is left");
    w.granted(&b).await;
}

async fn repeated_acquire_finds_its_grant(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let first = w.granted(&a).await;
    sleep(LEASE / 2).await;
    w.same(w.granted(&a).await, first, "the current fence");
    sleep(LEASE * 5 / 8).await;
    w.busy(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "once is enough");
    w.granted(&b).await;
}

async fn release_of_others_and_second_release_change_nothing(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::NotHolder, "not the holder");
    w.busy(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "the id");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "the second time");
    w.granted(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "a late copy");
    w.busy(&a).await;
}

async fn lease_expires_and_late_release_changes_nothing(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    w.granted(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "its lease has expired");
    w.same(w.renew(&[&a]).await, vec![RenewReply::NotHolder], "and it cannot come back");
    w.busy(&a).await;
}

async fn only_the_holder_renews_and_replies_are_in_order(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.same(w.renew(&[]).await, vec![], "no requests");
    w.granted(&a).await;
    for _ in 0..3 {
        sleep(LEASE * 2 / 3).await;
        let replies = w.renew(&[&b, &a, &b]).await;
        w.same(replies, vec![RenewReply::NotHolder, RenewReply::Extended, RenewReply::NotHolder], "one by one");
    }
    w.busy(&b).await;
}

async fn renewal_and_repeated_acquire_never_shorten_a_lease(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    let short = LEASE / 10;
    let request = RenewRequest::new(w.key.clone(), a.clone(), short);
    let replies = w.store.renew(vec![request]).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
    w.same(replies, vec![RenewReply::Extended], "it has the key");
    let left = w.busy(&b).await;
    assert!(left > LEASE / 2, "{}: a renewal left {left:?}", w.clause);
    let request = AcquireRequest::new(w.key.clone(), a.clone(), short, IfBusy::Fail, queue_config(), LEASE);
    let _ = w.send(request).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
    let left = w.busy(&b).await;
    assert!(left > LEASE / 2, "{}: a repeated acquire left {left:?}", w.clause);
}

async fn fences_rise_and_stay_below_the_limit(w: World) {
    let p = w.process();
    let mut last = 0;
    for _ in 0..20 {
        let id = p.ids.next();
        let fence = w.granted(&id).await;
        assert!(fence > last, "{}: {fence} after {last}", w.clause);
        last = fence;
        w.release(&id, Duration::ZERO).await;
    }
    // Exact as a double.
    assert!(last < 1 << 53, "{}: {last}", w.clause);
}

async fn holder_has_the_time_of_its_grant(w: World) {
    // The clock of the store may differ from that of this machine.
    const MAX_DIFFERENCE: Duration = Duration::from_secs(24 * 3600);
    let p = w.process();
    let a = p.ids.next();
    let since = || async {
        let status = w.inspect().await;
        let since = status.holder().and_then(|holder| holder.since);
        since.unwrap_or_else(|| panic!("{}: the time of the grant is unknown", w.clause))
    };
    w.granted(&a).await;
    let first = since().await;
    let elapsed = first.elapsed().unwrap_or_else(|error| error.duration());
    assert!(elapsed < MAX_DIFFERENCE, "{}: {first:?} is not the time of day", w.clause);
    sleep(LEASE / 3).await;
    w.renew(&[&a]).await;
    w.granted(&a).await;
    w.same(since().await, first, "a renewal is no new grant");
}

async fn release_offers_the_key_to_the_first_waiter(w: World) {
    let (p, q) = (w.process(), w.process());
    let (a, b, c) = (p.ids.next(), q.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.same((w.queued(&b).await, w.queued(&c).await), (0, 1), "first come, first served");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::HandedOff, "to the first");
    w.offered(&q, &b).await;
    w.same(w.queued(&c).await, 0, "the second is the first now");
    w.granted(&b).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::HandedOff, "to the second");
    w.offered(&p, &c).await;
    w.granted(&c).await;
    w.same(w.release(&c, Duration::ZERO).await, ReleaseReply::Freed, "no waiters left");
}

async fn accepted_offer_has_a_full_lease_and_its_own_fence(w: World) {
    let p = w.process();
    let (a, b, c) = (p.ids.next(), p.ids.next(), p.ids.next());
    let first = w.granted(&a).await;
    w.queued(&b).await;
    w.release(&a, Duration::ZERO).await;
    let fence = w.granted(&b).await;
    assert!(fence > first, "{}: {fence} after {first}", w.clause);
    w.same(w.granted(&b).await, fence, "repeated");
    sleep(OFFER_TTL + Duration::from_millis(200)).await;
    w.busy(&c).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::Freed, "a full lease");
}

async fn offer_that_expires_goes_to_the_next_waiter(w: World) {
    let (stopped, p) = (w.process(), w.process());
    let (a, b, c) = (p.ids.next(), stopped.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.queued(&b).await;
    w.queued(&c).await;
    w.release(&a, Duration::ZERO).await;
    sleep(OFFER_TTL + Duration::from_millis(50)).await;
    w.granted(&c).await;
}

async fn expired_key_is_offered_to_the_first_waiter(w: World) {
    let (p, q) = (w.process(), w.process());
    let (dead, b, c) = (p.ids.next(), q.ids.next(), p.ids.next());
    w.granted(&dead).await;
    w.queued(&b).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    w.busy(&c).await;
    w.offered(&q, &b).await;
    w.granted(&b).await;
}

async fn repeated_acquire_keeps_its_queue_position(w: World) {
    let p = w.process();
    let (a, b, c) = (p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    for _ in 0..3 {
        w.same((w.queued(&b).await, w.queued(&c).await), (0, 1), "repeated");
    }
    w.release(&b, Duration::ZERO).await;
    w.release(&a, Duration::ZERO).await;
    w.granted(&c).await;
    w.same(w.release(&c, Duration::ZERO).await, ReleaseReply::Freed, "one entry each");
}

async fn release_leaves_the_queue_and_passes_an_offer_on(w: World) {
    let p = w.process();
    let (a, b, c, d) = (p.ids.next(), p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    for waiter in [&b, &c, &d] {
        w.queued(waiter).await;
    }
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::NotHolder, "it only had a queue entry");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::HandedOff, "to the next");
    w.offered(&p, &c).await;
    // It leaves while the offer is in flight.
    w.same(w.release(&c, Duration::ZERO).await, ReleaseReply::HandedOff, "and on");
    w.offered(&p, &d).await;
    w.granted(&d).await;
}

async fn dead_process_is_skipped(w: World) {
    let (dead, p) = (w.process(), w.process());
    let (a, b, c) = (p.ids.next(), dead.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.queued(&b).await;
    w.queued(&c).await;
    drop(dead.alive);
    sleep(NOTICE_TIMEOUT).await;
    w.granted(&a).await;
    w.release(&a, Duration::ZERO).await;
    w.offered(&p, &c).await;
    w.granted(&c).await;
}

async fn dead_process_delays_the_next_by_an_offer(w: World) {
    let (dead, p) = (w.process(), w.process());
    let (a, b, c) = (p.ids.next(), dead.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.queued(&b).await;
    w.queued(&c).await;
    drop(dead.alive);
    w.release(&a, Duration::ZERO).await;
    sleep(OFFER_TTL + Duration::from_millis(50)).await;
    w.granted(&c).await;
}

async fn connection_of_the_holder_is_known(w: World) {
    let p = w.process();
    let a = p.ids.next();
    w.granted(&a).await;
    let connected = async || w.inspect().await.holder().and_then(|holder| holder.connected);
    w.same(connected().await, Some(true), "the sink is open");
    drop(p.alive);
    sleep(NOTICE_TIMEOUT).await;
    w.same(connected().await, Some(false), "the sink is closed");
}

async fn free_key_goes_to_the_first_acquire(w: World) {
    let p = w.process();
    let (a, b, c) = (p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.queued(&b).await;
    w.same(w.inspect().await.waiting, 0, "nothing is kept");
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::NotHolder, "nothing to end");
    w.queued(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "to no waiter");
    let fence = w.granted(&c).await;
    w.queued(&b).await;
    match w.yields(&c, fence, &a).await {
        YieldReply::Extended { .. } => {}
        other => panic!("{}: no waiter is known, but {other:?}", w.clause),
    }
    w.same(w.release(&c, Duration::ZERO).await, ReleaseReply::Freed, "to no waiter");
    w.granted(&b).await;
}

async fn queue_has_a_capacity(w: World) {
    let p = w.process();
    let ids: Vec<_> = (0..5).map(|_| p.ids.next()).collect();
    w.granted(&ids[0]).await;
    for waiter in &ids[1..4] {
        w.queued(waiter).await;
    }
    let full = w.acquire(&ids[4], IfBusy::Enqueue).await;
    assert!(matches!(full, AcquireReply::QueueFull { waiting: 3, .. }), "{}: {full:?}", w.clause);
    w.same(w.queued(&ids[3]).await, 2, "an entry is kept");
    for id in ids.iter().rev() {
        w.release(id, Duration::ZERO).await;
    }
}

async fn released_key_can_stay_blocked(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.queued(&b).await;
    w.same(w.release(&a, LEASE / 2).await, ReleaseReply::Freed, "no holder");
    w.same(w.renew(&[&a]).await, vec![RenewReply::NotHolder], "not even the former holder");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "a late copy changes nothing");
    w.same(w.queued(&b).await, 0, "still blocked");
    sleep(LEASE / 2 + Duration::from_millis(50)).await;
    w.granted(&b).await;
}

async fn yield_without_waiters_extends_under_a_new_fence(w: World) {
    let p = w.process();
    let (a, next, b) = (p.ids.next(), p.ids.next(), p.ids.next());
    let first = w.granted(&a).await;
    sleep(LEASE * 2 / 3).await;
    let YieldReply::Extended { fence } = w.yields(&a, first, &next).await else { panic!("{}: no waiters", w.clause) };
    assert!(fence > first, "{}: {fence} after {first}", w.clause);
    sleep(LEASE * 2 / 3).await;
    w.busy(&b).await;
    w.same(w.granted(&a).await, fence, "the current fence");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "and the next id has no entry");
}

async fn yield_offers_the_key_and_enqueues_the_next_id(w: World) {
    let (p, q) = (w.process(), w.process());
    let (a, next, b) = (p.ids.next(), p.ids.next(), q.ids.next());
    let fence = w.granted(&a).await;
    w.queued(&b).await;
    match w.yields(&a, fence, &next).await {
        YieldReply::NotHolder(AcquireReply::Queued { ahead: 0, .. }) => {}
        other => panic!("{}: {other:?}", w.clause),
    }
    w.offered(&q, &b).await;
    w.same(w.renew(&[&a]).await, vec![RenewReply::NotHolder], "the old id has ended");
    w.granted(&b).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::HandedOff, "offered back");
    w.offered(&p, &next).await;
    w.granted(&next).await;
}

async fn yield_of_a_lost_key_is_an_acquire(w: World) {
    let p = w.process();
    let (a, next) = (p.ids.next(), p.ids.next());
    let fence = w.granted(&a).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    match w.yields(&a, fence, &next).await {
        YieldReply::NotHolder(AcquireReply::Granted { .. }) => {}
        other => panic!("{}: {other:?}", w.clause),
    }
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "the old id");
    w.same(w.release(&next, Duration::ZERO).await, ReleaseReply::Freed, "the next id");
}

async fn copy_of_a_yield_changes_nothing(w: World) {
    let p = w.process();
    let (a, next, b) = (p.ids.next(), p.ids.next(), p.ids.next());
    let first = w.granted(&a).await;
    let YieldReply::Extended { fence } = w.yields(&a, first, &next).await else { panic!("{}: no waiters", w.clause) };
    // The copy arrives when a section runs under the new fence and a waiter is queued.
    w.queued(&b).await;
    w.same(w.yields(&a, first, &next).await, YieldReply::Extended { fence }, "the current fence");
    w.same(w.renew(&[&a]).await, vec![RenewReply::Extended], "it still has the key");
    w.same(w.queued(&b).await, 0, "the waiter still waits");
    let handed_off = if w.store.traits().ordered { ReleaseReply::HandedOff } else { ReleaseReply::Freed };
    w.same(w.release(&a, Duration::ZERO).await, handed_off, "to the waiter, and not to the next id");
}

async fn yield_to_a_queued_next_id_grants_or_keeps_one_entry(w: World) {
    let p = w.process();
    let (a, next, b) = (p.ids.next(), p.ids.next(), p.ids.next());
    let fence = w.granted(&a).await;
    w.queued(&next).await;
    match w.yields(&a, fence, &next).await {
        YieldReply::NotHolder(AcquireReply::Granted { .. }) => {}
        other => panic!("{}: {other:?}", w.clause),
    }
    w.same(w.release(&next, Duration::ZERO).await, ReleaseReply::Freed, "no entry as well");
    let fence = w.granted(&a).await;
    let later = p.ids.next();
    w.same((w.queued(&b).await, w.queued(&later).await), (0, 1), "behind another waiter");
    match w.yields(&a, fence, &later).await {
        YieldReply::NotHolder(AcquireReply::Queued { ahead: 0, .. }) => {}
        other => panic!("{}: {other:?}", w.clause),
    }
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::HandedOff, "it was queued for that");
    w.same(w.release(&later, Duration::ZERO).await, ReleaseReply::Freed, "one entry each");
}

async fn expired_call_is_not_executed(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let request = AcquireRequest::new(w.key.clone(), a.clone(), LEASE, IfBusy::Fail, queue_config(), Duration::ZERO);
    // A store that decides within the call is in time; any other is not.
    let reply = w.send(request).await;
    let is_granted = matches!(reply, Ok(AcquireReply::Granted { .. }));
    w.same(w.release(&a, Duration::ZERO).await == ReleaseReply::Freed, is_granted, "executed and granted, or neither");
    w.granted(&b).await;
    w.release(&b, Duration::ZERO).await;
    // Polled after it has expired. A store that executes a call before it is polled was in time.
    let valid_for = Duration::from_millis(10);
    let acquire = AcquireRequest::new(w.key.clone(), a.clone(), LEASE, IfBusy::Fail, queue_config(), valid_for);
    let reply = w.store.acquire(acquire.into()).into_single();
    sleep(valid_for * 5).await;
    let in_time = w.inspect().await.holder().is_some();
    w.same(matches!(reply.await, Ok(AcquireReply::Granted { .. })) && !in_time, false, "an acquire is late");
    w.release(&a, Duration::ZERO).await;
    let (key, lost) = (w.key.clone(), p.ids.next());
    let yields = YieldRequest::new(key, lost, 1, b.clone(), LEASE, queue_config(), valid_for);
    let reply = w.store.yield_to_queue(yields);
    sleep(valid_for * 5).await;
    let in_time = w.inspect().await.holder().is_some();
    w.same(matches!(reply.await, Ok(YieldReply::NotHolder(_))) && !in_time, false, "a yield is late");
}

async fn inspect_reports_holder_and_waiters(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let free = w.inspect().await;
    w.same((free.holders, free.lease_left, free.waiting), (vec![], Duration::ZERO, 0), "free");
    let fence = w.granted(&a).await;
    w.queued(&b).await;
    let held = w.inspect().await;
    let holders = held.holders.into_iter().map(|holder| (holder.id, holder.fence)).collect();
    w.same((holders, held.waiting), (vec![(a.clone(), fence)], w.waiting(1)), "held");
    assert!(held.lease_left <= LEASE && held.lease_left > Duration::ZERO, "{}: {:?}", w.clause, held.lease_left);
    w.release(&b, Duration::ZERO).await;
    w.release(&a, LEASE).await;
    let kept = w.inspect().await;
    w.same(kept.holders, vec![], "blocked, without a holder");
    assert!(kept.lease_left > Duration::ZERO, "{}", w.clause);
}

async fn revoked_key_stays_blocked_and_its_holder_is_notified(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let force = || async {
        let request = ForceReleaseRequest::new(w.key.clone(), LEASE / 2, queue_config());
        w.store.force_release(request).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause))
    };
    w.same(force().await, ForceReleaseReply::Free, "no holder");
    w.granted(&a).await;
    w.queued(&b).await;
    w.same(force().await, ForceReleaseReply::Revoked { holder: a.clone() }, "the holder");
    w.received(&p, &StoreEvent::Revoked { key: w.key.clone(), id: a.clone() }).await;
    w.same(w.renew(&[&a]).await, vec![RenewReply::NotHolder], "not the holder any more");
    w.same(w.queued(&b).await, 0, "so that it can stop");
    w.same(force().await, ForceReleaseReply::Revoked { holder: a.clone() }, "once more");
    w.received(&p, &StoreEvent::Revoked { key: w.key.clone(), id: a.clone() }).await;
    w.same(w.queued(&b).await, 0, "its lock-delay lasts");
    sleep(LEASE / 2 + Duration::from_millis(50)).await;
    w.granted(&b).await;
}

async fn force_release_frees_a_blocked_key_for_the_queue(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.queued(&b).await;
    let block = Duration::from_secs(3600);
    w.same(w.release(&a, block).await, ReleaseReply::Freed, "blocked for an hour");
    let request = ForceReleaseRequest::new(w.key.clone(), LEASE / 2, queue_config());
    match w.store.force_release(request).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause)) {
        ForceReleaseReply::Unblocked { blocked_for } => {
            assert!(blocked_for <= block && blocked_for > block / 2, "{}: {blocked_for:?}", w.clause);
        }
        other => panic!("{}: {other:?}", w.clause),
    }
    w.offered(&p, &b).await;
    w.granted(&b).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::Freed, "no waiters left");
}

/// Not text, and with an empty part.
fn record(n: u8) -> Record {
    Record::new(vec![n, 0, 0xff, b'\n'], (n > 0).then(|| Bytes::from(vec![n; usize::from(n) - 1])))
}

async fn listing_has_each_key_that_is_held_blocked_or_waited_for(w: World) {
    const KEYS: usize = 60;
    const LIMIT: usize = 5;
    let long = Duration::from_secs(600);
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let keys: Vec<_> = (0..KEYS).map(|n| LockKey::from(("conformance", w.key.as_str(), n))).collect();
    let world = |n: usize| World { key: keys[n].clone(), ..w.clone() };
    for n in 0..KEYS {
        let w = world(n);
        let acquire = |id: &AcquisitionId| {
            AcquireRequest::new(w.key.clone(), id.clone(), long, IfBusy::Enqueue, queue_config(), EVENT_TIMEOUT)
        };
        for id in [&a, &b].into_iter().take(if n % 4 == 1 { 2 } else { 1 }) {
            w.send(acquire(id)).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
        }
        // Held, contended, blocked or free.
        if n % 4 > 1 {
            w.release(&a, if n % 4 == 2 { long } else { Duration::ZERO }).await;
        }
    }
    let list = async |contended_only| {
        let mut statuses = vec![None; KEYS];
        let mut request = ListRequest::new(LIMIT).contended_only(contended_only);
        loop {
            let page = w.store.list(request.clone()).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
            assert!(page.entries.len() < KEYS / 3, "{}: a page of {} entries", w.clause, page.entries.len());
            for entry in page.entries {
                if let Some(n) = keys.iter().position(|key| *key == entry.key) {
                    let holders: Vec<_> = entry.status.holders.into_iter().map(|holder| holder.id).collect();
                    assert!(entry.status.lease_left > long / 2, "{}: {:?}", w.clause, entry.status.lease_left);
                    statuses[n] = Some((holders, entry.status.waiting));
                }
            }
            let Some(next) = page.next else { return statuses };
            request = request.after(next);
        }
    };
    let status = |n| match n % 4 {
        0 => Some((vec![a.clone()], 0)),
        1 => Some((vec![a.clone()], w.waiting(1))),
        2 => Some((vec![], 0)),
        _ => None,
    };
    let all: Vec<_> = (0..KEYS).map(status).collect();
    w.same(list(false).await, all.clone(), "all keys");
    let is_contended = |status: &(Vec<AcquisitionId>, usize)| status.1 > 0;
    let contended = all.iter().map(|status| status.clone().filter(is_contended)).collect();
    w.same(list(true).await, contended, "contended keys");
    w.same(list(false).await, all, "nothing has changed");
    for n in 0..KEYS {
        let w = world(n);
        w.release(&b, Duration::ZERO).await;
        w.release(&a, Duration::ZERO).await;
        let request = ForceReleaseRequest::new(w.key.clone(), Duration::ZERO, queue_config());
        w.store.force_release(request).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
    }
}

async fn request_for_a_record_is_refused(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let acquire = |id: &AcquisitionId| {
        AcquireRequest::new(w.key.clone(), id.clone(), LEASE, IfBusy::Enqueue, queue_config(), EVENT_TIMEOUT)
    };
    w.unsupported(w.send(acquire(&a).demand(Demand::new().unless_recorded())).await);
    let fence = w.granted(&b).await;
    let release = ReleaseRequest::new(w.key.clone(), b.clone(), Duration::ZERO, queue_config());
    w.unsupported(w.send_release(release.record(record(1), LEASE)).await);
    let yields = YieldRequest::new(w.key.clone(), b.clone(), fence, a, LEASE, queue_config(), EVENT_TIMEOUT);
    w.unsupported(w.store.yield_to_queue(yields.demand(Demand::new().unless_recorded())).await);
    w.unsupported(w.store.delete_record(w.key.clone()).await);
    let status = w.inspect().await;
    let holder = status.holder().map(|holder| (holder.id.clone(), holder.fence));
    w.same((holder, status.waiting), (Some((b.clone(), fence)), 0), "nothing has changed");
}

async fn record_stands_in_place_of_a_grant(w: World) {
    let p = w.process();
    let (a, b, c) = (p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.same(w.complete(&a, &record(9), LEASE).await, ReleaseReply::Freed, "released with a record");
    for (if_busy, why) in [(IfBusy::Fail, "without a queue"), (IfBusy::Enqueue, "with one")] {
        w.same(w.recorded(&b, if_busy).await, Some(record(9)), why);
    }
    // Others ignore it.
    w.granted(&c).await;
    w.same(w.release(&c, Duration::ZERO).await, ReleaseReply::Freed, "released without a record");
    w.same(w.recorded(&b, IfBusy::Fail).await, Some(record(9)), "it stays");
    sleep(LEASE).await;
    w.same(w.recorded(&b, IfBusy::Fail).await, None, "it has expired");
    w.same(w.complete(&b, &record(0), LEASE).await, ReleaseReply::Freed, "and the key was granted");
    w.same(w.recorded(&a, IfBusy::Fail).await, Some(record(0)), "a record without a body");
}

async fn only_the_holder_leaves_a_record_and_a_copy_changes_nothing(w: World) {
    let p = w.process();
    let (a, b, c, d) = (p.ids.next(), p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.same(w.complete(&b, &record(1), LEASE).await, ReleaseReply::NotHolder, "of another one");
    sleep(LEASE).await;
    w.same(w.complete(&a, &record(1), LEASE).await, ReleaseReply::NotHolder, "after its lease");
    w.same(w.recorded(&b, IfBusy::Fail).await, None, "no record, but a grant");
    let long = 4 * LEASE;
    w.same(w.complete(&b, &record(2), long).await, ReleaseReply::Freed, "the holder");
    w.same(w.complete(&b, &record(3), long).await, ReleaseReply::RecordedBefore, "a copy");
    w.same(w.complete(&a, &record(3), long).await, ReleaseReply::NotHolder, "a copy of an earlier holder");
    w.same(w.recorded(&c, IfBusy::Fail).await, Some(record(2)), "the first one stays");
    w.granted(&d).await;
    w.same(w.complete(&d, &record(0), long).await, ReleaseReply::Freed, "the next holder");
    w.same(w.recorded(&c, IfBusy::Fail).await, Some(record(0)), "its record replaces the earlier one");
    w.same(w.complete(&b, &record(2), long).await, ReleaseReply::NotHolder, "its record was replaced");
}

async fn waiters_get_the_record_and_pass_their_offers_on(w: World) {
    let p = w.process();
    let (a, b, c) = (p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    for id in [&b, &c] {
        w.same(w.recorded(id, IfBusy::Enqueue).await, None, "queued");
    }
    w.same(w.complete(&a, &record(1), 4 * LEASE).await, ReleaseReply::HandedOff, "waiters are behind");
    w.offered(&p, &b).await;
    w.same(w.recorded(&b, IfBusy::Enqueue).await, Some(record(1)), "in place of the offer");
    w.offered(&p, &c).await;
    w.same(w.recorded(&c, IfBusy::Enqueue).await, Some(record(1)), "of the next offer");
    let status = w.inspect().await;
    w.same((status.holders, status.waiting), (vec![], 0), "nothing is left");
}

async fn offer_that_expires_goes_on_with_a_record(w: World) {
    let p = w.process();
    let (a, b, c, d) = (p.ids.next(), p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    for id in [&b, &c] {
        w.same(w.recorded(id, IfBusy::Enqueue).await, None, "queued");
    }
    w.same(w.complete(&a, &record(1), 4 * LEASE).await, ReleaseReply::HandedOff, "waiters are behind");
    w.offered(&p, &b).await;
    sleep(OFFER_TTL + Duration::from_millis(100)).await;
    w.same(w.recorded(&d, IfBusy::Fail).await, Some(record(1)), "of a free key with a waiter");
    w.offered(&p, &c).await;
}

async fn record_is_returned_while_the_key_is_held_or_blocked(w: World) {
    let p = w.process();
    let (a, b, c) = (p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    let request = ReleaseRequest::new(w.key.clone(), a, LEASE, queue_config()).record(record(1), 4 * LEASE);
    let reply = w.send_release(request).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
    w.same(reply, ReleaseReply::Freed, "blocked");
    w.same(w.recorded(&b, IfBusy::Enqueue).await, Some(record(1)), "while it is blocked");
    w.busy(&c).await;
    sleep(LEASE).await;
    w.granted(&c).await;
    w.same(w.recorded(&b, IfBusy::Enqueue).await, Some(record(1)), "while another one holds it");
    w.same(w.release(&c, Duration::ZERO).await, ReleaseReply::Freed, "without waiters");
}

async fn yield_of_a_lost_key_finds_the_record(w: World) {
    let p = w.process();
    let (a, b, next) = (p.ids.next(), p.ids.next(), p.ids.next());
    let fence = w.granted(&a).await;
    sleep(LEASE).await;
    w.granted(&b).await;
    w.same(w.complete(&b, &record(1), 4 * LEASE).await, ReleaseReply::Freed, "another holder");
    let reply = w.yields_unless_recorded(&a, fence, &next).await;
    w.same(reply, YieldReply::NotHolder(AcquireReply::Recorded(record(1))), "in place of a grant");
    w.same(w.release(&next, Duration::ZERO).await, ReleaseReply::NotHolder, "it holds nothing");
}

async fn yield_to_a_waiter_finds_the_record(w: World) {
    let p = w.process();
    let (a, b, c, next) = (p.ids.next(), p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.same(w.complete(&a, &record(1), 4 * LEASE).await, ReleaseReply::Freed, "without waiters");
    let fence = w.granted(&b).await;
    w.queued(&c).await;
    if w.store.traits().ordered {
        let reply = w.yields_unless_recorded(&b, fence, &next).await;
        w.same(reply, YieldReply::NotHolder(AcquireReply::Recorded(record(1))), "in place of a queue entry");
        w.offered(&p, &c).await;
        w.same(w.release(&next, Duration::ZERO).await, ReleaseReply::NotHolder, "it has no entry");
    }
}

async fn deleted_record_stands_for_nothing(w: World) {
    let p = w.process();
    let (a, b, c) = (p.ids.next(), p.ids.next(), p.ids.next());
    let left = async || w.inspect().await.record_left;
    w.same((w.delete_record().await, left().await), (DeleteRecordReply::NotFound, None), "no record");
    w.granted(&a).await;
    w.complete(&a, &record(2), 4 * LEASE).await;
    let is_left = left().await.is_some_and(|left| left > 2 * LEASE && left <= 4 * LEASE);
    assert!(is_left, "{}: the record lasts for {:?}", w.clause, left().await);
    w.granted(&b).await;
    w.same(w.delete_record().await, DeleteRecordReply::Busy, "its key is held");
    w.same(w.recorded(&c, IfBusy::Fail).await, Some(record(2)), "and it stays");
    w.same(w.release(&b, LEASE).await, ReleaseReply::Freed, "blocked, without a holder");
    w.same(w.delete_record().await, DeleteRecordReply::Deleted, "once");
    w.same((w.delete_record().await, left().await), (DeleteRecordReply::NotFound, None), "and no second time");
    w.busy(&c).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    w.same(w.recorded(&c, IfBusy::Fail).await, None, "a grant in its place");
}

async fn requests_of_one_call_have_replies_of_their_own(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let keys = [0, 1, 2].map(|n| LockKey::from(("conformance", w.key.as_str(), n)));
    let acquire = |key: &LockKey, id: &AcquisitionId| {
        AcquireRequest::new(key.clone(), id.clone(), LEASE, IfBusy::Fail, queue_config(), EVENT_TIMEOUT)
    };
    let release = |key: &LockKey, id: &AcquisitionId| {
        ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, queue_config())
    };
    let held = w.send(acquire(&keys[2], &b)).await;
    assert!(matches!(held, Ok(AcquireReply::Granted { .. })), "{}: {held:?}", w.clause);
    let mut granted = Vec::new();
    for reply in w.store.acquire(keys.iter().map(|key| acquire(key, &a)).collect()) {
        let reply = reply.await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
        granted.push(matches!(reply, AcquireReply::Granted { .. }));
    }
    w.same(granted, vec![true, true, false], "in the order of the requests");
    let mut released = Vec::new();
    for reply in w.store.release(keys.iter().map(|key| release(key, &a)).collect()) {
        released.push(reply.await.unwrap_or_else(|error| panic!("{}: {error}", w.clause)));
    }
    let replies = vec![ReleaseReply::Freed, ReleaseReply::Freed, ReleaseReply::NotHolder];
    w.same(released, replies, "in the order of the requests");
    let last = w.send_release(release(&keys[2], &b)).await;
    w.same(last.ok(), Some(ReleaseReply::Freed), "it was not changed");
}

async fn store_that_replies_is_healthy(w: World) {
    let _p = w.process();
    w.store.health().await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
    assert!(w.store.call_timeout() > Duration::ZERO, "{}", w.clause);
}
