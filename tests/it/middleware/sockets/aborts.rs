//! Aborted responses: a statement of their handler may still be in flight, so their key stays
//! blocked for the lock-delay.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::Response,
    routing::get,
};
use futures_util::stream;
use tokio::{sync::watch, time::sleep};
use tower_lock_testkit::{
    body::{ScriptedBody, Step, paused},
    http::{Client, Http1, Http2, Version},
    panics::{panics, resumed},
    wait::soon,
};

use super::{Cluster, NotifyOnDrop, VERSIONS, one_key_for_long};

#[tokio::test]
async fn panic_in_a_body_blocks_for_the_lock_delay() {
    let ran = Arc::new(AtomicUsize::new(0));
    for (what, steps, notify) in [
        ("before the head", vec![Step::Panic("planned: at once")], "planned: at once"),
        ("in the stream", paused(&[Step::Data(10), Step::Panic("planned: then")]), "planned: then"),
    ] {
        for version in VERSIONS {
            let handler = get({
                let (ran, steps) = (Arc::clone(&ran), steps.clone());
                move || async move {
                    ran.fetch_add(1, SeqCst);
                    Response::new(Body::new(ScriptedBody::new(steps)))
                }
            });
            let cluster = Cluster::start(|locks| {
                Router::new()
                    .route("/panics", handler.clone().route_layer(one_key_for_long(locks)))
                    .route("/other", get(|| async { "other" }))
            })
            .await;
            let before = (panics(notify), ran.load(SeqCst));
            let mut client = Client::new(cluster.instances[0], version);
            client.request("GET", "/panics").await.expect_err("an incomplete response");
            cluster.assert_blocked_for_the_delay(&format!("{what}, {version:?}")).await;
            assert_eq!((panics(notify), ran.load(SeqCst)), (before.0 + 1, before.1 + 1), "{what}, {version:?}: once");
            assert_eq!(resumed(), 0, "a body that panicked is not polled again");
            assert_eq!(client.request("GET", "/other").await.expect("others are served").status, 200);
        }
    }
}

#[tokio::test]
async fn disconnect_in_a_stream_blocks_for_the_lock_delay() {
    for version in VERSIONS {
        let (notify, mut dropped) = watch::channel(false);
        let handler = get(move || async move {
            let frames = stream::unfold(NotifyOnDrop(notify), async |owned| {
                sleep(Duration::from_millis(1)).await;
                Some((Ok::<_, Infallible>(Bytes::from_static(b"0123456789")), owned))
            });
            Body::from_stream(frames)
        });
        let cluster = Cluster::start(|locks| {
            Router::new().route("/endless", handler.clone().route_layer(one_key_for_long(locks)))
        })
        .await;
        drop(handler);
        match version {
            Version::Http1 => {
                let mut wire = Http1::connect(cluster.instances[0]).await;
                wire.write("GET /endless HTTP/1.1\r\nhost: x\r\n\r\n").await;
                wire.head().await;
                wire.bytes(30).await;
                assert_eq!(cluster.store.held_count(), 1, "as long as it streams");
            }
            Version::Http2 => {
                let mut http2 = Http2::connect(cluster.instances[0]).await;
                let response = soon("a head", http2.send("GET", "/endless").await).await.expect("a head");
                let mut body = response.into_body();
                soon("data", body.data()).await.expect("data").expect("data");
                assert_eq!(cluster.store.held_count(), 1, "as long as it streams");
                drop(body);
                // The connection stays: only the stream was reset.
                soon("the end of the body", dropped.wait_for(|dropped| *dropped)).await.expect("one body remains");
            }
        }
        soon("the end of the body", dropped.wait_for(|dropped| *dropped)).await.expect("the last value is kept");
        cluster.assert_blocked_for_the_delay(&format!("{version:?}")).await;
    }
}
