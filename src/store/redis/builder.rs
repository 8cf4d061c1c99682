//! From an address to a store that is known to work.

use std::{env, pin::Pin, sync::Arc, time::Duration};

use deadpool_redis::{
    Config, Pool,
    redis::{Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo},
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

use super::{
    RedisStore, Shared,
    connection::{SharedConnection, Source, Timeouts},
    error::RedisConnectError,
    proto::{Keyspace, escape_control},
    self_test::self_test,
    socket::Connector,
    subscriber::Subscriber,
};
use crate::{
    clock::Clock,
    limits::{CONNECT_TIMEOUT, REDIS_PREFIX, STORE_CALL_TIMEOUT},
};

/// Makes a [`RedisStore`] that is to be told something about itself.
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
#[must_use = "a builder makes nothing before it connects"]
pub struct RedisStoreBuilder {
    prefix: Option<String>,
    connect_timeout: Option<Duration>,
    call_timeout: Option<Duration>,
}

impl RedisStoreBuilder {
    /// What the names of this application's locks begin with: `lock`, if it is not set. Two applications on one Redis have two.
    ///
    /// 1 to 64 of `[A-Za-z0-9._-]`; anything else is an error of whatever connects.
    pub fn prefix(self, prefix: impl Into<String>) -> Self {
        Self { prefix: Some(prefix.into()), ..self }
    }

    /// How long it may take to make a connection: DNS, TCP, TLS, AUTH. Default: 2 s. From 50 ms to 60 s.
    ///
    /// [`connect`](Self::connect) tries again within this time, so that a service may start a moment before its Redis. Later a request does
    /// not wait for a connection any longer than for a call; the connection is made all the same.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        Self { connect_timeout: Some(timeout), ..self }
    }

    /// How long one call may take. Default: 500 ms. From 50 ms to 5 s.
    ///
    /// Set it to some times the slowest round trip that is usual: a call that takes longer is repeated, and after twice this time without an
    /// answer a request is rejected (503, not started). A longer one makes an outage slower to be noticed by clients, and no lock safer.
    pub fn call_timeout(self, timeout: Duration) -> Self {
        Self { call_timeout: Some(timeout), ..self }
    }

    /// Connects to this address: `redis://user:password@host:port/database`, `rediss://` for TLS (feature `redis-tls`),
    /// `unix:///path`.
    ///
    /// # Errors
    ///
    /// Whatever a [`RedisConnectError`] says. A server that is not there yet is tried again until
    /// [`connect_timeout`](Self::connect_timeout) is over.
    pub async fn connect(self, url: &str) -> Result<RedisStore, RedisConnectError> {
        let address = Address::parse(url, "")?;
        self.connect_to(address).await
    }

    /// As [`connect`](Self::connect), but without waiting for Redis: the service starts though Redis is down.
    ///
    /// Until it is reachable requests are rejected (503, not started). With the first connection everything is checked that `connect` checks:
    /// version, rights, messages. What is missing is in the log, and in [`LockManager::health`](crate::LockManager::health), which a readiness
    /// probe asks; it is checked again about once a second.
    ///
    /// # Errors
    ///
    /// The address, the prefix or a timeout is none.
    pub fn connect_lazy(self, url: &str) -> Result<RedisStore, RedisConnectError> {
        let shared = self.build_shared(None, Address::parse(url, "")?)?;
        shared.subscriber.start(None);
        Ok(RedisStore { shared })
    }

    /// Connects to the address in the environment variable `REDIS_URL`.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect); and there may be no such variable.
    pub async fn from_env(self) -> Result<RedisStore, RedisConnectError> {
        let url = env::var("REDIS_URL").map_err(|_| RedisConnectError::MissingUrl)?;
        let address = Address::parse(&url, "REDIS_URL: ")?;
        self.connect_to(address).await
    }

    /// Connects as the rest of the service does. Of the configuration the address counts, and not that of the pool: locks have their own three
    /// connections.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect).
    pub async fn from_config(self, config: &Config) -> Result<RedisStore, RedisConnectError> {
        let address = match (&config.url, &config.connection) {
            (Some(url), None) => Address::parse(url, "")?,
            (None, connection) => Address::from_info(ConnectionInfo::from(connection.clone().unwrap_or_default()), "")?,
            (Some(_), Some(_)) => {
                return Err(RedisConnectError::InvalidUrl(
                    "the configuration has an URL and a connection: which one?".into(),
                ));
            }
        };
        self.connect_to(address).await
    }

    /// Takes its two connections from your pool, and makes a third one to this address, because no pool gives one that can listen.
    ///
    /// The two leave the pool, which makes others in their place; it is asked again when one of them breaks. Whoever made the pool decides on its
    /// `TCP_NODELAY`: without it a call can take 40 ms. A reply on them has no limit of length, as it has on connections of the store's own.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect).
    pub async fn from_pool(
        self,
        pool: Pool,
        address: impl IntoConnectionInfo,
    ) -> Result<RedisStore, RedisConnectError> {
        let address = address.into_connection_info().map_err(|error| RedisConnectError::InvalidUrl(error.into()))?;
        let shared = self.build_shared(Some(pool), Address::from_info(address, "")?)?;
        Self::test_connection(shared).await
    }

    async fn connect_to(self, address: Address) -> Result<RedisStore, RedisConnectError> {
        let shared = self.build_shared(None, address)?;
        Self::test_connection(shared).await
    }

    fn build_shared(self, pool: Option<Pool>, address: Address) -> Result<Arc<Shared>, RedisConnectError> {
        let prefix = self.prefix.as_deref().unwrap_or(REDIS_PREFIX);
        let names = Keyspace::new(prefix).map_err(|_| RedisConnectError::InvalidPrefix(prefix.to_owned()))?;
        let within = |setting, value: Option<Duration>, default, longest| match value.unwrap_or(default) {
            value if (MIN_TIMEOUT..=longest).contains(&value) => Ok(value),
            value => Err(RedisConnectError::InvalidTimeout { setting, value }),
        };
        let limits = Timeouts {
            call: within("call_timeout", self.call_timeout, STORE_CALL_TIMEOUT, MAX_CALL_TIMEOUT)?,
            connect: within("connect_timeout", self.connect_timeout, CONNECT_TIMEOUT, MAX_CONNECT_TIMEOUT)?,
        };
        let client = Client::open(address.info).map_err(|error| RedisConnectError::InvalidUrl(error.into()))?;
        let connector = Connector::new(client, limits.connect, limits.call);
        let source = pool.map_or_else(|| Source::Own(connector.clone()), Source::Pool);
        let recovered = Arc::new(Notify::new());
        let [asks, ends] = [source.clone(), source]
            .map(|source| Arc::new(SharedConnection::new(source, limits, Arc::clone(&recovered))));
        let lanes = [Arc::clone(&asks), Arc::clone(&ends)];
        Ok(Arc::new(Shared {
            subscriber: Subscriber::new(connector, address.display, names.clone(), limits, lanes, recovered),
            acquire_conn: asks,
            release_conn: ends,
            keyspace: names,
            clock: Clock::default(),
            server_clock: Default::default(),
            warned_of_missing_ttl: Default::default(),
            #[cfg(feature = "tracing")]
            fence_warned_at: Default::default(),
        }))
    }

    /// A server may come up a moment later than the service.
    async fn test_connection(shared: Arc<Shared>) -> Result<RedisStore, RedisConnectError> {
        let give_up = Instant::now() + shared.subscriber.timeouts.connect;
        loop {
            // A plain type for whoever awaits it: what is in there is nested deeper than their compiler may look by default.
            let test: Pin<Box<dyn Future<Output = _> + Send + '_>> = Box::pin(self_test(&shared.subscriber));
            match test.await {
                Ok((listener, now)) => {
                    shared.server_clock().observe(now, shared.clock.now());
                    shared.subscriber.check_passed();
                    shared.subscriber.start(Some(listener));
                    return Ok(RedisStore { shared });
                }
                Err(failed) if failed.is_transient && Instant::now() + RETRY_INTERVAL < give_up => {
                    sleep(RETRY_INTERVAL).await;
                }
                Err(failed) => return Err(failed.error),
            }
        }
    }
}

