//! Many keys that one process holds on Redis: their renewals, a neighbour's calls meanwhile, and
//! the release of all of them. No other lock here renews its keys.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tower_lock::{LockError, LockGuard, LockManager, RedisStore};
use tower_lock_testkit::RedisServer;

use super::{Run, runtime};
use crate::{
    chart::Chart,
    measure::{RedisWork, nanos, own_cpu, quantile_us, sleep},
    redis_lock::RedisLock,
    report::{Table, Target::AtMost},
};

const OURS: &str = RedisLock::OURS;
const CPU: &str = "renewals, % of a core";
const REDIS_CPU: &str = "renewals, % of Redis";
const WORST: &str = "neighbour p99.9 ms";
const RELEASE: &str = "release s";
const UNREPORTED: &str = "left and not reported";

/// Acquires that are in flight together.
const IN_FLIGHT: u64 = 256;

pub fn answer(run: &mut Run) {
    let runtime = runtime();
    runtime.block_on(hundred_thousand(run));
    if run.long {
        runtime.block_on(million(run));
    }
}

async fn hundred_thousand(run: &mut Run) {
    const KEYS: u64 = 100_000;
    let columns = [
        ("acquired/s", 0),
        (CPU, 2),
        (REDIS_CPU, 2),
        ("neighbour p50 us", 0),
        (WORST, 2),
        ("worst ms", 1),
        (RELEASE, 2),
        (UNREPORTED, 0),
    ];
    let mut table = Table::new("100 000 keys held on Redis", OURS, &columns);
    let mut push = |column, value| table.push(OURS, column, value);
    let server = RedisServer::start().await;
    let locks = manager(&server).await;
    let keys_before = keys_in(&server).await;
    let began = nanos();
    let (guards, refused) = hold(&locks, KEYS).await;
    push("acquired/s", guards.len() as f64 / seconds_since(began));
    assert!(refused.is_empty(), "{} keys: {}", refused.len(), refused[0]);

    // Two rounds of renewals, alone.
    let watch = (20.0 * run.scale).max(2.0);
    let (cpu, redis, began) = (own_cpu(), RedisWork::of(&server).await, nanos());
    sleep(watch).await;
    let (nanos, cpu, redis) = ((nanos() - began) as f64, own_cpu() - cpu, RedisWork::of(&server).await - redis);
    push(CPU, 100.0 * cpu as f64 / nanos);
    push(REDIS_CPU, 100.0 * redis.cpu / nanos);

    // And beside a neighbour.
    let is_stopped = Arc::new(AtomicBool::new(false));
    let neighbour = tokio::spawn(neighbour(locks.clone(), Arc::clone(&is_stopped)));
    sleep(watch).await;
    is_stopped.store(true, Ordering::Relaxed);
    let mut calls = neighbour.await.expect("no panic");
    push("neighbour p50 us", quantile_us(&mut calls, 0.5));
    push(WORST, quantile_us(&mut calls, 0.999) / 1e3);
    push("worst ms", quantile_us(&mut calls, 1.0) / 1e3);
    let lost = lost(&guards);

    let (seconds, unreported) = release(&server, &locks, guards, keys_before).await;
    push(RELEASE, seconds);
    push(UNREPORTED, unreported);
    table.print();
    let mut chart = Chart::new("growth", "100 000 keys held on Redis: less is better");
    chart.add("CPU of their renewals, % of a core of the service", &table, CPU, 2);
    chart.add("CPU of their renewals, % of a core of Redis", &table, REDIS_CPU, 2);
    chart.add("another caller meanwhile, 99.9th percentile of its calls, milliseconds", &table, WORST, 2);
    chart.add("release of all keys together, seconds", &table, RELEASE, 2);
    run.write(&chart);

    let goals = &mut run.goals;
    for (name, column, most) in [
        ("growth_renewals_cpu_percent", CPU, 4.0),
        ("growth_renewals_redis_cpu_percent", REDIS_CPU, 4.0),
        ("growth_neighbour_p999_ms", WORST, 5.0),
        ("growth_release_seconds", RELEASE, 2.0),
        ("growth_release_unreported", UNREPORTED, 0.0),
    ] {
        goals.check(name, table.median(OURS, column), AtMost(most));
    }
    goals.check("growth_lost", lost, AtMost(0.0));
}

