//! Failovers by Sentinel, of three kinds, beside concurrent requests.
//!
//! Without `min_replicas` a failover may lose a lock. Its overlaps are counted and printed, and the
//! check of the fence refuses the stale writes. With `min_replicas` there is no overlap.
//!
//! `SCALE=<number>` multiplies the failovers, and `SEED=<number>` repeats the requests of a run.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use tokio::time::sleep;
use tower_lock_storm::{Environment, Workload, scale, seed};
use tower_lock_testkit::{
    RedisServer, SentinelGroup, skipped,
    wait::{ms, until},
};

const PROGRAMS: (&str, &str) = (env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service"));

/// The failure of the master.
#[derive(Clone, Copy, Debug)]
enum Failure {
    /// It is killed, and its newest writes have not reached the replica.
    Killed,
    /// It is stopped, and continues as a master when another one was promoted.
    Stopped,
    /// The sentinels cannot reach it. Its clients can, and its replica follows it until the
    /// failover.
    Separated,
}

/// Guarantee: G1, G5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_with_failovers_and_min_replicas() {
    // In a short run the two kinds that leave two masters, or a loss.
    failovers(1, &[Failure::Killed, Failure::Separated], &[]).await;
}

async fn failovers(min_replicas: usize, failures: &[Failure], excused: &[&str]) {
    if !RedisServer::is_available() {
        return skipped("the storm with failovers", "redis-server");
    }
    let mut group = SentinelGroup::start(1).await;
    // A grant that is lost, or not acknowledged, may block its key for a lease.
    let url = format!("{}?min_replicas={min_replicas}", group.url());
    let environment = Environment::at(PROGRAMS, &url, &["--correct", "--lease-ms=3000"], seed()).await;
    // Another sequence than that of the requests.
    let mut rng = fastrand::Rng::with_seed(!environment.seed);
    let all_failures = async {
        for failure in (0..scale()).flat_map(|_| failures) {
            sleep(ms(rng.u64(200..800))).await;
            fail(&mut group, *failure, rng.u64(0..500)).await;
            let served = environment.served();
            until("requests are served again", async || environment.served() > served + 20).await;
        }
    };
    let storm = environment.storm_until(Workload::with_slow_handlers, all_failures).await;
    let outcome = environment.end(storm).await;
    let overlaps = outcome.summary.violations.get("overlap").copied().unwrap_or_default();
    println!("min_replicas {min_replicas}: {overlaps} overlaps in failovers of {failures:?}, times {}", scale());
    outcome.check(excused);
}

/// Lets the master fail, and returns when it is a replica of the promoted server.
async fn fail(group: &mut SentinelGroup, failure: Failure, unreplicated_ms: u64) {
    let number = group.master_number().await;
    let master = &group.servers()[number];
    match failure {
        Failure::Killed => {
            master.cut_replication().await;
            sleep(ms(unreplicated_ms)).await;
            master.kill();
            group.promoted(master).await;
            group.restart_as_replica(number).await;
        }
        Failure::Stopped => {
            master.freeze();
            group.promoted(master).await;
            master.thaw();
            group.rejoined(number).await;
        }
        Failure::Separated => {
            SentinelGroup::isolate(master).await;
            group.promoted(master).await;
            // An instance has left it by now.
            sleep(ms(2_500)).await;
            SentinelGroup::reunite(master).await;
            group.rejoined(number).await;
        }
    }
}

/// With `--long`.
mod long {
    use super::*;

    const ALL: [Failure; 3] = [Failure::Killed, Failure::Stopped, Failure::Separated];

    /// Guarantee: G1, G5.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_with_failovers() {
        failovers(0, &ALL, &["overlap", "too-soon", "fence-not-increasing"]).await;
        failovers(1, &ALL, &[]).await;
    }
}
