//! Requests over fifty keys, with and without faults: no overlap, an outcome for every request, and
//! nothing left.
//!
//! Half of the requests use HTTP/1.1 and half HTTP/2, some wait and some do not, some responses are
//! streams. One client in a hundred disconnects at any point, and one handler in a hundred panics.
//! Half of the panics reach a layer that responds 500, and half reach hyper, which closes the
//! connection.
//!
//! `SCALE=<number>` multiplies the requests and the faults, and `SEED=<number>` repeats the
//! requests of a run. Their interleaving still varies.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::sync::atomic::Ordering::SeqCst;

use tokio::time::sleep;
use tower_lock_storm::{Environment, Patience, Workload, is, scale, seed, turn};
use tower_lock_testkit::{Chaos, Direction, RedisServer, skipped, wait::ms};

/// Four seconds of requests.
const REQUESTS: u64 = 1_600;

/// The outage of a store is longer than its lease.
const SHORT_LEASE: &str = "--lease-ms=3000";

const PROGRAMS: (&str, &str) = (env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service"));

/// Returns `None`, with a note on stderr, if there is no server.
async fn on_redis(test: &str, processes: usize, flags: &[&str]) -> Option<Environment> {
    if !RedisServer::is_available() {
        skipped(test, "redis-server");
        return None;
    }
    let flags = [&["--correct"], flags].concat();
    Some(Environment::new(PROGRAMS, Some(RedisServer::start().await), processes, &flags, seed()).await)
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_in_one_process() {
    let _turn = turn().await;
    let environment = Environment::new(PROGRAMS, None, 1, &["--correct"], seed()).await;
    // Enough for each kind of event.
    let storm = environment.storm(3 * REQUESTS).await;
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
    outcome.check_nothing_aborted();
    outcome.check_connections();
    outcome.check_coverage();
    assert_eq!(outcome.summary.answers(503), 0, "every waiter gets a grant");
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_two_processes_with_redis() {
    let _turn = turn().await;
    let Some(environment) = on_redis("the storm without faults", 2, &["--patient"]).await else { return };
    let storm = environment.storm(REQUESTS).await;
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
    outcome.check_nothing_aborted();
    outcome.check_connections();
    // A request with a shorter wait than Redis takes gets this rejection.
    let rejected = outcome
        .count(|workload, observed| workload.patience != Patience::Briefly && is(observed, 503, "store-unavailable"));
    assert_eq!((outcome.faults, rejected), (0, 0), "every waiter gets a grant");
}

/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_with_network_faults() {
    let _turn = turn().await;
    let Some(environment) = on_redis("the storm with faults", 4, &[]).await else { return };
    // Copies arrive after their expiry: half a second after the request nothing is granted.
    let chaos = Chaos::new(environment.seed).cut(1).double(20).late(20, ms(20)).again(20, ms(1_000)..ms(3_000));
    // In flight when the connection broke: they arrive before or after their expiry.
    let chaos = chaos.orphaned(3, ms(1)..ms(900));
    environment.proxy().chaos(Some(chaos.drop_pushes(20).double_pushes(20)));
    // Sometimes all connections fail.
    let mut rng = fastrand::Rng::with_seed(!environment.seed);
    let gusts = async {
        loop {
            sleep(ms(rng.u64(300..900))).await;
            let all = environment.proxy().all();
            match rng.u8(0..5) {
                0 => all.cut(),
                1 => all.hold(Direction::Up),
                2 => all.hold(Direction::Down),
                3 => all.swallow(Direction::Both),
                _ => all.delay(Direction::Both, ms(10)),
            }
            sleep(ms(rng.u64(20..200))).await;
            all.heal();
        }
    };
    let storm = meanwhile(gusts, environment.storm(REQUESTS)).await;
    environment.proxy().chaos(None);
    environment.proxy().all().heal();
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
    outcome.check_nothing_aborted();
    outcome.check_connections();
    assert!(outcome.faults > 0);
    let most = outcome.summary.asked - outcome.summary.answers(503);
    assert!(most > outcome.summary.asked / 2, "{:#?}", outcome.summary);
}

/// Longer than any wait for a store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_with_a_frozen_redis() {
    let _turn = turn().await;
    let Some(environment) = on_redis("the storm, on a Redis that stands still", 4, &[]).await else { return };
    let stands_still = async {
        for _ in 0..2 * scale() {
            sleep(ms(600)).await;
            environment.redis().freeze();
            sleep(ms(2_500)).await;
            environment.redis().thaw();
        }
    };
    let storm = environment.storm_until(|workload| workload, stands_still).await;
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
    outcome.check_nothing_aborted();
    outcome.check_connections();
    // Twelve that work, and ten attempts per second each while the server is frozen.
    assert!(outcome.connections < 400 * scale(), "{} connections", outcome.connections);
    assert!(outcome.summary.answers(503) > 0, "the server was never frozen: {:#?}", outcome.summary);
    assert!(outcome.summary.answers(200) > 0);
}

/// A Redis that loses its data allows an overlap. Writes are safe: the fence is ahead of the lost
/// one.
/// Guarantee: G1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_with_a_redis_that_loses_its_data() {
    let _turn = turn().await;
    let Some(mut environment) = on_redis("the storm, on a Redis that forgets", 4, &[]).await else { return };
    let mut redis = environment.redis.take().expect("it has one");
    let forgets = async {
        loop {
            sleep(ms(500)).await;
            redis.restart_empty().await;
        }
    };
    let storm = meanwhile(forgets, environment.storm(REQUESTS)).await;
    // The storm may have ended during the outage.
    redis.restart_empty().await;
    environment.redis = Some(redis);
    let outcome = environment.end(storm).await;
    outcome.check(&["overlap", "too-soon", "fence-not-increasing"]);
    assert!(outcome.summary.answers(200) > 0, "{:#?}", outcome.summary);
}

/// One is killed, one stops for longer than its leases. Waiters of their keys are served after the
/// lease.
/// Guarantee: G2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_with_killed_and_stopped_processes() {
    let _turn = turn().await;
    let Some(environment) = on_redis("the storm with killed processes", 4, &[SHORT_LEASE]).await else { return };
    let storm = environment.storm_until(Workload::with_slow_handlers, environment.kill_and_stop()).await;
    let outcome = environment.end(storm).await;
    // A write in flight may arrive after the next one: it is refused.
    outcome.check(&[]);
    assert!(outcome.summary.broken_before > 0, "{:#?}", outcome.summary);
}

