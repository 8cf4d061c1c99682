//! The store: each operation, decided by a majority of the servers.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    group::Group,
    list,
    node::{Node, Validity},
    quorum::Raise,
};
use crate::{
    clock::BootInstant,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, EventSink, ForceReleaseReply, ForceReleaseRequest, IfBusy,
        KeyStatus, ListReply, ListRequest, LockStore, Many, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest,
        StoreError, StoreFuture, StoreTraits, YieldReply, YieldRequest,
        redis::{
            operations::{Renewals, Together},
            wire::RaiseRequest,
        },
        remote::{
            batch::Needs,
            batching::{SendRequests, Sender, SharedCalls, send_alone},
        },
    },
};

/// Store of locks on a majority of 3, 5, 7 or 9 independent Redis or Valkey servers (7.0 or later):
/// Redlock, with fencing tokens that rise. Needs the feature `redis`.
///
/// ```no_run
/// # use tower_lock::{LockManager, RedlockStore, store::RedisConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), RedisConnectError> {
/// let store = RedlockStore::connect(["redis://a:6379", "redis://b:6379", "redis://c:6379"]).await?;
/// let locks = LockManager::new(store);
/// # Ok(())
/// # }
/// ```
///
/// A key is held when a majority of the servers has granted it, and has its fence. A minority that
/// is down, frozen, separated or slow delays nothing and loses nothing. Without a majority no lock
/// is acquired (503, not started), and a held lock is lost when its lease expires.
///
/// The servers must not replicate each other: replicas, nodes of a Cluster, and one server at two
/// addresses are refused, by its `run_id` (`INFO server`). A server that comes later is checked
/// before it counts. The user needs the same permissions as for a
/// [`RedisStore`](crate::RedisStore), and `+info`.
///
/// Before you use it, compare it with [one Redis and its replicas](crate::guide::topologies):
///
/// - A server that restarts without its data must stay down for one lease (31 s by default), or
///   persist each write (`appendfsync always`). Else a restart of one server, together with a grant
///   that another one has missed, leads to two holders. A clock that is set forward on one server
///   does the same.
/// - There is no queue, and no message: waiters of other processes ask again each 50 to 150 ms, in
///   no order. A process keeps a key while it has waiters. A holder notices a
///   [`force_release`](crate::LockManager::force_release) by its next renewal.
/// - There are no records: [`ReplayLayer`](crate::ReplayLayer) and
///   [`once`](crate::LockManager::once) need another store.
/// - There are no permits and reads: [`permit`](crate::LockManager::permit) and
///   [`read`](crate::LockManager::read) need another store.
/// - A lock costs two round trips to acquire and one to release, three scripts on each server.
///
/// A key made by [`LockKey::raw`] is the name of a lock on each server, in the format of Redisson:
/// a lock of `RedissonRedLock` on the same servers excludes it, and a release wakes its waiters.
/// [`list`](LockStore::list) does not have such keys. Other programs, and stores with the same
/// prefix on one of the servers, hold the key at that server alone.
///
/// Each server has one connection: a release is executed after the votes and the raise before it.
/// When a server begins or ceases to reply, that is logged: the others hide it.
/// [`health`](LockStore::health) passes while a majority replies.
pub struct RedlockStore {
    pub(super) group: Arc<Group>,
}

impl RedlockStore {
    fn ask<T, F>(&self, run: impl FnOnce(Arc<Group>) -> F) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        StoreFuture::new(run(Arc::clone(&self.group)))
    }
}

impl LockStore for RedlockStore {
    /// There are no events.
    fn subscribe(&self, _: EventSink) {}

    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
        SharedCalls::push(&self.group, requests, self.group.now())
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        if requests.is_empty() {
            return StoreFuture::ready(Ok(Vec::new()));
        }
        self.ask(|group| async move { group.renew(requests).await })
    }

    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
        SharedCalls::push(&self.group, requests, self.group.now())
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        let validity = Validity { called: self.group.now(), valid_for: request.valid_for };
        self.ask(|group| async move {
            group.check("yield", &request.key, Needs::of(request.demand.takes_record(), false))?;
            group.extend_or_acquire(request, validity).await
        })
    }

    fn delete_record(&self, key: LockKey) -> StoreFuture<DeleteRecordReply> {
        let refused = self.group.check("delete-record", &key, Needs::Record);
        StoreFuture::ready(refused.map(|()| DeleteRecordReply::NotFound))
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.ask(|group| async move {
            group.check("inspect", &key, Needs::Nothing)?;
            Ok(group.inspect("inspect", &key).await?.0)
        })
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        self.ask(|group| async move { list::list(&group, &request).await })
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.ask(|group| async move {
            group.check("force-release", &request.key, Needs::Nothing)?;
            group.force(request).await
        })
    }

    fn traits(&self) -> StoreTraits {
        StoreTraits::new()
    }

    fn call_timeout(&self) -> Duration {
        self.group.timeouts.call
    }

    fn health(&self) -> StoreFuture<()> {
        self.ask(|group| async move { group.check_majority().await })
    }
}

