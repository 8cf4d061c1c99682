//! The table under other schedules than a machine happens to choose.
//!
//! ```sh
//! RUSTFLAGS='--cfg tower_lock_shuttle' cargo test --lib --target-dir target/schedules shuttle_tests
//! ```
//!
//! Threads are switched at every mutex. A failure prints its schedule; `SCHEDULE=<text>` in the environment runs it again.

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

use super::{LockFuture, LockGuard, Locks, driver::QUEUE_CONFIG};
use crate::{
    clock::Clock,
    error::LockError,
    limits::OFFER_TTL,
    lock::ReleaseOutcome,
    lock_key::LockKey,
    owner::Owner,
    store::{ForceReleaseRequest, LockStore, MemoryStore},
};

const SCHEDULES: usize = 3_000;

/// One key, whoever wants it, and who is in.
#[derive(Clone)]
struct World {
    locks: LockManager,
    store: Arc<MemoryStore>,
    inside: Arc<AtomicUsize>,
    last: Arc<AtomicU64>,
    /// Somebody may be in who has lost his lock.
    forced: bool,
}

impl World {
    fn new() -> Self {
        let store = Arc::new(MemoryStore::new());
        let locks = LockManager::new(Arc::clone(&store));
        Self { locks, store, inside: Arc::default(), last: Arc::default(), forced: false }
    }

    /// Another process on the same store.
    fn other(&self) -> Self {
        Self { locks: LockManager::new(Arc::clone(&self.store)), ..self.clone() }
    }

    fn key() -> LockKey {
        LockKey::from(("k",))
    }

    fn ask(&self) -> LockFuture {
        self.locks.lock(Self::key()).lock_delay(Duration::ZERO).into_future()
    }

    fn take(&self) -> Result<LockGuard, LockError> {
        block_on(self.ask())
    }

    fn section(&self, guard: LockGuard) -> ReleaseOutcome {
        let before = self.inside.fetch_add(1, SeqCst);
        assert!(self.forced || before == 0, "two are in");
        thread::yield_now();
        let token = guard.fencing_token().as_u64();
        assert!(self.forced || self.last.fetch_max(token, SeqCst) < token, "a token that does not rise");
        self.inside.fetch_sub(1, SeqCst);
        block_on(guard.release()).expect("in memory")
    }

    /// Polled once, and dropped: in the line, or chosen, or with its guard.
    fn leave(&self) {
        let mut call = pin!(self.ask());
        if let Poll::Ready(outcome) = poll_once(call.as_mut()) {
            drop(outcome);
        }
        thread::yield_now();
    }

    fn nothing_is_left(&self) {
        assert_eq!((self.locks.driver().size(), self.store.size()), ((0, 0), 0));
        assert_eq!(self.inside.load(SeqCst), 0);
    }
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn check(test: impl Fn() + Send + Sync + 'static) {
    // Timers are made and never fire: nobody drives this runtime.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let _runtime = runtime.enter();
    match std::env::var("SCHEDULE") {
        Ok(schedule) => shuttle::replay(test, &schedule),
        Err(_) => {
            let test = Arc::new(test);
            let again = Arc::clone(&test);
            shuttle::check_random(move || again(), SCHEDULES);
            shuttle::check_pct(move || test(), SCHEDULES, 3);
        }
    }
}

fn all(threads: Vec<thread::JoinHandle<()>>) {
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
                    let guard = world.take().expect("its turn");
                    assert_ne!(world.section(guard), ReleaseOutcome::NotHeld);
                }
            })
        });
        all(threads.collect());
        world.nothing_is_left();
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
                    world.leave();
                } else {
                    let guard = world.take().expect("its turn");
                    world.section(guard);
                }
            }));
        }
        all(threads);
        world.nothing_is_left();
    });
}

#[test]
fn two_processes_alternate_on_a_key() {
    check(|| {
        let world = World::new();
        let other = world.other();
        let mut threads = Vec::new();
        for world in [world.clone(), other.clone(), world.clone(), other.clone()] {
            threads.push(thread::spawn(move || {
                let guard = world.take().expect("its turn");
                world.section(guard);
            }));
        }
        let leaves = other.clone();
        threads.push(thread::spawn(move || leaves.leave()));
        all(threads);
        world.nothing_is_left();
        other.nothing_is_left();
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
                let guard = world.take().expect("its turn");
                world.section(guard);
            }));
        }
        let operator = world.clone();
        threads.push(thread::spawn(move || {
            let force =
                operator.store.force_release(ForceReleaseRequest::new(World::key(), Duration::ZERO, QUEUE_CONFIG));
            block_on(force).expect("in memory");
        }));
        all(threads);
        world.nothing_is_left();
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
                let inner = block_on(call()).expect("its own, at once");
                assert_eq!(outer.fencing_token(), inner.fencing_token(), "one section");
                assert!(outer.hold_count() >= 2);
                block_on(inner.release()).expect("in memory");
                block_on(outer.release()).expect("in memory");
            }));
        }
        let stranger = world.clone();
        threads.push(thread::spawn(move || {
            let guard = stranger.take().expect("its turn");
            assert_eq!(guard.hold_count(), 1);
            stranger.section(guard);
        }));
        all(threads);
        world.nothing_is_left();
    });
}

/// The delivery is looked at while its caller takes it: it is the one's or the next one's, and not
/// both.
#[test]
fn grant_is_taken_or_goes_to_the_next_waiter() {
    check(|| {
        let clock = Clock::default();
        let world = World::new();
        let locks = LockManager::builder(Arc::clone(&world.store)).clock(clock.clone()).build();
        let world = World { locks, ..world };
        let holder = world.take().expect("free");
        let grant = Arc::clone(holder.grant());
        let mut late = Box::pin(world.ask());
        assert!(poll_once(late.as_mut()).is_pending());
        world.section(holder);
        let mut threads = Vec::new();
        let taker = world.clone();
        threads.push(thread::spawn(move || match block_on(late) {
            Ok(guard) => drop(taker.section(guard)),
            Err(LockError::TimedOut { .. }) => {}
            Err(other) => panic!("{other}"),
        }));
        let looker = world.clone();
        threads.push(thread::spawn(move || {
            for _ in 0..2 {
                clock.jump(OFFER_TTL);
                looker.locks.driver().limit(&grant);
            }
        }));
        let next = world.clone();
        threads.push(thread::spawn(move || {
            // Its own grant is recalled, too, if it is slower than the looks at it.
            let guard = loop {
                match next.take() {
                    Ok(guard) => break guard,
                    Err(LockError::TimedOut { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            };
            next.section(guard);
        }));
        all(threads);
        world.nothing_is_left();
    });
}

#[test]
fn shutdown_notifies_all_waiters_and_leaves_nothing() {
    check(|| {
        let world = World::new();
        let mut threads = Vec::new();
        for _ in 0..3 {
            let world = world.clone();
            threads.push(thread::spawn(move || match world.take() {
                Ok(guard) => drop(world.section(guard)),
                Err(LockError::ShuttingDown) => {}
                Err(other) => panic!("{other}"),
            }));
        }
        let ends = world.clone();
        threads.push(thread::spawn(move || {
            let mut shutdown = pin!(ends.locks.shutdown(Duration::from_secs(1)));
            let _ = poll_once(shutdown.as_mut());
        }));
        all(threads);
        world.nothing_is_left();
        assert!(matches!(world.take(), Err(LockError::ShuttingDown)));
    });
}
