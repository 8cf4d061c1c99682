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
    collections::HashMap,
    future::Future,
    hash::{BuildHasher, RandomState},
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt, future::join_all};
use tokio::time::{Instant, sleep};

use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, Demand, EventSink, ForceReleaseReply, ForceReleaseRequest,
        Heir, IfBusy, KeyStatus, ListRequest, LockStore, QueueConfig, Record, ReleaseReply, ReleaseRequest, RenewReply,
        RenewRequest, StoreError, StoreErrorKind, StoreEvent, StoreFuture, StoreTraits, YieldReply, YieldRequest,
    },
    sync::Mutex,
    trace::SectionTrace,
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
    (
        |traits| traits.shares,
        clauses![
            as_many_acquisitions_hold_a_key_as_each_allows,
            each_holder_of_a_shared_key_has_its_own_lease,
            block_of_a_shared_key_keeps_one_place,
            revocation_of_a_shared_key_ends_each_holder
        ],
    ),
    (|traits| traits.shares && traits.ordered, clauses![waiter_that_does_not_fit_is_not_passed]),
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
    (|traits| traits.traces && traits.ordered, clauses![trace_of_a_section_reaches_those_that_wait_for_it]),
    (|traits| !traits.records, clauses![request_for_a_record_is_refused]),
    (
        |traits| traits.tickets,
        clauses![
            release_leaves_the_key_to_a_ticket_and_serves_no_waiter,
            one_acquisition_takes_the_place_of_a_ticket,
            ticket_that_expires_or_is_revoked_holds_nothing
        ],
    ),
    (|traits| !traits.tickets, clauses![request_for_a_ticket_is_refused]),
    (
        |traits| traits.supersedes,
        clauses![
            newer_acquisition_waits_for_the_older_ones_and_tells_them,
            offer_to_an_older_acquisition_is_superseded
        ],
    ),
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
    let check = async |(name, clause): &(&'static str, Clause)| {
        let key = LockKey::from(("conformance", format!("{run:x}"), *name));
        let world = World { store: Arc::clone(&store), key, processes: Arc::default() };
        if let Err(panic) = AssertUnwindSafe(clause(world)).catch_unwind().await {
            let message = panic.downcast_ref::<String>().map(String::as_str);
            panic!("{name}: {}", message.or(panic.downcast_ref().copied()).unwrap_or_default());
        }
    };
    join_all(clauses.map(&check)).await;
    for clause in ALONE {
        check(clause).await;
    }
}

/// The events that a process has received.
type Events = Mutex<Vec<StoreEvent>>;

/// The environment of one clause.
#[derive(Clone)]
struct World {
    store: Arc<dyn LockStore>,
    key: LockKey,
    /// The events of each process, by the id of its manager. Its sink is open as long as they live.
    processes: Arc<Mutex<HashMap<String, Arc<Events>>>>,
}

impl World {
    /// The same world with another key.
    fn at(&self, n: usize) -> Self {
        Self { key: LockKey::from(("conformance", self.key.as_str(), n)), ..self.clone() }
    }

    /// Starts a process. Returns ids of its acquisitions.
    fn process<const N: usize>(&self) -> [AcquisitionId; N] {
        self.sharers(1)
    }

    /// The same, of acquisitions that hold a key together: so many at most.
    fn sharers<const N: usize>(&self, max_holders: u16) -> [AcquisitionId; N] {
        self.process_of(|ids| ids.next_share(max_holders))
    }

    fn process_of<const N: usize>(&self, next: impl Fn(&AcquisitionIds) -> AcquisitionId) -> [AcquisitionId; N] {
        let ids = AcquisitionIds::new("conformance", RandomState::new().hash_one(1));
        let events = Arc::<Events>::default();
        self.store
            .subscribe(EventSink::new(Arc::clone(ids.manager()), &events, |events, event| events.lock().push(event)));
        self.processes.lock().insert(ids.manager().to_string(), events);
        std::array::from_fn(|_| next(&ids))
    }

    /// Closes the sink of the process of this acquisition.
    fn kill_process_of(&self, id: &AcquisitionId) {
        self.processes.lock().remove(id.manager());
    }

    fn acquire_request(&self, id: &AcquisitionId, if_busy: IfBusy) -> AcquireRequest {
        AcquireRequest::new(self.key.clone(), id.clone(), LEASE, if_busy, queue_config(), EVENT_TIMEOUT)
    }

    fn release_request(&self, id: &AcquisitionId, block_for: Duration) -> ReleaseRequest {
        ReleaseRequest::new(self.key.clone(), id.clone(), block_for, queue_config())
    }

    fn yield_request(&self, id: &AcquisitionId, fence: u64, next: &AcquisitionId) -> YieldRequest {
        YieldRequest::new(self.key.clone(), id.clone(), fence, next.clone(), LEASE, queue_config(), EVENT_TIMEOUT)
    }

    fn send_acquire(&self, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.store.acquire(request.into()).into_single()
    }

    fn send_release(&self, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.store.release(request.into()).into_single()
    }

    async fn acquire(&self, id: &AcquisitionId, if_busy: IfBusy) -> AcquireReply {
        self.send_acquire(self.acquire_request(id, if_busy)).await.expect("a reply")
    }

    async fn granted(&self, id: &AcquisitionId) -> u64 {
        fence_of(self.acquire(id, IfBusy::Enqueue).await)
    }

    /// Enqueues. Returns the number of waiters ahead.
    async fn queued(&self, id: &AcquisitionId) -> usize {
        ahead_of(self.acquire(id, IfBusy::Enqueue).await)
    }

    /// Grants the key, and enqueues the waiters in this order. Returns the fence.
    async fn contended(&self, holder: &AcquisitionId, waiters: &[&AcquisitionId]) -> u64 {
        let fence = self.granted(holder).await;
        for (n, waiter) in waiters.iter().enumerate() {
            assert_eq!(self.queued(waiter).await, self.waiting(n), "first come, first served");
        }
        fence
    }

    /// Returns the remaining lease of the holder.
    async fn busy(&self, id: &AcquisitionId) -> Duration {
        match self.acquire(id, IfBusy::Fail).await {
            AcquireReply::Busy { lease_left, .. } => lease_left,
            other => panic!("not busy, but {other:?}"),
        }
    }

    async fn release(&self, id: &AcquisitionId) -> ReleaseReply {
        self.block(id, Duration::ZERO).await
    }

    /// Releases. The key stays blocked for this time.
    async fn block(&self, id: &AcquisitionId, block_for: Duration) -> ReleaseReply {
        self.send_release(self.release_request(id, block_for)).await.expect("a reply")
    }

    /// Acquires unless the key has a record. Returns that.
    async fn recorded(&self, id: &AcquisitionId, if_busy: IfBusy) -> Option<Record> {
        let request = self.acquire_request(id, if_busy).demand(Demand::new().unless_recorded());
        match self.send_acquire(request).await.expect("a reply") {
            AcquireReply::Recorded(record) => Some(record),
            _ => None,
        }
    }

