//! Raw keys beside Redisson on a Cluster. A connection stands for its client.

use std::{future::IntoFuture, time::Duration};

use tokio::time::timeout;
use tower_lock::{LockKey, LockManager, RedisStore};
use tower_lock_testkit::{
    Connection, RedisCluster,
    log::Log,
    wait::{ms, soon, until},
};

use super::{
    cluster,
    connecting::{cluster_user, smallest_cluster_acl},
    instance,
};

const RAW: &str = "myLock";
const CHANNEL: &str = "redisson_lock__channel:{myLock}";
const OWN_CHANNEL: &str = "tower-lock:lock:in:raw:{myLock}";
const RAW_QUEUE: &str = "tower-lock:lock:q:{myLock}";
const JAVA: &str = "8b1b3cd2-2f9a-4d6e-9c56-6f0a2a1f0f3e:57";

fn raw() -> LockKey {
    LockKey::raw(RAW).expect("a name")
}

/// A client of Redisson that waits at a node, by one of its commands.
async fn java_waits(cluster: &RedisCluster, node: usize, command: &str) -> Connection {
    let mut java = cluster.node(node).connect().await;
    let reply = java.command(&[command, CHANNEL]).await.expect("a reply");
    assert_eq!(reply.items()[0].text(), Some(&*command.to_lowercase()), "{reply:?}");
    java
}

/// The payload of the next message. `None`: there is none.
async fn message(java: &mut Connection, limit: Duration) -> Option<String> {
    let message = timeout(limit, java.next()).await.ok()?.expect("connected");
    assert!(matches!(message.items()[0].text(), Some("message" | "smessage")), "{message:?}");
    message.items()[2].text().map(ToOwned::to_owned)
}

async fn java_locks(cluster: &RedisCluster) {
    cluster.command_for(RAW, &["HSET", RAW, JAVA, "1"]).await;
    cluster.command_for(RAW, &["PEXPIRE", RAW, "30000"]).await;
}

async fn java_unlocks(cluster: &RedisCluster) {
    cluster.command_for(RAW, &["DEL", RAW]).await;
    cluster.command_for(RAW, &["PUBLISH", CHANNEL, "0"]).await;
}

async fn is_free(cluster: &RedisCluster) -> bool {
    cluster.command_for(RAW, &["EXISTS", RAW]).await.integer() == Some(0)
}

async fn until_queued(cluster: &RedisCluster, count: i64) {
    until("queued", async || cluster.command_for(RAW, &["LLEN", RAW_QUEUE]).await.integer() == Some(count)).await;
}

async fn subscribers(cluster: &RedisCluster, channel: &str) -> i64 {
    cluster.command_for(RAW, &["PUBSUB", "NUMSUB", channel]).await.items()[1].integer().expect("a number")
}

/// Redisson subscribes at any node, or to a sharded channel at the master of the key.
/// Guarantee: G5.
#[tokio::test]
async fn release_of_a_raw_key_on_a_cluster_wakes_redisson() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let locks = instance(&cluster, "a").await;
    let owner = cluster.owner(RAW).await;
    for command in ["SUBSCRIBE", "SSUBSCRIBE"] {
        let node = if command == "SUBSCRIBE" { (owner + 1) % 3 } else { owner };
        let mut java = java_waits(&cluster, node, command).await;
        locks.lock(raw()).await.expect("free").release().await.expect("held");
        assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"), "{command}: a release");
        drop(locks.lock(raw()).await.expect("free"));
        assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"), "{command}: a block");
        let guard = soon("after the lock-delay", locks.lock(raw()).into_future()).await.expect("free");
        locks.force_release(raw()).await.expect("up");
        assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"), "{command}: a force release");
        drop(guard);
        assert_eq!(message(&mut java, ms(100)).await, None, "{command}");
        soon("free", locks.lock(raw()).into_future()).await.expect("free").release().await.expect("held");
    }
}

/// Guarantee: G5.
#[tokio::test]
async fn redisson_excludes_and_wakes_waiters_on_a_cluster() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let locks = instance(&cluster, "a").await;
    for _ in 0..3 {
        java_locks(&cluster).await;
        locks.try_lock(raw()).await.expect_err("held by Redisson");
        let waiting = tokio::spawn(locks.lock(raw()).into_future());
        until_queued(&cluster, 1).await;
        until("listening", async || subscribers(&cluster, OWN_CHANNEL).await == 1).await;
        assert!(!waiting.is_finished());
        java_unlocks(&cluster).await;
        let guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
        let fields = cluster.command_for(RAW, &["HKEYS", RAW]).await;
        assert!(fields.texts().iter().all(|id| id.starts_with("a:")), "{fields:?}: Redisson sees the lock");
        guard.release().await.expect("held");
        assert!(is_free(&cluster).await);
    }
}

