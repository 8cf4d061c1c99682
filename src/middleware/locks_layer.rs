use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Extensions, Request, Response};
use http_body::Body;
use tower::{BoxError, Layer, Service};

use super::rejection::{OnReject, Rejection};
use crate::lock::{Locks, Policy, policy_setters};

/// Settings for all [`LockLayer`](crate::LockLayer)s inside: those of one router.
///
/// ```
/// # use std::time::Duration;
/// # use axum::{Router, routing::post};
/// # use tower_lock::{LockLayer, Locks, LocksLayer, by_parts};
/// # async fn pay() {} async fn ship() {}
/// # fn app(locks: &Locks) -> Router {
/// # let order = by_parts(|parts| ("order", parts.uri.path().to_owned()));
/// Router::new()
///     .route("/orders/{id}/pay", post(pay).route_layer(LockLayer::new(locks, order.clone()).wait(Duration::from_secs(10))))
///     .route("/orders/{id}/ship", post(ship).route_layer(LockLayer::new(locks, order)))    // waits two seconds
///     .layer(LocksLayer::new(locks).wait(Duration::from_secs(2)))
/// # }
/// ```
///
/// What a route sets wins over the nearest `LocksLayer`, that over those outside of it, all over the [`Locks`].
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing before it is put on a router"]
pub struct LocksLayer {
    says: Outside,
}

/// The service of a [`LocksLayer`].
#[derive(Clone, Debug)]
pub struct LocksService<S> {
    inner: S,
    says: Outside,
}

/// What the layers outside say: in the extensions of the request.
#[derive(Clone, Debug)]
pub(super) struct Outside {
    layers: Policy,
    of_locks: Policy,
    on_reject: OnReject,
}

impl LocksLayer {
    /// With nothing set but what these locks set.
    pub fn new(locks: &Locks) -> Self {
        Self { says: Outside { layers: Policy::new(), of_locks: locks.policy(), on_reject: OnReject::default() } }
    }

    policy_setters!();

    /// Sets what this policy sets.
    pub fn policy(mut self, policy: Policy) -> Self {
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

impl<S> Layer<S> for LocksLayer {
    type Service = LocksService<S>;

    fn layer(&self, inner: S) -> LocksService<S> {
        LocksService { inner, says: self.says.clone() }
    }
}

impl<S, B> Service<Request<B>> for LocksService<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> S::Future {
        let extensions = request.extensions_mut();
        let says = self.says.over(extensions.get());
        extensions.insert(says);
        self.inner.call(request)
    }
}

impl Outside {
    /// The nearest one wins.
    fn over(&self, outer: Option<&Self>) -> Self {
        let Some(outer) = outer else { return self.clone() };
        Self {
            layers: self.layers.or(outer.layers),
            of_locks: self.of_locks.or(outer.of_locks),
            on_reject: self.on_reject.or(Some(&outer.on_reject)).clone(),
        }
    }

    /// What counts for a request: what the route sets, else the nearest layer outside, else the locks.
    pub(super) fn policy(outside: Option<&Self>, route: Policy, locks: &Locks) -> Policy {
        match outside {
            Some(Self { layers, of_locks, .. }) => route.or(*layers).or(*of_locks).or(locks.policy()),
            None => route.or(locks.policy()),
        }
    }

    pub(super) fn on_reject(&self) -> &OnReject {
        &self.on_reject
    }

    pub(super) fn of(extensions: &Extensions) -> Option<Self> {
        extensions.get().cloned()
    }
}
