//! The cost of locks on a Cluster: scripts, round trips and redirections, counted at the masters.

use std::{future::IntoFuture, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tower_lock::{
    LockGuard, LockKey, LockManager, RedisStore,
    store::{AcquisitionIds, LockStore, RenewRequest},
};
use tower_lock_testkit::{
    Connection, RedisCluster,
    locks::key,
    wait::{ms, until},
};

use super::{calls_in, cluster, instance, keys_at};

/// Counts at each master, on connections of its own.
struct Meter(Vec<Connection>);

/// What a master has done since its start.
#[derive(Clone, Copy, Debug)]
struct Counts {
    /// The reads from sockets. The commands of a pipeline are one, if it is short.
    reads: u64,
    evalsha: u64,
    eval: u64,
    /// `HEXISTS`, which only renewals use here.
    renewals: u64,
    redirections: u64,
}

impl Meter {
    async fn new(cluster: &RedisCluster) -> Self {
        let masters = cluster.masters().await;
        Self(join_all(masters.into_iter().map(|master| cluster.node(master).connect())).await)
    }

    async fn counts(&mut self) -> Vec<Counts> {
        let mut counts = Vec::new();
        for master in &mut self.0 {
            let info = master.command(&["INFO", "everything"]).await.expect("it is up");
            let info = info.text().expect("a text");
            let field = |name: &str| {
                let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
                value.and_then(|value| value.trim().parse().ok()).expect("a number")
            };
            let errors = info.lines().filter_map(|line| {
                let count = ["MOVED", "ASK", "TRYAGAIN", "CROSSSLOT", "CLUSTERDOWN"]
                    .iter()
                    .find_map(|error| line.strip_prefix(&format!("errorstat_{error}:count=")))?;
                count.trim().parse::<u64>().ok()
            });
            counts.push(Counts {
                reads: field("total_reads_processed"),
                evalsha: calls_in(info, "evalsha"),
                eval: calls_in(info, "eval"),
                renewals: calls_in(info, "hexists"),
                redirections: errors.sum(),
            });
        }
        counts
    }
}

/// For each master.
fn deltas(before: &[Counts], after: &[Counts], count: impl Fn(&Counts) -> u64) -> Vec<u64> {
    before.iter().zip(after).map(|(before, after)| count(after) - count(before)).collect()
}

/// Loads the scripts, and waits for the subscriptions.
async fn warm(cluster: &RedisCluster, locks: &LockManager) {
    for node in cluster.masters().await {
        for key in keys_at(cluster, node, 1).await {
            locks.lock(key).await.expect("free").release().await.expect("held");
        }
    }
}

#[tokio::test]
async fn uncontended_lock_on_a_cluster_costs_two_scripts() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let locks = instance(&cluster, "a").await;
    warm(&cluster, &locks).await;
    let mut meter = Meter::new(&cluster).await;
    for node in 0..3 {
        let keys = keys_at(&cluster, node, 50).await;
        let began = meter.counts().await;
        let mut reads = Vec::new();
        for key in keys {
            let before = meter.counts().await;
            locks.try_lock(key).await.expect("free").release().await.expect("held");
            reads.push(deltas(&before, &meter.counts().await, |counts| counts.reads));
        }
        let ended = meter.counts().await;
        let expected = |at: usize, n| if at == node { n } else { 0 };
        let scripts = deltas(&began, &ended, |counts| counts.evalsha + counts.eval);
        assert_eq!(scripts, [0, 1, 2].map(|at| expected(at, 100)), "node {node}");
        // The checks of each second are not in all of them. One read is that of the meter.
        let least: Vec<_> = (0..3).map(|at| reads.iter().map(|reads| reads[at]).min()).collect();
        assert_eq!(least, [0, 1, 2].map(|at| Some(1 + expected(at, 2))), "node {node}: two round trips");
    }
    assert!(meter.counts().await.iter().all(|counts| counts.redirections == 0));
}

/// Guarantee: G21.
#[tokio::test]
async fn keys_of_three_masters_cost_each_of_them_two_scripts() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let locks = instance(&cluster, "a").await;
    let keys = || (0..64).map(|number| ("several", number));
    let mut meter = Meter::new(&cluster).await;
    // The first lock of a slot makes its fence, by a script of its own.
    locks.lock_all(keys()).await.expect("free").release().await.expect("held");
    let mut reads = Vec::new();
    for _ in 0..30 {
        let before = meter.counts().await;
        locks.lock_all(keys()).await.expect("free").release().await.expect("held");
        let after = meter.counts().await;
        let scripts = deltas(&before, &after, |counts| counts.evalsha + counts.eval);
        assert_eq!(scripts, [2; 3], "one to acquire, one to release");
        reads.push(deltas(&before, &after, |counts| counts.reads));
    }
    let least: Vec<_> = (0..3).map(|at| reads.iter().map(|reads| reads[at]).min()).collect();
    assert_eq!(least, [Some(3); 3], "two round trips, and one of the meter");
    assert!(meter.counts().await.iter().all(|counts| counts.redirections == 0));
}

/// A replica that is promoted knows no script.
#[tokio::test]
async fn master_without_the_scripts_gets_each_text_once() {
    let Some(cluster) = cluster(2, 0).await else { return };
    let locks = instance(&cluster, "a").await;
    let keys = keys_at(&cluster, 0, 64).await;
    let mut meter = Meter::new(&cluster).await;
    let cold = meter.counts().await;
    locks.lock_all(keys).await.expect("free").release().await.expect("held");
    let texts = deltas(&cold, &meter.counts().await, |counts| counts.eval);
    assert_eq!(texts, [3, 0], "of an acquire of free keys, of the first one of a slot, and of a release");
}

