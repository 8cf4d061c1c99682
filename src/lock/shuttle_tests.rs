//! Tests of the lock table under many thread schedules, chosen by shuttle.
//!
//! ```sh
//! RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/shuttle.sh cargo test --lib shuttle_tests
//! ```

use std::{
    future::IntoFuture,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use shuttle::{future::block_on, thread};

use super::{LockFuture, LockGuard, LockManager};
use crate::{
    clock::Clock,
    error::LockError,
    limits::OFFER_TTL,
    lock::ReleaseOutcome,
    lock_key::LockKey,
    owner::Owner,
    proto::QUEUE,
    store::{ForceReleaseRequest, LockStore, MemoryStore},
    sync::schedules::check,
};

/// One key, its callers, and the number of holders. The holders are counted without a mutex: a
/// mutex of the checker would be one more point at which threads are switched.
#[derive(Clone)]
struct World {
    locks: LockManager,
    store: Arc<MemoryStore>,
    holders: Arc<AtomicUsize>,
    last_token: Arc<AtomicU64>,
    /// Whether locks are revoked, so that a holder that lost its lock may overlap the next one.
    forced: bool,
}

impl World {
    fn new() -> Self {
        let store = Arc::new(MemoryStore::new());
        let locks = LockManager::new(Arc::clone(&store));
        Self { locks, store, holders: Arc::default(), last_token: Arc::default(), forced: false }
    }

    /// Another process with the same store.
    fn other_process(&self) -> Self {
        Self { locks: LockManager::new(Arc::clone(&self.store)), ..self.clone() }
    }

    fn key() -> LockKey {
        LockKey::from(("k",))
    }

    fn lock(&self) -> LockFuture {
        self.locks.lock(Self::key()).lock_delay(Duration::ZERO).into_future()
    }

    fn try_lock(&self) -> LockFuture {
        self.locks.try_lock(Self::key()).lock_delay(Duration::ZERO).into_future()
    }

    fn acquire(&self) -> Result<LockGuard, LockError> {
        block_on(self.lock())
    }

    fn section(&self, guard: LockGuard) -> ReleaseOutcome {
        let before = self.holders.fetch_add(1, SeqCst);
        assert!(self.forced || before == 0, "two holders");
        thread::yield_now();
        let token = guard.fencing_token().as_u64();
        assert!(self.forced || self.last_token.fetch_max(token, SeqCst) < token, "fencing tokens increase");
        self.holders.fetch_sub(1, SeqCst);
        block_on(guard.release()).expect("in memory")
    }

    /// Polls a call once and drops it: in the queue, with a delivered grant, or with its guard.
    fn cancel(&self) {
        let mut call = pin!(self.lock());
        if let Poll::Ready(outcome) = poll_once(call.as_mut()) {
            drop(outcome);
        }
        thread::yield_now();
    }

    fn assert_empty(&self) {
        assert_eq!((self.locks.driver().size(), self.store.size()), ((0, 0), 0));
        assert_eq!(self.holders.load(SeqCst), 0);
    }
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn join_all(threads: Vec<thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("no panic");
    }
}

#[test]
fn local_handoffs_never_overlap() {
    check(|| {
        let world = World::new();
        let threads = (0..3).map(|_| {
            let world = world.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    let guard = world.acquire().expect("its turn");
                    assert_ne!(world.section(guard), ReleaseOutcome::NotHeld);
                }
            })
        });
        join_all(threads.collect());
        world.assert_empty();
    });
}

/// Guarantee: G6.
#[test]
fn free_key_goes_to_one_of_two_callers_that_do_not_wait() {
    check(|| {
        let world = World::new();
        let call = |world: World| move || block_on(world.try_lock()).ok();
        let threads: Vec<_> = (0..2).map(|_| thread::spawn(call(world.clone()))).collect();
        let guards: Vec<_> = threads.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect();
        assert_eq!(guards.len(), 1, "holders");
        guards.into_iter().for_each(|guard| drop(world.section(guard)));
        world.assert_empty();
    });
}

/// Guarantee: G6.
#[test]
fn table_without_entries_holds_nothing_in_the_store() {
    check(|| {
        let world = World::new();
        let guard = world.acquire().expect("free");
        let (releases, other) = (world.clone(), world.other_process());
        let release = thread::spawn(move || drop(releases.section(guard)));
        if world.locks.driver().size() == (0, 0) {
            let guard = block_on(other.try_lock()).expect("a shutdown would say that no key is held");
            other.section(guard);
        }
        join_all(vec![release]);
        world.assert_empty();
    });
}

