//! The pages for the operator of a service.

mod access;
mod keys;
mod mounting;
mod pages;
mod revocation;
mod waits;

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode, request},
};
use serde_json::Value;
use tower_lock::{
    LockManager,
    console::{self, Access},
};
use tower_lock_testkit::app::{send, text};

/// Where the tests nest the console.
const AT: &str = "/ops/locks";

fn operator() -> Access {
    Access::Revoke { operator: "ann".to_owned() }
}

/// The console for clients with this access.
fn app(locks: &LockManager, access: Access) -> Router {
    Router::new().nest(AT, console::router(locks, move |_| access.clone()))
}

fn post(path: &str) -> request::Builder {
    Request::post(format!("{AT}{path}")).header("sec-fetch-site", "same-origin")
}

async fn page(app: &Router, path: &str) -> (StatusCode, String) {
    let request = Request::get(format!("{AT}{path}")).header("sec-fetch-site", "same-origin");
    let response = send(app, request.body(Body::empty()).expect("a request")).await;
    (response.status(), text(response).await)
}

/// The page of a console that works.
async fn shown(app: &Router, path: &str) -> String {
    let (status, text) = page(app, path).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    text
}

async fn json(app: &Router, path: &str) -> Value {
    serde_json::from_str(&shown(app, path).await).expect("JSON")
}

/// The sentences at the top of a page.
fn answer(page: &str) -> &str {
    part(page, "<p id=\"answer\">", "</p>").trim()
}

/// The text between these two.
fn part<'a>(page: &'a str, from: &str, to: &str) -> &'a str {
    let (_, rest) = page.split_once(from).unwrap_or_else(|| panic!("no {from} in {page}"));
    rest.split(to).next().expect("the rest")
}
