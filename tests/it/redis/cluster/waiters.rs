//! Queues, messages and administration over all masters.

use std::{
    collections::BTreeMap,
    future::IntoFuture,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::runtime::{Builder, Runtime};
use tower_lock::{
    LockError, LockKey, LockLost, LockManager,
    lock::LockAllError,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, Cursor, EventSink, ForceReleaseReply, IfBusy, ListRequest,
        LockStore, QueueConfig, ReleaseReply, ReleaseRequest, StoreErrorKind, StoreEvent,
    },
};
use tower_lock_testkit::{
    RedisCluster, RedisServer, limits,
    store::{StoreExt, open_sink},
    wait::{ms, soon, until},
};

use super::{instance, key_at, keys_at, name_of, shared_cluster, store};

const TERMS: QueueConfig = QueueConfig::new(ms(3_000), ms(60_000), 16);
const MINUTE: Duration = Duration::from_secs(60);

async fn key_of_each(cluster: &RedisCluster) -> Vec<LockKey> {
    join_all((0..3).map(|node| key_at(cluster, node))).await
}

/// Another process, which can die.
fn process() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

async fn channels(cluster: &RedisCluster) -> usize {
    let mut count = 0;
    for node in 0..3 {
        count += cluster.command(node, &["PUBSUB", "CHANNELS", "tower-lock:lock:in:*"]).await.items().len();
    }
    count
}

/// Guarantee: G5.
#[tokio::test]
async fn dead_waiters_are_skipped_at_once_at_each_master() {
    let Some(cluster) = shared_cluster().await else { return };
    let (store, keys) = (store(&cluster).await, key_of_each(&cluster).await);
    let live = instance(&cluster, "live").await;
    let holder = AcquisitionIds::new("holder", 1);
    store.subscribe(open_sink(holder.next().manager()));
    let mut held = Vec::new();
    for key in &keys {
        let id = holder.next();
        let request = AcquireRequest::new(key.clone(), id.clone(), MINUTE, IfBusy::Fail, TERMS, limits::CALL);
        assert!(matches!(store.acquire_one(request).await, Ok(AcquireReply::Granted { .. })));
        held.push((key.clone(), id));
    }
    let queued = async |count: usize| {
        until("queued", async || {
            for key in &keys {
                if live.inspect(key.clone()).await.map_or(0, |key| key.waiting) != count {
                    return false;
                }
            }
            true
        })
        .await;
    };
    let (dies, url) = (process(), cluster.url());
    let waits = keys.clone();
    dies.spawn(async move {
        let locks = LockManager::new(limits::redis().connect(&url).await.expect("it is up"));
        join_all(waits.into_iter().map(|key| locks.lock(key).wait(MINUTE).into_future())).await;
    });
    queued(1).await;
    let waiting: Vec<_> =
        keys.iter().map(|key| tokio::spawn(live.lock(key.clone()).wait(MINUTE).into_future())).collect();
    queued(2).await;
    let before = channels(&cluster).await;
    dies.shutdown_background();
    until("it is dead", async || channels(&cluster).await + 3 == before).await;
    // Its offer would block the key.
    for ((key, id), waiting) in held.into_iter().zip(waiting) {
        let request = ReleaseRequest::new(key.clone(), id, Duration::ZERO, TERMS);
        assert_eq!(store.release_one(request).await.expect("a reply"), ReleaseReply::HandedOff, "{key:?}");
        let fields = cluster.command_for(&name_of(&key), &["HKEYS", &name_of(&key)]).await;
        assert!(fields.texts().iter().all(|id| id.starts_with("live:")), "{key:?}: {fields:?}");
        soon("a grant", waiting).await.expect("no panic").expect("a grant").release().await.expect("held");
    }
}

