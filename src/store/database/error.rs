//! Errors of a call, with hints for operators.

use std::error::Error;

use crate::store::{
    StoreError, StoreErrorKind,
    error::{error_chain, with_hint},
    remote::{
        credentials::{LOGIN_HINT, LoginError},
        link::LinkError,
    },
};

/// The error of a driver.
pub(crate) trait DriverError: Error + Send + Sync + 'static {
    /// The name of the server.
    const SERVER: &'static str;

    /// What kind of error it is, and a hint, which may be empty.
    fn classify(&self) -> (StoreErrorKind, &'static str);

    /// Whether the connection is unusable, or leads to a server that accepts no writes.
    fn breaks_connection(&self) -> bool;

    /// Whether another transaction was in the way: the server has executed nothing, and may execute
    /// the other requests of the call.
    fn is_of_wait(&self) -> bool;
}

/// Error of a call.
///
/// Its text contains its causes. The call is repeated or rejected by [`kind`](Self::kind).
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError<E: DriverError> {
    #[error("{}", error_chain(.0))]
    Server(#[from] E),
    /// The connection broke before the call was sent.
    #[error("the connection is closed")]
    Closed,
    #[error("{0}")]
    Link(#[from] LinkError<Self>),
    #[error("{0}")]
    Login(#[from] LoginError),
    /// The call reached the server after it had expired, and did nothing.
    #[error("the call reached the server too late and was not executed")]
    Expired,
    /// The connection for messages is down.
    #[error("the connection for messages is down")]
    NotListening,
    /// The address leads to other tables than at the start.
    #[error("the tables of the locks are not those that this process began with")]
    OtherTables,
    /// The database has no text with NUL.
    #[error("the key has a NUL character, which a text of {} cannot have", E::SERVER)]
    InvalidKey,
    #[error("the reply is not one of the functions of tower-lock")]
    UnexpectedReply,
}

const OTHER_TABLES: &str =
    "does the address lead to another database, or were they made again? if all processes use these, restart this one";

impl<E: DriverError> CallError<E> {
    pub(super) fn into_store_error(self, store: &'static str, operation: &'static str, address: &str) -> StoreError {
        StoreError::new(store, operation, self.kind()).with_source(self.with_hint(address))
    }

    pub(crate) fn with_hint(self, address: &str) -> Box<dyn Error + Send + Sync> {
        let hint = self.classify().1;
        with_hint(Some(&format_args!("{} at {address}", E::SERVER)), self, hint)
    }

    /// Whether the connection is unusable, or leads to a server that accepts no writes.
    pub(super) fn breaks_connection(&self) -> bool {
        matches!(self, Self::Closed) || matches!(self, Self::Server(error) if error.breaks_connection())
    }

    /// Whether the server has executed nothing, and may execute the other requests of the call.
    pub(super) fn may_be_of_one_key(&self) -> bool {
        self.driver().is_some_and(E::is_of_wait)
    }

    /// Whether a retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        self.kind().is_transient()
    }

    fn kind(&self) -> StoreErrorKind {
        self.classify().0
    }

    /// The error of the driver.
    pub(crate) fn driver(&self) -> Option<&E> {
        match self {
            Self::Server(error) => Some(error),
            Self::Link(LinkError::ConnectFailed(error)) => error.driver(),
            _ => None,
        }
    }

    fn classify(&self) -> (StoreErrorKind, &'static str) {
        use StoreErrorKind::{InvalidKey, Protocol, Refused, Timeout, Unavailable};
        match self {
            Self::Link(LinkError::ConnectFailed(error)) => error.classify(),
            Self::Server(error) => error.classify(),
            Self::Link(LinkError::ConnectTimeout) => {
                (Unavailable, "is the server up, and the address correct, does `credentials` return?")
            }
            Self::Login(_) => (Unavailable, LOGIN_HINT),
            Self::Closed | Self::NotListening => (Unavailable, ""),
            Self::Link(LinkError::NoReply) => (Timeout, "is the server overloaded, or is its disk slow?"),
            Self::Expired => (Timeout, ""),
            Self::OtherTables => (Refused, OTHER_TABLES),
            Self::InvalidKey => (InvalidKey, ""),
            Self::UnexpectedReply => (Protocol, "are the functions of another version of tower-lock?"),
        }
    }
}
