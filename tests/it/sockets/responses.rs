//! A client that has read the end of an answer never meets its own lock, whatever instance it asks next.

use std::{convert::Infallible, time::Duration};

use axum::{Router, body::Body, http::header, routing::get};
use futures_util::{StreamExt, stream};

use super::{
    Site, VERSIONS,
    matrix::{self, Client, ENDINGS, Ending, NOTHING, Version, whoever_read_the_end_is_served_elsewhere},
    one_key_for_long,
};
use tower_lock::test_util::StoreOp;

const ROUNDS: usize = 30;

/// With a store that answers at once, and with one that takes its time to free a key: more than the next request takes to come.
async fn whoever_has_read_the_end_is_served(endings: &[Ending], version: Version) {
    for millis in [0, 20] {
        let site = Site::of(matrix::service).await;
        site.store.on(StoreOp::Release).latency(Duration::from_millis(millis));
        whoever_read_the_end_is_served_elsewhere(endings, site.instances, version, ROUNDS).await;
        assert_eq!(site.store.held_count(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_client_with_a_response_is_served_elsewhere() {
    whoever_has_read_the_end_is_served(&ENDINGS, Version::Http1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_client_with_a_response_is_served_elsewhere() {
    whoever_has_read_the_end_is_served(&ENDINGS, Version::Http2).await;
}

/// Hyper never polls a body that is announced to be empty over HTTP/1.1, and drops it.
#[tokio::test]
async fn response_without_content_is_not_streamed() {
    for version in VERSIONS {
        whoever_has_read_the_end_is_served(&NOTHING, version).await;
    }
}

/// The byte that completes the announced length is the end of an answer, whatever its body still keeps open. (Over HTTP/2 the end is `END_STREAM`, and
/// that waits for the body with or without a lock.)
#[tokio::test]
async fn response_complete_by_length_ends_without_its_body() {
    for version in [Version::Http1] {
        let site = Site::of(|locks| {
            let frames = || stream::iter([Ok::<_, Infallible>("0123456789")]).chain(stream::pending());
            let open = get(async move || ([(header::CONTENT_LENGTH, "10")], Body::from_stream(frames())));
            let layer = one_key_for_long(locks).max_hold(Duration::from_secs(2));
            Router::new().route("/open", open.route_layer(layer))
        })
        .await;
        let reply = Client::new(site.instances[0], version).ask("GET", "/open").await.expect("a whole answer");
        assert_eq!((reply.status, reply.len), (200, 10), "{version:?}");
        site.answers(200, "it was whole").await;
    }
}
