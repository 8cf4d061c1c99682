//! A request that holds its key more than once: the last release comes before the end of its
//! response.

use std::{future::IntoFuture, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    routing::get,
};
use futures_util::stream;
use tokio::time::sleep;
use tower_lock::{HeldLock, LockLayer, LockManager, LockManagerLayer, test_util::StoreOp};
use tower_lock_testkit::{http::Client, locks::one_key};

use super::{Cluster, VERSIONS};

const ROUNDS: usize = 20;

/// Layers with one key on a route, a router and around both.
fn three_layers(locks: &LockManager) -> Router {
    let layer = || LockLayer::new(locks, one_key());
    let handler = async |lock: HeldLock| lock.fencing_token().to_string();
    Router::new()
        .route("/layers", get(handler).route_layer(layer()))
        .route_layer(layer())
        .layer(layer())
        .layer(LockManagerLayer::new(locks))
}

/// The handler reenters: once, and in concurrent branches.
fn the_handler_itself(locks: &LockManager) -> Router {
    let again = async |State(locks): State<LockManager>, held: HeldLock| {
        let guard = locks.lock(("k",)).await.expect("reentered");
        let counts = (guard.hold_count(), guard.fencing_token() == held.fencing_token());
        guard.release().await.expect("up");
        format!("{counts:?}")
    };
    let joined = async |State(locks): State<LockManager>| {
        let branch = || locks.try_lock(("k",)).into_future();
        let (one, two) = tokio::join!(branch(), branch());
        let (one, two) = (one.expect("reentered"), two.expect("reentered"));
        let is_one = one.fencing_token() == two.fencing_token();
        let counts = (one.hold_count(), two.hold_count(), is_one);
        one.release().await.expect("up");
        two.release().await.expect("up");
        format!("{counts:?}")
    };
    // Its body reenters while the response streams.
    let streamed = async |State(locks): State<LockManager>| {
        let frames = stream::unfold(Some(locks), async |locks| {
            let locks = locks?;
            sleep(Duration::from_millis(1)).await;
            let guard = locks.try_lock(("k",)).await.expect("reentered");
            let count = guard.hold_count();
            guard.release().await.expect("up");
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(count.to_string())), None))
        });
        Body::from_stream(frames)
    };
    Router::new()
        .route("/again", get(again))
        .route("/joined", get(joined))
        .route("/streamed", get(streamed))
        .route_layer(LockLayer::new(locks, one_key()))
        .with_state(locks.clone())
}

#[tokio::test]
async fn nested_holds_are_released_before_the_response_is_read() {
    let cluster = Cluster::start(|locks| three_layers(locks).merge(the_handler_itself(locks))).await;
    cluster.store.on(StoreOp::Release).latency(Duration::from_millis(2));
    for version in VERSIONS {
        let mut clients = cluster.instances.map(|address| Client::new(address, version));
        let (mut asked, mut last) = (cluster.store.on(StoreOp::Acquire).calls(), 0);
        for round in 0..ROUNDS {
            for path in ["/layers", "/again", "/joined", "/streamed"] {
                for client in &mut clients {
                    let reply = client.request("GET", path).await.expect("a response");
                    assert_eq!(reply.status, 200, "{path}, {version:?}, round {round}");
                    let text = String::from_utf8(reply.body.clone()).expect("text");
                    match path {
                        "/layers" => {
                            let fence: u64 = text.parse().expect("a number");
                            assert!(fence > last, "{fence} after {last}");
                            last = fence;
                        }
                        "/again" => assert_eq!(text, "(2, true)"),
                        "/joined" => assert_eq!(text, "(3, 3, true)"),
                        _ => assert!(text.contains('2'), "{text}"),
                    }
                    asked += 1;
                    assert_eq!(cluster.store.on(StoreOp::Acquire).calls(), asked, "{path}: one acquire");
                    assert_eq!(cluster.store.held_count(), 0, "{path}, {version:?}, round {round}");
                }
            }
        }
    }
}

/// It waits neither for itself nor for the waiter behind it.
#[tokio::test]
async fn request_reenters_ahead_of_waiters() {
    let cluster = Cluster::start(|locks| {
        let handler = async |State(locks): State<LockManager>| {
            let mut ahead = 0;
            // Until a waiter is queued, at any level.
            while ahead == 0 {
                sleep(Duration::from_millis(1)).await;
                let state = locks.inspect(("k",)).await.expect("up");
                ahead = state.waiting + state.waiting_locally;
            }
            let guard = locks.try_lock(("k",)).await.expect("reentered");
            guard.release().await.expect("up");
        };
        let layer = || LockLayer::new(locks, one_key()).wait(Duration::from_secs(60));
        Router::new()
            .route("/again", get(handler).route_layer(layer()))
            .route("/waits", get(|| async { "a grant" }).route_layer(layer()))
            .with_state(locks.clone())
    })
    .await;
    for waits_at in cluster.instances {
        for version in VERSIONS {
            let mut clients = [cluster.instances[0], waits_at].map(|address| Client::new(address, version));
            let [first, second] = &mut clients;
            let second = async {
                while cluster.locks[0].held_count() == 0 {
                    sleep(Duration::from_millis(1)).await;
                }
                second.request("GET", "/waits").await
            };
            let (first, second) = tokio::join!(first.request("GET", "/again"), second);
            assert_eq!((first.expect("a response").status, second.expect("a response").status), (200, 200));
        }
    }
    assert_eq!(cluster.store.held_count(), 0);
}
