//! The server: its address, the names in it, and the connections to it.

use std::sync::Arc;

use deadpool_redis::redis::aio::PubSub;
use tokio::time::timeout;

use super::{
    connection::{SharedConnection, Timeouts},
    connector::Connector,
    error::CallError,
    proto::Keyspace,
    replicas::MinReplicas,
};
use crate::store::{StoreError, StoreErrorKind};

/// The server of a store.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) connector: Connector,
    /// The address, without user and password.
    pub(super) address: String,
    /// The user of the calls, for errors.
    pub(super) user: String,
    pub(super) keyspace: Keyspace,
    pub(super) timeouts: Timeouts,
    /// The replicas that must have a grant or a renewal. `None`: it counts at once.
    pub(super) min_replicas: Option<MinReplicas>,
    /// For acquisitions.
    pub(super) acquire_conn: Arc<SharedConnection>,
    /// For releases, which never queue behind acquisitions.
    pub(super) release_conn: Arc<SharedConnection>,
    /// For renewals: the connection of releases, or one of its own if renewals wait for replicas.
    pub(super) renew_conn: Arc<SharedConnection>,
}

impl Server {
    /// Opens a connection for messages.
    pub(super) async fn connect_pubsub(&self) -> Result<PubSub, CallError> {
        let connection = timeout(self.timeouts.connect, self.connector.connect_pubsub()).await;
        Ok(connection.map_err(|_| CallError::ConnectTimeout)??)
    }

    /// The connections for calls.
    pub(super) fn connections(&self) -> impl Iterator<Item = &Arc<SharedConnection>> {
        let own = (!Arc::ptr_eq(&self.renew_conn, &self.release_conn)).then_some(&self.renew_conn);
        [&self.acquire_conn, &self.release_conn].into_iter().chain(own)
    }

    /// The error of a call.
    pub(super) fn store_error(&self, operation: &'static str, error: CallError) -> StoreError {
        let kind = match error.kind() {
            // The sentinels will promote another server: requests that wait may wait for it.
            StoreErrorKind::Unavailable | StoreErrorKind::Timeout if self.has_sentinels() => StoreErrorKind::Failover,
            kind => kind,
        };
        error.into_store_error(operation, kind, &self.address, &self.user)
    }

    fn has_sentinels(&self) -> bool {
        self.connector.sentinels().is_some_and(|sentinels| sentinels.are_reachable())
    }

    /// Warns that the stored value was not a fence, and that a script replaced it by the server's
    /// clock.
    #[cfg_attr(not(feature = "tracing"), expect(unused_variables, clippy::unused_self, reason = "there is no log"))]
    pub(super) fn warn_fence_replaced(&self, found: &str) {
        #[cfg(feature = "tracing")]
        tracing::warn!(
            target: "tower_lock",
            "the key of the last fencing token in Redis, `{key}`, contained {found}: not a number, or more than a day ahead of the \
             clock of Redis. It was set to that clock, and tokens increase from there. No other program may write to this key. If the \
             clock of Redis is wrong, correct it and `DEL {key}`",
            key = self.keyspace.fence(),
        );
    }
}
