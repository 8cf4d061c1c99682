//! Masters that are killed or stopped, replaced by their replicas, and come back.

use std::{future::IntoFuture, time::Duration};

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tower_lock::{
    LockError, LockLost, LockManager,
    store::{RedisStoreBuilder, StoreErrorKind},
};
use tower_lock_testkit::{
    RedisCluster, costs, limits,
    wait::{ms, soon, until},
};

use super::{cluster, instance, is_available, key_at, keys_at, name_of, scripts, store};
use crate::{
    failover::{Load, release, waiters_keep_their_order},
    support::granted,
};

/// The replicas of a node have all that it has.
async fn replicated(cluster: &RedisCluster, node: usize) {
    let key = name_of(&key_at(cluster, node).await);
    let mut connection = cluster.node(node).connect().await;
    connection.command(&["HSET", &format!("{{{key}}}barrier"), "a", "1"]).await.expect("a reply");
    let acknowledged = connection.command(&["WAIT", "1", "60000"]).await.expect("a reply");
    assert_eq!(acknowledged.integer(), Some(1));
}

/// The processes that are subscribed at a node.
async fn subscribed(cluster: &RedisCluster, node: usize) -> usize {
    let id = cluster.command(node, &["CLUSTER", "MYID"]).await.text().expect("an id").to_owned();
    cluster.command(node, &["PUBSUB", "CHANNELS", &format!("tower-lock:lock:in:{id}:*")]).await.items().len()
}

/// A cluster of three masters, of which each works without the others.
async fn independent_masters() -> Option<RedisCluster> {
    is_available().then_some(())?;
    Some(RedisCluster::options().set("cluster-require-full-coverage", "no").start(3, 0).await)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    /// Its connections stay open, and nothing replies.
    Stopped,
}

/// More locks at this master than two calls renew: the others wait for their turn there.
async fn master_ends(end: End) {
    let lease = Duration::from_secs(12);
    let Some(cluster) = independent_masters().await else { return };
    let a = LockManager::builder(store(&cluster).await).instance("a").lease(lease).build();
    let b = instance(&cluster, "b").await;
    let (mut held, mut free) = (Vec::new(), Vec::new());
    let acquired = Instant::now();
    for (node, count) in [270, 20, 20].into_iter().enumerate() {
        let mut keys = keys_at(&cluster, node, count + 1).await;
        free.push(keys.remove(0));
        b.lock(free[node].clone()).await.expect("free").release().await.expect("held");
        let guards = join_all(keys.iter().map(|key| a.lock(key.clone()).into_future())).await;
        held.push(guards.into_iter().map(|guard| guard.expect("free")).collect::<Vec<_>>());
    }
    let dead = held.remove(0);
    match end {
        End::Killed => cluster.kill(0),
        End::Stopped => cluster.freeze(0),
    }
    let refused = tokio::spawn(b.try_lock(free[0].clone()).into_future());
    for key in &free[1..] {
        b.try_lock(key.clone()).await.expect("its master works").release().await.expect("held");
        let own = a.try_lock(key.clone()).await.expect("its master works");
        let waiting = tokio::spawn(b.lock(key.clone()).into_future());
        until("it waits", async || b.inspect(key.clone()).await.is_ok_and(|key| key.waiting == 1)).await;
        own.release().await.expect("held");
        granted(waiting).await.release().await.expect("held");
    }
    assert!(!refused.is_finished(), "the others have not waited for the request at the master");
    let error = refused.await.expect("no panic").expect_err("its master is down");
    assert!(matches!(&error, LockError::Store(error) if error.kind() == StoreErrorKind::Failover), "{error:?}");
    assert!(format!("{error:?}").contains(&cluster.addresses()[0]), "{error:?}");
    sleep((lease + ms(500)).saturating_sub(acquired.elapsed())).await;
    for guard in held.into_iter().flatten() {
        assert!(!guard.held_lock().remaining().is_zero(), "renewed: {:?}", guard.key());
        guard.release().await.expect("held");
    }
    for guard in if end == End::Killed { dead } else { Vec::new() } {
        let lost = soon("its end", guard.while_held(std::future::pending::<()>())).await;
        assert!(matches!(lost, Err(LockLost::Expired)), "{lost:?}");
    }
}

#[tokio::test]
async fn killed_master_delays_no_other() {
    master_ends(End::Killed).await;
}

/// Guarantee: G15.
#[tokio::test]
async fn stopped_master_delays_no_other() {
    master_ends(End::Stopped).await;
}

