//! Errors of a call and of connecting, with hints for operators.

use std::{error::Error, fmt};

use super::schema::PROCEDURES;
use crate::store::{
    StoreErrorKind,
    database::{self, DriverError},
    error::error_chain,
    remote::{
        settings::{InvalidSetting, timeout_range},
        tls,
    },
};

/// Error of connecting to MySQL or MariaDB with [`MysqlStore`](crate::MysqlStore).
///
/// `Debug` prints the message and all causes on one line, so that `main` can return this error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum MysqlConnectError {
    /// The URL is invalid. The reason contains no password.
    #[error("invalid URL of MySQL: {0}")]
    InvalidUrl(String),
    /// A setting of the builder or of the URL cannot be used. The text names it, and its file.
    #[error("invalid setting of MySQL: {0}")]
    InvalidSetting(String),
    /// The server cannot be reached, or sent no reply or an unexpected one.
    #[error("could not connect to MySQL at {address}")]
    Unreachable {
        /// Host and port, without user and password.
        address: String,
        /// The cause, with a hint.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The server cannot have the locks: it is too old, read only, has a setting with which a lock
    /// is not exclusive, or another program has a table or a procedure with one of these names.
    #[error("the server at {address} cannot have the locks: {defect}")]
    UnsuitableServer {
        /// Host and port.
        address: String,
        /// The defect, and what to do.
        defect: String,
    },
    /// The database has no tables of this crate, or procedures of an older release, or the user has
    /// no right to see them. [`MysqlStoreBuilder::migration`] has the text that makes and replaces
    /// them, while other instances work.
    ///
    /// [`MysqlStoreBuilder::migration`]: crate::store::MysqlStoreBuilder::migration
    #[error(
        "the database at {address} has no tables and procedures of tower-lock with the prefix `{prefix}` and at least the \
         number {PROCEDURES} (found: {found}), or EXECUTE is not granted: connect with `.migrate(true)`, or execute the \
         SQL text of `MysqlStoreBuilder::migration`, also while other instances work"
    )]
    Migration {
        /// Host and port.
        address: String,
        /// The prefix.
        prefix: String,
        /// The number of the procedures that are there. Zero: there are none.
        found: u32,
    },
    /// The user lacks a right.
    #[error("the user lacks a right at {address}: {grant}")]
    MissingRights {
        /// Host and port.
        address: String,
        /// The message of the server, which names the user, and the statement that gives the
        /// rights.
        grant: String,
    },
}

/// Error of a call.
pub(super) type CallError = database::CallError<mysql_async::Error>;

impl DriverError for mysql_async::Error {
    const SERVER: &'static str = "MySQL";

    fn classify(&self) -> (StoreErrorKind, &'static str) {
        use StoreErrorKind::{Refused, Unavailable};
        match self {
            Self::Server(error) => classify_code(error.code),
            Self::Driver(mysql_async::DriverError::NoClientSslFlagFromServer) => (Refused, "the server has no TLS"),
            // As MySQL 9 replies for a user that does not exist.
            Self::Driver(mysql_async::DriverError::UnknownAuthPlugin { .. }) => (Refused, WRONG_LOGIN),
            error => match tls::hint(&error_chain(error)) {
                Some(hint) => (Refused, hint),
                None => (Unavailable, "is the server up, and the address correct?"),
            },
        }
    }

    fn breaks_connection(&self) -> bool {
        self.is_fatal() || self.classify().0 == StoreErrorKind::Failover
    }

    fn is_of_wait(&self) -> bool {
        matches!(code(self), Some(1205 | 1213))
    }
}

/// The number of an error of the server.
pub(super) fn code(error: &mysql_async::Error) -> Option<u16> {
    if let mysql_async::Error::Server(error) = error { Some(error.code) } else { None }
}

const WRONG_LOGIN: &str = "are the user and the password correct? does it require TLS (`sslmode`) or a certificate?";

fn classify_code(code: u16) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Failover, Refused, Timeout, Unavailable};
    match code {
        1290 | 1792 | 1836 => (Failover, "the server is a replica, or is `read_only`"),
        // Its session may have an open transaction, and is closed.
        1053 | 1077 | 1079 | 1317 | 1568 | 1927 | 1969 | 3024 | 3169 => (Failover, "the server ended the call"),
        1205 => (Timeout, "another transaction has locked a row or a table of the locks"),
        1040 | 1203 | 1226 => (Unavailable, "the server has no connection left: raise `max_connections`"),
        1213 | 2006 | 2013 | 4031 => (Unavailable, ""),
        // A migration replaces the procedures.
        1305 => (Unavailable, "execute the migration of tower-lock"),
        1146 => (Refused, "execute the migration of tower-lock"),
        1044 | 1045 | 1698 => (Refused, WRONG_LOGIN),
        1049 => (Refused, "the URL names a database that does not exist"),
        1142 | 1143 | 1227 | 1370 => (Refused, "the user lacks a right"),
        _ => (Refused, ""),
    }
}

impl From<InvalidSetting> for MysqlConnectError {
    fn from(error: InvalidSetting) -> Self {
        match error {
            InvalidSetting::Timeout { setting, value } => {
                Self::InvalidSetting(format!("`{setting}` is {value:?}, but must be {}", timeout_range(setting)))
            }
            InvalidSetting::Differs(defect) => Self::InvalidUrl(defect),
        }
    }
}

impl fmt::Debug for MysqlConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&error_chain(self))
    }
}
