//! Keys that several hold: permits, and readers beside a writer, on Redis and in memory.

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::Runtime,
    sync::{RwLock, Semaphore},
    task::yield_now,
};
use tower_lock::LockManager;

use super::{
    Run,
    hot_key::{COMMANDS, Contenders, Contending, Measured, RATE, REDIS_CPU, SCRIPTS, SHARE, Section, measure},
    runtime,
};
use crate::{
    chart::Chart,
    contender::Work,
    measure::{nanos, quantile_us, sleep},
    redis_lock::RedisLock,
    report::{
        Table,
        Target::{AtLeast, AtMost},
    },
    servers::Servers,
    share_lock::{SHORT_LEASE, ShareLock},
};

const PERMITS: &str = ShareLock::PERMITS;
const FOUR_PERMITS: &str = ShareLock::FOUR_PERMITS;
const READERS: &str = ShareLock::READERS;
const REDISSON_PERMITS: &str = "Redisson, 100 permits";
const REDISSON_FOUR_PERMITS: &str = "Redisson, 4 permits";
const REDISSON_READERS: &str = "Redisson, readers and writers";

const P50: &str = "p50 us";
const WAIT: &str = "wait p99 ms";
const READER_WAIT: &str = "reader wait p99 ms";
const WRITER_WAIT: &str = "writer wait p99 ms";
const IN_USE: &str = "in use";
const SECTION: &str = "ns a section";

const FREE_KEYS: usize = 1000;
const READERS_AND_WRITERS: Contenders =
    Contenders { processes: 4, in_each: Work { clients: 1, section: Duration::from_millis(1), ..Work::of(16) } };
const CAPACITY: Contenders =
    Contenders { processes: 2, in_each: Work { clients: 1, section: Duration::from_millis(10), ..Work::of(100) } };
/// Tasks of the parts in one process.
const TASKS: usize = 32;

pub fn answer(run: &mut Run) {
    let runtime = runtime();
    let servers = runtime.block_on(Servers::one());
    let mut chart = Chart::new("shares", "Keys that several hold, sections per second: more is better");
    free_permits(run, &runtime, &servers, &mut chart);
    capacity(run, &runtime, &servers, &mut chart);
    readers_and_writers(run, &runtime, &servers, &mut chart);
    local_readers(run, &runtime, &servers);
    after_a_crash(run, &runtime, &servers);
    run.write(&chart);
    in_memory(run, &runtime);
    run.print_skipped();
}

