//! The contenders of `hot_key`, `several_keys`, `shares` and `postgres`, in a process of their own.

use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    database_lock::{DatabaseGuard, DatabaseLock},
    measure::nanos,
    redis_lock::{RedisGuard, RedisLock},
    several_lock::{SeveralGuard, SeveralLock},
    share_lock::{ShareGuard, ShareLock},
};

/// A lock of a contender.
trait ContendedLock: Send + 'static {
    type Guard: Send;

    /// Returns `None` if another attempt is needed.
    fn lock(&mut self, keys: &[u64]) -> impl Future<Output = Option<Self::Guard>> + Send;
    fn unlock(&mut self, guard: Self::Guard) -> impl Future<Output = ()> + Send;
    /// The fencing token, if the lock has them. Of readers and writers: 1 for a writer.
    fn token(guard: &Self::Guard) -> Option<u64>;
}

/// The work of one process.
#[derive(Clone, Copy)]
pub struct Work {
    /// Tasks, each with one section after the other.
    pub tasks: usize,
    /// Locks with connections of their own, in turns for the tasks.
    pub clients: usize,
    /// The keys of all tasks.
    pub keys: usize,
    /// The keys of one section, at random.
    pub together: usize,
    /// The mean duration of a section. Most are shorter, and a few take several times as long.
    pub section: Duration,
}

/// The instants of a section in nanoseconds, its token or zero, and its keys.
struct Section {
    called: u64,
    start: u64,
    end: u64,
    released: u64,
    token: u64,
    keys: Vec<u64>,
}

/// Runs sections until the end of the input.
///
/// Prints `ready`, and then one line for each section: the number of the contender, the nanoseconds
/// of its call, its start, its end and its release, its token, and its keys.
///
/// # Panics
///
/// Panics if tasks would share a lock of several keys.
pub async fn contend(lock: &str, url: &str, work: Work) {
    if let Some(first) = ShareLock::connect(lock, url).await {
        let mut clients = vec![Arc::new(first)];
        for _ in 1..work.clients {
            clients.push(Arc::new(ShareLock::connect(lock, url).await.expect("a known name")));
        }
        contend_with(clients.iter().cycle().take(work.tasks).cloned().collect(), work).await;
    } else if ["postgres://", "mysql://"].iter().any(|scheme| url.starts_with(scheme)) {
        let mut clients = Vec::new();
        for _ in 0..work.clients {
            clients.push(Arc::new(DatabaseLock::connect(lock, url, 1).await));
        }
        contend_with(clients.iter().cycle().take(work.tasks).cloned().collect(), work).await;
    } else if work.keys == 1 {
        let mut clients = Vec::new();
        for _ in 0..work.clients {
            clients.push(Arc::new(RedisLock::connect(lock, url).await));
        }
        contend_with(clients.iter().cycle().take(work.tasks).cloned().collect(), work).await;
    } else {
        assert_eq!(work.clients, work.tasks, "each task has a lock");
        let mut locks = Vec::new();
        for _ in 0..work.tasks {
            locks.push(SeveralLock::connect(lock, url).await);
        }
        contend_with(locks, work).await;
    }
}

