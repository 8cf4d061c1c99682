//! `RedlockStore` on several real servers.

mod conformance;

use std::time::Duration;

use futures_util::future::join_all;
use tower_lock::{LockManager, RedlockStore};
use tower_lock_testkit::{Proxy, RedisServer, wait::until};

/// Independent servers, each with a proxy in front of it.
pub(crate) struct Servers {
    pub(crate) redis: Vec<RedisServer>,
    pub(crate) proxies: Vec<Proxy>,
}

/// Returns `None`, with a note on stderr, if there is no `redis-server`.
pub(crate) async fn servers(count: usize) -> Option<Servers> {
    if !RedisServer::is_available() {
        tower_lock_testkit::skipped(std::thread::current().name().unwrap_or("a test"), "redis-server");
        return None;
    }
    let redis: Vec<_> = join_all((0..count).map(|_| RedisServer::start())).await;
    let proxies = join_all(redis.iter().map(|redis| Proxy::start(redis.address()))).await;
    Some(Servers { redis, proxies })
}

impl Servers {
    pub(crate) fn urls(&self) -> Vec<String> {
        self.proxies.iter().map(Proxy::url).collect()
    }

    pub(crate) async fn store(&self) -> RedlockStore {
        RedlockStore::connect(self.urls()).await.expect("they are up")
    }

    /// A new instance of the service, behind the proxies.
    pub(crate) async fn instance(&self, name: &str) -> LockManager {
        LockManager::builder(self.store().await).instance(name).build()
    }
}
