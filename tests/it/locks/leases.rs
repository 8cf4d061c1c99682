//! The lease that the store gets: as long as configured, and no longer than its section needs.

use std::{future::IntoFuture, time::Duration};

use tokio::time::{Instant, sleep};
use tower_lock::{
    Lease, LockLost, LockManager,
    lock::ReleaseOutcome,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    locks::{key, store_and_locks},
    wait::{ms, settle, soon},
};

/// The time that the store would block the key after a crash now.
async fn kept(locks: &LockManager) -> Duration {
    locks.inspect(key()).await.expect("up").remaining
}

#[tokio::test(start_paused = true)]
async fn lease_setting_bounds_the_cost_of_a_crash() {
    let store = TestStore::new();
    let locks = LockManager::builder(store.clone()).lease(ms(2_000)).build();
    let guard = locks.lock(key()).await.expect("free");
    let began = Instant::now();
    assert_eq!(kept(&locks).await, ms(3_000), "with the lock-delay");
    sleep(ms(20_000)).await;
    let renewals = store.on(StoreOp::Renew).calls();
    assert!((29..=33).contains(&renewals), "each third of two seconds: {renewals}");
    assert!(kept(&locks).await <= ms(3_000) && !guard.held_lock().remaining().is_zero());
    store.fault_all(Fault::Hang);
    let stalled = Instant::now();
    assert_eq!(soon("lost", guard.held_lock().lost()).await, LockLost::Expired);
    assert!(stalled.elapsed() <= ms(1_978), "{:?} after {:?}", stalled.elapsed(), began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn long_lease_is_renewed_seldom() {
    let store = TestStore::new();
    let locks = LockManager::builder(store.clone()).lease(Duration::from_secs(600)).build();
    let guard = locks.lock(key()).await.expect("free");
    sleep(Duration::from_secs(1_000)).await;
    let renewals = store.on(StoreOp::Renew).calls();
    assert!((4..=5).contains(&renewals), "each third of ten minutes: {renewals}");
    assert!(guard.held_lock().remaining() > Duration::from_secs(390));
    guard.release().await.expect("held");
}

#[test]
fn invalid_lease_panics_when_it_is_set() {
    for wrong in [Duration::ZERO, ms(1_999), ms(600_001), Duration::MAX] {
        let set = std::panic::catch_unwind(|| LockManager::builder(TestStore::new()).lease(wrong));
        let text = set.expect_err("refused").downcast::<String>().expect("a text");
        assert!(text.contains("it must be from 2s to 600s"), "{text}");
    }
    for right in [ms(2_000), ms(600_000)] {
        let _ = LockManager::builder(TestStore::new()).lease(right).build();
    }
}

#[tokio::test(start_paused = true)]
async fn fixed_lease_runs_to_its_end_and_no_longer() {
    let (store, locks) = store_and_locks();
    // As slow as a reply may be.
    store.on(StoreOp::Acquire).latency(ms(450));
    let guard = locks.lock(key()).lease(Lease::Fixed(ms(5_000))).await.expect("free");
    let began = Instant::now();
    let most = ms(6_560);
    assert!(kept(&locks).await <= most && kept(&locks).await > ms(6_000), "{:?}", kept(&locks).await);
    // It is not renewed: it has its time, and no more.
    store.on(StoreOp::Renew).fault(Fault::Fail);
    sleep(ms(2_000)).await;
    assert!(kept(&locks).await <= most);
    assert_eq!(soon("over", guard.held_lock().lost()).await, LockLost::HoldLimitReached);
    let took = began.elapsed();
    assert!(took >= ms(5_000) && took <= ms(5_002), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn renewal_of_a_fixed_lease_requests_no_more_than_the_rest() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).lease(Lease::Fixed(ms(5_000))).await.expect("free");
    sleep(ms(4_500)).await;
    assert!(store.on(StoreOp::Renew).calls() >= 2, "so that a revocation is noticed");
    assert!(kept(&locks).await <= ms(6_560), "{:?}", kept(&locks).await);
    guard.release().await.expect("held");
}

/// Each section has the lease that it needs. If the next one needs another lease, the store is
/// called first.
#[tokio::test(start_paused = true)]
async fn handoff_to_another_lease_asks_the_store() {
    let (store, locks) = store_and_locks();
    let fixed = || locks.lock(key()).lease(Lease::Fixed(ms(5_000)));
    let first = fixed().await.expect("free");
    let second = tokio::spawn(fixed().into_future());
    settle().await;
    let third = tokio::spawn(locks.lock(key()).into_future());
    settle().await;
    let fourth = tokio::spawn(fixed().into_future());
    settle().await;
    let calls =
        || [StoreOp::Acquire, StoreOp::Yield, StoreOp::Renew, StoreOp::Release].map(|verb| store.on(verb).calls());

    first.release().await.expect("held");
    let second = soon("a grant", second).await.expect("no panic").expect("a grant");
    assert_eq!(calls(), [1, 0, 0, 0], "the same lease");
    assert_eq!(second.release().await.expect("held"), ReleaseOutcome::HandedOff);
    let third = soon("a grant", third).await.expect("no panic").expect("a grant");
    assert_eq!(calls(), [1, 1, 0, 0], "a longer lease: a yield extends it, under the same id");
    assert!(kept(&locks).await > ms(30_900), "{:?}", kept(&locks).await);
    third.release().await.expect("held");
    let fourth = soon("a grant", fourth).await.expect("no panic").expect("a grant");
    assert_eq!(calls(), [2, 1, 0, 1], "a shorter lease: another id");
    assert!(kept(&locks).await <= ms(6_560), "{:?}", kept(&locks).await);
    fourth.release().await.expect("held");
    assert_eq!(store.held_count(), 0);
}

/// Until its reply, the store blocks the key only for the previous section.
#[tokio::test(start_paused = true)]
async fn section_with_a_longer_lease_starts_after_the_extension() {
    for revoked in [false, true] {
        let (store, locks) = store_and_locks();
        // The rest is long enough to start with, but not what the next section needs.
        let first = locks.lock(key()).lease(Lease::Fixed(ms(20_000))).await.expect("free");
        let token = first.fencing_token();
        let next = tokio::spawn(locks.lock(key()).into_future());
        settle().await;
        if revoked {
            store.fault_events(Fault::Fail);
            LockManager::new(store.clone()).force_release(key()).await.expect("up");
        }
        store.on(StoreOp::Yield).pause_after();
        assert_eq!(first.release().await.expect("held"), ReleaseOutcome::HandedOff);
        settle().await;
        assert!(!next.is_finished(), "started before the reply");
        store.on(StoreOp::Yield).resume();
        let next = soon("a grant", next).await.expect("no panic").expect("a grant");
        assert!(next.fencing_token() > token && next.held_lock().remaining() > ms(29_000));
        assert!(kept(&locks).await > ms(29_900), "{:?}", kept(&locks).await);
        assert_eq!(store.on(StoreOp::Acquire).calls() > 1, revoked, "a lost lock is acquired again");
        next.release().await.expect("held");
        assert_eq!(store.held_count(), 0);
    }
}

/// The renewal was sent for the short lease, and its reply arrives when the grant has the long one.
#[tokio::test(start_paused = true)]
async fn renewal_before_a_longer_lease_counts_as_requested() {
    let (store, locks) = store_and_locks();
    let first = locks.lock(key()).lease(Lease::Fixed(ms(3_000))).await.expect("free");
    let next = tokio::spawn(locks.lock(key()).into_future());
    settle().await;
    store.on(StoreOp::Renew).pause_before();
    while store.on(StoreOp::Renew).calls() == 0 {
        sleep(ms(10)).await;
    }
    assert_eq!(first.release().await.expect("held"), ReleaseOutcome::HandedOff);
    let next = soon("a grant", next).await.expect("no panic").expect("a grant");
    store.on(StoreOp::Renew).resume();
    settle().await;
    assert!(kept(&locks).await > ms(30_900), "a late renewal shortens nothing: {:?}", kept(&locks).await);
    assert!(next.held_lock().remaining() <= kept(&locks).await, "the local lease is no longer than that of the store");
    next.release().await.expect("held");
}
