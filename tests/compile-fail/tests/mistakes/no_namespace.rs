use axum::extract::Path;

fn main() {
    tower_lock::by(|Path(id): Path<u64>| id);
}
