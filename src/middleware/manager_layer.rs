//! The layer that a whole router needs: settings, and locks of extractors.

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower::{BoxError, Layer, Service};

use super::{
    config::RouteConfig,
    future::ResponseFuture,
    handler::Pipeline,
    request_locks::RequestLocks,
    response::{ResponseBody, finish_response},
};
use crate::{
    body::request_body::RequestBody,
    lock::LockManager,
    policy::{LockPolicy, request_setters, settings},
    rejection::{OnReject, Rejection},
};

/// Layer that provides settings to all inner [`LockLayer`](crate::LockLayer)s, usually those of one
/// router, and the manager to [`Locked`](crate::Locked).
///
/// ```
/// # use std::time::Duration;
/// # use axum::{Router, routing::post};
/// # use tower_lock::{LockLayer, LockManager, LockManagerLayer, key};
/// # async fn pay() {} async fn ship() {}
/// # fn app(locks: &LockManager) -> Router {
/// # let order = key::from_parts(|parts| ("order", parts.uri.path().to_owned()));
/// Router::new()
///     .route("/orders/{id}/ship", post(ship).route_layer(LockLayer::new(locks, order.clone())))
///     .route(
///         "/orders/{id}/pay",
///         post(pay).route_layer(LockLayer::new(locks, order).wait(Duration::from_secs(10))),
///     )
///     // For both routes. `pay` has a setting of its own, which wins.
///     .layer(LockManagerLayer::new(locks).wait(Duration::from_secs(2)))
/// # }
/// ```
///
/// A setting of the route wins. Next are the nearest `LockManagerLayer`, outer ones, and the
/// [`LockManager`]. If the layers have different managers, that of the route is first.
///
/// Put the layer directly around its routes, with `.layer(..)` after `.route(..)`. Put timeouts and
/// panic handlers outside of it. Inside of it they make an aborted handler look like a normal
/// response. The layer adds a few hundred nanoseconds to a request that acquires no lock.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing before it is put on a router"]
pub struct LockManagerLayer {
    config: Arc<RouteConfig>,
}

/// Service of a [`LockManagerLayer`].
#[derive(Clone, Debug)]
pub struct LockManagerService<S> {
    inner: S,
    config: Arc<RouteConfig>,
}

impl LockManagerLayer {
    /// Creates a layer that sets nothing.
    pub fn new(locks: &LockManager) -> Self {
        Self { config: Arc::new(RouteConfig::new(locks, LockPolicy::new())) }
    }

    settings!(request_setters);

    /// Sets each setting that this policy sets.
    pub fn policy(self, policy: LockPolicy) -> Self {
        self.with(|config| config.policy = policy.or(config.policy))
    }

    /// Sets the function that creates the responses to rejected requests, for routes that do not
    /// set their own. See [`LockLayer::on_reject`](crate::LockLayer::on_reject).
    pub fn on_reject<F, B>(self, respond: F) -> Self
    where
        F: Fn(&Rejection) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        self.with(|config| config.on_reject = OnReject::new(respond))
    }

    fn with(self, change: impl FnOnce(&mut RouteConfig)) -> Self {
        let mut config = RouteConfig::clone(&self.config);
        change(&mut config);
        Self { config: Arc::new(config) }
    }
}

impl<S> Layer<S> for LockManagerLayer {
    type Service = LockManagerService<S>;

    fn layer(&self, inner: S) -> LockManagerService<S> {
        self.config.note_policy();
        LockManagerService { inner, config: Arc::clone(&self.config) }
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
        let (mut head, mut body) = request.map(RequestBody::new).into_parts();
        let params = self.config.provided(&head.extensions);
        let request_locks = RequestLocks::new(self.config.locks.driver(), Arc::clone(&params), &head);
        let context = request_locks.context().clone();
        head.extensions.insert(params);
        context.insert_into(&mut head.extensions);
        // For extractors, which only Axum has.
        if cfg!(feature = "axum") && context.buffers_body(&head.method) {
            let (shared, handle) = body.share();
            body = shared;
            if let Some(handle) = handle {
                head.extensions.insert(handle);
            }
        }
        let request = Request::from_parts(head, body.observed_by(|| context.body_observer(), context.policy()));
        context.set_running(true);
        let scope = context.request_scope();
        let handler = scope.clone().scope_sync(|| self.inner.call(request));
        let handler = async move {
            let done = request_locks.run(pin!(scope.scope(handler))).await;
            Ok((request_locks, done))
        };
        let pipeline = Pipeline::Handler { handler, finish: finish_response };
        ResponseFuture::locking(context, Box::pin(pipeline))
    }
}
