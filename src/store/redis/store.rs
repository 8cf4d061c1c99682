//! The store: calls of scripts.

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::try_join_all;
use tokio::time::Instant;

use super::{
    error::CallError,
    list,
    messages::Check,
    shared::Shared,
    topology::{Servers, connection::Query, server::Server},
    wire,
};
use crate::{
    limits::STORE_CALL_TIMEOUT,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus,
        ListReply, ListRequest, LockStore, Many, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreFuture,
        StoreTraits, YieldReply, YieldRequest, remote::batching::SharedCalls,
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
/// A store has three connections: one for acquisitions, one for renewals and releases, and one for
/// messages. Renewals and releases therefore never wait for acquisitions. Renewals have a fourth
/// one with [`min_replicas`](crate::store::RedisStoreBuilder::min_replicas). A broken connection is
/// replaced.
///
/// A fence is the clock of Redis in microseconds, or one more than the last fence of the prefix, if
/// that is larger. Fences therefore rise although Redis has lost its data, unless its clock is set
/// back.
///
/// [`list`](LockStore::list) uses `SCAN`, in steps that do not block the server. A key made by
/// [`LockKey::raw`] is listed only while it has waiters, because its lock has no prefix.
///
/// While Redis cannot be reached, no lock is acquired (503, not started), and a held lock is lost
/// when its lease expires. If Redis loses data, two holders of one key can overlap. Use the
/// [fencing token](crate::FencingToken) to reject stale writes. One Redis is a single point of
/// failure: [topologies](crate::guide::topologies) describes sentinels and acknowledged grants.
pub struct RedisStore {
    servers: Servers<Shared>,
}

impl RedisStore {
    pub(super) fn new(only: Arc<Shared>) -> Self {
        Self { servers: Servers::new(only) }
    }

    /// Calls the server of a key.
    fn call<T, F>(
        &self,
        operation: &'static str,
        key: &LockKey,
        run: impl FnOnce(Arc<Shared>, Instant) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, CallError>> + Send + 'static,
    {
        call(self.servers.of(key), operation, run)
    }
}

/// Starts the timeout at the first poll: the call itself may be outside of a runtime.
fn call<T, F>(
    shared: &Arc<Shared>,
    operation: &'static str,
    run: impl FnOnce(Arc<Shared>, Instant) -> F + Send + 'static,
) -> StoreFuture<T>
where
    F: Future<Output = Result<T, CallError>> + Send + 'static,
{
    let shared = Arc::clone(shared);
    StoreFuture::new(async move {
        let deadline = shared.server.timeouts.call_deadline();
        let reply = run(Arc::clone(&shared), deadline).await;
        reply.map_err(|error| shared.server.store_error(operation, error))
    })
}

impl LockStore for RedisStore {
    fn subscribe(&self, sink: EventSink) {
        for shared in self.servers.all() {
            shared.messages.add(sink.clone());
        }
    }

    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
        self.servers.call(requests, |shared, requests| {
            let refused = |request: &AcquireRequest| {
                let error = shared.server.keyspace.lock(&request.key).err()?;
                Some(Err(shared.server.store_error("acquire", error.into())))
            };
            SharedCalls::push_valid(shared, requests, refused)
        })
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        let Some(first) = requests.first() else { return StoreFuture::ready(Ok(Vec::new())) };
        let key = first.key.clone();
        self.call("renew", &key, move |shared, deadline| async move {
            let Server { keyspace, renew_conn, min_replicas, .. } = &*shared.server;
            let (call, is_sent) = keyspace.renew(&requests);
            let (reply, replicated) = renew_conn.call_replicated_retry(&call, *min_replicas, deadline).await?;
            let mut replies = renew_conn.parsed(wire::parse_renew(&reply, &is_sent))?;
            if replicated.is_err() {
                // The deadline stays: a server that is promoted now may not know the new lease.
                for reply in replies.iter_mut().filter(|reply| **reply == RenewReply::Extended) {
                    *reply = RenewReply::Unknown;
                }
            }
            Ok(replies)
        })
    }

    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
        // No lock can have this name, and the caller would repeat the release for a lease.
        self.servers.call(requests, |shared, requests| {
            let refused = |request: &ReleaseRequest| {
                shared.server.keyspace.lock(&request.key).err().map(|_| Ok(ReleaseReply::NotHolder))
            };
            SharedCalls::push_valid(shared, requests, refused)
        })
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        let called = self.servers.of(&request.key).clock.now();
        let key = request.key.clone();
        self.call("yield", &key, move |shared, deadline| async move {
            shared.messages.wait_subscribed(request.next_id.manager()).await;
            let call = |expires_at| shared.server.keyspace.yield_to_queue(&request, expires_at);
            let parse = wire::parse_yield;
            let (reply, replicated) =
                shared.call_before_expiry(called, request.valid_for, deadline, call, parse).await?;
            if request.key.is_raw() && matches!(reply, YieldReply::NotHolder(AcquireReply::Queued { .. })) {
                shared.messages.used_raw(&request.key, true);
            }
            match reply {
                YieldReply::Extended { .. } | YieldReply::NotHolder(AcquireReply::Granted { .. }) => replicated?,
                YieldReply::NotHolder(_) => {}
            }
            Ok(reply)
        })
    }

    fn delete_record(&self, key: LockKey) -> StoreFuture<DeleteRecordReply> {
        let of = key.clone();
        self.call("delete-record", &of, move |shared, deadline| async move {
            let call = shared.server.keyspace.delete_record(&key)?;
            // Not repeated: a later record would be deleted.
            let reply = shared.server.release_conn.query(Query::EvalSha(&call), deadline).await?;
            shared.server.release_conn.parsed(wire::parse_delete_record(&reply))
        })
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        let of = key.clone();
        self.call("inspect", &of, move |shared, deadline| async move {
            let call = shared.server.keyspace.inspect(&key)?;
            Ok(wire::parse_inspect(&shared.server.release_conn.query_retry(Query::EvalSha(&call), deadline).await?)?)
        })
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        let only = self.servers.all().next().expect("a store has a server");
        call(only, "list", move |shared, deadline| async move {
            list::list(&shared.server, &request, deadline).await?.ok_or(CallError::InvalidCursor)
        })
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        let key = request.key.clone();
        self.call("force-release", &key, move |shared, deadline| async move {
            let call = shared.server.keyspace.force(&request)?;
            // Not repeated: the next holder may have the key by then.
            let reply = shared.server.release_conn.query(Query::EvalSha(&call), deadline).await?;
            shared.check_fence(&reply);
            shared.server.release_conn.parsed(wire::parse_force(&reply))
        })
    }

    fn traits(&self) -> StoreTraits {
        StoreTraits::new().events(true).receivers_counted(true).records(true).ordered(true)
    }

    fn call_timeout(&self) -> Duration {
        self.servers.all().map(|shared| shared.server.timeouts.call).max().unwrap_or(STORE_CALL_TIMEOUT)
    }

    fn health(&self) -> StoreFuture<()> {
        let check = |shared| call(shared, "health", |shared, deadline| async move { shared.check(deadline).await });
        let checks: Vec<_> = self.servers.all().map(check).collect();
        StoreFuture::new(async move { try_join_all(checks).await.map(drop) })
    }
}

impl Shared {
    /// Checks whether the server accepts writes and can send messages.
    async fn check(&self, deadline: Instant) -> Result<(), CallError> {
        let Self { server, messages, .. } = self;
        let key = server.keyspace.health();
        try_join_all(server.connections().map(|connection| connection.check_writes(&key, deadline))).await?;
        if let Some(min_replicas) = server.min_replicas {
            server.renew_conn.check_replicas(min_replicas, deadline).await?;
        }
        match messages.check(deadline).await {
            Check::Passed => {}
            Check::Failed(error) => return Err(CallError::SelfTestFailed(error)),
            Check::Pending => return Err(CallError::ConnectTimeout),
        }
        if messages.are_subscribed().await { Ok(()) } else { Err(CallError::NotSubscribed) }
    }
}

impl fmt::Debug for RedisStore {
    /// Without the address, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.servers.all().map(|shared| &shared.server.keyspace).collect();
        f.debug_struct("RedisStore").field("names", &names).finish_non_exhaustive()
    }
}
