//! Errors of Redis: each has a kind and a hint.

use std::{error::Error, future::IntoFuture};

use futures_util::future::join;
use tokio::time::sleep;
use tower_lock::{
    LockError, LockManager,
    store::{AcquisitionIds, IfBusy, LockStore, RenewReply, RenewRequest, StoreError, StoreErrorKind},
};
use tower_lock_testkit::{
    RedisServer, Reply, limits,
    locks::key,
    log::Log,
    store::StoreExt,
    wait::{ms, settle, until},
};

use crate::support::{LONG, NAME, QUEUE, acquire, connect, environment, hasty, pass, served};

/// An error that is no timeout: on a busy machine, calls of a hasty instance time out.
async fn store_error(locks: &LockManager) -> StoreError {
    loop {
        match locks.try_lock(key()).await {
            Err(LockError::Store(error)) if error.kind() == StoreErrorKind::Timeout => {}
            Err(LockError::Store(error)) => return error,
            other => panic!("{other:?}"),
        }
    }
}

#[track_caller]
fn assert_error(error: &StoreError, kind: StoreErrorKind, what: &str, remedy: &str) {
    let source = error.source().expect("kept").to_string();
    assert_eq!((error.store(), error.kind()), ("redis", kind), "{source}");
    assert!(source.contains(what) && source.contains(remedy), "{source}");
}

/// Held locks can be renewed, handed off and released; no new key is locked.
#[tokio::test]
async fn out_of_memory_rejects_new_locks_and_keeps_held_ones() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = environment.waiter(&two).await;
    let store = environment.direct_store().await;
    environment.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    match one.try_lock(("another",)).await {
        Err(LockError::Store(error)) => assert_error(&error, StoreErrorKind::Refused, "OOM", "raise `maxmemory`"),
        other => panic!("{other:?}"),
    }
    let error = one.health().await.expect_err("it accepts no new lock");
    assert!(error.to_string().contains("OOM") && error.to_string().contains("raise `maxmemory`"), "{error}");
    let owner = one.inspect(key()).await.expect("a reply").holder().expect("held").id.clone();
    let renewal = store.renew(vec![RenewRequest::new(key(), owner, LONG)]).await;
    assert_eq!(renewal.expect("a reply"), [RenewReply::Extended]);
    guard.release().await.expect("released");
    served(waiting).await;
    environment.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    one.health().await.expect("as before");
    assert_eq!(environment.command(&["EXISTS", "tower-lock:lock:h"]).await.integer(), Some(0), "checked, not written");
    one.try_lock(("another",)).await.expect("as before").release().await.expect("held");
    environment.wait_until_clean().await;
}

#[tokio::test]
async fn foreign_value_at_the_key_is_reported_and_not_touched() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance_without_renewals("a").await;
    environment.command(&["SET", NAME, "text"]).await;
    assert_error(&store_error(&locks).await, StoreErrorKind::Refused, "WRONGTYPE", "check its `TYPE`");
    assert!(locks.lock(key()).wait(ms(100)).await.is_err());
    assert!(locks.inspect(key()).await.is_err());
    // A release that can only fail is not repeated until the end of its lease.
    until("the outcome is unknown", async || locks.size() == (0, 0)).await;
    assert_eq!(environment.command(&["GET", NAME]).await.text(), Some("text"));
}

