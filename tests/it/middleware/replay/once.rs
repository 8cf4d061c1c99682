//! Answers that a handler stores in its own database.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Method, Request, StatusCode},
    response::{IntoResponse, Response},
    routing::{MethodRouter, post},
};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_lock::{
    AnswerError, LockKey, LockManager, Once, ReplayLayer,
    key::{self, KeySource},
    middleware::RequestBody,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    app::{send, text},
    body::{ScriptedBody, Step},
    locks::store_and_locks,
    wait::{ms, soon},
};

use super::{app, created, is_replayed, layer, problem, request, run_of, spawn};

type MakeResponse = fn() -> Response;

/// A database, and the runs and questions that it has seen.
#[derive(Clone, Default)]
struct Database {
    rows: Arc<Mutex<HashMap<String, Vec<u8>>>>,
    runs: Arc<AtomicUsize>,
    questions: Arc<AtomicUsize>,
    is_down: Arc<Mutex<bool>>,
}

impl Database {
    /// A handler that writes its answer in the transaction of its work.
    fn handler(&self) -> MethodRouter {
        let this = self.clone();
        post(async move |once: Once| this.clone().claim(once).await)
    }

    async fn claim(self, once: Once) -> Result<Response, AnswerError> {
        let run = self.runs.fetch_add(1, SeqCst) + 1;
        let answer = once.answer(created(run).into_response()).await?;
        self.rows.lock().expect("whole").insert(once.key().to_string(), answer.as_bytes().to_vec());
        sleep(ms(100)).await;
        Ok(answer.into_response())
    }

    fn layer(&self, locks: &LockManager) -> ReplayLayer<impl KeySource + use<>> {
        let this = self.clone();
        layer(locks).find_answer(move |key: LockKey| {
            this.questions.fetch_add(1, SeqCst);
            let is_down = *this.is_down.lock().expect("whole");
            let found = this.rows.lock().expect("whole").get(key.as_str()).cloned();
            async move { if is_down { Err(io::Error::other("down")) } else { Ok(found) } }
        })
    }

    fn app(&self, locks: &LockManager) -> Router {
        Router::new().route("/", self.handler().route_layer(self.layer(locks)))
    }

    /// The number of runs and of questions.
    fn counts(&self) -> (usize, usize) {
        (self.runs.load(SeqCst), self.questions.load(SeqCst))
    }
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn answer_in_the_database_is_replayed_and_recorded() {
    let (store, locks) = store_and_locks();
    let database = Database::default();
    let app = database.app(&locks);
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false));
    assert_eq!(database.counts(), (1, 1));
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, true));
    assert_eq!(database.counts(), (1, 1), "a replay asks no database");
    store.restart();
    for _ in 0..3 {
        let response = send(&app, request("a", "x")).await;
        assert_eq!(response.status(), StatusCode::CREATED);
        assert_eq!(response.headers()["location"], "/runs/1");
        assert_eq!(run_of(response).await, (1, true));
        assert_eq!(database.counts(), (1, 2), "the record is left again");
    }
    assert_eq!(store.held_count(), 0);
}

/// The process is killed between the commit of the handler and the record.
/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn committed_work_does_not_run_again_after_a_crash() {
    let store = TestStore::new();
    let database = Database::default();
    let crashes = LockManager::new(store.clone());
    let first = spawn(&database.app(&crashes), request("a", "x"));
    sleep(ms(50)).await;
    // No release of this process reaches the store before its lease ends.
    store.on(StoreOp::Release).fault(Fault::Fail);
    store.on(StoreOp::Renew).fault(Fault::Fail);
    first.abort();
    sleep(Duration::from_secs(40)).await;
    store.on(StoreOp::Release).fault(Fault::None);
    store.on(StoreOp::Renew).fault(Fault::None);
    let survives = LockManager::new(store.clone());
    assert_eq!(run_of(send(&database.app(&survives), request("a", "x")).await).await, (1, true));
    assert_eq!(database.runs.load(SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn nothing_runs_while_the_database_cannot_be_asked() {
    let (store, locks) = store_and_locks();
    let database = Database::default();
    let app = database.app(&locks);
    *database.is_down.lock().expect("whole") = true;
    for questions in 1..=2 {
        let problem = problem(send(&app, request("a", "x")).await, 503, "store-unavailable").await;
        assert_eq!(problem["outcome"], "not-started");
        assert_eq!((database.counts(), store.held_count()), ((0, questions), 0));
    }
    *database.is_down.lock().expect("whole") = false;
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false), "at once");
}

#[tokio::test(start_paused = true)]
async fn answer_of_another_request_in_the_database_is_a_422() {
    let (store, locks) = store_and_locks();
    let database = Database::default();
    let app = database.app(&locks);
    send(&app, request("a", "x")).await;
    store.restart();
    problem(send(&app, request("a", "y")).await, 422, "idempotency-key-reused").await;
    assert_eq!((database.runs.load(SeqCst), store.held_count()), (1, 0));
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, true), "the first one is still found");
}

