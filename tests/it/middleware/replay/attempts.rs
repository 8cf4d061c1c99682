//! Attempts that overlap, and clients that disconnect.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    body::Body,
    http::{Request, StatusCode},
};
use futures_util::stream;
use tokio::time::{Instant, sleep};
use tower_lock::{
    LockPolicy,
    test_util::{StoreOp, TestStore},
};
use tower_lock_testkit::{
    app::send,
    body::{ScriptedBody, Step},
    locks::store_and_locks,
    wait::{ms, settle},
};

use super::{app, created, is_replayed, layer, problem, request, run_of, spawn};

const S: Duration = Duration::from_secs(1);

fn calls(store: &TestStore) -> [usize; 4] {
    [StoreOp::Acquire, StoreOp::Release, StoreOp::Yield, StoreOp::Renew].map(|op| store.on(op).calls())
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn rejected_duplicate_does_not_free_the_key_of_the_first() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    let first = spawn(&app, request("a", "x"));
    settle().await;
    for _ in 0..3 {
        let response = send(&app, request("a", "x")).await;
        let retry_after: u64 = response.headers()["retry-after"].to_str().expect("text").parse().expect("seconds");
        assert!((1..=5).contains(&retry_after));
        let problem = problem(response, 409, "in-flight").await;
        assert_eq!(problem["outcome"], "not-started");
        assert!(problem["retry_after_ms"].is_u64(), "{problem}");
    }
    assert_eq!((calls(&store), store.held_count()), ([1, 0, 0, 0], 1), "no call for a rejected duplicate");
    assert_eq!(run_of(first.await.expect("no panic")).await, (1, false));
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, true));
    assert_eq!(runs(), 1);
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn hundred_waiting_duplicates_cost_no_call() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks).wait(10 * S), created);
    let all: Vec<_> = (0..101).map(|_| spawn(&app, request("a", "x"))).collect();
    let mut replayed = 0;
    for response in all {
        let response = response.await.expect("no panic");
        assert_eq!(response.status(), StatusCode::CREATED);
        let (run, is_replayed) = run_of(response).await;
        assert_eq!(run, 1);
        replayed += usize::from(is_replayed);
    }
    assert_eq!((replayed, runs()), (100, 1));
    assert_eq!((calls(&store), store.held_count(), locks.size()), ([1, 1, 0, 0], 0, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn waiting_duplicate_with_another_body_is_rejected() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks).wait(10 * S), created);
    let first = spawn(&app, request("a", "x"));
    settle().await;
    problem(send(&app, request("a", "y")).await, 422, "idempotency-key-reused").await;
    assert_eq!(run_of(first.await.expect("no panic")).await, (1, false));
    assert_eq!(runs(), 1);
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn one_waiting_duplicate_runs_after_a_failure() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks).wait(10 * S), |run| {
        (if run == 1 { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::OK }, format!("run {run}"))
    });
    let first = spawn(&app, request("a", "x"));
    settle().await;
    let others: Vec<_> = (0..20).map(|_| spawn(&app, request("a", "x"))).collect();
    assert_eq!(first.await.expect("no panic").status(), StatusCode::INTERNAL_SERVER_ERROR);
    let mut ran = 0;
    for response in others {
        let (run, is_replayed) = run_of(response.await.expect("no panic")).await;
        assert_eq!(run, 2);
        ran += usize::from(!is_replayed);
    }
    assert_eq!((ran, runs(), store.held_count()), (1, 2, 0));
}

#[tokio::test(start_paused = true)]
async fn wait_that_times_out_is_in_flight() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks).wait(ms(30)), created);
    let first = spawn(&app, request("a", "x"));
    settle().await;
    let began = Instant::now();
    let response = send(&app, request("a", "x")).await;
    assert!((ms(30)..ms(60)).contains(&began.elapsed()));
    assert!(response.headers().contains_key("retry-after"));
    problem(response, 409, "in-flight").await;
    assert_eq!(run_of(first.await.expect("no panic")).await, (1, false));
    assert_eq!((run_of(send(&app, request("a", "x")).await).await, runs()), ((1, true), 1));
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn client_disconnects_and_its_retry_gets_the_answer() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    let first = spawn(&app, request("a", "x"));
    sleep(ms(50)).await;
    first.abort();
    settle().await;
    problem(send(&app, request("a", "x")).await, 409, "in-flight").await;
    sleep(ms(100)).await;
    assert_eq!((runs(), store.held_count()), (1, 0));
    let retry = send(&app, request("a", "x")).await;
    assert_eq!(retry.headers()["location"], "/runs/1");
    assert_eq!(run_of(retry).await, (1, true));
}

