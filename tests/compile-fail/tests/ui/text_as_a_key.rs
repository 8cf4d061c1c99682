use tower_lock::LockManager;

fn main() {
    let locks = LockManager::in_memory();
    let _ = locks.lock("nightly");
    let _ = locks.try_lock(format!("order-{}", 7));
}
