use tower_lock::key;

fn main() {
    key::from_fields("price", key::extension::<f64>());
}
