//! Storms on PostgreSQL, direct and behind PgBouncer: processes are killed and stopped, sessions
//! are killed, and the server crashes.
//!
//! `SCALE=<number>` multiplies the requests of a storm, and `SEED=<number>` repeats those of a run.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use tokio::time::sleep;
use tower_lock_storm::{Database, Environment, Route, Storm, Workload, seed, turn};
use tower_lock_testkit::wait::ms;

const PROGRAMS: (&str, &str) = (env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service"));

/// A killed process blocks its keys for it, and so does a release that a crash loses.
const SHORT_LEASE: &str = "--lease-ms=3000";

/// Three seconds of requests.
const REQUESTS: u64 = 1_200;

/// Returns `None`, with a note on stderr, if a server is not installed.
async fn environment(test: &str, route: Route, processes: usize, flags: &[&str]) -> Option<Environment> {
    let database = Database::start(test, route).await?;
    let flags = [&["--correct"], flags].concat();
    Some(Environment::on(database, PROGRAMS, processes, &flags, seed()).await)
}

/// A storm beside faults, until its requests have ended.
async fn storm_beside(environment: &Environment, faults: impl Future<Output = ()>) -> Storm {
    tokio::select! {
        storm = environment.storm(REQUESTS) => storm,
        () = faults => unreachable!("they have no end"),
    }
}

async fn storm_without_faults(route: Route) {
    let _turn = turn().await;
    let Some(environment) = environment("the storm on PostgreSQL", route, 2, &["--patient"]).await else { return };
    let storm = environment.storm(REQUESTS).await;
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
    outcome.check_nothing_aborted();
    outcome.check_connections();
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_two_processes_with_postgres() {
    storm_without_faults(Route::Direct).await;
}

/// One process is killed, and one stops for longer than its leases.
async fn storm_with_processes_that_fail(route: Route) {
    let _turn = turn().await;
    let test = "the storm on PostgreSQL with killed processes";
    let Some(environment) = environment(test, route, 4, &[SHORT_LEASE]).await else { return };
    let storm = environment.storm_until(Workload::with_slow_handlers, environment.kill_and_stop()).await;
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
    assert!(outcome.summary.broken_before > 0, "{:#?}", outcome.summary);
}

/// Guarantee: G2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_postgres_with_killed_and_stopped_processes() {
    storm_with_processes_that_fail(Route::Direct).await;
}

async fn storm_with_killed_sessions(route: Route) {
    let _turn = turn().await;
    let test = "the storm on PostgreSQL with killed sessions";
    let Some(environment) = environment(test, route, 4, &[]).await else { return };
    let mut rng = fastrand::Rng::with_seed(!environment.seed);
    let mut killed = 0;
    let kills = async {
        loop {
            sleep(ms(rng.u64(50..500))).await;
            killed += environment.database().kill_sessions().await;
        }
    };
    let storm = storm_beside(&environment, kills).await;
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
    outcome.check_nothing_aborted();
    assert!(killed > 0);
    assert!(outcome.summary.answers(200) > 0, "{:#?}", outcome.summary);
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_a_postgres_whose_sessions_are_killed() {
    storm_with_killed_sessions(Route::Direct).await;
}

/// A grant that was acknowledged is on the disk.
async fn storm_with_crashes(route: Route) {
    let _turn = turn().await;
    let test = "the storm on a PostgreSQL that crashes";
    let Some(environment) = environment(test, route, 4, &[SHORT_LEASE]).await else { return };
    let is_over = AtomicBool::new(false);
    let storm = async {
        let storm = environment.storm(REQUESTS).await;
        is_over.store(true, SeqCst);
        storm
    };
    // Each of them to its end: the server must be up after the last one.
    let crash = async {
        while !is_over.load(SeqCst) {
            sleep(ms(700)).await;
            environment.database().crash(ms(200)).await;
        }
    };
    let (storm, ()) = tokio::join!(storm, crash);
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
    // It may be up again before a request is rejected.
    assert!(outcome.summary.answers(200) > 0, "{:#?}", outcome.summary);
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_a_postgres_that_crashes() {
    storm_with_crashes(Route::Direct).await;
}

/// With `--long`.
mod long {
    use super::*;

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_two_processes_behind_pgbouncer() {
        storm_without_faults(Route::Pooled).await;
    }

    /// Guarantee: G2.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_behind_pgbouncer_with_killed_processes() {
        storm_with_processes_that_fail(Route::Pooled).await;
    }

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_behind_pgbouncer_with_killed_sessions() {
        storm_with_killed_sessions(Route::Pooled).await;
    }

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_behind_pgbouncer_of_a_postgres_that_crashes() {
        storm_with_crashes(Route::Pooled).await;
    }
}
