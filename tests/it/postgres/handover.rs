//! Two instances of a service that exclude each other, and pass keys to each other.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::NoTls;
use tower_lock::{
    AcquisitionId, LockKey, LockManager,
    store::{
        AcquireReply, AcquireRequest, ForceReleaseReply, IfBusy, LockStore, ReleaseRequest, StoreError, StoreErrorKind,
    },
};
use tower_lock_testkit::{
    locks::key,
    skipped,
    wait::{ms, soon, until},
};

use crate::support::{Caller, LONG, environment, own_environment, terms};

/// Tasks of two instances that lock the same key, one section at a time. Returns the sections.
async fn contend(instances: &[LockManager], sections: u32) -> u32 {
    let (inside, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let task = |locks: &LockManager| {
        let (locks, inside, done) = (locks.clone(), Arc::clone(&inside), Arc::clone(&done));
        tokio::spawn(async move {
            while done.fetch_add(1, SeqCst) < sections {
                let guard = locks.lock(key()).await.expect("a grant");
                assert!(!inside.swap(true, SeqCst), "two holders");
                sleep(ms(1)).await;
                inside.store(false, SeqCst);
                guard.release().await.expect("held");
            }
        })
    };
    let tasks: Vec<_> = instances.iter().flat_map(|locks| [task(locks), task(locks), task(locks)]).collect();
    for ended in join_all(tasks).await {
        ended.expect("no overlap");
    }
    done.load(SeqCst)
}

#[tokio::test]
async fn two_instances_exclude_each_other() {
    let Some(environment) = environment().await else { return };
    let instances = [environment.instance("a").await, environment.instance("b").await];
    assert!(soon("all sections", contend(&instances, 300)).await >= 300);
}

/// Callers that find the same row free at the same time.
#[tokio::test]
async fn free_key_is_granted_to_one_of_many_callers() {
    let Some(environment) = environment().await else { return };
    let stores = join_all((0..4).map(|_| environment.store())).await;
    let callers: Vec<_> = stores.iter().map(|store| Caller::new(store, "a")).collect();
    let key = LockKey::from(("free",));
    for round in 0..500 {
        let ids: Vec<_> = callers.iter().map(Caller::id).collect();
        let acquire = |(caller, id): (_, _)| Caller::acquire(caller, &key, id, LONG, IfBusy::Fail);
        let replies = join_all(callers.iter().zip(&ids).map(acquire)).await;
        let is_granted = |reply| matches!(reply, Ok(AcquireReply::Granted { .. }));
        let granted: Vec<_> = replies.into_iter().map(is_granted).collect();
        assert_eq!(granted.iter().filter(|granted| **granted).count(), 1, "round {round}: {granted:?}");
        join_all(callers.iter().zip(&ids).map(|(caller, id)| caller.release(&key, id, Duration::ZERO))).await;
    }
}

/// A waiter polls about once a second: ten keys that are passed on in less time came by messages.
#[tokio::test]
async fn released_key_is_passed_on_by_a_message() {
    let Some(environment) = environment().await else { return };
    let (a, b) = (environment.instance("a").await, environment.instance("b").await);
    let mut fastest = Duration::MAX;
    for _ in 0..10 {
        let guard = a.lock(key()).await.expect("a grant");
        let waiter = tokio::spawn({
            let b = b.clone();
            async move { b.lock(key()).await.map(|guard| (Instant::now(), guard)) }
        });
        until("it waits", async || a.inspect(key()).await.is_ok_and(|status| status.waiting == 1)).await;
        let released = Instant::now();
        guard.release().await.expect("held");
        let (granted, guard) = soon("a grant", waiter).await.expect("no panic").expect("a grant");
        fastest = fastest.min(granted - released);
        guard.release().await.expect("held");
    }
    assert!(fastest < ms(100), "{fastest:?}");
}

/// The connections for messages are killed all the time: waiters poll.
#[tokio::test]
async fn keys_are_passed_on_without_messages() {
    let Some(environment) = own_environment(&[]).await else { return };
    let instances = [environment.instance("a").await, environment.instance("b").await];
    let client = environment.client().await;
    let cut = async {
        loop {
            let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN %' OR query LIKE '%pg_is_in_recovery()'";
            client.batch_execute(kill).await.expect("the superuser may");
            sleep(ms(5)).await;
        }
    };
    let contended = async { timeout(Duration::from_secs(100), contend(&instances, 20)).await };
    tokio::select! {
        () = cut => unreachable!(),
        sections = contended => assert!(sections.expect("in time") >= 20),
    }
}

/// The keys of a call are locked in one order, in any order of its requests.
#[tokio::test]
async fn calls_with_many_keys_never_wait_for_each_other() {
    let Some(environment) = own_environment(&["deadlock_timeout=10ms"]).await else { return };
    let stores = [environment.store().await, environment.store().await];
    let rounds = stores.iter().enumerate().map(async |(n, store)| {
        let caller = Caller::new(store, "a");
        for _ in 0..100 {
            let mut keys: Vec<_> = (0..40).map(|key| LockKey::from(("many", key))).collect();
            if n == 1 {
                keys.reverse();
            }
            let requests: Vec<_> = keys.into_iter().map(|key| (key, caller.id())).collect();
            let acquire = |(key, id): &(LockKey, AcquisitionId)| {
                AcquireRequest::new(key.clone(), id.clone(), LONG, IfBusy::Enqueue, terms(), Duration::from_secs(5))
            };
            // On a busy machine one call may wait for the other for longer than the lock timeout.
            let is_late = |error: StoreError| assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error}");
            for reply in store.acquire(requests.iter().map(acquire).collect()) {
                reply.await.map_or_else(is_late, drop);
            }
            let release = |(key, id)| ReleaseRequest::new(key, id, Duration::ZERO, terms());
            for reply in store.release(requests.into_iter().map(release).collect()) {
                reply.await.map_or_else(is_late, drop);
            }
        }
    });
    join_all(rounds).await;
    let log = environment.server().log();
    assert!(!log.contains("deadlock detected"), "{log}");
}

