//! What others write into Redis, however much it is, costs a bounded time and a bounded memory.

use std::time::Duration;

use tower_lock::{
    RedisStore,
    store::{
        AcquireReply, AcquireRequest, EventSink, ForceReleaseReply, ForceReleaseRequest, IfBusy, LockStore,
        QueueConfig, ReleaseRequest,
    },
    test_util::decisions::AcquisitionIds,
};

use crate::support::{LINE, NAME, World, key, ms, world};

const TERMS: QueueConfig = QueueConfig::new(ms(4_000), ms(10_000), 1024);

/// What is counted here is commands, on a machine that may be busy.
async fn patient(world: &World) -> RedisStore {
    let builder = RedisStore::builder().call_timeout(Duration::from_secs(5));
    builder.connect(&world.redis.url()).await.expect("it is up")
}

/// How often each command was run, in scripts and without.
async fn calls(world: &World, command: &str) -> u64 {
    let stats = world.ask(&["INFO", "commandstats"]).await;
    let name = format!("cmdstat_{command}:calls=");
    let line = stats.text().expect("text").lines().find_map(|line| line.strip_prefix(&name));
    line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().expect("a number"))
}

#[tokio::test]
async fn hash_of_many_fields_can_be_inspected_and_revoked() {
    let Some(world) = world().await else { return };
    let locks = world.sound_instance("a").await;
    let fill = "for i = 1, ARGV[1] do redis.call('HSET', KEYS[1], 'stranger:' .. i, i) end";
    for fields in ["5000", "100000"] {
        world.ask(&["EVAL", fill, "1", NAME, fields]).await;
        let state = locks.inspect(key()).await.expect("an answer");
        assert!(state.holder.is_some() && state.remaining == Duration::MAX, "{state:?}");
        let revoked = locks.force_release(key()).await.expect("an answer");
        assert!(matches!(revoked, ForceReleaseReply::Revoked { .. }), "{revoked:?}");
        world.ask(&["DEL", NAME]).await;
    }
}

/// A script that runs for longer than `busy-reply-threshold` stops everybody else.
#[tokio::test]
async fn foreign_queue_of_a_million_entries_costs_little() {
    let Some(world) = world().await else { return };
    let store = patient(&world).await;
    let ids = AcquisitionIds::new("a", 1);
    store.subscribe(EventSink::new(ids.next().manager(), |_| true));
    // A thousand at a time: a long script would keep the store from its own questions.
    let fill = "local all = {} for j = 1, 1000 do all[j] = 'x:1:' .. ARGV[1] * 1000 + j end \
                return redis.call('RPUSH', KEYS[1], unpack(all))";
    let acquire = async |owner, if_held| {
        let ask = AcquireRequest::new(key(), owner, ms(30_000), if_held, TERMS, ms(5_000));
        store.acquire(ask).await.expect("an answer")
    };
    for entries in [60_000, 1_000_000] {
        for what in ["acquire", "release", "enqueue", "force"] {
            let (holder, other) = (ids.next(), ids.next());
            if what != "acquire" {
                assert!(matches!(acquire(holder.clone(), IfBusy::Fail).await, AcquireReply::Granted { .. }), "{what}");
            }
            for thousand in 0..entries / 1000 {
                world.ask(&["EVAL", fill, "1", LINE, &thousand.to_string()]).await;
            }
            world.ask(&["CONFIG", "RESETSTAT"]).await;
            match what {
                "acquire" => {
                    assert!(matches!(acquire(holder.clone(), IfBusy::Fail).await, AcquireReply::Granted { .. }));
                }
                "release" => {
                    let release = ReleaseRequest::new(key(), holder.clone(), Duration::ZERO, TERMS);
                    store.release(release).await.expect("an answer");
                }
                "enqueue" => drop(acquire(other.clone(), IfBusy::Enqueue).await),
                _ => {
                    let force = ForceReleaseRequest::new(key(), Duration::ZERO, TERMS);
                    store.force_release(force).await.expect("an answer");
                }
            }
            for command in ["lpop", "publish", "lrem"] {
                let calls = calls(&world, command).await;
                assert!(calls <= 65, "{what} behind {entries}: {calls} times {command}");
            }
            for owner in [holder, other] {
                store.release(ReleaseRequest::new(key(), owner, Duration::ZERO, TERMS)).await.expect("an answer");
            }
            world.ask(&["UNLINK", LINE, NAME]).await;
        }
    }
}