    /// Releases, and leaves a record.
    async fn complete(&self, id: &AcquisitionId, record: Record, keep_for: Duration) -> ReleaseReply {
        self.send_release(self.release_request(id, Duration::ZERO).record(record, keep_for)).await.expect("a reply")
    }

    /// A holder leaves a record while two acquisitions wait for it. The first one gets an offer.
    async fn completed_before_waiters(&self, holder: &AcquisitionId, waiters: [&AcquisitionId; 2]) {
        self.granted(holder).await;
        for id in waiters {
            assert_eq!(self.recorded(id, IfBusy::Enqueue).await, None, "queued");
        }
        assert_eq!(self.complete(holder, record(1), 4 * LEASE).await, ReleaseReply::HandedOff, "waiters are behind");
        self.offered(waiters[0]).await;
    }

    /// Releases, and leaves the key to a ticket.
    async fn keep(&self, id: &AcquisitionId, ticket: &AcquisitionId, lease: Duration) -> ReleaseReply {
        let heir = Heir::new(ticket.clone(), lease);
        self.send_release(self.release_request(id, Duration::ZERO).heir(heir)).await.expect("a reply")
    }

    /// Acquires in place of a ticket. Returns the fence, or `None` if the reply is busy.
    async fn redeem(&self, id: &AcquisitionId, ticket: &AcquisitionId) -> Option<u64> {
        let request = self.acquire_request(id, IfBusy::Fail).in_place_of(Some(ticket.clone()));
        match self.send_acquire(request).await.expect("a reply") {
            AcquireReply::Granted { fence, .. } => Some(fence),
            AcquireReply::Busy { .. } => None,
            other => panic!("neither granted nor busy, but {other:?}"),
        }
    }

    async fn renew(&self, ids: &[&AcquisitionId]) -> Vec<RenewReply> {
        let requests = ids.iter().map(|id| RenewRequest::new(self.key.clone(), (*id).clone(), LEASE)).collect();
        self.store.renew(requests).await.expect("a reply")
    }

    /// Yields a key without waiters. Returns the new fence.
    async fn extended(&self, id: &AcquisitionId, fence: u64, next: &AcquisitionId) -> u64 {
        match self.store.yield_to_queue(self.yield_request(id, fence, next)).await.expect("a reply") {
            YieldReply::Extended { fence } => fence,
            other @ YieldReply::NotHolder(_) => panic!("no waiter is known, but {other:?}"),
        }
    }

    /// Yields a key that the acquisition does not keep. Returns the reply for the next id.
    async fn yielded(&self, request: YieldRequest) -> AcquireReply {
        match self.store.yield_to_queue(request).await.expect("a reply") {
            YieldReply::NotHolder(reply) => reply,
            other @ YieldReply::Extended { .. } => panic!("not the holder any more, but {other:?}"),
        }
    }

    async fn force_release(&self, block_for: Duration) -> ForceReleaseReply {
        let request = ForceReleaseRequest::new(self.key.clone(), block_for, queue_config());
        self.store.force_release(request).await.expect("a reply")
    }

    async fn delete_record(&self) -> DeleteRecordReply {
        self.store.delete_record(self.key.clone()).await.expect("a reply")
    }

    async fn inspect(&self) -> KeyStatus {
        self.store.inspect(self.key.clone()).await.expect("a reply")
    }

    /// The number of waiters that the store shows if there are this many.
    fn waiting(&self, waiters: usize) -> usize {
        if self.store.traits().ordered { waiters } else { 0 }
    }

    /// Waits for an offer to this acquisition.
    async fn offered(&self, id: &AcquisitionId) {
        if self.store.traits().events {
            return self.received(id, StoreEvent::Offered { key: self.key.clone(), id: id.clone() }).await;
        }
        // The waiter polls: the offer is a grant.
        assert_eq!(self.inspect().await.holder().map(|holder| &holder.id), Some(id), "offered");
    }

    /// Waits until the process of this acquisition has been notified that its key was revoked.
    async fn revoked(&self, id: &AcquisitionId) {
        if self.store.traits().events {
            self.received(id, StoreEvent::Revoked { key: self.key.clone(), id: id.clone() }).await;
        }
    }

    async fn received(&self, id: &AcquisitionId, event: StoreEvent) {
        let events = Arc::clone(&self.processes.lock()[id.manager()]);
        let began = Instant::now();
        while !events.lock().contains(&event) {
            assert!(began.elapsed() < EVENT_TIMEOUT, "did not receive {event:?}");
            sleep(Duration::from_millis(5)).await;
        }
        // The next one is another.
        events.lock().retain(|received| *received != event);
    }
}

#[track_caller]
fn fence_of(reply: AcquireReply) -> u64 {
    match reply {
        AcquireReply::Granted { fence, .. } => fence,
        other => panic!("not granted, but {other:?}"),
    }
}

/// The number of waiters ahead.
#[track_caller]
fn ahead_of(reply: AcquireReply) -> usize {
    match reply {
        AcquireReply::Queued { ahead, .. } => ahead,
        other => panic!("not queued, but {other:?}"),
    }
}

#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "the reply of a call")]
fn assert_unsupported<T: std::fmt::Debug>(reply: Result<T, StoreError>) {
    let is_unsupported = reply.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Unsupported);
    assert!(is_unsupported, "not refused as unsupported, but {reply:?}");
}

fn queue_config() -> QueueConfig {
    QueueConfig::new(OFFER_TTL, 4 * LEASE, 3)
}

async fn key_has_one_holder_until_it_is_released(w: World) {
    let [a, b] = w.process();
    w.granted(&a).await;
    let left = w.busy(&b).await;
    assert!(left <= LEASE && left > Duration::ZERO, "a lease of {left:?}");
    assert_eq!(w.release(&a).await, ReleaseReply::Freed, "no waiter is left");
    w.granted(&b).await;
}

async fn repeated_acquire_finds_its_grant(w: World) {
    let [a, b] = w.process();
    let first = w.granted(&a).await;
    sleep(LEASE / 2).await;
    assert_eq!(w.granted(&a).await, first, "the current fence");
    sleep(LEASE * 5 / 8).await;
    w.busy(&b).await;
    assert_eq!(w.release(&a).await, ReleaseReply::Freed, "once is enough");
    w.granted(&b).await;
}

async fn release_of_others_and_second_release_change_nothing(w: World) {
    let [a, b] = w.process();
    w.granted(&a).await;
    assert_eq!(w.release(&b).await, ReleaseReply::NotHolder, "not the holder");
    w.busy(&b).await;
    assert_eq!(w.release(&a).await, ReleaseReply::Freed, "the id");
    assert_eq!(w.release(&a).await, ReleaseReply::NotHolder, "the second time");
    w.granted(&b).await;
    assert_eq!(w.release(&a).await, ReleaseReply::NotHolder, "a late copy");
    w.busy(&a).await;
}

