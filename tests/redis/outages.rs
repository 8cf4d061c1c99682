//! Redis is stopped, killed, cut off, and comes back.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode},
    routing::post,
};
use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use tower_lock::{LockLayer, LockLost, LockManager, RedisStore, key, test_util::Clock};
use tower_lock_faults::{Direction, RedisServer};

use crate::support::{World, key, ms, soon, until, world};

fn service(locks: &LockManager) -> Router {
    let layer = |wait| LockLayer::new(locks, key::from_parts(|_| ("k",))).wait(wait);
    Router::new()
        .route("/refuse", post(async || "done").route_layer(layer(Duration::ZERO)))
        .route("/wait", post(async || "done").route_layer(layer(Duration::from_secs(20))))
}

/// Status, outcome, and how long it took.
async fn ask(service: &Router, path: &str) -> (StatusCode, String, Duration) {
    let asked = Instant::now();
    let request = Request::post(path).body(Body::empty()).expect("a request");
    let answer = soon("an answer", service.clone().oneshot(request)).await.expect("infallible");
    let (status, took) = (answer.status(), asked.elapsed());
    let body = to_bytes(answer.into_body(), 1 << 16).await.expect("a body");
    (status, String::from_utf8_lossy(&body).into_owned(), took)
}

async fn is_turned_away(service: &Router, how: &str) {
    for path in ["/refuse", "/wait"] {
        let (status, body, took) = ask(service, path).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{how}, {path}: {body}");
        assert!(body.contains("store-unavailable") && body.contains(r#""outcome":"not-started""#), "{how}: {body}");
        eprintln!("{how}, {path}: 503 after {took:?}");
    }
}

async fn works_again(service: &Router, how: &str) {
    let back = Instant::now();
    until("it works again", async || ask(service, "/refuse").await.0 == StatusCode::OK).await;
    eprintln!("{how}: it works again after {:?}", back.elapsed());
}

#[tokio::test]
async fn requests_are_rejected_during_outages_and_work_afterwards() {
    let Some(mut world) = world().await else { return };
    let service = service(&world.instance("a").await);
    assert_eq!(ask(&service, "/wait").await.0, StatusCode::OK);

    world.redis.freeze();
    is_turned_away(&service, "stopped").await;
    world.redis.thaw();
    works_again(&service, "stopped").await;

    world.redis.kill();
    is_turned_away(&service, "killed").await;
    world.redis.restart_empty().await;
    works_again(&service, "back, and empty").await;

    // A cable that is pulled: nobody says that the connections are of no use any more.
    world.proxy.all().swallow(Direction::Both);
    is_turned_away(&service, "cut off").await;
    world.proxy.all().heal();
    works_again(&service, "cut off").await;
    world.is_clean_soon().await;
}

/// Somebody in between has forgotten the connections, and says nothing of it to either side.
#[tokio::test]
async fn silently_dead_connections_are_replaced() {
    let Some(world) = world().await else { return };
    let (one, two) = (world.instance("a").await, world.instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let dead = world.proxy.connections();
    assert_eq!(dead.len(), 6);
    for number in &dead {
        world.proxy.connection(*number).swallow(Direction::Both);
    }
    let _ = guard.release().await;
    until("both ask on new ones", async || one.try_lock(("a",)).await.is_ok() && two.try_lock(("b",)).await.is_ok())
        .await;
    let guard = one.lock(key()).await.expect("given back on a new one");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("both listen on new ones", async || {
        world.proxy.subscribers().iter().filter(|n| !dead.contains(n)).count() == 2
    })
    .await;
    // Three in a row have to be silent: this may be one of them, and is repeated.
    let _ = guard.release().await;
    let _ = soon("its turn", waiting).await.expect("runs").expect("its turn").release().await;
    world.is_clean_soon().await;
}

/// A request pays nothing for connections that died while nobody asked.
#[tokio::test]
async fn dead_idle_connections_are_replaced_before_use() {
    let Some(world) = world().await else { return };
    let locks = world.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("ours");
    let dead = world.proxy.connections();
    for number in &dead {
        world.proxy.connection(*number).swallow(Direction::Both);
    }
    until("they are replaced", async || dead.iter().all(|number| !world.proxy.connections().contains(number))).await;
    locks.try_lock(key()).await.expect("on a new one").release().await.expect("on a new one");
    world.is_clean_soon().await;
}

/// A failover behind one address: old connections stay with the old server, which is well, and is a replica now.
#[tokio::test]
async fn commands_and_messages_use_the_same_server() {
    let Some(world) = world().await else { return };
    let locks = world.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("ours");
    let listening = async |redis: &RedisServer| redis.command(&["PUBSUB", "CHANNELS"]).await.items().len();
    until("it listens", async || listening(&world.redis).await == 1).await;
    let promoted = RedisServer::start().await;
    world.proxy.redirect(promoted.address());
    let listener = world.proxy.subscribers();
    for number in world.proxy.connections().into_iter().filter(|number| !listener.contains(number)) {
        world.proxy.connection(number).cut();
    }
    until("it listens where it asks", async || listening(&promoted).await == 1).await;
    assert_eq!(listening(&world.redis).await, 0, "and nowhere else");
    locks.lock(key()).await.expect("free").release().await.expect("ours");
}

/// Each waits for no longer than it may, and is told what was wrong.
#[tokio::test]
async fn frozen_redis_is_named_as_the_reason() {
    let Some(world) = world().await else { return };
    let locks = world.sound_instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("ours");
    world.redis.freeze();
    let reason = locks.inspect(key()).await.expect_err("no answer");
    let source = std::error::Error::source(&reason).map(ToString::to_string).unwrap_or_default();
    assert!(reason.store() == "redis" && source.contains("is the server stopped"), "{reason}: {source}");
    world.redis.thaw();
}

/// Many at once wait for one answer, and not one after the other.
#[tokio::test]
async fn hanging_store_costs_each_request_the_store_timeout() {
    let Some(world) = world().await else { return };
    let locks = world.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("ours");
    world.redis.freeze();
    let began = Instant::now();
    let calls = (0..200).map(|n| locks.try_lock(("n", n)).into_future());
    let answers = futures_util::future::join_all(calls).await;
    assert!(answers.iter().all(Result::is_err));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    // Those who wait for a connection wait for one, and not for one each.
    until("others wait, too", async || locks.try_lock(("m",)).await.is_err()).await;
    assert!(world.proxy.arrived() < 30, "{} connections", world.proxy.arrived());
    world.redis.thaw();
    until("it works again", async || locks.try_lock(key()).await.is_ok()).await;
    world.is_clean_soon().await;
}

/// I5: no word of Redis is needed for it.
#[tokio::test]
async fn section_is_lost_at_its_deadline_while_redis_is_stopped() {
    let Some(world) = world().await else { return };
    let clock = Clock::default();
    let store = RedisStore::connect(&world.redis.url()).await.expect("it is up");
    let locks = LockManager::builder(store).clock(clock.clone()).build();
    let guard = locks.lock(key()).await.expect("free");
    let view = guard.held_lock();
    world.redis.freeze();
    clock.jump(Duration::from_secs(29));
    assert!(view.ensure_remaining(Duration::ZERO).is_ok(), "not yet");
    let jumped = Instant::now();
    assert_eq!(soon("the last second is over", view.lost()).await, LockLost::Expired);
    assert!(jumped.elapsed() < Duration::from_secs(15), "the lease ends once: {:?}", jumped.elapsed());
    assert!(view.ensure_remaining(Duration::ZERO).is_err());
    world.redis.thaw();
    drop(guard);
}

/// Renewals have a connection of their own: it does not matter how slow those are who ask.
#[tokio::test]
async fn renewals_and_releases_do_not_queue_behind_acquires() {
    let Some(world) = world().await else { return };
    let locks = world.instance("a").await;
    let guard = locks.lock(key()).await.expect("free");
    // The one on which it was asked for.
    let asks = busiest(&world).await;
    world.proxy.connection(asks).hold(Direction::Up);
    let others = tokio::spawn(locks.lock(("other",)).wait(ms(200)).into_future());
    sleep(ms(50)).await;
    // Behind those who ask it would wait for as long as that lasts.
    guard.release().await.expect("nobody is before it");
    assert!(others.await.expect("runs").is_err(), "it hangs");
    world.proxy.all().heal();
    world.is_clean_soon().await;
}

/// The number of the connection on which an acquire goes: the first one that was made.
async fn busiest(world: &World) -> u64 {
    let numbers = world.proxy.connections();
    let listens = world.proxy.subscribers();
    let first = numbers.into_iter().find(|number| !listens.contains(number));
    first.expect("it has asked")
}

/// Events are lost, and nothing else: the line still moves.
#[tokio::test]
async fn redis_restart_loses_the_queue_and_no_waiter() {
    let Some(mut world) = world().await else { return };
    let (one, two) = (world.sound_instance("a").await, world.sound_instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("in line", async || world.ask(&["LLEN", crate::support::LINE]).await.integer() == Some(1)).await;
    world.redis.restart_empty().await;
    // It has forgotten the holder: whoever waits has its turn, and a larger token.
    let token = guard.fencing_token();
    let second = soon("its turn", waiting).await.expect("runs").expect("its turn");
    assert!(second.fencing_token() > token);
    second.release().await.expect("ours");
    drop(guard);
    world.is_clean_soon().await;
}
