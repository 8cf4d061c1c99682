//! The context of one request at one layer.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{AcqRel, Acquire, Release},
        },
    },
    time::Duration,
};

use http::{Extensions, Method, Response, request::Parts};
use tokio::task::AbortHandle;

use super::{
    client::ClientId,
    config::LayerParams,
    disconnect::{DetachedHandlers, DetachedPermit},
    holder_limit::Views,
    prefer,
    request_lock::{AbortSignals, RequestLock},
    shares::{RouteId, Share, Shares},
};
use crate::{
    body::{
        budget::{BodyBudget, Reservation},
        reader::BodyReader,
        request_body::{BodyObserver, RequestBody},
    },
    error::LockLost,
    key_source::{HeldView, KeyRejection},
    limits::MAX_KEYS_OF_WAITERS,
    lock::{Driver, HeldLock, HeldLocks, HeldPermit, RequestInfo, RequestScope},
    owner::{Identity, Owner},
    policy::LockPolicy,
    rejection::{OnReject, RejectionBody},
    sync::Mutex,
    telemetry::route::Route,
};

/// One request at one layer, shared by the layer, its future, the handler and the extractors.
/// Stored in the extensions of the request: inside its `HeldLock`, or alone if no lock is held.
#[derive(Clone)]
pub(crate) struct RequestContext(Arc<Identity<Inner>>);

struct Inner {
    driver: Arc<Driver>,
    params: Arc<LayerParams>,
    /// The route, as far as it was known when the request reached this layer.
    route: Route,
    /// The client that a handler without its client is counted for.
    client: Option<ClientId>,
    /// `None`: this context is the owner.
    other_owner: Option<Owner>,
    /// The wait that the client chose.
    client_wait: Option<Duration>,
    /// Whether that choice was used.
    is_wait_applied: AtomicBool,
    /// The next outer layer.
    outer: Option<RequestContext>,
    /// An outer layer holds a lock: it decides what a disconnect does.
    is_inner: bool,
    /// The handler was called.
    has_started: AtomicBool,
    /// It has not returned yet.
    is_running: AtomicBool,
    /// The client has disconnected, and the handler finishes without it.
    is_detached: AtomicBool,
    /// The end of the request body has not been read.
    is_body_incomplete: AtomicBool,
    /// The number of lock requests in here that wait.
    waiting: AtomicUsize,
    /// The number of locks that are held here, with that of the layer.
    held: AtomicUsize,
    /// The locks that extractors acquired. `None`: the handler has returned, and no lock is added.
    extra_locks: Mutex<Option<Vec<RequestLock>>>,
}

/// The state of the HTTP side that all layers of one manager share.
#[derive(Debug)]
struct ManagerState {
    body_budget: Arc<BodyBudget>,
    detached: DetachedHandlers,
    /// The keys that requests for several keys may hold while they wait for another one.
    keys_of_waiters: Arc<Shares>,
}

/// Counts a lock request that waits, until it is dropped.
pub(crate) struct WaitingGuard<'a>(&'a RequestContext);

impl RequestContext {
    /// Creates the context. Also returns whether it keeps its owner open, until
    /// [`close_owner`](Self::close_owner).
    pub(super) fn new(driver: &Arc<Driver>, params: Arc<LayerParams>, head: &Parts) -> (Self, bool) {
        let extensions = &head.extensions;
        let found = Self::of(extensions);
        let known = extensions.get::<Owner>().cloned().or_else(|| found.as_ref().map(Self::owner));
        let known = known.filter(|owner| !owner.is_closed());
        // A copy of the extensions of a finished request is ignored, and not kept.
        let outer = found.filter(|context| !context.is_closed());
        let is_inner = outer.as_ref().is_some_and(|outer| outer.0.is_inner || outer.holds_lock());
        let (other_owner, keeps_open) = match (known, &outer) {
            (Some(owner), Some(outer)) if outer.is_owned_by(&owner) && is_inner => {
                let keeps_open = owner.keep_open();
                (Some(owner), keeps_open)
            }
            // A layer that holds no lock has nothing to re-enter. And the inner service may be
            // called twice (a retry, while the first call finishes detached): the second call must
            // not re-enter the locks of the first one.
            (Some(owner), Some(outer)) if outer.is_owned_by(&owner) => (None, true),
            // The owner was set by other code, which also ends its lifetime.
            (Some(owner), _) => (Some(owner), false),
            (None, _) => (None, true),
        };
        let context = Self(Arc::new(Identity::new(Inner {
            client_wait: params.policy.client_wait_limit().and_then(|max| prefer::requested_wait(&head.headers, max)),
            is_wait_applied: AtomicBool::default(),
            other_owner,
            is_inner,
            outer,
            route: Route::from_extensions(extensions, params.name),
            client: ClientId::of(extensions),
            driver: Arc::clone(driver),
            params,
            has_started: AtomicBool::default(),
            is_running: AtomicBool::default(),
            is_detached: AtomicBool::default(),
            is_body_incomplete: AtomicBool::default(),
            waiting: AtomicUsize::default(),
            held: AtomicUsize::default(),
            extra_locks: Mutex::new(Some(Vec::new())),
        })));
        (context, keeps_open)
    }

