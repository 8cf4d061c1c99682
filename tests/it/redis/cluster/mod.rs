//! A Redis Cluster: slots on several masters, which move and fail over.

mod connecting;
mod contract;
mod counts;
mod failover;
mod moving;
mod raw;
mod replay;
mod shared_scripts;
mod waiters;

use std::{collections::HashSet, sync::Arc};

use tower_lock::{LockKey, LockManager, RedisStore};
use tower_lock_testkit::{RedisCluster, RedisServer};

/// Returns `None`, with a note on stderr, if there is no `redis-server`.
async fn cluster(masters: usize, replicas_per_master: usize) -> Option<RedisCluster> {
    is_available().then_some(())?;
    Some(RedisCluster::start(masters, replicas_per_master).await)
}

/// Whether there is a `redis-server`. Otherwise it is noted on stderr.
fn is_available() -> bool {
    let is_available = RedisServer::is_available();
    if !is_available {
        tower_lock_testkit::skipped(std::thread::current().name().unwrap_or("a test"), "redis-server");
    }
    is_available
}

async fn store(cluster: &RedisCluster) -> Arc<RedisStore> {
    Arc::new(RedisStore::connect(&cluster.url()).await.expect("it is up"))
}

async fn instance(cluster: &RedisCluster, name: &str) -> LockManager {
    LockManager::builder(store(cluster).await).instance(name).build()
}

/// Keys in slots of a node.
async fn keys_at(cluster: &RedisCluster, node: usize, count: usize) -> Vec<LockKey> {
    let slots: HashSet<u16> = cluster.slots_of(node).await.into_iter().collect();
    let numbers = (0_u64..).filter(|number| slots.contains(&RedisCluster::slot(&format!("lock:n:{number}"))));
    numbers.take(count).map(|number| LockKey::from(("n", number))).collect()
}

async fn key_at(cluster: &RedisCluster, node: usize) -> LockKey {
    keys_at(cluster, node, 1).await.remove(0)
}

/// The name of the lock of a composed key.
fn name_of(key: &LockKey) -> String {
    format!("lock:{}", key.as_str())
}

/// The calls of a command, in an `INFO commandstats`.
fn calls_in(stats: &str, command: &str) -> u64 {
    let prefix = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(&prefix));
    line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
}

/// The scripts that a node has executed or refused.
async fn scripts(cluster: &RedisCluster, node: usize) -> u64 {
    let stats = cluster.command(node, &["INFO", "commandstats"]).await;
    ["eval", "evalsha"].iter().map(|command| calls_in(stats.text().unwrap_or_default(), command)).sum()
}
