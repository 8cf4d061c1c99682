//! A failover by Sentinel, on real servers.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
    time::{Instant, sleep},
};
use tower_lock::{
    LockError, LockGuard, LockKey, LockLost, LockManager, RedisStore,
    store::{AcquireRequest, AcquisitionIds, IfBusy, QueueConfig, StoreErrorKind},
};
use tower_lock_testkit::{
    RedisServer, Reply, SentinelGroup,
    costs::{runs, scripts},
    limits,
    locks::key,
    store::StoreExt,
    wait::{ms, soon, until},
};

use crate::support::{environment, granted, instance_of as instance, sentinel_group as group};

/// In a failover the release may fail at first. It is repeated then.
pub(crate) async fn release(guard: LockGuard) {
    if let Err(error) = guard.release().await {
        assert_eq!(error.kind(), StoreErrorKind::Failover, "{error}");
    }
}

/// Takes locks in a loop, waits for each of them, and checks that no two sections of a key overlap.
pub(crate) struct Load {
    sections: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<Vec<LockError>>>,
}

impl Load {
    pub(crate) fn start(locks: &[LockManager], keys: &[LockKey]) -> Self {
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
                        match locks.lock(key.clone()).wait(limits::BROKEN).await {
                            Ok(guard) => {
                                assert!(!is_inside.swap(true, SeqCst), "two sections of {key:?}");
                                sleep(ms(1)).await;
                                is_inside.store(false, SeqCst);
                                sections.fetch_add(1, SeqCst);
                                drop(guard.release().await);
                            }
                            Err(error) => refused.push(error),
                        }
                        sleep(ms(20)).await;
                    }
                    refused
                }));
            }
        }
        Self { sections, is_over, tasks }
    }

    /// Waits for this number of further sections.
    pub(crate) async fn goes_on(&self, count: usize) {
        let until_count = self.sections.load(SeqCst) + count;
        until("sections", async || self.sections.load(SeqCst) >= until_count).await;
    }

    /// Stops. Fails if a request was rejected.
    pub(crate) async fn ends_without_an_error(self) {
        self.is_over.store(true, SeqCst);
        let ended = soon("the requests", join_all(self.tasks)).await;
        let refused: Vec<_> = ended.into_iter().flat_map(|refused| refused.expect("no overlap")).collect();
        assert!(refused.is_empty(), "{} of them: {:?}", refused.len(), refused.first());
    }
}

/// Without a poll for as long, a queue expires. A failover on a busy machine may take longer.
const QUEUE_EXPIRES: Duration = Duration::from_secs(8);

/// Waiters that are in the queue keep their order while its server fails over. `fail_over` returns
/// the promoted server.
pub(crate) async fn waiters_keep_their_order<'a>(
    key: LockKey,
    [holder, waiters @ ..]: &[LockManager; 4],
    fail_over: impl AsyncFnOnce() -> &'a RedisServer,
) {
    let held = holder.lock(key.clone()).await.expect("free");
    let mut token = held.fencing_token();
    let mut waiting = Vec::new();
    for (ahead, locks) in waiters.iter().enumerate() {
        waiting.push(tokio::spawn(locks.lock(key.clone()).wait(limits::BROKEN).into_future()));
        until("it is queued", async || holder.inspect(key.clone()).await.is_ok_and(|key| key.waiting == ahead + 1))
            .await;
    }
    // A process that has not yet subscribed at the promoted server would lose its position.
    let began = Instant::now();
    let promoted = fail_over().await;
    // A caller repeats a call that was refused as not started.
    until("the holder is known", async || {
        let status = holder.inspect(key.clone()).await;
        status.is_ok_and(|key| key.holder().is_some_and(|holder| holder.connected == Some(true)) && key.waiting == 3)
    })
    .await;
    assert!(!held.held_lock().remaining().is_zero());
    let queue = format!("tower-lock:lock:q:{{lock:{}}}", key.as_str());
    let ids = promoted.command(&["LRANGE", &queue, "0", "-1"]).await;
    let order: Vec<_> = ids.texts().iter().map(|id| id.split(':').next().expect("a name").to_owned()).collect();
    if began.elapsed() < QUEUE_EXPIRES {
        assert_eq!(order, ["a", "b", "c"]);
    }
    release(held).await;
    let mut waiting: HashMap<_, _> = ["a", "b", "c"].into_iter().zip(waiting).collect();
    for name in order {
        let next = granted(waiting.remove(&*name).expect("each once")).await;
        assert!(next.fencing_token() > token);
        token = next.fencing_token();
        release(next).await;
    }
}

