//! Locks without HTTP: the same handle for jobs and tests.

use std::{
    future::IntoFuture,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    runtime::Builder,
    time::{Instant, sleep},
};
use tower_lock::{
    LockError, LockManager, LockPolicy, MemoryStore,
    lock::ReleaseOutcome,
    store::StoreErrorKind,
    test_util::{Fault, StoreOp},
};
use tower_lock_testkit::{
    locks::{key, store_and_locks},
    wait::{settle, soon, until},
};

#[tokio::test]
async fn key_has_one_holder_and_other_keys_are_free() {
    let locks = LockManager::in_memory();
    let guard = locks.try_lock(key()).await.expect("free");
    let error = locks.try_lock(key()).await.expect_err("held");
    assert!(
        matches!(error, LockError::Busy { ahead: 1, lease_left, .. } if lease_left <= Duration::from_secs(30)),
        "{error:?}"
    );
    let _other = locks.try_lock(("account", 8)).await.expect("another key");
    assert_eq!(guard.key().as_str(), "k");
    assert_eq!(guard.release().await.expect("a store"), ReleaseOutcome::Released);
    let _again = locks.try_lock(key()).await.expect("free again");
}

/// A call that arrives before the reply to a release waits for it: no caller meets its own lock.
#[tokio::test(start_paused = true)]
async fn released_lock_can_be_acquired_at_once() {
    let (store, locks) = store_and_locks();
    store.on(StoreOp::Release).latency(Duration::from_millis(2));
    for _ in 0..10 {
        // The outcome is not awaited.
        drop(locks.try_lock(key()).await.expect("free, with its release in flight").release());
    }
    sleep(Duration::from_millis(5)).await;
    assert_eq!((store.held_count(), store.on(StoreOp::Release).calls()), (0, 10), "each grant is released once");
    for _ in 0..10 {
        locks.try_lock(key()).await.expect("free").release().await.expect("the store is up");
    }
    settle().await;
    assert_eq!(
        (store.held_count(), store.on(StoreOp::Release).calls()),
        (0, 20),
        "its `Drop` does not release it again"
    );
}

/// It is renewed, so at least two thirds of its lease remain.
#[tokio::test(start_paused = true)]
async fn reported_lease_follows_renewals() {
    let locks = LockManager::in_memory();
    let _held = locks.try_lock(key()).await.expect("free");
    for seconds in [5, 20, 25, 45] {
        sleep(Duration::from_secs(seconds)).await;
        let error = locks.try_lock(key()).await.expect_err("held");
        let LockError::Busy { lease_left, .. } = error else { panic!("{error}") };
        assert!(lease_left >= Duration::from_secs(19) && lease_left <= Duration::from_secs(30), "{lease_left:?}");
    }
}

/// A call without a wait waits for the release only, and is rejected if it takes too long.
/// Guarantee: G10.
#[tokio::test(start_paused = true)]
async fn request_waits_one_second_for_a_hanging_release() {
    for fault in [Fault::Hang, Fault::Fail] {
        let (store, locks) = store_and_locks();
        store.on(StoreOp::Release).fault(fault);
        drop(locks.try_lock(key()).await.expect("free").release());
        let asked = Instant::now();
        let error = locks.try_lock(key()).await.expect_err("not known to be free");
        assert!(asked.elapsed() <= Duration::from_millis(1_010), "{fault:?}: {:?}", asked.elapsed());
        assert!(matches!(&error, LockError::Store(error) if error.operation() == "release"), "{error:?}");
        store.on(StoreOp::Release).fault(Fault::None);
        sleep(Duration::from_secs(2)).await;
        assert_eq!((store.held_count(), locks.size()), (0, (0, 0)), "{fault:?}: repeated until the reply");
    }
}

/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn lock_waits_30_seconds_by_default() {
    let locks = LockManager::in_memory();
    let _held = locks.try_lock(key()).await.expect("free");
    for (call, seconds) in [
        (locks.lock(key()), 30),
        (locks.lock(key()).wait(Duration::from_secs(3)), 3),
        (locks.with_policy(LockPolicy::new().wait(Duration::from_secs(4))).lock(key()), 4),
        (locks.with_policy(LockPolicy::new().wait(Duration::from_secs(4))).lock(key()).wait(Duration::from_secs(5)), 5),
        (locks.try_lock(key()), 0),
    ] {
        let asked = Instant::now();
        let error = call.await.expect_err("held all the time");
        assert_eq!(asked.elapsed().as_secs(), seconds);
        match error {
            LockError::Busy { .. } => assert_eq!(seconds, 0),
            LockError::TimedOut { waited, ahead: 1, .. } => assert_eq!(waited.as_secs(), seconds),
            other => panic!("{other}"),
        }
    }
    let without_end = locks.lock(key()).wait(Duration::MAX);
    assert!(tokio::time::timeout(Duration::from_secs(100_000), without_end.into_future()).await.is_err());
}

