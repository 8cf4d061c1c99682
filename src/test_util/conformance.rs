//! Asks a store for everything that the contract of [`LockStore`] promises.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! # use tower_lock::{MemoryStore, test_util::conformance};
//! let store = MemoryStore::new();             // yours
//! conformance::check(store).await;            // panics with the clause that is broken
//! # }
//! ```
//!
//! It takes some seconds, because leases of a real store end in real time. The store may hold other keys; those of the suite begin with
//! `conformance`.

use std::{
    future::Future,
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep};

use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, EventSink, ForceReleaseReply, ForceReleaseRequest, IfBusy, LockStore,
        QueueConfig, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreEvent, YieldReply, YieldRequest,
    },
};

/// Leases in here: long enough for a slow machine, short enough to be waited for.
const LEASE: Duration = Duration::from_millis(1500);
const OFFER: Duration = Duration::from_millis(600);
/// How long a store may take to notice that an inbox was closed.
const NOTICED: Duration = Duration::from_millis(1200);
/// How long an event may take to come.
const SOON: Duration = Duration::from_secs(5);

type Clause = fn(World) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! clauses {
    ($($clause:ident),* $(,)?) => { &[$((stringify!($clause), |world| Box::pin($clause(world)))),*] };
}

const CLAUSES: &[(&str, Clause)] = clauses![
    a_key_has_one_owner_until_it_is_given_back,
    an_acquire_that_is_repeated_finds_its_grant,
    a_stranger_frees_nothing_and_a_second_release_finds_nothing,
    a_lease_ends_and_the_late_holder_frees_nobody_elses,
    a_lease_is_renewed_for_its_owner_alone_and_answers_come_in_order,
    a_renewal_and_a_repeated_acquire_shorten_no_lease,
    fences_rise_over_all_owners_and_stand_behind_no_clock,
    who_does_not_line_up_leaves_nothing_behind,
    a_release_offers_the_key_to_the_first_in_line_and_tells_it,
    an_offer_that_is_asked_for_is_a_full_lease_under_its_own_fence,
    an_offer_that_nobody_asks_for_goes_on,
    a_key_whose_lease_ended_goes_to_the_first_in_line_whoever_asks,
    a_place_is_kept_however_often_it_is_asked_for,
    a_release_leaves_the_line_and_gives_an_offer_on,
    a_dead_process_is_skipped,
    a_line_has_an_end,
    a_key_can_be_kept_taken_by_nobody,
    a_yield_goes_on_under_a_new_fence_if_nobody_waits,
    a_yield_gives_the_key_on_and_lines_up_behind,
    a_yield_of_what_is_lost_is_an_acquire,
    a_copy_of_a_yield_changes_nothing,
    a_yield_whose_next_one_waits_already_gives_it_the_key_or_a_place,
    what_is_void_is_not_done,
    it_says_who_has_a_key_and_how_many_wait,
    a_key_that_is_taken_away_stays_taken_and_its_holder_is_told,
    a_key_that_is_only_blocked_is_freed_by_force_and_goes_to_the_queue,
    a_store_that_replies_is_healthy,
];

/// Checks every clause, one after the other.
///
/// # Panics
///
/// A clause is broken; the message says which.
pub async fn check(store: impl LockStore) {
    let store: Arc<dyn LockStore> = Arc::new(store);
    let run = RandomState::new().hash_one(0);
    for (name, clause) in CLAUSES {
        let key = LockKey::from(("conformance", format!("{run:x}"), *name));
        let world = World { store: Arc::clone(&store), key, clause: name };
        clause(world).await;
    }
}

/// What one clause is asked in.
#[derive(Clone)]
struct World {
    store: Arc<dyn LockStore>,
    key: LockKey,
    clause: &'static str,
}

/// One process: its ids, and what it was told.
struct Process {
    ids: AcquisitionIds,
    told: Arc<Mutex<Vec<StoreEvent>>>,
    alive: Arc<()>,
}

