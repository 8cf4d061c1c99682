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
    config::Config, context::Slot, future::ResponseFuture, request_locks::Duty, response, response_body::ResponseBody,
};
use crate::{
    body::{reader::BodyReader, request_body::RequestBody},
    key_source::{KeySource, NoKey},
};

/// Runs the inner service under the lock of the request. Made by [`LockLayer`](crate::LockLayer).
///
/// It adds no error of its own: whoever is turned away gets a response.
pub struct LockService<S, K> {
    inner: S,
    config: Arc<Config<K>>,
}

impl<S, K> LockService<S, K> {
    pub(super) fn new(inner: S, config: Arc<Config<K>>) -> Self {
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

    /// Always ready: a request that waits for its lock must not sit on the capacity of the inner service.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let inner = self.inner.clone();
        let (head, body) = request.map(RequestBody::new).into_parts();
        if self.config.skips(&head) {
            return ResponseFuture::passing(inner.oneshot(Request::from_parts(head, body)));
        }
        let (slot, tenure) = Slot::new(self.config.terms(&head), &head.headers, &head.extensions);
        let duty = Duty::new(slot.clone(), tenure);
        let steps = locked(Arc::clone(&self.config), inner, head, body, duty);
        ResponseFuture::under(slot, Box::pin(steps))
    }
}

/// The way of a request that asks for a lock: its key, its body, its turn, the inner service, its end.
async fn locked<S, K, ResB>(
    config: Arc<Config<K>>,
    mut inner: S,
    mut head: Parts,
    body: RequestBody,
    mut duty: Duty,
) -> Result<Response<ResponseBody<ResB>>, S::Error>
where
    K: KeySource,
    S: Service<Request<RequestBody>, Response = Response<ResB>>,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let slot = duty.slot().clone();
    let waits = slot.waits();
    let route = slot.route(&head.extensions);
    let mut body = BodyReader::new(body, config.locks.driver().bodies(), slot.policy());
    let key = match config.key.derive(&mut head, &mut body).await {
        Ok(Some(key)) => key,
        Ok(None) => {
            drop(waits);
            let (body, room) = body.finish();
            let ready = inner.ready().await?;
            drop(room);
            return Ok(ready.call(Request::from_parts(head, body)).await?.map(ResponseBody::passing));
        }
        Err(no_key) => return Ok(no_key.of(&head).answer(&route, slot.on_reject()).map(ResponseBody::rejected)),
    };
    // Before the lock: a client that does not send its body keeps no other request waiting.
    if slot.buffers_body(&head.method) {
        if let Some(rejection) = slot.refusal(&route, &key) {
            return Ok(slot.on_reject().answer(rejection).map(ResponseBody::rejected));
        }
        if let Err(rejection) = body.read(&mut head).await {
            return Ok(NoKey::from(rejection).answer(&route, slot.on_reject()).map(ResponseBody::rejected));
        }
    }
    let (body, mut room) = body.finish();
    let section = match slot.enter(&route, key, head.extensions.get(), room.as_mut()).await {
        Ok(section) => section,
        Err(rejection) => return Ok(slot.on_reject().answer(rejection).map(ResponseBody::rejected)),
    };
    drop(waits);

    head.extensions.insert(slot.owner().clone());
    head.extensions.insert(section.view());
    head.extensions.insert(slot.clone());
    let method = head.method.clone();
    let request = Request::from_parts(head, body.watched_by(slot.body_observer(), slot.policy()));
    duty.begin(section);
    let span = duty.span();
    // It owns the service: what that has taken for this request is gone with it, before the lock is.
    let handler = async move {
        // Only now: a request that waits must not sit on the capacity of the inner service.
        let ready = inner.ready().await?;
        // Its body waits no longer.
        drop(room);
        slot.runs(true);
        match span {
            Some(span) => span.around(|| ready.call(request)).await,
            None => ready.call(request).await,
        }
    };
    let done = duty.run(handler).await;
    response::answer(duty, &method, done).await
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
