use tower_lock::Locks;

fn main() {
    let _ = Locks::in_memory().lock(("price", 0.3));
}