async fn contend_with<L: ContendedLock>(locks: Vec<L>, Work { keys, together, section, .. }: Work) {
    println!("ready");
    let is_stopped = Arc::new(AtomicBool::new(false));
    let contender = |mut lock: L| {
        let is_stopped = Arc::clone(&is_stopped);
        async move {
            let mut sections = Vec::new();
            loop {
                let mut keys = fastrand::choose_multiple(0..keys as u64, together);
                // `SET NX` and Redisson acquire them in this order, which must be the same
                // everywhere.
                keys.sort_unstable();
                match Section::run(&mut lock, keys, section, &is_stopped).await {
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
        for Section { called, start, end, released, token, keys } in contender.await.expect("no panic") {
            print!("{number} {called} {start} {end} {released} {token}");
            keys.iter().for_each(|key| print!(" {key}"));
            println!();
        }
    }
}

// === impl Work ===

impl Work {
    /// Empty sections of one key, in tasks that each have a lock of their own.
    pub const fn of(tasks: usize) -> Self {
        Self { tasks, clients: tasks, keys: 1, together: 1, section: Duration::ZERO }
    }

    /// The arguments of a process, from which [`parse`](Self::parse) makes the work.
    pub fn arguments(&self) -> Vec<String> {
        let Self { tasks, clients, keys, together, section } = self;
        let millis = section.as_millis() as usize;
        [*tasks, *clients, *keys, *together, millis].iter().map(usize::to_string).collect()
    }

    /// Returns `None` if these are no five numbers.
    pub fn parse(arguments: &[&str]) -> Option<Self> {
        let numbers: Vec<usize> = arguments.iter().map(|number| number.parse().ok()).collect::<Option<_>>()?;
        let [tasks, clients, keys, together, section] = numbers[..] else { return None };
        Some(Self { tasks, clients, keys, together, section: Duration::from_millis(section as u64) })
    }
}

// === impl Section ===

impl Section {
    /// Returns `None` if the contenders are stopped before it starts.
    async fn run<L: ContendedLock>(
        lock: &mut L,
        keys: Vec<u64>,
        duration: Duration,
        is_stopped: &AtomicBool,
    ) -> Option<Self> {
        let called = nanos();
        while !is_stopped.load(Ordering::Relaxed) {
            let Some(guard) = lock.lock(&keys).await else { continue };
            let (start, token) = (nanos(), L::token(&guard).unwrap_or(0));
            if !duration.is_zero() {
                // The timer of Tokio has steps of a millisecond.
                // Exponential.
                let sleep = move || std::thread::sleep(duration.mul_f64(-(1.0 - fastrand::f64()).ln()));
                tokio::task::spawn_blocking(sleep).await.expect("no panic");
            }
            let end = nanos();
            lock.unlock(guard).await;
            return Some(Self { called, start, end, released: nanos(), token, keys });
        }
        None
    }
}

// === impl ContendedLock ===

impl ContendedLock for Arc<RedisLock> {
    type Guard = RedisGuard;

    async fn lock(&mut self, keys: &[u64]) -> Option<RedisGuard> {
        RedisLock::lock(self, keys[0]).await
    }

    async fn unlock(&mut self, guard: RedisGuard) {
        RedisLock::unlock(self, guard).await;
    }

    fn token(guard: &RedisGuard) -> Option<u64> {
        guard.token()
    }
}

impl ContendedLock for Arc<DatabaseLock> {
    type Guard = DatabaseGuard;

    async fn lock(&mut self, keys: &[u64]) -> Option<DatabaseGuard> {
        Some(DatabaseLock::lock(self, keys[0]).await)
    }

    async fn unlock(&mut self, guard: DatabaseGuard) {
        DatabaseLock::unlock(self, guard).await;
    }

    fn token(guard: &DatabaseGuard) -> Option<u64> {
        guard.token()
    }
}

impl ContendedLock for Arc<ShareLock> {
    type Guard = ShareGuard;

    async fn lock(&mut self, keys: &[u64]) -> Option<ShareGuard> {
        ShareLock::lock(self, keys[0]).await
    }

    async fn unlock(&mut self, guard: ShareGuard) {
        guard.release().await;
    }

    fn token(guard: &ShareGuard) -> Option<u64> {
        guard.is_writer().then_some(1)
    }
}

impl ContendedLock for SeveralLock {
    type Guard = SeveralGuard;

    async fn lock(&mut self, keys: &[u64]) -> Option<SeveralGuard> {
        self.lock_all(keys).await
    }

    async fn unlock(&mut self, guard: SeveralGuard) {
        self.unlock_all(guard).await;
    }

    fn token(_: &SeveralGuard) -> Option<u64> {
        None
    }
}
