use axum::extract::Path;

fn main() {
    tower_lock::key::from_fn(|Path(id): Path<u64>| id);
}
