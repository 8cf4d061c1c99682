//! A retry gets the first answer.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Request, Response, StatusCode},
    response::IntoResponse,
    routing::post,
};
use tokio::time::sleep;
use tower_lock::{
    LockManager, ReplayLayer,
    key::{self, Fixed},
    test_util::StoreOp,
};
use tower_lock_testkit::{
    app::{send, text},
    locks::store_and_locks,
    wait::ms,
};

type Runs = Arc<AtomicUsize>;

fn layer(locks: &LockManager) -> ReplayLayer<Fixed> {
    ReplayLayer::new(locks, key::fixed(("everyone",)))
}

/// A handler that counts its runs, and answers with their number.
async fn run(State(runs): State<Runs>) -> impl IntoResponse {
    sleep(ms(100)).await;
    let run = runs.fetch_add(1, SeqCst) + 1;
    (StatusCode::CREATED, [("location", format!("/runs/{run}"))], format!("run {run}"))
}

fn app(layer: ReplayLayer<Fixed>) -> (Router, Runs) {
    let runs = Runs::default();
    (Router::new().route("/", post(run).route_layer(layer)).with_state(Arc::clone(&runs)), runs)
}

fn request(key: &str, body: &'static str) -> Request<Body> {
    Request::post("/").header("idempotency-key", key).body(Body::from(body)).expect("a request")
}

fn is_replayed(response: &Response<Body>) -> bool {
    response.headers().get("idempotency-replayed").is_some_and(|value| value == "true")
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn retry_gets_the_first_answer() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks));
    let first = send(&app, request("\"a\"", "x")).await;
    assert!(first.status() == StatusCode::CREATED && !is_replayed(&first));
    assert_eq!(store.on(StoreOp::Acquire).calls() + store.on(StoreOp::Release).calls(), 2);
    for key in ["\"a\"", "a"] {
        let retry = send(&app, request(key, "x")).await;
        assert!(retry.status() == StatusCode::CREATED && is_replayed(&retry), "{retry:?}");
        assert_eq!(retry.headers()["location"], "/runs/1");
        assert_eq!(retry.headers()["content-type"], "text/plain; charset=utf-8");
        assert_eq!(retry.headers()["content-length"], "5");
        assert_eq!(text(retry).await, "run 1");
    }
    assert_eq!(store.on(StoreOp::Acquire).calls() + store.on(StoreOp::Release).calls(), 4, "one call for each retry");
    assert_eq!((runs.load(SeqCst), store.held_count()), (1, 0));
}
