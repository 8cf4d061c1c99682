//! `RedlockStore` on several real servers, some of which fail.

mod conformance;
mod connecting;
mod contention;
mod costs;
mod fences;
mod operations;
mod outages;

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_lock::{LockGuard, LockManager, RedlockStore};
use tower_lock_testkit::{
    Proxy, RedisServer, Reply, limits,
    locks::key,
    wait::{ms, soon, until},
};

use crate::support::NAME;

/// The longest lease: a lock that is left behind outlasts every test.
const LONGEST: Duration = Duration::from_secs(600);
const FENCE: &str = "tower-lock:lock:f";

/// Independent servers, each with a proxy in front of it.
struct Servers {
    redis: Vec<RedisServer>,
    proxies: Vec<Proxy>,
}

/// Returns `None`, with a note on stderr, if there is no `redis-server`.
async fn servers(count: usize) -> Option<Servers> {
    if !RedisServer::is_available() {
        tower_lock_testkit::skipped(std::thread::current().name().unwrap_or("a test"), "redis-server");
        return None;
    }
    let redis: Vec<_> = join_all((0..count).map(|_| RedisServer::start())).await;
    let proxies = join_all(redis.iter().map(|redis| Proxy::start(redis.address()))).await;
    Some(Servers { redis, proxies })
}

impl Servers {
    fn urls(&self) -> Vec<String> {
        self.proxies.iter().map(Proxy::url).collect()
    }

    async fn store(&self) -> RedlockStore {
        limits::redlock().connect(self.urls()).await.expect("they are up")
    }

    /// A new instance of the service whose calls time out soon.
    async fn hasty_instance(&self, name: &str) -> LockManager {
        let store = limits::redlock().call_timeout(limits::SHORT).connect(self.urls()).await.expect("they are up");
        LockManager::builder(store).lease(LONGEST).instance(name).build()
    }

    /// A new instance of the service, behind the proxies.
    async fn instance(&self, name: &str) -> LockManager {
        LockManager::builder(self.store().await).instance(name).build()
    }

    /// The keys at a server, without its last fence.
    async fn keys(&self, server: usize) -> Vec<String> {
        let keys = self.redis[server].command(&["KEYS", "*"]).await;
        keys.texts().into_iter().filter(|key| *key != FENCE).map(str::to_owned).collect()
    }

    /// The number of servers that have granted [`key`](tower_lock_testkit::locks::key), and know
    /// its fence.
    async fn holding(&self) -> usize {
        let up = self.redis.iter().filter(|redis| !redis.has_ended());
        let values = join_all(up.map(async |redis| redis.command(&["HVALS", NAME]).await)).await;
        let is_complete = |value: &&Reply| value.texts().iter().any(|fence| !fence.ends_with('?'));
        values.iter().filter(is_complete).count()
    }

    /// Locks the key at all servers.
    async fn lock_everywhere(&self, locks: &LockManager) -> LockGuard {
        let grant = async {
            loop {
                let guard = locks.lock(key()).await.expect("free");
                // A slow server may have missed this grant.
                for _ in 0..50 {
                    if self.holding().await == self.redis.len() {
                        return guard;
                    }
                    sleep(ms(20)).await;
                }
                guard.release().await.expect("held");
            }
        };
        soon("a grant of all servers", grant).await
    }

    async fn wait_until_clean(&self) {
        until("no data is left", async || {
            let up = (0..self.redis.len()).filter(|server| !self.redis[*server].has_ended());
            join_all(up.map(|server| self.keys(server))).await.concat().is_empty()
        })
        .await;
    }

    /// Locks the key at a server for another program.
    async fn occupy(&self, server: usize) {
        self.redis[server].command(&["HSET", NAME, "other", "1"]).await;
        self.redis[server].command(&["PEXPIRE", NAME, "100000"]).await;
    }
}
