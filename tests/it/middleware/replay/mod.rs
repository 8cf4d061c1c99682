//! Every retry of a request gets the first answer, and work that does not end leaves none.

mod answers;
mod keys;
mod attempts;
mod equal;
mod failures;
mod composition;
mod once;
mod bounds;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Request, Response, StatusCode},
    response::IntoResponse,
    routing::{MethodFilter, MethodRouter, on},
};
use serde_json::Value;
use tokio::{task::JoinHandle, time::sleep};
use tower_lock::{
    LockManager, ReplayLayer,
    key::{self, KeySource},
};
use tower_lock_testkit::{
    app::{problem_type, send, text},
    wait::ms,
};

/// The number of runs of a handler.
type Runs = Arc<AtomicUsize>;

fn layer(locks: &LockManager) -> ReplayLayer<impl KeySource + use<>> {
    ReplayLayer::new(locks, key::fixed(("everyone",)))
}

/// A handler that takes 100 ms, counts its runs, and answers as this function of their number.
fn counted<R: IntoResponse>(
    answer: impl Fn(usize) -> R + Clone + Send + Sync + 'static,
) -> (MethodRouter, impl Fn() -> usize) {
    let runs = Runs::default();
    let counter = Arc::clone(&runs);
    let methods = MethodFilter::POST.or(MethodFilter::PUT).or(MethodFilter::GET).or(MethodFilter::DELETE);
    let handler = on(methods, move |_: Bytes| {
        let (runs, answer) = (Arc::clone(&counter), answer.clone());
        async move {
            sleep(ms(100)).await;
            answer(runs.fetch_add(1, SeqCst) + 1)
        }
    });
    (handler, move || runs.load(SeqCst))
}

/// A route with such a handler.
fn app<K: KeySource, F: KeySource, R: IntoResponse>(
    layer: ReplayLayer<K, F>,
    answer: impl Fn(usize) -> R + Clone + Send + Sync + 'static,
) -> (Router, impl Fn() -> usize) {
    let (handler, runs) = counted(answer);
    (Router::new().route("/", handler.route_layer(layer)), runs)
}

/// A 201 with the number of the run.
fn created(run: usize) -> impl IntoResponse + use<> {
    (StatusCode::CREATED, [("location", format!("/runs/{run}"))], format!("run {run}"))
}

fn request(key: &str, body: &'static str) -> Request<Body> {
    Request::post("/").header("idempotency-key", key).body(Body::from(body)).expect("a request")
}

/// A request that can be cancelled.
fn spawn(app: &Router, request: Request<Body>) -> JoinHandle<Response<Body>> {
    let app = app.clone();
    tokio::spawn(async move { send(&app, request).await })
}

fn is_replayed(response: &Response<Body>) -> bool {
    response.headers().get("idempotency-replayed").is_some_and(|value| value == "true")
}

/// The problem details of a rejected request.
async fn problem(response: Response<Body>, status: u16, code: &str) -> Value {
    let found = response.status();
    let text = text(response).await;
    assert_eq!(found, status, "{code}: {text}");
    let problem: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{code}: {text}"));
    assert_eq!(problem["type"], problem_type(code));
    problem
}

/// The number of the run that a response is from, and whether it is replayed.
async fn run_of(response: Response<Body>) -> (usize, bool) {
    let is_replayed = is_replayed(&response);
    let text = text(response).await;
    let run = text.strip_prefix("run ").and_then(|run| run.parse().ok());
    (run.unwrap_or_else(|| panic!("no run: {text}")), is_replayed)
}
