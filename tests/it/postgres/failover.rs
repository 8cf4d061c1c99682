//! The primary server is lost, and its standby is promoted.

use std::{sync::Arc, time::Duration};

use tokio_postgres::{Client, NoTls};
use tower_lock::{
    LockKey, PostgresStore,
    store::{AcquireReply, IfBusy, Record},
};
use tower_lock_testkit::{
    PostgresServer,
    wait::{ms, until},
};

use crate::support::{Caller, Environment, LONG, own_environment};

/// A primary server with a standby.
struct Pair {
    primary: Environment,
    standby: PostgresServer,
}

impl Pair {
    async fn new() -> Option<Self> {
        let primary = own_environment(&[]).await?;
        primary.store().await;
        let standby = primary.server().start_standby().await;
        let streams = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
        until("replication", async || primary.value(streams).await == 1).await;
        Some(Self { primary, standby })
    }

    /// The store that a service has: the URL names both servers.
    async fn store(&self) -> Arc<PostgresStore> {
        let [first, second] =
            [self.primary.server(), &self.standby].map(|server| format!("127.0.0.1:{}", server.port()));
        let url = format!("postgres://postgres@{first},{second}/postgres");
        Arc::new(PostgresStore::connect(&url).await.expect("one of them is up"))
    }

    async fn standby(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.standby.url(), NoTls).await.expect("it is up");
        tokio::spawn(connection);
        client
    }

    /// Detaches the standby: it receives nothing more.
    async fn detach(&self) {
        let standby = self.standby().await;
        standby.batch_execute("ALTER SYSTEM SET primary_conninfo = ''").await.expect("the superuser may");
        standby.batch_execute("SELECT pg_reload_conf()").await.expect("the superuser may");
        let streams = "SELECT count(*) FROM pg_stat_replication";
        until("no replication", async || self.primary.value(streams).await == 0).await;
    }

    /// Ends the primary server, and promotes the standby.
    async fn fail_over(&self) {
        self.primary.server().crash().await;
        self.standby().await.execute("SELECT pg_promote()", &[]).await.expect("the superuser may");
    }
}

/// The primary server waits for the standby at each commit of a grant and of a record.
///
/// Guarantee: G1, G11, G18.
#[tokio::test]
async fn synchronous_standby_has_each_acknowledged_grant() {
    let Some(pair) = Pair::new().await else { return };
    pair.primary.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'").await;
    pair.primary.execute("SELECT pg_reload_conf()").await;
    let is_synchronous = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
    until("synchronous", async || pair.primary.value(is_synchronous).await == 1).await;
    let caller = Caller::new(&pair.store().await, "a");
    let acknowledged = async {
        let (mut held, mut recorded) = (Vec::new(), Vec::new());
        for number in 0.. {
            let (key, id) = (LockKey::from(("key", number)), caller.id());
            let Ok(AcquireReply::Granted { fence }) = caller.acquire(&key, &id, LONG, IfBusy::Fail).await else {
                break;
            };
            if number % 2 == 0 {
                held.push((key, fence));
            } else if caller.try_release_with(&key, &id, Record::new("paid", None)).await.is_ok() {
                recorded.push(key);
            }
        }
        (held, recorded)
    };
    let fails = async {
        until("some are granted", async || pair.primary.value("SELECT count(*) FROM {schema}.locks").await > 40).await;
        pair.detach().await;
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        until("a commit waits for the standby", async || pair.primary.value(waits).await > 0).await;
    };
    let ((held, recorded), ()) = tokio::join!(acknowledged, fails);
    pair.fail_over().await;
    assert!(held.len() > 10 && recorded.len() > 10, "{} and {}", held.len(), recorded.len());
    let other = Caller::new(&pair.store().await, "b");
    for (key, fence) in held {
        let reply = other.acquire(&key, &other.id(), LONG, IfBusy::Fail).await.expect("a reply");
        assert!(matches!(reply, AcquireReply::Busy { .. }), "{key} with fence {fence}: {reply:?}");
    }
    for key in recorded {
        let reply = other.acquire_unless_recorded(&key, &other.id()).await;
        assert_eq!(reply, AcquireReply::Recorded(Record::new("paid", None)), "{key}");
    }
}

/// Guarantee: G1, G11.
#[tokio::test]
async fn asynchronous_standby_may_lack_the_newest_grants() {
    let Some(pair) = Pair::new().await else { return };
    let store = pair.store().await;
    let caller = Caller::new(&store, "a");
    let [old, new] = ["old", "new"].map(|name| LockKey::from((name,)));
    let (first, second) = (caller.id(), caller.id());
    let fence = caller.granted(&old, &first, LONG).await;
    let has_old = async || {
        let rows = pair.standby().await.query("SELECT FROM tower_lock.locks WHERE fence > 0", &[]).await;
        rows.expect("a standby may be read").len() == 1
    };
    until("the standby has the grant", has_old).await;
    pair.detach().await;
    let lost = caller.granted(&new, &second, LONG).await;
    pair.fail_over().await;

    let other = Caller::new(&pair.store().await, "b");
    let reply = other.acquire(&old, &other.id(), LONG, IfBusy::Fail).await.expect("a reply");
    assert!(matches!(reply, AcquireReply::Busy { .. }), "it was replicated: {reply:?}");
    let next = other.granted(&new, &other.id(), LONG).await;
    assert!(next > lost && lost > fence, "{next} after {lost}: the fence distinguishes the writes of two holders");
    // The store of before goes on at the promoted server, and learns what it has lost there.
    let renewed = async || caller.acquire(&old, &first, LONG, IfBusy::Fail).await.is_ok();
    until("the store finds the promoted server", renewed).await;
    let reply = caller.acquire(&new, &second, LONG, IfBusy::Fail).await.expect("a reply");
    assert!(matches!(reply, AcquireReply::Busy { .. }), "{reply:?}");
    caller.release(&old, &first, Duration::ZERO).await;
    caller.granted(&old, &caller.id(), ms(500)).await;
}
