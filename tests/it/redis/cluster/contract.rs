//! The contract of a store, on a Cluster.

use tower_lock::test_util::conformance;

use super::{cluster, store};
use crate::conformance::same_replies_as_memory;

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
