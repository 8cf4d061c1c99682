//! Errors of a call and of connecting, with hints for operators.

use std::{error::Error, fmt, io, time::Duration};

use super::wire::NO_NODE;
use crate::store::{
    StoreErrorKind,
    error::{error_chain, with_hint},
    line::LineError,
    remote::{
        credentials::{LOGIN_HINT, LoginError},
        link::LinkError,
        settings::{InvalidSetting, SelfTestError, timeout_range},
        tls,
    },
};

/// Error of connecting to ZooKeeper with [`ZooKeeperStore`](super::ZooKeeperStore).
///
/// `Debug` prints the message and all causes on one line, so that `main` can return this error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ZooKeeperConnectError {
    /// The URL is invalid. The reason contains no password.
    #[error("invalid URL of ZooKeeper: {0}")]
    InvalidUrl(String),
    /// A setting of the builder or of the URL cannot be used. The text names it.
    #[error("invalid setting of ZooKeeper: {0}")]
    InvalidSetting(String),
    /// No server can be reached, or none has a leader, or one sent an unexpected reply.
    #[error("could not connect to ZooKeeper at {address}")]
    Unreachable {
        /// Hosts and ports, without user and password.
        address: String,
        /// The cause, with a hint.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The servers cannot have the locks: the session is too short, or the user may not make nodes.
    #[error("the servers at {address} cannot have the locks: {defect}")]
    UnsuitableServer {
        /// Hosts and ports.
        address: String,
        /// The defect, and what to do.
        defect: String,
    },
}

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("{0}")]
    Link(#[from] LinkError<Self>),
    #[error("{0}")]
    Login(#[from] LoginError),
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The connection broke before the call was sent.
    #[error("the connection is closed")]
    Closed,
    #[error("the connection broke before the reply")]
    Broken,
    #[error("the session has ended")]
    SessionEnded,
    #[error(
        "they grant a session of {granted:?}, and not of {wanted:?}: raise `maxSessionTimeout` of each server, which is \
         20 ticks (`tickTime`) by default, or lower `session` and the lease"
    )]
    ShortSession { granted: Duration, wanted: Duration },
    #[error("the reply is not one of ZooKeeper")]
    Protocol,
    #[error("ZooKeeper replied with the error {0}{name}", name = name(*.0))]
    Server(i32),
    #[error("the root has nodes of another program, or of another release")]
    ForeignRoot,
    #[error("others may write the nodes of the locks")]
    OpenRoot,
    #[error("{1}")]
    Adapter(StoreErrorKind, String),
}

const REACHABLE: &str = "is a majority of the servers up, and the address correct?";

const CLOSED: &str =
    "has the ensemble a majority? Is `maxClientCnxns` reached, or does this port need `zookeepers://`?";

/// The user has no right.
const NO_AUTH: i32 = -102;
const AUTH_FAILED: i32 = -115;

/// The name of an error in the documentation of ZooKeeper, which the servers do not send.
fn name(error: i32) -> &'static str {
    match error {
        -4 => " (ConnectionLoss)",
        -7 => " (OperationTimeout)",
        -8 => " (BadArguments)",
        NO_NODE => " (NoNode)",
        NO_AUTH => " (NoAuth)",
        -112 => " (SessionExpired)",
        AUTH_FAILED => " (AuthFailed)",
        -118 => " (SessionMoved)",
        -125 => " (QuotaExceeded)",
        _ => "",
    }
}

impl CallError {
    fn classify(&self) -> (StoreErrorKind, &'static str) {
        use StoreErrorKind::{Protocol, Refused, Timeout, Unavailable};
        match self {
            Self::Link(LinkError::ConnectFailed(error)) => error.classify(),
            Self::Link(LinkError::ConnectTimeout) => (Unavailable, REACHABLE),
            Self::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => (Unavailable, CLOSED),
            Self::Io(error) => (Unavailable, tls::hint(&error.to_string()).unwrap_or(REACHABLE)),
            Self::Login(_) => (Unavailable, LOGIN_HINT),
            Self::Closed | Self::Broken | Self::SessionEnded | Self::ShortSession { .. } => (Unavailable, ""),
            Self::Link(LinkError::NoReply) => (Timeout, "is the leader, or its disk, overloaded?"),
            Self::Protocol => (Protocol, "is it a ZooKeeper?"),
            // The connection, a timeout, the session, or its move to another server.
            Self::Server(-4 | -7 | -112 | -118) => (Unavailable, ""),
            Self::Server(NO_NODE) => (Unavailable, "were nodes of the locks deleted by hand?"),
            Self::Server(NO_AUTH | AUTH_FAILED) => (Refused, "the user lacks a right on the nodes of the locks"),
            Self::Server(_) | Self::ForeignRoot | Self::OpenRoot => (Refused, ""),
            Self::Adapter(kind, _) => (*kind, ""),
        }
    }

    pub(super) fn kind(&self) -> StoreErrorKind {
        self.classify().0
    }

    pub(super) fn breaks_connection(&self) -> bool {
        matches!(self, Self::Closed | Self::Broken)
    }

    pub(super) fn with_hint(self, address: &str) -> Box<dyn Error + Send + Sync> {
        let hint = self.classify().1;
        with_hint(Some(&format_args!("ZooKeeper at {address}")), self, hint)
    }
}

impl LineError for CallError {
    fn of(kind: StoreErrorKind, text: impl Into<String>) -> Self {
        Self::Adapter(kind, text.into())
    }
}

impl ZooKeeperConnectError {
    /// The error of a call of the self-test.
    pub(super) fn of(error: CallError, address: &str, root: &str) -> SelfTestError<Self> {
        let address = address.to_owned();
        let defect = match error {
            CallError::Server(NO_AUTH | AUTH_FAILED) => {
                Some(format!("the user may not make or read nodes below `{root}`: `setAcl` gives the right"))
            }
            CallError::ForeignRoot => {
                Some(format!("`{root}` has nodes of another program, or of another release: use another root"))
            }
            CallError::OpenRoot => Some(format!(
                "clients without a user may write below `{root}`: with all instances stopped, `setAcl -R {root} \
                 auth::cdrwa` as this user closes it, or use another root"
            )),
            _ => None,
        };
        if let Some(defect) = defect {
            return Self::UnsuitableServer { address, defect }.into();
        }
        if let CallError::Link(LinkError::ConnectFailed(cause)) = &error
            && let CallError::ShortSession { .. } = **cause
        {
            // Another server may grant it.
            let error = Self::UnsuitableServer { address, defect: cause.to_string() };
            return SelfTestError { error, is_transient: true };
        }
        let (is_transient, source) = (error.kind().is_transient(), error.with_hint(&address));
        SelfTestError { error: Self::Unreachable { address, source }, is_transient }
    }
}

impl From<InvalidSetting> for ZooKeeperConnectError {
    fn from(error: InvalidSetting) -> Self {
        match error {
            InvalidSetting::Timeout { setting, value } => {
                Self::InvalidSetting(format!("`{setting}` is {value:?}, but must be {}", timeout_range(setting)))
            }
            InvalidSetting::Differs(defect) => Self::InvalidUrl(defect),
        }
    }
}

impl fmt::Debug for ZooKeeperConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&error_chain(self))
    }
}
