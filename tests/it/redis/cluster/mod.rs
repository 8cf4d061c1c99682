//! A Redis Cluster: slots on several masters, which move and fail over.

mod connecting;
mod contract;
mod counts;
mod failover;
mod moving;
mod raw;
mod several;
mod waiters;

use std::{collections::HashSet, sync::Arc};

use tokio::sync::{MappedMutexGuard, MutexGuard};
use tower_lock::{LockKey, LockManager, RedisStore};
use tower_lock_testkit::{RedisCluster, RedisServer, costs, limits, wait::until};

/// Returns `None`, with a note on stderr, if there is no `redis-server`.
async fn cluster(masters: usize, replicas_per_master: usize) -> Option<RedisCluster> {
    is_available().then_some(())?;
    Some(RedisCluster::start(masters, replicas_per_master).await)
}

/// Three masters for tests that leave them as they were, one at a time: a Cluster needs two seconds
/// to start.
#[expect(clippy::disallowed_types, reason = "a test has the Cluster until it ends")]
async fn shared_cluster() -> Option<MappedMutexGuard<'static, RedisCluster>> {
    static CLUSTER: tokio::sync::Mutex<Option<RedisCluster>> = tokio::sync::Mutex::const_new(None);
    is_available().then_some(())?;
    let mut cluster = CLUSTER.lock().await;
    if cluster.is_none() {
        *cluster = Some(RedisCluster::start(3, 0).await);
    }
    let cluster = MutexGuard::map(cluster, |cluster| cluster.as_mut().expect("just started"));
    cluster.stop_moves().await;
    for node in 0..3 {
        cluster.rejoined(node).await;
        until("the test before has ended", async || {
            let clients = cluster.command(node, &["CLIENT", "LIST"]).await;
            // A master that has migrated keys stays connected.
            let others = |client: &&str| !client.contains(" cmd=restore");
            clients.text().is_some_and(|clients| clients.lines().filter(others).count() == 1)
        })
        .await;
        for command in [&["FLUSHALL"][..], &["SCRIPT", "FLUSH"], &["CONFIG", "RESETSTAT"]] {
            cluster.command(node, command).await;
        }
    }
    Some(cluster)
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
    Arc::new(limits::redis().connect(&cluster.url()).await.expect("it is up"))
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

/// The scripts that a node has executed or refused.
async fn scripts(cluster: &RedisCluster, node: usize) -> u64 {
    costs::scripts(cluster.node(node)).await
}
