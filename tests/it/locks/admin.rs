//! Operations for an administrator: inspection, force release, health and shutdown.

use std::{future::IntoFuture, pin::pin, sync::Arc, time::Duration};

use axum::{Router, http::StatusCode, routing::get};
use futures_util::{future::join, poll};
use tokio::{
    runtime::Builder,
    sync::{Notify, Semaphore},
    task::JoinSet,
    time::{Instant, sleep},
};
use tower_lock::{
    LockError, LockKey, LockLayer, LockLost, LockManager, Owner, Rejection,
    lock::ReleaseOutcome,
    store::{ForceReleaseReply, ListRequest, StoreErrorKind},
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    app::{fetch, problem_type, text},
    http::Http1,
    locks::{key, one_key, store_and_locks},
    wait::{settle, soon},
};

#[tokio::test(start_paused = true)]
async fn inspect_reports_holder_lease_and_waiters() {
    let store = TestStore::new();
    let one = LockManager::builder(store.clone()).instance("api 7/f3").build();
    let two = LockManager::new(store.clone());
    let free = two.inspect(key()).await.expect("up");
    assert_eq!((free.holder(), free.holding, free.remaining, free.waiting), (None, 0, Duration::ZERO, 0));
    #[expect(clippy::disallowed_methods, reason = "the test needs the wall clock")]
    let (before, guard, after) =
        (std::time::SystemTime::now(), one.lock(key()).await.expect("free"), std::time::SystemTime::now());
    let waiter = tokio::spawn(two.lock(key()).into_future());
    settle().await;
    let held = two.inspect(key()).await.expect("up");
    let holder = held.holder().expect("a holder");
    assert_eq!((holder.id.instance(), held.waiting, held.waiting_locally), ("api-7-f3", 1, 1));
    assert_eq!((holder.connected, held.record_left), (Some(true), None));
    assert_eq!(one.inspect(key()).await.expect("up").waiting_locally, 0, "two waiters in the other process");
    let since = holder.since.expect("waiting for a short time");
    assert!(since + Duration::from_millis(1) >= before && since <= after, "{since:?}");
    assert!(held.remaining > Duration::from_secs(30) && held.remaining <= Duration::from_secs(31));
    drop(guard);
    settle().await;
    let kept = two.inspect(key()).await.expect("up");
    assert!(kept.holder().is_none() && kept.remaining <= Duration::from_secs(1) && !kept.remaining.is_zero());
    waiter.abort();
    store.fault_all(Fault::Hang);
    let asked = Instant::now();
    assert_eq!(two.inspect(key()).await.expect_err("silent").operation(), "inspect");
    assert_eq!(asked.elapsed(), Duration::from_millis(500));
}

#[tokio::test(start_paused = true)]
async fn listing_has_pages_of_keys_with_their_states() {
    let store = TestStore::new();
    let (one, two) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let held = one.lock_all((0..5).map(|number| ("n", number))).await.expect("free");
    let waiter = tokio::spawn(two.lock(("n", 3)).into_future());
    settle().await;
    let list = async |limit, contended_only| {
        let (mut entries, mut pages, mut next) = (Vec::new(), 0, None);
        loop {
            let request = ListRequest::new(limit).contended_only(contended_only);
            let page = two.list(next.into_iter().fold(request, ListRequest::after)).await.expect("up");
            entries.extend(page.entries.into_iter().map(|entry| (entry.key, entry.status.waiting)));
            pages += 1;
            next = page.next;
            if next.is_none() {
                entries.sort_unstable();
                return (entries, pages);
            }
        }
    };
    let all: Vec<_> = (0..5).map(|number| (LockKey::from(("n", number)), usize::from(number == 3))).collect();
    assert_eq!(list(100, false).await, (all.clone(), 1));
    let (listed, pages) = list(2, false).await;
    assert!(listed == all && pages > 2, "{pages} pages: {listed:?}");
    assert_eq!(list(100, true).await.0, [all[3].clone()]);
    store.fault_all(Fault::Hang);
    assert_eq!(two.list(ListRequest::new(1)).await.expect_err("silent").operation(), "list");
    waiter.abort();
    drop(held);
}

