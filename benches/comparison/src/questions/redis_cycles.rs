//! Acquire and release of distinct keys on Redis, with 1, 64 and 512 of them in flight.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};

use tokio::runtime::Runtime;

use super::{
    Run, allocations,
    hot_key::{self, Contenders, REDISSON},
    runtime,
};
use crate::{
    chart::Chart,
    contender::Work,
    measure::{RedisWork, median, nanos, own_cpu, quantile_us, sleep},
    redis_lock::RedisLock,
    report::{
        Table,
        Target::{AtLeast, AtMost},
    },
    servers::Servers,
};

const VARIANTS: [&str; 4] = [RedisLock::OURS, RedisLock::RSLOCK, RedisLock::SET_NX, RedisLock::SET_NX_POOLED];
pub const RATE: &str = "cycles/s";
pub const P50: &str = "p50 us";
pub const REDIS_CPU: &str = "Redis CPU us";
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
    let servers = runtime.block_on(Servers::one());
    let locks: Vec<_> =
        VARIANTS.iter().map(|name| Arc::new(runtime.block_on(RedisLock::connect(name, &servers.url())))).collect();
    let mut chart =
        Chart::new("redis_cycles", "Acquire and release of distinct keys on Redis, cycles per second: more is better");
    for in_flight in [1, 64, 512] {
        let mut table = Table::new(format!("Redis, {in_flight} in flight"), RedisLock::OURS, &COLUMNS);
        for at in run.turns(&[0, 1, 2, 3]) {
            let measured = measure(&servers, &locks[at], in_flight, run.scale);
            runtime.block_on(measured).push(&mut table, VARIANTS[at]);
        }
        for (name, counted) in allocations("redis_cycles", &[&servers.url(), &in_flight.to_string()]) {
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

/// A lock of which cycles are measured.
pub trait Cycles: Send + Sync + 'static {
    /// Acquires and releases a key that no other task uses.
    fn cycle(&self, task: u64, number: u64) -> impl Future<Output = ()> + Send;
}

/// Cycles of some tasks, and the counters of the servers around them.
pub struct Counted<W> {
    pub seconds: f64,
    pub latencies: Vec<u64>,
    /// In nanoseconds.
    pub own_cpu: u64,
    pub before: W,
    pub after: W,
}

pub struct Measured {
    seconds: f64,
    latencies: Vec<u64>,
    /// In nanoseconds. None of another process.
    own_cpu: Option<u64>,
    redis: RedisWork,
}

pub async fn measure(servers: &Servers, lock: &Arc<RedisLock>, in_flight: u64, scale: f64) -> Measured {
    let counted = count(lock, in_flight, scale, async || servers.work().await).await;
    let Counted { seconds, latencies, own_cpu, before, after } = counted;
    Measured { seconds, latencies, own_cpu: Some(own_cpu), redis: after - before }
}

/// `in_flight` tasks, each with one cycle after the other.
pub async fn count<W>(lock: &Arc<impl Cycles>, in_flight: u64, scale: f64, work: impl AsyncFn() -> W) -> Counted<W> {
    let phase = Arc::new(AtomicU8::new(WARM_UP));
    let task = |task: u64| {
        let (lock, phase) = (Arc::clone(lock), Arc::clone(&phase));
        async move {
            let mut latencies = Vec::with_capacity(1 << 14);
            for number in 0.. {
                let began = nanos();
                lock.cycle(task, number).await;
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
    let (before, cpu, began) = (work().await, own_cpu(), nanos());
    phase.store(MEASURE, Ordering::Relaxed);
    sleep(scale).await;
    phase.store(STOP, Ordering::Relaxed);
    let (ended, own_cpu, after) = (nanos(), own_cpu() - cpu, work().await);
    let mut latencies = Vec::new();
    for task in tasks {
        latencies.extend(task.await.expect("no panic"));
    }
    Counted { seconds: (ended - began) as f64 / 1e9, latencies, own_cpu, before, after }
}

/// A lock, and the servers that keep it.
pub struct Variant<'a> {
    pub name: &'static str,
    pub lock: Arc<RedisLock>,
    pub servers: &'a Servers,
}

/// Measures all variants in turns, and Redisson on the servers of the first one. Redisson has three
/// rounds at most, because its virtual machine takes seconds to start.
pub fn compare(run: &Run, runtime: &Runtime, variants: &[Variant<'_>], in_flight: usize, table: &mut Table) {
    let turns: Vec<_> = (0..=variants.len()).collect();
    for at in run.turns(&turns) {
        if let Some(Variant { name, lock, servers }) = variants.get(at) {
            runtime.block_on(measure(servers, lock, in_flight as u64, run.scale)).push(table, name);
        } else if let Some(classes) = run.redisson.as_deref().filter(|_| table.of(REDISSON, RATE).len() < 3) {
            measure_redisson(runtime, variants[0].servers, classes, in_flight, run.scale).push(table, REDISSON);
        }
    }
}

/// The same with Redisson, in a process of its own: one client, and a thread for each task.
fn measure_redisson(runtime: &Runtime, servers: &Servers, classes: &str, in_flight: usize, scale: f64) -> Measured {
    // At random from so many that the threads do not meet.
    let keys = in_flight * 10_000;
    let contenders = Contenders { processes: 1, in_each: Work { keys, clients: 1, ..Work::of(in_flight) } };
    let lock = ("Redisson, free keys", classes);
    let measured = hot_key::measure(runtime, servers, lock, contenders, sleep(scale));
    measured.assert_exclusive(lock.0);
    Measured {
        seconds: (measured.until - measured.from) as f64 / 1e9,
        latencies: measured.sections.iter().map(|section| section.released - section.called).collect(),
        own_cpu: None,
        redis: measured.redis,
    }
}

impl Cycles for RedisLock {
    async fn cycle(&self, task: u64, number: u64) {
        let guard = self.try_lock(task * KEYS_PER_TASK + number % KEYS_PER_TASK).await.expect("a free key");
        self.unlock(guard).await;
    }
}

// === impl Measured ===

impl Measured {
    pub fn push(mut self, table: &mut Table, variant: &'static str) {
        let cycles = self.latencies.len() as f64;
        table.push(variant, RATE, cycles / self.seconds);
        table.push(variant, P50, quantile_us(&mut self.latencies, 0.5));
        table.push(variant, "p99 us", quantile_us(&mut self.latencies, 0.99));
        if let Some(cpu) = self.own_cpu {
            table.push(variant, "CPU us", cpu as f64 / 1e3 / cycles);
        }
        table.push(variant, REDIS_CPU, self.redis.cpu / 1e3 / cycles);
        table.push(variant, "commands", self.redis.commands / cycles);
    }
}
