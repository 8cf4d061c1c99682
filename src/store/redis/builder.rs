//! Builder and constructors of a store: URL, timeouts, TLS, pool, first test of the servers.

use std::{pin::Pin, sync::Arc, time::Duration};

use deadpool_redis::Pool;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tower::BoxError;

use super::{
    error::{CallError, RedisConnectError},
    self_test::{SelfTestError, self_test},
    shared::Shared,
    store::RedisStore,
    topology::{
        Nodes, Parts, Sentinels, Servers, Single,
        address::{Address, Deployment},
        cluster::Node,
        parameters::UrlSettings,
        replicas::MinReplicas,
    },
    wire::Keyspace,
};
use crate::{
    limits::REDIS_PREFIX,
    store::remote::{
        credentials::{Credentials, Login},
        settings::{RETRY_INTERVAL, Timeouts, same},
        tls::TlsSettings,
    },
};

/// Builder for a [`RedisStore`] with non-default settings.
///
/// ```no_run
/// # use tower_lock::{LockManager, RedisStore, store::RedisConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), RedisConnectError> {
/// let store = RedisStore::builder().prefix("shop").connect("redis://127.0.0.1:6379").await?;
/// let locks = LockManager::new(store);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until it connects"]
pub struct RedisStoreBuilder {
    pub(super) prefix: Option<String>,
    connect_timeout: Option<Duration>,
    call_timeout: Option<Duration>,
    min_replicas: Option<MinReplicas>,
    pub(super) tls: TlsSettings,
    pub(super) login: Option<Login>,
}

impl RedisStoreBuilder {
    /// Sets the prefix of the names of all locks. Default: `lock`.
    ///
    /// Applications that share a Redis need different prefixes. A prefix has 1 to 64 characters of
    /// `[A-Za-z0-9._-]`, and is not `tower-lock`. With any other prefix, connecting fails with
    /// [`RedisConnectError::InvalidPrefix`].
    pub fn prefix(self, prefix: impl Into<String>) -> Self {
        Self { prefix: Some(prefix.into()), ..self }
    }

