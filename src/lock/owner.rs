//! Who asks, within one process: what makes a lock re-entrant.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use super::policy::Policy;

tokio::task_local! {
    /// Whose work this task does at this moment.
    static CURRENT: Owner;
    /// For which request this task works at this moment.
    static REQUEST: InRequest;
}

/// An identity under which locks are re-entrant: a request, a job. In Java it is the thread.
///
/// An owner that asks for a key it holds has it once more, at once and without asking the store; the lock ends when its last guard does.
/// A [`LockLayer`](crate::LockLayer) gives each request an owner, puts it in the extensions of the request, and runs the
/// handler as it, so that in there `locks.lock(key)` re-enters without more ado. Code without a request says who it is:
///
/// ```
/// # use tower_lock::{LockError, Locks, Owner};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), LockError> {
/// # let locks = Locks::in_memory();
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
/// [`LockError::HeldByParentRequest`](crate::LockError::HeldByParentRequest). There are two ways out:
///
/// ```
/// # use tower_lock::{LockError, Locks, Owner};
/// # async fn handler(locks: Locks) -> Result<(), Box<dyn std::error::Error>> {
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
/// handler under one lock. It is detected by the [`Locks`](crate::Locks) that was cloned in the handler,
/// or extracted with `State`; a handle in a `static` or behind an `Arc` of the application is not, and
/// the call waits.
#[derive(Clone)]
pub struct Owner(Arc<Identity>);

struct Identity {
    /// What it stood for is over.
    retired: AtomicBool,
    /// How many of its calls wait in some line of this process.
    pub(super) waiting: AtomicUsize,
}

impl Owner {
    /// Somebody new.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each one is another")]
    pub fn new() -> Self {
        Self(Arc::new(Identity { retired: AtomicBool::new(false), waiting: AtomicUsize::new(0) }))
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
    pub(crate) fn retire(&self) {
        self.0.retired.store(true, Ordering::Release);
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.0.retired.load(Ordering::Acquire)
    }

    pub(super) fn lines_up(&self) {
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn leaves_line(&self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn waits(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) > 0
    }
}

/// What the calls of a handler have from its request.
#[derive(Clone)]
pub(crate) struct InRequest {
    owner: Owner,
    policy: Policy,
}

impl InRequest {
    pub(crate) fn new(owner: Owner, policy: Policy) -> Self {
        Self { owner, policy }
    }

    /// The settings of the request that this task works for.
    pub(super) fn policy() -> Option<Policy> {
        REQUEST.try_with(|request| request.policy).ok()
    }

    /// Does this work for this request, and as its owner.
    pub(crate) fn scope<F: Future>(self, work: F) -> impl Future<Output = F::Output> + use<F> {
        let owner = self.owner.clone();
        REQUEST.scope(self, CURRENT.scope(owner, work))
    }

    /// The same for what does not wait.
    pub(crate) fn scope_sync<T>(self, work: impl FnOnce() -> T) -> T {
        let owner = self.owner.clone();
        REQUEST.sync_scope(self, || CURRENT.sync_scope(owner, work))
    }
}

/// The owner of the request in which a handle was cloned. It does not keep it.
#[derive(Clone, Debug, Default)]
pub(super) struct Parent(Weak<Identity>);

impl Parent {
    /// The request that this task works for, if it works for one.
    pub(super) fn here() -> Option<Self> {
        REQUEST.try_with(|request| Self(Arc::downgrade(&request.owner.0))).ok()
    }

    /// `None`: the request is over, or there never was one.
    pub(super) fn get(&self) -> Option<Owner> {
        self.0.upgrade().map(Owner).filter(|owner| !owner.is_retired())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_does_not_keep_the_request_that_it_was_cloned_in() {
        let owner = Owner::new();
        let clone_here = || InRequest::new(owner.clone(), Policy::new()).scope_sync(Parent::here);
        let parent = clone_here().expect("in a request");
        assert_eq!(parent.get(), Some(owner.clone()));
        assert_eq!((Arc::strong_count(&owner.0), Arc::weak_count(&owner.0)), (1, 1));
        owner.retire();
        assert_eq!(parent.get(), None, "its response is out");
        let parent = clone_here().expect("in a request");
        drop(owner);
        assert_eq!(parent.get(), None);
        assert!(Parent::here().is_none(), "in no request");
    }
}
