use tower_lock::HeldLock;

fn main() {
    let _ = HeldLock::for_test(("reward", 7), 42);
}
