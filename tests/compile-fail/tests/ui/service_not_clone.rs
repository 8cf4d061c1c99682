use std::{convert::Infallible, future::Ready, task::{Context, Poll}};

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, Service, ServiceBuilder};
use tower_lock::{LockLayer, LockManager, ReplayLayer, key, middleware::RequestBody};

struct Counter(u64);

impl Service<Request<RequestBody>> for Counter {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<RequestBody>) -> Self::Future {
        self.0 += 1;
        std::future::ready(Ok(Response::default()))
    }
}

fn main() {
    let locks = LockManager::in_memory();
    LockLayer::new(&locks, key::fixed(("a",))).layer(Counter(0));
    ServiceBuilder::new().layer(ReplayLayer::new(&locks, key::fixed(("a",)))).service(Counter(0));
}
