//! The locks on Redis that several callers hold, behind one interface.

use std::time::Duration;

use rlock::{
    AcquireOptions,
    async_lock::{RLock, RReadLockGuard, RWriteLockGuard},
};
use tower_lock::{LockGuard, LockManager, PermitGuard};

use crate::peers::client;

/// A lock with connections of its own.
pub enum ShareLock {
    Permits(LockManager, u16),
    /// The number of writers among a hundred.
    ReadersAndWriters(LockManager, u64),
    Rlock(RLock),
}

pub enum ShareGuard {
    Permit(PermitGuard),
    Writer(LockGuard),
    RlockReader(RReadLockGuard),
    RlockWriter(RWriteLockGuard),
}

/// The lease of all of them: a crash blocks a permit for so long.
pub const SHORT_LEASE: Duration = Duration::from_secs(5);
/// Of a hundred sections, so many are of writers.
const WRITERS: u64 = 5;
const WAIT: Duration = Duration::from_secs(60);

impl ShareLock {
    pub const PERMITS: &str = "tower-lock, 100 permits";
    pub const FOUR_PERMITS: &str = "tower-lock, 4 permits";
    pub const READERS: &str = "tower-lock, readers and writers";
    pub const ONLY_READERS: &str = "tower-lock, readers";
    pub const RLOCK: &str = "rlock, readers and writers";

    /// Returns `None` if the name is none of the constants.
    ///
    /// # Panics
    ///
    /// Panics if Redis does not respond.
    pub async fn connect(name: &str, url: &str) -> Option<Self> {
        let ours = async || LockManager::connect(url).await.expect("a Redis").lease(SHORT_LEASE).build();
        Some(match name {
            Self::PERMITS => Self::Permits(ours().await, 100),
            Self::FOUR_PERMITS => Self::Permits(ours().await, 4),
            Self::READERS => Self::ReadersAndWriters(ours().await, WRITERS),
            Self::ONLY_READERS => Self::ReadersAndWriters(ours().await, 0),
            Self::RLOCK => {
                let connection = client(url).get_connection_manager().await.expect("a connection");
                Self::Rlock(RLock::with_connection_manager(connection).await.expect("a Redis"))
            }
            _ => return None,
        })
    }

    /// Waits at most a minute.
    pub async fn lock(&self, key: u64) -> Option<ShareGuard> {
        let writers = if let Self::ReadersAndWriters(_, writers) = self { *writers } else { WRITERS };
        let is_writer = fastrand::u64(0..100) < writers;
        match self {
            Self::Permits(locks, limit) => {
                locks.permit(("order", key), *limit).wait(WAIT).await.ok().map(ShareGuard::Permit)
            }
            Self::ReadersAndWriters(locks, _) if is_writer => {
                locks.lock(("order", key)).wait(WAIT).await.ok().map(ShareGuard::Writer)
            }
            Self::ReadersAndWriters(locks, _) => {
                locks.read(("order", key)).wait(WAIT).await.ok().map(ShareGuard::Permit)
            }
            Self::Rlock(locks) => {
                let options = AcquireOptions::builder().ttl(SHORT_LEASE).lock_timeout(Some(WAIT)).build();
                let (key, options) = (format!("lock:order:{key}"), options.expect("valid"));
                if is_writer {
                    locks.acquire_write_with_options(key, options).await.ok().map(ShareGuard::RlockWriter)
                } else {
                    locks.acquire_read_with_options(key, options).await.ok().map(ShareGuard::RlockReader)
                }
            }
        }
    }
}

impl ShareGuard {
    /// Returns after the reply of Redis.
    ///
    /// # Panics
    ///
    /// Panics if the key was lost.
    pub async fn release(self) {
        match self {
            Self::Permit(guard) => drop(guard.release().await.expect("a reply")),
            Self::Writer(guard) => drop(guard.release().await.expect("a reply")),
            Self::RlockReader(mut guard) => guard.release().await.expect("a reply"),
            Self::RlockWriter(mut guard) => guard.release().await.expect("a reply"),
        }
    }

    pub fn is_writer(&self) -> bool {
        matches!(self, Self::Writer(_) | Self::RlockWriter(_))
    }
}