/// Guarantee: G5, G6.
#[tokio::test]
async fn waiters_go_on_in_their_order_at_the_promoted_replica() {
    let Some(cluster) = cluster(3, 1).await else { return };
    let instances = ["holder", "a", "b", "c"].map(|name| instance(&cluster, name));
    let instances: [LockManager; 4] = join_all(instances).await.try_into().expect("four");
    let keys = keys_at(&cluster, 0, 21).await;
    let (key, others) = keys.split_first().expect("keys");
    let held = instances[0].lock_all(others.to_vec()).await.expect("free");
    let mut fences = Vec::new();
    for key in others {
        fences.push(cluster.command(0, &["HGETALL", &name_of(key)]).await);
    }
    let fail_over = async || {
        replicated(&cluster, 0).await;
        let promoted = cluster.failover(0).await;
        until("all processes have followed", async || subscribed(&cluster, promoted).await == 4).await;
        cluster.node(promoted)
    };
    waiters_keep_their_order(key.clone(), &instances, fail_over).await;

    // The other locks of the holder are renewed and released there, under the same fences.
    let left = held.held_locks().remaining();
    until("they are renewed", async || held.held_locks().remaining() > left).await;
    for (key, fence) in others.iter().zip(fences) {
        assert_eq!(cluster.command_for(&name_of(key), &["HGETALL", &name_of(key)]).await, fence, "{key:?}");
    }
    held.release().await.expect("held");
}

/// Guarantee: G1.
#[tokio::test]
async fn failover_loses_no_grant_that_counted() {
    let Some(mut cluster) = cluster(3, 1).await else { return };
    let locks = async |builder: RedisStoreBuilder, name| {
        let store = builder.connect(&cluster.url()).await.expect("it is up");
        LockManager::builder(store).instance(name).lease(Duration::from_secs(120)).build()
    };
    let patient = || limits::redis().min_replicas(1, limits::REPLICAS);
    let (a, b) = (locks(patient(), "a").await, locks(patient(), "b").await);
    let hasty = limits::redis().call_timeout(limits::SHORT).min_replicas(1, limits::SHORT / 2);
    let refused = locks(hasty, "c").await;
    let keys = keys_at(&cluster, 0, 8).await;
    let (counted, uncounted) = keys.split_at(6);
    let held = a.lock_all(counted.to_vec()).await.expect("free");
    cluster.cut_replication(0).await;
    a.health().await.expect_err("a master without replicas is not ready");
    for refused in join_all(uncounted.iter().map(|key| refused.try_lock(key.clone()).into_future())).await {
        assert!(matches!(refused, Err(LockError::Store(_))), "{refused:?}");
    }
    // Those of the other masters count.
    let other = key_at(&cluster, 1).await;
    a.try_lock(other).await.expect("free").release().await.expect("held");
    let promoted = cluster.failover(0).await;
    until("it has followed", async || b.inspect(counted[0].clone()).await.is_ok()).await;
    for key in counted {
        let status = b.inspect(key.clone()).await.expect("it is up");
        assert!(status.holder().is_some_and(|holder| holder.id.instance() == "a"), "{key:?}");
    }
    assert!(!held.held_locks().remaining().is_zero());
    // The former master becomes a replica of the promoted one.
    let error = refused.try_lock(uncounted[0].clone()).await.expect_err("the promoted one has no replica");
    assert!(matches!(error, LockError::Store(_)), "{error:?}");
    cluster.restart(0).await;
    for key in counted {
        let refused = b.try_lock(key.clone()).wait(ms(50)).await.expect_err("held");
        assert!(!matches!(refused, LockError::Store(_)), "{refused:?}");
    }
    for key in uncounted {
        let guard = b.lock(key.clone()).wait(limits::BROKEN).await.expect("free");
        release(guard).await;
    }
    held.release().await.expect("held at the promoted one");
    assert!(cluster.masters().await.contains(&promoted));
}

/// A master that was stopped has calls in its sockets that it has not read yet.
/// Guarantee: G1, G6.
#[tokio::test]
async fn waiting_requests_outlast_failovers_and_exclude_each_other() {
    let Some(cluster) = cluster(3, 1).await else { return };
    let locks = [instance(&cluster, "a").await, instance(&cluster, "b").await];
    let load = Load::start(&locks, &[keys_at(&cluster, 0, 2).await, keys_at(&cluster, 1, 2).await].concat());
    load.goes_on(20).await;
    cluster.planned_failover(1).await;
    // It is a replica, and gets no calls.
    until("all know the master", async || {
        let before = scripts(&cluster, 1).await;
        load.goes_on(20).await;
        before == scripts(&cluster, 1).await
    })
    .await;
    load.ends_without_an_error().await;

    let instance = async |name| {
        let store = limits::redis().min_replicas(1, limits::REPLICAS).connect(&cluster.url()).await.expect("it is up");
        // A lock whose release is lost is free after that.
        LockManager::builder(store).instance(name).lease(Duration::from_secs(12)).build()
    };
    let load = Load::start(&[instance("a").await, instance("b").await], &keys_at(&cluster, 0, 4).await);
    load.goes_on(20).await;
    cluster.freeze(0);
    cluster.promoted(0).await;
    // The promoted one grants nothing, either, because it has no replica.
    cluster.thaw(0);
    load.goes_on(20).await;
    cluster.rejoined(0).await;
    let before = scripts(&cluster, 0).await;
    load.goes_on(40).await;
    assert_eq!(scripts(&cluster, 0).await, before, "no call at the former master");
    load.ends_without_an_error().await;
}

