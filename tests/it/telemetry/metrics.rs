//! Metrics. Their names are API.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::IntoFuture,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
    routing::{get, post},
};
use metrics::Unit;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::time::sleep;
use tower_lock::{
    LockLayer, LockManager, Once, ReplayLayer, key,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    app::{fetch, send},
    locks::{one_key, store_and_locks},
    wait::settle,
};

use super::traces::Numbered;

/// Name and labels, with the value or the number of records.
fn seen(snapshotter: &Snapshotter) -> BTreeMap<String, f64> {
    let mut seen = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let labels: Vec<_> = key.key().labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let number = match value {
            DebugValue::Counter(count) => f64::from(u32::try_from(count).expect("few")),
            DebugValue::Gauge(gauge) => gauge.into_inner(),
            DebugValue::Histogram(values) => f64::from(u32::try_from(values.len()).expect("few")),
        };
        seen.insert(format!("{}{{{}}}", key.key().name(), labels.join(",")), number);
    }
    seen
}

fn watched(test: impl AsyncFnOnce(&Snapshotter)) {
    let recorder: &'static DebuggingRecorder = Box::leak(Box::default());
    let snapshotter = recorder.snapshotter();
    // For the threads as well that report without a request.
    let here = || std::mem::forget(metrics::set_default_local_recorder(recorder));
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).on_thread_start(here).build().expect("a runtime");
    metrics::with_local_recorder(recorder, || runtime.block_on(test(&snapshotter)));
}

/// A paused clock advances when all reports are done.
async fn reported() {
    sleep(Duration::from_millis(1)).await;
}

/// Unit and description of each metric, with or without values.
fn described(snapshotter: &Snapshotter) -> BTreeMap<String, (Option<Unit>, String)> {
    let all = snapshotter.snapshot().into_vec().into_iter();
    all.map(|(key, unit, text, _)| (key.key().name().to_owned(), (unit, text.unwrap_or_default().to_string())))
        .collect()
}

#[test]
fn every_metric_is_described_with_its_unit() {
    watched(async |snapshotter| {
        record_all(snapshotter).await;
        let described = described(snapshotter);
        for (name, (unit, text)) in &described {
            let expected = if name.ends_with("_seconds") { Unit::Seconds } else { Unit::Count };
            assert_eq!(*unit, Some(expected), "{name}");
            assert!(text.ends_with('.') && text.len() > 15, "{name}: {text}");
        }
        // The metrics in the source, and no others, are recorded and described.
        let source = include_str!("../../../src/telemetry/metrics.rs");
        let in_source: BTreeSet<_> = source.split('"').filter(|name| name.starts_with("tower_lock_")).collect();
        assert_eq!(described.keys().map(String::as_str).collect::<BTreeSet<_>>(), in_source);
        assert_eq!(in_source.len(), 15);
    });
}

async fn record_all(snapshotter: &Snapshotter) -> BTreeMap<String, f64> {
    let (store, locks) = store_and_locks();
    let handler = get(|| async { sleep(Duration::from_secs(15)).await });
    let layer = LockLayer::new(&locks, one_key());
    let app = Router::new().route("/goods/{id}", handler.route_layer(layer));
    let granted = tokio::spawn({
        let app = app.clone();
        async move { fetch(&app, "/goods/1").await }
    });
    settle().await;
    fetch(&app, "/goods/2").await;
    let waits = tokio::spawn(locks.lock(("k",)).wait(Duration::from_secs(60)).into_future());
    settle().await;
    let now = seen(snapshotter);
    assert_eq!((now["tower_lock_held{}"], now["tower_lock_waiting{}"]), (1.0, 1.0));
    waits.abort();
    granted.await.expect("no panic");
    let guard = locks.lock(("k",)).await.expect("free");
    store.fault_all(Fault::Fail);
    assert!(guard.while_held(std::future::pending::<()>()).await.is_err());
    store.fault_all(Fault::None);
    store.on(StoreOp::Acquire).fault(Fault::Hang);
    assert!(locks.try_lock(("n", 2)).await.is_err());
    store.on(StoreOp::Acquire).fault(Fault::None);
    drop(guard);
    sleep(Duration::from_secs(5)).await;
    let leaves = tokio::spawn(async move { fetch(&app, "/goods/3").await });
    settle().await;
    leaves.abort();
    settle().await;
    assert_eq!(seen(snapshotter)["tower_lock_detached{}"], 1.0);
    sleep(Duration::from_secs(20)).await;
    assert_eq!(seen(snapshotter)["tower_lock_detached{}"], -1.0, "since it was looked at");
    let traced = Numbered::default().locks(&store);
    let work =
        || traced.lock(("traced",)).wait(Duration::from_secs(9)).run(async |_| sleep(Duration::from_millis(70)).await);
    assert!(matches!(tokio::join!(work(), work()), (Ok(()), Ok(()))));
    assert_eq!(seen(snapshotter)["tower_lock_blocked_milliseconds_total{by=none}"], 70.0);
    let replay = ReplayLayer::new(&locks, key::fixed(("everyone",))).required();
    let app = Router::new().route("/claims", post(|| async {}).route_layer(replay));
    send(&app, Request::post("/claims").body(Body::empty()).expect("a request")).await;

    reported().await;
    seen(snapshotter)
}

