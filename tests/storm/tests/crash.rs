//! One key, and processes that are killed or stopped while they hold it or wait for it.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::Value;
use tokio::{process::Command, time::Instant};
use tower_lock_storm::{Cluster, Database, Observed, Request, Route, Service};
use tower_lock_testkit::{
    RedisServer, skipped,
    wait::{soon, until},
};

/// The default.
const LEASE: Duration = Duration::from_secs(30);
/// For tests that wait for the end of a lease.
const SHORT: Duration = Duration::from_secs(5);
/// The lock-delay, which is the default.
const LOCK_DELAY: Duration = Duration::from_secs(1);
/// How long a waiter that does not run keeps an offer, and its lock-delay.
const OFFER: Duration = Duration::from_secs(4);

const NAME: &str = "lock:subject:1";
const LINE: &str = "tower-lock:lock:q:{lock:subject:1}";

struct Environment {
    server: Server,
    cluster: Cluster,
    lease: Duration,
}

enum Server {
    Redis(RedisServer),
    Postgres(Database),
}

// === impl Environment ===

impl Environment {
    async fn on_redis(test: &str, lease: Duration) -> Option<Self> {
        if !RedisServer::is_available() {
            skipped(test, "redis-server");
            return None;
        }
        Some(Self::of(Server::Redis(RedisServer::start().await), lease).await)
    }

    async fn on_postgres(test: &str, lease: Duration) -> Option<Self> {
        Some(Self::of(Server::Postgres(Database::start(test, Route::Direct).await?), lease).await)
    }

