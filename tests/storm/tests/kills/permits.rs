//! Permits of one key, and readers and writers of another one: there are never more permits than
//! their limit, and a writer is alone.
//!
//! `SCALE=<number>` multiplies the permits and their contenders, and `SEED=<number>`
//! repeats the calls of a run.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_lock::{LockManager, MemoryStore};
use tower_lock_storm::{Database, Fault, Route, Visitors, Visits, run_with_faults, scale, seed};
use tower_lock_testkit::{
    RedisCluster, RedisServer, limits, skipped,
    wait::{soon, until},
};

/// Each has a queue of its own: it bounds the waiters for a key.
const PROCESSES: u64 = 8;

/// Managers that share a store in memory.
fn in_memory() -> Vec<LockManager> {
    let store = Arc::new(MemoryStore::new());
    (0..PROCESSES).map(|_| LockManager::builder(Arc::clone(&store)).build()).collect()
}

async fn shut_down(managers: &[LockManager]) {
    let left = join_all(managers.iter().map(|locks| locks.shutdown(limits::BROKEN))).await;
    assert!(left.iter().all(|left| *left == 0), "{left:?}");
}

/// A short storm has a tenth of the permits and of their contenders.
fn is_long() -> bool {
    scale() > 1
}

/// Ten contenders for each permit, in all processes.
fn visitors(processes: u64) -> Visitors {
    let capacity = if is_long() { 100 } else { 10 };
    let tasks = u64::from(capacity) * 10 / processes;
    let section = Duration::from_millis(if is_long() { 400 } else { 100 });
    Visitors { capacity, tasks, section, is_mixed: true }
}

fn sections() -> u64 {
    if is_long() { 8_000 } else { 400 }
}

fn check(visits: &Visits, visitors: Visitors, has_readers: bool) {
    let violations = visits.violations();
    assert!(violations.is_empty(), "{violations:#?}");
    let (permits, readers) = (visits.permits(), visits.readers());
    println!("{permits:?}, {readers:?}");
    assert!(2 * permits.most > usize::from(visitors.capacity), "most permits were in use");
    assert_eq!(readers.most > 1, has_readers, "readers were beside each other");
}

/// Guarantee: G22, G23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_permits_in_one_process() {
    let managers = in_memory();
    let visits = Visits::open(sections()).await;
    let visitors = visitors(PROCESSES);
    let mut rng = fastrand::Rng::with_seed(seed());
    let mut start =
        |visitors: Visitors| visitors.start(rng.choice(&managers).expect("some"), visits.address(), rng.u64(..));
    let mut tasks: Vec<_> = (0..PROCESSES).flat_map(|_| start(visitors)).collect();
    // A handler that is dropped leaves its place to the lock-delay.
    let drops = async {
        let mut next = 0;
        while !visits.progress().is_complete() {
            sleep(Duration::from_millis(50)).await;
            tasks[next].abort();
            tasks.extend(start(Visitors { tasks: 1, ..visitors }));
            next += 1;
        }
    };
    soon("the end of all sections", drops).await;
    soon("the end of all tasks", join_all(tasks)).await;
    check(&visits, visitors, true);
    shut_down(&managers).await;
}

/// Guarantee: G22, G23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_permits_with_kills() {
    if !RedisServer::is_available() {
        return skipped("the storm of permits with kills", "redis-server");
    }
    let redis = RedisServer::start().await;
    storm_with_kills(&redis.url()).await;
    let mut connection = redis.connect().await;
    let mut permits_left = async || {
        let keys = connection.command(&["KEYS", "*"]).await.expect("it is up");
        ["exports", "document"].iter().any(|key| format!("{keys:?}").contains(key))
    };
    until("no permit is left", async || !permits_left().await).await;
}

/// Guarantee: G22, G23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_permits_on_postgres_with_kills() {
    permits_on(Route::Direct).await;
}

async fn permits_on(route: Route) {
    let Some(database) = Database::start(&format!("the storm of permits on {route:?}"), route).await else { return };
    storm_with_kills(&database.url()).await;
    database.is_left_clean().await;
}

async fn storm_with_kills(url: &str) {
    let visits = Visits::open(sections()).await;
    let visitors = visitors(PROCESSES);
    let Visitors { capacity, tasks, section, .. } = visitors;
    let (capacity, tasks, section_ms) = (capacity.to_string(), tasks.to_string(), section.as_millis().to_string());
    let arguments = [visits.address().to_string(), capacity, tasks, section_ms];
    let progress = || visits.progress();
    let program = env!("CARGO_BIN_EXE_visitor");
    run_with_faults(Fault::Kill, program, url, &arguments, PROCESSES, seed(), progress).await;
    check(&visits, visitors, !url.starts_with("mysql:"));
}

/// The slots of both keys move from master to master.
/// Guarantee: G22, G23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_permits_on_a_cluster_whose_slots_move() {
    if !RedisServer::is_available() {
        return skipped("the storm of permits on a Cluster", "redis-server");
    }
    let cluster = RedisCluster::start(3, 0).await;
    let mut rng = fastrand::Rng::with_seed(!seed());
    let moves = async {
        loop {
            for key in ["lock:exports", "lock:document"] {
                sleep(Duration::from_millis(rng.u64(0..300))).await;
                cluster.move_key_by_key(RedisCluster::slot(key), &mut rng).await;
            }
        }
    };
    let url = cluster.url();
    tokio::select! {
        () = storm_with_kills(&url) => {}
        () = moves => {}
    }
}

/// Nothing ends but by its release: the permits are in use while there are waiters.
async fn permits_are_in_use(url: Option<&str>) {
    let capacity = if is_long() { 100 } else { 20 };
    let contenders = u64::from(capacity) * 8;
    let section = Duration::from_secs(if is_long() { 1 } else { 0 }) + Duration::from_millis(200);
    let visitors = Visitors { capacity, tasks: contenders / PROCESSES, section, is_mixed: false };
    let visits = Visits::open(contenders * 2).await;
    let connect = async |url| LockManager::connect(url).await.expect("it is up").build();
    let managers = match url {
        Some(url) => join_all((0..PROCESSES).map(|_| connect(url))).await,
        None => in_memory(),
    };
    let all = managers.iter().zip(1..).map(|(locks, seed)| visitors.run(locks, visits.address(), seed));
    for ended in soon("the end of all sections", join_all(all)).await {
        ended.expect("a ledger");
    }
    let (permits, violations) = (visits.permits(), visits.violations());
    println!("{permits:?} of {capacity}");
    assert!(violations.is_empty(), "{violations:#?}");
    assert!(permits.mean >= f64::from(capacity) * 0.95, "{permits:?}");
    shut_down(&managers).await;
}

/// With `--long`.
mod long {
    use super::*;

    /// Guarantee: G22.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn permits_are_in_use_while_there_are_waiters() {
        permits_are_in_use(None).await;
        if RedisServer::is_available() {
            permits_are_in_use(Some(&RedisServer::start().await.url())).await;
            permits_are_in_use(Some(&RedisCluster::start(3, 0).await.url())).await;
        }
        if let Some(database) = Database::start("permits on PostgreSQL", Route::Direct).await {
            permits_are_in_use(Some(&database.url())).await;
        }
    }

    /// Guarantee: G22, G23.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_permits_behind_pgbouncer_with_kills() {
        permits_on(Route::Pooled).await;
    }

    /// Its readers are refused: the store has no queue.
    /// Guarantee: G22.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn storm_of_permits_on_mysql_with_kills() {
        permits_on(Route::Mysql).await;
    }
}
