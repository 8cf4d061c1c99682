//! Subscribers and recorders are foreign code: they call back, panic and block, and do not affect
//! other locks.

use std::{
    future::IntoFuture,
    sync::{
        Arc, Mutex,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
        mpsc,
    },
    time::Duration,
};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use tokio::{
    runtime::{Builder, Runtime},
    time::sleep,
};
use tower_lock::{
    Lease, LockKey, LockLost, LockManager,
    lock::ReleaseOutcome,
    store::StoreEvent,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::wait::{settle, soon, until};
use tracing::{Dispatch, Subscriber, span};

/// Called with the message of a log event or the name of a metric.
type Behavior = Arc<dyn Fn(&str) + Send + Sync>;

/// A subscriber and a recorder with this behavior.
#[derive(Clone)]
struct Observer(Behavior);

struct Handle(Behavior, String);

struct Message(String);

impl tracing::field::Visit for Message {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Observer {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "tower_lock" && metadata.is_event()
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        (self.0)(&message.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

impl Handle {
    fn observed(&self) {
        (self.0)(&self.1);
    }
}

impl CounterFn for Handle {
    fn increment(&self, by: u64) {
        // A counter starts at zero.
        if by > 0 {
            self.observed();
        }
    }

    fn absolute(&self, _: u64) {
        self.observed();
    }
}

impl GaugeFn for Handle {
    fn increment(&self, _: f64) {
        self.observed();
    }

    fn decrement(&self, _: f64) {
        self.observed();
    }

    fn set(&self, _: f64) {
        self.observed();
    }
}

impl HistogramFn for Handle {
    fn record(&self, _: f64) {
        self.observed();
    }
}

impl Recorder for Observer {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(Handle(Arc::clone(&self.0), key.name().to_owned())))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(Handle(Arc::clone(&self.0), key.name().to_owned())))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Handle(Arc::clone(&self.0), key.name().to_owned())))
    }
}

/// A runtime whose threads all have this observer.
fn runtime(mut builder: Builder, behavior: impl Fn(&str) + Send + Sync + 'static) -> Runtime {
    let observer: &'static Observer = Box::leak(Box::new(Observer(Arc::new(behavior))));
    let dispatch = Dispatch::new(observer.clone());
    let here = move || {
        std::mem::forget(tracing::dispatcher::set_default(&dispatch));
        std::mem::forget(metrics::set_default_local_recorder(observer));
    };
    here();
    builder.enable_all().on_thread_start(here).build().expect("a runtime")
}

fn paused() -> Builder {
    let mut builder = Builder::new_current_thread();
    builder.start_paused(true);
    builder
}

/// Runs it on a thread of its own: a hang fails this test only.
fn with_timeout(test: impl FnOnce() + Send + 'static) {
    let (ends, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        ends.send(()).expect("the test waits");
    });
    match ended.recv_timeout(Duration::from_secs(60)) {
        Ok(()) => {}
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => drop(thread.join().map_err(std::panic::resume_unwind)),
    }
}

/// All events of locks: held, waited for, handed off, renewed, lost, rejected by a store that is
/// down.
async fn everything(locks: &LockManager, store: &TestStore) {
    let guard = locks.lock(("a",)).lock_delay(Duration::ZERO).await.expect("free");
    let waits = tokio::spawn(locks.lock(("a",)).into_future());
    let leaves = tokio::spawn(locks.lock(("a",)).into_future());
    settle().await;
    leaves.abort();
    assert!(locks.try_lock(("a",)).await.is_err());
    sleep(Duration::from_secs(15)).await;
    guard.release().await.expect("up");
    soon("a grant", waits).await.expect("no panic").expect("a grant").release().await.expect("up");
    let lost = locks.lock(("b",)).lease(Lease::Fixed(Duration::from_secs(1))).await.expect("free");
    assert_eq!(lost.held_lock().lost().await, LockLost::HoldLimitReached);
    drop(lost);
    let unrenewed = locks.lock(("c",)).await.expect("free");
    store.fault_all(Fault::Hang);
    assert!(locks.try_lock(("d",)).await.is_err());
    assert_eq!(unrenewed.held_lock().lost().await, LockLost::Expired);
    store.fault_all(Fault::None);
    drop(unrenewed);
    sleep(Duration::from_secs(60)).await;
    assert_eq!((locks.held_count(), store.held_count()), (0, 0));
    assert_eq!(locks.size(), (0, 0), "no data is left");
}

/// Guarantee: G2.
#[test]
fn observer_that_calls_the_manager_does_not_deadlock() {
    with_timeout(|| {
        let asked: Arc<Mutex<Option<LockManager>>> = Arc::default();
        let observed = Arc::new(AtomicUsize::new(0));
        let runtime = runtime(paused(), {
            let (asked, observed) = (Arc::clone(&asked), Arc::clone(&observed));
            move |_| {
                let locks = asked.lock().expect("whole").clone();
                if let Some(locks) = locks {
                    observed.fetch_add(1, SeqCst);
                    let _ = (locks.held_count(), locks.size());
                }
            }
        });
        runtime.block_on(async {
            let store = TestStore::new();
            let locks = LockManager::new(store.clone());
            *asked.lock().expect("whole") = Some(locks.clone());
            everything(&locks, &store).await;
            asked.lock().expect("whole").take();
        });
        assert!(observed.load(SeqCst) > 30, "{observed:?}");
    });
}

/// Guarantee: G2.
#[test]
fn panicking_observer_ends_nothing() {
    with_timeout(|| {
        let runtime = runtime(paused(), |_| panic!("an observer"));
        runtime.block_on(async {
            let store = TestStore::new();
            let locks = LockManager::new(store.clone());
            everything(&locks, &store).await;
            // The watchdog and the release task still work.
            everything(&locks, &store).await;
        });
    });
}

