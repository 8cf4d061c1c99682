//! Fences rise, as long as a database compares them.

use std::{sync::Arc, time::Duration};

use tower_lock::store::ZooKeeperStore;
use tower_lock_testkit::{
    caller::{Caller, LONG},
    limits,
    locks::key,
    wait::until,
};

use crate::support::{environment, own_environment};

const LEASE: Duration = Duration::from_secs(2);
const SESSION: Duration = Duration::from_secs(610);

/// Each election adds 2³² to the number of a transaction.
///
/// Guarantee: G11.
#[tokio::test]
async fn fences_rise_over_leaders_and_a_loss_of_all_data() {
    let Some(environment) = own_environment(3).await else { return };
    let servers = environment.servers();
    let locks = environment.instances(LEASE).await;
    let mut last = 0;
    let mut next = async |what: &str| {
        let mut fence = 0;
        until(what, async || {
            let Ok(guard) = locks[0].try_lock(key()).await else { return false };
            fence = guard.fencing_token().as_u64();
            guard.release().await.is_ok()
        })
        .await;
        assert!(fence > last, "{what}: {fence} after {last}");
        last = fence;
    };
    next("at first").await;
    for _ in 0..2 {
        let leader = servers.leader().await;
        servers.kill(leader);
        next("after a leader").await;
        servers.restart(leader).await;
        next("after its restart").await;
    }
    servers.lose_all_data().await;
    next("after a loss of all data").await;
    next("and again").await;
}

/// ZooKeeper counts the nodes of a bucket to 2³¹, and no further.
///
/// Guarantee: G11.
#[tokio::test]
async fn bucket_is_replaced_before_its_sequences_end() {
    let Some(environment) = environment().await else { return };
    let builder = ZooKeeperStore::builder().root(&environment.root).last_sequence(10);
    let builder = builder.session(SESSION).call_timeout(limits::CALL).connect_timeout(limits::CONNECT);
    let store = Arc::new(builder.connect(&environment.url()).await.expect("it is up"));
    let (caller, key) = (Caller::new(&store, "a"), key());
    let mut last = 0;
    for _ in 0..30 {
        let id = caller.id();
        let fence = caller.granted(&key, &id, LONG).await;
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        caller.release(&key, &id, Duration::ZERO).await;
    }
    // With a waiter at each moment, the bucket is never empty: it grants nothing more until it is.
    let mut held = caller.id();
    caller.granted(&key, &held, LONG).await;
    let mut count = 0;
    loop {
        let next = caller.id();
        match caller.acquire(&key, &next, LONG, tower_lock::store::IfBusy::Enqueue).await {
            Ok(_) => count += 1,
            Err(error) => {
                assert!(format!("{error:?}").contains("waits to be empty"), "{error:?}");
                break;
            }
        }
        caller.release(&key, &held, Duration::ZERO).await;
        last = caller.granted(&key, &next, LONG).await;
        held = next;
        assert!(count < 30, "it grants on");
    }
    caller.release(&key, &held, Duration::ZERO).await;
    assert!(caller.granted(&key, &caller.id(), LONG).await > last);
}
