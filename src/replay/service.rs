//! A request at a layer that keeps answers: key, body, fingerprint, claim, answer.

use std::{
    fmt,
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, header::CONTENT_TYPE, request::Parts};
use http_body::Body;
use tokio::time::timeout;
use tower::{BoxError, Service, ServiceExt, util::Oneshot};

use super::{
    answer::Answer,
    config::{FoundAnswer, ReplayConfig},
    fingerprint::Fingerprint,
    idempotency_key::IdempotencyKey,
    once::{Once, Unrecorded},
    recorder::{AnswerRecorder, Scope},
};
use crate::{
    body::{reader::BodyReader, request_body::RequestBody},
    key_source::{HeldView, KeyRejection, KeySource},
    lock::HeldLock,
    lock_key::{AllKeys, LockKey},
    middleware::{
        acquire::{Acquired, LockCall},
        context::RequestContext,
        future::ResponseFuture,
        handler::LockedRequest,
        request_locks::RequestLocks,
        response::{self, ResponseBody},
        service::leave_for_extractors,
    },
    policy::LockPolicy,
    rejection::Rejection,
    store::{NewRecord, Record, StoreError, StoreErrorKind},
    telemetry::{metrics::count_replay, span::LockSpan},
};

/// Service that runs the inner service once for each idempotency key. Created by
/// [`ReplayLayer`](crate::ReplayLayer).
///
/// It adds no errors: a rejected request gets a response.
pub struct ReplayService<S, K, V> {
    pub(super) inner: S,
    pub(super) config: Arc<ReplayConfig<K>>,
    pub(super) values: V,
}

/// A request with an idempotency key.
struct KeyedRequest {
    /// The key of its lock and of its record.
    key: LockKey,
    idempotency_key: IdempotencyKey,
    scope: LockKey,
    fingerprint: Fingerprint,
    /// It has no key of its client.
    is_equal: bool,
}

impl<S, K, V, B, ResB> Service<Request<B>> for ReplayService<S, K, V>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    K: KeySource,
    V: KeySource,
    S: Service<Request<RequestBody>, Response = Response<ResB>, Error: Send + 'static, Future: Send + 'static>
        + Clone
        + Send
        + 'static,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ResponseBody<ResB>>;
    type Error = S::Error;
    type Future = ResponseFuture<Oneshot<S, Request<RequestBody>>, ResB, S::Error>;

    /// Always ready: a request that gets an answer must not use capacity of the inner service.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let inner = self.inner.clone();
        let (mut head, body) = request.map(RequestBody::new).into_parts();
        if !self.config.applies_to(&head.method) {
            leave_for_extractors(&mut head, Unrecorded::Method);
            return ResponseFuture::pass_through(inner.oneshot(Request::from_parts(head, body)));
        }
        let route = &self.config.route;
        // The wait of this layer is for an answer, and its other settings are for its record: the
        // handler has none of them.
        let params = route.params(&head, LockPolicy::new());
        let locks = RequestLocks::new(route.locks.driver(), params, &head);
        let context = locks.context().clone();
        self.config.check_position(&head.extensions, context.known_route());
        let request = LockedRequest::new(inner, head, body, locks);
        let pipeline = replayed(Arc::clone(&self.config), self.values.clone(), request);
        ResponseFuture::locking(context, Box::pin(pipeline))
    }
}

