//! Servers that are down, frozen, separated, or empty.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode},
    routing::post,
};
use tokio::{
    select,
    time::{Instant, sleep, sleep_until},
};
use tower::ServiceExt;
use tower_lock::{
    LockError, LockLayer, LockLost, LockManager, RedlockStore,
    store::{AcquireReply, AcquireRequest, AcquisitionIds, IfBusy, QueueConfig, StoreErrorKind},
};
use tower_lock_testkit::{
    Direction, RedisServer,
    locks::{key, one_key},
    store::StoreExt,
    wait::{ms, soon, until},
};

use super::{LONGEST, Servers, servers};

/// The longest that can be set.
const CALL: Duration = Duration::from_secs(5);

async fn patient_instance(servers: &Servers) -> LockManager {
    let store = RedlockStore::builder().call_timeout(CALL).connect(servers.urls()).await.expect("they are up");
    LockManager::builder(store).lease(LONGEST).build()
}

/// Twenty locks, each before one decision would have to be made without a reply.
async fn assert_not_delayed(locks: &LockManager, how: &str) {
    for _ in 0..20 {
        let limit = Instant::now() + CALL / 3;
        let locked = async {
            locks.try_lock(key()).await.expect("a majority is there").release().await.expect("held");
        };
        select! {
            () = locked => {}
            () = sleep_until(limit) => panic!("a grant waits for a server: {how}"),
        }
    }
}

#[tokio::test]
async fn grants_do_not_wait_for_a_minority() {
    let Some(mut servers) = servers(5).await else { return };
    let locks = patient_instance(&servers).await;
    assert_not_delayed(&locks, "all are up").await;
    servers.redis[0].freeze();
    servers.proxies[1].all().swallow(Direction::Both);
    assert_not_delayed(&locks, "frozen and separated").await;
    servers.redis[0].thaw();
    // Until it has executed the calls that it has missed, it may have votes that are in the way.
    servers.lock_at(&locks, 4).await.release().await.expect("held");
    servers.wait_until_clean().await;
    servers.redis[2].kill();
    assert_not_delayed(&locks, "separated and down").await;
    servers.proxies[1].all().heal();
    servers.redis[2].restart_empty().await;
    servers.wait_until_clean().await;
}

