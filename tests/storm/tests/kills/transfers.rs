//! Transfers between fifty accounts, each under the locks of two to four of them, in any order: the
//! sum never changes, no account is used twice at a time, and nothing is left.
//!
//! `SCALE=<number>` multiplies their number, and `SEED=<number>` repeats the accounts of a run.

use tower_lock::LockManager;
use tower_lock_storm::{Bank, Database, Keys, Route, run_with_kills, scale, seed, transfer};
use tower_lock_testkit::{
    RedisServer, limits, skipped,
    wait::{soon, until},
};

const PROCESSES: u64 = 3;

/// Guarantee: G21.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_transfers_in_one_process_keeps_the_sum() {
    let locks = LockManager::in_memory();
    let bank = Bank::open(1_000 * scale()).await;
    let all = transfer(&locks, bank.address(), Keys::All, seed());
    soon("the end of all transfers", all).await.expect("a bank");
    let violations = bank.violations();
    assert!(violations.is_empty(), "{violations:#?}");
    assert_eq!(locks.shutdown(limits::BROKEN).await, 0);
    assert_eq!(locks.size(), (0, 0));
}

/// The bank detects transfers that overlap.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfers_under_one_of_their_keys_lose_money() {
    let locks = LockManager::in_memory();
    let bank = Bank::open(1_000).await;
    soon("an end", transfer(&locks, bank.address(), Keys::First, seed())).await.expect("a bank");
    let violations = bank.violations();
    let is_found = |text: &str| violations.iter().any(|violation| violation.contains(text));
    assert!(is_found("beside") && is_found("the sum was"), "{violations:#?}");
}

/// Guarantee: G21.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_transfers_with_kills_keeps_the_sum() {
    if !RedisServer::is_available() {
        return skipped("the storm of transfers with kills", "redis-server");
    }
    let redis = RedisServer::start().await;
    storm_with_kills(&redis.url(), 600 * scale()).await;
    // The locks of killed processes expire, and their queue entries with them.
    let mut connection = redis.connect().await;
    let mut locks_left = async || {
        let keys = connection.command(&["KEYS", "*account*"]).await.expect("it is up");
        format!("{keys:?}").contains("account")
    };
    until("no lock is left", async || !locks_left().await).await;
}

/// Guarantee: G21.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_transfers_on_postgres_keeps_the_sum() {
    transfers_on_postgres(Route::Direct).await;
}

async fn transfers_on_postgres(route: Route) {
    let Some(database) = Database::start("the storm of transfers on PostgreSQL", route).await else { return };
    storm_with_kills(&database.url(), 300 * scale()).await;
    database.is_left_clean().await;
}

/// A killed process leaves its locks for two seconds. The others go on with other accounts.
async fn storm_with_kills(url: &str, wanted: u64) {
    let bank = Bank::open(wanted).await;
    let arguments = [bank.address().to_string()];
    run_with_kills(env!("CARGO_BIN_EXE_teller"), url, &arguments, PROCESSES, seed(), || bank.progress()).await;
    let violations = bank.violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

/// With `--long`.
mod long {
    use super::*;

    /// Guarantee: G21.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_transfers_behind_pgbouncer_keeps_the_sum() {
        transfers_on_postgres(Route::Pooled).await;
    }
}
