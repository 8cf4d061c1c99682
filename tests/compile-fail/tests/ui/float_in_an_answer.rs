use axum::extract::Path;

fn main() {
    tower_lock::key::from_fn(|Path(price): Path<f64>| ("price", price));
}
