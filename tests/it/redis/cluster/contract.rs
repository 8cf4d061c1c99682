//! The contract of a store, on a Cluster.

use tower_lock::test_util::conformance;
use tower_lock_testkit::{
    limits,
    runtimes::{end_runtimes_in_child_process, ends_of_runtimes_are_survived},
};

use super::{cluster, shared_cluster, store};

#[tokio::test]
async fn redis_cluster_passes_conformance() {
    let Some(cluster) = cluster(3, 0).await else { return };
    conformance::check(store(&cluster).await).await;
}

/// Guarantee: G2.
#[tokio::test]
async fn runtimes_end_while_calls_to_a_cluster_are_under_way() {
    end_runtimes_in_child_process(async |url| limits::redis().connect(url).await.expect("it is up"));
    let Some(cluster) = shared_cluster().await else { return };
    let test = "cluster::contract::runtimes_end_while_calls_to_a_cluster_are_under_way";
    ends_of_runtimes_are_survived(test, &cluster.url()).await;
}
