//! The lock among other layers, in the documented order.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{Method, Request, StatusCode},
    routing::{any, get, post},
};
use tokio::time::Instant;
use tower::ServiceExt;
use tower_lock::{HeldLock, LockLayer, LockManager, Rejection, key, test_util::StoreOp};

use crate::support::{fetch, send, settle, soon, store_and_locks, text};

#[allow(dead_code, reason = "the services of the example")]
#[path = "../../examples/service_stack.rs"]
mod service_stack;

fn request(method: Method, path: &str) -> Request<Body> {
    Request::builder().method(method).uri(path).body(Body::empty()).expect("a request")
}

fn preflight() -> Request<Body> {
    let mut preflight = request(Method::OPTIONS, "/orders/7/pay");
    preflight.headers_mut().insert("origin", "https://shop.example".parse().expect("a header"));
    preflight.headers_mut().insert("access-control-request-method", "POST".parse().expect("a header"));
    preflight
}

#[tokio::test(start_paused = true)]
async fn documented_stack_locks_nothing_for_404_405_and_preflight() {
    let (store, locks) = store_and_locks();
    let app = service_stack::app(&locks, Duration::from_secs(1));
    assert_eq!(fetch(&app, "/nope").await.status(), StatusCode::NOT_FOUND);
    assert_eq!(fetch(&app, "/orders/7/pay").await.status(), StatusCode::METHOD_NOT_ALLOWED);
    let preflight = send(&app, preflight()).await;
    assert_eq!(preflight.status(), StatusCode::OK);
    assert_eq!(preflight.headers()["access-control-allow-methods"], "POST");
    assert_eq!(store.on(StoreOp::Acquire).calls(), 0);

    let pay = tokio::spawn(app.clone().oneshot(request(Method::POST, "/orders/7/pay")));
    settle().await;
    let second = send(&app, request(Method::POST, "/orders/7/pay")).await;
    assert_eq!(second.status(), StatusCode::CONFLICT);
    assert!(matches!(second.extensions().get(), Some(Rejection::Busy { .. })), "it passes through all layers");
    let first = soon("the payment", pay).await.expect("no panic").expect("infallible");
    assert_eq!((first.status(), text(first).await.as_str()), (StatusCode::OK, "paid"));
    assert_eq!((store.on(StoreOp::Acquire).calls(), store.held_count()), (1, 0));
}

/// Guarantee: G4.
#[tokio::test(start_paused = true)]
async fn documented_stack_timeout_responds_while_handler_finishes() {
    let (store, locks) = store_and_locks();
    // Longer than a lock-delay that starts with the timeout.
    let work = service_stack::TIMEOUT + Duration::from_secs(3);
    let app = service_stack::app(&locks, work);
    let began = Instant::now();
    let timed_out = send(&app, request(Method::POST, "/orders/7/pay")).await;
    assert_eq!((timed_out.status(), began.elapsed()), (StatusCode::GATEWAY_TIMEOUT, service_stack::TIMEOUT));
    assert_eq!(send(&app, request(Method::POST, "/orders/7/pay")).await.status(), StatusCode::CONFLICT);
    drop(locks.lock(("order", 7)).await.expect("the handler ends").release());
    assert_eq!(began.elapsed(), work, "ended in order: no lock-delay");
    settle().await;
    assert_eq!(store.held_count(), 0);
}

/// Guarantee: G14.
#[tokio::test(start_paused = true)]
async fn plain_service_stack_rejects_an_invalid_key() {
    let (store, locks) = store_and_locks();
    let service = service_stack::service(&locks);
    for (account, status) in [(Some("7"), 200), (Some("007"), 200), (Some("7a"), 400), (None, 400)] {
        let mut request = request(Method::POST, "/");
        if let Some(account) = account {
            request.headers_mut().insert("x-account", account.parse().expect("a header"));
        }
        let response = service.clone().oneshot(request).await.unwrap_or_else(|_| panic!("{account:?}"));
        assert_eq!(response.status().as_u16(), status, "{account:?}");
    }
    assert_eq!(store.on(StoreOp::Acquire).calls(), 2);
}

/// As documented at the layer.
#[tokio::test(start_paused = true)]
async fn router_layer_locks_unknown_routes_and_route_layer_does_not() {
    let lock = || LockLayer::new(&LockManager::in_memory(), key::from_fn(|Path(id): Path<u64>| ("order", id)));
    let router = || Router::new().route("/{id}/pay", post(async || "paid"));
    let status = async |app: Router, path: &str| fetch(&app, path).await.status().as_u16();
    assert_eq!(status(router().layer(lock()), "/nope").await, 404, "by the lock layer");
    assert_eq!(status(router().route_layer(lock()), "/nope").await, 404);
    assert_eq!(status(router().route_layer(lock()), "/x/pay").await, 400, "the key function before the 405");
    let methods = Router::new().route("/{id}/pay", post(async || "paid").route_layer(lock()));
    assert_eq!(status(methods.clone(), "/nope").await, 404);
    assert_eq!(status(methods, "/x/pay").await, 405);
}

/// Axum adds these handlers outside the layer. The docs of the layer list them.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn extractor_detects_a_method_added_outside_the_lock() {
    let lock = || LockLayer::new(&LockManager::in_memory(), key::from_fn(|Path(id): Path<u64>| ("order", id)));
    let work = async |lock: HeldLock| lock.key().to_string();
    for (how, locked, unlocked, methods) in [
        ("a fallback", Method::POST, Method::DELETE, post(work).fallback(work).route_layer(lock())),
        ("any", Method::GET, Method::DELETE, any(work).get(work).route_layer(lock())),
        ("merge", Method::POST, Method::GET, post(work).route_layer(lock()).merge(get(work))),
        ("a later method", Method::POST, Method::PUT, post(work).route_layer(lock()).put(work)),
    ] {
        let app = Router::new().route("/{id}", methods);
        assert_eq!(text(send(&app, request(locked, "/7")).await).await, "order:7", "{how}");
        let response = send(&app, request(unlocked, "/7")).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR, "{how}");
        let text = text(response).await;
        assert!(text.contains("holds no lock for `HeldLock`: no `LockLayer` is around this handler"), "{how}: {text}");
        assert!(text.contains("methods and routes that were added before it"), "{how}: {text}");
    }
    // The alternative from the docs.
    for (method, methods) in [
        (Method::DELETE, post(work).fallback(work).layer(lock())),
        (Method::DELETE, any(work).get(work).layer(lock())),
        (Method::GET, post(work).merge(get(work)).route_layer(lock())),
        (Method::PUT, post(work).put(work).route_layer(lock())),
    ] {
        let app = Router::new().route("/{id}", methods);
        assert_eq!(text(send(&app, request(method, "/7")).await).await, "order:7");
    }
}
