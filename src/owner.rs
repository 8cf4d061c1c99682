//! Who asks, within one process: what makes a lock re-entrant.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

tokio::task_local! {
    /// Whose work this task does at this moment.
    pub(crate) static CURRENT: Owner;
}

/// An identity under which locks are re-entrant: a request, a job. In Java it is the thread.
///
/// An owner that asks for a key it holds has it once more, at once and without asking the store; the lock ends when its last guard does.
/// A [`LockLayer`](crate::LockLayer) gives each request an owner, puts it in the extensions of the request, and runs the
/// handler as it, so that in there `locks.lock(key)` re-enters without more ado. Code without a request says who it is:
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
/// Branches joined inside of the layer that holds a lock are one owner: they do not exclude each other. A route that is called twice for one
/// request from outside of its layer (a retry, a hedge) is called by two. A spawned task is nobody until it is
/// told whom it works for; once the response of that request is out, nothing re-enters as its owner, and the
/// task waits like a stranger. An owner never leaves its process.
///
/// # Spawned tasks
///
/// A task that a handler spawns has no owner. If it asks for a key that its own request holds, and the
/// handler awaits it, each would wait for the other. Such a call fails at once with
/// [`LockError::WouldDeadlock`](crate::LockError::WouldDeadlock). There are two ways out:
///
/// ```
/// # use tower_lock::{LockError, LockManager, Owner};
/// # async fn handler(locks: LockManager) -> Result<(), Box<dyn std::error::Error>> {
/// // The task works for the request, and shares its lock:
/// let owner = Owner::current().unwrap_or_else(Owner::new);
/// let shared = locks.clone();
/// tokio::spawn(async move { shared.lock(("account", 7)).owner(&owner).await?.release().await?; Ok::<_, LockError>(()) })
///     .await??;
/// // The task is somebody else, and waits until the request has ended:
/// tokio::spawn(async move { locks.lock(("account", 7)).owner(&Owner::new()).await });
/// # Ok(())
/// # }
/// ```
///
/// It is an error and no re-entry, because a task that re-enters without being asked runs beside the
/// handler under one lock. It is detected by the [`LockManager`](crate::LockManager) that was cloned in the handler,
/// or extracted with `State`; a handle in a `static` or behind an `Arc` of the application is not, and
/// the call waits.
#[derive(Clone)]
pub struct Owner(pub(crate) Arc<Identity>);

pub(crate) struct Identity {
    /// What it stood for is over.
    is_closed: AtomicBool,
    /// How many of its calls wait in some line of this process.
    pub(crate) waiting: AtomicUsize,
}

impl Owner {
    /// Somebody new.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each one is another")]
    pub fn new() -> Self {
        Self(Arc::new(Identity { is_closed: AtomicBool::new(false), waiting: AtomicUsize::new(0) }))
    }

    /// Does this work as this owner: calls in it need not say who they are. Tasks spawned in there are not included.
    ///
    /// It changes who asks, and nothing else: calls within a request inherit the settings of its route
    /// in here, too.
    pub fn scope<F: Future>(&self, work: F) -> impl Future<Output = F::Output> + use<F> {
        CURRENT.scope(self.clone(), work)
    }

    /// The one whose [`scope`](Self::scope) this is.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Self::clone).ok()
    }

    /// From now on it re-enters nothing.
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
