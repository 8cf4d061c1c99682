//! A rejected client learns the reason, the outcome of its request, and when to retry.

use std::{error::Error, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    http::{Response, StatusCode, header},
    response::IntoResponse,
    routing::{get, post},
};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tower_lock::{
    LockError, LockLayer, LockLost, LockManager, Rejection, key, lock::QueueBound, store::StoreErrorKind,
    test_util::Fault,
};
use tower_lock_testkit::{
    app::{fetch, post_json, problem_type, text},
    locks::{one_key, store_and_locks},
    wait::settle,
};

async fn problem(response: Response<Body>) -> Value {
    assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
    assert_eq!(response.headers()[header::CACHE_CONTROL], "no-store");
    let status = response.status().as_u16();
    let text = text(response).await;
    let problem: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(problem["status"], status, "as in the head");
    assert_eq!(problem["outcome"], "not-started");
    assert!(problem["title"].is_string() && problem["detail"].is_string(), "{problem}");
    problem
}

fn retry_after_s(response: &Response<Body>) -> u64 {
    response.headers()[header::RETRY_AFTER].to_str().expect("digits").parse().expect("whole seconds")
}

fn app(layer: LockLayer<impl tower_lock::key::KeySource>) -> Router {
    Router::new().route("/", get(|| async { "ran" }).route_layer(layer))
}

/// Guarantee: G9.
#[tokio::test(start_paused = true)]
async fn busy_key_is_a_409_problem_with_retry_after() {
    let locks = LockManager::in_memory();
    let app = app(LockLayer::new(&locks, one_key()));
    let _held = locks.try_lock(("k",)).await.expect("free");
    let response = fetch(&app, "/").await;
    assert_eq!(response.status(), StatusCode::CONFLICT);
    assert!((1..=5).contains(&retry_after_s(&response)));
    let Some(Rejection::Busy { retry_after }) = response.extensions().get().cloned() else { panic!("not typed") };
    let problem = problem(response).await;
    assert_eq!(problem["type"], problem_type("locked"));
    assert_eq!(problem["retry_after_ms"], json!(u64::try_from(retry_after.as_millis()).expect("small")));
    let fields: Vec<_> = problem.as_object().expect("an object").keys().collect();
    assert_eq!(fields, ["detail", "outcome", "retry_after_ms", "status", "title", "type"], "no key, no owner");
}

/// A route that holds for 40 ms does not send its clients away for 30 seconds.
#[tokio::test(start_paused = true)]
async fn retry_after_follows_the_hold_estimate_of_the_route() {
    let locks = LockManager::in_memory();
    let hold = Duration::from_millis(40);
    let app =
        Router::new().route("/", get(move || tokio::time::sleep(hold)).route_layer(LockLayer::new(&locks, one_key())));
    fetch(&app, "/").await;
    let _held = locks.try_lock(("k",)).await.expect("free");
    let response = fetch(&app, "/").await;
    assert_eq!(retry_after_s(&response), 1, "whole seconds, at least one");
    let ms = problem(response).await["retry_after_ms"].as_u64().expect("a number");
    assert!((32..=49).contains(&ms), "{ms}: 40 ms, spread by a fifth");
}

/// Its handler runs on in this process: its end is unknown.
#[tokio::test(start_paused = true)]
async fn holder_past_its_lease_is_overdue() {
    let locks = LockManager::in_memory();
    let app = app(LockLayer::new(&locks, one_key()));
    let _held = locks.try_lock(("k",)).await.expect("free");
    tokio::time::sleep(Duration::from_secs(31)).await;
    let response = fetch(&app, "/").await;
    assert_eq!(response.status(), StatusCode::CONFLICT);
    let ms = problem(response).await["retry_after_ms"].as_u64().expect("a number");
    assert!(ms >= 800, "{ms}: the usual hold of a route that has measured none is a second");
}

/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn wait_timeout_is_a_409() {
    let locks = LockManager::in_memory();
    let app = app(LockLayer::new(&locks, one_key()).wait(Duration::from_secs(2)));
    let _held = locks.try_lock(("k",)).await.expect("free");
    let response = fetch(&app, "/").await;
    assert_eq!(response.status(), StatusCode::CONFLICT);
    assert!(retry_after_s(&response) >= 1);
    let rejection = response.extensions().get::<Rejection>().cloned();
    assert!(matches!(rejection, Some(Rejection::TimedOut { waited, .. }) if waited.as_secs() == 2), "{rejection:?}");
    assert_eq!(problem(response).await["type"], problem_type("timed-out"));
}

#[tokio::test(start_paused = true)]
async fn wait_timeout_has_the_status_of_the_route() {
    let locks = LockManager::in_memory();
    let _held = locks.try_lock(("k",)).await.expect("free");
    for (status, code) in [
        (StatusCode::CONFLICT, 409),
        (StatusCode::LOCKED, 423),
        (StatusCode::TOO_MANY_REQUESTS, 429),
        (StatusCode::SERVICE_UNAVAILABLE, 503),
    ] {
        let layer = LockLayer::new(&locks, one_key()).wait_timeout_status(status);
        let refused = fetch(&app(layer.clone()), "/").await;
        assert_eq!(refused.status(), 409, "no wait, no timeout");
        let response = fetch(&app(layer.wait(Duration::from_secs(1))), "/").await;
        assert!(response.status() == code && retry_after_s(&response) >= 1, "{status:?}");
        assert_eq!(problem(response).await["type"], problem_type("timed-out"));
    }
}

