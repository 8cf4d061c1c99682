//! Acquire and release of distinct keys on the three masters of a Redis Cluster, beside one Redis.

use std::sync::Arc;

use super::{
    Run,
    redis_cycles::{COLUMNS, RATE, REDIS_CPU, Variant, compare},
    runtime,
};
use crate::{
    chart::Chart,
    measure::median,
    redis_lock::RedisLock,
    report::{Table, Target::AtLeast},
    servers::Servers,
};

const OURS: &str = RedisLock::OURS;
/// The same work without a Cluster.
const ONE: &str = "tower-lock, one Redis";

pub fn answer(run: &mut Run) {
    let runtime = runtime();
    let (cluster, one) = runtime.block_on(async { (Servers::cluster(3).await, Servers::one().await) });
    let variant = |name, lock, servers| {
        let lock = runtime.block_on(RedisLock::connect(lock, &Servers::url(servers)));
        Variant { name, lock: Arc::new(lock), servers }
    };
    let variants = [
        variant(OURS, OURS, &cluster),
        variant(ONE, OURS, &one),
        variant(RedisLock::RSLOCK, RedisLock::RSLOCK, &cluster),
    ];
    let title = "Acquire and release of distinct keys on a Cluster, cycles per second: more is better";
    let mut chart = Chart::new("cluster", title);
    for (in_flight, goal) in [(1, None), (64, Some(0.5)), (512, Some(1.0))] {
        let title = format!("Redis Cluster of three masters, {in_flight} in flight");
        let mut table = Table::new(title, OURS, &COLUMNS[..COLUMNS.len() - 1]);
        compare(run, &runtime, &variants, in_flight, &mut table);
        table.print();
        chart.add(format!("{in_flight} in flight"), &table, RATE, 0);
        let (rate, cpu) = (table.ratio(RATE, OURS, ONE), median(&table.ratios(REDIS_CPU, OURS, ONE)));
        println!("beside one Redis: {rate:.2} times the rate, {cpu:.2} times the CPU of Redis, {in_flight} in flight");
        if let Some(least) = goal {
            let rate = table.ratio(RATE, OURS, RedisLock::RSLOCK);
            run.goals.check(format!("cluster_{in_flight}_vs_rslock"), rate, AtLeast(least));
        }
    }
    run.write(&chart);
    run.print_skipped();
}
