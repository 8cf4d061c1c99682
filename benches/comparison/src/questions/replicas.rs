//! What `min_replicas` adds to an acquire and a release: the master has one replica, and the same
//! keys are locked with and without its acknowledgement.

use std::{sync::Arc, time::Duration};

use tower_lock::{LockManager, RedisStore};
use tower_lock_testkit::{RedisServer, wait::until};

use super::{
    Run,
    redis_cycles::{COLUMNS, P50, measure},
    runtime,
};
use crate::{redis_lock::RedisLock, report::Table, servers::Servers};

const OURS: &str = RedisLock::OURS;
const ACKNOWLEDGED: &str = "with min_replicas(1)";

pub fn answer(run: &mut Run) {
    let runtime = runtime();
    let (master, _replica) = runtime.block_on(replicated());
    let master = Servers::One(master);
    let connect = |count| {
        let store = RedisStore::builder().min_replicas(count, Duration::from_millis(200));
        let store = runtime.block_on(store.connect(&master.url())).expect("a Redis");
        Arc::new(RedisLock::Ours(LockManager::new(store)))
    };
    let variants = [(OURS, connect(0)), (ACKNOWLEDGED, connect(1))];
    for in_flight in [1, 64, 512] {
        let columns = &COLUMNS[..COLUMNS.len() - 1];
        let mut table = Table::new(format!("Redis with a replica, {in_flight} in flight"), OURS, columns);
        for at in run.turns(&[0, 1]) {
            let (name, lock) = &variants[at];
            runtime.block_on(measure(&master, lock, in_flight, run.scale)).push(&mut table, name);
        }
        table.print();
        let added = table.differences(P50, ACKNOWLEDGED, OURS);
        println!("min_replicas adds {:.0} us to the median, {in_flight} in flight", crate::measure::median(&added));
    }
}

/// A master, and its replica that is up to date.
async fn replicated() -> (RedisServer, RedisServer) {
    let master = RedisServer::start().await;
    let of = ["--replicaof", "127.0.0.1", &master.port().to_string()];
    let replica = RedisServer::options().args(of).start().await;
    until("the replica follows", async || {
        let info = replica.command(&["INFO", "replication"]).await;
        info.text().is_some_and(|info| info.contains("master_link_status:up"))
    })
    .await;
    (master, replica)
}
