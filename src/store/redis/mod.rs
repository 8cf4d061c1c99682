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
    connection::{Lane, Question},
    error::Trouble,
    proto::{InTime, Misread, Names, NotAName, ScriptCall, ServerClock},
    subscriber::{Check, Events},
};
use super::{
    AcquireReply, AcquireRequest, EventSink, ForceReleaseReply, ForceReleaseRequest, IfBusy, KeyStatus, LockStore,
    ReleaseRequest, Released, RenewReply, RenewRequest, StoreFuture, YieldReply, YieldRequest,
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
    reason = "reached by simulators alone: feature `test-util`"
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
    names: Names,
    clock: Clock,
    server_clock: Mutex<ServerClock>,
    asks: Arc<Lane>,
    ends: Arc<Lane>,
    events: Arc<Events>,
    told_of_endless: AtomicBool,
    #[cfg(feature = "tracing")]
    warned_of_fence: Mutex<Option<BootInstant>>,
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
    fn answer<T, F>(
        &self,
        operation: &'static str,
        ask: impl FnOnce(Arc<Shared>, Instant) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, Trouble>> + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        StoreFuture::new(async move {
            let by = shared.events.limits.by();
            let answer = ask(shared, by);
            answer.await.map_err(|trouble| trouble.of(operation))
        })
    }
}

impl LockStore for RedisStore {
    fn subscribe(&self, inbox: EventSink) {
        self.shared.events.open(inbox);
    }

    fn acquire(&self, ask: AcquireRequest) -> StoreFuture<AcquireReply> {
        let called = self.shared.clock.now();
        self.answer("acquire", move |shared, by| async move {
            let mut ask = ask;
            let mut is_deaf = false;
            if ask.if_busy == IfBusy::Enqueue {
                shared.events.listening(ask.id.manager()).await;
                is_deaf = shared.events.is_deaf();
                if is_deaf {
                    // What is free can be had all the same.
                    ask.if_busy = IfBusy::Fail;
                }
            }
            let call = |until| shared.names.acquire(&ask, until);
            let answer = shared.in_time(called, ask.valid_for, by, call, proto::acquired).await?;
            shared.tell_of_endless(&answer);
            match answer {
                AcquireReply::Busy { .. } if is_deaf => Err(Trouble::Deaf),
                answer => Ok(answer),
            }
        })
    }

    fn renew(&self, asks: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.answer("renew", move |shared, by| async move {
            let (call, is_asked) = shared.names.renew(&asks);
            Ok(proto::renewed(&shared.ends.ask_again(Question::Script(&call), by).await?, &is_asked)?)
        })
    }

    fn release(&self, ask: ReleaseRequest) -> StoreFuture<Released> {
        self.answer("release", move |shared, by| async move {
            // Nothing can be there, and an error would be repeated for as long as a lease.
            let Ok(call) = shared.names.release(&ask) else { return Ok(Released::NotHolder) };
            let reply = shared.ends.ask_again(Question::Script(&call), by).await?;
            shared.look_at_the_fence(&reply);
            Ok(proto::released(&reply)?)
        })
    }

    fn yield_to_queue(&self, ask: YieldRequest) -> StoreFuture<YieldReply> {
        let called = self.shared.clock.now();
        self.answer("yield", move |shared, by| async move {
            shared.events.listening(ask.next_id.manager()).await;
            let call = |until| shared.names.yield_to_queue(&ask, until);
            shared.in_time(called, ask.valid_for, by, call, proto::yielded).await
        })
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.answer("inspect", move |shared, by| async move {
            let call = shared.names.inspect(&key)?;
            Ok(proto::inspected(&shared.ends.ask_again(Question::Script(&call), by).await?)?)
        })
    }

    fn force_release(&self, ask: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.answer("force-release", move |shared, by| async move {
            let call = shared.names.force(&ask)?;
            // Once: somebody else may have the key when it is done again.
            let reply = shared.ends.ask(Question::Script(&call), by).await?;
            shared.look_at_the_fence(&reply);
            Ok(proto::forced(&reply)?)
        })
    }

