//! What can go wrong with a call, and what to do about it.

use std::{error::Error, fmt, sync::Arc, time::Duration};

use deadpool_redis::{
    PoolError,
    redis::{ErrorKind, RedisError, ServerErrorKind},
};

#[cfg(doc)]
use super::RedisStore;
use super::{
    builder::{MAX_CALL_TIMEOUT, MAX_CONNECT_TIMEOUT, MIN_TIMEOUT},
    proto::{InvalidName, UnexpectedReply, escape_control},
};
use crate::store::{StoreError, StoreErrorKind};

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

/// Why a call has no answer.
#[derive(Debug)]
pub(super) enum CallError {
    /// Redis, or the way to it, says so.
    Redis(RedisError),
    /// The pool gave no connection.
    Pool(PoolError),
    /// No connection in time.
    ConnectTimeout,
    /// No connection, for a reason that all who wait for it are told.
    ConnectFailed(Arc<Self>),
    /// It was reached, and cannot do what locks need.
    SelfTestFailed(Arc<RedisConnectError>),
    /// Others have the key, and we cannot be told when it is our turn.
    NotSubscribed,
    /// No answer in time.
    NoReply,
    /// It came to Redis when it was void.
    Expired,
    UnexpectedReply(UnexpectedReply),
    InvalidName(InvalidName),
}

/// What Redis said, and what to do about it.
#[derive(Debug)]
struct WithHint {
    error: CallError,
    hint: &'static str,
}

impl CallError {
    pub(super) fn into_store_error(self, operation: &'static str) -> StoreError {
        let (kind, _) = self.classify();
        StoreError::new("redis", operation, kind).with_source(self.with_hint())
    }

    /// With what helps.
    pub(super) fn with_hint(self) -> Box<dyn Error + Send + Sync> {
        let (_, remedy) = self.classify();
        Box::new(WithHint { error: self, hint: remedy })
    }

    /// The connection is of no use any more, or is to the wrong server.
    pub(super) fn breaks_connection(error: &RedisError) -> bool {
        let is_replica =
            matches!(error.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown));
        is_replica || error.is_connection_dropped() || error.is_unrecoverable_error()
    }

    pub(super) fn kind(&self) -> StoreErrorKind {
        self.classify().0
    }

    /// Of what kind it is, and what helps.
    fn classify(&self) -> (StoreErrorKind, &'static str) {
        use StoreErrorKind::{InvalidKey, Protocol, Timeout, Unavailable};
        match self {
            Self::ConnectFailed(trouble) => trouble.classify(),
            Self::Redis(error) | Self::Pool(PoolError::Backend(error)) => {
                error.code().and_then(classify_code).unwrap_or_else(|| classify_kind(error))
            }
            Self::Pool(_) => (Unavailable, "is the pool too small for those who share it, or closed?"),
            Self::ConnectTimeout => (Timeout, "is it up, does the network let us through, has the pool one to give?"),
            Self::NoReply => (Timeout, NO_REPLY_HINT),
            Self::SelfTestFailed(_) => (StoreErrorKind::Refused, ""),
            Self::NotSubscribed => (
                Unavailable,
                "may this user subscribe to its inbox (`&tower-lock:<prefix>:in:*`), and do messages come through?",
            ),
            Self::Expired => (Timeout, "calls take longer than they may: is the network or the server overloaded?"),
            Self::UnexpectedReply(_) => (
                Protocol,
                "nothing else may write to names that begin with the prefix or with `tower-lock:<prefix>:`; `DEL` repairs the lock that somebody wrote to",
            ),
            Self::InvalidName(_) => (InvalidKey, ""),
        }
    }
}

