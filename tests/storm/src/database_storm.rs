//! Storms on a database: processes are killed and stopped, sessions are killed, and the server
//! crashes.

use tokio::time::sleep;
use tower_lock_testkit::wait::ms;

use crate::{Database, Environment, Route, Workload, scale, seed, turn};

/// A storm on a database of its own. It is skipped, with a note on stderr, if a server is not
/// installed.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseStorm {
    /// The programs of the checker and the service.
    pub programs: (&'static str, &'static str),
    /// The database.
    pub route: Route,
}

/// A killed process blocks its keys for it, and so does a release that a crash loses.
const SHORT_LEASE: &str = "--lease-ms=3000";

/// Three seconds of requests.
const REQUESTS: u64 = 1_200;

impl DatabaseStorm {
    async fn environment(self, storm: &str, processes: usize, flags: &[&str]) -> Option<Environment> {
        let Self { programs, route } = self;
        let database = Database::start(&format!("the storm {storm} on {route:?}"), route).await?;
        let flags = [&["--correct"], flags].concat();
        Some(Environment::on(database, programs, processes, &flags, seed()).await)
    }

    /// Without faults nothing is aborted.
    ///
    /// # Panics
    ///
    /// Panics if a check fails.
    pub async fn without_faults(self) {
        let _turn = turn().await;
        let Some(environment) = self.environment("without faults", 2, &["--patient"]).await else { return };
        let storm = environment.storm(REQUESTS).await;
        let outcome = environment.end(storm).await;
        outcome.check(&[]);
        outcome.check_nothing_aborted();
        outcome.check_connections();
    }

    /// One process is killed, and one stops for longer than its leases.
    ///
    /// # Panics
    ///
    /// Panics if a check fails.
    pub async fn with_processes_that_fail(self) {
        let _turn = turn().await;
        let Some(environment) = self.environment("with killed processes", 4, &[SHORT_LEASE]).await else { return };
        let storm = environment.storm_until(Workload::with_slow_handlers, environment.kill_and_stop()).await;
        let outcome = environment.end(storm).await;
        outcome.check(&[]);
        assert!(outcome.summary.broken_before > 0, "{:#?}", outcome.summary);
    }

    /// All sessions are killed again and again.
    ///
    /// # Panics
    ///
    /// Panics if a check fails.
    pub async fn with_killed_sessions(self) {
        let _turn = turn().await;
        let Some(environment) = self.environment("with killed sessions", 4, &[]).await else { return };
        let mut rng = fastrand::Rng::with_seed(!environment.seed);
        let mut killed = 0;
        let kills = async {
            loop {
                sleep(ms(rng.u64(50..500))).await;
                killed += environment.database().kill_sessions().await;
            }
        };
        let storm = tokio::select! {
            storm = environment.storm(REQUESTS) => storm,
            () = kills => unreachable!("they have no end"),
        };
        let outcome = environment.end(storm).await;
        outcome.check(&[]);
        outcome.check_nothing_aborted();
        assert!(killed > 0);
        assert!(outcome.summary.answers(200) > 0, "{:#?}", outcome.summary);
    }

    /// The server crashes again and again. A grant that was acknowledged is on the disk.
    ///
    /// # Panics
    ///
    /// Panics if a check fails.
    pub async fn with_crashes(self) {
        let _turn = turn().await;
        let Some(environment) = self.environment("with crashes", 4, &[SHORT_LEASE]).await else { return };
        let crashes = async {
            for _ in 0..3 * scale() {
                sleep(ms(700)).await;
                environment.database().crash(ms(200)).await;
            }
        };
        // Handlers that outlast the crash: their locks must be there after it.
        let storm = environment.storm_until(Workload::with_slow_handlers, crashes).await;
        let outcome = environment.end(storm).await;
        outcome.check(&[]);
        // It may be up again before a request is rejected.
        assert!(outcome.summary.answers(200) > 0, "{:#?}", outcome.summary);
    }
}
