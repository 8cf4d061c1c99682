//! Events about frequent mistakes in code that uses locks.

use std::{future::IntoFuture, pin::pin, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{Method, Request, StatusCode},
    routing::{MethodRouter, get},
};
use tokio::runtime::Builder;
use tower::ServiceExt;
use tower_lock::{Lease, LockLayer, LockManager, MemoryStore, key};
use tower_lock_testkit::{
    app::fetch,
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
    const TEXT: &str = "a second `LockManager::in_memory`";
    let warnings = |work: fn()| {
        let log = Log::default();
        let _listening = log.listen();
        Builder::new_current_thread().build().expect("a runtime").block_on(async { work() });
        assert!(log.text().is_empty() || log.text().contains("WARN"), "{}", log.text());
        count(&log, TEXT)
    };
    // As tests do.
    let one_each = || std::mem::forget(LockManager::in_memory());
    let several = || drop([(); 5].map(|()| LockManager::in_memory()));
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
    let seen: Vec<_> = (0..100).map(|_| warnings(several)).collect();
    assert!(seen.contains(&1) && seen.iter().all(|count| *count <= 1), "{seen:?}");
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