/// A lane that found nobody there says so for as long as its pause.
const RETRY_INTERVAL: Duration = SharedConnection::RECONNECT_DELAY.saturating_add(Duration::from_millis(10));

/// Timeouts that can be set.
pub(super) const MIN_TIMEOUT: Duration = Duration::from_millis(50);
pub(super) const MAX_CALL_TIMEOUT: Duration = Duration::from_secs(5);
pub(super) const MAX_CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// An address, and what of it may be shown.
struct Address {
    info: ConnectionInfo,
    display: String,
}

impl Address {
    /// `of`: where it comes from.
    fn parse(url: &str, of: &str) -> Result<Self, RedisConnectError> {
        let wants_tls = url.starts_with("rediss:") || url.starts_with("valkeys:");
        if wants_tls && !cfg!(feature = "redis-tls") {
            return Err(RedisConnectError::TlsNotEnabled);
        }
        let hint = url_hint(url);
        let info = url.into_connection_info().map_err(|_| {
            let hint = hint.as_deref().unwrap_or("an address is `redis://user:password@host:6379/0`, for instance");
            RedisConnectError::InvalidUrl(format!("{of}{hint}").into())
        })?;
        let mut address = Self::from_info(info, of)?;
        if let Some(hint) = hint {
            // What was read as a host may be a part of a password.
            address.display = format!("{of}{hint}");
        }
        Ok(address)
    }

