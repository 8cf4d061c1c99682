use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use tokio::time::timeout;

use super::{
    LockBuilder, LockStatus,
    driver::{Driver, QUEUE},
    request_scope::Parent,
};
use crate::{
    acquisition::AcquisitionIds,
    clock::Clock,
    limits::{LEASE, LEASE_MAX, LEASE_MIN, LOCK_DELAY, MAX_DETACHED_HANDLERS},
    lock_key::LockKey,
    owner::Owner,
    policy::LockPolicy,
    process::Process,
    store::{ForceReleaseReply, ForceReleaseRequest, KeyStatus, LockStore, StoreError, StoreErrorKind, StoreFuture},
    telemetry::{metrics, reports::Report},
};

/// The handle: locks in one store, for layers, handlers, jobs and tests.
///
/// Cheap to clone. All clones share the line of this process; two handles that were *made* on the same store are to each
/// other as two instances of the service.
///
/// Locks are taken within a Tokio runtime with its time driver on.
///
/// # Fork
///
/// A server that forks makes a `LockManager` in each child, after the fork. A handle that was made before
/// the fork begins anew at its first use in a child: with owner ids of its own, and nothing held.
/// Guards that were copied from the parent are lost in the child, and their drop releases nothing.
/// The handle must not be in use during the fork: a mutex that another thread has at that moment is
/// never unlocked in the child.
pub struct LockManager {
    handle: Arc<Handle>,
    policy: LockPolicy,
    /// For calls without an owner: tasks that were spawned in a request.
    parent: Parent,
}

/// What all clones share. Dropped with the last of them.
struct Handle {
    core: Arc<Driver>,
    /// Made at the first use in a child process: this is the copy of what belongs to its parent.
    child: OnceLock<Box<Self>>,
}

/// Makes a [`LockManager`] that is to be told something about itself.
#[derive(Debug)]
#[must_use = "a builder makes nothing before `build`"]
pub struct LockManagerBuilder {
    store: Arc<dyn LockStore>,
    instance: Option<String>,
    random: Option<u64>,
    process: Process,
    lease: Duration,
    clock: Clock,
    max_detached: usize,
}

impl LockManager {
    /// Locks for one process. Needs the feature `memory`.
    #[cfg(feature = "memory")]
    #[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
    #[must_use]
    pub fn in_memory() -> Self {
        Self::new(crate::store::MemoryStore::new())
    }

    /// Not without the feature `memory`.
    #[cfg(not(feature = "memory"))]
    #[doc(hidden)]
    #[must_use]
    #[expect(clippy::missing_panics_doc, reason = "it cannot be called")]
    pub fn in_memory() -> Self
    where
        for<'a> crate::missing::Missing<'a>: crate::missing::Memory,
    {
        unreachable!("nothing meets the bound")
    }

    /// Locks in this store. An `Arc` of a store is one, too.
    #[must_use]
    pub fn new(store: impl LockStore) -> Self {
        Self::builder(store).build()
    }

    /// Locks in this store, under a name of your choice.
    pub fn builder(store: impl LockStore) -> LockManagerBuilder {
        LockManagerBuilder {
            store: Arc::new(store),
            instance: None,
            random: None,
            process: Process::default(),
            lease: LEASE,
            clock: Clock::default(),
            max_detached: MAX_DETACHED_HANDLERS,
        }
    }

    /// The same locks with other defaults, for a router of its own perhaps.
    #[must_use]
    pub fn with_policy(&self, policy: LockPolicy) -> Self {
        Self { policy: policy.or(self.policy), ..self.clone() }
    }

    /// Takes the key if nobody has it. Redisson's `tryLock()`.
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

