use tower_lock::LockManager;

fn main() {
    let _ = LockManager::in_memory().lock(("price", 0.3));
}