impl World {
    fn process(&self) -> Process {
        let ids = AcquisitionIds::new("conformance", RandomState::new().hash_one(1));
        let (told, alive) = (Arc::new(Mutex::new(Vec::new())), Arc::new(()));
        let (notes, living) = (Arc::clone(&told), Arc::downgrade(&alive));
        self.store.subscribe(EventSink::new(Arc::clone(ids.manager()), move |event| {
            if living.strong_count() == 0 {
                return false;
            }
            notes.lock().unwrap_or_else(PoisonError::into_inner).extend(event);
            true
        }));
        Process { ids, told, alive }
    }

    async fn ask(&self, owner: &AcquisitionId, if_held: IfBusy) -> AcquireReply {
        let ask = AcquireRequest::new(self.key.clone(), owner.clone(), LEASE, if_held, terms(), SOON);
        self.store.acquire(ask).await.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    async fn granted(&self, owner: &AcquisitionId) -> u64 {
        match self.ask(owner, IfBusy::Enqueue).await {
            AcquireReply::Granted { fence } => fence,
            other => panic!("{}: not granted, but {other:?}", self.clause),
        }
    }

    /// In line, behind so many.
    async fn in_line(&self, owner: &AcquisitionId) -> usize {
        match self.ask(owner, IfBusy::Enqueue).await {
            AcquireReply::Queued { ahead: before, .. } => before,
            other => panic!("{}: not in line, but {other:?}", self.clause),
        }
    }

    async fn held(&self, owner: &AcquisitionId) -> Duration {
        match self.ask(owner, IfBusy::Fail).await {
            AcquireReply::Busy { lease_left } => lease_left,
            other => panic!("{}: not held, but {other:?}", self.clause),
        }
    }

    async fn release(&self, owner: &AcquisitionId, block_for: Duration) -> ReleaseReply {
        let ask = ReleaseRequest::new(self.key.clone(), owner.clone(), block_for, terms());
        self.store.release(ask).await.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    async fn renew(&self, owners: &[&AcquisitionId]) -> Vec<RenewReply> {
        let asks = owners.iter().map(|owner| RenewRequest::new(self.key.clone(), (*owner).clone(), LEASE)).collect();
        self.store.renew(asks).await.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    async fn yields(&self, owner: &AcquisitionId, fence: u64, next: &AcquisitionId) -> YieldReply {
        let ask = YieldRequest::new(self.key.clone(), owner.clone(), fence, next.clone(), LEASE, terms(), SOON);
        self.store.yield_to_queue(ask).await.unwrap_or_else(|error| panic!("{}: {error}", self.clause))
    }

    /// The process is told that this owner's turn has come.
    async fn offered(&self, process: &Process, owner: &AcquisitionId) {
        self.told(process, &StoreEvent::Offered { key: self.key.clone(), id: owner.clone() }).await;
    }

    async fn told(&self, process: &Process, event: &StoreEvent) {
        let began = Instant::now();
        while !process.told.lock().unwrap_or_else(PoisonError::into_inner).contains(event) {
            assert!(began.elapsed() < SOON, "{}: was not told {event:?}", self.clause);
            sleep(Duration::from_millis(5)).await;
        }
    }

    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "as `assert_eq!` reads")]
    fn same<T: PartialEq + std::fmt::Debug>(&self, is: T, should: T, why: &str) {
        assert!(is == should, "{}: {why}: {is:?}, and not {should:?}", self.clause);
    }
}

fn terms() -> QueueConfig {
    QueueConfig::new(OFFER, Duration::from_secs(10), 3)
}

async fn a_key_has_one_owner_until_it_is_given_back(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    let left = w.held(&b).await;
    assert!(left <= LEASE && left > Duration::ZERO, "{}: a lease of {left:?}", w.clause);
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "the owner gives it back");
    w.granted(&b).await;
    w.release(&b, Duration::ZERO).await;
}

async fn an_acquire_that_is_repeated_finds_its_grant(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let first = w.granted(&a).await;
    sleep(LEASE / 2).await;
    w.same(w.granted(&a).await, first, "the fence that stands there");
    sleep(LEASE * 3 / 4).await;
    w.held(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "once is enough");
    w.granted(&b).await;
    w.release(&b, Duration::ZERO).await;
}

