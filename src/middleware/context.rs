//! The slot of one request: what it may hold beyond the lock of its layer, and whether it runs at all.

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
    lock::{InRequest, LockFuture, LockParams},
    lock_key::LockKey,
    owner::Owner,
    policy::LockPolicy,
    rejection::{OnReject, Rejection},
    sync::Mutex,
    telemetry::{route::Route, span::LockSpan},
};

/// One request at one layer of ours: the layer, its future, its handler and the extractors in there meet here. In the extensions of the
/// request.
#[derive(Clone)]
pub(crate) struct RequestContext(Arc<Inner>);

struct Inner {
    params: LayerParams,
    /// Where the request was on its way when it came to this layer.
    route: Route,
    owner: Owner,
    /// Of a layer of ours that has named the owner.
    owner_lifetime: Weak<OwnerLifetime>,
    /// What the client chose.
    client_wait: Option<Duration>,
    /// That it chose has mattered.
    is_wait_applied: AtomicBool,
    /// The next layer of ours further out.
    outer: Option<RequestContext>,
    /// A layer further out holds a lock: it says what becomes of us.
    is_inner: bool,
    /// Of the handler.
    phase: AtomicU8,
    /// The end of the request's body was not read yet.
    is_body_incomplete: AtomicBool,
    /// How many in here wait for a lock.
    waiting: AtomicUsize,
    /// How many locks are held here, that of the layer included.
    held: AtomicUsize,
    extra_locks: Mutex<ExtraLocks>,
}

/// The handler was not called yet.
const BEFORE: u8 = 0;
/// It runs.
const RUNS: u8 = 1;
/// It has answered, or was broken off.
const AFTER: u8 = 2;

/// What is held beyond the lock of the layer.
#[derive(Default)]
struct ExtraLocks {
    /// The response is there: nothing is taken any more.
    is_closed: bool,
    locks: Vec<RequestLock>,
}

/// As long as it lives, somebody in here waits for a lock.
pub(crate) struct WaitingGuard<'a>(&'a RequestContext);

impl RequestContext {
    pub(super) fn new(
        terms: LayerParams,
        headers: &HeaderMap,
        extensions: &Extensions,
    ) -> (Self, Option<Arc<OwnerLifetime>>) {
        // A copy of the extensions of a request that is over says nothing, and is not kept.
        let outer = extensions.get::<Self>().filter(|slot| !slot.is_closed()).cloned();
        let is_inner = outer.as_ref().is_some_and(|outer| outer.0.is_inner || outer.holds_lock());
        let known = extensions.get::<Owner>().filter(|owner| !owner.is_closed()).cloned();
        let (owner, tenure) = match (known, &outer) {
            (Some(owner), Some(outer)) if outer.0.owner == owner && is_inner => {
                (owner, outer.0.owner_lifetime.upgrade())
            }
            // A layer that holds nothing gives nothing to re-enter. And what it is called for twice (a retry, while the first try finishes
            // alone) is not to be let in twice.
            (Some(owner), Some(outer)) if outer.0.owner == owner => OwnerLifetime::start(),
            // Named by somebody else, who also says when that is over.
            (Some(owner), _) => (owner, None),
            (None, _) => OwnerLifetime::start(),
        };
        let slot = Self(Arc::new(Inner {
            client_wait: terms.policy.client_wait_limit().and_then(|max| prefer::requested_wait(headers, max)),
            is_wait_applied: AtomicBool::new(false),
            owner,
            owner_lifetime: tenure.as_ref().map_or_else(Weak::new, Arc::downgrade),
            is_inner,
            outer,
            route: Route::from_extensions(extensions, terms.name),
            params: terms,
            phase: AtomicU8::new(BEFORE),
            is_body_incomplete: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            extra_locks: Mutex::default(),
        }));
        (slot, tenure)
    }

    pub(super) fn owner(&self) -> &Owner {
        &self.0.owner
    }

    /// Receives the progress of the body of the request.
    pub(super) fn body_observer(&self) -> Arc<dyn BodyObserver> {
        Arc::clone(&self.0) as _
    }

    /// What the calls of the handler have from this request.
    pub(super) fn request_scope(&self) -> InRequest {
        InRequest::new(self.0.owner.clone(), self.0.params.policy.for_handler(self.0.client_wait))
    }

    pub(super) fn policy(&self) -> &LockPolicy {
        &self.0.params.policy
    }

