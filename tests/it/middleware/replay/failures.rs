//! Work that does not end well leaves no record, and a store that fails starts no work.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    http::{Request, Response, StatusCode},
    routing::post,
};
use http_body_util::{BodyExt, Full};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_lock::{
    AcquisitionId, LockKey, LockPolicy, Once, Rejection,
    middleware::RequestBody,
    store::{AcquireReply, AcquireRequest, IfBusy, QueueConfig, Record, ReleaseReply, ReleaseRequest},
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::store::StoreExt;
use tower_lock_testkit::{
    app::send,
    body::{ScriptedBody, Step, paused},
    locks::store_and_locks,
    panics::panics,
    wait::{ms, settle, soon, until},
};

use super::{app, created, is_replayed, layer, problem, request, run_of, spawn};

const S: Duration = Duration::from_secs(1);

/// The key of the record of each request with the idempotency key `a`.
async fn record_key() -> LockKey {
    let (_store, locks) = store_and_locks();
    let handler = post(async |once: Once| Extension(once.key().clone()));
    let app = Router::new().route("/", handler.route_layer(layer(&locks)));
    send(&app, request("a", "x")).await.extensions().get::<LockKey>().expect("a key").clone()
}

/// Sends retries until one of them runs. Returns the time that this took.
async fn runs_after(app: &Router) -> Duration {
    let began = Instant::now();
    soon("a run", async {
        loop {
            let response = send(app, request("a", "x")).await;
            if response.status().is_success() {
                assert!(!is_replayed(&response), "no record was left");
                return began.elapsed();
            }
            problem(response, 409, "in-flight").await;
            sleep(ms(20)).await;
        }
    })
    .await
}

/// Guarantee: G19.
#[tokio::test(start_paused = true)]
async fn handler_that_panics_leaves_no_record() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), |run| {
        assert!(run > 1, "planned: replayed handler");
        format!("run {run}")
    });
    panics("planned: replayed handler");
    let app = app.layer(CatchPanicLayer::new());
    let first = send(&app, request("a", "x")).await;
    assert_eq!((first.status(), runs()), (StatusCode::INTERNAL_SERVER_ERROR, 1));
    assert!((ms(900)..ms(1300)).contains(&runs_after(&app).await), "the lock-delay");
    assert_eq!((runs(), store.held_count()), (2, 0));
}

/// Guarantee: G19.
#[tokio::test(start_paused = true)]
async fn answer_under_a_lost_lock_is_not_kept() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    let first = spawn(&app, request("a", "x"));
    sleep(ms(50)).await;
    locks.force_release(record_key().await).await.expect("up");
    let problem = problem(first.await.expect("no panic"), 503, "lost").await;
    assert_eq!(problem["outcome"], "unknown");
    assert!(runs_after(&app).await >= ms(900), "the lock-delay");
    assert_eq!((runs(), store.held_count()), (1, 0), "the lost one was dropped");
}

/// Guarantee: G19.
#[tokio::test(start_paused = true)]
async fn handler_that_exceeds_max_hold_leaves_no_record() {
    let (store, locks) = store_and_locks();
    let policy = LockPolicy::new().max_hold(5 * S);
    let runs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&runs);
    let handler = post(move || async move {
        if counter.fetch_add(1, SeqCst) == 0 {
            sleep(60 * S).await;
        }
    });
    let app = Router::new().route("/", handler.route_layer(layer(&locks).policy(policy)));
    problem(send(&app, request("a", "x")).await, 503, "hold-limit-reached").await;
    assert!((ms(900)..ms(1300)).contains(&runs_after(&app).await), "the lock-delay");
    assert_eq!((runs.load(SeqCst), store.held_count()), (2, 0));
}

/// Guarantee: G19.
#[tokio::test(start_paused = true)]
async fn stream_that_fails_leaves_no_record() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), move |run| {
        let end = if run == 1 { Step::Error("broken") } else { Step::Data(3) };
        Body::new(ScriptedBody::new(paused(&[Step::Data(3), Step::Data(3), end])))
    });
    let mut first = send(&app, request("a", "x")).await.into_body();
    first.frame().await.expect("a frame").expect("data");
    problem(send(&app, request("a", "x")).await, 409, "in-flight").await;
    assert!(first.collect().await.is_err());
    assert!(runs_after(&app).await < ms(200), "it has failed: no delay");
    settle().await;
    assert_eq!(runs(), 2);
}

/// The handler has done its work, and a retry must not do it again.
/// Guarantee: G19.
#[tokio::test(start_paused = true)]
async fn stream_that_loses_its_reader_is_not_run_again() {
    for is_stalled in [false, true] {
        let (store, locks) = store_and_locks();
        let (app, runs) = app(layer(&locks), |_| Body::new(ScriptedBody::new(paused(&[Step::Data(3); 4]))));
        let mut first = send(&app, request("a", "x")).await.into_body();
        first.frame().await.expect("a frame").expect("data");
        if is_stalled {
            sleep(Duration::from_secs(120)).await;
        } else {
            drop(first);
        }
        settle().await;
        problem(send(&app, request("a", "x")).await, 409, "answer-not-kept").await;
        assert_eq!((runs(), store.held_count()), (1, 0), "{is_stalled}");
    }
}

#[tokio::test(start_paused = true)]
async fn body_that_fails_at_once_leaves_no_record() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), |_| Body::new(ScriptedBody::new([Step::Data(3), Step::Error("broken")])));
    for _ in 0..2 {
        let response = send(&app, request("a", "x")).await;
        assert!(response.into_body().collect().await.is_err());
    }
    assert_eq!((runs(), store.held_count()), (2, 0));
}

