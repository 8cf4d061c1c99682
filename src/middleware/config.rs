//! The configuration of a layer, and the configuration that it inherits.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use http::{Extensions, request::Parts};

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
    pub(super) params: PerOuter<Arc<LayerParams>>,
}

/// A value that depends on the configuration of the outer layers. Requests with the same one as the
/// first request share its value.
pub(super) struct PerOuter<T>(OnceLock<(Option<Arc<InheritedConfig>>, T)>);

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

/// The configuration of the outer layers. It is in the extensions of the request, in an `Arc`.
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
        self.params.get_or_create(&head.extensions, |outside| {
            let policy = InheritedConfig::policy(outside, self.policy, &self.locks);
            Arc::new(LayerParams {
                policy,
                handler_policy: policy,
                on_reject: self.on_reject.or(outside.map(InheritedConfig::on_reject)).clone(),
                hold_estimate: Arc::clone(&self.hold_estimate),
                name: self.name,
            })
        })
    }
}

impl<T: Clone> PerOuter<T> {
    /// The value of a request with these extensions.
    pub(super) fn get_or_create(
        &self,
        extensions: &Extensions,
        create: impl FnOnce(Option<&InheritedConfig>) -> T,
    ) -> T {
        let outer = extensions.get::<Arc<InheritedConfig>>();
        match self.0.get() {
            Some((first, value)) if first.as_ref().map(Arc::as_ptr) == outer.map(Arc::as_ptr) => value.clone(),
            _ => {
                let value = create(outer.map(Arc::as_ref));
                // Only the first one is kept.
                let _ = self.0.set((outer.cloned(), value.clone()));
                value
            }
        }
    }
}

impl<T> Default for PerOuter<T> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<T> fmt::Debug for PerOuter<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerOuter").finish_non_exhaustive()
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
            params: PerOuter::default(),
        }
    }
}
