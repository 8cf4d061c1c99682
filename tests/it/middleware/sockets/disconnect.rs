//! Handlers that end without their client: it disconnects, an outer timeout responds, they panic,
//! or their runtime stops.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, Request},
    middleware::{Next, from_fn},
    response::Response,
    routing::{MethodRouter, get},
};
use h2::client::ResponseFuture;
use tokio::{
    net::TcpListener,
    runtime::{self, Runtime},
    sync::Semaphore,
};
use tower_lock::{LockKey, LockLayer, LockManager, MemoryStore, OnDisconnect, key, test_util::Clock};
use tower_lock_testkit::{
    app::serve,
    http::{Client, Cut, Http1, Http2, Reply, Version, read},
    locks::one_key,
    panics::{panics, resumed},
    wait::{soon, until},
};

use super::{Cluster, DELAY, VERSIONS, one_key_for_long};

/// A handler that waits in the middle of its work until it is released, and counts its events.
#[derive(Clone, Default)]
struct Work(Arc<Counts>);

struct Counts {
    begun: AtomicUsize,
    /// Its effect.
    done: AtomicUsize,
    /// Ended in any way.
    over: AtomicUsize,
    may_go_on: Semaphore,
    /// Requests dropped before their response, outside the lock.
    dropped_requests: AtomicUsize,
}

/// Counts when it is dropped.
struct Counted<'a>(&'a AtomicUsize);

/// A waiting client that can leave.
enum WaitingClient {
    Http1(Http1),
    Http2(Http2, ResponseFuture),
}

/// Panics with this message, if any, when it is released.
const NO_PANIC: &str = "";

// === impl Work ===

impl Default for Counts {
    fn default() -> Self {
        let zero = AtomicUsize::default;
        Self { begun: zero(), done: zero(), over: zero(), may_go_on: Semaphore::new(0), dropped_requests: zero() }
    }
}

impl Work {
    fn handler(&self, panics_with: &'static str) -> MethodRouter {
        let Self(counts) = self.clone();
        get(move || async move {
            let _over = Counted(&counts.over);
            counts.begun.fetch_add(1, SeqCst);
            counts.may_go_on.acquire().await.expect("never closed").forget();
            assert!(panics_with.is_empty(), "{panics_with}");
            counts.done.fetch_add(1, SeqCst);
            "done"
        })
    }

    /// An outer layer that counts requests dropped without a response.
    fn with_outer_layers(&self, router: Router) -> Router {
        let Self(counts) = self.clone();
        router.layer(from_fn(move |request: Request, next: Next| {
            let counts = Arc::clone(&counts);
            async move { counts.watch(request, next).await }
        }))
    }

    async fn has_begun(&self) {
        until("the handler runs", async || self.0.begun.load(SeqCst) > 0).await;
    }

    async fn wait_ended(&self) {
        until("the handler has ended", async || self.0.over.load(SeqCst) > 0).await;
    }

    async fn is_given_up(&self, times: usize) {
        until("the server has noticed", async || self.0.dropped_requests.load(SeqCst) == times).await;
    }

    fn may_go_on(&self) {
        self.0.may_go_on.add_permits(1);
    }

    /// How often it has started, ended, and completed.
    fn counts(&self) -> [usize; 3] {
        [&self.0.begun, &self.0.over, &self.0.done].map(|count| count.load(SeqCst))
    }
}

