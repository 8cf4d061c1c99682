//! Locks in one Redis, for many instances of a service.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_redis::{
    Config, Pool,
    redis::{IntoConnectionInfo, Value},
};

use tokio::time::Instant;

use self::{
    connection::{Query, SharedConnection},
    error::CallError,
    proto::{InvalidName, Keyspace, ScriptCall, ServerClock, Timed, UnexpectedReply},
    subscriber::{Check, Subscriber},
};
use super::{
    AcquireReply, AcquireRequest, EventSink, ForceReleaseReply, ForceReleaseRequest, IfBusy, KeyStatus, LockStore,
    ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreFuture, YieldReply, YieldRequest,
};
#[cfg(feature = "tracing")]
use crate::limits::WARN_INTERVAL;
use crate::{
    clock::{BootInstant, Clock},
    lock_key::LockKey,
};

// In the order of a call: from the address to the reply.
mod builder;
mod self_test;
#[allow(
    unreachable_pub,
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    reason = "public for the simulator alone: feature `__internals`"
)]
pub mod proto;
mod socket;
mod connection;
mod subscriber;
mod error;

pub use self::{builder::RedisStoreBuilder, error::RedisConnectError};

/// Locks in one Redis, 7.0 or later, that any number of instances share. Needs the feature `redis`.
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
/// A lock is a hash of one field, the owner's id, as Redisson writes it: the two exclude each other. Who waits has a place in a list
/// beside it, and is offered the lock by whoever gives it back, in the order of the list. `docs/redis.md` shows all of it, and what happens
/// when Redis is slow, down, restarted or flushed.
///
/// It has three connections: one that asks, one that renews and gives back, so that this never queues behind the first, and one that listens.
/// Each is made again when it breaks.
///
/// One Redis is one point of failure. While it cannot be reached nothing new is locked (503, not started), and what is held is lost at the end
/// of its lease; if it forgets what it knew, two may hold one key, and only a [fencing token](crate::FencingToken) tells them apart.
pub struct RedisStore {
    shared: Arc<Shared>,
}

struct Shared {
    keyspace: Keyspace,
    clock: Clock,
    server_clock: Mutex<ServerClock>,
    acquire_conn: Arc<SharedConnection>,
    release_conn: Arc<SharedConnection>,
    subscriber: Arc<Subscriber>,
    warned_of_missing_ttl: AtomicBool,
    #[cfg(feature = "tracing")]
    fence_warned_at: Mutex<Option<BootInstant>>,
}

impl RedisStore {
    /// Connects to this address: `redis://user:password@host:port/database`, `rediss://` for TLS (feature `redis-tls`),
    /// `unix:///path`.
    ///
    /// # Errors
    ///
    /// Whatever a [`RedisConnectError`] says: an address that cannot be read, no answer, too old a server, a right that is missing.
    pub async fn connect(url: &str) -> Result<Self, RedisConnectError> {
        Self::builder().connect(url).await
    }

    /// Connects to the address in the environment variable `REDIS_URL`.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect); and there may be no such variable.
    pub async fn from_env() -> Result<Self, RedisConnectError> {
        Self::builder().from_env().await
    }

    /// As [`connect`](Self::connect), but without waiting for Redis: the service starts though Redis is down. See
    /// [`RedisStoreBuilder::connect_lazy`].
    ///
    /// # Errors
    ///
    /// The address cannot be read.
    pub fn connect_lazy(url: &str) -> Result<Self, RedisConnectError> {
        Self::builder().connect_lazy(url)
    }

