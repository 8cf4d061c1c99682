//! Bursts of ten requests for a key at four instances, each of which replaces the older ones: no
//! overlap, one that completes, and 409 for the others.
//!
//! `SCALE=<number>` multiplies the bursts: 34 are a thousand. `SEED=<number>` repeats the instances
//! of a run.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use tower_lock_storm::{Database, Environment, Route, seed, turn};
use tower_lock_testkit::{RedisServer, skipped};

const PROGRAMS: (&str, &str) = (env!("CARGO_BIN_EXE_checker"), env!("CARGO_BIN_EXE_service"));

const BURSTS: u64 = 30;

/// Guarantee: G25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bursts_in_memory_end_with_the_newest() {
    let _turn = turn().await;
    let environment = Environment::new(PROGRAMS, None, 4, &["--correct", "--newest"], seed()).await;
    environment.end_bursts_with_the_newest(BURSTS).await;
}

/// Guarantee: G25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bursts_on_redis_end_with_the_newest() {
    if !RedisServer::is_available() {
        return skipped("the bursts", "redis-server");
    }
    let _turn = turn().await;
    let redis = RedisServer::start().await;
    let environment = Environment::new(PROGRAMS, Some(redis), 4, &["--correct", "--newest", "--patient"], seed()).await;
    environment.end_bursts_with_the_newest(BURSTS).await;
}

/// Guarantee: G25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bursts_on_postgres_end_with_the_newest() {
    let _turn = turn().await;
    let Some(database) = Database::start("the bursts on PostgreSQL", Route::Direct).await else { return };
    let environment = Environment::on(database, PROGRAMS, 4, &["--correct", "--newest", "--patient"], seed()).await;
    environment.end_bursts_with_the_newest(BURSTS).await;
}