/// Measures in turns. Redisson has three rounds at most, because its virtual machine takes seconds
/// to start.
fn compare(
    run: &Run,
    (runtime, servers): (&Runtime, &Servers),
    variants: &[&'static str],
    contenders: Contenders,
    table: &mut Table,
    push: fn(Measured, &mut Table, &'static str),
) {
    let classes = run.redisson.as_deref().unwrap_or_default();
    for name in run.turns(variants) {
        if name.starts_with("Redisson") && (run.redisson.is_none() || table.of(name, RATE).len() >= 3) {
            continue;
        }
        let measured = measure(runtime, servers, (name, classes), contenders, sleep(2.0 * run.scale));
        assert_shared(&measured, name);
        table.push(name, RATE, measured.rate());
        let (count, redis) = (measured.sections.len() as f64, measured.redis);
        table.push(name, SCRIPTS, redis.scripts / count);
        table.push(name, COMMANDS, redis.commands / count);
        table.push(name, REDIS_CPU, redis.cpu / 1e3 / count);
        push(measured, table, name);
    }
}

fn free_permits(run: &mut Run, runtime: &Runtime, servers: &Servers, chart: &mut Chart) {
    for tasks in [1, 64] {
        let in_each = Work { clients: 1, keys: FREE_KEYS, ..Work::of(tasks) };
        let columns = [(RATE, 0), (P50, 0), (SCRIPTS, 2), (COMMANDS, 1), (REDIS_CPU, 1)];
        let title = format!("a free permit of four, {tasks} in flight");
        let mut table = Table::new(&title, FOUR_PERMITS, &columns);
        let variants = [FOUR_PERMITS, REDISSON_FOUR_PERMITS];
        let contenders = Contenders { processes: 1, in_each };
        compare(run, (runtime, servers), &variants, contenders, &mut table, |measured, table, name| {
            let cycles = measured.sections.iter().map(|section| section.released - section.called);
            table.push(name, P50, quantile_us(&mut cycles.collect::<Vec<_>>(), 0.5));
        });
        table.print();
        chart.add(title, &table, RATE, 0);
        if tasks == 1 {
            // Two, and calls at the edges of the measurement.
            run.goals.check("shares_scripts", table.median(FOUR_PERMITS, SCRIPTS), AtMost(2.05));
        }
    }
}

fn capacity(run: &mut Run, runtime: &Runtime, servers: &Servers, chart: &mut Chart) {
    let columns = [(RATE, 0), (IN_USE, 1), (WAIT, 0), (SHARE, 2), (SCRIPTS, 2), (COMMANDS, 1), (REDIS_CPU, 1)];
    let title = "100 permits, 200 contenders in two processes, sections of 10 ms";
    let mut table = Table::new(title, PERMITS, &columns);
    compare(run, (runtime, servers), &[PERMITS, REDISSON_PERMITS], CAPACITY, &mut table, |measured, table, name| {
        table.push(
            name,
            IN_USE,
            measured.sections.iter().map(|section| (section.end - section.start) as f64).sum::<f64>()
                / (measured.until - measured.from) as f64,
        );
        table.push(name, WAIT, waits(&measured, |_| true));
        table.push(name, SHARE, measured.smallest_share(CAPACITY));
    });
    table.print();
    chart.add(title, &table, RATE, 0);
}

fn readers_and_writers(run: &mut Run, runtime: &Runtime, servers: &Servers, chart: &mut Chart) {
    let columns = [(RATE, 0), (READER_WAIT, 0), (WRITER_WAIT, 0), (SCRIPTS, 2), (COMMANDS, 1), (REDIS_CPU, 1)];
    let title = "5 % writers among readers, 64 contenders in four processes, sections of 1 ms";
    let mut table = Table::new(title, READERS, &columns);
    let variants = [READERS, ShareLock::RLOCK, REDISSON_READERS];
    compare(run, (runtime, servers), &variants, READERS_AND_WRITERS, &mut table, |measured, table, name| {
        table.push(name, READER_WAIT, waits(&measured, |section| section.token == 0));
        table.push(name, WRITER_WAIT, waits(&measured, |section| section.token == 1));
    });
    table.print();
    chart.add(title, &table, RATE, 0);
    let ratio = table.median(READERS, WRITER_WAIT) / table.median(READERS, READER_WAIT);
    run.goals.check("shares_writer_vs_reader_wait", ratio, AtMost(2.0));
}

/// Milliseconds.
fn waits(measured: &Measured, which: impl Fn(&&Section) -> bool) -> f64 {
    let waits = measured.sections.iter().filter(which).map(|section| section.start - section.called);
    quantile_us(&mut waits.collect::<Vec<_>>(), 0.99) / 1e3
}

/// Readers of one process beside exclusive handoffs in one process.
fn local_readers(run: &mut Run, runtime: &Runtime, servers: &Servers) {
    const ALONE: &str = RedisLock::OURS;
    let readers = ShareLock::ONLY_READERS;
    let columns = [(RATE, 0), (SCRIPTS, 3), (COMMANDS, 2), (REDIS_CPU, 1)];
    let mut table = Table::new("one process, 32 tasks, empty sections", readers, &columns);
    let contenders = Contenders { processes: 1, in_each: Work { clients: 1, ..Work::of(TASKS) } };
    compare(run, (runtime, servers), &[readers, ALONE], contenders, &mut table, |_, _, _| {});
    table.print();
    run.goals.check("shares_local_readers_vs_handoffs", table.ratio(RATE, readers, ALONE), AtLeast(0.5));
}

/// Four holders of four permits crash. The fifth waits for the end of a lease. A permit of Redisson
/// is not renewed: it ends after its lease while its holder works, and the fifth runs beside it.
fn after_a_crash(run: &Run, runtime: &Runtime, servers: &Servers) {
    let lease = SHORT_LEASE.as_secs();
    println!("\nsections of minutes, 4 permits, lease {lease} s: when the fifth starts");
    let classes = run.redisson.as_deref().unwrap_or_default();
    for name in [FOUR_PERMITS, REDISSON_FOUR_PERMITS] {
        if name.starts_with("Redisson") && run.redisson.is_none() {
            continue;
        }
        let forever = Work { clients: 1, section: Duration::from_secs(10_000), ..Work::of(4) };
        let crashed = Contending::start(name, classes, &servers.url(), forever).ready();
        let next = Contending::start(name, classes, &servers.url(), Work { clients: 1, ..Work::of(1) }).ready();
        runtime.block_on(sleep(1.5 * SHORT_LEASE.as_secs_f64()));
        let at = nanos();
        drop(crashed);
        runtime.block_on(sleep(2.0 * SHORT_LEASE.as_secs_f64()));
        match next.stopped().map(|section| section.start).min().expect("a section") {
            start if start > at => println!("{name}  {:.1} s after the crash of the four", (start - at) as f64 / 1e9),
            _ => println!("{name}  while the four work"),
        }
        runtime.block_on(servers.flush());
    }
}

/// # Panics
///
/// Panics if there are more sections of a key at a time than permits, or one beside a writer.
fn assert_shared(measured: &Measured, name: &str) {
    let limit = match name {
        FOUR_PERMITS | REDISSON_FOUR_PERMITS => 4,
        PERMITS | REDISSON_PERMITS => 100,
        RedisLock::OURS => return measured.assert_exclusive(name),
        _ => usize::MAX,
    };
    let mut open = std::collections::HashMap::<usize, Vec<&Section>>::new();
    for section in &measured.sections {
        let open = open.entry(section.keys[0]).or_default();
        open.retain(|other| other.end > section.start);
        open.push(section);
        assert!(open.len() <= limit, "{name}: {} permits", open.len());
        let has_writer = limit == usize::MAX && open.iter().any(|section| section.token == 1);
        assert!(!has_writer || open.len() == 1, "{name}: a writer beside {} others", open.len() - 1);
    }
}

// === in memory ===

const OURS: &str = "tower-lock";
const TOKIO: &str = "tokio";

fn in_memory(run: &Run, runtime: &Runtime) {
    let columns = [(SECTION, 0)];
    let mut permits = Table::new("memory, 8 permits, 32 tasks", OURS, &columns);
    let mut readers = Table::new("memory, 5 % writers among readers, 32 tasks", OURS, &columns);
    let sections = (3000.0 * run.scale) as u64;
    for name in run.turns(&[OURS, TOKIO]) {
        let (locks, semaphore, document) = (LockManager::in_memory(), Semaphore::new(8), RwLock::new(()));
        let shared = Arc::new((locks, semaphore, document));
        let permit = {
            let shared = Arc::clone(&shared);
            move |_| {
                let shared = Arc::clone(&shared);
                async move {
                    if name == OURS {
                        let guard = shared.0.permit(("export", 1), 8).await.expect("a grant");
                        yield_now().await;
                        drop(guard.release());
                    } else {
                        let _permit = shared.1.acquire().await.expect("open");
                        yield_now().await;
                    }
                }
            }
        };
        permits.push(name, SECTION, per_section(runtime, sections, permit));
        let read_or_write = move |number: u64| {
            let shared = Arc::clone(&shared);
            let is_writer = number % 20 == 0;
            async move {
                match (name == OURS, is_writer) {
                    (true, true) => {
                        let guard = shared.0.lock(("document", 1)).await.expect("a grant");
                        yield_now().await;
                        drop(guard.release());
                    }
                    (true, false) => {
                        let guard = shared.0.read(("document", 1)).await.expect("a grant");
                        yield_now().await;
                        drop(guard.release());
                    }
                    (false, true) => {
                        let _writer = shared.2.write().await;
                        yield_now().await;
                    }
                    (false, false) => {
                        let _reader = shared.2.read().await;
                        yield_now().await;
                    }
                }
            }
        };
        readers.push(name, SECTION, per_section(runtime, sections, read_or_write));
    }
    permits.print();
    readers.print();
}

/// Nanoseconds of a section, with so many in each of the tasks. A section yields once, so that all
/// others are queued when it ends.
fn per_section<F>(runtime: &Runtime, sections: u64, section: impl Fn(u64) -> F + Clone + Send + Sync + 'static) -> f64
where
    F: Future<Output = ()> + Send,
{
    let began = nanos();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..TASKS as u64)
            .map(|task| {
                let section = section.clone();
                tokio::spawn(async move {
                    for number in 0..sections {
                        section(task + number).await;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
    });
    (nanos() - began) as f64 / (sections * TASKS as u64) as f64
}
