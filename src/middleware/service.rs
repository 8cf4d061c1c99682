//! A request at a lock layer: key, body, lock, inner service, response.

use std::{
    fmt,
    future::Future,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tower::{BoxError, Service, ServiceExt, util::Oneshot};

use super::{
    acquire::{Acquired, LockCall},
    config::LayerConfig,
    future::ResponseFuture,
    handler::{LockedRequest, Pipeline},
    request_locks::RequestLocks,
    response::{HandlerEnd, ResponseBody, ResponseResult, finish_response},
};
use crate::{
    body::request_body::RequestBody,
    key_source::{KeySource, RequestKeys},
    rejection::RejectionBody,
};

/// Service that runs the inner service under the lock of the request. Created by
/// [`LockLayer`](crate::LockLayer).
///
/// It adds no errors: a rejected request gets a response.
pub struct LockService<S, K> {
    pub(super) inner: S,
    pub(super) config: Arc<LayerConfig<K>>,
}

/// Why a request passed its [`LockLayer`](crate::LockLayer) without a lock. It is in the extensions
/// of the request, for the error of an extractor that needs the lock.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unlocked {
    /// A predicate of the layer matched.
    Skipped,
    /// The key function returned `None`.
    NoKey,
}

impl<S, K, B, ResB> Service<Request<B>> for LockService<S, K>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    K: KeySource,
    S: Service<Request<RequestBody>, Response = Response<ResB>, Error: Send + 'static, Future: Send + 'static>
        + Clone
        + Send
        + 'static,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ResponseBody<ResB>>;
    type Error = S::Error;
    type Future = ResponseFuture<Oneshot<S, Request<RequestBody>>, ResB, S::Error>;

    /// Always ready: a request that waits for its lock must not use capacity of the inner service.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let inner = self.inner.clone();
        let (mut head, body) = request.map(RequestBody::new).into_parts();
        if self.config.skip.as_ref().is_some_and(|skip| skip(&head)) {
            leave_for_extractors(&mut head, Unlocked::Skipped);
            return ResponseFuture::pass_through(inner.oneshot(Request::from_parts(head, body)));
        }
        let route = &self.config.route;
        let locks = RequestLocks::new(route.locks.driver(), route.params(&head, route.policy), &head);
        let context = locks.context().clone();
        let handler = run_locked(Arc::clone(&self.config), LockedRequest::new(inner, head, body, locks));
        let pipeline = Pipeline::Handler { handler, finish: finish_response };
        ResponseFuture::locking(context, Box::pin(pipeline))
    }
}

/// The steps of a request before its response: key, body, lock, inner service. Fails with the
/// response to a request that did not run under a lock.
#[expect(clippy::manual_async_fn, reason = "the future of an `async fn` contains its arguments twice")]
fn run_locked<S, K, ResB>(
    config: Arc<LayerConfig<K>>,
    mut request: LockedRequest<S>,
) -> impl Future<Output = Result<HandlerEnd<ResB, S::Error>, ResponseResult<ResB, S::Error>>>
where
    K: KeySource,
    S: Service<Request<RequestBody>, Response = Response<ResB>>,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    async move {
        // Ends here: the future would contain a response beside the handler.
        let is_locked = match acquire_lock(&config, &mut request).await {
            Ok(is_locked) => is_locked,
            Err(response) => return Err(Ok(response.map(ResponseBody::rejected))),
        };
        if !is_locked {
            return Err(request.pass_through().await.map(|response| response.map(ResponseBody::pass_through)));
        }
        let done = request.run().await;
        Ok((request.locks, done))
    }
}

/// Acquires the lock of a request. Returns false if it has no key. Fails with the response to a
/// request that is rejected.
#[expect(clippy::manual_async_fn, reason = "the future of an `async fn` contains its arguments twice")]
fn acquire_lock<S, K: KeySource>(
    config: &LayerConfig<K>,
    request: &mut LockedRequest<S>,
) -> impl Future<Output = Result<bool, Response<RejectionBody>>> {
    async move {
        let LockedRequest { head, body, reservation, locks, .. } = request;
        let head = head.as_mut().expect("before the call");
        let context = locks.context();
        let waits = context.start_waiting();
        let route = context.known_route();
        let mut reader = context.body_reader(body, reservation);
        let call = match config.key.extract_key(head, &mut reader).await {
            Ok(Some(keys)) => {
                config.without_key.count(true, route);
                LockCall::new(context, route, keys.into())
                    .and_then(|call| call.with_terms(&config.limit, head)?.with_tickets(config.tickets, &head.headers))
            }
            Ok(None) => {
                config.without_key.count(false, route);
                leave_for_extractors(head, Unlocked::NoKey);
                return Ok(false);
            }
            Err(rejection) => Err(rejection.or_no_route(head)),
        };
        let call = call.map_err(|rejection| context.invalid_key(route, rejection))?;
        // Before the lock: a client that does not send its body blocks no other request.
        if context.buffers_body(&head.method) {
            if let Some(rejection) = call.immediate_rejection() {
                return Err(context.on_reject().respond_to(head, rejection));
            }
            reader.read(head).await.map_err(|rejection| context.invalid_key(route, rejection))?;
        }
        let terms = call.terms();
        let acquired = call.acquire(head.extensions.get(), reservation.as_mut()).await;
        let lock = acquired.and_then(Acquired::into_lock);
        let lock = lock.map_err(|rejection| context.on_reject().respond_to(head, rejection))?;
        drop(waits);
        context.insert_held::<<K::Keys as RequestKeys>::View>(&lock, terms.views, &mut head.extensions);
        locks.add(lock);
        Ok(true)
    }
}

/// Leaves a value for the extractors of the handler, which only Axum has.
pub(crate) fn leave_for_extractors<T: Clone + Send + Sync + 'static>(head: &mut Parts, value: T) {
    if cfg!(feature = "axum") {
        head.extensions.insert(value);
    }
}

impl<S: Clone, K> Clone for LockService<S, K> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), config: Arc::clone(&self.config) }
    }
}

impl<S: fmt::Debug, K> fmt::Debug for LockService<S, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockService").field("inner", &self.inner).finish_non_exhaustive()
    }
}
