//! A server that crashes right after a call.

use std::time::Duration;

use tower_lock::{
    LockKey,
    store::{LockStore, Record, ReleaseReply},
};

use crate::support::{Caller, LONG, environment, own_environment};

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
    environment.crash().await;
    let status = environment.store().await.inspect(key.clone()).await.expect("a reply");
    let holder = status.holder().map(|holder| (holder.id.clone(), holder.fence));
    assert_eq!(holder, Some((id, fence)), "its grant was on the disk, and its release was not");
}

/// Each of them alone: one is on the disk with what follows it.
///
/// Guarantee: G18.
#[tokio::test]
async fn release_with_a_record_or_a_block_survives_a_crash() {
    let Some(environment) = own_environment(&[SLOW_WRITER]).await else { return };
    for has_record in [true, false] {
        let store = environment.store().await;
        let caller = Caller::new(&store, "a");
        let (key, id) = (LockKey::from(("kept", has_record)), caller.id());
        caller.granted(&key, &id, LONG).await;
        let released = match has_record {
            true => caller.release_with(&key, &id, Record::new("done", None)).await,
            false => caller.release(&key, &id, LONG).await,
        };
        assert_eq!(released, ReleaseReply::Freed);
        environment.crash().await;
        let status = environment.store().await.inspect(key).await.expect("a reply");
        assert!(status.holders.is_empty() && status.record_left.is_some() == has_record, "{status:?}");
        assert!(status.lease_left.is_zero() == has_record, "{status:?}");
    }
}

/// The connections of a store are replaced, and a call that was not sent yet is sent again.
#[tokio::test]
async fn killed_connections_are_replaced() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    for round in 0..3_u32 {
        environment.kill_sessions("true").await;
        locks.lock(("k", round)).await.expect("a grant").release().await.expect("held");
    }
}
