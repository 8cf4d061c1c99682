#[derive(serde::Deserialize)]
struct Claim {
    family_id: u64,
}

fn main() {
    tower_lock::key::from_fn(|claim: Claim| ("reward", claim.family_id));
}
