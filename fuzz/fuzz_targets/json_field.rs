//! The key of a body is the value that `serde_json` reads: a handler and its lock agree.

#![no_main]

use std::sync::LazyLock;

use axum::{Extension, Router, body::Body, routing::post};
use http::{Request, StatusCode, header::CONTENT_TYPE};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;
use tower_lock::{HeldLock, LockKey, LockLayer, LockManager, key};

static LOCKS: LazyLock<LockManager> = LazyLock::new(LockManager::in_memory);
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_time().build().expect("a runtime"));

/// The key that the handler runs under, or `None` if the request is rejected.
async fn key_of(body: Vec<u8>) -> Option<LockKey> {
    let layer = LockLayer::new(&LOCKS, key::from_fields("order", key::json_field("id")));
    let handler = async |lock: HeldLock| Extension(lock.key().clone());
    let request = Request::post("/").header(CONTENT_TYPE, "application/json").body(Body::from(body)).expect("valid");
    let response = Router::new().route("/", post(handler).layer(layer)).oneshot(request).await.expect("a response");
    assert!(response.status() == StatusCode::OK || response.status().is_client_error(), "{}", response.status());
    response.extensions().get::<LockKey>().cloned()
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let key = RUNTIME.block_on(key_of(data.to_vec()));
    let Some(key) = key else { return };
    let body: Value = serde_json::from_slice(data).expect("JSON");
    let text = match &body["id"] {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        other => panic!("{other} is the key {key}"),
    };
    assert_eq!(key, LockKey::from(("order", text)));
});
