//! Events about frequent mistakes in code that uses locks.

use std::{future::IntoFuture, pin::pin, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::DefaultBodyLimit,
    http::{Method, Request, StatusCode},
    routing::{MethodRouter, get, post},
};
use futures_util::FutureExt;
use tokio::{runtime::Builder, time::sleep};
use tower::ServiceExt;
use tower_lock::{
    HeldLock, Lease, LockKey, LockLayer, LockManager, MemoryStore, Owner, ReplayLayer, key,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    app::{fetch, post_json, send},
    locks::{one_key, store_and_locks},
    log::Log,
    wait::settle,
};

/// The number of lines with this text.
fn count(log: &Log, text: &str) -> usize {
    log.text().lines().filter(|line| line.contains(text)).count()
}

#[tokio::test(start_paused = true)]
async fn dropped_guard_leaves_a_debug_event() {
    let (_store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    let is_logged = || count(&log, "a guard was dropped, and not released");
    // Normal ends.
    let app = Router::new().route("/", get(async || "done").route_layer(LockLayer::new(&locks, one_key())));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    locks.lock(("account", "ann")).await.expect("free").release().await.expect("up");
    drop(locks.lock(("account", "ann")).await.expect("free").release());
    locks.lock(("account", "ann")).run(async |_| {}).await.expect("free");
    // Its key is blocked already, or it is lost.
    let lost = locks.lock(("lost",)).lease(Lease::Fixed(Duration::from_secs(1))).await.expect("free");
    lost.held_lock().lost().await;
    drop(lost);
    assert_eq!(is_logged(), 0, "{}", log.text());

    drop(locks.lock(("account", "ann")).await.expect("free"));
    assert_eq!(is_logged(), 1);
    assert!(log.text().contains("DEBUG") && log.text().contains("account:~") && !log.text().contains("ann"));
}

/// No release has a reply before the lease has ended.
/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn lost_record_leaves_one_warning_with_its_key_and_token() {
    let (store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    locks.once(("left", 1)).run(async |_| {}).await.expect("up");
    store.on(StoreOp::Release).fault(Fault::Fail);
    store.on(StoreOp::Renew).fault(Fault::Fail);
    let mut token = None;
    let run = locks.once(("pay", 7)).run(async |lock| token = Some(lock.fencing_token()));
    run.await.expect("it ran");
    let is_logged = || count(&log, "a record may be lost");
    sleep(Duration::from_secs(20)).await;
    assert_eq!(is_logged(), 0, "its release may reach the store");
    sleep(Duration::from_secs(600)).await;
    store.on(StoreOp::Release).fault(Fault::None);
    sleep(Duration::from_secs(600)).await;
    assert_eq!(is_logged(), 1, "{}", log.text());
    assert!(log.text().contains(&format!("fence={}\n", token.expect("it ran"))), "{}", log.text());
    assert_eq!(count(&log, "key=\"+once:~"), 2, "this warning, and one before it: {}", log.text());
}

/// Of a layer, and not of each request.
#[tokio::test(start_paused = true)]
async fn replay_layer_inside_of_a_lock_leaves_one_warning() {
    let (_store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    let (lock, replay) = (LockLayer::new(&locks, one_key()), ReplayLayer::new(&locks, key::fixed(("all",))));
    let is_logged = || count(&log, "a `ReplayLayer` is inside of a `LockLayer`");
    let inside = post(async || "done").route_layer(replay.clone()).route_layer(lock.clone());
    let outside = post(async || "done").route_layer(lock).route_layer(replay);
    let app = Router::new().route("/inside", inside).route("/outside", outside);
    for (path, logged) in [("/outside", 0), ("/inside", 1), ("/inside", 1)] {
        assert_eq!(post_json(&app, path, "1").await.status(), StatusCode::OK);
        assert_eq!(is_logged(), logged, "{path}: {}", log.text());
    }
    assert!(log.text().contains("route=\"/inside\""), "{}", log.text());
}

#[test]
fn replay_layer_with_a_short_lease_leaves_a_warning() {
    let log = Log::default();
    let _listening = log.listen();
    for (lease, logged) in [(5, 0), (4, 1)] {
        let store = TestStore::with_call_timeout(Duration::from_millis(500));
        let locks = LockManager::builder(store).lease(Duration::from_secs(lease)).build();
        let _ = ReplayLayer::new(&locks, key::fixed(("all",)));
        assert_eq!(count(&log, "Set a lease of at least 5s"), logged, "{lease}: {}", log.text());
    }
    let in_memory = LockManager::builder(MemoryStore::new()).lease(Duration::from_secs(2)).build();
    let _ = ReplayLayer::new(&in_memory, key::fixed(("all",)));
    assert_eq!(count(&log, "Set a lease"), 1, "its calls take no time");
}

#[tokio::test(start_paused = true)]
async fn each_rejection_leaves_an_event_with_its_reason() {
    let (_store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    let lock = LockLayer::new(&locks, one_key()).wait(Duration::from_secs(1));
    let replay = ReplayLayer::new(&locks, key::from_parts(|_| None::<LockKey>)).required();
    let everyone = ReplayLayer::new(&locks, key::fixed(("all",)));
    let app = Router::new()
        .route("/large", post(async || "done").route_layer(lock).layer(DefaultBodyLimit::max(2)))
        .route("/nobody", post(async || "done").route_layer(replay))
        .route("/everyone", post(async || "done").route_layer(everyone));
    assert_eq!(post_json(&app, "/large", "123").await.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(count(&log, "`request_body(RequestBodyMode::Stream)`"), 1, "{}", log.text());
    let post = async |path, body: &'static str| {
        let request = Request::post(path).header("idempotency-key", "\"a\"").body(Body::from(body));
        send(&app, request.expect("a request")).await.status()
    };
    assert_eq!(post("/nobody", "1").await, StatusCode::BAD_REQUEST);
    assert_eq!(count(&log, "the scope of the `ReplayLayer` returned `None`"), 1, "{}", log.text());
    assert_eq!(post("/everyone", "1").await, StatusCode::OK);
    assert_eq!(post("/everyone", "2").await, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(count(&log, "request rejected: Idempotency key"), 1, "{}", log.text());
}

/// One event is of the lock, and one of the request: that is in the span with its route.
#[tokio::test(start_paused = true)]
async fn events_of_a_loss_name_key_route_and_token() {
    let (_store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    let layer = LockLayer::new(&locks, key::from_parts(|_| ("account", "ann"))).max_hold(Duration::from_secs(1));
    let handler = async |lock: HeldLock| {
        lock.lost().await;
        sleep(Duration::from_secs(1)).await;
    };
    let app = Router::new().route("/pay", get(handler).route_layer(layer));
    assert_eq!(fetch(&app, "/pay").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    // Logged by another thread, for which the paused clock waits.
    sleep(Duration::from_millis(1)).await;
    let log = log.text();
    let line = |text| log.lines().find(|line| line.contains(text)).expect(text);
    let of_lock = line("a lock is lost");
    assert!(of_lock.contains("key=\"account:~") && of_lock.contains("fence=1"), "{of_lock}");
    let of_request = line("request aborted");
    for field in ["route=\"/pay\"", "key=\"account:ann\"", "fence=1"] {
        assert!(of_request.contains(field), "{field}: {of_request}");
    }
}

#[tokio::test(start_paused = true)]
async fn call_that_is_dropped_unpolled_leaves_a_debug_event() {
    let (_store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    let is_logged = || count(&log, "dropped before it was awaited: nothing was locked");
    let guard = locks.lock(("a",)).await.expect("free");
    {
        let mut polled = pin!(locks.lock(("a",)).into_future());
        assert!(futures_util::poll!(&mut polled).is_pending());
    }
    drop(guard.release());
    locks.once(("a",)).run(async |_| {}).await.expect("free");
    locks.once(("a",)).inspect().await.expect("up");
    locks.once(("a",)).forget().await.expect("up");
    settle().await;
    assert_eq!(is_logged(), 0, "{}", log.text());

    drop(locks.lock(("account", "ann")));
    assert_eq!(is_logged(), 1);
    drop(locks.try_lock(("account", "ann")).into_future());
    assert_eq!(is_logged(), 2);
    drop(locks.once(("account", "ann")));
    assert_eq!(is_logged(), 3);
    assert!(log.text().contains("account:~") && !log.text().contains("ann"), "{}", log.text());
}

/// A runtime of its own for each try: another test may have created a manager in between.
#[test]
fn second_manager_in_memory_leaves_one_warning() {
    const TEXT: &str = "a second `LockManager` in memory";
    let warnings = |work: fn()| {
        let log = Log::default();
        let _listening = log.listen();
        Builder::new_current_thread().build().expect("a runtime").block_on(async { work() });
        assert!(log.text().is_empty() || log.text().contains("WARN"), "{}", log.text());
        count(&log, TEXT)
    };
    // As tests do.
    let one_each = || std::mem::forget(LockManager::in_memory());
    // Of five, one of another test in between would make two pairs.
    let several = || drop([(); 3].map(|()| LockManager::in_memory()));
    let others = || drop((LockManager::in_memory(), LockManager::new(MemoryStore::new())));
    let clones = || {
        let locks = LockManager::in_memory();
        drop([locks.clone(), locks]);
    };
    let replaced = || {
        drop(LockManager::in_memory());
        drop(LockManager::in_memory());
    };
    for work in [one_each, others, clones, replaced] {
        assert_eq!((0..20).map(|_| warnings(work)).sum::<usize>(), 0);
    }
    // With a shared store they would exclude each other.
    let connected = || {
        let connect = || LockManager::connect("memory:").now_or_never().expect("ready").expect("a store").build();
        drop([LockManager::in_memory(), connect(), connect()]);
    };
    for work in [several, connected] {
        let seen: Vec<_> = (0..100).map(|_| warnings(work)).collect();
        assert!(seen.contains(&1) && seen.iter().all(|count| *count <= 1), "{seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn key_function_without_keys_leaves_one_warning() {
    let (_store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    let is_logged = || count(&log, "a key function has returned `None` for 100 requests in a row");
    let key = key::from_fn(|method: Method| async move { (method == Method::PUT).then_some(("order",)) });
    let handler = MethodRouter::new().get(async || "done").put(async || "done");
    let app = Router::new().route("/orders", handler.route_layer(LockLayer::new(&locks, key)));
    let send = async |method: Method, times: usize| {
        for _ in 0..times {
            let request = Request::builder().method(&method).uri("/orders").body(Body::empty()).expect("a request");
            assert_eq!(app.clone().oneshot(request).await.expect("infallible").status(), StatusCode::OK);
        }
    };
    for _ in 0..3 {
        send(Method::GET, 99).await;
        send(Method::PUT, 1).await;
    }
    assert_eq!(is_logged(), 0, "{}", log.text());
    send(Method::GET, 350).await;
    send(Method::PUT, 1).await;
    send(Method::GET, 150).await;
    assert_eq!(is_logged(), 1);
    assert!(log.text().contains("WARN") && log.text().contains("route=\"/orders\""), "{}", log.text());
}

const BOTH_ORDERS: &str = "are acquired in both orders";

/// Handlers that acquire a second key under the lock of their layer.
fn nested(locks: &LockManager, path: &str, [outer, inner]: [(&'static str, u64); 2], wait: Duration) -> Router {
    let here = locks.clone();
    let handler = async move || match here.lock(inner).wait(wait).await {
        Ok(guard) => drop(guard.release()),
        Err(error) => panic!("{error}"),
    };
    Router::new().route(path, get(handler).route_layer(LockLayer::new(locks, key::fixed(outer))))
}

#[tokio::test(start_paused = true)]
async fn keys_acquired_in_both_orders_are_reported_once() {
    const WAIT: Duration = Duration::from_secs(1);
    let (a, b) = (("account", 7), ("order", 1));
    for (first, second, reports) in [
        ([a, b], [b, a], 1),
        // Consistent, whichever comes first in the alphabet.
        ([b, a], [b, a], 0),
        ([a, b], [a, b], 0),
        // Of one namespace, the texts decide.
        ([("account", 1), ("account", 2)], [("account", 4), ("account", 3)], 1),
        ([("account", 9), ("account", 8)], [("account", 4), ("account", 3)], 0),
        ([a, a], [b, b], 0),
    ] {
        let (_store, locks) = store_and_locks();
        let log = Log::default();
        let _listening = log.listen();
        let app = nested(&locks, "/first", first, WAIT).merge(nested(&locks, "/second", second, WAIT));
        for path in ["/first", "/second", "/first", "/second"] {
            assert_eq!(fetch(&app, path).await.status(), StatusCode::OK);
        }
        assert_eq!(count(&log, BOTH_ORDERS), reports, "{first:?} {second:?}: {}", log.text());
        let names = ["WARN", "/first", "/second", "account", "`lock_all`"];
        assert!(reports == 0 || names.iter().all(|name| log.text().contains(name)), "{}", log.text());
    }
}

#[tokio::test(start_paused = true)]
async fn orders_that_cannot_deadlock_are_not_reported() {
    let (_store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    let (a, b) = (("a", 1), ("b", 1));
    // Calls that do not wait.
    let app = nested(&locks, "/1", [a, b], Duration::ZERO).merge(nested(&locks, "/2", [b, a], Duration::ZERO));
    for path in ["/1", "/2"] {
        assert_eq!(fetch(&app, path).await.status(), StatusCode::OK);
    }
    // One after the other, by one owner and by two.
    let owner = Owner::new();
    for keys in [[a, b], [b, a]] {
        for key in keys {
            locks.lock(key).owner(&owner).await.expect("free").release().await.expect("up");
        }
        let guards = [locks.lock(keys[0]).await.expect("free"), locks.lock(keys[1]).await.expect("free")];
        guards.into_iter().for_each(|guard| drop(guard.release()));
        settle().await;
    }
    // Together, in any order.
    for keys in [[a, b], [b, a]] {
        locks.lock_all(keys).owner(&owner).await.expect("free").release().await.expect("up");
    }
    assert_eq!(count(&log, BOTH_ORDERS), 0, "{}", log.text());
}

#[tokio::test(start_paused = true)]
async fn single_locks_against_the_order_of_several_are_reported() {
    let (_store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    let owner = Owner::new();
    let hold = async |first: (&'static str, u64), second: (&'static str, u64)| {
        let outer = locks.lock(first).owner(&owner).await.expect("free");
        let inner = locks.lock(second).owner(&owner).await.expect("free");
        [outer, inner].into_iter().for_each(|guard| drop(guard.release()));
        settle().await;
    };
    locks
        .lock_all([("c", 1), ("a", 1), ("b", 1), ("b", 2)])
        .owner(&owner)
        .await
        .expect("free")
        .release()
        .await
        .expect("up");
    for (first, second) in [(("a", 5), ("c", 5)), (("a", 1), ("b", 9)), (("b", 1), ("b", 2))] {
        hold(first, second).await;
    }
    assert_eq!(count(&log, BOTH_ORDERS), 0, "{}", log.text());
    for (first, second) in [(("c", 5), ("a", 5)), (("b", 1), ("a", 9)), (("b", 2), ("b", 1))] {
        let before = count(&log, BOTH_ORDERS);
        hold(first, second).await;
        assert_eq!(count(&log, BOTH_ORDERS), before + 1, "{first:?} {second:?}: {}", log.text());
    }
    // The number of pairs is bounded.
    for number in 0..300_u64 {
        let name: &'static str = Box::leak(format!("n{number}").into_boxed_str());
        hold(("z", 1), (name, 1)).await;
        hold((name, 1), ("z", 1)).await;
    }
    assert_eq!(count(&log, BOTH_ORDERS), 256 - 1, "one of the four pairs of the first call has one order");
}
