//! Errors of a call and of connecting, with hints for operators.

use std::{error::Error, fmt, time::Duration};

use tokio_postgres::error::SqlState;

use super::schema::{FUNCTIONS, VERSION};
use crate::{
    limits::{DATABASE_CONNECTIONS_MAX, POSTGRES_CONNECTIONS_MIN},
    store::{
        StoreErrorKind,
        database::{self, DriverError},
        error::error_chain,
        remote::{
            settings::{InvalidSetting, timeout_range},
            tls,
        },
    },
};

/// Error of connecting to PostgreSQL with [`PostgresStore`](crate::PostgresStore).
///
/// `Debug` prints the message and all causes on one line, so that `main` can return this error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PostgresConnectError {
    /// The URL is invalid. The reason contains no password.
    #[error("invalid URL of PostgreSQL: {0}")]
    InvalidUrl(String),
    /// The URL requires TLS (`sslmode=require`, `verify-ca` or `verify-full`), and the crate was
    /// built without it.
    #[error(
        "the `sslmode` of the URL requires TLS, and tower-lock was built without it: add the feature `postgres-tls` of \
         tower-lock"
    )]
    TlsNotEnabled,
    /// A certificate or a key cannot be used. The text names its parameter or its method, and its
    /// file.
    #[error("TLS to PostgreSQL: {0}")]
    InvalidTls(String),
    /// The name of the schema is not 1 to 63 characters of `[a-z0-9_]`, begins with a digit, or
    /// begins with `pg_`.
    #[error("invalid schema `{0}`: a schema is 1 to 63 of [a-z0-9_], and begins with a letter, and not with `pg_`")]
    InvalidSchema(String),
    /// The number of connections is out of range.
    #[error("`connections` is {_0}, but must be from {POSTGRES_CONNECTIONS_MIN} to {DATABASE_CONNECTIONS_MAX}")]
    InvalidConnections(usize),
    /// A timeout of the builder is out of range.
    #[error("`{setting}` is {value:?}, but must be {}", timeout_range(.setting))]
    InvalidTimeout {
        /// `connect_timeout` or `call_timeout`.
        setting: &'static str,
        /// Its value.
        value: Duration,
    },
    /// The server cannot be reached, or sent no reply or an unexpected one.
    #[error("could not connect to PostgreSQL at {address}")]
    Unreachable {
        /// Host and port, or the path of a socket, without user and password.
        address: String,
        /// The cause, with a hint.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The server is older than PostgreSQL 13.
    #[error("PostgreSQL at {address} has version {version}, but at least 13 is required")]
    UnsupportedVersion {
        /// Host and port, or the path of a socket.
        address: String,
        /// The version of the server.
        version: String,
    },
    /// The server is a standby, which accepts no writes.
    #[error(
        "PostgreSQL at {address} is a standby, which accepts no writes: connect to the primary server, or name all of \
         them in the URL, `postgres://a,b/db?target_session_attrs=read-write`"
    )]
    Standby {
        /// Host and port, or the path of a socket.
        address: String,
    },
    /// The sessions of this user have another isolation level than the functions of the store need.
    #[error(
        "the sessions of user `{user}` at {address} have the isolation level `{level}`, but the locks need `read committed`: \
         ALTER ROLE \"{user}\" SET default_transaction_isolation = 'read committed', and end the sessions that a pooler \
         has open"
    )]
    IsolationLevel {
        /// Host and port, or the path of a socket.
        address: String,
        /// The user.
        user: String,
        /// The level.
        level: String,
    },
    /// The encoding of the database is not UTF8: it has no texts for some keys.
    #[error("the database at {address} has the encoding `{encoding}`, but the locks need one with UTF8")]
    Encoding {
        /// Host and port, or the path of a socket.
        address: String,
        /// The encoding.
        encoding: String,
    },
    /// The schema, a table or a function belongs to a role of which the user is not a member. The
    /// owner of a function can replace the code that grants the locks, and that code runs as the
    /// user of the store.
    #[error(
        "the schema `{schema}` at {address}, or a table or a function in it, belongs to the role `{owner}`, of which user \
         `{user}` is not a member: connect as the user of the locks, or let a superuser execute GRANT \"{owner}\" TO \"{user}\" if \
         the role is trusted, or choose another schema"
    )]
    OtherOwner {
        /// Host and port, or the path of a socket.
        address: String,
        /// The schema.
        schema: String,
        /// The user of the store.
        user: String,
        /// The owner.
        owner: String,
    },
    /// The database has no tables of this crate.
    #[error(
        "the database at {address} has no tables of tower-lock in the schema `{schema}`: connect with `.migrate(true)`, \
         or execute the SQL text of `PostgresStoreBuilder::migration` once"
    )]
    NoTables {
        /// Host and port, or the path of a socket.
        address: String,
        /// The schema.
        schema: String,
    },
    /// The functions of the schema are of an older release. [`PostgresStoreBuilder::migration`] has
    /// the text that replaces them, while other instances work.
    ///
    /// [`PostgresStoreBuilder::migration`]: crate::store::PostgresStoreBuilder::migration
    #[error(
        "the functions of the schema `{schema}` at {address} have the number {found}, and this release of tower-lock needs \
         {FUNCTIONS}: connect with `.migrate(true)` as their owner, or let the owner execute the SQL text of \
         `PostgresStoreBuilder::migration`, also while other instances work"
    )]
    OlderFunctions {
        /// Host and port, or the path of a socket.
        address: String,
        /// The schema.
        schema: String,
        /// The number of the functions.
        found: u32,
    },
    /// The tables of the schema are of another version, or of another program.
    #[error("the table `{schema}.locks` at {address} is of {found}, and not of {VERSION}: choose another schema")]
    OtherTables {
        /// Host and port, or the path of a socket.
        address: String,
        /// The schema.
        schema: String,
        /// The version of the tables, or `another program`.
        found: String,
    },
    /// The user lacks a right.
    #[error("user `{user}` lacks rights in the database at {address}: {grant}")]
    MissingRights {
        /// Host and port, or the path of a socket.
        address: String,
        /// The user.
        user: String,
        /// The statements that give the rights.
        grant: String,
    },
    /// A message did not arrive: `events_url` leads to a pooler, or to another database.
    #[error(
        "a message of PostgreSQL did not arrive at {address}: `events_url` must lead to the same database, and to the \
         server itself: the transactions of a pooler like PgBouncer receive no messages"
    )]
    EventsUnavailable {
        /// Host and port of `events_url`, or the path of a socket.
        address: String,
    },
}

