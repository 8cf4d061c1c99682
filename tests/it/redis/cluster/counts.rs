//! The cost of locks on a Cluster: scripts, round trips and redirections, counted at the masters.

use std::future::IntoFuture;

use futures_util::future::join_all;
use tower_lock::{LockGuard, LockKey};
use tower_lock_testkit::{
    Connection,
    costs::{self, Costs, runs},
    limits,
    wait::until,
};

use super::{instance, key_at, keys_at, scripts, shared_cluster, store};

/// The reads from sockets of each master. The commands of a pipeline are one, if it is short.
async fn reads(masters: &mut [Connection]) -> [u64; 3] {
    let mut reads = [0; 3];
    for (reads, master) in reads.iter_mut().zip(masters) {
        let info = master.command(&["INFO", "stats"]).await.expect("it is up");
        let line = info.text().expect("a text").lines().find_map(|line| line.strip_prefix("total_reads_processed:"));
        *reads = line.expect("a line").parse().expect("a number");
    }
    reads
}

/// Guarantee: G21.
#[tokio::test]
async fn locks_on_a_cluster_cost_the_scripts_of_the_table() {
    let Some(cluster) = shared_cluster().await else { return };
    let row = Costs { servers: 1, lock: 2, handoff: Some(3), renewal: 1 };
    let calls = async || join_all((0..3).map(|node| scripts(&cluster, node))).await;
    costs::check(row, async || store(&cluster).await, calls).await;

    let locks = instance(&cluster, "a").await;
    let mut masters = join_all((0..3).map(|node| cluster.node(node).connect())).await;
    let all = (0..64).map(|number| LockKey::from(("several", number))).collect();
    for (keys, expected) in [(vec![key_at(&cluster, 1).await], [0, 2, 0]), (all, [2; 3])] {
        let mut least = [u64::MAX; 3];
        // The checks of each second are not in all of them.
        for _ in 0..10 {
            let before = reads(&mut masters).await;
            locks.lock_all(keys.clone()).await.expect("free").release().await.expect("held");
            let after = reads(&mut masters).await;
            least = [0, 1, 2].map(|node| least[node].min(after[node] - before[node]));
        }
        assert_eq!(least, expected.map(|trips| trips + 1), "round trips for {} keys, and one of the test", keys.len());
    }
    for node in 0..3 {
        let errors = cluster.command(node, &["INFO", "errorstats"]).await;
        for error in ["MOVED", "ASK", "TRYAGAIN", "CROSSSLOT", "CLUSTERDOWN"] {
            assert!(!errors.text().expect("a text").contains(&format!("errorstat_{error}:")), "{node}: {errors:?}");
        }
    }
}

/// A replica that is promoted knows no script.
#[tokio::test]
async fn master_without_the_scripts_gets_each_text_once() {
    let Some(cluster) = shared_cluster().await else { return };
    let locks = instance(&cluster, "a").await;
    let cold = runs(cluster.node(0), "eval").await;
    locks.lock_all(keys_at(&cluster, 0, 64).await).await.expect("free").release().await.expect("held");
    let texts = runs(cluster.node(0), "eval").await - cold;
    assert_eq!(texts, 3, "of an acquire of free keys, of the first one of a slot, and of a release");
}

/// The first script leaves these keys as they are. Those of the others are still shared.
#[tokio::test]
async fn keys_that_are_not_simple_have_scripts_of_their_own() {
    let Some(cluster) = shared_cluster().await else { return };
    let (locks, other) = (instance(&cluster, "a").await, instance(&cluster, "b").await);
    let keys = keys_at(&cluster, 0, 20).await;
    locks.lock_all(keys.clone()).await.expect("free").release().await.expect("held");
    let held = locks.lock_all(keys.clone()).await.expect("free");
    let waiting = tokio::spawn(other.lock(keys[3].clone()).wait(limits::BROKEN).into_future());
    until("it waits", async || locks.inspect(keys[3].clone()).await.is_ok_and(|key| key.waiting == 1)).await;
    let before = scripts(&cluster, 0).await;
    held.release().await.expect("held");
    let next = waiting.await.expect("no panic").expect("a grant");
    let scripts = scripts(&cluster, 0).await - before;
    // More only if it polls meanwhile. Without a shared script there are 20 of the release alone.
    assert!((3..20).contains(&scripts), "{scripts}: of 19 keys, of the one with a waiter, its grant");
    // The reply to the shared script is not that of the busy key.
    let results = join_all(keys.iter().map(|key| locks.try_lock(key.clone()).into_future())).await;
    let busy: Vec<_> = (0..20).filter(|at| results[*at].is_err()).collect();
    assert_eq!(busy, [3], "{:?}", results[3]);
    let fences: Vec<_> = results.iter().flatten().map(LockGuard::fencing_token).collect();
    assert!(fences.iter().all(|fence| *fence > next.fencing_token()));
    drop(results);
    next.release().await.expect("held");
}
