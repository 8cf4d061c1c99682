use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower::{BoxError, Service, ServiceExt, util::Oneshot};

use super::{
    body_out::ResponseBody,
    config::Config,
    ending,
    future::ResponseFuture,
    key_source::{Derived, KeySourceFor, NoKey},
    locks_layer::Outside,
    rejection::{OnReject, Rejection, RejectionBody},
    section::Duty,
    slot::{Slot, Terms},
    trace::{LockSpan, Route},
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
    B: Send + 'static,
    K: KeySourceFor<B, Body: Send + 'static>,
    S: Service<Request<K::Body>, Response = Response<ResB>, Error: Send + 'static, Future: Send + 'static>
        + Clone
        + Send
        + 'static,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ResponseBody<ResB>>;
    type Error = S::Error;
    type Future = ResponseFuture<Oneshot<S, Request<K::Body>>, ResB, S::Error>;

    /// Always ready: a request that waits for its lock must not sit on the capacity of the inner service.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let inner = self.inner.clone();
        let (request, skipped) = self.config.skips(request);
        if skipped {
            return ResponseFuture::passing(inner.oneshot(K::pass(request)));
        }
        let (slot, tenure) = Slot::new(self.config.terms(&request), request.headers(), request.extensions());
        let duty = Duty::new(slot.clone(), tenure);
        let steps = locked(Arc::clone(&self.config), inner, request, duty);
        ResponseFuture::under(slot, Box::pin(steps))
    }
}

/// The way of a request that asks for a lock: its key, its turn, the inner service, its end.
async fn locked<S, K, B, ResB>(
    config: Arc<Config<K>>,
    mut inner: S,
    request: Request<B>,
    mut duty: Duty,
) -> Result<Response<ResponseBody<ResB>>, S::Error>
where
    K: KeySourceFor<B>,
    S: Service<Request<K::Body>, Response = Response<ResB>>,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let slot = duty.slot().clone();
    let waits = slot.waits();
    let route = slot.route(request.extensions());
    let (mut request, key, room) = match config.key.derive(request, &config.locks).await {
        Ok(Derived { request, key: Some(key), room }) => (request, key, room),
        Ok(Derived { request, key: None, room }) => {
            drop(waits);
            let ready = inner.ready().await?;
            drop(room);
            return Ok(ready.call(request).await?.map(ResponseBody::passing));
        }
        Err(no_key) => return Ok(no_key.answer(&route, slot.on_reject()).map(ResponseBody::rejected)),
    };
    let section = match slot.enter(&route, key).await {
        Ok(section) => section,
        Err(rejection) => return Ok(slot.on_reject().answer(rejection).map(ResponseBody::rejected)),
    };
    drop(waits);

    let extensions = request.extensions_mut();
    extensions.insert(slot.owner().clone());
    extensions.insert(section.view());
    extensions.insert(slot.clone());
    let method = request.method().clone();
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
    ending::answer(duty, &method, done).await
}

impl<K> Config<K> {
    fn skips<B>(&self, request: Request<B>) -> (Request<B>, bool) {
        let Some(skip) = &self.skip else { return (request, false) };
        let (head, body) = request.into_parts();
        let skips = skip(&head);
        (Request::from_parts(head, body), skips)
    }

    fn terms<B>(&self, request: &Request<B>) -> Terms {
        let outside = request.extensions().get();
        Terms {
            core: Arc::clone(self.locks.core()),
            policy: Outside::policy(outside, self.policy, &self.locks),
            on_reject: self.on_reject.or(outside.map(Outside::on_reject)).clone(),
            usual_hold: Arc::clone(&self.usual_hold),
            name: self.name,
        }
    }
}

impl NoKey {
    fn answer(self, route: &Route, on_reject: &OnReject) -> Response<RejectionBody> {
        match self {
            Self::Answered(mut response) => {
                LockSpan::without_key(route, "bad_key");
                let status = response.status();
                response.extensions_mut().insert(Rejection::BadKey { status, field: None });
                response
            }
            Self::Rejected(rejection) => {
                let result = match rejection {
                    Rejection::BodyTooLarge => "body_too_large",
                    Rejection::BodiesFull { .. } => "bodies_full",
                    _ => "bad_key",
                };
                LockSpan::without_key(route, result);
                on_reject.answer(rejection)
            }
        }
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
