//! A request at a layer, on the memory store: from its call to the end of its response body.

use std::{convert::Infallible, pin::pin};

use axum::{Json, Router, body, extract::Path, routing::post};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_lock::{
    LockKey, LockLayer, LockManager, LockManagerLayer,
    key::{self, KeySource},
    middleware::RequestBody,
};

use super::{
    Cost,
    locks::{cycle, rejection},
    now, runtime,
};

async fn hello(_: Request<RequestBody>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
}

/// The cost of a request without a body, which gets this status.
fn cost<S, B>(service: &S, status: StatusCode) -> Cost
where
    S: Service<Request<RequestBody>, Response = Response<B>, Error = Infallible> + Clone,
    B: Body<Data = Bytes>,
{
    Cost::of(|| {
        let Ok(response) = now(service.clone().oneshot(Request::default()));
        assert_eq!(response.status(), status);
        read(response.into_body());
    })
}

/// Reads a body without a list of its frames.
fn read(body: impl Body<Data = Bytes>) {
    let mut body = pin!(body);
    while let Some(Ok(frame)) = now(body.frame()) {
        assert!(frame.is_data());
    }
}

/// The cost that the layer adds to a route of Axum, without that of its lock.
fn added_to_route<K: KeySource>(
    locks: &LockManager,
    route: &str,
    key: K,
    handler: axum::routing::MethodRouter,
) -> Cost {
    let cost = |app: Router| {
        Cost::of(|| {
            let claim = body::Body::from(r#"{"family_id":42,"reward_type":10}"#);
            let request = Request::post("/rewards/42").header("content-type", "application/json").body(claim);
            let Ok(response) = now(app.clone().oneshot(request.expect("valid")));
            assert_eq!(response.status(), StatusCode::OK);
            read(response.into_body());
        })
    };
    let bare = cost(Router::new().route(route, handler.clone()));
    cost(Router::new().route(route, handler.route_layer(LockLayer::new(locks, key)))) - bare - cycle(locks)
}

#[test]
fn granted_request_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let layer = LockLayer::new(&locks, key::from_parts(|_| ("reward", 42_u64)));
    let granted = cost(&layer.layer(service_fn(hello)), StatusCode::OK);
    (granted - cycle(&locks)).is_at_most(5, 1_800);
}

#[test]
fn rejected_request_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let _held = now(locks.try_lock(("reward", 42_u64))).expect("free");
    let layer = LockLayer::new(&locks, key::from_parts(|_| ("reward", 42_u64)));
    let rejected = cost(&layer.layer(service_fn(hello)), StatusCode::CONFLICT);
    (rejected - rejection(&locks)).is_at_most(7, 2_500);
}

#[test]
fn manager_layer_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let inner = LockLayer::new(&locks, key::from_parts(|_| ("reward", 42_u64))).layer(service_fn(hello));
    let with_manager = cost(&LockManagerLayer::new(&locks).layer(inner.clone()), StatusCode::OK);
    (with_manager - cost(&inner, StatusCode::OK)).is_at_most(3, 1_800);
}

/// It has headers and extensions, as the request of a server.
#[test]
fn rejection_is_made_in_the_memory_of_its_request() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let _held = now(locks.try_lock(("reward", 42_u64))).expect("free");
    let service = LockLayer::new(&locks, key::from_parts(|_| ("reward", 42_u64))).layer(service_fn(hello));
    let request = || {
        let request = Request::post("/").header("host", "shop").header("accept", "*/*").header("te", "trailers");
        request.extension(7_u64).body(RequestBody::default()).expect("valid")
    };
    let rejected = Cost::of(|| {
        let Ok(response) = now(service.clone().oneshot(request()));
        assert_eq!((response.status(), response.extensions().len()), (StatusCode::CONFLICT, 1));
        assert_eq!(response.headers().len(), 3, "none of the request");
        read(response.into_body());
    });
    let request = Cost::of(|| drop(request()));
    (rejected - request - rejection(&locks)).is_at_most(3, 1_900);
}

#[test]
fn skipped_request_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let layer = LockLayer::new(&locks, key::fixed(("reward",))).skip(|_| true);
    cost(&layer.layer(service_fn(hello)), StatusCode::OK).is_at_most(3, 200);
}

#[test]
fn request_without_a_key_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let layer = LockLayer::new(&locks, key::from_parts(|_| None::<LockKey>));
    cost(&layer.layer(service_fn(hello)), StatusCode::OK).is_at_most(5, 1_900);
}

#[test]
fn key_from_a_path_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let key = key::from_fn(|Path(family): Path<u64>| ("reward", family));
    let handler = post(async |Path(_): Path<u64>| "claimed");
    added_to_route(&locks, "/rewards/{family}", key, handler).is_at_most(12, 2_700);
}

#[test]
fn key_from_a_body_stays_within_its_allocations() {
    #[derive(serde::Deserialize)]
    struct Claim {
        family_id: u64,
    }
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let key = key::from_fn(|Json(claim): Json<Claim>| ("reward", claim.family_id));
    let handler = post(async |Json(claim): Json<Claim>| claim.family_id.to_string());
    added_to_route(&locks, "/rewards/{family}", key, handler).is_at_most(29, 4_048);
}

#[test]
fn future_of_a_request_stays_small() {
    let locks = LockManager::in_memory();
    let mut service = LockLayer::new(&locks, key::from_parts(|_| ("reward", 42_u64))).layer(service_fn(hello));
    let future = service.call(Request::<RequestBody>::default());
    let size = size_of_val(&future);
    println!("{size} bytes");
    assert!(size <= 320, "{size} bytes");
}
