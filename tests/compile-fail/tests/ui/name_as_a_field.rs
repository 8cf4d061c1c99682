fn main() {
    tower_lock::key::from_fields("order", "id");
}
