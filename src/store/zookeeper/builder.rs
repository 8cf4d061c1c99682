//! Builder and constructors of a store: URL, root, session, timeouts.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use tower::BoxError;

use super::{
    address::Address, error::ZooKeeperConnectError, lines::ZooKeeper, names, session::Connector, store::ZooKeeperStore,
};
use crate::store::{
    line::LineStore,
    remote::{
        credentials::{Credentials, Login},
        settings::{Timeouts, same, until_ready},
        stream,
        tls::TlsSettings,
    },
};

/// Builder for a [`ZooKeeperStore`] with non-default settings.
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until it connects"]
pub struct ZooKeeperStoreBuilder {
    root: Option<String>,
    session: Option<Duration>,
    connect_timeout: Option<Duration>,
    call_timeout: Option<Duration>,
    tls: TlsSettings,
    login: Option<Login>,
    last_sequence: Option<i32>,
}

/// The default lease, the lock-delay, and what a server and the network may need.
const SESSION: Duration = Duration::from_secs(35);
const SESSIONS: RangeInclusive<Duration> = Duration::from_secs(7)..=Duration::from_secs(3_600);
const ROOT: &str = "/tower-lock";

impl ZooKeeperStoreBuilder {
    /// Sets the node below which all nodes are. Default: `/tower-lock`, or the path of the URL.
    ///
    /// The node is made if it is not there. It must have no nodes of another program. Services that
    /// share an ensemble share their locks only if they have the same root.
    pub fn root(self, root: impl Into<String>) -> Self {
        Self { root: Some(root.into()), ..self }
    }

    /// Sets the time after which the servers end the session of a process that they do not hear.
    /// Default: 35 s.
    ///
    /// A session must last for the lease, the lock-delay and four seconds more: a request with a
    /// longer lease is refused. The keys of a process that crashes are free after this time. The
    /// servers must grant it: by default they grant at most 20 ticks (`maxSessionTimeout`), which
    /// are 40 s with a tick of 2 s.
    ///
    /// The time is from 7 s to an hour. With any other, connecting fails with
    /// [`ZooKeeperConnectError::InvalidSetting`].
    pub fn session(self, session: Duration) -> Self {
        Self { session: Some(session), ..self }
    }