/// Error of a call.
pub(super) type CallError = database::CallError<tokio_postgres::Error>;

impl DriverError for tokio_postgres::Error {
    const SERVER: &'static str = "PostgreSQL";

    fn classify(&self) -> (StoreErrorKind, &'static str) {
        use StoreErrorKind::{Refused, Unavailable};
        match self.code() {
            Some(code) => classify_code(code),
            None if self.to_string().contains("TLS") => {
                (Refused, tls::hint(&error_chain(self)).unwrap_or("does the server have TLS (`ssl = on`)?"))
            }
            None if error_chain(self).contains("password missing") => {
                (Refused, "the server requires a password, and the URL has none")
            }
            None => (Unavailable, "is the server up, and the address correct?"),
        }
    }

    fn breaks_connection(&self) -> bool {
        // An error without a code is not of the server.
        self.code().is_none_or(|code| code.code().starts_with("08") || is_of_failover(code))
    }

    fn is_of_wait(&self) -> bool {
        self.code().is_some_and(is_of_wait)
    }
}

const READ_ONLY: &str = "the server is a standby, or the user has `default_transaction_read_only`";

fn classify_code(code: &SqlState) -> (StoreErrorKind, &'static str) {
    use StoreErrorKind::{Failover, Refused, Timeout, Unavailable};
    match code.code() {
        "25006" => (Failover, READ_ONLY),
        _ if is_of_failover(code) => (Failover, "the server is stopping, or starting"),
        "57014" => (Timeout, "a statement took longer than the call timeout"),
        "55P03" => (Timeout, "a transaction has locked the row of the key for longer than the lock timeout"),
        _ if is_of_wait(code) => (Unavailable, ""),
        "53300" => (Unavailable, "the server has no connection left: raise `max_connections`"),
        text if text.starts_with("53") || text.starts_with("08") => (Unavailable, ""),
        "42501" => (Refused, "the user lacks a right"),
        "42P01" | "42883" | "3F000" => (Refused, "execute the migration of tower-lock"),
        "3D000" => (Refused, "the URL names a database that does not exist"),
        text if text.starts_with("28") => (Refused, "are the user and the password correct?"),
        _ => (Refused, ""),
    }
}

/// Whether the server accepts no writes, because it is a standby, stops or starts.
fn is_of_failover(code: &SqlState) -> bool {
    ["25006", "57P01", "57P02", "57P03"].contains(&code.code())
}

/// Whether a transaction of another program was in the way.
fn is_of_wait(code: &SqlState) -> bool {
    ["40001", "40P01", "55P03"].contains(&code.code())
}

impl From<InvalidSetting> for PostgresConnectError {
    fn from(error: InvalidSetting) -> Self {
        match error {
            InvalidSetting::Timeout { setting, value } => Self::InvalidTimeout { setting, value },
            InvalidSetting::Differs(defect) => Self::InvalidUrl(defect),
        }
    }
}

impl fmt::Debug for PostgresConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&error_chain(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_the_server_say_whether_to_repeat_a_call() {
        use StoreErrorKind::{Failover, Refused, Timeout, Unavailable};

        for (code, kind) in [
            ("25006", Failover),
            ("57P01", Failover),
            ("57P02", Failover),
            ("57P03", Failover),
            ("55P03", Timeout),
            ("57014", Timeout),
            ("40001", Unavailable),
            ("40P01", Unavailable),
            ("53300", Unavailable),
            ("08006", Unavailable),
            ("28P01", Refused),
            ("42501", Refused),
            ("42883", Refused),
            ("XX000", Refused),
        ] {
            assert_eq!(classify_code(&SqlState::from_code(code)).0, kind, "{code}");
        }
    }
}
