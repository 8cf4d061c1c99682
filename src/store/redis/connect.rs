//! From an address to a store that is known to work.

use std::{
    env,
    error::Error,
    fmt,
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::Arc,
};

use deadpool_redis::{
    Config, Manager, Pool, PoolConfig, Runtime,
    redis::{
        AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, aio::PubSub, cmd,
        from_redis_value, make_extension_error,
    },
};
use futures_util::StreamExt;
use tokio::time::{Instant, timeout};

use super::{
    RedisStore, Shared,
    events::Events,
    lane::{CALL, Lane, Question},
    protocol::{self, Names, SelfTested},
    trouble::Trouble,
};
use crate::{
    clock::Clock,
    defaults::{PREFIX, STORE_CALL},
    key::LockKey,
};

/// Makes a [`RedisStore`] that is to be told something about itself.
///
/// ```no_run
/// # use tower_lock::{Locks, RedisStore, RedisConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), RedisConnectError> {
/// let store = RedisStore::builder().prefix("shop").connect("redis://127.0.0.1:6379").await?;
/// let locks = Locks::new(store);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder makes nothing before it connects"]
pub struct RedisStoreBuilder {
    prefix: Option<String>,
}

/// Why a [`RedisStore`] could not be made: found when the service starts, and not at three in the morning.
#[derive(Debug)]
#[non_exhaustive]
pub enum RedisConnectError {
    /// The environment variable `REDIS_URL` is not set, or is no text.
    NoUrl,
    /// The address cannot be read.
    Address(Box<dyn Error + Send + Sync>),
    /// The address wants TLS (`rediss://`), and the crate was built without the feature `redis-tls`.
    TlsNotBuilt,
    /// The prefix cannot be one: 1 to 64 of `[A-Za-z0-9._-]`, and not `tower-lock`.
    Prefix(String),
    /// There was no connection, or no answer; or an answer that nobody can work with.
    Unreachable(Box<dyn Error + Send + Sync>),
    /// The server is older than Redis 7.0; its version.
    TooOld(String),
    /// The user may not do all that is needed, or the server cannot: what was refused, and in which words.
    Refused(Vec<String>),
    /// Messages do not come, or nobody can tell who gets them: how many should have got the one that was sent, as the server says, and whether it
    /// came. Waiters would sleep until they ask again, and be taken for dead.
    NoEvents {
        /// How many got it, as the server says.
        receivers: u64,
        /// Whether it came.
        came: bool,
    },
}

impl RedisStoreBuilder {
    /// What the names of this application's locks begin with: `lock`, if it is not set. Two applications on one Redis have two.
    ///
    /// 1 to 64 of `[A-Za-z0-9._-]`; anything else is an error of whatever connects.
    pub fn prefix(self, prefix: impl Into<String>) -> Self {
        Self { prefix: Some(prefix.into()) }
    }

    /// Connects to this address: `redis://user:password@host:port/database`, `rediss://` for TLS (feature `redis-tls`),
    /// `unix:///path`.
    ///
    /// # Errors
    ///
    /// Whatever a [`RedisConnectError`] says. It takes some round trips, and half a second for each that is not answered.
    pub async fn connect(self, url: &str) -> Result<RedisStore, RedisConnectError> {
        self.open(readable(url)?, PoolConfig::default()).await
    }

    /// Connects to the address in the environment variable `REDIS_URL`.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect); and there may be no such variable.
    pub async fn from_env(self) -> Result<RedisStore, RedisConnectError> {
        let url = env::var("REDIS_URL").map_err(|_| RedisConnectError::NoUrl)?;
        self.connect(&url).await
    }

    /// Connects as the rest of the service does.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect).
    pub async fn from_config(self, config: &Config) -> Result<RedisStore, RedisConnectError> {
        let address = match (&config.url, &config.connection) {
            (Some(url), None) => readable(url)?,
            (None, connection) => ConnectionInfo::from(connection.clone().unwrap_or_default()),
            (Some(_), Some(_)) => {
                return Err(RedisConnectError::Address(
                    "the configuration has an URL and a connection: which one?".into(),
                ));
            }
        };
        self.open(address, config.get_pool_config()).await
    }

    /// Takes its two connections from your pool, and makes a third one to this address, because no pool gives one that can listen.
    ///
    /// The two leave the pool, which makes others in their place; it is asked again when one of them breaks. Whoever made the pool decides on its
    /// `TCP_NODELAY`: without it a call can take 40 ms.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect).
    pub async fn from_pool(
        self,
        pool: Pool,
        address: impl IntoConnectionInfo,
    ) -> Result<RedisStore, RedisConnectError> {
        let address = address.into_connection_info().map_err(|error| RedisConnectError::Address(error.into()))?;
        self.open_through(pool, address).await
    }