async fn lease_expires_and_late_release_changes_nothing(w: World) {
    let [a, b] = w.process();
    w.granted(&a).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    w.granted(&b).await;
    assert_eq!(w.release(&a).await, ReleaseReply::NotHolder, "its lease has expired");
    assert_eq!(w.renew(&[&a]).await, [RenewReply::NotHolder], "and it cannot come back");
    w.busy(&a).await;
}

async fn only_the_holder_renews_and_replies_are_in_order(w: World) {
    let [a, b] = w.process();
    assert_eq!(w.renew(&[]).await, vec![], "no requests");
    w.granted(&a).await;
    for _ in 0..3 {
        sleep(LEASE * 2 / 3).await;
        let replies = w.renew(&[&b, &a, &b]).await;
        assert_eq!(replies, [RenewReply::NotHolder, RenewReply::Extended, RenewReply::NotHolder], "one by one");
    }
    w.busy(&b).await;
}

async fn renewal_and_repeated_acquire_never_shorten_a_lease(w: World) {
    let [a, b] = w.process();
    w.granted(&a).await;
    let short = LEASE / 10;
    let renewal = RenewRequest::new(w.key.clone(), a.clone(), short);
    let replies = w.store.renew(vec![renewal]).await.expect("a reply");
    assert_eq!(replies, [RenewReply::Extended], "it has the key");
    let left = w.busy(&b).await;
    assert!(left > LEASE / 2, "a renewal left {left:?}");
    let repeated = AcquireRequest { lease: short, ..w.acquire_request(&a, IfBusy::Fail) };
    w.send_acquire(repeated).await.expect("a reply");
    let left = w.busy(&b).await;
    assert!(left > LEASE / 2, "a repeated acquire left {left:?}");
}

async fn fences_rise_and_stay_below_the_limit(w: World) {
    let mut last = 0;
    for id in w.process::<20>() {
        let fence = w.granted(&id).await;
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        w.release(&id).await;
    }
    // Exact as a double.
    assert!(last < 1 << 53, "{last}");
}

async fn holder_has_the_time_of_its_grant(w: World) {
    // The clock of the store may differ from that of this machine.
    const MAX_DIFFERENCE: Duration = Duration::from_secs(24 * 3600);
    let [a] = w.process();
    let since = async || w.inspect().await.holder().and_then(|holder| holder.since).expect("the time of the grant");
    w.granted(&a).await;
    let first = since().await;
    let elapsed = first.elapsed().unwrap_or_else(|error| error.duration());
    assert!(elapsed < MAX_DIFFERENCE, "{first:?} is not the time of day");
    sleep(LEASE / 3).await;
    w.renew(&[&a]).await;
    w.granted(&a).await;
    assert_eq!(since().await, first, "a renewal is no new grant");
}

async fn release_offers_the_key_to_the_first_waiter(w: World) {
    let ([a, c], [b]) = (w.process(), w.process());
    w.contended(&a, &[&b, &c]).await;
    assert_eq!(w.release(&a).await, ReleaseReply::HandedOff, "to the first");
    w.offered(&b).await;
    assert_eq!(w.queued(&c).await, 0, "the second is the first now");
    w.granted(&b).await;
    assert_eq!(w.release(&b).await, ReleaseReply::HandedOff, "to the second");
    w.offered(&c).await;
    w.granted(&c).await;
    assert_eq!(w.release(&c).await, ReleaseReply::Freed, "no waiters left");
}

async fn accepted_offer_has_a_full_lease_and_its_own_fence(w: World) {
    let [a, b, c] = w.process();
    let first = w.contended(&a, &[&b]).await;
    w.release(&a).await;
    let fence = w.granted(&b).await;
    assert!(fence > first, "{fence} after {first}");
    assert_eq!(w.granted(&b).await, fence, "repeated");
    sleep(OFFER_TTL + Duration::from_millis(200)).await;
    w.busy(&c).await;
    assert_eq!(w.release(&b).await, ReleaseReply::Freed, "a full lease");
}

async fn offer_that_expires_goes_to_the_next_waiter(w: World) {
    let ([b], [a, c]) = (w.process(), w.process());
    w.contended(&a, &[&b, &c]).await;
    w.release(&a).await;
    sleep(OFFER_TTL + Duration::from_millis(50)).await;
    w.granted(&c).await;
}

async fn expired_key_is_offered_to_the_first_waiter(w: World) {
    let ([dead, c], [b]) = (w.process(), w.process());
    w.contended(&dead, &[&b]).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    w.busy(&c).await;
    w.offered(&b).await;
    w.granted(&b).await;
}

async fn repeated_acquire_keeps_its_queue_position(w: World) {
    let [a, b, c] = w.process();
    w.granted(&a).await;
    for _ in 0..3 {
        assert_eq!((w.queued(&b).await, w.queued(&c).await), (0, 1), "repeated");
    }
    w.release(&b).await;
    w.release(&a).await;
    w.granted(&c).await;
    assert_eq!(w.release(&c).await, ReleaseReply::Freed, "one entry each");
}

async fn release_leaves_the_queue_and_passes_an_offer_on(w: World) {
    let [a, b, c, d] = w.process();
    w.contended(&a, &[&b, &c, &d]).await;
    assert_eq!(w.release(&b).await, ReleaseReply::NotHolder, "it only had a queue entry");
    assert_eq!(w.release(&a).await, ReleaseReply::HandedOff, "to the next");
    w.offered(&c).await;
    // It leaves while the offer is in flight.
    assert_eq!(w.release(&c).await, ReleaseReply::HandedOff, "and on");
    w.offered(&d).await;
    w.granted(&d).await;
}

async fn dead_process_is_skipped(w: World) {
    let ([b], [a, c]) = (w.process(), w.process());
    w.contended(&a, &[&b, &c]).await;
    w.kill_process_of(&b);
    sleep(NOTICE_TIMEOUT).await;
    w.granted(&a).await;
    w.release(&a).await;
    w.offered(&c).await;
    w.granted(&c).await;
}

async fn dead_process_delays_the_next_by_an_offer(w: World) {
    let ([b], [a, c]) = (w.process(), w.process());
    w.contended(&a, &[&b, &c]).await;
    w.kill_process_of(&b);
    w.release(&a).await;
    sleep(OFFER_TTL + Duration::from_millis(50)).await;
    w.granted(&c).await;
}

async fn connection_of_the_holder_is_known(w: World) {
    let [a] = w.process();
    w.granted(&a).await;
    let connected = async || w.inspect().await.holder().and_then(|holder| holder.connected);
    assert_eq!(connected().await, Some(true), "the sink is open");
    w.kill_process_of(&a);
    sleep(NOTICE_TIMEOUT).await;
    assert_eq!(connected().await, Some(false), "the sink is closed");
}

