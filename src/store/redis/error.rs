//! Errors of a call and of connecting, with hints for operators.

use std::{error::Error, fmt, io, sync::Arc, time::Duration};

use deadpool_redis::{
    PoolError,
    redis::{ErrorKind, RedisError, ServerErrorKind},
};

use super::wire::{InvalidName, UnexpectedReply};
use crate::store::{
    StoreError, StoreErrorKind,
    error::{error_chain, escape_control, with_hint},
    remote::{
        credentials::LOGIN_HINT,
        settings::{self, InvalidSetting},
        tls,
    },
};

/// Error of connecting to Redis with [`RedisStore`](crate::RedisStore) or
/// [`RedlockStore`](crate::RedlockStore).
///
/// `Debug` prints the message and all causes on one line, so that `main` can return this error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RedisConnectError {
    /// The URL is invalid. The reason contains no password.
    #[error("invalid Redis URL: {}", error_chain(&**.0))]
    InvalidUrl(Box<dyn Error + Send + Sync>),
    /// The URL requires TLS (`rediss://`), and the crate was built without the feature `redis-tls`.
    #[error("`rediss://` requires TLS, and tower-lock was built without it: add the feature `redis-tls` of tower-lock")]
    TlsNotEnabled,
    /// A certificate or a key cannot be used. The text names its parameter or its method, and its
    /// file.
    #[error("TLS to Redis: {0}")]
    InvalidTls(String),
    /// The prefix is not 1 to 64 characters of `[A-Za-z0-9._-]`, or it is `tower-lock`.
    #[error("invalid prefix `{}`: a prefix is 1 to 64 of [A-Za-z0-9._-], and not `tower-lock`", .0.escape_debug())]
    InvalidPrefix(String),
    /// A timeout of the builder is out of range.
    #[error("`{setting}` is {value:?}, but must be {}", timeout_range(.setting))]
    InvalidTimeout {
        /// `connect_timeout`, `call_timeout` or `min_replicas`.
        setting: &'static str,
        /// Its value.
        value: Duration,
    },
    /// The server cannot be reached, or sent no reply or an unexpected one.
    #[error("could not connect to Redis at {address}")]
    Unreachable {
        /// Host and port, or the path of a socket, without user and password.
        address: String,
        /// The cause, with a hint.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The server is a node of a Redis Cluster, and the URL is that of a single server.
    #[error(
        "Redis at {address} is a node of a Redis Cluster: connect to it by `redis+cluster://` (`rediss+cluster://` with TLS)"
    )]
    IsCluster {
        /// Host and port.
        address: String,
    },
    /// The server is not a node of a Redis Cluster.
    #[error("Redis at {address} is not a node of a Redis Cluster: connect to it by `redis://` (`rediss://` with TLS)")]
    NotCluster {
        /// Host and port.
        address: String,
    },
    /// The server is older than Redis 7.0.
    #[error("Redis at {address} has version {version}, but at least 7.0 is required")]
    UnsupportedVersion {
        /// Host and port, or the path of a socket.
        address: String,
        /// The version of the server.
        version: String,
    },
    /// The user lacks a permission, or the server does not support a command.
    #[error(
        "Redis at {address} refused required commands of {user} (docs/guide/redis-in-production.md has the minimal ACL): {}",
        .refusals.join("; ")
    )]
    PermissionDenied {
        /// Host and port, or the path of a socket.
        address: String,
        /// The user, for example: user `default`.
        user: String,
        /// Each refused command, with the error of the server.
        refusals: Vec<String>,
    },
    /// Pub/sub does not work on this connection. Without it, the store would treat waiters as dead.
    #[error("{}", pubsub_message(.address, *.receivers, *.received))]
    PubSubUnavailable {
        /// Host and port, or the path of a socket.
        address: String,
        /// The number of receivers that `PUBLISH` reported.
        receivers: u64,
        /// Whether the message arrived.
        received: bool,
    },
    /// A [`RedlockStore`](crate::RedlockStore) has 3, 5, 7 or 9 servers.
    #[error("a RedlockStore has 3, 5, 7 or 9 servers, and not {0}")]
    InvalidServerCount(usize),
    /// The server is not an independent one, as each of a [`RedlockStore`](crate::RedlockStore) is.
    #[error("Redis at {address} is no independent server for a RedlockStore: {reason}")]
    NotIndependent {
        /// Host and port, or the path of a socket.
        address: String,
        /// The reason, for example that another address leads to the same server.
        reason: String,
    },
    /// Too few servers of a [`RedlockStore`](crate::RedlockStore) can be reached.
    #[error("{passed} of {servers} servers can be reached, which is no majority: {}", .errors.join("; "))]
    NoMajority {
        /// The number of servers.
        servers: usize,
        /// The number of those that have passed the self-test.
        passed: usize,
        /// The errors of the others, with their addresses.
        errors: Vec<String>,
    },
}

