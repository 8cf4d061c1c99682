//! The identity that makes a lock re-entrant.

use std::{
    any::Any,
    fmt,
    future::Future,
    ops::Deref,
    ptr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use smallvec::SmallVec;

use crate::{lock_key::LockKey, sync::Mutex};

tokio::task_local! {
    /// The owner of the work that this task does now.
    pub(crate) static CURRENT: Owner;
}

/// Identity under which locks are re-entrant, for example a request or a job.
///
/// An owner that acquires a key that it already holds gets another guard of the same lock, at once
/// and without a store call. The lock is released with its last guard.
///
/// A [`LockLayer`](crate::LockLayer) creates an owner for each request and runs the handler as this
/// owner. `locks.lock(key)` in the handler therefore re-enters. An owner in the extensions of the
/// request replaces it. Code without a request creates an owner:
///
/// ```
/// # use tower_lock::{LockError, LockManager, Owner};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), LockError> {
/// # let locks = LockManager::in_memory();
/// let job = Owner::new();
/// let outer = locks.lock(("account", 7)).owner(&job).await?;
/// let inner = locks.lock(("account", 7)).owner(&job).await?;    // at once
/// assert_eq!(inner.hold_count(), 2);
/// # inner.release().await?;
/// # outer.release().await?;
///
/// job.scope(async {
///     let outer = locks.lock(("account", 7)).await?;
///     let inner = locks.lock(("account", 7)).await?;            // at once, too
/// #   inner.release().await?;
/// #   outer.release().await?;
///     Ok(())
/// }).await
/// # }
/// ```
///
/// Futures that a handler joins have the same owner, so they do not exclude each other. A request
/// that is sent twice from outside of the layer (a retry, a hedge) has two owners. The owner of a
/// request is closed when the response is complete. A closed owner re-enters no lock: its calls
/// queue like those of any other owner. An owner is known only in its process.
///
/// # Spawned tasks
///
/// A task that a handler spawns has no owner. If the task waits for a key that the request of the
/// handler holds, and the handler awaits the task, each waits for the other. The call in the task
/// therefore fails at once with [`LockError::WouldDeadlock`](crate::LockError::WouldDeadlock).
/// There are two solutions:
///
/// ```
/// # use tower_lock::{LockError, LockManager, Owner};
/// # async fn handler(locks: LockManager) -> Result<(), Box<dyn std::error::Error>> {
/// // The task works for the request, and shares its lock:
/// let owner = Owner::current().unwrap_or_else(Owner::new);
/// let shared = locks.clone();
/// let task = tokio::spawn(async move {
///     let guard = shared.lock(("account", 7)).owner(&owner).await?;
///     guard.release().await?;
///     Ok::<_, LockError>(())
/// });
/// task.await??;
/// // The task has an owner of its own, and waits until the request has released the lock:
/// tokio::spawn(async move { locks.lock(("account", 7)).owner(&Owner::new()).await });
/// # Ok(())
/// # }
/// ```
///
/// The call does not re-enter the lock of the request by default, because the task would run
/// concurrently with the handler under one lock. The deadlock is detected by a
/// [`LockManager`](crate::LockManager) that was cloned in the handler or extracted with `State`. It
/// is not detected by a manager in a `static` or in an `Arc` of the application: there the call
/// waits.
#[derive(Clone)]
pub struct Owner(Arc<Identity>);

/// The identity itself. That of a request is a part of its context, in one allocation.
pub(crate) struct Identity<T: ?Sized = dyn Any + Send + Sync> {
    /// The number of those that keep it open. Zero is final: the request or job has ended.
    open: AtomicUsize,
    /// The number of its requests in local queues.
    waiting: AtomicUsize,
    /// It has acquired a lock.
    has_locks: AtomicBool,
    /// The locks that it has acquired. One that has ended is dropped when another one is added.
    locks: Mutex<SmallVec<[Arc<dyn OwnedLock>; 1]>>,
    context: T,
}

/// A lock that an owner has acquired.
pub(crate) trait OwnedLock: Send + Sync {
    fn key(&self) -> &LockKey;

    fn is_held(&self) -> bool;
}

/// An owner that does not keep its context alive.
#[derive(Clone, Debug)]
pub(crate) struct WeakOwner(Weak<Identity>);

impl Owner {
    /// Creates an owner that differs from all others.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each one is another")]
    pub fn new() -> Self {
        Self::of(Arc::new(Identity::new(())))
    }

    pub(crate) fn of<T: Any + Send + Sync>(identity: Arc<Identity<T>>) -> Self {
        Self(identity)
    }

    /// Runs a future as this owner, so that its calls re-enter the locks of this owner.
    ///
    /// Tasks that the future spawns do not have this owner. Calls within a request still inherit
    /// the settings of its route.
    pub fn scope<F: Future>(&self, work: F) -> impl Future<Output = F::Output> + use<F> {
        CURRENT.scope(self.clone(), work)
    }

    /// Returns the owner of the innermost [`scope`](Self::scope) that this code runs in. In a
    /// handler under a lock, this is the owner of its request.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Self::clone).ok()
    }

    /// See [`Identity::keep_open`].
    pub(crate) fn keep_open(&self) -> bool {
        self.0.keep_open()
    }

    /// See [`Identity::close`].
    pub(crate) fn close(&self) {
        self.0.close();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.open.load(Ordering::Acquire) == 0
    }

    pub(crate) fn is<T: Any + Send + Sync>(&self, identity: &Arc<Identity<T>>) -> bool {
        ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(identity))
    }

    pub(crate) fn downgrade(&self) -> WeakOwner {
        WeakOwner(Arc::downgrade(&self.0))
    }

    pub(crate) fn enqueued(&self) {
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn dequeued(&self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Adds a lock that this owner has acquired.
    pub(crate) fn acquired(&self, lock: Arc<dyn OwnedLock>) {
        self.0.has_locks.store(true, Ordering::Relaxed);
        let mut locks = self.0.locks.lock();
        locks.retain(|lock| lock.is_held());
        locks.push(lock);
    }

    /// Whether this owner may hold a lock.
    pub(crate) fn has_locks(&self) -> bool {
        self.0.has_locks.load(Ordering::Relaxed)
    }

    /// The keys that this owner holds.
    pub(crate) fn held_keys(&self) -> Vec<LockKey> {
        let locks = self.0.locks.lock();
        locks.iter().filter(|lock| lock.is_held()).map(|lock| lock.key().clone()).collect()
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) > 0
    }
}

