//! Acquires the locks of a request, or says at once that it would be rejected.

use std::{future::Future, sync::Arc, time::Duration};

use http::{HeaderMap, StatusCode, request::Parts};
use smallvec::smallvec;

use super::{
    client::ClientConnection,
    config::LayerParams,
    context::RequestContext,
    holder_limit::{Grace, HolderLimit, Terms},
    request_lock::{LOCK_TICKET, RequestLock},
};
use crate::{
    body::budget::Reservation,
    error::LockError,
    key_source::KeyRejection,
    limits::{NEWEST_WAIT, RENEWALS_PER_LEASE},
    lock::{
        AcquireFuture, LockGuard, LockGuards, LockParams, NotGranted, Ticket, TicketError, TicketTerms,
        acquire_several, redeem,
    },
    lock_key::{AllKeys, KeyCountError, LockKey, SortedKeys},
    policy::LockPolicy,
    proto::LockRequest,
    rejection::{
        Rejection,
        field_error::{FieldError, FieldLocation, FieldProblem},
        retry_after::HoldEstimate,
    },
    store::{Demand, Record},
    telemetry::{metrics::AcquireMetrics, route::Route, span::LockSpan},
};

/// A request for the lock of one key, or of several together.
pub(crate) struct LockCall<'a> {
    context: &'a RequestContext,
    route: &'a Route,
    keys: SortedKeys,
    /// The idempotency key of a request whose layer keeps its answer. Another request with this key
    /// is in flight if the lock is busy.
    claim: Option<&'a str>,
    terms: Terms,
    /// Those of a layer with tickets, and the ticket of the request.
    tickets: Option<(TicketTerms, Option<Ticket>)>,
}

/// The result of a call that is not rejected.
pub(crate) enum Acquired {
    Held(RequestLock),
    /// The answer to a claim, and the span of its request.
    Recorded(Arc<Record>, LockSpan),
}

impl<'a> LockCall<'a> {
    pub(crate) fn new(context: &'a RequestContext, route: &'a Route, keys: AllKeys) -> Result<Self, KeyRejection> {
        let (keys, max) = (keys.into_sorted()?, context.params().max_keys);
        if keys.len() > max {
            return Err(KeyCountError::TooMany { max }.into());
        }
        Ok(Self { context, route, keys, claim: None, terms: Terms::default(), tickets: None })
    }

    pub(crate) fn claim(context: &'a RequestContext, key: LockKey, idempotency_key: &'a str) -> Self {
        let (route, claim) = (context.known_route(), Some(idempotency_key));
        Self { context, route, keys: smallvec![key], claim, terms: Terms::default(), tickets: None }
    }

    /// The same call, on the terms of its layer.
    pub(super) fn with_terms(self, limit: &HolderLimit, head: &Parts) -> Result<Self, KeyRejection> {
        Ok(Self { terms: limit.terms(head, &self.keys)?, ..self })
    }

    /// The same call, which may continue the work of an earlier request.
    pub(super) fn with_tickets(self, terms: Option<TicketTerms>, headers: &HeaderMap) -> Result<Self, KeyRejection> {
        let Some(terms) = terms else { return Ok(self) };
        let key = match &*self.keys {
            [key] if !key.is_raw() => key,
            _ => return Err(KeyRejection::Mistake("`tickets` is for one key, which is not raw".to_owned())),
        };
        let ticket = ticket_of(headers, key).map_err(KeyRejection::Rejection)?;
        Ok(Self { tickets: Some((terms, ticket)), ..self })
    }

    fn ticket(&self) -> Option<(TicketTerms, &Ticket)> {
        self.tickets.as_ref().and_then(|(terms, ticket)| Some((*terms, ticket.as_ref()?)))
    }

    /// The rejection of a request whose limit is zero, without a call of the store.
    fn no_permits(&self) -> Option<Rejection> {
        if self.terms.permits != Some(0) {
            return None;
        }
        let error = LockError::busy(Duration::MAX, 1);
        AcquireMetrics::start(self.route.as_str(), false).rejected(&error);
        Some(self.rejected(&self.start_span(), 0, error))
    }

    pub(super) fn terms(&self) -> Terms {
        self.terms
    }

