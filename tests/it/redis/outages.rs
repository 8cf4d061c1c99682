//! Redis is stopped, killed, disconnected, and comes back.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode},
    routing::post,
};
use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use tower_lock::{LockLayer, LockLost, LockManager, RedisStore, test_util::Clock};
use tower_lock_testkit::{Direction, RedisServer, locks::one_key};
use tower_lock_testkit::{
    locks::key,
    wait::{ms, soon, until},
};

use crate::support::{Environment, environment};

fn service(locks: &LockManager) -> Router {
    let layer = |wait| LockLayer::new(locks, one_key()).wait(wait);
    Router::new()
        .route("/refuse", post(async || "done").route_layer(layer(Duration::ZERO)))
        .route("/wait", post(async || "done").route_layer(layer(Duration::from_secs(20))))
}

/// The status, outcome and duration.
async fn get(service: &Router, path: &str) -> (StatusCode, String, Duration) {
    let asked = Instant::now();
    let request = Request::post(path).body(Body::empty()).expect("a request");
    let response = soon("a response", service.clone().oneshot(request)).await.expect("infallible");
    let (status, took) = (response.status(), asked.elapsed());
    let body = to_bytes(response.into_body(), 1 << 16).await.expect("a body");
    (status, String::from_utf8_lossy(&body).into_owned(), took)
}

async fn assert_rejected(service: &Router, how: &str) {
    for path in ["/refuse", "/wait"] {
        let (status, body, took) = get(service, path).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{how}, {path}: {body}");
        assert!(body.contains("store-unavailable") && body.contains(r#""outcome":"not-started""#), "{how}: {body}");
        eprintln!("{how}, {path}: 503 after {took:?}");
    }
}

async fn assert_recovered(service: &Router, how: &str) {
    let back = Instant::now();
    until("it works again", async || get(service, "/refuse").await.0 == StatusCode::OK).await;
    eprintln!("{how}: it works again after {:?}", back.elapsed());
}

/// Guarantee: G6.
#[tokio::test]
async fn requests_are_rejected_during_outages_and_work_afterwards() {
    let Some(mut environment) = environment().await else { return };
    let service = service(&environment.instance("a").await);
    assert_eq!(get(&service, "/wait").await.0, StatusCode::OK);

    environment.redis.freeze();
    assert_rejected(&service, "stopped").await;
    environment.redis.thaw();
    assert_recovered(&service, "stopped").await;

    environment.redis.kill();
    assert_rejected(&service, "killed").await;
    environment.redis.restart_empty().await;
    assert_recovered(&service, "the server runs again, without data").await;

    // An unplugged cable: the connections fail without a notification.
    environment.proxy.all().swallow(Direction::Both);
    assert_rejected(&service, "cut off").await;
    environment.proxy.all().heal();
    assert_recovered(&service, "cut off").await;
    environment.wait_until_clean().await;
}

/// A firewall drops the connections without notifying either side.
#[tokio::test]
async fn silently_dead_connections_are_replaced() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.instance("a").await, environment.instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let dead = environment.proxy.connections();
    assert_eq!(dead.len(), 6);
    for number in &dead {
        environment.proxy.connection(*number).swallow(Direction::Both);
    }
    let _ = guard.release().await;
    until("both use new connections", async || {
        one.try_lock(("a",)).await.is_ok() && two.try_lock(("b",)).await.is_ok()
    })
    .await;
    let guard = one.lock(key()).await.expect("released on a new connection");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("both listen on new connections", async || {
        environment.proxy.subscribers().iter().filter(|n| !dead.contains(n)).count() == 2
    })
    .await;
    // Three timeouts in a row replace a connection: this call may be one of them.
    let _ = guard.release().await;
    let _ = soon("a grant", waiting).await.expect("runs").expect("a grant").release().await;
    environment.wait_until_clean().await;
}

/// Requests pay nothing for connections that died while idle.
#[tokio::test]
async fn dead_idle_connections_are_replaced_before_use() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("held");
    let dead = environment.proxy.connections();
    for number in &dead {
        environment.proxy.connection(*number).swallow(Direction::Both);
    }
    until("they are replaced", async || dead.iter().all(|number| !environment.proxy.connections().contains(number)))
        .await;
    locks.try_lock(key()).await.expect("on a new one").release().await.expect("on a new one");
    environment.wait_until_clean().await;
}

