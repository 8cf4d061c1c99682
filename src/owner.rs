//! The identity that makes a lock re-entrant.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

tokio::task_local! {
    /// The owner of the work that this task does now.
    pub(crate) static CURRENT: Owner;
}

/// An identity under which locks are re-entrant, for example a request or a job.
///
/// If an owner acquires a key that it holds, it gets the same lock once more, at once and without a
/// store call. The lock is released with its last guard. A [`LockLayer`](crate::LockLayer) creates
/// an owner for each request, inserts it into the extensions of the request and runs the handler as
/// this owner, so that `locks.lock(key)` in the handler re-enters. Code without a request creates
/// an owner:
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
/// Futures that a handler joins have the same owner: they do not exclude each other. A request that
/// is sent twice from outside of the layer (a retry, a hedge) has two owners. An owner is closed
/// when the response of its request is complete; then it re-enters no lock, and its calls queue
/// like those of any other owner. An owner is known only in its process.
///
/// # Spawned tasks
///
/// A task that a handler spawns has no owner. If it waits for a key that the request of the handler
/// holds, and the handler awaits the task, each waits for the other. Such a call fails at once with
/// [`LockError::WouldDeadlock`](crate::LockError::WouldDeadlock). There are two solutions:
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
/// The call does not re-enter by itself, because the task would run concurrently with the handler
/// under one lock. The deadlock is detected by the [`LockManager`](crate::LockManager) that was
/// cloned in the handler or extracted with `State`. It is not detected by a handle in a `static` or
/// in an `Arc` of the application: there the call waits.
#[derive(Clone)]
pub struct Owner(pub(crate) Arc<Identity>);

pub(crate) struct Identity {
    /// The request or job has ended.
    is_closed: AtomicBool,
    /// The number of its requests in local queues.
    pub(crate) waiting: AtomicUsize,
}

impl Owner {
    /// Creates an owner that differs from all others.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each one is another")]
    pub fn new() -> Self {
        Self(Arc::new(Identity { is_closed: AtomicBool::new(false), waiting: AtomicUsize::new(0) }))
    }

    /// Runs a future as this owner: its calls re-enter the locks of this owner. Tasks that the
    /// future spawns are not included.
    ///
    /// Only the owner changes. Calls within a request still inherit the settings of its route.
    pub fn scope<F: Future>(&self, work: F) -> impl Future<Output = F::Output> + use<F> {
        CURRENT.scope(self.clone(), work)
    }

    /// The owner of the innermost [`scope`](Self::scope) that this code runs in.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Self::clone).ok()
    }

    /// Ends the re-entrancy of this owner.
    pub(crate) fn close(&self) {
        self.0.is_closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed.load(Ordering::Acquire)
    }

    pub(crate) fn enqueued(&self) {
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn dequeued(&self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) > 0
    }
}

impl PartialEq for Owner {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Owner {}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owner").field(&Arc::as_ptr(&self.0)).finish()
    }
}
