//! Connecting to a Cluster, by one URL and by a builder.

use tower_lock::{LockManager, RedisStore};
use tower_lock_testkit::{RedisCluster, RedisServer, Reply, locks::key, skipped};

/// Acquires a key, and returns whether it has this prefix.
async fn locks_under(locks: &LockManager, cluster: &RedisCluster, prefix: &str) -> bool {
    let guard = locks.lock(key()).await.expect("free");
    let name = format!("{prefix}:k");
    let reply = cluster.command_for(&name, &["EXISTS", &name]).await;
    guard.release().await.expect("held");
    reply == Reply::Integer(1)
}

#[tokio::test]
async fn url_and_builder_name_the_nodes_of_a_cluster() {
    if !RedisServer::is_available() {
        return skipped("connecting to a Cluster", "redis-server");
    }
    let cluster = RedisCluster::options().user("someone", "secret").start(3, 0).await;
    let url = format!("{}?prefix=shop", cluster.url());
    let locks = LockManager::connect(&url).await.expect("it is up").build();
    assert!(locks_under(&locks, &cluster, "shop").await);
    // Nothing listens at the first address.
    let gone = RedisServer::start().await.address();
    for (first, further) in [(cluster.addresses().remove(0), None), (gone.to_string(), Some(&cluster.addresses()[1]))] {
        let builder = RedisStore::builder().cluster(further);
        let store = builder.connect(&format!("redis://someone:secret@{first}")).await;
        let locks = LockManager::new(store.unwrap_or_else(|error| panic!("{first}: {error:?}")));
        assert!(locks_under(&locks, &cluster, "lock").await, "{first}");
    }
    let error = RedisStore::builder().cluster(["a"]).sentinel(["s"], "m").connect("redis://m").await;
    assert!(error.expect_err("one of both").to_string().ends_with("a Cluster has no sentinels"));
}
