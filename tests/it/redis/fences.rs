//! Fencing tokens.

use std::{
    collections::BTreeSet,
    error::Error,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_lock::{
    AcquisitionId, LockKey, RedisStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, EventSink, IfBusy, LockStore, QueueConfig, ReleaseReply,
        ReleaseRequest, StoreErrorKind, StoreEvent, YieldReply, YieldRequest,
    },
};
use tower_lock_testkit::store::{StoreExt, open_sink};
use tower_lock_testkit::{
    locks::key,
    log::Log,
    wait::{ms, soon, until},
};

use crate::support::environment;

const KEYS: usize = 10;
const GRANTS: usize = 300;

/// By default Lua prints doubles with 14 digits, and a fence has 16.
#[tokio::test]
async fn fence_is_equal_in_message_store_and_reply() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let messages = Arc::new(Mutex::new(BTreeSet::new()));
    let heard = Arc::clone(&messages);
    environment.proxy.all().pushes(move |push| {
        let said = String::from_utf8(push.payload.clone()).expect("text");
        heard.lock().unwrap_or_else(PoisonError::into_inner).insert(said);
        vec![push.payload.clone()]
    });
    let ids = AcquisitionIds::new("p", 1);
    store.subscribe(open_sink(ids.next().manager()));
    let grants = join_all((0..KEYS).map(async |n| {
        let (key, name) = (LockKey::from(("k", n)), format!("lock:k:{n}"));
        let request = |owner| {
            store.acquire_one(AcquireRequest::new(key.clone(), owner, ms(60_000), IfBusy::Enqueue, TERMS, ms(5_000)))
        };
        let mut holder = ids.next();
        assert!(matches!(request(holder.clone()).await, Ok(AcquireReply::Granted { .. })));
        let mut look = environment.redis.connect().await;
        let mut offers = Vec::new();
        for _ in 0..GRANTS {
            let next = ids.next();
            assert!(matches!(request(next.clone()).await, Ok(AcquireReply::Queued { .. })));
            let release = ReleaseRequest::new(key.clone(), holder, Duration::ZERO, TERMS);
            assert_eq!(store.release_one(release).await.expect("a reply"), ReleaseReply::HandedOff);
            let stored = look.command(&["HGET", &name, &next.to_string()]).await.expect("a reply");
            let Ok(AcquireReply::Granted { fence }) = request(next.clone()).await else { panic!("it was offered") };
            assert_eq!(stored.text(), Some(fence.to_string().as_str()));
            offers.push(format!("1 offered {fence} {next} {name}"));
            holder = next;
        }
        assert!(offers.is_sorted(), "they rise");
        offers
    }))
    .await;
    let offers: BTreeSet<_> = grants.into_iter().flatten().collect();
    assert_eq!(offers.len(), KEYS * GRANTS);
    until("all messages have arrived", async || {
        messages.lock().unwrap_or_else(PoisonError::into_inner).len() >= offers.len()
    })
    .await;
    assert!(*messages.lock().unwrap_or_else(PoisonError::into_inner) == offers);
}

const TERMS: QueueConfig = QueueConfig::new(ms(60_000), ms(60_000), 8);

