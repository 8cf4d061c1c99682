//! What an operator counts. The names are API.

use std::{collections::BTreeMap, future::IntoFuture, time::Duration};

use axum::{Router, routing::get};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::time::sleep;
use tower_lock::{
    LockLayer,
    test_util::{Fault, Verb},
};

use crate::support::{fetch, one_key, settle, store_and_locks};

/// Name and labels, and the number, or how many were recorded.
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
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    metrics::with_local_recorder(&recorder, || runtime.block_on(test(&snapshotter)));
}

#[test]
fn the_names_and_labels_of_all_metrics_are_these() {
    watched(async |snapshotter| {
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
        store.all(Fault::Fail);
        assert!(guard.while_held(std::future::pending::<()>()).await.is_err());
        store.all(Fault::None);
        store.on(Verb::Acquire).fault(Fault::Stall);
        assert!(locks.try_lock(("n", 2)).await.is_err());
        store.on(Verb::Acquire).fault(Fault::None);
        drop(guard);
        sleep(Duration::from_secs(5)).await;
        let leaves = tokio::spawn(async move { fetch(&app, "/goods/3").await });
        settle().await;
        leaves.abort();
        settle().await;
        assert_eq!(seen(snapshotter)["tower_lock_detached{}"], 1.0);
        sleep(Duration::from_secs(20)).await;
        assert_eq!(seen(snapshotter)["tower_lock_detached{}"], -1.0, "since it was looked at");

        let names: Vec<_> = seen(snapshotter).into_keys().collect();
        assert_eq!(
            names,
            [
                "tower_lock_acquire_total{route=/goods/{id},result=granted}",
                "tower_lock_acquire_total{route=/goods/{id},result=refused}",
                "tower_lock_acquire_total{route=none,result=cancelled}",
                "tower_lock_acquire_total{route=none,result=granted}",
                "tower_lock_acquire_total{route=none,result=store_unavailable}",
                "tower_lock_detached{}",
                "tower_lock_held{}",
                "tower_lock_hold_seconds{}",
                "tower_lock_lost_total{}",
                "tower_lock_renew_margin_seconds{}",
                "tower_lock_store_errors_total{op=acquire,kind=timeout}",
                "tower_lock_store_errors_total{op=renew,kind=unavailable}",
                "tower_lock_wait_seconds{}",
                "tower_lock_waiting{}",
            ]
        );
    });
}

#[test]
fn what_is_held_and_what_waits_is_counted_down_again() {
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
