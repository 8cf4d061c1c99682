//! Replays over a network: clients that disconnect, and the framing of a replayed answer.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Request, StatusCode},
    response::IntoResponse,
    routing::post,
};
use tokio::sync::Semaphore;
use tower_lock::{LockManager, ReplayLayer, key, test_util::StoreOp};
use tower_lock_testkit::{
    app::serve,
    body::{ScriptedBody, Step, paused},
    http::{Cut, Http1, Http2, Reply, Version, read},
    locks::store_and_locks,
    wait::{soon, until},
};

use super::VERSIONS;

/// A handler that waits until it may end, and counts its runs.
#[derive(Clone)]
struct Work {
    runs: Arc<AtomicUsize>,
    may_end: Arc<Semaphore>,
}

impl Work {
    async fn serve(locks: &LockManager) -> (Self, SocketAddr) {
        let work = Self { runs: Arc::default(), may_end: Arc::new(Semaphore::new(0)) };
        let this = work.clone();
        let replay = ReplayLayer::new(locks, key::fixed(("everyone",))).wait(Duration::from_secs(60));
        let claim = post(async move |_: Bytes| {
            let run = this.runs.fetch_add(1, SeqCst) + 1;
            this.may_end.acquire().await.expect("never closed").forget();
            (StatusCode::CREATED, [("location", format!("/runs/{run}"))], "0123456789")
        });
        let stream = post(async || Body::new(ScriptedBody::new(paused(&[Step::Data(10); 3]))));
        let unsized_body = post(async || Body::new(ScriptedBody::new([Step::Data(10); 3])));
        let empty = post(async || StatusCode::NO_CONTENT.into_response());
        let app = Router::new().route("/claim", claim).route("/stream", stream);
        let app = app.route("/unsized", unsized_body).route("/empty", empty).route_layer(replay);
        (work, serve(app).await)
    }

    fn runs(&self) -> usize {
        self.runs.load(SeqCst)
    }
}

fn head(path: &str, key: &str, length: usize) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\nidempotency-key: \"{key}\"\r\ncontent-length: {length}\r\n\r\n")
}

/// The response to a request whose key is its path.
async fn call(address: SocketAddr, version: Version, path: &str) -> Result<Reply, Cut> {
    match version {
        Version::Http1 => {
            let mut http1 = Http1::connect(address).await;
            http1.write(head(path, path, 0)).await;
            http1.response(false).await
        }
        Version::Http2 => {
            let request = Request::post(format!("http://{address}{path}")).header("idempotency-key", path).body(());
            let mut http2 = Http2::connect(address).await;
            let (response, _) = http2.request(request.expect("a request"), true).await;
            read(soon("a head", response).await.map_err(|_| Cut)?).await
        }
    }
}

/// Guarantee: G18.
#[tokio::test]
async fn connection_is_cut_and_the_retry_gets_the_answer() {
    for version in VERSIONS {
        let (store, locks) = store_and_locks();
        let (work, address) = Work::serve(&locks).await;
        let first = tokio::spawn(async move { call(address, version, "/claim").await });
        until("it runs", async || work.runs() == 1).await;
        first.abort();
        assert!(first.await.is_err_and(|error| error.is_cancelled()));
        let retry = tokio::spawn(async move { call(address, version, "/claim").await });
        until("the retry waits", async || locks.size().1 == 1).await;
        work.may_end.add_permits(1);
        for reply in [soon("an answer", retry).await.expect("no panic"), call(address, version, "/claim").await] {
            let Reply { status, head, body, .. } = reply.expect("complete");
            assert_eq!((status, &body[..]), (201, &b"0123456789"[..]), "{version:?}");
            for line in ["idempotency-replayed: true", "content-length: 10", "location: /runs/1"] {
                assert!(head.contains(line), "{version:?}: {line}: {head}");
            }
        }
        assert_eq!((work.runs(), store.held_count()), (1, 0), "{version:?}");
    }
}

#[tokio::test]
async fn request_that_is_incomplete_claims_no_key() {
    let (store, locks) = store_and_locks();
    let (work, address) = Work::serve(&locks).await;
    work.may_end.add_permits(1);
    let mut incomplete = Http1::connect(address).await;
    incomplete.write(head("/claim", "/claim", 10)).await;
    incomplete.write("12345").await;
    let reply = call(address, Version::Http1, "/claim").await.expect("complete");
    assert_eq!((reply.status, work.runs(), store.held_count()), (201, 1, 0));
    drop(incomplete);
    assert!(call(address, Version::Http1, "/claim").await.expect("complete").head.contains("idempotency-replayed"));
    assert_eq!((work.runs(), store.on(StoreOp::Acquire).calls()), (1, 2), "the incomplete request made no call");
}

#[tokio::test]
async fn framing_of_a_replayed_answer_is_its_own() {
    for version in VERSIONS {
        let (_store, locks) = store_and_locks();
        let (_work, address) = Work::serve(&locks).await;
        let first = call(address, version, "/unsized").await.expect("complete");
        assert!(first.len == 30 && !first.head.contains("content-length"), "{version:?}: {}", first.head);
        let retry = call(address, version, "/unsized").await.expect("complete");
        assert!(retry.len == 30 && retry.head.contains("content-length: 30"), "{version:?}: {}", retry.head);
        assert!(!retry.head.contains("transfer-encoding"), "{version:?}: {}", retry.head);
        assert_eq!(retry.head.matches("date: ").count(), 1, "{version:?}: {}", retry.head);
        for is_retry in [false, true] {
            let empty = call(address, version, "/empty").await.expect("complete");
            assert_eq!((empty.status, empty.head.contains("idempotency-replayed")), (204, is_retry), "{version:?}");
        }
    }
}

#[tokio::test]
async fn stream_that_was_read_to_its_end_is_not_sent_again() {
    for version in VERSIONS {
        let (_store, locks) = store_and_locks();
        let (_work, address) = Work::serve(&locks).await;
        assert_eq!(call(address, version, "/stream").await.expect("complete").len, 30);
        let retry = call(address, version, "/stream").await.expect("complete");
        assert_eq!(retry.status, 409, "{version:?}");
        assert!(String::from_utf8_lossy(&retry.body).contains("answer-not-kept"), "{version:?}");
    }
}

/// The reader has no window: it gets the head, and no byte of the body.
/// Guarantee: G18.
#[tokio::test]
async fn reader_without_a_window_does_not_delay_the_record() {
    let (store, locks) = store_and_locks();
    let (work, address) = Work::serve(&locks).await;
    work.may_end.add_permits(2);
    let mut unread = Http2::with_window(address, 0).await;
    let request = Request::post(format!("http://{address}/claim")).header("idempotency-key", "/claim").body(());
    let (response, _) = unread.request(request.expect("a request"), true).await;
    let response = soon("a head", response).await.expect("a head");
    assert_eq!((response.status(), store.held_count()), (StatusCode::CREATED, 0));
    for version in VERSIONS {
        let reply = call(address, version, "/claim").await.expect("a reply");
        assert_eq!((reply.status, reply.len), (201, 10));
    }
    assert_eq!(work.runs(), 1);
    unread.open_window(1 << 20);
    assert_eq!(read(response).await.expect("the rest").len, 10);
}
