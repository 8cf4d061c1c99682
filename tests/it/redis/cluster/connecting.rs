//! Connecting to a Cluster: addresses, permissions, and the errors when a requirement is not met.

use std::{error::Error, future::IntoFuture, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::{net::TcpListener, time::Instant};
use tower_lock::{
    LockError, LockManager, RedisStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, Credentials, IfBusy, ListRequest, LockStore, QueueConfig,
        RedisConnectError, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreErrorKind,
    },
};
use tower_lock_testkit::{
    RedisCluster, RedisServer, Reply, limits,
    locks::key,
    log::Log,
    store::StoreExt,
    wait::{soon, until},
};

use super::{cluster, instance, is_available, key_at, keys_at, name_of, scripts};
use crate::connecting::{smallest_acl, user};

/// Acquires a key, and returns whether it has this prefix.
async fn locks_under(locks: &LockManager, cluster: &RedisCluster, prefix: &str) -> bool {
    let guard = locks.lock(key()).await.expect("free");
    let name = format!("{prefix}:k");
    let reply = cluster.command_for(&name, &["EXISTS", &name]).await;
    guard.release().await.expect("held");
    reply == Reply::Integer(1)
}

fn whole(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

/// Locks at each master.
async fn works(cluster: &RedisCluster, store: RedisStore) {
    let locks = LockManager::new(store);
    for master in cluster.masters().await {
        let key = key_at(cluster, master).await;
        locks.lock(key).await.expect("free").release().await.expect("held");
    }
    locks.health().await.expect("all masters are up");
}

fn cluster_url(login: &str, addresses: &[String]) -> String {
    format!("redis+cluster://{login}{}", addresses.join(","))
}

async fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound").to_string()
}

/// Waits until a store without a connection names this reason. Returns all that its error says.
async fn reason(url: &str, says: &str) -> String {
    let locks = LockManager::new(RedisStore::builder().connect_lazy(url).expect("an address"));
    let mut text = String::new();
    until(says, async || {
        text = format!("{:?}, {:?}", locks.try_lock(key()).await.expect_err("not connected"), locks.health().await);
        text.contains(says)
    })
    .await;
    text
}

#[tokio::test]
async fn url_names_the_nodes_and_the_user_of_a_cluster() {
    if !is_available() {
        return;
    }
    let cluster = RedisCluster::options().user("ann", "s3cret").start(2, 0).await;
    let url = format!("{}?prefix=shop", cluster.url());
    let locks = LockManager::connect(&url).await.expect("it is up").build();
    assert!(locks_under(&locks, &cluster, "shop").await);
    // Nothing listens at the first address.
    let gone = free_address().await;
    for (first, further) in [(cluster.addresses().remove(0), None), (gone, Some(&cluster.addresses()[1]))] {
        let addresses: Vec<_> = [&first].into_iter().chain(further).cloned().collect();
        let store = limits::redis().connect(&cluster_url("ann:s3cret@", &addresses)).await;
        let store = store.unwrap_or_else(|error| panic!("{first}: {error:?}"));
        assert!(!format!("{store:?}").contains("s3cret"), "{store:?}");
        works(&cluster, store).await;
    }
    let builder = limits::redis().credentials(async || Ok(Credentials::new("ann", "s3cret")));
    works(&cluster, builder.connect(&cluster_url("", &cluster.addresses())).await.expect("the login of each node"))
        .await;
    for (login, says) in [
        ("", "the URL has none: write `:password@` or"),
        ("ann:wr0ng@", "the server refused user `ann`"),
        (":wr0ng@", "the server refused user `default`"),
    ] {
        let url = cluster_url(login, &cluster.addresses());
        let started = Instant::now();
        let error = limits::redis().connect(&url).await.expect_err("not authenticated");
        assert!(started.elapsed() < limits::CONNECT, "another try would not help");
        for text in [whole(&error), format!("{error:?}")] {
            assert!(text.contains(says) && !text.contains("wr0ng"), "{login}: {text}");
            assert!(text.contains(&cluster.addresses()[0]), "{login}: {text}");
        }
        assert!(!reason(&url, says).await.contains("wr0ng"));
    }
}

