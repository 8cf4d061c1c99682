//! Slow readers affect only themselves.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Path,
    http::Response,
    routing::{get, post},
};
use futures_util::stream;
use h2::RecvStream;
use tokio::{sync::watch, time::sleep};
use tower_lock::{LockLayer, ReleaseAt, key};
use tower_lock_testkit::{
    http::{Client, Http1, Http2, Version, read},
    locks::one_key,
    wait::soon,
};

use super::{Cluster, DELAY, NotifyOnDrop, VERSIONS, one_key_for_long};

/// A client that has read a head, and stalls.
enum Stalls {
    Http1(Http1),
    Http2(Http2, Response<RecvStream>),
}

impl Stalls {
    async fn at(cluster: &Cluster, version: Version, path: &str) -> Self {
        let address = cluster.instances[0];
        match version {
            Version::Http1 => {
                let mut wire = Http1::narrow(address).await;
                wire.write(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
                Self::Http1(wire)
            }
            Version::Http2 => {
                let mut http2 = Http2::with_window(address, 0).await;
                let response = http2.send("GET", path).await;
                Self::Http2(http2, soon("a head", response).await.expect("a head"))
            }
        }
    }

    /// Continues to read.
    async fn reads_on(self) {
        match self {
            Self::Http1(mut wire) => wire.response(false).await.map(|_| ()),
            Self::Http2(http2, response) => {
                http2.open_window(1 << 20);
                read(response).await.map(|_| ())
            }
        }
        .expect_err("an aborted response is incomplete");
    }
}

/// A body without an end, longer than all buffers.
fn endless(owns: watch::Sender<bool>) -> Body {
    endless_frames(owns, 100_000)
}

/// The same, with frames of this size.
fn endless_frames(owns: watch::Sender<bool>, bytes: usize) -> Body {
    let frames = stream::unfold((NotifyOnDrop(owns), bytes), async |(owns, bytes)| {
        tokio::task::yield_now().await;
        Some((Ok::<_, Infallible>(Bytes::from(vec![b'x'; bytes])), (owns, bytes)))
    });
    Body::from_stream(frames)
}

/// The response of the shop is complete; an unread body does not block the product.
#[tokio::test]
async fn client_without_a_window_blocks_no_other() {
    let left = Arc::new(AtomicI64::new(5));
    let sell = post({
        let left = Arc::clone(&left);
        move || async move {
            let left = left.fetch_sub(1, SeqCst) - 1;
            // All of it is ready, in more than the one frame that hyper takes without a window.
            let frames = std::iter::repeat_n(format!("{left:05}").repeat(1000), 10);
            Body::from_stream(stream::iter(frames.map(Ok::<_, Infallible>)))
        }
    });
    let cluster = Cluster::start(|locks| {
        let by_good = LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("good", id)));
        Router::new().route(
            "/goods/{id}/sell",
            sell.clone().route_layer(by_good.wait(Duration::from_secs(60)).body_idle_timeout(DELAY)),
        )
    })
    .await;
    let mut unread = Vec::new();
    for instance in cluster.instances {
        let mut http2 = Http2::with_window(instance, 0).await;
        unread.push((http2.send("POST", "/goods/1/sell").await, http2));
    }
    let mut next = cluster.instances.map(|address| Client::new(address, Version::Http1));
    for client in &mut next {
        let reply = client.request("POST", "/goods/1/sell").await.expect("a response");
        assert_eq!((reply.status, reply.len), (200, 50_000));
    }
    // The heads have arrived, and nothing after them.
    let mut bodies = Vec::new();
    for (response, http2) in unread {
        let mut response = soon("a head", response).await.expect("a head");
        assert_eq!(response.status(), 200);
        let first = futures_util::poll!(Box::pin(response.body_mut().data()));
        assert!(first.is_pending(), "no window, no data: {first:?}");
        bodies.push((response, http2));
    }
    assert_eq!((left.load(SeqCst), cluster.store.held_count()), (1, 0), "four were sold, and the key is free");
    for (response, http2) in bodies {
        http2.open_window(1 << 20);
        assert_eq!(read(response).await.expect("the rest").len, 50_000);
    }
}

/// A phone in a tunnel. The data of the body (a transaction) is dropped before the next section
/// starts.
#[tokio::test]
async fn stalled_reader_loses_its_lock_and_body() {
    let short = Duration::from_millis(150);
    for bound in ["body_idle_timeout", "max_hold"] {
        let bounded = |layer: LockLayer<_>| match bound {
            "body_idle_timeout" => layer.body_idle_timeout(short),
            _ => layer.max_hold(short).body_idle_timeout(DELAY),
        };
        for version in VERSIONS {
            let what = format!("{bound}, {version:?}");
            let (notify, mut dropped) = watch::channel(false);
            let cluster = Cluster::start(|locks| {
                let notify = notify.clone();
                let endless = get(move || async move { endless(notify) });
                Router::new().route("/endless", endless.route_layer(bounded(one_key_for_long(locks))))
            })
            .await;
            let reader = Stalls::at(&cluster, version, "/endless").await;
            soon(&what, dropped.wait_for(|dropped| *dropped)).await.expect("the last value is kept");
            cluster.assert_blocked_for_the_delay(&what).await;
            reader.reads_on().await;
        }
    }
}

