//! The contract of a store, on a Cluster.

use tower_lock::test_util::conformance;
use tower_lock_testkit::parity::same_replies_as_memory;

use super::{cluster, store};

#[tokio::test]
async fn redis_cluster_passes_conformance() {
    let Some(cluster) = cluster(3, 0).await else { return };
    conformance::check(store(&cluster).await).await;
}

#[tokio::test]
async fn memory_and_a_cluster_give_the_same_replies() {
    let Some(cluster) = cluster(3, 0).await else { return };
    same_replies_as_memory(store(&cluster).await).await;
}
