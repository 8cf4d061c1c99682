//! Builder and constructors of a store: URL, schema, migration, timeouts.

use std::{fmt, sync::Arc, time::Duration};

use tower::BoxError;

use super::{
    address::Address, connection::Connector, error::PostgresConnectError, messages::Messages, schema::Schema,
    self_test::self_test, store::PostgresStore, tls::tls,
};
use crate::{
    limits::{DATABASE_CONNECTIONS, DATABASE_CONNECTIONS_MAX, POSTGRES_CONNECTIONS_MIN, TABLES_NAME},
    store::{
        database::{DatabaseStore, Server},
        remote::{
            credentials::{Credentials, Login},
            settings::{Timeouts, same, until_ready},
            tls::TlsSettings,
        },
    },
};

/// Builder for a [`PostgresStore`] with non-default settings.
///
/// ```no_run
/// # use tower_lock::{LockManager, PostgresStore, store::PostgresConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), PostgresConnectError> {
/// let store = PostgresStore::builder().schema("shop_locks").connect("postgres://user:password@localhost/app").await?;
/// let locks = LockManager::new(store);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
#[must_use = "a builder does nothing until it connects"]
pub struct PostgresStoreBuilder {
    events_url: Option<String>,
    schema: Option<String>,
    migrate: Option<bool>,
    connections: Option<usize>,
    connect_timeout: Option<Duration>,
    call_timeout: Option<Duration>,
    tls: TlsSettings,
    login: Option<Login>,
}

impl PostgresStoreBuilder {
    /// Sets the URL of the connection for messages. Default: the URL of [`connect`](Self::connect).
    ///
    /// With a pooler like PgBouncer in between, messages need a connection to the server itself:
    /// `LISTEN` belongs to a session. Without messages waiters poll several times a second.
    pub fn events_url(self, url: impl Into<String>) -> Self {
        Self { events_url: Some(url.into()), ..self }
    }

    /// Sets the schema of the tables and the functions. Default: `tower_lock`.
    ///
    /// Applications that share a database need different schemas. A schema has 1 to 63 characters
    /// of `[a-z0-9_]`, does not begin with a digit, and does not begin with `pg_`. With any other,
    /// connecting fails with [`PostgresConnectError::InvalidSchema`].
    pub fn schema(self, schema: impl Into<String>) -> Self {
        Self { schema: Some(schema.into()), ..self }
    }

    /// Sets whether [`connect`](Self::connect) executes the [`migration`](Self::migration) if the
    /// schema has no tables, or functions of an older release. Default: `false`.
    ///
    /// The user then needs the right to create the schema: `GRANT CREATE ON DATABASE app TO user`.
    /// Only the user that has made the functions can replace them. Instances of the older release
    /// go on working with the new ones. The migration is one statement of some 50 ms, and
    /// [`call_timeout`](Self::call_timeout) bounds each try.
    pub fn migrate(self, migrate: bool) -> Self {
        Self { migrate: Some(migrate), ..self }
    }

    /// Sets the most connections of the store to the server. Default: 6.
    ///
    /// The number is from 3 to 64. With any other, connecting fails with
    /// [`PostgresConnectError::InvalidConnections`]. One connection is for renewals and releases,
    /// one for messages. The others are for acquires, and for releases with a record or a block:
    /// their commits wait for the disk, and those of several connections wait together. The fourth
    /// and later ones are opened under load. If the server refuses them, the store goes on with
    /// those that it has.
    pub fn connections(self, connections: usize) -> Self {
        Self { connections: Some(connections), ..self }
    }

