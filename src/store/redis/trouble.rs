//! What can go wrong with a call, and what to do about it.

use std::{error::Error, fmt, sync::Arc};

use deadpool_redis::{
    PoolError,
    redis::{ErrorKind, RedisError, ServerErrorKind},
};

use super::protocol::{Misread, NotAName};
use crate::store::{StoreError, StoreErrorKind};

/// Why a call has no answer.
#[derive(Debug)]
pub(super) enum Trouble {
    /// Redis, or the way to it, says so.
    Redis(RedisError),
    /// The pool gave no connection.
    Pool(PoolError),
    /// No connection in time.
    NoConnection,
    /// No connection, for a reason that all who wait for it are told.
    NotConnected(Arc<Self>),
    /// Others have the key, and we cannot be told when it is our turn.
    Deaf,
    /// No answer in time.
    Silent,
    /// It came to Redis when it was void.
    Late,
    Misread(Misread),
    Name(NotAName),
}

/// What Redis said, and what to do about it.
#[derive(Debug)]
struct Remedied {
    trouble: Trouble,
    remedy: &'static str,
}

impl Trouble {
    pub(super) fn of(self, operation: &'static str) -> StoreError {
        let (kind, _) = self.verdict();
        StoreError::new("redis", operation, kind).with_source(self.remedied())
    }

    /// With what helps.
    pub(super) fn remedied(self) -> Box<dyn Error + Send + Sync> {
        let (_, remedy) = self.verdict();
        Box::new(Remedied { trouble: self, remedy })
    }

    /// The connection is of no use any more, or is to the wrong server.
    pub(super) fn breaks_connection(error: &RedisError) -> bool {
        let is_replica = matches!(error.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly));
        is_replica || error.is_connection_dropped() || error.is_unrecoverable_error()
    }

    /// Of what kind it is, and what helps.
    pub(super) fn verdict(&self) -> (StoreErrorKind, &'static str) {
        use StoreErrorKind::{Protocol, Refused, Timeout, Unavailable};
        let error = match self {
            Self::NotConnected(trouble) => return trouble.verdict(),
            Self::Redis(error) | Self::Pool(PoolError::Backend(error)) => error,
            Self::Pool(_) => return (Unavailable, "is the pool too small for those who share it?"),
            Self::NoConnection => {
                return (Timeout, "is the server up, does the network let us through, and has the pool one to give?");
            }
            Self::Silent => {
                return (Timeout, "is the server stopped, swamped, or busy with a slow command (`SLOWLOG GET`)?");
            }
            Self::Deaf => {
                return (Unavailable, "may this user subscribe to `tower-lock:in:*`, and do messages come through?");
            }
            Self::Late => {
                return (Timeout, "calls take longer than they may: is the network or the server overloaded?");
            }
            Self::Misread(_) => {
                return (Protocol, "nothing else may write to keys of the prefix, and to `tower-lock:*`");
            }
            Self::Name(_) => return (Refused, ""),
        };
        if error.to_string().contains("certificate") {
            return (Refused, "does this system trust whoever signed it? `SSL_CERT_FILE` names others");
        }
        if error.is_timeout() {
            return (Timeout, "is the server stopped, swamped, or busy with a slow command (`SLOWLOG GET`)?");
        }
        match error.code().unwrap_or_default() {
            "OOM" => (
                Refused,
                "Redis is out of memory, and noeviction is right for locks: raise `maxmemory`, or move other data away. \
                                What is held can be renewed and given back all the same",
            ),
            "WRONGTYPE" => {
                (Refused, "something that is no lock has the name of one: look at its `TYPE`, or choose another prefix")
            }
            "NOPERM" => (Refused, "the user lacks a right: docs/redis.md has the smallest ACL"),
            "NOAUTH" | "WRONGPASS" => (Refused, "are user and password in the URL, and right?"),
            "MISCONF" => (
                Refused,
                "Redis cannot save its data, so it takes no writes: its log says why, and its disk may be full",
            ),
            "READONLY" => (Unavailable, "this is a replica: a failover is going on, or the address is wrong"),
            "LOADING" => (Unavailable, "Redis reads its data after a restart"),
            "BUSY" => (Unavailable, "a script of somebody runs and runs: `SCRIPT KILL`"),
            "MASTERDOWN" => {
                (Unavailable, "this is a replica without its master: a failover is going on, or the address is wrong")
            }
            "NOREPLICAS" => (Unavailable, "too few replicas are up for `min-replicas-to-write`"),
            "CLUSTERDOWN" | "TRYAGAIN" | "MOVED" | "ASK" | "CROSSSLOT" => (
                Refused,
                "this is a Redis Cluster: the locks of this store \
                                                                                     live in one Redis",
            ),
            _ => match error.kind() {
                ErrorKind::AuthenticationFailed => (Refused, "are user and password in the URL, and right?"),
                ErrorKind::InvalidClientConfig => (Refused, "is the address right?"),
                ErrorKind::UnexpectedReturnType => (Protocol, "is that a Redis?"),
                ErrorKind::Parse => {
                    (Unavailable, "the connection broke off in the middle of an answer; or is that no Redis?")
                }
                // NOPERM, as it is called within a script: by Redis 7.0, and by later ones.
                ErrorKind::Server(_)
                    if error.detail().is_some_and(|text| {
                        ["user executing the script", "ACL failure in script", "has no permissions"]
                            .iter()
                            .any(|words| text.contains(words))
                    }) =>
                {
                    (Refused, "the user lacks a right: docs/redis.md has the smallest ACL")
                }
                ErrorKind::Server(_) if error.detail().is_some_and(|text| text.contains("max number of clients")) => {
                    (Unavailable, "raise `maxclients`, or find who keeps so many connections (`CLIENT LIST`)")
                }
                ErrorKind::Server(_) | ErrorKind::Extension => (Refused, "Redis does not do this for us"),
                _ => (Unavailable, "is the server up, and the address right?"),
            },
        }
    }
}