/// Its section has ended normally, and the yield in flight decides about the key.
/// Guarantee: G1.
#[test]
fn renewal_after_a_yield_does_not_warn_of_a_loss() {
    with_timeout(|| {
        let observed = Arc::new(Mutex::new(Vec::new()));
        let runtime = runtime(paused(), {
            let observed = Arc::clone(&observed);
            move |what| observed.lock().expect("whole").push(what.to_owned())
        });
        runtime.block_on(async {
            let store = TestStore::new();
            let (one, other) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
            let held = one.lock(("a",)).await.expect("free");
            let [here, there] = [&one, &other].map(|locks| tokio::spawn(locks.lock(("a",)).into_future()));
            settle().await;
            let owner = one.inspect(("a",)).await.expect("up").holder().expect("a holder").id.clone();
            store.on(StoreOp::Renew).pause_before();
            store.forge(&StoreEvent::Revoked { key: LockKey::from(("a",)), id: owner });
            store.on(StoreOp::Renew).wait_until_paused().await;
            store.on(StoreOp::Yield).pause_after();
            assert_eq!(held.release().await.expect("held"), ReleaseOutcome::HandedOff);
            store.on(StoreOp::Yield).wait_until_paused().await;
            store.on(StoreOp::Renew).resume();
            settle().await;
            store.on(StoreOp::Yield).resume();
            for waits in [there, here] {
                soon("a grant", waits).await.expect("no panic").expect("a grant").release().await.expect("held");
            }
            sleep(Duration::from_secs(1)).await;
        });
        let observed = observed.lock().expect("whole");
        assert!(observed.iter().any(|what| what == "tower_lock_hold_seconds"), "{observed:?}");
        let is_alarm = |what: &&String| what.contains("is lost") || *what == "tower_lock_lost_total";
        assert_eq!(observed.iter().find(is_alarm), None);
    });
}

/// A log with a blocked pipe: the thread that reports a loss waits forever.
/// Guarantee: G2.
#[test]
fn blocking_subscriber_delays_no_other_lock() {
    with_timeout(|| {
        let blocks = Arc::new(AtomicBool::new(true));
        let blocked = Arc::new(AtomicUsize::new(0));
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(2);
        let runtime = runtime(builder, {
            let (blocks, blocked) = (Arc::clone(&blocks), Arc::clone(&blocked));
            move |observed| {
                if observed.contains("a lock is lost") {
                    blocked.fetch_add(1, SeqCst);
                    while blocks.load(SeqCst) {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
            }
        });
        runtime.block_on(async {
            let store = TestStore::new();
            let locks = LockManager::new(store.clone());
            let long = locks.lock(("long",)).await.expect("free");
            // More than there are workers.
            for n in 0..5 {
                let fixed = Lease::Fixed(Duration::from_millis(1));
                let lost = locks.lock(("lost", n)).lease(fixed).await.expect("free");
                soon("lost", lost.held_lock().lost()).await;
                drop(lost);
            }
            until("the subscriber blocks", async || blocked.load(SeqCst) > 0).await;
            for n in 0..3 {
                for _ in 0..10 {
                    let guard = soon("a lock", locks.lock(("other", n)).into_future()).await.expect("free");
                    soon("released", guard.release()).await.expect("up");
                }
            }
            let renewed = store.on(StoreOp::Renew).calls();
            let owner = locks.inspect(("long",)).await.expect("up").holder().expect("held").id.clone();
            let event = tower_lock::store::StoreEvent::Revoked { key: ("long",).into(), id: owner };
            // Renewals go on: each of these is one.
            for n in 1..=3 {
                sleep(Duration::from_millis(150)).await;
                store.forge(&event);
                until("renewed", async || store.on(StoreOp::Renew).calls() >= renewed + n).await;
            }
            assert!(!long.held_lock().remaining().is_zero());
            assert_eq!(blocked.load(SeqCst), 1, "only one thread waits");
            soon("released", long.release()).await.expect("up");
            blocks.store(false, SeqCst);
            until("observed", async || blocked.load(SeqCst) == 5).await;
        });
    });
}

/// A blocking recorder delays the request that it counts, and no other.
/// Guarantee: G2.
#[test]
fn blocking_recorder_delays_only_what_it_counts() {
    with_timeout(|| {
        let blocks = Arc::new(AtomicBool::new(false));
        let blocked = Arc::new(AtomicUsize::new(0));
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(2);
        let runtime = runtime(builder, {
            let (blocks, blocked) = (Arc::clone(&blocks), Arc::clone(&blocked));
            move |observed| {
                if observed == "tower_lock_hold_seconds" && blocked.fetch_add(1, SeqCst) == 0 {
                    while blocks.load(SeqCst) {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
            }
        });
        blocks.store(true, Relaxed);
        runtime.block_on(async {
            let store = TestStore::new();
            let locks = LockManager::new(store.clone());
            let stuck = locks.lock(("stuck",)).await.expect("free");
            let stuck = tokio::spawn(async move { stuck.release().await });
            until("the recorder blocks", async || blocked.load(SeqCst) == 1).await;
            for n in 0..3 {
                for _ in 0..10 {
                    let guard = soon("a lock", locks.lock(("other", n)).into_future()).await.expect("free");
                    soon("released", guard.release()).await.expect("up");
                }
            }
            assert!(
                !stuck.is_finished() && locks.try_lock(("stuck",)).await.is_err(),
                "it is held until it is counted"
            );
            blocks.store(false, SeqCst);
            soon("released", stuck).await.expect("no panic").expect("up");
        });
    });
}
