fn main() {
    tower_lock::by_fields("order", "id");
}
