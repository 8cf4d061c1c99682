//! The context of one request at one layer.

use std::{
    future::Future,
    sync::{
        Arc, Weak,
        atomic::{
            AtomicBool, AtomicU8, AtomicUsize,
            Ordering::{AcqRel, Acquire, Release},
        },
    },
    time::Duration,
};

use http::{Extensions, HeaderMap, Method};
#[cfg(feature = "axum")]
use http::{Response, request::Parts};
use tokio::{task::AbortHandle, time::Instant};

use super::{
    abort::AbortSignals,
    config::LayerParams,
    connection::ClientConnection,
    disconnect::{DetachedPermit, RouteId},
    manager_state::ManagerState,
    owner_lifetime::OwnerLifetime,
    prefer,
    request_lock::RequestLock,
};
#[cfg(feature = "axum")]
use crate::body::{reader::BodyReader, request_body::RequestBodyHandle};
#[cfg(feature = "axum")]
use crate::key_source::KeyRejection;
#[cfg(feature = "axum")]
use crate::rejection::RejectionBody;
use crate::{
    body::{budget::Reservation, request_body::BodyObserver},
    error::LockLost,
    lock::{Claim, ClaimFuture, LockParams, RequestScope},
    lock_key::LockKey,
    owner::Owner,
    policy::LockPolicy,
    rejection::{OnReject, Rejection},
    store::Record,
    sync::Mutex,
    telemetry::{metrics::count_replay, route::Route, span::LockSpan},
};

/// One request at one layer, shared by the layer, its future, the handler and the extractors.
/// It is in the extensions of the request.
#[derive(Clone)]
pub(crate) struct RequestContext(Arc<Inner>);

struct Inner {
    params: LayerParams,
    /// The route, as far as it was known when the request reached this layer.
    route: Route,
    owner: Owner,
    /// Of the layer that created the owner.
    owner_lifetime: Weak<OwnerLifetime>,
    /// The wait that the client chose.
    client_wait: Option<Duration>,
    /// Whether that choice was used.
    is_wait_applied: AtomicBool,
    /// The next outer layer.
    outer: Option<RequestContext>,
    /// An outer layer holds a lock: it decides what a disconnect does.
    is_inner: bool,
    /// A [`HandlerPhase`].
    phase: AtomicU8,
    /// The client has disconnected, and the handler finishes without it.
    is_detached: AtomicBool,
    /// The end of the request body has not been read.
    is_body_incomplete: AtomicBool,
    /// The number of lock requests in here that wait.
    waiting: AtomicUsize,
    /// The number of locks that are held here, with that of the layer.
    held: AtomicUsize,
    extra_locks: Mutex<ExtraLocks>,
}

/// The phase of the handler.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq)]
enum HandlerPhase {
    NotStarted,
    Running,
    Ended,
}

/// The locks that extractors acquired.
#[derive(Default)]
struct ExtraLocks {
    /// The handler has returned: no lock is added.
    is_closed: bool,
    locks: Vec<RequestLock>,
}

/// The result of a [claim](RequestContext::claim).
pub(super) enum ClaimedLock {
    /// The key is held.
    Granted(RequestLock),
    /// The key has this record, and is not held.
    Recorded(Arc<Record>, LockSpan),
}

/// Counts a lock request that waits, until it is dropped.
pub(crate) struct WaitingGuard<'a>(&'a RequestContext);

