//! Builder and constructors of a store: URL, prefix, migration, timeouts.

use std::{sync::Arc, time::Duration};

use tower::BoxError;

use super::{
    address::Address, connection::Connector, error::MysqlConnectError, schema::Schema, self_test::self_test,
    store::MysqlStore, tls::with_tls,
};
use crate::{
    limits::{
        DATABASE_CONNECTIONS, DATABASE_CONNECTIONS_MAX, MAX_MYSQL_PREFIX_BYTES, MYSQL_CONNECTIONS_MIN, TABLES_NAME,
    },
    store::{
        database::{DatabaseStore, Server},
        remote::{
            credentials::{Credentials, Login},
            settings::{Timeouts, same, until_ready},
            tls::TlsSettings,
        },
    },
};

/// Builder for a [`MysqlStore`] with non-default settings.
///
/// ```no_run
/// # use tower_lock::{LockManager, MysqlStore, store::MysqlConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), MysqlConnectError> {
/// let store = MysqlStore::builder()
///     .prefix("shop_locks")
///     .connect("mysql://user:password@localhost/app")
///     .await?;
/// let locks = LockManager::new(store);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until it connects"]
pub struct MysqlStoreBuilder {
    prefix: Option<String>,
    migrate: Option<bool>,
    connections: Option<usize>,
    connect_timeout: Option<Duration>,
    call_timeout: Option<Duration>,
    tls: TlsSettings,
    login: Option<Login>,
}

impl MysqlStoreBuilder {
    /// Sets the first part of the names of the tables and the procedures. Default: `tower_lock`.
    ///
    /// They are in the database of the URL. Applications that share a database need different
    /// prefixes. A prefix has 1 to 32 characters of `[a-z0-9_]`, and begins with a letter. With any
    /// other, connecting fails with [`MysqlConnectError::InvalidSetting`].
    pub fn prefix(self, prefix: impl Into<String>) -> Self {
        Self { prefix: Some(prefix.into()), ..self }
    }

    /// Sets whether [`connect`](Self::connect) executes the [`migration`](Self::migration) if the
    /// database has no tables, or procedures of an older release. Default: `false`.
    ///
    /// Beside the rights of the store, the user then needs `CREATE`, `CREATE ROUTINE` and `ALTER
    /// ROUTINE` of the database.
    /// Instances of the older release go on working with the new procedures: a call in between is
    /// repeated.
    pub fn migrate(self, migrate: bool) -> Self {
        Self { migrate: Some(migrate), ..self }
    }

    /// Sets the most connections of the store to the server. Default: 6.
    ///
    /// The number is from 2 to 64. With any other, connecting fails with
    /// [`MysqlConnectError::InvalidSetting`]. One connection is for renewals. The others are for
    /// acquires and releases: their commits wait for the disk, and those of several connections
    /// wait together. The third and later ones are opened under load. If the server refuses them,
    /// the store goes on with those that it has.
    pub fn connections(self, connections: usize) -> Self {
        Self { connections: Some(connections), ..self }
    }

