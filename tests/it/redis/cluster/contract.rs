//! The contract of a store, on a Cluster.

use tower_lock::test_util::conformance;

use super::{cluster, store};

#[tokio::test]
async fn redis_cluster_passes_conformance() {
    let Some(cluster) = cluster(3, 0).await else { return };
    conformance::check(store(&cluster).await).await;
}
