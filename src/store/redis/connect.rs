//! From an address to a store that is known to work.

use std::{env, error::Error, fmt, pin::Pin, sync::Arc, time::Duration};

use deadpool_redis::{
    Config, Pool,
    redis::{
        Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, aio::PubSub, cmd, from_redis_value,
        make_extension_error,
    },
};
use futures_util::StreamExt;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use super::{
    RedisStore, Shared,
    events::Events,
    lane::{Lane, Limits, Question, Source},
    protocol::{self, Names, SelfTested, escaped},
    socket::Connector,
    trouble::{Trouble, flat},
    warn_of_fence,
};
use crate::{
    clock::Clock,
    limits::{CONNECT_TIMEOUT, REDIS_PREFIX, STORE_CALL_TIMEOUT},
    lock_key::LockKey,
    process::Process,
    store::StoreErrorKind,
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

/// Why a [`RedisStore`] could not be made: found when the service starts, and not at three in the morning.
///
/// `Debug` is what `Display` says, with the causes: `main` may return it.
#[non_exhaustive]
pub enum RedisConnectError {
    /// The environment variable `REDIS_URL` is not set, or is no text.
    MissingUrl,
    /// The address cannot be read. The reason, without a password.
    InvalidUrl(Box<dyn Error + Send + Sync>),
    /// The address wants TLS (`rediss://`), and the crate was built without the feature `redis-tls`.
    TlsNotEnabled,
    /// The prefix cannot be one: 1 to 64 of `[A-Za-z0-9._-]`, and not `tower-lock`.
    InvalidPrefix(String),
    /// A timeout of the builder is too short or too long.
    InvalidTimeout {
        /// `connect_timeout` or `call_timeout`.
        setting: &'static str,
        /// What it was set to.
        value: Duration,
    },
    /// There was no connection, or no answer; or an answer that nobody can work with.
    Unreachable {
        /// Host and port, or the path of a socket. Nothing of a user or a password.
        address: String,
        /// The reason, and what helps.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The server is older than Redis 7.0.
    UnsupportedVersion {
        /// Host and port, or the path of a socket.
        address: String,
        /// The version of the server.
        version: String,
    },
    /// The user may not do all that is needed, or the server cannot.
    PermissionDenied {
        /// Host and port, or the path of a socket.
        address: String,
        /// Each command that was refused, with the words of the server.
        refusals: Vec<String>,
    },
    /// Messages do not come, or nobody can tell who gets them: how many should have got the one that was sent, as the server says, and whether it
    /// came. Waiters would sleep until they ask again, and be taken for dead.
    PubSubUnavailable {
        /// Host and port, or the path of a socket.
        address: String,
        /// How many got it, as the server says.
        receivers: u64,
        /// Whether it came.
        received: bool,
    },
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
        let address = Address::read(url, "")?;
        self.open(address).await
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
        let shared = self.shared(None, Address::read(url, "")?)?;
        shared.events.start(None);
        Ok(RedisStore { shared })
    }

    /// Connects to the address in the environment variable `REDIS_URL`.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect); and there may be no such variable.
    pub async fn from_env(self) -> Result<RedisStore, RedisConnectError> {
        let url = env::var("REDIS_URL").map_err(|_| RedisConnectError::MissingUrl)?;
        let address = Address::read(&url, "REDIS_URL: ")?;
        self.open(address).await
    }

    /// Connects as the rest of the service does. Of the configuration the address counts, and not that of the pool: locks have their own three
    /// connections.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect).
    pub async fn from_config(self, config: &Config) -> Result<RedisStore, RedisConnectError> {
        let address = match (&config.url, &config.connection) {
            (Some(url), None) => Address::read(url, "")?,
            (None, connection) => Address::of(ConnectionInfo::from(connection.clone().unwrap_or_default()), "")?,
            (Some(_), Some(_)) => {
                return Err(RedisConnectError::InvalidUrl(
                    "the configuration has an URL and a connection: which one?".into(),
                ));
            }
        };
        self.open(address).await
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
        let shared = self.shared(Some(pool), Address::of(address, "")?)?;
        Self::tested(shared).await
    }

    async fn open(self, address: Address) -> Result<RedisStore, RedisConnectError> {
        let shared = self.shared(None, address)?;
        Self::tested(shared).await
    }

    fn shared(self, pool: Option<Pool>, address: Address) -> Result<Arc<Shared>, RedisConnectError> {
        let prefix = self.prefix.as_deref().unwrap_or(REDIS_PREFIX);
        let names = Names::new(prefix).map_err(|_| RedisConnectError::InvalidPrefix(prefix.to_owned()))?;
        let within = |setting, value: Option<Duration>, default, longest| match value.unwrap_or(default) {
            value if (SHORTEST..=longest).contains(&value) => Ok(value),
            value => Err(RedisConnectError::InvalidTimeout { setting, value }),
        };
        let limits = Limits {
            call: within("call_timeout", self.call_timeout, STORE_CALL_TIMEOUT, LONGEST_CALL)?,
            connect: within("connect_timeout", self.connect_timeout, CONNECT_TIMEOUT, LONGEST_CONNECT)?,
        };
        let client = Client::open(address.info).map_err(|error| RedisConnectError::InvalidUrl(error.into()))?;
        let connector = Connector::new(client, limits.connect, limits.call);
        let source = pool.map_or_else(|| Source::Own(connector.clone()), Source::Pool);
        let recovered = Arc::new(Notify::new());
        let [asks, ends] =
            [source.clone(), source].map(|source| Arc::new(Lane::new(source, limits, Arc::clone(&recovered))));
        let lanes = [Arc::clone(&asks), Arc::clone(&ends)];
        Ok(Arc::new(Shared {
            events: Events::new(connector, address.shown, names.clone(), limits, lanes, recovered),
            asks,
            ends,
            names,
            clock: Clock::default(),
            server_clock: Default::default(),
            told_of_endless: Default::default(),
            #[cfg(feature = "tracing")]
            warned_of_fence: Default::default(),
        }))
    }

    /// A server may come up a moment later than the service.
    async fn tested(shared: Arc<Shared>) -> Result<RedisStore, RedisConnectError> {
        let give_up = Instant::now() + shared.events.limits.connect;
        loop {
            // A plain type for whoever awaits it: what is in there is nested deeper than their compiler may look by default.
            let test: Pin<Box<dyn Future<Output = _> + Send + '_>> = Box::pin(self_test(&shared.events));
            match test.await {
                Ok((listener, now)) => {
                    shared.server_clock().said(now, shared.clock.now());
                    shared.events.passed();
                    shared.events.start(Some(listener));
                    return Ok(RedisStore { shared });
                }
                Err(failed) if failed.may_pass && Instant::now() + AGAIN < give_up => sleep(AGAIN).await,
                Err(failed) => return Err(failed.error),
            }
        }
    }
}

/// A lane that found nobody there says so for as long as its pause.
const AGAIN: Duration = Lane::PAUSE.saturating_add(Duration::from_millis(10));

/// Timeouts that can be set.
const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST_CALL: Duration = Duration::from_secs(5);
const LONGEST_CONNECT: Duration = Duration::from_secs(60);

/// An address, and what of it may be shown.
struct Address {
    info: ConnectionInfo,
    shown: String,
}

impl Address {
    /// `of`: where it comes from.
    fn read(url: &str, of: &str) -> Result<Self, RedisConnectError> {
        let wants_tls = url.starts_with("rediss:") || url.starts_with("valkeys:");
        if wants_tls && !cfg!(feature = "redis-tls") {
            return Err(RedisConnectError::TlsNotEnabled);
        }
        let hint = hint(url);
        let info = url.into_connection_info().map_err(|_| {
            let hint = hint.as_deref().unwrap_or("an address is `redis://user:password@host:6379/0`, for instance");
            RedisConnectError::InvalidUrl(format!("{of}{hint}").into())
        })?;
        let mut address = Self::of(info, of)?;
        if let Some(hint) = hint {
            // What was read as a host may be a part of a password.
            address.shown = format!("{of}{hint}");
        }
        Ok(address)
    }

    fn of(info: ConnectionInfo, of: &str) -> Result<Self, RedisConnectError> {
        if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            #[cfg(not(feature = "redis-tls"))]
            return Err(RedisConnectError::TlsNotEnabled);
            // Whatever the process has chosen; rustls panics where nobody has, or where two crates bring one each.
            #[cfg(feature = "redis-tls")]
            if rustls::crypto::CryptoProvider::get_default().is_none() {
                let _ = rustls::crypto::ring::default_provider().install_default();
            }
        }
        let shown = format!("{of}{}", escaped(&info.addr().to_string()));
        Ok(Self { info: quick(info), shown })
    }
}

