//! Several keys together on Redis, with an empty section: 1, 2, 4 and 16 free keys in one task, and
//! 64 contenders that each lock two of five keys.

use tokio::runtime::Runtime;

use super::{
    Run,
    hot_key::{COMMANDS, Contenders, Measured, RATE, REDIS_CPU, REDISSON, SCRIPTS, SHARE, measure},
    runtime,
};
use crate::{
    chart::Chart,
    contender::Work,
    measure::{quantile_us, sleep},
    report::{
        Table,
        Target::{AtLeast, AtMost},
    },
    servers::Servers,
    several_lock::SeveralLock,
};

const OURS: &str = SeveralLock::OURS;
/// Its keys are fields of one hash, in place of locks of their own.
const REDISSON_GROUP: &str = "Redisson, one group";
const VARIANTS: [&str; 6] =
    [OURS, SeveralLock::SET_NX, SeveralLock::RLOCK, SeveralLock::REDIS_LOCK, REDISSON, REDISSON_GROUP];

const CYCLES: &str = "cycles/s";
const P50: &str = "p50 us";
const FREE_COLUMNS: [(&str, usize); 5] = [(CYCLES, 0), (P50, 0), (SCRIPTS, 2), (COMMANDS, 1), (REDIS_CPU, 1)];
const WAIT: &str = "wait p99 ms";
const LONGEST: &str = "longest wait ms";
const CONTENDED_COLUMNS: [(&str, usize); 7] =
    [(RATE, 0), (WAIT, 0), (LONGEST, 0), (SHARE, 2), (SCRIPTS, 2), (COMMANDS, 1), (REDIS_CPU, 1)];

/// The keys of a task whose keys are all free.
const FREE_KEYS: usize = 1000;
const CONTENDED: Contenders = Contenders { processes: 1, in_each: Work { keys: 5, together: 2, ..Work::of(64) } };

pub fn answer(run: &mut Run) {
    let runtime = runtime();
    let servers = runtime.block_on(Servers::one());
    let mut chart = Chart::new("several_keys", "Several keys together on Redis, per second: more is better");

    let scripts = AtMost(2.05); // Two, and calls at the edges of the measurement.
    let least = AtLeast(3.0);
    for together in [1, 2, 4, 16] {
        let contenders = Contenders { processes: 1, in_each: Work { keys: FREE_KEYS, together, ..Work::of(1) } };
        let title = if together == 1 { "1 free key".to_owned() } else { format!("{together} free keys") };
        let mut table = Table::new(&title, OURS, &FREE_COLUMNS);
        compare(run, &runtime, &servers, contenders, 1.0, &mut table, push_free);
        table.print();
        chart.add(title, &table, CYCLES, 0);
        match together {
            4 if run.redisson.is_some() => {
                run.goals.check("several_keys_4_vs_redisson", table.ratio(CYCLES, OURS, REDISSON), least);
            }
            4 => run.goals.skip("several_keys_4_vs_redisson", least),
            16 => run.goals.check("several_keys_scripts", table.median(OURS, SCRIPTS), scripts),
            _ => {}
        }
    }

    let mut table = Table::new("64 contenders, each section two of 5 keys", OURS, &CONTENDED_COLUMNS);
    compare(run, &runtime, &servers, CONTENDED, 3.0, &mut table, push_contended);
    table.print();
    chart.add("64 contenders for two of 5 keys, sections (without a queue, a few of them get all)", &table, RATE, 0);
    chart.add("the same, smallest share (1: all get as many sections)", &table, SHARE, 2);
    run.write(&chart);
    run.goals.check("several_keys_smallest_share", table.median(OURS, SHARE), AtLeast(0.5));
    if run.redisson.is_none() {
        println!("\nskipped Redisson: it needs a JDK and Maven, see scripts/bench.sh");
    }
}

/// Measures all variants in turns. Redisson has three rounds at most, because its virtual machine
/// takes seconds to start.
fn compare(
    run: &Run,
    runtime: &Runtime,
    servers: &Servers,
    contenders: Contenders,
    seconds: f64,
    table: &mut Table,
    push: fn(Measured, &mut Table, &'static str),
) {
    let classes = run.redisson.as_deref().unwrap_or_default();
    for name in run.turns(&VARIANTS) {
        if name.starts_with(REDISSON) && (run.redisson.is_none() || table.of(name, SCRIPTS).len() >= 3) {
            continue;
        }
        let measured = measure(runtime, servers, (name, classes), contenders, sleep(seconds * run.scale));
        measured.assert_exclusive(name);
        push(measured, table, name);
    }
}

fn push_free(measured: Measured, table: &mut Table, name: &'static str) {
    let mut cycles: Vec<_> = measured.sections.iter().map(|section| section.released - section.called).collect();
    table.push(name, CYCLES, measured.rate());
    table.push(name, P50, quantile_us(&mut cycles, 0.5));
    push_redis(&measured, table, name);
}

fn push_contended(measured: Measured, table: &mut Table, name: &'static str) {
    let mut waits: Vec<_> = measured.sections.iter().map(|section| section.start - section.called).collect();
    table.push(name, RATE, measured.rate());
    table.push(name, WAIT, quantile_us(&mut waits, 0.99) / 1e3);
    table.push(name, LONGEST, measured.longest_wait(CONTENDED) as f64 / 1e6);
    table.push(name, SHARE, measured.smallest_share(CONTENDED));
    push_redis(&measured, table, name);
}

/// What a section costs Redis.
fn push_redis(Measured { sections, redis, .. }: &Measured, table: &mut Table, name: &'static str) {
    let count = sections.len() as f64;
    table.push(name, SCRIPTS, redis.scripts / count);
    table.push(name, COMMANDS, redis.commands / count);
    table.push(name, REDIS_CPU, redis.cpu / 1e3 / count);
}
