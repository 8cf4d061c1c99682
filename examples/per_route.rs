//! One router with settings for each route: wait, reject at once, run without a lock, and a custom
//! response.
//!
//! ```sh
//! cargo run --example per_route
//! ```

use std::{convert::Infallible, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::Path,
    http::{HeaderMap, Method, Request, StatusCode},
    response::IntoResponse,
    routing::{get, post},
};
use http_body_util::BodyExt;
use serde_json::json;
use tower::ServiceExt;
use tower_lock::{HeldLock, LockLayer, LockManager, LockManagerLayer, LockPolicy, Rejection, key};

fn app(locks: &LockManager) -> Router {
    // One key for an order, on all of its routes.
    let order = |Path(id): Path<u64>| ("order", id);

    Router::new()
        // Waits as long as the router sets, below.
        .route("/orders/{id}/ship", post(work).route_layer(LockLayer::new(locks, key::from_fn(order))))
        // Waits longer.
        .route(
            "/orders/{id}/pay",
            post(work).route_layer(LockLayer::new(locks, key::from_fn(order)).wait(Duration::from_secs(10))),
        )
        // Rejects at once, with a response of the shop.
        .route(
            "/orders/{id}/cancel",
            post(work)
                .route_layer(LockLayer::new(locks, key::from_fn(order)).wait(Duration::ZERO).on_reject(shop_response)),
        )
        // Reading needs no lock, and a dry run changes nothing.
        .route(
            "/orders/{id}",
            get(read).put(work).route_layer(
                LockLayer::new(
                    locks,
                    key::from_fn(|Path(id): Path<u64>, headers: HeaderMap| {
                        (!headers.contains_key("x-dry-run")).then_some(("order", id))
                    }),
                )
                .skip_methods([Method::GET, Method::HEAD]),
            ),
        )
        // Defaults for all routes.
        .layer(LockManagerLayer::new(locks).policy(LockPolicy::new().wait(Duration::from_millis(200))))
}

async fn work(lock: Option<HeldLock>) -> String {
    lock.map_or_else(|| "done without a lock".into(), |lock| format!("done under {}", lock.key()))
}

async fn read() -> &'static str {
    "an order"
}

fn shop_response(rejection: &Rejection) -> axum::response::Response {
    match rejection {
        Rejection::Busy { .. } => {
            (StatusCode::LOCKED, Json(json!({ "error": "the order is being worked on" }))).into_response()
        }
        other => other.clone().into_response(),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let locks = LockManager::in_memory();
    let app = app(&locks);
    println!("Order 7 is locked.\n");
    let busy = locks.try_lock(("order", 7)).await?;
    let requests = [
        (Method::POST, "/orders/7/ship", false),
        (Method::POST, "/orders/7/cancel", false),
        (Method::PUT, "/orders/7", false),
        (Method::PUT, "/orders/7", true),
        (Method::GET, "/orders/7", false),
        (Method::POST, "/orders/8/ship", false),
    ];
    for (method, path, dry_run) in requests {
        show(&app, method, path, dry_run).await?;
    }
    // The payment waits up to ten seconds, and the order is free after one.
    let pay = show(&app, Method::POST, "/orders/7/pay", false);
    let finish = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        busy.release().await
    };
    let (paid, released) = tokio::join!(pay, finish);
    paid?;
    released?;
    Ok(())
}

async fn show(app: &Router, method: Method, path: &str, dry_run: bool) -> Result<(), Box<dyn std::error::Error>> {
    let mut request = Request::builder().method(&method).uri(path);
    if dry_run {
        request = request.header("x-dry-run", "1");
    }
    let response: Result<_, Infallible> = app.clone().oneshot(request.body(Body::empty())?).await;
    let response = response?;
    let status = response.status().as_u16();
    let text = String::from_utf8(response.into_body().collect().await?.to_bytes().into())?;
    let note = if dry_run { " (dry run)" } else { "" };
    println!("{:<34} {status} {text}", format!("{method} {path}{note}"));
    Ok(())
}
