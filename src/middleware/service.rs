use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tower::{BoxError, Service, ServiceExt, util::Oneshot};

use super::{
    config::LayerConfig, context::RequestContext, future::ResponseFuture, handler::run_handler,
    manager_state::ManagerState, request_locks::RequestLocks, response_body::ResponseBody, unlocked::Unlocked,
};
use crate::{
    body::{reader::BodyReader, request_body::RequestBody},
    key_source::{KeyRejection, KeySource},
};

/// Service that runs the inner service under the lock of the request. Created by
/// [`LockLayer`](crate::LockLayer).
///
/// It adds no errors: a rejected request gets a response.
pub struct LockService<S, K> {
    inner: S,
    config: Arc<LayerConfig<K>>,
}

impl<S, K> LockService<S, K> {
    pub(super) fn new(inner: S, config: Arc<LayerConfig<K>>) -> Self {
        Self { inner, config }
    }
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
        if self.config.skips(&head) {
            mark_unlocked(&mut head, Unlocked::Skipped);
            return ResponseFuture::pass_through(inner.oneshot(Request::from_parts(head, body)));
        }
        let (driver, params) = (self.config.locks.driver(), self.config.params(&head));
        let (context, keeps_owner_open) = RequestContext::new(driver, params, &head.headers, &head.extensions);
        let request_locks = RequestLocks::new(context.clone(), keeps_owner_open);
        let pipeline = locked(Arc::clone(&self.config), inner, head, body, request_locks);
        ResponseFuture::locking(context, Box::pin(pipeline))
    }
}

/// The steps of a request: key, body, lock, inner service, response.
async fn locked<S, K, ResB>(
    config: Arc<LayerConfig<K>>,
    mut inner: S,
    mut head: Parts,
    body: RequestBody,
    mut locks: RequestLocks,
) -> Result<Response<ResponseBody<ResB>>, S::Error>
where
    K: KeySource,
    S: Service<Request<RequestBody>, Response = Response<ResB>>,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let context = locks.context().clone();
    let waits = context.start_waiting();
    let route = context.known_route();
    let mut body = BodyReader::new(body, &ManagerState::of(config.locks.driver()).body_budget, context.policy());
    let key = match config.key.extract_key(&mut head, &mut body).await {
        Ok(Some(key)) => key,
        Ok(None) => {
            drop(waits);
            let (body, reservation) = body.into_parts();
            mark_unlocked(&mut head, Unlocked::NoKey);
            let ready = inner.ready().await?;
            drop(reservation);
            return Ok(ready.call(Request::from_parts(head, body)).await?.map(ResponseBody::pass_through));
        }
        Err(rejection) => {
            return Ok(rejection
                .or_no_route(&head)
                .into_response(route, context.on_reject())
                .map(ResponseBody::rejected));
        }
    };
    // Before the lock: a client that does not send its body blocks no other request.
    if context.buffers_body(&head.method) {
        if let Some(rejection) = context.immediate_rejection(route, &key) {
            return Ok(context.on_reject().respond(rejection).map(ResponseBody::rejected));
        }
        if let Err(rejection) = body.read(&mut head).await {
            return Ok(KeyRejection::from(rejection)
                .into_response(route, context.on_reject())
                .map(ResponseBody::rejected));
        }
    }
    let (body, mut reservation) = body.into_parts();
    let lock = match context.acquire(route, key, head.extensions.get(), reservation.as_mut()).await {
        Ok(lock) => lock,
        Err(rejection) => return Ok(context.on_reject().respond(rejection).map(ResponseBody::rejected)),
    };
    drop(waits);

    let held_lock = lock.held_lock();
    locks.add(lock);
    run_handler(locks, inner, head, body, reservation, Some(held_lock)).await
}

fn mark_unlocked(head: &mut Parts, why: Unlocked) {
    // For extractors, which only Axum has.
    if cfg!(feature = "axum") {
        head.extensions.insert(why);
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
