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
    abort::Stops, config::Terms, connection::ClientConnection, owner_lifetime::Tenure, prefer, request_lock::Section,
};
#[cfg(feature = "axum")]
use crate::body::{reader::BodyReader, request_body::SharedBody};
#[cfg(feature = "axum")]
use crate::key_source::NoKey;
#[cfg(feature = "axum")]
use crate::rejection::RejectionBody;
use crate::{
    body::{budget::Share, request_body::BodyObserver},
    error::LockLost,
    lock::{Detached, DetachedRoute, LockFuture, LockParams, RequestScope},
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
pub(crate) struct Slot(Arc<Inner>);

struct Inner {
    terms: Terms,
    /// Where the request was on its way when it came to this layer.
    route: Route,
    owner: Owner,
    /// Of a layer of ours that has named the owner.
    tenure: Weak<Tenure>,
    /// What the client chose.
    max_client_wait: Option<Duration>,
    /// That it chose has mattered.
    has_applied: AtomicBool,
    /// The next layer of ours further out.
    outer: Option<Slot>,
    /// A layer further out holds a lock: it says what becomes of us.
    is_inner: bool,
    /// Of the handler.
    phase: AtomicU8,
    /// The end of the request's body was not read yet.
    is_incomplete: AtomicBool,
    /// How many in here wait for a lock.
    waiting: AtomicUsize,
    /// How many locks are held here, that of the layer included.
    held: AtomicUsize,
    beyond: Mutex<Beyond>,
}

/// The handler was not called yet.
const BEFORE: u8 = 0;
/// It runs.
const RUNS: u8 = 1;
/// It has answered, or was broken off.
const AFTER: u8 = 2;

/// What is held beyond the lock of the layer.
#[derive(Default)]
struct Beyond {
    /// The response is there: nothing is taken any more.
    is_closed: bool,
    sections: Vec<Section>,
}

/// As long as it lives, somebody in here waits for a lock.
pub(crate) struct Waits<'a>(&'a Slot);