async fn a_stranger_frees_nothing_and_a_second_release_finds_nothing(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::NotHolder, "a stranger");
    w.held(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "the owner");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "the second time");
    w.granted(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "a late copy");
    w.held(&a).await;
    w.release(&b, Duration::ZERO).await;
}

async fn a_lease_ends_and_the_late_holder_frees_nobody_elses(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    w.granted(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "its lease was over");
    w.same(w.renew(&[&a]).await, vec![RenewReply::NotHolder], "and it cannot come back");
    w.held(&a).await;
    w.release(&b, Duration::ZERO).await;
}

async fn a_lease_is_renewed_for_its_owner_alone_and_answers_come_in_order(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.same(w.renew(&[]).await, vec![], "nothing is asked");
    w.granted(&a).await;
    for _ in 0..3 {
        sleep(LEASE * 2 / 3).await;
        let answers = w.renew(&[&b, &a, &b]).await;
        w.same(answers, vec![RenewReply::NotHolder, RenewReply::Extended, RenewReply::NotHolder], "one by one");
    }
    w.held(&b).await;
    w.release(&a, Duration::ZERO).await;
}

async fn a_renewal_and_a_repeated_acquire_shorten_no_lease(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    let short = LEASE / 10;
    let ask = RenewRequest::new(w.key.clone(), a.clone(), short);
    let answers = w.store.renew(vec![ask]).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
    w.same(answers, vec![RenewReply::Extended], "it has the key");
    let left = w.held(&b).await;
    assert!(left > LEASE / 2, "{}: a renewal left {left:?}", w.clause);
    let ask = AcquireRequest::new(w.key.clone(), a.clone(), short, IfBusy::Fail, terms(), LEASE);
    let _ = w.store.acquire(ask).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
    let left = w.held(&b).await;
    assert!(left > LEASE / 2, "{}: a repeated acquire left {left:?}", w.clause);
    w.release(&a, Duration::ZERO).await;
}

async fn fences_rise_over_all_owners_and_stand_behind_no_clock(w: World) {
    let p = w.process();
    let mut last = 0;
    for _ in 0..20 {
        let owner = p.ids.next();
        let fence = w.granted(&owner).await;
        assert!(fence > last, "{}: {fence} after {last}", w.clause);
        last = fence;
        w.release(&owner, Duration::ZERO).await;
    }
    // A clock of microseconds in this century, and a double can hold it.
    assert!(last > 1_600_000_000_000_000 && last < 1 << 53, "{}: {last}", w.clause);
}

async fn who_does_not_line_up_leaves_nothing_behind(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.held(&b).await;
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "nobody waits");
    w.granted(&a).await;
    w.release(&a, Duration::ZERO).await;
}

async fn a_release_offers_the_key_to_the_first_in_line_and_tells_it(w: World) {
    let (p, q) = (w.process(), w.process());
    let (a, b, c) = (p.ids.next(), q.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.same((w.in_line(&b).await, w.in_line(&c).await), (0, 1), "first come, first served");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::HandedOff, "to the first");
    w.offered(&q, &b).await;
    w.same(w.in_line(&c).await, 0, "the second is the first now");
    w.granted(&b).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::HandedOff, "to the second");
    w.offered(&p, &c).await;
    w.granted(&c).await;
    w.same(w.release(&c, Duration::ZERO).await, ReleaseReply::Freed, "nobody is left");
}

async fn an_offer_that_is_asked_for_is_a_full_lease_under_its_own_fence(w: World) {
    let p = w.process();
    let (a, b, c) = (p.ids.next(), p.ids.next(), p.ids.next());
    let first = w.granted(&a).await;
    w.in_line(&b).await;
    w.release(&a, Duration::ZERO).await;
    let fence = w.granted(&b).await;
    assert!(fence > first, "{}: {fence} after {first}", w.clause);
    w.same(w.granted(&b).await, fence, "asked again");
    sleep(OFFER + Duration::from_millis(200)).await;
    w.held(&c).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::Freed, "it was a lease");
}

