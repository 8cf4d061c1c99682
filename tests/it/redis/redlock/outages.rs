//! Servers that are down, frozen, separated, or empty.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode},
    routing::post,
};
use tokio::time::Instant;
use tower::ServiceExt;
use tower_lock::{
    LockError, LockLayer, LockLost, LockManager,
    store::{AcquireReply, AcquireRequest, AcquisitionIds, IfBusy, QueueConfig, StoreErrorKind},
};
use tower_lock_testkit::{
    Direction, RedisServer,
    costs::scripts,
    limits,
    locks::{key, one_key},
    runtimes::{end_runtimes_in_child_process, ends_of_runtimes_are_survived},
    store::StoreExt,
    wait::{ms, soon, until},
};

use super::{LONGEST, servers};

#[tokio::test]
async fn grants_do_not_wait_for_a_minority() {
    let Some(mut servers) = servers(3).await else { return };
    // A server whose connection has broken may execute a release before its grant.
    let locks = LockManager::builder(servers.store().await).lease(ms(3_000)).build();
    for (server, how) in [(0, "up"), (0, "frozen"), (1, "separated"), (2, "down")] {
        match how {
            "up" => {}
            "frozen" => servers.redis[server].freeze(),
            "separated" => servers.proxies[server].all().swallow(Direction::Both),
            _ => servers.redis[server].kill(),
        }
        const LOCKS: u32 = 8;
        let started = Instant::now();
        for _ in 0..LOCKS {
            locks.try_lock(key()).await.expect("a majority is there").release().await.expect("held");
        }
        // A decision without a reply is made after a third of the timeout.
        assert!(started.elapsed() < limits::CALL / 3 * LOCKS, "each grant waits for a server that is {how}");
        match how {
            "up" => {}
            "frozen" => servers.redis[server].thaw(),
            "separated" => servers.proxies[server].all().heal(),
            _ => servers.redis[server].restart_empty().await,
        }
        // Until it has executed the calls that it has missed, its votes may be in the way.
        servers.lock_everywhere(&locks).await.release().await.expect("held");
        servers.wait_until_clean().await;
    }
}

