//! The session of a process ends, and its entries with it.

use std::time::Duration;

use tower_lock::{
    LockError, LockKey, LockManager,
    store::{AcquireReply, IfBusy, ZooKeeperStore},
};
use tower_lock_testkit::{
    Direction, Proxy,
    caller::{Caller, LONG},
    locks::key,
    wait::{ms, soon, until},
};

use crate::support::{environment, own_environment};

/// A process that is cut off loses its lock before another one gets it.
///
/// Guarantee: G1.
#[tokio::test]
async fn process_that_is_cut_off_loses_its_lock_before_the_next_grant() {
    let Some(environment) = environment().await else { return };
    let proxy = Proxy::start_raw(environment.servers().address(0)).await;
    let lease = Duration::from_secs(2);
    let cut = environment.store_at(&proxy.address().to_string(), lease + Duration::from_secs(5)).await;
    let cut = LockManager::builder(cut).instance("cut").lease(lease).build();
    let [_, other] = environment.instances(lease).await;
    let held = cut.lock(key()).await.expect("free");
    let waiter = tokio::spawn(async move { other.lock(key()).wait(LONG).await });
    proxy.all().swallow(Direction::Both);
    soon("the loss", held.held_lock().lost()).await;
    assert!(!waiter.is_finished(), "lost before the next grant");
    let next = soon("a grant", waiter).await.expect("no panic").expect("a grant");
    assert!(next.fencing_token() > held.fencing_token());
    proxy.all().heal();
    // In a new session.
    until("it locks again", async || cut.try_lock(("another",)).await.is_ok()).await;
    assert!(matches!(cut.try_lock(key()).await, Err(LockError::Busy { .. })));
    next.release().await.expect("held");
}

/// A server that grants a shorter session than the others would end it before the leases that were
/// granted on it.
///
/// Guarantee: G1.
#[tokio::test]
async fn lock_is_lost_at_once_when_a_server_shortens_the_session() {
    let Some(environment) = own_environment(1).await else { return };
    let servers = environment.servers();
    let long = environment.store_at(&servers.addresses(), Duration::from_secs(35)).await;
    let long = LockManager::builder(long).instance("long").build();
    let held = long.lock(key()).await.expect("free");
    let [other, _] = environment.instances(Duration::from_secs(2)).await;
    let waiter = tokio::spawn(async move { other.lock(key()).wait(LONG).await });
    servers.kill(0);
    servers.set(0, "maxSessionTimeout=8000");
    servers.restart(0).await;
    soon("the loss", held.held_lock().lost()).await;
    assert!(!waiter.is_finished(), "lost before the next grant");
    let next = soon("a grant", waiter).await.expect("no panic").expect("a grant");
    assert!(next.fencing_token() > held.fencing_token());
    let url = format!("zookeeper://{}", servers.addresses());
    let refused = ZooKeeperStore::builder().connect(&url).await.map(drop).expect_err("35 s");
    assert!(format!("{refused:?}").contains("they grant a session of 8s, and not of 35s"), "{refused:?}");
}

/// A store that is dropped ends its session at once.
///
/// Guarantee: G2.
#[tokio::test]
async fn keys_of_a_store_that_is_dropped_are_free_at_once() {
    let Some(environment) = environment().await else { return };
    let store = environment.store(LONG).await;
    let caller = Caller::new(&store, "a");
    caller.granted(&key(), &caller.id(), Duration::from_secs(500)).await;
    let other = environment.store(LONG).await;
    let next = Caller::new(&other, "b");
    let busy = next.acquire(&key(), &next.id(), LONG / 2, IfBusy::Fail).await;
    assert!(matches!(busy, Ok(AcquireReply::Busy { .. })), "{busy:?}");
    drop((caller, store));
    until("a free key", async || {
        let reply = next.acquire(&key(), &next.id(), LONG / 2, IfBusy::Fail).await;
        matches!(reply, Ok(AcquireReply::Granted { .. }))
    })
    .await;
}

/// A block outlives the process that has made it.
///
/// Guarantee: G3.
#[tokio::test]
async fn block_outlives_its_process() {
    let Some(environment) = environment().await else { return };
    let store = environment.store(LONG).await;
    let caller = Caller::new(&store, "a");
    let (key, id) = (LockKey::from(("mail",)), caller.id());
    caller.granted(&key, &id, ms(60_000)).await;
    caller.release(&key, &id, ms(3_000)).await;
    drop((caller, store));
    let other = environment.store(LONG).await;
    let next = Caller::new(&other, "b");
    let busy = next.acquire(&key, &next.id(), ms(60_000), IfBusy::Fail).await;
    assert!(matches!(busy, Ok(AcquireReply::Busy { lease_left, .. }) if lease_left > ms(1_000)), "{busy:?}");
    until("the end of the block", async || {
        let reply = next.acquire(&key, &next.id(), ms(60_000), IfBusy::Fail).await;
        matches!(reply, Ok(AcquireReply::Granted { .. }))
    })
    .await;
}
