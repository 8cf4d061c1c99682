//! The configuration of a layer, and the configuration that it inherits.

use std::sync::{Arc, OnceLock};

use http::request::Parts;

use crate::{
    lock::LockManager,
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
    pub(super) own_params: OwnParams,
}

/// The parameters of requests that inherit nothing from an outer layer: all of them share one
/// value, which the first one creates.
#[derive(Default)]
pub(super) struct OwnParams(OnceLock<Arc<LayerParams>>);

/// The parameters with which a layer acquires locks.
pub(super) struct LayerParams {
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

    pub(super) fn params(&self, head: &Parts) -> Arc<LayerParams> {
        self.own_params.or_inherited(head, |outside| {
            let policy = InheritedConfig::policy(outside, self.policy, &self.locks);
            LayerParams {
                policy,
                handler_policy: policy,
                on_reject: self.on_reject.or(outside.map(InheritedConfig::on_reject)).clone(),
                hold_estimate: Arc::clone(&self.hold_estimate),
                name: self.name,
            }
        })
    }
}

impl OwnParams {
    /// The parameters of this request.
    pub(super) fn or_inherited(
        &self,
        head: &Parts,
        create: impl FnOnce(Option<&InheritedConfig>) -> LayerParams,
    ) -> Arc<LayerParams> {
        match head.extensions.get() {
            None => Arc::clone(self.0.get_or_init(|| Arc::new(create(None)))),
            outside => Arc::new(create(outside)),
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
            own_params: OwnParams::default(),
        }
    }
}
