//! The contenders of the question `hot_key`, in a process of their own.

use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{measure::nanos, redis_lock::RedisLock};

/// The one key.
const KEY: u64 = 0;

/// Runs sections of one key in so many tasks, each with a lock and connections of its own.
///
/// Prints `ready`, and after the end of its input one line for each section: the number of the
/// contender, and the nanoseconds of its start and its end.
pub async fn contend(lock: &str, redis: &str, count: usize) {
    let mut locks = Vec::new();
    for _ in 0..count {
        locks.push(RedisLock::connect(lock, redis).await);
    }
    println!("ready");
    let is_stopped = Arc::new(AtomicBool::new(false));
    let contender = |lock: RedisLock| {
        let is_stopped = Arc::clone(&is_stopped);
        async move {
            let mut sections = Vec::new();
            while !is_stopped.load(Ordering::Relaxed) {
                let Some(guard) = lock.lock(KEY).await else { continue };
                let start = nanos();
                // The section is empty.
                let end = nanos();
                lock.unlock(guard).await;
                sections.push((start, end));
            }
            sections
        }
    };
    let contenders: Vec<_> = locks.into_iter().map(|lock| tokio::spawn(contender(lock))).collect();
    let end_of_input = || std::io::stdin().read_to_end(&mut Vec::new());
    tokio::task::spawn_blocking(end_of_input).await.expect("no panic").expect("a pipe");
    is_stopped.store(true, Ordering::Relaxed);
    for (number, contender) in contenders.into_iter().enumerate() {
        for (start, end) in contender.await.expect("no panic") {
            println!("{number} {start} {end}");
        }
    }
}