async fn an_offer_that_nobody_asks_for_goes_on(w: World) {
    let (stopped, p) = (w.process(), w.process());
    let (a, b, c) = (p.ids.next(), stopped.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.in_line(&b).await;
    w.in_line(&c).await;
    w.release(&a, Duration::ZERO).await;
    sleep(OFFER + Duration::from_millis(50)).await;
    w.granted(&c).await;
    w.release(&c, Duration::ZERO).await;
}

async fn a_key_whose_lease_ended_goes_to_the_first_in_line_whoever_asks(w: World) {
    let (p, q) = (w.process(), w.process());
    let (dead, b, c) = (p.ids.next(), q.ids.next(), p.ids.next());
    w.granted(&dead).await;
    w.in_line(&b).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    w.held(&c).await;
    w.offered(&q, &b).await;
    w.granted(&b).await;
    w.release(&b, Duration::ZERO).await;
}

async fn a_place_is_kept_however_often_it_is_asked_for(w: World) {
    let p = w.process();
    let (a, b, c) = (p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    for _ in 0..3 {
        w.same((w.in_line(&b).await, w.in_line(&c).await), (0, 1), "asked again");
    }
    w.release(&b, Duration::ZERO).await;
    w.release(&a, Duration::ZERO).await;
    w.granted(&c).await;
    w.same(w.release(&c, Duration::ZERO).await, ReleaseReply::Freed, "one place each");
}

async fn a_release_leaves_the_line_and_gives_an_offer_on(w: World) {
    let p = w.process();
    let (a, b, c, d) = (p.ids.next(), p.ids.next(), p.ids.next(), p.ids.next());
    w.granted(&a).await;
    for waiter in [&b, &c, &d] {
        w.in_line(waiter).await;
    }
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::NotHolder, "it had a place, and no more");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::HandedOff, "to the next");
    w.offered(&p, &c).await;
    // It has left while the offer was on its way.
    w.same(w.release(&c, Duration::ZERO).await, ReleaseReply::HandedOff, "and on");
    w.offered(&p, &d).await;
    w.granted(&d).await;
    w.release(&d, Duration::ZERO).await;
}

async fn a_dead_process_is_skipped(w: World) {
    let (dead, p) = (w.process(), w.process());
    let (a, b, c) = (p.ids.next(), dead.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.in_line(&b).await;
    w.in_line(&c).await;
    drop(dead.alive);
    sleep(NOTICED).await;
    w.granted(&a).await;
    w.release(&a, Duration::ZERO).await;
    w.offered(&p, &c).await;
    w.granted(&c).await;
    w.release(&c, Duration::ZERO).await;
}

async fn a_line_has_an_end(w: World) {
    let p = w.process();
    let owners: Vec<_> = (0..5).map(|_| p.ids.next()).collect();
    w.granted(&owners[0]).await;
    for waiter in &owners[1..4] {
        w.in_line(waiter).await;
    }
    let full = w.ask(&owners[4], IfBusy::Enqueue).await;
    assert!(matches!(full, AcquireReply::QueueFull { waiting: 3, .. }), "{}: {full:?}", w.clause);
    w.same(w.in_line(&owners[3]).await, 2, "who has a place keeps it");
    for owner in owners.iter().rev() {
        w.release(owner, Duration::ZERO).await;
    }
}

async fn a_key_can_be_kept_taken_by_nobody(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.in_line(&b).await;
    w.same(w.release(&a, LEASE / 2).await, ReleaseReply::Freed, "nobody has it");
    w.same(w.renew(&[&a]).await, vec![RenewReply::NotHolder], "not even who had it");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "a late copy ends nothing");
    w.same(w.in_line(&b).await, 0, "taken still");
    sleep(LEASE / 2 + Duration::from_millis(50)).await;
    w.granted(&b).await;
    w.release(&b, Duration::ZERO).await;
}

