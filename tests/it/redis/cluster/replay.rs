//! Answers that are kept, and several keys, on the masters of a Cluster.

use std::{
    collections::HashSet,
    future::IntoFuture,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{Path, State},
    http::{Request, StatusCode},
    routing::post,
};
use futures_util::future::join_all;
use tokio::time::sleep;
use tower_lock::{LockError, LockKey, LockManager, ReplayLayer, key, lock::LockAllError};
use tower_lock_testkit::{
    RedisCluster,
    app::send,
    wait::{ms, soon, until},
};

use super::{cluster, instance, keys_at};

const PAYMENTS: usize = 24;

/// The runs of each payment.
type Runs = Arc<Vec<AtomicUsize>>;

async fn pay(State(runs): State<Runs>, Path(number): Path<usize>) -> (StatusCode, String) {
    let run = runs[number].fetch_add(1, SeqCst);
    sleep(ms(10)).await;
    (StatusCode::CREATED, format!("payment {number}, run {run}"))
}

fn app(locks: &LockManager, runs: &Runs) -> Router {
    let layer = ReplayLayer::new(locks, key::fixed(("user", 7))).required().wait(Duration::from_secs(60));
    Router::new().route("/{number}", post(pay).route_layer(layer)).with_state(Arc::clone(runs))
}

async fn ask(app: &Router, number: usize) -> (StatusCode, String) {
    let request = Request::post(format!("/{number}")).header("idempotency-key", format!("\"payment {number}\""));
    let response = send(app, request.body(Body::empty()).expect("a request")).await;
    let status = response.status();
    let body = to_bytes(response.into_body(), 1 << 20).await.expect("a body");
    (status, String::from_utf8_lossy(&body).into_owned())
}

/// Guarantee: G18.
#[tokio::test]
async fn duplicates_at_all_masters_run_once_each() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let runs: Runs = Arc::new((0..PAYMENTS).map(|_| AtomicUsize::new(0)).collect());
    let instances = join_all(["a", "b", "c"].map(|name| instance(&cluster, name))).await;
    let apps: Vec<_> = instances.iter().map(|locks| app(locks, &runs)).collect();
    let requests = (0..PAYMENTS * 15).map(|request| {
        let app = apps[request % apps.len()].clone();
        tokio::spawn(async move { (request % PAYMENTS, ask(&app, request % PAYMENTS).await) })
    });
    let answers = soon("answers", join_all(requests.collect::<Vec<_>>())).await;
    for answer in answers {
        let (number, answer) = answer.expect("no panic");
        assert_eq!(answer, (StatusCode::CREATED, format!("payment {number}, run 0")));
    }
    assert!(runs.iter().all(|runs| runs.load(SeqCst) == 1), "{runs:?}");
    let mut records = Vec::new();
    for node in 0..3 {
        records.push(cluster.command(node, &["KEYS", "tower-lock:lock:[rs]:*"]).await.items().len());
    }
    assert!(records.iter().sum::<usize>() == PAYMENTS && !records.contains(&0), "{records:?}: at each master");
    // A retry at an instance that has not seen it.
    let late = app(&instance(&cluster, "d").await, &runs);
    assert_eq!(ask(&late, 0).await.1, "payment 0, run 0");
}

fn refused(error: &LockAllError) -> bool {
    matches!(error, LockAllError::NotAcquired { source: LockError::Busy { .. }, .. })
}

/// Guarantee: G21.
#[tokio::test]
async fn busy_key_of_several_masters_keeps_only_smaller_ones() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let (locks, other) = (instance(&cluster, "a").await, instance(&cluster, "b").await);
    let mut keys = Vec::new();
    for node in 0..3 {
        keys.extend(keys_at(&cluster, node, 3).await);
    }
    keys.sort_unstable();
    let owners: HashSet<_> =
        keys.iter().map(|key| RedisCluster::slot(&format!("lock:{}", key.as_str())) / 5_462).collect();
    assert_eq!(owners.len(), 3);
    for busy in 0..keys.len() {
        let held = other.lock(keys[busy].clone()).await.expect("free");
        let error = locks.try_lock_all(keys.clone()).await.expect_err("one is busy");
        assert!(refused(&error), "{error:?}");
        let is_free = async |key: &LockKey| {
            other.inspect(key.clone()).await.is_ok_and(|status| status.holder.is_none() && status.waiting == 0)
        };
        for key in keys.iter().filter(|key| **key != keys[busy]) {
            until("free again", async || is_free(key).await).await;
        }
        let waiting = tokio::spawn(locks.lock_all(keys.clone()).into_future());
        until("it waits", async || other.inspect(keys[busy].clone()).await.is_ok_and(|key| key.waiting == 1)).await;
        for key in &keys[..busy] {
            let status = other.inspect(key.clone()).await.expect("up");
            assert!(status.holder.is_some_and(|holder| holder.instance() == "a"), "{key:?} is kept");
        }
        for key in &keys[busy + 1..] {
            until("free meanwhile", async || is_free(key).await).await;
        }
        held.release().await.expect("held");
        let all = soon("the rest", waiting).await.expect("no panic").expect("a grant");
        assert_eq!(all.held_locks().iter().count(), keys.len());
        all.release().await.expect("held");
    }
}