/// Any user may fill the queue of the messages of a server, in any of its databases.
/// Guarantee: G6.
#[tokio::test]
async fn handovers_go_on_while_the_queue_of_messages_is_full() {
    let Some(environment) = own_environment(&[]).await else { return };
    let server = environment.server();
    if server.version() < 17 {
        // Its size cannot be set: 8 GB.
        return skipped("a full queue of messages", "PostgreSQL 17");
    }
    environment.execute("CREATE ROLE neighbour LOGIN").await;
    environment.execute("ALTER SYSTEM SET max_notify_queue_pages = 64").await;
    server.crash().await;
    server.restart().await;
    let (a, b) = (environment.instance("a").await, environment.instance("b").await);
    let neighbour = async || {
        let (client, connection) = tokio_postgres::connect(&server.url_of("neighbour"), NoTls).await.expect("it is up");
        tokio::spawn(connection);
        client
    };
    let listening = neighbour().await;
    for statement in ["LISTEN other", "BEGIN", "SELECT 1"] {
        listening.batch_execute(statement).await.expect("it may");
    }
    let talking = neighbour().await;
    while talking.execute("SELECT pg_notify('other', repeat('a', 7000))", &[]).await.is_ok() {}

    let guard = a.lock(key()).await.expect("free");
    let waiting = tokio::spawn(b.lock(key()).into_future());
    until("queued", async || a.inspect(key()).await.is_ok_and(|status| status.waiting == 1)).await;
    guard.release().await.expect("held");
    let guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
    let revoked = a.force_release(key()).await.expect("no message is needed");
    assert!(matches!(revoked, ForceReleaseReply::Revoked { .. }), "{revoked:?}");
    soon("its next renewal", guard.held_lock().lost()).await;
    let error = environment.builder().connect(&server.url()).await.expect_err("no message can be sent");
    assert!(format!("{error:?}").contains("too many notifications in the NOTIFY queue"), "{error:?}");
    drop(listening);
}
