use axum::{Json, extract::Path};

fn main() {
    tower_lock::key::from_fn(|Json(amount): Json<u64>, Path(id): Path<u64>| ("account", id, amount));
}
