use axum::extract::Path;
use tower_lock::Locked;

async fn claim(Locked(Path(family), _): Locked<Path<u64>>) -> String {
    family.to_string()
}

fn main() {
    let _ = claim;
}
