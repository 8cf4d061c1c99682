//! A process that was copied by `fork()`: each call of the copied manager fails, and the copy of a
//! guard does nothing.
//!
//! The process id is simulated: another number stands for the child (`tests/storm/tests/crash.rs`
//! has a real fork).

use std::{
    future::IntoFuture,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::time::sleep;
use tower_lock::{
    LockError, LockManager, Owner, RunError,
    lock::ReleaseOutcome,
    store::StoreError,
    test_util::{StoreOp, TestStore},
};
use tower_lock_testkit::{
    locks::key,
    wait::{settle, soon},
};

const PARENT: u32 = 100;
const CHILD: u32 = 101;

fn forked() -> (TestStore, Arc<AtomicU32>, LockManager) {
    let (store, process) = (TestStore::new(), Arc::new(AtomicU32::new(PARENT)));
    let locks = LockManager::builder(store.clone()).instance("api").seed(7).process_id(Arc::clone(&process)).build();
    (store, process, locks)
}

#[track_caller]
fn is_of_a_child(error: &StoreError) {
    let text = format!("{error:?}");
    assert!(
        text.ends_with(": this process is a forked child: create the store and the `LockManager` after the fork"),
        "{text}"
    );
}

#[track_caller]
fn is_rejected(error: LockError) {
    let LockError::Store(error) = error else { panic!("{error:?}") };
    is_of_a_child(&error);
}

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn each_call_fails_in_a_forked_child() {
    let (store, process, locks) = forked();
    let owner = Owner::new();
    let _guard = locks.lock(key()).owner(&owner).await.expect("free");
    let before = locks.lock(key()).owner(&owner).into_future();
    let calls = || {
        [StoreOp::Acquire, StoreOp::Release, StoreOp::Inspect, StoreOp::Force, StoreOp::Health]
            .map(|op| store.on(op).calls())
    };
    let sent = calls();
    process.store(CHILD, SeqCst);
    is_rejected(before.await.expect_err("no re-entry: the parent has it"));
    is_rejected(locks.try_lock(key()).owner(&owner).await.expect_err("the same"));
    is_rejected(locks.lock(("account", 8)).await.expect_err("a free key"));
    match locks.once(("mail", 1)).run(async |_| ()).await {
        Err(RunError::NotStarted(error)) => is_rejected(error),
        other => panic!("{other:?}"),
    }
    is_of_a_child(&locks.inspect(key()).await.expect_err("a child"));
    is_of_a_child(&locks.force_release(key()).await.expect_err("a child"));
    is_of_a_child(&locks.health().await.expect_err("a child"));
    assert_eq!((locks.held_count(), locks.hold_count(key(), &owner)), (0, 0));
    assert_eq!(locks.shutdown(Duration::from_secs(60)).await, 0);
    assert_eq!(calls(), sent, "nothing is sent");
}

/// The waiters in the copied table are those of the parent: dropping or releasing a guard must not
/// hand the key off to them.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn dropping_a_forked_guard_hands_nothing_off() {
    for is_released in [false, true] {
        let (store, process, locks) = forked();
        let guard = locks.lock(key()).await.expect("free");
        let waiter = tokio::spawn(locks.lock(key()).wait(Duration::from_secs(5)).into_future());
        settle().await;
        process.store(CHILD, SeqCst);
        if is_released {
            assert_eq!(guard.release().await.expect("no call is needed"), ReleaseOutcome::NotHeld);
        } else {
            drop(guard);
        }
        let error = soon("its timeout", waiter).await.expect("no panic").expect_err("it gets no grant");
        assert!(matches!(error, LockError::TimedOut { .. }), "{error:?}");
        assert_eq!((store.on(StoreOp::Release).calls(), store.on(StoreOp::Yield).calls()), (0, 0));
    }
}

/// A single-threaded runtime is copied with its tasks, and continues in the child.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn forked_child_renews_no_lock_of_its_parent() {
    let (store, process, locks) = forked();
    let guard = locks.lock(key()).await.expect("free");
    // Until only its renewal is left for the watchdog.
    sleep(Duration::from_secs(15)).await;
    assert_eq!(store.on(StoreOp::Renew).calls(), 1, "by the parent");
    assert!(!guard.held_lock().remaining().is_zero());
    process.store(CHILD, SeqCst);
    sleep(Duration::from_secs(120)).await;
    assert_eq!((store.on(StoreOp::Renew).calls(), store.held_count()), (1, 0), "its lease has ended");
}
