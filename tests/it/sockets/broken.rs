//! Answers that do not come to their end: a statement of theirs may be on its way still, so their key stays taken for the lock-delay.

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
use tower_lock::{LockLayer, Locks};

use super::{
    Site,
    matrix::{Client, Says, Step, Steps, Version},
};
use crate::support::{
    one_key,
    panics::panics,
    soon, until,
    wire::{Http2, Wire},
};

/// Longer than the machine can be busy with something else: it is over when the clock jumps.
const DELAY: Duration = Duration::from_secs(3600);

/// Both instances refuse until the delay is over, and none of them for longer.
async fn stays_taken_for_the_delay(site: &Site, what: &str) {
    let mut clients = site.instances.map(|address| Client::new(address, Version::Http1));
    for refused in [true, true, false] {
        for client in &mut clients {
            let status = client.ask("GET", "/next").await.expect("an answer").status;
            assert_eq!(status, if refused { 409 } else { 200 }, "{what}");
        }
        if refused {
            // From here on it counts.
            until("given back", || site.store.held() == 0).await;
            site.clock.jump(DELAY / 2);
        }
    }
}

fn layer<S>(locks: &Locks, method_router: axum::routing::MethodRouter<S>) -> axum::routing::MethodRouter<S>
where
    S: Clone + Send + Sync + 'static,
{
    method_router.route_layer(LockLayer::new(locks, one_key()).lock_delay(DELAY))
}

#[tokio::test]
async fn after_a_panic_in_a_body_the_key_stays_taken_for_the_lock_delay() {
    let ran = Arc::new(AtomicUsize::new(0));
    for (what, steps, paused, says) in [
        ("before the head", vec![Step::Panic("planned: at once")], false, "planned: at once"),
        ("in the stream", vec![Step::Data(10), Step::Panic("planned: then")], true, "planned: then"),
    ] {
        for version in [Version::Http1, Version::Http2] {
            let handler = get({
                let (ran, steps) = (Arc::clone(&ran), steps.clone());
                move || async move {
                    ran.fetch_add(1, SeqCst);
                    Response::new(Body::new(Steps::new(steps, Says::Nobody, paused)))
                }
            });
            let site = Site::of(|locks| {
                Router::new()
                    .route("/panics", layer(locks, handler.clone()))
                    .route("/next", layer(locks, get(|| async { "next" })))
                    .route("/other", get(|| async { "other" }))
            })
            .await;
            let before = (panics(says), ran.load(SeqCst));
            let mut client = Client::new(site.instances[0], version);
            client.ask("GET", "/panics").await.expect_err("no whole answer");
            stays_taken_for_the_delay(&site, &format!("{what}, {version:?}")).await;
            assert_eq!((panics(says), ran.load(SeqCst)), (before.0 + 1, before.1 + 1), "{what}, {version:?}: once");
            assert_eq!(client.ask("GET", "/other").await.expect("others are served").status, 200);
        }
    }
}

/// Says when it is dropped.
struct Owned(watch::Sender<bool>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.send_replace(true);
    }
}

#[tokio::test]
async fn after_a_client_left_a_stream_the_key_stays_taken_for_the_lock_delay() {
    for version in [Version::Http1, Version::Http2] {
        let (says, mut gone) = watch::channel(false);
        let handler = get(move || async move {
            let frames = stream::unfold(Owned(says), async |owned| {
                sleep(Duration::from_millis(1)).await;
                Some((Ok::<_, Infallible>(Bytes::from_static(b"0123456789")), owned))
            });
            Body::from_stream(frames)
        });
        let site = Site::of(|locks| {
            Router::new()
                .route("/endless", layer(locks, handler.clone()))
                .route("/next", layer(locks, get(|| async { "next" })))
        })
        .await;
        drop(handler);
        match version {
            Version::Http1 => {
                let mut wire = Wire::connect(site.instances[0]).await;
                wire.write("GET /endless HTTP/1.1\r\nhost: x\r\n\r\n").await;
                wire.head().await;
                wire.bytes(30).await;
                assert_eq!(site.store.held(), 1, "as long as it streams");
            }
            Version::Http2 => {
                let mut http2 = Http2::connect(site.instances[0]).await;
                let answer = soon("a head", http2.send("GET", "/endless").await).await.expect("a head");
                let mut body = answer.into_body();
                soon("data", body.data()).await.expect("data").expect("data");
                assert_eq!(site.store.held(), 1, "as long as it streams");
                drop(body);
                // The connection stays: it was a reset.
                soon("the end of the body", gone.wait_for(|gone| *gone)).await.expect("one of them lives");
            }
        }
        soon("the end of the body", gone.wait_for(|gone| *gone)).await.expect("its last word is kept");
        stays_taken_for_the_delay(&site, &format!("{version:?}")).await;
    }
}