#[test]
fn status_says_whether_the_holder_is_connected() {
    let store = TestStore::new();
    let runtime = || Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    let operator = LockManager::new(store.clone());
    let connected = || {
        let status = runtime().block_on(operator.inspect(key())).expect("up");
        (
            status.holder().is_some(),
            status.holder().and_then(|holder| holder.connected),
            status.to_string().contains("is not connected"),
        )
    };
    assert_eq!(connected(), (false, None, false), "free");
    let process = runtime();
    let (locks, dies) = (LockManager::new(store.clone()), store.clone());
    let guard = process.block_on(async move { locks.lock(key()).await.expect("free") });
    assert_eq!(connected(), (true, Some(true), false));
    dies.on(StoreOp::Release).fault(Fault::Fail);
    drop((guard, process));
    assert_eq!(connected(), (true, Some(false), true), "died before its release");
}

/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn forced_release_aborts_the_holder_and_keeps_the_lock_delay() {
    let (store, locks) = store_and_locks();
    let operator = LockManager::new(store.clone());
    assert_eq!(operator.force_release(key()).await.expect("up"), ForceReleaseReply::Free, "free before");
    let app = Router::new().route(
        "/",
        get(|| async { std::future::pending::<()>().await }).route_layer(LockLayer::new(&locks, one_key())),
    );
    let request = tokio::spawn(async move { fetch(&app, "/").await });
    settle().await;
    let next = tokio::spawn(operator.lock(key()).into_future());
    settle().await;
    let forced = Instant::now();
    let holder = operator.inspect(key()).await.expect("up").holder().map(|holder| holder.id.clone());
    assert!(holder.is_some());
    let revoked = operator.force_release(key()).await.expect("up");
    assert_eq!(revoked.holder(), holder.as_ref(), "the holder");
    let response = request.await.expect("no panic");
    assert_eq!((response.status(), forced.elapsed()), (StatusCode::SERVICE_UNAVAILABLE, Duration::ZERO), "at once");
    assert!(matches!(response.extensions().get(), Some(Rejection::Lost)));
    assert!(text(response).await.contains("unknown"));
    drop(soon("a grant", next).await.expect("no panic").expect("a grant").release());
    assert!(
        forced.elapsed() >= Duration::from_secs(1),
        "a lock-delay, so that the holder can stop: {:?}",
        forced.elapsed()
    );
    settle().await;
    assert_eq!((store.memory().size(), locks.size(), operator.size()), (0, (0, 0), (0, 0)));
}

/// A wrong `min_hold(1 day)` blocks a key for a day: `force_release` ends that.
/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn force_release_ends_a_minimum_hold() {
    let (_store, locks) = store_and_locks();
    let day = Duration::from_secs(24 * 3600);
    locks.lock(key()).min_hold(day).await.expect("free").release().await.expect("up");
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })));
    match locks.force_release(key()).await.expect("up") {
        ForceReleaseReply::Unblocked { blocked_for } => assert!(blocked_for > day / 2, "{blocked_for:?}"),
        other => panic!("{other:?}"),
    }
    locks.try_lock(key()).await.expect("free").release().await.expect("up");
}

/// An operator repeats a call whose reply was lost, and the holder has not been notified.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn second_force_release_keeps_the_first_lock_delay() {
    let (store, locks) = store_and_locks();
    let operator = LockManager::new(store.clone());
    store.fault_events(Fault::Fail);
    let guard = locks.lock(key()).await.expect("free");
    let first = operator.force_release(key()).await.expect("up");
    store.fault_events(Fault::None);
    sleep(Duration::from_millis(400)).await;
    assert!(guard.held_lock().ensure_remaining(Duration::ZERO).is_ok(), "not notified");
    assert_eq!(operator.force_release(key()).await.expect("up"), first);
    assert!(matches!(operator.try_lock(key()).await, Err(LockError::Busy { .. })), "blocked");
    soon("the second message", guard.held_lock().lost()).await;
    sleep(Duration::from_millis(601)).await;
    operator.try_lock(key()).await.expect("free").release().await.expect("up");
    // The lock-delay of a failed section remains.
    operator.lock(key()).min_hold(Duration::from_secs(60)).await.expect("free").release().await.expect("up");
    let unblocked = operator.force_release(key()).await.expect("up");
    assert!(matches!(unblocked, ForceReleaseReply::Unblocked { .. }), "{unblocked:?}");
}