/// Guarantee: G11.
#[tokio::test]
async fn fence_rises_over_flushall_and_restart() {
    let Some(mut environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    let mut last = None;
    for how in ["as it is", "flushed", "as it is", "restarted", "as it is"] {
        match how {
            "flushed" => drop(environment.command(&["FLUSHALL"]).await),
            "restarted" => environment.redis.restart_empty().await,
            _ => {}
        }
        let guard = locks.lock(key()).await.unwrap_or_else(|error| panic!("{how}: {error}"));
        assert!(last < Some(guard.fencing_token()), "{how}: {:?} after {last:?}", guard.fencing_token());
        last = Some(guard.fencing_token());
        guard.release().await.expect("held");
    }
    drop(RedisStore::connect(&environment.redis.url()).await.expect("and another one"));
}

/// The counter is gone, and the locks may be gone with it: the next section of a held key begins
/// with a call, and not with the token of the old grant.
/// Guarantee: G11.
#[tokio::test]
async fn lost_counter_ends_local_handoffs() {
    let Some(environment) = environment().await else { return };
    let (ours, other) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let first = ours.lock(key()).await.expect("free");
    let waiter = tokio::spawn(ours.lock(key()).wait(Duration::from_secs(60)).into_future());
    until("it waits", async || ours.inspect(key()).await.is_ok_and(|key| key.waiting_locally == 1)).await;
    environment.command(&["FLUSHALL"]).await;
    // The first reply after the loss shows it.
    drop(ours.lock(("another key",)).await.expect("free").release());
    let theirs = other.lock(key()).await.expect("lost by its holder");
    assert!(theirs.fencing_token() > first.fencing_token());
    drop(first.release());
    sleep(ms(100)).await;
    assert!(!waiter.is_finished(), "it waits behind the new holder");
    let token = theirs.fencing_token();
    theirs.release().await.expect("held");
    let next = soon("its turn", waiter).await.expect("no panic").expect("a grant");
    assert!(next.fencing_token() > token);
}

/// The server may have been restarted or replaced. Then it may have lost its locks, too.
/// Guarantee: G11.
#[tokio::test]
async fn store_doubts_a_server_that_disconnects_or_becomes_a_replica() {
    let Some(environment) = environment().await else { return };
    let store = RedisStore::connect(&environment.redis.url()).await.expect("it is up");
    let doubts = Arc::new(AtomicU32::new(0));
    let count = |doubts: &Arc<AtomicU32>, event| {
        if event == StoreEvent::Doubted {
            doubts.fetch_add(1, SeqCst);
        }
    };
    store.subscribe(EventSink::new("a:01", &doubts, count));
    let is_subscribed =
        async || !environment.command(&["PUBSUB", "CHANNELS", "tower-lock:lock:in:*"]).await.items().is_empty();
    until("it is subscribed", is_subscribed).await;
    assert_eq!(doubts.load(SeqCst), 0);
    environment.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    until("it was disconnected", async || doubts.load(SeqCst) == 1).await;
    until("it is subscribed again", is_subscribed).await;
    environment.command(&["REPLICAOF", "127.0.0.1", "1"]).await;
    let refused = store.acquire_one(AcquireRequest::new(
        key(),
        AcquisitionIds::new("a", 1).next(),
        ms(60_000),
        IfBusy::Fail,
        TERMS,
        ms(5_000),
    ));
    assert_eq!(refused.await.expect_err("a replica").kind(), StoreErrorKind::Failover);
    until("it is a replica", async || doubts.load(SeqCst) > 1).await;
}

/// Written by another program or by mistake. Each of these values used to fail every acquire until
/// the key was deleted.
const INVALID_FENCES: [&str; 10] = [
    "abc",
    "",
    "inf",
    "nan",
    "1e300",
    "0x1fffffffffffff",
    "9007199254740990",
    "9007199254740991",
    "99999999999999999999",
    "a\r\n2026-11-22T00:00:00Z  INFO forged",
];

/// Guarantee: G11.
#[tokio::test]
async fn invalid_fence_counter_is_replaced_and_logged() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let terms = QueueConfig::new(ms(4_000), ms(10_000), 8);
    let ids = AcquisitionIds::new("a", 1);
    store.subscribe(open_sink(ids.next().manager()));
    let acquire = async |owner: AcquisitionId, what: &str| {
        let request = AcquireRequest::new(key(), owner, ms(30_000), IfBusy::Enqueue, terms, ms(500));
        store
            .acquire_one(request)
            .await
            .unwrap_or_else(|error| panic!("{what}: {error}: {}", error.source().expect("kept")))
    };
    let mut last = 0;
    for value in INVALID_FENCES.into_iter().chain(["a list"]) {
        for way in ["acquire", "offer", "yield"] {
            let log = Log::default();
            let guard = log.listen();
            let (holder, next) = (ids.next(), ids.next());
            let disturb = async || {
                environment.command(&["DEL", FENCES]).await;
                if value == "a list" {
                    environment.command(&["RPUSH", FENCES, "1"]).await;
                } else {
                    environment.command(&["SET", FENCES, value]).await;
                }
            };
            if way == "acquire" {
                disturb().await;
            }
            let AcquireReply::Granted { mut fence } = acquire(holder.clone(), value).await else { panic!("free") };
            match way {
                "offer" => {
                    assert!(matches!(acquire(next.clone(), value).await, AcquireReply::Queued { .. }));
                    disturb().await;
                    let release = ReleaseRequest::new(key(), holder.clone(), Duration::ZERO, terms);
                    assert_eq!(store.release_one(release).await.expect("a reply"), ReleaseReply::HandedOff, "{value}");
                    let AcquireReply::Granted { fence: offered } = acquire(next.clone(), value).await else {
                        panic!("it was offered")
                    };
                    fence = offered;
                }
                "yield" => {
                    disturb().await;
                    let request =
                        YieldRequest::new(key(), holder.clone(), fence, next.clone(), ms(30_000), terms, ms(500));
                    match store.yield_to_queue(request).await {
                        Ok(YieldReply::Extended { fence: extended }) => fence = extended,
                        other => panic!("{value}: {other:?}"),
                    }
                }
                _ => {}
            }
            assert!(fence > last && fence < 1 << 52, "{value} by {way}: {fence} after {last}");
            last = fence;
            for owner in [holder, next] {
                store.release_one(ReleaseRequest::new(key(), owner, Duration::ZERO, terms)).await.expect("a reply");
            }
            // One warning in ten seconds.
            if (value, way) == ("abc", "acquire") {
                until("a warning", async || log.text().contains(&format!("`DEL {FENCES}`"))).await;
            }
            drop(guard);
            let text = log.text();
            assert!(text.lines().count() <= 1, "{value} by {way}: {text}");
        }
    }
}

/// Guarantee: G11.
#[tokio::test]
async fn missing_fence_counter_is_logged_at_start() {
    let Some(environment) = environment().await else { return };
    for value in INVALID_FENCES {
        environment.command(&["SET", FENCES, value]).await;
        let log = Log::default();
        let guard = log.listen();
        drop(RedisStore::connect(&environment.redis.url()).await.unwrap_or_else(|error| panic!("{value}: {error}")));
        until("a warning", async || log.text().contains(&format!("`DEL {FENCES}`"))).await;
        drop(guard);
        let text = log.text();
        assert_eq!(text.lines().count(), 1, "{value}: {text}");
        let stored = environment.command(&["GET", FENCES]).await;
        let stored: u64 = stored.text().and_then(|text| text.parse().ok()).expect("a number");
        assert!(stored < 1 << 52, "{value}: {stored}");
    }
    // A fence within a day of the clock comes from a clock that was set back.
    let hour = environment.command(&["TIME"]).await.items()[0].integer().expect("a number") + 3600;
    environment.command(&["SET", FENCES, &format!("{hour}000000")]).await;
    let locks = environment.direct_instance("a").await;
    let guard = locks.lock(key()).await.expect("free");
    assert_eq!(guard.fencing_token().as_i64() >> 10, hour * 1_000_000 + 1);
    guard.release().await.expect("held");
}

const FENCES: &str = "tower-lock:lock:f";