/// What may be wrong with an address, without a word of it that may be secret.
fn hint(url: &str) -> Option<String> {
    if url.trim().is_empty() {
        return Some("it is empty: `redis://host:6379`, for instance".to_owned());
    }
    let Some((scheme, rest)) = url.split_once("://") else {
        // Behind the last `@` there is no password.
        let host = url.rsplit('@').next().unwrap_or_default();
        return Some(format!("it has no scheme: is it `redis://{}`?", escaped(host)));
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
fn quick(address: ConnectionInfo) -> ConnectionInfo {
    let settings = address.tcp_settings().clone().set_nodelay(true);
    address.set_tcp_settings(settings)
}

// === the self-test ===

/// Why the self-test came to no end.
pub(super) struct Failed {
    pub(super) error: RedisConnectError,
    /// The server may be about to start.
    pub(super) may_pass: bool,
}

impl From<RedisConnectError> for Failed {
    fn from(error: RedisConnectError) -> Self {
        Self { error, may_pass: false }
    }
}

/// Everything that locks need, once; the connection that listened, and the server's clock.
pub(super) async fn self_test(events: &Events) -> Result<(PubSub, i64), Failed> {
    let limits = events.limits;
    let address = || events.address.clone();
    let failed = |trouble: Trouble| {
        use StoreErrorKind::{Failover, Timeout, Unavailable};

        let may_pass = matches!(trouble.kind(), Failover | Timeout | Unavailable);
        let error = RedisConnectError::Unreachable { address: address(), source: trouble.remedied() };
        Failed { error, may_pass }
    };
    let all_refused = |refusals| Failed::from(RedisConnectError::PermissionDenied { address: address(), refusals });
    let refused = |error: &dyn fmt::Display| all_refused(vec![escaped(&error.to_string())]);
    let [asks, ends] = &events.lanes;
    // To connect may take longer than a call.
    asks.ready().await.map_err(failed)?;
    ends.ready().await.map_err(failed)?;
    look_at_the_server(asks, &events.address, &failed).await?;
    let once = format!("self-test:{:016x}", Process::default().random_bits());
    let channel = events.names.inbox(&once);
    let mut listener = events.connect().await.map_err(failed)?;
    match timeout(limits.call, listener.subscribe(&channel)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) if error.code() == Some("NOPERM") => return Err(refused(&error)),
        Ok(Err(error)) => return Err(failed(error.into())),
        Err(_) => return Err(failed(Trouble::Silent)),
    }
    let key = LockKey::from(("self-test", once.as_str()));
    let call = events.names.self_test(&key, &channel, "1 hello").map_err(|name| failed(name.into()))?;
    let run = async |question| {
        // By the connection that was not used yet.
        ends.ask(question, limits.by()).await.map_err(|trouble| match trouble {
            // It may not even run a script.
            Trouble::Redis(error) if error.code() == Some("NOPERM") => refused(&error),
            trouble => failed(trouble),
        })
    };
    // By its text and by its hash: after a restart the first one is needed, whoever may have taught the server now.
    let read = |reply| protocol::self_tested(&reply).map_err(|misread| failed(misread.into()));
    // Of what is no fence only the first one hears: it has put the clock there.
    let no_fence = read(run(Question::Text(&call)).await?)?.no_fence;
    let SelfTested { now, receivers, refused: refusals, .. } = read(run(Question::Script(&call)).await?)?;
    if let Some(first) = refusals.first() {
        // A replica, or no memory: that is no matter of rights, and has a remedy of its own.
        let said = first.split_once(": ").map_or(first.as_str(), |(_, said)| said);
        let (code, detail) = said.split_once(' ').unwrap_or((said, ""));
        let is_known = !matches!(code, "ERR" | "NOPERM");
        return Err(if is_known {
            failed(make_extension_error(code.to_owned(), Some(detail.to_owned())).into())
        } else {
            all_refused(refusals)
        });
    }
    if let Some(no_fence) = no_fence {
        warn_of_fence(&events.names, &no_fence);
    }
    let came = matches!(timeout(limits.call, listener.on_message().next()).await, Ok(Some(_)));
    if !came || receivers == 0 {
        return Err(RedisConnectError::PubSubUnavailable { address: address(), receivers, received: came }.into());
    }
    timeout(limits.call, listener.unsubscribe(&channel))
        .await
        .map_err(|_| failed(Trouble::Silent))?
        .map_err(|error| failed(error.into()))?;
    Ok((listener, now))
}

/// Its version, and whether it may throw locks away. Asked of `INFO`, because a server that somebody else runs has no `CONFIG`.
async fn look_at_the_server(
    lane: &Lane,
    address: &str,
    failed: &(dyn Fn(Trouble) -> Failed + Sync),
) -> Result<(), Failed> {
    let section = async |name: &str| match lane.ask(Question::Command(cmd("INFO").arg(name)), lane.limits.by()).await {
        Ok(info) => Ok(from_redis_value::<String>(info).ok()),
        Err(Trouble::Redis(error)) if error.code() == Some("NOPERM") => Ok(None),
        Err(trouble) => Err(failed(trouble)),
    };
    let (server, memory) = (section("server").await?, section("memory").await?);
    match server.as_deref().and_then(|info| field(info, "redis_version")) {
        Some(version) if is_too_old(version) => {
            return Err(RedisConnectError::UnsupportedVersion {
                address: address.to_owned(),
                version: escaped(version),
            }
            .into());
        }
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
            Self::MissingUrl => f.write_str("the environment variable REDIS_URL is not set: redis://host:6379, for instance"),
            Self::InvalidUrl(error) => {
                f.write_str("the address of the Redis for locks cannot be read: ")?;
                flat(&**error, f)
            }
            Self::InvalidTimeout { setting, value } => {
                let longest = if *setting == "call_timeout" { LONGEST_CALL } else { LONGEST_CONNECT };
                write!(f, "`{setting}` of the Redis for locks is {value:?}: it can be from {SHORTEST:?} to {longest:?}")
            }
            Self::TlsNotEnabled => f.write_str(
                "the Redis for locks is to be reached by TLS, and tower-lock was built without: turn on its feature `redis-tls`",
            ),
            Self::InvalidPrefix(prefix) => {
                write!(f, "`{prefix}` cannot be the prefix of locks: 1 to 64 of [A-Za-z0-9._-], and not `tower-lock`")
            }
            Self::Unreachable { address, source: _ } => {
                write!(f, "the Redis for locks does not answer as it should ({address})")
            }
            Self::UnsupportedVersion { address, version } => {
                write!(f, "the Redis for locks has version {version}, and at least 7.0 is needed ({address})")
            }
            Self::PermissionDenied { address, refusals } => {
                let refusals = refusals.join("; ");
                write!(
                    f,
                    "the Redis for locks refuses what is needed ({address}; docs/redis.md has the smallest ACL): {refusals}"
                )
            }
            Self::PubSubUnavailable { address, receivers, received: true } => write!(
                f,
                "the Redis for locks reports {receivers} receivers of a message that arrived ({address}): a proxy between may hide the \
                 subscribers, and locks need their number"
            ),
            Self::PubSubUnavailable { address, received: false, .. } => write!(
                f,
                "a message that was published on the Redis for locks did not arrive ({address}): a proxy between may drop messages"
            ),
        }
    }
}

impl Error for RedisConnectError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unreachable { source, .. } => Some(&**source),
            _ => None,
        }
    }
}

impl fmt::Debug for RedisConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        flat(self, f)
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