impl SendRequests<ReleaseRequest> for Group {
    /// On all servers, also those that have not granted the key: their vote may have come late.
    async fn send(
        self: &Arc<Self>,
        requests: Vec<ReleaseRequest>,
        called: BootInstant,
    ) -> Vec<Result<ReleaseReply, StoreError>> {
        let requests: Arc<[_]> = requests.into();
        let release = |node: Arc<Node>| {
            let requests = Arc::clone(&requests);
            async move { node.call(Together { requests, called }).await }
        };
        let (outcomes, answers) = self.ask(requests.len(), self.limit(), release, |_, replies| replies.decide()).await;
        if requests.len() > 1 && outcomes.contains(&Err(())) && answers.may_be_of_one_key() {
            return send_alone(self, requests.to_vec(), called).await;
        }
        let reply = |(index, outcome): (usize, Result<_, ()>)| {
            outcome.map_err(|()| self.store_error("release", index, &answers))
        };
        outcomes.into_iter().enumerate().map(reply).collect()
    }
}

impl Group {
    /// Renews. An error: too few servers have replied.
    async fn renew(&self, requests: Vec<RenewRequest>) -> Result<Vec<RenewReply>, StoreError> {
        let requests: Arc<[_]> = requests.into();
        let renew = |node: Arc<Node>| {
            let requests = Arc::clone(&requests);
            async move {
                let renewed = node.call(Renewals(requests, false)).await?;
                Ok(renewed.into_iter().map(Ok).collect())
            }
        };
        let deadline = self.timeouts.call_deadline();
        let (outcomes, answers) = self.ask(requests.len(), deadline, renew, |_, replies| replies.decide()).await;
        let replies = outcomes.into_iter().enumerate().map(|(index, reply)| {
            if answers.keys[index].may_decide() { Ok(reply) } else { Err(self.store_error("renew", index, &answers)) }
        });
        replies.collect()
    }

    /// Extends a grant under a new fence: without a queue there is nobody to yield to. A grant that
    /// is lost is acquired under the next id.
    async fn extend_or_acquire(
        self: &Arc<Self>,
        request: YieldRequest,
        validity: Validity,
    ) -> Result<YieldReply, StoreError> {
        let YieldRequest { key, id, fence, next_id, lease, queue, valid_for, .. } = request;
        // A copy of an executed yield finds the fence that it has asked for, or a larger one.
        let raise = RaiseRequest { key: key.clone(), id: id.clone(), fence: fence + 1, lease };
        let (outcomes, answers) = self.raise(vec![raise], validity).await;
        match outcomes.first() {
            Some(Raise::Held { fence }) => return Ok(YieldReply::Extended { fence: *fence }),
            Some(Raise::NotHolder) => {}
            Some(Raise::Undecided) | None => return Err(self.store_error("yield", 0, &answers)),
        }
        // Else a minority that has the former id would be in the way of the next one.
        let release = ReleaseRequest::new(key.clone(), id, Duration::ZERO, queue);
        SendRequests::<ReleaseRequest>::send(self, vec![release], validity.called)
            .await
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        let acquire = AcquireRequest::new(key, next_id, lease, IfBusy::Enqueue, queue, valid_for);
        let reply = self.acquire(vec![acquire], validity).await.into_iter().next();
        reply.unwrap_or_else(|| unreachable!("one for each request")).map(YieldReply::NotHolder)
    }

    async fn force(&self, request: ForceReleaseRequest) -> Result<ForceReleaseReply, StoreError> {
        let force = |node: Arc<Node>| {
            let request = request.clone();
            async move { Ok(vec![Ok(node.call(request).await?)]) }
        };
        let (mut outcomes, answers) = self.ask(1, self.limit(), force, |_, replies| replies.decide()).await;
        outcomes.swap_remove(0).map_err(|()| self.store_error("force-release", 0, &answers))
    }

    async fn check_majority(&self) -> Result<(), StoreError> {
        let deadline = self.timeouts.call_deadline();
        let check = |node: Arc<Node>| async move { Ok(vec![Ok(node.shared.server.check_writes(deadline).await?)]) };
        let (outcomes, answers) = self.ask(1, deadline, check, |_, replies| replies.is_majority()).await;
        if outcomes == [true] { Ok(()) } else { Err(self.store_error("health", 0, &answers)) }
    }
}

impl fmt::Debug for RedlockStore {
    /// Without the addresses, which may contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedlockStore")
            .field("servers", &self.group.nodes.len())
            .field("names", &self.group.keyspace)
            .finish_non_exhaustive()
    }
}
