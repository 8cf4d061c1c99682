//! A server that has lost its data: its locks end before their next renewal.

use std::{future::IntoFuture, time::Duration};

use tower_lock::{LockLost, LockManager};
use tower_lock_testkit::{
    RedisServer,
    locks::key,
    wait::{soon, until},
};

use crate::support::{LONG, connect, environment};

/// Guarantee: G1.
#[tokio::test]
async fn flushed_server_ends_its_locks_at_once() {
    let Some(environment) = environment().await else { return };
    for command in ["FLUSHALL", "FLUSHDB"] {
        let locks = LockManager::builder(environment.direct_store().await).lease(LONG).build();
        let mut guards = Vec::new();
        for n in 0..300 {
            guards.push(locks.try_lock(("held", n)).await.expect("free"));
        }
        environment.command(&[command]).await;
        for guard in &guards {
            assert_eq!(soon("the loss", guard.held_lock().lost()).await, LockLost::Revoked, "{command}");
        }
    }
}

/// Guarantee: G1.
#[tokio::test]
async fn restart_without_data_ends_its_locks_at_once() {
    if !RedisServer::is_available() {
        return tower_lock_testkit::skipped("restart_without_data_ends_its_locks_at_once", "redis-server");
    }
    let mut redis = RedisServer::start().await;
    let locks = LockManager::builder(connect(&redis.url()).await).lease(LONG).build();
    let guard = locks.try_lock(key()).await.expect("free");
    redis.restart_empty().await;
    assert_eq!(soon("the loss", guard.held_lock().lost()).await, LockLost::Revoked);
    soon("a grant", locks.lock(key()).wait(LONG).into_future()).await.expect("free").release().await.expect("held");
}

/// Only the server itself can send a message without a payload.
/// Guarantee: G1.
#[tokio::test]
async fn forged_message_of_a_flush_renews_nothing() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance_without_renewals("a").await;
    let guard = locks.try_lock(key()).await.expect("free");
    until("it is subscribed", async || environment.listeners().await == 1).await;
    let [before] = environment.calls(["hexists"]).await;
    for payload in ["", "*", "tower-lock"] {
        let receivers = environment.command(&["PUBLISH", "__redis__:invalidate", payload]).await;
        assert_eq!(receivers.integer(), Some(0), "nobody subscribes it");
    }
    // Of other keys: the connection reads none.
    for n in 0..100 {
        environment.command(&["SET", &format!("other:{n}"), "x"]).await;
    }
    // A real one arrives after them.
    environment.command(&["FLUSHALL"]).await;
    assert_eq!(soon("the loss", guard.held_lock().lost()).await, LockLost::Revoked);
    let checks = async || environment.calls(["hexists"]).await[0] - before;
    until("a renewal, and the release of the lock that is lost", async || checks().await == 2).await;
}

/// Guarantee: G1.
#[tokio::test]
async fn server_without_tracking_is_used_as_before() {
    let Some(environment) = environment().await else { return };
    let rules: Vec<_> =
        crate::connecting::smallest_acl().into_iter().filter(|rule| *rule != "+client|tracking").collect();
    let url = crate::connecting::user(&environment.redis, &rules).await;
    let locks = LockManager::builder(connect(&url).await).lease(Duration::from_secs(6)).build();
    let guard = locks.try_lock(key()).await.expect("free");
    environment.command(&["FLUSHALL"]).await;
    // By a renewal, after a third of its lease.
    assert_eq!(soon("the loss", guard.held_lock().lost()).await, LockLost::Revoked);
}
