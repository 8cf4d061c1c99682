//! The primary server is lost, and its standby is promoted.

use std::{sync::Arc, time::Duration};

use tokio_postgres::Client;
use tower_lock::{
    LockKey, PostgresStore,
    store::{AcquireReply, IfBusy, PostgresStoreBuilder, Record, ReleaseReply},
};
use tower_lock_testkit::{PostgresServer, limits, wait::until};

use crate::support::{Caller, Environment, LONG, connect, own_environment};

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
    async fn store(&self, builder: PostgresStoreBuilder) -> Arc<PostgresStore> {
        let [first, second] =
            [self.primary.server(), &self.standby].map(|server| format!("127.0.0.1:{}", server.port()));
        let url = format!("postgres://postgres@{first},{second}/postgres");
        self.primary.connect(builder, &url).await
    }

    async fn standby(&self) -> Client {
        connect(&self.standby.url()).await
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
    let caller = Caller::new(&pair.store(pair.primary.builder()).await, "a");
    let impatient = Caller::new(&pair.store(pair.primary.builder().call_timeout(limits::SHORT)).await, "a");
    let key = |name| LockKey::from((name,));
    let grant = async |name| {
        let id = caller.id();
        caller.granted(&key(name), &id, LONG).await;
        (key(name), id)
    };
    let ((held, _), (paid, first), (unpaid, second)) =
        (grant("held").await, grant("paid").await, grant("unpaid").await);
    assert_eq!(caller.release_with(&paid, &first, record()).await, ReleaseReply::Freed);
    pair.detach().await;
    let reply = impatient.acquire(&key("not held"), &caller.id(), LONG, IfBusy::Fail).await;
    assert!(reply.is_err(), "only the primary server has the grant, and it is acknowledged: {reply:?}");
    let reply = impatient.try_release_with(&unpaid, &second, record()).await;
    assert!(reply.is_err(), "only the primary server has the record, and it is acknowledged: {reply:?}");
    pair.fail_over().await;
    let other = Caller::new(&pair.store(pair.primary.builder()).await, "b");
    for key in [held, unpaid] {
        let reply = other.acquire(&key, &other.id(), LONG, IfBusy::Fail).await.expect("a reply");
        assert!(matches!(reply, AcquireReply::Busy { .. }), "{key}: {reply:?}");
    }
    assert_eq!(other.acquire_unless_recorded(&paid, &other.id()).await, AcquireReply::Recorded(record()));
    other.granted(&key("not held"), &other.id(), LONG).await;
}

fn record() -> Record {
    Record::new("paid", None)
}

/// Guarantee: G1, G11.
#[tokio::test]
async fn asynchronous_standby_may_lack_the_newest_grants() {
    let Some(pair) = Pair::new().await else { return };
    let store = pair.store(pair.primary.builder()).await;
    let caller = Caller::new(&store, "a");
    let [old, new] = ["old", "new"].map(|name| LockKey::from((name,)));
    let (first, second) = (caller.id(), caller.id());
    let fence = caller.granted(&old, &first, LONG).await;
    let (standby, granted) = (pair.standby().await, pair.primary.named("SELECT FROM {schema}.locks WHERE fence > 0"));
    let has_old = async || standby.query(&granted, &[]).await.expect("a standby may be read").len() == 1;
    until("the standby has the grant", has_old).await;
    pair.detach().await;
    let lost = caller.granted(&new, &second, LONG).await;
    pair.fail_over().await;

    let other = Caller::new(&pair.store(pair.primary.builder()).await, "b");
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
    caller.granted(&old, &caller.id(), LONG).await;
}
