//! The server of a key, and how a server is found.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::{
    endpoint::{Connected, Subscriptions},
    socket::OnMessage,
};
use crate::{
    lock_key::LockKey,
    store::{Many, StoreErrorKind, redis::error::CallError},
};

/// How the server of a store is found.
pub(crate) trait Topology: fmt::Debug + Send + Sync + 'static {
    /// Connects for calls. `named` gets the address of the server before, if it was looked up.
    fn connect<'a>(&'a self, named: &'a OnceLock<Arc<str>>) -> BoxFuture<'a, Result<Connected, CallError>>;

    /// Connects for messages.
    fn subscribe(&self, on_message: OnMessage) -> BoxFuture<'_, Result<Subscriptions, CallError>>;

    /// The address that counts now. A connection to another one is abandoned, although its server
    /// replies. `None`: this is not known, or each connection leads to the right server.
    fn current(&self) -> BoxFuture<'_, Option<String>> {
        Box::pin(async { None })
    }

    /// Notifies of each move of the server, until the future is dropped. A hint.
    fn listen<'a>(&'a self, _signs: &'a Arc<Signs>) -> BoxFuture<'a, ()> {
        Box::pin(async {})
    }

    /// The kind of an error, which may be that of a failover.
    fn classify(&self, kind: StoreErrorKind) -> StoreErrorKind {
        kind
    }
}

/// Signs of the end of an outage, and of a failover.
#[derive(Debug, Default)]
pub(crate) struct Signs {
    /// Notified by the first reply after a timeout or on a new connection: the outage may have
    /// ended.
    pub(crate) recovered: Arc<Notify>,
    /// Notified by a reply of a replica, and by the sentinels: the master may be another server.
    pub(crate) moved: Notify,
}

/// The servers of a store, by key. All keys live on one server.
#[derive(Debug)]
pub(crate) struct Servers<S>(Arc<S>);

impl<S> Servers<S> {
    pub(crate) fn new(only: Arc<S>) -> Self {
        Self(only)
    }

    /// The server of a key.
    pub(crate) fn of(&self, _key: &LockKey) -> &Arc<S> {
        &self.0
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<S>> {
        std::iter::once(&self.0)
    }

    /// Calls the server of each request, with all its requests together. The replies are in the
    /// order of the requests.
    pub(crate) fn call<R, T>(&self, requests: Many<R>, call: impl Fn(&Arc<S>, Many<R>) -> Many<T>) -> Many<T> {
        call(&self.0, requests)
    }
}
