//! The contract of all stores.

use tower_lock::test_util::conformance;

use super::servers;

/// With a minority that is down, and without. `REDLOCK_SERVERS=5` sets the number of servers.
#[tokio::test]
async fn redlock_store_passes_conformance() {
    let count = std::env::var("REDLOCK_SERVERS").map_or(3, |count| count.parse().expect("a number"));
    let Some(servers) = servers(count).await else { return };
    conformance::check(servers.store().await).await;
    let store = servers.store().await;
    for down in 0..count / 2 {
        if down % 2 == 0 { servers.redis[down].kill() } else { servers.redis[down].freeze() }
    }
    conformance::check(store).await;
}
