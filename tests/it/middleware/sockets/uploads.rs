//! Slow or incomplete requests lock nothing.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Path,
    http::{Request, StatusCode},
    middleware::{Next, from_fn},
    response::IntoResponse,
    routing::post,
};
use h2::client::ResponseFuture;
use tokio::time::timeout;
use tower_lock::test_util::TestStore;
use tower_lock::{LockLayer, LockManager, OnDisconnect, RequestBodyMode, key, test_util::StoreOp};
use tower_lock_testkit::http::Version;
use tower_lock_testkit::{
    app::serve,
    http::{Http1, Http2, read},
    wait::{settle, soon, until},
};

use super::{Cluster, VERSIONS};

/// Counts requests that have started and ended; optionally an outer timeout.
#[derive(Default)]
struct Gate {
    came: AtomicUsize,
    over: AtomicUsize,
}

impl Gate {
    fn around(self: &Arc<Self>, app: Router, limit: Option<Duration>) -> Router {
        let gate = Arc::clone(self);
        app.layer(from_fn(move |request: Request<Body>, next: Next| {
            let gate = Arc::clone(&gate);
            async move {
                gate.came.fetch_add(1, SeqCst);
                let response = timeout(limit.unwrap_or(Duration::from_secs(3600)), next.run(request)).await;
                gate.over.fetch_add(1, SeqCst);
                response.unwrap_or_else(|_| StatusCode::GATEWAY_TIMEOUT.into_response())
            }
        }))
    }
}

/// Requests that announce a body and send nothing of it, until this is dropped.
enum Silent {
    Http1 { _wires: Vec<Http1> },
    Http2 { _connection: Http2, _streams: Vec<(ResponseFuture, h2::SendStream<Bytes>)> },
}

impl Silent {
    async fn at(address: std::net::SocketAddr, version: Version, how_many: usize) -> Self {
        match version {
            Version::Http1 => {
                let mut all = Vec::new();
                for n in 0..how_many {
                    let mut wire = Http1::connect(address).await;
                    wire.write(format!("POST /orders/{n}/pay HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")).await;
                    all.push(wire);
                }
                Self::Http1 { _wires: all }
            }
            Version::Http2 => {
                let mut http2 = Http2::connect(address).await;
                let mut all = Vec::new();
                for n in 0..how_many {
                    let request = Request::post(format!("http://{address}/orders/{n}/pay")).body(());
                    all.push(http2.request(request.expect("a request"), false).await);
                }
                Self::Http2 { _connection: http2, _streams: all }
            }
        }
    }
}

/// Sixty bytes each, or one connection with two hundred streams.
/// Guarantee: G16.
#[tokio::test]
async fn client_that_sends_no_body_holds_nothing() {
    for version in VERSIONS {
        for limit in [None, Some(Duration::from_millis(200))] {
            let what = format!("{version:?}, {limit:?}");
            let store = TestStore::new();
            let locks = LockManager::new(store.clone());
            let by_order = LockLayer::new(&locks, key::from_fn(|Path(id): Path<u64>| ("order", id)));
            let pay = post(|body: Bytes| async move { body.len().to_string() });
            let gate = Arc::new(Gate::default());
            let app = gate.around(Router::new().route("/orders/{id}/pay", pay.route_layer(by_order)), limit);
            let address = serve(app).await;
            let how_many = 200;
            let silent = Silent::at(address, version, how_many).await;
            until("all bodies have arrived", async || gate.came.load(SeqCst) == how_many).await;
            if limit.is_some() {
                until("the timeout has ended all of them", async || gate.over.load(SeqCst) == how_many).await;
            }
            settle().await;
            assert_eq!(
                (store.on(StoreOp::Acquire).calls(), store.held_count(), locks.size()),
                (0, 0, (0, 0)),
                "{what}"
            );
            for n in [0, 77, 199] {
                let mut wire = Http1::connect(address).await;
                let request = format!("POST /orders/{n}/pay HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc");
                wire.write(request).await;
                let reply = wire.reply(false).await;
                assert_eq!((reply.status, &reply.body[..]), (200, &b"3"[..]), "{what}");
            }
            drop(silent);
        }
    }
}

/// The body comes before the upgrade.
/// Guarantee: G16.
#[tokio::test]
async fn upgrade_request_sends_its_body_first() {
    let cluster = Cluster::start(|locks| {
        let layer = LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("order", id)));
        Router::new().route("/orders/{id}/pay", post(|body: Bytes| async { body }).route_layer(layer))
    })
    .await;
    let upgrade =
        "POST /orders/7/pay HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: shout\r\ncontent-length: 3\r\n\r\n";
    let mut silent = Http1::connect(cluster.instances[0]).await;
    silent.write(upgrade).await;
    let mut quick = Http1::connect(cluster.instances[0]).await;
    quick.write(format!("{upgrade}abc")).await;
    assert_eq!(quick.reply(false).await.status, 200);
    assert_eq!(cluster.store.on(StoreOp::Acquire).calls(), 1);
    silent.write("abc").await;
    assert_eq!(silent.reply(false).await.status, 200);
}

