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
pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);

/// The lock is on the methods of a route. The other layers are on the router, outside of every
/// lock.
pub(crate) fn app(locks: &LockManager, work: Duration) -> Router {
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
pub(crate) fn service(
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