async fn as_many_acquisitions_hold_a_key_as_each_allows(world: World) {
    let ([a, b, c], [alone]) = (world.sharers(2), world.process());
    world.granted(&a).await;
    world.granted(&b).await;
    world.granted(&a).await;
    for refused in [&c, &alone] {
        let left = world.busy(refused).await;
        assert!(left > LEASE / 2 && left <= LEASE, "{left:?}");
    }
    assert_eq!(world.inspect().await.holders.len(), 2);
    assert_eq!(world.release(&a).await, ReleaseReply::Freed);
    assert_eq!(world.release(&a).await, ReleaseReply::NotHolder);
    world.granted(&c).await;
    world.busy(&alone).await;
    assert_eq!(world.renew(&[&a, &b, &c]).await, [RenewReply::NotHolder, RenewReply::Extended, RenewReply::Extended]);
    for held in [&b, &c] {
        assert_eq!(world.release(held).await, ReleaseReply::Freed);
    }
    // The whole key, and then a smaller limit beside a larger one.
    world.granted(&alone).await;
    world.busy(&a).await;
    assert_eq!(world.release(&alone).await, ReleaseReply::Freed);
    let [first, second] = world.sharers(8);
    world.granted(&first).await;
    world.granted(&second).await;
    world.busy(&a).await;
    assert_eq!(world.release(&first).await, ReleaseReply::Freed);
    world.granted(&a).await;
}

async fn each_holder_of_a_shared_key_has_its_own_lease(world: World) {
    let ([a, b, c], [alone]) = (world.sharers(2), world.process());
    world.granted(&a).await;
    sleep(LEASE / 2).await;
    world.granted(&b).await;
    let (first, last) = (world.busy(&c).await, world.busy(&alone).await);
    assert!(first <= LEASE / 2 && last > first, "{first:?} and {last:?}");
    sleep(LEASE / 2).await;
    assert_eq!(world.renew(&[&a, &b]).await, [RenewReply::NotHolder, RenewReply::Extended]);
    world.granted(&c).await;
    sleep(LEASE / 2).await;
    assert_eq!(world.renew(&[&b, &c]).await, [RenewReply::Extended; 2], "no other end has shortened it");
}

/// Those behind it come in together after it.
async fn waiter_that_does_not_fit_is_not_passed(world: World) {
    let ([a, b, c], [writer]) = (world.sharers(1_024), world.process());
    world.granted(&a).await;
    for (waiter, ahead) in [(&writer, 0), (&b, 1), (&c, 2)] {
        assert_eq!(world.queued(waiter).await, ahead);
    }
    assert_eq!(world.release(&a).await, ReleaseReply::HandedOff);
    world.offered(&writer).await;
    world.granted(&writer).await;
    assert_eq!(world.release(&writer).await, ReleaseReply::HandedOff);
    world.offered(&b).await;
    world.offered(&c).await;
    world.granted(&b).await;
    world.granted(&c).await;
    assert_eq!(world.queued(&writer).await, 0);
    assert_eq!(world.queued(&a).await, 1, "as many as may hold the key, and a writer is before it");
    assert_eq!(world.release(&writer).await, ReleaseReply::NotHolder, "it leaves the queue");
    world.offered(&a).await;
}

async fn block_of_a_shared_key_keeps_one_place(world: World) {
    let [a, b, c] = world.sharers(2);
    world.granted(&a).await;
    world.granted(&b).await;
    assert_eq!(world.block(&a, 2 * LEASE).await, ReleaseReply::Freed);
    let left = world.busy(&c).await;
    assert!(left <= LEASE, "the holder may end first: {left:?}");
    assert_eq!(world.release(&b).await, ReleaseReply::Freed);
    world.granted(&c).await;
    world.busy(&b).await;
}

async fn revocation_of_a_shared_key_ends_each_holder(world: World) {
    let ([a, b], [c]) = (world.sharers(2), world.sharers(2));
    world.granted(&a).await;
    world.granted(&b).await;
    assert!(matches!(world.force_release(Duration::ZERO).await, ForceReleaseReply::Revoked { .. }));
    world.revoked(&a).await;
    world.revoked(&b).await;
    assert_eq!(world.renew(&[&a, &b]).await, [RenewReply::NotHolder; 2]);
    world.granted(&c).await;
}

async fn free_key_goes_to_the_first_acquire(w: World) {
    let [a, b, c] = w.process();
    w.contended(&a, &[&b]).await;
    assert_eq!(w.inspect().await.waiting, 0, "nothing is kept");
    assert_eq!(w.release(&b).await, ReleaseReply::NotHolder, "nothing to end");
    w.queued(&b).await;
    assert_eq!(w.release(&a).await, ReleaseReply::Freed, "to no waiter");
    let fence = w.contended(&c, &[&b]).await;
    w.extended(&c, fence, &a).await;
    assert_eq!(w.release(&c).await, ReleaseReply::Freed, "to no waiter");
    w.granted(&b).await;
}

async fn queue_has_a_capacity(w: World) {
    let [a, b, c, d, e] = w.process();
    w.contended(&a, &[&b, &c, &d]).await;
    let full = w.acquire(&e, IfBusy::Enqueue).await;
    assert!(matches!(full, AcquireReply::QueueFull { waiting: 3, .. }), "{full:?}");
    assert_eq!(w.queued(&d).await, 2, "an entry is kept");
    for id in [e, d, c, b, a] {
        w.release(&id).await;
    }
}

async fn released_key_can_stay_blocked(w: World) {
    let [a, b] = w.process();
    w.contended(&a, &[&b]).await;
    assert_eq!(w.block(&a, LEASE / 2).await, ReleaseReply::Freed, "no holder");
    assert_eq!(w.renew(&[&a]).await, [RenewReply::NotHolder], "not even the former holder");
    assert_eq!(w.release(&a).await, ReleaseReply::NotHolder, "a late copy changes nothing");
    assert_eq!(w.queued(&b).await, 0, "still blocked");
    sleep(LEASE / 2 + Duration::from_millis(50)).await;
    w.granted(&b).await;
}

async fn yield_without_waiters_extends_under_a_new_fence(w: World) {
    let [a, next, b] = w.process();
    let first = w.granted(&a).await;
    sleep(LEASE * 2 / 3).await;
    let fence = w.extended(&a, first, &next).await;
    assert!(fence > first, "{fence} after {first}");
    sleep(LEASE * 2 / 3).await;
    w.busy(&b).await;
    assert_eq!(w.granted(&a).await, fence, "the current fence");
    assert_eq!(w.release(&a).await, ReleaseReply::Freed, "and the next id has no entry");
}

