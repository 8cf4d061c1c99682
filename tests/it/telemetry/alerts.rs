//! The alerts and the dashboard, on what the exporter of the guide shows of a real run.
//!
//! `promtool` evaluates the rules. It comes with Prometheus, which `scripts/test.sh --long`
//! installs. Without it the tests are skipped.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    future::pending,
    process::Command,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::Request,
    routing::{get, post},
};
use futures_util::future::join_all;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower_lock::{
    LockLayer, LockManager, LockManagerBuilder, Once, ReplayLayer, key,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    app::{fetch, send},
    skipped,
    wait::settle,
};

use crate::repository::read;

/// As in the guide, which a test compares.
const BUCKETS: [f64; 15] = [0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
const MINUTE: Duration = Duration::from_secs(60);

/// What Prometheus reads from one process, once a minute.
struct Process {
    exporter: PrometheusHandle,
    /// The samples of each series, `None` before the first one.
    series: BTreeMap<String, Vec<Option<f64>>>,
    scrapes: usize,
}

/// A run of a process, and the alerts that fire at these minutes.
struct Run {
    name: &'static str,
    process: Process,
    firing: Vec<(usize, &'static [&'static str])>,
}

impl Process {
    fn scrape(&mut self) {
        for line in self.exporter.render().lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').expect("a series and its value");
            let samples = self.series.entry(series.to_owned()).or_default();
            samples.resize(self.scrapes, None);
            samples.push(Some(value.parse().expect("a number")));
        }
        self.scrapes += 1;
    }

    async fn minutes(&mut self, count: usize) {
        for _ in 0..count {
            sleep(MINUTE).await;
            self.scrape();
        }
    }
}

/// Runs a process with the exporter of the guide. The first scrape is that of a manager that was
/// just built.
fn run(
    name: &'static str,
    settings: impl FnOnce(LockManagerBuilder) -> LockManagerBuilder,
    firing: &[(usize, &'static [&'static str])],
    work: impl AsyncFnOnce(&TestStore, &LockManager, &mut Process),
) -> Run {
    let builder = PrometheusBuilder::new().set_buckets_for_metric(Matcher::Prefix("tower_lock".to_owned()), &BUCKETS);
    let recorder = &*Box::leak(Box::new(builder.expect("buckets").build_recorder()));
    let mut process = Process { exporter: recorder.handle(), series: BTreeMap::new(), scrapes: 0 };
    // For the threads as well that report without a request.
    let here = || std::mem::forget(metrics::set_default_local_recorder(recorder));
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).on_thread_start(here).build().expect("a runtime");
    metrics::with_local_recorder(recorder, || {
        runtime.block_on(async {
            let store = TestStore::with_call_timeout(Duration::from_secs(2));
            let locks = settings(LockManager::builder(store.clone())).build();
            process.scrape();
            work(&store, &locks, &mut process).await;
        });
    });
    Run { name, process, firing: firing.to_vec() }
}

/// Holds a lock until its runtime ends.
fn hold(locks: &LockManager) {
    let locks = locks.clone();
    tokio::spawn(async move { locks.lock(("held",)).run(async |_| pending::<()>().await).await });
}

/// A service that leaves a record, and one whose lock is revoked before.
fn payment(locks: &LockManager) -> (Router, Router) {
    let replay = ReplayLayer::new(locks, key::fixed(("everyone",)));
    let revoker = locks.clone();
    // The process does not learn of it before the release.
    let revoked = post(async move |once: Once| drop(revoker.force_release(once.key().clone()).await));
    let paid = post(async || "paid");
    (
        Router::new().route("/pay", paid.route_layer(replay.clone())),
        Router::new().route("/pay", revoked.route_layer(replay)),
    )
}

async fn pay(app: &Router, key: &str) {
    let request = Request::post("/pay").header("idempotency-key", key).body(Body::empty());
    send(app, request.expect("a request")).await;
}

