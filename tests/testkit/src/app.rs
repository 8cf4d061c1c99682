//! Requests to a router, with and without a server.

use std::net::SocketAddr;

use axum::{
    BoxError, Router,
    body::{Body, Bytes, HttpBody},
    http::{Request, Response},
};
use http_body_util::BodyExt;
use tokio::net::TcpListener;
use tower::ServiceExt;

use crate::wait::soon;

/// The `type` of a problem.
#[must_use]
pub fn problem_type(code: &str) -> String {
    format!("https://docs.rs/tower-lock/latest/tower_lock/problem/#{code}")
}

/// Serves a router on a free port, until the runtime ends.
pub async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// The response to a request, without a server.
pub async fn send(app: &Router, request: Request<Body>) -> Response<Body> {
    soon("a response", app.clone().oneshot(request)).await.expect("infallible")
}

/// The response to `GET`.
pub async fn fetch(app: &Router, path: &str) -> Response<Body> {
    send(app, Request::get(path).body(Body::empty()).expect("a request")).await
}

/// The response to `POST` with JSON.
pub async fn post_json(app: &Router, path: &str, body: &'static str) -> Response<Body> {
    let request = Request::post(path).header("content-type", "application/json").body(Body::from(body));
    send(app, request.expect("a request")).await
}

/// The body of a response, which must be text.
pub async fn text<B>(response: Response<B>) -> String
where
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let bytes = soon("the end of a body", Body::new(response.into_body()).collect()).await;
    String::from_utf8(bytes.expect("a whole body").to_bytes().into()).expect("text")
}