    /// Takes the key, and waits for it: 30 seconds, or as long as the [`LockPolicy`] of this handle or the call itself says.
    /// Redisson's `lock()`, but that every wait has an end.
    ///
    /// In a handler under a [`LockLayer`](crate::LockLayer) or [`LockManagerLayer`](crate::LockManagerLayer) a call
    /// inherits the settings of the request: what the call sets, else the route (with the wait that its
    /// client chose), else this handle, else the default of a request. A route that rejects at once so
    /// rejects at once in its handler, too; say [`wait`](LockBuilder::wait) where that is not meant. A task
    /// that a handler spawns is in no request: it inherits nothing, and has no
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
        LockBuilder::new(Arc::clone(self.core()), key.into(), self.policy, self.parent.clone())
    }

    /// Who has this key, since when, and how many wait, as the store sees it. Redisson's `isLocked()`, and what its operators read from
    /// the hash.
    ///
    /// # Errors
    ///
    /// The store did not reply within its [call timeout](LockStore::call_timeout).
    pub async fn inspect(&self, key: impl Into<LockKey>) -> Result<LockStatus, StoreError> {
        let key = key.into();
        let KeyStatus { holder, lease_left, waiting } =
            self.within("inspect", self.core().store.inspect(key.clone())).await?;
        let (holder, since) = match holder {
            Some(record) => {
                let since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(record.fence));
                (Some(record.id), since.filter(|_| record.fence > 0))
            }
            None => (None, None),
        };
        let waiting_locally = self.core().waiting_for(&key);
        Ok(LockStatus { holder, since, remaining: lease_left, waiting, waiting_locally })
    }

    /// Revokes the key from its holder. Redisson's `forceUnlock()`.
    ///
    /// The holder is notified and aborted; the key stays blocked for the lock-delay of a second, so
    /// that the holder can stop. A key without a holder that a
    /// [`min_hold`](LockPolicy::min_hold) or a [`lock_delay`](LockPolicy::lock_delay) blocks is
    /// freed at once. A second call within the lock-delay of the first one changes nothing,
    /// notifies the holder again and has the same answer.
    ///
    /// # Errors
    ///
    /// The store did not reply within its [call timeout](LockStore::call_timeout). It may have revoked the key all the same.
    pub async fn force_release(&self, key: impl Into<LockKey>) -> Result<ForceReleaseReply, StoreError> {
        let ask = ForceReleaseRequest::new(key.into(), LOCK_DELAY, QUEUE);
        self.within("force-release", self.core().store.force_release(ask)).await
    }

    /// Whether the store replies and can notify waiters, for a readiness probe. A store in memory is always ready.
    ///
    /// It changes nothing: while the store cannot be reached, requests get 503, with or without a
    /// probe. It asks the store alone, and is `Ok` during a [`shutdown`](Self::shutdown): a probe
    /// that is to fail then looks at the signal itself.
    ///
    /// # Errors
    ///
    /// The reason why requests would be rejected, or would wait longer than they have to.
    pub async fn health(&self) -> Result<(), StoreError> {
        self.within("health", self.core().store.health()).await
    }

    /// How often this owner has this key now: how many guards it has. Zero: it does not have it. Redisson's `isHeldByCurrentThread()` and
    /// `getHoldCount()`; it is known in this process, and asks nobody.
    #[must_use]
    pub fn hold_count(&self, key: impl Into<LockKey>, owner: &Owner) -> u32 {
        self.core().hold_count(&key.into(), owner)
    }

    /// How many keys are held by this handle and its clones now.
    #[must_use]
    pub fn held_count(&self) -> usize {
        self.core().held_count()
    }

    /// Ends in order: nothing new is begun, whoever waits is told so and leaves every line, and what is held may go on until it is given
    /// back, within the budget. Completes when everything is.
    ///
    /// Answers how many holders were still running when the budget was spent: they are left alone, renewed as before, and give
    /// their keys back when they end, if the process lets them. Beyond that the lease does.
    ///
    /// Call it when the service is told to stop, in the future that `axum::serve(..).with_graceful_shutdown(..)` waits for: the server answers
    /// meanwhile, 503 to who wants a lock. (Called after the server, who waits has its turn first.) A handler that re-enters a lock it
    /// holds still can, and one that finishes [without its client](crate::OnDisconnect) is waited for.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the shutting down goes on; nobody waits for it.
    pub async fn shutdown(&self, budget: Duration) -> usize {
        self.core().shut_down();
        match timeout(budget, self.core().wait_idle()).await {
            Ok(()) => 0,
            Err(_) => self.core().held_count(),
        }
    }

    /// Waits for SIGTERM or Ctrl-C (elsewhere than on Unix: for Ctrl-C), then shuts the locks down within the budget. Made for
    /// `axum::serve(..).with_graceful_shutdown(..)`. Needs the feature `signal`, which is on by default.
    ///
    /// A process that is stopped without it keeps its keys from everybody for the lease and the lock-delay, 31 seconds, at every deploy.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_lock::LockManager;
    /// # async fn serve(listener: tokio::net::TcpListener, app: axum::Router, locks: LockManager) -> std::io::Result<()> {
    /// axum::serve(listener, app)
    ///     .with_graceful_shutdown(locks.shutdown_on_signal(Duration::from_secs(20)))
    ///     .await
    /// # }
    /// ```
    ///
    /// After the signal:
    ///
    /// 1. Waiters and new requests are rejected with 503 `shutting-down`. The server goes on to accept connections, so that each
    ///    client gets that answer.
    /// 2. Handlers that hold a lock may finish, as in [`shutdown`](Self::shutdown).
    /// 3. One second before the end of the budget (at half of a budget that is shorter than two seconds) the locks that are still held
    ///    are revoked: [`LockLost::ShuttingDown`](crate::LockLost::ShuttingDown). Their handlers are dropped and answer 503 with outcome
    ///    `unknown`. Their keys are free a [lock-delay](LockPolicy::lock_delay) later.
    /// 4. The future completes, at the end of the budget at the latest. The server then waits for the requests that hold no
    ///    lock. It has no limit of its own for that.
    ///
    /// The budget should be some seconds shorter than the time after which the process is killed: 20 seconds where Kubernetes waits for 30.
    ///
    /// # Panics
    ///
    /// The future panics if the runtime has no IO driver, or if the process cannot listen to signals.
    ///
    /// # Cancel safety
    ///
    /// Dropped before the signal, it does nothing. Dropped after it, nothing is revoked; the rest goes on.
    #[cfg(feature = "signal")]
    #[cfg_attr(docsrs, doc(cfg(feature = "signal")))]
    pub fn shutdown_on_signal(&self, budget: Duration) -> impl Future<Output = ()> + Send + use<> {
        let locks = self.clone();
        async move {
            crate::lock::signal::stop().await;
            // The releases of what is revoked take a call to the store.
            let grace = budget.saturating_sub(locks.core().store_timeout()).max(budget / 2);
            if locks.shutdown(grace).await > 0 {
                locks.core().end_all();
                // The store may not answer: then the leases end by themselves.
                let _ = timeout(budget - grace, locks.core().wait_idle()).await;
            }
        }
    }

    /// How many keys something is known of in this process, and how many calls wait.
    #[cfg(feature = "__internals")]
    #[doc(hidden)]
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        self.core().size()
    }

    async fn within<T: Unpin>(&self, operation: &'static str, reply: StoreFuture<T>) -> Result<T, StoreError> {
        let reply = timeout(self.core().call_timeout, reply).await;
        reply.unwrap_or_else(|_| Err(StoreError::new("lock", operation, StoreErrorKind::Timeout)))
    }

    pub(crate) fn core(&self) -> &Arc<Driver> {
        self.handle.core()
    }

    pub(crate) fn policy(&self) -> LockPolicy {
        self.policy
    }
}