    /// The context of the innermost layer around this request.
    pub(crate) fn of(extensions: &Extensions) -> Option<Self> {
        let innermost = || extensions.get::<HeldLocks>()?.iter().next();
        let of_permit = || extensions.get().map(HeldPermit::lock);
        let of_lock = extensions.get().or_else(innermost).or_else(of_permit).and_then(|lock: &HeldLock| {
            // A view that the application has inserted: its handler runs in the innermost layer.
            lock.request().cloned().or_else(RequestScope::current)
        });
        of_lock.and_then(RequestScope::downcast).map(Self).or_else(|| extensions.get().cloned())
    }

    /// Inserts this context into the extensions for the handler of a layer that holds no lock.
    pub(crate) fn insert_into(&self, extensions: &mut Extensions) {
        self.insert_owner(extensions);
        // Inside of the views, because each extension costs an allocation.
        let in_request = |lock: &HeldLock| lock.clone().in_request(self.request_scope());
        if let Some(lock) = extensions.get_mut::<HeldLock>() {
            *lock = in_request(lock);
        } else if let Some(locks) = extensions.get_mut::<HeldLocks>() {
            *locks = HeldLocks::new(locks.iter().map(in_request));
        } else if extensions.get::<HeldPermit>().is_none() {
            extensions.insert(self.clone());
        }
        if let Some(permit) = extensions.get_mut::<HeldPermit>() {
            *permit = HeldPermit::new(in_request(permit.lock()));
        }
    }

    /// Inserts this context into the extensions for the handler, with the lock of its layer.
    pub(super) fn insert_held<V: HeldView>(&self, lock: &RequestLock, views: Views, extensions: &mut Extensions) {
        match views {
            Views::Lock => self.insert_owner(extensions),
            // Each view has the context of the innermost layer, also that of an outer lock.
            Views::Permit | Views::Both => {
                extensions.insert(HeldPermit::new(self.view(lock)));
                self.insert_into(extensions);
            }
        }
        if views != Views::Permit {
            self.view::<V>(lock).insert_into(extensions);
        }
    }

    /// The view of a lock of this request, for the layers and extractors further in.
    pub(crate) fn view<V: HeldView>(&self, lock: &RequestLock) -> V {
        V::of(lock.views().map(|view| view.in_request(self.request_scope())))
    }

    fn insert_owner(&self, extensions: &mut Extensions) {
        if let Some(owner) = extensions.get_mut::<Owner>()
            && !self.is_owned_by(owner)
        {
            *owner = self.owner();
        }
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.0.driver
    }

    pub(super) fn owner(&self) -> Owner {
        Arc::clone(&self.0).owner()
    }

    fn is_owned_by(&self, owner: &Owner) -> bool {
        match &self.0.other_owner {
            Some(other) => other == owner,
            None => owner.is(&self.0),
        }
    }

    /// Ends the part of this layer in the lifetime of the owner.
    pub(super) fn close_owner(&self) {
        match &self.0.other_owner {
            Some(owner) => owner.close(),
            None => self.0.close(),
        }
    }