#[test]
fn cancelled_waiter_passes_its_turn_on() {
    check(|| {
        let world = World::new();
        let mut threads = Vec::new();
        for n in 0..4 {
            let world = world.clone();
            threads.push(thread::spawn(move || {
                if n % 2 == 0 {
                    world.cancel();
                } else {
                    let guard = world.acquire().expect("its turn");
                    world.section(guard);
                }
            }));
        }
        join_all(threads);
        world.assert_empty();
    });
}

#[test]
fn two_processes_alternate_on_a_key() {
    check(|| {
        let world = World::new();
        let other = world.other_process();
        let mut threads = Vec::new();
        for world in [world.clone(), other.clone(), world.clone(), other.clone()] {
            threads.push(thread::spawn(move || {
                let guard = world.acquire().expect("its turn");
                world.section(guard);
            }));
        }
        let canceller = other.clone();
        threads.push(thread::spawn(move || canceller.cancel()));
        join_all(threads);
        world.assert_empty();
        other.assert_empty();
    });
}

#[test]
fn lost_lock_goes_to_the_next_waiter() {
    check(|| {
        let world = World { forced: true, ..World::new() };
        let mut threads = Vec::new();
        for _ in 0..2 {
            let world = world.clone();
            threads.push(thread::spawn(move || {
                let guard = world.acquire().expect("its turn");
                world.section(guard);
            }));
        }
        let operator = world.clone();
        threads.push(thread::spawn(move || {
            let force = operator.store.force_release(ForceReleaseRequest::new(World::key(), Duration::ZERO, QUEUE));
            block_on(force).expect("in memory");
        }));
        join_all(threads);
        world.assert_empty();
    });
}

#[test]
fn owner_reenters_from_any_task() {
    check(|| {
        let world = World::new();
        let owner = Owner::new();
        let mut threads = Vec::new();
        for _ in 0..2 {
            let (world, owner) = (world.clone(), owner.clone());
            threads.push(thread::spawn(move || {
                let call = || world.locks.lock(World::key()).owner(&owner).lock_delay(Duration::ZERO).into_future();
                let outer = block_on(call()).expect("its turn");
                let inner = block_on(call()).expect("re-entered");
                assert_eq!(outer.fencing_token(), inner.fencing_token(), "the same section");
                assert!(outer.hold_count() >= 2);
                block_on(inner.release()).expect("in memory");
                block_on(outer.release()).expect("in memory");
            }));
        }
        let stranger = world.clone();
        threads.push(thread::spawn(move || {
            let guard = stranger.acquire().expect("its turn");
            assert_eq!(guard.hold_count(), 1);
            stranger.section(guard);
        }));
        join_all(threads);
        world.assert_empty();
    });
}

/// The deadline of a delivered grant is checked while its caller takes it. The grant goes to this
/// caller or to the next one, not to both.
#[test]
fn grant_is_taken_or_goes_to_the_next_waiter() {
    check(|| {
        let clock = Clock::default();
        let world = World::new();
        let locks = LockManager::builder(Arc::clone(&world.store)).clock(clock.clone()).build();
        let world = World { locks, ..world };
        let holder = world.acquire().expect("free");
        let grant = Arc::clone(holder.grant());
        let mut late = Box::pin(world.lock());
        assert!(poll_once(late.as_mut()).is_pending());
        world.section(holder);
        let mut threads = Vec::new();
        let taker = world.clone();
        threads.push(thread::spawn(move || match block_on(late) {
            Ok(guard) => drop(taker.section(guard)),
            Err(LockError::TimedOut { .. }) => {}
            Err(other) => panic!("{other}"),
        }));
        let checker = world.clone();
        threads.push(thread::spawn(move || {
            for _ in 0..2 {
                clock.jump(OFFER_TTL);
                checker.locks.driver().check_section(&grant);
            }
        }));
        let next = world.clone();
        threads.push(thread::spawn(move || {
            // Its own grant expires too if it is taken after the checks.
            let guard = loop {
                match next.acquire() {
                    Ok(guard) => break guard,
                    Err(LockError::TimedOut { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            };
            next.section(guard);
        }));
        join_all(threads);
        world.assert_empty();
    });
}

#[test]
fn shutdown_notifies_all_waiters_and_leaves_nothing() {
    check(|| {
        let world = World::new();
        let mut threads = Vec::new();
        for _ in 0..3 {
            let world = world.clone();
            threads.push(thread::spawn(move || match world.acquire() {
                Ok(guard) => drop(world.section(guard)),
                Err(LockError::ShuttingDown) => {}
                Err(other) => panic!("{other}"),
            }));
        }
        let closer = world.clone();
        threads.push(thread::spawn(move || {
            let mut shutdown = pin!(closer.locks.shutdown(Duration::from_secs(1)));
            let _ = poll_once(shutdown.as_mut());
        }));
        join_all(threads);
        world.assert_empty();
        assert!(matches!(world.acquire(), Err(LockError::ShuttingDown)));
    });
}