const CLIENTS_HINT: &str = "raise `maxclients`, or find who keeps so many connections (`CLIENT LIST`)";
const NO_REPLY_HINT: &str = "is the server stopped, swamped, or busy with a slow command (`SLOWLOG GET`)?";
const PERMISSION_HINT: &str = "the user lacks a right: docs/redis.md has the smallest ACL";
const PASSWORD_HINT: &str = "are user and password in the URL, and right?";
const MEMORY_HINT: &str =
    "raise `maxmemory`, or move other data away; what is held can be renewed and given back all the same";
const TYPE_HINT: &str = "something that is no lock has the name of one: look at its `TYPE`, or choose another prefix";
const DISK_HINT: &str = "it cannot save its data, so it takes no writes: its log says why, and its disk may be full";
const REPLICA_HINT: &str = "this is a replica: a failover is going on, or the address is wrong";
const CLUSTER_HINT: &str = "this is a Redis Cluster, and the locks of this store live in one Redis";

/// By the word with which an answer of Redis begins.
fn classify_code(code: &str) -> Option<(StoreErrorKind, &'static str)> {
    use StoreErrorKind::{Failover, Refused, Unavailable};
    let verdict = match code {
        "OOM" => (Refused, MEMORY_HINT),
        "WRONGTYPE" => (Refused, TYPE_HINT),
        "NOPERM" => (Refused, PERMISSION_HINT),
        "NOAUTH" | "WRONGPASS" => (Refused, PASSWORD_HINT),
        "MISCONF" => (Refused, DISK_HINT),
        "MOVED" | "ASK" | "TRYAGAIN" | "CROSSSLOT" | "CLUSTERDOWN" => (Refused, CLUSTER_HINT),
        "READONLY" | "MASTERDOWN" => (Failover, REPLICA_HINT),
        "DENIED" => {
            (Refused, "its protected mode lets nobody in from elsewhere: set a password, or `protected-mode no`")
        }
        "LOADING" => (Unavailable, "it reads its data after a restart"),
        "BUSY" => (Unavailable, "a script of somebody runs and runs: `SCRIPT KILL`"),
        "NOREPLICAS" => (Unavailable, "too few replicas are up for `min-replicas-to-write`"),
        _ => return None,
    };
    Some(verdict)
}

fn classify_kind(error: &RedisError) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Protocol, Refused, Timeout, Unavailable};
    let says = |words: &[&str]| error.detail().is_some_and(|text| words.iter().any(|word| text.contains(word)));
    if says(&["max number of clients"]) {
        return (Unavailable, CLIENTS_HINT);
    }
    match error.kind() {
        ErrorKind::AuthenticationFailed => (Refused, PASSWORD_HINT),
        ErrorKind::InvalidClientConfig => (Refused, "is the address right?"),
        ErrorKind::UnexpectedReturnType => (Protocol, "is that a Redis?"),
        ErrorKind::Parse => (Unavailable, "the connection broke off in the middle of an answer; or is that no Redis?"),
        // NOPERM, as it is called within a script: by Redis 7.0, by later ones and by Valkey.
        ErrorKind::Server(_) if says(&["user executing the script", "ACL failure in script", "has no permissions"]) => {
            (Refused, PERMISSION_HINT)
        }
        ErrorKind::Server(_) | ErrorKind::Extension => (
            Refused,
            "the server refused this command: are the password, the number of the database and the rights right?",
        ),
        _ if error.is_timeout() => (Timeout, NO_REPLY_HINT),
        _ if error.to_string().contains("certificate") => (Refused, certificate_hint(&error.to_string())),
        _ => (Unavailable, "is the server up, and the address right?"),
    }
}

/// What helps against a certificate that was not accepted, in the words of rustls.
fn certificate_hint(text: &str) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if says(&["NotValidForName", "not valid for name"]) {
        "the certificate is for another host name: connect by a name that it has, or issue it for this one"
    } else if says(&["Expired", "expired"]) {
        "the certificate has expired, or the clock of this machine is wrong: renew it"
    } else if says(&["NotValidYet", "not valid yet"]) {
        "the certificate is not valid yet, or the clock of this machine is wrong"
    } else {
        "does this system trust the issuer of the certificate? `SSL_CERT_FILE` names other roots"
    }
}

