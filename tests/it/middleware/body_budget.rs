//! The bodies of waiting requests share a bounded budget, and every end of a request frees its
//! part.

use std::{
    convert::Infallible,
    future::pending,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::DefaultBodyLimit,
    http::{HeaderMap, Request, Response, StatusCode, header},
    middleware::{Next, from_fn},
    routing::post,
};
use futures_util::{StreamExt, stream};
use serde_json::Value;
use tokio::{
    sync::{Notify, Semaphore},
    task::JoinHandle,
};
use tower::{Layer, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_lock::test_util::TestStore;
use tower_lock::{
    LockKey, LockLayer, LockManager, LockPolicy, Rejection, RequestBodyMode, key, middleware::RequestBody,
    test_util::StoreOp,
};
use tower_lock_testkit::{
    app::{problem_type, send, serve, text},
    body::{ScriptedBody, Step},
    http::Http1,
    locks::store_and_locks,
    wait::{settle, soon},
};

/// For all bodies.
const BUDGET: usize = 64 << 20;

/// A buffer that is never written, read or copied, so it costs no memory.
fn bytes(len: usize) -> Bytes {
    static ALL: LazyLock<Bytes> = LazyLock::new(|| Bytes::from(vec![0; BUDGET]));
    ALL.slice(..len)
}

fn upload(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).body(body.into()).expect("a request")
}

/// A body with these frames and without a size hint, which then stalls forever.
fn stalled(frames: impl IntoIterator<Item = Bytes>) -> Body {
    let frames: Vec<_> = frames.into_iter().map(Ok::<_, Infallible>).collect();
    Body::from_stream(stream::iter(frames).chain(stream::pending()))
}

fn frames(frames: impl IntoIterator<Item = Bytes>) -> Body {
    let frames: Vec<_> = frames.into_iter().map(Ok::<_, Infallible>).collect();
    Body::from_stream(stream::iter(frames))
}

struct TestApp {
    store: TestStore,
    locks: LockManager,
    app: Router,
    go_on: Arc<Notify>,
}

impl TestApp {
    fn new() -> Self {
        let (store, locks) = store_and_locks();
        let go_on = Arc::new(Notify::new());
        let notified = Arc::clone(&go_on);
        let handler = post(async move |_: Body| notified.notified().await);
        let layer = |key| LockLayer::new(&locks, key);
        let read = |_: Bytes| ("k",);
        let app = Router::new()
            .route("/wait", handler.clone().route_layer(layer(key::from_fn(read)).wait(Duration::from_secs(60))))
            .route("/refuse", handler.clone().route_layer(layer(key::from_fn(read))))
            .route(
                "/no-key",
                handler.clone().route_layer(LockLayer::new(&locks, key::from_fn(|_: Bytes| None::<LockKey>))),
            )
            .route(
                "/said-no",
                handler.clone().route_layer(LockLayer::new(
                    &locks,
                    key::from_fn(|_: Bytes| Err::<LockKey, _>(StatusCode::BAD_REQUEST)),
                )),
            )
            .route(
                "/no-json",
                handler.clone().route_layer(LockLayer::new(&locks, key::from_fields("n", key::json_field("id")))),
            )
            .route(
                "/thinks",
                handler.route_layer(LockLayer::new(&locks, key::from_fn(async |_: Bytes| pending::<LockKey>().await))),
            )
            .route("/probe", probe(&locks))
            .layer(DefaultBodyLimit::disable());
        Self { store, locks, app, go_on }
    }

    fn start(&self, request: Request<Body>) -> JoinHandle<StatusCode> {
        let app = self.app.clone();
        tokio::spawn(async move { send(&app, request).await.status() })
    }

    async fn response(&self, request: Request<Body>) -> StatusCode {
        send(&self.app, request).await.status()
    }

    async fn assert_available(&self, len: usize, when: &str) {
        assert_available(&self.app, len, when).await;
    }
}

fn probe(locks: &LockManager) -> axum::routing::MethodRouter {
    post(async || "ran").route_layer(LockLayer::new(locks, key::from_fn(|_: Bytes| ("probe",))))
}

/// Other bodies leave this: one body may have half of it, or all of it if there is no other.
async fn assert_available(app: &Router, free: usize, when: &str) {
    let len = if free == BUDGET { BUDGET } else { free / 2 };
    let response = send(app, upload("/probe", bytes(len))).await;
    assert_eq!(response.status(), StatusCode::OK, "{when}: {len} bytes fit");
    if len < BUDGET {
        let response = send(app, upload("/probe", bytes(len + 1))).await;
        let rejection = response.extensions().get();
        assert!(matches!(rejection, Some(Rejection::BodyBufferFull { .. })), "{when}, one byte more: {rejection:?}");
    }
}