/// Guarantee: G5, G6.
#[tokio::test]
async fn waiters_go_on_in_their_order_at_the_promoted_server() {
    let Some(group) = group(2).await else { return };
    let instances = ["holder", "a", "b", "c"].map(|name| instance(&group, name));
    let instances: [LockManager; 4] = join_all(instances).await.try_into().expect("four");
    let master = &group.servers()[0];
    let fail_over = async || {
        // The replicas have all of it.
        assert_eq!(master.command(&["WAIT", "2", "60000"]).await.integer(), Some(2));
        master.kill();
        let promoted = group.promoted(master).await;
        let subscribed = async || promoted.command(&["PUBSUB", "CHANNELS", "tower-lock:lock:in:*"]).await.items().len();
        until("all processes have followed", async || subscribed().await == 4).await;
        promoted
    };
    waiters_keep_their_order(key(), &instances, fail_over).await;
    let promoted = group.master().await.expect("they agree");
    assert!(scripts(promoted).await > 0);
}

/// It has the role of a master, and would grant keys that are held at the other one.
/// Guarantee: G1.
#[tokio::test]
async fn former_master_is_left_after_a_failover() {
    for resumed in [false, true] {
        let Some(group) = group(1).await else { return };
        let locks = instance(&group, "a").await;
        locks.lock(key()).await.expect("free").release().await.expect("it is up");
        let old = &group.servers()[0];
        // The replica knows of the release: the promoted server would keep the key for a lease.
        assert_eq!(old.command(&["WAIT", "1", "60000"]).await.integer(), Some(1));
        if resumed {
            old.freeze();
        } else {
            SentinelGroup::isolate(old).await;
        }
        let promoted = group.promoted(old).await;
        if resumed {
            old.thaw();
        }
        let began = Instant::now();
        let pass = async || release(locks.lock(key()).wait(limits::BROKEN).await.expect("a grant")).await;
        until("it is left", async || {
            let before = scripts(promoted).await;
            pass().await;
            scripts(promoted).await >= before + 2
        })
        .await;
        assert!(began.elapsed() < limits::LEFT, "{:?}", began.elapsed());
        let before = (scripts(old).await, scripts(promoted).await);
        for _ in 0..20 {
            pass().await;
        }
        assert_eq!(scripts(old).await, before.0, "no call at the former master, resumed: {resumed}");
        assert!(scripts(promoted).await >= before.1 + 40);
    }
}

/// A grant whose release a failover loses lasts as long as its lease.
fn short_leases(store: RedisStore) -> LockManager {
    LockManager::builder(store).lease(Duration::from_secs(10)).build()
}

/// Guarantee: G6.
#[tokio::test]
async fn planned_failover_rejects_no_request_that_waits() {
    let Some(group) = group(1).await else { return };
    let store = limits::redis().connect(&group.url()).await.expect("it is up");
    let load = Load::start(&[short_leases(store)], &[key()]);
    load.goes_on(10).await;
    let old = &group.servers()[0];
    group.fail_over().await;
    let promoted = group.promoted(old).await;
    let earlier = scripts(promoted).await;
    until("requests go on", async || scripts(promoted).await > earlier + 20).await;
    until("the former master is a replica", async || {
        sleep(ms(100)).await;
        let role = old.try_command(&["ROLE"]).await;
        role.is_ok_and(|role| role.items().first().and_then(Reply::text) == Some("slave"))
    })
    .await;
    load.ends_without_an_error().await;
}

/// Requests that arrive while an acquire waits for the replicas share the next one, and wait longer
/// than they may while the master hangs.
/// Guarantee: G6.
#[tokio::test]
async fn failover_rejects_no_request_that_waits_for_replicas() {
    let Some(group) = group(2).await else { return };
    let store = limits::redis().min_replicas(1, limits::REPLICAS).connect(&group.url()).await.expect("it is up");
    let keys: Vec<_> = (0..16).map(|number| LockKey::from(("n", number))).collect();
    let load = Load::start(&[short_leases(store)], &keys);
    load.goes_on(32).await;
    let old = &group.servers()[0];
    old.freeze();
    let promoted = group.promoted(old).await;
    old.thaw();
    let earlier = scripts(promoted).await;
    until("requests go on", async || scripts(promoted).await > earlier + 64).await;
    load.ends_without_an_error().await;
}

