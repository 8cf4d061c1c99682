//! The manager of the locks in one store.

use std::{
    error::Error as _,
    fmt,
    sync::{Arc, LazyLock, Weak},
    time::Duration,
};

#[cfg(feature = "signal")]
use tokio::time::sleep;
use tokio::{runtime, time::timeout};

#[cfg(feature = "signal")]
use super::signal::ShutdownOnSignal;
use super::{Holding, LockBuilder, LockStatus, acquire::Call, driver::Driver, request_scope::Parent, watchdog};
use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    clock::Clock,
    error::LockError,
    limits::{LEASE, LEASE_MAX, LEASE_MIN, LOCK_DELAY, MAX_DETACHED_HANDLERS, RECORD_CALLS},
    lock_key::LockKey,
    owner::Owner,
    policy::LockPolicy,
    process,
    proto::{self, lease::LeaseBounds, sharing::Sharing},
    store::{
        self, ConnectError, ForceReleaseReply, ForceReleaseRequest, Holder, KeyStatus, ListReply, ListRequest,
        LockStore, NamedStore, StoreError, StoreErrorKind, StoreFuture,
    },
    sync::Mutex,
    telemetry::{metrics, notice, report::Report},
    trace::Traces,
};

/// Manager of the locks in one store, for layers, handlers, jobs and tests.
///
/// Create one manager for the whole application. A clone is cheap, and all clones share one queue
/// per key. Two managers on the same store exclude each other like two instances of a service.
///
/// Locks need a Tokio runtime with its time driver enabled.
///
/// # Fork
///
/// In a server that forks, create the Tokio runtime, the store and the `LockManager` in each child,
/// after the fork. Each call of a manager that was created before fails in the child, and a request
/// gets 503. The log has the reason. Guards that were copied from the parent are not renewed there,
/// and their drop releases nothing.
pub struct LockManager {
    handle: Arc<Handle>,
    policy: LockPolicy,
    /// The request in which this clone was made, for calls of tasks that it spawned.
    parent: Parent,
}

/// The state that all clones share.
struct Handle {
    driver: Arc<Driver>,
}

/// Builder for a [`LockManager`] with non-default settings.
#[derive(Debug)]
#[must_use = "a builder does nothing before `build`"]
pub struct LockManagerBuilder {
    store: Arc<dyn LockStore>,
    instance: Option<String>,
    random: Option<u64>,
    lease: Duration,
    clock: Clock,
    max_detached: usize,
    traces: Option<Arc<dyn Traces>>,
    /// A second one on the same runtime is a mistake.
    is_in_memory: bool,
}

impl LockManager {
    /// Creates a manager whose locks are shared within this process. Needs the feature `memory`.
    ///
    /// Locks of two managers do not exclude each other, so a second one on the same runtime logs a
    /// warning, once. Clone the first one.
    #[cfg(feature = "memory")]
    #[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
    #[must_use]
    pub fn in_memory() -> Self {
        let store = Arc::new(store::MemoryStore::new());
        LockManagerBuilder { is_in_memory: true, ..LockManagerBuilder::new(store) }.build()
    }

