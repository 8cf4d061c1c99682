use axum::extract::Path;
use uuid::Uuid;

fn main() {
    tower_lock::key::from_fn(|Path(id): Path<Uuid>| ("order", id.to_string()));
}