/// Each failover of a master whose newest writes no replica has.
/// Guarantee: G1.
#[tokio::test]
async fn unreplicated_grant_counts_only_without_min_replicas() {
    for min_replicas in [0, 1] {
        let Some(group) = group(2).await else { return };
        let builder = || limits::redis().min_replicas(min_replicas, limits::SHORT);
        let connect = async |name| {
            let store = builder().connect(&group.url()).await.expect("it is up");
            // A short one to see a loss, and a long one to see a release.
            let lease = Duration::from_secs(if min_replicas == 0 { 10 } else { 120 });
            LockManager::builder(store).instance(name).lease(lease).build()
        };
        let (a, b) = (connect("a").await, connect("b").await);
        a.lock(key()).await.expect("free").release().await.expect("it is up");
        let old = &group.servers()[0];
        old.cut_replication().await;
        assert_eq!(a.health().await.is_ok(), min_replicas == 0, "it is not ready without replicas");
        let first = a.try_lock(key()).await;
        if let Err(error) = &first {
            assert!(matches!(error, LockError::Store(_)), "{error:?}");
            until("it is released", async || old.command(&["EXISTS", "lock:k"]).await.integer() == Some(0)).await;
        }
        old.kill();
        group.promoted(old).await;
        // The promoted server has one replica.
        let second = b.lock(key()).wait(if min_replicas == 0 { limits::BROKEN } else { Duration::ZERO }).await;
        if min_replicas == 0 {
            // Asynchronous replication loses a grant.
            let (first, second) = (first.expect("a grant"), second.expect("a grant"));
            assert!(second.fencing_token() > first.fencing_token());
            // With its next renewal, or at its deadline.
            let lost = soon("the first one", first.while_held(std::future::pending::<()>())).await;
            assert!(matches!(lost, Err(LockLost::Revoked | LockLost::Expired)), "{lost:?}");
            release(second).await;
        } else {
            assert!(first.is_err(), "no replica has it");
            drop(second);
            let again = b.lock(key()).wait(limits::BROKEN).await.expect("the other replica acknowledges");
            release(again).await;
        }
    }
}

/// `WAIT` counts connections. A replica that has reconnected has two, until the master notices.
/// Guarantee: G1.
#[tokio::test]
async fn replica_with_two_connections_counts_once() {
    let Some(group) = group(2).await else { return };
    let [master, replica, stopped] = group.servers() else { panic!("three servers") };
    let store = limits::redis().min_replicas(2, limits::SHORT).connect(&group.url()).await.expect("both are up");
    let locks = LockManager::new(store);
    locks.lock(key()).await.expect("free").release().await.expect("it is up");
    stopped.freeze();
    let second_connection = tokio::spawn(acknowledge_as(replica.port(), master.address()));
    until("both connections work", async || {
        let info = master.command(&["INFO", "replication"]).await;
        let works = format!("port={},state=online", replica.port());
        info.text().is_some_and(|info| info.matches(&works).count() == 2)
    })
    .await;
    let error = locks.try_lock(key()).await.expect_err("one replica has it");
    assert!(format!("{error:?}").contains("1 of 2 replicas"), "{error:?}");
    stopped.thaw();
    second_connection.abort();
    release(locks.lock(key()).wait(limits::BROKEN).await.expect("both replicas have it")).await;
}

/// Acknowledges everything, as another connection of the replica with this port.
async fn acknowledge_as(replica: u16, master: SocketAddr) {
    let (mut read, mut write) = TcpStream::connect(master).await.expect("it is up").into_split();
    for command in [format!("AUTH {}\r\n", SentinelGroup::PASSWORD), format!("REPLCONF listening-port {replica}\r\n")] {
        write.write_all(command.as_bytes()).await.expect("it is up");
        let mut reply = [0; 5];
        read.read_exact(&mut reply).await.expect("a reply");
        assert_eq!(&reply, b"+OK\r\n");
    }
    write.write_all(b"PSYNC ? -1\r\n").await.expect("it is up");
    let acknowledge = async {
        loop {
            write.write_all(b"REPLCONF ACK 999999999\r\n").await.expect("it is up");
            sleep(ms(20)).await;
        }
    };
    let mut discarded = tokio::io::sink();
    let discard = tokio::io::copy(&mut read, &mut discarded);
    tokio::select! {
        () = acknowledge => {}
        _ = discard => {}
    }
}

/// A renewal without an acknowledgement extends nothing: the promoted server may have an older
/// lease.
/// Guarantee: G1.
#[tokio::test]
async fn unreplicated_renewal_does_not_extend_the_lock() {
    let Some(group) = group(1).await else { return };
    let store = limits::redis().min_replicas(1, limits::SHORT).connect(&group.url()).await.expect("it is up");
    let locks = LockManager::builder(store).lease(Duration::from_secs(6)).build();
    let held = locks.lock(key()).wait(limits::BROKEN).await.expect("free");
    let acquired = held.held_lock().remaining();
    until("it passes", async || held.held_lock().remaining() < acquired / 4 * 3).await;
    until("renewals are acknowledged", async || held.held_lock().remaining() > acquired / 4 * 3).await;
    group.servers()[0].cut_replication().await;
    let lost = soon("its end", held.while_held(std::future::pending::<()>())).await.expect_err("it has ended");
    assert_eq!(lost, LockLost::Expired);
    assert_eq!(group.servers()[0].command(&["EXISTS", "lock:k"]).await.integer(), Some(1), "the master keeps it");
}

