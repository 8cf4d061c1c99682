//! The configuration of a layer, and the configuration that it inherits.

use std::sync::Arc;

use http::request::Parts;

use crate::{
    lock::{Driver, LockManager},
    policy::LockPolicy,
    rejection::{OnReject, retry_after::HoldEstimate},
};

pub(super) type Skip = dyn Fn(&Parts) -> bool + Send + Sync;

/// Shared by a layer and all its services.
pub(super) struct LayerConfig<K> {
    pub(super) locks: LockManager,
    pub(super) key: K,
    /// The settings of the route. Settings that it lacks are inherited per request.
    pub(super) policy: LockPolicy,
    pub(super) skip: Option<Arc<Skip>>,
    pub(super) on_reject: OnReject,
    pub(super) name: Option<&'static str>,
    pub(super) hold_estimate: Arc<HoldEstimate>,
}

/// The parameters with which a layer acquires locks.
#[derive(Clone)]
pub(super) struct LayerParams {
    pub(super) driver: Arc<Driver>,
    /// The settings of the lock of the layer.
    pub(super) policy: LockPolicy,
    /// Those of the locks that the handler acquires.
    pub(super) handler_policy: LockPolicy,
    pub(super) on_reject: OnReject,
    pub(super) hold_estimate: Arc<HoldEstimate>,
    pub(super) name: Option<&'static str>,
}

/// The configuration of the outer layers. It is in the extensions of the request.
#[derive(Clone, Debug)]
pub(super) struct InheritedConfig {
    pub(super) layer_policy: LockPolicy,
    pub(super) manager_policy: LockPolicy,
    pub(super) on_reject: OnReject,
}

impl<K> LayerConfig<K> {
    pub(super) fn skips(&self, head: &Parts) -> bool {
        self.skip.as_ref().is_some_and(|skip| skip(head))
    }

    pub(super) fn params(&self, head: &Parts) -> LayerParams {
        let outside = head.extensions.get();
        let policy = InheritedConfig::policy(outside, self.policy, &self.locks);
        LayerParams {
            driver: Arc::clone(self.locks.driver()),
            policy,
            handler_policy: policy,
            on_reject: self.on_reject.or(outside.map(InheritedConfig::on_reject)).clone(),
            hold_estimate: Arc::clone(&self.hold_estimate),
            name: self.name,
        }
    }
}

impl InheritedConfig {
    /// The inner layer wins.
    pub(super) fn merged_with(&self, outer: Option<&Self>) -> Self {
        let Some(outer) = outer else { return self.clone() };
        Self {
            layer_policy: self.layer_policy.or(outer.layer_policy),
            manager_policy: self.manager_policy.or(outer.manager_policy),
            on_reject: self.on_reject.or(Some(&outer.on_reject)).clone(),
        }
    }

    /// The settings of a request: those of the route, else of the nearest outer layer, else of the
    /// manager.
    pub(super) fn policy(outside: Option<&Self>, route: LockPolicy, locks: &LockManager) -> LockPolicy {
        match outside {
            Some(Self { layer_policy: layers, manager_policy: of_locks, .. }) => {
                route.or(*layers).or(*of_locks).or(locks.policy())
            }
            None => route.or(locks.policy()),
        }
    }

    pub(super) fn on_reject(&self) -> &OnReject {
        &self.on_reject
    }
}

/// A layer that is changed after it was cloned belongs to another route: its estimate starts anew.
impl<K: Clone> Clone for LayerConfig<K> {
    fn clone(&self) -> Self {
        Self {
            locks: self.locks.clone(),
            key: self.key.clone(),
            policy: self.policy,
            skip: self.skip.clone(),
            on_reject: self.on_reject.clone(),
            name: self.name,
            hold_estimate: Arc::default(),
        }
    }
}
