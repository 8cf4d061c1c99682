//! A replay layer with other layers, with extractors, and without Axum.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    http::{Request, Response, StatusCode},
    routing::post,
};
use http_body_util::{BodyExt, Full};
use tokio::time::sleep;
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_lock::{
    HasLockKey, HeldLock, LockKey, LockLayer, LockManager, LockManagerLayer, Locked, Once, ReplayLayer, key,
    middleware::RequestBody,
};
use tower_lock_testkit::{
    app::{send, text},
    body::{ScriptedBody, Step},
    locks::{one_key, store_and_locks},
    wait::{ms, settle},
};

use super::{app, counted, created, is_replayed, layer, problem, request, run_of, spawn};

const S: Duration = Duration::from_secs(1);

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn retry_needs_no_lock_of_an_inner_layer() {
    let (store, locks) = store_and_locks();
    let (handler, runs) = counted(created);
    let handler = handler.route_layer(LockLayer::new(&locks, one_key())).route_layer(layer(&locks));
    let app = Router::new().route("/", handler);
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false));
    let held = locks.try_lock(("k",)).await.expect("free");
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, true));
    // The rejection of the inner layer says that the handler did not run.
    problem(send(&app, request("b", "x")).await, 409, "locked").await;
    held.release().await.expect("up");
    assert_eq!(run_of(send(&app, request("b", "x")).await).await, (2, false), "at once");
    assert_eq!((runs(), store.held_count()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn rejection_of_an_inner_layer_is_never_kept() {
    let (_store, locks) = store_and_locks();
    let (handler, runs) = counted(created);
    let inner = LockLayer::new(&locks, one_key())
        .on_reject(|_| Response::builder().status(202).body(Body::empty()).expect("a response"));
    let handler = handler.route_layer(inner).route_layer(layer(&locks).keep_if(|_| true));
    let app = Router::new().route("/", handler);
    let held = locks.try_lock(("k",)).await.expect("free");
    assert_eq!(send(&app, request("a", "x")).await.status(), StatusCode::ACCEPTED);
    held.release().await.expect("up");
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false));
    assert_eq!(runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn body_is_read_once_for_both_layers_and_the_handler() {
    let (_store, locks) = store_and_locks();
    let echo = service_fn(|request: Request<RequestBody>| async move {
        let lock = request.extensions().get::<HeldLock>().map(|lock| lock.key().to_string());
        let body = request.into_body().collect().await.expect("complete").to_bytes();
        let text = format!("{} {}", lock.unwrap_or_default(), String::from_utf8_lossy(&body));
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(text))))
    });
    let by_body = LockLayer::new(&locks, key::from_fn(|text: String| ("text", text)));
    let service = ServiceBuilder::new().layer(layer(&locks)).layer(by_body).service(echo);
    for is_retry in [false, true] {
        let polls = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&polls);
        let body = ScriptedBody::new([Step::Text("one-"), Step::Text("two")]);
        let body = body.on_poll(move || {
            counter.fetch_add(1, SeqCst);
        });
        let request = Request::post("/").header("idempotency-key", "a").body(body).expect("a request");
        let response = service.clone().oneshot(request).await.expect("infallible");
        assert_eq!(response.headers().contains_key("idempotency-replayed"), is_retry);
        assert_eq!(text(response).await, "text:one-two one-two");
        assert_eq!(polls.load(SeqCst), 3, "two frames and the end");
    }
}

#[tokio::test(start_paused = true)]
async fn layer_works_on_a_tower_service_without_axum() {
    let (store, locks) = store_and_locks();
    let runs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&runs);
    let service = service_fn(move |request: Request<RequestBody>| {
        let (run, once) = (counter.fetch_add(1, SeqCst) + 1, request.extensions().get::<Once>().is_some());
        async move { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(format!("run {run} {once}"))))) }
    });
    let scope = key::from_parts(|head| {
        let user = head.headers.get("x-user").and_then(|user| user.to_str().ok());
        user.map(|user| ("user", user.to_owned())).ok_or(StatusCode::UNAUTHORIZED)
    });
    let service = ServiceBuilder::new().layer(ReplayLayer::new(&locks, scope)).service(service);
    let of = |user: &str| {
        let request = Request::post("/").header("x-user", user).header("idempotency-key", "a");
        request.body(Full::<Bytes>::from("x")).expect("a request")
    };
    for (user, expected) in [("ann", "run 1 true"), ("bob", "run 2 true"), ("ann", "run 1 true"), ("bob", "run 2 true")]
    {
        let response = service.clone().oneshot(of(user)).await.expect("infallible");
        assert_eq!(text(response).await, expected);
    }
    let nobody = Request::post("/").header("idempotency-key", "a").body(Full::<Bytes>::default()).expect("a request");
    assert_eq!(service.oneshot(nobody).await.expect("infallible").status(), StatusCode::UNAUTHORIZED);
    assert_eq!((runs.load(SeqCst), store.held_count()), (2, 0));
}

