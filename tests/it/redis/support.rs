//! A Redis server, and several instances of a service in front of it.

use std::{path::Path, sync::Arc};

use tokio::net::TcpListener;
use tower_lock::{LockManager, RedisStore};
use tower_lock_testkit::{Proxy, RedisServer, Reply, SentinelGroup, wait::until};

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
    LockManager::builder(RedisStore::connect(&group.url()).await.expect("it is up")).instance(name).build()
}

/// A self-signed certificate for this machine.
pub(crate) fn certificate(folder: &std::path::Path) -> bool {
    let script = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key -out crt -days 2 \
                  -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext basicConstraints=critical,CA:false";
    let made = std::process::Command::new("sh").args(["-c", script]).current_dir(folder).output();
    made.is_ok_and(|made| made.status.success())
}

/// Lets a server also listen with the certificate of this folder, and returns the port.
pub(crate) async fn listen_with_tls(server: &RedisServer, folder: &Path) -> Option<u16> {
    let file = |name: &str| folder.join(name).to_str().expect("text").to_owned();
    let port = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound").port();
    for (name, value) in [
        ("tls-cert-file", file("crt")),
        ("tls-key-file", file("key")),
        ("tls-ca-cert-file", file("crt")),
        ("tls-auth-clients", "no".to_owned()),
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