#[test]
fn the_names_and_labels_of_all_metrics_are_these() {
    watched(async |snapshotter| {
        let all = record_all(snapshotter).await.into_keys();
        // Those of store errors begin with zero, all of them: see below.
        let names: Vec<_> = all.filter(|name| !name.contains("_store_errors_")).collect();
        assert_eq!(
            names,
            [
                "tower_lock_acquire_total{route=/claims,result=queue_full}",
                "tower_lock_acquire_total{route=/goods/{id},result=granted}",
                "tower_lock_acquire_total{route=/goods/{id},result=locked}",
                "tower_lock_acquire_total{route=/goods/{id},result=queue_full}",
                "tower_lock_acquire_total{route=none,result=cancelled}",
                "tower_lock_acquire_total{route=none,result=granted}",
                "tower_lock_acquire_total{route=none,result=queue_full}",
                "tower_lock_acquire_total{route=none,result=store_unavailable}",
                "tower_lock_blocked_milliseconds_total{by=none}",
                "tower_lock_detached{}",
                "tower_lock_held{}",
                "tower_lock_hold_seconds{route=/goods/{id}}",
                "tower_lock_hold_seconds{route=none}",
                "tower_lock_lease_seconds{}",
                "tower_lock_lost_total{}",
                "tower_lock_max_detached{}",
                "tower_lock_permits{route=none}",
                "tower_lock_records_lost_total{}",
                "tower_lock_renew_margin_seconds{}",
                "tower_lock_replay_total{route=/claims,result=missing}",
                "tower_lock_wait_seconds{route=/goods/{id},result=granted}",
                "tower_lock_wait_seconds{route=/goods/{id},result=locked}",
                "tower_lock_wait_seconds{route=none,result=cancelled}",
                "tower_lock_wait_seconds{route=none,result=granted}",
                "tower_lock_wait_seconds{route=none,result=store_unavailable}",
                "tower_lock_waiting{}",
            ]
        );
    });
}

