//! The cost of locks in statements and waits for the disk, counted on the server.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;
use tower_lock::{
    LockKey, LockManager,
    store::{AcquireReply, AcquireRequest, IfBusy, LockStore, RenewReply, RenewRequest},
};
use tower_lock_testkit::{locks::key, skipped, wait::until};

use crate::support::{Caller, Environment, LONG, own_environment, terms};

async fn counted() -> Option<Environment> {
    let environment = own_environment(&["max_wal_size=1GB", "checkpoint_timeout=1h", "autovacuum=off"]).await?;
    environment.execute("CREATE EXTENSION pg_stat_statements").await;
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
    async fn statements(&self) -> i64 {
        let query = "SELECT coalesce(sum(calls), 0)::int8 FROM pg_stat_statements \
                     WHERE query LIKE 'SELECT * FROM \"{schema}\".%' AND query NOT LIKE '%.sweep(%'";
        self.value(query).await
    }

    /// The waits for the disk until now. A session counts its own when it ends.
    async fn disk_waits(&self, sessions: impl Sized) -> i64 {
        drop(sessions);
        let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tower-lock'";
        until("the sessions end", async || self.value(open).await == 0).await;
        self.value(self.server().disk_waits().expect("counted")).await
    }
}

#[tokio::test]
async fn lock_costs_two_statements() {
    let Some(environment) = counted().await else { return };
    let locks = environment.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("released");
    let before = environment.statements().await;
    for _ in 0..50 {
        locks.try_lock(key()).await.expect("free").release().await.expect("released");
    }
    assert_eq!(environment.statements().await - before, 100);
}

/// The background writer writes the releases to the disk, and no caller waits for it.
#[tokio::test]
async fn lock_waits_once_for_the_disk() {
    let Some(environment) = durable().await else { return };
    let before = environment.disk_waits(environment.store().await).await;
    let locks = environment.instance("a").await;
    for _ in 0..50 {
        locks.try_lock(key()).await.expect("free").release().await.expect("released");
    }
    let waits = environment.disk_waits(locks).await - before;
    assert!((50..60).contains(&waits), "{waits} waits for the disk for 50 locks");
}

/// A release and a queue entry need none.
#[tokio::test]
async fn handoff_waits_once_for_the_disk() {
    let Some(environment) = durable().await else { return };
    let before = environment.disk_waits(environment.store().await).await;
    let instances = join_all(["a", "b"].map(|name| environment.instance(name))).await;
    const SECTIONS: i64 = 100;
    alternate(&instances, SECTIONS).await;
    let waits = environment.disk_waits(instances).await - before;
    assert!(waits <= SECTIONS + 10, "{waits} waits for the disk for {SECTIONS} sections");
}

/// Instances that hand a key to each other.
async fn alternate(instances: &[LockManager], sections: i64) {
    join_all(instances.iter().map(async |locks| {
        for _ in 0..sections / i64::try_from(instances.len()).expect("a few") {
            locks.lock(key()).wait(Duration::from_secs(60)).await.expect("a grant").release().await.expect("held");
        }
    }))
    .await;
}

#[tokio::test]
async fn several_free_keys_cost_two_statements() {
    let Some(environment) = counted().await else { return };
    let locks = environment.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("released");
    for count in [1, 2, 16, 64_u64] {
        let before = environment.statements().await;
        for round in 0..5 {
            let keys = (0..count).map(|number| ("several", number));
            let call = if round % 2 == 0 { locks.lock_all(keys) } else { locks.try_lock_all(keys) };
            call.await.expect("free").release().await.expect("released");
        }
        assert_eq!(environment.statements().await - before, 10, "{count} keys");
    }
}

#[tokio::test]
async fn handoff_between_instances_costs_three_statements() {
    let Some(environment) = counted().await else { return };
    let instances = join_all(["a", "b"].map(|name| environment.instance(name))).await;
    for locks in &instances {
        locks.lock(key()).await.expect("free").release().await.expect("released");
    }
    let (before, began) = (environment.statements().await, Instant::now());
    const SECTIONS: i64 = 100;
    alternate(&instances, SECTIONS).await;
    let statements = environment.statements().await - before;
    // Waiters poll about once a second.
    let polls = 4 * i64::try_from(began.elapsed().as_secs() + 1).expect("short");
    assert!(statements <= 3 * SECTIONS + polls, "{statements} statements for {SECTIONS} sections");
}

#[tokio::test]
async fn thousand_renewals_cost_eight_statements() {
    let Some(environment) = counted().await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let held: Vec<_> = (0..1000).map(|n| (LockKey::from(("held", n)), caller.id())).collect();
    join_all(held.iter().map(|(key, id)| caller.granted(key, id, LONG))).await;
    let before = environment.statements().await;
    // As the watchdog does.
    for batch in held.chunks(128) {
        let renew = |(key, id): &(LockKey, _)| RenewRequest::new(key.clone(), Clone::clone(id), LONG);
        let replies = store.renew(batch.iter().map(renew).collect()).await.expect("a reply");
        assert_eq!(replies, vec![RenewReply::Extended; batch.len()]);
    }
    assert_eq!(environment.statements().await - before, 8);
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