/// Guarantee: G5.
#[tokio::test(start_paused = true)]
async fn local_waiters_are_served_in_order() {
    let locks = LockManager::in_memory();
    let held = locks.try_lock(key()).await.expect("free");
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for n in 0..10 {
        let (locks, order) = (locks.clone(), Arc::clone(&order));
        waiters.push(tokio::spawn(async move {
            // Every third one has a short timeout.
            let patience = if n % 3 == 2 { 1 } else { 100 };
            match locks.lock(key()).wait(Duration::from_secs(patience)).await {
                Ok(guard) => {
                    order.lock().expect("whole").push(n);
                    sleep(Duration::from_millis(10)).await;
                    guard.release().await.expect("a store");
                    None
                }
                Err(LockError::TimedOut { ahead, .. }) => Some((n, ahead)),
                Err(other) => panic!("{other}"),
            }
        }));
        settle().await;
    }
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { ahead: 11, .. })));
    sleep(Duration::from_secs(2)).await;
    held.release().await.expect("a store");
    let mut gave_up = Vec::new();
    for waiter in waiters {
        gave_up.extend(waiter.await.expect("no panic"));
    }
    // The holder, two waiters, and those that gave up later in the same second.
    assert_eq!(gave_up, [(2, 3), (5, 5), (8, 7)]);
    assert_eq!(*order.lock().expect("whole"), [0, 1, 3, 4, 6, 7, 9]);
}

/// It is neither released nor renewed: its runtime has ended.
#[test]
fn dead_holder_blocks_for_its_lease_and_no_longer() {
    let store = Arc::new(MemoryStore::new());
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    let dead = LockManager::new(Arc::clone(&store));
    std::mem::forget(runtime().block_on(dead.try_lock(key()).into_future()).expect("free"));
    let other = LockManager::new(Arc::clone(&store));
    runtime().block_on(async {
        let began = Instant::now();
        assert!(other.lock(key()).wait(Duration::from_secs(29)).await.is_err());
        let _guard = other.lock(key()).wait(Duration::from_secs(29)).await.expect("its lease has expired");
        assert!(began.elapsed() <= Duration::from_millis(31_010), "{:?}", began.elapsed());
    });
}

/// Guarantee: G2.
#[test]
fn guard_can_be_released_without_its_runtime() {
    let locks = LockManager::in_memory();
    let take = || locks.try_lock(key()).lock_delay(Duration::ZERO).into_future();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    drop(runtime.block_on(take()).expect("free"));
    drop(runtime.block_on(take()).expect("released").release());
    let outlives = runtime.block_on(take()).expect("free");
    drop(runtime);
    drop(outlives);
    let runtime = tokio::runtime::Runtime::new().expect("another runtime");
    drop(runtime.block_on(take()).expect("in memory it needs no runtime to be free"));

    // A store behind a network needs a runtime: the last one it was used in.
    let (store, locks) = store_and_locks();
    let guard = runtime.block_on(locks.try_lock(key()).into_future()).expect("free");
    drop(guard.release());
    runtime.block_on(async {
        soon("a grant", locks.lock(key()).into_future())
            .await
            .expect("released by its first runtime")
            .release()
            .await
            .expect("up");
        assert_eq!(store.held_count(), 0);
    });
    // If that runtime has ended, the lease ends the lock. Nothing panics or hangs.
    let guard = runtime.block_on(locks.try_lock(key()).into_future()).expect("free");
    drop(runtime);
    drop(guard);
    assert_eq!(store.held_count(), 1);
}

#[tokio::test(start_paused = true)]
async fn failed_release_is_reported_and_repeated() {
    let (store, locks) = store_and_locks();
    let guard = locks.try_lock(key()).await.expect("free");
    store.fault_all(Fault::Fail);
    let error = guard.release().await.expect_err("down");
    assert_eq!((error.operation(), error.kind()), ("release", StoreErrorKind::Unavailable));
    store.fault_all(Fault::None);
    // A new call waits for that, not for the end of the lease.
    let asked = Instant::now();
    locks.try_lock(key()).await.expect("released").release().await.expect("up");
    assert!(asked.elapsed() <= Duration::from_millis(50), "{:?}", asked.elapsed());
}

/// More releases than may be under way: the end of each one starts another, which fails at once.
/// Guarantee: G2.
#[test]
fn runtime_that_ends_with_many_releases_overflows_no_stack() {
    let (store, locks) = store_and_locks();
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    runtime.block_on(async {
        let mut guards = Vec::new();
        for n in 0..10_500 {
            guards.push(locks.try_lock(("n", n)).await.expect("free"));
        }
        store.on(StoreOp::Release).pause_before();
    });
    drop(runtime);
    store.on(StoreOp::Release).resume();
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("another runtime");
    runtime.block_on(async {
        for n in [0, 10_499] {
            until("it is released from here", async || locks.try_lock(("n", n)).await.is_ok()).await;
        }
    });
}