impl RequestContext {
    pub(super) fn new(
        params: LayerParams,
        headers: &HeaderMap,
        extensions: &Extensions,
    ) -> (Self, Option<Arc<OwnerLifetime>>) {
        // A copy of the extensions of a finished request is ignored, and not kept.
        let outer = extensions.get::<Self>().filter(|context| !context.is_closed()).cloned();
        let is_inner = outer.as_ref().is_some_and(|outer| outer.0.is_inner || outer.holds_lock());
        let known = extensions.get::<Owner>().filter(|owner| !owner.is_closed()).cloned();
        let (owner, owner_lifetime) = match (known, &outer) {
            (Some(owner), Some(outer)) if outer.0.owner == owner && is_inner => {
                (owner, outer.0.owner_lifetime.upgrade())
            }
            // A layer that holds no lock has nothing to re-enter. And the inner service may be
            // called twice (a retry, while the first call finishes detached): the second call must
            // not re-enter the locks of the first one.
            (Some(owner), Some(outer)) if outer.0.owner == owner => OwnerLifetime::start(),
            // The owner was set by other code, which also ends its lifetime.
            (Some(owner), _) => (owner, None),
            (None, _) => OwnerLifetime::start(),
        };
        let context = Self(Arc::new(Inner {
            client_wait: params.policy.client_wait_limit().and_then(|max| prefer::requested_wait(headers, max)),
            is_wait_applied: AtomicBool::new(false),
            owner,
            owner_lifetime: owner_lifetime.as_ref().map_or_else(Weak::new, Arc::downgrade),
            is_inner,
            outer,
            route: Route::from_extensions(extensions, params.name),
            params,
            phase: AtomicU8::new(HandlerPhase::NotStarted as u8),
            is_detached: AtomicBool::new(false),
            is_body_incomplete: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            extra_locks: Mutex::default(),
        }));
        (context, owner_lifetime)
    }

    pub(super) fn owner(&self) -> &Owner {
        &self.0.owner
    }

    /// The receiver of the progress of the request body.
    pub(super) fn body_observer(&self) -> Arc<dyn BodyObserver> {
        Arc::clone(&self.0) as _
    }

    /// The owner and the settings that the calls of the handler inherit.
    pub(super) fn request_scope(&self) -> RequestScope {
        RequestScope::new(self.0.owner.clone(), self.0.params.handler_policy.for_handler(self.0.client_wait))
    }

    pub(super) fn policy(&self) -> &LockPolicy {
        &self.0.params.policy
    }

    pub(crate) fn on_reject(&self) -> &OnReject {
        &self.0.params.on_reject
    }

    /// The route, as far as it is known now.
    pub(crate) fn route(&self, extensions: &Extensions) -> Route {
        Route::from_extensions(extensions, self.0.params.name)
    }

    // --- acquiring a lock

