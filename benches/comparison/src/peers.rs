//! Locks as users write them by hand.

use std::{sync::Arc, time::Duration};

use dashmap::DashMap;
use redis::{Client, IntoConnectionInfo, Script, aio::MultiplexedConnection};
use tokio::sync::{Mutex, OwnedMutexGuard};

/// The lease of every lock on Redis.
pub const LEASE: Duration = Duration::from_secs(30);

/// `SET NX PX` with a random token, and a script that deletes the key while it has this token.
pub struct SetNx {
    connection: Connection,
    unlock: Script,
}

enum Connection {
    Multiplexed(MultiplexedConnection),
    /// With its defaults: a `PING` at each use.
    Pooled(deadpool_redis::Pool),
}

/// A key that is held, and the token of its holder.
pub struct SetNxGuard {
    key: String,
    token: String,
}

/// A map of mutexes. The last user of a key removes its entry.
#[derive(Default)]
pub struct MutexMap(DashMap<String, Arc<Mutex<()>>>);

pub struct MutexMapGuard {
    map: Arc<MutexMap>,
    key: String,
    guard: Option<OwnedMutexGuard<()>>,
}

/// A client without the delay of small packets, which each of these crates allows.
pub fn client(url: &str) -> Client {
    let info = url.into_connection_info().expect("a URL");
    let settings = info.tcp_settings().clone().set_nodelay(true);
    Client::open(info.set_tcp_settings(settings)).expect("a client")
}

// === impl SetNx ===

impl SetNx {
    const UNLOCK: &str =
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

    pub async fn multiplexed(url: &str) -> Self {
        let connection = client(url).get_multiplexed_async_connection().await.expect("a connection");
        Self::new(Connection::Multiplexed(connection))
    }

    pub fn pooled(url: &str) -> Self {
        let runtime = Some(deadpool_redis::Runtime::Tokio1);
        Self::new(Connection::Pooled(deadpool_redis::Config::from_url(url).create_pool(runtime).expect("a pool")))
    }

    fn new(connection: Connection) -> Self {
        Self { connection, unlock: Script::new(Self::UNLOCK) }
    }

    pub async fn try_lock(&self, key: String) -> Option<SetNxGuard> {
        let token = format!("{:016x}", fastrand::u64(..));
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(&token).arg("NX").arg("PX").arg(LEASE.as_millis() as u64);
        let reply: Option<String> = match &self.connection {
            Connection::Multiplexed(connection) => set.query_async(&mut connection.clone()).await,
            Connection::Pooled(pool) => set.query_async(&mut pool.get().await.expect("a connection")).await,
        }
        .expect("a reply");
        reply.map(|_| SetNxGuard { key, token })
    }

    /// One key after the other. If one is busy, those before it are released.
    pub async fn try_lock_all(&self, keys: Vec<String>) -> Option<Vec<SetNxGuard>> {
        let mut held = Vec::new();
        for key in keys {
            match self.try_lock(key).await {
                Some(guard) => held.push(guard),
                None => {
                    self.unlock_all(held).await;
                    return None;
                }
            }
        }
        Some(held)
    }

    pub async fn unlock_all(&self, held: Vec<SetNxGuard>) {
        for guard in held {
            self.unlock(guard).await;
        }
    }

    pub async fn unlock(&self, held: SetNxGuard) {
        let mut call = self.unlock.key(held.key);
        call.arg(held.token);
        let deleted: i64 = match &self.connection {
            Connection::Multiplexed(connection) => call.invoke_async(&mut connection.clone()).await,
            Connection::Pooled(pool) => call.invoke_async(&mut pool.get().await.expect("a connection")).await,
        }
        .expect("a reply");
        assert_eq!(deleted, 1, "the key was not lost");
    }
}

// === impl MutexMap ===

impl MutexMap {
    pub async fn lock(self: &Arc<Self>, key: String) -> MutexMapGuard {
        let guard = self.mutex(&key).lock_owned().await;
        MutexMapGuard { map: Arc::clone(self), key, guard: Some(guard) }
    }

    pub fn try_lock(self: &Arc<Self>, key: String) -> Option<MutexMapGuard> {
        let guard = self.mutex(&key).try_lock_owned().ok()?;
        Some(MutexMapGuard { map: Arc::clone(self), key, guard: Some(guard) })
    }

    fn mutex(&self, key: &str) -> Arc<Mutex<()>> {
        Arc::clone(&self.0.entry(key.to_owned()).or_default())
    }
}

impl Drop for MutexMapGuard {
    fn drop(&mut self) {
        self.guard = None;
        // Another user of the key has a clone of its mutex.
        self.map.0.remove_if(&self.key, |_, mutex| Arc::strong_count(mutex) == 1);
    }
}
