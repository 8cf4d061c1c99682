use axum::extract::Path;

fn main() {
    tower_lock::by(|Path((kind, id)): Path<(String, u64)>| (kind, id));
}
