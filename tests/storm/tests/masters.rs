//! Stores of many masters, of which some fail beside concurrent requests, and slots that move
//! between them.
//!
//! `SCALE=<number>` multiplies the faults, and `SEED=<number>` repeats the requests of a run.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use tokio::time::sleep;
use tower_lock_storm::{Environment, Outcome, Workload, scale, seed, turn};
use tower_lock_testkit::{
    RedisCluster, RedisServer, skipped,
    wait::{ms, until},
};

const PROGRAMS: (&str, &str) = (env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service"));

/// A grant that is lost, or not acknowledged, may block its key for a lease.
const LEASE: &str = "--lease-ms=3000";

/// Ten times as long as a key may be without a grant while its slot moves.
const LONGEST_GAP: Duration = Duration::from_secs(10);

const MASTERS: usize = 3;

/// The failure of a master of a Cluster.
#[derive(Clone, Copy, Debug)]
enum Failure {
    /// It is killed, and its newest writes have not reached the replica.
    Killed,
    /// It is stopped, and continues when its replica was promoted.
    Stopped,
    /// Its replica takes over, without a loss.
    Planned,
}

/// Returns false, with a note on stderr, if there is no server.
fn is_available(test: &str) -> bool {
    if !RedisServer::is_available() {
        skipped(test, "redis-server");
    }
    RedisServer::is_available()
}

/// The number of faults in this run.
fn scaled(number: u64) -> usize {
    usize::try_from(number * scale()).expect("a few")
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_a_cluster_with_failovers_and_min_replicas() {
    failovers(1, &[]).await;
}

async fn failovers(min_replicas: usize, excused: &[&str]) {
    if !is_available("the storm on a Cluster with failovers") {
        return;
    }
    let _turn = turn().await;
    let mut cluster = RedisCluster::start(MASTERS, 1).await;
    let url = format!("{}?min_replicas={min_replicas}", cluster.url());
    let environment = Environment::at(PROGRAMS, &url, &["--correct", LEASE], seed()).await;
    // Another sequence than that of the requests.
    let mut rng = Rng::with_seed(!environment.seed);
    // In a short run the first two kinds of failures.
    let failovers = scaled(2);
    let all_failures = async {
        for number in 0..failovers {
            // No shard fails twice in four seconds.
            sleep(ms(rng.u64(900..1_500))).await;
            let failure = [Failure::Killed, Failure::Stopped, Failure::Planned][number % 3];
            fail(&mut cluster, number % MASTERS, failure, rng.u64(0..500)).await;
            let served = environment.served();
            until("requests are served again", async || environment.served() > served + 20).await;
        }
    };
    let storm = environment.storm_until(Workload::with_slow_handlers, all_failures).await;
    let outcome = environment.end(storm).await;
    check_with_losses(&outcome, &format!("min_replicas {min_replicas}"), failovers, excused);
}

/// Lets the master of a shard fail, and returns when it is a replica of the promoted node.
async fn fail(cluster: &mut RedisCluster, shard: usize, failure: Failure, unreplicated_ms: u64) {
    let masters = cluster.masters().await;
    let master = *masters.iter().find(|node| *node % MASTERS == shard).expect("a master");
    match failure {
        Failure::Killed => {
            cluster.cut_replication(master).await;
            sleep(ms(unreplicated_ms)).await;
            cluster.failover(master).await;
            cluster.restart(master).await;
        }
        Failure::Stopped => {
            cluster.freeze(master);
            cluster.promoted(master).await;
            cluster.thaw(master);
            cluster.rejoined(master).await;
        }
        Failure::Planned => {
            cluster.planned_failover(master).await;
            cluster.rejoined(master).await;
        }
    }
}

/// The slot of a key for which requests always wait moves from master to master.
/// Guarantee: G1, G5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_a_cluster_with_a_hot_slot_that_moves() {
    if !is_available("the storm on a Cluster with a slot that moves") {
        return;
    }
    let _turn = turn().await;
    let cluster = RedisCluster::start(MASTERS, 1).await;
    let environment = Environment::at(PROGRAMS, &cluster.url(), &["--correct"], seed()).await;
    let mut rng = Rng::with_seed(!environment.seed);
    let slot = RedisCluster::slot("lock:subject:0");
    let moves = scaled(8);
    let all_moves = async {
        for _ in 0..moves {
            sleep(ms(rng.u64(0..200))).await;
            cluster.move_key_by_key(slot, &mut rng).await;
        }
    };
    let storm = environment.storm_until(Workload::with_hot_subject, all_moves).await;
    let gap = storm.longest_gap(0);
    let outcome = environment.end(storm).await;
    println!("{moves} moves: the hot key had no grant for {gap:?} at most");
    outcome.check(&[]);
    outcome.check_nothing_aborted();
    assert!(gap < LONGEST_GAP, "the key was unavailable for {gap:?}");
}

/// Two of five servers are down, stopped or empty at a time.
/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_redlock_with_a_minority_that_fails() {
    let _turn = turn().await;
    let Some((mut servers, environment)) = on_redlock().await else { return };
    let mut rng = Rng::with_seed(!environment.seed);
    let rounds = scaled(1);
    let faults = async {
        for _ in 0..rounds {
            let (killed, stopped) = (rng.usize(0..5), rng.usize(1..5));
            let stopped = (killed + stopped) % 5;
            servers[killed].kill();
            sleep(ms(rng.u64(300..800))).await;
            // Most of the time it stands still: a slow server.
            for _ in 0..5 {
                servers[stopped].freeze();
                sleep(ms(rng.u64(50..300))).await;
                servers[stopped].thaw();
                sleep(ms(rng.u64(0..50))).await;
            }
            servers[stopped].freeze();
            // No lock is left of those that the killed server has lost.
            sleep(ms(3_500)).await;
            servers[stopped].thaw();
            servers[killed].restart_empty().await;
            let served = environment.served();
            until("requests are served again", async || environment.served() > served + 20).await;
        }
    };
    let storm = environment.storm_until(|workload| workload, faults).await;
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
}

/// A lost lock overlaps with those that get its key until its holder notices the loss.
fn check_with_losses(outcome: &Outcome, what: &str, faults: usize, excused: &[&str]) {
    let overlaps = outcome.summary.violations.get("overlap").copied().unwrap_or_default();
    println!("{what}: {overlaps} overlaps in {faults} faults");
    outcome.check(excused);
    let most = Workload::SUBJECTS * u64::try_from(faults).expect("a few");
    assert!(overlaps <= most, "more overlaps than lost locks explain");
}

/// Five servers, and services on them. Returns `None`, with a note on stderr, if there is no
/// `redis-server`.
async fn on_redlock() -> Option<(Vec<RedisServer>, Environment)> {
    is_available("the storm on Redlock").then_some(())?;
    let servers = join_all((0..5).map(|_| RedisServer::start())).await;
    let addresses: Vec<_> = servers.iter().map(|server| server.address().to_string()).collect();
    let url = format!("redis+redlock://{}", addresses.join(","));
    let environment = Environment::at(PROGRAMS, &url, &["--correct", LEASE], seed()).await;
    Some((servers, environment))
}

/// With `--long`.
mod long {
    use super::*;

    /// A failover may lose a lock: its overlaps are counted, and the check of the fence refuses the
    /// stale writes.
    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_a_cluster_with_failovers() {
        failovers(0, &["overlap", "too-soon", "fence-not-increasing"]).await;
    }

    /// A server that restarts empty at once may let two requests have one lock. The check of the
    /// fence refuses the stale write.
    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_on_redlock_with_servers_that_restart_empty() {
        let _turn = turn().await;
        let Some((mut servers, environment)) = on_redlock().await else { return };
        let mut rng = Rng::with_seed(!environment.seed);
        let rounds = scaled(1);
        let restarts = async {
            for _ in 0..rounds * 5 {
                sleep(ms(rng.u64(300..900))).await;
                servers[rng.usize(0..5)].restart_empty().await;
            }
        };
        let storm = environment.storm_until(Workload::with_slow_handlers, restarts).await;
        let outcome = environment.end(storm).await;
        check_with_losses(&outcome, "restarts", rounds * 5, &["overlap", "too-soon"]);
    }
}
