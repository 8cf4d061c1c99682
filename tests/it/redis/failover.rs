//! A failover by Sentinel, on real servers.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::sleep,
};
use tower_lock::{
    LockError, LockGuard, LockLost, LockManager, RedisStore,
    store::{AcquireRequest, AcquisitionIds, IfBusy, QueueConfig, StoreErrorKind},
};
use tower_lock_testkit::store::StoreExt;
use tower_lock_testkit::{
    RedisServer, Reply, SentinelGroup,
    locks::key,
    wait::{ms, soon, until},
};

use crate::support::{environment, instance_of as instance, sentinel_group as group};

/// In a failover the release may fail at first. It is repeated then.
async fn release(guard: LockGuard) {
    if let Err(error) = guard.release().await {
        assert_eq!(error.kind(), StoreErrorKind::Failover, "{error}");
    }
}

/// The number of scripts that a server has executed.
async fn scripts(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]).await;
    let calls = stats.text().into_iter().flat_map(str::lines).filter_map(|line| {
        let rest = line.strip_prefix("cmdstat_eval")?;
        rest.trim_start_matches("sha").strip_prefix(":calls=")?.split(',').next()?.parse::<u64>().ok()
    });
    calls.sum()
}

/// Guarantee: G5, G6.
#[tokio::test]
async fn waiters_go_on_in_their_order_at_the_promoted_server() {
    let Some(group) = group(2).await else { return };
    let holder = instance(&group, "holder").await;
    let held = holder.lock(key()).await.expect("free");
    let mut token = held.fencing_token();
    let mut waiters = Vec::new();
    for (ahead, name) in ["a", "b", "c"].into_iter().enumerate() {
        let locks = instance(&group, name).await;
        waiters.push(tokio::spawn(locks.lock(key()).wait(Duration::from_secs(60)).into_future()));
        until("it is queued", async || holder.inspect(key()).await.is_ok_and(|key| key.waiting == ahead + 1)).await;
    }
    let master = &group.servers()[0];
    // The replicas have all of it.
    assert_eq!(master.command(&["WAIT", "2", "5000"]).await.integer(), Some(2));
    master.kill();
    let promoted = group.promoted(master).await;
    // A process that has not yet subscribed there would lose its position.
    let subscribed = async || promoted.command(&["PUBSUB", "CHANNELS", "tower-lock:lock:in:*"]).await.items().len();
    until("all processes have followed", async || subscribed().await == 4).await;
    // A caller repeats a call that was refused as not started.
    until("the holder is known", async || holder.inspect(key()).await.is_ok_and(|key| key.holder.is_some())).await;
    assert!(!held.held_lock().remaining().is_zero());
    release(held).await;
    for waiter in waiters {
        let next = soon("a grant", waiter).await.expect("no panic").expect("a grant");
        assert!(next.fencing_token() > token);
        token = next.fencing_token();
        release(next).await;
    }
    assert!(scripts(promoted).await > 0);
}

/// It has the role of a master, and would grant keys that are held at the other one.
/// Guarantee: G1.
#[tokio::test]
async fn former_master_is_left_within_two_seconds() {
    for resumed in [false, true] {
        let Some(group) = group(1).await else { return };
        let locks = instance(&group, "a").await;
        locks.lock(key()).await.expect("free").release().await.expect("it is up");
        let old = &group.servers()[0];
        if resumed {
            old.freeze();
        } else {
            SentinelGroup::isolate(old).await;
        }
        let promoted = group.promoted(old).await;
        if resumed {
            old.thaw();
        }
        sleep(Duration::from_secs(2)).await;
        let before = (scripts(old).await, scripts(promoted).await);
        for _ in 0..20 {
            release(locks.lock(key()).wait(Duration::from_secs(60)).await.expect("a grant")).await;
        }
        assert_eq!(scripts(old).await, before.0, "no call at the former master, resumed: {resumed}");
        assert!(scripts(promoted).await >= before.1 + 40);
    }
}

/// Guarantee: G6.
#[tokio::test]
async fn planned_failover_rejects_no_request_that_waits() {
    let Some(group) = group(2).await else { return };
    let locks = instance(&group, "a").await;
    let is_over = Arc::new(AtomicBool::new(false));
    let requests = tokio::spawn({
        let is_over = Arc::clone(&is_over);
        async move {
            let mut refused = Vec::new();
            while !is_over.load(SeqCst) {
                // Longer than a lease: the promoted server may lack the release before.
                match locks.lock(key()).wait(Duration::from_secs(60)).await {
                    Ok(guard) => drop(guard.release().await),
                    Err(error) => refused.push(error),
                }
                sleep(ms(5)).await;
            }
            refused
        }
    });
    let old = &group.servers()[0];
    until("a request", async || scripts(old).await > 10).await;
    group.fail_over().await;
    let promoted = group.promoted(old).await;
    let earlier = scripts(promoted).await;
    until("requests go on", async || scripts(promoted).await > earlier + 20).await;
    until("the former master is a replica", async || {
        let role = old.try_command(&["ROLE"]).await;
        role.is_ok_and(|role| role.items().first().and_then(Reply::text) == Some("slave"))
    })
    .await;
    is_over.store(true, SeqCst);
    let refused = soon("the requests", requests).await.expect("no panic");
    assert!(refused.is_empty(), "{refused:?}");
}

