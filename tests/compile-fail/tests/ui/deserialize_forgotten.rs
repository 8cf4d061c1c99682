use axum::{Json, extract::Path};

struct Claim {
    family_id: u64,
}

fn main() {
    tower_lock::key::from_fn(|Path(_): Path<u64>, Json(claim): Json<Claim>| ("reward", claim.family_id));
    tower_lock::key::from_fn(|Path(claim): Path<Claim>| ("reward", claim.family_id));
}