    async fn open(self, address: ConnectionInfo, config: PoolConfig) -> Result<RedisStore, RedisConnectError> {
        let address = quick(with_tls_only_if_built(address)?);
        // Timeouts are ours: each call has one, and so has each connection that is made.
        let connections = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(STORE_CALL))
            .set_response_timeout(Some(2 * STORE_CALL))
            .set_pipeline_buffer_size(PIPELINE);
        let manager = Manager::new_with_config(address.clone(), connections)
            .map_err(|error| RedisConnectError::Address(error.into()))?;
        let pool = Pool::builder(manager).config(config).runtime(Runtime::Tokio1).build();
        self.open_through(pool.map_err(|error| RedisConnectError::Address(error.into()))?, address).await
    }

    async fn open_through(self, pool: Pool, address: ConnectionInfo) -> Result<RedisStore, RedisConnectError> {
        let address = quick(with_tls_only_if_built(address)?);
        let prefix = self.prefix.as_deref().unwrap_or(PREFIX);
        let names = Names::new(prefix).map_err(|_| RedisConnectError::Prefix(prefix.to_owned()))?;
        let client = Client::open(address).map_err(|error| RedisConnectError::Address(error.into()))?;
        let [asks, ends] = [pool.clone(), pool].map(|pool| Arc::new(Lane::new(pool)));
        let shared = Arc::new(Shared {
            events: Events::new(client, names.clone(), [Arc::clone(&asks), Arc::clone(&ends)]),
            asks,
            ends,
            names,
            clock: Clock::default(),
            server_clock: Default::default(),
            told_of_endless: Default::default(),
            #[cfg(feature = "tracing")]
            warned_of_fence: Default::default(),
        });
        // A plain type for whoever awaits it: what is in there is nested deeper than their compiler may look by default.
        let test: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(self_test(Arc::clone(&shared)));
        let listener = test.await?;
        shared.events.start(Some(listener));
        Ok(RedisStore { shared })
    }
}

/// Calls that may wait for the socket of a lane; those behind them wait for their turn.
const PIPELINE: usize = 1024;

fn readable(url: &str) -> Result<ConnectionInfo, RedisConnectError> {
    let wants_tls = url.starts_with("rediss:") || url.starts_with("valkeys:");
    if wants_tls && !cfg!(feature = "redis-tls") {
        return Err(RedisConnectError::TlsNotBuilt);
    }
    url.into_connection_info().map_err(|error| RedisConnectError::Address(error.into()))
}

fn with_tls_only_if_built(address: ConnectionInfo) -> Result<ConnectionInfo, RedisConnectError> {
    if matches!(address.addr(), ConnectionAddr::TcpTls { .. }) {
        #[cfg(not(feature = "redis-tls"))]
        return Err(RedisConnectError::TlsNotBuilt);
        // Whatever the process has chosen; rustls panics where nobody has, or where two crates bring one each.
        #[cfg(feature = "redis-tls")]
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
    }
    Ok(address)
}

/// What is sent goes out at once, and does not wait for the answer to what was sent before.
fn quick(address: ConnectionInfo) -> ConnectionInfo {
    let settings = address.tcp_settings().clone().set_nodelay(true);
    address.set_tcp_settings(settings)
}

// === the self-test ===

/// Everything that locks need, once; and the connection that listened.
async fn self_test(shared: Arc<Shared>) -> Result<PubSub, RedisConnectError> {
    let ask = |trouble: Trouble| RedisConnectError::Unreachable(trouble.remedied());
    look_at_the_server(&shared).await?;
    let once = format!("self-test:{:016x}", RandomState::new().hash_one(0));
    let channel = shared.names.inbox(&once);
    let mut listener = shared.events.connect().await.map_err(ask)?;
    match timeout(STORE_CALL, listener.subscribe(&channel)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.code() == Some("NOPERM") => {
            return Err(RedisConnectError::Refused(vec![error.to_string()]));
        }
        Ok(Err(error)) => return Err(ask(error.into())),
        Err(_) => return Err(ask(Trouble::Silent)),
    }
    let key = LockKey::from(("self-test", once.as_str()));
    let call = shared.names.self_test(&key, &channel, "1 hello").map_err(|name| ask(name.into()))?;
    let run = async |question| {
        // By the connection that was not used yet.
        shared.ends.ask(question, Instant::now() + CALL).await.map_err(|trouble| match trouble {
            // It may not even run a script.
            Trouble::Redis(error) if error.code() == Some("NOPERM") => {
                RedisConnectError::Refused(vec![error.to_string()])
            }
            trouble => ask(trouble),
        })
    };
    // By its text and by its hash: after a restart the first one is needed, whoever may have taught the server now.
    let read = |reply| protocol::self_tested(&reply).map_err(|misread| ask(misread.into()));
    // Of what is no fence only the first one hears: it has put the clock there.
    let no_fence = read(run(Question::Text(&call)).await?)?.no_fence;
    let SelfTested { now, receivers, refused, .. } = read(run(Question::Script(&call)).await?)?;
    if let Some(first) = refused.first() {
        // A replica, or no memory: that is no matter of rights, and has a remedy of its own.
        let said = first.split_once(": ").map_or(first.as_str(), |(_, said)| said);
        let (code, detail) = said.split_once(' ').unwrap_or((said, ""));
        let is_known = !matches!(code, "ERR" | "NOPERM");
        return Err(if is_known {
            ask(make_extension_error(code.to_owned(), Some(detail.to_owned())).into())
        } else {
            RedisConnectError::Refused(refused)
        });
    }
    if let Some(no_fence) = no_fence {
        shared.warn_of_fence(&no_fence);
    }
    shared.server_clock().said(now, shared.clock.now());
    let came = matches!(timeout(STORE_CALL, listener.on_message().next()).await, Ok(Some(_)));
    if !came || receivers == 0 {
        return Err(RedisConnectError::NoEvents { receivers, came });
    }
    timeout(STORE_CALL, listener.unsubscribe(&channel))
        .await
        .map_err(|_| ask(Trouble::Silent))?
        .map_err(|error| ask(error.into()))?;
    Ok(listener)
}

