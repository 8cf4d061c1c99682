//! How the server of a store is found, and the signs that it has moved.

use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::{
    endpoint::{Connected, Subscriptions},
    socket::OnMessage,
};
use crate::store::{StoreErrorKind, redis::error::CallError};

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

    /// Whether the server must be a node of a Cluster.
    fn is_cluster(&self) -> bool {
        false
    }

    /// Whether the calls must be executed in the order in which they are sent. They then share one
    /// connection.
    fn needs_order(&self) -> bool {
        false
    }

    /// The kind of an error, which may be that of a failover.
    fn classify(&self, kind: StoreErrorKind) -> StoreErrorKind {
        kind
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
