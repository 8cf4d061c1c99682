//! Examples of tests for the handlers of a service.
//!
//! ```toml
//! [dev-dependencies]
//! tower-lock = { version = "0.1", features = ["test-util"] }
//! tokio = { version = "1", features = ["full", "test-util"] }
//! tower = { version = "0.5", features = ["util"] }
//! ```

use std::time::Duration;

use axum::{
    Extension, Json, Router,
    body::Body,
    http::{Request, StatusCode},
    response::Response,
    routing::post,
};
use tokio::time::sleep;
use tower::ServiceExt;
use tower_lock::{
    HeldLock, LockLayer, LockManager, Rejection, key,
    test_util::{Fault, StoreOp, TestStore, held_lock},
};

// --- the service ---

#[derive(serde::Deserialize)]
struct Claim {
    family_id: u64,
}

async fn claim(lock: HeldLock, Json(claim): Json<Claim>) -> (StatusCode, String) {
    sleep(Duration::from_secs(40)).await; // reads, computes, writes
    (StatusCode::CREATED, format!("family {} under {}", claim.family_id, lock.fencing_token()))
}

fn app(locks: &LockManager) -> Router {
    let reward = key::from_fn(|Json(claim): Json<Claim>| ("reward", claim.family_id));
    Router::new().route("/claim", post(claim).route_layer(LockLayer::new(locks, reward)))
}

// --- its tests ---

async fn ask(app: Router) -> Response {
    let request = Request::post("/claim").header("content-type", "application/json");
    let request = request.body(Body::from(r#"{"family_id":7}"#)).expect("a request");
    app.oneshot(request).await.expect("infallible")
}

/// The handler alone, with a lock that exists only in the test.
#[tokio::test(start_paused = true)]
async fn claim_is_written_with_its_fencing_token() {
    let lock = held_lock(("reward", 7), 42);
    let (status, text) = claim(lock, Json(Claim { family_id: 7 })).await;
    assert_eq!((status, text.as_str()), (StatusCode::CREATED, "family 7 under 42"));
}

/// The same through a router without the layer.
#[tokio::test(start_paused = true)]
async fn route_can_be_tested_without_locks() {
    let lock = held_lock(("reward", 7), 42);
    let app = Router::new().route("/claim", post(claim)).layer(Extension(lock));
    assert_eq!(ask(app).await.status(), StatusCode::CREATED);
}

/// The key is held by another request.
#[tokio::test(start_paused = true)]
async fn second_claim_is_reported_as_claimed() {
    let locks = LockManager::in_memory();
    let app = app(&locks);
    let first = locks.try_lock(("reward", 7)).await.expect("free");
    let answer = ask(app.clone()).await;
    assert_eq!(answer.status(), StatusCode::CONFLICT);
    assert!(matches!(answer.extensions().get(), Some(Rejection::Busy { .. })));
    first.release().await.expect("in memory");
    assert_eq!(ask(app).await.status(), StatusCode::CREATED);
}

/// The store does not respond: the handler does not start.
#[tokio::test(start_paused = true)]
async fn claim_without_a_lock_does_not_start() {
    let store = TestStore::new();
    let app = app(&LockManager::new(store.clone()));
    store.on(StoreOp::Acquire).fault(Fault::Hang);
    assert_eq!(ask(app.clone()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    store.on(StoreOp::Acquire).fault(Fault::None);
    assert_eq!(ask(app).await.status(), StatusCode::CREATED);
    assert_eq!(store.held_count(), 0);
}

/// The lock is revoked while the handler runs: it is dropped.
#[tokio::test(start_paused = true)]
async fn claim_that_loses_its_lock_is_aborted() {
    let locks = LockManager::in_memory();
    let meanwhile = async {
        sleep(Duration::from_secs(5)).await;
        locks.force_release(("reward", 7)).await.expect("in memory");
    };
    let (answer, ()) = tokio::join!(ask(app(&locks)), meanwhile);
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(matches!(answer.extensions().get(), Some(Rejection::Lost)));
}

/// The store fails for longer than the lease.
#[tokio::test(start_paused = true)]
async fn claim_whose_lock_cannot_be_renewed_is_aborted() {
    let store = TestStore::new();
    store.on(StoreOp::Renew).fault(Fault::Fail);
    let answer = ask(app(&LockManager::new(store))).await;
    assert!(matches!(answer.extensions().get(), Some(Rejection::Lost)));
}