#[tokio::test]
async fn handoff_on_a_cluster_costs_three_scripts() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let mut meter = Meter::new(&cluster).await;
    for contenders in [2_u64, 8] {
        let instances = join_all((0..contenders).map(|_| instance(&cluster, "a"))).await;
        for locks in &instances {
            warm(&cluster, locks).await;
            locks.lock(key()).await.expect("free").release().await.expect("held");
        }
        let (before, began) = (meter.counts().await, Instant::now());
        let sections = 320 / contenders;
        join_all(instances.iter().map(async |locks| {
            for _ in 0..sections {
                locks.lock(key()).wait(Duration::from_secs(60)).await.expect("a grant").release().await.expect("held");
            }
        }))
        .await;
        let scripts = deltas(&before, &meter.counts().await, |counts| counts.evalsha + counts.eval);
        // Waiters poll about once a second.
        let polls = contenders * 2 * (began.elapsed().as_secs() + 1);
        let (total, sections) = (scripts.iter().sum::<u64>(), sections * contenders);
        assert!(total <= 3 * sections + polls, "{contenders} contenders: {total} scripts for {sections} sections");
        assert_eq!(scripts.iter().filter(|scripts| **scripts > 0).count(), 1, "{scripts:?}: at one master");
    }
    assert!(meter.counts().await.iter().all(|counts| counts.redirections == 0));
}

/// The first script leaves these keys as they are. Those of the others are still shared.
#[tokio::test]
async fn keys_that_are_not_simple_have_scripts_of_their_own() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let (locks, other) = (instance(&cluster, "a").await, instance(&cluster, "b").await);
    let keys = keys_at(&cluster, 0, 20).await;
    locks.lock_all(keys.clone()).await.expect("free").release().await.expect("held");
    let mut meter = Meter::new(&cluster).await;
    let held = locks.lock_all(keys.clone()).await.expect("free");
    let waiting = tokio::spawn(other.lock(keys[3].clone()).wait(Duration::from_secs(60)).into_future());
    until("it waits", async || locks.inspect(keys[3].clone()).await.is_ok_and(|key| key.waiting == 1)).await;
    let before = meter.counts().await;
    held.release().await.expect("held");
    let next = waiting.await.expect("no panic").expect("a grant");
    let scripts = deltas(&before, &meter.counts().await, |counts| counts.evalsha + counts.eval);
    // It may poll meanwhile.
    assert!((3..=5).contains(&scripts[0]), "{scripts:?}: of 19 keys, of the one with a waiter, its grant");
    // The reply to the shared script is not that of the busy key.
    let results = join_all(keys.iter().map(|key| locks.try_lock(key.clone()).into_future())).await;
    let busy: Vec<_> = (0..20).filter(|at| results[*at].is_err()).collect();
    assert_eq!(busy, [3], "{:?}", results[3]);
    let fences: Vec<_> = results.iter().flatten().map(LockGuard::fencing_token).collect();
    assert!(fences.iter().all(|fence| *fence > next.fencing_token()));
    drop(results);
    next.release().await.expect("held");
}

#[tokio::test]
async fn locks_of_a_master_are_renewed_in_common_scripts() {
    const LOCKS: u64 = 1_000;
    let Some(cluster) = cluster(3, 0).await else { return };
    // A busy machine is no outage.
    let store = RedisStore::builder().call_timeout(ms(4_000)).connect(&cluster.url()).await.expect("it is up");
    let store = Arc::new(store);
    // Loads the script of renewals.
    let ids = AcquisitionIds::new("a", 1);
    let renewal = |number| RenewRequest::new(LockKey::from(("n", number)), ids.next(), ms(1_000));
    store.renew((0..50).map(renewal).collect()).await.expect("a reply");
    let locks = LockManager::builder(store).lease(Duration::from_secs(9)).build();
    let all = (0..8).map(|part| {
        let keys = (0..125).map(move |number| ("held", format!("{part}-{number}")));
        join_all(
            [keys.clone().take(63).collect::<Vec<_>>(), keys.skip(63).collect()]
                .map(|keys| locks.lock_all(keys).into_future()),
        )
    });
    let held: Vec<_> = join_all(all).await.into_iter().flatten().map(|guards| guards.expect("free")).collect();
    assert_eq!(locks.held_count() as u64, LOCKS);
    let mut meter = Meter::new(&cluster).await;
    let before = meter.counts().await;
    let mut after = before.clone();
    until("renewals", async || {
        sleep(ms(100)).await;
        after = meter.counts().await;
        deltas(&before, &after, |counts| counts.renewals).iter().sum::<u64>() >= LOCKS
    })
    .await;
    assert_eq!(deltas(&before, &after, |counts| counts.renewals).iter().sum::<u64>(), LOCKS, "once each");
    let scripts = deltas(&before, &after, |counts| counts.evalsha + counts.eval);
    // Three for each master, if all are due together.
    assert!(scripts.iter().sum::<u64>() < LOCKS / 10, "{scripts:?}");
    assert!(after.iter().all(|counts| counts.redirections == 0));
    for guards in held {
        guards.release().await.expect("held");
    }
}
