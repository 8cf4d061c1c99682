//! Locks on MariaDB: distinct keys with 1 and 64 tasks, and a key that two instances hand to each
//! other.

use std::sync::Arc;

use mysql_async::prelude::Queryable;
use tower_lock_testkit::{MariaDb, PostgresServer};

use super::{
    Run,
    hot_key::HANDOFF,
    postgres::{self, SERVER_CPU},
    redis_cycles::{P50, RATE},
    runtime,
};
use crate::{
    chart::Chart,
    database_lock::{self, DatabaseLock},
    measure::{cpu_of, cpu_of_family, nanos, quantile_us, sleep},
    report::{
        Table,
        Target::{self, AtLeast, AtMost},
    },
};

const OURS: &str = DatabaseLock::OURS;
const FOR_UPDATE: &str = DatabaseLock::FOR_UPDATE;
const ON_POSTGRES: &str = DatabaseLock::OURS_ON_POSTGRES;

const VARIANTS: [&str; 6] =
    [OURS, FOR_UPDATE, DatabaseLock::GET_LOCK, DatabaseLock::VERSION, DatabaseLock::UNIQUE_ROW, ON_POSTGRES];
/// Waiters of the others do not wait in the server.
const HANDED: [&str; 4] = [OURS, FOR_UPDATE, DatabaseLock::GET_LOCK, ON_POSTGRES];

const HANDOFF_P99: &str = "handoff p99 us";
const COLUMNS: [(&str, usize); 5] = [(RATE, 0), (P50, 0), ("p99 us", 0), ("CPU us", 1), (SERVER_CPU, 1)];
const HANDED_COLUMNS: [(&str, usize); 2] = [(HANDOFF, 0), (HANDOFF_P99, 0)];

const TASKS: u64 = 64;
/// Connections of a lock by hand. A task waits for one of them.
const CONNECTIONS: usize = 16;
/// Keys that are handed off at the same time.
const HANDED_KEYS: u64 = 8;
/// Those of a server by default, where the tests have others.
const SETTINGS: [&str; 7] = [
    "--innodb-flush-log-at-trx-commit=1",
    "--innodb-flush-method=fsync",
    "--loose-skip-debug-no-sync",
    "--innodb-buffer-pool-size=128M",
    "--loose-innodb-log-file-size=96M",
    "--loose-innodb-redo-log-capacity=96M",
    "--innodb-stats-persistent=ON",
];

/// In the order of the measurements.
const GOALS: [(&str, Target); 4] = [
    ("mysql_1_time_vs_for_update", AtMost(2.0)),
    ("mysql_64_vs_for_update", AtLeast(5.0)),
    ("mysql_handoff_p50_us", AtMost(60_000.0)),
    ("mysql_handoff_p99_us", AtMost(160_000.0)),
];

pub fn answer(run: &mut Run) {
    if !MariaDb::is_available() || !PostgresServer::is_available() {
        println!("\nskipped mysql: it needs mariadbd, postgres and initdb");
        GOALS.iter().for_each(|(name, target)| run.goals.skip(*name, *target));
        return;
    }
    let runtime = runtime();
    let servers = runtime.block_on(Servers::start());
    let connect = |name| runtime.block_on(DatabaseLock::connect(name, &servers.url(name), CONNECTIONS));
    let locks = VARIANTS.map(|name| Arc::new(connect(name)));
    let mut chart = Chart::new("mysql", "Locks on MariaDB, per second: more is better");
    let mut values = Vec::new();
    for tasks in [1, TASKS] {
        let mut table = Table::new(format!("MariaDB, {tasks} in flight"), OURS, &COLUMNS);
        for at in run.turns(&[0, 1, 2, 3, 4, 5]) {
            let name = VARIANTS[at];
            let measured = postgres::measure(|| servers.cpu(name), &locks[at], name, tasks, run.scale, &mut table);
            runtime.block_on(measured);
        }
        table.print();
        chart.add(format!("distinct keys, {tasks} in flight: cycles"), &table, RATE, 0);
        match tasks {
            // The time is one by the rate.
            1 => values.push(table.ratio(RATE, FOR_UPDATE, OURS)),
            _ => values.push(table.ratio(RATE, OURS, FOR_UPDATE)),
        }
    }
    drop(locks);
    let mut table = Table::new("one key, from one of 2 instances to the other", OURS, &HANDED_COLUMNS);
    let instances = HANDED.map(|name| [(); 2].map(|()| Arc::new(connect(name))));
    for at in run.turns(&[0, 1, 2, 3]) {
        let hand_off = |key| runtime.spawn(hand_off(instances[at].clone(), key, 4.0 * run.scale));
        let handed: Vec<_> = (0..HANDED_KEYS).map(hand_off).collect();
        let joined = handed.into_iter().flat_map(|handed| runtime.block_on(handed).expect("no panic"));
        let mut handoffs: Vec<_> = joined.collect();
        table.push(HANDED[at], HANDOFF, quantile_us(&mut handoffs, 0.5));
        table.push(HANDED[at], HANDOFF_P99, quantile_us(&mut handoffs, 0.99));
    }
    table.print();
    values.extend([HANDOFF, HANDOFF_P99].map(|column| table.median(OURS, column)));
    for ((name, target), value) in GOALS.into_iter().zip(values) {
        run.goals.check(name, value, target);
    }
    run.write(&chart);
}

/// A MariaDB with the tables of all locks, and a PostgreSQL.
struct Servers {
    mariadb: MariaDb,
    postgres: PostgresServer,
}

/// Two instances get a key in turns. Each releases it at a random time while the other one waits.
/// Returns the times from the start of a release to the next grant, in nanoseconds.
async fn hand_off(instances: [Arc<DatabaseLock>; 2], key: u64, seconds: f64) -> Vec<u64> {
    let mut handoffs = Vec::new();
    let mut held = instances[0].lock(key).await;
    let began = nanos();
    for turn in 1.. {
        let next = Arc::clone(&instances[turn % 2]);
        let waiter = tokio::spawn(async move { (next.lock(key).await, nanos()) });
        sleep(0.05 + 0.1 * fastrand::f64()).await;
        let released = nanos();
        instances[(turn - 1) % 2].unlock(held).await;
        let granted;
        (held, granted) = waiter.await.expect("no panic");
        if nanos() - began > (seconds * 1e9) as u64 {
            instances[turn % 2].unlock(held).await;
            break;
        }
        handoffs.push(granted - released);
    }
    handoffs
}

// === impl Servers ===

impl Servers {
    /// Servers with their default durability: a commit waits for the disk.
    async fn start() -> Self {
        let mariadb = MariaDb::installed(&["app"], &SETTINGS).await;
        let mut client = database_lock::mysql(&mariadb.url("app")).await;
        for statement in DatabaseLock::tables(TASKS) {
            client.query_drop(statement).await.expect("a reply");
        }
        Self { mariadb, postgres: PostgresServer::start(&["max_connections=200", "fsync=on"]).await }
    }

    fn url(&self, name: &str) -> String {
        match name {
            ON_POSTGRES => format!("{}?migrate=true", self.postgres.url()),
            OURS => format!("{}?migrate=true", self.mariadb.url("app")),
            _ => self.mariadb.url("app"),
        }
    }

    /// The CPU time of the server of a lock, in nanoseconds.
    fn cpu(&self, name: &str) -> u64 {
        match name {
            ON_POSTGRES => cpu_of_family(self.postgres.pid()),
            _ => cpu_of(self.mariadb.pid()),
        }
    }
}
