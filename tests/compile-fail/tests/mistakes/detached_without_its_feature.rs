use tower_lock::HeldLock;

fn main() {
    let _ = HeldLock::detached(("reward", 7), 42);
}
