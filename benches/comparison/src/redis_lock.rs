//! The locks on Redis that are compared, behind one interface.

use std::time::Duration;

use redis::{cluster::ClusterClient, io::tcp::TcpSettings};
use tower_lock::{LockGuard, LockManager};

use crate::peers::{LEASE, SetNx, SetNxGuard, client};

/// A lock on Redis, with connections of its own.
pub enum RedisLock {
    Ours(LockManager),
    Rslock(rslock::LockManager),
    SetNx(SetNx),
}

pub enum RedisGuard {
    Ours(LockGuard),
    Rslock(rslock::Lock),
    SetNx(SetNxGuard),
}

// === impl RedisGuard ===

impl RedisGuard {
    /// The fencing token, which the other locks do not have.
    pub fn token(&self) -> Option<u64> {
        match self {
            Self::Ours(guard) => Some(guard.fencing_token().as_u64()),
            Self::Rslock(_) | Self::SetNx(_) => None,
        }
    }
}

// === impl RedisLock ===

impl RedisLock {
    pub const OURS: &str = "tower-lock";
    pub const RSLOCK: &str = "rslock";
    pub const SET_NX: &str = "SET NX, multiplexed";
    pub const SET_NX_POOLED: &str = "SET NX, deadpool";

    /// The URL is that of [`Servers`](crate::servers::Servers). `SET NX` knows one server only.
    ///
    /// # Panics
    ///
    /// Panics if the name is none of the constants or Redis does not respond.
    pub async fn connect(name: &str, url: &str) -> Self {
        match name {
            Self::OURS => Self::Ours(LockManager::connect(url).await.expect("servers").build()),
            Self::RSLOCK => Self::Rslock(rslock(url)),
            Self::SET_NX => Self::SetNx(SetNx::multiplexed(url).await),
            Self::SET_NX_POOLED => Self::SetNx(SetNx::pooled(url)),
            name => panic!("no lock is named {name}"),
        }
    }

    /// One attempt. rslock repeats it twice, after up to 200 ms each.
    pub async fn try_lock(&self, key: u64) -> Option<RedisGuard> {
        match self {
            Self::Ours(locks) => locks.try_lock(("order", key)).await.ok().map(RedisGuard::Ours),
            Self::Rslock(locks) => {
                locks.lock(format!("lock:order:{key}").as_bytes(), LEASE).await.ok().map(RedisGuard::Rslock)
            }
            Self::SetNx(locks) => locks.try_lock(format!("lock:order:{key}")).await.map(RedisGuard::SetNx),
        }
    }

    /// Waits at most a minute, or, if the lock has no queue, for one attempt and its pause.
    pub async fn lock(&self, key: u64) -> Option<RedisGuard> {
        if let Self::Ours(locks) = self {
            return locks.lock(("order", key)).wait(Duration::from_secs(60)).await.ok().map(RedisGuard::Ours);
        }
        let guard = self.try_lock(key).await;
        if guard.is_none() && matches!(self, Self::SetNx(_)) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        guard
    }

    /// Returns after the reply of Redis.
    ///
    /// # Panics
    ///
    /// Panics if the lock was lost, or is another one.
    pub async fn unlock(&self, guard: RedisGuard) {
        match (self, guard) {
            (Self::Ours(_), RedisGuard::Ours(guard)) => {
                guard.release().await.expect("a reply");
            }
            (Self::Rslock(locks), RedisGuard::Rslock(guard)) => locks.unlock(&guard).await,
            (Self::SetNx(locks), RedisGuard::SetNx(guard)) => locks.unlock(guard).await,
            _ => panic!("the guard of another lock"),
        }
    }
}

fn rslock(url: &str) -> rslock::LockManager {
    match several(url) {
        Some(("redis+cluster", urls)) => {
            let client = ClusterClient::builder(urls).tcp_settings(TcpSettings::default().set_nodelay(true));
            rslock::LockManager::from_cluster_client(client.build().expect("a client"))
        }
        Some((_, urls)) => rslock::LockManager::from_clients(urls.iter().map(|url| client(url)).collect()),
        None => rslock::LockManager::from_clients(vec![client(url)]),
    }
}

/// The scheme of a URL of several servers, and the URL of each of them.
fn several(url: &str) -> Option<(&str, Vec<String>)> {
    let (scheme, addresses) = url.split_once("://").filter(|(scheme, _)| scheme.contains('+'))?;
    Some((scheme, addresses.split(',').map(|address| format!("redis://{address}")).collect()))
}
