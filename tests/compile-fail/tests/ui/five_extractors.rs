use axum::http::{HeaderMap, Method, Uri, Version};
use axum::extract::Path;

fn main() {
    tower_lock::key::from_fn(|_: HeaderMap, _: Method, _: Uri, _: Version, Path(id): Path<u64>| ("order", id));
}
