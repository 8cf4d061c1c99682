//! The locks within one process that are compared, behind one interface.

use std::{future::Future, sync::Arc};

use lockable::{LockPool, Lockable};
use tokio::sync::{Mutex, MutexGuard};
use tower_lock::{LockGuard, LockManager};

use crate::peers::{MutexMap, MutexMapGuard};

/// A lock for each key. Not behind an enum: the largest of the futures would slow all of them.
pub trait MemoryLock: Send + Sync + 'static {
    const NAME: &str;

    type Guard<'a>: Send;

    fn new() -> Self;

    fn lock(&self, key: u64) -> impl Future<Output = Self::Guard<'_>> + Send;

    fn unlock(guard: Self::Guard<'_>);
}

pub struct Ours(LockManager);

pub struct LockableCrate(LockPool<String>);

pub struct MapOfMutexes(Arc<MutexMap>);

/// Mutexes without a map: the key is an index.
pub struct BareMutexes(Vec<Mutex<()>>);

/// The keys that the work uses are smaller.
pub const KEYS: u64 = 10_000;

fn text(key: u64) -> String {
    format!("reward:{key}:gold")
}

impl MemoryLock for Ours {
    const NAME: &str = "tower-lock";

    type Guard<'a> = LockGuard;

    fn new() -> Self {
        Self(LockManager::in_memory())
    }

    async fn lock(&self, key: u64) -> LockGuard {
        self.0.lock(("reward", key, "gold")).await.expect("a grant")
    }

    fn unlock(guard: LockGuard) {
        drop(guard.release());
    }
}

impl MemoryLock for LockableCrate {
    const NAME: &str = "lockable";

    type Guard<'a> = <LockPool<String> as Lockable<String, ()>>::Guard<'a>;

    fn new() -> Self {
        Self(LockPool::new())
    }

    async fn lock(&self, key: u64) -> Self::Guard<'_> {
        self.0.async_lock(text(key)).await
    }

    fn unlock(guard: Self::Guard<'_>) {
        drop(guard);
    }
}

impl MemoryLock for MapOfMutexes {
    const NAME: &str = "dashmap of mutexes";

    type Guard<'a> = MutexMapGuard;

    fn new() -> Self {
        Self(Arc::default())
    }

    async fn lock(&self, key: u64) -> MutexMapGuard {
        self.0.lock(text(key)).await
    }

    fn unlock(guard: MutexMapGuard) {
        drop(guard);
    }
}

impl MemoryLock for BareMutexes {
    const NAME: &str = "tokio::sync::Mutex";

    type Guard<'a> = MutexGuard<'a, ()>;

    fn new() -> Self {
        Self((0..KEYS).map(|_| Mutex::default()).collect())
    }

    async fn lock(&self, key: u64) -> MutexGuard<'_, ()> {
        self.0[key as usize].lock().await
    }

    fn unlock(guard: MutexGuard<'_, ()>) {
        drop(guard);
    }
}
