//! Ten duplicates of each request at four processes that kill themselves, with network faults: one
//! run, and one answer.
//!
//! `SCALE=<number>` multiplies the number of keys, and `SEED=<number>` repeats the clients and the
//! faults of a run. Their interleaving still varies.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use tower_lock_storm::{Database, ReplayOutcome, ReplayStorm, Route, scale, seed, turn};
use tower_lock_testkit::{RedisServer, skipped};

/// Returns `None`, with a note on stderr, if there is no server.
async fn storm(flag: &'static str, finds_answers: bool) -> Option<ReplayOutcome> {
    if !RedisServer::is_available() {
        skipped("the storm of duplicates", "redis-server");
        return None;
    }
    let _turn = turn().await;
    let storm = ReplayStorm { flag, ..parameters(finds_answers) };
    let outcome = storm.run().await;
    outcome.check_coverage(&storm);
    Some(outcome)
}

fn parameters(finds_answers: bool) -> ReplayStorm {
    let keys = 30 * scale();
    let crashes = usize::try_from(keys / 30).expect("few").max(3);
    let program = env!("CARGO_BIN_EXE_replayer");
    ReplayStorm { program, keys, crashes, finds_answers, flag: "--correct", seed: seed() }
}

/// The same on a database, whose sessions are killed in place of network faults.
async fn storm_on(route: Route, finds_answers: bool) {
    let _turn = turn().await;
    let Some(database) = Database::start(&format!("the storm of duplicates on {route:?}"), route).await else { return };
    let storm = parameters(finds_answers);
    let outcome = storm.run_on(&database).await;
    outcome.check_coverage(&storm);
    let violations = outcome.violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

///
/// Guarantee: G18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_duplicates_runs_each_key_once() {
    let Some(outcome) = storm("--correct", true).await else { return };
    let violations = outcome.violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

/// The requests have no key, and differ in their path and their body. As below, a kill excuses a
/// second run.
///
/// Guarantee: G18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_equal_requests_runs_each_once() {
    let Some(outcome) = storm("--equal", false).await else { return };
    let violations = outcome.violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

/// A killed process may have committed its work without a record, and a record may be lost: those
/// keys alone run again.
///
/// Guarantee: G18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_duplicates_runs_a_key_again_only_after_a_kill() {
    let Some(outcome) = storm("--correct", false).await else { return };
    let violations = outcome.violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

///
/// Guarantee: G18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_duplicates_on_postgres_runs_each_key_once() {
    storm_on(Route::Direct, true).await;
}

/// A killed process may have committed its work without a record, and a record may be lost: those
/// keys alone run again.
///
/// Guarantee: G18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_postgres_runs_a_key_again_only_after_a_kill() {
    storm_on(Route::Direct, false).await;
}

/// With `--long`.
mod long {
    use super::*;

    ///
    /// Guarantee: G18.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_duplicates_behind_pgbouncer_runs_each_once() {
        storm_on(Route::Pooled, true).await;
    }

    ///
    /// Guarantee: G18.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_duplicates_on_mysql_runs_each_key_once() {
        storm_on(Route::Mysql, true).await;
    }

    /// A killed process may have committed its work without a record, and a record may be lost:
    /// those keys alone run again.
    /// Guarantee: G18.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_mysql_runs_a_key_again_only_after_a_kill() {
        storm_on(Route::Mysql, false).await;
    }
}
