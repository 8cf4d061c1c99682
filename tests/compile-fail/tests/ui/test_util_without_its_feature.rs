use tower_lock::test_util::held_lock;

fn main() {
    let _ = held_lock(("reward", 7), 42);
}
