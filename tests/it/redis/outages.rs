//! Redis is stopped, killed, disconnected, and comes back.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode},
    routing::post,
};
use futures_util::future::join_all;
use tower::ServiceExt;
use tower_lock::{LockGuard, LockLayer, LockLost, LockManager, test_util::Clock};
use tower_lock_testkit::{
    Direction, RedisServer, limits,
    locks::{key, one_key},
    wait::{settle, soon, until},
};

use crate::support::{Environment, LONG, environment, granted, pass};

fn service(locks: &LockManager) -> Router {
    let layer = |wait| LockLayer::new(locks, one_key()).wait(wait);
    Router::new()
        .route("/refuse", post(async || "done").route_layer(layer(Duration::ZERO)))
        .route("/wait", post(async || "done").route_layer(layer(limits::OUTAGE)))
}

/// The status and the body.
async fn get(service: &Router, path: &str) -> (StatusCode, String) {
    let request = Request::post(path).body(Body::empty()).expect("a request");
    let response = soon("a response", service.clone().oneshot(request)).await.expect("infallible");
    let status = response.status();
    let body = to_bytes(response.into_body(), 1 << 16).await.expect("a body");
    (status, String::from_utf8_lossy(&body).into_owned())
}

async fn assert_rejected(service: &Router, how: &str) {
    for path in ["/refuse", "/wait"] {
        let (status, body) = get(service, path).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{how}, {path}: {body}");
        assert!(body.contains("store-unavailable") && body.contains(r#""outcome":"not-started""#), "{how}: {body}");
    }
}

async fn assert_recovered(service: &Router) {
    until("it works again", async || get(service, "/refuse").await.0 == StatusCode::OK).await;
}

/// Guarantee: G6.
#[tokio::test]
async fn requests_are_rejected_during_outages_and_work_afterwards() {
    let Some(mut environment) = environment().await else { return };
    let service = service(&environment.hasty_instance("a").await);
    assert_recovered(&service).await;

    environment.redis.freeze();
    assert_rejected(&service, "stopped").await;
    environment.redis.thaw();
    assert_recovered(&service).await;

    environment.redis.kill();
    assert_rejected(&service, "killed").await;
    environment.redis.restart_empty().await;
    assert_recovered(&service).await;

    // An unplugged cable: the connections fail without a notification.
    environment.proxy.all().swallow(Direction::Both);
    assert_rejected(&service, "cut off").await;
    environment.proxy.all().heal();
    assert_recovered(&service).await;
    environment.wait_until_clean().await;
}

/// A firewall drops the connections without notifying either side.
#[tokio::test]
async fn silently_dead_connections_are_replaced() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.hasty_instance("a").await, environment.hasty_instance("b").await);
    until("it works", async || one.try_lock(("a",)).await.is_ok() && two.try_lock(("b",)).await.is_ok()).await;
    let held = one.lock(key()).await;
    let dead = cut_off(&environment);
    drop(held.map(LockGuard::release));
    until("both use new connections", async || {
        one.try_lock(("a",)).await.is_ok() && two.try_lock(("b",)).await.is_ok()
    })
    .await;
    until("both listen on new connections", async || {
        environment.proxy.subscribers().iter().filter(|number| !dead.contains(number)).count() == 2
    })
    .await;
    environment.wait_until_clean().await;
}

/// Lets no byte pass on the open connections, without a notification. Returns their numbers.
fn cut_off(environment: &Environment) -> Vec<u64> {
    let connections = environment.proxy.connections();
    for number in &connections {
        environment.proxy.connection(*number).swallow(Direction::Both);
    }
    connections
}

/// Requests pay nothing for connections that died while idle.
#[tokio::test]
async fn dead_idle_connections_are_replaced_before_use() {
    let Some(environment) = environment().await else { return };
    let locks = environment.hasty_instance("a").await;
    let dead = cut_off(&environment);
    until("they are replaced", async || dead.iter().all(|number| !environment.proxy.connections().contains(number)))
        .await;
    until("they work", async || locks.try_lock(key()).await.is_ok()).await;
    environment.wait_until_clean().await;
}