/// Guarantee: G5.
#[tokio::test]
async fn processes_get_keys_of_each_master_in_their_order() {
    let Some(cluster) = shared_cluster().await else { return };
    let keys = key_of_each(&cluster).await;
    let holder = instance(&cluster, "holder").await;
    let held = holder.lock_all(keys.clone()).await.expect("free");
    let instances = join_all(["a", "b", "c", "d"].map(|name| instance(&cluster, name))).await;
    let order = Arc::new(Mutex::new(BTreeMap::<LockKey, Vec<usize>>::new()));
    let mut waiting = Vec::new();
    for (at, key) in keys.iter().enumerate() {
        for turn in 0..instances.len() {
            // Another order for each key.
            let process = (at + turn) % instances.len();
            let (locks, key, order) = (instances[process].clone(), key.clone(), Arc::clone(&order));
            let queued = key.clone();
            waiting.push(tokio::spawn(async move {
                let guard = locks.lock(key.clone()).wait(MINUTE).await.expect("a grant");
                order.lock().expect("no panic").entry(key).or_default().push(process);
                guard.release().await.expect("held");
            }));
            let is_queued =
                async || holder.inspect(queued.clone()).await.is_ok_and(|status| status.waiting == turn + 1);
            until("queued", is_queued).await;
        }
    }
    held.release().await.expect("held");
    for waiting in waiting {
        soon("a grant", waiting).await.expect("no panic");
    }
    let order = order.lock().expect("no panic");
    for (at, key) in keys.iter().enumerate() {
        assert_eq!(order[key], [at, at + 1, at + 2, at + 3].map(|process| process % 4), "{key:?}");
    }
}

/// Guarantee: G21.
#[tokio::test]
async fn busy_key_of_several_masters_keeps_only_smaller_ones() {
    let Some(cluster) = shared_cluster().await else { return };
    let (locks, other) = (instance(&cluster, "a").await, instance(&cluster, "b").await);
    let mut keys = key_of_each(&cluster).await;
    keys.sort_unstable();
    for busy in 0..3 {
        let held = other.lock(keys[busy].clone()).await.expect("free");
        let error = locks.try_lock_all(keys.clone()).await.expect_err("one is busy");
        assert!(matches!(&error, LockAllError::NotAcquired { source: LockError::Busy { .. }, .. }), "{error:?}");
        let waiting = tokio::spawn(locks.lock_all(keys.clone()).into_future());
        until("it waits", async || other.inspect(keys[busy].clone()).await.is_ok_and(|key| key.waiting == 1)).await;
        for key in &keys[..busy] {
            let status = other.inspect(key.clone()).await.expect("up");
            assert!(status.holder().is_some_and(|holder| holder.id.instance() == "a"), "{key:?} is kept");
        }
        for key in &keys[busy + 1..] {
            until("free meanwhile", async || other.inspect(key.clone()).await.is_ok_and(|key| key.holders.is_empty()))
                .await;
        }
        held.release().await.expect("held");
        soon("the rest", waiting).await.expect("no panic").expect("a grant").release().await.expect("held");
    }
}

