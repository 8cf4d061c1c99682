use axum::{Json, extract::Path};

fn main() {
    tower_lock::by(|Json(amount): Json<u64>, Path(id): Path<u64>| ("account", id, amount));
}