/// A failover behind one address: old connections stay with the old server, which is a replica now.
#[tokio::test]
async fn commands_and_messages_use_the_same_server() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("held");
    let listening = async |redis: &RedisServer| redis.command(&["PUBSUB", "CHANNELS"]).await.items().len();
    until("it listens", async || listening(&environment.redis).await == 1).await;
    let promoted = RedisServer::start().await;
    environment.proxy.redirect(promoted.address());
    let listener = environment.proxy.subscribers();
    for number in environment.proxy.connections().into_iter().filter(|number| !listener.contains(number)) {
        environment.proxy.connection(number).cut();
    }
    until("subscribed at the new server", async || listening(&promoted).await == 1).await;
    assert_eq!(listening(&environment.redis).await, 0, "no subscriber at the old server");
    locks.lock(key()).await.expect("free").release().await.expect("held");
}

/// Each call waits no longer than allowed, and reports the reason.
#[tokio::test]
async fn frozen_redis_is_named_as_the_reason() {
    let Some(environment) = environment().await else { return };
    let locks = environment.direct_instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("held");
    environment.redis.freeze();
    let reason = locks.inspect(key()).await.expect_err("no reply");
    let source = std::error::Error::source(&reason).map(ToString::to_string).unwrap_or_default();
    assert!(reason.store() == "redis" && source.contains("is the server stopped"), "{reason}: {source}");
    environment.redis.thaw();
}

/// Concurrent calls wait for one timeout, not one after the other.
#[tokio::test]
async fn hanging_store_costs_each_request_the_store_timeout() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("held");
    environment.redis.freeze();
    let began = Instant::now();
    let calls = (0..200).map(|n| locks.try_lock(("n", n)).into_future());
    let replies = futures_util::future::join_all(calls).await;
    assert!(replies.iter().all(Result::is_err));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    // Callers share the wait for a connection.
    until("a rejection", async || locks.try_lock(("m",)).await.is_err()).await;
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
    let store = RedisStore::connect(&environment.redis.url()).await.expect("it is up");
    let locks = LockManager::builder(store).clock(clock.clone()).build();
    let guard = locks.lock(key()).await.expect("free");
    let view = guard.held_lock();
    environment.redis.freeze();
    clock.jump(Duration::from_secs(29));
    assert!(view.ensure_remaining(Duration::ZERO).is_ok(), "not yet");
    let jumped = Instant::now();
    assert_eq!(soon("the deadline", view.lost()).await, LockLost::Expired);
    assert!(jumped.elapsed() < Duration::from_secs(15), "the lease ends once: {:?}", jumped.elapsed());
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
    // The connection of the acquires.
    let acquires = busiest(&environment).await;
    environment.proxy.connection(acquires).hold(Direction::Up);
    let others = tokio::spawn(locks.lock(("other",)).wait(ms(200)).into_future());
    sleep(ms(50)).await;
    // On that connection it would wait for the delayed acquires.
    guard.release().await.expect("not delayed");
    assert!(others.await.expect("runs").is_err(), "it hangs");
    environment.proxy.all().heal();
    environment.wait_until_clean().await;
}

/// The number of the connection that acquires use: the first one.
async fn busiest(environment: &Environment) -> u64 {
    let numbers = environment.proxy.connections();
    let listens = environment.proxy.subscribers();
    let first = numbers.into_iter().find(|number| !listens.contains(number));
    first.expect("an acquire")
}

/// Only messages are lost: the queue still moves.
/// Guarantee: G5.
#[tokio::test]
async fn redis_restart_loses_the_queue_and_no_waiter() {
    let Some(mut environment) = environment().await else { return };
    let (one, two) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("queued", async || environment.command(&["LLEN", crate::support::QUEUE]).await.integer() == Some(1)).await;
    environment.redis.restart_empty().await;
    // The holder is lost: the waiter is granted the key with a larger token.
    let token = guard.fencing_token();
    let second = soon("a grant", waiting).await.expect("runs").expect("a grant");
    assert!(second.fencing_token() > token);
    second.release().await.expect("held");
    drop(guard);
    environment.wait_until_clean().await;
}
