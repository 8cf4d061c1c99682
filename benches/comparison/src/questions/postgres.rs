//! Locks on PostgreSQL: distinct keys with 1, 16 and 512 tasks, one task with a network between it
//! and the server, and one key that instances hand to each other.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use tokio::runtime::Runtime;
use tokio_postgres::{Client, NoTls};
use tower_lock_testkit::{Direction, PostgresServer, Proxy, RedisServer};

use super::{
    Run,
    hot_key::{self, Contenders, HANDOFF, RATE as SECTIONS, SHARE, SWITCHES},
    redis_cycles::{self, Counted, Cycles, KEYS_PER_TASK, P50, RATE},
    runtime,
};
use crate::{
    chart::Chart,
    contender::Work,
    database_lock::DatabaseLock,
    measure::{cpu_of, cpu_of_family, nanos, quantile_us, sleep},
    report::{
        Table,
        Target::{self, AtLeast, AtMost},
    },
};

const OURS: &str = DatabaseLock::OURS;
const FOR_UPDATE: &str = DatabaseLock::FOR_UPDATE;
const ADVISORY: &str = DatabaseLock::ADVISORY;

const VARIANTS: [&str; 6] =
    [OURS, FOR_UPDATE, ADVISORY, DatabaseLock::VERSION, DatabaseLock::UNIQUE_ROW, DatabaseLock::OURS_ON_REDIS];
const DISTANT: [&str; 5] = [OURS, FOR_UPDATE, ADVISORY, DatabaseLock::VERSION, DatabaseLock::UNIQUE_ROW];
const CONTENDERS: [&str; 4] = [OURS, FOR_UPDATE, ADVISORY, DatabaseLock::OURS_ON_REDIS];

pub const SERVER_CPU: &str = "server CPU us";
/// The last two are counted apart.
const STATEMENTS: &str = "statements";
const SYNCS: &str = "fsyncs";
const COLUMNS: [(&str, usize); 7] =
    [(RATE, 0), (P50, 0), ("p99 us", 0), ("CPU us", 1), (SERVER_CPU, 1), (STATEMENTS, 1), (SYNCS, 2)];
const DISTANT_COLUMNS: [(&str, usize); 2] = [(RATE, 0), (P50, 0)];
const HOT_COLUMNS: [(&str, usize); 5] = [(SECTIONS, 0), (HANDOFF, 0), (SWITCHES, 2), (SERVER_CPU, 1), (SHARE, 2)];

const TASKS: [u64; 3] = [1, 16, 512];
/// Of each reply. A timer of Tokio is not finer.
const NETWORK_DELAY: Duration = Duration::from_millis(1);
/// Connections of a lock by hand. A task waits for one of them.
const CONNECTIONS: usize = 16;

/// In the order of the measurements.
const GOALS: [(&str, Target); 6] = [
    ("postgres_1_time_vs_for_update", AtMost(0.8)),
    ("postgres_16_vs_for_update", AtLeast(1.0)),
    ("postgres_512_vs_for_update", AtLeast(8.0)),
    ("postgres_distant_time_vs_for_update", AtMost(0.8)),
    ("postgres_handoff_2_vs_advisory", AtMost(6.0)),
    ("postgres_handoff_8_vs_advisory", AtMost(6.0)),
];

