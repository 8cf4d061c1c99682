//! A client that has read the end of a response never meets its own lock, at any instance.

use std::{convert::Infallible, time::Duration};

use axum::{Router, body::Body, http::header, routing::get};
use futures_util::{StreamExt, stream};
use tower_lock::test_util::StoreOp;
use tower_lock_testkit::{
    endings::{self, ENDINGS, Ending, NOTHING, assert_next_request_is_served_elsewhere},
    http::{Client, Version},
};

use super::{Cluster, VERSIONS, one_key_for_long};

const ROUNDS: usize = 5;

/// With a fast store, and with one that releases more slowly than the next request arrives.
async fn assert_next_request_is_served(endings: &[Ending], version: Version) {
    for millis in [0, 20] {
        let cluster = Cluster::start(endings::service).await;
        cluster.store.on(StoreOp::Release).latency(Duration::from_millis(millis));
        assert_next_request_is_served_elsewhere(endings, cluster.instances, version, ROUNDS).await;
        assert_eq!(cluster.store.held_count(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_client_with_a_response_is_served_elsewhere() {
    assert_next_request_is_served(&ENDINGS, Version::Http1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_client_with_a_response_is_served_elsewhere() {
    assert_next_request_is_served(&ENDINGS, Version::Http2).await;
}

/// Hyper never polls a body that is announced as empty over HTTP/1.1, and drops it.
#[tokio::test]
async fn response_without_content_is_not_streamed() {
    for version in VERSIONS {
        assert_next_request_is_served(&NOTHING, version).await;
    }
}

/// The byte that completes the announced length is the end of a response, even if its body stays
/// open. (Over HTTP/2 the end is `END_STREAM`, which waits for the body with or without a lock.)
/// Guarantee: G10.
#[tokio::test]
async fn response_complete_by_length_ends_without_its_body() {
    for version in [Version::Http1] {
        let cluster = Cluster::start(|locks| {
            let frames = || stream::iter([Ok::<_, Infallible>("0123456789")]).chain(stream::pending());
            let open = get(async move || ([(header::CONTENT_LENGTH, "10")], Body::from_stream(frames())));
            let layer = one_key_for_long(locks).max_hold(Duration::from_secs(2));
            Router::new().route("/open", open.route_layer(layer))
        })
        .await;
        let reply =
            Client::new(cluster.instances[0], version).request("GET", "/open").await.expect("a complete response");
        assert_eq!((reply.status, reply.len), (200, 10), "{version:?}");
        cluster.assert_status(200, "it was whole").await;
    }
}
