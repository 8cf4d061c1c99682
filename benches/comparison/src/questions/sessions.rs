//! Locks in ZooKeeper, one server and three: distinct keys with 1 and 64 tasks, and keys that one
//! instance hands to another one.

use std::{
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use tower_lock::{LockManager, store::ZooKeeperStore};
use tower_lock_testkit::ZooKeeper;

use super::{
    Run,
    hot_key::HANDOFF,
    redis_cycles::{P50, RATE},
    runtime,
};
use crate::{
    chart::Chart,
    measure::{nanos, quantile_us, sleep},
    report::{
        Table,
        Target::{self, AtMost},
    },
};

const OURS: &str = "tower-lock";
const CURATOR: &str = "Curator";
const HANDOFF_P90: &str = "handoff p90 us";
const COLUMNS: [(&str, usize); 3] = [(RATE, 0), (P50, 0), ("p99 us", 0)];
const HANDED_COLUMNS: [(&str, usize); 2] = [(HANDOFF, 0), (HANDOFF_P90, 0)];

/// In the order of the measurements.
const GOALS: [(&str, Target); 4] = [
    ("zookeeper_1_time_vs_curator", AtMost(1.0)),
    ("zookeeper_1_handoff_vs_curator", AtMost(1.0)),
    ("zookeeper_3_time_vs_curator", AtMost(1.0)),
    ("zookeeper_3_handoff_vs_curator", AtMost(1.0)),
];

pub fn answer(run: &mut Run) {
    let Some(curator) = run.curator.clone().filter(|_| ZooKeeper::is_available()) else {
        println!("\nskipped sessions: it needs a JDK and Maven, see scripts/bench.sh");
        GOALS.iter().for_each(|(name, target)| run.goals.skip(*name, *target));
        return;
    };
    let (runtime, seconds) = (runtime(), 3.0 * run.scale);
    let mut chart = Chart::new("sessions", "Locks in ZooKeeper, per second: more is better");
    let mut values = Vec::new();
    for count in [1, 3] {
        // The servers write to their disks, as they do by default.
        let servers = runtime.block_on(ZooKeeper::start_with(count, |_| "forceSync=yes\n".to_owned()));
        let instance = || async {
            // The disk of the machine may be slow.
            let builder = ZooKeeperStore::builder().call_timeout(Duration::from_secs(5));
            let builder = builder.connect_timeout(Duration::from_secs(10));
            let store = builder.connect(&format!("zookeeper://{}", servers.addresses())).await;
            LockManager::new(store.expect("it is up"))
        };
        let instances = [runtime.block_on(instance()), runtime.block_on(instance())];
        let measure = |name, tasks: u64| match name {
            CURATOR => of_curator(&curator, &servers.addresses(), tasks, seconds),
            _ if tasks == 0 => runtime.block_on(hand_off(&instances, seconds)),
            _ => runtime.block_on(cycles(&instances[0], tasks, seconds)),
        };
        for tasks in [1, 64] {
            let mut table = Table::new(format!("ZooKeeper of {count}, {tasks} in flight"), OURS, &COLUMNS);
            for name in run.turns(&[OURS, CURATOR]) {
                let mut times = measure(name, tasks);
                table.push(name, RATE, times.len() as f64 / seconds);
                table.push(name, P50, quantile_us(&mut times, 0.5));
                table.push(name, "p99 us", quantile_us(&mut times, 0.99));
            }
            table.print();
            chart.add(format!("{count} servers, {tasks} in flight: cycles"), &table, RATE, 0);
            if tasks == 1 {
                values.push(table.ratio(P50, OURS, CURATOR));
            }
        }
        let mut table =
            Table::new(format!("ZooKeeper of {count}, from one instance to the other"), OURS, &HANDED_COLUMNS);
        for name in run.turns(&[OURS, CURATOR]) {
            let mut times = measure(name, 0);
            table.push(name, HANDOFF, quantile_us(&mut times, 0.5));
            table.push(name, HANDOFF_P90, quantile_us(&mut times, 0.9));
        }
        table.print();
        values.push(table.ratio(HANDOFF, OURS, CURATOR));
    }
    for ((name, target), value) in GOALS.into_iter().zip(values) {
        run.goals.check(name, value, target);
    }
    run.write(&chart);
}

/// The nanoseconds of each cycle or, without tasks, of each handoff.
fn of_curator(classes: &str, servers: &str, tasks: u64, seconds: f64) -> Vec<u64> {
    let mut command = Command::new("java");
    command.args(["-cp", classes, "Cycles", servers]).args([tasks.to_string(), seconds.to_string()]);
    let output = command.output().expect("java");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(|line| line.parse().expect("a number")).collect()
}

/// Each task acquires and releases keys of its own.
async fn cycles(locks: &LockManager, tasks: u64, seconds: f64) -> Vec<u64> {
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let task = |task: u64| {
        let locks = locks.clone();
        tokio::spawn(async move {
            let mut times = Vec::new();
            for n in (0_u64..50).cycle() {
                if Instant::now() >= until {
                    break;
                }
                let began = nanos();
                let guard = locks.try_lock(("cycle", task, n)).await.expect("free");
                guard.release().await.expect("held");
                times.push(nanos() - began);
            }
            times
        })
    };
    let tasks: Vec<_> = (0..tasks).map(task).collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.expect("no panic"));
    }
    times
}

/// One instance releases a key for which the other one waits.
async fn hand_off([one, other]: &[LockManager; 2], seconds: f64) -> Vec<u64> {
    let (other, until) = (Arc::new(other.clone()), Instant::now() + Duration::from_secs_f64(seconds));
    let mut times = Vec::new();
    for n in (0_u64..20).cycle() {
        if Instant::now() >= until {
            break;
        }
        let held = one.try_lock(("handoff", n)).await.expect("free");
        let waiting = Arc::clone(&other);
        let waiter = tokio::spawn(async move {
            let guard = waiting.lock(("handoff", n)).wait(Duration::from_secs(10)).await.expect("a grant");
            let granted = nanos();
            guard.release().await.expect("held");
            granted
        });
        sleep(0.03 + 0.04 * fastrand::f64()).await;
        let released = nanos();
        held.release().await.expect("held");
        times.push(waiter.await.expect("no panic") - released);
    }
    times
}