async fn yield_offers_the_key_and_enqueues_the_next_id(w: World) {
    let ([a, next], [b]) = (w.process(), w.process());
    let fence = w.contended(&a, &[&b]).await;
    assert_eq!(ahead_of(w.yielded(w.yield_request(&a, fence, &next)).await), 0, "behind no other waiter");
    w.offered(&b).await;
    assert_eq!(w.renew(&[&a]).await, [RenewReply::NotHolder], "the old id has ended");
    w.granted(&b).await;
    assert_eq!(w.release(&b).await, ReleaseReply::HandedOff, "offered back");
    w.offered(&next).await;
    w.granted(&next).await;
}

async fn yield_of_a_lost_key_is_an_acquire(w: World) {
    let [a, next] = w.process();
    let fence = w.granted(&a).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    fence_of(w.yielded(w.yield_request(&a, fence, &next)).await);
    assert_eq!(w.release(&a).await, ReleaseReply::NotHolder, "the old id");
    assert_eq!(w.release(&next).await, ReleaseReply::Freed, "the next id");
}

async fn copy_of_a_yield_changes_nothing(w: World) {
    let [a, next, b] = w.process();
    let first = w.granted(&a).await;
    let fence = w.extended(&a, first, &next).await;
    // The copy arrives when a section runs under the new fence and a waiter is queued.
    w.queued(&b).await;
    assert_eq!(w.extended(&a, first, &next).await, fence, "the current fence");
    assert_eq!(w.renew(&[&a]).await, [RenewReply::Extended], "it still has the key");
    assert_eq!(w.queued(&b).await, 0, "the waiter still waits");
    let handed_off = if w.store.traits().ordered { ReleaseReply::HandedOff } else { ReleaseReply::Freed };
    assert_eq!(w.release(&a).await, handed_off, "to the waiter, and not to the next id");
}

async fn yield_to_a_queued_next_id_grants_or_keeps_one_entry(w: World) {
    let [a, next, b, later] = w.process();
    let fence = w.contended(&a, &[&next]).await;
    fence_of(w.yielded(w.yield_request(&a, fence, &next)).await);
    assert_eq!(w.release(&next).await, ReleaseReply::Freed, "no entry as well");
    let fence = w.contended(&a, &[&b, &later]).await;
    assert_eq!(ahead_of(w.yielded(w.yield_request(&a, fence, &later)).await), 0, "behind no other waiter");
    assert_eq!(w.release(&b).await, ReleaseReply::HandedOff, "it was queued for that");
    assert_eq!(w.release(&later).await, ReleaseReply::Freed, "one entry each");
}

async fn expired_call_is_not_executed(w: World) {
    let [a, b, lost] = w.process();
    let late = AcquireRequest { valid_for: Duration::ZERO, ..w.acquire_request(&a, IfBusy::Fail) };
    // A store that decides within the call is in time; any other is not.
    let reply = w.send_acquire(late).await;
    let is_granted = matches!(reply, Ok(AcquireReply::Granted { .. }));
    assert_eq!(w.release(&a).await == ReleaseReply::Freed, is_granted, "executed and granted, or neither");
    w.granted(&b).await;
    w.release(&b).await;
    // Polled after it has expired. A store that executes a call before it is polled was in time.
    let valid_for = Duration::from_millis(10);
    let reply = w.send_acquire(AcquireRequest { valid_for, ..w.acquire_request(&a, IfBusy::Fail) });
    sleep(valid_for * 5).await;
    let in_time = w.inspect().await.holder().is_some();
    assert!(!matches!(reply.await, Ok(AcquireReply::Granted { .. })) || in_time, "an acquire is late");
    w.release(&a).await;
    let reply = w.store.yield_to_queue(YieldRequest { valid_for, ..w.yield_request(&lost, 1, &b) });
    sleep(valid_for * 5).await;
    let in_time = w.inspect().await.holder().is_some();
    assert!(!matches!(reply.await, Ok(YieldReply::NotHolder(_))) || in_time, "a yield is late");
}

async fn inspect_reports_holder_and_waiters(w: World) {
    let [a, b] = w.process();
    let free = w.inspect().await;
    assert_eq!((free.holders, free.lease_left, free.waiting), (vec![], Duration::ZERO, 0), "free");
    let fence = w.contended(&a, &[&b]).await;
    let held = w.inspect().await;
    let holders = held.holders.into_iter().map(|holder| (holder.id, holder.fence)).collect();
    assert_eq!((holders, held.waiting), (vec![(a.clone(), fence)], w.waiting(1)), "held");
    assert!(held.lease_left <= LEASE && held.lease_left > Duration::ZERO, "{:?}", held.lease_left);
    w.release(&b).await;
    w.block(&a, LEASE).await;
    let kept = w.inspect().await;
    assert_eq!(kept.holders, vec![], "blocked, without a holder");
    assert!(kept.lease_left > Duration::ZERO, "it is not blocked");
}

async fn revoked_key_stays_blocked_and_its_holder_is_notified(w: World) {
    let [a, b] = w.process();
    assert_eq!(w.force_release(LEASE / 2).await, ForceReleaseReply::Free, "no holder");
    w.contended(&a, &[&b]).await;
    assert_eq!(w.force_release(LEASE / 2).await, ForceReleaseReply::Revoked { holders: vec![a.clone()] }, "the holder");
    w.revoked(&a).await;
    assert_eq!(w.renew(&[&a]).await, [RenewReply::NotHolder], "not the holder any more");
    assert_eq!(w.queued(&b).await, 0, "so that it can stop");
    assert_eq!(w.force_release(LEASE / 2).await, ForceReleaseReply::Revoked { holders: vec![a.clone()] }, "once more");
    w.revoked(&a).await;
    assert_eq!(w.queued(&b).await, 0, "its lock-delay lasts");
    sleep(LEASE / 2 + Duration::from_millis(50)).await;
    w.granted(&b).await;
}

async fn force_release_frees_a_blocked_key_for_the_queue(w: World) {
    let [a, b] = w.process();
    w.contended(&a, &[&b]).await;
    let block = Duration::from_secs(3600);
    assert_eq!(w.block(&a, block).await, ReleaseReply::Freed, "blocked for an hour");
    match w.force_release(LEASE / 2).await {
        ForceReleaseReply::Unblocked { blocked_for } => {
            assert!(blocked_for <= block && blocked_for > block / 2, "{blocked_for:?}");
        }
        other => panic!("{other:?}"),
    }
    w.offered(&b).await;
    w.granted(&b).await;
    assert_eq!(w.release(&b).await, ReleaseReply::Freed, "no waiters left");
}

/// Not text, and with an empty part.
fn record(n: u8) -> Record {
    Record::new(vec![n, 0, 0xff, b'\n'], (n > 0).then(|| Bytes::from(vec![n; usize::from(n) - 1])))
}

