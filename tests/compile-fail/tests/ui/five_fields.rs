use tower_lock::key;

fn main() {
    let q = key::query_param;
    key::from_fields("order", (q("a"), q("b"), q("c"), q("d"), q("e")));
}
