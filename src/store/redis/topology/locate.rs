//! How the server of a store is found, and the signs that it has moved. One server at an address,
//! which may be a name, is found here: its connections may come from a pool of the user.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use deadpool_redis::{Connection, Pool};
use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::{
    endpoint::{Connected, Endpoint, Subscriptions},
    socket::OnMessage,
};
use crate::store::redis::error::CallError;

/// How the server of a store is found.
pub(crate) trait Topology: Send + Sync + 'static {
    /// Connects for calls. `named` gets the address of the server before, if it was looked up.
    fn connect<'a>(&'a self, named: &'a OnceLock<Arc<str>>) -> BoxFuture<'a, Result<Connected, CallError>>;

    /// Connects for messages, if the store needs them.
    fn subscribe(&self, _on_message: OnMessage) -> BoxFuture<'_, Result<Subscriptions, CallError>> {
        Box::pin(async { Err(CallError::NotSubscribed) })
    }

    /// The address that counts now. A connection to another one is abandoned, although its server
    /// replies. `None`: this is not known, or each connection leads to the right server.
    fn current(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(async { None })
    }

    /// Notifies of each move of the server, until the future is dropped. A hint.
    fn listen<'a>(&'a self, _signs: &'a Arc<Signs>) -> BoxFuture<'a, ()> {
        Box::pin(async {})
    }

    /// A slot that the server has, for keys of its own. `None`: it has all keys, or no slot.
    fn any_slot(&self) -> Option<u16> {
        None
    }

    /// The host of the server, for an address without one.
    fn host(&self) -> String {
        String::new()
    }

    /// Whether the calls must be executed in the order in which they are sent. They then share one
    /// connection.
    fn needs_order(&self) -> bool {
        false
    }

    /// Whether another server will be promoted if this one stays down.
    fn will_promote(&self) -> bool {
        false
    }
}

/// Signs of the end of an outage, and of a failover.
#[derive(Default)]
pub(crate) struct Signs {
    /// Notified by the first reply after a timeout or on a new connection: the outage may have
    /// ended.
    pub(crate) recovered: Arc<Notify>,
    /// Notified by a reply of a replica, and by the sentinels: the master may be another server.
    pub(crate) moved: Notify,
}

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
