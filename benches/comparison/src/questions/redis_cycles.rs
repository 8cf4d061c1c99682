//! Acquire and release of distinct keys on Redis, with 1, 64 and 512 of them in flight.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};

use tower_lock_testkit::RedisServer;

use super::{Run, allocations, runtime};
use crate::{
    chart::Chart,
    measure::{RedisWork, median, nanos, own_cpu, quantile_us, sleep},
    redis_lock::RedisLock,
    report::{
        Table,
        Target::{AtLeast, AtMost},
    },
};

const VARIANTS: [&str; 4] = [RedisLock::OURS, RedisLock::RSLOCK, RedisLock::SET_NX, RedisLock::SET_NX_POOLED];
pub const RATE: &str = "cycles/s";
pub const P50: &str = "p50 us";
const REDIS_CPU: &str = "Redis CPU us";
const ALLOCATIONS: &str = "allocations";
/// The last one is counted apart.
pub const COLUMNS: [(&str, usize); 7] =
    [(RATE, 0), (P50, 0), ("p99 us", 0), ("CPU us", 1), (REDIS_CPU, 1), ("commands", 1), (ALLOCATIONS, 1)];

/// Keys of one task. None of them is used by two tasks.
pub const KEYS_PER_TASK: u64 = 1000;

const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

pub fn answer(run: &mut Run) {
    let runtime = runtime();
    let server = runtime.block_on(RedisServer::start());
    let locks: Vec<_> =
        VARIANTS.iter().map(|name| Arc::new(runtime.block_on(RedisLock::connect(name, &server.url())))).collect();
    let mut chart =
        Chart::new("redis_cycles", "Acquire and release of distinct keys on Redis, cycles per second: more is better");
    for in_flight in [1, 64, 512] {
        let mut table = Table::new(format!("Redis, {in_flight} in flight"), RedisLock::OURS, &COLUMNS);
        for at in run.turns(&[0, 1, 2, 3]) {
            let measured = measure(&server, &locks[at], in_flight, run.scale);
            runtime.block_on(measured).push(&mut table, VARIANTS[at]);
        }
        for (name, counted) in allocations("redis_cycles", &[&server.url(), &in_flight.to_string()]) {
            let variant = VARIANTS.into_iter().find(|variant| *variant == name).expect("a variant");
            table.push(variant, ALLOCATIONS, counted.count);
        }
        table.print();
        chart.add(format!("{in_flight} in flight"), &table, RATE, 0);

        let mut rate = |other, name: &str, least| {
            let ratio = table.ratio(RATE, RedisLock::OURS, other);
            run.goals.check(format!("redis_cycles_{in_flight}_vs_{name}"), ratio, AtLeast(least));
        };
        match in_flight {
            1 => {
                rate(RedisLock::RSLOCK, "rslock", 0.9);
                rate(RedisLock::SET_NX, "set_nx", 0.85);
            }
            64 => {
                rate(RedisLock::RSLOCK, "rslock", 1.2);
                rate(RedisLock::SET_NX, "set_nx", 0.95);
                let count = table.median(RedisLock::OURS, ALLOCATIONS);
                run.goals.check("redis_allocations_64", count, AtMost(10.0));
            }
            _ => {
                rate(RedisLock::RSLOCK, "rslock", 1.6);
                rate(RedisLock::SET_NX, "set_nx", 1.1);
                let cpu = table.ratios(REDIS_CPU, RedisLock::OURS, RedisLock::SET_NX);
                run.goals.check("redis_cpu_512_vs_set_nx", median(&cpu), AtMost(1.0));
            }
        }
    }
    run.write(&chart);
}

pub struct Measured {
    seconds: f64,
    latencies: Vec<u64>,
    own_cpu: u64,
    redis: RedisWork,
}

/// `in_flight` tasks, each with one cycle after the other.
pub async fn measure(server: &RedisServer, lock: &Arc<RedisLock>, in_flight: u64, scale: f64) -> Measured {
    let phase = Arc::new(AtomicU8::new(WARM_UP));
    let task = |task: u64| {
        let (lock, phase) = (Arc::clone(lock), Arc::clone(&phase));
        async move {
            let mut latencies = Vec::with_capacity(1 << 14);
            for number in 0.. {
                let began = nanos();
                cycle(&lock, task, number).await;
                match phase.load(Ordering::Relaxed) {
                    MEASURE => latencies.push(nanos() - began),
                    STOP => break,
                    _ => {}
                }
            }
            latencies
        }
    };
    let tasks: Vec<_> = (0..in_flight).map(|number| tokio::spawn(task(number))).collect();
    sleep(0.25 * scale).await;
    let (redis, cpu, began) = (RedisWork::of(server).await, own_cpu(), nanos());
    phase.store(MEASURE, Ordering::Relaxed);
    sleep(scale).await;
    phase.store(STOP, Ordering::Relaxed);
    let (ended, own_cpu, redis) = (nanos(), own_cpu() - cpu, RedisWork::of(server).await - redis);
    let mut latencies = Vec::new();
    for task in tasks {
        latencies.extend(task.await.expect("no panic"));
    }
    Measured { seconds: (ended - began) as f64 / 1e9, latencies, own_cpu, redis }
}

pub async fn cycle(lock: &RedisLock, task: u64, number: u64) {
    let guard = lock.try_lock(task * KEYS_PER_TASK + number % KEYS_PER_TASK).await.expect("a free key");
    lock.unlock(guard).await;
}

// === impl Measured ===

impl Measured {
    pub fn push(mut self, table: &mut Table, variant: &'static str) {
        let cycles = self.latencies.len() as f64;
        table.push(variant, RATE, cycles / self.seconds);
        table.push(variant, P50, quantile_us(&mut self.latencies, 0.5));
        table.push(variant, "p99 us", quantile_us(&mut self.latencies, 0.99));
        table.push(variant, "CPU us", self.own_cpu as f64 / 1e3 / cycles);
        table.push(variant, REDIS_CPU, self.redis.cpu / 1e3 / cycles);
        table.push(variant, "commands", self.redis.commands / cycles);
    }
}
