//! The request that a task works for: its owner, and the settings that its calls inherit.

use std::{
    future::Future,
    sync::{Arc, Weak},
};

use crate::{
    owner::{CURRENT, Identity, Owner},
    policy::LockPolicy,
};

tokio::task_local! {
    /// The request that this task works for.
    static REQUEST: RequestScope;
}

/// The owner and the settings that the calls of a handler inherit from its request.
#[derive(Clone)]
pub(crate) struct RequestScope {
    owner: Owner,
    policy: LockPolicy,
}

impl RequestScope {
    pub(crate) fn new(owner: Owner, policy: LockPolicy) -> Self {
        Self { owner, policy }
    }

    /// The settings of the request that this task works for.
    pub(super) fn policy() -> Option<LockPolicy> {
        REQUEST.try_with(|request| request.policy).ok()
    }

    /// Runs a future for this request and as its owner.
    pub(crate) fn scope<F: Future>(self, work: F) -> impl Future<Output = F::Output> + use<F> {
        let owner = self.owner.clone();
        REQUEST.scope(self, CURRENT.scope(owner, work))
    }

    /// Runs a function for this request and as its owner.
    pub(crate) fn scope_sync<T>(self, work: impl FnOnce() -> T) -> T {
        let owner = self.owner.clone();
        REQUEST.sync_scope(self, || CURRENT.sync_scope(owner, work))
    }
}

/// The owner of the request in which a handle was cloned. It does not keep the request alive.
#[derive(Clone, Debug, Default)]
pub(super) struct Parent(Weak<Identity>);

impl Parent {
    /// The request that this task works for, if it works for one.
    pub(super) fn here() -> Option<Self> {
        REQUEST.try_with(|request| Self(Arc::downgrade(&request.owner.0))).ok()
    }

    /// `None` if there is no request, or if it has ended.
    pub(super) fn get(&self) -> Option<Owner> {
        self.0.upgrade().map(Owner).filter(|owner| !owner.is_closed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guarantee: G12.
    #[test]
    fn handle_does_not_keep_its_request_alive() {
        let owner = Owner::new();
        let clone_here = || RequestScope::new(owner.clone(), LockPolicy::new()).scope_sync(Parent::here);
        let parent = clone_here().expect("in a request");
        assert_eq!(parent.get(), Some(owner.clone()));
        assert_eq!((Arc::strong_count(&owner.0), Arc::weak_count(&owner.0)), (1, 1));
        owner.close();
        assert_eq!(parent.get(), None, "its response is out");
        let parent = clone_here().expect("in a request");
        drop(owner);
        assert_eq!(parent.get(), None);
        assert!(Parent::here().is_none(), "in no request");
    }
}
