use tower_lock::key;

fn main() {
    key::from_fields("price", (key::header("x-shop"), 0.3));
}
