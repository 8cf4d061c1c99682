//! Fences over deleted rows, restarts and clocks that were set back.

use std::time::Duration;

use tower_lock::{LockKey, store::IfBusy};

use crate::support::{Caller, LONG, environment, own_environment};

/// A day ahead of the clock: as if the clock was set back after the grant.
const AHEAD: &str = "UPDATE {schema}.locks SET fence = fence + 86400000000, until = now() - interval '2 minutes'";

/// Guarantee: G11.
#[tokio::test]
async fn fences_rise_over_a_sweep_of_their_rows() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("swept",)));
    let id = caller.id();
    let first = caller.granted(&key, &id, LONG).await;
    environment.execute(AHEAD).await;
    environment.execute("SELECT * FROM {schema}.sweep('', 1000)").await;
    assert_eq!(environment.value("SELECT count(*) FROM {schema}.locks").await, 0, "the row is deleted");
    let next = caller.granted(&key, &caller.id(), LONG).await;
    assert!(next > first + 86_400_000_000, "{next} after {first} and a day");
}

/// Guarantee: G11.
#[tokio::test]
async fn fences_rise_over_a_restart() {
    let Some(environment) = own_environment(&[]).await else { return };
    let store = environment.store().await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("restarted",)));
    caller.granted(&key, &caller.id(), LONG).await;
    environment.execute(AHEAD).await;
    let first = environment.value("SELECT fence FROM {schema}.locks").await;
    environment.crash().await;
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let next = caller.granted(&key, &caller.id(), LONG).await;
    assert!(next > first.unsigned_abs(), "{next} after {first}");
}

#[tokio::test]
async fn sweep_keeps_rows_that_are_in_use() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let caller = Caller::new(&store, "a");
    let key = |name: &'static str| LockKey::from(("swept", name));
    let [held, old, pinned, waited] = ["held", "old", "pinned", "waited"].map(key);
    for key in [&held, &old, &pinned, &waited] {
        caller.granted(key, &caller.id(), LONG).await;
    }
    caller.acquire(&waited, &caller.id(), LONG, IfBusy::Enqueue).await.expect("a reply");
    environment
        .execute("UPDATE {schema}.locks SET until = now() - interval '2 minutes' WHERE key <> 'swept:held'")
        .await;
    let transaction = environment.client().await;
    let read = "BEGIN; SELECT 1 FROM {schema}.locks WHERE key = 'swept:pinned' FOR KEY SHARE";
    environment.run(&transaction, read).await;
    environment.execute("SELECT * FROM {schema}.sweep('', 1000)").await;
    let kept = environment.value("SELECT count(*) FROM {schema}.locks").await;
    let is_deleted = environment.value("SELECT count(*) FROM {schema}.locks WHERE key = 'swept:old'").await == 0;
    assert_eq!((kept, is_deleted), (3, true));
}

/// The next lock of the key writes no index.
#[tokio::test]
async fn sweep_keeps_rows_that_were_used_lately() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("released",)));
    let id = caller.id();
    caller.granted(&key, &id, LONG).await;
    caller.release(&key, &id, Duration::ZERO).await;
    let mut left = Vec::new();
    for age in ["30 seconds", "2 minutes"] {
        environment.execute(&format!("UPDATE {{schema}}.locks SET since = now() - interval '{age}'")).await;
        environment.execute("SELECT * FROM {schema}.sweep('', 1000)").await;
        left.push(environment.value("SELECT count(*) FROM {schema}.locks").await);
    }
    assert_eq!(left, [1, 0]);
}

/// One call reads a page, and says where the next one begins.
#[tokio::test]
async fn sweep_is_bounded() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    environment
        .execute(
            "INSERT INTO {schema}.locks (key, fence, until) SELECT 'k' || n, 7, 'epoch' FROM generate_series(10, 34) n",
        )
        .await;
    let mut left = Vec::new();
    for after in ["", "k19", "k29"] {
        environment.execute(&format!("SELECT * FROM {{schema}}.sweep('{after}', 10)")).await;
        left.push(environment.value("SELECT count(*) FROM {schema}.locks").await);
    }
    assert_eq!(left, [15, 5, 0]);
    assert_eq!(environment.value("SELECT fence FROM {schema}.floor").await, 7);
}

/// An answer lives for a day, and there may be a million of them.
#[tokio::test]
async fn sweep_reads_only_records_that_have_expired() {
    let Some(environment) = environment().await else { return };
    environment.store().await;
    let records = "INSERT INTO {schema}.records (key, id, head, until) \
                   SELECT n, 'a:1:1', '', now() + n * interval '1 minute' FROM generate_series(-10, 20000) n; \
                   ANALYZE {schema}.records";
    environment.execute(records).await;
    let client = environment.client().await;
    let sweep = environment.named("EXPLAIN (ANALYZE, BUFFERS) SELECT * FROM {schema}.sweep('', 1000)");
    let mut pages = Vec::new();
    for _ in 0..3 {
        let plan = client.query(&sweep, &[]).await.expect("a plan");
        let lines: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
        let buffers = lines.iter().find_map(|line| line.trim().strip_prefix("Buffers: shared hit="));
        let hits = buffers.and_then(|rest| rest.split(' ').next()).and_then(|hits| hits.parse::<u64>().ok());
        pages.push(hits.unwrap_or_else(|| panic!("{lines:?}")));
    }
    assert_eq!(
        environment.value("SELECT count(*) FROM {schema}.records").await,
        20_000,
        "the expired ones are deleted"
    );
    // The first calls also read the catalog. The table has some 150 pages.
    assert!(pages[2] < 50, "{pages:?}");
}
