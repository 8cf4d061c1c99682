//! Foreign data in Redis, of any size, costs bounded time and memory.

use std::time::Duration;

use tower_lock::{
    LockManager, RedisStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, ForceReleaseReply, ForceReleaseRequest, IfBusy, LockStore,
        QueueConfig, ReleaseRequest,
    },
};
use tower_lock_testkit::store::{StoreExt, open_sink};
use tower_lock_testkit::{locks::key, wait::ms};

use crate::support::{Environment, NAME, QUEUE, environment};

const TERMS: QueueConfig = QueueConfig::new(ms(4_000), ms(10_000), 1024);

/// A store with long timeouts: these tests count commands on a machine that may be busy.
async fn patient(environment: &Environment) -> RedisStore {
    let builder = RedisStore::builder().call_timeout(Duration::from_secs(5));
    builder.connect(&environment.redis.url()).await.expect("it is up")
}

/// The number of runs of this command, in scripts and outside.
async fn calls(environment: &Environment, command: &str) -> u64 {
    let stats = environment.command(&["INFO", "commandstats"]).await;
    let name = format!("cmdstat_{command}:calls=");
    let line = stats.text().expect("text").lines().find_map(|line| line.strip_prefix(&name));
    line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().expect("a number"))
}

/// Guarantee: G15.
#[tokio::test]
async fn hash_of_many_fields_can_be_inspected_and_revoked() {
    let Some(environment) = environment().await else { return };
    let locks = LockManager::new(patient(&environment).await);
    // A thousand fields per script: a long script would block the health checks of the store, and
    // on a busy machine they would replace its connections.
    let fill = "for i = 1, 1000 do redis.call('HSET', KEYS[1], 'foreign:' .. ARGV[1] * 1000 + i, i) end";
    for thousands in [5, 100] {
        for thousand in 0..thousands {
            environment.command(&["EVAL", fill, "1", NAME, &thousand.to_string()]).await;
        }
        let state = locks.inspect(key()).await.expect("a reply");
        assert!(state.holder.is_some() && state.remaining == Duration::MAX, "{state:?}");
        let revoked = locks.force_release(key()).await.expect("a reply");
        assert!(matches!(revoked, ForceReleaseReply::Revoked { .. }), "{revoked:?}");
        environment.command(&["DEL", NAME]).await;
    }
}

/// A script that runs for longer than `busy-reply-threshold` blocks all other clients.
/// Guarantee: G15.
#[tokio::test]
async fn foreign_queue_of_a_million_entries_costs_little() {
    let Some(environment) = environment().await else { return };
    let store = patient(&environment).await;
    let ids = AcquisitionIds::new("a", 1);
    store.subscribe(open_sink(ids.next().manager()));
    // A thousand entries per script: a long script would block the health checks of the store.
    let fill = "local all = {} for j = 1, 1000 do all[j] = 'x:1:' .. ARGV[1] * 1000 + j end \
                return redis.call('RPUSH', KEYS[1], unpack(all))";
    let acquire = async |owner, if_busy| {
        let request = AcquireRequest::new(key(), owner, ms(30_000), if_busy, TERMS, ms(5_000));
        store.acquire_one(request).await.expect("a reply")
    };
    for entries in [60_000, 1_000_000] {
        for thousand in 0..entries / 1000 {
            environment.command(&["EVAL", fill, "1", "filled", &thousand.to_string()]).await;
        }
        for what in ["acquire", "release", "enqueue", "force"] {
            let (holder, other) = (ids.next(), ids.next());
            if what != "acquire" {
                assert!(matches!(acquire(holder.clone(), IfBusy::Fail).await, AcquireReply::Granted { .. }), "{what}");
            }
            environment.command(&["COPY", "filled", QUEUE]).await;
            environment.command(&["CONFIG", "RESETSTAT"]).await;
            match what {
                "acquire" => {
                    assert!(matches!(acquire(holder.clone(), IfBusy::Fail).await, AcquireReply::Granted { .. }));
                }
                "release" => {
                    let release = ReleaseRequest::new(key(), holder.clone(), Duration::ZERO, TERMS);
                    store.release_one(release).await.expect("a reply");
                }
                "enqueue" => drop(acquire(other.clone(), IfBusy::Enqueue).await),
                _ => {
                    let force = ForceReleaseRequest::new(key(), Duration::ZERO, TERMS);
                    store.force_release(force).await.expect("a reply");
                }
            }
            for command in ["lpop", "publish", "lrem"] {
                let calls = calls(&environment, command).await;
                assert!(calls <= 65, "{what} behind {entries}: {calls} times {command}");
            }
            for owner in [holder, other] {
                store.release_one(ReleaseRequest::new(key(), owner, Duration::ZERO, TERMS)).await.expect("a reply");
            }
            environment.command(&["UNLINK", QUEUE, NAME]).await;
        }
        environment.command(&["UNLINK", "filled"]).await;
    }
}