    /// Sets the timeout of connecting, which includes DNS, TCP and the password. Default: 2
    /// seconds.
    ///
    /// The timeout is from 50 ms to 60 s. With any other, connecting fails with
    /// [`MysqlConnectError::InvalidSetting`]. [`connect`](Self::connect) retries within this time,
    /// so that a service may start shortly before its database. Later, when a connection is
    /// replaced, a request waits for it at most as long as for a call, and the connect continues in
    /// the background.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        Self { connect_timeout: Some(timeout), ..self }
    }

    /// Sets the timeout of one call. Default: 500 ms.
    ///
    /// The timeout is from 50 ms to 5 s. With any other, connecting fails with
    /// [`MysqlConnectError::InvalidSetting`]. A call that takes longer is repeated. A request is
    /// rejected (503, not started) after twice this time without a reply.
    pub fn call_timeout(self, timeout: Duration) -> Self {
        Self { call_timeout: Some(timeout), ..self }
    }

    /// Trusts these certificates, in PEM, in place of those of the system.
    ///
    /// This is for a URL with TLS (feature `mysql-tls`). With a URL without TLS, or with a text
    /// without a certificate, connecting fails with [`MysqlConnectError::InvalidSetting`].
    pub fn tls_roots(self, pem: impl Into<Vec<u8>>) -> Self {
        Self { tls: self.tls.with_roots(pem.into()), ..self }
    }

    /// Shows this certificate to the server, and proves it with this key, which is not encrypted.
    /// Both are in PEM. The certificates between it and its root may follow.
    ///
    /// This is for a URL with TLS (feature `mysql-tls`). With a URL without TLS, or if the key is
    /// not that of the certificate, connecting fails with [`MysqlConnectError::InvalidSetting`].
    pub fn tls_client_certificate(self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        Self { tls: self.tls.with_client_certificate(certificate.into(), key.into()), ..self }
    }

    /// Calls this function for user and password at each connect, in place of those of the URL.
    ///
    /// Use it for passwords that end, such as the tokens of RDS, which are valid for 15 minutes. A
    /// connection keeps its login. [`connect_timeout`](Self::connect_timeout) includes the call. If
    /// the function fails, the connect fails, and is repeated. Several connects may call the
    /// function at the same time: keep a token while it is valid. The function must not block its
    /// thread. With a user or a password in the URL, connecting fails with
    /// [`MysqlConnectError::InvalidUrl`].
    ///
    /// [`PostgresStoreBuilder::credentials`](crate::store::PostgresStoreBuilder::credentials) has
    /// an example.
    pub fn credentials<F, T>(self, function: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        Self { login: Some(Login::new(function)), ..self }
    }

    /// Returns the SQL text that makes the tables and the procedures, and replaces procedures of an
    /// older release, for the `mysql` client and for tools that know its `DELIMITER`.
    ///
    /// The text may be executed while instances work, and again. It keeps tables and rows, also a
    /// table of another program with one of its names, which [`connect`](Self::connect) then
    /// refuses. It replaces each procedure with one of its names, and the rights on it end.
    ///
    /// # Errors
    ///
    /// Fails if the [`prefix`](Self::prefix) is invalid.
    pub fn migration(&self) -> Result<String, MysqlConnectError> {
        Ok(schema(self.prefix.as_deref())?.migration())
    }

    /// Connects to a URL: `mysql://user:password@host:port/database`. The scheme may be `mariadb`.
    ///
    /// The URL may have parameters, for example `mysql://host/app?prefix=shop&migrate=true`:
    ///
    /// | parameter | meaning |
    /// |---|---|
    /// | `prefix` | as [`prefix`](Self::prefix) |
    /// | `migrate` | as [`migrate`](Self::migrate), `true` or `false` |
    /// | `connections` | as [`connections`](Self::connections) |
    /// | `sslmode` | `require`, `verify-ca` or `verify-full`: TLS. `disable`, `prefer`: none |
    /// | `sslrootcert` | the file of the trusted certificates, as [`tls_roots`](Self::tls_roots) |
    /// | `sslcert`, `sslkey` | the files of the certificate of this client and of its key |
    ///
    /// TLS needs the feature `mysql-tls`. The certificate and the name of the server are always
    /// checked. The trusted certificates are by default those of the system, or of the file that
    /// `SSL_CERT_FILE` names.
    ///
    /// Any other parameter is an error. So is one that the builder sets to another value: neither
    /// of them is ignored.
    ///
    /// # Errors
    ///
    /// Fails with a [`MysqlConnectError`]. If the server cannot be reached, connecting is retried
    /// until [`connect_timeout`](Self::connect_timeout) has passed.
    pub async fn connect(self, url: &str) -> Result<MysqlStore, MysqlConnectError> {
        let invalid = MysqlConnectError::InvalidSetting;
        let mut address = Address::parse(url, &self.tls, self.login.as_ref())?;
        let schema = schema(same("prefix", self.prefix, address.prefix.take())?.as_deref())?;
        let migrate = same("migrate", self.migrate, address.migrate)?.unwrap_or(false);
        let connections = same("connections", self.connections, address.connections)?.unwrap_or(DATABASE_CONNECTIONS);
        if !(MYSQL_CONNECTIONS_MIN..=DATABASE_CONNECTIONS_MAX).contains(&connections) {
            let range = format!("from {MYSQL_CONNECTIONS_MIN} to {DATABASE_CONNECTIONS_MAX}");
            return Err(invalid(format!("`connections` is {connections}, but must be {range}")));
        }
        let timeouts = Timeouts::new(self.call_timeout, self.connect_timeout)?;
        address.options = with_tls(address.options, address.tls.as_ref()).map_err(invalid)?;
        let connector = Arc::new(Connector::new(address));
        // The other one is for renewals.
        let server = Server::new(&connector, connector.address.clone(), schema, timeouts, connections - 1);
        until_ready(timeouts, || self_test(&server, migrate, &connector)).await?;
        Ok(MysqlStore(Arc::new(DatabaseStore::new(Arc::new(server), Arc::new(())))))
    }
}

fn schema(prefix: Option<&str>) -> Result<Schema, MysqlConnectError> {
    let prefix = prefix.unwrap_or(TABLES_NAME);
    let rule = format!("a prefix is 1 to {MAX_MYSQL_PREFIX_BYTES} of [a-z0-9_], and begins with a letter");
    Schema::new(prefix).ok_or_else(|| MysqlConnectError::InvalidSetting(format!("prefix `{prefix}`: {rule}")))
}

impl MysqlStore {
    /// Connects to a URL: `mysql://user:password@host:port/database`.
    /// [`MysqlStoreBuilder::connect`] has its parameters.
    ///
    /// # Errors
    ///
    /// Fails with a [`MysqlConnectError`] if the URL is invalid, the server cannot be reached, is
    /// too old, read only or of an unknown kind, a right is missing, or the database has no tables
    /// of this crate or procedures of an older release: see [`MysqlStoreBuilder::migrate`].
    pub async fn connect(url: &str) -> Result<Self, MysqlConnectError> {
        Self::builder().connect(url).await
    }

    /// Returns a builder for a store with non-default settings.
    pub fn builder() -> MysqlStoreBuilder {
        MysqlStoreBuilder::default()
    }
}
