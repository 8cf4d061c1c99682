//! The checker detects defects: environments with one defect each, and the same environments
//! without it.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::time::Duration;

use tokio::time::sleep;
use tower_lock_storm::{
    Cluster, Database, Disconnect, Environment as Storm, Observed, ReplayOutcome, ReplayStorm, Request, Route, Service,
    Summary, seed, turn,
};
use tower_lock_testkit::{RedisServer, skipped, wait::ms};

const PROGRAMS: (&str, &str) = (env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service"));

/// A short lock-delay after an aborted section.
const SOON: &str = "--lock-delay-ms=100";

struct Environment {
    cluster: Cluster,
    /// In memory: one process. On Redis: two.
    services: Vec<Service>,
    _redis: Option<RedisServer>,
}

impl Environment {
    /// Two instances that share only their store.
    async fn new(redis: bool, checker: &[&str], service: &str) -> Self {
        let cluster = Cluster::start(PROGRAMS.0, PROGRAMS.1, checker).await;
        let redis = if redis { Some(RedisServer::start().await) } else { None };
        let services = match &redis {
            Some(redis) => {
                vec![
                    cluster.service(&["a", "1", SOON, "--patient", service], Some(&redis.url())).await,
                    cluster.service(&["b", "1", SOON, "--patient", service], Some(&redis.url())).await,
                ]
            }
            None => vec![cluster.service(&["a", "2", SOON, service], None).await],
        };
        Self { cluster, services, _redis: redis }
    }

    async fn request(&self, instance: usize, path: &str, name: &str) -> Observed {
        self.cluster.send(self.instance(instance), &Request::new(name, path)).await
    }

    async fn disconnects(&self, instance: usize, path: &str, name: &str) -> Observed {
        let request = Request::new(name, path).disconnecting(Disconnect::after(Duration::from_millis(300)));
        self.cluster.send(self.instance(instance), &request).await
    }

    fn instance(&self, number: usize) -> std::net::SocketAddr {
        self.services.iter().flat_map(Service::instances).copied().nth(number).expect("two instances")
    }

    async fn finish(self) -> Summary {
        for service in self.services {
            service.terminate().await;
        }
        self.cluster.finish().await
    }
}

/// In memory, and on Redis if it is installed; both at once.
async fn on_each_store(test: impl AsyncFn(bool)) {
    if RedisServer::is_available() {
        tokio::join!(test(false), test(true));
    } else {
        skipped("the self-test of the checker on Redis", "redis-server");
        test(false).await;
    }
}

fn violations(summary: &Summary) -> Vec<&str> {
    summary.violations.keys().map(String::as_str).collect()
}

/// One client holds, one waits and disconnects, one arrives.
async fn waiter_leaves(redis: bool, service: &str) -> Summary {
    let environment = Environment::new(redis, &[], service).await;
    let holds = environment.request(0, "/refuse/1?work_ms=2000", "holds");
    let others = async {
        sleep(ms(200)).await;
        assert_eq!(environment.disconnects(1, "/wait/1", "leaves").await, Observed::Left);
        sleep(ms(400)).await;
        environment.request(1, "/refuse/1", "comes").await
    };
    let (held, _) = tokio::join!(holds, others);
    assert!(matches!(held, Observed::Response { .. }), "{held:?}");
    environment.finish().await
}

#[tokio::test]
async fn release_by_any_id_causes_an_overlap() {
    on_each_store(async |redis| {
        let wrong = waiter_leaves(redis, "--releases-any-holder");
        let (wrong, right) = tokio::join!(wrong, waiter_leaves(redis, "--correct"));
        assert_eq!(violations(&wrong), ["overlap"], "{wrong:#?}");
        assert_eq!((violations(&right), right.answers(409)), (vec![], 1), "{right:#?}");
    })
    .await;
}

/// One holds for longer than a lease by a wrong clock, one arrives.
async fn late_arrival(redis: bool, service: &str) -> Summary {
    let environment = Environment::new(redis, &[], service).await;
    let holds = environment.request(0, "/refuse/1?work_ms=2000", "holds");
    let comes = async {
        sleep(ms(1_000)).await;
        environment.request(1, "/refuse/1", "comes").await
    };
    tokio::join!(holds, comes);
    environment.finish().await
}

/// Guarantee: G1.
#[tokio::test]
async fn fast_store_clock_causes_an_overlap() {
    on_each_store(async |redis| {
        let wrong = late_arrival(redis, "--shortens-leases");
        let (wrong, right) = tokio::join!(wrong, late_arrival(redis, "--correct"));
        assert_eq!(violations(&wrong), ["overlap"], "{wrong:#?}");
        assert_eq!((violations(&right), right.answers(409)), (vec![], 1), "{right:#?}");
    })
    .await;
}

/// One is paused past the end of its lease and then writes; another one has written by then.
async fn paused_holder(redis: bool, checker: &[&str]) -> Summary {
    let environment = Environment::new(redis, checker, "--correct").await;
    let is_paused = environment.request(0, "/fixed/1?block_ms=2000", "is-paused");
    let comes = async {
        sleep(ms(200)).await;
        environment.request(1, "/fixed/1", "comes").await
    };
    let (paused, came) = tokio::join!(is_paused, comes);
    assert!(matches!(came, Observed::Response { status: 200, .. }), "{came:?}");
    let is_unknown =
        matches!(&paused, Observed::Response { status: 503, outcome: Some(outcome), .. } if outcome == "unknown");
    assert!(is_unknown, "its outcome must not be reported: {paused:?}");
    environment.finish().await
}

/// Guarantee: G1.
#[tokio::test]
async fn sink_without_a_fence_check_accepts_a_stale_write() {
    on_each_store(async |redis| {
        let wrong = paused_holder(redis, &["--ignore-fences"]);
        let (wrong, right) = tokio::join!(wrong, paused_holder(redis, &[]));
        assert_eq!(violations(&wrong), ["stale-write-accepted"], "{wrong:#?}");
        assert_eq!((violations(&right), right.refused, right.accepted), (vec![], 1, 1), "{right:#?}");
    })
    .await;
}

/// Storms with this defect: in one process, and in two on each server that is installed.
async fn storms(wrong: &str, alone_too: bool) -> Vec<Summary> {
    const REQUESTS: u64 = 2_000;
    let _turn = turn().await;
    let seed = seed();
    let storm = async |redis: Option<RedisServer>| {
        let processes = if redis.is_some() { 2 } else { 1 };
        let environment = Storm::new(PROGRAMS, redis, processes, &[wrong, "--patient"], seed).await;
        let storm = environment.storm(REQUESTS).await;
        let outcome = environment.end(storm).await;
        println!("{wrong}: {}", serde_json::to_string(&outcome.summary).expect("plain data"));
        outcome.summary
    };
    let mut summaries = Vec::new();
    if alone_too {
        summaries.push(storm(None).await);
    }
    if RedisServer::is_available() {
        summaries.push(storm(Some(RedisServer::start().await)).await);
    } else {
        skipped("a storm that is wrong, on Redis", "redis-server");
    }
    for route in [Route::Direct, Route::Pooled] {
        let Some(database) = Database::start("a storm that is wrong, on PostgreSQL", route).await else { continue };
        let environment = Storm::on(database, PROGRAMS, 2, &[wrong, "--patient"], seed).await;
        let storm = environment.storm(REQUESTS / 2).await;
        summaries.push(environment.end(storm).await.summary);
    }
    summaries
}

fn overlaps(summary: &Summary) -> u64 {
    summary.violations.get("overlap").copied().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unlocked_requests_in_a_storm_overlap() {
    for summary in storms("--skips-some", true).await {
        assert!(overlaps(&summary) > 0, "{summary:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unlocked_streams_in_a_storm_overlap() {
    for summary in storms("--releases-at-head", true).await {
        assert!(overlaps(&summary) > 0, "{summary:#?}");
    }
}

/// Not in one process: there only holders release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_by_any_id_in_a_storm_causes_overlaps() {
    for summary in storms("--releases-any-holder", false).await {
        assert!(overlaps(&summary) > 0, "{summary:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_lock_delay_in_a_storm_is_too_soon() {
    for summary in storms("--skips-lock-delay", true).await {
        assert_eq!(violations(&summary), ["too-soon"], "{summary:#?}");
    }
}

/// Storms of duplicates with this defect, on each server that is installed.
async fn duplicates(flag: &'static str, finds_answers: bool) -> Vec<ReplayOutcome> {
    let _turn = turn().await;
    let program = env!("CARGO_BIN_EXE_replayer");
    let storm = ReplayStorm { program, keys: 30, crashes: 3, finds_answers, flag, seed: seed() };
    let mut outcomes = Vec::new();
    if RedisServer::is_available() {
        outcomes.push(storm.run().await);
    } else {
        skipped("a storm of duplicates that is wrong, on Redis", "redis-server");
    }
    if let Some(database) = Database::start("a storm of duplicates that is wrong", Route::Direct).await {
        outcomes.push(storm.run_on(&database).await);
    }
    outcomes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_records_in_a_storm_run_again() {
    for outcome in duplicates("--forgets-records", false).await {
        assert!(outcome.violations().contains_key("ran-twice"), "{:#?}", outcome.violations());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_records_in_a_storm_are_other_answers() {
    for outcome in duplicates("--changes-records", false).await {
        let violations: Vec<_> = outcome.violations().into_keys().collect();
        assert_eq!(violations, ["answers-differ"], "{:#?}", outcome.violations());
    }
}

/// Its processes do not look for the answers that they have committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn committed_answers_that_are_not_found_in_a_storm_run_again() {
    for outcome in duplicates("--ignores-commits", true).await {
        let violations: Vec<_> = outcome.violations().into_keys().collect();
        assert_eq!(violations, ["ran-twice"], "{:#?}", outcome.violations());
    }
}
