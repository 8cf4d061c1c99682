//! Key names from a client.

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{Request, StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use tower::ServiceExt;
use tower_lock::{LockError, LockKey, LockLayer, LogKey, Rejection, key, store::StoreErrorKind};
use tower_lock_testkit::{log::Log, wait::until};

use crate::support::environment;

/// The request is at fault: a repetition is rejected again. Neither the log nor the error shows the
/// name.
/// Guarantee: G14.
#[tokio::test]
async fn raw_name_rejected_by_the_store_is_a_400() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let raw = key::from_fn(|Path(name): Path<String>| match LockKey::raw(name) {
        Ok(key) => Ok(key),
        Err(error) => Err((StatusCode::BAD_REQUEST, error.to_string()).into_response()),
    });
    let layer = LockLayer::new(&locks, raw).log_key(LogKey::Redacted);
    let app = Router::new().route("/{name}", get(|| async { "ran" }).route_layer(layer));
    let log = Log::default();
    let guard = log.listen();
    for name in ["lock:ann@example.org%0A2026-11-22T00:00:00Z%20INFO%20forged", "tower-lock:ann@example.org"] {
        for _ in 0..3 {
            let request = Request::get(format!("/{name}")).body(Body::empty()).expect("a request");
            let response = app.clone().oneshot(request).await.expect("infallible");
            assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{name}");
            assert!(response.headers().get(header::RETRY_AFTER).is_none());
            let rejection = response.extensions().get::<Rejection>().expect("typed");
            assert!(matches!(rejection, Rejection::InvalidKey { .. }), "{rejection:?}");
            assert_eq!((rejection.outcome(), rejection.retry_after()), ("not-started", None));
        }
    }
    let error = match locks.try_lock(LockKey::raw("lock:ann@example.org").expect("a name")).await {
        Err(LockError::Store(error)) => error,
        other => panic!("{other:?}"),
    };
    drop(guard);
    assert_eq!(error.kind(), StoreErrorKind::InvalidKey);
    let reason = std::error::Error::source(&error).expect("kept").to_string();
    assert!(reason.contains("begins with `lock:`") && !reason.contains("ann"), "{reason}");
    let text = log.text();
    assert!(!text.contains("WARN") && !text.contains("ann@example.org"), "{text}");
    until("nothing is pending", async || locks.size() == (0, 0)).await;
}
