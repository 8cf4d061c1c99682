//! Records in Redis: stored in the same step as the release, or not at all.

use std::sync::Arc;

use tower_lock::{
    AcquisitionId, LockManager, RedisStore,
    lock::OnceOutcome,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, Demand, IfBusy, LockStore, Record, ReleaseReply, ReleaseRequest,
        StoreErrorKind,
    },
};
use tower_lock_testkit::{
    locks::{key, lost_record_is_reported},
    store::{StoreExt, open_sink},
};

use crate::support::{self, Environment, LONG, environment, hasty};

const RECORD: &str = "tower-lock:lock:r:{lock:k}";

/// A store, and two acquisitions of one process. The first one holds the key.
async fn held(environment: &Environment) -> (Arc<RedisStore>, AcquisitionId, AcquisitionId) {
    let store = environment.direct_store().await;
    let ids = AcquisitionIds::new("a", 1);
    let (holder, other) = (ids.next(), ids.next());
    store.subscribe(open_sink(holder.manager()));
    assert!(matches!(store.acquire_one(acquire(&holder)).await, Ok(AcquireReply::Granted { .. })));
    (store, holder, other)
}

fn acquire(id: &AcquisitionId) -> AcquireRequest {
    support::acquire(&key(), id, IfBusy::Fail).demand(Demand::new().unless_recorded())
}

fn release(id: &AcquisitionId) -> ReleaseRequest {
    let record = Record::new("head", Some(vec![0xff, 0].into()));
    support::release(&key(), id).record(record, LONG)
}

#[tokio::test]
async fn record_is_a_hash_with_a_ttl() {
    let Some(environment) = environment().await else { return };
    let (store, holder, other) = held(&environment).await;
    assert_eq!(store.release_one(release(&holder)).await.expect("a reply"), ReleaseReply::Freed);
    let id = environment.command(&["HGET", RECORD, "id"]).await;
    assert_eq!(id.text(), Some(holder.to_string().as_str()));
    assert_eq!(environment.command(&["HLEN", RECORD]).await.integer(), Some(3));
    let ttl = environment.command(&["PTTL", RECORD]).await.integer().expect("a number");
    assert!((1..=600_000).contains(&ttl), "{ttl}");
    assert!(matches!(store.acquire_one(acquire(&other)).await, Ok(AcquireReply::Recorded(_))));
}

/// An operator who has no instance at hand.
#[tokio::test(flavor = "multi_thread")]
async fn work_runs_again_after_the_command_of_the_guide() {
    const RECIPES: &str = include_str!("../../../docs/guide/recipes.md");
    let command = RECIPES.lines().find_map(|line| line.strip_prefix("redis-cli DEL ")).expect("a command");
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let run = async || locks.once(("nightly-mail", "2026-11-23")).run(async |_| ()).await.expect("a result");
    assert_eq!((run().await, run().await), (OnceOutcome::Ran(()), OnceOutcome::Already));
    assert_eq!(environment.command(&["DEL", command.trim_matches('\'')]).await.integer(), Some(1));
    assert_eq!((run().await, run().await), (OnceOutcome::Ran(()), OnceOutcome::Already));
    assert!(locks.once(("nightly-mail", "2026-11-23")).forget().await.expect("up"), "the same by an instance");
    assert_eq!(run().await, OnceOutcome::Ran(()));
}

#[tokio::test]
async fn out_of_memory_stores_no_record_and_releases_nothing() {
    let Some(environment) = environment().await else { return };
    let (store, holder, other) = held(&environment).await;
    environment.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let error = store.release_one(release(&holder)).await.expect_err("no memory");
    assert_eq!(error.kind(), StoreErrorKind::Refused);
    assert_eq!(environment.command(&["EXISTS", RECORD]).await.integer(), Some(0));
    assert!(matches!(store.acquire_one(acquire(&other)).await, Ok(AcquireReply::Busy { .. })), "it runs only once");
    environment.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert_eq!(store.release_one(release(&holder)).await.expect("a reply"), ReleaseReply::Freed);
    assert!(matches!(store.acquire_one(acquire(&other)).await, Ok(AcquireReply::Recorded(_))));
}

/// A value of another program is no proof that nothing was recorded.
/// Guarantee: G18.
#[tokio::test]
async fn foreign_value_in_place_of_the_record_grants_nothing() {
    let Some(environment) = environment().await else { return };
    let (store, holder, other) = held(&environment).await;
    for foreign in [&["SET", RECORD, "text"][..], &["RPUSH", RECORD, "item"]] {
        environment.command(&["DEL", RECORD]).await;
        environment.command(foreign).await;
        store.release_one(release(&holder)).await.expect_err("no record was stored");
        assert!(matches!(
            store.acquire_one(acquire(&other).demand(Demand::new())).await,
            Ok(AcquireReply::Busy { .. })
        ));
        let error = store.acquire_one(acquire(&other)).await.expect_err("unknown");
        assert_eq!(error.kind(), StoreErrorKind::Refused);
    }
    assert_eq!(environment.command(&["LRANGE", RECORD, "0", "-1"]).await.texts(), ["item"]);
    environment.command(&["DEL", RECORD]).await;
    environment.command(&["HSET", RECORD, "name", "of another program"]).await;
    assert_eq!(store.release_one(support::release(&key(), &holder)).await.expect("a reply"), ReleaseReply::Freed);
    let granted = store.acquire_one(acquire(&other)).await;
    assert!(matches!(granted, Ok(AcquireReply::Granted { .. })), "a hash without a head is no record: {granted:?}");
}

/// A body of 1 MiB is kept. A longer value, which only another program writes, does not end the
/// connection.
#[tokio::test]
async fn long_record_is_read_up_to_the_bounds() {
    let Some(environment) = environment().await else { return };
    let (store, holder, other) = held(&environment).await;
    let largest = vec![7; 1 << 20];
    let record = Record::new("head", Some(largest.clone().into()));
    store.release_one(support::release(&key(), &holder).record(record, LONG)).await.expect("a reply");
    let Ok(AcquireReply::Recorded(found)) = store.acquire_one(acquire(&other)).await else { panic!("no record") };
    assert_eq!(found.body.as_deref(), Some(&largest[..]));
    let longer = "x".repeat((1 << 20) + 1);
    environment.command(&["HSET", RECORD, "body", &longer]).await;
    let Ok(AcquireReply::Recorded(found)) = store.acquire_one(acquire(&other)).await else { panic!("no record") };
    assert_eq!((&found.head[..], found.body), (&b"head"[..], None));
    environment.command(&["HSET", RECORD, "head", &longer]).await;
    let Ok(AcquireReply::Recorded(found)) = store.acquire_one(acquire(&other)).await else { panic!("no record") };
    assert!(found.head.is_empty(), "it stands, and is no answer");
}

/// Guarantee: G18.
#[tokio::test]
async fn record_that_redis_does_not_confirm_is_reported() {
    let Some(environment) = environment().await else { return };
    let redis = &environment.redis;
    let locks = LockManager::builder(hasty().connect(&redis.url()).await.expect("it is up"));
    lost_record_is_reported(locks, async || redis.freeze(), async || redis.thaw()).await;
}