/// The lock of an idempotency key does not protect a resource.
#[tokio::test(start_paused = true)]
async fn held_lock_is_never_that_of_the_idempotency_key() {
    let (_store, locks) = store_and_locks();
    let show = || post(async |lock: HeldLock| lock.key().to_string());
    let with_lock = show().route_layer(LockLayer::new(&locks, one_key())).route_layer(layer(&locks));
    let without = show().route_layer(layer(&locks));
    let optional = post(async |lock: Option<HeldLock>| lock.is_some().to_string()).route_layer(layer(&locks));
    let app = Router::new().route("/", with_lock).route("/without", without).route("/optional", optional);
    assert_eq!(text(send(&app, request("a", "x")).await).await, "k");
    let at = |path: &str| Request::post(path).header("idempotency-key", "b").body(Body::empty()).expect("a request");
    let response = send(&app, at("/without")).await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(text(response).await.contains("no `LockLayer` is around this handler"));
    assert_eq!(text(send(&app, at("/optional")).await).await, "false");
}

#[tokio::test(start_paused = true)]
async fn nested_layers_with_one_scope_run_the_handler_once() {
    for wait in [Duration::ZERO, 10 * S] {
        let (store, locks) = store_and_locks();
        let (handler, runs) = counted(created);
        let twice = || layer(&locks).wait(wait);
        let app = Router::new().route("/", handler.route_layer(twice()).route_layer(twice()));
        assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false), "{wait:?}");
        assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, true), "{wait:?}");
        assert_eq!((runs(), store.held_count(), locks.size()), (1, 0, (0, 0)));
    }
}

#[tokio::test(start_paused = true)]
async fn nested_layers_with_two_scopes_keep_both_answers() {
    let (store, locks) = store_and_locks();
    let (handler, runs) = counted(created);
    let inner = ReplayLayer::new(&locks, key::fixed(("inner",)));
    let both = Router::new().route("/", handler.clone().route_layer(inner.clone()).route_layer(layer(&locks)));
    assert_eq!(run_of(send(&both, request("a", "x")).await).await, (1, false));
    assert_eq!(run_of(send(&both, request("a", "x")).await).await, (1, true));
    let inner_only = Router::new().route("/", handler.route_layer(inner));
    assert_eq!(run_of(send(&inner_only, request("a", "x")).await).await, (1, true));
    assert_eq!((runs(), store.held_count()), (1, 0));
}

#[derive(serde::Deserialize)]
struct Claim {
    id: u64,
}

impl HasLockKey for Claim {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("claim", self.id)
    }
}

/// A wait for an answer is no wait for a lock.
#[tokio::test(start_paused = true)]
async fn locks_of_the_handler_have_the_settings_of_outer_layers() {
    let (store, locks) = store_and_locks();
    let by_extractor = post(async |Locked(Json(claim), _): Locked<Json<Claim>>| format!("run {}", claim.id));
    let manager = locks.clone();
    let by_call = post(async move || match manager.lock(("claim", 1)).await {
        Ok(_guard) => "run 1".to_owned(),
        Err(error) => error.to_string(),
    });
    for (wait, manager_wait, succeeds) in [(None, Some(10 * S), true), (Some(10 * S), None, false)] {
        for handler in [by_extractor.clone(), by_call.clone()] {
            let replay = wait.map_or_else(|| layer(&locks), |wait| layer(&locks).wait(wait));
            let outside = LockManagerLayer::new(&locks);
            let outside = manager_wait.map_or(outside.clone(), |wait| outside.wait(wait));
            let app = Router::new().route("/", handler.route_layer(replay)).layer(outside);
            let held = locks.lock(("claim", 1)).await.expect("free");
            let key = format!("key-{succeeds}");
            let mut request = request(&key, r#"{"id": 1}"#);
            request.headers_mut().insert("content-type", "application/json".parse().expect("a value"));
            let response = spawn(&app, request);
            sleep(ms(500)).await;
            held.release().await.expect("up");
            let text = text(response.await.expect("no panic")).await;
            assert_eq!(text == "run 1", succeeds, "{wait:?} {manager_wait:?}: {text}");
            store.restart();
        }
    }
}

/// A request that waits for the lock of an inner layer leaves its queue when its client does.
#[tokio::test(start_paused = true)]
async fn disconnect_while_an_inner_lock_waits_runs_nothing() {
    let (store, locks) = store_and_locks();
    let (handler, runs) = counted(created);
    let inner = LockLayer::new(&locks, one_key()).wait(60 * S);
    let app = Router::new().route("/", handler.route_layer(inner).route_layer(layer(&locks)));
    let held = locks.lock(("k",)).await.expect("free");
    let request_of_client = spawn(&app, request("a", "x"));
    settle().await;
    request_of_client.abort();
    settle().await;
    held.release().await.expect("up");
    sleep(2 * S).await;
    assert_eq!((runs(), store.held_count(), locks.size()), (0, 0, (0, 0)));
    assert_eq!(run_of(send(&app, request("a", "x")).await).await, (1, false));
}

/// Two instances of a service.
#[tokio::test(start_paused = true)]
async fn retry_at_another_instance_gets_the_answer() {
    let (store, one) = store_and_locks();
    let two = LockManager::new(store.clone());
    let ((first, runs), (second, other_runs)) = (app(layer(&one), created), app(layer(&two).wait(10 * S), created));
    let running = spawn(&first, request("a", "x"));
    settle().await;
    let (waits, impatient) = (spawn(&second, request("a", "x")), app(layer(&two), created).0);
    assert_eq!(send(&impatient, request("a", "x")).await.status(), StatusCode::CONFLICT);
    assert_eq!(run_of(running.await.expect("no panic")).await, (1, false));
    assert_eq!(run_of(waits.await.expect("no panic")).await, (1, true));
    assert!(is_replayed(&send(&impatient, request("a", "x")).await));
    assert_eq!((runs(), other_runs()), (1, 0));
}
