//! A Redis Cluster: slots on several masters, which move and fail over.

mod connecting;
mod contract;
mod moving;

use std::sync::Arc;

use tower_lock::{LockManager, RedisStore};
use tower_lock_testkit::{RedisCluster, RedisServer};

/// Returns `None`, with a note on stderr, if there is no `redis-server`.
async fn cluster(masters: usize, replicas_per_master: usize) -> Option<RedisCluster> {
    if !RedisServer::is_available() {
        tower_lock_testkit::skipped(std::thread::current().name().unwrap_or("a test"), "redis-server");
        return None;
    }
    Some(RedisCluster::start(masters, replicas_per_master).await)
}

async fn store(cluster: &RedisCluster) -> Arc<RedisStore> {
    Arc::new(RedisStore::connect(&cluster.url()).await.expect("it is up"))
}

async fn instance(cluster: &RedisCluster, name: &str) -> LockManager {
    LockManager::builder(store(cluster).await).instance(name).build()
}
