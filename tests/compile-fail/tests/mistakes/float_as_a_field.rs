use tower_lock::{by_fields, key::header};

fn main() {
    by_fields("price", (header("x-shop"), 0.3));
}
