use tower_lock::{by_fields, key::query_param};

fn main() {
    let q = query_param;
    by_fields("order", (q("a"), q("b"), q("c"), q("d"), q("e")));
}