/// Requests that arrive while an acquire waits for the replicas share the next one, and wait longer
/// than they may while the master hangs.
/// Guarantee: G6.
#[tokio::test]
async fn failover_rejects_no_request_that_waits_for_replicas() {
    let Some(group) = group(2).await else { return };
    // A slow call of the promoted server is no overload.
    let builder = RedisStore::builder().min_replicas(1, ms(100)).call_timeout(ms(1_500));
    let locks = LockManager::new(builder.connect(&group.url()).await.expect("it is up"));
    let is_over = Arc::new(AtomicBool::new(false));
    let requests = (0..32).map(|number| {
        let (locks, is_over) = (locks.clone(), Arc::clone(&is_over));
        tokio::spawn(async move {
            let mut refused = Vec::new();
            while !is_over.load(SeqCst) {
                // Longer than a lease: the promoted server may lack the release before.
                match locks.lock(("n", number)).wait(Duration::from_secs(60)).await {
                    Ok(guard) => drop(guard.release().await),
                    Err(error) => refused.push(error),
                }
                sleep(ms(5)).await;
            }
            refused
        })
    });
    let requests: Vec<_> = requests.collect();
    let old = &group.servers()[0];
    until("a request", async || scripts(old).await > 100).await;
    old.freeze();
    let promoted = group.promoted(old).await;
    old.thaw();
    let earlier = scripts(promoted).await;
    until("requests go on", async || scripts(promoted).await > earlier + 100).await;
    is_over.store(true, SeqCst);
    let ended = soon("the requests", join_all(requests)).await;
    let refused: Vec<_> = ended.into_iter().flat_map(|refused| refused.expect("no panic")).collect();
    assert!(refused.is_empty(), "{} of them: {:?}", refused.len(), refused.first());
}

/// Each failover of a master whose newest writes no replica has.
/// Guarantee: G1.
#[tokio::test]
async fn unreplicated_grant_counts_only_without_min_replicas() {
    for min_replicas in [0, 1] {
        let Some(group) = group(2).await else { return };
        let builder = || RedisStore::builder().min_replicas(min_replicas, ms(100));
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
        let second = b.lock(key()).wait(Duration::from_secs(if min_replicas == 0 { 60 } else { 0 })).await;
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
            let again = b.lock(key()).wait(Duration::from_secs(60)).await.expect("the other replica acknowledges");
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
    let store = RedisStore::builder().min_replicas(2, ms(200)).connect(&group.url()).await.expect("both are up");
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
    release(locks.lock(key()).wait(Duration::from_secs(60)).await.expect("both replicas have it")).await;
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
    let store = RedisStore::builder().min_replicas(1, ms(100)).connect(&group.url()).await.expect("it is up");
    let locks = LockManager::builder(store).lease(Duration::from_secs(3)).build();
    let held = locks.lock(key()).await.expect("free");
    sleep(Duration::from_secs(4)).await;
    assert!(!held.held_lock().remaining().is_zero(), "renewals are acknowledged");
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
    sleep(Duration::from_secs(2)).await;
    locks.try_lock(key()).await.expect("free").release().await.expect("it is up");
    assert_eq!(scripts(&environment.redis).await, before, "no call at the former master");
}

/// The numbers of `docs/guide/topologies.md`.
#[tokio::test]
async fn acquires_at_the_same_time_share_one_wait_for_replicas() {
    let Some(group) = group(1).await else { return };
    let builder = RedisStore::builder().call_timeout(ms(5_000)).min_replicas(1, ms(2_500));
    let locks = LockManager::new(builder.connect(&group.url()).await.expect("it is up"));
    locks.lock(key()).await.expect("free").release().await.expect("it is up");
    let calls = async |command: &str| {
        let stats = group.servers()[0].command(&["INFO", "commandstats"]).await;
        let line = stats
            .text()
            .and_then(|text| text.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls="))));
        line.and_then(|line| line.split(',').next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    let (waits, scripts) = (calls("wait").await, calls("evalsha").await);
    for _ in 0..20 {
        locks.lock(key()).await.expect("free").release().await.expect("it is up");
    }
    assert_eq!(
        (calls("wait").await - waits, calls("evalsha").await - scripts),
        (20, 40),
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
    for number in 1..65 {
        // Longer than a call that lets others pass it.
        sleep(ms(if number < 5 { 5 } else { 0 })).await;
        requests.push(acquire(number));
    }
    sleep(ms(5)).await;
    replica.thaw();
    let held: Vec<_> = join_all(requests).await.into_iter().map(|request| request.expect("no panic")).collect();
    // The first one was sent alone, and the others shared the next call.
    assert_eq!(calls("wait").await - waits, 2);
    assert!(held.iter().all(Result::is_ok));
    drop(held);
}

/// The numbers of `docs/guide/topologies.md`.
#[tokio::test]
async fn store_has_four_connections_and_two_to_each_sentinel() {
    let Some(group) = group(1).await else { return };
    for (min_replicas, expected) in [(0, 3), (1, 4)] {
        let builder = RedisStore::builder().min_replicas(min_replicas, ms(100));
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
}

/// `WAIT` covers only what its connection has written. The offer was written by another client.
#[tokio::test]
async fn repeated_acquire_writes_even_if_it_extends_nothing() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let ids = AcquisitionIds::new("a", 1);
    let (id, queue) = (ids.next(), QueueConfig::new(ms(4_000), ms(60_000), 9));
    let acquire = async |lease| {
        let request = AcquireRequest::new(key(), id.clone(), lease, IfBusy::Fail, queue, ms(5_000));
        store.acquire_one(request).await.expect("a reply")
    };
    let granted = acquire(ms(30_000)).await;
    environment.command(&["CONFIG", "RESETSTAT"]).await;
    assert_eq!(acquire(ms(3_000)).await, granted);
    let stats = environment.command(&["INFO", "commandstats"]).await;
    assert!(stats.text().is_some_and(|stats| stats.contains("cmdstat_hset:calls=1,")), "{stats:?}");
}
