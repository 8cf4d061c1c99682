//! A server, and several instances of a service in front of it.

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
#[allow(dead_code, reason = "in part for the tests with a store in memory")]
pub(crate) mod panics;
#[path = "../it/support/wire.rs"]
#[allow(dead_code, reason = "in part for the tests with a store in memory")]
pub(crate) mod wire;

/// Longer than anything takes here, on a machine that does something else as well.
const AT_MOST: Duration = Duration::from_secs(120);

/// A Redis, and a proxy before it.
pub(crate) struct World {
    pub(crate) redis: RedisServer,
    pub(crate) proxy: Proxy,
}

/// `None`: there is no `redis-server`, and that was said.
pub(crate) async fn world() -> Option<World> {
    if !RedisServer::is_available() {
        tower_lock_faults::skipped(std::thread::current().name().unwrap_or("a test"), "redis-server");
        return None;
    }
    let redis = RedisServer::start().await;
    let proxy = Proxy::start(redis.address()).await;
    Some(World { redis, proxy })
}

impl World {
    /// One more instance of the service, through the proxy.
    pub(crate) async fn instance(&self, name: &str) -> LockManager {
        LockManager::builder(self.store().await).instance(name).build()
    }

    /// One more instance, which nothing happens to.
    pub(crate) async fn sound_instance(&self, name: &str) -> LockManager {
        LockManager::builder(RedisStore::connect(&self.redis.url()).await.expect("it is up")).instance(name).build()
    }

    pub(crate) async fn store(&self) -> Arc<RedisStore> {
        Arc::new(RedisStore::connect(&self.proxy.url()).await.expect("it is up"))
    }

    pub(crate) async fn ask(&self, parts: &[&str]) -> Reply {
        self.redis.command(parts).await
    }

    /// What is in Redis but for the fences.
    pub(crate) async fn keys(&self) -> Vec<String> {
        let keys = self.ask(&["KEYS", "*"]).await;
        keys.texts()
            .into_iter()
            .filter(|key| *key != "tower-lock:lock:f" && *key != "tower-lock:shop:f")
            .map(ToOwned::to_owned)
            .collect()
    }

    /// Nothing of ours is left but the fences.
    pub(crate) async fn is_clean_soon(&self) {
        until("nothing is left", async || self.keys().await.is_empty()).await;
    }

    /// How often scripts were run.
    pub(crate) async fn scripts(&self) -> u64 {
        let stats = self.ask(&["INFO", "commandstats"]).await;
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

/// What [`key`] is called in Redis.
pub(crate) const NAME: &str = "lock:k";
pub(crate) const LINE: &str = "tower-lock:lock:q:{lock:k}";

pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(AT_MOST, future).await.unwrap_or_else(|_| panic!("never happened: {what}"))
}

/// Asks until it is so.
pub(crate) async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < AT_MOST, "never so: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// What was written to the log.
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