/// Guarantee: G6.
#[tokio::test]
async fn majority_down_is_a_503_and_works_afterwards() {
    let Some(mut servers) = servers(3).await else { return };
    let locks = servers.hasty_instance("a").await;
    let layer = |wait| LockLayer::new(&locks, one_key()).wait(wait);
    let service = Router::new()
        .route("/refuse", post(async || "done").route_layer(layer(Duration::ZERO)))
        .route("/wait", post(async || "done").route_layer(layer(limits::OUTAGE)));
    let post = async |path: &str| {
        let request = Request::post(path).body(Body::empty()).expect("a request");
        let response = soon("a response", service.clone().oneshot(request)).await.expect("infallible");
        let status = response.status();
        let body = to_bytes(response.into_body(), 1 << 16).await.expect("a body");
        (status, String::from_utf8_lossy(&body).into_owned())
    };
    until("all are up", async || post("/wait").await.0 == StatusCode::OK).await;
    servers.redis[0].kill();
    until("a majority is left", async || post("/wait").await.0 == StatusCode::OK).await;
    for how in ["frozen", "separated", "down"] {
        match how {
            "frozen" => servers.redis[1].freeze(),
            "separated" => servers.proxies[1].all().swallow(Direction::Both),
            _ => servers.redis[1].kill(),
        }
        for path in ["/refuse", "/wait"] {
            let (status, body) = post(path).await;
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{how}, {path}: {body}");
            assert!(body.contains(r#""outcome":"not-started""#), "{how}, {path}: {body}");
        }
        match how {
            "frozen" => servers.redis[1].thaw(),
            "separated" => servers.proxies[1].all().heal(),
            _ => servers.redis[1].restart_empty().await,
        }
        until("it works again", async || post("/refuse").await.0 == StatusCode::OK).await;
    }
    servers.redis[0].restart_empty().await;
    servers.wait_until_clean().await;
}

/// A lease is renewed by two of three servers, and lost without a majority.
/// Guarantee: G8.
#[tokio::test]
async fn lock_is_renewed_by_a_majority_and_lost_without_one() {
    let Some(servers) = servers(3).await else { return };
    let store = servers.store().await;
    let locks = LockManager::builder(store).lease(Duration::from_secs(6)).build();
    let guard = locks.lock(key()).await.expect("free");
    servers.redis[0].kill();
    let left = guard.held_lock().remaining();
    until("it is renewed", async || guard.held_lock().remaining() > left).await;
    servers.redis[1].freeze();
    assert_eq!(soon("a loss", guard.held_lock().lost()).await, LockLost::Expired);
    servers.redis[1].thaw();
}

/// Guarantee: G1.
#[tokio::test]
async fn server_restarted_empty_frees_no_key_and_lowers_no_fence() {
    let Some(mut servers) = servers(3).await else { return };
    let (one, two) = (servers.instance("a").await, servers.instance("b").await);
    let mut last = 0;
    for server in [0, 1, 2] {
        let guard = servers.lock_everywhere(&one).await;
        servers.redis[server].restart_empty().await;
        let other = two.try_lock(key()).await;
        assert!(matches!(other, Err(LockError::Busy { .. })), "the others have it: {other:?}");
        let fence = guard.fencing_token().as_i64();
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        guard.release().await.expect("held by a majority");
    }
    servers.wait_until_clean().await;
}

/// The server executes the vote, the raise and the release late, in this order.
/// Guarantee: G2.
#[tokio::test]
async fn grant_that_comes_after_the_release_does_not_stay() {
    let Some(servers) = servers(3).await else { return };
    let locks = LockManager::builder(servers.store().await).lease(LONGEST).build();
    locks.lock(key()).await.expect("free").release().await.expect("held");
    servers.wait_until_clean().await;
    // The connection of the votes. A release on another one would be executed before them.
    let asked = std::sync::Arc::new(std::sync::Mutex::new(None));
    let seen = std::sync::Arc::clone(&asked);
    servers.proxies[2].observe(move |request| {
        seen.lock().expect("not poisoned").get_or_insert(request.connection);
    });
    locks.lock(key()).await.expect("free").release().await.expect("held");
    servers.wait_until_clean().await;
    let votes = asked.lock().expect("not poisoned").expect("a vote is first");
    servers.proxies[2].connection(votes).hold(Direction::Up);
    let before = scripts(&servers.redis[2]).await;
    locks.lock(key()).await.expect("two servers are enough").release().await.expect("held");
    servers.proxies[2].connection(votes).heal();
    until("all were executed", async || scripts(&servers.redis[2]).await >= before + 3).await;
    servers.wait_until_clean().await;
}

/// Guarantee: G2.
#[tokio::test]
async fn lease_ends_a_lock_that_one_server_does_not_release() {
    let Some(servers) = servers(3).await else { return };
    let store = limits::redlock().call_timeout(limits::SHORT).connect(&servers.urls()).await.expect("they are up");
    let locks = LockManager::builder(store).lease(ms(2_000)).build();
    let guard = servers.lock_everywhere(&locks).await;
    servers.proxies[1].all().swallow(Direction::Both);
    guard.release().await.expect("by the others");
    assert_eq!(servers.keys(1).await, ["lock:k"]);
    locks.lock(key()).await.expect("the others are enough").release().await.expect("held");
    servers.wait_until_clean().await;
}

#[tokio::test]
async fn health_names_the_servers_that_are_missing() {
    let Some(servers) = servers(3).await else { return };
    let locks = servers.instance("a").await;
    locks.health().await.expect("all are up");
    servers.redis[0].kill();
    locks.health().await.expect("a majority is up");
    servers.redis[1].freeze();
    let error = locks.health().await.expect_err("no majority").to_string();
    assert!(error.starts_with("the redlock store is not ready for locks: no majority of the 3 servers: "), "{error}");
    for server in [0, 1] {
        assert!(error.contains(&servers.proxies[server].address().to_string()), "{error}");
    }
    assert!(!error.contains(&servers.proxies[2].address().to_string()), "{error}");
    servers.redis[1].thaw();
    until("a majority is back", async || locks.health().await.is_ok()).await;
}

/// Each round trip takes longer than a decision waits for a slow server.
#[tokio::test]
async fn servers_far_away_grant_with_a_longer_call_timeout() {
    let Some(servers) = servers(3).await else { return };
    let builder = |call| limits::redlock().call_timeout(call).connect(servers.urls());
    let locks = LockManager::new(builder(limits::CALL).await.expect("they are up"));
    let store = builder(limits::SHORT).await.expect("they are up");
    servers.proxies.iter().for_each(|proxy| proxy.all().delay(Direction::Both, limits::SHORT / 5));
    for _ in 0..2 {
        locks.try_lock(key()).await.expect("three round trips").release().await.expect("held");
    }
    // A third of the timeout is too short, so that all are slow. Then none is left out.
    let ids = AcquisitionIds::new("a", 1);
    let acquire = || {
        let terms = QueueConfig::new(ms(4_000), ms(10_000), 16);
        store.acquire_one(AcquireRequest::new(key(), ids.next(), LONGEST, IfBusy::Fail, terms, limits::CALL))
    };
    for _ in 0..3 {
        let error = acquire().await.expect_err("too late");
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
    }
    servers.proxies.iter().for_each(|proxy| proxy.all().heal());
    until("a grant", async || matches!(acquire().await, Ok(AcquireReply::Granted { .. }))).await;
}

/// Guarantee: G2.
#[tokio::test]
async fn runtimes_end_while_calls_to_redlock_are_under_way() {
    let connect = async |urls: &str| limits::redlock().connect(urls.split(',')).await.expect("they are up");
    end_runtimes_in_child_process(connect);
    let Some(servers) = servers(3).await else { return };
    let test = "redlock::outages::runtimes_end_while_calls_to_redlock_are_under_way";
    let urls: Vec<_> = servers.redis.iter().map(RedisServer::url).collect();
    ends_of_runtimes_are_survived(test, &urls.join(",")).await;
}
