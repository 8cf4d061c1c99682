//! The contract of all stores.

use tower_lock::test_util::conformance;

use super::servers;

#[tokio::test]
async fn redlock_store_passes_conformance_on_three_servers() {
    let Some(servers) = servers(3).await else { return };
    conformance::check(servers.store().await).await;
}