/// Too few replicas have a write. It may survive a failover nevertheless.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{acknowledged} of {required} replicas have acknowledged the write in time")]
pub(crate) struct NotReplicated {
    pub(in crate::store) acknowledged: i64,
    pub(in crate::store) required: u32,
}

/// Error of a call.
///
/// Its text contains its causes. The call is repeated or rejected by [`kind`](Self::kind).
#[derive(Debug, thiserror::Error)]
pub(in crate::store) enum CallError {
    #[error("{}", redis_message(.0))]
    Redis(#[from] RedisError),
    #[error("{}", pool_message(.0))]
    Pool(#[from] PoolError),
    /// No connection before the deadline.
    #[error("timed out connecting")]
    ConnectTimeout,
    /// The error that all callers share that waited for a connect, or whose scripts were sent
    /// together.
    #[error("{0}")]
    Common(Arc<Self>),
    /// The connect to a server failed that sentinels name.
    #[error("at {server}, which the sentinels name: {error}")]
    AtMaster {
        /// Host and port.
        server: Arc<str>,
        // Not named `source`: the text has it.
        error: Box<Self>,
    },
    /// No node knows which master has the slot of the key, or none has it.
    #[error("no node of the Cluster knows the master of the key")]
    NoMaster,
    /// The slot of the key moves, or the Cluster does not serve it now.
    #[error("{}", redis_message(.0))]
    ClusterChanges(RedisError),
    /// The server at this address is no node of a Cluster.
    #[error("the server at {0} is not a node of a Redis Cluster")]
    NotCluster(String),
    /// The server at an address is not the node that had it, or not one of the same Cluster.
    #[error("the server at this address is another node, or belongs to another Redis Cluster")]
    OtherCluster,
    /// The server lacks a required feature or permission.
    #[error("{}", error_chain(&**.0))]
    SelfTestFailed(Arc<RedisConnectError>),
    /// The key is busy, and an offer could not be received.
    #[error("not subscribed to offers: the connection for messages is down")]
    NotSubscribed,
    /// No reply before the deadline.
    #[error("timed out waiting for a reply")]
    NoReply,
    /// The call reached the server after it had expired, and did nothing.
    #[error("the call reached the server too late and was not executed")]
    Expired,
    /// The cursor of a listing is not one of this store.
    #[error("the cursor is not one of this store")]
    InvalidCursor,
    #[error(transparent)]
    NotReplicated(#[from] NotReplicated),
    #[error(transparent)]
    UnexpectedReply(#[from] UnexpectedReply),
    #[error(transparent)]
    InvalidName(#[from] InvalidName),
}

impl CallError {
    /// `address` and `user`: those of the call.
    pub(super) fn into_store_error(
        self,
        operation: &'static str,
        kind: StoreErrorKind,
        address: &str,
        user: &str,
    ) -> StoreError {
        // The text of the self-test names the address.
        let address = (!matches!(self, Self::SelfTestFailed(_))).then(|| address.to_owned());
        StoreError::new("redis", operation, kind).with_source(self.with_hint(address, user))
    }

    pub(in crate::store) fn with_hint(self, address: Option<String>, user: &str) -> Box<dyn Error + Send + Sync> {
        let hint = self.classify().1.replace("{user}", user);
        let server = address.map(|address| format!("Redis at {address}"));
        with_hint(server.as_ref().map(|server| server as &dyn fmt::Display), self, &hint)
    }

    /// Whether the connection is unusable, or leads to a server that accepts no writes.
    pub(super) fn breaks_connection(error: &RedisError) -> bool {
        Self::is_of_replica(error) || error.is_connection_dropped() || error.is_unrecoverable_error()
    }

    /// Whether the server accepts no writes, because another one is the master.
    pub(super) fn is_of_replica(error: &RedisError) -> bool {
        matches!(error.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown))
    }

    /// Whether the server has executed nothing, because of one of the keys: this user has no
    /// permission for it.
    pub(in crate::store) fn may_be_of_one_key(&self) -> bool {
        matches!(self, Self::Redis(error) if error.code() == Some("NOPERM"))
    }

    /// Whether this is the error of a Cluster that changes, or lacks masters.
    pub(super) fn is_of_cluster(error: &RedisError) -> bool {
        use ServerErrorKind::{Ask, ClusterDown, Moved, TryAgain};

        // The error of a script that makes a key again which it has deleted, while its slot moves.
        // Redis 8 and Valkey 8 have the second text if the command names several keys.
        let is_of_script = |text: &str| text.contains("non local key") || text.contains("rehashing of the slot");
        matches!(error.kind(), ErrorKind::Server(Ask | ClusterDown | Moved | TryAgain))
            || error.detail().is_some_and(is_of_script)
    }

    /// The error itself, if a connect has failed.
    pub(super) fn of_connect(&self) -> &Self {
        if let Self::Common(error) = self { error.of_connect() } else { self }
    }

    pub(in crate::store) fn kind(&self) -> StoreErrorKind {
        self.classify().0
    }

    fn classify(&self) -> (StoreErrorKind, &'static str) {
        use StoreErrorKind::{InvalidKey, Protocol, Timeout, Unavailable, Unsupported};
        match self {
            Self::Common(error) => error.classify(),
            Self::AtMaster { error, .. } => match (error.classify(), &**error) {
                ((kind, _), Self::ConnectTimeout) => (kind, MASTER_HINT),
                ((kind, _), Self::Redis(error)) if error.is_io_error() => (kind, MASTER_HINT),
                // The server has sent an error, which has a hint of its own.
                (class, _) => class,
            },
            Self::Redis(error) | Self::Pool(PoolError::Backend(error)) => {
                error.code().and_then(classify_code).unwrap_or_else(|| classify_kind(error))
            }
            Self::Pool(_) => (Unavailable, "is the pool closed, or too small for all its users?"),
            Self::ConnectTimeout => (Timeout, CONNECT_HINT),
            Self::NoReply => (Timeout, NO_REPLY_HINT),
            Self::SelfTestFailed(_) => (StoreErrorKind::Refused, ""),
            Self::NotSubscribed => (
                Unavailable,
                "may this user subscribe to its channel (`&tower-lock:<prefix>:in:*`), and do messages arrive?",
            ),
            Self::NotReplicated(_) => {
                (Unavailable, "are enough replicas up, and do they follow this server (`INFO replication`)?")
            }
            Self::NoMaster => (StoreErrorKind::Failover, NO_MASTER_HINT),
            Self::ClusterChanges(_) => (StoreErrorKind::Failover, CLUSTER_CHANGES_HINT),
            Self::OtherCluster => (StoreErrorKind::Failover, OTHER_CLUSTER_HINT),
            Self::NotCluster(_) => (StoreErrorKind::Refused, "use `redis://` for a single server"),
            Self::Expired => (Timeout, "is the network or the server overloaded?"),
            Self::UnexpectedReply(_) => (
                Protocol,
                "no other program may write to keys that begin with the prefix or with `tower-lock:<prefix>:`; `DEL` repairs \
                 a lock with foreign data",
            ),
            Self::InvalidName(_) => (InvalidKey, ""),
            Self::InvalidCursor => (Unsupported, ""),
        }
    }
}

/// The code of an error of the function of the user.
pub(super) const LOGIN_FAILED: &str = "NOCREDENTIALS";
const CONNECT_HINT: &str =
    "is the server up, does a firewall drop packets, does the pool have a free connection, does `credentials` return?";
const CLIENTS_HINT: &str = "raise `maxclients`, or find the client with too many connections (`CLIENT LIST`)";
const NO_REPLY_HINT: &str = "is the server stopped, overloaded, or busy with a slow command (`SLOWLOG GET`)?";
const PERMISSION_HINT: &str = "{user} lacks a permission: docs/guide/redis-in-production.md has the minimal ACL";
// A user without a password may be a password in the wrong place, and is not named.
const NO_PASSWORD_HINT: &str = "the server requires a password, and the URL has none: write `:password@` or \
     `user:password@` before the host";
const PASSWORD_HINT: &str = "the server refused {user}: does this user exist, is it on (`ACL LIST`), and is its password correct? \
     `@`, `#`, `/`, `?`, `%` and `,` in a URL must be encoded";
const MEMORY_HINT: &str = "raise `maxmemory`, or remove other data; held locks can still be renewed and released";
const TYPE_HINT: &str = "the name of a lock is used by other data: check its `TYPE`, or choose another prefix";
const DISK_HINT: &str = "it cannot save and accepts no writes: is its disk full? its log has the reason";
const REPLICA_HINT: &str = "this is a replica: a failover is in progress, or the address is wrong";
const SENTINEL_HINT: &str =
    "are the sentinels up, and are their addresses, their password and the name of the master correct?";
const WRONG_PORT_HINT: &str = "is this a sentinel? its URL is `redis+sentinel://host:26379/mymaster`";
const MASTER_HINT: &str =
    "is it up, and can this process reach the address that the sentinels name (`replica-announce-ip`)?";
const CLUSTER_HINT: &str = "this is a node of a Redis Cluster: use `redis+cluster://`";
const NO_MASTER_HINT: &str = "are its nodes up, and does each slot have a master (`CLUSTER INFO`; `redis-cli --cluster create` makes a Cluster)?";
const OTHER_CLUSTER_HINT: &str =
    "name only nodes of one Cluster; if all of its nodes were replaced at once, restart this process";
const CLUSTER_CHANGES_HINT: &str =
    "a failover or a move of slots is in progress, or slots have no master (`CLUSTER INFO`)";

/// Classifies by the error code, the first word of a Redis error.
fn classify_code(code: &str) -> Option<(StoreErrorKind, &'static str)> {
    use StoreErrorKind::{Failover, Refused, Unavailable};
    let class = match code {
        "OOM" => (Refused, MEMORY_HINT),
        "WRONGTYPE" => (Refused, TYPE_HINT),
        "NOPERM" => (Refused, PERMISSION_HINT),
        "NOAUTH" => (Refused, NO_PASSWORD_HINT),
        "WRONGPASS" => (Refused, PASSWORD_HINT),
        "MISCONF" => (Refused, DISK_HINT),
        "MOVED" | "ASK" | "TRYAGAIN" | "CROSSSLOT" | "CLUSTERDOWN" => (Refused, CLUSTER_HINT),
        // The last one ends a wait for replicas.
        "READONLY" | "MASTERDOWN" | "UNBLOCKED" => (Failover, REPLICA_HINT),
        "DENIED" => (Refused, "its protected mode accepts only local clients: set a password, or `protected-mode no`"),
        "NOMASTER" => (Unavailable, SENTINEL_HINT),
        LOGIN_FAILED => (Unavailable, LOGIN_HINT),
        "LOADING" => (Unavailable, "it is loading its data after a restart"),
        "BUSY" => (Unavailable, "a script of another client does not finish: `SCRIPT KILL`"),
        "NOREPLICAS" => (Unavailable, "too few replicas are up for `min-replicas-to-write`"),
        _ => return None,
    };
    Some(class)
}

fn classify_kind(error: &RedisError) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Overloaded, Protocol, Refused, Timeout, Unavailable};
    let mentions = |texts: &[&str]| error.detail().is_some_and(|detail| texts.iter().any(|text| detail.contains(text)));
    if mentions(&["max number of clients"]) {
        return (Unavailable, CLIENTS_HINT);
    }
    if mentions(&["WAIT cannot be used with replica"]) {
        return (StoreErrorKind::Failover, REPLICA_HINT);
    }
    match error.kind() {
        ErrorKind::AuthenticationFailed => (Refused, PASSWORD_HINT),
        ErrorKind::InvalidClientConfig => (Refused, "is the address correct?"),
        ErrorKind::UnexpectedReturnType => (Protocol, "is the server a Redis?"),
        ErrorKind::Parse => {
            (Unavailable, "the connection broke in the middle of a reply, or the server is not a Redis")
        }
        // The texts of NOPERM within a script: of Redis 7.0, of later versions, and of Valkey.
        ErrorKind::Server(_)
            if mentions(&["user executing the script", "ACL failure in script", "has no permissions"]) =>
        {
            (Refused, PERMISSION_HINT)
        }
        ErrorKind::Server(_) if mentions(&["unknown command 'EVAL"]) => (Refused, WRONG_PORT_HINT),
        ErrorKind::Server(_) | ErrorKind::Extension => {
            (Refused, "are the password, the number of the database and the permissions correct?")
        }
        _ if is_unsent(error) => (Overloaded, "is the server slow, or are too many calls made at once?"),
        _ if error.is_timeout() => (Timeout, NO_REPLY_HINT),
        _ => match tls::hint(&error.to_string()) {
            Some(hint) => (Refused, hint),
            None => (Unavailable, "is the server up, and the address correct?"),
        },
    }
}

/// Whether a socket was full.
fn is_unsent(error: &RedisError) -> bool {
    // As the library keeps it.
    let source = error.source().and_then(<dyn Error>::downcast_ref::<Arc<dyn Error + Send + Sync>>);
    let io = source.and_then(|source| source.downcast_ref::<io::Error>());
    io.is_some_and(|io| io.kind() == io::ErrorKind::ResourceBusy)
}

/// The text of a Redis error: the code first, as the server sent it.
fn redis_message(error: &RedisError) -> String {
    match (error.kind(), error.code()) {
        (_, Some(LOGIN_FAILED)) => error.detail().unwrap_or_default().to_owned(),
        (ErrorKind::Server(_) | ErrorKind::Extension, Some(code)) => {
            escape_control(&format!("{code} {}", error.detail().unwrap_or_default()))
        }
        _ => error_chain(error),
    }
}

fn pool_message(error: &PoolError) -> String {
    if let PoolError::Backend(error) = error { redis_message(error) } else { error_chain(error) }
}

fn pubsub_message(address: &str, receivers: u64, received: bool) -> String {
    if received {
        format!(
            "a published message arrived, but Redis at {address} reported {receivers} receivers: a proxy may hide the subscribers, \
             whose number is required"
        )
    } else {
        format!("a message published to Redis at {address} did not arrive: a proxy may drop messages")
    }
}

fn timeout_range(setting: &str) -> String {
    match setting {
        "min_replicas" => "from 1ms to half of `call_timeout`".to_owned(),
        setting => settings::timeout_range(setting),
    }
}

impl From<InvalidSetting> for RedisConnectError {
    fn from(error: InvalidSetting) -> Self {
        match error {
            InvalidSetting::Timeout { setting, value } => Self::InvalidTimeout { setting, value },
            InvalidSetting::Differs(defect) => Self::InvalidUrl(defect.into()),
        }
    }
}

impl fmt::Debug for RedisConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&error_chain(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_error_text_is_one_log_line() {
        let error = deadpool_redis::redis::make_extension_error(
            "ERR".to_owned(),
            Some("no\r\n2026-11-22T00:00:00Z  INFO forged \u{1b}[31m".to_owned()),
        );
        let text = CallError::Redis(error).with_hint(None, "").to_string();
        assert!(text.contains("forged") && !text.contains(char::is_control), "{text:?}");
    }

    #[cfg(feature = "redis-tls")]
    #[test]
    fn rejected_certificate_names_its_defect() {
        use rustls::{AlertDescription, CertificateError, Error};

        for (error, hint) in [
            (CertificateError::NotValidForName.into(), "for another host name"),
            (CertificateError::Expired.into(), "has expired"),
            (CertificateError::NotValidYet.into(), "not valid yet"),
            (CertificateError::UnknownIssuer.into(), "`SSL_CERT_FILE`"),
            (Error::AlertReceived(AlertDescription::CertificateRequired), "does the server require a certificate"),
            (Error::AlertReceived(AlertDescription::CertificateExpired), "does the server require a certificate"),
        ] {
            let io = std::io::Error::new(std::io::ErrorKind::InvalidData, error);
            let error = CallError::Redis(RedisError::from(io));
            assert_eq!(error.kind(), StoreErrorKind::Refused);
            let text = error.with_hint(None, "").to_string();
            assert!(text.contains(hint), "{text}");
        }
    }
}
