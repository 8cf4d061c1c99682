use tower_lock::Locks;
use uuid::Uuid;

fn main() {
    let _ = Locks::in_memory().lock(("order", Uuid::nil()));
}
