//! The servers of a store, and the server of a key.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    cluster::{Node, Nodes},
    connection::Timeouts,
};
use crate::{
    clock::{BootInstant, Clock},
    lock_key::LockKey,
    store::{Many, StoreError, StoreFuture, redis::error::CallError, remote::batch::Shareable},
};

/// The servers of a store, by key.
pub(crate) enum Servers<S> {
    /// All keys live on one server.
    One(Arc<S>),
    Cluster(Arc<Nodes<S>>),
}

impl<S: Node> Servers<S> {
    /// The server of a key. On a Cluster the nodes are asked, if that is not known yet.
    pub(crate) async fn of(&self, key: &LockKey, operation: &'static str) -> Result<Arc<S>, StoreError> {
        match self {
            Self::One(only) => Ok(Arc::clone(only)),
            Self::Cluster(nodes) => nodes.find(nodes.slot(key), operation).await,
        }
    }

    /// The number of the server of a key, as far as this process knows.
    pub(crate) fn number(&self, key: &LockKey) -> usize {
        match self {
            Self::One(_) => 0,
            Self::Cluster(nodes) => nodes.number(nodes.slot(key)),
        }
    }

    /// The servers that are known now.
    pub(crate) fn all(&self) -> Vec<Arc<S>> {
        match self {
            Self::One(only) => vec![Arc::clone(only)],
            Self::Cluster(nodes) => nodes.all(),
        }
    }

    /// All servers, of which there is one at least. The nodes of a Cluster are asked, if they are
    /// not known yet.
    pub(crate) async fn known(&self, operation: &'static str) -> Result<Vec<Arc<S>>, StoreError> {
        if let Self::Cluster(nodes) = self {
            nodes.load(operation).await?;
            // No node has slots, or the refresh of another caller was cancelled.
            if nodes.all().is_empty() {
                return Err(nodes.store_error(operation, CallError::NoMaster));
            }
        }
        Ok(self.all())
    }

    pub(crate) fn timeouts(&self) -> Timeouts {
        match self {
            Self::One(only) => only.server().timeouts,
            Self::Cluster(nodes) => nodes.timeouts,
        }
    }

    /// Calls the server of each request, with all its requests together. The replies are in the
    /// order of the requests. `wait` shortens the validity of a request whose server is not known
    /// yet.
    pub(crate) fn call<R: Shareable + Send + 'static, T: Send + Unpin + 'static>(
        &self,
        operation: &'static str,
        requests: Many<R>,
        call: fn(&Arc<S>, Many<R>) -> Many<StoreFuture<T>>,
        wait: fn(&mut R, Duration),
    ) -> Many<StoreFuture<T>> {
        let nodes = match self {
            Self::One(only) => return call(only, requests),
            Self::Cluster(nodes) => nodes,
        };
        let (groups, unknown) = nodes.groups(requests.into_iter().enumerate(), |(_, request)| request.key());
        let later = |(place, request)| (place, call_later(nodes, operation, request, call, wait));
        let mut futures: Vec<_> = unknown.into_iter().map(later).collect();
        for (server, requests) in groups {
            let (places, requests): (Vec<_>, Vec<_>) = requests.into_iter().unzip();
            futures.extend(places.into_iter().zip(call(&server, requests.into_iter().collect())));
        }
        futures.sort_unstable_by_key(|(place, _)| *place);
        futures.into_iter().map(|(_, future)| future).collect()
    }
}

/// Calls a server when the map of the slots is known.
fn call_later<S: Node, R: Shareable + Send + 'static, T: Send + Unpin + 'static>(
    nodes: &Arc<Nodes<S>>,
    operation: &'static str,
    mut request: R,
    call: fn(&Arc<S>, Many<R>) -> Many<StoreFuture<T>>,
    wait: fn(&mut R, Duration),
) -> StoreFuture<T> {
    let nodes = Arc::clone(nodes);
    let clock = Clock::default();
    let called: BootInstant = clock.now();
    StoreFuture::new(async move {
        let server = nodes.find(nodes.slot(request.key()), operation).await?;
        wait(&mut request, clock.now().saturating_duration_since(called));
        call(&server, request.into()).into_single().await
    })
}

impl<S> Clone for Servers<S> {
    fn clone(&self) -> Self {
        match self {
            Self::One(only) => Self::One(Arc::clone(only)),
            Self::Cluster(nodes) => Self::Cluster(Arc::clone(nodes)),
        }
    }
}

impl<S: Node> fmt::Debug for Servers<S> {
    /// Without addresses, which may contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all().iter().map(|server| server.server().keyspace.clone())).finish()
    }
}
