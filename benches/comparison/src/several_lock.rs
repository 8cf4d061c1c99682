//! The locks of several keys on Redis that are compared, behind one interface.

use std::time::Duration;

use ::redis_lock::MultiResourceLock;
use redis_of_redis_lock::Client;
use rlock::{
    AcquireOptions, LockKeys,
    async_lock::{RLock, RMultiKeyLockGuard},
};
use tower_lock::{LockGuards, LockManager, RedisStore};

use crate::peers::{LEASE, SetNx, SetNxGuard, client};

/// A lock of several keys on Redis, with connections of its own.
pub enum SeveralLock {
    Ours(LockManager),
    Rlock(RLock),
    RedisLock(MultiResourceLock),
    SetNx(SetNx),
}

pub enum SeveralGuard {
    Ours(LockGuards),
    Rlock(RMultiKeyLockGuard),
    /// The id of the lock, and the number of its keys.
    RedisLock(String, usize),
    SetNx(Vec<SetNxGuard>),
}

/// The longest wait of a call.
const WAIT: Duration = Duration::from_secs(60);

impl SeveralLock {
    pub const OURS: &str = "tower-lock";
    pub const RLOCK: &str = "rlock";
    pub const REDIS_LOCK: &str = "redis-lock";
    pub const SET_NX: &str = "SET NX, key by key";

    /// # Panics
    ///
    /// Panics if the name is none of the constants or Redis does not respond.
    pub async fn connect(name: &str, url: &str) -> Self {
        match name {
            Self::OURS => Self::Ours(LockManager::new(RedisStore::connect(url).await.expect("a Redis"))),
            Self::RLOCK => {
                let connection = client(url).get_connection_manager().await.expect("a connection");
                Self::Rlock(RLock::with_connection_manager(connection).await.expect("a Redis"))
            }
            Self::REDIS_LOCK => {
                let client = Client::open(url).expect("a client");
                ::redis_lock::setup(&client).await.expect("a Redis with functions");
                Self::RedisLock(MultiResourceLock::new(client).expect("a lock"))
            }
            Self::SET_NX => Self::SetNx(SetNx::multiplexed(url).await),
            name => panic!("no lock is named {name}"),
        }
    }

    /// Waits at most a minute, or, by hand, for one attempt and its pause. The pauses of the crates
    /// are their defaults.
    pub async fn lock_all(&mut self, keys: &[u64]) -> Option<SeveralGuard> {
        let names = |prefix| -> Vec<_> { keys.iter().map(|key| format!("{prefix}:{key}")).collect() };
        match self {
            Self::Ours(locks) => {
                let guards = locks.lock_all(keys.iter().map(|&key| ("order", key))).wait(WAIT);
                guards.await.ok().map(SeveralGuard::Ours)
            }
            Self::Rlock(locks) => {
                let options = AcquireOptions::builder().ttl(LEASE).lock_timeout(Some(WAIT)).build().expect("valid");
                let keys = LockKeys::new(names("lock:order")).expect("different keys");
                let guard = locks.acquire_multi_key_mutex_with_options(keys, options);
                guard.await.ok().map(SeveralGuard::Rlock)
            }
            Self::RedisLock(lock) => {
                // It adds the prefix `lock:`.
                let names = names("order");
                let id = lock.acquire(&names, LEASE, WAIT, ::redis_lock::DEFAULT_SLEEP);
                Some(SeveralGuard::RedisLock(id.await.expect("a reply")?, keys.len()))
            }
            Self::SetNx(locks) => {
                let guards = locks.try_lock_all(names("lock:order")).await;
                if guards.is_none() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                guards.map(SeveralGuard::SetNx)
            }
        }
    }

    /// Returns after the reply of Redis.
    ///
    /// # Panics
    ///
    /// Panics if a key was lost, or the lock is another one.
    pub async fn unlock_all(&mut self, guard: SeveralGuard) {
        match (self, guard) {
            (Self::Ours(_), SeveralGuard::Ours(guards)) => {
                guards.release().await.expect("a reply");
            }
            (Self::Rlock(_), SeveralGuard::Rlock(mut guard)) => guard.release().await.expect("a reply"),
            (Self::RedisLock(lock), SeveralGuard::RedisLock(id, keys)) => {
                assert_eq!(lock.release(&id).await.expect("a reply"), keys, "no key was lost");
            }
            (Self::SetNx(locks), SeveralGuard::SetNx(guards)) => locks.unlock_all(guards).await,
            _ => panic!("the guard of another lock"),
        }
    }
}
