//! One server at an address, which may be a name. Its connections may come from a pool of the user.

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

/// The server at this address.
pub(crate) struct Single {
    pub(crate) endpoint: Endpoint,
    /// For calls. It is asked only for a new connection: asking it for each call would add a
    /// `PING`. It has no connections for messages.
    pub(crate) pool: Option<Pool>,
    pub(crate) call_timeout: Duration,
}

impl Topology for Single {
    fn connect<'a>(&'a self, _named: &'a OnceLock<Arc<str>>) -> BoxFuture<'a, Result<Connected, CallError>> {
        Box::pin(async {
            let Some(pool) = &self.pool else { return Ok(Connected::Socket(self.endpoint.connect().await?)) };
            // For good: a returned connection would be shared with other users of the pool.
            let mut connection = Connection::take(pool.get().await?);
            connection.set_response_timeout(2 * self.call_timeout);
            Ok(Connected::Pooled(connection))
        })
    }

    fn subscribe(&self, on_message: OnMessage) -> BoxFuture<'_, Result<Subscriptions, CallError>> {
        Box::pin(async { Ok(self.endpoint.subscribe(on_message).await?) })
    }
}