#[tokio::test]
async fn replica_full_disk_and_missing_right_are_distinguished() {
    let Some(environment) = environment().await else { return };
    let (locks, patient) = (environment.hasty_instance("a").await, environment.direct_instance("b").await);
    environment.command(&["REPLICAOF", "127.0.0.1", "1"]).await;
    assert_error(&store_error(&locks).await, StoreErrorKind::Failover, "READONLY", "a failover is in progress");
    environment.command(&["REPLICAOF", "NO", "ONE"]).await;
    pass(&patient).await;

    let revoke = ["ACL", "SETUSER", "default", "-hset"];
    environment.command(&revoke).await;
    assert_error(&store_error(&locks).await, StoreErrorKind::Refused, "script", "the minimal ACL");
    environment.command(&["ACL", "SETUSER", "default", "+hset"]).await;

    environment.command(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    assert_error(&store_error(&locks).await, StoreErrorKind::Unavailable, "NOREPLICAS", "min-replicas-to-write");
    environment.command(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await;

    // A folder at the path of its file.
    std::fs::create_dir(environment.redis.folder().join("dump.rdb")).expect("a folder");
    environment.command(&["CONFIG", "SET", "save", "3600 1"]).await;
    environment.command(&["BGSAVE"]).await;
    until("it has noticed", async || {
        environment
            .command(&["INFO", "persistence"])
            .await
            .text()
            .is_some_and(|text| text.contains("last_bgsave_status:err"))
    })
    .await;
    assert_error(&store_error(&locks).await, StoreErrorKind::Refused, "MISCONF", "its log has the reason");
    environment.command(&["CONFIG", "SET", "save", ""]).await;
    until("as before", async || locks.try_lock(key()).await.is_ok()).await;
}

/// The log names the reason of rejections, without a line for each of them.
#[tokio::test]
async fn refusing_store_is_warned_of_at_intervals() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    environment.command(&["SET", NAME, "text"]).await;
    let log = Log::default();
    let guard = log.listen();
    for _ in 0..5 {
        store_error(&locks).await;
    }
    // The log has a thread of its own.
    until("a warning", async || log.text().contains("WARN")).await;
    drop(guard);
    let warnings: Vec<_> = log.text().lines().filter(|line| line.contains("WARN")).map(ToOwned::to_owned).collect();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    let assert_error = ["tower_lock", "refused to acquire", "WRONGTYPE", "check its `TYPE`", "operation=\"acquire\""];
    assert!(assert_error.iter().all(|word| warnings[0].contains(word)), "{warnings:#?}");
}

/// An error settles nothing: the key is free as soon as Redis accepts the release, before the end
/// of the lease.
#[tokio::test]
async fn refused_release_is_reported_and_repeated() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.instance_without_renewals("a").await, environment.direct_instance("b").await);
    let troubles = [
        (["CONFIG", "SET", "min-replicas-to-write", "1"], ["CONFIG", "SET", "min-replicas-to-write", "0"]),
        (["ACL", "SETUSER", "default", "-hdel"], ["ACL", "SETUSER", "default", "+hdel"]),
    ];
    for (store_error, remedy) in troubles {
        let guard = one.lock(key()).await.expect("free");
        environment.command(&store_error).await;
        let error = guard.release().await.expect_err("refused");
        assert_eq!((error.store(), error.operation()), ("redis", "release"), "{error}");
        environment.command(&remedy).await;
        pass(&two).await;
        environment.wait_until_clean().await;
    }
}

/// It would be treated as dead at each handoff. So it has no place in the queue, and asks again.
#[tokio::test]
async fn unsubscribed_client_locks_free_keys_without_a_queue() {
    let Some(environment) = environment().await else { return };
    let (unsubscribed, other) = (environment.instance("a").await, environment.direct_instance("b").await);
    pass(&unsubscribed).await;
    environment.command(&["ACL", "SETUSER", "default", "resetchannels"]).await;
    environment.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    let guard = other.lock(key()).await.expect("free");
    let mut reason = String::new();
    until("a rejection", async || match unsubscribed.lock(key()).wait(limits::SHORT).await {
        Err(LockError::Store(error)) => {
            reason = error.source().map(ToString::to_string).unwrap_or_default();
            true
        }
        _ => false,
    })
    .await;
    assert!(reason.contains("not subscribed to offers") && reason.contains("tower-lock:<prefix>:in:"), "{reason}");
    unsubscribed.lock(("free",)).await.expect("free").release().await.expect("held");
    let asks = unsubscribed.lock(key()).wait(limits::BROKEN).into_future();
    let frees = async {
        assert_eq!(environment.command(&["LLEN", QUEUE]).await.integer(), Some(0));
        guard.release().await.expect("held");
    };
    join(asks, frees).await.0.expect("free").release().await.expect("held");
    environment.command(&["ACL", "SETUSER", "default", "allchannels"]).await;
    until("subscribed again", async || {
        sleep(ms(50)).await;
        environment.listeners().await == 2
    })
    .await;
    pass(&unsubscribed).await;
}

