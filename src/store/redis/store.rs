//! The store: calls of scripts.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_redis::redis::Value;
use tokio::time::Instant;

use super::{
    connection::Query,
    error::CallError,
    lane::Lane,
    list,
    proto::{self, InvalidName, ScriptCall, ServerClock, Timed, UnexpectedReply},
    server::Server,
    subscriber::{Check, Subscriber},
};
#[cfg(feature = "tracing")]
use crate::limits::WARN_INTERVAL;
use crate::{
    clock::{BootInstant, Clock},
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus, ListReply,
        ListRequest, LockStore, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, Share, StoreError,
        StoreErrorKind, StoreFuture, StoreTraits, YieldReply, YieldRequest,
    },
    sync::{Mutex, MutexGuard},
};

/// Store of locks in one Redis (7.0 or later), which any number of instances share. Needs the
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
/// messages. Renewals and releases therefore never wait for acquisitions. A broken connection is
/// replaced.
///
/// A fence is the clock of Redis in microseconds, or one more than the last fence of the prefix, if
/// that is larger. Fences therefore rise although Redis has lost its data, unless its clock is set
/// back.
///
/// [`list`](LockStore::list) uses `SCAN`, in steps that do not block the server. A key made by
/// [`LockKey::raw`] is listed only while it has waiters, because its lock has no prefix.
///
/// One Redis is a single point of failure. While it cannot be reached, no lock is acquired (503,
/// not started), and a held lock is lost when its lease expires. If Redis loses data, two holders
/// of one key can overlap. Use the [fencing token](crate::FencingToken) to reject stale writes.
pub struct RedisStore {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) clock: Clock,
    pub(super) server_clock: Mutex<ServerClock>,
    pub(super) subscriber: Arc<Subscriber>,
    pub(super) acquires: Lane<AcquireRequest>,
    pub(super) releases: Lane<ReleaseRequest>,
    pub(super) warned_of_missing_ttl: AtomicBool,
    #[cfg(feature = "tracing")]
    pub(super) fence_warned_at: Mutex<Option<BootInstant>>,
}

impl RedisStore {
    /// Starts the timeout at the first poll: the call itself may be outside of a runtime.
    fn call<T, F>(
        &self,
        operation: &'static str,
        run: impl FnOnce(Arc<Shared>, Instant) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, CallError>> + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        StoreFuture::new(async move {
            let deadline = shared.server().timeouts.call_deadline();
            let reply = run(Arc::clone(&shared), deadline).await;
            let Server { address, user, .. } = shared.server();
            reply.map_err(|error| error.into_store_error(operation, address, user))
        })
    }
}

impl LockStore for RedisStore {
    fn subscribe(&self, sink: EventSink) {
        self.shared.acquires.after_fork();
        self.shared.releases.after_fork();
        self.shared.subscriber.add(sink);
    }

    fn acquire(&self, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        if request.share != Share::EXCLUSIVE {
            let error = StoreError::new("redis", "acquire", StoreErrorKind::Unsupported);
            return StoreFuture::ready(Err(error));
        }
        if let Err(error) = self.shared.server().keyspace.lock(&request.key) {
            let Server { address, user, .. } = self.shared.server();
            return StoreFuture::ready(Err(CallError::from(error).into_store_error("acquire", address, user)));
        }
        Lane::push(&self.shared, request)
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.call("renew", move |shared, deadline| async move {
            let (call, is_sent) = shared.server().keyspace.renew(&requests);
            Ok(proto::parse_renew(
                &shared.server().release_conn.query_retry(Query::EvalSha(&call), deadline).await?,
                &is_sent,
            )?)
        })
    }

    fn release(&self, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        // No lock can have this name, and the caller would repeat the release for a lease.
        if self.shared.server().keyspace.lock(&request.key).is_err() {
            return StoreFuture::ready(Ok(ReleaseReply::NotHolder));
        }
        Lane::push(&self.shared, request)
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        let called = self.shared.clock.now();
        self.call("yield", move |shared, deadline| async move {
            shared.subscriber.wait_subscribed(request.next_id.manager()).await;
            let call = |expires_at| shared.server().keyspace.yield_to_queue(&request, expires_at);
            shared.call_before_expiry(called, request.valid_for, deadline, call, proto::parse_yield).await
        })
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.call("inspect", move |shared, deadline| async move {
            let call = shared.server().keyspace.inspect(&key)?;
            Ok(proto::parse_inspect(&shared.server().release_conn.query_retry(Query::EvalSha(&call), deadline).await?)?)
        })
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        self.call("list", move |shared, deadline| async move {
            list::list(shared.server(), &request, deadline).await?.ok_or(CallError::InvalidCursor)
        })
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.call("force-release", move |shared, deadline| async move {
            let call = shared.server().keyspace.force(&request)?;
            // Not repeated: the next holder may have the key by then.
            let reply = shared.server().release_conn.query(Query::EvalSha(&call), deadline).await?;
            shared.check_fence(&reply);
            Ok(proto::parse_force(&reply)?)
        })
    }

