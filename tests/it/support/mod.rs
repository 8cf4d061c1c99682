//! A server, a client that sees every byte, and stores with faults.

use std::{future::Future, net::SocketAddr, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Request, Response},
};
use http_body_util::BodyExt;
use tokio::{
    net::TcpListener,
    time::{sleep, timeout},
};
use tower::ServiceExt;
use tower_lock::{
    LockManager,
    key::{self, KeySource},
};

pub(crate) mod panics;
pub(crate) mod wire;

pub(crate) use tower_lock::test_util::TestStore;

pub(crate) use self::wire::Wire;

/// Longer than any step takes, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(TIMEOUT, future).await.unwrap_or_else(|_| panic!("never happened: {what}"))
}

/// Polls until the condition holds, in real time.
pub(crate) async fn until(what: &str, is_so: impl Fn() -> bool) {
    let poll = async {
        while !is_so() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    soon(what, poll).await;
}

/// Lets all other tasks run until they only wait.
pub(crate) async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// The same key for every request.
pub(crate) fn one_key() -> impl KeySource {
    key::from_parts(|_| ("k",))
}

pub(crate) fn store_and_locks() -> (TestStore, LockManager) {
    let store = TestStore::new();
    let locks = LockManager::new(store.clone());
    (store, locks)
}

pub(crate) async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

pub(crate) async fn send(app: &Router, request: Request<Body>) -> Response<Body> {
    soon("a response", app.clone().oneshot(request)).await.expect("infallible")
}

pub(crate) async fn fetch(app: &Router, path: &str) -> Response<Body> {
    send(app, Request::get(path).body(Body::empty()).expect("a request")).await
}

pub(crate) async fn post_json(app: &Router, path: &str, body: &'static str) -> Response<Body> {
    let request = Request::post(path).header("content-type", "application/json").body(Body::from(body));
    send(app, request.expect("a request")).await
}

pub(crate) async fn text<B>(response: Response<B>) -> String
where
    B: axum::body::HttpBody<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let bytes = soon("the end of a body", response.into_body().collect()).await.expect("a whole body").to_bytes();
    String::from_utf8(bytes.into()).expect("text")
}
