//! A server that crashes right after a call.

use std::time::Duration;

use tower_lock::{
    LockKey,
    store::{LockStore, Record, ReleaseReply, ReleaseRequest},
};
use tower_lock_testkit::{store::StoreExt, wait::until};

use crate::support::{Caller, LONG, own_environment, terms};

/// The background writer would write the release to the disk meanwhile.
const SLOW_WRITER: &str = "wal_writer_delay=10s";

/// A release does not wait for the disk. One that is lost leaves the key locked until its lease
/// expires: it is never free twice.
#[tokio::test]
async fn release_that_a_crash_loses_leaves_the_key_locked() {
    let Some(environment) = own_environment(&[SLOW_WRITER]).await else { return };
    let store = environment.store().await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("lost",)));
    let id = caller.id();
    let fence = caller.granted(&key, &id, LONG).await;
    assert_eq!(caller.release(&key, &id, Duration::ZERO).await, ReleaseReply::Freed);
    environment.server().crash().await;
    environment.server().restart().await;
    let status = environment.store().await.inspect(key.clone()).await.expect("a reply");
    let holder = status.holder().map(|holder| (holder.id.clone(), holder.fence));
    assert_eq!(holder, Some((id, fence)), "its grant was on the disk, and its release was not");
}

/// Guarantee: G18.
#[tokio::test]
async fn release_with_a_record_or_a_block_survives_a_crash() {
    let Some(environment) = own_environment(&[SLOW_WRITER]).await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let [recorded, blocked] = ["recorded", "blocked"].map(|name| LockKey::from(("kept", name)));
    let (first, second) = (caller.id(), caller.id());
    caller.granted(&recorded, &first, LONG).await;
    caller.granted(&blocked, &second, LONG).await;
    assert_eq!(caller.release(&blocked, &second, LONG).await, ReleaseReply::Freed);
    let request = ReleaseRequest::new(recorded.clone(), first, Duration::ZERO, terms());
    let request = request.record(Record::new("done", None), LONG);
    assert_eq!(store.release_one(request).await.expect("a reply"), ReleaseReply::Freed);
    environment.server().crash().await;
    environment.server().restart().await;
    let store = environment.store().await;
    let status = store.inspect(recorded).await.expect("a reply");
    assert!(status.holders.is_empty() && status.record_left.is_some(), "{status:?}");
    let status = store.inspect(blocked).await.expect("a reply");
    assert!(status.holders.is_empty() && !status.lease_left.is_zero(), "{status:?}");
}

/// The same for the last of them alone: the one above is on the disk with what follows it.
#[tokio::test]
async fn release_with_a_block_alone_survives_a_crash() {
    let Some(environment) = own_environment(&[SLOW_WRITER]).await else { return };
    let store = environment.store().await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("blocked",)));
    let id = caller.id();
    caller.granted(&key, &id, LONG).await;
    assert_eq!(caller.release(&key, &id, LONG).await, ReleaseReply::Freed);
    environment.server().crash().await;
    environment.server().restart().await;
    let status = environment.store().await.inspect(key).await.expect("a reply");
    assert!(status.holders.is_empty() && !status.lease_left.is_zero(), "{status:?}");
}

/// The connections of a store are replaced, and a call that was not sent yet is sent again.
#[tokio::test]
async fn killed_connections_are_replaced() {
    let Some(environment) = own_environment(&[]).await else { return };
    let locks = environment.instance("a").await;
    for round in 0..5_u32 {
        let now = environment.value("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8").await;
        // A session that is not idle ends later. One that has begun since is another.
        let terminated = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
             WHERE application_name = 'tower-lock' AND extract(epoch FROM backend_start) * 1000000 < {now}"
        );
        until("they have ended", async || environment.value(&terminated).await == 0).await;
        let guard = locks.lock(("k", round)).await.expect("a grant");
        guard.release().await.expect("held");
    }
}