impl From<RedisError> for Trouble {
    fn from(error: RedisError) -> Self {
        Self::Redis(error)
    }
}

impl From<PoolError> for Trouble {
    fn from(error: PoolError) -> Self {
        Self::Pool(error)
    }
}

impl From<Misread> for Trouble {
    fn from(misread: Misread) -> Self {
        Self::Misread(misread)
    }
}

impl From<NotAName> for Trouble {
    fn from(name: NotAName) -> Self {
        Self::Name(name)
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // As Redis says it, and as whoever looks for it finds it: the code first.
            Self::Redis(error) | Self::Pool(PoolError::Backend(error)) => match (error.kind(), error.code()) {
                (ErrorKind::Server(_) | ErrorKind::Extension, Some(code)) => {
                    write!(f, "{code} {}", error.detail().unwrap_or_default())
                }
                _ => error.fmt(f),
            },
            Self::Pool(error) => error.fmt(f),
            Self::NoConnection => f.write_str("there was no connection in time"),
            Self::NotConnected(trouble) => trouble.fmt(f),
            Self::Deaf => f.write_str("nobody can tell us when it is our turn: there is no connection that listens"),
            Self::Silent => f.write_str("there was no answer in time"),
            Self::Late => f.write_str("it came too late, and was not done"),
            Self::Misread(misread) => misread.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

impl fmt::Display for Remedied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trouble, remedy } = self;
        if remedy.is_empty() { trouble.fmt(f) } else { write!(f, "{trouble} ({remedy})") }
    }
}

impl Error for Remedied {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.trouble.source()
    }
}

impl Trouble {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Redis(error) => Some(error),
            Self::Pool(error) => Some(error),
            Self::NotConnected(trouble) => trouble.source(),
            _ => None,
        }
    }
}
