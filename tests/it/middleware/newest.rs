//! A layer whose newest request replaces the older ones.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{DefaultBodyLimit, Path},
    http::{Method, Request, Response, StatusCode},
    routing::{any, get, post},
};
use futures_util::{FutureExt, stream};
use http_body_util::BodyExt;
use tokio::{
    sync::Notify,
    task::JoinHandle,
    time::{Instant, sleep},
};
use tower_lock::{
    HasLockKey, HeldLock, LockError, LockKey, LockLayer, LockLost, LockManager, Locked, MemoryStore, Rejection,
    ReplayLayer,
    key::{self, KeySource},
};
use tower_lock_testkit::{
    app::{fetch, problem_type, send, text},
    body::{ScriptedBody, Step},
    locks::{key, store_and_locks},
    log::Log,
    store::{InterceptedStore, WithoutTraits},
    wait::{ms, settle},
};

const GRACE: Duration = Duration::from_secs(5);

fn layer(locks: &LockManager, grace: Duration) -> LockLayer<impl KeySource> {
    LockLayer::new(locks, key::fixed(key())).newest_wins(grace)
}

/// The key of an extractor.
#[derive(serde::Deserialize)]
struct Account(u64);

impl HasLockKey for Account {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("account", self.0)
    }
}

/// The handlers that run at a time, and the most of them.
#[derive(Clone, Default)]
struct Running(Arc<[AtomicUsize; 2]>);

/// A resource of a handler.
struct Resource(Running);

impl Running {
    fn start(&self) -> Resource {
        let running = self.0[0].fetch_add(1, SeqCst) + 1;
        self.0[1].fetch_max(running, SeqCst);
        Resource(self.clone())
    }

    fn most(&self) -> usize {
        self.0[1].load(SeqCst)
    }
}

impl Drop for Resource {
    fn drop(&mut self) {
        self.0.0[0].fetch_sub(1, SeqCst);
    }
}

/// A route whose handlers sleep for the milliseconds in their path, or until they are replaced.
fn app(layer: LockLayer<impl KeySource>, running: &Running) -> Router {
    let running = running.clone();
    let handler = |lock: HeldLock, Path(ms): Path<u64>| async move {
        let _resource = running.start();
        tokio::select! {
            () = sleep(Duration::from_millis(ms)) => "done",
            () = async {
                lock.superseded().await;
                // What is left to do takes some time.
                sleep(Duration::from_millis(ms % 1_000)).await;
            } => "stopped",
        }
    };
    Router::new().route("/{ms}", any(handler).layer(layer))
}

fn request(app: &Router, ms: u64) -> JoinHandle<Response<Body>> {
    let (app, request) = (app.clone(), Request::get(format!("/{ms}")).body(Body::empty()).expect("a request"));
    tokio::spawn(async move { send(&app, request).await })
}

async fn superseded(response: JoinHandle<Response<Body>>, outcome: &str) {
    let response = response.await.expect("no panic");
    assert_eq!(response.status(), StatusCode::CONFLICT);
    assert!(matches!(response.extensions().get(), Some(Rejection::Superseded { .. })));
    let problem: serde_json::Value = serde_json::from_str(&text(response).await).expect("a problem");
    assert_eq!((&problem["type"], &problem["outcome"]), (&problem_type("superseded").into(), &outcome.into()));
    assert!(problem.get("retry_after_ms").is_none(), "{problem}");
}

async fn ended(response: JoinHandle<Response<Body>>) -> String {
    let response = response.await.expect("no panic");
    assert_eq!(response.status(), StatusCode::OK);
    text(response).await
}

/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn newer_request_replaces_the_one_that_runs() {
    let (store, locks) = store_and_locks();
    let running = Running::default();
    let app = app(layer(&locks, Duration::ZERO), &running);
    let started = Instant::now();
    let older = request(&app, 60_001);
    settle().await;
    let newer = request(&app, 1);
    superseded(older, "unknown").await;
    assert_eq!(ended(newer).await, "done");
    assert!(started.elapsed() < ms(10), "no lock-delay keeps the key blocked: {:?}", started.elapsed());
    assert_eq!((running.most(), store.held_count(), locks.size()), (1, 0, (0, 0)));
}

/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn waiting_request_is_replaced_before_it_starts() {
    let (_store, locks) = store_and_locks();
    let running = Running::default();
    let app = app(layer(&locks, GRACE), &running);
    // It needs 900 ms for its end.
    let first = request(&app, 60_900);
    settle().await;
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(request(&app, 1));
        settle().await;
    }
    let last = waiting.pop().expect("of three");
    for replaced in waiting {
        superseded(replaced, "not-started").await;
    }
    let started = Instant::now();
    assert_eq!((ended(first).await.as_str(), ended(last).await.as_str()), ("stopped", "done"));
    assert!(started.elapsed() >= ms(900) && running.most() == 1, "the last one waits for the end of the first one");
}