/// Each further request used to ask for each of the 1 024 entries whether somebody listens.
#[tokio::test]
async fn full_queue_is_swept_in_parts_until_done() {
    let Some(world) = world().await else { return };
    let store = patient(&world).await;
    let (ids, dead) = (AcquisitionIds::new("a", 1), AcquisitionIds::new("dead", 2));
    store.subscribe(EventSink::new(ids.next().manager(), |_| true));
    let acquire = async |owner| {
        let ask = AcquireRequest::new(key(), owner, ms(30_000), IfBusy::Enqueue, TERMS, ms(5_000));
        store.acquire(ask).await.expect("an answer")
    };
    assert!(matches!(acquire(ids.next()).await, AcquireReply::Granted { .. }));
    for n in 0..1024 {
        // One dead entry, somewhere.
        let owner = if n == 700 { dead.next() } else { ids.next() };
        assert!(matches!(acquire(owner).await, AcquireReply::Queued { ahead, .. } if ahead == n));
    }
    let mut requests = 0;
    loop {
        world.ask(&["CONFIG", "RESETSTAT"]).await;
        let answer = acquire(ids.next()).await;
        requests += 1;
        let asked = (calls(&world, "lrange").await, calls(&world, "pubsub|numsub").await, calls(&world, "lrem").await);
        match answer {
            // The store itself asks once a second whether it is heard.
            AcquireReply::QueueFull { waiting: 1024, .. } => {
                assert!(matches!(asked, (1, 1..=8, 0)), "one part, one question: {asked:?}");
            }
            AcquireReply::Queued { ahead: 1023, .. } => {
                assert!(matches!(asked, (1, 1..=8, 1)), "{asked:?}");
                break;
            }
            other => panic!("{other:?}"),
        }
        assert!(requests < 5_000, "the dead one is never found");
    }
    assert!(matches!(acquire(ids.next()).await, AcquireReply::QueueFull { waiting: 1024, .. }), "full again");
}

/// A field that another program has written is no word of a script, and one line of a log.
#[tokio::test]
async fn key_with_an_unknown_field_is_revoked_and_reported() {
    let Some(world) = world().await else { return };
    let locks = world.sound_instance("a").await;
    // As Lua writes it, because a text has no such byte; and as it is shown.
    for (field, shown) in
        [("healed", "healed"), ("stranger", "stranger"), ("two\\nlines", "two\\nlines"), ("\\255", "\u{fffd}")]
    {
        let writes = format!("return redis.call('HSET', KEYS[1], '{field}', 1)");
        assert_eq!(world.ask(&["EVAL", &writes, "1", NAME]).await.integer(), Some(1), "{field}");
        let holder = locks.inspect(key()).await.expect("it is up").holder.expect("a stranger").to_string();
        let Ok(ForceReleaseReply::Revoked { holder: revoked }) = locks.force_release(key()).await else {
            panic!("{field}: it was revoked");
        };
        assert_eq!(revoked.to_string(), holder);
        assert!(holder.starts_with(shown), "{holder}");
        world.ask(&["DEL", NAME]).await;
    }
}

/// The mark that `force_release` leaves, written beside a holder by another program.
#[tokio::test]
async fn forged_revocation_mark_does_not_prevent_revocation() {
    let Some(world) = world().await else { return };
    let locks = world.sound_instance("a").await;
    let guard = locks.lock(key()).await.expect("free");
    let holder = locks.inspect(key()).await.expect("it is up").holder.expect("ours");
    world.ask(&["HSET", NAME, "b:1:end", "forced"]).await;
    world.ask(&["PEXPIRE", NAME, "900"]).await;
    let revoked = locks.force_release(key()).await.expect("it is up");
    assert!(matches!(&revoked, ForceReleaseReply::Revoked { holder: is } if *is == holder), "{revoked:?}");
    assert_eq!(world.ask(&["HEXISTS", NAME, &holder.to_string()]).await.integer(), Some(0), "revoked");
    drop(guard.release());
}
