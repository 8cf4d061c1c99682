//! What Redis says no with: each told apart, each with what to do.

use std::{error::Error, time::Duration};

use tokio::time::{Instant, sleep};
use tower_lock::{
    LockError, LockManager, RedisStore,
    store::AcquisitionIds,
    store::{AcquireRequest, IfBusy, LockStore, QueueConfig, RenewReply, RenewRequest, StoreError, StoreErrorKind},
};
use tower_lock_faults::{RedisServer, Reply};

use crate::support::{Log, NAME, key, ms, until, world};

async fn trouble(locks: &LockManager) -> StoreError {
    match locks.try_lock(key()).await {
        Err(LockError::Store(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn says(error: &StoreError, kind: StoreErrorKind, what: &str, remedy: &str) {
    let source = error.source().expect("kept").to_string();
    assert_eq!((error.store(), error.kind()), ("redis", kind), "{source}");
    assert!(source.contains(what) && source.contains(remedy), "{source}");
}

/// What is held can be renewed, handed on and given back; nothing new is locked.
#[tokio::test]
async fn out_of_memory_nothing_new_is_locked_and_what_is_held_goes_on() {
    let Some(world) = world().await else { return };
    let (one, two) = (world.sound_instance("a").await, world.sound_instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("in line", async || world.ask(&["LLEN", crate::support::LINE]).await.integer() == Some(1)).await;
    let store = world.store().await;
    world.ask(&["CONFIG", "SET", "maxmemory", "1"]).await;
    match one.try_lock(("another",)).await {
        Err(LockError::Store(error)) => says(&error, StoreErrorKind::Refused, "OOM", "raise `maxmemory`"),
        other => panic!("{other:?}"),
    }
    let owner = one.inspect(key()).await.expect("an answer").holder.expect("held");
    let renewal = store.renew(vec![RenewRequest::new(key(), owner, Duration::from_secs(30))]).await;
    assert_eq!(renewal.expect("an answer"), [RenewReply::Extended]);
    guard.release().await.expect("given back");
    let guard = waiting.await.expect("runs").expect("handed on");
    guard.release().await.expect("given back");
    world.ask(&["CONFIG", "SET", "maxmemory", "0"]).await;
    one.try_lock(("another",)).await.expect("as before").release().await.expect("ours");
    world.is_clean_soon().await;
}

#[tokio::test]
async fn something_else_at_the_key_is_said_to_be_there_and_not_touched() {
    let Some(world) = world().await else { return };
    let locks = world.sound_instance("a").await;
    world.ask(&["SET", NAME, "text"]).await;
    says(&trouble(&locks).await, StoreErrorKind::Refused, "WRONGTYPE", "check its `TYPE`");
    assert!(locks.lock(key()).wait(ms(100)).await.is_err());
    assert!(locks.inspect(key()).await.is_err());
    // A give-back that could only fail is not repeated until its lease would be over.
    let began = Instant::now();
    until("nothing is known of it", async || locks.size() == (0, 0)).await;
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(world.ask(&["GET", NAME]).await.text(), Some("text"));
}

#[tokio::test]
async fn a_replica_a_disk_that_is_full_and_a_right_that_was_taken_are_told_apart() {
    let Some(world) = world().await else { return };
    let locks = world.sound_instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("ours");
    let master = RedisServer::start().await;

    world.ask(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]).await;
    world.ask(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).await;
    says(&trouble(&locks).await, StoreErrorKind::Failover, "READONLY", "a failover is in progress");
    world.ask(&["REPLICAOF", "NO", "ONE"]).await;
    locks.lock(key()).await.expect("as before").release().await.expect("ours");

    let nobody = ["ACL", "SETUSER", "default", "-hset"];
    world.ask(&nobody).await;
    says(&trouble(&locks).await, StoreErrorKind::Refused, "script", "the minimal ACL");
    world.ask(&["ACL", "SETUSER", "default", "+hset"]).await;

    world.ask(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    says(&trouble(&locks).await, StoreErrorKind::Unavailable, "NOREPLICAS", "min-replicas-to-write");
    world.ask(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await;

    // A folder where its file should be.
    std::fs::create_dir(world.redis.folder().join("dump.rdb")).expect("a folder");
    world.ask(&["CONFIG", "SET", "save", "3600 1"]).await;
    world.ask(&["BGSAVE"]).await;
    until("it has noticed", async || {
        world.ask(&["INFO", "persistence"]).await.text().is_some_and(|text| text.contains("last_bgsave_status:err"))
    })
    .await;
    says(&trouble(&locks).await, StoreErrorKind::Refused, "MISCONF", "its log has the reason");
    world.ask(&["CONFIG", "SET", "save", ""]).await;
    until("as before", async || locks.try_lock(key()).await.is_ok()).await;
}

/// Whoever reads the log learns why requests are turned away, and is not drowned in it.
#[tokio::test]
async fn a_store_that_refuses_is_complained_of_now_and_then_with_its_reason() {
    let Some(world) = world().await else { return };
    let locks = world.sound_instance("a").await;
    world.ask(&["SET", NAME, "text"]).await;
    let log = Log::default();
    let guard = log.listen();
    for _ in 0..20 {
        trouble(&locks).await;
    }
    drop(guard);
    let warnings: Vec<_> = log.text().lines().filter(|line| line.contains("WARN")).map(ToOwned::to_owned).collect();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    let says = ["tower_lock", "refused to acquire", "WRONGTYPE", "check its `TYPE`", "operation=\"acquire\""];
    assert!(says.iter().all(|word| warnings[0].contains(word)), "{warnings:#?}");
}

/// An error is no answer: the key is free as soon as the trouble is over, and not at the end of a lease.
#[tokio::test]
async fn a_release_that_redis_refuses_is_told_and_repeated() {
    let Some(world) = world().await else { return };
    let (one, two) = (world.sound_instance("a").await, world.sound_instance("b").await);
    let troubles = [
        (["CONFIG", "SET", "min-replicas-to-write", "1"], ["CONFIG", "SET", "min-replicas-to-write", "0"]),
        (["ACL", "SETUSER", "default", "-hdel"], ["ACL", "SETUSER", "default", "+hdel"]),
    ];
    for (trouble, remedy) in troubles {
        let guard = one.lock(key()).await.expect("free");
        world.ask(&trouble).await;
        let error = guard.release().await.expect_err("refused");
        assert_eq!((error.store(), error.operation()), ("redis", "release"), "{error}");
        world.ask(&remedy).await;
        let guard = two.lock(key()).wait(Duration::from_secs(10)).await.expect("given back after all");
        guard.release().await.expect("ours");
        world.is_clean_soon().await;
    }
}

/// It would be taken for dead at each hand-over, and wait in vain.
#[tokio::test]
async fn who_cannot_listen_has_what_is_free_and_is_not_left_to_wait() {
    let Some(world) = world().await else { return };
    let (deaf, other) = (world.instance("a").await, world.sound_instance("b").await);
    deaf.lock(key()).await.expect("free").release().await.expect("ours");
    world.ask(&["ACL", "SETUSER", "default", "resetchannels"]).await;
    world.ask(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    let guard = other.lock(key()).await.expect("free");
    let mut reason = String::new();
    until("it is told", async || match deaf.lock(key()).wait(ms(2_500)).await {
        Err(LockError::Store(error)) => {
            reason = error.source().map(ToString::to_string).unwrap_or_default();
            true
        }
        _ => false,
    })
    .await;
    assert!(reason.contains("not subscribed to offers") && reason.contains("tower-lock:<prefix>:in:"), "{reason}");
    deaf.lock(("free",)).await.expect("free").release().await.expect("ours");
    world.ask(&["ACL", "SETUSER", "default", "allchannels"]).await;
    guard.release().await.expect("ours");
    until("it hears again", async || world.ask(&["PUBSUB", "CHANNELS"]).await.items().len() == 2).await;
    deaf.lock(key()).await.expect("as before").release().await.expect("ours");
}

/// Another program has written into a lock.
#[tokio::test]
async fn a_fence_that_no_clock_gives_is_said_to_be_none() {
    let Some(world) = world().await else { return };
    let store = world.store().await;
    let owner = AcquisitionIds::new("a", 1).next();
    let terms = QueueConfig::new(ms(4_000), ms(10_000), 8);
    let ask = || AcquireRequest::new(key(), owner.clone(), ms(30_000), IfBusy::Fail, terms, ms(500));
    store.acquire(ask()).await.expect("free");
    for fence in ["abc", "18014398509481984"] {
        world.ask(&["HSET", "lock:k", &owner.to_string(), fence]).await;
        let error = store.acquire(ask()).await.expect_err("no fence");
        says(&error, StoreErrorKind::Protocol, "unexpected reply", "tower-lock:<prefix>:");
    }
}

/// Its holder is not broken off because of it.
#[tokio::test]
async fn a_renewal_that_redis_refuses_is_no_loss() {
    let Some(world) = world().await else { return };
    let store = world.store().await;
    let owner = AcquisitionIds::new("a", 1).next();
    let terms = QueueConfig::new(ms(4_000), ms(10_000), 8);
    let ask = AcquireRequest::new(key(), owner.clone(), ms(30_000), IfBusy::Fail, terms, ms(500));
    store.acquire(ask).await.expect("free");
    let renew = || store.renew(vec![RenewRequest::new(key(), owner.clone(), ms(30_000))]);
    world.ask(&["ACL", "SETUSER", "default", "-hexists"]).await;
    assert_eq!(renew().await.expect("an answer"), [RenewReply::Unknown]);
    world.ask(&["ACL", "SETUSER", "default", "+hexists"]).await;
    assert_eq!(renew().await.expect("an answer"), [RenewReply::Extended]);
}

#[tokio::test]
async fn a_script_of_somebody_that_runs_and_runs_is_told_and_waited_for() {
    let Some(world) = world().await else { return };
    let locks = world.sound_instance("a").await;
    world.ask(&["CONFIG", "SET", "busy-reply-threshold", "50"]).await;
    let mut connection = world.redis.connect().await;
    connection.send(&["EVAL", "while true do end", "0"]).await.expect("sent");
    sleep(ms(200)).await;
    says(&trouble(&locks).await, StoreErrorKind::Unavailable, "BUSY", "SCRIPT KILL");
    let waiting = tokio::spawn(locks.lock(key()).into_future());
    sleep(ms(100)).await;
    assert_eq!(world.ask(&["SCRIPT", "KILL"]).await, Reply::Status("OK".to_owned()));
    waiting.await.expect("runs").expect("it is over").release().await.expect("ours");
}

#[tokio::test]
async fn a_redis_that_reads_its_data_after_a_restart_is_told_and_waited_for() {
    if world().await.is_none() {
        return;
    }
    let mut redis = RedisServer::options()
        .args(["--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024"])
        .start()
        .await;
    let locks = LockManager::new(RedisStore::connect(&redis.url()).await.expect("it is up"));
    let guard = locks.lock(("kept",)).await.expect("free");
    redis.command(&["DEBUG", "POPULATE", "3000"]).await;
    redis.command(&["SAVE"]).await;
    redis.restart().await;
    says(&trouble(&locks).await, StoreErrorKind::Unavailable, "LOADING", "loading its data");
    until("it has read", async || locks.try_lock(key()).await.is_ok()).await;
    // What was on its disk is there again, with its end.
    let left = redis.command(&["PTTL", "lock:kept"]).await.integer().expect("a number");
    assert!(left > 0 && left <= Duration::from_secs(31).as_millis().try_into().expect("small"), "{left}");
    guard.release().await.expect("ours");
}

#[tokio::test]
async fn too_many_clients_are_told() {
    let Some(world) = world().await else { return };
    world.ask(&["CONFIG", "SET", "maxclients", "1"]).await;
    let mut first = world.redis.connect().await;
    first.command(&["PING"]).await.expect("an answer");
    let error = RedisStore::connect(&world.redis.url()).await.expect_err("too many");
    let source = error.source().expect("kept").to_string();
    assert!(source.contains("max number of clients reached") && source.contains("`maxclients`"), "{source}");
    first.command(&["CONFIG", "SET", "maxclients", "100"]).await.expect("an answer");
}
