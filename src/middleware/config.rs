//! The configuration of a layer, and the configuration that it inherits.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
};

use http::{Extensions, request::Parts};

use super::holder_limit::HolderLimit;
use crate::{
    limits::MAX_KEYS_TOGETHER,
    lock::{LockManager, TicketTerms},
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
    pub(crate) limit: HolderLimit,
    pub(crate) tickets: Option<TicketTerms>,
    pub(crate) without_key: Arc<WithoutKey>,
}

/// Requests in a row for which the key function returned `None`.
#[derive(Debug, Default)]
pub(crate) struct WithoutKey {
    in_a_row: AtomicU32,
    has_warned: AtomicBool,
}

/// The configuration that all layers have in common.
#[derive(Debug)]
pub(crate) struct RouteConfig {
    pub(crate) locks: LockManager,
    /// The settings of the route. Settings that it lacks are inherited per request.
    pub(crate) policy: LockPolicy,
    pub(crate) on_reject: OnReject,
    pub(crate) name: Option<&'static str>,
    pub(crate) max_keys: usize,
    pub(crate) hold_estimate: Arc<HoldEstimate>,
    /// The parameters of the first request, and those of the outer layers that they depend on. Most
    /// requests share them.
    params: OnceLock<(Option<Arc<LayerParams>>, Arc<LayerParams>)>,
}

/// The parameters with which a layer acquires locks. Those of the nearest
/// [`LockManagerLayer`](super::LockManagerLayer) are in the extensions of the request, in an `Arc`.
#[derive(Debug)]
pub(crate) struct LayerParams {
    /// The settings of the lock of the layer.
    pub(crate) policy: LockPolicy,
    /// Those of the locks that the handler acquires.
    pub(crate) handler_policy: LockPolicy,
    pub(crate) on_reject: OnReject,
    pub(crate) hold_estimate: Arc<HoldEstimate>,
    pub(crate) name: Option<&'static str>,
    /// The most keys of a request.
    pub(crate) max_keys: usize,
    /// The settings of this layer and of the outer ones, without those of a manager.
    layer_policy: LockPolicy,
    /// Those of their managers.
    manager_policy: LockPolicy,
}

impl<K> LayerConfig<K> {
    /// A ticket has its key alone, and no newer request ends its work.
    #[track_caller]
    pub(super) fn check_limit(&self, limit: &HolderLimit, has_tickets: bool) {
        let is_newest = |limit: &HolderLimit| matches!(limit, HolderLimit::Newest(_));
        assert!(
            matches!(self.limit, HolderLimit::Alone) || is_newest(&self.limit) == is_newest(limit),
            "`newest_wins` is for keys with one holder, and not for `at_most`, `at_most_by` and `shared_for`"
        );
        assert!(
            !has_tickets || matches!(limit, HolderLimit::Alone),
            "`tickets` is for keys with one holder, and not for `at_most`, `at_most_by`, `shared_for` and `newest_wins`"
        );
    }
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
            max_keys: MAX_KEYS_TOGETHER,
            hold_estimate: Arc::default(),
            params: OnceLock::new(),
        }
    }

    /// Notes the settings of a layer for the console. They are final when it is put on a service.
    pub(crate) fn note_policy(&self) {
        self.locks.driver().note_policy(&self.policy.or(self.locks.policy()));
    }

    /// The parameters of a request at the layer of a route, whose handler has this policy.
    pub(crate) fn params(&self, head: &Parts, handler: LockPolicy) -> Arc<LayerParams> {
        self.shared(&head.extensions, |outer| {
            // With the first request, and not for each: a layer usually has one route.
            metrics::register_route(Route::from_extensions(&head.extensions, self.name).as_str());
            let params = self.own_params(outer);
            let outer_policy = outer.map_or(handler, |outer| handler.or(outer.layer_policy));
            LayerParams { handler_policy: outer_policy.or(params.manager_policy), ..params }
        })
    }

    /// The parameters of a request at a layer that provides its settings to others.
    pub(super) fn provided(&self, extensions: &Extensions) -> Arc<LayerParams> {
        self.shared(extensions, |outer| self.own_params(outer))
    }

    /// The settings of the layer. Its own are first, then those of outer layers, then those of its
    /// manager, then those of their managers.
    fn own_params(&self, outer: Option<&LayerParams>) -> LayerParams {
        let (own, locks) = (self.policy, self.locks.policy());
        let layer_policy = outer.map_or(own, |outer| own.or(outer.layer_policy));
        let manager_policy = outer.map_or(locks, |outer| locks.or(outer.manager_policy));
        let policy = layer_policy.or(manager_policy);
        self.locks.driver().note_policy(&policy);
        LayerParams {
            policy,
            handler_policy: policy,
            on_reject: self.on_reject.or(outer.map(|outer| &outer.on_reject)).clone(),
            hold_estimate: Arc::clone(&self.hold_estimate),
            name: self.name,
            max_keys: self.max_keys,
            layer_policy,
            manager_policy,
        }
    }

    /// The parameters of the first request, or new ones if the outer layers are others.
    fn shared(
        &self,
        extensions: &Extensions,
        create: impl FnOnce(Option<&LayerParams>) -> LayerParams,
    ) -> Arc<LayerParams> {
        let outer = extensions.get::<Arc<LayerParams>>();
        match self.params.get() {
            Some((first, params)) if first.as_ref().map(Arc::as_ptr) == outer.map(Arc::as_ptr) => Arc::clone(params),
            _ => {
                let params = Arc::new(create(outer.map(Arc::as_ref)));
                // Only the first one is kept.
                let _ = self.params.set((outer.cloned(), Arc::clone(&params)));
                params
            }
        }
    }
}

// A layer that is changed after it was cloned belongs to another route: its estimate and its
// parameters start anew.
impl Clone for RouteConfig {
    fn clone(&self) -> Self {
        let Self { locks, policy, on_reject, name, max_keys, .. } = self;
        Self { on_reject: on_reject.clone(), name: *name, max_keys: *max_keys, ..Self::new(locks, *policy) }
    }
}