/// Guarantee: G6.
#[tokio::test]
async fn cluster_without_a_shard_rejects_until_it_is_back() {
    let Some(mut cluster) = cluster(3, 0).await else { return };
    let locks = instance(&cluster, "a").await;
    let (dead, live) = (key_at(&cluster, 0).await, keys_at(&cluster, 1, 2).await);
    let held = locks.lock(live[0].clone()).await.expect("free");
    cluster.kill(0);
    until("no slot is served", async || {
        let info = cluster.command(1, &["CLUSTER", "INFO"]).await;
        info.text().is_some_and(|info| info.contains("cluster_state:fail"))
    })
    .await;
    let refused = join_all([&dead, &live[1]].map(|key| locks.try_lock(key.clone()).into_future())).await;
    for refused in &refused {
        let Err(LockError::Store(error)) = refused else { panic!("{refused:?}") };
        assert_eq!(error.kind(), StoreErrorKind::Failover, "{error:?}");
    }
    let text = format!("{:?}", refused[1]);
    assert!(text.contains("CLUSTERDOWN") && text.contains("`CLUSTER INFO`"), "{text}");
    let waiting: Vec<_> = [dead, live[1].clone()]
        .into_iter()
        .map(|key| tokio::spawn(locks.lock(key).wait(limits::BROKEN).into_future()))
        .collect();
    sleep(ms(500)).await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()), "they wait");
    cluster.restart(0).await;
    for waiting in waiting {
        release(granted(waiting).await).await;
    }
    held.release().await.expect("held");
    until("it is ready", async || locks.health().await.is_ok()).await;
}

/// The address of a master that is down may be given to a node of another Cluster, whose epoch is
/// larger, as in Kubernetes. Locks stay where they are, at connected processes and at new ones.
///
/// Guarantee: G1.
#[tokio::test]
async fn node_of_another_cluster_at_a_known_address_grants_nothing() {
    let Some(mut cluster) = independent_masters().await else { return };
    let hasty = || limits::redis().call_timeout(limits::SHORT);
    let a = instance(&cluster, "a").await;
    let b = LockManager::new(hasty().connect(&cluster.url()).await.expect("it is up"));
    let [at_first, at_second] = [key_at(&cluster, 0).await, key_at(&cluster, 1).await];
    let held = a.lock(at_second.clone()).await.expect("free");
    cluster.replace_by_another_cluster(0).await;
    let asked = async |command: &str| costs::runs(cluster.node(0), command).await;
    until("both have asked it", async || asked("cluster|myid").await + asked("cluster|slots").await >= 6).await;

    let live = format!("redis+cluster://{}", cluster.addresses()[1..].join(","));
    // Waits that long for the one that is down.
    let c = LockManager::new(hasty().connect_timeout(limits::OUTAGE).connect(&live).await.expect("two masters work"));
    for locks in [&b, &c] {
        let busy = locks.try_lock(at_second.clone()).await.expect_err("another process has it");
        assert!(matches!(busy, LockError::Busy { .. }), "{busy:?}");
        let refused = locks.try_lock(at_first.clone()).await.expect_err("its master is down");
        let LockError::Store(error) = refused else { panic!("{refused:?}") };
        assert_eq!(error.kind(), StoreErrorKind::Failover, "{error:?}");
    }
    // On a busy machine, the time may pass before that is known.
    let is_named = async || {
        let connected = hasty().connect_timeout(limits::SHORT).connect(&cluster.url()).await;
        let error = connected.map(drop).expect_err("nodes of two Clusters");
        format!("{error:?}").contains("name only nodes of one Cluster")
    };
    until("the error names the cause", is_named).await;

    // The others are down, too, and of the named nodes only that one replies.
    held.release().await.expect("held");
    (1..3).for_each(|node| cluster.kill(node));
    let before = asked("cluster|slots").await;
    until("the named nodes are asked", async || asked("cluster|slots").await > before + 2).await;
    b.try_lock(at_second).await.expect_err("its master is down");
    assert_eq!(cluster.command(0, &["DBSIZE"]).await.integer(), Some(0), "nothing was written there");
}
