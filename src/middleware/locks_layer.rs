use std::task::{Context, Poll};

use http::{Extensions, Request};
use tower::{Layer, Service};

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
    policy: Policy,
    of_locks: Policy,
}

/// The service of a [`LocksLayer`].
#[derive(Clone, Debug)]
pub struct LocksService<S> {
    inner: S,
    policy: Policy,
    of_locks: Policy,
}

/// What the layers outside say, in the extensions of the request.
#[derive(Clone, Copy, Debug)]
struct Outside {
    layers: Policy,
    of_locks: Policy,
}

impl LocksLayer {
    /// With nothing set but what these locks set.
    pub fn new(locks: &Locks) -> Self {
        Self { policy: Policy::new(), of_locks: locks.policy() }
    }

    policy_setters!();

    /// Sets what this policy sets.
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy: policy.or(self.policy), ..self }
    }
}

impl<S> Layer<S> for LocksLayer {
    type Service = LocksService<S>;

    fn layer(&self, inner: S) -> LocksService<S> {
        let Self { policy, of_locks } = *self;
        LocksService { inner, policy, of_locks }
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
        let outside = match extensions.get::<Outside>() {
            Some(outer) => Outside { layers: self.policy.or(outer.layers), of_locks: self.of_locks.or(outer.of_locks) },
            None => Outside { layers: self.policy, of_locks: self.of_locks },
        };
        extensions.insert(outside);
        self.inner.call(request)
    }
}

/// What counts for a request: what the route sets, else the nearest layer outside, else the locks.
pub(super) fn policy_of(route: Policy, extensions: &Extensions, locks: &Locks) -> Policy {
    match extensions.get::<Outside>() {
        Some(outside) => route.or(outside.layers).or(outside.of_locks).or(locks.policy()),
        None => route.or(locks.policy()),
    }
}