/// Not even with a lock-delay in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_behind_a_stalled_reader_starts_after_its_body() {
    for version in VERSIONS {
        let (notify, dropped) = watch::channel(false);
        let cluster = Cluster::start(|locks| {
            let layer = || LockLayer::new(locks, one_key()).lock_delay(Duration::ZERO).wait(Duration::from_secs(60));
            let notify = notify.clone();
            let endless = get(move || async move { endless(notify) });
            let dropped = dropped.clone();
            let waits = get(move || async move { dropped.borrow().to_string() });
            Router::new()
                .route("/endless", endless.route_layer(layer().body_idle_timeout(Duration::from_millis(150))))
                .route("/waits", waits.route_layer(layer()))
        })
        .await;
        for instance in cluster.instances {
            notify.send_replace(false);
            let _reader = Stalls::at(&cluster, version, "/endless").await;
            while cluster.store.held_count() == 0 {
                sleep(Duration::from_millis(1)).await;
            }
            let reply = Client::new(instance, version).request("GET", "/waits").await.expect("a grant");
            assert_eq!((reply.status, &reply.body[..]), (200, &b"true"[..]), "{version:?}");
        }
    }
}

/// The body had no data.
#[tokio::test]
async fn pausing_body_is_not_a_stalled_reader() {
    let cluster = Cluster::start(|locks| {
        let slow = get(|| async {
            let frames = stream::unfold(0, async |n| {
                sleep(Duration::from_millis(400)).await;
                (n < 3).then(|| (Ok::<_, Infallible>("0123456789"), n + 1))
            });
            Body::from_stream(frames)
        });
        Router::new()
            .route("/slow", slow.route_layer(one_key_for_long(locks).body_idle_timeout(Duration::from_millis(150))))
    })
    .await;
    for version in VERSIONS {
        let reply =
            Client::new(cluster.instances[0], version).request("GET", "/slow").await.expect("a complete response");
        assert_eq!((reply.status, reply.len), (200, 30), "{version:?}");
        cluster.assert_free("ended in order").await;
    }
}

/// Slow, but not stalled: it takes longer than the idle timeout in total, and never for one part.
#[tokio::test]
async fn slow_reader_keeps_the_lock_to_the_end() {
    let cluster = Cluster::start(|locks| {
        let large = get(|| async {
            let frames = stream::unfold(0, async |n| {
                tokio::task::yield_now().await;
                (n < 30).then(|| (Ok::<_, Infallible>(Bytes::from(vec![b'x'; 1000])), n + 1))
            });
            Body::from_stream(frames)
        });
        Router::new().route(
            "/large",
            large.route_layer(one_key_for_long(locks).body_idle_timeout(Duration::from_secs(2)).min_body_rate(0)),
        )
    })
    .await;
    let mut http2 = Http2::with_window(cluster.instances[0], 1000).await;
    let response = http2.send("GET", "/large").await;
    let mut body = soon("a head", response).await.expect("a head").into_body();
    let mut read = 0;
    while let Some(data) = soon("data", body.data()).await {
        let data = data.expect("not aborted");
        read += data.len();
        let mut other = Client::new(cluster.instances[1], Version::Http1);
        if read < 28_000 {
            assert_eq!(other.request("GET", "/next").await.expect("a response").status, 409, "{read} bytes are read");
        }
        sleep(Duration::from_millis(100)).await;
        body.flow_control().release_capacity(data.len()).expect("read");
    }
    assert_eq!(read, 30_000);
    cluster.assert_free("ended in order").await;
}

/// It opens its window slightly, repeatedly: it is alive, but too slow.
/// Guarantee: G10.
#[tokio::test]
async fn reader_below_the_minimum_rate_is_aborted() {
    let (notify, mut dropped) = watch::channel(false);
    let cluster = Cluster::start(|locks| {
        let notify = notify.clone();
        // Short frames: the next one is polled each time the window opens.
        let endless = get(move || async move { endless_frames(notify, 500) });
        let layer = one_key_for_long(locks).body_idle_timeout(Duration::from_secs(1)).min_body_rate(100_000);
        Router::new().route("/endless", endless.route_layer(layer))
    })
    .await;
    let mut http2 = Http2::with_window(cluster.instances[0], 1000).await;
    let response = http2.send("GET", "/endless").await;
    let mut body = soon("a head", response).await.expect("a head").into_body();
    let mut read = 0;
    let cut = loop {
        match soon("data", body.data()).await.expect("it has no end") {
            Ok(data) => {
                read += data.len();
                assert!(read < 200_000, "it is kept for ever");
                sleep(Duration::from_millis(100)).await;
                let _ = body.flow_control().release_capacity(data.len());
            }
            Err(cut) => break cut,
        }
    };
    assert!(cut.is_reset(), "{cut}");
    soon("the data of the body", dropped.wait_for(|dropped| *dropped)).await.expect("its last message is kept");
    cluster.assert_blocked_for_the_delay("it was cut").await;
}

/// Its work is done with its head.
#[tokio::test]
async fn stream_released_at_its_head_blocks_no_other() {
    let cluster = Cluster::start(|locks| {
        let (notify, _) = watch::channel(false);
        let endless = get(move || async move { endless(notify) });
        Router::new()
            .route("/endless", endless.route_layer(one_key_for_long(locks).release_at(ReleaseAt::ResponseHead)))
    })
    .await;
    for version in VERSIONS {
        let mut reader = Stalls::at(&cluster, version, "/endless").await;
        if let Stalls::Http1(wire) = &mut reader {
            assert_eq!(wire.head().await.0, 200);
        }
        cluster.assert_status(200, "held to its head").await;
        drop(reader);
        cluster.assert_status(200, "no lock was held when its client disconnected").await;
    }
}