async fn a_yield_goes_on_under_a_new_fence_if_nobody_waits(w: World) {
    let p = w.process();
    let (a, next, b) = (p.ids.next(), p.ids.next(), p.ids.next());
    let first = w.granted(&a).await;
    sleep(LEASE * 2 / 3).await;
    let YieldReply::Extended { fence } = w.yields(&a, first, &next).await else { panic!("{}: nobody waits", w.clause) };
    assert!(fence > first, "{}: {fence} after {first}", w.clause);
    sleep(LEASE * 2 / 3).await;
    w.held(&b).await;
    w.same(w.granted(&a).await, fence, "it stands there now");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::Freed, "and its next one has no place");
}

async fn a_yield_gives_the_key_on_and_lines_up_behind(w: World) {
    let (p, q) = (w.process(), w.process());
    let (a, next, b) = (p.ids.next(), p.ids.next(), q.ids.next());
    let fence = w.granted(&a).await;
    w.in_line(&b).await;
    match w.yields(&a, fence, &next).await {
        YieldReply::NotHolder(AcquireReply::Queued { ahead: 0, .. }) => {}
        other => panic!("{}: {other:?}", w.clause),
    }
    w.offered(&q, &b).await;
    w.same(w.renew(&[&a]).await, vec![RenewReply::NotHolder], "the old one is over");
    w.granted(&b).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::HandedOff, "back again");
    w.offered(&p, &next).await;
    w.granted(&next).await;
    w.release(&next, Duration::ZERO).await;
}

async fn a_yield_of_what_is_lost_is_an_acquire(w: World) {
    let p = w.process();
    let (a, next) = (p.ids.next(), p.ids.next());
    let fence = w.granted(&a).await;
    sleep(LEASE + Duration::from_millis(50)).await;
    match w.yields(&a, fence, &next).await {
        YieldReply::NotHolder(AcquireReply::Granted { .. }) => {}
        other => panic!("{}: {other:?}", w.clause),
    }
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::NotHolder, "the old one");
    w.same(w.release(&next, Duration::ZERO).await, ReleaseReply::Freed, "the next one");
}

async fn a_copy_of_a_yield_changes_nothing(w: World) {
    let p = w.process();
    let (a, next, b) = (p.ids.next(), p.ids.next(), p.ids.next());
    let first = w.granted(&a).await;
    let YieldReply::Extended { fence } = w.yields(&a, first, &next).await else { panic!("{}: nobody waits", w.clause) };
    // A section runs under the new fence when the copy comes, and by now somebody waits.
    w.in_line(&b).await;
    w.same(w.yields(&a, first, &next).await, YieldReply::Extended { fence }, "the fence that stands there");
    w.same(w.renew(&[&a]).await, vec![RenewReply::Extended], "it still has the key");
    w.same(w.in_line(&b).await, 0, "who waits still does");
    w.same(w.release(&a, Duration::ZERO).await, ReleaseReply::HandedOff, "to who waits, and not to its next one");
    w.release(&b, Duration::ZERO).await;
}

async fn a_yield_whose_next_one_waits_already_gives_it_the_key_or_a_place(w: World) {
    let p = w.process();
    let (a, next, b) = (p.ids.next(), p.ids.next(), p.ids.next());
    let fence = w.granted(&a).await;
    w.in_line(&next).await;
    match w.yields(&a, fence, &next).await {
        YieldReply::NotHolder(AcquireReply::Granted { .. }) => {}
        other => panic!("{}: {other:?}", w.clause),
    }
    w.same(w.release(&next, Duration::ZERO).await, ReleaseReply::Freed, "it has no place as well");
    let fence = w.granted(&a).await;
    let later = p.ids.next();
    w.same((w.in_line(&b).await, w.in_line(&later).await), (0, 1), "behind another one");
    match w.yields(&a, fence, &later).await {
        YieldReply::NotHolder(AcquireReply::Queued { ahead: 0, .. }) => {}
        other => panic!("{}: {other:?}", w.clause),
    }
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::HandedOff, "it waited for that");
    w.same(w.release(&later, Duration::ZERO).await, ReleaseReply::Freed, "one place each");
}