    /// Connects as the rest of the service does.
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect).
    pub async fn from_config(config: &Config) -> Result<Self, RedisConnectError> {
        Self::builder().from_config(config).await
    }

    /// Takes its connections from your pool, but for the one that listens: no pool gives such a one, so it is made to this address.
    ///
    /// See [`RedisStoreBuilder::from_pool`].
    ///
    /// # Errors
    ///
    /// As of [`connect`](Self::connect).
    pub async fn from_pool(pool: Pool, address: impl IntoConnectionInfo) -> Result<Self, RedisConnectError> {
        Self::builder().from_pool(pool, address).await
    }

    /// A store that is to be told something about itself.
    pub fn builder() -> RedisStoreBuilder {
        RedisStoreBuilder::default()
    }

    /// Begins to count with the first poll: where a call is made there may be no runtime, and no time.
    fn call<T, F>(
        &self,
        operation: &'static str,
        ask: impl FnOnce(Arc<Shared>, Instant) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, CallError>> + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        StoreFuture::new(async move {
            let by = shared.subscriber.timeouts.call_deadline();
            let answer = ask(shared, by);
            answer.await.map_err(|trouble| trouble.into_store_error(operation))
        })
    }
}

impl LockStore for RedisStore {
    fn subscribe(&self, inbox: EventSink) {
        self.shared.subscriber.add(inbox);
    }

    fn acquire(&self, ask: AcquireRequest) -> StoreFuture<AcquireReply> {
        let called = self.shared.clock.now();
        self.call("acquire", move |shared, by| async move {
            let mut ask = ask;
            let mut is_deaf = false;
            if ask.if_busy == IfBusy::Enqueue {
                shared.subscriber.wait_subscribed(ask.id.manager()).await;
                is_deaf = shared.subscriber.is_disconnected();
                if is_deaf {
                    // What is free can be had all the same.
                    ask.if_busy = IfBusy::Fail;
                }
            }
            let call = |until| shared.keyspace.acquire(&ask, until);
            let answer = shared.call_before_expiry(called, ask.valid_for, by, call, proto::parse_acquire).await?;
            shared.warn_if_no_ttl(&answer);
            match answer {
                AcquireReply::Busy { .. } if is_deaf => Err(CallError::NotSubscribed),
                answer => Ok(answer),
            }
        })
    }

    fn renew(&self, asks: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.call("renew", move |shared, by| async move {
            let (call, is_asked) = shared.keyspace.renew(&asks);
            Ok(proto::parse_renew(&shared.release_conn.query_retry(Query::EvalSha(&call), by).await?, &is_asked)?)
        })
    }

    fn release(&self, ask: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.call("release", move |shared, by| async move {
            // Nothing can be there, and an error would be repeated for as long as a lease.
            let Ok(call) = shared.keyspace.release(&ask) else { return Ok(ReleaseReply::NotHolder) };
            let reply = shared.release_conn.query_retry(Query::EvalSha(&call), by).await?;
            shared.check_fence(&reply);
            Ok(proto::parse_release(&reply)?)
        })
    }

    fn yield_to_queue(&self, ask: YieldRequest) -> StoreFuture<YieldReply> {
        let called = self.shared.clock.now();
        self.call("yield", move |shared, by| async move {
            shared.subscriber.wait_subscribed(ask.next_id.manager()).await;
            let call = |until| shared.keyspace.yield_to_queue(&ask, until);
            shared.call_before_expiry(called, ask.valid_for, by, call, proto::parse_yield).await
        })
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.call("inspect", move |shared, by| async move {
            let call = shared.keyspace.inspect(&key)?;
            Ok(proto::parse_inspect(&shared.release_conn.query_retry(Query::EvalSha(&call), by).await?)?)
        })
    }

    fn force_release(&self, ask: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.call("force-release", move |shared, by| async move {
            let call = shared.keyspace.force(&ask)?;
            // Once: somebody else may have the key when it is done again.
            let reply = shared.release_conn.query(Query::EvalSha(&call), by).await?;
            shared.check_fence(&reply);
            Ok(proto::parse_force(&reply)?)
        })
    }

    fn call_timeout(&self) -> Duration {
        self.shared.subscriber.timeouts.call
    }