    /// Sets the timeout of connecting, which includes DNS, TCP, TLS and AUTH. Default: 2 seconds.
    ///
    /// The timeout is from 50 ms to 60 s. With any other, connecting fails with
    /// [`RedisConnectError::InvalidTimeout`]. [`connect`](Self::connect) retries within this time,
    /// so that a service may start shortly before its Redis. Later, when a connection is replaced,
    /// a request waits for it at most as long as for a call, and the connect continues in the
    /// background.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        Self { connect_timeout: Some(timeout), ..self }
    }

    /// Sets the timeout of one call. Default: 500 ms.
    ///
    /// The timeout is from 50 ms to 5 s. With any other, connecting fails with
    /// [`RedisConnectError::InvalidTimeout`]. Use a multiple of the slowest usual round trip. A
    /// call that takes longer is repeated. A request is rejected (503, not started) after twice
    /// this time without a reply. A longer timeout delays these rejections during an outage, and
    /// does not make locks safer.
    pub fn call_timeout(self, timeout: Duration) -> Self {
        Self { call_timeout: Some(timeout), ..self }
    }

    /// Counts a grant or a renewal only when this number of replicas has it. Default: 0.
    ///
    /// Replication is asynchronous: without this setting, a failover to a replica that does not
    /// have the newest grants can lead to two holders. With it, a grant that too few replicas
    /// acknowledge within `timeout` is released, and its request is repeated or rejected (503, not
    /// started). A master that is separated from its replicas can therefore grant nothing.
    ///
    /// With as many as all replicas, no failover loses a grant. With fewer, a replica without the
    /// newest grants may still be promoted. Each acquire waits for one more round trip, from the
    /// master to the replicas; requests at the same time share it. While too few replicas are up,
    /// no lock is acquired.
    ///
    /// `timeout` is from 1 ms to half of the [`call_timeout`](Self::call_timeout). With any other,
    /// connecting fails with [`RedisConnectError::InvalidTimeout`]. Use a multiple of the usual
    /// time of replication, for example 100 ms.
    pub fn min_replicas(self, count: u32, timeout: Duration) -> Self {
        Self { min_replicas: Some(MinReplicas { count, timeout }), ..self }
    }

    /// Trusts these certificates, in PEM, in place of those of the system.
    ///
    /// This is for a `rediss` URL (feature `redis-tls`), and holds for the connections to the
    /// servers and to the sentinels. With any other URL, or with a text without a certificate,
    /// connecting fails with [`RedisConnectError::InvalidTls`].
    pub fn tls_roots(self, pem: impl Into<Vec<u8>>) -> Self {
        Self { tls: self.tls.with_roots(pem.into()), ..self }
    }

    /// Shows this certificate to the servers and to the sentinels, and proves it with this key,
    /// which is not encrypted. Both are in PEM. The certificates between it and its root may
    /// follow.
    ///
    /// This is for a `rediss` URL (feature `redis-tls`), whose servers have `tls-auth-clients yes`.
    /// With any other URL, or if the key is not that of the certificate, connecting fails with
    /// [`RedisConnectError::InvalidTls`].
    pub fn tls_client_certificate(self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        Self { tls: self.tls.with_client_certificate(certificate.into(), key.into()), ..self }
    }

    /// Calls this function for user and password at each connect, in place of those of the URL.
    ///
    /// Use it for passwords that end, such as the tokens of ElastiCache, which are valid for 15
    /// minutes. A connection keeps its login. [`connect_timeout`](Self::connect_timeout) includes
    /// the call. If the function fails, the connect fails, and is repeated. Several connects may
    /// call the function at the same time: keep a token while it is valid. The function must not
    /// block its thread. The passwords of sentinels stay those of the URL. With a user or a
    /// password in the URL, connecting fails with [`RedisConnectError::InvalidUrl`].
    ///
    /// ```no_run
    /// # use tower_lock::{RedisStore, store::{Credentials, RedisConnectError}};
    /// # #[derive(Clone)] struct Vault;
    /// # impl Vault { async fn token(&self) -> std::io::Result<String> { Ok(String::new()) } }
    /// # async fn connect(vault: Vault) -> Result<RedisStore, RedisConnectError> {
    /// let credentials = move || {
    ///     let vault = vault.clone();
    ///     async move { Ok(Credentials::new("locks", vault.token().await?)) }
    /// };
    /// RedisStore::builder()
    ///     .credentials(credentials)
    ///     .connect("rediss://cache.internal:6379")
    ///     .await
    /// # }
    /// ```
    pub fn credentials<F, T>(self, function: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        Self { login: Some(Login::new(function)), ..self }
    }

    /// Connects to a URL:
    ///
    /// | URL | server |
    /// |---|---|
    /// | `redis://user:password@host:port/database` | one server |
    /// | `unix:///path` | one server on this machine, by its socket |
    /// | `redis+sentinel://user:password@s1:26379,s2:26379,s3:26379/mymaster/database` | the master that these sentinels name, which the store follows when it moves |
    /// | `redis+cluster://user:password@a:6379,b:6379,c:6379` | the Redis Cluster of these nodes, which name the others |
    ///
    /// `rediss` in place of `redis` means TLS (feature `redis-tls`), also to the sentinels. User
    /// and password are those of the servers. Name at least three sentinels, and as many nodes of a
    /// Cluster as are seldom down together.
    ///
    /// The sentinels are asked together, and the newest configuration among their replies counts. A
    /// failover is noticed by a message of a sentinel, by a reply of a replica, and by two requests
    /// each second: for the role of the server, and for the master that the sentinels name.
    /// Replication is asynchronous: a failover may lose the newest grants, without
    /// [`min_replicas`](Self::min_replicas).
    ///
    /// The URL may have parameters, for example
    /// `redis://host:6379?prefix=shop&min_replicas=1`:
    ///
    /// | parameter | meaning |
    /// |---|---|
    /// | `prefix` | as [`prefix`](Self::prefix) |
    /// | `min_replicas` | as [`min_replicas`](Self::min_replicas), within 100 ms |
    /// | `min_replicas_timeout_ms` | another time for it, in milliseconds |
    /// | `sslrootcert` | the file of the trusted certificates, as [`tls_roots`](Self::tls_roots) |
    /// | `sslcert`, `sslkey` | the files of the certificate of this client and of its key |
    /// | `sentinel_username`, `sentinel_password` | those of all sentinels |
    /// | `db`, `user`, `pass` | database, user and password of `unix:///path` |
    ///
    /// Any other parameter is an error. So is one that the builder sets to another value: neither
    /// of them is ignored.
    ///
    /// # Errors
    ///
    /// Fails with a [`RedisConnectError`]. If the server cannot be reached, connecting is retried
    /// until [`connect_timeout`](Self::connect_timeout) has passed.
    pub async fn connect(self, url: &str) -> Result<RedisStore, RedisConnectError> {
        let store = self.build(None, url)?;
        test(&store.servers).await?;
        Ok(store)
    }

    /// Creates a store as [`connect`](Self::connect) does, but does not wait for Redis, so that the
    /// service starts while Redis is down.
    ///
    /// Requests are rejected (503, not started) until Redis can be reached. The first connection is
    /// checked in the same way as by `connect`: version, permissions, messages. If a check fails,
    /// the error is logged, [`LockManager::health`](crate::LockManager::health) returns it for a
    /// readiness probe, and the check is repeated about once a second.
    ///
    /// # Errors
    ///
    /// Fails if the URL, the prefix or a timeout is invalid.
    pub fn connect_lazy(self, url: &str) -> Result<RedisStore, RedisConnectError> {
        let store = self.build(None, url)?;
        store.start();
        Ok(store)
    }

    /// Takes the connections for calls from a pool, and opens one for messages to this URL.
    ///
    /// A pool has no connections for pub/sub. Two connections are for calls, and a third one with
    /// [`min_replicas`](Self::min_replicas). They are not returned to the pool. A broken one is
    /// replaced by another of the pool. Enable `TCP_NODELAY` in the pool, because otherwise a call
    /// can take 40 ms. Replies on connections of a pool are not bounded in length, and their TLS is
    /// that of the pool.
    ///
    /// The URL is that of one server, with the parameters of [`connect`](Self::connect).
    ///
    /// # Errors
    ///
    /// The same as [`connect`](Self::connect).
    pub async fn from_pool(self, pool: Pool, url: &str) -> Result<RedisStore, RedisConnectError> {
        let store = self.build(Some(pool), url)?;
        test(&store.servers).await?;
        Ok(store)
    }

    fn build(self, pool: Option<Pool>, url: &str) -> Result<RedisStore, RedisConnectError> {
        let invalid = |defect: &str| Err(RedisConnectError::InvalidUrl(defect.into()));
        let Address { deployment, settings } = Address::parse(url, &self.tls, self.login.as_ref())?;
        let parts = self.parts(settings)?;
        let call_timeout = parts.timeouts.call;
        let one = |topology, address, user| {
            Servers::One(Shared::new(Parts { user, ..parts.clone() }, topology, address, None))
        };
        let servers = match (deployment, pool) {
            (Deployment::Server(endpoint), pool) => {
                let user = if pool.is_some() { "the user of the pool".to_owned() } else { endpoint.user() };
                let address = endpoint.to_string();
                let server = Single { endpoint, pool, call_timeout };
                one(Arc::new(server), address, user)
            }
            (Deployment::Sentinel { .. } | Deployment::Cluster(_), Some(_)) => {
                return invalid("connections of a pool lead to one server");
            }
            (Deployment::Sentinel { master, sentinels, server }, None) => {
                let user = server.user();
                let sentinels = Sentinels::new(master, sentinels, server, call_timeout, parts.background.clone());
                let address = sentinels.to_string();
                one(Arc::new(sentinels), address, user)
            }
            (Deployment::Cluster(seeds), None) => Servers::Cluster(Nodes::new(seeds, parts)),
            (Deployment::Redlock(_), _) => {
                return invalid("independent servers are a `RedlockStore`; `LockManager::connect` connects to them");
            }
        };
        Ok(RedisStore { servers: Arc::new(servers) })
    }

    /// What all servers have in common, but for the user.
    pub(super) fn parts(self, of_url: UrlSettings) -> Result<Parts, RedisConnectError> {
        let prefix = same("prefix", self.prefix, of_url.prefix)?;
        let prefix = prefix.as_deref().unwrap_or(REDIS_PREFIX);
        let min_replicas = same("min_replicas", self.min_replicas, of_url.min_replicas)?;
        let min_replicas = min_replicas.filter(|replicas| replicas.count > 0);
        let keyspace = Keyspace::new(prefix).ok_or_else(|| RedisConnectError::InvalidPrefix(prefix.to_owned()))?;
        let timeouts = Timeouts::new(self.call_timeout, self.connect_timeout)?;
        if let Some(MinReplicas { timeout, .. }) = min_replicas
            && !(Duration::from_millis(1)..=timeouts.call / 2).contains(&timeout)
        {
            return Err(RedisConnectError::InvalidTimeout { setting: "min_replicas", value: timeout });
        }
        let (user, background) = Default::default();
        Ok(Parts { user, keyspace, timeouts, min_replicas, background })
    }
}