impl Handle {
    fn new(core: Arc<Driver>) -> Self {
        Self { core, child: OnceLock::new() }
    }

    /// That of this process.
    fn core(&self) -> &Arc<Driver> {
        // The newest one first: a process may have the id that its grandparent had.
        let mut newest = self;
        while let Some(child) = newest.child.get() {
            newest = child;
        }
        if newest.core.is_of_this_process() {
            return &newest.core;
        }
        &newest.child.get_or_init(|| Box::new(Self::new(newest.core.for_child()))).core
    }
}

impl LockManagerBuilder {
    /// What this instance is called where an operator reads who has a lock. Default: `HOSTNAME`, which is the pod in a cluster, else the name of the
    /// host. Other characters than `[A-Za-z0-9._-]` become `-`, and of what is longer than 32 the last ones are kept.
    pub fn instance(self, name: impl Into<String>) -> Self {
        Self { instance: Some(name.into()), ..self }
    }

    /// How many handlers may finish without their client at once ([`OnDisconnect::Finish`](crate::OnDisconnect::Finish)). Default: 1 024; zero: none. Beyond
    /// it they are dropped with their client, and their keys free after the lock-delay.
    ///
    /// A route (a layer, and the path that it matched) may have as many as it leaves free: one that
    /// is flooded takes half of them, and another one still finds a place.
    pub fn max_detached(self, handlers: usize) -> Self {
        Self { max_detached: handlers, ..self }
    }

