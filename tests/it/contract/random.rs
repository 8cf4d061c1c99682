//! Random calls over a faulty store on paused time: no overlap, a reply for every call, nothing
//! left.
//!
//! `SEED=<number> cargo test -p tower-lock-tests --test it random` repeats a seed that failed.

use std::{
    collections::HashMap,
    future::IntoFuture,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_lock::{
    FencingToken, HeldLock, Lease, LockError, LockGuard, LockKey, LockManager, Owner,
    lock::LockBuilder,
    test_util::{Chaos, TestStore},
};
use tower_lock_testkit::exclusion::Sections;

/// `SEEDS=` sets another number.
const SEEDS: u64 = 150;
const PROCESSES: usize = 3;
const CLIENTS: usize = 12;
const CALLS: usize = 6;
const KEYS: u64 = 3;

/// The running sections by key, as they report themselves.
#[derive(Default)]
struct Checker {
    keys: Mutex<HashMap<LockKey, Sections<HeldLock>>>,
    sections: AtomicUsize,
    replies: AtomicUsize,
}

/// A running section, ended on drop.
struct SectionGuard {
    checker: Arc<Checker>,
    key: LockKey,
    token: FencingToken,
}

impl Checker {
    /// A failed check panics under the mutex; others must still report.
    fn keys(&self) -> MutexGuard<'_, HashMap<LockKey, Sections<HeldLock>>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(self: &Arc<Self>, guard: &LockGuard) -> SectionGuard {
        let (key, token, view) = (guard.key().clone(), guard.fencing_token(), guard.held_lock());
        let mut keys = self.keys();
        let sections = keys.entry(key.clone()).or_default();
        // Its lock may be lost by now; then it will not be polled.
        if !view.remaining().is_zero() && !sections.is_open(token.as_u64()) {
            let violation = sections.violation(token.as_u64(), |other| !other.remaining().is_zero());
            assert!(violation.is_none(), "{key}: {token} begins: {violation:?}");
        }
        sections.begin(token.as_u64(), view);
        drop(keys);
        self.sections.fetch_add(1, SeqCst);
        SectionGuard { checker: Arc::clone(self), key, token }
    }
}

impl Drop for SectionGuard {
    fn drop(&mut self) {
        let mut keys = self.checker.keys();
        let ended = keys.get_mut(&self.key).expect("entered").end(|token, _| token == self.token.as_u64());
        assert!(ended.is_some(), "inside");
    }
}

struct Client {
    locks: LockManager,
    /// Without faults. A holder that misses its revocation runs on until its next renewal: a force
    /// release during lost events may overlap.
    without_faults: bool,
    checker: Arc<Checker>,
    rng: fastrand::Rng,
}

impl Client {
    async fn run(mut self) {
        for _ in 0..CALLS {
            sleep(self.ms(0, 300)).await;
            match self.rng.u8(0..20) {
                0 if self.without_faults => {
                    let key = self.key();
                    let _ = self.locks.force_release(key).await;
                }
                // Cancels at a random time.
                1..=4 => {
                    let patience = self.ms(0, 900);
                    let _ = timeout(patience, self.one_section()).await;
                }
                _ => self.one_section().await,
            }
        }
    }

    async fn one_section(&mut self) {
        let (wait, owner) = (if self.rng.bool() { Duration::ZERO } else { self.ms(1, 6_000) }, Owner::new());
        let call = self.call().wait(wait).owner(&owner);
        let asked = Instant::now();
        let outcome = call.await;
        self.checker.replies.fetch_add(1, SeqCst);
        let took = asked.elapsed();
        assert!(took <= wait + Duration::from_millis(2_010), "a reply after {took:?} to a wait of {wait:?}");
        let guard = match outcome {
            Ok(guard) => guard,
            Err(LockError::Busy { .. }) => return assert!(wait.is_zero(), "a waiter is never rejected as busy"),
            Err(LockError::TimedOut { .. } | LockError::Store(_) | LockError::ShuttingDown) => return,
            Err(other) => panic!("{other}"),
        };
        let work = if self.rng.u8(0..20) == 0 { self.ms(5_000, 45_000) } else { self.ms(0, 400) };
        let (inside, nested) = (self.checker.enter(&guard), self.rng.u8(0..4) == 0);
        let done = guard.while_held(async {
            sleep(work / 2).await;
            if nested {
                let inner = self.locks.try_lock(guard.key().clone()).owner(&owner).await;
                let inner = inner.expect("reentered");
                let _inside = self.checker.enter(&inner);
                assert_eq!(inner.hold_count(), 2);
                sleep(work / 2).await;
                drop(inner.release());
            }
            sleep(work / 2).await;
        });
        let _ = done.await;
        drop(inside);
        if self.rng.u8(0..5) == 0 {
            drop(guard);
        } else {
            let _ = guard.release().await;
        }
    }