/// A managed Redis has one address, which leads to another server after a failover. The open
/// connections stay with the former master.
#[tokio::test]
async fn former_master_behind_one_address_is_left_before_a_call() {
    let Some(environment) = environment().await else { return };
    let locks = environment.instance("a").await;
    locks.lock(key()).await.expect("free").release().await.expect("it is up");
    let promoted = RedisServer::start().await;
    environment.proxy.redirect(promoted.address());
    let before = scripts(&environment.redis).await;
    environment.command(&["REPLICAOF", "127.0.0.1", &promoted.port().to_string()]).await;
    // Each connection is checked about once a second.
    until("it has left", async || {
        let clients = environment.command(&["CLIENT", "LIST", "TYPE", "normal"]).await;
        clients.text().is_some_and(|clients| clients.lines().count() == 1)
    })
    .await;
    locks.try_lock(key()).await.expect("free").release().await.expect("it is up");
    assert_eq!(scripts(&environment.redis).await, before, "no call at the former master");
}

/// The numbers of `docs/guide/topologies.md`.
#[tokio::test]
async fn replicas_cost_a_connection_and_a_shared_wait() {
    let Some(group) = group(1).await else { return };
    // Two to each sentinel.
    for (min_replicas, expected) in [(0, 3), (1, 4)] {
        let builder = limits::redis().min_replicas(min_replicas, limits::REPLICAS);
        let store = builder.connect(&group.url()).await.expect("it is up");
        let locks = LockManager::builder(store).lease(Duration::from_secs(2)).build();
        let held = locks.lock(key()).await.expect("free");
        until("connections", async || {
            let at_server = |client: &str| client.contains(" user=default ") && !client.contains(" flags=S ");
            let clients = group.servers()[0].command(&["CLIENT", "LIST"]).await;
            // One is of this command.
            let server = clients.text().map(|clients| clients.lines().filter(|client| at_server(client)).count());
            let clients = group.sentinel_command(0, &["CLIENT", "LIST"]).await;
            // The other sentinels have names.
            let of_store = |client: &str| client.contains(" name= ") && !client.contains("cmd=client");
            let sentinel = clients.text().map(|clients| clients.lines().filter(|client| of_store(client)).count());
            (server, sentinel) == (Some(expected + 1), Some(2))
        })
        .await;
        release(held).await;
    }

    let builder = limits::redis().min_replicas(1, limits::REPLICAS);
    let locks = LockManager::new(builder.connect(&group.url()).await.expect("it is up"));
    locks.lock(key()).await.expect("free").release().await.expect("it is up");
    let calls = async |command: &str| runs(&group.servers()[0], command).await;
    let (waits, scripts) = (calls("wait").await, calls("evalsha").await);
    for _ in 0..5 {
        locks.lock(key()).await.expect("free").release().await.expect("it is up");
    }
    assert_eq!(
        (calls("wait").await - waits, calls("evalsha").await - scripts),
        (5, 10),
        "one each, none for a release"
    );
    let waits = calls("wait").await;
    let replica = &group.servers()[1];
    replica.freeze();
    let acquire = |number| tokio::spawn(locks.lock(("n", number)).into_future());
    let mut requests = vec![acquire(0)];
    until("the first one waits for the replica", async || {
        let clients = group.servers()[0].command(&["INFO", "clients"]).await;
        clients.text().is_some_and(|clients| clients.contains("blocked_clients:1"))
    })
    .await;
    for number in 1..17 {
        // Longer than a call that lets others pass it.
        sleep(ms(if number < 5 { 5 } else { 0 })).await;
        requests.push(acquire(number));
    }
    until("all of them are known", async || locks.size().0 == 17).await;
    sleep(ms(5)).await;
    replica.thaw();
    let held: Vec<_> = join_all(requests).await.into_iter().map(|request| request.expect("no panic")).collect();
    // The first one was sent alone, and the others shared the next call.
    assert_eq!(calls("wait").await - waits, 2);
    assert!(held.iter().all(Result::is_ok));
    drop(held);
}

/// `WAIT` covers only what its connection has written. The offer was written by another client.
#[tokio::test]
async fn repeated_acquire_writes_even_if_it_extends_nothing() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let ids = AcquisitionIds::new("a", 1);
    let (id, queue) = (ids.next(), QueueConfig::new(ms(4_000), ms(60_000), 9));
    let acquire = async |lease| {
        let request = AcquireRequest::new(key(), id.clone(), lease, IfBusy::Fail, queue, limits::CALL);
        store.acquire_one(request).await.expect("a reply")
    };
    let granted = acquire(ms(30_000)).await;
    environment.command(&["CONFIG", "RESETSTAT"]).await;
    assert_eq!(acquire(ms(3_000)).await, granted);
    let stats = environment.command(&["INFO", "commandstats"]).await;
    assert!(stats.text().is_some_and(|stats| stats.contains("cmdstat_hset:calls=1,")), "{stats:?}");
}