/// An incomplete request has decided nothing: there is nothing to finish.
/// Guarantee: G16.
#[tokio::test]
async fn handler_of_an_incomplete_request_drops_with_its_client() {
    for whole in [false, true] {
        let gate = Arc::new(Gate::default());
        let done = Arc::new(AtomicUsize::new(0));
        let cluster = Cluster::start(|locks| {
            let layer = LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("order", id)))
                .request_body(RequestBodyMode::Stream)
                .on_disconnect(OnDisconnect::Finish)
                .lock_delay(Duration::from_millis(1));
            let done = Arc::clone(&done);
            let pay = post(async move |body: Body| {
                // The missing rest is an error, with which the handler continues.
                let _ = axum::body::to_bytes(body, 9).await;
                tokio::time::sleep(Duration::from_millis(300)).await;
                done.fetch_add(1, SeqCst);
            });
            gate.around(
                Router::new().route("/orders/{id}/pay", pay.route_layer(layer)),
                Some(Duration::from_millis(100)),
            )
        })
        .await;
        let mut wire = Http1::connect(cluster.instances[0]).await;
        wire.write("POST /orders/7/pay HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n").await;
        if whole {
            wire.write("012345678").await;
        }
        until("the timeout has ended it", async || gate.over.load(SeqCst) == 1).await;
        if whole {
            until("it finishes", async || done.load(SeqCst) == 1).await;
        }
        until("released", async || cluster.store.held_count() == 0 && cluster.locks[0].size() == (0, 0)).await;
        assert_eq!(done.load(SeqCst), usize::from(whole));
    }
}

/// All of their bodies except for the last byte, until no further one fits.
/// Guarantee: G15.
#[tokio::test]
async fn unfinished_bodies_reject_no_small_one() {
    const BODY: usize = 2 << 20;
    let cluster = Cluster::start(|locks| {
        let upload = LockLayer::new(locks, key::from_fn(|body: Bytes| ("upload", body.len())))
            .body_idle_timeout(Duration::from_secs(3600));
        let pay = LockLayer::new(locks, key::from_fn(|body: Bytes| ("pay", body.len())));
        Router::new()
            .route("/upload", post(|_: Bytes| async {}).route_layer(upload))
            .route("/pay", post(|_: Bytes| async {}).route_layer(pay))
    })
    .await;
    let mut stopped = Vec::new();
    for _ in 0..31 {
        let mut wire = Http1::connect(cluster.instances[0]).await;
        wire.write(format!("POST /upload HTTP/1.1\r\nhost: x\r\ncontent-length: {BODY}\r\n\r\n")).await;
        wire.write(vec![b'x'; BODY - 1]).await;
        stopped.push(wire);
    }
    for _ in 0..20 {
        let mut wire = Http1::connect(cluster.instances[0]).await;
        wire.write("POST /pay HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n").await;
        wire.write([b'x'; 100]).await;
        assert_eq!(wire.reply(false).await.status, 200);
    }
    until("a further large one is rejected by its head", async || {
        let mut large = Http1::connect(cluster.instances[0]).await;
        let head = "POST /upload HTTP/1.1\r\nhost: x\r\nexpect: 100-continue";
        large.write(format!("{head}\r\ncontent-length: {BODY}\r\n\r\n")).await;
        large.head().await.0 == 503
    })
    .await;
}

#[tokio::test]
async fn nothing_is_locked_while_the_key_body_arrives() {
    let cluster = Cluster::start(|locks| {
        let layer = LockLayer::new(locks, key::from_fn(|_: Bytes| ("k",)));
        Router::new().route("/", post(|body: Bytes| async { body }).route_layer(layer))
    })
    .await;
    let head = "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n";
    let mut slow = Http1::connect(cluster.instances[0]).await;
    slow.write(format!("{head}ab")).await;
    let mut closed = Http1::connect(cluster.instances[0]).await;
    closed.write(format!("{head}ab")).await;
    let mut slow_http2 = Http2::connect(cluster.instances[0]).await;
    let request = || Request::post(format!("http://{}/", cluster.instances[0])).body(()).expect("a request");
    let (response, mut body) = slow_http2.request(request(), false).await;
    body.send_data(Bytes::from_static(b"ab"), false).expect("an open stream");
    let (closed_http2, mut closed_body) = slow_http2.request(request(), false).await;
    closed_body.send_data(Bytes::from_static(b"ab"), false).expect("an open stream");

    // Complete requests are served meanwhile, on any instance.
    for _ in 0..10 {
        for instance in cluster.instances {
            let mut quick = Http1::connect(instance).await;
            quick.write(format!("{head}abcd")).await;
            assert_eq!(quick.reply(false).await.status, 200);
        }
    }
    drop((closed, closed_http2, closed_body));
    slow.write("cd").await;
    assert_eq!(slow.reply(false).await.body, b"abcd");
    body.send_data(Bytes::from_static(b"cd"), true).expect("an open stream");
    let response = soon("a head", response).await.expect("a head");
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(read(response).await.expect("the rest").body, b"abcd");
    settle().await;
    assert_eq!(cluster.store.on(StoreOp::Acquire).calls(), 22, "for the bodies that were complete");
    assert_eq!(cluster.store.held_count(), 0);
}

/// The head of the response is sent, and its body is made from that of the request, which holds the
/// lock: the client must not stop sending.
/// Guarantee: G16.
#[tokio::test]
async fn bidirectional_stream_ends_with_a_silent_client() {
    const IDLE: Duration = Duration::from_millis(300);
    for version in VERSIONS {
        let store = TestStore::new();
        let locks = LockManager::new(store.clone());
        let layer = LockLayer::new(&locks, key::from_fn(|Path(id): Path<u64>| ("order", id)))
            .request_body(RequestBodyMode::Stream)
            .body_idle_timeout(IDLE)
            .lock_delay(Duration::from_millis(1));
        let echo = post(async move |body: Body| body);
        let address = serve(Router::new().route("/orders/{id}/pay", echo.route_layer(layer))).await;
        let _silent = Silent::at(address, version, 1).await;
        until("it holds its key", async || store.held_count() == 1).await;
        let freed = timeout(20 * IDLE, until("its body was idle for too long", async || store.held_count() == 0)).await;
        assert!(freed.is_ok(), "{version:?}: still held after 20 times the limit");
    }
}
