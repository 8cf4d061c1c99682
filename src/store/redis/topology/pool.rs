//! A server whose connections for calls come from a pool of the user.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use deadpool_redis::{Connection, Pool};
use futures_util::future::BoxFuture;

use super::{
    endpoint::{Connected, Endpoint, Subscriptions},
    locate::Topology,
    socket::OnMessage,
};
use crate::store::redis::error::CallError;

/// The server of a pool. The pool is asked only for a new connection: asking it for each call would
/// add a `PING`.
pub(crate) struct Pooled {
    pub(crate) pool: Pool,
    /// For messages: a pool has no connections for pub/sub.
    pub(crate) messages: Endpoint,
    pub(crate) call_timeout: Duration,
}

impl Topology for Pooled {
    fn connect<'a>(&'a self, _named: &'a OnceLock<Arc<str>>) -> BoxFuture<'a, Result<Connected, CallError>> {
        Box::pin(async {
            // For good: a returned connection would be shared with other users of the pool.
            let mut connection = Connection::take(self.pool.get().await?);
            connection.set_response_timeout(2 * self.call_timeout);
            Ok(connection.into())
        })
    }

    fn subscribe(&self, on_message: OnMessage) -> BoxFuture<'_, Result<Subscriptions, CallError>> {
        Box::pin(async { Ok(self.messages.subscribe(on_message).await?) })
    }
}

impl std::fmt::Debug for Pooled {
    /// Without the manager of the pool, which has a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pooled").finish_non_exhaustive()
    }
}
