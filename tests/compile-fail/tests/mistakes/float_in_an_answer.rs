use axum::extract::Path;

fn main() {
    tower_lock::by(|Path(price): Path<f64>| ("price", price));
}
