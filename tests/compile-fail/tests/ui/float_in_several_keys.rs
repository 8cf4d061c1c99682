//! Floats are no keys, not even several of them.

use tower_lock::{LockManager, key};

fn main() {
    let _ = key::all([("price", 0.1), ("price", 0.3)]);
    let _ = LockManager::in_memory().lock_all([("price", 0.1)]);
}
