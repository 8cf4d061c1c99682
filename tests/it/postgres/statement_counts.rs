//! The cost of locks in statements and waits for the disk, counted on the server.

use std::time::Duration;

use futures_util::future::join_all;
use tower_lock::{
    LockKey,
    store::{AcquireReply, AcquireRequest, IfBusy, LockStore},
};
use tower_lock_testkit::{
    costs::{self, Costs},
    limits,
    locks::key,
    skipped,
    wait::until,
};

use crate::support::{Caller, Environment, LONG, environment, own_environment, terms};

async fn counted() -> Option<Environment> {
    let environment = environment().await?;
    let create = "DO $$ BEGIN CREATE EXTENSION pg_stat_statements;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$";
    environment.execute(create).await;
    Some(environment)
}

/// A server whose commits wait for the disk, and which does little else. `None` also if it does not
/// count that.
async fn durable() -> Option<Environment> {
    let environment = own_environment(&["fsync=on", "wal_writer_delay=10s", "autovacuum=off"]).await?;
    if environment.server().disk_waits().is_none() {
        skipped(std::thread::current().name().unwrap_or("a test"), "PostgreSQL 15");
        return None;
    }
    Some(environment)
}

impl Environment {
    /// The calls of the functions of the store, without the sweep.
    async fn statements(&self) -> u64 {
        let query = "SELECT coalesce(sum(calls), 0)::int8 FROM pg_stat_statements \
                     WHERE query LIKE 'SELECT * FROM \"{schema}\".%' AND query NOT LIKE '%.sweep(%'";
        self.value(query).await.try_into().expect("a count")
    }

    /// The waits for the disk until now. A session counts its own when it ends.
    async fn disk_waits(&self, sessions: impl Sized) -> i64 {
        drop(sessions);
        let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tower-lock'";
        until("the sessions end", async || self.value(open).await == 0).await;
        self.value(self.server().disk_waits().expect("counted")).await
    }
}

/// The background writer writes the releases to the disk, and no caller waits for it. A queue entry
/// needs none, either.
#[tokio::test]
async fn lock_and_handoff_wait_once_for_the_disk() {
    let Some(environment) = durable().await else { return };
    const SECTIONS: i64 = 40;
    let before = environment.disk_waits(environment.store().await).await;
    let locks = environment.instance("a").await;
    for _ in 0..SECTIONS {
        locks.try_lock(key()).await.expect("free").release().await.expect("released");
    }
    let after = environment.disk_waits(locks).await;
    let waits = after - before;
    assert!((SECTIONS..SECTIONS + 10).contains(&waits), "{waits} waits for the disk for {SECTIONS} locks");

    let instances = join_all(["a", "b"].map(|name| environment.instance(name))).await;
    join_all(instances.iter().map(async |locks| {
        for _ in 0..SECTIONS / 2 {
            locks.lock(key()).wait(limits::BROKEN).await.expect("a grant").release().await.expect("held");
        }
    }))
    .await;
    let waits = environment.disk_waits(instances).await - after;
    assert!(waits <= SECTIONS + 10, "{waits} waits for the disk for {SECTIONS} sections");
}

/// Guarantee: G21.
#[tokio::test]
async fn locks_on_postgres_cost_the_statements_of_the_table() {
    let Some(environment) = counted().await else { return };
    let row = Costs { servers: 1, lock: 2, handoff: Some(3), renewal: 1, keys_share: true };
    costs::check(row, async || environment.store().await, async || vec![environment.statements().await]).await;
}

/// A caller that does not wait for a busy key does not wait for a call that changes it, either.
#[tokio::test]
async fn try_lock_of_a_busy_key_waits_for_no_call() {
    let Some(environment) = counted().await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let (busy, free) = (LockKey::from(("busy",)), LockKey::from(("free",)));
    let holder = caller.id();
    caller.granted(&busy, &holder, LONG).await;
    let other = environment.client().await;
    let renew =
        format!("BEGIN; SELECT {}.renew('{{{}}}', '{{{holder}}}', '{{60000}}')", environment.schema, busy.as_str());
    other.batch_execute(&renew).await.expect("extended, and not committed");
    let request = |key: &LockKey| {
        AcquireRequest::new(key.clone(), caller.id(), LONG, IfBusy::Fail, terms(), Duration::from_secs(5))
    };
    let before = environment.statements().await;
    for keys in [&[&busy][..], &[&busy, &free]] {
        let replies = join_all(store.acquire(keys.iter().map(|key| request(key)).collect()).into_iter()).await;
        assert!(matches!(replies[0], Ok(AcquireReply::Busy { .. })), "{replies:?}");
        assert!(replies.iter().skip(1).all(|reply| matches!(reply, Ok(AcquireReply::Granted { .. }))), "{replies:?}");
    }
    assert_eq!(environment.statements().await - before, 2, "no key was sent again alone");
    other.batch_execute("COMMIT").await.expect("extended");
}
