//! `Locked`: the lock of an extracted value.

use std::{
    ops::Deref,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Extension, Json, Router,
    body::{Body, Bytes},
    extract::{FromRequestParts, Path, Query},
    http::{Request, StatusCode, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::stream;
use tokio::time::{Instant, sleep};
use tower_lock::{
    HasLockKey, HeldLock, LockKey, LockLayer, LockManager, LockManagerLayer, Locked, OnLost, Rejection, key,
    test_util::{Fault, StoreOp},
};
use tower_lock_testkit::{
    app::{fetch, post_json, problem_type, text},
    locks::{one_key, store_and_locks},
    wait::settle,
};

const S: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, serde::Deserialize)]
struct Claim {
    family_id: u64,
}

impl HasLockKey for Claim {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("family", self.family_id)
    }
}

#[derive(serde::Deserialize)]
#[serde(transparent)]
struct FamilyId(u64);

impl HasLockKey for FamilyId {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("family", self.0)
    }
}

async fn show(Locked(Json(claim), lock): Locked<Json<Claim>>) -> String {
    format!("{} {} {}", claim.family_id, lock.key().as_str(), lock.ensure_remaining(S).is_ok())
}

/// Guarantee: G14.
#[tokio::test(start_paused = true)]
async fn locked_holds_the_key_of_its_value_to_the_response_end() {
    let (store, locks) = store_and_locks();
    let again = locks.clone();
    let streams = post(async move |Locked(Json(_), _): Locked<Json<Claim>>| {
        // The request is its owner and reenters.
        again.try_lock(("family", 7)).await.expect("reentered").release().await.expect("up");
        let parts = stream::unfold(0, |n| async move {
            sleep(S).await;
            (n < 3).then_some((Ok::<_, std::convert::Infallible>("x"), n + 1))
        });
        Body::from_stream(parts)
    });
    let app = Router::new()
        .route("/claim", post(show))
        .route(
            "/path/{id}",
            get(async |Locked(Path(id), lock): Locked<Path<FamilyId>>| format!("{} {}", id.0, lock.key().as_str())),
        )
        .route(
            "/query",
            get(async |Locked(Query(claim), lock): Locked<Query<Claim>>, inner: HeldLock| {
                format!("{} {} {}", claim.family_id, lock.key().as_str(), lock.fencing_token() == inner.fencing_token())
            }),
        )
        .route("/streams", streams)
        .layer(LockManagerLayer::new(&locks));
    for (response, expected) in [
        (post_json(&app, "/claim", r#"{"family_id":7}"#).await, "7 family:7 true"),
        (fetch(&app, "/path/%30007").await, "7 family:7"),
        (fetch(&app, "/query?family_id=%2B7").await, "7 family:7 true"),
    ] {
        assert_eq!((response.status(), text(response).await.as_str()), (StatusCode::OK, expected));
        assert_eq!((store.held_count(), locks.size()), (0, (0, 0)), "released with a complete response");
    }

    let response = post_json(&app, "/streams", r#"{"family_id":7}"#).await;
    assert_eq!(store.held_count(), 1, "a stream holds it");
    assert_eq!(post_json(&app, "/claim", r#"{"family_id":7}"#).await.status(), StatusCode::CONFLICT);
    assert_eq!(post_json(&app, "/claim", r#"{"family_id":8}"#).await.status(), StatusCode::OK);
    assert_eq!(text(response).await, "xxx");
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn locked_rejects_as_a_layer_and_keeps_inner_rejections() {
    let (_store, locks) = store_and_locks();
    let layer = LockManagerLayer::new(&locks).wait(2 * S);
    let app = Router::new().route("/", post(show)).layer(layer.clone());
    let guard = locks.lock(("family", 7)).await.expect("free");
    let began = Instant::now();
    let response = post_json(&app, "/", r#"{"family_id":7}"#).await;
    assert_eq!((response.status(), began.elapsed()), (StatusCode::CONFLICT, 2 * S));
    assert!(matches!(response.extensions().get(), Some(Rejection::TimedOut { .. })));
    assert!(text(response).await.contains(&problem_type("timed-out")));
    assert_eq!(post_json(&app, "/", r#"{"family":7}"#).await.status(), StatusCode::UNPROCESSABLE_ENTITY);

    let own = Router::new().route("/", post(show)).layer(layer.on_reject(|_| StatusCode::IM_A_TEAPOT.into_response()));
    assert_eq!(post_json(&own, "/", r#"{"family_id":7}"#).await.status(), StatusCode::IM_A_TEAPOT);
    guard.release().await.expect("up");
    assert_eq!(post_json(&own, "/", r#"{"family_id":7}"#).await.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn missing_layer_is_a_500_that_names_layer_and_route() {
    let locks = LockManager::in_memory();
    let bare = Router::new().route("/", post(show));
    let before_its_route = Router::new().layer(LockManagerLayer::new(&locks)).route("/", post(show));
    for app in [bare, before_its_route] {
        let response = post_json(&app, "/", r#"{"family_id":7}"#).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let text = text(response).await;
        assert!(
            text.contains("`LockManagerLayer`") && text.contains("after `.route(..)`") && text.contains(".layer("),
            "{text}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn locked_inside_a_layer_holds_both_and_reenters() {
    let (store, locks) = store_and_locks();
    let seen = |count: usize| {
        let store = store.clone();
        async move |outer: HeldLock, Locked(Json(_), inner): Locked<Json<Claim>>| {
            assert_eq!(store.held_count(), count);
            format!("{} {}", outer.key().as_str(), inner.key().as_str())
        }
    };
    let family = key::from_fn(|Json(c): Json<Claim>| ("family", c.family_id));
    let app = Router::new()
        .route("/two", post(seen(2)).route_layer(LockLayer::new(&locks, one_key())))
        .route("/one", post(seen(1)).route_layer(LockLayer::new(&locks, family)));
    assert_eq!(text(post_json(&app, "/two", r#"{"family_id":7}"#).await).await, "k family:7");
    assert_eq!(text(post_json(&app, "/one", r#"{"family_id":7}"#).await).await, "family:7 family:7");
    assert_eq!((store.held_count(), locks.size(), store.on(StoreOp::Acquire).calls()), (0, (0, 0), 3));
}

/// I6.
#[tokio::test(start_paused = true)]
async fn handler_that_loses_its_extracted_lock_is_aborted() {
    for goes_on in [false, true] {
        let (store, locks) = store_and_locks();
        let mut layer = LockManagerLayer::new(&locks);
        if goes_on {
            layer = layer.on_lost(OnLost::Continue);
        }
        let has_ended = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&has_ended);
        let handler = post(async move |Locked(Json(_), lock): Locked<Json<Claim>>| {
            sleep(40 * S).await;
            ends.store(true, SeqCst);
            format!("{:?}", lock.ensure_remaining(Duration::ZERO).is_err())
        });
        let app = Router::new().route("/", handler).layer(layer);
        let request = tokio::spawn(async move { post_json(&app, "/", r#"{"family_id":7}"#).await });
        settle().await;
        store.fault_all(Fault::Fail);
        let response = request.await.expect("no panic");
        if goes_on {
            assert_eq!((response.status(), text(response).await.as_str()), (StatusCode::OK, "true"));
        } else {
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
            assert!(matches!(response.extensions().get(), Some(Rejection::Lost)));
        }
        assert_eq!(has_ended.load(SeqCst), goes_on);
    }
}

/// A value that was extracted before.
#[derive(Debug)]
struct Kept(Extension<Claim>);

impl Deref for Kept {
    type Target = Claim;

    fn deref(&self) -> &Claim {
        &self.0.0
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Kept {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        Extension::from_request_parts(parts, state).await.map(Self).map_err(IntoResponse::into_response)
    }
}

/// A task with a copy of the request cannot lock with it.
#[tokio::test(start_paused = true)]
async fn nothing_is_locked_for_an_ended_request() {
    let (store, locks) = store_and_locks();
    let kept: &'static Mutex<Option<Parts>> = Box::leak(Box::default());
    let keep = async |request: Request<Body>, next: Next| {
        let (parts, body) = request.into_parts();
        *kept.lock().expect("whole") = Some(parts.clone());
        next.run(Request::from_parts(parts, body)).await
    };
    let app = Router::new()
        .route("/", get(async |_: Locked<Kept>| "done"))
        .route_layer(middleware::from_fn(keep))
        .layer(LockManagerLayer::new(&locks))
        .layer(Extension(Claim { family_id: 7 }));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    let mut parts = kept.lock().expect("whole").take().expect("kept");
    let late = Locked::<Kept>::from_request_parts(&mut parts, &()).await;
    assert_eq!(late.expect_err("the request has ended").status(), StatusCode::INTERNAL_SERVER_ERROR);
    sleep(S).await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// The body is read first: a slow upload locks nothing.
#[tokio::test(start_paused = true)]
async fn nothing_is_locked_before_the_value_is_extracted() {
    let (store, locks) = store_and_locks();
    let app = Router::new().route("/", post(show)).layer(LockManagerLayer::new(&locks));
    let (send, body) = tokio::sync::mpsc::unbounded_channel::<Result<Bytes, std::convert::Infallible>>();
    let body = Body::from_stream(stream::unfold(body, |mut body| async { Some((body.recv().await?, body)) }));
    let request = Request::post("/").header("content-type", "application/json").body(body).expect("a request");
    let response = tokio::spawn(async move { tower_lock_testkit::app::send(&app, request).await });
    send.send(Ok("{\"family_id\"".into())).expect("read");
    settle().await;
    assert_eq!((store.held_count(), store.on(StoreOp::Acquire).calls()), (0, 0));
    send.send(Ok(":7}".into())).expect("read");
    drop(send);
    assert_eq!(text(response.await.expect("no panic")).await, "7 family:7 true");
}
