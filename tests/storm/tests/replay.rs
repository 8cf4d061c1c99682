//! Ten duplicates of each request at three processes that kill themselves, with network faults: one
//! run, and one answer.
//!
//! `KEYS=<number>` sets the number of keys, and `SEED=<number>` repeats the clients and the faults
//! of a run. Their interleaving still varies.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use tower_lock_storm::{ReplayOutcome, ReplayStorm, number_of_keys, seed};
use tower_lock_testkit::{RedisServer, skipped};

/// Returns `None`, with a note on stderr, if there is no server.
async fn storm(finds_answers: bool) -> Option<ReplayOutcome> {
    if !RedisServer::is_available() {
        skipped("the storm of duplicates", "redis-server");
        return None;
    }
    let keys = number_of_keys();
    let crashes = usize::try_from(keys / 30).expect("few").max(3);
    let program = env!("CARGO_BIN_EXE_replayer");
    let storm = ReplayStorm { program, keys, crashes, finds_answers, flag: "--correct", seed: seed() };
    let outcome = storm.run().await;
    outcome.check_coverage(&storm);
    Some(outcome)
}

/// Guarantee: G18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_duplicates_runs_each_key_once() {
    let Some(outcome) = storm(true).await else { return };
    let violations = outcome.violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

/// A killed process may have committed its work without a record: that key alone runs again.
/// Guarantee: G18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_duplicates_runs_a_key_again_only_after_a_kill() {
    let Some(outcome) = storm(false).await else { return };
    let violations = outcome.violations();
    assert!(violations.is_empty(), "{violations:#?}");
}