    /// The route of the innermost layer around this request that holds a lock.
    pub(super) fn holding_route(&self) -> &str {
        self.self_and_outer().find(|context| context.holds_lock()).unwrap_or(self).0.route.as_str()
    }

    /// The receiver of the progress of the request body.
    pub(super) fn body_observer(&self) -> Arc<dyn BodyObserver> {
        Arc::clone(&self.0) as _
    }

    /// The request whose owner and settings the calls of the handler inherit.
    pub(crate) fn request_scope(&self) -> RequestScope {
        RequestScope::new(Arc::clone(&self.0) as _)
    }

    /// The route, as far as it was known when the request reached this layer.
    pub(crate) fn known_route(&self) -> &Route {
        &self.0.route
    }

    pub(crate) fn policy(&self) -> &LockPolicy {
        &self.0.params.policy
    }

    pub(super) fn params(&self) -> &LayerParams {
        &self.0.params
    }

    pub(crate) fn on_reject(&self) -> &OnReject {
        &self.0.params.on_reject
    }

    /// The response to a request without a key.
    pub(crate) fn invalid_key(&self, route: &Route, why: impl Into<KeyRejection>) -> Response<RejectionBody> {
        why.into().into_response(route, self.on_reject())
    }

    /// The route, as far as it is known now.
    #[cfg(feature = "axum")]
    pub(crate) fn route(&self, extensions: &Extensions) -> Route {
        Route::from_extensions(extensions, self.0.params.name)
    }

    // --- before a lock is acquired