    /// Counts a lock request that waits, here and at each outer layer.
    pub(crate) fn start_waiting(&self) -> WaitingGuard<'_> {
        for context in self.self_and_outer() {
            context.0.waiting.fetch_add(1, AcqRel);
        }
        WaitingGuard(self)
    }

    /// Whether the body is read before the lock is acquired. A `CONNECT` request is followed by a
    /// tunnel, which does not end.
    pub(super) fn buffers_body(&self, method: &Method) -> bool {
        self.0.params.policy.buffers_request() && method != Method::CONNECT
    }

    /// Reads the body of the request for an extractor, and puts it back for the handler.
    ///
    /// The reservation is needed while the request waits.
    #[cfg(feature = "axum")]
    pub(crate) async fn read_body(
        &self,
        route: &Route,
        head: &mut Parts,
    ) -> Result<Option<Reservation>, Response<RejectionBody>> {
        if !self.buffers_body(&head.method) {
            return Ok(None);
        }
        let Some(shared) = head.extensions.get::<RequestBodyHandle>().cloned() else { return Ok(None) };
        let Some(body) = shared.take() else { return Ok(None) };
        let mut body = BodyReader::new(body, &ManagerState::of(&self.0.params.driver).body_budget, self.policy());
        body.read(head)
            .await
            .map_err(|rejection| KeyRejection::from(rejection).into_response(route, self.on_reject()))?;
        let (body, reservation) = body.into_parts();
        shared.put_back(body);
        Ok(reservation)
    }

    /// Acquires a lock of the handler for this request if its client is still connected. `body` is
    /// the reservation of its complete body while it waits.
    pub(crate) async fn acquire(
        &self,
        route: &Route,
        key: LockKey,
        client: Option<&ClientConnection>,
        body: Option<&mut Reservation>,
    ) -> Result<RequestLock, Rejection> {
        let policy = &self.0.params.handler_policy;
        self.reserve_for_waiting(route, &key, body, policy)?;
        let ClaimedLock::Granted(lock) = self.request_lock(route, key, policy, false).await? else {
            unreachable!("a request that ignores records")
        };
        // The server may not have noticed the disconnect.
        if client.is_some_and(ClientConnection::is_closed) {
            lock.cancel();
            return Err(Rejection::Disconnected);
        }
        Ok(lock)
    }

    /// Acquires the lock of a layer whose record answers the request. Another request with the key
    /// is in flight if the key is busy.
    pub(super) async fn claim(
        &self,
        route: &Route,
        key: LockKey,
        client: Option<&ClientConnection>,
        body: Option<&mut Reservation>,
    ) -> Result<ClaimedLock, Rejection> {
        let policy = self.policy();
        self.reserve_for_waiting(route, &key, body, policy).map_err(Rejection::into_in_flight)?;
        let claimed = self.request_lock(route, key, policy, true).await.map_err(Rejection::into_in_flight)?;
        match claimed {
            ClaimedLock::Granted(lock) if client.is_some_and(ClientConnection::is_closed) => {
                lock.cancel();
                Err(Rejection::Disconnected)
            }
            claimed => Ok(claimed),
        }
    }

    /// Ensures that the waiters of one key do not use the whole body budget.
    fn reserve_for_waiting(
        &self,
        route: &Route,
        key: &LockKey,
        body: Option<&mut Reservation>,
        policy: &LockPolicy,
    ) -> Result<(), Rejection> {
        let Some(Err(why)) = body.map(|body| body.wait_for(key)) else { return Ok(()) };
        // The holder of the key re-enters: rejected, it would give way to its own waiters.
        if self.0.params.driver.hold_count(key, &self.0.owner) > 0 {
            return Ok(());
        }
        // A request that does not wait is rejected for its lock, not for its body.
        Err(self.rejection_without_wait(route, key, policy).unwrap_or_else(|| {
            let rejection = Rejection::from(why);
            LockSpan::rejected_before_lock(route, "body_buffer_full", rejection.status(), None);
            rejection
        }))
    }

    async fn request_lock(
        &self,
        route: &Route,
        key: LockKey,
        policy: &LockPolicy,
        unless_recorded: bool,
    ) -> Result<ClaimedLock, Rejection> {
        let LayerParams { driver, hold_estimate, .. } = &self.0.params;
        let mut span = LockSpan::start(route, &key, policy.shows_key());
        let began = Instant::now();
        if self.0.client_wait.is_some() {
            self.0.is_wait_applied.store(true, Release);
        }
        let params = LockParams {
            key,
            wait: self.0.client_wait.unwrap_or_else(|| policy.request_wait()),
            limits: policy.request_hold_limits(),
            owner: Some(self.0.owner.clone()),
            route: route.label(),
            unless_recorded,
        };
        match ClaimFuture::new(Arc::clone(driver), params).await {
            Ok(Claim::Granted(guard)) => {
                span.granted(began.elapsed(), || guard.hold_count(), guard.fencing_token());
                Ok(ClaimedLock::Granted(RequestLock::new(guard, span, Arc::clone(hold_estimate), policy)))
            }
            Ok(Claim::Recorded(record)) => {
                span.recorded(began.elapsed());
                Ok(ClaimedLock::Recorded(record, span))
            }
            Err(error) => {
                span.rejected(&error, began.elapsed());
                Err(Rejection::from_lock_error(error, hold_estimate, policy.timeout_status()))
            }
        }
    }

    /// The rejection of a request that does not wait and would be rejected anyway: its body need
    /// not be sent.
    pub(crate) fn immediate_rejection(&self, route: &Route, key: &LockKey) -> Option<Rejection> {
        self.rejection_without_wait(route, key, &self.0.params.handler_policy)
    }

    /// The same for a [claim](Self::claim).
    pub(super) fn immediate_claim_rejection(&self, route: &Route, key: &LockKey) -> Option<Rejection> {
        self.rejection_without_wait(route, key, self.policy()).map(Rejection::into_in_flight)
    }

    fn rejection_without_wait(&self, route: &Route, key: &LockKey, policy: &LockPolicy) -> Option<Rejection> {
        let LayerParams { driver, hold_estimate, .. } = &self.0.params;
        if !self.0.client_wait.unwrap_or_else(|| policy.request_wait()).is_zero() {
            return None;
        }
        let error = driver.rejection_without_wait(key, &self.0.owner, || route.label())?;
        self.0.is_wait_applied.store(self.0.client_wait.is_some(), Release);
        LockSpan::start(route, key, policy.shows_key()).rejected(&error, Duration::ZERO);
        Some(Rejection::from_lock_error(error, hold_estimate, policy.timeout_status()))
    }

    /// The wait that the client chose, if it was used.
    pub(super) fn applied_wait(&self) -> Option<Duration> {
        self.0.client_wait.filter(|_| self.0.is_wait_applied.load(Acquire))
    }

    /// Counts a response whose record was not left.
    pub(super) fn count_unrecorded(&self, span: &LockSpan) {
        count_replay(self.0.route.label(), "unrecorded");
        span.replay("unrecorded");
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
        let mut beyond = self.0.extra_locks.lock();
        if beyond.is_closed {
            return Err(lock);
        }
        beyond.locks.push(lock);
        self.count_lock();
        Ok(())
    }

    fn is_closed(&self) -> bool {
        self.0.extra_locks.lock().is_closed
    }

    /// Closes the context to further locks. The caller releases the locks that were kept.
    pub(super) fn close(&self) -> Vec<RequestLock> {
        let mut beyond = self.0.extra_locks.lock();
        beyond.is_closed = true;
        std::mem::take(&mut beyond.locks)
    }

    /// Ends the time in which a slow client is aborted: no lock is held here.
    pub(super) fn clear_lock_count(&self) {
        self.0.held.store(0, Release);
    }

    /// The reason to abort the handler because of a lock that was kept here.
    pub(super) fn abort_reason(&self) -> Option<LockLost> {
        // Usually there is no lock, or only that of the layer, which its owner checks.
        if !self.holds_lock() {
            return None;
        }
        self.0.extra_locks.lock().locks.iter().find_map(RequestLock::abort_reason)
    }

    /// Adds the signals of locks that were kept since the last call. `of_layer` signals belong to
    /// the layer.
    pub(super) fn add_abort_signals(&self, signals: &mut AbortSignals, of_layer: usize) {
        if self.holds_lock() {
            let beyond = self.0.extra_locks.lock();
            signals.extend(beyond.locks.iter().skip(signals.len() - of_layer).map(RequestLock::abort_signal));
        }
    }

    // --- after a disconnect

    /// Sets whether the handler runs or has returned.
    pub(super) fn set_running(&self, is_running: bool) {
        let (running, ended) = (HandlerPhase::Running as u8, HandlerPhase::Ended as u8);
        if is_running {
            self.0.phase.store(running, Release);
        } else {
            // A handler that was not started has not ended.
            let _ = self.0.phase.compare_exchange(running, ended, AcqRel, Acquire);
        }
    }

    /// Whether the handler was called.
    pub(super) fn handler_started(&self) -> bool {
        self.0.phase.load(Acquire) != HandlerPhase::NotStarted as u8
    }

    /// The permission to finish the handler after a disconnect, if it runs, holds a lock, and is to
    /// finish.
    pub(super) fn detach_permit(&self) -> Option<DetachedPermit> {
        let Inner { params, is_inner, phase, is_body_incomplete: is_incomplete, waiting, .. } = &*self.0;
        // The handler would wait for the rest of a request whose client has disconnected.
        if is_incomplete.load(Acquire) {
            return None;
        }
        let is_at_work =
            phase.load(Acquire) == HandlerPhase::Running as u8 && self.holds_lock() && waiting.load(Acquire) == 0;
        // An outer lock is released by its own layer: that layer decides for all inner ones.
        let is_to_finish = is_at_work && !is_inner && params.policy.finishes_after_disconnect();
        let permit = is_to_finish.then(|| {
            let handlers = &ManagerState::of(&params.driver).detached;
            DetachedPermit::acquire(handlers, &params.driver, self.route_id())
        });
        let permit = permit.flatten();
        self.0.is_detached.store(permit.is_some(), Release);
        permit
    }

    /// Whether the handler finishes without its client.
    pub(super) fn is_detached(&self) -> bool {
        self.0.is_detached.load(Acquire)
    }

    /// A layer may serve several routes, and a route may have several layers.
    fn route_id(&self) -> RouteId {
        let Inner { params, route, .. } = &*self.0;
        RouteId { layer: Arc::as_ptr(&params.hold_estimate).addr(), name: route.as_str().to_owned() }
    }

    /// Spawns a task. Without a runtime, drops it.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
        self.0.params.driver.spawn(task)
    }

    fn self_and_outer(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |context| context.0.outer.as_ref())
    }
}

impl BodyObserver for Inner {
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