    /// Connects to the store that a URL names, and returns a builder for a manager of its locks. So
    /// one setting moves a service from one machine to a fleet.
    ///
    /// | URL | feature | locks |
    /// |---|---|---|
    /// | `memory:` | `memory` | within this process, as [`in_memory`](Self::in_memory) |
    /// | `mysql://user:password@host:port/database` | `mysql` | in this MySQL or MariaDB |
    /// | `postgres://user:password@host:port/database` | `postgres` | in this PostgreSQL |
    /// | `redis://user:password@host:port/database` | `redis` | in one Redis or Valkey |
    /// | `unix:///path` | `redis` | in the server at this socket |
    /// | `redis+sentinel://user:password@s1,s2,s3/mymaster` | `redis` | in the master that these sentinels name |
    /// | `redis+cluster://user:password@a,b,c` | `redis` | in the Redis Cluster of these nodes |
    /// | `redis+redlock://user:password@a,b,c` | `redis` | in a majority of these independent servers |
    /// | `rediss://`, `rediss+sentinel://`, `rediss+cluster://`, `rediss+redlock://` | `redis-tls` | the same, with TLS |
    /// | `zookeeper://user:password@a,b,c/root` | `zookeeper` | in this ensemble of ZooKeeper |
    /// | `zookeepers://user:password@a,b,c/root` | `zookeeper-tls` | the same, with TLS |
    ///
    /// `valkey` may replace `redis`, `mariadb` may replace `mysql`, and `zk` may replace
    /// `zookeeper`. The default port is 6379, that of a sentinel 26379, that of MySQL 3306, that of
    /// PostgreSQL 5432, and that of ZooKeeper 2181. Each server has the user, the password and the
    /// database of the URL. In a user and a password `@`, `#`, `/`, `?`, `%`, `,` and `:` are
    /// encoded: `%40`, `%23`, `%2F`, `%3F`, `%25`, `%2C` and `%3A`.
    ///
    /// The URL of a Redis may have [parameters](crate::store::RedisStoreBuilder::connect), for
    /// example `redis://host:6379?prefix=shop&min_replicas=1`, and so may those of a
    /// [PostgreSQL](crate::store::PostgresStoreBuilder::connect), a
    /// [MySQL](crate::store::MysqlStoreBuilder::connect) and a
    /// [ZooKeeper](crate::store::ZooKeeperStoreBuilder::connect):
    /// `postgres://host/app?migrate=true` makes the tables. For other settings of a store, connect
    /// with its builder, and pass the store to
    /// [`builder`](Self::builder).
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_lock::{LockManager, store::ConnectError};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), ConnectError> {
    /// let url = std::env::var("LOCK_URL").unwrap_or("memory:".to_owned());
    /// let locks = LockManager::connect(&url).await?.lease(Duration::from_secs(10)).build();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Fails with a [`ConnectError`] if the URL is invalid, if the crate was built without the
    /// feature of its scheme, or if the store cannot be reached or used. No error has a part of the
    /// URL that may be secret.
    pub async fn connect(url: &str) -> Result<LockManagerBuilder, ConnectError> {
        let NamedStore { store, is_in_memory } = store::connect(url).await?;
        Ok(LockManagerBuilder { is_in_memory, ..LockManagerBuilder::new(store) })
    }

    /// Creates a manager of locks in this store. An `Arc` of a store is a store, too.
    #[must_use]
    pub fn new(store: impl LockStore) -> Self {
        Self::builder(store).build()
    }

    /// Returns a builder for a manager of locks in this store.
    pub fn builder(store: impl LockStore) -> LockManagerBuilder {
        LockManagerBuilder::new(Arc::new(store))
    }

    /// Returns a manager of the same locks with other settings, for example for one router.
    ///
    /// Each setting of `policy` replaces that of this manager.
    #[must_use]
    pub fn with_policy(&self, policy: LockPolicy) -> Self {
        self.driver().note_policy(&policy);
        Self { policy: policy.or(self.policy), ..self.clone() }
    }

    /// Acquires the lock if it is free. Does not wait while another owner holds it.
    ///
    /// Fails with [`LockError::Busy`](crate::LockError::Busy) if another owner holds the lock.
    ///
    /// ```
    /// # use tower_lock::{LockError, LockManager};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// # let locks = LockManager::in_memory();
    /// let guard = locks.try_lock(("nightly", "mail")).await?;
    /// assert!(matches!(locks.try_lock(("nightly", "mail")).await, Err(LockError::Busy { .. })));
    /// guard.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn try_lock(&self, key: impl Into<LockKey>) -> LockBuilder {
        self.lock(key).wait(Duration::ZERO)
    }

    /// Acquires the lock, and waits for it up to 30 seconds by default.
    ///
    /// [`LockBuilder::wait`] or the [`LockPolicy`] of this manager sets another wait.
    ///
    /// In a handler under a [`LockLayer`](crate::LockLayer) or a
    /// [`LockManagerLayer`](crate::LockManagerLayer) a call inherits the settings of its request. A
    /// setting of the call wins. Next are the route (with the wait that its client chose), this
    /// manager, and the defaults of a request. If the route rejects requests at once, a call in its
    /// handler does not wait either, unless it sets [`wait`](LockBuilder::wait). A task that a
    /// handler spawns belongs to no request: it inherits nothing, and has no
    /// [`Owner`](Owner#spawned-tasks).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_lock::{Lease, LockError, LockManager};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// # let locks = LockManager::in_memory();
    /// let guard = locks
    ///     .lock(("account", 7))
    ///     .wait(Duration::from_secs(1))
    ///     .lease(Lease::Fixed(Duration::from_secs(60)))
    ///     .await?;
    /// guard.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn lock(&self, key: impl Into<LockKey>) -> LockBuilder {
        LockBuilder::new(self.call(), key.into())
    }

    /// A call that sets nothing.
    pub(super) fn call(&self) -> Call {
        Call {
            driver: Arc::clone(self.driver()),
            policy: LockPolicy::new(),
            owner: None,
            sharing: Sharing::Alone,
            of_handle: self.policy,
            parent: self.parent.clone(),
        }
    }

    /// Returns the state of this key in the store: its holders, the times of their grants, and the
    /// number of waiters. Changes nothing. [`OnceBuilder::inspect`](super::OnceBuilder::inspect)
    /// does it for work that runs once.
    ///
    /// # Errors
    ///
    /// Fails if the store does not reply within its [call timeout](LockStore::call_timeout).
    pub async fn inspect(&self, key: impl Into<LockKey>) -> Result<LockStatus, StoreError> {
        self.driver().inspect(key.into()).await
    }

    /// Returns one page of the keys that are held, blocked or waited for, with their states.
    /// Changes nothing.
    ///
    /// Ask for the next page with [`ListRequest::after`] and the `next` of this one. A key that is
    /// held from the first page to the last one is listed at least once, and may be listed twice.
    ///
    /// ```
    /// # use tower_lock::{LockManager, MemoryStore, store::{ListRequest, StoreError}};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), StoreError> {
    /// # let locks = LockManager::new(MemoryStore::new());
    /// let mut request = ListRequest::new(100).contended_only(true);
    /// loop {
    ///     let page = locks.list(request).await?;
    ///     for entry in &page.entries {
    ///         println!("{}: {} wait", entry.key, entry.status.waiting);
    ///     }
    ///     let Some(next) = page.next else { break };
    ///     request = ListRequest::new(100).contended_only(true).after(next);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Fails if the store does not reply within its [call timeout](LockStore::call_timeout), or
    /// with [`StoreErrorKind::Unsupported`](crate::store::StoreErrorKind::Unsupported) if the page
    /// before is that of another store.
    pub async fn list(&self, request: ListRequest) -> Result<ListReply, StoreError> {
        let mut page = self.driver().within("list", |store| store.list(request)).await?;
        for entry in &mut page.entries {
            forget_connections(&mut entry.status.holders);
        }
        Ok(page)
    }

    /// Revokes the lock from its holder, or from all holders of permits and reads.
    /// [`revoke`](Self::revoke) names one of them.
    ///
    /// Each holder is notified and aborted. The key stays blocked for 1 second, so that the holder
    /// can stop. If the key has no holder, but a [`min_hold`](LockPolicy::min_hold) or a
    /// [`lock_delay`](LockPolicy::lock_delay) blocks it, it is freed at once. A second call within
    /// 1 second of the first one changes nothing, notifies the holder again and returns the same
    /// reply.
    ///
    /// # Errors
    ///
    /// Fails if the store does not reply within its [call timeout](LockStore::call_timeout). The
    /// lock may have been revoked nevertheless.
    pub async fn force_release(&self, key: impl Into<LockKey>) -> Result<ForceReleaseReply, StoreError> {
        self.force(ForceReleaseRequest::new(key.into(), LOCK_DELAY, proto::QUEUE)).await
    }

    /// Revokes the lock, the permit or the read of one holder, which [`inspect`](Self::inspect)
    /// names. The others keep theirs. The readers of one process that share a grant are one holder.
    ///
    /// [`AcquisitionId::from_text`](crate::AcquisitionId::from_text) reads the id of a holder. The
    /// text of a permit contains a `/`.
    ///
    /// The holder is notified and aborted. Its place stays blocked for 1 second. The reply is
    /// [`Free`](ForceReleaseReply::Free) if it does not hold the key.
    ///
    /// # Errors
    ///
    /// The same as those of [`force_release`](Self::force_release).
    pub async fn revoke(
        &self,
        key: impl Into<LockKey>,
        holder: &AcquisitionId,
    ) -> Result<ForceReleaseReply, StoreError> {
        let request = ForceReleaseRequest::new(key.into(), LOCK_DELAY, proto::QUEUE);
        self.force(request.holder(Some(holder.clone()))).await
    }

    async fn force(&self, request: ForceReleaseRequest) -> Result<ForceReleaseReply, StoreError> {
        self.driver().within("force-release", |store| store.force_release(request)).await
    }

    /// Checks whether the store accepts writes and can notify waiters, for a readiness probe. A
    /// store in memory is always ready.
    ///
    /// The result has no effect on requests: while the store cannot be reached, they get 503 with
    /// or without a probe.
    ///
    /// # Errors
    ///
    /// Fails if the store does not reply or accepts no writes, so that requests are rejected, or if
    /// it cannot notify waiters, so that requests wait longer than necessary. Fails from the first
    /// moment of a shutdown on, as [`is_shutting_down`](Self::is_shutting_down) says.
    pub async fn health(&self) -> Result<(), StoreError> {
        if self.is_shutting_down() {
            return Err(
                StoreError::new("lock", "health", StoreErrorKind::Unavailable).with_source(LockError::ShuttingDown)
            );
        }
        self.driver().within("health", <dyn LockStore>::health).await
    }

    /// Returns whether the process has got its stop signal, or [`shutdown`](Self::shutdown) was
    /// called. A balancer should send no further requests. The store is not called.
    #[must_use]
    pub fn is_shutting_down(&self) -> bool {
        self.driver().is_shutdown_announced()
    }

    /// Returns the number of guards that this owner has for this key. Zero if it does not hold the
    /// key.
    ///
    /// The store is not called.
    #[must_use]
    pub fn hold_count(&self, key: impl Into<LockKey>, owner: &Owner) -> u32 {
        self.driver().hold_count(&key.into(), owner)
    }

    /// Returns the number of keys that this manager and its clones hold.
    #[must_use]
    pub fn held_count(&self) -> usize {
        self.driver().held_count()
    }

    /// Returns what this manager and its clones hold, oldest first. The store is not called.
    ///
    /// The readers of one process have an entry each, also if they share a grant. See
    /// [`inspect`](Self::inspect) and [`list`](Self::list) for the holders in other processes.
    ///
    /// ```
    /// # use tower_lock::{LockError, LockManager};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// # let locks = LockManager::in_memory();
    /// let guard = locks.lock(("nightly", "mail")).await?;
    /// let held = locks.holding();
    /// assert_eq!((held.len(), held[0].key.as_str()), (1, "nightly:mail"));
    /// # guard.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn holding(&self) -> Vec<Holding> {
        self.driver().holding()
    }

    /// Rejects waiters and new calls, and waits until all held locks are released, at most for the
    /// budget.
    ///
    /// Returns the number of keys that are still held at the end of the budget, or whose release
    /// the store has not confirmed. A lock that is held is renewed as before, and released when its
    /// work ends. A release is repeated. If the process ends sooner, the leases expire.
    ///
    /// Call this method when the service receives its stop signal, in the future that is passed to
    /// `axum::serve(..).with_graceful_shutdown(..)`. The server then responds meanwhile, with 503
    /// to requests that need a lock. If the method is called after the server has stopped, waiters
    /// are not rejected but served. A handler can still re-enter a lock that it holds. A handler
    /// that finishes [without its client](crate::OnDisconnect) is waited for, too.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the shutdown continues.
    pub async fn shutdown(&self, budget: Duration) -> usize {
        if !self.driver().is_of_this_process() {
            // A forked child holds nothing.
            return 0;
        }
        self.driver().shut_down();
        match timeout(budget, self.driver().wait_idle()).await {
            Ok(()) => 0,
            Err(_) => self.driver().unfinished_count(),
        }
    }

    /// Waits for SIGTERM or Ctrl-C (only Ctrl-C on systems other than Unix), then shuts down within
    /// the budget.
    ///
    /// The future is for `axum::serve(..).with_graceful_shutdown(..)`. Without it, each stop of a
    /// process blocks the keys that it holds for the lease and the lock-delay, 31 seconds by
    /// default. Needs the feature `signal`, which is on by default.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_lock::LockManager;
    /// # async fn serve(
    /// #     listener: tokio::net::TcpListener,
    /// #     app: axum::Router,
    /// #     locks: LockManager,
    /// # ) -> std::io::Result<()> {
    /// axum::serve(listener, app)
    ///     .with_graceful_shutdown(locks.shutdown_on_signal(Duration::from_secs(20)))
    ///     .await
    /// # }
    /// ```
    ///
    /// After the signal:
    ///
    /// 1. [`health`](Self::health) fails. For the time of [`ShutdownOnSignal::serve_for`], requests
    ///    are served as before: a balancer may not know yet. The default is none.
    /// 2. Waiters and new requests are rejected with 503 `shutting-down`. The server still accepts
    ///    connections, so that each client gets that response.
    /// 3. Handlers that hold a lock may finish, as in [`shutdown`](Self::shutdown).
    /// 4. One second before the end of the budget (at half of a budget that is shorter than two
    ///    seconds) the locks that are still held are lost:
    ///    [`LockLost::ShuttingDown`](crate::LockLost::ShuttingDown). Their handlers are dropped,
    ///    and their clients get 503 with outcome `unknown`. Their keys are free a
    ///    [lock-delay](LockPolicy::lock_delay) later.
    /// 5. The future completes, at the end of the budget at the latest. The server then waits for
    ///    the requests that hold no lock. The server has no limit of its own for that.
    ///
    /// Set the budget some seconds shorter than the time after which the process is killed, for
    /// example 20 seconds if Kubernetes waits for 30.
    ///
    /// # Panics
    ///
    /// The future panics if the runtime has no IO driver, or if the process cannot listen to
    /// signals.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before the signal, nothing happens. If it is dropped after the
    /// signal, [`health`](Self::health) still fails, waiters and new calls stay rejected if they
    /// were, and no further lock is ended early.
    #[cfg(feature = "signal")]
    #[cfg_attr(docsrs, doc(cfg(feature = "signal")))]
    pub fn shutdown_on_signal(&self, budget: Duration) -> ShutdownOnSignal {
        let locks = self.clone();
        ShutdownOnSignal::new(move |serve_for| async move {
            locks.driver().announce_shutdown();
            sleep(serve_for).await;
            // The releases of the locks that are ended take a call to the store.
            let grace = budget.saturating_sub(locks.driver().store_timeout()).max(budget / 2);
            if locks.shutdown(grace).await > 0 {
                locks.driver().end_all();
                // If the store does not reply, the leases expire.
                let _ = timeout(budget - grace, locks.driver().wait_idle()).await;
            }
        })
    }

    /// The number of keys with an entry in this process, and the number of calls that wait.
    #[cfg(feature = "__internals")]
    #[doc(hidden)]
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        self.driver().size()
    }

    /// Makes this process a forked child of that of the manager, for a test.
    #[cfg(feature = "__internals")]
    #[doc(hidden)]
    pub fn simulate_fork(&self) {
        self.driver().created_in.simulate_fork();
    }

    pub(crate) fn driver(&self) -> &Arc<Driver> {
        &self.handle.driver
    }

    /// Warns of a lease that is over after a few calls without a reply. A store whose calls take no
    /// time leaves no record pending.
    pub(crate) fn check_record_lease(&self) {
        let LeaseBounds { longest, call_timeout } = self.driver().lease;
        let needed = call_timeout.saturating_mul(RECORD_CALLS);
        if longest < needed && self.driver().store.free_keys().is_none() {
            notice::short_lease(longest, call_timeout, needed);
        }
    }

    /// Why the store keeps no records, in its own words: the error of this operation. `None`: it
    /// keeps them.
    pub(crate) fn records_refused(&self, operation: &'static str) -> Option<StoreError> {
        let driver = self.driver();
        if driver.store.traits().records {
            return None;
        }
        // Each request for a record has this error, and changes nothing.
        let refused = driver.store.delete_record(LockKey::from(("record",))).into_ready().ok().and_then(Result::err);
        let Some(refused) = refused.filter(|error| error.kind() == StoreErrorKind::Unsupported) else {
            return Some(StoreError::new("lock", operation, StoreErrorKind::Unsupported));
        };
        let error = StoreError::new(refused.store(), operation, StoreErrorKind::Unsupported);
        Some(match refused.source() {
            Some(source) => error.with_source(source.to_string()),
            None => error,
        })
    }

    /// The key, as far as a log may show it.
    #[cfg(feature = "axum")]
    pub(crate) fn shown(&self, key: &LockKey) -> String {
        if self.policy.shows_key() { key.as_str().to_owned() } else { key.redacted() }
    }

    pub(crate) fn policy(&self) -> LockPolicy {
        self.policy
    }
}