    pub(crate) fn on_reject(&self) -> &OnReject {
        &self.0.params.on_reject
    }

    /// Where the request is on its way, as far as it is known by now.
    pub(crate) fn route(&self, extensions: &Extensions) -> Route {
        Route::from_extensions(extensions, self.0.params.name)
    }

    // --- taking a lock --------------------------------------------------------------------------------------------

    /// Somebody in here waits, and so does each layer further out.
    pub(crate) fn start_waiting(&self) -> WaitingGuard<'_> {
        for slot in self.self_and_outer() {
            slot.0.waiting.fetch_add(1, AcqRel);
        }
        WaitingGuard(self)
    }

    /// Whether the body of a request is read before a lock is taken. After a `CONNECT` comes a
    /// tunnel, which has no end.
    pub(super) fn buffers_body(&self, method: &Method) -> bool {
        self.0.params.policy.buffers_request() && method != Method::CONNECT
    }

    /// For an extractor that takes a lock: reads the body of its request, and puts it back for the
    /// handler.
    ///
    /// The share lasts for as long as the request waits.
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
        let (body, share) = body.into_parts();
        shared.put_back(body);
        Ok(share)
    }

    /// Takes a lock for this request, for a client that is still connected. `body` is what its
    /// complete body takes up while it waits.
    pub(crate) async fn acquire(
        &self,
        route: &Route,
        key: LockKey,
        client: Option<&ClientConnection>,
        body: Option<&mut Reservation>,
    ) -> Result<RequestLock, Rejection> {
        self.reserve_for_waiting(route, &key, body)?;
        let section = self.acquire_lock(route, key).await?;
        // The server may not have noticed the disconnect: no handler runs without a client.
        if client.is_some_and(ClientConnection::is_closed) {
            section.cancel();
            return Err(Rejection::Disconnected);
        }
        Ok(section)
    }

    /// One key does not take up the room for the bodies of all.
    fn reserve_for_waiting(
        &self,
        route: &Route,
        key: &LockKey,
        body: Option<&mut Reservation>,
    ) -> Result<(), Rejection> {
        let Some(Err(why)) = body.map(|body| body.wait_for(key)) else { return Ok(()) };
        // The holder of the key does not wait for it: rejected, it would be for its own waiters.
        if self.0.params.driver.hold_count(key, &self.0.owner) > 0 {
            return Ok(());
        }
        // The body of a request that does not wait is not the reason.
        Err(self.immediate_rejection(route, key).unwrap_or_else(|| {
            let rejection = Rejection::from(why);
            LockSpan::rejected_before_lock(route, "bodies_full", rejection.status(), None);
            rejection
        }))
    }

    async fn acquire_lock(&self, route: &Route, key: LockKey) -> Result<RequestLock, Rejection> {
        let LayerParams { driver: core, policy, hold_estimate: usual_hold, .. } = &self.0.params;
        let mut span = LockSpan::start(route, &key, policy.shows_key());
        let began = Instant::now();
        if self.0.client_wait.is_some() {
            self.0.is_wait_applied.store(true, Release);
        }
        let ask = LockParams {
            key,
            wait: self.0.client_wait.unwrap_or_else(|| policy.request_wait()),
            terms: policy.request_hold_limits(),
            owner: Some(self.0.owner.clone()),
            route: route.label(),
        };
        match LockFuture::new(Arc::clone(core), ask).await {
            Ok(guard) => {
                span.granted(began.elapsed(), || guard.hold_count(), guard.fencing_token());
                Ok(RequestLock::new(guard, span, Arc::clone(usual_hold), policy))
            }
            Err(error) => {
                span.rejected(&error, began.elapsed());
                Err(Rejection::from_lock_error(error, usual_hold, policy.timeout_status()))
            }
        }
    }

    /// Whether this request, which does not wait, would be refused anyway: then its body need not be sent.
    pub(crate) fn immediate_rejection(&self, route: &Route, key: &LockKey) -> Option<Rejection> {
        let LayerParams { driver: core, policy, hold_estimate: usual_hold, .. } = &self.0.params;
        if !self.0.client_wait.unwrap_or_else(|| policy.request_wait()).is_zero() {
            return None;
        }
        let error = core.rejection_without_wait(key, &self.0.owner, || route.label())?;
        self.0.is_wait_applied.store(self.0.client_wait.is_some(), Release);
        LockSpan::start(route, key, policy.shows_key()).rejected(&error, Duration::ZERO);
        Some(Rejection::from_lock_error(error, usual_hold, policy.timeout_status()))
    }

    /// What the client chose and got, for the answer.
    pub(super) fn applied_wait(&self) -> Option<Duration> {
        self.0.client_wait.filter(|_| self.0.is_wait_applied.load(Acquire))
    }

    // --- what is held here ----------------------------------------------------------------------------------------

    /// The layer itself holds a lock from now on.
    pub(super) fn count_lock(&self) {
        self.0.held.fetch_add(1, AcqRel);
    }

    /// Whether a lock is held here now.
    pub(super) fn holds_lock(&self) -> bool {
        self.0.holds_lock()
    }

    /// To the end of the response. Handed back if that is over.
    #[cfg_attr(not(feature = "axum"), expect(dead_code, reason = "extractors do"))]
    pub(crate) fn keep(&self, section: RequestLock) -> Result<(), RequestLock> {
        let mut beyond = self.0.extra_locks.lock();
        if beyond.is_closed {
            return Err(section);
        }
        beyond.locks.push(section);
        self.count_lock();
        Ok(())
    }

    fn is_closed(&self) -> bool {
        self.0.extra_locks.lock().is_closed
    }

    /// Nothing is put in here any more; what was, is handed over, and whoever takes it sees to the lock of the layer, too.
    pub(super) fn close(&self) -> Vec<RequestLock> {
        let mut beyond = self.0.extra_locks.lock();
        beyond.is_closed = true;
        std::mem::take(&mut beyond.locks)
    }

    /// No lock is held here any more. Until then a client may not stop sending its body, also while
    /// the answer streams.
    pub(super) fn clear_lock_count(&self) {
        self.0.held.store(0, Release);
    }

    /// Whether something that was put in here is to be broken off now, and why.
    pub(super) fn abort_reason(&self) -> Option<LockLost> {
        // Mostly there is nothing, or nothing but the lock of the layer, which looks for itself.
        if !self.holds_lock() {
            return None;
        }
        self.0.extra_locks.lock().locks.iter().find_map(RequestLock::abort_reason)
    }

    /// Adds those of what was put in here since; so many are of the layer itself.
    pub(super) fn add_abort_signals(&self, stops: &mut AbortSignals, of_layer: usize) {
        if self.holds_lock() {
            let beyond = self.0.extra_locks.lock();
            stops.extend(beyond.locks.iter().skip(stops.len() - of_layer).map(RequestLock::abort_signal));
        }
    }

    // --- when the client has left ---------------------------------------------------------------------------------

    /// The handler begins, or has answered.
    pub(super) fn runs(&self, runs: bool) {
        self.0.phase.store(if runs { RUNS } else { AFTER }, Release);
    }

    /// Whether it ever was called.
    pub(super) fn handler_started(&self) -> bool {
        self.0.phase.load(Acquire) != BEFORE
    }

    /// A place for the handler to finish in, now that nobody waits for its answer; if it has begun, holds a lock, and is to finish.
    pub(super) fn detach_permit(&self) -> Option<DetachedPermit> {
        let Inner { params: terms, is_inner, phase, is_body_incomplete: is_incomplete, waiting, .. } = &*self.0;
        // It would wait for the rest of a request that nobody sends any more, and keep its locks so long.
        if is_incomplete.load(Acquire) {
            return None;
        }
        let is_at_work = phase.load(Acquire) == RUNS && self.holds_lock() && waiting.load(Acquire) == 0;
        // What a layer further out holds is given back by that one: if it goes on, we are a part of it, and if it does not, nor may we.
        let is_to_finish = is_at_work && !is_inner && terms.policy.finishes_after_disconnect();
        is_to_finish
            .then(|| {
                let handlers = &ManagerState::of(&terms.driver).detached;
                DetachedPermit::acquire(handlers, &terms.driver, self.route_id())
            })
            .flatten()
    }

    /// A layer may stand on several routes, and several on one.
    fn route_id(&self) -> RouteId {
        let Inner { params: terms, route, .. } = &*self.0;
        RouteId { layer: Arc::as_ptr(&terms.hold_estimate).addr(), name: route.as_str().to_owned() }
    }

    /// Where there is a runtime; else it is dropped at once.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
        self.0.params.driver.spawn(task)
    }

    fn self_and_outer(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |slot| slot.0.outer.as_ref())
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
        for slot in self.0.self_and_outer() {
            slot.0.waiting.fetch_sub(1, AcqRel);
        }
    }
}
