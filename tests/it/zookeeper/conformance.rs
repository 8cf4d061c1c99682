//! One contract for all stores.

use std::time::Duration;

use tower_lock::test_util::conformance;

use crate::support::{environment, own_environment};

/// The leases of the suite have ten minutes.
const SESSION: Duration = Duration::from_secs(610);

#[tokio::test]
async fn zookeeper_store_passes_conformance() {
    let Some(environment) = environment().await else { return };
    conformance::check(environment.store(SESSION).await).await;
}

#[tokio::test]
async fn store_on_three_servers_passes_conformance() {
    let Some(environment) = own_environment(3).await else { return };
    conformance::check(environment.store(SESSION).await).await;
}