    /// Sets the timeout of connecting, which includes DNS, TCP and the password. Default: 2
    /// seconds.
    ///
    /// The timeout is from 50 ms to 60 s. With any other, connecting fails with
    /// [`PostgresConnectError::InvalidTimeout`]. [`connect`](Self::connect) retries within this
    /// time, so that a service may start shortly before its database. Later, when a connection is
    /// replaced, a request waits for it at most as long as for a call, and the connect continues in
    /// the background.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        Self { connect_timeout: Some(timeout), ..self }
    }

    /// Sets the timeout of one call. Default: 500 ms.
    ///
    /// The timeout is from 50 ms to 5 s. With any other, connecting fails with
    /// [`PostgresConnectError::InvalidTimeout`]. A call that takes longer is repeated. A request is
    /// rejected (503, not started) after twice this time without a reply.
    pub fn call_timeout(self, timeout: Duration) -> Self {
        Self { call_timeout: Some(timeout), ..self }
    }

    /// Trusts these certificates, in PEM, in place of those of the system.
    ///
    /// This is for a URL with TLS (feature `postgres-tls`), and for that of
    /// [`events_url`](Self::events_url). With a URL without TLS, or with a text without a
    /// certificate, connecting fails with [`PostgresConnectError::InvalidTls`].
    pub fn tls_roots(self, pem: impl Into<Vec<u8>>) -> Self {
        Self { tls: self.tls.with_roots(pem.into()), ..self }
    }

    /// Shows this certificate to the server, and proves it with this key, which is not encrypted.
    /// Both are in PEM. The certificates between it and its root may follow.
    ///
    /// This is for a URL with TLS (feature `postgres-tls`), and for that of
    /// [`events_url`](Self::events_url). With a URL without TLS, or if the key is not that of the
    /// certificate, connecting fails with [`PostgresConnectError::InvalidTls`].
    pub fn tls_client_certificate(self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        Self { tls: self.tls.with_client_certificate(certificate.into(), key.into()), ..self }
    }

    /// Calls this function for user and password at each connect, in place of those of the URL.
    ///
    /// Use it for passwords that end, such as the tokens of RDS, which are valid for 15 minutes. A
    /// connection keeps its login. [`connect_timeout`](Self::connect_timeout) includes the call. If
    /// the function fails, the connect fails, and is repeated. Several connects may call the
    /// function at the same time: keep a token while it is valid. The function must not block its
    /// thread. With a user or a password in the URL, or in that of
    /// [`events_url`](Self::events_url), connecting fails with
    /// [`PostgresConnectError::InvalidUrl`].
    ///
    /// ```no_run
    /// # use tower_lock::{PostgresStore, store::{Credentials, PostgresConnectError}};
    /// # #[derive(Clone)] struct Vault;
    /// # impl Vault { async fn token(&self) -> std::io::Result<String> { Ok(String::new()) } }
    /// # async fn connect(vault: Vault) -> Result<PostgresStore, PostgresConnectError> {
    /// let credentials = move || {
    ///     let vault = vault.clone();
    ///     async move { Ok(Credentials::new("locks", vault.token().await?)) }
    /// };
    /// PostgresStore::builder()
    ///     .credentials(credentials)
    ///     .connect("postgres://db.internal/app?sslmode=verify-full")
    ///     .await
    /// # }
    /// ```
    pub fn credentials<F, T>(self, function: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        Self { login: Some(Login::new(function)), ..self }
    }

    /// Returns the SQL text that makes the schema, its tables and its functions, and replaces
    /// functions of an older release, for a tool that executes migrations.
    ///
    /// The text is one statement. It may be executed while instances work, and again: it keeps
    /// tables, rows, and functions of this or a newer release.
    ///
    /// # Errors
    ///
    /// Fails if the [`schema`](Self::schema) is invalid.
    pub fn migration(&self) -> Result<String, PostgresConnectError> {
        Ok(schema(self.schema.as_deref())?.migration())
    }

    /// Connects to a URL: `postgres://user:password@host:port/database`.
    ///
    /// The URL may have parameters, for example `postgres://host/app?schema=shop&migrate=true`:
    ///
    /// | parameter | meaning |
    /// |---|---|
    /// | `schema` | as [`schema`](Self::schema) |
    /// | `migrate` | as [`migrate`](Self::migrate), `true` or `false` |
    /// | `connections` | as [`connections`](Self::connections) |
    /// | `events_url` | as [`events_url`](Self::events_url), with `%26` for `&` and `%25` for `%` |
    /// | `sslmode` | `require`, `verify-ca` or `verify-full`: TLS. Any other: none |
    /// | `sslrootcert` | the file of the trusted certificates, as [`tls_roots`](Self::tls_roots) |
    /// | `sslcert`, `sslkey` | the files of the certificate of this client and of its key |
    /// | `host`, `port`, `user`, `password`, `dbname` and others | as in libpq |
    ///
    /// TLS needs the feature `postgres-tls`. The certificate and the name of the server are always
    /// checked. The trusted certificates are by default those of the system, or of the file that
    /// `SSL_CERT_FILE` names.
    ///
    /// Any other parameter is an error. So is one that the builder sets to another value: neither
    /// of them is ignored. Of several hosts, `postgres://a,b/app`, the one that accepts writes is
    /// used.
    ///
    /// # Errors
    ///
    /// Fails with a [`PostgresConnectError`]. If the server cannot be reached, connecting is
    /// retried until [`connect_timeout`](Self::connect_timeout) has passed, which each host of the
    /// URL has for itself.
    pub async fn connect(self, url: &str) -> Result<PostgresStore, PostgresConnectError> {
        let login = self.login.as_ref();
        let mut address = Address::parse(url, &self.tls, login)?;
        let own = std::mem::take(&mut address.own);
        let events = same("events_url", self.events_url, own.events_url)?;
        let events = events.map(|url| Address::parse(&url, &self.tls, login).map_err(of_events_url)).transpose()?;
        let schema = schema(same("schema", self.schema, own.schema)?.as_deref())?;
        let migrate = same("migrate", self.migrate, own.migrate)?.unwrap_or(false);
        let connections = same("connections", self.connections, own.connections)?.unwrap_or(DATABASE_CONNECTIONS);
        if !(POSTGRES_CONNECTIONS_MIN..=DATABASE_CONNECTIONS_MAX).contains(&connections) {
            return Err(PostgresConnectError::InvalidConnections(connections));
        }
        let timeouts = Timeouts::new(self.call_timeout, self.connect_timeout)?;
        let connector = |address: Address| {
            let tls = tls(address.tls.as_ref());
            tls.map(|tls| Arc::new(Connector::new(address, tls, timeouts)))
        };
        let calls = connector(address)?;
        let events = events.map(connector).transpose()?;
        let timeouts = calls.timeouts();
        // The other two are for releases and for messages.
        let server = Server::new(&calls, calls.address.clone(), schema, timeouts, connections - 2);
        let test = || self_test(&server, migrate, &calls, events.as_deref());
        let arrives = until_ready(timeouts, test).await?;
        let server = Arc::new(server);
        let messages = Messages::new(Arc::clone(&server), arrives.then_some(events.unwrap_or(calls))).await;
        Ok(PostgresStore(Arc::new(DatabaseStore::new(server, messages))))
    }
}

