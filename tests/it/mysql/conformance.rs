//! One contract for all stores.

use tower_lock::test_util::conformance;

use crate::support::environment;

#[tokio::test]
async fn mysql_store_passes_conformance() {
    let Some(environment) = environment().await else { return };
    conformance::check(environment.store().await).await;
}