/// A request used to check all 1,024 entries for a subscription.
/// Guarantee: G15.
#[tokio::test]
async fn full_queue_is_swept_in_parts_until_done() {
    let Some(environment) = environment().await else { return };
    let store = patient(&environment).await;
    let (ids, dead) = (AcquisitionIds::new("a", 1), AcquisitionIds::new("dead", 2));
    store.subscribe(open_sink(ids.next().manager()));
    let acquire = async |owner| {
        let request = AcquireRequest::new(key(), owner, ms(30_000), IfBusy::Enqueue, TERMS, ms(5_000));
        store.acquire_one(request).await.expect("a reply")
    };
    assert!(matches!(acquire(ids.next()).await, AcquireReply::Granted { .. }));
    for n in 0..1024 {
        // One dead entry, at any position.
        let owner = if n == 700 { dead.next() } else { ids.next() };
        assert!(matches!(acquire(owner).await, AcquireReply::Queued { ahead, .. } if ahead == n));
    }
    let mut requests = 0;
    loop {
        environment.command(&["CONFIG", "RESETSTAT"]).await;
        let reply = acquire(ids.next()).await;
        requests += 1;
        let calls_made = (
            calls(&environment, "lrange").await,
            calls(&environment, "pubsub|numsub").await,
            calls(&environment, "lrem").await,
        );
        match reply {
            // The store checks its subscription once a second.
            AcquireReply::QueueFull { waiting: 1024, .. } => {
                assert!(matches!(calls_made, (1, 1..=8, 1)), "one part, one check, its own entry: {calls_made:?}");
            }
            AcquireReply::Queued { ahead: 1023, .. } => {
                assert!(matches!(calls_made, (1, 1..=8, 2)), "{calls_made:?}");
                break;
            }
            other => panic!("{other:?}"),
        }
        assert!(requests < 5_000, "the dead entry is never found");
    }
    assert!(matches!(acquire(ids.next()).await, AcquireReply::QueueFull { waiting: 1024, .. }), "full again");
}

/// A field of another program is neither read as a reply nor as several log lines.
/// Guarantee: G15.
#[tokio::test]
async fn key_with_an_unknown_field_is_revoked_and_reported() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    // As written by Lua, because a Rust string has no such byte; and as it is logged.
    for (field, shown) in
        [("healed", "healed"), ("foreign", "foreign"), ("two\\nlines", "two\\nlines"), ("\\255", "\u{fffd}")]
    {
        let writes = format!("return redis.call('HSET', KEYS[1], '{field}', 1)");
        assert_eq!(environment.command(&["EVAL", &writes, "1", NAME]).await.integer(), Some(1), "{field}");
        let holder = locks.inspect(key()).await.expect("it is up").holder.expect("a holder").to_string();
        let Ok(ForceReleaseReply::Revoked { holder: revoked }) = locks.force_release(key()).await else {
            panic!("{field}: it was revoked");
        };
        assert_eq!(revoked.to_string(), holder);
        assert!(holder.starts_with(shown), "{holder}");
        environment.command(&["DEL", NAME]).await;
    }
}

/// The mark of `force_release`, written beside a holder by another program.
#[tokio::test]
async fn forged_revocation_mark_does_not_prevent_revocation() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let guard = locks.lock(key()).await.expect("free");
    let holder = locks.inspect(key()).await.expect("it is up").holder.expect("held");
    environment.command(&["HSET", NAME, "b:1:end", "forced"]).await;
    environment.command(&["PEXPIRE", NAME, "900"]).await;
    let revoked = locks.force_release(key()).await.expect("it is up");
    assert!(matches!(&revoked, ForceReleaseReply::Revoked { holder: is } if *is == holder), "{revoked:?}");
    assert_eq!(environment.command(&["HEXISTS", NAME, &holder.to_string()]).await.integer(), Some(0), "revoked");
    drop(guard.release());
}