/// A URL in a URL is encoded twice.
fn of_events_url(error: PostgresConnectError) -> PostgresConnectError {
    match error {
        PostgresConnectError::InvalidUrl(defect) => PostgresConnectError::InvalidUrl(format!(
            "in `events_url`: {defect}. As a parameter of a URL it is encoded once more: `%40` is `%2540` there"
        )),
        error => error,
    }
}

fn schema(name: Option<&str>) -> Result<Schema, PostgresConnectError> {
    let name = name.unwrap_or(TABLES_NAME);
    Schema::new(name).ok_or_else(|| PostgresConnectError::InvalidSchema(name.to_owned()))
}

impl PostgresStore {
    /// Connects to a URL: `postgres://user:password@host:port/database`.
    /// [`PostgresStoreBuilder::connect`] has its parameters.
    ///
    /// # Errors
    ///
    /// Fails with a [`PostgresConnectError`] if the URL is invalid, the server cannot be reached,
    /// is too old or is a standby, a right is missing, or the database has no tables of this crate
    /// or functions of an older release: see [`PostgresStoreBuilder::migrate`].
    pub async fn connect(url: &str) -> Result<Self, PostgresConnectError> {
        Self::builder().connect(url).await
    }

    /// Returns a builder for a store with non-default settings.
    pub fn builder() -> PostgresStoreBuilder {
        PostgresStoreBuilder::default()
    }
}

impl fmt::Debug for PostgresStoreBuilder {
    /// Without the URL, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { schema, migrate, connect_timeout, call_timeout, .. } = self;
        f.debug_struct("PostgresStoreBuilder")
            .field("schema", schema)
            .field("migrate", migrate)
            .field("connect_timeout", connect_timeout)
            .field("call_timeout", call_timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_of_a_builder_has_no_password() {
        let builder = PostgresStore::builder().schema("shop").events_url("postgres://ann:s3cret@a");
        let text = format!("{builder:?}");
        assert!(text.contains("shop") && !text.contains("s3cret"), "{text}");
    }
}
