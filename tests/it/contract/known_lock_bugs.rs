//! Known bugs of older Redis locks, each with a minimal lock that has it.

use std::{collections::HashMap, future::IntoFuture, sync::Mutex, time::Duration};

use tokio::time::{Instant, sleep};
use tower_lock::{
    Lease, LockError, LockLost, LockManager, MemoryStore, Owner,
    lock::ReleaseOutcome,
    test_util::{StoreOp, TestStore},
};
use tower_lock_testkit::{
    locks::{key, store_and_locks},
    wait::{settle, soon},
};

/// `SET NX` with or without a TTL, and `DEL`: a map of owners and expiry times.
#[derive(Default)]
struct OlderLock(Mutex<HashMap<&'static str, (u32, Option<Instant>)>>);

impl OlderLock {
    fn set_nx(&self, key: &'static str, owner: u32, lease: Option<Duration>) -> bool {
        let mut held = self.0.lock().expect("whole");
        held.retain(|_, (_, until)| until.is_none_or(|until| until > Instant::now()));
        let free = !held.contains_key(key);
        if free {
            held.insert(key, (owner, lease.map(|lease| Instant::now() + lease)));
        }
        free
    }

    fn del(&self, key: &'static str) {
        self.0.lock().expect("whole").remove(key);
    }
}

/// Step 1.
#[tokio::test(start_paused = true)]
async fn crashed_holder_does_not_block_forever() {
    let older = OlderLock::default();
    assert!(older.set_nx("k", 1, None));
    sleep(Duration::from_secs(1_000_000)).await;
    assert!(!older.set_nx("k", 2, None), "SETNX has no TTL");

    let store = std::sync::Arc::new(MemoryStore::new());
    let crashed = LockManager::new(std::sync::Arc::clone(&store));
    // No release and no renewal, as after a failure of the machine.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    std::thread::scope(|scope| {
        scope.spawn(|| std::mem::forget(runtime.block_on(crashed.lock(key()).into_future()).expect("free")));
    });
    drop(tokio::task::spawn_blocking(|| drop(runtime)).await);
    let other = LockManager::new(store);
    let began = Instant::now();
    drop(other.lock(key()).wait(Duration::from_secs(60)).await.expect("its lease expires").release());
    assert!(began.elapsed() <= Duration::from_millis(31_010), "a lease and a lock-delay: {:?}", began.elapsed());
}

/// Step 2.
#[tokio::test(start_paused = true)]
async fn late_holder_does_not_release_the_next_lock() {
    let older = OlderLock::default();
    assert!(older.set_nx("k", 1, Some(Duration::from_secs(30))));
    sleep(Duration::from_secs(31)).await;
    assert!(older.set_nx("k", 2, Some(Duration::from_secs(30))));
    older.del("k");
    assert!(older.set_nx("k", 3, Some(Duration::from_secs(30))), "DEL ignores the owner: an overlap");

    let store = TestStore::new();
    let (late, next) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let guard = late.lock(key()).await.expect("free");
    store.restart();
    let _held = next.lock(key()).await.expect("the store has lost its data");
    assert_eq!(guard.release().await.expect("up"), ReleaseOutcome::NotHeld);
    assert!(matches!(late.try_lock(key()).await, Err(LockError::Busy { .. })));
    assert_eq!(store.held_count(), 1);
}

/// Step 3.
#[tokio::test(start_paused = true)]
async fn section_longer_than_the_lease_stays_exclusive() {
    let older = OlderLock::default();
    assert!(older.set_nx("k", 1, Some(Duration::from_secs(30))));
    sleep(Duration::from_secs(40)).await;
    assert!(older.set_nx("k", 2, Some(Duration::from_secs(30))), "the first holder still runs");

    let store = TestStore::new();
    let (one, two) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let guard = one.lock(key()).await.expect("free");
    for _ in 0..10 {
        sleep(Duration::from_secs(40)).await;
        assert!(matches!(two.try_lock(key()).await, Err(LockError::Busy { .. })));
    }
    assert!(store.on(StoreOp::Renew).calls() >= 40, "every third of a lease");
    assert_eq!(guard.release().await.expect("up"), ReleaseOutcome::Released);
}

/// Step 3 again: a fixed lease limits its holder.
#[tokio::test(start_paused = true)]
async fn holder_learns_of_the_end_of_a_fixed_lease() {
    let (_store, locks) = store_and_locks();
    let guard = locks.lock(key()).lease(Lease::Fixed(Duration::from_secs(60))).await.expect("free");
    let began = Instant::now();
    let next = tokio::spawn(locks.lock(key()).wait(Duration::from_secs(100)).into_future());
    let lost = guard.while_held(std::future::pending::<()>()).await;
    assert_eq!((lost, began.elapsed().as_secs()), (Err(LockLost::HoldLimitReached), 60));
    drop(next.await.expect("no panic").expect("a grant").release());
    assert_eq!(guard.release().await.expect("up"), ReleaseOutcome::NotHeld);
}

/// Step 4.
#[tokio::test(start_paused = true)]
async fn owner_does_not_deadlock_with_itself() {
    let older = OlderLock::default();
    assert!(older.set_nx("k", 1, None));
    assert!(!older.set_nx("k", 1, None), "it waits for itself");

    let (store, locks) = store_and_locks();
    Owner::new()
        .scope(async {
            let mut guards = Vec::new();
            for depth in 1..=10 {
                guards.push(locks.try_lock(key()).await.expect("reentered"));
                assert_eq!(guards[0].hold_count(), depth);
            }
            for guard in guards.drain(1..) {
                assert_eq!(guard.release().await.expect("up"), ReleaseOutcome::StillHeld);
            }
            assert_eq!(store.held_count(), 1, "the last one's release frees the key");
            assert_eq!(guards.remove(0).release().await.expect("up"), ReleaseOutcome::Released);
        })
        .await;
    assert_eq!(store.held_count(), 0);
}

/// Step 5.
#[tokio::test(start_paused = true)]
async fn waiter_sleeps_until_the_release_wakes_it() {
    let store = TestStore::new();
    let (one, two) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let guard = one.lock(key()).await.expect("free");
    let waiter = tokio::spawn(two.lock(key()).into_future());
    settle().await;
    let asked = store.on(StoreOp::Acquire).calls();
    sleep(Duration::from_millis(10_300)).await;
    let check_ins = store.on(StoreOp::Acquire).calls() - asked;
    assert!((8..=13).contains(&check_ins), "about one poll per second: {check_ins}");
    let freed = Instant::now();
    guard.release().await.expect("up");
    drop(soon("a grant", waiter).await.expect("no panic").expect("a grant").release());
    assert!(freed.elapsed() <= Duration::from_millis(5), "woken, and not at the next poll: {:?}", freed.elapsed());
}