/// Guarantee: G5.
#[tokio::test]
async fn second_release_on_a_cluster_leaves_the_key_to_redisson() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let both = [instance(&cluster, "a").await, instance(&cluster, "b").await];
    let owner = cluster.owner(RAW).await;
    for command in ["SUBSCRIBE", "SSUBSCRIBE"] {
        // Both listen.
        java_locks(&cluster).await;
        for locks in &both {
            locks.lock(raw()).wait(ms(50)).await.expect_err("held");
        }
        until("listening", async || subscribers(&cluster, OWN_CHANNEL).await == 2).await;
        java_unlocks(&cluster).await;
        let mut java = java_waits(&cluster, owner, command).await;
        let (mut guard, mut turn) = (both[0].lock(raw()).await.expect("free"), 0);
        let (mut left, mut offered_in_a_row) = (0, 0);
        for _ in 0..8 {
            let waiting = tokio::spawn(both[1 - turn].lock(raw()).into_future());
            until_queued(&cluster, 1).await;
            guard.release().await.expect("held");
            if is_free(&cluster).await {
                assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"), "{command}");
                (left, offered_in_a_row) = (left + 1, 0);
            } else {
                offered_in_a_row += 1;
                assert!(offered_in_a_row < 2, "{command}: two offers while Redisson waits");
            }
            guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
            turn = 1 - turn;
        }
        assert!(left >= 3, "{command}: {left} of 8");
        drop(java);
        let waits = async || {
            let sharded = cluster.command_for(RAW, &["PUBSUB", "SHARDNUMSUB", CHANNEL]).await;
            sharded.items()[1].integer() != Some(0) || subscribers(&cluster, CHANNEL).await > 2
        };
        until("unsubscribed", async || !waits().await).await;
        // Without it, each release is an offer.
        for _ in 0..4 {
            let waiting = tokio::spawn(both[1 - turn].lock(raw()).into_future());
            until_queued(&cluster, 1).await;
            guard.release().await.expect("held");
            assert!(!is_free(&cluster).await, "{command}: offered");
            guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
            turn = 1 - turn;
        }
        guard.release().await.expect("held");
    }
}

/// Neither for the channel, nor for the commands of sharded ones.
/// Guarantee: G5.
#[tokio::test]
async fn raw_key_on_a_cluster_needs_no_permission_for_redisson() {
    let Some(cluster) = cluster(2, 0).await else { return };
    let log = Log::default();
    let _listening = log.listen();
    let rules: Vec<_> = smallest_cluster_acl().into_iter().chain([format!("~{RAW}")]).collect();
    let locks = LockManager::new(RedisStore::connect(&cluster_user(&cluster, &rules).await).await.expect("enough"));
    java_locks(&cluster).await;
    let waiting = tokio::spawn(locks.lock(raw()).into_future());
    until_queued(&cluster, 1).await;
    until("warned", async || log.text().contains("Add the ACL rule `&redisson_lock__channel:*`")).await;
    java_unlocks(&cluster).await;
    let guard = soon("at the next poll", waiting).await.expect("no panic").expect("a grant");
    guard.release().await.expect("held");
    assert!(is_free(&cluster).await, "the release is complete");
    // With the rule of the guide it is woken, and wakes.
    let rules: Vec<_> = rules.into_iter().chain(["&redisson_lock__channel:*".to_owned()]).collect();
    cluster_user(&cluster, &rules).await;
    let owner = cluster.owner(RAW).await;
    for command in ["SUBSCRIBE", "SSUBSCRIBE"] {
        let mut java = java_waits(&cluster, owner, command).await;
        locks.lock(raw()).await.expect("free").release().await.expect("held");
        let woken = message(&mut java, ms(if command == "SUBSCRIBE" { 5_000 } else { 200 })).await;
        assert_eq!(woken.as_deref(), (command == "SUBSCRIBE").then_some("0"), "{command}");
    }
    let sharded = ["+spublish", "+pubsub|shardnumsub"].map(ToOwned::to_owned);
    cluster_user(&cluster, &rules.into_iter().chain(sharded).collect::<Vec<_>>()).await;
    let mut java = java_waits(&cluster, owner, "SSUBSCRIBE").await;
    locks.lock(raw()).await.expect("free").release().await.expect("held");
    assert_eq!(message(&mut java, ms(5_000)).await.as_deref(), Some("0"));
}