    fn traits(&self) -> StoreTraits {
        StoreTraits::new().events(true).receivers_counted(true).records(true)
    }

    fn call_timeout(&self) -> Duration {
        self.shared.server().timeouts.call
    }

    fn health(&self) -> StoreFuture<()> {
        self.call("health", move |shared, deadline| async move {
            let (acquire, release) =
                tokio::join!(shared.server().acquire_conn.ping(deadline), shared.server().release_conn.ping(deadline));
            acquire.and(release)?;
            match shared.subscriber.check(deadline).await {
                Check::Passed => {}
                Check::Failed(error) => return Err(CallError::SelfTestFailed(error)),
                Check::Pending => return Err(CallError::ConnectTimeout),
            }
            if shared.subscriber.is_subscribed().await { Ok(()) } else { Err(CallError::NotSubscribed) }
        })
    }
}

impl Shared {
    /// Tries of a call that expired only because the estimate of the server's clock was too low. An
    /// expired call does nothing, and its reply has the server's time.
    const MAX_TRIES: usize = 3;

    /// Executes a call that does nothing later than `valid_for` after it was made, by either clock.
    pub(super) async fn call_before_expiry<T>(
        &self,
        called: BootInstant,
        valid_for: Duration,
        deadline: Instant,
        call: impl Fn(i64) -> Result<ScriptCall, InvalidName>,
        parse: impl Fn(&Value) -> Result<(i64, Timed<T>), UnexpectedReply>,
    ) -> Result<T, CallError> {
        for _ in 0..Self::MAX_TRIES {
            // Without an estimate, a call that has expired already fetches the server's time.
            let expires_at = self.server_clock().expires_at(called, valid_for).unwrap_or(0);
            // Not repeated: the caller releases what a call without a reply may have acquired (I8).
            let reply = self.server().acquire_conn.query(Query::EvalSha(&call(expires_at)?), deadline).await?;
            let now = self.clock.now();
            self.check_fence(&reply);
            let (server_us, outcome) = parse(&reply)?;
            self.server_clock().observe(server_us, now);
            match outcome {
                Timed::Done(reply) => return Ok(reply),
                Timed::Expired if now.saturating_duration_since(called) >= valid_for => break,
                Timed::Expired => {}
            }
        }
        Err(CallError::Expired)
    }

    pub(super) fn server(&self) -> &Server {
        self.subscriber.server()
    }

    pub(super) fn server_clock(&self) -> MutexGuard<'_, ServerClock> {
        self.server_clock.lock()
    }

    pub(super) fn check_fence(&self, reply: &Value) {
        if proto::fence_was_replaced(reply) {
            self.warn_fence_replaced();
        }
    }

    /// At most one warning in ten seconds: another program may write there repeatedly.
    fn warn_fence_replaced(&self) {
        #[cfg(feature = "tracing")]
        {
            let now = self.clock.now();
            let mut warned_at = self.fence_warned_at.lock();
            if warned_at.is_none_or(|at| now.saturating_duration_since(at) >= WARN_INTERVAL) {
                *warned_at = Some(now);
                drop(warned_at);
                self.server().warn_fence_replaced("another value");
            }
        }
    }

    /// Warns once about a lock without a TTL, which another program wrote. It must be deleted by
    /// hand.
    pub(super) fn warn_if_no_ttl(&self, reply: &AcquireReply) {
        let (AcquireReply::Queued { lease_left, .. }
        | AcquireReply::Busy { lease_left }
        | AcquireReply::QueueFull { lease_left, .. }) = reply
        else {
            return;
        };
        if *lease_left == Duration::MAX && !self.warned_of_missing_ttl.swap(true, Ordering::Relaxed) {
            #[cfg(feature = "tracing")]
            tracing::warn!(target: "tower_lock", "a key in Redis has no TTL and stays locked: tower-lock did not write it");
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.subscriber.stop();
    }
}

impl fmt::Debug for RedisStore {
    /// Without the address, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("names", &self.shared.server().keyspace).finish_non_exhaustive()
    }
}
