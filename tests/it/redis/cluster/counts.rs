//! The cost of locks on a Cluster: scripts, round trips and redirections, counted at the masters.

use futures_util::future::join_all;
use tower_lock::LockKey;
use tower_lock_testkit::{
    Connection,
    costs::{self, Costs, runs},
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
    let row = Costs { servers: 1, lock: 2, handoff: Some(3), renewal: 1, keys_share: false };
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
    assert_eq!(texts, 2, "of an acquire, and of a release");
}