    fn call_timeout(&self) -> Duration {
        self.shared.events.limits.call
    }

    fn health(&self) -> StoreFuture<()> {
        self.answer("health", move |shared, by| async move {
            let (asks, ends) = tokio::join!(shared.asks.ping(by), shared.ends.ping(by));
            asks.and(ends)?;
            match shared.events.check(by).await {
                Check::Passed => {}
                Check::Failed(error) => return Err(Trouble::Unfit(error)),
                Check::Open => return Err(Trouble::NoConnection),
            }
            if shared.events.is_listening().await { Ok(()) } else { Err(Trouble::Deaf) }
        })
    }
}

impl Shared {
    /// How often a call is made again that came too late only because we had too low an idea of the server's clock: it did nothing, and its
    /// answer says what time it is there.
    const LATE: usize = 3;

    /// A call that does nothing once `valid_for` has passed since it was made, by whichever clock.
    async fn in_time<T>(
        &self,
        called: BootInstant,
        valid_for: Duration,
        by: Instant,
        call: impl Fn(i64) -> Result<ScriptCall, NotAName>,
        read: impl Fn(&Value) -> Result<(i64, InTime<T>), Misread>,
    ) -> Result<T, Trouble> {
        for _ in 0..Self::LATE {
            // A server whose clock we know nothing of is asked for it by a call that it finds too late.
            let until = self.server_clock().until(called, valid_for).unwrap_or(0);
            // Once: whoever asked counts the calls that got no answer, and gives back what they may have been granted (I8).
            let reply = self.asks.ask(Question::Script(&call(until)?), by).await?;
            let now = self.clock.now();
            self.look_at_the_fence(&reply);
            let (server, answer) = read(&reply)?;
            self.server_clock().said(server, now);
            match answer {
                InTime::Done(answer) => return Ok(answer),
                InTime::Late if now.saturating_duration_since(called) >= valid_for => break,
                InTime::Late => {}
            }
        }
        Err(Trouble::Late)
    }

    fn server_clock(&self) -> MutexGuard<'_, ServerClock> {
        self.server_clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_at_the_fence(&self, reply: &Value) {
        if proto::is_healed(reply) {
            self.warn_of_fence();
        }
    }

    /// One warning in ten seconds: a stranger may write there again and again.
    fn warn_of_fence(&self) {
        #[cfg(feature = "tracing")]
        {
            let now = self.clock.now();
            let mut warned = self.warned_of_fence.lock().unwrap_or_else(PoisonError::into_inner);
            if warned.is_none_or(|warned| now.saturating_duration_since(warned) >= WARN_INTERVAL) {
                *warned = Some(now);
                drop(warned);
                warn_of_fence(&self.names, "something else");
            }
        }
    }

    /// Tells once of a lock that somebody else left without an end: nobody can have it before it is deleted.
    fn tell_of_endless(&self, answer: &AcquireReply) {
        let (AcquireReply::Queued { lease_left, .. }
        | AcquireReply::Busy { lease_left }
        | AcquireReply::QueueFull { lease_left, .. }) = answer
        else {
            return;
        };
        if *lease_left == Duration::MAX && !self.told_of_endless.swap(true, Ordering::Relaxed) {
            #[cfg(feature = "tracing")]
            tracing::warn!(target: "tower_lock", "a key in Redis has no TTL, so that it is locked for ever: nothing of ours writes such a one");
        }
    }
}

/// What stood where the last fence stands was none, and the clock of the server stands there now.
#[cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "there is no log"))]
fn warn_of_fence(names: &Names, stood: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: "tower_lock",
        "where the last fencing token stands in Redis, `{key}`, there was {stood}: no number, or more than a day ahead of the clock of \
         Redis. That clock stands there now, and tokens rise from it. Nothing else may write there. If the clock of Redis is wrong, set it and \
         `DEL {key}`",
        key = names.fences(),
    );
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.events.stop();
    }
}

impl fmt::Debug for RedisStore {
    /// Without addresses: there may be a password in them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("names", &self.shared.names).finish_non_exhaustive()
    }
}
