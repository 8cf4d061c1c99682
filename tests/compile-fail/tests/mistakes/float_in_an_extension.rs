use tower_lock::{by_fields, key::extension};

fn main() {
    by_fields("price", extension::<f64>());
}