/// The steps of a request: key, body, fingerprint, claim, and then the answer that is kept or the
/// inner service.
async fn replayed<S, K, V, ResB>(
    config: Arc<ReplayConfig<K>>,
    values: V,
    mut request: LockedRequest<S>,
) -> Result<Response<ResponseBody<ResB>>, S::Error>
where
    K: KeySource,
    V: KeySource,
    S: Service<Request<RequestBody>, Response = Response<ResB>>,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let context = request.locks.context().clone();
    let waits = context.start_waiting();
    let KeyedRequest { key, idempotency_key, scope, fingerprint, is_equal } =
        match keyed_request(&config, &values, &context, &mut request).await {
            Ok(Some(request)) => request,
            Ok(None) => {
                drop(waits);
                return Ok(request.pass_through().await?.map(ResponseBody::pass_through));
            }
            Err(KeyRejection::Rejection(rejection)) => {
                return Ok(reject_before_claim(&config, &context, rejection));
            }
            Err(rejection) => {
                let rejection = rejection.or_no_route(request.head());
                return Ok(context.invalid_key(context.known_route(), rejection).map(ResponseBody::rejected));
            }
        };
    let LockedRequest { head, reservation, .. } = &mut request;
    let client = head.as_ref().and_then(|head| head.extensions.get());
    let call = LockCall::claim(&context, key.clone(), idempotency_key.as_str());
    let lock = match call.acquire(client, reservation.as_mut()).await {
        Ok(Acquired::Held(lock)) => lock,
        Ok(Acquired::Recorded(record, span)) => {
            span.recorded();
            let mut answer = replay(&record, &fingerprint);
            // The store has dropped the body. The application may have it.
            if let (Err(Rejection::AnswerNotKept { .. }), Some(find_answer)) = (&answer, &config.find_answer)
                && let Some(found) = within_max_hold(&context, find_answer(key)).await.transpose()
            {
                answer = read_found(found).and_then(|record| replay(&record, &fingerprint));
            }
            return Ok(match answer {
                Ok(response) => {
                    count(&context, Some(&span), "replayed");
                    response
                }
                Err(rejection) => reject(&config, &context, Some(&span), rejection),
            });
        }
        Err(rejection) => return Ok(reject(&config, &context, None, rejection)),
    };
    drop(waits);

    let (mut settings, mut usage) = (Arc::clone(&config.answers), &config.scope_usage);
    if let Some(terms) = config.equal_requests.as_ref().filter(|_| is_equal) {
        Arc::make_mut(&mut settings).keep_for = terms.window;
        usage = &terms.scope_usage;
    }
    let scope = Scope {
        key: scope,
        limits: config.scope_limits,
        usage: Arc::clone(usage),
        now: config.route.locks.driver().now(),
    };
    // Only now: the retry of an earlier request gets its answer.
    if scope.is_full(settings.keep_for) {
        let response = reject(&config, &context, Some(&lock.span), Rejection::TooManyAnswers);
        lock.release_unused();
        return Ok(response);
    }
    let held_lock = HeldLock::of(lock.views());
    request.locks.add(lock);
    let recorder = AnswerRecorder { settings: Arc::clone(&settings), fingerprint, scope, head: None };
    request.locks.set_recorder(recorder, settings.is_record_required);
    if let Some(find_answer) = &config.find_answer {
        let search = context.request_scope().scope(find_answer(key.clone()));
        let found = match request.locks.run(pin!(search)).await {
            Ok(found) => found,
            Err(why) => return Ok(response::aborted(request.locks, why)),
        };
        if let Some(found) = found.transpose() {
            return Ok(replay_found(&config, found, &fingerprint, settings.keep_for, request.locks).await);
        }
    }
    count(&context, request.locks.span(), "first");
    request.head().extensions.insert(Once { lock: held_lock, fingerprint, settings });
    context.insert_into(&mut request.head().extensions);
    let done = request.run().await;
    response::finish_response((request.locks, done)).await
}

/// The key and the fingerprint of a request. `None` if it has no key and needs none, has no scope,
/// or is a request of an outer layer with the same scope. Its body is complete afterwards: a client
/// that does not send it blocks no other request.
async fn keyed_request<K: KeySource, S>(
    config: &ReplayConfig<K>,
    values: &impl KeySource,
    context: &RequestContext,
    request: &mut LockedRequest<S>,
) -> Result<Option<KeyedRequest>, KeyRejection> {
    let LockedRequest { head, body, reservation, .. } = request;
    let head = head.as_mut().expect("before the call");
    let body = &mut context.body_reader(body, reservation);
    let text = if config.key_field.reads_body() { body.read(head).await? } else { Bytes::new() };
    let sent = config.key_field.read(head, &text).await?;
    if sent.is_none() && config.is_required {
        return Err(config.key_field.missing().into());
    }
    let is_equal =
        sent.is_none() && config.equal_requests.is_some() && [Method::POST, Method::PATCH].contains(&head.method);
    if sent.is_none() && !is_equal {
        leave_for_extractors(head, Unrecorded::NoKey);
        return Ok(None);
    }
    let Some(scope) = config.scope.extract_key(head, body).await? else {
        if config.is_required {
            return Err(KeyRejection::NoScope);
        }
        leave_for_extractors(head, Unrecorded::NoScope);
        return Ok(None);
    };
    let scope = one_key(scope)?;
    let idempotency_key = match sent {
        Some(key) => key,
        None => IdempotencyKey::of_equal(&of_whole(head, body).await?),
    };
    let key = idempotency_key.lock_key(&scope);
    // An outer layer with this scope keeps the answer. Its lock is held.
    if head.extensions.get().is_some_and(|outer: &Once| outer.is_running(&key)) {
        return Ok(None);
    }
    if let Some(rejection) = LockCall::claim(context, key.clone(), idempotency_key.as_str()).immediate_rejection() {
        return Err(rejection.into());
    }
    let values = values.extract_key(head, body).await?;
    let fingerprint = match values {
        Some(values) => {
            body.read(head).await?;
            Fingerprint::of_values(head, &one_key(values)?)
        }
        None => of_whole(head, body).await?,
    };
    Ok(Some(KeyedRequest { key, idempotency_key, scope, fingerprint, is_equal }))
}

