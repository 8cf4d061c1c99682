use axum::extract::Path;

fn main() {
    tower_lock::key::from_fn(|Path((kind, id)): Path<(String, u64)>| (kind, id));
}