/// As in a deployment: waiters of the ending process are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_with_graceful_shutdowns() {
    let _turn = turn().await;
    let Some(environment) = on_redis("the storm, with processes that end", 4, &[]).await else { return };
    let ending = async {
        for number in [1, 3] {
            sleep(ms(400)).await;
            environment.leaving[number].store(true, SeqCst);
            environment.services[number].process().terminate();
        }
        std::future::pending::<()>().await;
    };
    let storm = meanwhile(ending, environment.storm(REQUESTS)).await;
    assert!(environment.leaving[3].load(SeqCst), "in the middle of it");
    let outcome = environment.end(storm).await;
    outcome.check(&[]);
    outcome.check_nothing_aborted();
}

async fn meanwhile<T>(for_ever: impl Future<Output = ()>, storm: impl Future<Output = T>) -> T {
    tokio::select! {
        observed = storm => observed,
        () = for_ever => unreachable!("it has no end"),
    }
}

/// With `--long`.
mod long {
    use super::*;

    /// Nine times `FLUSHALL` and four restarts without data, in a minute and a half. The lease of
    /// 30 seconds bounds no overlap: the locks of the lost data end at once.
    ///
    /// Guarantee: G1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn overlaps_end_at_once_when_redis_loses_its_data() {
        let _turn = turn().await;
        let Some(mut environment) = on_redis("the schedule of losses", 4, &[]).await else { return };
        let mut redis = environment.redis.take().expect("it has one");
        let losses = async {
            for loss in 1..=13 {
                sleep(ms(6_500)).await;
                if loss % 3 == 0 {
                    redis.restart_empty().await;
                } else {
                    redis.command(&["FLUSHALL"]).await;
                }
            }
        };
        let storm = environment.storm_until(Workload::with_slow_handlers, losses).await;
        environment.redis = Some(redis);
        let outcome = environment.end(storm).await;
        outcome.check(&["overlap", "too-soon", "fence-not-increasing"]);
        let mut overlaps = outcome.summary.overlaps_us.clone();
        overlaps.sort_unstable();
        let p99 = overlaps.get(overlaps.len() * 99 / 100).copied().unwrap_or_default();
        println!("{} overlaps, {p99} µs (p99), {:?} µs (the longest)", overlaps.len(), overlaps.last());
        assert!(p99 < 3_000_000 && outcome.summary.accepted > 0, "{overlaps:?}");
    }
}
