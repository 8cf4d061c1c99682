//! The contract of all stores.

use tower_lock::{RedlockStore, test_util::conformance};
use tower_lock_testkit::wait::ms;

use super::{Servers, servers};

/// A busy machine is no outage.
async fn patient(servers: &Servers) -> RedlockStore {
    RedlockStore::builder().call_timeout(ms(4_000)).connect(servers.urls()).await.expect("they are up")
}

#[tokio::test]
async fn redlock_store_passes_conformance_on_three_and_five() {
    let (Some(three), Some(five)) = (servers(3).await, servers(5).await) else { return };
    tokio::join!(conformance::check(patient(&three).await), conformance::check(patient(&five).await));
}

#[tokio::test]
async fn redlock_store_passes_conformance_without_a_minority() {
    let (Some(three), Some(five)) = (servers(3).await, servers(5).await) else { return };
    let (first, second) = (patient(&three).await, patient(&five).await);
    three.redis[1].kill();
    five.redis[0].kill();
    five.redis[3].freeze();
    tokio::join!(conformance::check(first), conformance::check(second));
}