impl Slot {
    pub(super) fn new(terms: Terms, headers: &HeaderMap, extensions: &Extensions) -> (Self, Option<Arc<Tenure>>) {
        // A copy of the extensions of a request that is over says nothing, and is not kept.
        let outer = extensions.get::<Self>().filter(|slot| !slot.is_closed()).cloned();
        let is_inner = outer.as_ref().is_some_and(|outer| outer.0.is_inner || outer.holds());
        let known = extensions.get::<Owner>().filter(|owner| !owner.is_closed()).cloned();
        let (owner, tenure) = match (known, &outer) {
            (Some(owner), Some(outer)) if outer.0.owner == owner && is_inner => (owner, outer.0.tenure.upgrade()),
            // A layer that holds nothing gives nothing to re-enter. And what it is called for twice (a retry, while the first try finishes
            // alone) is not to be let in twice.
            (Some(owner), Some(outer)) if outer.0.owner == owner => Tenure::begin(),
            // Named by somebody else, who also says when that is over.
            (Some(owner), _) => (owner, None),
            (None, _) => Tenure::begin(),
        };
        let slot = Self(Arc::new(Inner {
            max_client_wait: terms.policy.longest_client_wait().and_then(|max| prefer::wait(headers, max)),
            has_applied: AtomicBool::new(false),
            owner,
            tenure: tenure.as_ref().map_or_else(Weak::new, Arc::downgrade),
            is_inner,
            outer,
            route: Route::of(extensions, terms.name),
            terms,
            phase: AtomicU8::new(BEFORE),
            is_incomplete: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            beyond: Mutex::default(),
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
    pub(super) fn in_request(&self) -> RequestScope {
        RequestScope::new(self.0.owner.clone(), self.0.terms.policy.of_request(self.0.max_client_wait))
    }

    pub(super) fn policy(&self) -> &LockPolicy {
        &self.0.terms.policy
    }

    pub(crate) fn on_reject(&self) -> &OnReject {
        &self.0.terms.on_reject
    }

    /// Where the request is on its way, as far as it is known by now.
    pub(crate) fn route(&self, extensions: &Extensions) -> Route {
        Route::of(extensions, self.0.terms.name)
    }

    // --- taking a lock --------------------------------------------------------------------------------------------

    /// Somebody in here waits, and so does each layer further out.
    pub(crate) fn waits(&self) -> Waits<'_> {
        for slot in self.and_outer() {
            slot.0.waiting.fetch_add(1, AcqRel);
        }
        Waits(self)
    }

    /// Whether the body of a request is read before a lock is taken. After a `CONNECT` comes a
    /// tunnel, which has no end.
    pub(super) fn buffers_body(&self, method: &Method) -> bool {
        self.0.terms.policy.buffers_request() && method != Method::CONNECT
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
    ) -> Result<Option<Share>, Response<RejectionBody>> {
        if !self.buffers_body(&head.method) {
            return Ok(None);
        }
        let Some(shared) = head.extensions.get::<SharedBody>().cloned() else { return Ok(None) };
        let Some(body) = shared.take() else { return Ok(None) };
        let mut body = BodyReader::new(body, self.0.terms.core.bodies(), self.policy());
        body.read(head).await.map_err(|rejection| NoKey::from(rejection).answer(route, self.on_reject()))?;
        let (body, share) = body.finish();
        shared.put(body);
        Ok(share)
    }

    /// Takes a lock for this request, for a client that is still connected. `body` is what its
    /// complete body takes up while it waits.
    pub(crate) async fn enter(
        &self,
        route: &Route,
        key: LockKey,
        client: Option<&ClientConnection>,
        body: Option<&mut Share>,
    ) -> Result<Section, Rejection> {
        self.admit(route, &key, body)?;
        let section = self.acquire(route, key).await?;
        // The server may not have noticed the disconnect: no handler runs without a client.
        if client.is_some_and(ClientConnection::is_closed) {
            section.unheard();
            return Err(Rejection::Disconnected);
        }
        Ok(section)
    }

    /// One key does not take up the room for the bodies of all.
    fn admit(&self, route: &Route, key: &LockKey, body: Option<&mut Share>) -> Result<(), Rejection> {
        let Some(Err(why)) = body.map(|body| body.waits_for(key)) else { return Ok(()) };
        // The holder of the key does not wait for it: rejected, it would be for its own waiters.
        if self.0.terms.core.hold_count(key, &self.0.owner) > 0 {
            return Ok(());
        }
        // The body of a request that does not wait is not the reason.
        Err(self.refusal(route, key).unwrap_or_else(|| {
            let rejection = Rejection::from(why);
            LockSpan::without_key(route, "bodies_full", rejection.status(), None);
            rejection
        }))
    }

    async fn acquire(&self, route: &Route, key: LockKey) -> Result<Section, Rejection> {
        let Terms { core, policy, usual_hold, .. } = &self.0.terms;
        let mut span = LockSpan::waiting(route, &key, policy.shows_key());
        let began = Instant::now();
        if self.0.max_client_wait.is_some() {
            self.0.has_applied.store(true, Release);
        }
        let ask = LockParams {
            key,
            wait: self.0.max_client_wait.unwrap_or_else(|| policy.request_wait()),
            limits: policy.request_terms(),
            owner: Some(self.0.owner.clone()),
            route: route.label(),
        };
        match LockFuture::new(Arc::clone(core), ask).await {
            Ok(guard) => {
                span.granted(began.elapsed(), || guard.hold_count(), guard.fencing_token());
                Ok(Section::new(guard, span, Arc::clone(usual_hold), policy))
            }
            Err(error) => {
                span.turned_away(&error, began.elapsed());
                Err(Rejection::of(error, usual_hold, policy.status_in_vain()))
            }
        }
    }

    /// Whether this request, which does not wait, would be refused anyway: then its body need not be sent.
    pub(crate) fn refusal(&self, route: &Route, key: &LockKey) -> Option<Rejection> {
        let Terms { core, policy, usual_hold, .. } = &self.0.terms;
        if !self.0.max_client_wait.unwrap_or_else(|| policy.request_wait()).is_zero() {
            return None;
        }
        let error = core.rejection_without_wait(key, &self.0.owner, || route.label())?;
        self.0.has_applied.store(self.0.max_client_wait.is_some(), Release);
        LockSpan::waiting(route, key, policy.shows_key()).turned_away(&error, Duration::ZERO);
        Some(Rejection::of(error, usual_hold, policy.status_in_vain()))
    }

    /// What the client chose and got, for the answer.
    pub(super) fn applied(&self) -> Option<Duration> {
        self.0.max_client_wait.filter(|_| self.0.has_applied.load(Acquire))
    }

    // --- what is held here ----------------------------------------------------------------------------------------

    /// The layer itself holds a lock from now on.
    pub(super) fn holds_one(&self) {
        self.0.held.fetch_add(1, AcqRel);
    }

    /// Whether a lock is held here now.
    pub(super) fn holds(&self) -> bool {
        self.0.holds_lock()
    }

    /// To the end of the response. Handed back if that is over.
    #[cfg_attr(not(feature = "axum"), expect(dead_code, reason = "extractors do"))]
    pub(crate) fn put(&self, section: Section) -> Result<(), Section> {
        let mut beyond = self.0.beyond.lock();
        if beyond.is_closed {
            return Err(section);
        }
        beyond.sections.push(section);
        self.holds_one();
        Ok(())
    }

    fn is_closed(&self) -> bool {
        self.0.beyond.lock().is_closed
    }

    /// Nothing is put in here any more; what was, is handed over, and whoever takes it sees to the lock of the layer, too.
    pub(super) fn close(&self) -> Vec<Section> {
        let mut beyond = self.0.beyond.lock();
        beyond.is_closed = true;
        std::mem::take(&mut beyond.sections)
    }

    /// No lock is held here any more. Until then a client may not stop sending its body, also while
    /// the answer streams.
    pub(super) fn holds_none(&self) {
        self.0.held.store(0, Release);
    }

    /// Whether something that was put in here is to be broken off now, and why.
    pub(super) fn must_stop(&self) -> Option<LockLost> {
        // Mostly there is nothing, or nothing but the lock of the layer, which looks for itself.
        if !self.holds() {
            return None;
        }
        self.0.beyond.lock().sections.iter().find_map(Section::must_stop)
    }

    /// Adds those of what was put in here since; so many are of the layer itself.
    pub(super) fn add_stops(&self, stops: &mut Stops, of_layer: usize) {
        if self.holds() {
            let beyond = self.0.beyond.lock();
            stops.extend(beyond.sections.iter().skip(stops.len() - of_layer).map(Section::stop));
        }
    }

    // --- when the client has left ---------------------------------------------------------------------------------

    /// The handler begins, or has answered.
    pub(super) fn runs(&self, runs: bool) {
        self.0.phase.store(if runs { RUNS } else { AFTER }, Release);
    }

    /// Whether it ever was called.
    pub(super) fn has_begun(&self) -> bool {
        self.0.phase.load(Acquire) != BEFORE
    }

    /// A place for the handler to finish in, now that nobody waits for its answer; if it has begun, holds a lock, and is to finish.
    pub(super) fn finish(&self) -> Option<Detached> {
        let Inner { terms, is_inner, phase, is_incomplete, waiting, .. } = &*self.0;
        // It would wait for the rest of a request that nobody sends any more, and keep its locks so long.
        if is_incomplete.load(Acquire) {
            return None;
        }
        let is_at_work = phase.load(Acquire) == RUNS && self.holds() && waiting.load(Acquire) == 0;
        // What a layer further out holds is given back by that one: if it goes on, we are a part of it, and if it does not, nor may we.
        let is_to_finish = is_at_work && !is_inner && terms.policy.finishes_without_client();
        is_to_finish.then(|| Detached::new(&terms.core, self.detached_route())).flatten()
    }

    /// A layer may stand on several routes, and several on one.
    fn detached_route(&self) -> DetachedRoute {
        let Inner { terms, route, .. } = &*self.0;
        DetachedRoute { layer: Arc::as_ptr(&terms.usual_hold).addr(), name: route.as_str().to_owned() }
    }

    /// Where there is a runtime; else it is dropped at once.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
        self.0.terms.core.spawn(task)
    }

    fn and_outer(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |slot| slot.0.outer.as_ref())
    }
}

impl BodyObserver for Inner {
    fn set_incomplete(&self, is_incomplete: bool) {
        self.is_incomplete.store(is_incomplete, Release);
    }

    fn holds_lock(&self) -> bool {
        self.held.load(Acquire) > 0
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        for slot in self.0.and_outer() {
            slot.0.waiting.fetch_sub(1, AcqRel);
        }
    }
}
