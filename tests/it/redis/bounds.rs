//! Foreign data in Redis, of any size, costs bounded time and memory.

use std::time::Duration;

use tower_lock::store::{
    AcquireReply, AcquireRequest, AcquisitionIds, ForceReleaseReply, ForceReleaseRequest, IfBusy, LockStore,
    QueueConfig,
};
use tower_lock_testkit::{
    locks::key,
    store::{StoreExt, open_sink},
};

use crate::support::{LONG, NAME, QUEUE, TERMS, acquire, environment, release};

/// Guarantee: G15.
#[tokio::test]
async fn hash_of_many_fields_can_be_inspected_and_revoked() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    // Longer in total than the longest reply.
    let fill = "for i = 1, 10000 do redis.call('HSET', KEYS[1], i .. string.rep('x', 300), i) end";
    environment.command(&["EVAL", fill, "1", NAME]).await;
    let state = locks.inspect(key()).await.expect("a reply");
    assert!(state.holder().is_some() && state.remaining == Duration::MAX, "{state:?}");
    let revoked = locks.force_release(key()).await.expect("a reply");
    assert!(matches!(revoked, ForceReleaseReply::Revoked { .. }), "{revoked:?}");
}

/// A script that runs for longer than `busy-reply-threshold` blocks all other clients.
/// Guarantee: G15.
#[tokio::test]
async fn long_foreign_queue_costs_little() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let ids = AcquisitionIds::new("a", 1);
    store.subscribe(open_sink(ids.next().manager()));
    let fill = "local all = {} for i = 1, 5000 do all[i] = 'x:1:' .. i end \
                for _ = 1, 10 do redis.call('RPUSH', KEYS[1], unpack(all)) end";
    environment.command(&["EVAL", fill, "1", "filled"]).await;
    // The longest queue that is searched has 65,536 entries: one fill is shorter, two are longer.
    for (what, is_doubled) in
        ["acquire", "release", "enqueue", "force"].iter().flat_map(|what| [(*what, false), (*what, true)])
    {
        let (holder, other) = (ids.next(), ids.next());
        if what != "acquire" {
            let held = store.acquire_one(acquire(&key(), &holder, IfBusy::Fail)).await;
            assert!(matches!(held, Ok(AcquireReply::Granted { .. })), "{what}: {held:?}");
        }
        environment.command(&["COPY", "filled", QUEUE]).await;
        if is_doubled {
            environment.command(&["EVAL", fill, "1", QUEUE]).await;
        }
        environment.command(&["CONFIG", "RESETSTAT"]).await;
        match what {
            "acquire" => {
                let held = store.acquire_one(acquire(&key(), &holder, IfBusy::Fail)).await;
                assert!(matches!(held, Ok(AcquireReply::Granted { .. })), "{held:?}");
            }
            "release" => drop(store.release_one(release(&key(), &holder)).await.expect("a reply")),
            "enqueue" => drop(store.acquire_one(acquire(&key(), &other, IfBusy::Enqueue)).await.expect("a reply")),
            _ => {
                let force = ForceReleaseRequest::new(key(), Duration::ZERO, TERMS);
                store.force_release(force).await.expect("a reply");
            }
        }
        let calls = environment.calls(["lpop", "publish", "lrem"]).await;
        assert!(calls.iter().all(|calls| *calls <= 65), "{what}: {calls:?} behind a long queue");
        environment.command(&["UNLINK", QUEUE, NAME]).await;
    }
}

/// A request used to check all entries for a subscription.
/// Guarantee: G15.
#[tokio::test]
async fn full_queue_is_swept_in_parts_until_done() {
    const FULL: usize = 100;
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let (ids, dead) = (AcquisitionIds::new("a", 1), AcquisitionIds::new("dead", 2));
    store.subscribe(open_sink(ids.next().manager()));
    let enqueue = async |id| {
        let queue = QueueConfig::new(LONG, LONG, FULL);
        let request = AcquireRequest::new(key(), id, LONG, IfBusy::Enqueue, queue, LONG);
        store.acquire_one(request).await.expect("a reply")
    };
    assert!(matches!(enqueue(ids.next()).await, AcquireReply::Granted { .. }));
    for n in 0..FULL {
        // One dead entry, at any position.
        let id = if n == 70 { dead.next() } else { ids.next() };
        assert!(matches!(enqueue(id).await, AcquireReply::Queued { ahead, .. } if ahead == n));
    }
    let mut requests = 0;
    loop {
        environment.command(&["CONFIG", "RESETSTAT"]).await;
        let reply = enqueue(ids.next()).await;
        requests += 1;
        let [parts, checks, removed] = environment.calls(["lrange", "pubsub|numsub", "lrem"]).await;
        // The store checks its subscription once a second.
        assert!(parts == 1 && (1..=8).contains(&checks), "one part, one check: {parts}, {checks}");
        match reply {
            AcquireReply::QueueFull { waiting: FULL, .. } => assert_eq!(removed, 1, "its own entry"),
            AcquireReply::Queued { ahead, .. } => {
                assert_eq!((ahead, removed), (FULL - 1, 2));
                break;
            }
            other => panic!("{other:?}"),
        }
        assert!(requests < 1_000, "the dead entry is never found");
    }
    assert!(matches!(enqueue(ids.next()).await, AcquireReply::QueueFull { waiting: FULL, .. }), "full again");
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
        let holder = locks.inspect(key()).await.expect("it is up").holder().expect("a holder").id.to_string();
        let Ok(ForceReleaseReply::Revoked { holders }) = locks.force_release(key()).await else {
            panic!("{field}: it was revoked");
        };
        assert_eq!(holders[0].to_string(), holder);
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
    let holder = locks.inspect(key()).await.expect("it is up").holder().expect("held").id.clone();
    environment.command(&["HSET", NAME, "b:1:end", "forced"]).await;
    environment.command(&["PEXPIRE", NAME, "900"]).await;
    let revoked = locks.force_release(key()).await.expect("it is up");
    assert!(
        matches!(&revoked, ForceReleaseReply::Revoked { holders } if holders[..] == [holder.clone()]),
        "{revoked:?}"
    );
    assert_eq!(environment.command(&["HEXISTS", NAME, &holder.to_string()]).await.integer(), Some(0), "revoked");
    drop(guard.release());
}
