//! Two instances of a service that exclude each other, and pass keys to each other.

use std::{sync::Arc, time::Duration};

use axum::{Router, extract::Path, http::StatusCode, routing::get};
use futures_util::future::join_all;
use tokio::{sync::mpsc, time::sleep};
use tower_lock::{
    LockKey, LockLayer, LockManager, key as lock_key,
    store::{AcquireReply, ForceReleaseReply, IfBusy, LockStore, ReleaseRequest},
};
use tower_lock_testkit::{
    app::fetch,
    limits,
    locks::key,
    skipped,
    wait::{soon, until},
};

use crate::support::{Caller, LONG, Sections, connect, environment, own_environment, pooled, request, terms};

/// Callers that find the same row free at the same time.
#[tokio::test]
async fn free_key_is_granted_to_one_of_many_callers() {
    let Some(environment) = environment().await else { return };
    let stores = join_all((0..4).map(|_| environment.store())).await;
    let callers: Vec<_> = stores.iter().map(|store| Caller::new(store, "a")).collect();
    let key = LockKey::from(("free",));
    for round in 0..40 {
        let ids: Vec<_> = callers.iter().map(Caller::id).collect();
        let acquire = |(caller, id): (_, _)| Caller::acquire(caller, &key, id, LONG, IfBusy::Fail);
        let replies = join_all(callers.iter().zip(&ids).map(acquire)).await;
        let is_granted = |reply| matches!(reply, Ok(AcquireReply::Granted { .. }));
        let granted: Vec<_> = replies.into_iter().map(is_granted).collect();
        assert_eq!(granted.iter().filter(|granted| **granted).count(), 1, "round {round}: {granted:?}");
        join_all(callers.iter().zip(&ids).map(|(caller, id)| caller.release(&key, id, Duration::ZERO))).await;
    }
}

/// The connections for messages are killed again and again: waiters poll.
#[tokio::test]
async fn keys_are_passed_on_without_messages() {
    let Some(environment) = environment().await else { return };
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&environment.two_instances().await);
    for _ in 0..3 {
        environment.kill_sessions("(query LIKE 'LISTEN %' OR query LIKE '%pg_is_in_recovery()')").await;
        sections.go_on("sections without messages").await;
    }
    sections.end(tasks).await;
}

/// A pooler passes the messages to another client: waiters poll.
#[tokio::test]
async fn keys_are_passed_on_behind_pgbouncer_alone() {
    let Some((environment, pooler)) = pooled().await else { return };
    let store = environment.connect(environment.builder(), &pooler.url()).await;
    assert!(!store.traits().events, "no message arrives");
    let instance = |name| LockManager::builder(Arc::clone(&store)).instance(name).build();
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&["a", "b"].map(instance));
    sections.go_on("sections without messages").await;
    sections.end(tasks).await;
}

/// The reply to a renewal says so: no message arrives.
///
/// Guarantee: G25.
#[tokio::test]
async fn newest_request_behind_pgbouncer_waits_for_a_renewal() {
    let Some((environment, pooler)) = pooled().await else { return };
    let store = environment.connect(environment.builder(), &pooler.url()).await;
    let (started, mut starts) = mpsc::unbounded_channel();
    let app = |name| {
        let locks = LockManager::builder(Arc::clone(&store)).instance(name).lease(Duration::from_secs(2)).build();
        let started = started.clone();
        let handler = |Path(seconds): Path<u64>| async move {
            let _ = started.send(());
            sleep(Duration::from_secs(seconds)).await;
        };
        let layer = LockLayer::new(&locks, lock_key::fixed(("newest",))).newest_wins(Duration::ZERO);
        Router::new().route("/{seconds}", get(handler).route_layer(layer))
    };
    let (older, newer) = (app("a"), app("b"));
    let older = tokio::spawn(async move { fetch(&older, "/600").await.status() });
    soon("the older one", starts.recv()).await;
    assert_eq!(fetch(&newer, "/0").await.status(), StatusCode::OK);
    assert_eq!(older.await.expect("no panic"), StatusCode::CONFLICT);
}

/// The keys of a call are locked in one order, in any order of its requests.
#[tokio::test]
async fn calls_with_many_keys_never_wait_for_each_other() {
    let Some(environment) = environment().await else { return };
    environment.execute("ALTER ROLE {user} SET deadlock_timeout = '10ms'").await;
    let stores = [environment.store().await, environment.store().await];
    let rounds = stores.iter().enumerate().map(async |(n, store)| {
        let caller = Caller::new(store, "a");
        for _ in 0..30 {
            let mut keys: Vec<_> = (0..40).map(|key| LockKey::from(("many", key))).collect();
            if n == 1 {
                keys.reverse();
            }
            let requests: Vec<_> = keys.into_iter().map(|key| (key, caller.id())).collect();
            let acquire = |(key, id): &(_, _)| request(key, id, LONG, IfBusy::Enqueue);
            for reply in store.acquire(requests.iter().map(acquire).collect()) {
                reply.await.expect("a reply");
            }
            let release = |(key, id)| ReleaseRequest::new(key, id, Duration::ZERO, terms());
            for reply in store.release(requests.into_iter().map(release).collect()) {
                reply.await.expect("a reply");
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
    environment.crash().await;
    let [a, b] = environment.two_instances().await;
    let neighbour = server.url_of("neighbour");
    let listening = connect(&neighbour).await;
    for statement in ["LISTEN other", "BEGIN", "SELECT 1"] {
        listening.batch_execute(statement).await.expect("it may");
    }
    let talking = connect(&neighbour).await;
    while talking.execute("SELECT pg_notify('other', repeat('a', 7000))", &[]).await.is_ok() {}

    let guard = a.lock(key()).await.expect("free");
    let waiting = tokio::spawn(b.lock(key()).into_future());
    until("queued", async || a.inspect(key()).await.is_ok_and(|status| status.waiting == 1)).await;
    guard.release().await.expect("held");
    let guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
    let revoked = a.force_release(key()).await.expect("no message is needed");
    assert!(matches!(revoked, ForceReleaseReply::Revoked { .. }), "{revoked:?}");
    soon("its next renewal", guard.held_lock().lost()).await;
    until("an error with its cause", async || {
        let builder = environment.builder().connect_timeout(limits::SHORT);
        let error = builder.connect(&environment.url()).await.expect_err("no message can be sent");
        format!("{error:?}").contains("too many notifications in the NOTIFY queue")
    })
    .await;
    drop(listening);
}
