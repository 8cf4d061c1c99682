//! Seats that are kept by tickets over several sections: each is used by one section at a time, and
//! no ticket is redeemed twice.
//!
//! `SCALE=<number>` multiplies the sections, and `SEED=<number>` repeats the calls of a run.

use std::sync::Arc;

use futures_util::future::join_all;
use tower_lock::{LockManager, MemoryStore, store::ListRequest};
use tower_lock_storm::{Database, Fault, Route, Seats, run_with_faults, scale, seed, travel};
use tower_lock_testkit::{
    RedisCluster, RedisServer, limits, skipped,
    wait::{soon, until},
};

const PROCESSES: u64 = 3;
const SECTIONS: u64 = 300;

/// Each ticket has expired, and nothing else is left.
async fn seats_are_free(locks: &LockManager) {
    let is_free = async || {
        let mut request = ListRequest::new(100);
        while let Ok(page) = locks.list(request).await
            && page.entries.is_empty()
        {
            let Some(next) = page.next else { return true };
            request = ListRequest::new(100).after(next);
        }
        false
    };
    until("each seat is free", is_free).await;
}

/// Guarantee: G24.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_tickets_in_one_process() {
    let store = Arc::new(MemoryStore::new());
    let managers: Vec<_> = (0..PROCESSES).map(|_| LockManager::new(Arc::clone(&store))).collect();
    let seats = Seats::open(SECTIONS * scale()).await;
    let tasks = managers.iter().zip(seed()..).flat_map(|(locks, seed)| travel(locks, seats.address(), seed));
    for ended in soon("the end of all sections", join_all(tasks)).await {
        ended.expect("no panic").expect("a ledger");
    }
    seats.check();
    seats_are_free(&managers[0]).await;
    for locks in managers {
        assert_eq!(locks.shutdown(limits::BROKEN).await, 0);
    }
}

async fn storm_with_kills(url: &str) {
    let seats = Seats::open(SECTIONS * scale()).await;
    let arguments = [seats.address().to_string()];
    let program = env!("CARGO_BIN_EXE_traveller");
    run_with_faults(Fault::Kill, program, url, &arguments, PROCESSES, seed(), || seats.progress()).await;
    seats.check();
    seats_are_free(&LockManager::connect(url).await.expect("it is up").build()).await;
}

/// Guarantee: G24.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_tickets_with_kills() {
    if !RedisServer::is_available() {
        return skipped("the storm of tickets with kills", "redis-server");
    }
    let redis = RedisServer::start().await;
    storm_with_kills(&redis.url()).await;
}

async fn storm_on(route: Route) {
    let Some(database) = Database::start(&format!("the storm of tickets on {route:?}"), route).await else { return };
    storm_with_kills(&database.url()).await;
    database.is_left_clean().await;
}

/// Guarantee: G24.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_tickets_on_postgres_with_kills() {
    storm_on(Route::Direct).await;
}

/// With `--long`.
mod long {
    use super::*;

    /// Guarantee: G24.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_tickets_on_mysql_with_kills() {
        storm_on(Route::Mysql).await;
    }

    /// Guarantee: G24.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_tickets_on_a_cluster_with_kills() {
        if !RedisServer::is_available() {
            return skipped("the storm of tickets on a Cluster", "redis-server");
        }
        let cluster = RedisCluster::start(3, 0).await;
        storm_with_kills(&cluster.url()).await;
    }
}
