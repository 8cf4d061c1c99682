//! Transfers between fifty accounts, each under the locks of two to four of them, in any order: the
//! sum never changes, no account is used twice at a time, and nothing is left.
//!
//! `SCALE=<number>` multiplies their number, and `SEED=<number>` repeats the accounts of a run.

use std::time::Duration;

use tower_lock::LockManager;
use tower_lock_storm::{Bank, Database, Fault, Keys, Route, run_with_faults, scale, seed, transfer};
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
    let all = transfer(&locks, bank.address(), None, Keys::All, seed());
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
    soon("an end", transfer(&locks, bank.address(), None, Keys::First, seed())).await.expect("a bank");
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
    transfers_on(Route::Direct).await;
}

async fn transfers_on(route: Route) {
    let Some(database) = Database::start(&format!("the storm of transfers on {route:?}"), route).await else { return };
    storm_with_kills(&database.url(), 300 * scale()).await;
    database.is_left_clean().await;
}

/// The accounts are in a table of the database that has the locks. A process stops for longer than
/// its leases, in the middle of transactions that have checked their fences: the keys stay locked.
async fn checked_transfers_on(route: Route) {
    let Some(database) = Database::start(&format!("the storm of checks on {route:?}"), route).await else { return };
    let bank = Bank::open_table(&database, 240 * scale()).await;
    storm_with(Fault::Stop(Duration::from_secs(3)), &database.url(), &bank, "table").await;
    let violations = bank.table_violations(&database).await;
    assert!(violations.is_empty(), "{violations:#?}");
    database.is_left_clean().await;
}

/// A killed process leaves its locks for two seconds. The others go on with other accounts.
async fn storm_with_kills(url: &str, wanted: u64) {
    let bank = Bank::open(wanted).await;
    storm_with(Fault::Kill, url, &bank, "memory").await;
    let violations = bank.violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

async fn storm_with(fault: Fault, url: &str, bank: &Bank, accounts: &str) {
    let arguments = [bank.address().to_string(), accounts.to_owned()];
    let program = env!("CARGO_BIN_EXE_teller");
    run_with_faults(fault, program, url, &arguments, PROCESSES, seed(), || bank.progress()).await;
}

/// With `--long`.
mod long {
    use super::*;

    /// Guarantee: G21.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_transfers_behind_pgbouncer_keeps_the_sum() {
        transfers_on(Route::Pooled).await;
    }

    /// Guarantee: G21.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_transfers_on_mysql_keeps_the_sum() {
        transfers_on(Route::Mysql).await;
    }

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_checked_transfers_on_mysql_keeps_the_sum() {
        checked_transfers_on(Route::Mysql).await;
    }

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_checked_transfers_on_postgres_keeps_the_sum() {
        checked_transfers_on(Route::Direct).await;
    }
}
