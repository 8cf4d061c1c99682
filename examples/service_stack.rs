//! The layers of a service in their order: tracing, panics, CORS, a timeout, the lock, a limit, the
//! handler.
//!
//! ```sh
//! cargo run --example service_stack
//! ```

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{Method, Request, Response, StatusCode, request},
    routing::post,
};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, limit::ConcurrencyLimitLayer, service_fn};
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{Any, CorsLayer},
    timeout::TimeoutLayer,
    trace::TraceLayer,
};
use tower_lock::{HeldLock, LockLayer, LockManager, key, middleware::RequestBody};

/// How long a client waits for a response.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The lock is on the methods of a route. The other layers are on the router, outside of every
/// lock.
fn app(locks: &LockManager, work: Duration) -> Router {
    let order = |Path(id): Path<u64>| ("order", id);
    // `HeldLock`: without the lock layer the handler does not run.
    let pay = async move |_lock: HeldLock| {
        tokio::time::sleep(work).await;
        "paid"
    };
    let one_at_a_time = LockLayer::new(locks, key::from_fn(order));

    Router::new().route("/orders/{id}/pay", post(pay).route_layer(one_at_a_time)).layer(
        // The first one is the outermost.
        ServiceBuilder::new()
            .layer(TraceLayer::new_for_http())
            .layer(CatchPanicLayer::new())
            .layer(CorsLayer::new().allow_origin(Any).allow_methods([Method::POST]))
            .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, TIMEOUT)),
    )
}

/// The same without Axum: one stack, with a limit for the handler inside of the lock.
fn service(
    locks: &LockManager,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + use<> {
    let account = key::from_parts(|head| {
        let account = head.headers.get("x-account").and_then(|text| text.to_str().ok()?.parse::<u64>().ok());
        account.map(|id| ("account", id)).ok_or(StatusCode::BAD_REQUEST)
    });
    ServiceBuilder::new()
        // Each layer wraps the body: one type for all of them.
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(TraceLayer::new_for_http())
        .layer(CatchPanicLayer::new())
        .layer(CorsLayer::new().allow_origin(Any).allow_methods([Method::POST]))
        .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, TIMEOUT))
        .layer(LockLayer::new(locks, account))
        // Inside: a request that waits for its lock does not use its capacity.
        .layer(ConcurrencyLimitLayer::new(100))
        .service(service_fn(|_: Request<RequestBody>| async {
            Ok::<_, Infallible>(Response::new(Body::from("transferred")))
        }))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let locks = LockManager::in_memory();
    let app = app(&locks, Duration::from_millis(50));
    let paid = || show(&app, "a payment", Request::post("/orders/7/pay"));
    tokio::try_join!(paid(), paid())?;
    show(&app, "an unknown URL", Request::post("/nope")).await?;
    show(&app, "another method", Request::delete("/orders/7/pay")).await?;
    let preflight = Request::options("/orders/7/pay").header("origin", "https://shop.example");
    show(&app, "a CORS preflight", preflight.header("access-control-request-method", "POST")).await?;

    let slow = self::app(&locks, TIMEOUT * 2);
    show(&slow, "a slow payment", Request::post("/orders/8/pay")).await?;
    // The handler of the slow payment continues under its lock.
    show(&slow, "the same order again", Request::post("/orders/8/pay")).await?;

    let service = service(&locks);
    show(&service, "a transfer", Request::post("/").header("x-account", "7")).await?;
    show(&service, "without an account", Request::post("/")).await
}

async fn show<S>(service: &S, name: &str, request: request::Builder) -> Result<(), BoxError>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let response = service.clone().oneshot(request.body(Body::empty())?).await?;
    println!("{name:<22} {}", response.status());
    Ok(())
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use tokio::{task::yield_now, time::Instant};
    use tower_lock::{
        Rejection,
        test_util::{StoreOp, TestStore},
    };

    use super::*;

    fn store_and_locks() -> (TestStore, LockManager) {
        let store = TestStore::new();
        (store.clone(), LockManager::new(store))
    }

    async fn send(app: &Router, method: Method, path: &str) -> Response<Body> {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).expect("a request");
        app.clone().oneshot(request).await.expect("infallible")
    }

    async fn pay(app: &Router) -> Response<Body> {
        send(app, Method::POST, "/orders/7/pay").await
    }

    #[tokio::test(start_paused = true)]
    async fn documented_stack_locks_nothing_for_404_405_and_preflight() {
        let (store, locks) = store_and_locks();
        let app = app(&locks, Duration::from_secs(1));
        assert_eq!(send(&app, Method::GET, "/nope").await.status(), StatusCode::NOT_FOUND);
        assert_eq!(send(&app, Method::GET, "/orders/7/pay").await.status(), StatusCode::METHOD_NOT_ALLOWED);
        let preflight = Request::options("/orders/7/pay")
            .header("origin", "https://shop.example")
            .header("access-control-request-method", "POST");
        let request = preflight.body(Body::empty()).expect("a request");
        let preflight = app.clone().oneshot(request).await.expect("infallible");
        assert_eq!(preflight.status(), StatusCode::OK);
        assert_eq!(preflight.headers()["access-control-allow-methods"], "POST");
        assert_eq!(store.on(StoreOp::Acquire).calls(), 0);

        let second = async {
            // The first payment holds its lock.
            while store.held_count() == 0 {
                yield_now().await;
            }
            pay(&app).await
        };
        let (first, second) = tokio::join!(pay(&app), second);
        assert_eq!(second.status(), StatusCode::CONFLICT);
        assert!(matches!(second.extensions().get(), Some(Rejection::Busy { .. })), "it passes through all layers");
        assert_eq!(first.status(), StatusCode::OK);
        let body = first.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(body, "paid");
        assert_eq!((store.on(StoreOp::Acquire).calls(), store.held_count()), (1, 0));
    }

    /// Guarantee: G4.
    #[tokio::test(start_paused = true)]
    async fn documented_stack_timeout_responds_while_handler_finishes() {
        let (store, locks) = store_and_locks();
        // Longer than a lock-delay that starts with the timeout.
        let work = TIMEOUT + Duration::from_secs(3);
        let app = app(&locks, work);
        let began = Instant::now();
        let timed_out = pay(&app).await;
        assert_eq!((timed_out.status(), began.elapsed()), (StatusCode::GATEWAY_TIMEOUT, TIMEOUT));
        assert_eq!(pay(&app).await.status(), StatusCode::CONFLICT);
        locks.lock(("order", 7)).await.expect("the handler ends").release().await.expect("held");
        assert_eq!(began.elapsed(), work, "ended in order: no lock-delay");
        assert_eq!(store.held_count(), 0);
    }

    /// Guarantee: G14.
    #[tokio::test(start_paused = true)]
    async fn plain_service_stack_rejects_an_invalid_key() {
        let (store, locks) = store_and_locks();
        let service = service(&locks);
        for (account, status) in [(Some("7"), 200), (Some("007"), 200), (Some("7a"), 400), (None, 400)] {
            let mut request = Request::post("/");
            if let Some(account) = account {
                request = request.header("x-account", account);
            }
            let request = request.body(Body::empty()).expect("a request");
            let response = service.clone().oneshot(request).await.unwrap_or_else(|_| panic!("{account:?}"));
            assert_eq!(response.status().as_u16(), status, "{account:?}");
        }
        assert_eq!(store.on(StoreOp::Acquire).calls(), 2);
    }
}
