//! Builder and constructors of a store: URL, root, session, timeouts.

use std::{future::ready, sync::Arc, time::Duration};

use tower::BoxError;

use super::{
    address::Address, error::ZooKeeperConnectError, lines::ZooKeeper, session::Connector, store::ZooKeeperStore,
};
use crate::store::{
    line::LineStore,
    remote::{
        credentials::{Credentials, Login, TWO_LOGINS},
        settings::{SelfTestError, Timeouts, same, until_ready},
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
    login: Option<Login>,
}

/// The default lease, the lock-delay, and what a server and the network may need.
const SESSION: Duration = Duration::from_secs(35);
const ROOT: &str = "/tower-lock";

impl ZooKeeperStoreBuilder {
    /// Sets the node below which all nodes are. Default: `/tower-lock`, or the path of the URL.
    ///
    /// It is made if it is not there. Applications that share an ensemble need different ones.
    pub fn root(self, root: impl Into<String>) -> Self {
        Self { root: Some(root.into()), ..self }
    }

    /// Sets the time after which the servers end the session of a process that they do not hear.
    /// Default: 35 s.
    ///
    /// A session must last for the lease, the lock-delay and four seconds more. The keys of a
    /// process that crashes are free after this time. The servers must grant it: by default they
    /// grant at most 20 ticks (`maxSessionTimeout`), which are 40 s.
    pub fn session(self, session: Duration) -> Self {
        Self { session: Some(session), ..self }
    }

    /// Sets the longest time of a connect. Default: two seconds.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        Self { connect_timeout: Some(timeout), ..self }
    }

    /// Sets the longest time of a call. Default: half a second.
    pub fn call_timeout(self, timeout: Duration) -> Self {
        Self { call_timeout: Some(timeout), ..self }
    }

    /// Calls this function for user and password at each connect, in place of those of the URL. If
    /// the function fails, the connect fails, and is repeated. The function must not block its
    /// thread.
    ///
    /// The nodes are then private: all rights on them are of this user.
    pub fn credentials<F, T>(self, function: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        Self { login: Some(Login::new(function)), ..self }
    }

    /// Connects to a URL: `zookeeper://user:password@host:2181,host2:2181/root?session=35s`. The
    /// scheme may be `zk`.
    ///
    /// # Errors
    ///
    /// Fails with a [`ZooKeeperConnectError`]. If no server can be reached, connecting is retried
    /// until [`connect_timeout`](Self::connect_timeout) has passed.
    pub async fn connect(self, url: &str) -> Result<ZooKeeperStore, ZooKeeperConnectError> {
        let Address { servers, root, user, session } = Address::parse(url)?;
        let root = same("root", self.root, root)?.unwrap_or_else(|| ROOT.to_owned());
        if !root.starts_with('/') || root.ends_with('/') || root.contains("//") || root.contains(char::is_control) {
            let rule = "a root is a path such as `/shop/locks`";
            return Err(ZooKeeperConnectError::InvalidSetting(format!("root `{}`: {rule}", root.escape_debug())));
        }
        let session = same("session", self.session, session)?.unwrap_or(SESSION);
        let timeouts = Timeouts::new(self.call_timeout, self.connect_timeout)?;
        let of_url = user.map(|user| Login::new(move || ready(Ok(user.clone()))));
        if of_url.is_some() && self.login.is_some() {
            return Err(ZooKeeperConnectError::InvalidUrl(TWO_LOGINS.to_owned()));
        }
        let address = servers.join(",");
        let connector = Connector::new(servers, session, self.login.or(of_url));
        let lines = ZooKeeper::new(connector, address, root, timeouts);
        until_ready(timeouts, || self_test(&lines, session)).await?;
        Ok(ZooKeeperStore(Arc::new(LineStore::new(lines, timeouts.call))))
    }
}

/// Makes the nodes that all locks share, and compares the session with what was asked for.
async fn self_test(lines: &ZooKeeper, wanted: Duration) -> Result<(), SelfTestError<ZooKeeperConnectError>> {
    let failed = |error| ZooKeeperConnectError::of(error, &lines.address, &lines.root);
    let granted = lines.prepare().await.map_err(failed)?;
    if granted < wanted {
        let defect = format!(
            "they grant a session of {granted:?}, and not of {wanted:?}: raise `maxSessionTimeout`, which is 20 ticks \
             (`tickTime`) by default, or lower `session` and the lease"
        );
        return Err(ZooKeeperConnectError::UnsuitableServer { address: lines.address.clone(), defect }.into());
    }
    Ok(())
}

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
