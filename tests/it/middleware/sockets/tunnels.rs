//! `101 Switching Protocols` and `CONNECT`: the request ends with its head, and the tunnel needs no
//! lock.

use std::convert::Infallible;

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Method, Request, Response, StatusCode},
    routing::any,
};
use futures_util::stream;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower_lock::{LockLayer, LockManager};
use tower_lock_testkit::{
    http::{Http1, Http2},
    locks::one_key,
    wait::soon,
};

use super::Cluster;

/// Echoes its input in capitals after the head is sent.
async fn shout(mut request: Request<Body>) -> Response<Body> {
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let mut tunnel = TokioIo::new(upgrade.await.expect("a tunnel"));
        let mut heard = [0; 64];
        while let Ok(n @ 1..) = tunnel.read(&mut heard).await {
            tunnel.write_all(heard[..n].to_ascii_uppercase().as_slice()).await.expect("an open tunnel");
        }
    });
    let response = if request.method() == Method::CONNECT {
        Response::builder()
    } else {
        Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header("connection", "upgrade")
            .header("upgrade", "shout")
    };
    response.body(Body::empty()).expect("a response")
}

/// With an endless body that is not polled: this head has no content.
async fn shout_with_a_body(request: Request<Body>) -> Response<Body> {
    shout(request).await.map(|_| Body::from_stream(stream::pending::<Result<Bytes, Infallible>>()))
}

fn service(locks: &LockManager) -> Router {
    Router::new()
        .route("/empty", any(shout))
        .route("/body", any(shout_with_a_body))
        // A `CONNECT` has no path.
        .fallback(async |request: Request<Body>| {
            if request.uri().host() == Some("body.example") {
                shout_with_a_body(request).await
            } else {
                shout(request).await
            }
        })
        .layer(LockLayer::new(locks, one_key()))
}

async fn talks(wire: &mut Http1, what: &str) {
    wire.write("hello").await;
    assert_eq!(wire.bytes(5).await, b"HELLO", "{what}");
}

#[tokio::test]
async fn upgraded_connection_outlives_the_lock() {
    let cluster = Cluster::start(service).await;
    for path in ["/empty", "/body"] {
        for _ in 0..10 {
            let mut wire = Http1::connect(cluster.instances[0]).await;
            wire.write(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: shout\r\n\r\n"))
                .await;
            assert_eq!(wire.head().await.0, 101, "{path}");
            cluster.assert_status(200, path).await;
            talks(&mut wire, path).await;
            cluster.assert_status(200, path).await;
            talks(&mut wire, path).await;
        }
    }
}

#[tokio::test]
async fn http1_tunnel_outlives_the_lock() {
    let cluster = Cluster::start(service).await;
    for host in ["empty.example", "body.example"].into_iter().cycle().take(10) {
        let mut wire = Http1::connect(cluster.instances[0]).await;
        wire.write(format!("CONNECT {host}:443 HTTP/1.1\r\nhost: {host}:443\r\n\r\n")).await;
        assert_eq!(wire.head().await.0, 200);
        cluster.assert_status(200, host).await;
        talks(&mut wire, host).await;
    }
}

#[tokio::test]
async fn http2_tunnel_outlives_the_lock() {
    let cluster = Cluster::start(service).await;
    let mut http2 = Http2::connect(cluster.instances[0]).await;
    for host in ["empty.example", "body.example"].into_iter().cycle().take(10) {
        let request = Request::builder().method(Method::CONNECT).uri(format!("{host}:443"));
        let request = request.body(()).expect("a request");
        let (response, mut says) = http2.request(request, false).await;
        let response = soon("a head", response).await.expect("a head");
        assert_eq!(response.status(), StatusCode::OK);
        cluster.assert_status(200, host).await;
        let mut hears = response.into_body();
        says.send_data(Bytes::from_static(b"hello"), false).expect("an open tunnel");
        assert_eq!(soon("an echo", hears.data()).await.expect("data").expect("data"), "HELLO");
        cluster.assert_status(200, host).await;
    }
}