/// Healthy, with some waits, rejections, and replays, for a quarter of an hour.
async fn work_well(_: &TestStore, locks: &LockManager, process: &mut Process) {
    hold(locks);
    let (app, _) = payment(locks);
    for _ in 0..15 {
        let holder = tokio::spawn(locks.lock(("a",)).run(async |_| sleep(Duration::from_secs(2)).await));
        settle().await;
        assert!(locks.try_lock(("a",)).await.is_err());
        locks.lock(("a",)).run(async |_| sleep(Duration::from_secs(1)).await).await.expect("after the holder");
        holder.await.expect("no panic").expect("free");
        pay(&app, "a").await;
        process.minutes(1).await;
    }
}

/// A renewal takes 1.9 s, and less than a third of a lease of 5 s is left.
async fn renew_late(store: &TestStore, locks: &LockManager, process: &mut Process) {
    hold(locks);
    store.on(StoreOp::Renew).latency(Duration::from_millis(1_900));
    process.minutes(15).await;
}

fn runs() -> Vec<Run> {
    let lease = |lease: u64| move |builder: LockManagerBuilder| builder.lease(Duration::from_secs(lease));
    let healthy: &[(usize, &[&str])] = &[(1, &[]), (5, &[]), (10, &[]), (15, &[])];
    vec![
        run("healthy", |builder| builder, healthy, work_well),
        run("healthy, lease of 2 s", lease(2), healthy, work_well),
        run("healthy, lease of 5 s", lease(5), healthy, work_well),
        run("healthy, lease of 600 s", lease(600), healthy, work_well),
        run("late renewals", lease(5), &[(15, &["LockRenewalsLate"])], renew_late),
        run("the same renewals, lease of 30 s", lease(30), &[(15, &[])], renew_late),
        run("the first loss of a process", lease(5), &[(1, &["LocksLost"]), (9, &[])], async |_, locks, process| {
            let guard = locks.lock(("a",)).await.expect("free");
            locks.force_release(("a",)).await.expect("up");
            guard.held_lock().lost().await;
            assert!(guard.while_held(pending::<()>()).await.is_err());
            drop(guard);
            process.minutes(9).await;
        }),
        run("one short outage", lease(30), &[(1, &[]), (3, &["LockStoreErrors"])], async |store, locks, process| {
            store.on(StoreOp::Acquire).fault(Fault::Fail);
            for n in 0..20 {
                assert!(locks.try_lock(("a", n)).await.is_err());
            }
            store.on(StoreOp::Acquire).fault(Fault::None);
            process.minutes(3).await;
        }),
        run("a full queue", lease(30), &[(1, &[]), (2, &["LockQueueFull"]), (9, &[])], async |_, locks, process| {
            let slow = get(|| sleep(Duration::from_secs(2)));
            let layer = LockLayer::new(locks, key::fixed(("a",))).wait(MINUTE);
            let app = Router::new().route("/goods", slow.route_layer(layer));
            let goods = async || drop(send(&app, Request::get("/goods").body(Body::empty()).expect("a request")).await);
            goods().await;
            process.minutes(1).await;
            join_all((0..300).map(|_| goods())).await;
            process.minutes(8).await;
        }),
        run("long waits", lease(30), &[(25, &["LockWaitsLong"])], async |_, locks, process| {
            let layer = LockLayer::new(locks, key::fixed(("a",))).wait(Duration::from_secs(60));
            let works = get(async || sleep(Duration::from_secs(10)).await);
            let app = Router::new().route("/works", works.route_layer(layer));
            for _ in 0..25 {
                tokio::join!(fetch(&app, "/works"), fetch(&app, "/works"));
                process.minutes(1).await;
            }
        }),
        run("long waits without HTTP", lease(30), &[(25, &[])], async |_, locks, process| {
            let works = || locks.lock(("a",)).run(async |_| sleep(Duration::from_secs(10)).await);
            for _ in 0..25 {
                let (first, second) = tokio::join!(works(), works());
                first.and(second).expect("one after the other");
                process.minutes(1).await;
            }
        }),
        run(
            "detached handlers",
            |builder| builder.max_detached(10),
            &[(1, &[]), (9, &["LockHandlersDetached"])],
            leave_handlers,
        ),
        run("detached handlers, and few of them", |builder| builder.max_detached(20), &[(9, &[])], leave_handlers),
        run("a lost record", lease(30), &[(1, &[]), (2, &["LockRecordsLost"])], async |_, locks, process| {
            let (app, revoked) = payment(locks);
            pay(&app, "a").await;
            process.minutes(1).await;
            pay(&revoked, "b").await;
            process.minutes(8).await;
        }),
    ]
}

