use axum::extract::Path;
use tower_lock::{LockLayer, LockManager, key};

#[derive(serde::Deserialize)]
struct FamilyId(u64);

fn main() {
    let _ = LockLayer::new(&LockManager::in_memory(), key::from_fn(|Path(id): Path<FamilyId>| ("reward", id)));
}
