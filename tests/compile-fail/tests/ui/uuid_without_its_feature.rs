use tower_lock::LockManager;
use uuid::Uuid;

fn main() {
    let _ = LockManager::in_memory().lock(("order", Uuid::nil()));
}