async fn listing_has_each_key_that_is_held_blocked_or_waited_for(w: World) {
    const KEYS: usize = 60;
    const LIMIT: usize = 5;
    let long = Duration::from_secs(600);
    let [a, b] = w.process();
    let worlds: Vec<_> = (0..KEYS).map(|n| w.at(n)).collect();
    for (n, w) in worlds.iter().enumerate() {
        for id in [&a, &b].into_iter().take(if n % 4 == 1 { 2 } else { 1 }) {
            let request = AcquireRequest { lease: long, ..w.acquire_request(id, IfBusy::Enqueue) };
            w.send_acquire(request).await.expect("a reply");
        }
        // Held, contended, blocked or free.
        if n % 4 > 1 {
            w.block(&a, if n % 4 == 2 { long } else { Duration::ZERO }).await;
        }
    }
    let list = async |contended_only| {
        let mut statuses = vec![None; KEYS];
        let mut request = ListRequest::new(LIMIT).contended_only(contended_only);
        loop {
            let page = w.store.list(request.clone()).await.expect("a reply");
            assert!(page.entries.len() < KEYS / 3, "a page of {} entries", page.entries.len());
            for entry in page.entries {
                if let Some(n) = worlds.iter().position(|w| w.key == entry.key) {
                    let holders: Vec<_> = entry.status.holders.into_iter().map(|holder| holder.id).collect();
                    assert!(entry.status.lease_left > long / 2, "{:?}", entry.status.lease_left);
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
    assert_eq!(list(false).await, all.clone(), "all keys");
    let is_contended = |status: &(Vec<AcquisitionId>, usize)| status.1 > 0;
    let contended: Vec<_> = all.iter().map(|status| status.clone().filter(is_contended)).collect();
    assert_eq!(list(true).await, contended, "contended keys");
    assert_eq!(list(false).await, all, "nothing has changed");
    for w in worlds {
        w.release(&b).await;
        w.release(&a).await;
        w.force_release(Duration::ZERO).await;
    }
}

async fn request_for_a_record_is_refused(w: World) {
    let [a, b] = w.process();
    let unless_recorded = Demand::new().unless_recorded();
    assert_unsupported(w.send_acquire(w.acquire_request(&a, IfBusy::Enqueue).demand(unless_recorded)).await);
    let fence = w.granted(&b).await;
    assert_unsupported(w.send_release(w.release_request(&b, Duration::ZERO).record(record(1), LEASE)).await);
    let yields = w.yield_request(&b, fence, &a).demand(unless_recorded);
    assert_unsupported(w.store.yield_to_queue(yields).await);
    assert_unsupported(w.store.delete_record(w.key.clone()).await);
    let status = w.inspect().await;
    let holder = status.holder().map(|holder| (&holder.id, holder.fence));
    assert_eq!((holder, status.waiting), (Some((&b, fence)), 0), "nothing has changed");
}

async fn record_stands_in_place_of_a_grant(w: World) {
    let [a, b, c] = w.process();
    w.granted(&a).await;
    assert_eq!(w.complete(&a, record(9), LEASE).await, ReleaseReply::Freed, "released with a record");
    for (if_busy, why) in [(IfBusy::Fail, "without a queue"), (IfBusy::Enqueue, "with one")] {
        assert_eq!(w.recorded(&b, if_busy).await, Some(record(9)), "{why}");
    }
    // Others ignore it.
    w.granted(&c).await;
    assert_eq!(w.release(&c).await, ReleaseReply::Freed, "released without a record");
    assert_eq!(w.recorded(&b, IfBusy::Fail).await, Some(record(9)), "it stays");
    sleep(LEASE).await;
    assert_eq!(w.recorded(&b, IfBusy::Fail).await, None, "it has expired");
    assert_eq!(w.complete(&b, record(0), LEASE).await, ReleaseReply::Freed, "and the key was granted");
    assert_eq!(w.recorded(&a, IfBusy::Fail).await, Some(record(0)), "a record without a body");
}

async fn only_the_holder_leaves_a_record_and_a_copy_changes_nothing(w: World) {
    let [a, b, c, d] = w.process();
    w.granted(&a).await;
    assert_eq!(w.complete(&b, record(1), LEASE).await, ReleaseReply::NotHolder, "of another one");
    sleep(LEASE).await;
    assert_eq!(w.complete(&a, record(1), LEASE).await, ReleaseReply::NotHolder, "after its lease");
    assert_eq!(w.recorded(&b, IfBusy::Fail).await, None, "no record, but a grant");
    let long = 4 * LEASE;
    assert_eq!(w.complete(&b, record(2), long).await, ReleaseReply::Freed, "the holder");
    assert_eq!(w.complete(&b, record(3), long).await, ReleaseReply::RecordedBefore, "a copy");
    assert_eq!(w.complete(&a, record(3), long).await, ReleaseReply::NotHolder, "a copy of an earlier holder");
    assert_eq!(w.recorded(&c, IfBusy::Fail).await, Some(record(2)), "the first one stays");
    w.granted(&d).await;
    assert_eq!(w.complete(&d, record(0), long).await, ReleaseReply::Freed, "the next holder");
    assert_eq!(w.recorded(&c, IfBusy::Fail).await, Some(record(0)), "its record replaces the earlier one");
    assert_eq!(w.complete(&b, record(2), long).await, ReleaseReply::NotHolder, "its record was replaced");
}

async fn waiters_get_the_record_and_pass_their_offers_on(w: World) {
    let [a, b, c] = w.process();
    w.completed_before_waiters(&a, [&b, &c]).await;
    assert_eq!(w.recorded(&b, IfBusy::Enqueue).await, Some(record(1)), "in place of the offer");
    w.offered(&c).await;
    assert_eq!(w.recorded(&c, IfBusy::Enqueue).await, Some(record(1)), "of the next offer");
    let status = w.inspect().await;
    assert_eq!((status.holders, status.waiting), (vec![], 0), "nothing is left");
}

async fn offer_that_expires_goes_on_with_a_record(w: World) {
    let [a, b, c, d] = w.process();
    w.completed_before_waiters(&a, [&b, &c]).await;
    sleep(OFFER_TTL + Duration::from_millis(100)).await;
    assert_eq!(w.recorded(&d, IfBusy::Fail).await, Some(record(1)), "of a free key with a waiter");
    w.offered(&c).await;
}

async fn record_is_returned_while_the_key_is_held_or_blocked(w: World) {
    let [a, b, c] = w.process();
    w.granted(&a).await;
    let release = w.release_request(&a, LEASE).record(record(1), 4 * LEASE);
    assert_eq!(w.send_release(release).await.expect("a reply"), ReleaseReply::Freed, "blocked");
    assert_eq!(w.recorded(&b, IfBusy::Enqueue).await, Some(record(1)), "while it is blocked");
    w.busy(&c).await;
    sleep(LEASE).await;
    w.granted(&c).await;
    assert_eq!(w.recorded(&b, IfBusy::Enqueue).await, Some(record(1)), "while another one holds it");
    assert_eq!(w.release(&c).await, ReleaseReply::Freed, "without waiters");
}

async fn yield_of_a_lost_key_finds_the_record(w: World) {
    let [a, b, next] = w.process();
    let fence = w.granted(&a).await;
    sleep(LEASE).await;
    w.granted(&b).await;
    assert_eq!(w.complete(&b, record(1), 4 * LEASE).await, ReleaseReply::Freed, "another holder");
    let request = w.yield_request(&a, fence, &next).demand(Demand::new().unless_recorded());
    assert_eq!(w.yielded(request).await, AcquireReply::Recorded(record(1)), "in place of a grant");
    assert_eq!(w.release(&next).await, ReleaseReply::NotHolder, "it holds nothing");
}

async fn yield_to_a_waiter_finds_the_record(w: World) {
    let [a, b, c, next] = w.process();
    w.granted(&a).await;
    assert_eq!(w.complete(&a, record(1), 4 * LEASE).await, ReleaseReply::Freed, "without waiters");
    let fence = w.contended(&b, &[&c]).await;
    if w.store.traits().ordered {
        let request = w.yield_request(&b, fence, &next).demand(Demand::new().unless_recorded());
        assert_eq!(w.yielded(request).await, AcquireReply::Recorded(record(1)), "in place of a queue entry");
        w.offered(&c).await;
        assert_eq!(w.release(&next).await, ReleaseReply::NotHolder, "it has no entry");
    }
}

async fn deleted_record_stands_for_nothing(w: World) {
    let [a, b, c] = w.process();
    let left = async || w.inspect().await.record_left;
    assert_eq!((w.delete_record().await, left().await), (DeleteRecordReply::NotFound, None), "no record");
    w.granted(&a).await;
    w.complete(&a, record(2), 4 * LEASE).await;
    let is_left = left().await.is_some_and(|left| left > 2 * LEASE && left <= 4 * LEASE);
    assert!(is_left, "the record lasts for {:?}", left().await);
    w.granted(&b).await;
    assert_eq!(w.delete_record().await, DeleteRecordReply::Busy, "its key is held");
    assert_eq!(w.recorded(&c, IfBusy::Fail).await, Some(record(2)), "and it stays");
    assert_eq!(w.block(&b, LEASE).await, ReleaseReply::Freed, "blocked, without a holder");
    assert_eq!(w.delete_record().await, DeleteRecordReply::Deleted, "once");
    assert_eq!((w.delete_record().await, left().await), (DeleteRecordReply::NotFound, None), "and no second time");
    w.busy(&c).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    assert_eq!(w.recorded(&c, IfBusy::Fail).await, None, "a grant in its place");
}

async fn requests_of_one_call_have_replies_of_their_own(w: World) {
    let [a, b] = w.process();
    let worlds = [0, 1, 2].map(|n| w.at(n));
    worlds[2].granted(&b).await;
    let acquires = worlds.iter().map(|w| w.acquire_request(&a, IfBusy::Fail)).collect();
    let mut granted = Vec::new();
    for reply in w.store.acquire(acquires) {
        granted.push(matches!(reply.await.expect("a reply"), AcquireReply::Granted { .. }));
    }
    assert_eq!(granted, [true, true, false], "in the order of the requests");
    let releases = worlds.iter().map(|w| w.release_request(&a, Duration::ZERO)).collect();
    let mut released = Vec::new();
    for reply in w.store.release(releases) {
        released.push(reply.await.expect("a reply"));
    }
    let replies = [ReleaseReply::Freed, ReleaseReply::Freed, ReleaseReply::NotHolder];
    assert_eq!(released, replies, "in the order of the requests");
    assert_eq!(worlds[2].release(&b).await, ReleaseReply::Freed, "it was not changed");
}

async fn store_that_replies_is_healthy(w: World) {
    let [_] = w.process();
    w.store.health().await.expect("a healthy store");
    assert!(w.store.call_timeout() > Duration::ZERO, "the timeout of a call is zero");
}

/// The id of a ticket: of no process.
fn ticket(w: &World) -> AcquisitionId {
    AcquisitionId::of_ticket("conformance", &format!("{:x}", RandomState::new().hash_one(&w.key)), 1)
}

async fn release_leaves_the_key_to_a_ticket_and_serves_no_waiter(w: World) {
    let ([a, b], ticket) = (w.process(), ticket(&w));
    let fence = w.contended(&a, &[&b]).await;
    assert_eq!(w.keep(&b, &ticket, LEASE).await, ReleaseReply::NotHolder, "it waits, and holds nothing");
    assert_eq!(w.queued(&b).await, 0, "once more");
    for copy in ["", "a copy"] {
        assert_eq!(w.keep(&a, &ticket, 2 * LEASE).await, ReleaseReply::Freed, "{copy}");
    }
    assert_eq!(w.renew(&[&a]).await, [RenewReply::NotHolder], "it has ended");
    assert_eq!(w.queued(&b).await, 0, "behind the ticket");
    let kept = w.inspect().await;
    let holders: Vec<_> = kept.holders.iter().map(|holder| (&holder.id, holder.fence)).collect();
    assert_eq!((holders, kept.waiting), (vec![(&ticket, fence)], w.waiting(1)), "under the fence of the section");
    assert!(kept.lease_left > LEASE && kept.lease_left <= 2 * LEASE, "{:?}", kept.lease_left);
}

async fn one_acquisition_takes_the_place_of_a_ticket(w: World) {
    let ([a, b, c, d], ticket) = (w.process(), ticket(&w));
    assert_eq!(w.redeem(&b, &ticket).await, None, "not a free key");
    let first = w.granted(&a).await;
    assert_eq!(w.redeem(&b, &ticket).await, None, "not a key of another holder");
    w.keep(&a, &ticket, LEASE).await;
    assert_eq!(w.redeem(&b, &a).await, None, "the ticket holds the key, and not the section before it");
    let second = w.redeem(&b, &ticket).await.expect("it holds the key");
    assert!(second > first, "{second} after {first}");
    assert_eq!(w.redeem(&b, &ticket).await, Some(second), "a repeated call finds its grant");
    assert_eq!(w.redeem(&c, &ticket).await, None, "one of two");
    assert_eq!(w.keep(&a, &ticket, LEASE).await, ReleaseReply::NotHolder, "a late copy");
    assert_eq!(w.renew(&[&b]).await, [RenewReply::Extended], "it still has the key");
    w.queued(&d).await;
    w.keep(&b, &ticket, LEASE).await;
    let third = w.redeem(&c, &ticket).await.expect("the same ticket");
    assert!(third > second, "{third} after {second}, before the waiter");
    let handed_off = if w.store.traits().ordered { ReleaseReply::HandedOff } else { ReleaseReply::Freed };
    assert_eq!(w.release(&c).await, handed_off, "to the waiter");
    assert_eq!(w.redeem(&b, &ticket).await, None, "the work is over");
    w.granted(&d).await;
}

async fn newer_acquisition_waits_for_the_older_ones_and_tells_them(w: World) {
    let ([a, b, c], [other]) = (w.process_of(AcquisitionIds::next_replaceable), w.process());
    w.contended(&a, &[&other]).await;
    assert_eq!(w.renew(&[&a]).await, [RenewReply::Extended], "a waiter of another kind replaces nothing");
    let held = w.inspect().await;
    assert!(held.holder().is_some_and(|holder| holder.id == a && holder.connected != Some(false)), "{held:?}");
    assert_eq!(w.queued(&b).await, w.waiting(1));
    w.revoked(&a).await;
    assert_eq!(w.renew(&[&a, &b]).await, [RenewReply::Superseded, RenewReply::NotHolder]);
    assert_eq!(w.acquire(&a, IfBusy::Enqueue).await, AcquireReply::Superseded, "a repeated call");
    assert_eq!(w.renew(&[&a]).await, [RenewReply::Superseded], "it holds the key until its release");
    assert_eq!(w.queued(&c).await, w.waiting(2));
    w.revoked(&b).await;
    assert_eq!(w.acquire(&b, IfBusy::Enqueue).await, AcquireReply::Superseded);
    assert_eq!(w.release(&b).await, ReleaseReply::NotHolder, "it leaves the queue");
    assert_eq!(w.release(&a).await, ReleaseReply::HandedOff);
    w.granted(&other).await;
    w.release(&other).await;
    w.granted(&c).await;
    assert_eq!(w.renew(&[&c]).await, [RenewReply::Extended], "nothing newer waits");
}

async fn offer_to_an_older_acquisition_is_superseded(w: World) {
    let [a, b, c] = w.process_of(AcquisitionIds::next_replaceable);
    w.contended(&a, &[&b]).await;
    w.release(&a).await;
    w.offered(&b).await;
    w.queued(&c).await;
    w.revoked(&b).await;
    assert_eq!(w.acquire(&b, IfBusy::Enqueue).await, AcquireReply::Superseded);
    assert_eq!(w.release(&b).await, ReleaseReply::HandedOff, "it passes the offer on");
    w.granted(&c).await;
}

async fn ticket_that_expires_or_is_revoked_holds_nothing(w: World) {
    let ([a, b, c], ticket, lease) = (w.process(), ticket(&w), Duration::from_secs(1));
    w.granted(&a).await;
    w.keep(&a, &ticket, lease).await;
    w.busy(&b).await;
    sleep(lease + Duration::from_millis(50)).await;
    assert_eq!(w.redeem(&c, &ticket).await, None, "expired");
    w.granted(&b).await;
    w.keep(&b, &ticket, LEASE).await;
    assert_eq!(w.force_release(lease).await, ForceReleaseReply::Revoked { holders: vec![ticket.clone()] });
    assert_eq!(w.redeem(&c, &ticket).await, None, "revoked");
    w.busy(&c).await;
    // The same key, without a ticket.
    sleep(lease + Duration::from_millis(50)).await;
    w.granted(&c).await;
}

async fn trace_of_a_section_reaches_those_that_wait_for_it(w: World) {
    let ([a, b, c, next, late], [of_a, of_b, of_next]) = (w.process(), [1, 2, 3].map(section_trace));
    let traced = async |id: &AcquisitionId, if_busy, trace: &SectionTrace| {
        let request = AcquireRequest { trace: Some(trace.clone()), ..w.acquire_request(id, if_busy) };
        w.send_acquire(request).await.expect("a reply")
    };
    assert_eq!(after(traced(&a, IfBusy::Enqueue, &of_a).await), None, "the key was free");
    assert_eq!(held_by(traced(&b, IfBusy::Enqueue, &of_b).await), Some(of_a.clone()), "queued");
    assert_eq!(held_by(traced(&late, IfBusy::Fail, &of_b).await), Some(of_a.clone()), "busy");
    let ended = of_a.ended(Duration::from_millis(1_234));
    let release = ReleaseRequest { trace: Some(ended.clone()), ..w.release_request(&a, Duration::ZERO) };
    assert_eq!(w.send_release(release).await.expect("a reply"), ReleaseReply::HandedOff);
    assert_eq!(held_by(traced(&late, IfBusy::Fail, &of_b).await), None, "no section runs yet");
    let reply = traced(&b, IfBusy::Enqueue, &of_b).await;
    let fence = fence_of(reply.clone());
    assert_eq!(after(reply), Some(ended), "by a release");
    assert_eq!(w.inspect().await.holder().map(|holder| (&holder.id, holder.fence)), Some((&b, fence)));
    assert_eq!(held_by(traced(&c, IfBusy::Enqueue, &of_b).await), Some(of_b.clone()), "the holder is another one");
    let request = w.yield_request(&b, fence, &next);
    let request = YieldRequest { ended: Some(of_b.clone()), trace: Some(of_next.clone()), ..request };
    assert_eq!(ahead_of(w.yielded(request).await), 0, "another one waited");
    assert_eq!(after(traced(&c, IfBusy::Enqueue, &of_a).await), Some(of_b), "by a yield");
    w.release(&c).await;
    let reply = w.acquire(&next, IfBusy::Enqueue).await;
    let fence = fence_of(reply.clone());
    assert_eq!(after(reply), None, "by a release without a trace");
    assert_eq!(held_by(traced(&late, IfBusy::Fail, &of_a).await), None, "a grant without a trace");
    let request = YieldRequest { trace: Some(of_next.clone()), ..w.yield_request(&next, fence, &a) };
    assert!(matches!(w.store.yield_to_queue(request).await, Ok(YieldReply::Extended { .. })));
    assert_eq!(held_by(traced(&late, IfBusy::Fail, &of_a).await), Some(of_next), "of the section after a yield");
}

fn section_trace(id: u64) -> SectionTrace {
    SectionTrace::new(u128::from(id) << 64, id, &format!("/sections/{id} of {{many}}"))
}

fn after(reply: AcquireReply) -> Option<SectionTrace> {
    match reply {
        AcquireReply::Granted { after, .. } => after,
        other => panic!("not granted, but {other:?}"),
    }
}

fn held_by(reply: AcquireReply) -> Option<SectionTrace> {
    match reply {
        AcquireReply::Busy { held_by, .. } | AcquireReply::Queued { held_by, .. } => held_by,
        other => panic!("not busy, but {other:?}"),
    }
}

async fn request_for_a_ticket_is_refused(w: World) {
    let ([a], ticket) = (w.process(), ticket(&w));
    let request = w.acquire_request(&a, IfBusy::Fail).in_place_of(Some(ticket.clone()));
    assert_unsupported(w.send_acquire(request).await);
    w.granted(&a).await;
    let heir = Heir::new(ticket, LEASE);
    assert_unsupported(w.send_release(w.release_request(&a, Duration::ZERO).heir(heir)).await);
    assert_eq!(w.renew(&[&a]).await, [RenewReply::Extended], "nothing has changed");
}