#[tokio::test(start_paused = true)]
async fn health_reports_the_health_of_the_store() {
    let (store, locks) = store_and_locks();
    locks.health().await.expect("up");
    store.fault_all(Fault::Fail);
    assert_eq!(locks.health().await.expect_err("down").kind(), StoreErrorKind::Unavailable);
    store.fault_all(Fault::Hang);
    assert_eq!(locks.health().await.expect_err("silent").kind(), StoreErrorKind::Timeout);
}

/// Twice the time of a call without a reply; then the request is rejected.
#[tokio::test(start_paused = true)]
async fn call_timeout_is_that_of_the_store() {
    let store = TestStore::with_call_timeout(Duration::from_secs(2));
    let locks = LockManager::new(store.clone());
    store.on(StoreOp::Acquire).latency(Duration::from_millis(1_900));
    let guard = locks.try_lock(key()).await.expect("in time");
    guard.release().await.expect("up");
    store.fault_all(Fault::Hang);
    let asked = Instant::now();
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Store(_))));
    assert_eq!(asked.elapsed(), Duration::from_secs(4));
}

/// Events may be lost: then the next renewal detects the revocation.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn holder_learns_of_a_revocation_by_its_next_renewal() {
    let (store, locks) = store_and_locks();
    store.fault_events(Fault::Fail);
    let guard = locks.lock(key()).await.expect("free");
    sleep(Duration::from_secs(5)).await;
    assert!(locks.force_release(key()).await.expect("up").holder().is_some());
    let forced = Instant::now();
    assert_eq!(guard.held_lock().lost().await, LockLost::Revoked);
    assert!(forced.elapsed() <= Duration::from_millis(5_010), "{:?}", forced.elapsed());
    assert_eq!(guard.release().await.expect("up"), ReleaseOutcome::NotHeld);
}

/// Waiters are rejected, holders may finish, and all locks are released.
/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn shutdown_rejects_new_calls_and_lets_holders_finish() {
    let store = TestStore::new();
    let (locks, other) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let elsewhere = other.lock(("n", 0)).await.expect("free");
    let me = Owner::new();
    let mut held = Vec::new();
    for n in 1..=5 {
        held.push(locks.lock(("n", n)).owner(&me).await.expect("free"));
    }
    let mut waiters = JoinSet::new();
    for n in 0..=5 {
        for _ in 0..10 {
            waiters.spawn(locks.lock(("n", n)).into_future());
        }
    }
    settle().await;
    let began = Instant::now();
    let shutdown = tokio::spawn({
        let locks = locks.clone();
        async move { locks.shutdown(Duration::from_secs(20)).await }
    });
    settle().await;
    while let Some(waiter) = waiters.join_next().await {
        assert!(matches!(waiter.expect("no panic"), Err(LockError::ShuttingDown)));
    }
    assert_eq!(began.elapsed(), Duration::ZERO, "rejected at once");
    assert!(matches!(locks.try_lock(("n", 9)).await, Err(LockError::ShuttingDown)));
    assert_eq!(other.inspect(("n", 0)).await.expect("up").waiting, 0, "no queue entry remains");
    // A holder may reenter, and finishes.
    locks.try_lock(("n", 1)).owner(&me).await.expect("reentered").release().await.expect("up");
    for guard in held {
        assert!(!shutdown.is_finished());
        sleep(Duration::from_secs(2)).await;
        guard.release().await.expect("up");
    }
    assert_eq!((shutdown.await.expect("no panic"), began.elapsed().as_secs()), (0, 10));
    assert_eq!((store.held_count(), locks.size()), (1, (0, 0)), "the guard of the other process");
    elsewhere.release().await.expect("up");
    drop(other.lock(("n", 1)).await.expect("another process continues").release());
}

