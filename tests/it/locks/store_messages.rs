//! Messages of the store are hints. A forged one frees no key, ends no section, and costs little.

use std::{future::IntoFuture, sync::Arc, time::Duration};

use tokio::time::{Instant, advance, sleep, timeout};
use tower_lock::{
    AcquisitionId, LockLost, LockManager, MemoryStore,
    store::{LockStore, StoreEvent},
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    locks::{key, store_and_locks},
    store::{InterceptedStore, Unordered},
    wait::{ms, settle, soon},
};

async fn holder(locks: &LockManager) -> AcquisitionId {
    locks.inspect(key()).await.expect("up").holder().expect("a holder").id.clone()
}

fn offered(owner: &AcquisitionId) -> StoreEvent {
    StoreEvent::Offered { key: key(), id: owner.clone() }
}

fn revoked(owner: &AcquisitionId) -> StoreEvent {
    StoreEvent::Revoked { key: key(), id: owner.clone() }
}

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn forged_offer_does_not_free_a_held_key() {
    let store = TestStore::new();
    let (one, other) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let guard = one.lock(key()).await.expect("free");
    let owner = holder(&other).await;
    // Both processes have issued this number.
    other.lock(("another",)).await.expect("free").release().await.expect("up");
    let released = store.on(StoreOp::Release).calls();
    store.forge(&offered(&owner));
    // A number that its process has not issued yet.
    store.forge(&offered(&AcquisitionId::from_text(&format!("{}:77", owner.manager()))));
    settle().await;
    assert_eq!(store.on(StoreOp::Release).calls(), released, "unknown ids are not released");
    assert!(other.try_lock(key()).await.is_err(), "it is held");
    assert_eq!(holder(&other).await, owner);
    guard.release().await.expect("held to the end");
}

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn forged_revocation_is_verified_and_ends_nothing() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    let owner = holder(&locks).await;
    for _ in 0..1_000 {
        store.forge(&revoked(&owner));
        store.forge(&revoked(&AcquisitionId::from_text("unknown:0000000000000000:0")));
    }
    sleep(Duration::from_millis(99)).await;
    assert_eq!(store.on(StoreOp::Renew).calls(), 1, "one renewal for all of them");
    for _ in 0..1_000 {
        store.forge(&revoked(&owner));
        advance(Duration::from_millis(1)).await;
        settle().await;
    }
    let renewals = store.on(StoreOp::Renew).calls();
    assert!((8..=11).contains(&renewals), "one in a tenth of a second: {renewals}");
    assert!(!guard.held_lock().remaining().is_zero());
    guard.release().await.expect("held to the end");
}

/// A neighbour that flushes its own database again and again causes no storm of renewals, and a
/// loss is noticed.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn locks_are_checked_once_a_second_after_a_recovery() {
    let (store, locks) = store_and_locks();
    let (guard, other) = (locks.lock(key()).await.expect("free"), locks.lock(("other",)).await.expect("free"));
    let renewals = || store.on(StoreOp::Renew).calls();
    for _ in 0..900 {
        store.forge(&StoreEvent::Recovered);
        advance(ms(1)).await;
        settle().await;
    }
    assert_eq!(renewals(), 1, "both locks together");
    sleep(ms(200)).await;
    assert_eq!(renewals(), 2, "once more for those that came meanwhile");
    other.release().await.expect("held to the end");
    store.restart();
    sleep(Duration::from_secs(1)).await;
    store.forge(&StoreEvent::Recovered);
    assert_eq!(timeout(ms(10), guard.held_lock().lost()).await, Ok(LockLost::Revoked));
}