    fn call(&mut self) -> LockBuilder {
        let key = self.key();
        let mut call = self.locks.lock(key);
        if self.rng.u8(0..4) == 0 {
            call = call.lock_delay(self.ms(0, 500));
        }
        if self.rng.u8(0..8) == 0 {
            call = call.lease(Lease::Fixed(self.ms(1, 1_000)));
        }
        if self.rng.u8(0..8) == 0 {
            call = call.min_hold(self.ms(1, 1_000));
        }
        call
    }

    fn key(&mut self) -> LockKey {
        LockKey::from(("n", self.rng.u64(0..KEYS)))
    }

    fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.rng.u64(from..=to))
    }
}

/// The numbers of sections and of replies.
async fn simulate(seed: u64) -> (usize, usize) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let store = TestStore::new();
    let locks: Vec<_> =
        (0..PROCESSES).map(|_| LockManager::builder(store.clone()).instance("p").seed(rng.u64(..)).build()).collect();
    // From no faults to a third of all calls.
    let per_mille = [0, 20, 100, 300][rng.usize(0..4)];
    store.chaos(Some(Chaos::new(rng.u64(..), per_mille)));
    let checker = Arc::new(Checker::default());
    let (mut clients, mut handles) = (JoinSet::new(), Vec::new());
    for n in 0..CLIENTS {
        let locks = locks[n % PROCESSES].clone();
        handles.push(clients.spawn(
            Client { locks, without_faults: per_mille == 0, checker: Arc::clone(&checker), rng: rng.fork() }.run(),
        ));
    }
    // One process may stop, and some clients are aborted anywhere.
    if rng.u8(0..4) == 0 {
        let stops = locks[0].clone();
        clients.spawn(async move {
            sleep(Duration::from_millis(700)).await;
            stops.shutdown(Duration::from_secs(5)).await;
        });
    }
    for _ in 0..rng.usize(0..4) {
        sleep(Duration::from_millis(rng.u64(0..1_500))).await;
        handles[rng.usize(0..CLIENTS)].abort();
    }
    while let Some(client) = clients.join_next().await {
        match client {
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            _ => {}
        }
    }
    store.chaos(None);
    sleep(Duration::from_secs(120)).await;
    let left: Vec<_> = locks.iter().map(LockManager::size).collect();
    assert!(
        left.iter().all(|size| *size == (0, 0)) && store.memory().size() == 0,
        "left: {left:?}, {}",
        store.memory().size()
    );
    // And everything works as before.
    for key in 0..KEYS {
        let guard = locks[1].try_lock(("n", key)).await.expect("free");
        guard.release().await.expect("the store is up");
    }
    (checker.sections.load(SeqCst), checker.replies.load(SeqCst))
}

/// Guarantee: G6.
#[test]
fn random_faults_never_break_exclusion_or_lose_requests() {
    let alone = std::env::var("SEED").ok().map(|seed| seed.parse::<u64>().expect("a number"));
    let seeds = std::env::var("SEEDS").map_or(SEEDS, |seeds| seeds.parse().expect("a number"));
    let (next, end) = alone.map_or((0, seeds), |seed| (seed, seed + 1));
    let (next, sections, replies) = (AtomicU64::new(next), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, SeqCst);
                    if seed >= end {
                        return;
                    }
                    let run = || {
                        let runtime =
                            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
                        runtime.expect("a runtime").block_on(simulate(seed))
                    };
                    let (ran, replied) = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
                        eprintln!("SEED={seed}");
                        std::panic::resume_unwind(panic)
                    });
                    sections.fetch_add(ran, SeqCst);
                    replies.fetch_add(replied, SeqCst);
                }
            });
        }
    });
    let (sections, replies) = (sections.into_inner(), replies.into_inner());
    assert!(
        alone.is_some() || sections > 1_500 && replies > sections,
        "{sections} sections, {replies} answers: too few"
    );
}

/// The same seed gives the same run.
#[test]
fn failed_seed_can_be_repeated() {
    let run = |seed| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(simulate(seed))
    };
    assert!((0..10).map(run).eq((0..10).map(run)));
}

/// The checker detects two independent stores.
#[test]
#[should_panic(expected = "Overlap(")]
fn checker_detects_two_separate_stores() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let checker = Arc::new(Checker::default());
        let mut inside = Vec::new();
        for locks in [LockManager::in_memory(), LockManager::in_memory()] {
            let guard = locks.lock(("n", 0)).into_future().await.expect("free");
            inside.push((checker.enter(&guard), guard));
        }
    });
}