    async fn of(server: Server, lease: Duration) -> Self {
        let cluster = Cluster::start(env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service"), &[]).await;
        Self { server, cluster, lease }
    }

    async fn service(&self, name: &str) -> Service {
        self.service_with(name, &["--patient"]).await
    }

    async fn service_with(&self, name: &str, settings: &[&str]) -> Service {
        let lease = format!("--lease-ms={}", self.lease.as_millis());
        let url = match &self.server {
            Server::Redis(redis) => redis.url(),
            Server::Postgres(database) => database.url(),
        };
        self.cluster.service(&[&[name, "1", &lease], settings].concat(), Some(&url)).await
    }

    async fn request(&self, service: &Service, path: &str, name: &str) -> Observed {
        self.cluster.send(service.instances()[0], &Request::new(name, path)).await
    }

    /// The name of the instance that holds the key.
    async fn holder(&self) -> Option<String> {
        let id = match &self.server {
            Server::Redis(redis) => redis.command(&["HKEYS", NAME]).await.texts().first()?.to_string(),
            Server::Postgres(database) => {
                database.value("SELECT holder FROM tower_lock.locks WHERE until > clock_timestamp()").await?
            }
        };
        Some(id.split('.').next()?.to_owned())
    }

    async fn is_held_by(&self, name: &str) {
        until("it has the key", async || self.holder().await.as_deref() == Some(name)).await;
    }

    async fn waiting(&self, number: i64) {
        until("queued", async || match &self.server {
            Server::Redis(redis) => redis.command(&["LLEN", LINE]).await.integer() == Some(number),
            Server::Postgres(database) => {
                let waiters = database.value("SELECT count(*)::text FROM tower_lock.waiters").await;
                waiters == Some(number.to_string())
            }
        })
        .await;
    }

    async fn ms_left(&self) -> u64 {
        const LEFT: &str =
            "SELECT (extract(epoch FROM until - clock_timestamp()) * 1000)::bigint::text FROM tower_lock.locks";
        let left = match &self.server {
            Server::Redis(redis) => redis.command(&["PTTL", NAME]).await.integer(),
            Server::Postgres(database) => database.value(LEFT).await.and_then(|left| left.parse().ok()),
        };
        left.and_then(|left| left.try_into().ok()).expect("held, with a lease")
    }

    /// No overlap, and no late write.
    async fn finish(self) {
        let summary = self.cluster.finish().await;
        assert!(summary.violations.is_empty() && summary.refused == 0, "{summary:#?}");
    }
}

fn ran(observed: &Observed) -> bool {
    matches!(observed, Observed::Response { status: 200, .. })
}

/// Guarantee: G2, G4, G13.
#[tokio::test]
async fn killed_holder_frees_its_key_after_lease_and_lock_delay() {
    let Some(environment) = Environment::on_redis("a holder that is killed", SHORT).await else { return };
    holder_is_killed(environment).await;
}

/// Guarantee: G2.
#[tokio::test]
async fn killed_holder_frees_its_key_on_postgres() {
    let Some(environment) = Environment::on_postgres("a holder that is killed", SHORT).await else { return };
    holder_is_killed(environment).await;
}

async fn holder_is_killed(environment: Environment) {
    let (killed, next) = (environment.service("killed").await, environment.service("next").await);
    let waits = async {
        environment.is_held_by("killed").await;
        let answer = environment.request(&next, "/wait/1", "next");
        let killer = async {
            environment.waiting(1).await;
            killed.process().kill();
            (Instant::now(), Duration::from_millis(environment.ms_left().await))
        };
        let (observed, (at, left)) = tokio::join!(answer, killer);
        assert!(ran(&observed), "{observed:?}");
        // Not renewed.
        assert!(left <= environment.lease + LOCK_DELAY, "{left:?}");
        let took = at.elapsed();
        assert!(took + Duration::from_millis(100) >= left, "after {took:?}: there were {left:?} left");
    };
    let (observed, ()) = tokio::join!(environment.request(&killed, "/wait/1?work_ms=120000", "killed"), waits);
    assert_eq!(observed, Observed::Broken);
    drop((killed, next));
    environment.finish().await;
}

/// Guarantee: G1.
#[tokio::test]
async fn holder_stopped_past_its_deadline_does_not_continue() {
    let Some(environment) = Environment::on_redis("a holder that is stopped", SHORT).await else { return };
    holder_is_stopped(environment).await;
}

/// Guarantee: G1.
#[tokio::test]
async fn holder_stopped_on_postgres_does_not_continue() {
    let Some(environment) = Environment::on_postgres("a holder that is stopped", SHORT).await else { return };
    holder_is_stopped(environment).await;
}

/// It wakes long after its deadline: its handler does not go on, and the outcome is unknown to its
/// client.
async fn holder_is_stopped(environment: Environment) {
    let (stopped, next) = (environment.service("stopped").await, environment.service("next").await);
    let waits = async {
        // A process that is stopped before it has read the reply to its acquire starts no section.
        until("its handler runs", async || stopped.residue().await.inside == 1).await;
        stopped.process().freeze();
        let observed = environment.request(&next, "/wait/1", "next").await;
        assert!(ran(&observed), "{observed:?}");
        stopped.process().thaw();
    };
    // It would write on waking.
    let (observed, ()) = tokio::join!(environment.request(&stopped, "/wait/1?work_ms=20000", "stopped"), waits);
    assert!(
        matches!(&observed, Observed::Response { status: 503, outcome: Some(outcome), kind: Some(kind) }
            if (outcome.as_str(), kind.as_str()) == ("unknown", "lost")),
        "{observed:?}"
    );
    drop((stopped, next));
    environment.finish().await;
}

/// How long the last one waits after the first has ended, when this happens to those in between.
async fn with_heads_that(environment: &Environment, count: usize, happens: impl Fn(&Service)) -> Duration {
    // With the default timeout of a call, which the lease of an offer follows.
    let service = async |name| environment.service_with(name, &[]).await;
    let (first, last) = (service("first").await, service("last").await);
    let mut heads = Vec::new();
    for _ in 0..count {
        heads.push(service("head").await);
    }
    let ended = async {
        assert!(ran(&environment.request(&first, "/wait/1?work_ms=3000", "first").await));
        Instant::now()
    };
    let heads_ask = async {
        environment.is_held_by("first").await;
        let names: Vec<_> = (0..count).map(|n| format!("head-{n}")).collect();
        let asks = heads.iter().zip(&names).map(|(head, name)| environment.request(head, "/wait/1", name));
        join_all(asks).await
    };
    let last_asks = async {
        environment.waiting(count as i64).await;
        let answer = async {
            assert!(ran(&environment.request(&last, "/wait/1", "last").await));
            Instant::now()
        };
        let strikes = async {
            environment.waiting(count as i64 + 1).await;
            heads.iter().for_each(&happens);
        };
        let (at, ()) = tokio::join!(answer, strikes);
        // Their clients must get a response, too.
        heads.iter().for_each(|head| head.process().thaw());
        at
    };
    let (ended, _, served) = tokio::join!(ended, heads_ask, last_asks);
    served.saturating_duration_since(ended)
}

/// Guarantee: G5.
#[tokio::test]
async fn dead_head_of_the_queue_costs_nothing() {
    let Some(environment) = Environment::on_redis("a dead head of the queue", LEASE).await else { return };
    let waited = with_heads_that(&environment, 1, |head| head.process().kill()).await;
    assert!(waited < OFFER, "{waited:?}: it was offered to the dead process");
    environment.finish().await;
}

/// A Redis knows that no connection listens for a waiter. PostgreSQL offers it the key.
/// Guarantee: G5.
#[tokio::test]
async fn dead_head_of_a_queue_on_postgres_costs_an_offer() {
    let Some(environment) = Environment::on_postgres("a dead head of the queue", LEASE).await else { return };
    let waited = with_heads_that(&environment, 1, |head| head.process().kill()).await;
    assert!(waited < LEASE, "{waited:?}: the next waiter waited for a lease");
    environment.finish().await;
}

/// Guarantee: G5.
#[tokio::test]
async fn stopped_head_of_the_queue_costs_an_offer_and_lock_delay() {
    let Some(environment) = Environment::on_redis("a stopped head of the queue", LEASE).await else { return };
    head_is_stopped(environment).await;
}

/// Guarantee: G5.
#[tokio::test]
async fn stopped_head_of_a_queue_on_postgres_costs_an_offer() {
    let Some(environment) = Environment::on_postgres("a stopped head of the queue", LEASE).await else { return };
    head_is_stopped(environment).await;
}

async fn head_is_stopped(environment: Environment) {
    let waited = with_heads_that(&environment, 3, |head| head.process().freeze()).await;
    // The clocks of the server and of this process are read at different times.
    assert!(waited >= OFFER - Duration::from_millis(100), "{waited:?}: it was offered to a stopped process");
    assert!(waited < 2 * OFFER, "{waited:?}: each stopped process has cost the time of the first one");
    environment.finish().await;
}

/// Two managers in two processes: they share no keys, ids, connections or threads.
/// Guarantee: G1.
#[tokio::test]
async fn forked_child_locks_by_a_manager_of_its_own() {
    if !RedisServer::is_available() {
        skipped("a fork", "redis-server");
        return;
    }
    let redis = RedisServer::start().await;
    let forker = Command::new(env!("CARGO_BIN_EXE_forker")).env("REDIS_URL", redis.url()).kill_on_drop(true).output();
    let output = soon("its end", forker).await.expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let observed = String::from_utf8(output.stdout).expect("text");
    let mut observed: Vec<Value> = observed.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    observed.sort_by_key(|observed| observed["is_child"].as_bool());
    let [parent, child] = &*observed else { panic!("{observed:?}") };
    assert_eq!((&parent["freed"], &child["freed"], &child["refused"]), (&true.into(), &true.into(), &true.into()));
    assert!(parent["name"] != child["name"], "{observed:?}");
    let tokens = [&parent["tokens"][0], &child["tokens"][1]].map(|token| token.as_u64().expect("a token"));
    assert!(tokens[0] < tokens[1], "{observed:?}");
    assert_eq!(redis.command(&["EXISTS", "lock:account:7", "lock:account:8"]).await.integer(), Some(0));
}
