//! The server: its address, the names in it, and the connections to it.

use std::sync::Arc;

use deadpool_redis::redis::cmd;
use futures_util::future::try_join_all;
use tokio::time::{Instant, timeout};
use tracing::warn;

use super::{
    connection::SharedConnection,
    endpoint::Subscriptions,
    locate::{Signs, Topology},
    replicas::MinReplicas,
    socket::OnMessage,
};
use crate::{
    background::Background,
    store::{
        StoreError, StoreErrorKind,
        redis::{error::CallError, wire::Keyspace},
        remote::settings::Timeouts,
    },
};

/// What all servers of a store have in common.
#[derive(Clone)]
pub(crate) struct Parts {
    pub(crate) user: String,
    pub(crate) keyspace: Keyspace,
    pub(crate) timeouts: Timeouts,
    pub(crate) min_replicas: Option<MinReplicas>,
    pub(crate) background: Background,
}

/// The server of a store.
pub(crate) struct Server {
    pub(crate) topology: Arc<dyn Topology>,
    /// The address, without user and password.
    pub(crate) address: String,
    /// The user of the calls, for errors.
    pub(crate) user: String,
    pub(crate) keyspace: Keyspace,
    /// For the logs of tasks that must not block.
    pub(crate) background: Background,
    pub(crate) timeouts: Timeouts,
    /// The replicas that must have a grant or a renewal. `None`: it counts at once.
    pub(crate) min_replicas: Option<MinReplicas>,
    pub(crate) signs: Arc<Signs>,
    /// For acquisitions.
    pub(crate) acquire_conn: Arc<SharedConnection>,
    /// For releases, which never queue behind acquisitions.
    pub(crate) release_conn: Arc<SharedConnection>,
    /// For renewals: the connection of releases, or one of its own if renewals wait for replicas.
    pub(crate) renew_conn: Arc<SharedConnection>,
}

impl Server {
    pub(crate) fn new(parts: Parts, topology: Arc<dyn Topology>, address: String) -> Arc<Self> {
        let Parts { user, keyspace, timeouts, min_replicas, background } = parts;
        let signs = Arc::<Signs>::default();
        let connection =
            || Arc::new(SharedConnection::new(Arc::clone(&topology), timeouts.connect, Arc::clone(&signs)));
        let acquire_conn = connection();
        let release_conn = if topology.needs_order() { Arc::clone(&acquire_conn) } else { connection() };
        let renew_conn = if min_replicas.is_some() { connection() } else { Arc::clone(&release_conn) };
        Arc::new(Self {
            topology,
            address,
            user,
            keyspace,
            background,
            timeouts,
            min_replicas,
            signs,
            acquire_conn,
            release_conn,
            renew_conn,
        })
    }

    /// Opens a connection for messages.
    pub(crate) async fn subscribe(&self, on_message: OnMessage) -> Result<Subscriptions, CallError> {
        let connect = async {
            let mut connection = self.topology.subscribe(on_message).await?;
            connection.track().await?;
            Ok(connection)
        };
        timeout(self.timeouts.connect, connect).await.map_err(|_| CallError::ConnectTimeout)?
    }

    /// The connections for calls.
    pub(crate) fn connections(&self) -> impl Iterator<Item = &Arc<SharedConnection>> {
        let Self { acquire_conn, release_conn, renew_conn, .. } = self;
        let is_own = |one: &Arc<_>, other| !Arc::ptr_eq(one, other);
        let release = is_own(release_conn, acquire_conn).then_some(release_conn);
        let renew = is_own(renew_conn, release_conn).then_some(renew_conn);
        [acquire_conn].into_iter().chain(release).chain(renew)
    }

    /// Whether the server must be a node of a Cluster.
    pub(crate) fn is_cluster(&self) -> bool {
        self.keyspace.node_id().is_some()
    }

    /// Sends a write on each connection. The write changes nothing, because its key never exists. A
    /// server that is full, cannot save or is a replica refuses the write. A connection that broke
    /// while idle is detected here, before a request uses it.
    pub(crate) async fn check_writes(&self, deadline: Instant) -> Result<(), CallError> {
        let key = self.keyspace.health(self.topology.any_slot().unwrap_or(0));
        let write = cmd("SET").arg(key).arg("").arg("XX").take();
        let checks = self.connections().map(async |connection| match connection.command(&write, deadline).await {
            // The slot of the key moves, and the node replies.
            Err(CallError::Redis(error)) if error.redirect_node().is_some() && self.is_cluster() => Ok(()),
            reply => reply.map(drop),
        });
        try_join_all(checks).await.map(drop)
    }

    /// The error of a call.
    pub(crate) fn store_error(&self, operation: &'static str, error: CallError) -> StoreError {
        let error = self.seen_by_cluster(error);
        let kind = match error.kind() {
            // Requests that wait may wait for the next master.
            StoreErrorKind::Unavailable | StoreErrorKind::Timeout if self.topology.will_promote() => {
                StoreErrorKind::Failover
            }
            kind => kind,
        };
        error.into_store_error(operation, kind, &self.address, &self.user)
    }

    /// A redirection is an error of a single server, and a change of a Cluster.
    pub(crate) fn seen_by_cluster(&self, error: CallError) -> CallError {
        match error {
            CallError::Redis(error) if self.is_cluster() && CallError::is_of_cluster(&error) => {
                CallError::ClusterChanges(error)
            }
            error => error,
        }
    }

    /// Warns that the stored value was not a fence, and that a script replaced it by the server's
    /// clock.
    pub(crate) fn warn_fence_replaced(&self, found: &str) {
        let (key, found) = (self.keyspace.fences(), found.to_owned());
        self.background.log(move || {
            warn!(
                target: "tower_lock",
                "the key of the last fencing token in Redis, `{key}`, contained {found}: not a number, or more than a day ahead \
                 of the clock of Redis. It was set to that clock, and tokens increase from there. No other program may write to \
                 this key. If the clock of Redis is wrong, correct it and `DEL {key}`",
            );
        });
    }
}
