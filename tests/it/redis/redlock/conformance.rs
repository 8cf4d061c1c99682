//! The contract of all stores.

use tower_lock::test_util::conformance;

use super::servers;

#[tokio::test]
async fn redlock_store_passes_conformance_on_three_and_five() {
    let (Some(three), Some(five)) = (servers(3).await, servers(5).await) else { return };
    tokio::join!(conformance::check(three.patient_store().await), conformance::check(five.patient_store().await));
}

#[tokio::test]
async fn redlock_store_passes_conformance_without_a_minority() {
    let (Some(three), Some(five)) = (servers(3).await, servers(5).await) else { return };
    let (first, second) = (three.patient_store().await, five.patient_store().await);
    three.redis[1].kill();
    five.redis[0].kill();
    five.redis[3].freeze();
    tokio::join!(conformance::check(first), conformance::check(second));
}