/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn confirmed_revocation_ends_its_section_at_once() {
    let (store, locks) = store_and_locks();
    let operator = LockManager::new(store.clone());
    let guard = locks.lock(key()).await.expect("free");
    let owner = holder(&locks).await;
    let lost = tokio::spawn({
        let view = guard.held_lock();
        async move { (view.lost().await, Instant::now()) }
    });
    // The reply to a forged one is in flight during the revocation.
    store.on(StoreOp::Renew).pause_after();
    store.forge(&revoked(&owner));
    store.on(StoreOp::Renew).wait_until_paused().await;
    let forced = Instant::now();
    operator.force_release(key()).await.expect("up");
    store.on(StoreOp::Renew).resume();
    let (why, at) = soon("lost", lost).await.expect("no panic");
    assert_eq!(why, LockLost::Revoked);
    assert!(at - forced <= Duration::from_millis(100), "{:?}", at - forced);
}

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn unverified_revocation_leaves_the_deadline() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    let (asked, owner) = (Instant::now(), holder(&locks).await);
    store.fault_all(Fault::Hang);
    store.forge(&revoked(&owner));
    assert_eq!(soon("lost", guard.held_lock().lost()).await, LockLost::Expired);
    assert!(asked.elapsed() >= Duration::from_millis(29_698), "{:?}", asked.elapsed());
}

/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn gap_notifications_are_limited_to_ten_per_second() {
    let (store, locks) = store_and_locks();
    let other = LockManager::new(store.clone());
    let guard = other.lock(key()).await.expect("free");
    let waits = tokio::spawn(locks.lock(key()).into_future());
    settle().await;
    let before = store.on(StoreOp::Acquire).calls();
    for _ in 0..1_000 {
        store.forge(&StoreEvent::Lagged);
        settle().await;
    }
    assert_eq!(store.on(StoreOp::Acquire).calls() - before, 1);
    sleep(Duration::from_millis(101)).await;
    assert_eq!(store.on(StoreOp::Acquire).calls() - before, 2, "and once for the messages that arrived since");
    sleep(Duration::from_millis(200)).await;
    assert_eq!(store.on(StoreOp::Acquire).calls() - before, 2);
    guard.release().await.expect("held");
    soon("a grant", waits).await.expect("no panic").expect("a grant").release().await.expect("held");
}

/// A store without a queue says when to ask again.
#[tokio::test(start_paused = true)]
async fn waiter_asks_a_store_without_a_queue_when_it_says() {
    let memory: Arc<dyn LockStore> = Arc::new(MemoryStore::new());
    let store = || InterceptedStore::new(Arc::clone(&memory), Unordered);
    let (one, two) = (LockManager::new(store()), LockManager::new(store()));
    let guard = one.lock(key()).await.expect("free");
    let waiter = tokio::spawn(two.lock(key()).into_future());
    settle().await;
    assert_eq!(one.inspect(key()).await.expect("a reply").waiting, 0, "nothing is queued");
    let began = Instant::now();
    guard.release().await.expect("a reply");
    waiter.await.expect("no panic").expect("a grant").release().await.expect("a reply");
    assert!(began.elapsed() <= Unordered::POLL + ms(10), "{:?}", began.elapsed());
    assert_eq!((one.size(), two.size()), ((0, 0), (0, 0)));
}

/// `Freed` is a hint: the waiter asks the store, and a flood of hints makes few calls.
#[tokio::test(start_paused = true)]
async fn freed_key_is_asked_for_at_most_ten_times_a_second() {
    let store = TestStore::new();
    let locks = || LockManager::new(InterceptedStore::new(Arc::new(store.clone()), Unordered));
    let (one, two) = (locks(), locks());
    let guard = one.lock(key()).await.expect("free");
    let mut waiter = tokio::spawn(two.lock(key()).into_future());
    settle().await;
    let asked = store.on(StoreOp::Acquire).calls();
    for _ in 0..1_000 {
        store.forge(&StoreEvent::Freed { key: key() });
        sleep(ms(1)).await;
    }
    let asked = store.on(StoreOp::Acquire).calls() - asked;
    assert!((8..=12).contains(&asked), "{asked} calls in a second");
    assert!(!waiter.is_finished(), "the key is held");
    // The last poll was just now.
    sleep(Unordered::POLL - ms(10)).await;
    guard.release().await.expect("a reply");
    store.forge(&StoreEvent::Freed { key: key() });
    let guard = timeout(ms(1), &mut waiter).await.expect("at once").expect("no panic").expect("a grant");
    guard.release().await.expect("a reply");
}