    fn health(&self) -> StoreFuture<()> {
        self.call("health", move |shared, by| async move {
            let (asks, ends) = tokio::join!(shared.acquire_conn.ping(by), shared.release_conn.ping(by));
            asks.and(ends)?;
            match shared.subscriber.check(by).await {
                Check::Passed => {}
                Check::Failed(error) => return Err(CallError::SelfTestFailed(error)),
                Check::Pending => return Err(CallError::ConnectTimeout),
            }
            if shared.subscriber.is_subscribed().await { Ok(()) } else { Err(CallError::NotSubscribed) }
        })
    }
}

impl Shared {
    /// How often a call is made again that came too late only because we had too low an idea of the server's clock: it did nothing, and its
    /// answer says what time it is there.
    const MAX_TRIES: usize = 3;

    /// A call that does nothing once `valid_for` has passed since it was made, by whichever clock.
    async fn call_before_expiry<T>(
        &self,
        called: BootInstant,
        valid_for: Duration,
        by: Instant,
        call: impl Fn(i64) -> Result<ScriptCall, InvalidName>,
        read: impl Fn(&Value) -> Result<(i64, Timed<T>), UnexpectedReply>,
    ) -> Result<T, CallError> {
        for _ in 0..Self::MAX_TRIES {
            // A server whose clock we know nothing of is asked for it by a call that it finds too late.
            let until = self.server_clock().expires_at(called, valid_for).unwrap_or(0);
            // Once: whoever asked counts the calls that got no answer, and gives back what they may have been granted (I8).
            let reply = self.acquire_conn.query(Query::EvalSha(&call(until)?), by).await?;
            let now = self.clock.now();
            self.check_fence(&reply);
            let (server, answer) = read(&reply)?;
            self.server_clock().observe(server, now);
            match answer {
                Timed::Done(answer) => return Ok(answer),
                Timed::Expired if now.saturating_duration_since(called) >= valid_for => break,
                Timed::Expired => {}
            }
        }
        Err(CallError::Expired)
    }

    fn server_clock(&self) -> MutexGuard<'_, ServerClock> {
        self.server_clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_fence(&self, reply: &Value) {
        if proto::fence_was_replaced(reply) {
            self.warn_fence_replaced();
        }
    }

    /// One warning in ten seconds: a stranger may write there again and again.
    fn warn_fence_replaced(&self) {
        #[cfg(feature = "tracing")]
        {
            let now = self.clock.now();
            let mut warned = self.fence_warned_at.lock().unwrap_or_else(PoisonError::into_inner);
            if warned.is_none_or(|warned| now.saturating_duration_since(warned) >= WARN_INTERVAL) {
                *warned = Some(now);
                drop(warned);
                warn_fence_replaced(&self.keyspace, "something else");
            }
        }
    }

    /// Tells once of a lock that somebody else left without an end: nobody can have it before it is deleted.
    fn warn_if_no_ttl(&self, answer: &AcquireReply) {
        let (AcquireReply::Queued { lease_left, .. }
        | AcquireReply::Busy { lease_left }
        | AcquireReply::QueueFull { lease_left, .. }) = answer
        else {
            return;
        };
        if *lease_left == Duration::MAX && !self.warned_of_missing_ttl.swap(true, Ordering::Relaxed) {
            #[cfg(feature = "tracing")]
            tracing::warn!(target: "tower_lock", "a key in Redis has no TTL, so that it is locked for ever: nothing of ours writes such a one");
        }
    }
}

/// What stood where the last fence stands was none, and the clock of the server stands there now.
#[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "there is no log"))]
fn warn_fence_replaced(names: &Keyspace, stood: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: "tower_lock",
        "where the last fencing token stands in Redis, `{key}`, there was {stood}: no number, or more than a day ahead of the clock of \
         Redis. That clock stands there now, and tokens rise from it. Nothing else may write there. If the clock of Redis is wrong, set it and \
         `DEL {key}`",
        key = names.fence(),
    );
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.subscriber.stop();
    }
}

impl fmt::Debug for RedisStore {
    /// Without addresses: there may be a password in them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("names", &self.shared.keyspace).finish_non_exhaustive()
    }
}