impl Driver {
    pub(super) async fn inspect(&self, key: LockKey) -> Result<LockStatus, StoreError> {
        let mut status = self.within("inspect", |store| store.inspect(key.clone())).await?;
        forget_connections(&mut status.holders);
        Ok(self.status_of(&key, status))
    }

    /// The status in the store, with the calls that wait here.
    pub(crate) fn status_of(&self, key: &LockKey, status: KeyStatus) -> LockStatus {
        let KeyStatus { holders, holding, lease_left, waiting, record_left, kept_by } = status;
        let waiting_locally = self.waiting_for(key);
        LockStatus { holders, holding, remaining: lease_left, record_left, kept_by, waiting, waiting_locally }
    }

    /// A call of an operator, within the call timeout of the store.
    pub(super) async fn within<T: Unpin>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&dyn LockStore) -> StoreFuture<T>,
    ) -> Result<T, StoreError> {
        self.check_process(operation)?;
        let reply = timeout(self.lease.call_timeout, call(&*self.store)).await;
        reply.unwrap_or_else(|_| Err(StoreError::no_reply(operation)))
    }
}

/// A ticket has no process that could be connected.
fn forget_connections(holders: &mut [Holder]) {
    for holder in holders.iter_mut().filter(|holder| holder.id.is_of_ticket()) {
        holder.connected = None;
    }
}