#[tokio::test]
async fn url_of_the_other_kind_or_without_slots_is_named() {
    let Some(cluster) = cluster(1, 0).await else { return };
    let node = &cluster.addresses()[0];
    let error = limits::redis().connect(&cluster.url_of(0)).await.expect_err("a node of a Cluster");
    assert!(matches!(error, RedisConnectError::IsCluster { .. }), "{error:?}");
    let text = whole(&error);
    assert!(text.contains("`redis+cluster://`") && text.contains(node), "{text}");
    let single = RedisServer::start().await;
    let url = cluster_url("", &[single.address().to_string()]);
    let error = limits::redis().connect(&url).await.expect_err("a single server");
    assert!(matches!(error, RedisConnectError::NotCluster { .. }), "{error:?}");
    let text = whole(&error);
    assert!(text.contains("`redis://`") && text.contains(&single.address().to_string()), "{text}");

    // Redis refuses it while there are keys.
    cluster.command(0, &["FLUSHALL"]).await;
    assert_eq!(cluster.command(0, &["CLUSTER", "FLUSHSLOTS"]).await, Reply::Status("OK".to_owned()));
    let lazy = LockManager::new(limits::redis().connect_lazy(&cluster.url()).expect("an address"));
    let error = lazy.health().await.expect_err("no node has slots");
    assert_eq!(error.kind(), StoreErrorKind::Failover, "{error:?}");
    let text = reason(&cluster.url(), "`redis-cli --cluster create`").await;
    assert!(text.contains(node), "{text}");
}

#[tokio::test]
async fn nodes_that_are_down_are_left_out_until_they_are_back() {
    let Some(cluster) = cluster(2, 0).await else { return };
    let (dead, live) = (free_address().await, cluster.addresses());
    let store = limits::redis().connect(&cluster_url("", &[dead.clone(), live[1].clone()])).await;
    works(&cluster, store.expect("one of them is up")).await;
    let text = reason(&cluster_url("ann:s3cret@", &[dead.clone(), free_address().await]), "refused").await;
    assert!(text.contains(&dead) && !text.contains("s3cret"), "{text}");

    // Nothing replies.
    (0..2).for_each(|node| cluster.freeze(node));
    let url = cluster.url();
    let connect = RedisStore::builder().connect_timeout(limits::SHORT).connect(&url);
    let text = format!("{:?}", soon("an error", connect).await.expect_err("all are stopped"));
    assert!(text.contains(&live[0]) && text.contains("timed out"), "{text}");
    let log = Log::default();
    let _listening = log.listen();
    let short = || RedisStore::builder().call_timeout(limits::SHORT);
    let locks = LockManager::new(short().connect_lazy(&url).expect("an address"));
    let gone = LockManager::new(short().connect_lazy(&cluster_url("", &[dead])).expect("an address"));
    for locks in [&locks, &gone] {
        let calls = (0..4).map(|number| locks.try_lock(("n", number)).into_future());
        for refused in join_all(calls).await {
            let Err(LockError::Store(error)) = refused else { panic!("{refused:?}") };
            assert!(matches!(error.kind(), StoreErrorKind::Timeout | StoreErrorKind::Unavailable), "{error:?}");
        }
    }
    locks.health().await.expect_err("nothing replies");
    let warning = |line: &str| line.contains("no node of the Redis Cluster replies") && line.contains(&live[0]);
    until("a warning", async || log.text().lines().any(warning)).await;
    (0..2).for_each(|node| cluster.thaw(node));
    until("it is ready", async || locks.health().await.is_ok()).await;
    until("a line of the log", async || log.text().contains("a node of the Redis Cluster replies again")).await;
    for node in 0..2 {
        let key = key_at(&cluster, node).await;
        until("it works", async || locks.try_lock(key.clone()).await.is_ok()).await;
    }
}

