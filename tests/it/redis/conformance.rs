//! One contract for all stores.

use tower_lock::test_util::conformance;
use tower_lock_testkit::parity::same_replies_as_memory;

use crate::support::environment;

#[tokio::test]
async fn redis_store_passes_conformance() {
    let Some(environment) = environment().await else { return };
    conformance::check(environment.direct_store().await).await;
}

/// The same random sequence of calls gives the same replies and events on both stores. `SEED=` runs
/// one sequence.
#[tokio::test]
async fn memory_and_redis_give_the_same_replies() {
    let Some(environment) = environment().await else { return };
    same_replies_as_memory(environment.direct_store().await).await;
}
