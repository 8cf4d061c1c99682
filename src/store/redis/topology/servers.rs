//! The servers of a store, and the server of a key.

use std::sync::Arc;

use super::cluster::{Node, Nodes};
use crate::{
    clock::Clock,
    lock_key::LockKey,
    store::{
        Many, StoreError, StoreFuture,
        redis::error::CallError,
        remote::{
            batching::{Outgoing, SendRequests, SharedCalls},
            settings::Timeouts,
        },
    },
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
        let nodes = match self {
            Self::One(only) => return Ok(vec![Arc::clone(only)]),
            Self::Cluster(nodes) => nodes,
        };
        nodes.load(operation).await?;
        let all = nodes.all();
        // No node has slots, or the refresh of another caller was cancelled.
        if all.is_empty() { Err(nodes.store_error(operation, CallError::NoMaster)) } else { Ok(all) }
    }

    pub(crate) fn timeouts(&self) -> Timeouts {
        match self {
            Self::One(only) => only.server().timeouts,
            Self::Cluster(nodes) => nodes.parts.timeouts,
        }
    }

    /// Sends each request with the next call to its server. The replies are in the order of the
    /// requests.
    pub(crate) fn push<R: Outgoing>(&self, requests: Many<R>) -> Many<StoreFuture<R::Reply>>
    where
        S: SendRequests<R>,
    {
        let nodes = match self {
            Self::One(only) => return SharedCalls::push(only, requests, only.now()),
            Self::Cluster(nodes) => nodes,
        };
        let (groups, unknown) = nodes.groups(requests.into_iter().enumerate(), |(_, request)| request.key());
        let later = |(index, request)| (index, push_later(nodes, request));
        let mut futures: Vec<_> = unknown.into_iter().map(later).collect();
        for (server, requests) in groups {
            let (indices, requests): (Vec<_>, Vec<_>) = requests.into_iter().unzip();
            let sent = SharedCalls::push(&server, requests.into_iter().collect(), server.now());
            futures.extend(indices.into_iter().zip(sent));
        }
        futures.sort_unstable_by_key(|(index, _)| *index);
        futures.into_iter().map(|(_, future)| future).collect()
    }
}

/// Sends a request when the map of the slots is known. Its validity counts from now.
fn push_later<S: Node + SendRequests<R>, R: Outgoing>(nodes: &Arc<Nodes<S>>, request: R) -> StoreFuture<R::Reply> {
    let nodes = Arc::clone(nodes);
    let called = Clock::default().now();
    StoreFuture::new(async move {
        let server = nodes.find(nodes.slot(request.key()), R::OPERATION).await?;
        SharedCalls::push(&server, request.into(), called).into_single().await
    })
}