/// `increase()` of a counter that begins with its first event is zero.
#[test]
fn counters_of_the_alerts_begin_with_zero() {
    watched(async |snapshotter| {
        let store = TestStore::new();
        let locks = LockManager::builder(store.clone()).lease(Duration::from_secs(5)).max_detached(7).build();
        let built = seen(snapshotter);
        let errors = built.iter().filter(|(name, _)| name.starts_with("tower_lock_store_errors_total{"));
        assert_eq!(errors.map(|(_, count)| *count).collect::<Vec<_>>(), [0.0; 4 * 6]);
        let others: Vec<_> = built.iter().filter(|(name, _)| !name.contains("_errors_")).collect();
        assert_eq!(
            others.iter().map(|(name, value)| (name.as_str(), **value)).collect::<Vec<_>>(),
            [
                ("tower_lock_acquire_total{route=none,result=queue_full}", 0.0),
                ("tower_lock_detached{}", 0.0),
                ("tower_lock_held{}", 0.0),
                ("tower_lock_lease_seconds{}", 5.0),
                ("tower_lock_lost_total{}", 0.0),
                ("tower_lock_max_detached{}", 7.0),
                ("tower_lock_permits{route=none}", 0.0),
                ("tower_lock_records_lost_total{}", 0.0),
                ("tower_lock_waiting{}", 0.0),
            ]
        );
        // Those of a route, with its first request.
        let layer = LockLayer::new(&locks, key::fixed(("a",)));
        fetch(&Router::new().route("/", get(async || ()).route_layer(layer)), "/").await;
        assert_eq!(seen(snapshotter)["tower_lock_acquire_total{route=/,result=queue_full}"], 0.0);
        store.on(StoreOp::Acquire).fault(Fault::Hang);
        assert!(locks.try_lock(("b",)).await.is_err());
        store.on(StoreOp::Acquire).fault(Fault::None);
        let guard = locks.try_lock(("b",)).await.expect("free");
        store.on(StoreOp::Release).fault(Fault::Refuse);
        assert!(guard.release().await.is_err());
        store.on(StoreOp::Release).fault(Fault::None);
        reported().await;
        let errors =
            seen(snapshotter).into_iter().filter(|(name, _)| name.starts_with("tower_lock_store_errors_total{"));
        let (counted, zero): (Vec<_>, Vec<_>) = errors.partition(|(_, count)| *count > 0.0);
        assert_eq!(
            counted.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            [
                "tower_lock_store_errors_total{op=acquire,kind=timeout}",
                "tower_lock_store_errors_total{op=release,kind=refused}",
            ]
        );
        assert_eq!(zero.len(), 4 * 6 - 2);
    });
}

#[test]
fn gauges_of_holders_and_waiters_return_to_zero() {
    watched(async |snapshotter| {
        let (_store, locks) = store_and_locks();
        for n in 0..5 {
            let (dropped, released) =
                (locks.lock(("a", n)).await.expect("free"), locks.lock(("b", n)).await.expect("free"));
            let leaves = tokio::spawn(locks.lock(("a", n)).into_future());
            settle().await;
            leaves.abort();
            settle().await;
            drop(dropped);
            released.release().await.expect("up");
        }
        let now = seen(snapshotter);
        assert_eq!((now["tower_lock_held{}"], now["tower_lock_waiting{}"]), (0.0, 0.0));
    });
}