    /// Counts a lock request that waits, here and at each outer layer.
    pub(crate) fn start_waiting(&self) -> WaitingGuard<'_> {
        for context in self.self_and_outer() {
            context.0.waiting.fetch_add(1, AcqRel);
        }
        WaitingGuard(self)
    }

    /// Whether the body is read before the lock is acquired. A `CONNECT` request is followed by a
    /// tunnel, which does not end.
    pub(crate) fn buffers_body(&self, method: &Method) -> bool {
        self.0.params.policy.buffers_request() && method != Method::CONNECT
    }

    /// A reader of the body of the request, within the budget of the manager.
    pub(crate) fn body_reader<'a>(
        &'a self,
        body: &'a mut RequestBody,
        reservation: &'a mut Option<Reservation>,
    ) -> BodyReader<'a> {
        BodyReader { body, reservation, budget: &ManagerState::of(&self.0.driver).body_budget, policy: self.policy() }
    }

    /// The wait of a request with this policy. The choice of the client wins.
    pub(super) fn wait(&self, policy: &LockPolicy) -> Duration {
        self.0.client_wait.unwrap_or_else(|| policy.request_wait())
    }

    pub(super) fn set_wait_applied(&self) {
        self.0.is_wait_applied.store(self.0.client_wait.is_some(), Release);
    }

    /// The wait that the client chose, if it was used.
    pub(super) fn applied_wait(&self) -> Option<Duration> {
        self.0.client_wait.filter(|_| self.0.is_wait_applied.load(Acquire))
    }

    // --- what is held here

    /// Counts the lock of the layer.
    pub(super) fn count_lock(&self) {
        self.0.held.fetch_add(1, AcqRel);
    }

    /// Whether a lock is held here.
    pub(super) fn holds_lock(&self) -> bool {
        self.0.holds_lock()
    }

    /// Keeps a lock until the end of the response. Returns it if the handler has returned.
    #[cfg_attr(not(feature = "axum"), expect(dead_code, reason = "used by extractors"))]
    pub(crate) fn keep(&self, lock: RequestLock) -> Result<(), RequestLock> {
        let mut extra = self.0.extra_locks.lock();
        let Some(locks) = &mut *extra else { return Err(lock) };
        locks.push(lock);
        self.count_lock();
        Ok(())
    }

    fn is_closed(&self) -> bool {
        self.0.extra_locks.lock().is_none()
    }

    /// Closes the context to further locks. The caller releases the locks that were kept.
    pub(super) fn close(&self) -> Vec<RequestLock> {
        self.0.extra_locks.lock().take().unwrap_or_default()
    }

    /// Ends the time in which a slow client is aborted: no lock is held here.
    pub(super) fn clear_lock_count(&self) {
        self.0.held.store(0, Release);
    }

    /// The reason to abort the handler because of a lock that was kept here, beyond those of the
    /// layer.
    pub(super) fn abort_reason(&self, of_layer: usize) -> Option<LockLost> {
        if self.0.held.load(Acquire) <= of_layer {
            return None;
        }
        self.0.extra_locks.lock().iter().flatten().find_map(RequestLock::abort_reason)
    }

    /// Adds the signals of locks that were kept since the last call. `of_layer` signals belong to
    /// the layer.
    pub(super) fn add_abort_signals(&self, signals: &mut AbortSignals, of_layer: usize) {
        if self.0.held.load(Acquire) > of_layer {
            let extra = self.0.extra_locks.lock();
            let locks = extra.iter().flatten();
            signals.extend(locks.skip(signals.len() - of_layer).map(RequestLock::abort_signal));
        }
    }

    // --- after a disconnect

    /// Sets whether the handler runs or has returned.
    pub(super) fn set_running(&self, is_running: bool) {
        self.0.has_started.fetch_or(is_running, AcqRel);
        self.0.is_running.store(is_running, Release);
    }

    /// Whether the handler was called.
    pub(super) fn handler_started(&self) -> bool {
        self.0.has_started.load(Acquire)
    }

    /// The permission to finish the handler after a disconnect, if it runs, holds a lock, and is to
    /// finish.
    pub(super) fn detach_permit(&self) -> Option<DetachedPermit> {
        let Inner { driver, params, is_inner, is_running, is_body_incomplete, waiting, client, .. } = &**self.0;
        let is_at_work = is_running.load(Acquire) && self.holds_lock() && waiting.load(Acquire) == 0;
        // An outer lock is released by its own layer: that layer decides for all inner ones.
        let is_to_finish = is_at_work && !is_inner && params.policy.finishes_after_disconnect();
        // The handler would wait for the rest of a request whose client has disconnected.
        if !is_to_finish || is_body_incomplete.load(Acquire) {
            return None;
        }
        let handlers = &ManagerState::of(driver).detached;
        let permit = DetachedPermit::acquire(handlers, driver, &self.route_id(), client.clone());
        self.0.is_detached.store(permit.is_some(), Release);
        permit
    }

    /// The permission to hold so many keys during a wait for another one.
    pub(super) fn share_of_keys(&self, keys: usize) -> Option<Share> {
        ManagerState::of(&self.0.driver).keys_of_waiters.take(self.route_id(), self.0.client.clone(), keys)
    }

    /// Whether the handler finishes without its client.
    pub(super) fn is_detached(&self) -> bool {
        self.0.is_detached.load(Acquire)
    }

    /// A layer may serve several routes, and a route may have several layers.
    fn route_id(&self) -> RouteId {
        let Inner { params, route, .. } = &**self.0;
        RouteId { layer: Arc::as_ptr(&params.hold_estimate).addr(), name: route.as_str().to_owned() }
    }

    /// Spawns a task. Without a runtime, drops it.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
        self.0.driver.spawn(task)
    }

    fn self_and_outer(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |context| context.0.outer.as_ref())
    }
}

impl ManagerState {
    fn of(driver: &Driver) -> &Self {
        driver.extension(|| Self {
            body_budget: Arc::default(),
            detached: DetachedHandlers::new(driver.max_detached),
            keys_of_waiters: Shares::new(MAX_KEYS_OF_WAITERS),
        })
    }
}

impl RequestInfo for Identity<Inner> {
    fn owner(self: Arc<Self>) -> Owner {
        self.other_owner.clone().unwrap_or_else(|| Owner::of(self))
    }

    fn call_policy(&self) -> LockPolicy {
        self.params.handler_policy.for_handler(self.client_wait)
    }

    fn route(&self) -> &str {
        self.route.as_str()
    }
}

impl BodyObserver for Identity<Inner> {
    fn set_incomplete(&self, is_incomplete: bool) {
        self.is_body_incomplete.store(is_incomplete, Release);
    }

    fn holds_lock(&self) -> bool {
        self.held.load(Acquire) > 0
    }
}

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        for context in self.0.self_and_outer() {
            context.0.waiting.fetch_sub(1, AcqRel);
        }
    }
}
