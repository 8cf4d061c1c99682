//! The layer, on the memory store: a request from its head to the end of its response.

use std::{cell::Cell, convert::Infallible, future::Future};

use allocation_counter::AllocationInfo;
use axum::{Json, Router, extract::Path, routing::post};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_lock::{LockKey, LockLayer, LockManager, key, key::KeySource, middleware::RequestBody};

use super::{cost, now, runtime};

type In = Request<RequestBody>;

#[derive(serde::Deserialize)]
struct Claim {
    family_id: u64,
    reward_type: u32,
}

async fn hello(_: In) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
}

fn layer<K: KeySource>(locks: &LockManager, key: K) -> LockLayer<K> {
    LockLayer::new(locks, key)
}

fn request_cost<S, B>(service: &S, status: StatusCode) -> AllocationInfo
where
    S: Service<In, Response = Response<B>, Error = Infallible> + Clone,
    B: http_body_util::BodyExt,
{
    cost(|| {
        let Ok(response) = now(service.clone().oneshot(In::default()));
        assert_eq!(response.status(), status);
        drop(now(response.into_body().collect()));
    })
}

#[test]
fn x() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let _held = now(locks.try_lock(("held",))).expect("free");
    let lock = cost(|| drop(now(now(locks.try_lock(("reward", 42))).expect("free").release()).expect("in memory")));
    println!("lock {lock:?}");
    let ok = StatusCode::OK;
    println!("bare {:?}", request_cost(&service_fn(hello), ok));
    println!("skipped {:?}", request_cost(&layer(&locks, key::fixed(("held",))).skip(|_| true).layer(service_fn(hello)), ok));
    println!("no key {:?}", request_cost(&layer(&locks, key::from_parts(|_| None::<LockKey>)).layer(service_fn(hello)), ok));
    println!("granted {:?}", request_cost(&layer(&locks, key::from_parts(|_| ("reward", 42))).layer(service_fn(hello)), ok));
    println!("rejected {:?}", request_cost(&layer(&locks, key::from_parts(|_| ("held",))).layer(service_fn(hello)), StatusCode::CONFLICT));

    let app: Router = Router::new()
        .route("/path/{id}/bare", post(async |Path(_): Path<u64>| "hello"))
        .route("/path/{id}", post(async |Path(_): Path<u64>| "hello").route_layer(layer(&locks, key::from_fn(|Path(id): Path<u64>| ("order", id)))))
        .route("/body/bare", post(async |Json(_): Json<Claim>| "hello"))
        .route("/body", post(async |Json(_): Json<Claim>| "hello").route_layer(layer(&locks, key::from_fn(|Json(c): Json<Claim>| ("reward", c.family_id, c.reward_type)))));
    for path in ["/path/42/bare", "/path/42", "/body/bare", "/body"] {
        println!("{path} {:?}", cost(|| {
            let r = Request::post(path).header("content-type", "application/json").body(axum::body::Body::from(r#"{"family_id":42,"reward_type":10}"#)).unwrap();
            let response = now(app.clone().oneshot(r)).unwrap();
            assert_eq!(response.status(), ok);
            drop(now(response.into_body().collect()));
        }));
    }
}
