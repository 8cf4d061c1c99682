//! A Redis server, and several instances of a service in front of it.

use std::{
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout};
use tower_lock::{LockKey, LockManager, RedisStore};
use tower_lock_faults::{Proxy, RedisServer, Reply};
use tracing_subscriber::{fmt::MakeWriter, layer::SubscriberExt};

#[path = "../it/support/panics.rs"]
#[allow(dead_code, reason = "partly used by the tests of `it` only")]
pub(crate) mod panics;
#[path = "../it/support/wire.rs"]
#[allow(dead_code, reason = "partly used by the tests of `it` only")]
pub(crate) mod wire;

/// Longer than any step takes, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A Redis server with a proxy in front of it.
pub(crate) struct Environment {
    pub(crate) redis: RedisServer,
    pub(crate) proxy: Proxy,
}

/// Returns `None`, with a note on stderr, if there is no `redis-server`.
pub(crate) async fn environment() -> Option<Environment> {
    if !RedisServer::is_available() {
        tower_lock_faults::skipped(std::thread::current().name().unwrap_or("a test"), "redis-server");
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
        LockManager::builder(RedisStore::connect(&self.redis.url()).await.expect("it is up")).instance(name).build()
    }

    pub(crate) async fn store(&self) -> Arc<RedisStore> {
        Arc::new(RedisStore::connect(&self.proxy.url()).await.expect("it is up"))
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

    /// The number of scripts run.
    pub(crate) async fn scripts(&self) -> u64 {
        let stats = self.command(&["INFO", "commandstats"]).await;
        let calls = |command: &str| {
            let line =
                stats.text()?.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")))?;
            line.split(',').next()?.parse::<u64>().ok()
        };
        calls("evalsha").unwrap_or(0) + calls("eval").unwrap_or(0)
    }
}

pub(crate) fn key() -> LockKey {
    LockKey::from(("k",))
}

/// The name of [`key`] in Redis.
pub(crate) const NAME: &str = "lock:k";
pub(crate) const QUEUE: &str = "tower-lock:lock:q:{lock:k}";

pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(TIMEOUT, future).await.unwrap_or_else(|_| panic!("never happened: {what}"))
}

/// Polls until the condition holds.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < TIMEOUT, "it never held: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The text of the log.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Log {
    pub(crate) fn listen(&self) -> tracing::subscriber::DefaultGuard {
        let to_us = tracing_subscriber::fmt::layer().with_writer(self.clone()).with_ansi(false);
        tracing::subscriber::set_default(tracing_subscriber::registry().with(to_us))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}
