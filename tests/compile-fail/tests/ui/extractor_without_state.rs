use axum::extract::{Path, State};

#[derive(Clone)]
struct Db;

fn main() {
    tower_lock::key::from_fn(|State(_): State<Db>, Path(id): Path<u64>| ("order", id));
}
