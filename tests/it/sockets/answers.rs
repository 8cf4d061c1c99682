//! A client that has read the end of an answer never meets its own lock, whatever instance it asks next.

use std::time::Duration;

use super::{
    Site,
    matrix::{self, Version, whoever_read_the_end_is_served_elsewhere},
};
use tower_lock::test_util::Verb;

const ROUNDS: usize = 30;

#[tokio::test]
async fn whoever_has_read_the_end_over_http_1_is_served_at_another_instance() {
    let site = Site::of(matrix::service).await;
    whoever_read_the_end_is_served_elsewhere(site.instances, Version::Http1, ROUNDS).await;
    assert_eq!(site.store.held(), 0);
}

#[tokio::test]
async fn whoever_has_read_the_end_over_http_2_is_served_at_another_instance() {
    let site = Site::of(matrix::service).await;
    whoever_read_the_end_is_served_elsewhere(site.instances, Version::Http2, ROUNDS).await;
    assert_eq!(site.store.held(), 0);
}

#[tokio::test]
async fn a_slow_store_makes_no_difference() {
    for version in [Version::Http1, Version::Http2] {
        let site = Site::of(matrix::service).await;
        site.store.on(Verb::Acquire).takes(Duration::from_millis(2));
        site.store.on(Verb::Release).takes(Duration::from_millis(5));
        whoever_read_the_end_is_served_elsewhere(site.instances, version, ROUNDS).await;
        assert_eq!(site.store.held(), 0);
    }
}
