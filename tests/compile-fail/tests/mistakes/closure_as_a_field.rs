use axum::extract::Path;

fn main() {
    tower_lock::by_fields("order", |Path(id): Path<u64>| id);
}