/// Its version, and whether it may throw locks away. Asked of `INFO`, because a server that somebody else runs has no `CONFIG`.
async fn look_at_the_server(shared: &Shared) -> Result<(), RedisConnectError> {
    let section =
        async |name: &str| match shared.asks.ask(Question::Command(cmd("INFO").arg(name)), Instant::now() + CALL).await
        {
            Ok(info) => Ok(from_redis_value::<String>(info).ok()),
            Err(Trouble::Redis(error)) if error.code() == Some("NOPERM") => Ok(None),
            Err(trouble) => Err(RedisConnectError::Unreachable(trouble.remedied())),
        };
    let (server, memory) = (section("server").await?, section("memory").await?);
    match server.as_deref().and_then(|info| field(info, "redis_version")) {
        Some(version) if is_too_old(version) => return Err(RedisConnectError::TooOld(version.to_owned())),
        Some(_) => {}
        None => warn("its version cannot be read (`INFO server`): locks need Redis 7.0"),
    }
    let memory = memory.unwrap_or_default();
    let policy = field(&memory, "maxmemory_policy").unwrap_or("noeviction");
    if policy != "noeviction" && field(&memory, "maxmemory").is_some_and(|max| max != "0") {
        warn(
            "its `maxmemory-policy` throws keys away when memory is short, and a lock that is thrown away is a lock for two: \
              use `noeviction`",
        );
    }
    Ok(())
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Older than 7.0. What cannot be read as a version is not.
fn is_too_old(version: &str) -> bool {
    version.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_some_and(|major| major < 7)
}

#[cfg(feature = "tracing")]
fn warn(what: &'static str) {
    tracing::warn!(target: "tower_lock", "the Redis for locks: {what}");
}

#[cfg(not(feature = "tracing"))]
fn warn(_: &'static str) {}

// === impl RedisConnectError ===

impl fmt::Display for RedisConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoUrl => f.write_str("REDIS_URL is not set: redis://host:6379, for instance"),
            Self::Address(_) => f.write_str("the address of the Redis for locks cannot be read"),
            Self::TlsNotBuilt => f.write_str(
                "the Redis for locks is to be reached by TLS, and tower-lock was built without: turn on its feature `redis-tls`",
            ),
            Self::Prefix(prefix) => {
                write!(f, "`{prefix}` cannot be the prefix of locks: 1 to 64 of [A-Za-z0-9._-], and not `tower-lock`")
            }
            Self::Unreachable(_) => f.write_str("the Redis for locks does not answer as it should"),
            Self::TooOld(version) => write!(f, "the Redis for locks has the version {version}: at least 7.0 is needed"),
            Self::Refused(what) => {
                write!(f, "the Redis for locks refuses what is needed (docs/redis.md has the smallest ACL): {}", what.join("; "))
            }
            Self::NoEvents { receivers, came: true } => write!(
                f,
                "the Redis for locks says that {receivers} have got a message that came: is it a proxy? Locks need to know who listens"
            ),
            Self::NoEvents { came: false, .. } => {
                f.write_str("a message that was published on the Redis for locks did not come: does something in between drop them?")
            }
        }
    }
}

impl Error for RedisConnectError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Address(error) | Self::Unreachable(error) => Some(&**error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_seven_is_too_old_and_what_cannot_be_read_is_not() {
        for (version, too_old) in
            [("6.2.14", true), ("7.0.15", false), ("7.2.4", false), ("10.1", false), ("unstable", false)]
        {
            assert_eq!(is_too_old(version), too_old, "{version}");
        }
        assert_eq!(field("# Server\r\nredis_version:7.0.15\r\nredis_mode:x\r\n", "redis_version"), Some("7.0.15"));
        assert_eq!(field("maxmemory_human:0B\r\nmaxmemory:5\r\n", "maxmemory"), Some("5"));
        assert_eq!(field("", "maxmemory"), None);
    }
}