impl LockManagerBuilder {
    fn new(store: Arc<dyn LockStore>) -> Self {
        Self {
            store,
            instance: None,
            random: None,
            lease: LEASE,
            clock: Clock::default(),
            max_detached: MAX_DETACHED_HANDLERS,
            traces: None,
            is_in_memory: false,
        }
    }

    /// Sets the name of this instance in acquisition ids, which operators read.
    ///
    /// Default: the environment variable `HOSTNAME`, which is the name of the pod in a cluster. If
    /// it is not set, the name of the host. Characters other than `[A-Za-z0-9._-]` become `-`. Only
    /// the last 32 characters are kept.
    pub fn instance(self, name: impl Into<String>) -> Self {
        Self { instance: Some(name.into()), ..self }
    }

    /// Sets the maximum number of handlers that finish without their client at the same time
    /// ([`OnDisconnect::Finish`](crate::OnDisconnect::Finish)). Default: 1,024.
    ///
    /// Further handlers are dropped when their client disconnects, and their keys are free after
    /// the lock-delay. With zero, each such handler is dropped.
    ///
    /// A route (a layer and the path that it matched) may have at most as many handlers as remain
    /// free. A route under a flood therefore takes half of them, and leaves capacity for other
    /// routes.
    pub fn max_detached(self, handlers: usize) -> Self {
        Self { max_detached: handlers, ..self }
    }