/// The fingerprint of the whole request.
async fn of_whole(head: &mut Parts, body: &mut BodyReader<'_>) -> Result<Fingerprint, KeyRejection> {
    let content = body.read(head).await?;
    // One reader may use the first media type, and another one the last.
    if head.headers.get_all(CONTENT_TYPE).iter().nth(1).is_some() {
        return Err(Rejection::duplicate_content_type().into());
    }
    Ok(Fingerprint::of_request(head, &content))
}

/// The key of a source whose type has one, which the constructors of the layer require.
fn one_key(keys: impl Into<AllKeys>) -> Result<LockKey, KeyRejection> {
    Ok(keys.into().into_sorted()?.swap_remove(0))
}

/// The answer in a record, for a request with this fingerprint.
fn replay<B>(record: &Record, fingerprint: &Fingerprint) -> Result<Response<ResponseBody<B>>, Rejection> {
    let (first, answer) = Answer::from_record(record).map_err(|invalid| {
        let error = StoreError::new("replay", "read", StoreErrorKind::Protocol).with_source(invalid);
        Rejection::answer_unavailable(error)
    })?;
    if first != *fingerprint {
        return Err(Rejection::IdempotencyKeyReused);
    }
    Ok(answer.into_response()?.map(ResponseBody::replayed))
}

/// Limits a search that runs without a lock to the time that a lock would give it.
async fn within_max_hold(context: &RequestContext, search: FoundAnswer) -> Result<Option<Bytes>, BoxError> {
    timeout(context.policy().request_max_hold(), search).await.unwrap_or_else(|elapsed| Err(elapsed.into()))
}

/// The record in the bytes that the application has found in its database.
fn read_found(found: Result<Bytes, BoxError>) -> Result<Record, Rejection> {
    found.and_then(|bytes| Ok(Answer::record_from_bytes(bytes)?)).map_err(|error| {
        let error = StoreError::new("replay", "find_answer", StoreErrorKind::Unavailable).with_source(error);
        Rejection::answer_unavailable(error)
    })
}

/// Responds with the answer that the application has found in its database, and leaves it as the
/// record.
async fn replay_found<K, B: 'static>(
    config: &ReplayConfig<K>,
    found: Result<Bytes, BoxError>,
    fingerprint: &Fingerprint,
    keep_for: Duration,
    mut locks: RequestLocks,
) -> Response<ResponseBody<B>> {
    let context = locks.context().clone();
    let result = read_found(found).and_then(|record| Ok((replay(&record, fingerprint)?, record)));
    let response = match result {
        Ok((response, record)) => {
            locks.set_record(NewRecord { record, keep_for });
            count(&context, locks.span(), "replayed");
            response
        }
        Err(rejection) => {
            locks.set_failed();
            reject(config, &context, locks.span(), rejection)
        }
    };
    // The application has this answer: its record only spares it the question.
    let _ = locks.release_all().await;
    response
}

fn reject_before_claim<K, B>(
    config: &ReplayConfig<K>,
    context: &RequestContext,
    rejection: Rejection,
) -> Response<ResponseBody<B>> {
    if rejection.is_about_idempotency() {
        // A request that is rejected because of its key has a span of its own already.
        if !matches!(rejection, Rejection::InFlight { .. }) {
            LockSpan::rejected_before_lock(context.known_route(), "invalid_idempotency_key", rejection.status(), None);
        }
        return reject(config, context, None, rejection);
    }
    context.invalid_key(context.known_route(), rejection).map(ResponseBody::rejected)
}

fn reject<K, B>(
    config: &ReplayConfig<K>,
    context: &RequestContext,
    span: Option<&LockSpan>,
    rejection: Rejection,
) -> Response<ResponseBody<B>> {
    if let Some(result) = rejection.replay_result() {
        count(context, span, result);
    }
    if let Some(span) = span {
        span.rejected_by_record(&rejection);
    }
    let mut response = context.on_reject().respond(rejection);
    if let Some(docs) = &config.docs {
        docs.add_to(&mut response);
    }
    response.map(ResponseBody::rejected)
}

fn count(context: &RequestContext, span: Option<&LockSpan>, result: &'static str) {
    count_replay(context.known_route().as_str(), result);
    if let Some(span) = span {
        span.replay(result);
    }
}

impl<S: Clone, K, V: Clone> Clone for ReplayService<S, K, V> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), config: Arc::clone(&self.config), values: self.values.clone() }
    }
}

impl<S: fmt::Debug, K, V> fmt::Debug for ReplayService<S, K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayService").field("inner", &self.inner).finish_non_exhaustive()
    }
}
