//! A layer that keeps answers has one key for each of them.

use axum::extract::Path;
use tower_lock::{LockManager, ReplayLayer, key};

fn main() {
    let locks = LockManager::in_memory();
    let users = key::from_fn(|Path((ann, bob)): Path<(u64, u64)>| key::all([("user", ann), ("user", bob)]));
    let _ = ReplayLayer::new(&locks, users);
}
