//! One contract for all stores.

use tower_lock::test_util::conformance;
use tower_lock_testkit::parity::same_replies_as_memory;

use crate::{
    connecting::{smallest_acl, user},
    support::{connect, environment},
};

/// As a user with the smallest ACL of the guide.
#[tokio::test]
async fn redis_store_passes_conformance() {
    let Some(environment) = environment().await else { return };
    // Only `list` needs `+scan`: see `missing_permission_of_scan_fails_only_listings`.
    let rules: Vec<_> = smallest_acl().into_iter().chain(["+scan".to_owned()]).collect();
    let url = user(&environment.redis, &rules).await;
    conformance::check(connect(&url).await).await;
    let log = environment.command(&["ACL", "LOG"]).await;
    assert!(log.items().is_empty(), "{log:?}");
}

/// The same random sequence of calls gives the same replies and events on both stores. `SEED=` runs
/// one sequence.
///
/// Guarantee: G22.
#[tokio::test]
async fn memory_and_redis_give_the_same_replies() {
    let Some(environment) = environment().await else { return };
    same_replies_as_memory(environment.direct_store().await).await;
}