impl Counts {
    async fn watch(&self, request: Request, next: Next) -> Response {
        let dropped_requests = Counted(&self.dropped_requests);
        let response = next.run(request).await;
        std::mem::forget(dropped_requests);
        response
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

// === impl WaitingClient ===

impl WaitingClient {
    async fn send(version: Version, cluster: &Cluster, path: &str) -> Self {
        let address = cluster.instances[0];
        match version {
            Version::Http1 => {
                let mut wire = Http1::connect(address).await;
                wire.write(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
                Self::Http1(wire)
            }
            Version::Http2 => {
                let mut http2 = Http2::connect(address).await;
                let response = http2.send("GET", path).await;
                Self::Http2(http2, response)
            }
        }
    }

    /// Closes the socket, or sends `RST_STREAM` on a connection that stays.
    fn leave(self) -> Option<Http2> {
        match self {
            Self::Http1(_) => None,
            Self::Http2(http2, _) => Some(http2),
        }
    }

    async fn response(self) -> Result<Reply, Cut> {
        match self {
            Self::Http1(mut wire) => wire.response(false).await,
            Self::Http2(_connection, response) => read(soon("a head", response).await.map_err(|_| Cut)?).await,
        }
    }
}

/// One handler at two instances, with this disconnect setting.
async fn serve_work(work: &Work, on_disconnect: Option<OnDisconnect>, panics_with: &'static str) -> Cluster {
    Cluster::start(|locks| {
        let layer = match on_disconnect {
            Some(on_disconnect) => one_key_for_long(locks).on_disconnect(on_disconnect),
            None => one_key_for_long(locks),
        };
        work.with_outer_layers(Router::new().route("/work", work.handler(panics_with).route_layer(layer)))
    })
    .await
}

#[tokio::test]
async fn handler_finishes_once_after_a_disconnect() {
    for version in VERSIONS {
        for on_disconnect in [None, Some(OnDisconnect::Finish)] {
            let work = Work::default();
            let cluster = serve_work(&work, on_disconnect, NO_PANIC).await;
            let client = WaitingClient::send(version, &cluster, "/work").await;
            work.has_begun().await;
            let connection = client.leave();
            work.is_given_up(1).await;
            cluster.assert_status(409, "the handler still runs").await;
            assert_eq!(work.counts(), [1, 0, 0], "{version:?}");
            work.may_go_on();
            work.wait_ended().await;
            cluster.assert_free("ended in order, without a client").await;
            assert_eq!(work.counts(), [1, 1, 1], "{version:?}");
            drop(connection);
        }
    }
}

#[tokio::test]
async fn cancelled_handler_is_dropped_with_its_client() {
    for version in VERSIONS {
        let work = Work::default();
        let cluster = serve_work(&work, Some(OnDisconnect::Cancel), NO_PANIC).await;
        let client = WaitingClient::send(version, &cluster, "/work").await;
        work.has_begun().await;
        let connection = client.leave();
        work.wait_ended().await;
        cluster.assert_blocked_for_the_delay("a statement may be in flight").await;
        assert_eq!(work.counts(), [1, 1, 0], "{version:?}");
        drop(connection);
    }
}

#[tokio::test]
async fn waiter_behind_a_detached_handler_is_served_at_its_end() {
    for version in VERSIONS {
        let work = Work::default();
        let cluster = Cluster::start(|locks| {
            let layer = || one_key_for_long(locks).wait(Duration::from_secs(60));
            let waits = get(|| async { "a grant" }).route_layer(layer());
            let router =
                Router::new().route("/work", work.handler(NO_PANIC).route_layer(layer())).route("/waits", waits);
            work.with_outer_layers(router)
        })
        .await;
        let client = WaitingClient::send(version, &cluster, "/work").await;
        work.has_begun().await;
        let connection = client.leave();
        work.is_given_up(1).await;
        let waits = cluster
            .instances
            .map(|address| tokio::spawn(async move { Client::new(address, version).request("GET", "/waits").await }));
        until("both are queued", async || cluster.locks.iter().all(|locks| locks.size().1 == 1)).await;
        assert_eq!(work.counts(), [1, 0, 0], "{version:?}");
        work.may_go_on();
        for waits in waits {
            let reply = soon("a grant", waits).await.expect("no panic").expect("a response");
            assert_eq!((reply.status, work.counts()), (200, [1, 1, 1]), "{version:?}");
        }
        drop(connection);
    }
}

#[tokio::test]
async fn handler_panic_blocks_for_the_lock_delay_detached_or_not() {
    for (on_disconnect, disconnects, message) in [
        (OnDisconnect::Finish, false, "planned: before its client"),
        (OnDisconnect::Cancel, false, "planned: before its client, not to finish"),
        (OnDisconnect::Finish, true, "planned: without a client"),
    ] {
        for version in VERSIONS {
            let work = Work::default();
            let cluster = serve_work(&work, Some(on_disconnect), message).await;
            let before = panics(message);
            let client = WaitingClient::send(version, &cluster, "/work").await;
            work.has_begun().await;
            if disconnects {
                drop(client.leave());
                work.is_given_up(1).await;
                work.may_go_on();
            } else {
                work.may_go_on();
                client.response().await.expect_err("no response");
            }
            work.wait_ended().await;
            cluster.assert_blocked_for_the_delay(message).await;
            assert_eq!((panics(message), work.counts()), (before + 1, [1, 1, 0]), "{version:?}: once");
            assert_eq!(resumed(), 0, "a handler that panicked is not polled again");
            assert_eq!((cluster.locks[0].held_count(), cluster.locks[0].size()), (0, (0, 0)), "no handler remains");
        }
    }
}

/// As when one of several runtimes of a process ends: the handler is not polled any more, and no
/// task can be spawned.
#[tokio::test]
async fn runtime_shutdown_drops_handlers_and_blocks_their_keys() {
    for (on_disconnect, disconnects) in
        [(OnDisconnect::Finish, false), (OnDisconnect::Cancel, false), (OnDisconnect::Finish, true)]
    {
        for version in VERSIONS {
            let what = format!("{on_disconnect:?}, {version:?}, the client left first: {disconnects}");
            let work = Work::default();
            let clock = Clock::default();
            let store = Arc::new(MemoryStore::with_clock(clock.clone()));
            let instance = || LockManager::builder(Arc::clone(&store)).clock(clock.clone()).build();
            let service = |locks: &LockManager| {
                let layer = || LockLayer::new(locks, one_key()).lock_delay(DELAY);
                let next = get(|| async { "next" }).route_layer(layer());
                let router = Router::new()
                    .route("/work", work.handler(NO_PANIC).route_layer(layer().on_disconnect(on_disconnect)));
                work.with_outer_layers(router.route("/next", next))
            };
            let (stops, stays) = (instance(), instance());
            let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("threads");
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
            listener.set_nonblocking(true).expect("a socket");
            let address = listener.local_addr().expect("bound");
            let app = service(&stops);
            runtime.spawn(async move {
                axum::serve(TcpListener::from_std(listener).expect("a socket"), app).await.expect("it serves");
            });
            let mut client = Client::new(address, version);
            let asks = tokio::spawn(async move { client.request("GET", "/work").await.map(|reply| reply.status) });
            work.has_begun().await;
            if disconnects {
                asks.abort();
                work.is_given_up(1).await;
                assert_eq!(work.counts(), [1, 0, 0], "{what}");
            }
            stop(runtime).await;
            assert_eq!(work.counts(), [1, 1, 0], "{what}: dropped before its end");
            if !disconnects {
                asks.await.expect("no panic").expect_err("no response");
            }

            let mut next = Client::new(serve(service(&stays)).await, version);
            for status in [409, 409, 200] {
                assert_eq!(next.request("GET", "/next").await.expect("a response").status, status, "{what}");
                clock.jump(DELAY / 2 + Duration::from_secs(1));
            }
            assert_eq!(stops.held_count(), 0, "{what}");
        }
    }
}

async fn stop(runtime: Runtime) {
    let stopped = tokio::task::spawn_blocking(move || runtime.shutdown_timeout(Duration::from_secs(60)));
    soon("the end of a runtime", stopped).await.expect("no panic");
}

/// One HTTP/2 connection: each stream is reset as soon as its handler runs, and no longer counts
/// against its limit.
/// Guarantee: G4.
#[tokio::test]
async fn flood_of_resets_leaves_other_routes_alone() {
    const MAX: usize = 20;
    let (flood, honest) = (Work::default(), Work::default());
    let locks = LockManager::builder(MemoryStore::new()).max_detached(MAX).build();
    let order = |layer: &str| {
        let name = layer.to_owned();
        key::from_fn(move |Path(id): Path<u64>| LockKey::from(("order", name.clone(), id)))
    };
    let app =
        Router::new()
            .route("/flood/{id}", flood.handler(NO_PANIC).route_layer(LockLayer::new(&locks, order("flood"))))
            .merge(honest.with_outer_layers(
                Router::new().route(
                    "/honest/{id}",
                    honest.handler(NO_PANIC).route_layer(LockLayer::new(&locks, order("honest"))),
                ),
            ));
    let address = serve(app).await;
    let mut attacker = Http2::connect(address).await;
    for n in 0..2 * MAX {
        let stream = attacker.send("GET", &format!("/flood/{n}")).await;
        until("it runs", async || flood.0.begun.load(SeqCst) == n + 1).await;
        drop(stream);
    }
    until("at most half of the permits", async || flood.0.over.load(SeqCst) == 2 * MAX - MAX / 2).await;
    let client = {
        let mut http2 = Http2::connect(address).await;
        let response = http2.send("GET", "/honest/1").await;
        honest.has_begun().await;
        WaitingClient::Http2(http2, response)
    };
    drop(client);
    honest.is_given_up(1).await;
    for _ in 0..MAX {
        flood.may_go_on();
    }
    honest.may_go_on();
    honest.wait_ended().await;
    assert_eq!(honest.counts(), [1, 1, 1], "it has finished without its client");
    until("the flood has ended", async || flood.0.over.load(SeqCst) == 2 * MAX).await;
    assert_eq!(flood.counts()[2], MAX / 2);
}
