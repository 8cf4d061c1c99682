use tower_lock::{by_fields, extension};

fn main() {
    by_fields("price", extension::<f64>());
}