/// Another program has written to the key of a lock.
#[tokio::test]
async fn impossible_fence_is_reported() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let owner = AcquisitionIds::new("a", 1).next();
    let request = || acquire(&key(), &owner, IfBusy::Fail);
    store.acquire_one(request()).await.expect("free");
    for fence in ["abc", "18014398509481984"] {
        environment.command(&["HSET", "lock:k", &owner.to_string(), fence]).await;
        let error = store.acquire_one(request()).await.expect_err("no fence");
        assert_error(&error, StoreErrorKind::Protocol, "unexpected reply", "tower-lock:<prefix>:");
    }
}

/// Its holder is not aborted.
#[tokio::test]
async fn refused_renewal_is_no_loss() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let owner = AcquisitionIds::new("a", 1).next();
    store.acquire_one(acquire(&key(), &owner, IfBusy::Fail)).await.expect("free");
    let renew = || store.renew(vec![RenewRequest::new(key(), owner.clone(), LONG)]);
    environment.command(&["ACL", "SETUSER", "default", "-hexists"]).await;
    assert_eq!(renew().await.expect("a reply"), [RenewReply::Unknown]);
    environment.command(&["ACL", "SETUSER", "default", "+hexists"]).await;
    assert_eq!(renew().await.expect("a reply"), [RenewReply::Extended]);
}

#[tokio::test]
async fn busy_script_is_reported_and_waited_for() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    environment.command(&["CONFIG", "SET", "busy-reply-threshold", "1"]).await;
    let mut connection = environment.redis.connect().await;
    connection.send(&["EVAL", "while true do end", "0"]).await.expect("sent");
    let mut error = None;
    until("Redis is busy", async || {
        error = locks.inspect(key()).await.err();
        error.is_some()
    })
    .await;
    assert_error(&error.expect("just set"), StoreErrorKind::Unavailable, "BUSY", "SCRIPT KILL");
    let waiting = tokio::spawn(locks.lock(key()).into_future());
    settle().await;
    assert_eq!(environment.command(&["SCRIPT", "KILL"]).await, Reply::Status("OK".to_owned()));
    served(waiting).await;
}

#[tokio::test]
async fn loading_redis_is_reported_and_waited_for() {
    if environment().await.is_none() {
        return;
    }
    // It would load for 50 seconds.
    let mut redis = RedisServer::options()
        .args(["--key-load-delay", "5000", "--loading-process-events-interval-bytes", "1024"])
        .start()
        .await;
    let locks = LockManager::builder(connect(&redis.url()).await).lease(LONG).build();
    let guard = locks.lock(("kept",)).await.expect("free");
    let hasty = LockManager::new(hasty().connect(&redis.url()).await.expect("it is up"));
    redis.command(&["DEBUG", "POPULATE", "10000"]).await;
    redis.command(&["SAVE"]).await;
    redis.restart().await;
    assert_error(&store_error(&hasty).await, StoreErrorKind::Unavailable, "LOADING", "loading its data");
    redis.command(&["CONFIG", "SET", "key-load-delay", "0"]).await;
    until("it has read", async || locks.try_lock(key()).await.is_ok()).await;
    // The data on disk is loaded again, with its TTL.
    let left = redis.command(&["PTTL", "lock:kept"]).await.integer().expect("a number");
    assert!((1..=601_000).contains(&left), "{left}");
    guard.release().await.expect("held");
}

#[tokio::test]
async fn too_many_clients_is_reported() {
    let Some(environment) = environment().await else { return };
    // The only connection sets the limit: Redis counts one that was just closed for a while.
    let mut first = environment.redis.connect().await;
    let limited = first.command(&["CONFIG", "SET", "maxclients", "1"]).await.expect("a reply");
    assert_eq!(limited.text(), Some("OK"));
    let error = limits::redis().connect_timeout(limits::OUTAGE).connect(&environment.redis.url()).await;
    let error = error.expect_err("too many");
    let source = error.source().expect("kept").to_string();
    assert!(source.contains("max number of clients reached") && source.contains("`maxclients`"), "{source}");
    first.command(&["CONFIG", "SET", "maxclients", "100"]).await.expect("a reply");
}