    /// Sets how long [`connect`](Self::connect) is retried. Default: two seconds. One connect to a
    /// server takes at most this time and at most two seconds, also later.
    ///
    /// The timeout is from 50 ms to 60 s. With any other, connecting fails with
    /// [`ZooKeeperConnectError::InvalidSetting`].
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        Self { connect_timeout: Some(timeout), ..self }
    }

    /// Sets the timeout of one call. Default: 500 ms.
    ///
    /// The timeout is from 50 ms to 5 s. With any other, connecting fails with
    /// [`ZooKeeperConnectError::InvalidSetting`]. A call that takes longer is repeated. A request
    /// is rejected (503, not started) after twice this time without a reply.
    pub fn call_timeout(self, timeout: Duration) -> Self {
        Self { call_timeout: Some(timeout), ..self }
    }

    /// Trusts these certificates, in PEM, in place of those of the system.
    ///
    /// This is for a `zookeepers` URL (feature `zookeeper-tls`). With any other URL, or with a text
    /// without a certificate, connecting fails with [`ZooKeeperConnectError::InvalidSetting`].
    pub fn tls_roots(self, pem: impl Into<Vec<u8>>) -> Self {
        Self { tls: self.tls.with_roots(pem.into()), ..self }
    }

    /// Shows this certificate to the servers, and proves it with this key, which is not encrypted.
    /// Both are in PEM. The certificates between it and its root may follow. ZooKeeper requires a
    /// certificate of its clients unless `ssl.clientAuth` says otherwise.
    ///
    /// This is for a `zookeepers` URL (feature `zookeeper-tls`). With any other URL, or if the key
    /// is not that of the certificate, connecting fails with
    /// [`ZooKeeperConnectError::InvalidSetting`].
    pub fn tls_client_certificate(self, certificate: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        Self { tls: self.tls.with_client_certificate(certificate.into(), key.into()), ..self }
    }

    /// Calls this function for user and password at each connect, in place of those of the URL.
    ///
    /// Only this user has rights on the nodes that are made: each instance needs the same user and
    /// password. Nodes that others may write are refused. If the function fails, the connect fails,
    /// and is repeated. The function must not block its thread. With a user in the URL, connecting
    /// fails with
    /// [`ZooKeeperConnectError::InvalidUrl`].
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

    /// Replaces a bucket of nodes after this many, for tests.
    #[cfg(feature = "__internals")]
    #[doc(hidden)]
    pub fn last_sequence(self, last: i32) -> Self {
        Self { last_sequence: Some(last), ..self }
    }

    /// Connects to a URL: `zookeeper://user:password@host:2181,host2:2181/root`. The scheme may be
    /// `zk`, and with TLS it is `zookeepers` or `zks`.
    ///
    /// The hosts are those of one ensemble: all of its members, or some of them. With user and
    /// password, only this user has rights on the nodes that are made (`digest`).
    ///
    /// The URL may have parameters, for example `zookeeper://host/shop?session=45s`:
    ///
    /// | parameter | meaning |
    /// |---|---|
    /// | `session` | as [`session`](Self::session), in whole seconds, with their unit: `45s` |
    /// | `sslrootcert` | the file of the trusted certificates, as [`tls_roots`](Self::tls_roots) |
    /// | `sslcert`, `sslkey` | the files of the certificate of this client and of its key |
    ///
    /// TLS needs the feature `zookeeper-tls`. The certificate and the name of the server are always
    /// checked. The trusted certificates are by default those of the system, or of the file that
    /// `SSL_CERT_FILE` names.
    ///
    /// Any other parameter is an error. So is one that the builder sets to another value: neither
    /// of them is ignored.
    ///
    /// # Errors
    ///
    /// Fails with a [`ZooKeeperConnectError`]. If no server can be reached, or the servers have no
    /// majority, connecting is retried until [`connect_timeout`](Self::connect_timeout) has passed.
    pub async fn connect(self, url: &str) -> Result<ZooKeeperStore, ZooKeeperConnectError> {
        let invalid = ZooKeeperConnectError::InvalidSetting;
        let Address { servers, root, login, tls, session } = Address::parse(url, &self.tls, self.login.as_ref())?;
        let root = same("root", self.root, root)?.unwrap_or_else(|| ROOT.to_owned());
        if !names::is_root(&root) {
            let rule = "a root is a path such as `/shop/locks`";
            return Err(invalid(format!("root `{}`: {rule}", root.escape_debug())));
        }
        let session = same("session", self.session, session)?.unwrap_or(SESSION);
        if !SESSIONS.contains(&session) {
            let range = format!("from {:?} to {:?}", SESSIONS.start(), SESSIONS.end());
            return Err(invalid(format!("`session` is {session:?}, but must be {range}")));
        }
        let timeouts = Timeouts::new(self.call_timeout, self.connect_timeout)?;
        let tls = match tls.map(|settings| stream::tls(&settings)) {
            None => None,
            Some(Some(tls)) => Some(tls.map_err(invalid)?),
            Some(None) => return Err(invalid(NO_TLS.to_owned())),
        };
        let address: Vec<_> = servers.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        let connector = Connector::new(servers, session, tls, login);
        let last = self.last_sequence.unwrap_or(names::LAST_SEQUENCE);
        let lines = ZooKeeper::new(connector, address.join(","), root, timeouts, last);
        let failed = |error| ZooKeeperConnectError::of(error, &lines.address, &lines.root);
        until_ready(timeouts, async || lines.prepare().await.map_err(failed)).await?;
        Ok(ZooKeeperStore(Arc::new(LineStore::new(lines, timeouts.call))))
    }
}

const NO_TLS: &str = "the URL requires TLS, and tower-lock was built without it: add its feature `zookeeper-tls`";

impl ZooKeeperStore {
    /// Connects to a URL: `zookeeper://host:2181,host2:2181/root`.
    /// [`ZooKeeperStoreBuilder::connect`] has its parts.
    ///
    /// # Errors
    ///
    /// Fails with a [`ZooKeeperConnectError`] if the URL is invalid, no server can be reached, the
    /// user may not make nodes, or the servers grant no session that is long enough.
    pub async fn connect(url: &str) -> Result<Self, ZooKeeperConnectError> {
        Self::builder().connect(url).await
    }

    /// Returns a builder for a store with non-default settings.
    pub fn builder() -> ZooKeeperStoreBuilder {
        ZooKeeperStoreBuilder::default()
    }
}