pub fn answer(run: &mut Run) {
    if !PostgresServer::is_available() {
        println!("\nskipped postgres: it needs postgres and initdb");
        GOALS.iter().for_each(|(name, target)| run.goals.skip(*name, *target));
        return;
    }
    let runtime = runtime();
    let servers = runtime.block_on(Servers::start(&[]));
    // Its counters would slow all statements.
    let counted = runtime.block_on(Servers::start(&[
        "shared_preload_libraries=pg_stat_statements",
        "pg_stat_statements.track_utility=on",
    ]));
    let mut chart = Chart::new("postgres", "Locks on PostgreSQL, per second: more is better");
    let connect = |name| servers.connect(name);
    let locks: Vec<_> = VARIANTS.iter().map(|name| Arc::new(runtime.block_on(connect(name)))).collect();
    let mut values = Vec::new();
    for tasks in TASKS {
        let mut table = Table::new(format!("PostgreSQL, {tasks} in flight"), OURS, &COLUMNS);
        for at in run.turns(&[0, 1, 2, 3, 4, 5]) {
            let cpu = || servers.cpu(VARIANTS[at]);
            runtime.block_on(measure(cpu, &locks[at], VARIANTS[at], tasks, run.scale, &mut table));
        }
        for name in VARIANTS.into_iter().filter(|name| *name != DatabaseLock::OURS_ON_REDIS) {
            runtime.block_on(counted.count(name, tasks, run.scale, &mut table));
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
    values.push(runtime.block_on(distant(run, &servers)).ratio(P50, OURS, FOR_UPDATE));
    for contenders in [2, 8] {
        let mut table = Table::new(format!("one key, {contenders} instances"), OURS, &HOT_COLUMNS);
        for name in run.turns(&CONTENDERS) {
            contend(&runtime, &servers, name, contenders, run.scale, &mut table);
        }
        table.print();
        chart.add(format!("one key, {contenders} instances: sections"), &table, SECTIONS, 0);
        values.push(table.ratio(HANDOFF, OURS, ADVISORY));
    }
    for ((name, target), value) in GOALS.into_iter().zip(values) {
        run.goals.check(name, value, target);
    }
    run.write(&chart);
}

/// A PostgreSQL with the tables of all locks, and a Redis.
struct Servers {
    postgres: PostgresServer,
    client: Client,
    redis: RedisServer,
}

pub async fn measure(
    cpu: impl Fn() -> u64,
    lock: &Arc<DatabaseLock>,
    name: &'static str,
    tasks: u64,
    scale: f64,
    table: &mut Table,
) {
    let counted = redis_cycles::count(lock, tasks, scale, async || cpu()).await;
    let Counted { seconds, mut latencies, own_cpu, before, after } = counted;
    let cycles = latencies.len() as f64;
    table.push(name, RATE, cycles / seconds);
    table.push(name, P50, quantile_us(&mut latencies, 0.5));
    table.push(name, "p99 us", quantile_us(&mut latencies, 0.99));
    table.push(name, "CPU us", own_cpu as f64 / 1e3 / cycles);
    table.push(name, SERVER_CPU, (after - before) as f64 / 1e3 / cycles);
}

/// One task, whose replies are under way for a millisecond.
async fn distant(run: &mut Run, servers: &Servers) -> Table {
    let proxy = Proxy::start_raw((Ipv4Addr::LOCALHOST, servers.postgres.port()).into()).await;
    let (from, to) = (servers.postgres.port().to_string(), proxy.address().port().to_string());
    let mut table = Table::new("PostgreSQL, 1 in flight, replies 1 ms later".to_owned(), OURS, &DISTANT_COLUMNS);
    let mut locks = Vec::new();
    for name in DISTANT {
        let url = servers.url(name).replace(&from, &to);
        locks.push(Arc::new(DatabaseLock::connect(name, &url, 1).await));
    }
    proxy.all().delay(Direction::Down, NETWORK_DELAY);
    for at in run.turns(&[0, 1, 2, 3, 4]) {
        let counted = redis_cycles::count(&locks[at], 1, run.scale, async || ()).await;
        let Counted { seconds, mut latencies, .. } = counted;
        table.push(DISTANT[at], RATE, latencies.len() as f64 / seconds);
        table.push(DISTANT[at], P50, quantile_us(&mut latencies, 0.5));
    }
    table.print();
    table
}

fn contend(runtime: &Runtime, servers: &Servers, name: &'static str, contenders: usize, scale: f64, table: &mut Table) {
    let contenders = Contenders { processes: 1, in_each: Work::of(contenders) };
    let lock = if name == DatabaseLock::OURS_ON_REDIS { OURS } else { name };
    let meanwhile = async {
        let (cpu, from) = (servers.cpu(name), nanos());
        sleep(2.0 * scale).await;
        (from, nanos(), servers.cpu(name) - cpu)
    };
    let ((from, until, cpu), sections) =
        hot_key::contend(runtime, &servers.url(name), (lock, ""), contenders, meanwhile);
    let sections = hot_key::within(sections, from, until);
    let measured = hot_key::Measured { from, until, sections, redis: Default::default() };
    measured.assert_exclusive(name);
    table.push(name, SECTIONS, measured.rate());
    measured.push_handoffs(table, name);
    table.push(name, SERVER_CPU, cpu as f64 / 1e3 / measured.sections.len() as f64);
    table.push(name, SHARE, measured.smallest_share(contenders));
}

// === impl Servers ===

impl Servers {
    /// A server with its default durability: a commit waits for the disk.
    async fn start(settings: &[&str]) -> Self {
        let settings: Vec<_> = ["max_connections=200", "fsync=on"].iter().chain(settings).copied().collect();
        let postgres = PostgresServer::start(&settings).await;
        let (client, connection) = tokio_postgres::connect(&postgres.url(), NoTls).await.expect("a connection");
        tokio::spawn(connection);
        let [orders, held_keys, rows] = DatabaseLock::tables(TASKS[TASKS.len() - 1]);
        let [options, counts] =
            ["ALTER TABLE orders SET (fillfactor = 70)", "CREATE EXTENSION IF NOT EXISTS pg_stat_statements"];
        for statement in [&orders, options, &held_keys, &rows, counts, "VACUUM ANALYZE", "CHECKPOINT"] {
            client.batch_execute(statement).await.expect("a reply");
        }
        Self { postgres, client, redis: RedisServer::start().await }
    }

    fn url(&self, name: &str) -> String {
        match name {
            DatabaseLock::OURS => format!("{}?migrate=true", self.postgres.url()),
            DatabaseLock::OURS_ON_REDIS => self.redis.url(),
            _ => self.postgres.url(),
        }
    }

    async fn connect(&self, name: &str) -> DatabaseLock {
        DatabaseLock::connect(name, &self.url(name), CONNECTIONS).await
    }

    /// The CPU time of the server of a lock, in nanoseconds.
    fn cpu(&self, name: &str) -> u64 {
        match name {
            DatabaseLock::OURS_ON_REDIS => cpu_of(self.redis.pid()),
            _ => cpu_of_family(self.postgres.pid()),
        }
    }

    /// Counts the statements that sessions receive, and the waits for the disk of all processes.
    async fn count(&self, name: &'static str, tasks: u64, scale: f64, table: &mut Table) {
        const OF_OTHERS: &str = "SELECT count(*) FROM pg_stat_activity \
                                 WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
        let lock = Arc::new(self.connect(name).await);
        let before = self.statements().await;
        let synced = self.syncs().await;
        let Counted { latencies, before: warm, after, .. } =
            redis_cycles::count(&lock, tasks, scale, async || self.statements().await).await;
        table.push(name, STATEMENTS, (after - warm) as f64 / latencies.len() as f64);
        let all = self.statements().await - before;
        drop(lock);
        // A session adds its waits to the counter when it ends.
        while self.value(OF_OTHERS).await > 0 {
            sleep(0.01).await;
        }
        let syncs = self.syncs().await - synced;
        let cycles = all as f64 / table.median(name, STATEMENTS);
        table.push(name, SYNCS, syncs as f64 / cycles);
    }

    async fn syncs(&self) -> i64 {
        self.value(self.postgres.disk_waits().expect("PostgreSQL 15 or later counts them")).await
    }

    async fn statements(&self) -> i64 {
        self.value("SELECT coalesce(sum(calls), 0)::int8 FROM pg_stat_statements WHERE query NOT LIKE '%pg_stat%'")
            .await
    }

    async fn value(&self, query: &str) -> i64 {
        self.client.query_one(query, &[]).await.expect("a row").get(0)
    }
}

impl Cycles for DatabaseLock {
    async fn cycle(&self, task: u64, number: u64) {
        let guard = self.lock(task * KEYS_PER_TASK + number % KEYS_PER_TASK).await;
        self.unlock(guard).await;
    }
}