    /// Sets how spans get their traces, so that a request that has waited for another one is linked
    /// to it. Default: no traces.
    ///
    /// Each section then leaves its trace and its route (at most 64 bytes of the route) with its
    /// release, and the store passes them to the request that was waiting. After a wait of 10 ms or
    /// longer, the span of that request has a link, and the fields `blocked_by_route` and
    /// `blocked_for_ms`. The log of a 409 names the section that it was rejected for.
    ///
    /// For locks in memory, Redis and PostgreSQL that one request holds alone. See
    /// [the guide](crate::guide::observability#whose-work-did-a-request-wait-for).
    pub fn traces(self, traces: impl Traces) -> Self {
        Self { traces: Some(Arc::new(traces)), ..self }
    }

    /// Sets the lease: how long the store keeps a lock that is not renewed. Default: 30 seconds.
    ///
    /// The lease is from 2 seconds to 10 minutes. It decides how long a crash blocks a key: the
    /// lease plus the [lock-delay](LockPolicy::lock_delay), 1 second by default. A shorter lease
    /// costs more renewals, because each held lock is renewed after every third of its lease. It
    /// also loses locks sooner in an outage of the store or a pause of the process.
    ///
    /// | lease | renewals per second for 1,000 held keys | a crash blocks a key for at most |
    /// |---|---|---|
    /// | 2 s, the shortest | 1,500 | 3 s |
    /// | 5 s | 600 | 6 s |
    /// | 10 s | 300 | 11 s |
    /// | **30 s, the default** | 100 | 31 s |
    /// | 60 s | 50 | 61 s |
    /// | 10 min, the longest | 5 | 601 s |
    ///
    /// Up to 128 renewals that are due at about the same time share one call. A section that ends
    /// within a third of its lease is never renewed.
    ///
    /// [`Lease::Fixed`](crate::Lease::Fixed) sets a shorter lease for one lock.
    ///
    /// # Panics
    ///
    /// Panics if the lease is shorter than 2 seconds or longer than 10 minutes. A lease that was
    /// silently adjusted would be noticed only after a crash.
    #[track_caller]
    pub fn lease(self, lease: Duration) -> Self {
        assert!(
            (LEASE_MIN..=LEASE_MAX).contains(&lease),
            "a lease of {lease:?} cannot be set: it must be from {LEASE_MIN:?} to {LEASE_MAX:?}",
        );
        Self { lease, ..self }
    }

