//! A process that was copied by `fork()`: each call of the copied manager fails, and the copy of a
//! guard does nothing.
//!
//! The fork is simulated (`tests/storm/tests/crash.rs` has a real one).

use std::{future::IntoFuture, time::Duration};

use axum::{Router, http::StatusCode, routing::post};
use tokio::time::sleep;
use tower_lock::{
    LockError, LockLayer, LockManager, Owner, Rejection, RunError, lock::ReleaseOutcome, store::StoreError,
    test_util::StoreOp,
};
use tower_lock_testkit::{
    app::post_json,
    locks::{key, one_key, store_and_locks},
    log::Log,
    wait::{settle, soon, until},
};

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
    let (store, locks) = store_and_locks();
    let owner = Owner::new();
    let _guard = locks.lock(key()).owner(&owner).await.expect("free");
    let before = locks.lock(key()).owner(&owner).into_future();
    let calls = || {
        [StoreOp::Acquire, StoreOp::Release, StoreOp::Inspect, StoreOp::Force, StoreOp::Health]
            .map(|op| store.on(op).calls())
    };
    let sent = calls();
    locks.simulate_fork();
    is_rejected(before.await.expect_err("no re-entry: the parent has it"));
    is_rejected(locks.try_lock(key()).owner(&owner).await.expect_err("the same"));
    is_rejected(locks.lock(("account", 8)).await.expect_err("a free key"));
    match locks.once(("mail", 1)).run(async |_| ()).await {
        Err(RunError::NotStarted(error)) => is_rejected(error),
        other => panic!("{other:?}"),
    }
    soon("the end", locks.lead(("mover",), |_| async { panic!("a child does not lead") })).await;
    is_of_a_child(&locks.inspect(key()).await.expect_err("a child"));
    is_of_a_child(&locks.force_release(key()).await.expect_err("a child"));
    is_of_a_child(&locks.health().await.expect_err("a child"));
    assert_eq!((locks.held_count(), locks.hold_count(key(), &owner)), (0, 0));
    assert_eq!(locks.shutdown(Duration::from_secs(60)).await, 0);
    assert_eq!(calls(), sent, "nothing is sent");
}

/// A leader and the client of a request do not get the error. The log has it.
/// Guarantee: G1.
#[tokio::test]
async fn request_in_a_forked_child_gets_503_and_the_log_says_why() {
    let log = Log::default();
    let _listening = log.listen();
    let (_, locks) = store_and_locks();
    let handler = async || -> &'static str { panic!("it runs without a lock") };
    // The copied table says that the key is held.
    let _guard = locks.lock(key()).await.expect("free");
    locks.simulate_fork();
    for wait in [Duration::ZERO, Duration::from_secs(5)] {
        let app = Router::new().route("/", post(handler)).layer(LockLayer::new(&locks, one_key()).wait(wait));
        let response = post_json(&app, "/", "{}").await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let rejection = response.extensions().get::<Rejection>().expect("typed");
        assert_eq!(rejection.outcome(), "not-started");
    }
    // A thread of its own writes it.
    until("the log says why", async || log.text().contains("this process is a forked child")).await;
}

/// The waiters in the copied table are those of the parent: dropping or releasing a guard must not
/// hand the key off to them.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn dropping_a_forked_guard_hands_nothing_off() {
    for is_released in [false, true] {
        let (store, locks) = store_and_locks();
        let guard = locks.lock(key()).await.expect("free");
        let waiter = tokio::spawn(locks.lock(key()).wait(Duration::from_secs(5)).into_future());
        settle().await;
        locks.simulate_fork();
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

/// The parent would lose its place in the queue of the store.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn dropping_a_forked_call_keeps_the_place_of_its_parent() {
    let (store, locks) = store_and_locks();
    let other = LockManager::new(store.clone());
    let _guard = other.lock(key()).await.expect("free");
    let waiter = tokio::spawn(locks.lock(key()).into_future());
    settle().await;
    locks.simulate_fork();
    waiter.abort();
    settle().await;
    assert_eq!(other.inspect(key()).await.expect("the store is up").waiting, 1);
}

/// A single-threaded runtime is copied with its tasks, and continues in the child.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn forked_child_renews_no_lock_of_its_parent() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    // Until only its renewal is left for the watchdog.
    sleep(Duration::from_secs(15)).await;
    assert_eq!(store.on(StoreOp::Renew).calls(), 1, "by the parent");
    assert!(!guard.held_lock().remaining().is_zero());
    locks.simulate_fork();
    sleep(Duration::from_secs(120)).await;
    assert_eq!((store.on(StoreOp::Renew).calls(), store.held_count()), (1, 0), "its lease has ended");
}
