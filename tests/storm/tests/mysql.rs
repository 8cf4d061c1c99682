//! Storms on MariaDB: processes are killed and stopped, sessions are killed, and the server
//! crashes.
//!
//! `SCALE=<number>` multiplies the requests of a storm, and `SEED=<number>` repeats those of a run.

use tower_lock_storm::{DatabaseStorm, Route};

const STORM: DatabaseStorm =
    DatabaseStorm { programs: (env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service")), route: Route::Mysql };

/// With `--long`.
mod long {
    use super::*;

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_two_processes_with_mysql() {
        STORM.without_faults().await;
    }

    /// Guarantee: G2.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_mysql_with_killed_and_stopped_processes() {
        STORM.with_processes_that_fail().await;
    }

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_a_mysql_whose_sessions_are_killed() {
        STORM.with_killed_sessions().await;
    }

    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_a_mysql_that_crashes() {
        STORM.with_crashes().await;
    }
}