    fn policy(&self) -> &'a LockPolicy {
        let LayerParams { policy, handler_policy, .. } = self.context.params();
        if self.claim.is_some() { policy } else { handler_policy }
    }

    /// How long the request waits. Under `newest_wins`, an older one has its time for its end.
    fn wait(&self) -> Duration {
        let wait = self.context.wait(self.policy());
        let renewal = self.context.driver().lease.longest / RENEWALS_PER_LEASE;
        let least = |grace: Grace| Duration::from(grace).saturating_add(renewal).saturating_add(NEWEST_WAIT);
        self.terms.grace.map_or(wait, |grace| wait.max(least(grace)))
    }

    fn start_span(&self) -> LockSpan {
        let span = LockSpan::start(self.route, &self.keys, self.claim, self.policy().shows_key());
        if self.terms.sharing.max_holders() > 1 {
            span.limit(self.terms.sharing.max_holders());
        }
        span
    }

    /// The rejection of a request that does not wait and would be rejected anyway: its body need
    /// not be sent.
    pub(crate) fn immediate_rejection(&self) -> Option<Rejection> {
        let Self { context, route, keys, claim, terms, .. } = self;
        if let Some(rejection) = self.no_permits() {
            return Some(rejection);
        }
        // The key of a ticket is locked, also for this process.
        if !self.wait().is_zero() || self.ticket().is_some() {
            return None;
        }
        let owner = context.owner();
        let metrics = || AcquireMetrics::start(route.as_str(), claim.is_some());
        let error = |key: &LockKey| context.driver().rejection_without_wait(key, &owner, terms.sharing, metrics);
        let (at, error) = keys.iter().enumerate().find_map(|(at, key)| Some((at, error(key)?)))?;
        context.set_wait_applied();
        Some(self.rejected(&self.start_span(), at, error))
    }

    /// Acquires the lock if the client is still connected. `body` is the reservation of the
    /// complete body of the request while it waits.
    #[expect(clippy::manual_async_fn, reason = "the future of an `async fn` contains its arguments twice")]
    pub(crate) fn acquire(
        &self,
        client: Option<&ClientConnection>,
        body: Option<&mut Reservation>,
    ) -> impl Future<Output = Result<Acquired, Rejection>> {
        async move {
            if let Some(rejection) = self.no_permits() {
                return Err(rejection);
            }
            self.reserve_for_waiting(body)?;
            let mut span = self.start_span();
            self.context.set_wait_applied();
            let driver = self.context.driver();
            let acquired = match (self.ticket(), &*self.keys) {
                // In a box, as below.
                (Some((terms, ticket)), _) => {
                    match Box::pin(redeem(driver, ticket, self.params(&span), Some(terms))).await {
                        Ok(guard) => Ok(smallvec![guard]),
                        Err(TicketError::NotHeld) => {
                            span.ticket_not_held();
                            return Err(Rejection::TicketNotHeld);
                        }
                        Err(TicketError::Lock(error)) => Err((0, error.into())),
                    }
                }
                (None, [key]) => {
                    let acquired = AcquireFuture::send(Arc::clone(driver), key.clone(), self.params(&span)).await;
                    acquired.map(|guard| smallvec![guard]).map_err(|why| (0, why))
                }
                // In a box: the future of a request for one key does not contain this one.
                (None, keys) => Box::pin(self.acquire_several(keys, &span)).await.map(LockGuards::into_guards),
            };
            let guards = match acquired {
                Ok(guards) => guards,
                Err((_, NotGranted::Recorded(record))) => return Ok(Acquired::Recorded(record, span)),
                Err((at, NotGranted::Rejected(error))) => return Err(self.rejected(&span, at, error)),
            };
            let single = || guards.first().filter(|_| guards.len() == 1);
            let fence = |guard: &LockGuard| {
                (guard.held_lock().acquisition_id().max_holders() == 1).then(|| guard.fencing_token())
            };
            span.granted(|| single().map(|guard: &LockGuard| (guard.hold_count(), fence(guard))));
            if let (Some((terms, None)), Some(guard)) = (&self.tickets, guards.first()) {
                guard.set_ticket_terms(*terms);
            }
            let lock = RequestLock::new(
                guards,
                span,
                Arc::clone(&self.context.params().hold_estimate),
                self.policy(),
                self.terms.grace,
            );
            // The server may not have noticed the disconnect.
            if client.is_some_and(ClientConnection::is_closed) {
                lock.cancel();
                return Err(Rejection::Disconnected);
            }
            Ok(Acquired::Held(lock))
        }
    }

    /// A request that waits holds its smaller keys meanwhile. A client at its bound of such keys
    /// does not wait.
    async fn acquire_several(&self, keys: &[LockKey], span: &LockSpan) -> Result<LockGuards, (usize, NotGranted)> {
        let mut params = self.params(span);
        let waits = !params.request.wait.is_zero();
        let share = if waits { self.context.share_of_keys(keys.len() - 1) } else { None };
        if share.is_none() {
            params.request.wait = Duration::ZERO;
        }
        acquire_several(self.context.driver(), keys, params).await
    }

    fn params(&self, span: &LockSpan) -> LockParams {
        let policy = self.policy();
        let demand = Demand { unless_recorded: self.claim.is_some() };
        let request = LockRequest {
            waiter: (),
            wait: self.wait(),
            owner: Some(self.context.owner()),
            parent: None,
            limits: policy.request_hold_limits(),
            demand,
            sharing: self.terms.sharing,
            trace: None,
        };
        let metrics = AcquireMetrics::start(self.route.as_str(), self.claim.is_some());
        let caller = self.context.driver().waits.caller(self.route.clone(), || span.to_tracing());
        LockParams { request, metrics: Some(metrics), caller }
    }

    /// The rejection because of the key at this position.
    fn rejected(&self, span: &LockSpan, at: usize, error: LockError) -> Rejection {
        let policy = self.policy();
        if self.keys.len() > 1 {
            span.not_acquired(&self.keys[at], policy.shows_key());
        }
        span.rejected(&error, self.page().as_deref());
        if matches!(error, LockError::WouldDeadlock) && self.claim.is_none() {
            return self.would_deadlock();
        }
        let default_status =
            if self.terms.permits.is_some() { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::CONFLICT };
        let status = policy.timeout_status(default_status);
        let rejection = Rejection::from_lock_error(error, &self.context.params().hold_estimate, status);
        match self.terms.permits {
            _ if self.claim.is_some() => rejection.into_in_flight(),
            Some(permits) => rejection.into_no_permit(permits),
            None => rejection,
        }
    }

    /// The page of the console about the key, if the log may show it.
    fn page(&self) -> Option<String> {
        match &*self.keys {
            #[cfg(feature = "console")]
            [key] if self.policy().shows_key() && crate::telemetry::span::logs_rejections() => {
                Some(format!("key?{}", key.as_query()))
            }
            _ => None,
        }
    }

    /// The rejection of a request that holds the key with others, and asks for it alone.
    fn would_deadlock(&self) -> Rejection {
        let (held_by, asked_by) = (self.context.holding_route(), self.route.as_str());
        tracing::error!(
            target: "tower_lock",
            held_by,
            asked_by,
            "a request holds its key with others, and asks for it alone: use the same limit at both layers, or another \
             key at one of them",
        );
        Rejection::WouldDeadlock { held_by: held_by.to_owned(), asked_by: asked_by.to_owned() }
    }

    /// Ensures that the waiters of one key do not use the whole body budget.
    fn reserve_for_waiting(&self, body: Option<&mut Reservation>) -> Result<(), Rejection> {
        // Of those that newer ones replace, one waits.
        let Some(body) = body.filter(|_| self.terms.grace.is_none()) else { return Ok(()) };
        let key = self.most_wanted();
        let Err(why) = body.wait_for(key) else { return Ok(()) };
        // The holder of the key re-enters: rejected, it would give way to its own waiters.
        if self.context.driver().hold_count(key, &self.context.owner()) > 0 {
            return Ok(());
        }
        // A request that does not wait is rejected for its lock, not for its body.
        Err(self.immediate_rejection().unwrap_or_else(|| {
            let rejection = Rejection::from(why);
            LockSpan::rejected_before_lock(self.route, "body_buffer_full", rejection.status(), None);
            rejection
        }))
    }

    /// The key for which the request most likely waits.
    fn most_wanted(&self) -> &LockKey {
        match &*self.keys {
            [key] => key,
            // The first one of those with the same demand.
            keys => {
                let owner = self.context.owner();
                let demand = |key: &&LockKey| self.context.driver().demand_for(key, &owner);
                keys.iter().rev().max_by_key(demand).expect("at least one key")
            }
        }
    }
}