/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn body_takes_budget_only_while_its_request_waits() {
    const LARGE: usize = 4 << 20;
    let app = TestApp::new();
    app.assert_available(BUDGET, "at the start").await;
    let held = app.locks.try_lock(("k",)).await.expect("free");
    let small = app.start(upload("/wait", bytes(1000)));
    let large = app.start(upload("/wait", bytes(LARGE)));
    settle().await;
    app.assert_available(BUDGET - 1000 - LARGE, "two wait").await;
    held.release().await.expect("the store is up");
    settle().await;
    app.assert_available(BUDGET - LARGE, "a running handler keeps its body").await;
    app.go_on.notify_one();
    assert_eq!(small.await.expect("no panic"), StatusCode::OK);
    settle().await;
    app.assert_available(BUDGET, "both were called").await;
    app.go_on.notify_one();
    assert_eq!(large.await.expect("no panic"), StatusCode::OK);
    app.assert_available(BUDGET, "at the end").await;
    assert_eq!(app.store.held_count(), 0);
}

/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn every_end_before_the_handler_frees_the_budget() {
    let app = TestApp::new();
    let held = app.locks.try_lock(("k",)).await.expect("free");

    assert_eq!(app.response(upload("/refuse", bytes(BUDGET))).await, StatusCode::CONFLICT);
    app.assert_available(BUDGET, "refused").await;

    let waits = app.start(upload("/wait", bytes(BUDGET)));
    tokio::time::sleep(Duration::from_secs(59)).await;
    app.assert_available(0, "a second before it is timed out").await;
    assert_eq!(waits.await.expect("no panic"), StatusCode::CONFLICT);
    app.assert_available(BUDGET, "timed out").await;

    for (when, request) in [
        ("while it waits", upload("/wait", bytes(BUDGET))),
        ("while its key is derived", upload("/thinks", bytes(BUDGET))),
    ] {
        let request = app.start(request);
        settle().await;
        app.assert_available(0, when).await;
        request.abort();
        request.await.expect_err("aborted");
        app.assert_available(BUDGET, &format!("cancelled {when}")).await;
    }
    let request = app.start(upload("/wait", stalled([bytes(BUDGET)])));
    settle().await;
    request.abort();
    request.await.expect_err("aborted");
    app.assert_available(BUDGET, "cancelled while its body arrives").await;

    let broken = Body::from_stream(stream::iter([Ok(bytes(BUDGET)), Err(std::io::Error::other("gone"))]));
    for (when, request, status) in [
        ("the key function rejects", upload("/said-no", bytes(BUDGET)), 400),
        ("it is no JSON", upload("/no-json", bytes(BUDGET)), 400),
        ("a truncated body", upload("/wait", broken), 400),
        ("it is too long", upload("/wait", frames([bytes(BUDGET), bytes(1)])), 413),
    ] {
        assert_eq!(app.response(request).await, status, "{when}");
        app.assert_available(BUDGET, when).await;
    }

    app.store.fault_all(tower_lock::test_util::Fault::Fail);
    let other = Router::new()
        .route("/", post(async || ()).route_layer(LockLayer::new(&app.locks, key::from_fn(|_: Bytes| ("other",)))))
        .layer(DefaultBodyLimit::disable());
    assert_eq!(send(&other, upload("/", bytes(BUDGET))).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    app.store.fault_all(tower_lock::test_util::Fault::None);
    app.assert_available(BUDGET, "the store was down").await;

    let runs = app.start(upload("/no-key", bytes(BUDGET)));
    settle().await;
    app.assert_available(BUDGET, "no lock was needed: the handler runs").await;
    app.go_on.notify_one();
    assert_eq!(runs.await.expect("no panic"), StatusCode::OK);
    held.release().await.expect("the store is up");
}

/// It waits for its handler.
#[tokio::test]
async fn request_that_waits_for_inner_capacity_takes_budget() {
    let locks = LockManager::in_memory();
    let probe = Router::new().route("/probe", probe(&locks)).layer(DefaultBodyLimit::disable());
    for is_locked in [true, false] {
        let key = key::from_fn(move |_: Bytes| is_locked.then_some(("k",)));
        let inner = service_fn(async |_: Request<RequestBody>| {
            pending::<()>().await;
            Ok::<_, Infallible>(Response::new(Body::empty()))
        });
        let capacity = Arc::new(Semaphore::new(1));
        let busy = Arc::clone(&capacity).acquire_owned().await.expect("open");
        let service = LockLayer::new(&locks, key).layer(ConcurrencyLimit::with_semaphore(inner, capacity));
        let request = tokio::spawn(service.oneshot(upload("/", bytes(1000))));
        settle().await;
        assert_available(&probe, BUDGET - 1000, "it waits").await;
        drop(busy);
        settle().await;
        assert_available(&probe, BUDGET, "it runs").await;
        assert!(!request.is_finished());
        request.abort();
        request.await.expect_err("aborted");
    }
}

/// Guarantee: G15.
#[tokio::test]
async fn received_bytes_count_and_announced_bytes_do_not() {
    let app = TestApp::new();
    let polls = Arc::new(AtomicUsize::new(0));
    let announced = |len: usize| {
        let polls = Arc::clone(&polls);
        let count = move || {
            polls.fetch_add(1, SeqCst);
        };
        ScriptedBody::new([Step::Stall]).announce(len as u64).on_poll(count)
    };
    let silent: Vec<_> = (0..3).map(|_| app.start(upload("/wait", Body::new(announced(BUDGET))))).collect();
    settle().await;
    assert_eq!(polls.load(SeqCst), 3, "each was polled");
    app.assert_available(BUDGET, "an announced length uses no budget").await;

    let held = app.locks.try_lock(("k",)).await.expect("free");
    let waits = app.start(upload("/wait", frames([bytes(1000), bytes(2000)])));
    settle().await;
    app.assert_available(BUDGET - 3000, "received bytes count").await;

    // Rejected unread and in the middle: its bytes are freed.
    assert_eq!(
        app.response(upload("/wait", Body::new(announced((BUDGET - 3000) / 2 + 1)))).await,
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert_eq!(polls.load(SeqCst), 3, "not polled");
    let grows = upload("/wait", frames([bytes(4000), bytes((BUDGET - 3000) / 2 - 4000), bytes(1)]));
    assert_eq!(app.response(grows).await, StatusCode::SERVICE_UNAVAILABLE);
    app.assert_available(BUDGET - 3000, "after them").await;
    for request in silent.into_iter().chain([waits]) {
        request.abort();
        request.await.expect_err("aborted");
    }
    held.release().await.expect("the store is up");
    app.assert_available(BUDGET, "all have ended").await;
    assert_eq!(app.locks.size(), (0, 0));
}

#[tokio::test]
async fn clones_share_the_budget_and_other_managers_do_not() {
    let (_, locks) = store_and_locks();
    let (_, others) = store_and_locks();
    let app = |locks: &LockManager| {
        Router::new()
            .route(
                "/wait",
                post(async || ())
                    .route_layer(LockLayer::new(locks, key::from_fn(|_: Bytes| ("k",))).wait(Duration::from_secs(60))),
            )
            .route("/probe", probe(locks))
            .layer(DefaultBodyLimit::disable())
    };
    let clone = locks.clone().with_policy(LockPolicy::new().wait(Duration::from_secs(1)));
    let (here, clone, elsewhere) = (app(&locks), app(&clone), app(&others));
    let held = locks.try_lock(("k",)).await.expect("free");
    let waits = tokio::spawn(async move { send(&here, upload("/wait", bytes(1000))).await.status() });
    settle().await;
    assert_available(&clone, BUDGET - 1000, "a clone").await;
    assert_available(&elsewhere, BUDGET, "another handle").await;
    held.release().await.expect("the store is up");
    assert_eq!(waits.await.expect("no panic"), StatusCode::OK);
    assert_available(&clone, BUDGET, "a clone").await;
}

/// Guarantee: G15.
#[tokio::test]
async fn exhausted_budget_rejects_before_locking() {
    let app = TestApp::new();
    let held = app.locks.try_lock(("k",)).await.expect("free");
    let waits = app.start(upload("/wait", bytes(BUDGET)));
    settle().await;
    let asked = app.store.on(StoreOp::Acquire).calls();

    let response = send(&app.app, upload("/probe", bytes(1))).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let after: u64 = response.headers()[header::RETRY_AFTER].to_str().expect("digits").parse().expect("seconds");
    assert!((1..=2).contains(&after), "{after}");
    let Some(Rejection::BodyBufferFull { retry_after }) = response.extensions().get().cloned() else {
        panic!("not typed")
    };
    assert!(retry_after >= Duration::from_secs(1), "{retry_after:?}");
    let problem: Value = serde_json::from_str(&text(response).await).expect("JSON");
    assert_eq!(problem["type"], problem_type("body-buffer-full"));
    assert_eq!(problem["outcome"], "not-started");
    assert_eq!(problem["status"], 503);
    assert_eq!(app.store.on(StoreOp::Acquire).calls(), asked, "no store call");

    // A body that is read for the key needs budget for every key source; other requests need none.
    assert_eq!(app.response(upload("/probe", Body::empty())).await, StatusCode::OK);
    let of_head = LockLayer::new(&app.locks, key::from_fn(|_: HeaderMap| ("head",)));
    for (layer, status) in [(of_head.clone(), 503), (of_head.request_body(RequestBodyMode::Stream), 200)] {
        let app = Router::new().route("/", post(async || ()).route_layer(layer));
        assert_eq!(send(&app, upload("/", bytes(1000))).await.status(), status);
    }

    // A client that sends `Expect: 100-continue` does not send its body.
    let server = serve(app.app.clone()).await;
    let mut wire = Http1::connect(server).await;
    wire.write("POST /probe HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n").await;
    assert_eq!(wire.head().await.0, 503, "no body was requested");

    waits.abort();
    held.release().await.expect("the store is up");
    soon("the end", waits).await.expect_err("aborted");
    app.assert_available(BUDGET, "at the end").await;
}

/// They wait for a held key with complete bodies; other keys go on.
/// Guarantee: G15.
#[tokio::test]
async fn waiters_of_one_key_leave_budget_for_other_keys() {
    let app = TestApp::new();
    let held = app.locks.try_lock(("k",)).await.expect("free");
    let flood: Vec<_> = (0..33).map(|_| app.start(upload("/wait", bytes(2 << 20)))).collect();
    settle().await;
    assert_eq!(app.response(upload("/probe", bytes(1000))).await, StatusCode::OK, "the budget of another key");
    let (waiting, rejected): (Vec<_>, Vec<_>) = flood.into_iter().partition(|waits| !waits.is_finished());
    assert_eq!((waiting.len(), app.locks.size().1), (3, 3), "the key has an eighth of the budget");
    for response in rejected {
        assert_eq!(response.await.expect("no panic"), StatusCode::SERVICE_UNAVAILABLE);
    }
    // A client without a wait gets the same response as without a body.
    assert_eq!(app.response(upload("/refuse", bytes(2 << 20))).await, StatusCode::CONFLICT);
    for waits in waiting {
        waits.abort();
        soon("the end", waits).await.expect_err("aborted");
    }
    let one = app.start(upload("/wait", bytes(BUDGET / 2)));
    settle().await;
    assert!(!one.is_finished(), "the first one waits, also with more than the part of its key");
    one.abort();
    held.release().await.expect("the store is up");
    soon("the end", one).await.expect_err("aborted");
    app.assert_available(BUDGET, "at the end").await;
}

/// It holds the key, and its waiters use the budget of the key.
/// Guarantee: G15.
#[tokio::test]
async fn holder_reenters_with_a_body_despite_many_waiters() {
    let (_store, locks) = store_and_locks();
    let layer = || LockLayer::new(&locks, key::from_fn(|_: HeaderMap| ("k",))).wait(Duration::from_secs(60));
    let gate = Arc::new(Semaphore::new(0));
    let passes = Arc::clone(&gate);
    let pause = from_fn(move |request: Request<Body>, next: Next| {
        let gate = Arc::clone(&passes);
        async move {
            gate.acquire().await.expect("open").forget();
            next.run(request).await
        }
    });
    let app = Router::new()
        .route("/", post(async |_: Body| ()).route_layer(layer()).layer(pause).route_layer(layer()))
        .layer(DefaultBodyLimit::disable());
    let start = |len| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, upload("/", bytes(len))).await.status() })
    };
    let holder = start(2 << 20);
    settle().await;
    let waits = start(30 << 20);
    settle().await;
    assert_eq!(locks.size(), (1, 1));
    gate.add_permits(2);
    assert_eq!(soon("its response", holder).await.expect("no panic"), StatusCode::OK);
    assert_eq!(soon("its response", waits).await.expect("no panic"), StatusCode::OK);
    assert_available(
        &Router::new().route("/probe", probe(&locks)).layer(DefaultBodyLimit::disable()),
        BUDGET,
        "at the end",
    )
    .await;
}