/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn full_queue_is_a_503() {
    let (store, locks) = store_and_locks();
    let go_on = Arc::new(Notify::new());
    let notified = Arc::clone(&go_on);
    let handler = get(move || async move { notified.notified().await });
    let app = Router::new()
        .route("/", handler.route_layer(LockLayer::new(&locks, one_key()).wait(Duration::from_secs(1000))));
    let mut queued = Vec::new();
    for _ in 0..257 {
        let app = app.clone();
        queued.push(tokio::spawn(async move { fetch(&app, "/").await.status() }));
    }
    settle().await;
    let response = fetch(&app, "/").await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "one runs, 256 wait");
    assert!(retry_after_s(&response) >= 1);
    assert!(matches!(response.extensions().get(), Some(Rejection::QueueFull { bound: QueueBound::Key, .. })));
    assert_eq!(problem(response).await["type"], problem_type("queue-full"));

    // A cancelled waiter frees its queue entry at once.
    queued.pop().expect("the last waiter").abort();
    settle().await;
    let again = {
        let app = app.clone();
        tokio::spawn(async move { fetch(&app, "/").await.status() })
    };
    settle().await;
    queued.push(again);
    for _ in 0..257 {
        go_on.notify_one();
        settle().await;
    }
    for request in queued {
        assert_eq!(request.await.expect("no panic"), StatusCode::OK);
    }
    assert_eq!(store.held_count(), 0);
}

/// Guarantee: G9.
#[tokio::test(start_paused = true)]
async fn unavailable_store_is_a_503_without_a_handler_run() {
    let (store, locks) = store_and_locks();
    let app = app(LockLayer::new(&locks, one_key()).wait(Duration::from_secs(60)));
    // The estimate of the route does not apply to a store failure.
    for _ in 0..20 {
        fetch(&app, "/").await;
    }
    store.fault_all(Fault::Fail);
    let response = fetch(&app, "/").await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(retry_after_s(&response) >= 1);
    let Some(Rejection::StoreUnavailable { retry_after, .. }) = response.extensions().get() else {
        panic!("not typed")
    };
    assert!(*retry_after >= Duration::from_secs(1), "{retry_after:?}");
    let Some(Rejection::StoreUnavailable { source, .. }) = response.extensions().get() else { panic!("not typed") };
    assert_eq!((source.store(), source.operation(), source.kind()), ("test", "acquire", StoreErrorKind::Unavailable));
    assert_eq!(source.source().expect("kept").to_string(), "fault injected by the test");
    assert_eq!(problem(response).await["type"], problem_type("store-unavailable"));

    store.fault_all(Fault::None);
    assert_eq!(text(fetch(&app, "/").await).await, "ran", "it recovers without a restart");
}

#[tokio::test(start_paused = true)]
async fn every_rejection_can_be_replaced_and_stays_typed() {
    let (store, locks) = store_and_locks();
    let layer =
        LockLayer::new(&locks, key::from_fn(|_: axum::body::Bytes| ("k",))).on_reject(|rejection| match rejection {
            Rejection::Busy { .. } => {
                (StatusCode::LOCKED, [("x-mine", "1")], Json(json!({ "busy": true }))).into_response()
            }
            other => other.clone().into_response(),
        });
    let app = Router::new()
        .route("/", post(|| async { "ran" }).route_layer(layer))
        .layer(axum::extract::DefaultBodyLimit::max(10));
    let held = locks.try_lock(("k",)).await.expect("free");
    let response = post_json(&app, "/", "{}").await;
    assert_eq!(
        (response.status(), &response.headers()["x-mine"]),
        (StatusCode::LOCKED, &"1".parse().expect("a value"))
    );
    assert!(matches!(response.extensions().get(), Some(Rejection::Busy { .. })));
    assert_eq!(text(response).await, r#"{"busy":true}"#);

    let response = post_json(&app, "/", "01234567890").await;
    assert!(matches!(response.extensions().get(), Some(Rejection::BodyTooLarge)));
    assert!(!response.headers().contains_key(header::RETRY_AFTER), "no retry can succeed");
    let problem = problem(response).await;
    assert_eq!((&problem["type"], &problem["status"]), (&json!(problem_type("body-too-large")), &json!(413)));
    assert_eq!(problem.get("retry_after_ms"), None);
    held.release().await.expect("the store is up");
    assert_eq!(store.held_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn errors_describe_the_problem_and_keep_their_source() {
    let (store, locks) = store_and_locks();
    let held = locks.try_lock(("k",)).await.expect("free");
    let error = locks.try_lock(("k",)).await.expect_err("held");
    let text = error.to_string();
    assert!(
        text.starts_with(
            "the lock is held by another owner, or by as many as the call allows, or its key is blocked (29."
        ),
        "{text}"
    );
    held.release().await.expect("the store is up");
    store.fault_all(Fault::Fail);
    let error: LockError = locks.try_lock(("k",)).await.expect_err("down");
    assert_eq!(error.to_string(), "the test store cannot be reached to acquire a lock", "the reason");
    assert_eq!(error.source().expect("kept").to_string(), "fault injected by the test", "no text twice");
    let lost = LockLost::Revoked.to_string();
    assert_eq!(lost, "the lock was lost: it was revoked, or the store has lost its data");
    store.fault_all(Fault::None);
    let release = locks.lock(("k",)).await.expect("free").release();
    assert_eq!(format!("{release:?}"), "ReleaseFuture { outcome: Ok(Released), .. }");
    release.await.expect("the store is up");
}
