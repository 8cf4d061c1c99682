//! Locks within one process: without contention, on one hot key, and on two threads.

use std::{sync::Arc, thread};

use tokio::task::{unconstrained, yield_now};

use super::{INSTRUCTIONS, Run, allocations, one_thread, runtime};
use crate::{
    chart::Chart,
    measure::{nanos, own_cpu},
    memory_lock::{BareMutexes, KEYS, LockableCrate, MapOfMutexes, MemoryLock, Ours},
    report::{
        Table,
        Target::{AtLeast, AtMost},
    },
};

/// Nanoseconds and CPU nanoseconds of one unit of work.
type Time = (f64, f64);

/// The measurements of one lock.
#[derive(Clone, Copy)]
struct Variant {
    name: &'static str,
    cycles: fn(u64),
    cycle: fn(f64) -> Time,
    hot_key: fn(f64) -> Time,
    threads: fn(u64, f64) -> f64,
}

const VARIANTS: [Variant; 4] = [
    Variant::of::<Ours>(),
    Variant::of::<LockableCrate>(),
    Variant::of::<MapOfMutexes>(),
    Variant::of::<BareMutexes>(),
];

const OURS: &str = Ours::NAME;
const CYCLE: &str = "ns a cycle";
const SECTION: &str = "ns a section";
const SPEEDUP: &str = "two threads / one";
const HELD: &str = "bytes a held key";

/// Contenders of the hot key.
const CONTENDERS: u64 = 64;

pub fn answer(run: &mut Run) {
    let columns = [(CYCLE, 0), (INSTRUCTIONS, 0), ("allocations", 1), ("allocated bytes", 0), (HELD, 0)];
    let mut cycles = Table::new("memory, distinct keys, one thread", OURS, &columns);
    let mut hot = Table::new("memory, one hot key, 64 waiters", OURS, &[(SECTION, 0), ("CPU ns", 0)]);
    let columns = [("cycles of two threads/s", 0), ("of one thread/s", 0), (SPEEDUP, 2)];
    let mut threads = Table::new("memory, keys that no two threads share", OURS, &columns);
    for Variant { name, cycle, hot_key, threads: cycles_per_second, .. } in run.turns(&VARIANTS) {
        // One thread that never waits: its CPU time does not depend on other processes.
        let (_, cpu) = cycle(run.scale);
        cycles.push(name, CYCLE, cpu);
        let (time, cpu) = hot_key(run.scale);
        hot.push(name, SECTION, time);
        hot.push(name, "CPU ns", cpu);
        let (one, two) = (cycles_per_second(1, run.scale), cycles_per_second(2, run.scale));
        threads.push(name, "cycles of two threads/s", two);
        threads.push(name, "of one thread/s", one);
        threads.push(name, SPEEDUP, two / one);
    }
    let (per_cycle, per_key) = (allocations("memory_cycle", &[]), allocations("memory_held", &[]));
    for Variant { name, .. } in VARIANTS {
        if let Some(count) = run.instructions("memory", name) {
            cycles.push(name, INSTRUCTIONS, count);
        }
        cycles.push(name, "allocations", per_cycle[name].count);
        cycles.push(name, "allocated bytes", per_cycle[name].bytes);
        if let Some(held) = per_key.get(name) {
            cycles.push(name, HELD, held.bytes);
        }
    }
    let mut chart = Chart::new("memory", "Locks within one process");
    chart.add("acquire and release without contention, nanoseconds: less is better", &cycles, CYCLE, 0);
    chart.add("one hot key, 64 waiters on two workers, nanoseconds a section: less is better", &hot, SECTION, 0);
    chart.add("different keys, the work of two threads beside that of one: more is better", &threads, SPEEDUP, 2);
    chart.add("bytes for each of 100 000 held keys: less is better", &cycles, HELD, 0);
    for table in [&cycles, &hot, &threads] {
        table.print();
    }
    run.write(&chart);

    let goals = &mut run.goals;
    goals.check("memory_cycle_vs_lockable", cycles.ratio(CYCLE, OURS, LockableCrate::NAME), AtMost(3.5));
    goals.check("memory_hot_64_vs_tokio", hot.ratio(SECTION, OURS, BareMutexes::NAME), AtMost(2.5));
    goals.check("memory_two_threads", threads.median(OURS, SPEEDUP), AtLeast(1.7));
    goals.check("bytes_per_held_key", cycles.median(OURS, HELD), AtMost(700.0));
}

// === impl Variant ===

impl Variant {
    const fn of<L: MemoryLock>() -> Self {
        Self {
            name: L::NAME,
            cycles: some_cycles::<L>,
            cycle: cycle::<L>,
            hot_key: hot_key::<L>,
            threads: threads::<L>,
        }
    }
}

/// One cycle after the other, on different keys, without yields to the scheduler.
pub async fn cycles<L: MemoryLock>(locks: &L, first_key: u64, keys: u64, count: u64) {
    unconstrained(async {
        for number in 0..count {
            L::unlock(locks.lock(first_key + number % keys).await);
        }
    })
    .await;
}

/// So many cycles of one lock, to count their instructions.
pub fn count_cycles(name: &str, count: u64) {
    let Variant { cycles, .. } = VARIANTS.into_iter().find(|variant| variant.name == name).expect("a known name");
    cycles(count);
}

fn some_cycles<L: MemoryLock>(count: u64) {
    one_thread().block_on(cycles(&L::new(), 0, KEYS, count));
}

fn timed(units: u64, work: impl FnOnce()) -> Time {
    let (cpu, began) = (own_cpu(), nanos());
    work();
    ((nanos() - began) as f64 / units as f64, (own_cpu() - cpu) as f64 / units as f64)
}

fn cycle<L: MemoryLock>(scale: f64) -> Time {
    let (runtime, locks) = (one_thread(), L::new());
    let count = (200_000.0 * scale) as u64;
    runtime.block_on(cycles(&locks, 0, KEYS, count / 10));
    timed(count, || runtime.block_on(cycles(&locks, 0, KEYS, count)))
}

/// The section yields once, so that all others are queued when it ends.
fn hot_key<L: MemoryLock>(scale: f64) -> Time {
    let (runtime, locks) = (runtime(), Arc::new(L::new()));
    let sections = |count: u64| {
        let task = |locks: Arc<L>| async move {
            for _ in 0..count {
                let guard = locks.lock(0).await;
                yield_now().await;
                L::unlock(guard);
            }
        };
        runtime.block_on(async {
            let tasks: Vec<_> = (0..CONTENDERS).map(|_| tokio::spawn(task(Arc::clone(&locks)))).collect();
            for task in tasks {
                task.await.expect("no panic");
            }
        });
    };
    let count = (1500.0 * scale) as u64;
    sections(count / 10);
    timed(CONTENDERS * count, || sections(count))
}

/// The cycles per second of threads that share the locks and no key, each with a runtime of its
/// own.
fn threads<L: MemoryLock>(threads: u64, scale: f64) -> f64 {
    let locks = L::new();
    let keys = KEYS / 2;
    let work = |count: u64| {
        thread::scope(|scope| {
            for thread in 0..threads {
                let locks = &locks;
                scope.spawn(move || one_thread().block_on(cycles(locks, keys * thread, keys, count)));
            }
        });
    };
    let count = (100_000.0 * scale) as u64;
    work(count / 10);
    1e9 / timed(threads * count, || work(count)).0
}