impl From<RedisError> for CallError {
    fn from(error: RedisError) -> Self {
        Self::Redis(error)
    }
}

impl From<PoolError> for CallError {
    fn from(error: PoolError) -> Self {
        Self::Pool(error)
    }
}

impl From<UnexpectedReply> for CallError {
    fn from(misread: UnexpectedReply) -> Self {
        Self::UnexpectedReply(misread)
    }
}

impl From<InvalidName> for CallError {
    fn from(name: InvalidName) -> Self {
        Self::InvalidName(name)
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // As Redis says it, and as whoever looks for it finds it: the code first.
            Self::Redis(error) | Self::Pool(PoolError::Backend(error)) => match (error.kind(), error.code()) {
                (ErrorKind::Server(_) | ErrorKind::Extension, Some(code)) => {
                    write!(f, "{}", escape_control(&format!("{code} {}", error.detail().unwrap_or_default())))
                }
                _ => write_chain(error, f),
            },
            Self::Pool(error) => write_chain(error, f),
            Self::SelfTestFailed(error) => write_chain(&**error, f),
            Self::ConnectTimeout => f.write_str("there was no connection in time"),
            Self::ConnectFailed(trouble) => trouble.fmt(f),
            Self::NotSubscribed => {
                f.write_str("nobody can tell us when it is our turn: there is no connection that listens")
            }
            Self::NoReply => f.write_str("there was no answer in time"),
            Self::Expired => f.write_str("it came too late, and was not done"),
            Self::UnexpectedReply(misread) => misread.fmt(f),
            Self::InvalidName(name) => name.fmt(f),
        }
    }
}

impl fmt::Display for WithHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { error: trouble, hint: remedy } = self;
        if remedy.is_empty() { trouble.fmt(f) } else { write!(f, "{trouble} ({remedy})") }
    }
}

/// It has its causes in its text.
impl Error for WithHint {}

/// An error and its causes, each one once, in one line: a server may have chosen the words.
pub(super) fn write_chain(error: &dyn Error, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.contains(&words) {
            text += &format!(": {words}");
        }
        cause = error.source();
    }
    f.write_str(&escape_control(&text))
}

// === impl RedisConnectError ===

impl fmt::Display for RedisConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingUrl => f.write_str("the environment variable REDIS_URL is not set: redis://host:6379, for instance"),
            Self::InvalidUrl(error) => {
                f.write_str("the address of the Redis for locks cannot be read: ")?;
                write_chain(&**error, f)
            }
            Self::InvalidTimeout { setting, value } => {
                let longest = if *setting == "call_timeout" { MAX_CALL_TIMEOUT } else { MAX_CONNECT_TIMEOUT };
                write!(f, "`{setting}` of the Redis for locks is {value:?}: it can be from {MIN_TIMEOUT:?} to {longest:?}")
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
        write_chain(self, f)
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
        let text = CallError::Redis(error).with_hint().to_string();
        assert!(text.contains("forged") && !text.contains(char::is_control), "{text:?}");
    }

    #[cfg(feature = "redis-tls")]
    #[test]
    fn rejected_certificate_names_its_defect() {
        use rustls::{CertificateError, Error};

        for (error, remedy) in [
            (CertificateError::NotValidForName, "for another host name"),
            (CertificateError::Expired, "has expired"),
            (CertificateError::NotValidYet, "not valid yet"),
            (CertificateError::UnknownIssuer, "`SSL_CERT_FILE`"),
        ] {
            let io = std::io::Error::new(std::io::ErrorKind::InvalidData, Error::InvalidCertificate(error));
            let trouble = CallError::Redis(RedisError::from(io));
            assert_eq!(trouble.kind(), StoreErrorKind::Refused);
            let text = trouble.with_hint().to_string();
            assert!(text.contains(remedy), "{text}");
        }
    }
}
