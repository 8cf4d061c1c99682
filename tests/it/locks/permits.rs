//! Permits and readers of several processes, in memory.

use std::{sync::Arc, time::Duration};

use tower_lock::{LockError, LockKey, LockManager, MemoryStore, Owner};
use tower_lock_testkit::{
    locks::key,
    permits::{self, dropped_guard_blocks_one_place, limit_is_kept, writer_is_not_passed},
    wait::until,
};

fn processes(count: usize) -> (Arc<MemoryStore>, Vec<LockManager>) {
    let store = Arc::new(MemoryStore::new());
    let locks = (0..count).map(|_| LockManager::new(Arc::clone(&store))).collect();
    (store, locks)
}

/// Guarantee: G22.
#[tokio::test]
async fn at_most_the_limit_hold_a_key() {
    let (store, locks) = processes(2);
    limit_is_kept(&locks, key()).await;
    assert_eq!(store.size(), 0);
}

/// Guarantee: G23.
#[tokio::test]
async fn readers_run_together_and_a_writer_alone() {
    let (store, locks) = processes(3);
    writer_is_not_passed(&locks, key()).await;
    assert_eq!(store.size(), 0);
}

/// Guarantee: G22.
#[tokio::test]
async fn dropped_permit_blocks_its_place_alone() {
    let (_, locks) = processes(1);
    dropped_guard_blocks_one_place(&locks, key()).await;
}

/// Guarantee: G22, G23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_permits_and_one_of_readers() {
    for (limit, most) in [(6, 6), (1_024, 7)] {
        let (store, locks) = processes(4);
        let report = permits::storm(&locks, &key(), limit, Duration::from_millis(500)).await;
        assert!(report.sections > 100 && report.most >= most, "{report:?}");
        until("nothing is left", async || store.size() == 0).await;
        assert!(locks.iter().all(|locks| locks.held_count() == 0));
    }
}

/// An owner that waited for its own read would wait forever.
///
/// Guarantee: G23.
#[tokio::test]
async fn upgrade_of_a_read_fails_at_once() {
    let (_, locks) = processes(1);
    let owner = Owner::new();
    let read = locks[0].read(key()).owner(&owner).await.expect("free");
    let again = locks[0].read(key()).owner(&owner).await.expect("the same");
    assert_eq!((read.hold_count(), locks[0].held_count()), (2, 1));
    let upgrade = locks[0].lock(key()).owner(&owner).await;
    assert!(matches!(upgrade, Err(LockError::WouldDeadlock)), "{upgrade:?}");
    again.release().await.expect("released");
    read.release().await.expect("released");
    let whole = locks[0].lock(key()).owner(&owner).await.expect("free");
    let read = locks[0].read(key()).owner(&owner).await.expect("under the whole key");
    assert_eq!(read.hold_count(), 2);
    read.release().await.expect("released");
    whole.release().await.expect("released");
}

#[tokio::test]
async fn work_under_a_permit_ends_with_its_loss() {
    let (_, locks) = processes(1);
    let other = locks[0].permit(key(), 2).await.expect("free");
    let run = locks[0].permit(key(), 2).max_hold(Duration::from_millis(20)).run(async |permit| {
        assert_eq!(permit.key(), &key());
        permit.lost().await
    });
    assert!(run.await.is_err());
    assert!(!other.held_permit().remaining().is_zero());
    other.release().await.expect("released");
    let done = locks[0].read(LockKey::from(("r",))).run(async |read| read.ensure_remaining(Duration::from_secs(1)));
    assert!(done.await.expect("ran").is_ok());
}

#[test]
#[should_panic(expected = "0 permits are not possible: 1 to 1024 are")]
fn zero_permits_panic() {
    let _ = LockManager::in_memory().permit(key(), 0);
}
