//! What the user said of one route.

use std::sync::Arc;

use http::request::Parts;

use crate::{
    lock::{Driver, LockManager},
    policy::LockPolicy,
    rejection::{OnReject, retry_after::UsualHold},
};

pub(super) type Skip = dyn Fn(&Parts) -> bool + Send + Sync;

/// What a layer and all its services share.
pub(super) struct Config<K> {
    pub(super) locks: LockManager,
    pub(super) key: K,
    /// What the route says; what it does not say is found with the request.
    pub(super) policy: LockPolicy,
    pub(super) skip: Option<Arc<Skip>>,
    pub(super) on_reject: OnReject,
    pub(super) name: Option<&'static str>,
    pub(super) usual_hold: Arc<UsualHold>,
}

/// How this layer takes locks.
#[derive(Clone)]
pub(super) struct Terms {
    pub(super) core: Arc<Driver>,
    pub(super) policy: LockPolicy,
    pub(super) on_reject: OnReject,
    pub(super) usual_hold: Arc<UsualHold>,
    pub(super) name: Option<&'static str>,
}

/// What the layers outside say: in the extensions of the request.
#[derive(Clone, Debug)]
pub(super) struct Outside {
    pub(super) layers: LockPolicy,
    pub(super) of_locks: LockPolicy,
    pub(super) on_reject: OnReject,
}

impl<K> Config<K> {
    pub(super) fn skips(&self, head: &Parts) -> bool {
        self.skip.as_ref().is_some_and(|skip| skip(head))
    }

    pub(super) fn terms(&self, head: &Parts) -> Terms {
        let outside = head.extensions.get();
        Terms {
            core: Arc::clone(self.locks.driver()),
            policy: Outside::policy(outside, self.policy, &self.locks),
            on_reject: self.on_reject.or(outside.map(Outside::on_reject)).clone(),
            usual_hold: Arc::clone(&self.usual_hold),
            name: self.name,
        }
    }
}

impl Outside {
    /// The nearest one wins.
    pub(super) fn over(&self, outer: Option<&Self>) -> Self {
        let Some(outer) = outer else { return self.clone() };
        Self {
            layers: self.layers.or(outer.layers),
            of_locks: self.of_locks.or(outer.of_locks),
            on_reject: self.on_reject.or(Some(&outer.on_reject)).clone(),
        }
    }

    /// What counts for a request: what the route sets, else the nearest layer outside, else the locks.
    pub(super) fn policy(outside: Option<&Self>, route: LockPolicy, locks: &LockManager) -> LockPolicy {
        match outside {
            Some(Self { layers, of_locks, .. }) => route.or(*layers).or(*of_locks).or(locks.policy()),
            None => route.or(locks.policy()),
        }
    }

    pub(super) fn on_reject(&self) -> &OnReject {
        &self.on_reject
    }
}

/// For a layer that is changed after it was cloned: it stands on another route, and has measured nothing there.
impl<K: Clone> Clone for Config<K> {
    fn clone(&self) -> Self {
        Self {
            locks: self.locks.clone(),
            key: self.key.clone(),
            policy: self.policy,
            skip: self.skip.clone(),
            on_reject: self.on_reject.clone(),
            name: self.name,
            usual_hold: Arc::default(),
        }
    }
}
