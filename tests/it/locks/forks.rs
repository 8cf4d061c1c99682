//! A process that was copied by `fork()`: the copy has its own ids, and holds no lock of its
//! parent.
//!
//! The process id is simulated: another number stands for the child (`tests/storm/tests/crash.rs`
//! has a real fork). The handle of the parent that continues meanwhile is a second one with the
//! same seed.

use std::{
    future::IntoFuture,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::time::{Instant, sleep};
use tower_lock::{
    LockError, LockLost, LockManager, MemoryStore, Owner,
    lock::ReleaseOutcome,
    store::StoreErrorKind,
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

async fn holder(locks: &LockManager) -> String {
    locks.inspect(key()).await.expect("the store is up").holder.expect("a holder").manager().to_owned()
}

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn forked_child_has_new_ids_and_holds_no_locks() {
    let (store, process, locks) = forked();
    let owner = Owner::new();
    let guard = locks.lock(key()).owner(&owner).await.expect("free");
    let parent = holder(&locks).await;
    process.store(CHILD, SeqCst);
    assert_eq!((locks.held_count(), locks.hold_count(key(), &owner)), (0, 0));
    let again = locks.try_lock(key()).owner(&owner).await.expect_err("no re-entry: the parent has it");
    assert!(matches!(again, LockError::Busy { .. }), "{again:?}");
    let forked = Instant::now();
    assert_eq!(guard.held_lock().lost().await, LockLost::Expired, "the copied guard");
    assert_eq!(forked.elapsed(), Duration::ZERO, "at once, and not at the end of its lease");
    assert_eq!(guard.release().await.expect("no call is needed"), ReleaseOutcome::NotHeld);
    settle().await;
    assert_eq!(
        (store.on(StoreOp::Release).calls(), store.on(StoreOp::Yield).calls()),
        (0, 0),
        "the parent still holds it"
    );
    assert_eq!(holder(&locks).await, parent);
    let other = locks.try_lock(("account", 8)).await.expect("free");
    let state = locks.inspect(("account", 8)).await.expect("the store is up");
    let child = state.holder.expect("held").manager().to_owned();
    assert!(child.starts_with("api:") && child != parent, "{child} {parent}");
    assert_eq!(other.release().await.expect("a store"), ReleaseOutcome::Released);
    // A child of the child, even with the id of the grandparent.
    process.store(PARENT, SeqCst);
    let _third = locks.try_lock(("account", 9)).await.expect("free");
    let state = locks.inspect(("account", 9)).await.expect("the store is up");
    let third = state.holder.expect("held").manager().to_owned();
    assert!(third != parent && third != child, "{third}");
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

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn call_made_before_a_fork_gets_no_grant_in_the_child() {
    let (store, process, locks) = forked();
    let owner = Owner::new();
    let _guard = locks.lock(key()).owner(&owner).await.expect("free");
    let call = locks.lock(key()).owner(&owner).into_future();
    process.store(CHILD, SeqCst);
    let error = call.await.expect_err("a copied table grants nothing");
    assert!(matches!(&error, LockError::Store(error) if error.kind() == StoreErrorKind::Unavailable), "{error:?}");
    assert_eq!(store.on(StoreOp::Acquire).calls(), 1, "only the guard of the parent");
}

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn forked_child_subscribes_to_its_own_channel() {
    let store = Arc::new(MemoryStore::new());
    let [parent, child] = [PARENT, CHILD].map(|later| {
        let process = Arc::new(AtomicU32::new(PARENT));
        let locks = LockManager::builder(Arc::clone(&store)).seed(7).process_id(Arc::clone(&process)).build();
        process.store(later, SeqCst);
        locks
    });
    let guard = parent.lock(key()).await.expect("free");
    let waiter = tokio::spawn(child.lock(key()).into_future());
    settle().await;
    assert!(!waiter.is_finished(), "one key, one holder");
    assert_eq!(guard.release().await.expect("a store"), ReleaseOutcome::HandedOff);
    let guard = soon("a grant", waiter).await.expect("no panic").expect("a grant");
    assert_eq!(guard.release().await.expect("a store"), ReleaseOutcome::Released);
}