    /// Sets the clock that measures leases. Default: the clock of the system.
    #[cfg(feature = "test-util")]
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    pub fn clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Sets the seed of the random parts of acquisition ids and of jitter. Default: random.
    ///
    /// Two managers on one store need different seeds.
    #[cfg(feature = "test-util")]
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    pub fn seed(self, seed: u64) -> Self {
        Self { random: Some(seed), ..self }
    }

    /// Creates the manager.
    #[must_use]
    pub fn build(self) -> LockManager {
        let Self { store, instance, random, lease, clock, max_detached, traces, is_in_memory } = self;
        let instance = instance.unwrap_or_else(this_instance);
        let random = random.unwrap_or_else(process::random_bits);
        metrics::register(lease, max_detached);
        let ids = AcquisitionIds::new(&instance, random);
        let driver = Driver::new(store, clock, &ids, lease, max_detached, traces, watchdog::start);
        if is_in_memory {
            warn_of_second(&driver);
        }
        LockManager { handle: Arc::new(Handle { driver }), policy: LockPolicy::new(), parent: Parent::default() }
    }
}

/// Warns, once for a runtime, if the manager of another store in memory is still there. Of one
/// runtime, because each test of a program has one.
fn warn_of_second(driver: &Arc<Driver>) {
    struct Last {
        runtime: runtime::Id,
        driver: Weak<Driver>,
        has_warned: bool,
    }
    static LAST: LazyLock<Mutex<Option<Last>>> = LazyLock::new(Mutex::default);

    let Ok(runtime) = runtime::Handle::try_current() else { return };
    let mut next = Last { runtime: runtime.id(), driver: Arc::downgrade(driver), has_warned: false };
    let mut last = LAST.lock();
    let same = last.take().filter(|last| last.runtime == next.runtime);
    let has_warned = same.as_ref().is_some_and(|last| last.has_warned);
    let is_second = same.is_some_and(|last| last.driver.strong_count() > 0);
    next.has_warned = has_warned || is_second;
    *last = Some(next);
    drop(last);
    if is_second && !has_warned {
        notice::second_in_memory();
    }
}

fn this_instance() -> String {
    let by_environment = std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty());
    #[cfg(unix)]
    let by_system = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let by_system = || std::env::var("COMPUTERNAME").unwrap_or_else(|_| "instance".to_owned());
    by_environment.unwrap_or_else(by_system)
}

impl Clone for LockManager {
    fn clone(&self) -> Self {
        // A clone that is made in a request may be moved to a task of that request.
        let parent = Parent::here().unwrap_or_else(|| self.parent.clone());
        Self { handle: Arc::clone(&self.handle), policy: self.policy, parent }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Nothing is left that could wait for them.
        if let held @ 1.. = self.driver.held_count() {
            self.driver.report(Report::Abandoned { held });
        }
    }
}

impl fmt::Debug for LockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { handle, policy, parent: _ } = self;
        f.debug_struct("LockManager")
            .field("store", &handle.driver.store)
            .field("policy", policy)
            .finish_non_exhaustive()
    }
}