/// Guarantee: G8.
#[tokio::test]
async fn operator_sees_and_revokes_keys_of_each_master() {
    let Some(cluster) = shared_cluster().await else { return };
    let keys = key_of_each(&cluster).await;
    let (operator, other) = (instance(&cluster, "operator").await, instance(&cluster, "other").await);
    let (dies, url, held) = (process(), cluster.url(), keys.clone());
    let holds = dies.spawn(async move {
        let store = limits::redis().connect(&url).await.expect("it is up");
        let locks = LockManager::builder(store).instance("api").build();
        locks.lock_all(held).await.expect("free")
    });
    let held = soon("held", holds).await.expect("no panic");
    let mut waiting = Vec::new();
    for key in &keys {
        waiting.push(tokio::spawn(other.lock(key.clone()).wait(MINUTE).into_future()));
        until("queued", async || operator.inspect(key.clone()).await.is_ok_and(|key| key.waiting == 1)).await;
        let status = operator.inspect(key.clone()).await.expect("up");
        let holder = status.holder().expect("a holder");
        assert_eq!((holder.id.instance(), holder.connected), ("api", Some(true)), "{key:?}");
        assert!(holder.since.is_some() && status.remaining > MINUTE / 4);
    }
    let lost = dies.spawn(async move {
        let mut ends = Vec::new();
        for lock in held.held_locks().iter() {
            ends.push(lock.lost().await);
        }
        ends
    });
    for key in &keys {
        let revoked = operator.force_release(key.clone()).await.expect("up");
        assert!(
            matches!(&revoked, ForceReleaseReply::Revoked { holders } if holders[0].instance() == "api"),
            "{revoked:?}"
        );
    }
    assert_eq!(soon("a loss", lost).await.expect("no panic"), [LockLost::Revoked; 3]);
    for (key, waiting) in keys.iter().zip(waiting) {
        let guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
        assert_eq!(operator.inspect(key.clone()).await.expect("up").holder().expect("held").id.instance(), "other");
        guard.release().await.expect("held");
    }

    // A process that has died.
    let url = cluster.url();
    let (key, dead) = (
        keys[2].clone(),
        dies.spawn(async move { LockManager::new(limits::redis().connect(&url).await.expect("up")) }),
    );
    let locks = dead.await.expect("no panic");
    let guard = dies.spawn(locks.lock(key.clone()).into_future()).await.expect("no panic").expect("free");
    std::mem::forget((guard, locks));
    assert_eq!(operator.inspect(key.clone()).await.expect("up").holder().expect("held").connected, Some(true));
    dies.shutdown_background();
    until("it is not connected", async || {
        operator
            .inspect(key.clone())
            .await
            .is_ok_and(|key| key.holder().is_some_and(|holder| holder.connected == Some(false)))
    })
    .await;
    let hasty = limits::redis().call_timeout(limits::SHORT).connect(&cluster.url()).await.expect("it is up");
    let operator = LockManager::new(hasty);
    until("all masters are up", async || operator.health().await.is_ok()).await;
    cluster.freeze(1);
    let error = operator.health().await.expect_err("one is stopped");
    let text = format!("{error:?}");
    assert!(text.contains(&cluster.addresses()[1]) && !text.contains(&cluster.addresses()[0]), "{text}");
    cluster.thaw(1);
    until("it is ready", async || operator.health().await.is_ok()).await;
}

#[tokio::test]
async fn listing_visits_each_master_in_bounded_pages() {
    let Some(cluster) = shared_cluster().await else { return };
    let store = store(&cluster).await;
    let locks = LockManager::new(Arc::clone(&store));
    let mut keys = Vec::new();
    for node in 0..3 {
        keys.extend(keys_at(&cluster, node, 30).await);
    }
    let mut held = Vec::new();
    for part in keys.chunks(45) {
        held.push(locks.lock_all(part.to_vec()).await.expect("free"));
    }
    // A free key with a waiter, and a raw one with a waiter, at whatever master.
    let ids = AcquisitionIds::new("b", 1);
    store.subscribe(open_sink(ids.next().manager()));
    let raw = LockKey::raw("raw").expect("a name");
    for key in [raw.clone(), raw.clone(), keys[0].clone()] {
        let request = AcquireRequest::new(key, ids.next(), MINUTE, IfBusy::Enqueue, TERMS, limits::CALL);
        store.acquire_one(request).await.expect("a reply");
    }
    let list = async |limit: usize, contended_only: bool| {
        let (mut found, mut pages) = (Vec::new(), 0);
        let mut request = ListRequest::new(limit).contended_only(contended_only);
        loop {
            let page = store.list(request).await.expect("a reply");
            pages += 1;
            // `SCAN` may return more names than its `COUNT`.
            assert!(page.entries.len() <= limit + 10, "{} of {limit}", page.entries.len());
            found.extend(page.entries.into_iter().map(|entry| entry.key));
            let Some(next) = page.next else { break };
            request = ListRequest::new(limit).contended_only(contended_only).after(next);
        }
        found.sort_unstable();
        (found, pages)
    };
    let mut all: Vec<_> = keys.iter().chain([&raw]).cloned().collect();
    all.sort_unstable();
    let (found, pages) = list(1_000, false).await;
    assert_eq!((found, pages >= 3), (all.clone(), true), "{pages} pages");
    let (mut found, pages) = list(5, false).await;
    assert!(pages > 10, "{pages} pages");
    found.dedup();
    assert_eq!(found, all);
    let mut contended = vec![keys[0].clone(), raw];
    contended.sort_unstable();
    assert_eq!(list(1_000, true).await.0, contended);

    // Cursors of others: of a single server, and of no store.
    let single = RedisServer::start().await;
    let single = limits::redis().connect(&single.url()).await.expect("it is up");
    for cursor in ["l7", "q0", "x"] {
        let error = store.list(ListRequest::new(1).after(Cursor::new(cursor))).await.expect_err(cursor);
        assert_eq!(error.kind(), StoreErrorKind::Unsupported, "{cursor}: {error:?}");
    }
    let page = store.list(ListRequest::new(1)).await.expect("a reply");
    let error = single.list(ListRequest::new(1).after(page.next.expect("more"))).await.expect_err("of a Cluster");
    assert_eq!(error.kind(), StoreErrorKind::Unsupported, "{error:?}");
    for guards in held {
        guards.release().await.expect("held");
    }
}

