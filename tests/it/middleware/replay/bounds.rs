//! Bounds of answers, of records, and of requests that wait.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, Request, StatusCode, header::LOCATION},
};
use futures_util::future::join_all;
use tokio::time::sleep;
use tower_lock::{
    LockKey, LockManager, MemoryStore, ReplayLayer,
    key::{self, KeySource},
    store::{AcquireRequest, AcquisitionIds, IfBusy, QueueConfig, Record, ReleaseRequest},
    test_util::StoreOp,
};
use tower_lock_testkit::{
    app::send,
    body::{ScriptedBody, Step},
    locks::store_and_locks,
    store::StoreExt,
    wait::settle,
};

use super::{app, created, is_replayed, layer, problem, request, run_of, spawn};

const DAY: Duration = Duration::from_secs(86_400);

#[tokio::test(start_paused = true)]
async fn header_bytes_of_an_answer_are_bounded() {
    // With the lengths of name and value, and `content-type`.
    let rest = (16 << 10) - (8 + "x-long".len()) - (8 + "content-type".len() + "text/plain; charset=utf-8".len());
    for (bytes, is_kept) in [(rest, true), (rest + 1, false)] {
        let (_store, locks) = store_and_locks();
        let (app, runs) = app(layer(&locks), move |_| ([("x-long", "x".repeat(bytes))], "run 1"));
        assert_eq!(send(&app, request("a", "x")).await.headers()["x-long"].len(), bytes);
        let retry = send(&app, request("a", "x")).await;
        if is_kept {
            assert_eq!((is_replayed(&retry), retry.headers()["x-long"].len()), (true, bytes));
        } else {
            problem(retry, 409, "answer-not-kept").await;
        }
        assert_eq!(runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn body_bytes_of_an_answer_are_bounded() {
    for (keep_up_to, bytes, is_kept) in [
        (None, 64 << 10, true),
        (None, (64 << 10) + 1, false),
        (Some(10), 10, true),
        (Some(10), 11, false),
        (Some(0), 0, true),
        (Some(0), 1, false),
        (Some(1 << 20), 1 << 20, true),
        (Some(1 << 20), (1 << 20) + 1, false),
    ] {
        let (_store, locks) = store_and_locks();
        let layer = keep_up_to.map_or_else(|| layer(&locks), |bytes| layer(&locks).keep_up_to(bytes));
        let (app, runs) = app(layer, move |_| vec![b'x'; bytes]);
        send(&app, request("a", "x")).await;
        let retry = send(&app, request("a", "x")).await;
        assert_eq!(is_replayed(&retry), is_kept, "{keep_up_to:?} {bytes}");
        assert_eq!((retry.status() == StatusCode::CONFLICT, runs()), (!is_kept, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn time_for_which_an_answer_is_kept_is_bounded() {
    for (keep_for, expected) in [(None, DAY), (Some(366 * DAY), 366 * DAY), (Some(DAY / 2), DAY / 2)] {
        let (_store, locks) = store_and_locks();
        let layer = keep_for.map_or_else(|| layer(&locks), |time| layer(&locks).keep_for(time));
        let (app, _) = app(layer, created);
        send(&app, request("a", "x")).await;
        sleep(expected - Duration::from_secs(60)).await;
        assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, true), "{keep_for:?}");
        sleep(Duration::from_secs(61)).await;
        assert_eq!(run_of(send(&app, request("a", "x")).await).await, (2, false), "{keep_for:?}: no sliding expiry");
    }
}

#[tokio::test]
#[should_panic(expected = "`keep_for(0ns)` cannot be set: it must be from 1s to")]
async fn answer_that_is_not_kept_at_all_is_refused() {
    let _ = layer(&LockManager::in_memory()).keep_for(Duration::ZERO);
}

#[tokio::test]
#[should_panic(expected = "`keep_up_to(1048577)` cannot be set: at most 1048576 bytes are kept")]
async fn limit_beyond_that_of_the_stores_is_refused() {
    let _ = layer(&LockManager::in_memory()).keep_up_to((1 << 20) + 1);
}

#[tokio::test(start_paused = true)]
async fn slow_request_body_holds_nothing() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    let body = Body::new(ScriptedBody::new([Step::Text("x"), Step::Stall]));
    let slow = Request::post("/").header("idempotency-key", "a").body(body).expect("a request");
    let slow = spawn(&app, slow);
    settle().await;
    assert_eq!((store.held_count(), store.on(StoreOp::Acquire).calls(), locks.size()), (0, 0, (0, 0)));
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false), "not delayed");
    problem(slow.await.expect("no panic"), 408, "body-timeout").await;
    assert_eq!(runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn many_keys_leave_nothing_in_the_manager() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    let keys: Vec<_> = (0..2_000).map(|n| n.to_string()).collect();
    for (attempt, keys) in keys.chunks(200).cycle().take(20).enumerate() {
        let responses = join_all(keys.iter().map(|key| send(&app, request(key, "x")))).await;
        let replayed = responses.iter().filter(|response| is_replayed(response)).count();
        assert_eq!(replayed, if attempt < 10 { 0 } else { 200 });
    }
    settle().await;
    assert_eq!((runs(), store.held_count(), locks.size()), (2_000, 0, (0, 0)));
}

/// The scope of each request is its header `x-user`.
fn by_user(locks: &LockManager) -> ReplayLayer<impl KeySource + use<>> {
    ReplayLayer::new(locks, key::from_fields("user", key::header("x-user")))
}

fn of(user: &'static str, key: &str) -> Request<Body> {
    let mut request = request(key, "x");
    request.headers_mut().insert("x-user", HeaderValue::from_static(user));
    request
}

/// A client with many answers gets no new ones, and takes nothing from another one.
/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn answers_of_one_scope_are_bounded() {
    let (_store, locks) = store_and_locks();
    let layer = by_user(&locks).keep_for(DAY).scope_limits(3, 250);
    // Some 110 bytes each: two headers, and the body.
    let (app, runs) = app(layer, |_| ([(LOCATION, "1234567890".repeat(4))], "ten bytes."));
    let before = send(&app, of("ann", "a")).await;
    assert_eq!(before.status(), StatusCode::OK);
    for key in ["1", "2", "3"] {
        assert_eq!(send(&app, of("mallory", key)).await.status(), StatusCode::OK);
    }
    assert_eq!(runs(), 4);
    let problem_of_new = problem(send(&app, of("mallory", "4")).await, 429, "too-many-answers").await;
    assert_eq!((&problem_of_new["outcome"], runs()), (&"not-started".into(), 4));
    // Within its bytes the first two answers have their bodies.
    for (key, is_kept) in [("1", true), ("2", true), ("3", false)] {
        let retry = send(&app, of("mallory", key)).await;
        assert_eq!(is_replayed(&retry), is_kept, "{key}");
        if !is_kept {
            assert!(!retry.headers().contains_key(LOCATION), "no header is kept, either");
            problem(retry, 409, "answer-not-kept").await;
        }
    }
    assert!(is_replayed(&send(&app, of("ann", "a")).await));
    assert_eq!(send(&app, of("ann", "b")).await.status(), StatusCode::OK);
    sleep(2 * DAY).await;
    assert_eq!(send(&app, of("mallory", "4")).await.status(), StatusCode::OK, "the others have expired");
}

/// A record of the store in memory is not dropped for a newer one: its work would run again.
/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn full_store_in_memory_keeps_its_records() {
    let memory = Arc::new(MemoryStore::new());
    let locks = LockManager::new(Arc::clone(&memory));
    let (app, runs) = app(by_user(&locks), created);
    assert_eq!(run_of(send(&app, of("ann", "a")).await).await, (1, false));
    let ids = AcquisitionIds::new("flood", 1);
    let queue = QueueConfig::new(DAY, DAY, 10);
    for n in 0..99_990 {
        let (key, id) = (LockKey::from(("flood", n)), ids.next());
        let acquire = AcquireRequest::new(key.clone(), id.clone(), DAY, IfBusy::Fail, queue, DAY);
        drop(memory.acquire_one(acquire).await);
        let release = ReleaseRequest::new(key, id, Duration::ZERO, queue).record(Record::new("head", None), DAY);
        memory.release_one(release).await.expect("up");
    }
    let problem = problem(send(&app, of("mallory", "new")).await, 503, "store-unavailable").await;
    assert_eq!((&problem["outcome"], runs()), (&"not-started".into(), 1));
    assert_eq!(run_of(send(&app, of("ann", "a")).await).await, (1, true));
    assert!(locks.try_lock(("any",)).await.is_ok(), "locks need no record");
    sleep(DAY).await;
    assert_eq!(run_of(send(&app, of("mallory", "new")).await).await, (2, false));
}