#[tokio::test(start_paused = true)]
async fn garbage_in_the_database_is_no_answer() {
    let (_store, locks) = store_and_locks();
    let database = Database::default();
    send(&database.app(&locks), request("a", "x")).await;
    let (key, bytes) = database.rows.lock().expect("whole").drain().next().expect("a row");
    let cuts = (0..bytes.len()).step_by(7).map(|end| bytes[..end.min(40)].to_vec());
    let wrong = [b"garbage".to_vec(), vec![255; 100], vec![0; 100], [&[9], &bytes[1..]].concat()];
    for row in cuts.chain(wrong) {
        let (store, locks) = store_and_locks();
        database.rows.lock().expect("whole").insert(key.clone(), row.clone());
        let response = send(&database.app(&locks), request("a", "x")).await;
        problem(response, 503, "store-unavailable").await;
        assert_eq!((database.runs.load(SeqCst), store.held_count()), (1, 0), "{row:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn answer_that_is_too_large_is_an_error_of_the_handler() {
    let (_store, locks) = store_and_locks();
    let bodies: [(MakeResponse, Option<&str>); 4] = [
        (|| vec![b'x'; 1_000].into_response(), None),
        (|| vec![b'x'; 1_001].into_response(), Some("at most 1000 bytes of body and 16 KiB of headers")),
        (|| ([("x-long", "x".repeat(16 << 10))], "small").into_response(), Some("16 KiB of headers")),
        (
            || Body::new(ScriptedBody::new([Step::Error("broken")])).into_response(),
            Some("the body of the answer failed"),
        ),
    ];
    for (n, (response, error)) in bodies.into_iter().enumerate() {
        let handler = post(async move |once: Once| once.answer(response()).await.map(IntoResponse::into_response));
        let app = Router::new().route("/", handler.route_layer(layer(&locks).keep_up_to(1_000)));
        let response = send(&app, request(&format!("key-{n}"), "x")).await;
        assert_eq!(response.status() == StatusCode::INTERNAL_SERVER_ERROR, error.is_some());
        let text = text(response).await;
        assert!(text.contains(error.unwrap_or_default()), "{text}");
    }
}

/// The work is in the database, so it is done, also if the status is that of an error.
#[tokio::test(start_paused = true)]
async fn answer_with_an_error_status_is_kept_by_once() {
    let (_store, locks) = store_and_locks();
    let handler = post(async |once: Once| {
        let answer = once.answer((StatusCode::BAD_GATEWAY, "captured, no receipt").into_response()).await;
        answer.map(IntoResponse::into_response)
    });
    let app = Router::new().route("/", handler.route_layer(layer(&locks)));
    assert!(!is_replayed(&send(&app, request("a", "x")).await));
    let retry = send(&app, request("a", "x")).await;
    assert!(retry.status() == StatusCode::BAD_GATEWAY && is_replayed(&retry));
}

#[tokio::test(start_paused = true)]
async fn once_without_its_layer_names_the_remedy() {
    let (_store, locks) = store_and_locks();
    let handler = || post(async |once: Once| once.key().to_string());
    let without_layer = Router::new().route("/", handler());
    let without_key = Router::new().route("/", handler().route_layer(layer(&locks)));
    let no_scope = ReplayLayer::new(&locks, key::from_parts(|_| None::<LockKey>));
    let without_scope = Router::new().route("/", handler().route_layer(no_scope));
    let other_method = Router::new().route("/", handler().route_layer(layer(&locks).methods([Method::PUT])));
    let no_key = || Request::post("/").body(Body::empty()).expect("a request");
    for (app, request, remedy) in [
        (without_layer, request("a", "x"), "Put one on its route: `post(handler).route_layer(ReplayLayer::new("),
        (without_key, no_key(), "Call `.required()` on the `ReplayLayer`"),
        (without_scope, request("a", "x"), "Return a scope for each request"),
        (other_method, request("a", "x"), "Add the method to `.methods(..)`"),
    ] {
        let response = send(&app, request).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let text = text(response).await;
        assert!(text.contains(remedy), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn lock_that_is_lost_while_the_database_is_asked_runs_nothing() {
    let (store, locks) = store_and_locks();
    let (asked, key) = tokio::sync::oneshot::channel();
    let asked = Mutex::new(Some(asked));
    let layer = layer(&locks).find_answer(move |key: LockKey| {
        let asked = asked.lock().expect("whole").take();
        async move {
            if let Some(asked) = asked {
                asked.send(key).expect("a receiver");
                sleep(Duration::from_secs(20)).await;
            }
            Ok::<_, io::Error>(None::<Bytes>)
        }
    });
    let (app, runs) = app(layer, created);
    let first = spawn(&app, request("a", "x"));
    let key = soon("a question", key).await.expect("asked");
    let began = Instant::now();
    locks.force_release(key).await.expect("up");
    problem(first.await.expect("no panic"), 503, "lost").await;
    assert!(began.elapsed() < Duration::from_secs(1), "before the database replies");
    assert_eq!(runs(), 0);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false));
    assert_eq!(store.held_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn disconnect_while_the_database_is_asked_frees_the_key() {
    let (store, locks) = store_and_locks();
    let is_first = Mutex::new(true);
    let layer = layer(&locks).find_answer(move |_| {
        let is_first = std::mem::take(&mut *is_first.lock().expect("whole"));
        async move {
            if is_first {
                sleep(Duration::from_secs(20)).await;
            }
            Ok::<_, io::Error>(None::<Bytes>)
        }
    });
    let (app, runs) = app(layer, created);
    let first = spawn(&app, request("a", "x"));
    sleep(ms(10)).await;
    first.abort();
    sleep(ms(10)).await;
    assert_eq!((runs(), store.held_count()), (0, 0));
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false), "nothing ran: no lock-delay");
}

#[tokio::test(start_paused = true)]
async fn disconnect_before_the_handler_starts_frees_the_key() {
    let (store, locks) = store_and_locks();
    let layer = layer(&locks).find_answer(async |_| Ok::<_, io::Error>(None::<Bytes>));
    let inner = service_fn(async |_: Request<RequestBody>| {
        sleep(ms(100)).await;
        Ok::<_, Infallible>(Response::new(Body::from("run 1")))
    });
    let service = layer.layer(ConcurrencyLimit::new(inner, 1));
    let call = |key| tokio::spawn(service.clone().oneshot(request(key, "x")));
    let (busy, leaves) = (call("b"), call("a"));
    sleep(ms(10)).await;
    assert_eq!(store.held_count(), 2, "it waits for capacity");
    leaves.abort();
    sleep(ms(10)).await;
    assert_eq!(store.held_count(), 1);
    assert_eq!(call("a").await.expect("no panic").expect("infallible").status(), StatusCode::OK);
    busy.await.expect("no panic").expect("infallible");
}

/// The store has dropped the body of the answer, or never had it.
/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn answer_in_the_database_replaces_a_body_that_was_not_kept() {
    let (_, locks) = store_and_locks();
    let (database, this) = (Database::default(), Database::default());
    let database = Database { rows: Arc::clone(&this.rows), ..database };
    let handler = post(async move |once: Once| {
        drop(this.claim(once).await);
        "x".repeat(100_000)
    });
    let app = Router::new().route("/", handler.route_layer(database.layer(&locks)));
    assert_eq!(text(send(&app, request("a", "x")).await).await.len(), 100_000);
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, true));
    database.rows.lock().expect("whole").clear();
    problem(send(&app, request("a", "x")).await, 409, "answer-not-kept").await;
    assert_eq!(database.questions.load(SeqCst), 3, "one before the run");
}

#[tokio::test(start_paused = true)]
async fn search_for_a_body_that_was_not_kept_has_an_end() {
    let (_, locks) = store_and_locks();
    let is_first = AtomicUsize::new(0);
    let layer = layer(&locks).find_answer(move |_| {
        let is_first = is_first.fetch_add(1, SeqCst) == 0;
        async move { if is_first { Ok::<_, io::Error>(None::<Vec<u8>>) } else { std::future::pending().await } }
    });
    let (app, runs) = app(layer, |_| "x".repeat(100_000));
    send(&app, request("a", "x")).await;
    let retry = tokio::time::timeout(Duration::from_secs(600), app.clone().oneshot(request("a", "x"))).await;
    problem(retry.expect("an end").expect("infallible"), 503, "store-unavailable").await;
    assert_eq!(runs(), 1);
}