    /// The lease: how long the store keeps a lock that is not renewed. Default: 30 seconds. From 2
    /// seconds to 10 minutes.
    ///
    /// The decision: how long may a crash block a key? A shorter lease frees the key sooner. It
    /// costs more renewals, because each held lock is renewed after every third of its lease, and
    /// an outage or a pause of the process loses locks sooner. The
    /// [lock-delay](LockPolicy::lock_delay), 1 second by default, is added to the lease.
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
    /// Renewals that are due together share a call: up to 1,000 in one. A section that ends within
    /// a third of its lease is never renewed.
    ///
    /// [`Lease::Fixed`](crate::Lease::Fixed) does the same for single sections: the store is asked
    /// for no more than such a section needs.
    ///
    /// # Panics
    ///
    /// The lease is shorter than 2 seconds or longer than 10 minutes. A service that started with
    /// another lease than the one it was given would show that after its first crash only.
    #[track_caller]
    pub fn lease(self, lease: Duration) -> Self {
        assert!(
            (LEASE_MIN..=LEASE_MAX).contains(&lease),
            "a lease of {lease:?} cannot be set: it is {LEASE_MIN:?} at the least and {LEASE_MAX:?} at the most",
        );
        Self { lease, ..self }
    }

    /// Measures leases by this clock.
    #[cfg(feature = "test-util")]
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    pub fn clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// The seed of all that is random: ids, and the spread of check-ins and repeats. Two handles on one store must not have the same.
    #[cfg(feature = "test-util")]
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    pub fn seed(self, seed: u64) -> Self {
        Self { random: Some(seed), ..self }
    }

    /// Where the id of this process is read: another number stands for a child process.
    #[cfg(feature = "__internals")]
    #[doc(hidden)]
    pub fn process_id(self, id: Arc<std::sync::atomic::AtomicU32>) -> Self {
        Self { process: Process::simulated(id), ..self }
    }

    /// Makes it.
    #[must_use]
    pub fn build(self) -> LockManager {
        let Self { store, instance, random, process, lease, clock, max_detached } = self;
        let instance = instance.unwrap_or_else(this_instance);
        let random = random.unwrap_or_else(|| process.random_bits());
        metrics::describe();
        let ids = AcquisitionIds::new(&instance, random);
        let core = Driver::new(store, clock, ids, process, lease, max_detached);
        LockManager { handle: Arc::new(Handle::new(core)), policy: LockPolicy::new(), parent: Parent::default() }
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
        // A clone that is made in a request may go to a task of that request.
        let parent = Parent::here().unwrap_or_else(|| self.parent.clone());
        Self { handle: Arc::clone(&self.handle), policy: self.policy, parent }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Nobody is left who could wait for them.
        if self.core.is_of_this_process()
            && let held @ 1.. = self.core.held_count()
        {
            self.core.report(Report::Abandoned { held });
        }
    }
}

impl fmt::Debug for LockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { handle, policy, parent: _ } = self;
        f.debug_struct("Locks").field("store", &handle.core.store).field("policy", policy).finish_non_exhaustive()
    }
}
