//! Counts allocations, for the program `comparison`.
//!
//! ```sh
//! allocations QUESTION [ARGUMENT ..]
//! ```
//!
//! Prints for each variant its name, allocations and bytes. Everything runs on one thread, because
//! the allocator counts per thread.

use std::{future::Future, sync::Arc};

use allocation_counter::{AllocationInfo, measure};
use tokio::runtime::Runtime;
use tower_lock_comparison::{
    memory_lock::{BareMutexes, KEYS, LockableCrate, MapOfMutexes, MemoryLock, Ours},
    questions::{layer, memory, one_thread, redis_cycles::Cycles},
    redis_lock::RedisLock,
};

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["memory_cycle"] => {
            memory_cycle::<Ours>();
            memory_cycle::<LockableCrate>();
            memory_cycle::<MapOfMutexes>();
            memory_cycle::<BareMutexes>();
        }
        ["memory_held"] => {
            memory_held::<Ours>();
            memory_held::<LockableCrate>();
            memory_held::<MapOfMutexes>();
        }
        ["layer"] => layer(),
        ["redis_cycles", url, in_flight] => redis_cycles(url, in_flight.parse().expect("a number")),
        _ => panic!("no question has these arguments: {arguments:?}"),
    }
}

fn print(name: &str, count: u64, bytes: i64, units: u64) {
    println!("{name}\t{}\t{}", count as f64 / units as f64, bytes as f64 / units as f64);
}

fn counted(runtime: &Runtime, work: impl Future<Output = ()>) -> AllocationInfo {
    measure(|| runtime.block_on(work))
}

fn memory_cycle<L: MemoryLock>() {
    const CYCLES: u64 = 10_000;
    let (runtime, locks) = (one_thread(), L::new());
    runtime.block_on(memory::cycles(&locks, 0, KEYS, CYCLES));
    let info = counted(&runtime, memory::cycles(&locks, 0, KEYS, CYCLES));
    print(L::NAME, info.count_total, info.bytes_total as i64, CYCLES);
}

/// The bytes include the guards.
fn memory_held<L: MemoryLock>() {
    const HELD: u64 = 100_000;
    let (runtime, locks) = (one_thread(), L::new());
    let mut guards = Vec::new();
    let info = counted(&runtime, async {
        guards.reserve_exact(HELD as usize);
        for key in 0..HELD {
            guards.push(locks.lock(key).await);
        }
    });
    print(L::NAME, info.count_total, info.bytes_current, HELD);
    runtime.block_on(async { guards.into_iter().for_each(L::unlock) });
}

fn layer() {
    const REQUESTS: u64 = 1000;
    for layer::Variant { name, answer } in layer::variants(&Arc::new(one_thread())) {
        answer(REQUESTS);
        let info = measure(|| answer(REQUESTS));
        print(name, info.count_total, info.bytes_total as i64, REQUESTS);
    }
}

fn redis_cycles(url: &str, in_flight: u64) {
    let cycles = 20_000 / in_flight;
    for name in [RedisLock::OURS, RedisLock::RSLOCK, RedisLock::SET_NX, RedisLock::SET_NX_POOLED] {
        let runtime = one_thread();
        let lock = Arc::new(runtime.block_on(RedisLock::connect(name, url)));
        let run = async || {
            let task = |task: u64, lock: Arc<RedisLock>| async move {
                for number in 0..cycles {
                    lock.cycle(task, number).await;
                }
            };
            let tasks: Vec<_> = (0..in_flight).map(|number| tokio::spawn(task(number, Arc::clone(&lock)))).collect();
            for task in tasks {
                task.await.expect("no panic");
            }
        };
        runtime.block_on(run());
        let info = counted(&runtime, run());
        print(name, info.count_total, info.bytes_total as i64, in_flight * cycles);
    }
}
