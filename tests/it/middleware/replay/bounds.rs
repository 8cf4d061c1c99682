//! Bounds of answers, of records, and of requests that wait.

use std::time::Duration;

use axum::{
    body::Body,
    http::{Request, StatusCode},
};
use futures_util::future::join_all;
use tokio::time::sleep;
use tower_lock::test_util::StoreOp;
use tower_lock_testkit::{
    app::send,
    body::{ScriptedBody, Step},
    locks::store_and_locks,
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
        (Some(usize::MAX), 1 << 20, true),
        (Some(usize::MAX), (1 << 20) + 1, false),
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
    for (keep_for, expected) in [(None, DAY), (Some(Duration::MAX), 366 * DAY), (Some(DAY / 2), DAY / 2)] {
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
async fn ten_thousand_keys_leave_nothing_in_the_manager() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    let keys: Vec<_> = (0..10_000).map(|n| n.to_string()).collect();
    for (attempt, keys) in keys.chunks(1_000).cycle().take(20).enumerate() {
        let responses = join_all(keys.iter().map(|key| send(&app, request(key, "x")))).await;
        let replayed = responses.iter().filter(|response| is_replayed(response)).count();
        assert_eq!(replayed, if attempt < 10 { 0 } else { 1_000 });
    }
    settle().await;
    assert_eq!((runs(), store.held_count(), locks.size()), (10_000, 0, (0, 0)));
}