/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn handler_that_ignores_a_newer_one_is_dropped_after_the_grace() {
    let (_store, locks) = store_and_locks();
    let handler = |Path(ms): Path<u64>| async move { sleep(Duration::from_millis(ms)).await };
    let app = Router::new().route("/{ms}", any(handler).layer(layer(&locks, GRACE)));
    let older = request(&app, 60_000);
    settle().await;
    let started = Instant::now();
    let newer = request(&app, 0);
    superseded(older, "unknown").await;
    let after = started.elapsed();
    assert!(after >= GRACE && after < GRACE + ms(50), "{after:?}");
    ended(newer).await;
}

/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn stream_ends_with_an_error_before_the_newer_request_starts() {
    let (_store, locks) = store_and_locks();
    let (say, body) = ScriptedBody::fed();
    let is_dropped = body.is_dropped();
    let body = Arc::new(std::sync::Mutex::new(Some(Body::new(body))));
    let seen = Arc::clone(&is_dropped);
    let handler = any(move || async move {
        match body.lock().expect("whole").take() {
            Some(stream) => Response::new(stream),
            None => Response::new(Body::from(format!("{}", seen.load(SeqCst)))),
        }
    });
    let app = Router::new().route("/", handler.layer(layer(&locks, Duration::ZERO)));
    let mut stream = fetch(&app, "/").await.into_body();
    say.send(Step::Text("one")).expect("read");
    assert_eq!(stream.frame().await.expect("one").expect("data").into_data().expect("data"), "one");
    assert_eq!(text(fetch(&app, "/").await).await, "true", "its resources are dropped");
    let error = stream.frame().await.expect("an end").expect_err("incomplete");
    let is_superseded = |error: &(dyn std::error::Error + 'static)| error.downcast_ref() == Some(&LockLost::Superseded);
    let mut causes = std::iter::successors(Some(&error as &(dyn std::error::Error + 'static)), |error| error.source());
    assert!(causes.any(is_superseded), "{error:?}");
}

/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn section_of_another_kind_is_not_replaced() {
    let (_store, locks) = store_and_locks();
    let running = Running::default();
    let app = app(layer(&locks, GRACE), &running);
    let held = locks.lock(key()).await.expect("free");
    let started = Instant::now();
    let refused = fetch(&app, "/1").await;
    assert_eq!(refused.status(), StatusCode::CONFLICT);
    assert!(matches!(refused.extensions().get(), Some(Rejection::TimedOut { .. })), "{refused:?}");
    assert_eq!(started.elapsed().as_secs(), (GRACE + ms(12_000)).as_secs(), "the wait, without a setting");
    let waits = request(&app, 1);
    settle().await;
    assert!(!held.held_lock().remaining().is_zero());
    held.release().await.expect("held");
    assert_eq!(ended(waits).await, "done");
}

/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn request_does_not_replace_itself() {
    let (_store, locks) = store_and_locks();
    let inner = || get(|_: HeldLock| async { "inner" });
    let (newest, plain) = (layer(&locks, Duration::ZERO), LockLayer::new(&locks, key::fixed(key())));
    for inner in [inner().route_layer(newest.clone()), inner().route_layer(plain)] {
        let app = Router::new().route("/", inner.route_layer(newest.clone()));
        assert_eq!(text(fetch(&app, "/").await).await, "inner");
    }
}

/// The key of an extractor has not been given up: a statement under it may be in flight.
///
/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn other_locks_of_a_replaced_handler_keep_their_lock_delay() {
    let (_store, locks) = store_and_locks();
    let handler = |Locked(Path(Account(ms)), _): Locked<Path<Account>>| async move {
        sleep(Duration::from_millis(ms)).await;
    };
    let app = Router::new().route("/{ms}", any(handler).layer(layer(&locks, Duration::ZERO)));
    let older = request(&app, 60_000);
    settle().await;
    let started = Instant::now();
    ended(request(&app, 1)).await;
    superseded(older, "unknown").await;
    assert!(started.elapsed() < ms(10));
    assert!(matches!(locks.try_lock(("account", 60_000)).await, Err(LockError::Busy { .. })));
    sleep(ms(1_000)).await;
    assert!(locks.try_lock(("account", 60_000)).await.is_ok());
}

/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn grace_is_that_of_the_handler_and_of_its_stream() {
    let (_store, locks) = store_and_locks();
    let log = Log::default();
    let _listening = log.listen();
    let handler = |Path(ms): Path<u64>| async move {
        sleep(Duration::from_millis(ms)).await;
        // Always ready, and without an end.
        let words = stream::repeat_with(|| Ok::<_, Infallible>("word"));
        if ms == 0 { Body::empty() } else { Body::from_stream(words) }
    };
    let app = Router::new().route("/{ms}", any(handler).layer(layer(&locks, GRACE)));
    let older = request(&app, 4_000);
    settle().await;
    let started = Instant::now();
    let newer = request(&app, 0);
    let stream = older.await.expect("no panic").into_body();
    let error = tokio::spawn(async move {
        let mut stream = stream;
        while let Some(frame) = stream.frame().await {
            sleep(ms(1)).await;
            if frame.is_err() {
                return true;
            }
        }
        false
    });
    ended(newer).await;
    let after = started.elapsed();
    assert!(after >= GRACE && after < GRACE + ms(50), "{after:?}");
    assert!(error.await.expect("no panic") && log.text().contains("request replaced"), "{}", log.text());
}

/// As a client does that stops a stream for its next request.
///
/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn stream_that_its_client_stops_has_no_lock_delay() {
    let (store, locks) = store_and_locks();
    let (_say, body) = ScriptedBody::fed();
    let body = Arc::new(std::sync::Mutex::new(Some(Body::new(body))));
    let handler = any(move || async move { Response::new(body.lock().expect("whole").take().unwrap_or_default()) });
    let app = Router::new().route("/", handler.layer(layer(&locks, Duration::ZERO)));
    drop(fetch(&app, "/").await);
    settle().await;
    assert_eq!(store.held_count(), 0);
    let started = Instant::now();
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    assert!(started.elapsed() < ms(10), "{:?}", started.elapsed());
}

/// It had its lock to the end.
///
/// Guarantee: G25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handler_that_has_completed_is_not_replaced() {
    let (_store, locks) = store_and_locks();
    let (started, is_first) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(true)));
    let starts = Arc::clone(&started);
    let handler = |lock: HeldLock| async move {
        starts.notify_one();
        // In the poll in which it completes.
        while is_first.load(SeqCst) && lock.superseded().now_or_never().is_none() {
            std::thread::yield_now();
        }
        is_first.store(false, SeqCst);
        "committed"
    };
    let app = Router::new().route("/", get(handler).layer(layer(&locks, Duration::ZERO)));
    let older = app.clone();
    let older = tokio::spawn(async move { text(fetch(&older, "/").await).await });
    started.notified().await;
    assert_eq!(text(fetch(&app, "/").await).await, "committed");
    assert_eq!(older.await.expect("no panic"), "committed");
}

/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn newest_request_takes_the_place_of_a_large_one() {
    let (_store, locks) = store_and_locks();
    let running = Running::default();
    let app = app(layer(&locks, GRACE), &running).layer(DefaultBodyLimit::max(16 << 20));
    let first = request(&app, 60_900);
    settle().await;
    let large = || {
        let request = Request::post("/1").body(Body::from(vec![0; 8 << 20])).expect("a request");
        let app = app.clone();
        tokio::spawn(async move { send(&app, request).await })
    };
    let second = large();
    settle().await;
    let third = large();
    superseded(second, "not-started").await;
    assert_eq!((ended(first).await.as_str(), ended(third).await.as_str()), ("stopped", "done"));
}

/// Guarantee: G25.
#[tokio::test(start_paused = true)]
async fn replaced_request_leaves_no_answer() {
    let (_store, locks) = store_and_locks();
    let running = Running::default();
    let runs = running.clone();
    let handler = post(|Path(ms): Path<u64>| async move {
        let _resource = runs.start();
        sleep(Duration::from_millis(ms)).await;
    });
    let replay = ReplayLayer::new(&locks, key::fixed(("user", 7)));
    let app = Router::new().route("/{ms}", handler.route_layer(layer(&locks, Duration::ZERO)).route_layer(replay));
    let attempt = |uri, key| {
        let request = Request::post(uri).header("idempotency-key", key).body(Body::empty()).expect("a request");
        let app = app.clone();
        tokio::spawn(async move { send(&app, request).await })
    };
    let first = attempt("/60000", "\"a\"");
    settle().await;
    ended(attempt("/0", "\"b\"")).await;
    superseded(first, "unknown").await;
    let again = attempt("/60000", "\"a\"").await.expect("no panic");
    assert_eq!((again.status(), again.headers().get("idempotency-replayed")), (StatusCode::OK, None), "it runs");
}

/// Guarantee: G25.
#[test]
fn what_does_not_go_with_it_is_refused_by_name() {
    let locks = LockManager::in_memory();
    let poor = LockManager::new(InterceptedStore::new(Arc::new(MemoryStore::new()), WithoutTraits));
    let layer = |locks| LockLayer::new(locks, key::fixed(key()));
    let builds: [&dyn Fn(); 8] = [
        &|| drop(layer(&locks).newest_wins(GRACE).at_most(2)),
        &|| drop(layer(&locks).at_most(1).newest_wins(GRACE)),
        &|| drop(layer(&locks).at_most_by(|_| 2).newest_wins(GRACE)),
        &|| drop(layer(&locks).newest_wins(GRACE).shared_for([Method::GET])),
        &|| drop(layer(&locks).newest_wins(GRACE).tickets(GRACE, GRACE)),
        &|| drop(layer(&locks).tickets(GRACE, GRACE).newest_wins(GRACE)),
        &|| drop(layer(&locks).newest_wins(ms(30_001))),
        &|| drop(layer(&poor).newest_wins(GRACE)),
    ];
    for build in builds {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(build)).expect_err("refused");
        let fixed = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = panic.downcast_ref::<String>().cloned().or(fixed).expect("a text");
        assert!(text.contains("`newest_wins`"), "{text}");
    }
}
