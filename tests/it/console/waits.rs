//! What a process holds, and its longest waits.

use std::{future::IntoFuture, time::Duration};

use axum::{Router, routing::get};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower_lock::{LockKey, LockLayer, LockManager, MemoryStore, Owner, console::Access, key::fixed};
use tower_lock_testkit::{
    app::fetch,
    log::Log,
    wait::{ms, settle},
};

use super::{app, json, shown};

/// Waits for a key that another call holds for this time.
async fn wait_for(locks: &LockManager, key: &LockKey, time: Duration) {
    let guard = locks.lock(key.clone()).await.expect("free");
    let waiter = tokio::spawn(locks.lock(key.clone()).into_future());
    settle().await;
    sleep(time).await;
    guard.release().await.expect("up");
    waiter.await.expect("no panic").expect("free").release().await.expect("up");
}

async fn waits(locks: &LockManager) -> Vec<Value> {
    let holding = json(&app(locks, Access::Read), "/api/holding").await;
    holding["waits"].as_array().expect("a list").clone()
}

#[tokio::test(start_paused = true)]
async fn longest_waits_are_kept_in_order_for_five_minutes() {
    let locks = LockManager::new(MemoryStore::new());
    wait_for(&locks, &("short",).into(), ms(9)).await;
    assert_eq!(waits(&locks).await, [] as [Value; 0], "less than 10 ms");
    for n in 0..40 {
        // In no order.
        wait_for(&locks, &("n", n).into(), ms(20 + n * 7 % 40)).await;
    }
    let kept = waits(&locks).await;
    let times: Vec<_> = kept.iter().map(|wait| wait["waited_ms"].as_u64().expect("a number")).collect();
    assert_eq!((times.len(), times[0], times[31]), (32, 59, 28));
    assert!(times.is_sorted_by(|a, b| a >= b), "{times:?}");
    let first = kept[0].as_object().expect("an object");
    assert_eq!(first.keys().cloned().collect::<Vec<_>>().join(" "), "ended_ms_ago key raw result route waited_ms");
    assert_eq!((&first["route"], &first["result"]), (&json!("none"), &json!("granted")));
    assert!(shown(&app(&locks, Access::Read), "").await.contains("<td>59 ms</td><td>granted</td><td>none</td>"));
    sleep(Duration::from_secs(5 * 60)).await;
    assert_eq!(waits(&locks).await, [] as [Value; 0]);
}

#[tokio::test(start_paused = true)]
async fn waits_have_the_route_and_the_result_of_a_request() {
    let locks = LockManager::new(MemoryStore::new());
    let layer = LockLayer::new(&locks, fixed(("k",))).wait(ms(300));
    let service = Router::new().route("/goods/{id}", get(|| async {}).route_layer(layer));
    let guard = locks.lock(("k",)).await.expect("free");
    fetch(&service, "/goods/7").await;
    let cancelled = tokio::spawn({
        let service = service.clone();
        async move { fetch(&service, "/goods/8").await }
    });
    sleep(ms(100)).await;
    cancelled.abort();
    settle().await;
    let kept = waits(&locks).await;
    let ends: Vec<_> = kept.iter().map(|wait| [&wait["route"], &wait["key"], &wait["result"]]).collect();
    let (route, key) = (&json!("/goods/{id}"), &json!("k"));
    assert_eq!(ends, [[route, key, &json!("timed_out")], [route, key, &json!("cancelled")]]);
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn holding_lists_what_is_held_with_the_oldest_first() {
    let locks = LockManager::builder(MemoryStore::new()).instance("api-7").build();
    let owner = Owner::new();
    let one = locks.lock(("one",)).owner(&owner).await.expect("free");
    sleep(Duration::from_secs(2)).await;
    let two = locks.permit(("two",), 4).await.expect("free");
    let again = locks.lock(("one",)).owner(&owner).await.expect("its own");
    let read = locks.read(("three",)).await.expect("free");
    let waiter = tokio::spawn(locks.lock(("one",)).into_future());
    settle().await;
    let held = locks.holding();
    let [first, rest @ ..] = &held[..] else { panic!("{held:?}") };
    assert_eq!((first.key.as_str(), first.limit, first.guards, first.waiting), ("one", 1, 2, 1));
    assert_eq!(first.fencing_token, Some(one.fencing_token()));
    assert_eq!((first.id.instance(), &first.id), ("api-7", one.held_lock().acquisition_id()));
    assert_eq!(first.held_for, Duration::from_secs(2));
    assert!(first.remaining > Duration::from_secs(19) && first.remaining < Duration::from_secs(30));
    let rest: Vec<_> = rest.iter().map(|held| (held.key.as_str(), held.limit, held.fencing_token)).collect();
    assert_eq!(rest, [("three", 1024, None), ("two", 4, None)]);
    waiter.abort();
    drop((one, two, again, read));
    settle().await;
    assert!(locks.holding().is_empty());
}

#[tokio::test]
async fn event_of_a_rejected_request_has_its_page() {
    let log = Log::default();
    let _listening = log.listen();
    let locks = LockManager::new(MemoryStore::new());
    let raw = LockKey::raw("a b").expect("valid");
    let guard = locks.lock(raw.clone()).await.expect("free");
    let layer = LockLayer::new(&locks, fixed(raw));
    let route = |layer| Router::new().route("/", get(|| async {}).route_layer(layer));
    fetch(&route(layer.clone().log_key(tower_lock::LogKey::Redacted)), "/").await;
    assert!(!log.text().contains("page="), "{}", log.text());
    fetch(&route(layer), "/").await;
    assert!(log.text().contains("page=\"key?name=a+b&raw=1\""), "{}", log.text());
    drop(guard);
}