/// Five clients leave their handlers behind.
async fn leave_handlers(_: &TestStore, locks: &LockManager, process: &mut Process) {
    let layer = LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("goods", id))).max_hold(60 * MINUTE);
    let slow = get(|| sleep(30 * MINUTE)).route_layer(layer);
    let app = Router::new().route("/goods/{id}", slow);
    for n in 0..5 {
        let client = tokio::spawn({
            let app = app.clone();
            async move { fetch(&app, &format!("/goods/{n}")).await }
        });
        settle().await;
        client.abort();
        settle().await;
    }
    process.minutes(9).await;
}

/// The series of a run as `promtool` reads them, and the results that these queries must have.
fn as_test(run: &Run, queries: &[(usize, String, Vec<Value>)]) -> Value {
    let sample = |value: &Option<f64>| value.map_or_else(|| "_".to_owned(), |value| value.to_string());
    let series = run.process.series.iter().map(|(series, samples)| {
        json!({ "series": series, "values": samples.iter().map(sample).collect::<Vec<_>>().join(" ") })
    });
    let queries = queries.iter().map(
        |(minute, query, samples)| json!({ "expr": query, "eval_time": format!("{minute}m"), "exp_samples": samples }),
    );
    json!({
        "name": run.name,
        "interval": "1m",
        "input_series": series.collect::<Vec<_>>(),
        "promql_expr_test": queries.collect::<Vec<_>>(),
    })
}

/// Runs `promtool`. It reads YAML, which JSON is.
fn test_rules(tests: &[Value]) {
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/observability/alerts.yml");
    let file = std::env::temp_dir().join(format!("tower-lock-alerts-{}.yml", std::process::id()));
    fs::write(&file, json!({ "rule_files": [rules], "evaluation_interval": "1m", "tests": tests }).to_string())
        .expect("a temporary file");
    let tested = Command::new("promtool").args(["test", "rules"]).arg(&file).output().expect("promtool");
    fs::remove_file(&file).expect("it was written");
    let checked = Command::new("promtool").args(["check", "rules", rules]).output().expect("promtool");
    for output in [tested, checked] {
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(output.status.success(), "{text}");
    }
}

#[test]
fn alerts_fire_for_what_a_process_exports() {
    if Command::new("promtool").arg("--version").output().is_err() {
        return skipped("alerts_fire_for_what_a_process_exports", "promtool");
    }
    let runs = runs();
    let named: BTreeSet<_> = runs.iter().flat_map(|run| &run.firing).flat_map(|(_, names)| *names).copied().collect();
    let rules = read("docs/observability/alerts.yml");
    let alerts: BTreeSet<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert_eq!(named, alerts, "an alert that no run shows");
    let firing = |run: &Run| {
        let expected = run.firing.iter().map(|(minute, names)| {
            let names = names.iter().map(|name| json!({ "labels": format!("{{alertname=\"{name}\"}}"), "value": 1 }));
            (*minute, "count by (alertname) (ALERTS{alertstate=\"firing\"})".to_owned(), names.collect())
        });
        as_test(run, &expected.collect::<Vec<_>>())
    };
    let mut tests: Vec<_> = runs.iter().map(firing).collect();
    // Each panel of the dashboard shows something.
    let dashboard: Value = serde_json::from_str(&read("docs/observability/grafana.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let shown = targets.map(|target| {
        let query = target["expr"].as_str().expect("a query").replace("$__rate_interval", "5m");
        (10, format!("count({query}) > bool 0"), vec![json!({ "labels": "{}", "value": 1 })])
    });
    tests.push(as_test(&runs[0], &shown.collect::<Vec<_>>()));
    test_rules(&tests);
}

#[test]
fn buckets_of_the_pages_are_those_of_the_test() {
    let buckets = BUCKETS.map(|bucket| format!("{bucket:?}")).join(", ");
    let text = |page: &str| read(page).split_whitespace().filter(|word| *word != "#").collect::<Vec<_>>().join(" ");
    for page in ["docs/guide/observability.md", "docs/observability/alerts.yml"] {
        assert!(text(page).contains(&buckets), "{page} has other buckets than {buckets}");
    }
}