#[test]
fn each_result_of_a_replay_layer_is_counted() {
    watched(async |snapshotter| {
        let (store, locks) = store_and_locks();
        let handler = post(async |body: String| {
            sleep(Duration::from_millis(10)).await;
            body
        });
        let replay = ReplayLayer::new(&locks, key::fixed(("everyone",))).required().keep_up_to(3);
        let revoker = locks.clone();
        let revoked = post(async move |once: Once| {
            // The process does not learn of it before the release.
            revoker.force_release(once.key().clone()).await.map(drop).map_err(|_| StatusCode::BAD_GATEWAY)
        });
        let app = Router::new()
            .route("/claims/{id}", handler.route_layer(replay.clone()))
            .route("/revoked", revoked.route_layer(replay));
        let claim = async |key: Option<&'static str>, body: &'static str| {
            let request = Request::post("/claims/7");
            let request = if let Some(key) = key { request.header("idempotency-key", key) } else { request };
            send(&app, request.body(Body::from(body)).expect("a request")).await
        };
        tokio::join!(claim(Some("a"), "x"), claim(Some("a"), "x"));
        for (key, body) in [
            (Some("a"), "x"),
            (Some("a"), "x"),
            (Some("a"), "y"),
            (None, "x"),
            (Some("a b"), "x"),
            (Some("long"), "1234"),
            (Some("long"), "1234"),
        ] {
            claim(key, body).await;
        }
        store.fault_events(Fault::Fail);
        let request = Request::post("/revoked").header("idempotency-key", "b").body(Body::empty());
        assert_eq!(send(&app, request.expect("a request")).await.status(), StatusCode::OK);
        reported().await;
        let seen = seen(snapshotter);
        let counted = |result| seen[&format!("tower_lock_replay_total{{route=/claims/{{id}},result={result}}}")];
        let results = ["first", "replayed", "in_flight", "mismatch", "missing", "invalid", "not_kept"];
        assert_eq!(results.map(counted), [2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        // Its own lock is not one of the route.
        let acquires: Vec<_> = seen.keys().filter(|name| name.contains("route=/claims/{id}")).collect();
        assert!(acquires.iter().all(|name| name.contains("replay") || name.contains("queue_full")), "{acquires:?}");
        let of_replay = seen.keys().filter(|name| name.starts_with("tower_lock_replay_total"));
        // And `first` of the other route.
        assert_eq!(of_replay.count(), results.len() + 1);
        assert_eq!(seen["tower_lock_records_lost_total{}"], 1.0);
    });
}

/// A second guard of a permit does not count, and a writer is no permit.
#[test]
fn permits_in_use_are_counted_by_route() {
    watched(async |snapshotter| {
        let (_, locks) = store_and_locks();
        let again = locks.clone();
        let handler = get(async move || {
            let guard = again.permit(("exports",), 2).await.expect("its own permit");
            sleep(Duration::from_secs(1)).await;
            drop(guard.release().await);
        });
        let layer = LockLayer::new(&locks, key::fixed(("exports",))).at_most(2);
        let app = Router::new().route("/exports", handler.route_layer(layer));
        let requests: Vec<_> = (0..3)
            .map(|_| {
                let app = app.clone();
                tokio::spawn(async move { fetch(&app, "/exports").await.status() })
            })
            .collect();
        let reader = locks.read(("document",)).await.expect("free");
        let writer = locks.lock(("other",)).await.expect("free");
        settle().await;
        let now = seen(snapshotter);
        assert_eq!((now["tower_lock_permits{route=/exports}"], now["tower_lock_held{}"]), (2.0, 4.0));
        assert_eq!(now["tower_lock_permits{route=none}"], 1.0);
        assert_eq!(now["tower_lock_acquire_total{route=/exports,result=locked}"], 1.0);
        for request in requests {
            request.await.expect("no panic");
        }
        drop((reader.release().await, writer.release().await));
        settle().await;
        let now = seen(snapshotter);
        assert_eq!(now["tower_lock_permits{route=/exports}"], -2.0, "since it was looked at");
        assert_eq!(now["tower_lock_permits{route=none}"], -1.0);
    });
}

/// Several keys are one call for a lock, one hold, and as many held locks.
#[test]
fn several_keys_are_counted_as_one_acquire() {
    watched(async |snapshotter| {
        let (store, locks) = store_and_locks();
        let keys = key::from_parts(|_| key::all([("a", 1), ("b", 2), ("c", 3)]));
        let layer = LockLayer::new(&locks, keys);
        let app = Router::new().route("/", get(async || sleep(Duration::from_secs(1)).await).route_layer(layer));
        let request = tokio::spawn({
            let app = app.clone();
            async move { fetch(&app, "/").await }
        });
        settle().await;
        let now = seen(snapshotter);
        assert_eq!(now["tower_lock_held{}"], 3.0);
        assert_eq!(now["tower_lock_acquire_total{route=/,result=granted}"], 1.0);
        assert_eq!(fetch(&app, "/").await.status(), StatusCode::CONFLICT);
        assert_eq!(request.await.expect("no panic").status(), StatusCode::OK);
        settle().await;
        let now = seen(snapshotter);
        assert_eq!(now["tower_lock_held{}"], -3.0, "since it was looked at");
        assert_eq!(now["tower_lock_acquire_total{route=/,result=locked}"], 1.0);
        let holds = now.iter().filter(|(name, _)| name.contains("hold_seconds"));
        assert_eq!(holds.map(|(_, count)| count).sum::<f64>(), 1.0);
        // A busy key that this process does not hold, with a wait.
        let other = LockManager::new(store.clone());
        let held = other.try_lock(("b", 2)).await.expect("free");
        assert!(locks.lock_all([("a", 1), ("b", 2)]).wait(Duration::from_secs(1)).await.is_err());
        held.release().await.expect("up");
        settle().await;
        let now = seen(snapshotter);
        assert_eq!(now["tower_lock_acquire_total{route=none,result=timed_out}"], 1.0);
        assert_eq!((now["tower_lock_held{}"], now["tower_lock_waiting{}"]), (0.0, 0.0));
    });
}
