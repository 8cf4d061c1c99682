//! The bodies of requests that wait take up a bounded room, and every end of a request gives its share back.

use std::{
    convert::Infallible,
    future::pending,
    pin::Pin,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
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
use http_body::{Frame, SizeHint};
use serde_json::Value;
use tokio::{
    sync::{Notify, Semaphore},
    task::JoinHandle,
};
use tower::{Layer, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_lock::{
    LockKey, LockLayer, LockManager, LockPolicy, Rejection, RequestBodyMode, key, middleware::RequestBody,
};

use crate::support::{TestStore, Wire, send, serve, settle, soon, store_and_locks, text};
use tower_lock::test_util::StoreOp;

/// Of all bodies.
const ROOM: usize = 64 << 20;

/// So many bytes. Nothing of them is ever written, read or copied, so they cost no memory.
fn bytes(len: usize) -> Bytes {
    static ALL: LazyLock<Bytes> = LazyLock::new(|| Bytes::from(vec![0; ROOM]));
    ALL.slice(..len)
}

fn upload(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).body(body.into()).expect("a request")
}

/// These frames, and no word of their length; then nothing more, for ever.
fn stalled(frames: impl IntoIterator<Item = Bytes>) -> Body {
    let frames: Vec<_> = frames.into_iter().map(Ok::<_, Infallible>).collect();
    Body::from_stream(stream::iter(frames).chain(stream::pending()))
}

fn frames(frames: impl IntoIterator<Item = Bytes>) -> Body {
    let frames: Vec<_> = frames.into_iter().map(Ok::<_, Infallible>).collect();
    Body::from_stream(stream::iter(frames))
}

/// Says how long it is, and counts who asks for it.
struct Announced {
    length: u64,
    polls: Arc<AtomicUsize>,
}

impl http_body::Body for Announced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.polls.fetch_add(1, SeqCst);
        Poll::Pending
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.length)
    }
}

struct Site {
    store: TestStore,
    locks: LockManager,
    app: Router,
    go_on: Arc<Notify>,
}