impl<T> Identity<T> {
    /// An identity that one [`close`](Owner::close) closes.
    pub(crate) fn new(context: T) -> Self {
        Self {
            open: AtomicUsize::new(1),
            waiting: AtomicUsize::new(0),
            has_locks: AtomicBool::new(false),
            locks: Mutex::default(),
            context,
        }
    }
}

impl<T: ?Sized> Identity<T> {
    /// Keeps this owner open until one more [`close`](Self::close). Returns false if it is closed.
    pub(crate) fn keep_open(&self) -> bool {
        let one_more = |open: usize| (open > 0).then_some(open + 1);
        self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok()
    }

    /// Ends the re-entrancy of this owner, unless it is kept open.
    pub(crate) fn close(&self) {
        self.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<T> Deref for Identity<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.context
    }
}

impl WeakOwner {
    pub(crate) fn upgrade(&self) -> Option<Owner> {
        self.0.upgrade().map(Owner)
    }
}

impl Default for WeakOwner {
    fn default() -> Self {
        Self(Weak::<Identity<()>>::new())
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl PartialEq for Owner {
    fn eq(&self, other: &Self) -> bool {
        // Without their vtables, of which one type may have several.
        ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }
}

impl Eq for Owner {}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owner").field(&Arc::as_ptr(&self.0)).finish()
    }
}
