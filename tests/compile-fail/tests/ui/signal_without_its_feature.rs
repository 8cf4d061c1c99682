use std::time::Duration;

use tower_lock::LockManager;

fn main() {
    let _ = LockManager::in_memory().shutdown_on_signal(Duration::from_secs(20));
}
