//! Locks on a majority of three independent servers: distinct keys with 1 and 64 tasks, and one key
//! that eight tasks contend for, also while the servers lose their data.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Run,
    hot_key::{self, Contenders, Measured, RATE as SECTIONS, REDIS_CPU as SECTION_CPU, REDISSON, SHARE},
    redis_cycles::{COLUMNS, RATE, Variant, compare},
    runtime,
};
use crate::{
    chart::Chart,
    contender::Work,
    measure::{quantile_us, sleep},
    redis_lock::RedisLock,
    report::{
        Table,
        Target::{AtLeast, AtMost},
    },
    servers::Servers,
};

const OURS: &str = RedisLock::OURS;
const RSLOCK: &str = RedisLock::RSLOCK;
const WAIT: &str = "wait p99 ms";
const LONGEST: &str = "longest wait ms";
const OVERLAPS: &str = "overlaps";
const STALE: &str = "stale writes";
const CONTENDED_COLUMNS: [(&str, usize); 7] =
    [(SECTIONS, 0), (WAIT, 0), (LONGEST, 0), (SHARE, 2), (OVERLAPS, 0), (STALE, 0), (SECTION_CPU, 1)];

pub fn answer(run: &mut Run) {
    let runtime = runtime();
    let servers = runtime.block_on(Servers::independent(3));
    let mut chart = Chart::new("redlock", "Locks on a majority of three servers, per second: more is better");

    let variants = [OURS, RSLOCK].map(|name| {
        let lock = Arc::new(runtime.block_on(RedisLock::connect(name, &servers.url())));
        Variant { name, lock, servers: &servers }
    });
    for in_flight in [1, 64] {
        let title = format!("three servers, {in_flight} in flight");
        let mut table = Table::new(title, OURS, &COLUMNS[..COLUMNS.len() - 1]);
        compare(run, &runtime, &variants, in_flight, &mut table);
        table.print();
        chart.add(format!("{in_flight} in flight, distinct keys"), &table, RATE, 0);
        let rate = table.ratio(RATE, OURS, RSLOCK);
        run.goals.check(format!("redlock_{in_flight}_vs_rslock"), rate, AtLeast(0.5));
    }

    let instances = Work { section: Duration::from_millis(1), ..Work::of(8) };
    let one_instance = Work { clients: 1, ..instances };
    // Long enough for the loss of a majority.
    let overtaken = Work { section: Duration::from_millis(10), ..instances };
    let mut stale_writes = Vec::new();
    for (title, work, losses) in [
        ("one key, 8 tasks of one instance", one_instance, false),
        ("one key, 8 instances", instances, false),
        ("one key, 8 instances, and all servers lose their data", overtaken, true),
    ] {
        let contenders = Contenders { processes: 1, in_each: work };
        let mut table = Table::new(title, OURS, &CONTENDED_COLUMNS);
        for name in run.turns(&[OURS, RSLOCK, REDISSON]) {
            if name == REDISSON && (run.redisson.is_none() || table.of(name, SECTIONS).len() >= 3) {
                continue;
            }
            let lock = (name, run.redisson.as_deref().unwrap_or_default());
            let meanwhile = async {
                if losses {
                    lose_data(&servers, 3.0 * run.scale).await;
                } else {
                    sleep(3.0 * run.scale).await;
                }
            };
            let measured = hot_key::measure(&runtime, &servers, lock, contenders, meanwhile);
            if !losses {
                measured.assert_exclusive(name);
            }
            push(&measured, &mut table, name, contenders);
        }
        table.print();
        chart.add(format!("{title}, sections"), &table, SECTIONS, 0);
        stale_writes.extend_from_slice(table.of(OURS, STALE));
    }
    run.goals.check("redlock_stale_writes", stale_writes.iter().sum(), AtMost(0.0));
    run.write(&chart);
    run.print_skipped();
}

/// As restarts without persistence would do it, of one server after the other. A section loses its
/// key on a majority, which is more than any of these locks promises to survive.
async fn lose_data(servers: &Servers, seconds: f64) {
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    for server in servers.all().into_iter().cycle() {
        if Instant::now() >= until {
            break;
        }
        sleep(0.004).await;
        server.command(&["FLUSHALL"]).await;
    }
}

fn push(measured: &Measured, table: &mut Table, name: &'static str, contenders: Contenders) {
    let mut waits: Vec<_> = measured.sections.iter().map(|section| section.start - section.called).collect();
    table.push(name, SECTIONS, measured.rate());
    table.push(name, WAIT, quantile_us(&mut waits, 0.99) / 1e3);
    table.push(name, LONGEST, measured.longest_wait(contenders) as f64 / 1e6);
    table.push(name, SHARE, measured.smallest_share(contenders));
    table.push(name, OVERLAPS, measured.overlaps() as f64);
    table.push(name, STALE, measured.stale_writes() as f64);
    table.push(name, SECTION_CPU, measured.redis.cpu / 1e3 / measured.sections.len() as f64);
}
