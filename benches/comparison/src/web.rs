//! The HTTP server of the question `http`, in a process of its own.

use std::sync::Arc;

use axum::{
    Json, Router,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{MethodRouter, post},
    serve::ListenerExt,
};
use tokio::net::TcpListener;
use tower_lock::{HeldLock, LockLayer, LockManager, RedisStore, key};

use crate::peers::{MutexMap, SetNx};

#[derive(serde::Deserialize)]
struct Claim {
    family_id: u64,
    reward_type: u32,
}

pub const NONE: &str = "/none";
pub const LAYER_MEMORY: &str = "/layer-memory";
pub const LAYER_REDIS: &str = "/layer-redis";
pub const MUTEX_MAP: &str = "/mutex-map";
pub const SET_NX: &str = "/set-nx";
pub const SET_NX_POOLED: &str = "/set-nx-pooled";

/// Prints its port.
pub async fn serve(redis: &str) {
    let store = RedisStore::connect(redis).await.expect("a Redis");
    let router = Router::new()
        .route(NONE, post(async |Json(claim): Json<Claim>| work(&claim)))
        .route(LAYER_MEMORY, locked(&LockManager::in_memory()))
        .route(LAYER_REDIS, locked(&LockManager::new(store)))
        .route(MUTEX_MAP, mutex_map())
        .route(SET_NX, set_nx(SetNx::multiplexed(redis).await))
        .route(SET_NX_POOLED, set_nx(SetNx::pooled(redis)));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    println!("{}", listener.local_addr().expect("bound").port());
    axum::serve(listener.tap_io(|socket| _ = socket.set_nodelay(true)), router).await.expect("a server");
}

fn work(claim: &Claim) -> Response {
    (StatusCode::CREATED, format!("claimed for family {}\n", claim.family_id)).into_response()
}

fn locked(locks: &LockManager) -> MethodRouter {
    let reward = key::from_fn(|Json(claim): Json<Claim>| ("reward", claim.family_id, claim.reward_type));
    post(async |_lock: HeldLock, Json(claim): Json<Claim>| work(&claim)).route_layer(LockLayer::new(locks, reward))
}

fn mutex_map() -> MethodRouter {
    let map = Arc::<MutexMap>::default();
    post(async move |Json(claim): Json<Claim>| {
        match map.try_lock(format!("reward:{}:{}", claim.family_id, claim.reward_type)) {
            Some(_guard) => work(&claim),
            None => StatusCode::CONFLICT.into_response(),
        }
    })
}

fn set_nx(locks: SetNx) -> MethodRouter {
    let locks = Arc::new(locks);
    post(async move |Json(claim): Json<Claim>| {
        let key = format!("lock:reward:{}:{}", claim.family_id, claim.reward_type);
        let Some(guard) = locks.try_lock(key).await else { return StatusCode::CONFLICT.into_response() };
        let response = work(&claim);
        locks.unlock(guard).await;
        response
    })
}
