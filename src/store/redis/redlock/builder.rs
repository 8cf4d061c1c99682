//! Builder and constructors of a store: the servers, and the wait for a majority of them.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::time::{Instant, sleep, timeout_at};
use tower::BoxError;

use super::{
    group::Group,
    member::{Member, Members},
    node::Node,
    store::RedlockStore,
};
use crate::{
    limits::{REDLOCK_SERVERS_MAX, REDLOCK_SERVERS_MIN},
    store::{
        redis::{
            RedisConnectError,
            builder::RedisStoreBuilder,
            self_test::{SelfTestError, self_test_without_messages},
            shared::Shared,
            topology::{
                Endpoint, Parts, Topology,
                address::{Address, Deployment},
                cluster::Node as _,
                parameters::UrlSettings,
            },
        },
        remote::{
            batching::Outbox,
            credentials::Credentials,
            settings::{RETRY_INTERVAL, Timeouts, same},
        },
    },
};

/// Builder for a [`RedlockStore`] with non-default settings.
///
/// ```no_run
/// # use tower_lock::{LockManager, RedlockStore, store::RedisConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), RedisConnectError> {
/// let servers = ["redis://a:6379", "redis://b:6379", "redis://c:6379"];
/// let store = RedlockStore::builder().prefix("shop").connect(servers).await?;
/// let locks = LockManager::new(store);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until it connects"]
pub struct RedlockStoreBuilder(RedisStoreBuilder);

/// A server that is not tested yet.
type Candidate = (Arc<Member>, Arc<Node>);

impl RedlockStoreBuilder {
    /// Sets the prefix of the names of all locks. Default: `lock`.
    ///
    /// Applications that share a Redis need different prefixes. A prefix has 1 to 64 characters of
    /// `[A-Za-z0-9._-]`, and is not `tower-lock`. With any other prefix, connecting fails with
    /// [`RedisConnectError::InvalidPrefix`]. A [`RedisStore`](crate::RedisStore) on one of the
    /// servers needs another prefix, too: it would lock there alone.
    pub fn prefix(self, prefix: impl Into<String>) -> Self {
        Self(self.0.prefix(prefix))
    }

