//! A server, a client that sees every byte, and stores with hands.

use std::{future::Future, net::SocketAddr, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Request, Response},
};
use http_body_util::BodyExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tower::ServiceExt;
use tower_lock::{KeySourceFor, Locks, by_parts};

pub(crate) mod examples;

pub(crate) use tower_lock::test_util::TestStore;

/// Longer than anything takes here, on a machine that does something else as well.
const AT_MOST: Duration = Duration::from_secs(120);

pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(AT_MOST, future).await.unwrap_or_else(|_| panic!("never happened: {what}"))
}

/// Lets every other task run until none of them has anything to do but wait.
pub(crate) async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// The same key for every request.
pub(crate) fn one_key() -> impl KeySourceFor<Body, Body = Body> {
    by_parts(|_| ("k",))
}

pub(crate) fn store_and_locks() -> (TestStore, Locks) {
    let store = TestStore::new();
    let locks = Locks::new(store.clone());
    (store, locks)
}

pub(crate) async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

pub(crate) async fn send(app: &Router, request: Request<Body>) -> Response<Body> {
    soon("an answer", app.clone().oneshot(request)).await.expect("infallible")
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

/// One HTTP/1.1 connection, byte for byte.
pub(crate) struct Wire {
    stream: TcpStream,
    read: Vec<u8>,
}

/// A response as it came over the wire; header names in lower case.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Wire {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.expect("a server");
        stream.set_nodelay(true).expect("a socket");
        Self { stream, read: Vec::new() }
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.expect("an open connection");
    }

    /// Reads to the end of a head; what is behind it stays.
    pub(crate) async fn head(&mut self) -> (u16, String) {
        let end = loop {
            if let Some(at) = self.read.windows(4).position(|w| w == b"\r\n\r\n") {
                break at;
            }
            assert!(self.fill().await > 0, "closed before a head: {:?}", String::from_utf8_lossy(&self.read));
        };
        let head = String::from_utf8_lossy(&self.read[..end]).to_lowercase();
        self.read.drain(..end + 4);
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line");
        (status, head)
    }

    /// Reads one response to where a client knows that it is complete.
    pub(crate) async fn reply(&mut self, to_head: bool) -> Reply {
        let (status, head) = self.head().await;
        let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse().ok());
        let body = if to_head || matches!(status, 100..=199 | 204 | 304) {
            Vec::new()
        } else if let Some(length) = length {
            while self.read.len() < length {
                assert!(self.fill().await > 0, "closed in a body");
            }
            self.read.drain(..length).collect()
        } else {
            while !self.read.ends_with(b"0\r\n\r\n") && self.fill().await > 0 {}
            std::mem::take(&mut self.read)
        };
        Reply { status, head, body }
    }

    /// Everything to the end of the connection.
    pub(crate) async fn rest(mut self) -> Vec<u8> {
        while self.fill().await > 0 {}
        self.read
    }

    async fn fill(&mut self) -> usize {
        // A reset is an end, too.
        soon("more bytes", self.stream.read_buf(&mut self.read)).await.unwrap_or(0)
    }
}