async fn million(run: &mut Run) {
    const KEYS: u64 = 1_000_000;
    const REFUSED: &str = "refused";
    const LOST: &str = "lost";
    const HEALTHY: &str = "healthy after s";
    let columns = [("held", 0), (REFUSED, 0), (LOST, 0), (HEALTHY, 2), (RELEASE, 2), (UNREPORTED, 0)];
    let mut table = Table::new("1 000 000 keys wanted on Redis", OURS, &columns);
    let server = RedisServer::start().await;
    let locks = manager(&server).await;
    let keys_before = keys_in(&server).await;
    let (guards, refused) = hold(&locks, KEYS).await;
    let healthy = healthy_after(&locks).await;
    // Longer than a lease: each key was renewed, or is lost.
    sleep(35.0).await;
    table.push(OURS, "held", guards.len() as f64);
    table.push(OURS, REFUSED, refused.len() as f64);
    table.push(OURS, LOST, lost(&guards));
    table.push(OURS, HEALTHY, healthy);
    let (seconds, unreported) = release(&server, &locks, guards, keys_before).await;
    table.push(OURS, RELEASE, seconds);
    table.push(OURS, UNREPORTED, unreported);
    table.print();
    if let Some(error) = refused.first() {
        println!("the first refusal: {error}");
    }
    run.goals.check("growth_million_lost", table.median(OURS, LOST), AtMost(0.0));
    run.goals.check("growth_million_healthy_seconds", healthy, AtMost(2.0));
}

async fn manager(server: &RedisServer) -> LockManager {
    let locks = LockManager::new(RedisStore::connect(&server.url()).await.expect("a Redis"));
    // The first call creates the keys that stay.
    locks.try_lock(("first", "key")).await.expect("a free key").release().await.expect("a reply");
    locks
}

async fn keys_in(server: &RedisServer) -> i64 {
    server.command(&["DBSIZE"]).await.integer().expect("a number")
}

/// The guards, and the errors of the keys that were refused.
async fn hold(locks: &LockManager, keys: u64) -> (Vec<LockGuard>, Vec<LockError>) {
    let task = |first: u64, locks: LockManager| async move {
        let (mut guards, mut refused) = (Vec::new(), Vec::new());
        for key in (first..keys).step_by(IN_FLIGHT as usize) {
            match locks.try_lock(("held", key)).await {
                Ok(guard) => guards.push(guard),
                Err(error) => refused.push(error),
            }
        }
        (guards, refused)
    };
    let tasks: Vec<_> = (0..IN_FLIGHT).map(|first| tokio::spawn(task(first, locks.clone()))).collect();
    let (mut guards, mut refused) = (Vec::new(), Vec::new());
    for task in tasks {
        let (own, errors) = task.await.expect("no panic");
        guards.extend(own);
        refused.extend(errors);
    }
    (guards, refused)
}

/// A cycle each millisecond. Returns the times of the cycles.
async fn neighbour(locks: LockManager, is_stopped: Arc<AtomicBool>) -> Vec<u64> {
    let mut calls = Vec::new();
    for key in 0_u64.. {
        if is_stopped.load(Ordering::Relaxed) {
            break;
        }
        sleep(0.001).await;
        let began = nanos();
        if let Ok(guard) = locks.try_lock(("neighbour", key)).await {
            // A failure is as long as the timeout of a call.
            let _ = guard.release().await;
        }
        calls.push(nanos() - began);
    }
    calls
}

/// The seconds until a hundred calls in a row succeed.
async fn healthy_after(locks: &LockManager) -> f64 {
    let began = nanos();
    let (mut since, mut in_a_row) = (began, 0);
    for key in 0_u64.. {
        let is_released = match locks.try_lock(("healthy", key)).await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        };
        match is_released {
            true => in_a_row += 1,
            false => (since, in_a_row) = (nanos(), 0),
        }
        if in_a_row == 100 || seconds_since(began) > 60.0 {
            break;
        }
        sleep(0.005).await;
    }
    (since - began) as f64 / 1e9
}

fn lost(guards: &[LockGuard]) -> f64 {
    guards.iter().filter(|guard| guard.held_lock().remaining().is_zero()).count() as f64
}

/// Releases all keys together. Returns the seconds until the shutdown is complete, and the keys
/// that are then in Redis although the shutdown did not report them.
async fn release(server: &RedisServer, locks: &LockManager, guards: Vec<LockGuard>, keys_before: i64) -> (f64, f64) {
    let began = nanos();
    for guard in guards {
        drop(guard.release());
    }
    let reported = locks.shutdown(Duration::from_secs(60)).await;
    let seconds = seconds_since(began);
    let left = keys_in(server).await - keys_before;
    (seconds, (left as f64 - reported as f64).max(0.0))
}

fn seconds_since(began: u64) -> f64 {
    (nanos() - began) as f64 / 1e9
}
