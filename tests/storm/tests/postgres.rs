//! Storms on PostgreSQL, direct and behind PgBouncer: processes are killed and stopped, sessions
//! are killed, and the server crashes.
//!
//! `SCALE=<number>` multiplies the requests of a storm, and `SEED=<number>` repeats those of a run.

use tower_lock_storm::{DatabaseStorm, Route};

fn on(route: Route) -> DatabaseStorm {
    let programs = (env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service"));
    DatabaseStorm { programs, route }
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_two_processes_with_postgres() {
    on(Route::Direct).without_faults().await;
}

/// Guarantee: G2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_postgres_with_killed_and_stopped_processes() {
    on(Route::Direct).with_processes_that_fail().await;
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_a_postgres_whose_sessions_are_killed() {
    on(Route::Direct).with_killed_sessions().await;
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_a_postgres_that_crashes() {
    on(Route::Direct).with_crashes().await;
}

/// With `--long`.
mod long {
    use super::*;

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_two_processes_behind_pgbouncer() {
        on(Route::Pooled).without_faults().await;
    }

    /// Guarantee: G2.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_behind_pgbouncer_with_killed_processes() {
        on(Route::Pooled).with_processes_that_fail().await;
    }

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_behind_pgbouncer_with_killed_sessions() {
        on(Route::Pooled).with_killed_sessions().await;
    }

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_behind_pgbouncer_of_a_postgres_that_crashes() {
        on(Route::Pooled).with_crashes().await;
    }
}
