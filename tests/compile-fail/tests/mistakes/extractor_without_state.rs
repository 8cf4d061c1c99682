use axum::extract::{Path, State};

#[derive(Clone)]
struct Db;

fn main() {
    tower_lock::by(|State(_): State<Db>, Path(id): Path<u64>| ("order", id));
}
