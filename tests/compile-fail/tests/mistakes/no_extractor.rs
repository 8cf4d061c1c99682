#[derive(serde::Deserialize)]
struct Claim {
    family_id: u64,
}

fn main() {
    tower_lock::by(|claim: Claim| ("reward", claim.family_id));
}
