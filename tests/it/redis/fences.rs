//! Fencing tokens.

use std::{
    collections::BTreeSet,
    error::Error,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
};

use tower_lock::{
    AcquisitionId,
    store::{
        AcquireReply, AcquisitionIds, EventSink, IfBusy, LockStore, ReleaseReply, StoreErrorKind, StoreEvent,
        YieldReply, YieldRequest,
    },
};
use tower_lock_testkit::{
    locks::key,
    log::Log,
    store::{StoreExt, open_sink},
    wait::until,
};

use crate::support::{LONG, NAME, TERMS, acquire, environment, granted, release};

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
    let request = |id: &AcquisitionId| store.acquire_one(acquire(&key(), id, IfBusy::Enqueue));
    let (mut holder, mut offers) = (ids.next(), Vec::new());
    assert!(matches!(request(&holder).await, Ok(AcquireReply::Granted { .. })));
    for _ in 0..30 {
        let next = ids.next();
        assert!(matches!(request(&next).await, Ok(AcquireReply::Queued { .. })));
        assert_eq!(store.release_one(release(&key(), &holder)).await.expect("a reply"), ReleaseReply::HandedOff);
        let stored = environment.command(&["HGET", NAME, &next.to_string()]).await;
        let Ok(AcquireReply::Granted { fence, .. }) = request(&next).await else { panic!("it was offered") };
        assert_eq!(stored.text(), Some(fence.to_string().as_str()));
        offers.push(format!("1 offered {fence} {next} {NAME}"));
        holder = next;
    }
    assert!(offers.is_sorted(), "they rise");
    let offers: BTreeSet<_> = offers.into_iter().collect();
    until("all messages have arrived", async || {
        messages.lock().unwrap_or_else(PoisonError::into_inner).len() >= offers.len()
    })
    .await;
    assert!(*messages.lock().unwrap_or_else(PoisonError::into_inner) == offers);
}

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
}

/// The counter is gone, and the locks may be gone with it: the next section of a held key begins
/// with a call, and not with the token of the old grant.
/// Guarantee: G11.
#[tokio::test]
async fn lost_counter_ends_local_handoffs() {
    let Some(environment) = environment().await else { return };
    let (ours, other) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let first = ours.lock(key()).await.expect("free");
    let waiter = tokio::spawn(ours.lock(key()).into_future());
    until("it waits", async || ours.inspect(key()).await.is_ok_and(|key| key.waiting_locally == 1)).await;
    environment.command(&["FLUSHALL"]).await;
    // The first reply after the loss shows it.
    drop(ours.lock(("another key",)).await.expect("free").release());
    let theirs = other.lock(key()).await.expect("lost by its holder");
    assert!(theirs.fencing_token() > first.fencing_token());
    drop(first.release());
    until("it waits behind the new holder", async || ours.inspect(key()).await.is_ok_and(|key| key.waiting == 1)).await;
    assert!(!waiter.is_finished());
    let token = theirs.fencing_token();
    theirs.release().await.expect("held");
    assert!(granted(waiter).await.fencing_token() > token);
}

/// The server may have been restarted or replaced. Then it may have lost its locks, too.
/// Guarantee: G11.
#[tokio::test]
async fn store_doubts_a_server_that_disconnects_or_becomes_a_replica() {
    let Some(environment) = environment().await else { return };
    let store = environment.direct_store().await;
    let doubts = Arc::new(AtomicU32::new(0));
    let count = |doubts: &Arc<AtomicU32>, event| {
        if event == StoreEvent::Doubted {
            doubts.fetch_add(1, SeqCst);
        }
    };
    store.subscribe(EventSink::new("a:01", &doubts, count));
    let is_subscribed = async || environment.listeners().await == 1;
    until("it is subscribed", is_subscribed).await;
    assert_eq!(doubts.load(SeqCst), 0);
    environment.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    until("it was disconnected", async || doubts.load(SeqCst) == 1).await;
    until("it is subscribed again", is_subscribed).await;
    environment.command(&["REPLICAOF", "127.0.0.1", "1"]).await;
    let refused = store.acquire_one(acquire(&key(), &AcquisitionIds::new("a", 1).next(), IfBusy::Fail)).await;
    assert_eq!(refused.expect_err("a replica").kind(), StoreErrorKind::Failover);
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
    let store = environment.direct_store().await;
    let ids = AcquisitionIds::new("a", 1);
    store.subscribe(open_sink(ids.next().manager()));
    let request = async |id: &AcquisitionId, what: &str| {
        let reply = store.acquire_one(acquire(&key(), id, IfBusy::Enqueue)).await;
        reply.unwrap_or_else(|error| panic!("{what}: {error}: {}", error.source().expect("kept")))
    };
    let mut last = 0;
    for value in INVALID_FENCES.into_iter().chain(["a list"]) {
        let log = Log::default();
        let guard = log.listen();
        for way in ["acquire", "offer", "yield"] {
            let (holder, next) = (ids.next(), ids.next());
            let disturb = async || {
                environment.command(&["DEL", FENCES]).await;
                let command = if value == "a list" { "RPUSH" } else { "SET" };
                environment.command(&[command, FENCES, value]).await;
            };
            if way == "acquire" {
                disturb().await;
            }
            let AcquireReply::Granted { mut fence, .. } = request(&holder, value).await else { panic!("free") };
            match way {
                "offer" => {
                    assert!(matches!(request(&next, value).await, AcquireReply::Queued { .. }));
                    disturb().await;
                    let released = store.release_one(release(&key(), &holder)).await;
                    assert_eq!(released.expect("a reply"), ReleaseReply::HandedOff, "{value}");
                    let AcquireReply::Granted { fence: offered, .. } = request(&next, value).await else {
                        panic!("it was offered")
                    };
                    fence = offered;
                }
                "yield" => {
                    disturb().await;
                    let request = YieldRequest::new(key(), holder.clone(), fence, next.clone(), LONG, TERMS, LONG);
                    match store.yield_to_queue(request).await {
                        Ok(YieldReply::Extended { fence: extended }) => fence = extended,
                        other => panic!("{value}: {other:?}"),
                    }
                }
                _ => {}
            }
            assert!(fence > last && fence < 1 << 52, "{value} by {way}: {fence} after {last}");
            last = fence;
            for id in [holder, next] {
                store.release_one(release(&key(), &id)).await.expect("a reply");
            }
        }
        // One warning in ten seconds.
        if value == "abc" {
            until("a warning", async || log.text().contains(&format!("`DEL {FENCES}`"))).await;
        }
        drop(guard);
        let lines = log.text();
        assert!(lines.lines().all(|line| line.contains("WARN")), "{value}: {lines}");
    }
}

/// Guarantee: G11.
#[tokio::test]
async fn missing_fence_counter_is_logged_at_start() {
    let Some(environment) = environment().await else { return };
    for value in [INVALID_FENCES[0], INVALID_FENCES[7], INVALID_FENCES[9]] {
        environment.command(&["SET", FENCES, value]).await;
        let log = Log::default();
        let guard = log.listen();
        drop(environment.direct_store().await);
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
