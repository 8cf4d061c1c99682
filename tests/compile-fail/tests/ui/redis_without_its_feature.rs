use tower_lock::RedisStore;

fn main() {
    let _ = RedisStore::connect("redis://127.0.0.1:6379");
}