/// Guarantee: G6.
#[tokio::test]
async fn majority_down_is_a_503_and_works_afterwards() {
    let Some(mut servers) = servers(3).await else { return };
    let locks = servers.instance("a").await;
    let layer = |wait| LockLayer::new(&locks, one_key()).wait(wait);
    let service = Router::new()
        .route("/refuse", post(async || "done").route_layer(layer(Duration::ZERO)))
        .route("/wait", post(async || "done").route_layer(layer(Duration::from_secs(20))));
    let post = async |path: &str| {
        let request = Request::post(path).body(Body::empty()).expect("a request");
        let response = soon("a response", service.clone().oneshot(request)).await.expect("infallible");
        let status = response.status();
        let body = to_bytes(response.into_body(), 1 << 16).await.expect("a body");
        (status, String::from_utf8_lossy(&body).into_owned())
    };
    assert_eq!(post("/wait").await.0, StatusCode::OK);
    servers.redis[0].kill();
    assert_eq!(post("/wait").await.0, StatusCode::OK, "a majority is left");
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
    let locks = LockManager::builder(store).lease(Duration::from_secs(2)).build();
    let guard = locks.lock(key()).await.expect("free");
    servers.redis[0].kill();
    sleep(Duration::from_secs(5)).await;
    assert!(!guard.held_lock().remaining().is_zero(), "renewed for more than two leases");
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
    for server in [0, 1, 2, 0] {
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

/// The number of scripts that a server has run.
async fn scripts(redis: &RedisServer) -> u64 {
    let stats = redis.command(&["INFO", "commandstats"]).await;
    let calls =
        stats.text().and_then(|text| text.split_once("cmdstat_evalsha:calls=")?.1.split(',').next()?.parse().ok());
    calls.unwrap_or(0)
}

/// The vote and the raise arrive after the release. The lock would stay for a lease.
/// Guarantee: G2.
#[tokio::test]
async fn grant_that_comes_after_the_release_does_not_stay() {
    let Some(servers) = servers(3).await else { return };
    let store = RedlockStore::builder().call_timeout(CALL).connect(servers.urls()).await.expect("they are up");
    let locks = LockManager::builder(store).lease(LONGEST).build();
    locks.lock(key()).await.expect("free").release().await.expect("held");
    servers.wait_until_clean().await;
    // The connection of the acquires; that of the releases is not held.
    let asked = std::sync::Arc::new(std::sync::Mutex::new(None));
    let seen = std::sync::Arc::clone(&asked);
    servers.proxies[2].observe(move |request| {
        seen.lock().expect("not poisoned").get_or_insert(request.connection);
    });
    locks.lock(key()).await.expect("free").release().await.expect("held");
    servers.wait_until_clean().await;
    let acquires = asked.lock().expect("not poisoned").expect("a vote is first");
    servers.proxies[2].connection(acquires).hold(Direction::Up);
    locks.lock(key()).await.expect("two servers are enough").release().await.expect("held");
    until("it has not found the lock there", async || servers.holding().await == 0).await;
    let before = scripts(&servers.redis[2]).await;
    servers.proxies[2].connection(acquires).heal();
    until("the vote and the raise were executed", async || scripts(&servers.redis[2]).await >= before + 2).await;
    servers.wait_until_clean().await;
}

/// Guarantee: G2.
#[tokio::test]
async fn release_is_repeated_at_a_server_that_was_separated() {
    let Some(servers) = servers(3).await else { return };
    let locks = LockManager::builder(servers.store().await).lease(LONGEST).build();
    let guard = servers.lock_everywhere(&locks).await;
    servers.proxies[1].all().swallow(Direction::Both);
    guard.release().await.expect("by the others");
    assert_eq!(servers.keys(1).await, ["lock:k"]);
    sleep(ms(1_200)).await;
    servers.proxies[1].all().heal();
    servers.wait_until_clean().await;
}

/// The runtime that has released ends, and the release is repeated from another one.
#[test]
fn release_is_repeated_by_another_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (servers_runtime, first) = (runtime(), runtime());
    let Some(servers) = servers_runtime.block_on(servers(3)) else { return };
    let urls: Vec<_> = servers.redis.iter().map(RedisServer::url).collect();
    let store = first.block_on(RedlockStore::connect(&urls)).expect("they are up");
    let locks = LockManager::builder(store).lease(LONGEST).build();
    first.block_on(async {
        let guards = [locks.lock(("first",)).await.expect("free"), locks.lock(key()).await.expect("free")];
        until("each server has granted it", async || servers.holding().await == 3).await;
        servers.redis[1].freeze();
        for guard in guards {
            guard.release().await.expect("by the others");
        }
    });
    drop(first);
    servers.redis[1].thaw();
    servers_runtime.block_on(async {
        until("the connection works", async || {
            drop(locks.lock(("other",)).await.expect("a majority").release().await);
            servers.keys(1).await.len() < 3
        })
        .await;
    });
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
    let builder = |call| RedlockStore::builder().call_timeout(call).connect(servers.urls());
    let locks = LockManager::new(builder(ms(4_000)).await.expect("they are up"));
    let store = builder(ms(300)).await.expect("they are up");
    servers.proxies.iter().for_each(|proxy| proxy.all().delay(Direction::Both, ms(60)));
    for _ in 0..3 {
        locks.try_lock(key()).await.expect("three round trips").release().await.expect("held");
    }
    // A third of the timeout is too short, so that all are slow. Then none is left out.
    let ids = AcquisitionIds::new("a", 1);
    let acquire = || {
        let terms = QueueConfig::new(ms(4_000), ms(10_000), 16);
        store.acquire_one(AcquireRequest::new(key(), ids.next(), LONGEST, IfBusy::Fail, terms, ms(300)))
    };
    for _ in 0..3 {
        let error = acquire().await.expect_err("too late");
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
    }
    sleep(ms(600)).await;
    servers.proxies.iter().for_each(|proxy| proxy.all().heal());
    let reply = acquire().await;
    assert!(matches!(reply, Ok(AcquireReply::Granted { .. })), "{reply:?}");
}