/// The ACL of the guide.
pub(super) fn smallest_cluster_acl() -> Vec<String> {
    let docs = include_str!("../../../../docs/guide/redis-in-production.md");
    let (_, rest) = docs.split_once("A Cluster needs").expect("the rules for a Cluster");
    let rules = rest.split_once("\n`'").or_else(|| rest.split_once(" `'")).expect("rules").1;
    let rules = rules.split('`').next().expect("their end");
    let rules = rules.split_whitespace().map(|rule| rule.trim_matches('\'').to_owned());
    smallest_acl().into_iter().chain(rules).collect()
}

pub(super) async fn cluster_user(cluster: &RedisCluster, rules: &[String]) -> String {
    for node in 0..cluster.addresses().len() {
        user(cluster.node(node), rules).await;
    }
    cluster_url("locks:secret@", &cluster.addresses())
}

#[tokio::test]
async fn smallest_acl_for_a_cluster_suffices() {
    let Some(cluster) = cluster(2, 0).await else { return };
    let rules = smallest_cluster_acl();
    let url = cluster_user(&cluster, &rules).await;
    works(&cluster, limits::redis().connect(&url).await.expect("it is enough")).await;
    // Each of them is tried.
    for missing in ["+cluster|slots", "+cluster|info", "+cluster|myid", "+asking"] {
        let rest: Vec<_> = rules.iter().filter(|rule| *rule != missing).cloned().collect();
        assert_eq!(rest.len() + 1, rules.len(), "{missing} is in {rules:?}");
        let url = cluster_user(&cluster, &rest).await;
        let error = limits::redis().connect(&url).await.expect_err(missing);
        assert!(matches!(error, RedisConnectError::PermissionDenied { .. }), "{missing}: {error:?}");
        let (text, name) = (whole(&error).to_lowercase(), missing.trim_start_matches('+'));
        assert!(text.contains(name) && text.contains("user `locks`") && !text.contains("secret"), "{text}");
    }
    // The renewal of a lock that has moved needs all of them.
    let url = cluster_user(&cluster, &rules).await;
    let store = Arc::new(limits::redis().connect(&url).await.expect("it is enough"));
    let (key, id) = (key_at(&cluster, 0).await, AcquisitionIds::new("a", 1).next());
    let held = LockManager::new(Arc::clone(&store)).lock(key.clone()).await.expect("free");
    held.release().await.expect("held");
    let terms = QueueConfig::new(limits::CALL, limits::CALL, 1);
    let request = AcquireRequest::new(key.clone(), id.clone(), limits::BROKEN, IfBusy::Fail, terms, limits::CALL);
    assert!(matches!(store.acquire_one(request).await, Ok(AcquireReply::Granted { .. })));
    let name = name_of(&key);
    cluster.begin_move(RedisCluster::slot(&name), 0, 1).await;
    cluster.migrate(0, 1, &[&name]).await.expect("it is moved");
    let renewed = store.renew(vec![RenewRequest::new(key, id, limits::BROKEN)]).await;
    assert_eq!(renewed.expect("a reply"), [RenewReply::Extended]);
}