/// Each slot has a fence of its own: its absence shows that a master has lost its data.
/// Guarantee: G11.
#[tokio::test]
async fn loss_of_the_data_of_one_master_is_noticed() {
    let Some(cluster) = shared_cluster().await else { return };
    let store = store(&cluster).await;
    let doubts = Arc::new(AtomicU32::new(0));
    let count = |doubts: &Arc<AtomicU32>, event| {
        if event == StoreEvent::Doubted {
            doubts.fetch_add(1, SeqCst);
        }
    };
    store.subscribe(EventSink::new("d:01", &doubts, count));
    let locks = LockManager::builder(Arc::clone(&store)).lease(Duration::from_secs(6)).build();
    let mut keys = Vec::new();
    for node in 0..3 {
        let keys_there = keys_at(&cluster, node, 20).await;
        // The first use of a slot, and another one.
        for _ in 0..2 {
            let held = locks.lock_all(keys_there.clone()).await.expect("free");
            held.release().await.expect("held");
        }
        keys.push(keys_there);
    }
    assert_eq!(doubts.load(SeqCst), 0, "the first key of a slot makes its fence");
    let held = join_all(keys.iter().map(|keys| locks.lock(keys[0].clone()).into_future())).await;
    let mut held: Vec<_> = held.into_iter().map(|guard| guard.expect("free")).collect();
    let waiting = tokio::spawn(locks.lock(keys[1][0].clone()).wait(MINUTE).into_future());
    until("it waits", async || locks.inspect(keys[1][0].clone()).await.is_ok_and(|key| key.waiting_locally == 1)).await;
    // Key by key: of a `FLUSHALL` the master says so itself.
    let delete_all = "#!lua flags=allow-cross-slot-keys\n\
                      for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('DEL', key) end";
    cluster.command(1, &["EVAL", delete_all, "0"]).await;
    for node in [0, 2, 1] {
        assert_eq!(doubts.load(SeqCst), 0, "before a key of that master");
        locks.lock(keys[node][1].clone()).await.expect("free").release().await.expect("held");
    }
    assert_eq!(doubts.load(SeqCst), 1);
    // Another process gets the key, and the local waiter learns of it before it starts.
    let other = instance(&cluster, "other").await;
    let theirs = other.lock(keys[1][0].clone()).await.expect("lost by its holder");
    let lost = held.remove(1);
    assert!(theirs.fencing_token() > lost.fencing_token());
    let _ = lost.release().await;
    until("it waits in the store", async || other.inspect(keys[1][0].clone()).await.is_ok_and(|key| key.waiting == 1))
        .await;
    assert!(!waiting.is_finished(), "behind the new holder");
    let token = theirs.fencing_token();
    theirs.release().await.expect("held");
    let next = soon("a grant", waiting).await.expect("no panic").expect("a grant");
    assert!(next.fencing_token() > token);
    next.release().await.expect("held");
    // Without a local waiter, a loss is noticed by the next renewal. The other masters lost
    // nothing.
    let lost = locks.lock(keys[1][2].clone()).await.expect("free");
    cluster.command(1, &["FLUSHALL"]).await;
    let end = soon("its end", lost.while_held(std::future::pending::<()>())).await;
    assert!(matches!(end, Err(LockLost::Revoked)), "{end:?}");
    for guard in held {
        assert!(!guard.held_lock().remaining().is_zero());
        guard.release().await.expect("held");
    }
}