    fn from_info(info: ConnectionInfo, of: &str) -> Result<Self, RedisConnectError> {
        if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            #[cfg(not(feature = "redis-tls"))]
            return Err(RedisConnectError::TlsNotEnabled);
            // Whatever the process has chosen; rustls panics where nobody has, or where two crates bring one each.
            #[cfg(feature = "redis-tls")]
            if rustls::crypto::CryptoProvider::get_default().is_none() {
                let _ = rustls::crypto::ring::default_provider().install_default();
            }
        }
        let shown = format!("{of}{}", escape_control(&info.addr().to_string()));
        Ok(Self { info: with_nodelay(info), display: shown })
    }
}

/// What may be wrong with an address, without a word of it that may be secret.
fn url_hint(url: &str) -> Option<String> {
    if url.trim().is_empty() {
        return Some("it is empty: `redis://host:6379`, for instance".to_owned());
    }
    let Some((scheme, rest)) = url.split_once("://") else {
        // Behind the last `@` there is no password.
        let host = url.rsplit('@').next().unwrap_or_default();
        return Some(format!("it has no scheme: is it `redis://{}`?", escape_control(host)));
    };
    if scheme.starts_with("unix") || scheme == "redis+unix" {
        return None;
    }
    if scheme.starts_with("http") {
        return Some("its scheme is not `redis`, `rediss` or `unix`: is it `redis://host:6379`?".to_owned());
    }
    let at = rest.rfind('@')?;
    let is_ambiguous = rest[..at].contains(['@', '#', '/', '?']);
    is_ambiguous.then(|| {
        "`@`, `#`, `/`, `?` and `%` of a user or a password are written `%40`, `%23`, `%2F`, `%3F` and `%25`".to_owned()
    })
}

/// What is sent goes out at once, and does not wait for the answer to what was sent before.
fn with_nodelay(address: ConnectionInfo) -> ConnectionInfo {
    let settings = address.tcp_settings().clone().set_nodelay(true);
    address.set_tcp_settings(settings)
}
