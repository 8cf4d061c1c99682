use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use super::{LockCall, Policy, table::Table, watchdog::Watchdog};
use crate::{defaults::LOCK_WAIT, key::LockKey, lease::OwnerIds, store::LockStore};

/// The handle: locks in one store, for layers, handlers, jobs and tests.
///
/// Cheap to clone. All clones share the line of this process; two handles that were *made* on the same store are to each
/// other as two instances of the service.
///
/// Locks are taken within a Tokio runtime with its time driver on.
#[derive(Clone)]
pub struct Locks {
    core: Arc<Core>,
    policy: Policy,
}

/// What all clones share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(super) store: Arc<dyn LockStore>,
    pub(super) owner_ids: OwnerIds,
    pub(super) watchdog: Watchdog,
    table: Mutex<Table>,
}

impl Locks {
    /// Locks for one process. Needs the feature `memory`.
    #[cfg(feature = "memory")]
    #[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
    #[must_use]
    pub fn in_memory() -> Self {
        Self::new(crate::store::MemoryStore::new())
    }

    /// Locks in this store. An `Arc` of a store is one, too.
    #[must_use]
    pub fn new(store: impl LockStore) -> Self {
        // The one source of random bits in the standard library: each state has keys of its own.
        let random = RandomState::new().hash_one(0);
        let core = Core {
            store: Arc::new(store),
            owner_ids: OwnerIds::new(random),
            watchdog: Watchdog::default(),
            table: Mutex::default(),
        };
        Self { core: Arc::new(core), policy: Policy::new() }
    }

    /// The same locks with other defaults, for a router of its own perhaps.
    #[must_use]
    pub fn with_policy(&self, policy: Policy) -> Self {
        Self { core: Arc::clone(&self.core), policy: policy.or(self.policy) }
    }

    /// Takes the key if nobody has it. Redisson's `tryLock()`.
    ///
    /// ```
    /// # use tower_lock::{LockError, Locks};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// # let locks = Locks::in_memory();
    /// let guard = locks.try_lock(("nightly", "mail")).await?;
    /// assert!(matches!(locks.try_lock(("nightly", "mail")).await, Err(LockError::Held { .. })));
    /// guard.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn try_lock(&self, key: impl Into<LockKey>) -> LockCall {
        self.lock(key).wait(Duration::ZERO)
    }

    /// Takes the key, and waits for it: 30 seconds, or as long as the [`Policy`] of this handle or the call itself says.
    /// Redisson's `lock()`, but that every wait has an end.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_lock::{LockError, Locks};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// # let locks = Locks::in_memory();
    /// let guard = locks.lock(("account", 7)).wait(Duration::from_secs(1)).await?;
    /// # drop(guard);
    /// # Ok(())
    /// # }
    /// ```
    pub fn lock(&self, key: impl Into<LockKey>) -> LockCall {
        LockCall::new(Arc::clone(&self.core), key.into(), self.policy.call_wait().unwrap_or(LOCK_WAIT))
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { core, policy } = self;
        f.debug_struct("Locks").field("store", &core.store).field("policy", policy).finish_non_exhaustive()
    }
}

impl Core {
    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        // No code of others runs under this mutex: a poisoned one holds a whole table. `Drop` comes here, too, and must
        // not panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
