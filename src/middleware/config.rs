//! The configuration of a layer, and the configuration that it inherits.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
};

use http::{Extensions, request::Parts};

use crate::{
    lock::LockManager,
    policy::LockPolicy,
    rejection::{OnReject, retry_after::HoldEstimate},
    telemetry::{metrics, notice, route::Route},
};

pub(crate) type Skip = dyn Fn(&Parts) -> bool + Send + Sync;

/// Shared by a layer and all its services.
#[derive(Clone)]
pub(crate) struct LayerConfig<K> {
    pub(crate) route: RouteConfig,
    pub(crate) key: K,
    pub(crate) skip: Option<Arc<Skip>>,
    pub(crate) without_key: Arc<WithoutKey>,
}

/// Requests in a row for which the key function returned `None`.
#[derive(Debug, Default)]
pub(crate) struct WithoutKey {
    in_a_row: AtomicU32,
    has_warned: AtomicBool,
}

/// The configuration that the layers of routes have in common.
pub(crate) struct RouteConfig {
    pub(crate) locks: LockManager,
    /// The settings of the route. Settings that it lacks are inherited per request.
    pub(crate) policy: LockPolicy,
    pub(crate) on_reject: OnReject,
    pub(crate) name: Option<&'static str>,
    pub(crate) hold_estimate: Arc<HoldEstimate>,
    params: PerOuter<Arc<LayerParams>>,
}

/// A value that depends on the configuration of the outer layers. Requests with the same one as the
/// first request share its value.
pub(crate) struct PerOuter<T>(OnceLock<(Option<Arc<InheritedConfig>>, T)>);

/// The parameters with which a layer acquires locks.
pub(crate) struct LayerParams {
    /// The settings of the lock of the layer.
    pub(crate) policy: LockPolicy,
    /// Those of the locks that the handler acquires.
    pub(crate) handler_policy: LockPolicy,
    pub(crate) on_reject: OnReject,
    pub(crate) hold_estimate: Arc<HoldEstimate>,
    pub(crate) name: Option<&'static str>,
}

/// The configuration of the outer layers. It is in the extensions of the request, in an `Arc`.
#[derive(Clone, Debug)]
pub(crate) struct InheritedConfig {
    pub(crate) layer_policy: LockPolicy,
    pub(crate) manager_policy: LockPolicy,
    pub(crate) on_reject: OnReject,
}

impl WithoutKey {
    /// After so many requests in a row the key function is probably wrong.
    const SUSPICIOUS: u32 = 100;

    /// Counts a request. A key function that never returns a key leaves one warning.
    pub(crate) fn count(&self, has_key: bool, route: &Route) {
        if has_key {
            // Read first: other threads read it, too.
            if self.in_a_row.load(Relaxed) > 0 {
                self.in_a_row.store(0, Relaxed);
            }
        } else if self.in_a_row.fetch_add(1, Relaxed) + 1 == Self::SUSPICIOUS && !self.has_warned.swap(true, Relaxed) {
            notice::without_key(route, Self::SUSPICIOUS);
        }
    }
}

impl RouteConfig {
    pub(crate) fn new(locks: &LockManager, policy: LockPolicy) -> Self {
        Self {
            locks: locks.clone(),
            policy,
            on_reject: OnReject::default(),
            name: None,
            hold_estimate: Arc::default(),
            params: PerOuter::default(),
        }
    }

    /// The parameters of a request. The locks that its handler acquires have the settings of
    /// `handler`, and inherit the others.
    pub(crate) fn params(&self, head: &Parts, handler: LockPolicy) -> Arc<LayerParams> {
        self.params.get_or_create(&head.extensions, |outside| {
            // With the first request, and not for each: a layer usually has one route.
            metrics::register_route(Route::from_extensions(&head.extensions, self.name).as_str());
            Arc::new(LayerParams {
                policy: InheritedConfig::policy(outside, self.policy, &self.locks),
                handler_policy: InheritedConfig::policy(outside, handler, &self.locks),
                on_reject: self.on_reject.or(outside.map(|outside| &outside.on_reject)).clone(),
                hold_estimate: Arc::clone(&self.hold_estimate),
                name: self.name,
            })
        })
    }
}

impl<T: Clone> PerOuter<T> {
    /// The value of a request with these extensions.
    pub(crate) fn get_or_create(
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

/// A copy belongs to another configuration.
impl<T> Clone for PerOuter<T> {
    fn clone(&self) -> Self {
        Self::default()
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
    pub(crate) fn merged_with(&self, outer: Option<&Self>) -> Self {
        let Some(outer) = outer else { return self.clone() };
        Self {
            layer_policy: self.layer_policy.or(outer.layer_policy),
            manager_policy: self.manager_policy.or(outer.manager_policy),
            on_reject: self.on_reject.or(Some(&outer.on_reject)).clone(),
        }
    }

    /// The settings of a request: those of the route, else of the nearest outer layer, else of the
    /// manager.
    pub(crate) fn policy(outside: Option<&Self>, route: LockPolicy, locks: &LockManager) -> LockPolicy {
        match outside {
            Some(Self { layer_policy: layers, manager_policy: of_locks, .. }) => {
                route.or(*layers).or(*of_locks).or(locks.policy())
            }
            None => route.or(locks.policy()),
        }
    }
}

/// A layer that is changed after it was cloned belongs to another route: its estimate starts anew.
impl Clone for RouteConfig {
    fn clone(&self) -> Self {
        let Self { locks, policy, on_reject, name, .. } = self;
        Self { on_reject: on_reject.clone(), name: *name, ..Self::new(locks, *policy) }
    }
}