/// A failover behind one address: old connections stay with the old server, which is a replica now.
#[tokio::test]
async fn commands_and_messages_use_the_same_server() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    pass(&locks).await;
    let listening =
        async |redis: &RedisServer| redis.command(&["PUBSUB", "CHANNELS", "tower-lock:*"]).await.items().len();
    until("it listens", async || listening(&environment.redis).await == 1).await;
    let promoted = RedisServer::start().await;
    environment.proxy.redirect(promoted.address());
    let listener = environment.proxy.subscribers();
    for number in environment.proxy.connections().into_iter().filter(|number| !listener.contains(number)) {
        environment.proxy.connection(number).cut();
    }
    until("subscribed at the new server", async || listening(&promoted).await == 1).await;
    assert_eq!(listening(&environment.redis).await, 0, "no subscriber at the old server");
    pass(&locks).await;
}

/// Each call waits no longer than allowed, and reports the reason. Concurrent calls wait for one
/// timeout, and share the wait for a connection.
#[tokio::test]
async fn frozen_redis_is_named_as_the_reason() {
    let Some(environment) = environment().await else { return };
    let locks = environment.hasty_instance("a").await;
    environment.redis.freeze();
    let reason = locks.inspect(key()).await.expect_err("no reply");
    let source = std::error::Error::source(&reason).map(ToString::to_string).unwrap_or_default();
    assert!(reason.store() == "redis" && source.contains("is the server stopped"), "{reason}: {source}");
    let calls = join_all((0..1_000).map(|n| locks.try_lock(("n", n)).into_future()));
    let replies = soon("the same timeout for all", calls).await;
    assert!(replies.iter().all(Result::is_err));
    assert!(environment.proxy.arrived() < 30, "{} connections", environment.proxy.arrived());
    environment.redis.thaw();
    until("it works again", async || locks.try_lock(key()).await.is_ok()).await;
    environment.wait_until_clean().await;
}

/// I5: it needs no reply of Redis.
/// Guarantee: G8.
#[tokio::test]
async fn section_is_lost_at_its_deadline_while_redis_is_stopped() {
    let Some(environment) = environment().await else { return };
    let clock = Clock::default();
    let locks = LockManager::builder(environment.direct_store().await).clock(clock.clone()).lease(LONG).build();
    let guard = locks.lock(key()).await.expect("free");
    let view = guard.held_lock();
    environment.redis.freeze();
    clock.jump(LONG - limits::BROKEN);
    assert!(view.ensure_remaining(Duration::ZERO).is_ok(), "not yet");
    clock.jump(limits::BROKEN);
    assert_eq!(soon("the deadline", view.lost()).await, LockLost::Expired);
    assert!(view.ensure_remaining(Duration::ZERO).is_err());
    environment.redis.thaw();
    drop(guard);
}

/// Renewals have their own connection: slow acquires do not delay them.
#[tokio::test]
async fn renewals_and_releases_do_not_queue_behind_acquires() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    let guard = locks.lock(key()).await.expect("free");
    let listens = environment.proxy.subscribers();
    // The connection of the acquires is the first one.
    let acquires = environment.proxy.connections().into_iter().find(|number| !listens.contains(number));
    environment.proxy.connection(acquires.expect("an acquire")).hold(Direction::Up);
    let other = tokio::spawn(locks.lock(("other",)).into_future());
    settle().await;
    // On that connection it would wait for the delayed acquires.
    guard.release().await.expect("not delayed");
    assert!(!other.is_finished(), "it hangs");
    environment.proxy.all().heal();
    drop(granted(other).await.release());
    environment.wait_until_clean().await;
}

/// Only messages are lost: the queue still moves.
/// Guarantee: G5.
#[tokio::test]
async fn redis_restart_loses_the_queue_and_no_waiter() {
    let Some(mut environment) = environment().await else { return };
    let (one, two) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = environment.waiter(&two).await;
    environment.redis.restart_empty().await;
    // The holder is lost: the waiter is granted the key with a larger token.
    let token = guard.fencing_token();
    let second = granted(waiting).await;
    assert!(second.fencing_token() > token);
    second.release().await.expect("held");
    drop(guard);
    environment.wait_until_clean().await;
}
