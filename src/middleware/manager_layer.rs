use std::{
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower::{BoxError, Layer, Service};

use super::{
    config::{Outside, Terms},
    context::Slot,
    future::ResponseFuture,
    request_locks::Duty,
    response,
    response_body::ResponseBody,
};
use crate::{
    body::request_body::RequestBody,
    lock::LockManager,
    policy::{LockPolicy, request_setters, settings},
    rejection::{OnReject, Rejection, retry_after::UsualHold},
};

/// Settings for all [`LockLayer`](crate::LockLayer)s inside, those of one router; and what [`Locked`](crate::Locked) takes its locks
/// from.
///
/// ```
/// # use std::time::Duration;
/// # use axum::{Router, routing::post};
/// # use tower_lock::{LockLayer, LockManager, LockManagerLayer, key};
/// # async fn pay() {} async fn ship() {}
/// # fn app(locks: &LockManager) -> Router {
/// # let order = key::from_parts(|parts| ("order", parts.uri.path().to_owned()));
/// Router::new()
///     .route("/orders/{id}/pay", post(pay).route_layer(LockLayer::new(locks, order.clone()).wait(Duration::from_secs(10))))
///     .route("/orders/{id}/ship", post(ship).route_layer(LockLayer::new(locks, order)))    // waits two seconds
///     .layer(LockManagerLayer::new(locks).wait(Duration::from_secs(2)))
/// # }
/// ```
///
/// What a route sets wins over the nearest `LockManagerLayer`, that over those outside of it, all over the [`LockManager`].
///
/// Directly around the routes it is for, `.layer(..)` after `.route(..)`: what times out, catches panics or goes on without its client stands
/// further out, or it ends a handler where the lock cannot see it. A request that takes no lock costs it a few hundred nanoseconds.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing before it is put on a router"]
pub struct LockManagerLayer {
    locks: LockManager,
    says: Outside,
    usual_hold: Arc<UsualHold>,
}

/// The service of a [`LockManagerLayer`].
#[derive(Clone, Debug)]
pub struct LockManagerService<S> {
    inner: S,
    layer: LockManagerLayer,
}

impl LockManagerLayer {
    /// With nothing set but what these locks set.
    pub fn new(locks: &LockManager) -> Self {
        let says = Outside { layers: LockPolicy::new(), of_locks: locks.policy(), on_reject: OnReject::default() };
        Self { locks: locks.clone(), says, usual_hold: Arc::default() }
    }

    settings!(request_setters);

    /// Sets what this policy sets.
    pub fn policy(mut self, policy: LockPolicy) -> Self {
        self.says.layers = policy.or(self.says.layers);
        self
    }

    /// Answers requests that are turned away on a route that does not say itself how. See
    /// [`LockLayer::on_reject`](crate::LockLayer::on_reject).
    pub fn on_reject<F, B>(mut self, answer: F) -> Self
    where
        F: Fn(&Rejection) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        self.says.on_reject = OnReject::new(answer);
        self
    }
}

impl<S> Layer<S> for LockManagerLayer {
    type Service = LockManagerService<S>;

    fn layer(&self, inner: S) -> LockManagerService<S> {
        LockManagerService { inner, layer: self.clone() }
    }
}

impl<S, B, ResB> Service<Request<B>> for LockManagerService<S>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    S: Service<Request<RequestBody>, Response = Response<ResB>, Error: Send + 'static, Future: Send + 'static>,
    ResB: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ResponseBody<ResB>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, ResB, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let mut request = request.map(RequestBody::new);
        let says = self.layer.says.over(request.extensions().get());
        let terms = self.layer.terms(&says);
        let (slot, tenure) = Slot::new(terms, request.headers(), request.extensions());
        let extensions = request.extensions_mut();
        extensions.insert(says);
        extensions.insert(slot.owner().clone());
        extensions.insert(slot.clone());
        let method = request.method().clone();
        let (mut head, mut body) = request.into_parts();
        // For extractors, and only Axum has them.
        if cfg!(feature = "axum") && slot.buffers_body(&method) {
            let (shared, handle) = body.shared();
            body = shared;
            if let Some(handle) = handle {
                head.extensions.insert(handle);
            }
        }
        let request = Request::from_parts(head, body.watched_by(slot.body_observer(), slot.policy()));
        slot.runs(true);
        let handler = slot.in_request().scope_sync(|| self.inner.call(request));
        let duty = Duty::new(slot.clone(), tenure);
        ResponseFuture::under(
            slot,
            Box::pin(async move {
                let done = duty.run(handler).await;
                response::answer(duty, &method, done).await
            }),
        )
    }
}

impl LockManagerLayer {
    fn terms(&self, says: &Outside) -> Terms {
        Terms {
            core: Arc::clone(self.locks.driver()),
            policy: Outside::policy(Some(says), LockPolicy::new(), &self.locks),
            on_reject: says.on_reject.clone(),
            usual_hold: Arc::clone(&self.usual_hold),
            name: None,
        }
    }
}
