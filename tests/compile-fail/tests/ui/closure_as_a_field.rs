use axum::extract::Path;

fn main() {
    tower_lock::key::from_fields("order", |Path(id): Path<u64>| id);
}
