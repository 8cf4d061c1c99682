//! A Redis server, and several instances of a service in front of it.

use std::{future::IntoFuture, path::Path, sync::Arc, time::Duration};

use tokio::{net::TcpListener, task::JoinHandle};
use tower_lock::{
    AcquisitionId, LockError, LockGuard, LockKey, LockManager, RedisStore,
    lock::ReleaseOutcome,
    store::{AcquireRequest, IfBusy, QueueConfig, RedisStoreBuilder, ReleaseRequest},
};
use tower_lock_testkit::{
    Proxy, RedisServer, Reply, SentinelGroup, costs, limits,
    locks::key,
    wait::{soon, until},
};

/// A Redis server with a proxy in front of it.
pub(crate) struct Environment {
    pub(crate) redis: RedisServer,
    pub(crate) proxy: Proxy,
}

/// Returns `None`, with a note on stderr, if there is no `redis-server`.
pub(crate) async fn environment() -> Option<Environment> {
    if !RedisServer::is_available() {
        tower_lock_testkit::skipped(std::thread::current().name().unwrap_or("a test"), "redis-server");
        return None;
    }
    let redis = RedisServer::start().await;
    let proxy = Proxy::start(redis.address()).await;
    Some(Environment { redis, proxy })
}

impl Environment {
    /// A new instance of the service, behind the proxy.
    pub(crate) async fn instance(&self, name: &str) -> LockManager {
        LockManager::builder(self.store().await).instance(name).build()
    }

    /// A new instance that connects without the proxy.
    pub(crate) async fn direct_instance(&self, name: &str) -> LockManager {
        LockManager::builder(self.direct_store().await).instance(name).build()
    }

    /// A new instance behind the proxy, whose calls time out soon.
    pub(crate) async fn hasty_instance(&self, name: &str) -> LockManager {
        let store = hasty().connect(&self.proxy.url()).await.expect("it is up");
        LockManager::builder(store).instance(name).build()
    }

    /// A new instance behind the proxy, whose leases and times of renewal are longer than any wait
    /// of a test.
    pub(crate) async fn instance_without_renewals(&self, name: &str) -> LockManager {
        LockManager::builder(self.store().await).instance(name).lease(LONG).build()
    }

    pub(crate) async fn store(&self) -> Arc<RedisStore> {
        connect(&self.proxy.url()).await
    }

    pub(crate) async fn direct_store(&self) -> Arc<RedisStore> {
        connect(&self.redis.url()).await
    }

    pub(crate) async fn command(&self, parts: &[&str]) -> Reply {
        self.redis.command(parts).await
    }

    /// The keys in Redis, except for the fence counters.
    pub(crate) async fn keys(&self) -> Vec<String> {
        let keys = self.command(&["KEYS", "*"]).await;
        keys.texts()
            .into_iter()
            .filter(|key| *key != "tower-lock:lock:f" && *key != "tower-lock:shop:f")
            .map(ToOwned::to_owned)
            .collect()
    }

    /// Waits until only the fence counters are left.
    pub(crate) async fn wait_until_clean(&self) {
        until("no data is left", async || self.keys().await.is_empty()).await;
    }

    /// Waits until this many requests are in the queue of the key.
    pub(crate) async fn wait_until_queued(&self, number: i64) {
        until("queued", async || self.command(&["LLEN", QUEUE]).await.integer() == Some(number)).await;
    }

    /// The first waiter for the key, which is in the queue.
    pub(crate) async fn waiter(&self, locks: &LockManager) -> Waiter {
        let waiter = tokio::spawn(locks.lock(key()).into_future());
        self.wait_until_queued(1).await;
        waiter
    }

    /// The number of scripts run.
    pub(crate) async fn scripts(&self) -> u64 {
        costs::scripts(&self.redis).await
    }