impl Site {
    fn new() -> Self {
        let (store, locks) = store_and_locks();
        let go_on = Arc::new(Notify::new());
        let notified = Arc::clone(&go_on);
        let handler = post(async move |_: Body| notified.notified().await);
        let layer = |key| LockLayer::new(&locks, key);
        let read = |_: Bytes| ("k",);
        let app = Router::new()
            .route("/wait", handler.clone().route_layer(layer(key::from_fn(read)).wait(Duration::from_secs(60))))
            .route(
                "/patient",
                handler.clone().route_layer(layer(key::from_fn(read)).body_idle_timeout(Duration::from_secs(3600))),
            )
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

    async fn answer(&self, request: Request<Body>) -> StatusCode {
        send(&self.app, request).await.status()
    }

    async fn assert_room(&self, len: usize, when: &str) {
        assert_room(&self.app, len, when).await;
    }
}

fn probe(locks: &LockManager) -> axum::routing::MethodRouter {
    post(async || "ran").route_layer(LockLayer::new(locks, key::from_fn(|_: Bytes| ("probe",))))
}

/// A body of so many bytes fits, and none that is longer.
async fn assert_room(app: &Router, len: usize, when: &str) {
    let answer = send(app, upload("/probe", bytes(len))).await;
    assert_eq!(answer.status(), StatusCode::OK, "{when}: {len} bytes fit");
    if len < ROOM {
        let answer = send(app, upload("/probe", bytes(len + 1))).await;
        let rejection = answer.extensions().get();
        assert!(matches!(rejection, Some(Rejection::BodyBufferFull { .. })), "{when}, one byte more: {rejection:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn body_takes_budget_only_while_its_request_waits() {
    const LARGE: usize = 4 << 20;
    let site = Site::new();
    site.assert_room(ROOM, "at the start").await;
    let held = site.locks.try_lock(("k",)).await.expect("free");
    let small = site.start(upload("/wait", bytes(1000)));
    let large = site.start(upload("/wait", bytes(LARGE)));
    settle().await;
    site.assert_room(ROOM - 1000 - LARGE, "two wait").await;
    held.release().await.expect("the store is up");
    settle().await;
    site.assert_room(ROOM - LARGE, "one runs, with its body in its hands").await;
    site.go_on.notify_one();
    assert_eq!(small.await.expect("no panic"), StatusCode::OK);
    settle().await;
    site.assert_room(ROOM, "both were called").await;
    site.go_on.notify_one();
    assert_eq!(large.await.expect("no panic"), StatusCode::OK);
    site.assert_room(ROOM, "at the end").await;
    assert_eq!(site.store.held_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn every_end_before_the_handler_frees_the_budget() {
    let site = Site::new();
    let held = site.locks.try_lock(("k",)).await.expect("free");

    assert_eq!(site.answer(upload("/refuse", bytes(ROOM))).await, StatusCode::CONFLICT);
    site.assert_room(ROOM, "refused").await;

    let waits = site.start(upload("/wait", bytes(ROOM)));
    tokio::time::sleep(Duration::from_secs(59)).await;
    site.assert_room(0, "a second before it is timed out").await;
    assert_eq!(waits.await.expect("no panic"), StatusCode::CONFLICT);
    site.assert_room(ROOM, "timed out").await;

    for (when, request) in
        [("while it waits", upload("/wait", bytes(ROOM))), ("while its key is derived", upload("/thinks", bytes(ROOM)))]
    {
        let request = site.start(request);
        settle().await;
        site.assert_room(0, when).await;
        request.abort();
        request.await.expect_err("aborted");
        site.assert_room(ROOM, &format!("cancelled {when}")).await;
    }
    let request = site.start(upload("/wait", stalled([bytes(ROOM)])));
    settle().await;
    request.abort();
    request.await.expect_err("aborted");
    site.assert_room(ROOM, "cancelled while its body comes").await;

    let broken = Body::from_stream(stream::iter([Ok(bytes(ROOM)), Err(std::io::Error::other("gone"))]));
    for (when, request, status) in [
        ("the key function says no", upload("/said-no", bytes(ROOM)), 400),
        ("it is no JSON", upload("/no-json", bytes(ROOM)), 400),
        ("it breaks off", upload("/wait", broken), 400),
        ("it is too long", upload("/wait", frames([bytes(ROOM), bytes(1)])), 413),
    ] {
        assert_eq!(site.answer(request).await, status, "{when}");
        site.assert_room(ROOM, when).await;
    }

    site.store.fault_all(tower_lock::test_util::Fault::Fail);
    let other = Router::new()
        .route("/", post(async || ()).route_layer(LockLayer::new(&site.locks, key::from_fn(|_: Bytes| ("other",)))))
        .layer(DefaultBodyLimit::disable());
    assert_eq!(send(&other, upload("/", bytes(ROOM))).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    site.store.fault_all(tower_lock::test_util::Fault::None);
    site.assert_room(ROOM, "the store was down").await;

    let runs = site.start(upload("/no-key", bytes(ROOM)));
    settle().await;
    site.assert_room(ROOM, "no lock was needed: the handler runs").await;
    site.go_on.notify_one();
    assert_eq!(runs.await.expect("no panic"), StatusCode::OK);
    held.release().await.expect("the store is up");
}

/// It waits for its handler still.
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
        assert_room(&probe, ROOM - 1000, "it waits").await;
        drop(busy);
        settle().await;
        assert_room(&probe, ROOM, "it runs").await;
        assert!(!request.is_finished());
        request.abort();
        request.await.expect_err("aborted");
    }
}

#[tokio::test]
async fn received_bytes_count_and_announced_bytes_do_not() {
    let site = Site::new();
    let polls = Arc::new(AtomicUsize::new(0));
    let announced = |len: usize| Announced { length: len as u64, polls: Arc::clone(&polls) };
    let silent: Vec<_> = (0..3).map(|_| site.start(upload("/wait", Body::new(announced(ROOM))))).collect();
    settle().await;
    assert_eq!(polls.load(SeqCst), 3, "each was asked for");
    site.assert_room(ROOM, "a promise takes up nothing").await;

    let held = site.locks.try_lock(("k",)).await.expect("free");
    let waits = site.start(upload("/wait", frames([bytes(1000), bytes(2000)])));
    settle().await;
    site.assert_room(ROOM - 3000, "what has come counts").await;

    // Refused unread, and in the middle: what it had is given back.
    assert_eq!(site.answer(upload("/wait", Body::new(announced(ROOM - 2999)))).await, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(polls.load(SeqCst), 3, "not asked for");
    let grows = upload("/wait", frames([bytes(4000), bytes(ROOM - 7000), bytes(1)]));
    assert_eq!(site.answer(grows).await, StatusCode::SERVICE_UNAVAILABLE);
    site.assert_room(ROOM - 3000, "after them").await;
    for request in silent.into_iter().chain([waits]) {
        request.abort();
        request.await.expect_err("aborted");
    }
    held.release().await.expect("the store is up");
    site.assert_room(ROOM, "all are gone").await;
    assert_eq!(site.locks.size(), (0, 0));
}

/// Whoever comes is not turned away for those that do not go on.
#[tokio::test]
async fn longest_idle_body_is_evicted_for_another() {
    let site = Site::new();
    // Nothing else ends it in time.
    let idle = site.start(upload("/patient", stalled([bytes(ROOM / 2)])));
    settle().await;
    let (say, frames) = tokio::sync::mpsc::unbounded_channel();
    let busy = stream::unfold(frames, async |mut frames| frames.recv().await.map(|frame| (frame, frames)));
    let busy = site.start(upload("/wait", Body::from_stream(busy)));
    let next = |len| say.send(Ok::<_, Infallible>(bytes(len))).expect("read");
    next(ROOM / 2 - 1);
    settle().await;
    assert!(!idle.is_finished() && !busy.is_finished());
    // The one byte that is left is enough for it.
    assert_eq!(site.answer(upload("/probe", bytes(1))).await, StatusCode::OK);
    assert!(!idle.is_finished(), "nobody has to go without need");
    let answer = send(&site.app, upload("/probe", bytes(2))).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(soon("an answer", idle).await.expect("no panic"), StatusCode::REQUEST_TIMEOUT);
    assert!(!busy.is_finished());
    next(2);
    drop(say);
    site.go_on.notify_one();
    assert_eq!(soon("an answer", busy).await.expect("no panic"), StatusCode::OK, "whole");
    site.assert_room(ROOM, "at the end").await;
    assert_eq!(site.store.held_count(), 0);
}

#[tokio::test]
async fn evicted_body_is_rejected_even_if_bytes_are_ready() {
    let site = Site::new();
    let (say, frames) = tokio::sync::mpsc::unbounded_channel();
    let late = stream::unfold(frames, async |mut frames| frames.recv().await.map(|frame| (frame, frames)));
    let late = site.start(upload("/patient", Body::from_stream(late)));
    let next = |len| say.send(Ok::<_, Infallible>(bytes(len))).expect("read");
    next(ROOM - 1);
    settle().await;
    // Its task does not run before the other one has its room.
    next(1);
    assert_eq!(site.answer(upload("/probe", bytes(2))).await, StatusCode::OK);
    assert_eq!(soon("an answer", late).await.expect("no panic"), StatusCode::REQUEST_TIMEOUT);
    site.assert_room(ROOM, "at the end").await;
}

#[tokio::test]
async fn clones_share_the_budget_and_other_managers_do_not() {
    let (_, locks) = store_and_locks();
    let (_, others) = store_and_locks();
    let site = |locks: &LockManager| {
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
    let (here, clone, elsewhere) = (site(&locks), site(&clone), site(&others));
    let held = locks.try_lock(("k",)).await.expect("free");
    let waits = tokio::spawn(async move { send(&here, upload("/wait", bytes(1000))).await.status() });
    settle().await;
    assert_room(&clone, ROOM - 1000, "a clone").await;
    assert_room(&elsewhere, ROOM, "another handle").await;
    held.release().await.expect("the store is up");
    assert_eq!(waits.await.expect("no panic"), StatusCode::OK);
    assert_room(&clone, ROOM, "a clone").await;
}

#[tokio::test]
async fn exhausted_budget_rejects_before_locking() {
    let site = Site::new();
    let held = site.locks.try_lock(("k",)).await.expect("free");
    let waits = site.start(upload("/wait", bytes(ROOM)));
    settle().await;
    let asked = site.store.on(StoreOp::Acquire).calls();

    let answer = send(&site.app, upload("/probe", bytes(1))).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    let after: u64 = answer.headers()[header::RETRY_AFTER].to_str().expect("digits").parse().expect("seconds");
    assert!((1..=2).contains(&after), "{after}");
    let Some(Rejection::BodyBufferFull { retry_after }) = answer.extensions().get().cloned() else {
        panic!("not typed")
    };
    assert!(retry_after >= Duration::from_secs(1), "{retry_after:?}");
    let problem: Value = serde_json::from_str(&text(answer).await).expect("JSON");
    assert_eq!(problem["type"], "urn:tower-lock:bodies-full");
    assert_eq!(problem["outcome"], "not-started");
    assert_eq!(problem["status"], 503);
    assert_eq!(site.store.on(StoreOp::Acquire).calls(), asked, "the store heard of nothing");

    // Who has no body, or none that is read before the lock, needs no room; who has one does, whatever the key is made of.
    assert_eq!(site.answer(upload("/probe", Body::empty())).await, StatusCode::OK);
    let of_head = LockLayer::new(&site.locks, key::from_fn(|_: HeaderMap| ("head",)));
    for (layer, status) in [(of_head.clone(), 503), (of_head.request_body(RequestBodyMode::Stream), 200)] {
        let app = Router::new().route("/", post(async || ()).route_layer(layer));
        assert_eq!(send(&app, upload("/", bytes(1000))).await.status(), status);
    }

    // A client that asks before it sends is spared to.
    let server = serve(site.app.clone()).await;
    let mut wire = Wire::connect(server).await;
    wire.write("POST /probe HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n").await;
    assert_eq!(wire.head().await.0, 503, "not a byte of the body was asked for");

    waits.abort();
    held.release().await.expect("the store is up");
    soon("the end", waits).await.expect_err("aborted");
    site.assert_room(ROOM, "at the end").await;
}

/// They wait for a key that is held, with bodies that are complete: other keys go on.
#[tokio::test]
async fn waiters_of_one_key_leave_budget_for_other_keys() {
    let site = Site::new();
    let held = site.locks.try_lock(("k",)).await.expect("free");
    let flood: Vec<_> = (0..33).map(|_| site.start(upload("/wait", bytes(2 << 20)))).collect();
    settle().await;
    assert_eq!(site.answer(upload("/probe", bytes(1000))).await, StatusCode::OK, "it is for another key");
    let (waiting, rejected): (Vec<_>, Vec<_>) = flood.into_iter().partition(|waits| !waits.is_finished());
    assert_eq!((waiting.len(), site.locks.size().1), (3, 3), "they have an eighth of the room");
    for answer in rejected {
        assert_eq!(answer.await.expect("no panic"), StatusCode::SERVICE_UNAVAILABLE);
    }
    // A client that does not wait has the answer that it would have without a body.
    assert_eq!(site.answer(upload("/refuse", bytes(2 << 20))).await, StatusCode::CONFLICT);
    for waits in waiting {
        waits.abort();
        soon("the end", waits).await.expect_err("aborted");
    }
    let one = site.start(upload("/wait", bytes(ROOM / 2)));
    settle().await;
    assert!(!one.is_finished(), "the first one waits, also with more than the part of its key");
    one.abort();
    held.release().await.expect("the store is up");
    soon("the end", one).await.expect_err("aborted");
    site.assert_room(ROOM, "at the end").await;
}

/// It has the key, and its waiters have the part of the key.
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
    assert_eq!(soon("its answer", holder).await.expect("no panic"), StatusCode::OK);
    assert_eq!(soon("its answer", waits).await.expect("no panic"), StatusCode::OK);
    assert_room(&Router::new().route("/probe", probe(&locks)).layer(DefaultBodyLimit::disable()), ROOM, "at the end")
        .await;
}