#[tokio::test(start_paused = true)]
async fn shutdown_counts_holders_that_outlive_its_budget() {
    let (store, locks) = store_and_locks();
    let guards = [locks.lock(("n", 1)).await.expect("free"), locks.lock(("n", 2)).await.expect("free")];
    let quick = locks.lock(("n", 3)).await.expect("free");
    let shutdown = tokio::spawn({
        let locks = locks.clone();
        async move { locks.shutdown(Duration::from_secs(5)).await }
    });
    settle().await;
    quick.release().await.expect("up");
    assert_eq!(shutdown.await.expect("no panic"), 2);
    sleep(Duration::from_secs(100)).await;
    for guard in guards {
        assert!(guard.held_lock().remaining() > Duration::from_secs(15), "renewed as before");
        assert_eq!(guard.release().await.expect("up"), ReleaseOutcome::Released);
    }
    assert_eq!((store.held_count(), locks.shutdown(Duration::ZERO).await), (0, 0), "a second shutdown is harmless");
}

/// The keys of such releases stay blocked until their leases end.
#[tokio::test(start_paused = true)]
async fn shutdown_counts_releases_without_a_reply() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    let hand = store.on(StoreOp::Release);
    hand.pause_before();
    drop(guard.release());
    assert_eq!((locks.held_count(), locks.shutdown(Duration::from_secs(2)).await), (0, 1));
    hand.resume();
    assert_eq!(locks.shutdown(Duration::from_secs(2)).await, 0);
}

#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_releases_and_responds_503() {
    let (store, locks) = store_and_locks();
    let app = Router::new().route("/", get(|| async { "ran" }).route_layer(LockLayer::new(&locks, one_key())));
    store.on(StoreOp::Release).latency(Duration::from_millis(300));
    drop(locks.lock(key()).await.expect("free").release());
    let began = Instant::now();
    assert_eq!(locks.shutdown(Duration::from_secs(5)).await, 0);
    assert_eq!((began.elapsed().as_millis() / 10, store.held_count()), (30, 0));
    let response = fetch(&app, "/").await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.headers().contains_key("retry-after"));
    assert!(matches!(response.extensions().get(), Some(Rejection::ShuttingDown { .. })));
    assert!(text(response).await.contains(&problem_type("shutting-down")));
}

/// Requests arrive all the time and half of them leave; meanwhile the service stops.
/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn shutdown_under_load_leaves_nothing() {
    let store = TestStore::new();
    store.on(StoreOp::Acquire).latency(Duration::from_millis(3));
    store.on(StoreOp::Release).latency(Duration::from_millis(2));
    let (locks, other) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let mut clients = JoinSet::new();
    for n in 0..200_u64 {
        for locks in [locks.clone(), other.clone()] {
            clients.spawn(async move {
                for round in 0..20_u64 {
                    sleep(Duration::from_millis(1 + (n * 7 + round * 3) % 20)).await;
                    let call = locks.lock(("n", n % 5)).wait(Duration::from_millis(10 + n % 100)).into_future();
                    let work = async {
                        let guard = call.await?;
                        sleep(Duration::from_millis(n % 3)).await;
                        drop(guard.release());
                        Ok::<_, LockError>(())
                    };
                    if let Ok(Err(LockError::ShuttingDown)) =
                        tokio::time::timeout(Duration::from_millis(40), work).await
                    {
                        return true;
                    }
                }
                false
            });
        }
    }
    sleep(Duration::from_millis(150)).await;
    assert_eq!(locks.shutdown(Duration::from_secs(5)).await, 0);
    assert_eq!(locks.size(), (0, 0));
    let mut rejected = 0;
    while let Some(client) = clients.join_next().await {
        rejected += usize::from(client.expect("no panic"));
    }
    assert_eq!(rejected, 200, "all clients of this process, and none of the other");
    sleep(Duration::from_secs(60)).await;
    assert_eq!((store.memory().size(), other.size()), (0, (0, 0)));
}