    /// The number of runs of each command, in scripts and outside.
    pub(crate) async fn calls<const N: usize>(&self, commands: [&str; N]) -> [u64; N] {
        let stats = self.command(&["INFO", "commandstats"]).await;
        let stats = stats.text().expect("text");
        commands.map(|command| costs::runs_in(stats, command))
    }

    /// The number of processes that listen for messages.
    pub(crate) async fn listeners(&self) -> usize {
        self.command(&["PUBSUB", "CHANNELS", "tower-lock:*"]).await.items().len()
    }
}

/// A store whose calls time out soon. Only its first connect is patient.
pub(crate) fn hasty() -> RedisStoreBuilder {
    limits::redis().call_timeout(limits::SHORT)
}

/// A store without a proxy.
pub(crate) async fn connect(url: &str) -> Arc<RedisStore> {
    Arc::new(limits::redis().connect(url).await.expect("it is up"))
}

/// A call that waits for the key.
pub(crate) type Waiter = JoinHandle<Result<LockGuard, LockError>>;

/// The lock of a waiter.
pub(crate) async fn granted(waiter: Waiter) -> LockGuard {
    soon("a grant", waiter).await.expect("no panic").expect("a grant")
}

/// Lets a waiter have its section.
pub(crate) async fn served(waiter: Waiter) -> ReleaseOutcome {
    granted(waiter).await.release().await.expect("held")
}

/// Locks and releases the key.
pub(crate) async fn pass(locks: &LockManager) {
    let guard = soon("the key is free", locks.lock(key()).into_future()).await.expect("a grant");
    guard.release().await.expect("held");
}

/// Longer than any test.
pub(crate) const LONG: Duration = Duration::from_secs(600);

/// No entry and no offer expires during a test.
pub(crate) const TERMS: QueueConfig = QueueConfig::new(LONG, LONG, 8);

/// A request that is valid during the whole test, and so is its grant.
pub(crate) fn acquire(key: &LockKey, id: &AcquisitionId, if_busy: IfBusy) -> AcquireRequest {
    AcquireRequest::new(key.clone(), id.clone(), LONG, if_busy, TERMS, LONG)
}

/// A release without a lock-delay.
pub(crate) fn release(key: &LockKey, id: &AcquisitionId) -> ReleaseRequest {
    ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, TERMS)
}

/// Returns `None`, with a note on stderr, if there is no `redis-server`.
pub(crate) async fn sentinel_group(replicas: usize) -> Option<SentinelGroup> {
    if !RedisServer::is_available() {
        tower_lock_testkit::skipped(std::thread::current().name().unwrap_or("a test"), "redis-server");
        return None;
    }
    Some(SentinelGroup::start(replicas).await)
}

/// A new instance of the service.
pub(crate) async fn instance_of(group: &SentinelGroup, name: &str) -> LockManager {
    LockManager::builder(connect(&group.url()).await).instance(name).build()
}

/// Lets a server also listen with the certificate of this folder, for clients that have it, too,
/// and returns the port.
pub(crate) async fn listen_with_tls(server: &RedisServer, folder: &Path) -> Option<u16> {
    let file = |name: &str| folder.join(name).to_str().expect("text").to_owned();
    let port = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound").port();
    for (name, value) in [
        ("tls-cert-file", file("crt")),
        ("tls-key-file", file("key")),
        ("tls-ca-cert-file", file("crt")),
        ("tls-auth-clients", "yes".to_owned()),
        ("tls-port", port.to_string()),
    ] {
        // A server that was built without TLS ends here.
        let reply = server.try_command(&["CONFIG", "SET", name, &value]).await.ok()?;
        assert_eq!(reply, Reply::Status("OK".to_owned()), "{name}");
    }
    Some(port)
}

/// The name of [`key`](tower_lock_testkit::locks::key) in Redis.
pub(crate) const NAME: &str = "lock:k";
pub(crate) const QUEUE: &str = "tower-lock:lock:q:{lock:k}";