    /// Sets the timeout of connecting, which includes DNS, TCP, TLS and AUTH. Default: 2 seconds.
    ///
    /// The timeout is from 50 ms to 60 s. With any other, connecting fails with
    /// [`RedisConnectError::InvalidTimeout`]. [`connect`](Self::connect) retries within this time.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        Self(self.0.connect_timeout(timeout))
    }

    /// Sets the timeout of one call. Default: 500 ms.
    ///
    /// The timeout is from 50 ms to 5 s. With any other, connecting fails with
    /// [`RedisConnectError::InvalidTimeout`]. An acquire asks all servers twice, and waits for a
    /// majority for a third of the timeout each time: use at least six times the slowest usual
    /// round trip. A grant that is not confirmed ends on each server after this time.
    pub fn call_timeout(self, timeout: Duration) -> Self {
        Self(self.0.call_timeout(timeout))
    }

    /// Trusts these certificates, in PEM, in place of those of the system.
    ///
    /// This is for `rediss` URLs (feature `redis-tls`). With any other URL, or with a text without
    /// a certificate, connecting fails with [`RedisConnectError::InvalidTls`].
    pub fn tls_roots(self, pem: impl Into<Vec<u8>>) -> Self {
        Self(self.0.tls_roots(pem))
    }

    /// Shows this certificate to the servers, and proves it with this key, which is not encrypted.
    /// Both are in PEM. The certificates between it and its root may follow.
    ///
    /// This is for `rediss` URLs (feature `redis-tls`). With any other URL, or if the key is not
    /// that of the certificate, connecting fails with [`RedisConnectError::InvalidTls`].
    pub fn tls_client_certificate(self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        Self(self.0.tls_client_certificate(certificate, key))
    }

    /// Calls this function for user and password at each connect to one of the servers, in place of
    /// those of the URLs. See [`RedisStoreBuilder::credentials`].
    pub fn credentials<F, T>(self, function: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        Self(self.0.credentials(function))
    }

    /// Connects to 3, 5, 7 or 9 servers. Each URL is `redis://user:password@host:port/database`,
    /// `rediss://` for TLS (feature `redis-tls`), or `unix:///path`. One URL can name all of them:
    /// `redis+redlock://user:password@a:6379,b:6379,c:6379`.
    ///
    /// A URL may have the parameter `prefix`, as [`prefix`](Self::prefix), and with TLS those of
    /// [`RedisStoreBuilder::connect`](crate::store::RedisStoreBuilder::connect): `sslrootcert`,
    /// `sslcert` and `sslkey`.
    ///
    /// Returns when a majority of the servers has passed the self-test, and the others have passed
    /// it, cannot be reached, or have had the [call timeout](Self::call_timeout) for it. A server
    /// that cannot be reached now is checked when it can be, before it counts.
    ///
    /// # Errors
    ///
    /// Fails with a [`RedisConnectError`]: at once if a server has a defect that a retry does not
    /// repair, such as a missing permission, if two URLs lead to one server, or if one leads to a
    /// replica or a Cluster; else if no majority can be reached within the
    /// [`connect_timeout`](Self::connect_timeout).
    pub async fn connect<U: AsRef<str>>(
        self,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<RedlockStore, RedisConnectError> {
        let (store, candidates, timeouts) = self.build(urls)?;
        // Boxed: the nested future type is too deep for the default limit of the caller's compiler.
        let tested: BoxFuture<'_, _> = Box::pin(test(candidates, timeouts));
        tested.await?;
        Ok(store)
    }

    /// Creates a store as [`connect`](Self::connect) does, but does not wait for the servers, so
    /// that the service starts while they are down.
    ///
    /// Requests are rejected (503, not started) until a majority can be reached. Each server is
    /// checked before it counts; the log and [`LockManager::health`](crate::LockManager::health)
    /// have the errors.
    ///
    /// # Errors
    ///
    /// Fails if a URL, their number, the prefix or a timeout is invalid.
    pub fn connect_lazy<U: AsRef<str>>(
        self,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<RedlockStore, RedisConnectError> {
        Ok(self.build(urls)?.0)
    }

    fn build<U: AsRef<str>>(
        self,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<(RedlockStore, Vec<Candidate>, Timeouts), RedisConnectError> {
        let invalid = |defect: &str| Err(RedisConnectError::InvalidUrl(defect.into()));
        let (mut settings, mut endpoints) = (self.0, Vec::new());
        // One more than allowed is enough to know that there are too many.
        for url in urls.into_iter().take(REDLOCK_SERVERS_MAX + 1) {
            let Address { deployment, settings: of_url } =
                Address::parse(url.as_ref(), &settings.tls, settings.login.as_ref())?;
            settings.prefix = same("prefix", settings.prefix, of_url.prefix)?;
            match deployment {
                _ if of_url.min_replicas.is_some() => {
                    return invalid("the servers of a RedlockStore have no replicas");
                }
                Deployment::Server(endpoint) => endpoints.push(endpoint),
                Deployment::Redlock(servers) => endpoints.extend(servers),
                Deployment::Sentinel { .. } | Deployment::Cluster(_) => {
                    return invalid("each server of a RedlockStore is independent: no sentinels, and no Cluster");
                }
            }
        }
        let parts = settings.parts(UrlSettings::default())?;
        if !(REDLOCK_SERVERS_MIN..=REDLOCK_SERVERS_MAX).contains(&endpoints.len()) || endpoints.len().is_multiple_of(2)
        {
            return Err(RedisConnectError::InvalidServerCount(endpoints.len()));
        }
        let members = Members::new(endpoints.iter().map(ToString::to_string).collect());
        members.check_addresses()?;
        let candidate = |(index, endpoint): (usize, Endpoint)| {
            let (parts, address) = (Parts { user: endpoint.user(), ..parts.clone() }, endpoint.to_string());
            let (keyspace, members) = (parts.keyspace.clone(), Arc::clone(&members));
            let member = Arc::new(Member { endpoint, index, keyspace, members });
            let topology: Arc<dyn Topology> = Arc::<Member>::clone(&member);
            (member, Node::new(Shared::new(parts, topology, address, None)))
        };
        let candidates: Vec<_> = endpoints.into_iter().enumerate().map(candidate).collect();
        let nodes = candidates.iter().map(|(_, node)| Arc::clone(node)).collect();
        let timeouts = parts.timeouts;
        let group = Arc::new(Group { nodes, keyspace: parts.keyspace, timeouts, outbox: Outbox::default() });
        Ok((RedlockStore { group }, candidates, timeouts))
    }
}

/// Waits for a majority of the servers, and shortly for the others.
async fn test(candidates: Vec<Candidate>, timeouts: Timeouts) -> Result<(), RedisConnectError> {
    let (servers, deadline) = (candidates.len(), Instant::now() + timeouts.connect);
    let test = |index: usize, delay: Duration| {
        let (member, node) = &candidates[index];
        async move {
            sleep(delay).await;
            (index, test_one(member, &node.shared).await)
        }
    };
    let mut tests: FuturesUnordered<_> = (0..servers).map(|index| test(index, Duration::ZERO)).collect();
    // The last result of each.
    let mut results: Vec<Option<Result<(), String>>> = vec![None; servers];
    let mut wait_until = deadline;
    loop {
        let passed = results.iter().filter(|result| matches!(result, Some(Ok(())))).count();
        let is_majority = passed > servers / 2;
        if is_majority && results.iter().all(Option::is_some) {
            return Ok(());
        }
        match timeout_at(wait_until, tests.next()).await {
            Ok(Some((index, Ok(())))) => {
                results[index] = Some(Ok(()));
                if passed == servers / 2 {
                    wait_until = deadline.min(Instant::now() + timeouts.call);
                }
            }
            Ok(Some((_, Err(SelfTestError { error, is_transient: false })))) => return Err(error),
            Ok(Some((index, Err(SelfTestError { error, .. })))) => {
                results[index] = Some(Err(format!("{error:?}")));
                tests.push(test(index, RETRY_INTERVAL));
            }
            Ok(None) | Err(_) if is_majority => return Ok(()),
            Ok(None) | Err(_) => {
                let no_reply =
                    |index: usize| format!("no reply of Redis at {}", candidates[index].1.shared.server.address);
                let errors = results.into_iter().enumerate();
                let errors =
                    errors.filter_map(|(index, result)| result.map_or_else(|| Some(no_reply(index)), Result::err));
                return Err(RedisConnectError::NoMajority { servers, passed, errors: errors.collect() });
            }
        }
    }
}

/// Connects once, so that a defect is an error of its own kind, and then executes every command.
async fn test_one(member: &Member, shared: &Shared) -> Result<(), SelfTestError> {
    let failed = |error| shared.server.test_failed(error);
    member.connect_checked().await.map_err(|error| error.map_or_else(failed, SelfTestError::from))?;
    let server_us = self_test_without_messages(&shared.server).await?;
    shared.outbox.observe(server_us);
    Ok(())
}

impl RedlockStore {
    /// Connects to 3, 5, 7 or 9 servers, each at a URL of its own. See
    /// [`RedlockStoreBuilder::connect`].
    ///
    /// # Errors
    ///
    /// Fails with a [`RedisConnectError`] if a URL or their number is invalid, if no majority of
    /// the servers can be reached, or if one of them is too old, is not independent of the others,
    /// or lacks a permission.
    pub async fn connect<U: AsRef<str>>(urls: impl IntoIterator<Item = U>) -> Result<Self, RedisConnectError> {
        Self::builder().connect(urls).await
    }

    /// Returns a builder for a store with non-default settings.
    pub fn builder() -> RedlockStoreBuilder {
        RedlockStoreBuilder::default()
    }
}