/// Held by a test that listens to signals: a signal is one to the whole process.
#[cfg(unix)]
pub(super) static SIGNALS: Semaphore = Semaphore::const_new(1);

/// A signal to this process, which handles it: tests that do not listen do not notice.
#[cfg(unix)]
pub(super) fn terminate_this_process() {
    let kill = std::process::Command::new("sh").args(["-c", "kill -TERM $PPID"]).status();
    assert!(kill.expect("sh runs").success());
}

/// A waiter is rejected at once. A lock that is not released within the budget is revoked and
/// released before the end of the budget.
/// Guarantee: G2, G6.
#[cfg(unix)]
#[tokio::test]
async fn signal_starts_a_shutdown_within_its_budget() {
    let _signals = SIGNALS.acquire().await;
    let store = TestStore::new();
    let (locks, other) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    // The end of the budget is for the releases of revoked locks.
    store.on(StoreOp::Release).latency(Duration::from_millis(50));
    let ends = locks.lock(("n", 2)).await.expect("free");
    let hangs = locks.lock(("n", 1)).await.expect("free");
    let view = hangs.held_lock();
    let handler = tokio::spawn(async move { hangs.while_held(std::future::pending::<()>()).await });
    let mut shutdown = pin!(locks.shutdown_on_signal(Duration::from_secs(3)));
    assert!(poll!(shutdown.as_mut()).is_pending(), "no signal yet");
    let waits = tokio::spawn(locks.lock(("n", 1)).into_future());
    settle().await;
    assert!(!waits.is_finished() && !view.remaining().is_zero(), "nothing ends before the signal");

    terminate_this_process();
    let goes_on = async {
        assert!(matches!(waits.await.expect("no panic"), Err(LockError::ShuttingDown)));
        assert!(!view.remaining().is_zero(), "held sections have the whole budget");
        assert_eq!(ends.release().await.expect("up"), ReleaseOutcome::Released);
    };
    soon("the end of the budget", join(shutdown, goes_on)).await;
    let ended = soon("the end of the handler", handler).await;
    assert_eq!(ended.expect("no panic"), Err(LockLost::ShuttingDown));
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)), "no key waits for the end of a lease");
    let state = other.inspect(("n", 1)).await.expect("up");
    assert!(state.holder().is_none() && state.remaining <= Duration::from_secs(1), "only the lock-delay: {state:?}");
}

/// As in `docs/guide/without-http.md`: the server responds while the locks are shut down, and then
/// closes.
#[tokio::test]
async fn terminated_server_finishes_holders_and_rejects_the_rest() {
    let (store, locks) = store_and_locks();
    let (go_on, terminate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (works, stop) = (Arc::clone(&go_on), Arc::clone(&terminate));
    let handler = get(async move || {
        works.notified().await;
        "done"
    });
    let app =
        Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key()).wait(Duration::from_secs(60))));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let ending = locks.clone();
    let stop = async move {
        stop.notified().await;
        assert_eq!(ending.shutdown(Duration::from_secs(60)).await, 0);
    };
    let server = tokio::spawn(async move { axum::serve(listener, app).with_graceful_shutdown(stop).await });

    let send = async || {
        let mut wire = Http1::connect(address).await;
        wire.write("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
        wire
    };
    let mut holds = send().await;
    while store.held_count() == 0 {
        tokio::task::yield_now().await;
    }
    let mut waits = send().await;
    while locks.size().1 == 0 {
        tokio::task::yield_now().await;
    }
    terminate.notify_one();
    assert_eq!(waits.reply(false).await.status, 503, "waiters");
    assert_eq!(send().await.reply(false).await.status, 503, "new requests");
    go_on.notify_one();
    assert_eq!(holds.reply(false).await.status, 200, "holders");
    soon("the end of the server", server).await.expect("no panic").expect("no error");
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}