/// The ticket in the headers of a request for this key.
pub(crate) fn ticket_of(headers: &HeaderMap, key: &LockKey) -> Result<Option<Ticket>, Rejection> {
    let mut values = headers.get_all(LOCK_TICKET).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let invalid = |problem| {
        let field = FieldError { location: FieldLocation::Header, name: "lock-ticket", problem };
        Rejection::InvalidKey { status: field.status(), field: Some(field), extractor: None }
    };
    if values.next().is_some() {
        return Err(invalid(FieldProblem::Duplicate));
    }
    let ticket: Option<Ticket> = value.to_str().ok().and_then(|text| text.parse().ok());
    match ticket {
        Some(ticket) if ticket.key() == key => Ok(Some(ticket)),
        _ => Err(invalid(FieldProblem::NotATicket)),
    }
}

impl Acquired {
    /// The lock of a request that is no claim: a store that replies with a record all the same
    /// violates its contract.
    pub(crate) fn into_lock(self) -> Result<RequestLock, Rejection> {
        match self {
            Self::Held(lock) => Ok(lock),
            Self::Recorded(record, span) => {
                let error = NotGranted::Recorded(record).into_error();
                span.rejected(&error, None);
                Err(Rejection::from_lock_error(error, &HoldEstimate::default(), StatusCode::CONFLICT))
            }
        }
    }
}
