//! The contenders of the questions `hot_key` and `several_keys`, in a process of their own.

use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    measure::nanos,
    redis_lock::{RedisGuard, RedisLock},
    several_lock::{SeveralGuard, SeveralLock},
};

/// A lock of a contender.
trait ContendedLock: Send + 'static {
    type Guard: Send;

    fn connect(name: &str, redis: &str) -> impl Future<Output = Self>;
    /// Returns `None` if another attempt is needed.
    fn lock(&mut self, keys: &[u64]) -> impl Future<Output = Option<Self::Guard>> + Send;
    fn unlock(&mut self, guard: Self::Guard) -> impl Future<Output = ()> + Send;
}

/// The instants of an empty section in nanoseconds, and its keys.
struct Section {
    called: u64,
    start: u64,
    end: u64,
    released: u64,
    keys: Vec<u64>,
}

/// Runs sections in so many tasks, each with a lock and connections of its own. Each section locks
/// so many random keys of all together.
///
/// Prints `ready`, and after the end of its input one line for each section: the number of the
/// contender, the nanoseconds of its call, its start, its end and its release, and its keys.
pub async fn contend(lock: &str, redis: &str, count: usize, keys: u64, together: usize) {
    match keys {
        1 => contend_with::<RedisLock>(lock, redis, count, keys, together).await,
        _ => contend_with::<SeveralLock>(lock, redis, count, keys, together).await,
    }
}

async fn contend_with<L: ContendedLock>(lock: &str, redis: &str, count: usize, keys: u64, together: usize) {
    let mut locks = Vec::new();
    for _ in 0..count {
        locks.push(L::connect(lock, redis).await);
    }
    println!("ready");
    let is_stopped = Arc::new(AtomicBool::new(false));
    let contender = |mut lock: L| {
        let is_stopped = Arc::clone(&is_stopped);
        async move {
            let mut sections = Vec::new();
            loop {
                let mut keys = fastrand::choose_multiple(0..keys, together);
                // `SET NX` and Redisson acquire them in this order, which must be the same
                // everywhere.
                keys.sort_unstable();
                match Section::run(&mut lock, keys, &is_stopped).await {
                    Some(section) => sections.push(section),
                    None => return sections,
                }
            }
        }
    };
    let contenders: Vec<_> = locks.into_iter().map(|lock| tokio::spawn(contender(lock))).collect();
    let end_of_input = || std::io::stdin().read_to_end(&mut Vec::new());
    tokio::task::spawn_blocking(end_of_input).await.expect("no panic").expect("a pipe");
    is_stopped.store(true, Ordering::Relaxed);
    for (number, contender) in contenders.into_iter().enumerate() {
        for Section { called, start, end, released, keys } in contender.await.expect("no panic") {
            print!("{number} {called} {start} {end} {released}");
            keys.iter().for_each(|key| print!(" {key}"));
            println!();
        }
    }
}

// === impl Section ===

impl Section {
    /// Returns `None` if the contenders are stopped before it starts.
    async fn run<L: ContendedLock>(lock: &mut L, keys: Vec<u64>, is_stopped: &AtomicBool) -> Option<Self> {
        let called = nanos();
        while !is_stopped.load(Ordering::Relaxed) {
            let Some(guard) = lock.lock(&keys).await else { continue };
            let start = nanos();
            // The section is empty.
            let end = nanos();
            lock.unlock(guard).await;
            return Some(Self { called, start, end, released: nanos(), keys });
        }
        None
    }
}

// === impl ContendedLock ===

impl ContendedLock for RedisLock {
    type Guard = RedisGuard;

    async fn connect(name: &str, redis: &str) -> Self {
        Self::connect(name, redis).await
    }

    async fn lock(&mut self, keys: &[u64]) -> Option<RedisGuard> {
        Self::lock(self, keys[0]).await
    }

    async fn unlock(&mut self, guard: RedisGuard) {
        Self::unlock(self, guard).await;
    }
}

impl ContendedLock for SeveralLock {
    type Guard = SeveralGuard;

    async fn connect(name: &str, redis: &str) -> Self {
        Self::connect(name, redis).await
    }

    async fn lock(&mut self, keys: &[u64]) -> Option<SeveralGuard> {
        self.lock_all(keys).await
    }

    async fn unlock(&mut self, guard: SeveralGuard) {
        self.unlock_all(guard).await;
    }
}