/// With `unknown-endpoint`, `CLUSTER SLOTS` has no host, and neither has `MOVED`: it is that of the
/// named node.
#[tokio::test]
async fn nodes_are_reached_by_host_names_and_without_a_host() {
    let Some(mut cluster) = cluster(2, 0).await else { return };
    let new = cluster.add_empty_master().await;
    for (kind, host) in [("unknown-endpoint", Reply::Nil), ("hostname", Reply::Bulk("localhost".into()))] {
        for node in 0..=new {
            cluster.command(node, &["CONFIG", "SET", "cluster-announce-hostname", "localhost"]).await;
            cluster.command(node, &["CONFIG", "SET", "cluster-preferred-endpoint-type", kind]).await;
        }
        until("all nodes say so", async || {
            for node in 0..=new {
                let slots = cluster.command(node, &["CLUSTER", "SLOTS"]).await;
                if slots.items().iter().any(|slots| slots.items()[2].items()[0] != host) {
                    return false;
                }
            }
            true
        })
        .await;
        let store = limits::redis().connect(&cluster_url("", &cluster.addresses()[..1])).await.expect("up");
        let (store, terms) = (Arc::new(store), QueueConfig::new(limits::CALL, limits::CALL, 1));
        let locks = LockManager::new(Arc::clone(&store));
        for from in 0..2 {
            let (key, before) = (key_at(&cluster, from).await, scripts(&cluster, new).await);
            let slot = RedisCluster::slot(&format!("lock:{}", key.as_str()));
            let (id, lease) = (AcquisitionIds::new("a", 1).next(), limits::BROKEN);
            let request = AcquireRequest::new(key.clone(), id.clone(), lease, IfBusy::Fail, terms, limits::CALL);
            assert!(matches!(store.acquire_one(request).await, Ok(AcquireReply::Granted { .. })));
            cluster.begin_move(slot, from, new).await;
            cluster.move_keys(slot, from, new).await.expect("no key is on both nodes");
            let renewed = store.renew(vec![RenewRequest::new(key.clone(), id.clone(), lease)]).await;
            assert_eq!(renewed.expect("a reply"), [RenewReply::Extended], "by ASK");
            cluster.finish_move(slot, from, new).await;
            let release = ReleaseRequest::new(key.clone(), id, Duration::ZERO, terms);
            assert_eq!(store.release_one(release).await.expect("a reply"), ReleaseReply::Freed, "by MOVED");
            locks.lock(key).await.expect("free").release().await.expect("held");
            assert!(scripts(&cluster, new).await >= before + 4, "{kind}");
        }
        locks.health().await.expect("all are up");
    }
}

/// Guarantee: G5.
#[tokio::test]
async fn master_that_joins_offers_its_keys_and_may_leave() {
    let Some(mut cluster) = cluster(2, 0).await else { return };
    let instances = [instance(&cluster, "a").await, instance(&cluster, "b").await];
    let new = cluster.add_empty_master().await;
    let keys = keys_at(&cluster, 0, 2).await;
    let slot = RedisCluster::slot(&name_of(&keys[0]));
    let mut guard = instances[0].lock(keys[0].clone()).await.expect("free");
    cluster.move_slot(slot, 0, new).await.expect("moved");
    let id = cluster.command(new, &["CLUSTER", "MYID"]).await.text().expect("an id").to_owned();
    let channels = format!("tower-lock:lock:in:{id}:*");
    until("both are subscribed there", async || {
        cluster.command(new, &["PUBSUB", "CHANNELS", &channels]).await.items().len() == 2
    })
    .await;
    let (before, began) = (scripts(&cluster, new).await, Instant::now());
    const TURNS: u64 = 12;
    for next in instances.iter().rev().cycle().take(12) {
        let waiting = tokio::spawn(next.lock(keys[0].clone()).into_future());
        until("queued", async || cluster.command(new, &["KEYS", "tower-lock:lock:q:*"]).await.items().len() == 1).await;
        guard.release().await.expect("held");
        guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
    }
    let (count, polls) = (scripts(&cluster, new).await - before, 2 * (began.elapsed().as_secs() + 1));
    // Each waiter enqueues, and takes its offer. Each instance sends the texts of acquire, release
    // and their variants once more.
    assert!(count <= 3 * TURNS + polls + 8, "{count} scripts and {polls} polls");
    guard.release().await.expect("held");

    let store = super::store(&cluster).await;
    let locks = LockManager::new(store.clone());
    cluster.move_slot(slot, new, 0).await.expect("moved");
    for node in 0..2 {
        cluster.command(node, &["CLUSTER", "FORGET", &id]).await;
    }
    cluster.kill(new);
    for locks in &instances {
        locks.lock(keys[0].clone()).await.expect("free").release().await.expect("held");
        until("it is ready", async || locks.health().await.is_ok()).await;
    }
    let _held = locks.lock(keys[1].clone()).await.expect("free");
    let listed = async || {
        let (mut entries, mut request) = (Vec::new(), ListRequest::new(100));
        loop {
            let page = store.list(request).await?;
            entries.extend(page.entries);
            let Some(next) = page.next else { return Ok::<_, tower_lock::store::StoreError>(entries) };
            request = ListRequest::new(100).after(next);
        }
    };
    until("a listing", async || listed().await.is_ok_and(|entries| entries.len() == 1)).await;
}
