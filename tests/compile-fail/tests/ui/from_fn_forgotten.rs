use axum::{Router, extract::Path, routing::post};
use tower_lock::{LockLayer, LockManager};

fn main() {
    let locks = LockManager::in_memory();
    let _: Router = Router::new().route(
        "/orders/{id}",
        post(|| async {}).route_layer(LockLayer::new(&locks, |Path(id): Path<u64>| ("order", id))),
    );
}