/// Guarantee: G19.
#[tokio::test(start_paused = true)]
async fn error_of_the_inner_service_leaves_no_record() {
    let (store, locks) = store_and_locks();
    let runs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&runs);
    let service = service_fn(move |_: Request<RequestBody>| {
        let run = counter.fetch_add(1, SeqCst);
        async move { if run == 0 { Err("broken") } else { Ok(Response::new(Full::<Bytes>::default())) } }
    });
    let service = layer(&locks).layer(service);
    assert_eq!(service.clone().oneshot(request("a", "x")).await.map(drop), Err("broken"));
    assert!(service.clone().oneshot(request("a", "x")).await.is_ok(), "no delay");
    assert!(service.clone().oneshot(request("a", "x")).await.is_ok());
    assert_eq!((runs.load(SeqCst), store.held_count()), (2, 0));
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn nothing_runs_while_the_store_fails() {
    for fault in [Fault::Fail, Fault::Hang, Fault::Refuse] {
        let (store, locks) = store_and_locks();
        let (app, runs) = app(layer(&locks), created);
        store.on(StoreOp::Acquire).fault(fault);
        let problem = problem(send(&app, request("a", "x")).await, 503, "store-unavailable").await;
        assert_eq!(problem["outcome"], "not-started");
        assert_eq!(runs(), 0, "{fault:?}");
        store.on(StoreOp::Acquire).fault(Fault::None);
        sleep(2 * S).await;
        assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false), "{fault:?}");
        // An answer that cannot be looked up is not a missing answer.
        store.on(StoreOp::Acquire).fault(fault);
        super::problem(send(&app, request("a", "x")).await, 503, "store-unavailable").await;
        assert_eq!(runs(), 1, "{fault:?}");
    }
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn release_that_fails_is_repeated_with_its_record() {
    for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply] {
        let (store, locks) = store_and_locks();
        let (app, runs) = app(layer(&locks), created);
        store.on(StoreOp::Release).fault(fault);
        let began = Instant::now();
        assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false));
        assert!(began.elapsed() < ms(400), "{fault:?}: the response is sent");
        for _ in 0..8 {
            sleep(ms(500)).await;
            let response = send(&app, request("a", "x")).await;
            let is_answer = fault == Fault::LoseReply && is_replayed(&response);
            assert!(is_answer || [409, 503].contains(&response.status().as_u16()), "{fault:?}: {response:?}");
        }
        store.on(StoreOp::Release).fault(Fault::None);
        until("the answer", async || is_replayed(&send(&app, request("a", "x")).await)).await;
        assert_eq!((runs(), store.held_count()), (1, 0), "{fault:?}");
    }
}

/// A client that has an answer gets no other one.
/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn required_record_is_left_before_its_answer_is_sent() {
    let bodies: [fn() -> Body; 2] =
        [|| Body::from("done"), || Body::new(ScriptedBody::new(paused(&[Step::Data(3), Step::Data(3)])))];
    for body in bodies {
        for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply] {
            let (store, locks) = store_and_locks();
            let (app, runs) = app(layer(&locks).require_record(), move |_| body());
            store.on(StoreOp::Release).fault(fault);
            let first = send(&app, request("a", "x")).await;
            if first.status().is_success() {
                assert!(first.into_body().collect().await.is_err(), "{fault:?}: a stream without its end");
            } else {
                let problem = problem(first, 503, "answer-unconfirmed").await;
                assert_eq!(problem["outcome"], "unknown");
            }
            store.on(StoreOp::Release).fault(Fault::None);
            let is_left = async || send(&app, request("a", "x")).await.status() != StatusCode::SERVICE_UNAVAILABLE;
            until("a record", async || is_left().await && store.held_count() == 0).await;
            assert_eq!(runs(), 1, "{fault:?}");
            assert!(send(&app, request("b", "x")).await.into_body().collect().await.is_ok(), "{fault:?}");
        }
    }
}

/// Leaves a record for the requests with the idempotency key `a`.
async fn leave(store: &TestStore, record: Record) {
    let queue = QueueConfig::new(3 * S, 10 * S, 10);
    let (key, id) = (record_key().await, AcquisitionId::from_text("a:1"));
    let acquire = AcquireRequest::new(key.clone(), id.clone(), 60 * S, IfBusy::Fail, queue, S);
    assert!(matches!(store.acquire_one(acquire).await, Ok(AcquireReply::Granted { .. })));
    let release = ReleaseRequest::new(key, id, Duration::ZERO, queue).record(record, 60 * S);
    assert_eq!(store.release_one(release).await.expect("up"), ReleaseReply::Freed);
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn record_of_another_program_is_no_answer() {
    let foreign: [&[u8]; 5] = [b"", b"once", b"\x01", b"\x02 of the next version", &[1; 60]];
    for head in foreign {
        for body in [None, Some("an answer")] {
            let (store, locks) = store_and_locks();
            let (app, runs) = app(layer(&locks), created);
            leave(&store, Record::new(head, body.map(Bytes::from))).await;
            for _ in 0..2 {
                let response = send(&app, request("a", "x")).await;
                let rejection = response.extensions().get::<Rejection>().expect("a rejection");
                let source = std::error::Error::source(rejection).map(ToString::to_string);
                assert!(source.is_some_and(|source| source.contains("replay")), "{rejection:?}");
                problem(response, 503, "store-unavailable").await;
            }
            assert_eq!((runs(), store.held_count()), (0, 0), "{head:?}");
        }
    }
}