/// Guarantee: G2.
#[tokio::test(start_paused = true)]
async fn hanging_release_is_reported_and_repeated_until_answered() {
    let (store, locks) = store_and_locks();
    let guard = locks.try_lock(key()).await.expect("free");
    store.on(StoreOp::Release).pause_before();
    let asked = Instant::now();
    let error = guard.release().await.expect_err("no reply");
    assert_eq!((error.kind(), asked.elapsed().as_millis() / 10), (StoreErrorKind::Timeout, 50));
    assert!(format!("{error:?}").contains("within the call timeout"), "{error:?}");
    // No other call is sent for this key meanwhile, so its holder is unknown; after a second the
    // store is called nevertheless.
    let error = locks.try_lock(key()).await.expect_err("no reply of the store");
    assert!(matches!(error, LockError::Store(_)) && asked.elapsed() <= Duration::from_millis(1_010), "{error}");
    let next = tokio::spawn(locks.lock(key()).into_future());
    sleep(Duration::from_secs(5)).await;
    assert!(!next.is_finished());
    store.on(StoreOp::Release).resume();
    let opened = Instant::now();
    let guard = next.await.expect("no panic").expect("a grant");
    assert!(opened.elapsed() <= Duration::from_secs(2), "not at the end of the lease: {:?}", opened.elapsed());
    guard.release().await.expect("the store is up");
    assert_eq!(locks.size(), (0, 0));
}

#[test]
fn handle_and_parts_are_send_and_sync() {
    fn shared<T: Send + Sync + 'static>() {}
    fn cloned<T: Clone>() {}
    shared::<LockManager>();
    cloned::<LockManager>();
    shared::<tower_lock::LockGuard>();
    shared::<tower_lock::HeldLock>();
    cloned::<tower_lock::HeldLock>();
    shared::<tower_lock::LockError>();
}

/// It is repeated for as long as the lease lasts, even without a handle.
/// Guarantee: G2.
#[tokio::test(start_paused = true)]
async fn pending_release_outlives_the_handle() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    store.on(StoreOp::Release).fault(Fault::Fail);
    let _ = guard.release().await;
    drop(locks);
    store.on(StoreOp::Release).fault(Fault::None);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(store.memory().size(), 0);
}

mod runtimes_that_end {
    use super::*;

    /// It cannot be renewed there, but nothing hangs.
    #[test]
    fn memory_lock_works_without_a_runtime() {
        let locks = LockManager::in_memory();
        for _ in 0..3 {
            let taken = futures_util::FutureExt::now_or_never(locks.try_lock(key()).into_future());
            drop(taken.expect("at once").expect("free").release());
        }
        assert_eq!(locks.size(), (0, 0));
    }

    fn paused() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime")
    }

    /// Its wake-up belongs to the other runtime.
    #[test]
    fn waiter_outlives_the_end_of_another_runtime() {
        let locks = LockManager::in_memory();
        let first = paused();
        let guard = first.block_on(locks.lock(key()).into_future()).expect("free");
        let second =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().expect("a runtime");
        let waiter = second.spawn(locks.lock(key()).wait(Duration::from_secs(60)).into_future());
        while locks.size() != (1, 1) {
            std::thread::yield_now();
        }
        // Free after its lock-delay; the timer for that is in this runtime.
        first.block_on(async move { drop(guard) });
        drop(first);
        let began = std::time::Instant::now();
        drop(second.block_on(waiter).expect("no panic").expect("a grant").release());
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }

    #[test]
    fn renewal_outlives_the_runtime_of_the_watchdog() {
        let locks = LockManager::in_memory();
        let first = paused();
        let _one = first.block_on(locks.lock(("n", 1)).into_future()).expect("free");
        let second = paused();
        let two = second.block_on(locks.lock(("n", 2)).into_future()).expect("free");
        let view = two.held_lock();
        let works = second.spawn(async move { view.while_held(sleep(Duration::from_secs(300))).await });
        second.block_on(settle());
        drop(first);
        assert_eq!(second.block_on(works).expect("no panic"), Ok(()), "renewed throughout");
    }

    /// Guarantee: G2.
    #[test]
    fn pending_release_is_dropped_at_the_end_of_the_lease() {
        let (store, locks) = store_and_locks();
        let first = paused();
        let guards: Vec<_> =
            (0..10_000).map(|n| first.block_on(locks.lock(("n", n)).into_future()).expect("free")).collect();
        drop(first);
        drop(guards);
        assert_eq!(locks.size(), (10_000, 0));
        paused().block_on(async {
            sleep(Duration::from_secs(100)).await;
            drop(locks.lock(key()).await.expect("capacity").release());
            settle().await;
            assert_eq!((locks.size(), store.memory().size()), ((0, 0), 0));
        });
    }
}
