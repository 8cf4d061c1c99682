//! Masters that are killed or stopped, replaced by their replicas, and come back.

use std::{
    future::IntoFuture,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};
use tower_lock::{LockError, LockGuard, LockKey, LockLost, LockManager, RedisStore, store::StoreErrorKind};
use tower_lock_testkit::{
    RedisCluster,
    wait::{ms, soon, until},
};

use super::{cluster, instance, is_available, key_at, keys_at, name_of, scripts, store};

/// In a failover the release may fail at first. It is repeated then.
async fn release(guard: LockGuard) {
    if let Err(error) = guard.release().await {
        assert_eq!(error.kind(), StoreErrorKind::Failover, "{error}");
    }
}

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

/// Hundreds of locks at each master are renewed in several calls: two of those of one master are
/// under way at a time, and each waits for the master that does not reply.
async fn master_ends(end: End) {
    let lease = Duration::from_secs(6);
    let Some(cluster) = independent_masters().await else { return };
    let a = LockManager::builder(store(&cluster).await).instance("a").lease(lease).build();
    let b = instance(&cluster, "b").await;
    let (mut held, acquired) = (Vec::new(), Instant::now());
    for node in 0..3 {
        let keys = keys_at(&cluster, node, 410).await;
        let (of_a, of_b) = keys.split_at(400);
        let guards = join_all(of_a.iter().map(|key| a.lock(key.clone()).into_future())).await;
        held.push((guards.into_iter().map(|guard| guard.expect("free")).collect::<Vec<_>>(), of_b.to_vec()));
        for key in of_b {
            b.lock(key.clone()).await.expect("free").release().await.expect("held");
        }
    }
    let (dead, dead_keys) = held.remove(0);
    // Shortly before the renewals.
    sleep((lease / 3).saturating_sub(acquired.elapsed() + ms(500))).await;
    match end {
        End::Killed => cluster.kill(0),
        End::Stopped => cluster.freeze(0),
    }
    let ended = Instant::now();
    // Requests for the master fail after a second. Those for the others follow each other
    // meanwhile.
    let mut refused = tokio::spawn(b.try_lock(dead_keys[0].clone()).into_future());
    let mut locks_meanwhile = 0;
    while !refused.is_finished() || ended.elapsed() < Duration::from_secs(4) {
        for (_, keys) in &held {
            for key in keys {
                b.try_lock(key.clone()).await.expect("its master works").release().await.expect("held");
                locks_meanwhile += usize::from(!refused.is_finished());
            }
            let own = a.try_lock(keys[0].clone()).await.expect("its master works");
            let waiting = tokio::spawn(b.lock(keys[0].clone()).into_future());
            until("it waits", async || b.inspect(keys[0].clone()).await.is_ok_and(|key| key.waiting == 1)).await;
            own.release().await.expect("held");
            soon("a grant", waiting).await.expect("no panic").expect("a grant").release().await.expect("held");
        }
        if refused.is_finished() {
            sleep(ms(20)).await;
        }
        for guard in held.iter().flat_map(|(guards, _)| guards) {
            let left = guard.held_lock().remaining();
            assert!(
                left > lease / 3,
                "a renewal was missed: {left:?} left of {:?} after {:?}",
                guard.key(),
                ended.elapsed()
            );
        }
    }
    assert!(locks_meanwhile > 5, "{locks_meanwhile} locks while a request for the master was under way");
    let error = (&mut refused).await.expect("no panic").expect_err("its master is down");
    assert!(matches!(&error, LockError::Store(error) if error.kind() == StoreErrorKind::Failover), "{error:?}");
    for guard in held.into_iter().flat_map(|(guards, _)| guards) {
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
    let holder = instance(&cluster, "holder").await;
    let (key, other) = {
        let keys = keys_at(&cluster, 0, 2).await;
        (keys[0].clone(), keys[1].clone())
    };
    let held = holder.lock(key.clone()).await.expect("free");
    let mut token = held.fencing_token();
    let fence = cluster.command(0, &["HVALS", &name_of(&key)]).await;
    let mut waiters = Vec::new();
    for (ahead, name) in ["a", "b", "c"].into_iter().enumerate() {
        let locks = instance(&cluster, name).await;
        waiters.push(tokio::spawn(locks.lock(key.clone()).wait(Duration::from_secs(60)).into_future()));
        until("queued", async || holder.inspect(key.clone()).await.is_ok_and(|key| key.waiting == ahead + 1)).await;
    }
    replicated(&cluster, 0).await;
    cluster.kill(0);
    let refused = holder.try_lock(other).await.expect_err("its master is down");
    assert!(matches!(&refused, LockError::Store(error) if error.kind() == StoreErrorKind::Failover), "{refused:?}");
    let promoted = cluster.promoted(0).await;
    // A process that has not yet subscribed there would lose its position.
    until("all processes have followed", async || subscribed(&cluster, promoted).await == 4).await;
    until("the holder is known", async || {
        holder.inspect(key.clone()).await.is_ok_and(|key| key.holder_connected == Some(true) && key.waiting == 3)
    })
    .await;
    assert_eq!(cluster.command(promoted, &["HVALS", &name_of(&key)]).await, fence);
    release(held).await;
    for waiter in waiters {
        let next = soon("a grant", waiter).await.expect("no panic").expect("a grant");
        assert!(next.fencing_token() > token);
        token = next.fencing_token();
        release(next).await;
    }
    assert!(scripts(&cluster, promoted).await > 0);
}

/// Longer than a lease.
#[tokio::test]
async fn held_locks_are_renewed_at_the_promoted_replica() {
    let Some(cluster) = cluster(3, 1).await else { return };
    let locks = LockManager::builder(store(&cluster).await).lease(Duration::from_secs(9)).build();
    let (mut held, acquired) = (Vec::new(), Instant::now());
    for node in 0..3 {
        for key in keys_at(&cluster, node, 100).await {
            let guard = locks.lock(key).await.expect("free");
            held.push((cluster.command(node, &["HGETALL", &name_of(guard.key())]).await, guard));
        }
    }
    replicated(&cluster, 0).await;
    let promoted = cluster.failover(0).await;
    while acquired.elapsed() < Duration::from_secs(10) {
        sleep(ms(200)).await;
        assert!(held.iter().all(|(_, guard)| !guard.held_lock().remaining().is_zero()));
    }
    for (stored, guard) in held {
        let name = name_of(guard.key());
        assert_eq!(cluster.command_for(&name, &["HGETALL", &name]).await, stored, "{name}: the same fence");
        guard.release().await.expect("held");
    }
    assert!(scripts(&cluster, promoted).await > 100, "renewals, and a release of each");
}

/// Guarantee: G1.
#[tokio::test]
async fn failover_loses_no_grant_that_counted() {
    let Some(mut cluster) = cluster(3, 1).await else { return };
    let locks = async |name| {
        let builder = RedisStore::builder().min_replicas(1, ms(100));
        let store = builder.connect(&cluster.url()).await.expect("it is up");
        LockManager::builder(store).instance(name).lease(Duration::from_secs(120)).build()
    };
    let (a, b) = (locks("a").await, locks("b").await);
    let keys = keys_at(&cluster, 0, 8).await;
    let (counted, uncounted) = keys.split_at(6);
    let held = a.lock_all(counted.to_vec()).await.expect("free");
    cluster.cut_replication(0).await;
    a.health().await.expect_err("a master without replicas is not ready");
    for refused in join_all(uncounted.iter().map(|key| a.try_lock(key.clone()).into_future())).await {
        assert!(matches!(refused, Err(LockError::Store(_))), "{refused:?}");
    }
    // Those of the other masters count.
    let other = key_at(&cluster, 1).await;
    a.try_lock(other).await.expect("free").release().await.expect("held");
    let promoted = cluster.failover(0).await;
    until("it has followed", async || b.inspect(counted[0].clone()).await.is_ok()).await;
    for key in counted {
        let status = b.inspect(key.clone()).await.expect("it is up");
        assert!(status.holder.is_some_and(|holder| holder.instance() == "a"), "{key:?}");
    }
    assert!(!held.held_locks().remaining().is_zero());
    // The former master becomes a replica of the promoted one.
    let error = b.try_lock(uncounted[0].clone()).await.expect_err("the promoted one has no replica");
    assert!(matches!(error, LockError::Store(_)), "{error:?}");
    cluster.restart(0).await;
    for key in counted {
        let refused = b.try_lock(key.clone()).wait(ms(50)).await.expect_err("held");
        assert!(!matches!(refused, LockError::Store(_)), "{refused:?}");
    }
    for key in uncounted {
        let guard = b.lock(key.clone()).wait(Duration::from_secs(60)).await.expect("free");
        release(guard).await;
    }
    held.release().await.expect("held at the promoted one");
    assert!(cluster.masters().await.contains(&promoted));
}

/// Takes locks in a loop, waits for each of them, and checks that no two sections of a key overlap.
struct Load {
    sections: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<Vec<LockError>>>,
}

impl Load {
    fn start(locks: &[LockManager], keys: &[LockKey]) -> Self {
        let (sections, is_over) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let mut tasks = Vec::new();
        for key in keys {
            let is_inside = Arc::<AtomicBool>::default();
            for locks in locks {
                let (locks, key, is_inside) = (locks.clone(), key.clone(), Arc::clone(&is_inside));
                let (sections, is_over) = (Arc::clone(&sections), Arc::clone(&is_over));
                tasks.push(tokio::spawn(async move {
                    let mut refused = Vec::new();
                    while !is_over.load(SeqCst) {
                        // Longer than a lease: the promoted replica may lack the release before.
                        match locks.lock(key.clone()).wait(Duration::from_secs(60)).await {
                            Ok(guard) => {
                                assert!(!is_inside.swap(true, SeqCst), "two sections of {key:?}");
                                sleep(ms(1)).await;
                                is_inside.store(false, SeqCst);
                                sections.fetch_add(1, SeqCst);
                                drop(guard.release().await);
                            }
                            Err(error) => refused.push(error),
                        }
                        sleep(ms(4)).await;
                    }
                    refused
                }));
            }
        }
        Self { sections, is_over, tasks }
    }

    /// Waits for this number of further sections.
    async fn goes_on(&self, count: usize) {
        let until_count = self.sections.load(SeqCst) + count;
        until("sections", async || self.sections.load(SeqCst) >= until_count).await;
    }

    /// Stops. Fails if a request was rejected.
    async fn ends_without_an_error(self) {
        self.is_over.store(true, SeqCst);
        let ended = soon("the requests", join_all(self.tasks)).await;
        let refused: Vec<_> = ended.into_iter().flat_map(|refused| refused.expect("no overlap")).collect();
        assert!(refused.is_empty(), "{} of them: {:?}", refused.len(), refused.first());
    }
}

/// Guarantee: G6.
#[tokio::test]
async fn planned_failover_of_a_master_rejects_no_waiting_request() {
    let Some(cluster) = cluster(3, 1).await else { return };
    let locks = [instance(&cluster, "a").await, instance(&cluster, "b").await];
    let mut keys = Vec::new();
    for node in 0..3 {
        keys.extend(keys_at(&cluster, node, 3).await);
    }
    let load = Load::start(&locks, &keys);
    load.goes_on(50).await;
    for former in 0..3 {
        cluster.planned_failover(former).await;
        load.goes_on(50).await;
    }
    // Each former master is a replica, and gets no calls.
    until("all know the masters", async || {
        let before = [scripts(&cluster, 0).await, scripts(&cluster, 1).await, scripts(&cluster, 2).await];
        load.goes_on(50).await;
        before == [scripts(&cluster, 0).await, scripts(&cluster, 1).await, scripts(&cluster, 2).await]
    })
    .await;
    load.ends_without_an_error().await;
}

/// It was stopped, and has calls in its sockets that it has not read yet.
/// Guarantee: G1, G6.
#[tokio::test]
async fn master_that_comes_back_grants_nothing() {
    let Some(cluster) = cluster(3, 1).await else { return };
    let instance = async |name| {
        let store = RedisStore::builder().min_replicas(1, ms(100)).connect(&cluster.url()).await.expect("it is up");
        LockManager::builder(store).instance(name).build()
    };
    let load = Load::start(&[instance("a").await, instance("b").await], &keys_at(&cluster, 0, 16).await);
    load.goes_on(100).await;
    cluster.freeze(0);
    cluster.promoted(0).await;
    // The promoted one grants nothing, either, because it has no replica.
    cluster.thaw(0);
    load.goes_on(50).await;
    cluster.rejoined(0).await;
    let before = scripts(&cluster, 0).await;
    load.goes_on(100).await;
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
        .map(|key| tokio::spawn(locks.lock(key).wait(Duration::from_secs(60)).into_future()))
        .collect();
    sleep(ms(1_500)).await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()), "they wait");
    cluster.restart(0).await;
    for waiting in waiting {
        release(soon("a grant", waiting).await.expect("no panic").expect("a grant")).await;
    }
    held.release().await.expect("held");
    until("it is ready", async || locks.health().await.is_ok()).await;
}