/// Runs the self-test of each server. A server that starts shortly after the service is retried.
/// Of a Cluster, one master that works is enough: the others are tested when they can be reached.
async fn test(servers: &Servers<Shared>) -> Result<(), RedisConnectError> {
    let deadline = Instant::now() + servers.timeouts().connect;
    loop {
        // Boxed: the nested future type is too deep for the default limit of the caller's compiler.
        let test: Pin<Box<dyn Future<Output = _> + Send + '_>> = Box::pin(test_all(servers, deadline));
        let (passed, failure) = test.await;
        match failure {
            None => return Ok(()),
            Some(failure) if !failure.is_transient => return Err(failure.error),
            Some(_) if Instant::now() + RETRY_INTERVAL < deadline => sleep(RETRY_INTERVAL).await,
            // Each of them warns.
            Some(_) if passed > 0 => return Ok(()),
            Some(failure) => return Err(failure.error),
        }
    }
}

/// Tests the servers that have not passed. Returns how many have, and the worst failure.
async fn test_all(servers: &Servers<Shared>, deadline: Instant) -> (usize, Option<SelfTestError>) {
    let passed = || servers.all().iter().filter(|shared| shared.messages.has_passed()).count();
    if let Servers::Cluster(nodes) = servers {
        let refreshed = nodes.refresh_before(deadline).await;
        let failure = refreshed.err().or_else(|| nodes.all().is_empty().then_some(CallError::NoMaster));
        if let Some(failure) = failure {
            // The map may be late, and masters may have passed before.
            return (passed(), Some(nodes_error(nodes, failure)));
        }
    }
    let all = servers.all();
    let tests = all.iter().filter(|shared| !shared.messages.has_passed()).map(|shared| async move {
        let (subscriptions, server_us) = self_test(&shared.server, shared.messages.on_message()).await?;
        shared.outbox.observe(server_us);
        shared.messages.check_passed();
        shared.messages.start(Some(subscriptions));
        Ok(())
    });
    let failures = join_all(tests).await.into_iter().filter_map(Result::err);
    let failure = failures.reduce(|worst: SelfTestError, failure| if worst.is_transient { failure } else { worst });
    (passed(), failure)
}

fn nodes_error(nodes: &Nodes<Shared>, error: CallError) -> SelfTestError {
    let (address, user) = (nodes.to_string(), &nodes.parts.user);
    match error.of_connect() {
        CallError::NotCluster(address) => RedisConnectError::NotCluster { address: address.clone() }.into(),
        _ => SelfTestError::unreachable(error, address, user),
    }
}

impl RedisStore {
    /// Connects to a URL, for example `redis://user:password@host:port/database`.
    /// [`RedisStoreBuilder::connect`] has the other kinds, and the parameters of a URL.
    ///
    /// # Errors
    ///
    /// Fails with a [`RedisConnectError`] if the URL is invalid, the server cannot be reached or is
    /// too old, or a permission is missing.
    pub async fn connect(url: &str) -> Result<Self, RedisConnectError> {
        Self::builder().connect(url).await
    }

    /// Returns a builder for a store with non-default settings.
    pub fn builder() -> RedisStoreBuilder {
        RedisStoreBuilder::default()
    }
}
