//! The request that a task works for: its owner, and the settings that its calls inherit.

use std::{any::Any, fmt, future::Future, sync::Arc};

use crate::{
    owner::{CURRENT, Owner, WeakOwner},
    policy::LockPolicy,
};

tokio::task_local! {
    /// The request that this task works for.
    static REQUEST: RequestScope;
}

/// The context of a request, from which the calls of its handler inherit.
pub(crate) trait RequestInfo: Any + Send + Sync {
    fn owner(self: Arc<Self>) -> Owner;

    /// The settings of the calls.
    fn call_policy(&self) -> LockPolicy;

    fn route(&self) -> &str;
}

/// A request whose owner and settings the calls of its handler inherit.
#[derive(Clone)]
pub(crate) struct RequestScope(Arc<dyn RequestInfo>);

impl RequestScope {
    pub(crate) fn new(request: Arc<dyn RequestInfo>) -> Self {
        Self(request)
    }

    /// The request that this task works for.
    pub(crate) fn current() -> Option<Self> {
        REQUEST.try_with(Self::clone).ok()
    }

    /// The context, if it is one of this type.
    pub(crate) fn downcast<T: RequestInfo>(self) -> Option<Arc<T>> {
        (self.0 as Arc<dyn Any + Send + Sync>).downcast().ok()
    }

    /// The settings of the request that this task works for.
    pub(super) fn policy() -> Option<LockPolicy> {
        REQUEST.try_with(|request| request.0.call_policy()).ok()
    }

    fn owner(&self) -> Owner {
        Arc::clone(&self.0).owner()
    }

    pub(super) fn route(&self) -> &str {
        self.0.route()
    }

    /// Runs a future for this request and as its owner.
    pub(crate) fn scope<F: Future>(self, work: F) -> impl Future<Output = F::Output> + use<F> {
        let owner = self.owner();
        REQUEST.scope(self, CURRENT.scope(owner, work))
    }

    /// Runs a function for this request and as its owner.
    pub(crate) fn scope_sync<T>(self, work: impl FnOnce() -> T) -> T {
        let owner = self.owner();
        REQUEST.sync_scope(self, || CURRENT.sync_scope(owner, work))
    }
}

impl fmt::Debug for RequestScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestScope").finish_non_exhaustive()
    }
}

/// The owner of the request in which a handle was cloned. It does not keep the request alive.
#[derive(Clone, Debug, Default)]
pub(super) struct Parent(WeakOwner);

impl Parent {
    /// The request that this task works for, if it works for one.
    pub(super) fn here() -> Option<Self> {
        REQUEST.try_with(|request| Self(request.owner().downgrade())).ok()
    }

    /// `None` if there is no request, or if it has ended.
    pub(super) fn get(&self) -> Option<Owner> {
        self.0.upgrade().filter(|owner| !owner.is_closed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::Identity;

    struct Request;

    impl RequestInfo for Identity<Request> {
        fn owner(self: Arc<Self>) -> Owner {
            Owner::of(self)
        }

        fn call_policy(&self) -> LockPolicy {
            LockPolicy::new()
        }

        fn route(&self) -> &str {
            "none"
        }
    }

    /// Guarantee: G12.
    #[test]
    fn handle_does_not_keep_its_request_alive() {
        let request = Arc::new(Identity::new(Request));
        let clone_here = || RequestScope::new(request.clone()).scope_sync(Parent::here);
        let parent = clone_here().expect("in a request");
        assert_eq!(parent.get(), Some(Owner::of(request.clone())));
        assert_eq!((Arc::strong_count(&request), Arc::weak_count(&request)), (1, 1));
        Owner::of(request.clone()).close();
        assert_eq!(parent.get(), None, "its response is out");
        let parent = clone_here().expect("in a request");
        drop(request);
        assert_eq!(parent.get(), None);
        assert!(Parent::here().is_none(), "in no request");
    }

    #[test]
    fn owner_is_closed_by_the_last_one_that_keeps_it_open() {
        let owner = Owner::new();
        assert!(owner.keep_open());
        owner.close();
        assert!(!owner.is_closed());
        owner.close();
        assert!(owner.is_closed() && !owner.keep_open() && owner.is_closed(), "it stays closed");
    }
}
