//! The store: calls of scripts.

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::try_join_all;
use tokio::time::Instant;

use super::{
    calls::{Call, send_one},
    error::CallError,
    list,
    operations::{self, DeleteRecord, Inspect, Yield},
    shared::Shared,
    topology::Servers,
};
use crate::{
    clock::Clock,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus,
        ListReply, ListRequest, LockStore, Many, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreFuture,
        StoreTraits, YieldReply, YieldRequest,
    },
};

/// Store of locks in Redis or Valkey (7.0 or later), which any number of instances share. Needs the
/// feature `redis`.
///
/// ```no_run
/// # use tower_lock::{LockManager, RedisStore, store::RedisConnectError};
/// # #[tokio::main]
/// # async fn main() -> Result<(), RedisConnectError> {
/// let locks = LockManager::new(RedisStore::connect("redis://127.0.0.1:6379").await?);
/// # Ok(())
/// # }
/// ```
///
/// A lock is a hash with one field, the acquisition id. This is the format of Redisson, so locks of
/// both libraries exclude each other. Waiters queue in a list next to the lock. A release offers
/// the lock to the first live waiter. [Redis in production](crate::guide::redis_in_production)
/// describes the data model, and the behaviour when Redis is slow, down, restarted or flushed.
///
/// A store has three connections, on a Redis Cluster to each master: one for acquisitions, one for
/// renewals and releases, and one for messages. Renewals and releases therefore never wait for
/// acquisitions. With [`min_replicas`](crate::store::RedisStoreBuilder::min_replicas), renewals
/// have one of their own. A broken connection is replaced.
///
/// A fence is the clock of Redis in microseconds, or one more than the last fence of the prefix (on
/// a Cluster: of its slot), if that is larger. Fences therefore rise although Redis has lost its
/// data, unless its clock is set back.
///
/// [`list`](LockStore::list) uses `SCAN`, in steps that do not block the server. A key made by
/// [`LockKey::raw`] is listed only while it has waiters, because its lock has no prefix.
///
/// While Redis cannot be reached, no lock is acquired (503, not started), and a held lock is lost
/// when its lease expires. If Redis loses data, two holders of one key can overlap. Use the
/// [fencing token](crate::FencingToken) to reject stale writes. One Redis is a single point of
/// failure: [topologies](crate::guide::topologies) describes sentinels, a Cluster and acknowledged
/// grants.
pub struct RedisStore {
    pub(super) servers: Arc<Servers<Shared>>,
}

impl RedisStore {
    /// Connects in the background.
    pub(super) fn start(&self) {
        match &*self.servers {
            Servers::One(only) => only.messages.start(None),
            Servers::Cluster(nodes) => nodes.start(),
        }
    }

    /// Calls the server of a key.
    fn call<C: Call + 'static>(&self, operation: &'static str, call: C) -> StoreFuture<C::Reply> {
        let servers = Arc::clone(&self.servers);
        // The timeout starts at the first poll: the call itself may be outside of a runtime.
        StoreFuture::new(async move {
            let shared = servers.of(call.key(), operation).await?;
            let (at, reply) = send_one(&shared, call).await;
            reply.map_err(|error| at.server.store_error(operation, error))
        })
    }
}

impl LockStore for RedisStore {
    fn subscribe(&self, sink: EventSink) {
        match &*self.servers {
            Servers::One(only) => only.messages.add(sink),
            Servers::Cluster(nodes) => nodes.listen(&sink),
        }
    }

    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
        self.servers.push(requests)
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        let servers = Arc::clone(&self.servers);
        StoreFuture::new(async move { operations::renew(&servers, requests).await })
    }

    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
        self.servers.push(requests)
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        self.call("yield", Yield(request, Clock::default().now()))
    }

    fn delete_record(&self, key: LockKey) -> StoreFuture<DeleteRecordReply> {
        self.call("delete-record", DeleteRecord(key))
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.call("inspect", Inspect(key))
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        let servers = Arc::clone(&self.servers);
        StoreFuture::new(async move { list::list(&servers, &request).await })
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.call("force-release", request)
    }

    fn traits(&self) -> StoreTraits {
        let traits = StoreTraits::new().events(true).receivers_counted(true).records(true).ordered(true);
        traits.shares(true).tickets(true).traces(true).supersedes(true)
    }

    fn call_timeout(&self) -> Duration {
        self.servers.timeouts().call
    }

    fn health(&self) -> StoreFuture<()> {
        let servers = Arc::clone(&self.servers);
        StoreFuture::new(async move {
            let all = servers.known("health").await?;
            let checks = all.iter().map(|shared| async move {
                let check = shared.check(shared.server.timeouts.call_deadline()).await;
                check.map_err(|error| shared.server.store_error("health", error))
            });
            try_join_all(checks).await.map(drop)
        })
    }

    fn server_of(&self, key: &LockKey) -> usize {
        self.servers.number(key)
    }
}

impl Shared {
    /// Checks whether the server accepts writes and can send messages.
    async fn check(&self, deadline: Instant) -> Result<(), CallError> {
        let Self { server, messages, .. } = self;
        server.check_writes(deadline).await?;
        if let Some(min_replicas) = server.min_replicas {
            server.renew_conn.check_replicas(min_replicas, deadline).await?;
        }
        messages.check(deadline).await?;
        if messages.are_subscribed().await { Ok(()) } else { Err(CallError::NotSubscribed) }
    }
}

impl fmt::Debug for RedisStore {
    /// Without the address, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.servers.all();
        let names: Vec<_> = all.iter().map(|shared| &shared.server.keyspace).collect();
        f.debug_struct("RedisStore").field("servers", &names).finish_non_exhaustive()
    }
}