/// The response is read to its end without a client.
/// Guarantee: G4, G18.
#[tokio::test(start_paused = true)]
async fn client_disconnects_before_a_stream_and_it_runs_once() {
    let (store, locks) = store_and_locks();
    let late = |rest: &'static [Step]| {
        let pauses = std::iter::repeat_n(Step::Pause, 200);
        ScriptedBody::new(
            [Step::Text("run 1")].into_iter().chain(pauses).chain(rest.iter().copied()).collect::<VecDeque<_>>(),
        )
    };
    // Before the handler has returned.
    let (stream, runs) = app(layer(&locks), move |_| Body::new(late(&[Step::Text("more")])));
    let first = spawn(&stream, request("a", "x"));
    sleep(ms(50)).await;
    first.abort();
    sleep(5 * S).await;
    problem(send(&stream, request("a", "x")).await, 409, "answer-not-kept").await;
    assert_eq!((runs(), store.held_count()), (1, 0));
    // While the end of a body whose bytes are ready is awaited.
    let (complete, runs) = app(layer(&locks), move |_| Body::new(late(&[]).announce(5)));
    let first = spawn(&complete, request("b", "x"));
    sleep(ms(150)).await;
    first.abort();
    sleep(5 * S).await;
    assert_eq!(run_of(send(&complete, request("b", "x")).await).await, (1, true));
    assert_eq!((runs(), store.held_count()), (1, 0));
}

/// Nobody reads it: no more is read than would be kept, or for longer than a reader may be idle.
/// Guarantee: G4, G18.
#[tokio::test(start_paused = true)]
async fn endless_stream_without_its_client_is_not_read_on() {
    for (bytes, pause, most) in [(1 << 17, ms(1), 10), (1, S, 60)] {
        let (store, locks) = store_and_locks();
        let frames = Arc::<AtomicUsize>::default();
        let of_body = Arc::clone(&frames);
        let (app, runs) = app(layer(&locks), move |_| {
            Body::from_stream(stream::unfold(Arc::clone(&of_body), move |frames| async move {
                sleep(pause).await;
                frames.fetch_add(1, SeqCst);
                Some((Ok::<_, Infallible>(vec![b'x'; bytes]), frames))
            }))
        });
        let first = spawn(&app, request("a", "x"));
        sleep(ms(50)).await;
        first.abort();
        sleep(100 * S).await;
        problem(send(&app, request("a", "x")).await, 409, "answer-not-kept").await;
        assert_eq!((runs(), store.held_count()), (1, 0));
        assert!(frames.load(SeqCst) <= most, "{} frames of {bytes} bytes", frames.load(SeqCst));
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_duplicate_that_disconnects_changes_nothing() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks).wait(10 * S), created);
    let first = spawn(&app, request("a", "x"));
    settle().await;
    let (leaves, stays) = (spawn(&app, request("a", "x")), spawn(&app, request("a", "x")));
    settle().await;
    leaves.abort();
    settle().await;
    assert_eq!(run_of(first.await.expect("no panic")).await, (1, false));
    assert_eq!(run_of(stays.await.expect("no panic")).await, (1, true));
    assert_eq!((runs(), store.held_count(), locks.size()), (1, 0, (0, 0)));
}

/// A key of one request does not delay another one.
#[tokio::test(start_paused = true)]
async fn requests_with_different_keys_run_together() {
    let (_store, locks) = store_and_locks();
    let (app, _) = app(layer(&locks), created);
    let began = Instant::now();
    let all: Vec<_> = ["a", "b", "c"].map(|key| spawn(&app, request(key, "x"))).into();
    for response in all {
        let response = response.await.expect("no panic");
        assert!(response.status() == StatusCode::CREATED && !is_replayed(&response), "{response:?}");
    }
    assert!(began.elapsed() < ms(200));
}

/// The client may choose to wait for the answer (RFC 7240).
#[tokio::test(start_paused = true)]
async fn client_may_choose_to_wait_for_the_answer() {
    let (_store, locks) = store_and_locks();
    let policy = LockPolicy::new().max_client_wait(10 * S);
    let (app, _) = app(layer(&locks).policy(policy), created);
    let first = spawn(&app, request("a", "x"));
    settle().await;
    let (mut parts, body) = request("a", "x").into_parts();
    parts.headers.insert("prefer", "wait=5".parse().expect("a value"));
    let response = send(&app, Request::from_parts(parts, body)).await;
    assert_eq!(response.headers()["preference-applied"], "wait=5");
    assert_eq!(run_of(response).await, (1, true));
    first.await.expect("no panic");
}
