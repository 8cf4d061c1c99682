//! The cost of locks, counted at each server.

use std::time::Duration;

use tokio::time::sleep;
use tower_lock::LockManager;
use tower_lock_testkit::{locks::key, wait::until};

use super::{Servers, servers};

async fn warm(locks: &LockManager) {
    for _ in 0..2 {
        locks.lock(key()).await.expect("free").release().await.expect("held");
    }
}

/// The scripts and the other commands that each server got since the last call.
fn requests(servers: &Servers) -> Vec<(u64, u64)> {
    let requests = servers.proxies.iter().map(|proxy| {
        let requests = proxy.requests();
        proxy.forget_requests();
        let scripts = requests.get("EVALSHA").copied().unwrap_or_default();
        (scripts, requests.values().sum::<u64>() - scripts)
    });
    requests.collect()
}

#[tokio::test]
async fn uncontended_lock_costs_three_scripts_at_each_server() {
    let Some(servers) = servers(3).await else { return };
    let locks = LockManager::new(servers.patient_store().await);
    warm(&locks).await;
    requests(&servers);
    for _ in 0..100 {
        locks.try_lock(key()).await.expect("free").release().await.expect("held");
    }
    // The servers that were not waited for.
    servers.wait_until_clean().await;
    assert_eq!(requests(&servers), [(300, 0); 3]);
}

#[tokio::test]
async fn many_keys_share_the_scripts_of_a_server() {
    let Some(servers) = servers(3).await else { return };
    let locks = LockManager::new(servers.patient_store().await);
    warm(&locks).await;
    requests(&servers);
    for count in [2, 64_u64] {
        let keys = || (0..count).map(|number| ("several", number));
        for _ in 0..10 {
            locks.lock_all(keys()).await.expect("free").release().await.expect("held");
        }
        servers.wait_until_clean().await;
        assert_eq!(requests(&servers), [(30, 0); 3], "{count} keys");
    }
}

#[tokio::test]
async fn held_keys_share_a_renewal_at_each_server() {
    let Some(servers) = servers(3).await else { return };
    let store = servers.store().await;
    let locks = LockManager::builder(store).lease(Duration::from_secs(3)).build();
    warm(&locks).await;
    requests(&servers);
    let guard = locks.lock_all((0..50).map(|number| ("several", number))).await.expect("free");
    // The first one loads the script.
    until("it was renewed", async || servers.proxies.iter().all(|proxy| proxy.requests().contains_key("EVAL"))).await;
    requests(&servers);
    sleep(Duration::from_millis(1_500)).await;
    let renewals = requests(&servers);
    // One after a third of the lease.
    assert!(renewals.iter().all(|(scripts, others)| (1..=2).contains(scripts) && *others == 0), "{renewals:?}");
    guard.release().await.expect("held");
}
