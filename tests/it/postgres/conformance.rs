//! One contract for all stores.

use tower_lock::test_util::conformance;
use tower_lock_testkit::parity::same_replies_as_memory;

use crate::support::{environment, pooled};

#[tokio::test]
async fn postgres_store_passes_conformance() {
    let Some(environment) = environment().await else { return };
    conformance::check(environment.store().await).await;
}

/// The same random sequence of calls gives the same replies and events on both stores. `SEED=` runs
/// one sequence. The calls share the sessions of a pooler in any order, if there is one: nothing
/// else differs from a direct connection.
///
/// Guarantee: G22.
#[tokio::test]
async fn memory_and_postgres_give_the_same_replies() {
    if let Some((environment, pooler)) = pooled().await {
        let builder = environment.builder().events_url(environment.url());
        same_replies_as_memory(environment.connect(builder, &pooler.url()).await).await;
    } else if let Some(environment) = environment().await {
        same_replies_as_memory(environment.store().await).await;
    }
}