async fn what_is_void_is_not_done(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let ask = AcquireRequest::new(w.key.clone(), a.clone(), LEASE, IfBusy::Fail, terms(), Duration::ZERO);
    // A store that decides with the call is in time; any other is not.
    let answer = w.store.acquire(ask).await;
    let is_granted = matches!(answer, Ok(AcquireReply::Granted { .. }));
    w.same(w.release(&a, Duration::ZERO).await == ReleaseReply::Freed, is_granted, "done and said so, or neither");
    w.granted(&b).await;
    w.release(&b, Duration::ZERO).await;
}

async fn it_says_who_has_a_key_and_how_many_wait(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let inspect =
        || async { w.store.inspect(w.key.clone()).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause)) };
    let free = inspect().await;
    w.same((free.holder, free.lease_left, free.waiting), (None, Duration::ZERO, 0), "free");
    let fence = w.granted(&a).await;
    w.in_line(&b).await;
    let held = inspect().await;
    let Some(holder) = held.holder else { panic!("{}: nobody has it", w.clause) };
    w.same((holder.id, holder.fence, held.waiting), (a.clone(), fence, 1), "held");
    assert!(held.lease_left <= LEASE && held.lease_left > Duration::ZERO, "{}: {:?}", w.clause, held.lease_left);
    w.release(&b, Duration::ZERO).await;
    w.release(&a, LEASE).await;
    let kept = inspect().await;
    w.same(kept.holder, None, "kept taken by nobody");
    assert!(kept.lease_left > Duration::ZERO, "{}", w.clause);
}

async fn a_key_that_is_taken_away_stays_taken_and_its_holder_is_told(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    let force = || async {
        let ask = ForceReleaseRequest::new(w.key.clone(), LEASE / 2, terms());
        w.store.force_release(ask).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause))
    };
    w.same(force().await, ForceReleaseReply::Free, "nobody had it");
    w.granted(&a).await;
    w.in_line(&b).await;
    w.same(force().await, ForceReleaseReply::Revoked { holder: a.clone() }, "the holder");
    w.told(&p, &StoreEvent::Revoked { key: w.key.clone(), id: a.clone() }).await;
    w.same(w.renew(&[&a]).await, vec![RenewReply::NotHolder], "it has it no more");
    w.same(w.in_line(&b).await, 0, "so that it can stop");
    w.same(force().await, ForceReleaseReply::Revoked { holder: a.clone() }, "once more");
    w.told(&p, &StoreEvent::Revoked { key: w.key.clone(), id: a.clone() }).await;
    w.same(w.in_line(&b).await, 0, "its lock-delay lasts");
    sleep(LEASE / 2 + Duration::from_millis(50)).await;
    w.granted(&b).await;
    w.release(&b, Duration::ZERO).await;
}

async fn a_key_that_is_only_blocked_is_freed_by_force_and_goes_to_the_queue(w: World) {
    let p = w.process();
    let (a, b) = (p.ids.next(), p.ids.next());
    w.granted(&a).await;
    w.in_line(&b).await;
    let block = Duration::from_secs(3600);
    w.same(w.release(&a, block).await, ReleaseReply::Freed, "blocked for an hour");
    let ask = ForceReleaseRequest::new(w.key.clone(), LEASE / 2, terms());
    match w.store.force_release(ask).await.unwrap_or_else(|error| panic!("{}: {error}", w.clause)) {
        ForceReleaseReply::Unblocked { blocked_for } => {
            assert!(blocked_for <= block && blocked_for > block / 2, "{}: {blocked_for:?}", w.clause);
        }
        other => panic!("{}: {other:?}", w.clause),
    }
    w.offered(&p, &b).await;
    w.granted(&b).await;
    w.same(w.release(&b, Duration::ZERO).await, ReleaseReply::Freed, "nothing is left");
}

async fn a_store_that_replies_is_healthy(w: World) {
    let _p = w.process();
    w.store.health().await.unwrap_or_else(|error| panic!("{}: {error}", w.clause));
    assert!(w.store.call_timeout() > Duration::ZERO, "{}", w.clause);
}
