//! An Axum handler behind a lock, `POST` with a JSON body: 64 connections in a closed loop, and
//! 1,000 requests per second.

use std::io::{BufRead, BufReader, Read};

use tokio::runtime::Runtime;
use tower_lock_testkit::{Process, RedisServer};

use super::{Run, runtime, spawn_role};
use crate::{
    chart::Chart,
    measure::{RedisWork, cpu_of},
    report::{
        NO_LOCK, Table,
        Target::{AtLeast, AtMost},
    },
    web,
};

/// The name of a variant, and its path.
type Variant = (&'static str, &'static str);

const NONE: Variant = (NO_LOCK, web::NONE);
const MEMORY: Variant = ("tower-lock, layer", web::LAYER_MEMORY);
const MUTEX_MAP: Variant = ("dashmap of mutexes, by hand", web::MUTEX_MAP);
const REDIS: Variant = ("tower-lock, layer", web::LAYER_REDIS);
const SET_NX: Variant = ("SET NX by hand, multiplexed", web::SET_NX);
const SET_NX_POOLED: Variant = ("SET NX by hand, deadpool", web::SET_NX_POOLED);

const RATE: &str = "requests/s";
const P50: &str = "p50 us";
const P99: &str = "p99 us";
const ADDED_P50: &str = "added p50 us";
const ADDED_P99: &str = "added p99 us";
const CPU: &str = "CPU us";
const REDIS_CPU: &str = "Redis CPU us";

/// A server and its Redis.
struct Site {
    runtime: Runtime,
    redis: RedisServer,
    web: Process,
    port: String,
}

pub fn answer(run: &mut Run) {
    let site = Site::start();
    let columns = [(RATE, 0), (P50, 0), (P99, 0), (CPU, 1), (REDIS_CPU, 1)];
    let mut on_redis = Table::new("HTTP on Redis, 64 connections", REDIS.0, &columns);
    let mut in_memory = Table::new("HTTP in memory, 64 connections", MEMORY.0, &columns);
    for variant in run.turns(&[NONE, REDIS, SET_NX, SET_NX_POOLED]) {
        site.measure("closed", variant, 2.0 * run.scale, &mut on_redis);
    }
    for variant in run.turns(&[NONE, MEMORY, MUTEX_MAP]) {
        site.measure("closed", variant, 2.0 * run.scale, &mut in_memory);
    }
    let columns = [(ADDED_P50, 0), (ADDED_P99, 0), (P50, 0), (P99, 0), (RATE, 0), (CPU, 1), (REDIS_CPU, 1)];
    let mut open = Table::new("HTTP on Redis, 1 000 requests/s", REDIS.0, &columns);
    for variant in run.turns(&[NONE, REDIS, SET_NX, SET_NX_POOLED]) {
        site.measure("open", variant, 3.0 * run.scale, &mut open);
    }
    for (name, _) in [REDIS, SET_NX, SET_NX_POOLED] {
        for (column, added) in [(P50, ADDED_P50), (P99, ADDED_P99)] {
            for value in open.differences(column, name, NONE.0) {
                open.push(name, added, value);
            }
        }
    }
    for table in [&on_redis, &in_memory, &open] {
        table.print();
    }
    let mut chart = Chart::new("http", "An Axum handler behind a lock, a key from a JSON body");
    chart.add("on Redis, 64 connections, requests per second: more is better", &on_redis, RATE, 0);
    chart.add("in memory, 64 connections, requests per second: more is better", &in_memory, RATE, 0);
    chart.add("on Redis, 1 000 requests per second, added median, microseconds: less is better", &open, ADDED_P50, 0);
    chart.add(
        "on Redis, 1 000 requests per second, added 99th percentile, microseconds: less is better",
        &open,
        ADDED_P99,
        0,
    );
    run.write(&chart);

    let goals = &mut run.goals;
    goals.check("http_closed_64_redis_vs_set_nx", on_redis.ratio(RATE, REDIS.0, SET_NX.0), AtLeast(0.9));
    goals.check("http_closed_64_memory_vs_dashmap", in_memory.ratio(RATE, MEMORY.0, MUTEX_MAP.0), AtLeast(0.85));
    goals.check("http_open_1000_redis_p50", open.ratio(ADDED_P50, REDIS.0, SET_NX.0), AtMost(1.2));
    goals.check("http_open_1000_redis_p99", open.ratio(ADDED_P99, REDIS.0, SET_NX.0), AtMost(1.4));
}

// === impl Site ===

impl Site {
    fn start() -> Self {
        let runtime = runtime();
        let redis = runtime.block_on(RedisServer::start());
        let web = spawn_role("web", &[&redis.url()]);
        let mut port = String::new();
        BufReader::new(web.take_stdout().expect("a pipe")).read_line(&mut port).expect("a port");
        Self { runtime, redis, web, port: port.trim().to_owned() }
    }

    fn measure(&self, mode: &str, (name, path): Variant, seconds: f64, table: &mut Table) {
        let redis_work = || self.runtime.block_on(RedisWork::of(&self.redis));
        self.load(mode, path, seconds * 0.1);
        let (cpu, redis) = (cpu_of(self.web.pid()), redis_work());
        let [requests, seconds, p50, p99] = self.load(mode, path, seconds);
        let (cpu, redis) = (cpu_of(self.web.pid()) - cpu, redis_work() - redis);
        table.push(name, RATE, requests / seconds);
        table.push(name, P50, p50);
        table.push(name, P99, p99);
        table.push(name, CPU, cpu as f64 / 1e3 / requests);
        table.push(name, REDIS_CPU, redis.cpu / 1e3 / requests);
    }

    fn load(&self, mode: &str, path: &str, seconds: f64) -> [f64; 4] {
        let load = spawn_role("load", &[mode, &self.port, path, &seconds.to_string()]);
        let mut output = String::new();
        load.take_stdout().expect("a pipe").read_to_string(&mut output).expect("text");
        let numbers: Vec<f64> = output.split_whitespace().map(|number| number.parse().expect("a number")).collect();
        numbers.try_into().expect("four numbers")
    }
}
