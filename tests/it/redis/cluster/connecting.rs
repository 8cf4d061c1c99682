//! Connecting to a Cluster: addresses, permissions, and the errors when a requirement is not met.

use std::{error::Error, future::IntoFuture, time::Duration};

use futures_util::future::join_all;
use tokio::{net::TcpListener, time::Instant};
use tower_lock::{
    LockError, LockManager, RedisStore,
    store::{ListRequest, LockStore, RedisConnectError, StoreErrorKind},
};
use tower_lock_testkit::{
    RedisCluster, RedisServer, Reply,
    locks::key,
    log::Log,
    wait::{ms, soon, until},
};

use super::{cluster, instance, is_available, key_at, keys_at, scripts};
use crate::connecting::{smallest_acl, user};

/// Acquires a key, and returns whether it has this prefix.
async fn locks_under(locks: &LockManager, cluster: &RedisCluster, prefix: &str) -> bool {
    let guard = locks.lock(key()).await.expect("free");
    let name = format!("{prefix}:k");
    let reply = cluster.command_for(&name, &["EXISTS", &name]).await;
    guard.release().await.expect("held");
    reply == Reply::Integer(1)
}

#[tokio::test]
async fn url_and_builder_name_the_nodes_of_a_cluster() {
    if !is_available() {
        return;
    }
    let cluster = RedisCluster::options().user("someone", "secret").start(3, 0).await;
    let url = format!("{}?prefix=shop", cluster.url());
    let locks = LockManager::connect(&url).await.expect("it is up").build();
    assert!(locks_under(&locks, &cluster, "shop").await);
    // Nothing listens at the first address.
    let gone = RedisServer::start().await.address();
    for (first, further) in [(cluster.addresses().remove(0), None), (gone.to_string(), Some(&cluster.addresses()[1]))] {
        let builder = RedisStore::builder().cluster(further);
        let store = builder.connect(&format!("redis://someone:secret@{first}")).await;
        let locks = LockManager::new(store.unwrap_or_else(|error| panic!("{first}: {error:?}")));
        assert!(locks_under(&locks, &cluster, "lock").await, "{first}");
    }
    let error = RedisStore::builder().cluster(["a"]).sentinel(["s"], "m").connect("redis://m").await;
    assert!(error.expect_err("one of both").to_string().ends_with("a Cluster has no sentinels"));
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

#[tokio::test]
async fn url_of_the_other_kind_is_named_in_the_error() {
    let Some(cluster) = cluster(1, 0).await else { return };
    let error = RedisStore::connect(&cluster.url_of(0)).await.expect_err("a node of a Cluster");
    assert!(matches!(error, RedisConnectError::IsCluster { .. }), "{error:?}");
    let text = whole(&error);
    assert!(text.contains("`redis+cluster://`") && text.contains(&cluster.addresses()[0]), "{text}");
    let single = RedisServer::start().await;
    let url = cluster_url("", &[single.address().to_string()]);
    let error = RedisStore::connect(&url).await.expect_err("a single server");
    assert!(matches!(error, RedisConnectError::NotCluster { .. }), "{error:?}");
    let text = whole(&error);
    assert!(text.contains("`redis://`") && text.contains(&single.address().to_string()), "{text}");
}

#[tokio::test]
async fn user_and_password_are_those_of_all_nodes() {
    if !is_available() {
        return;
    }
    let cluster = RedisCluster::options().user("ann", "s3cret").start(3, 0).await;
    let store = RedisStore::connect(&cluster.url()).await.expect("the user");
    assert!(!format!("{store:?}").contains("s3cret"), "{store:?}");
    works(&cluster, store).await;
    for (login, says) in [
        ("", "the URL has none: write `:password@` or"),
        ("ann:wr0ng@", "the server refused user `ann`"),
        (":wr0ng@", "the server refused user `default`"),
    ] {
        let url = cluster_url(login, &cluster.addresses());
        let started = Instant::now();
        let error = RedisStore::connect(&url).await.expect_err("not authenticated");
        for text in [whole(&error), format!("{error:?}")] {
            assert!(text.contains(says) && !text.contains("wr0ng"), "{login}: {text}");
            assert!(text.contains(&cluster.addresses()[0]), "{login}: {text}");
        }
        assert!(started.elapsed() < Duration::from_secs(2), "another try would not help");
        let locks = LockManager::new(RedisStore::connect_lazy(&url).expect("an address"));
        let mut text = String::new();
        until("the reason", async || {
            let error = locks.health().await.expect_err("not authenticated");
            text = format!("{} {error:?}", whole(&error));
            text.contains(says)
        })
        .await;
        assert!(!text.contains("wr0ng"), "{text}");
    }
}

#[tokio::test]
async fn named_nodes_that_are_down_are_left_out() {
    let Some(cluster) = cluster(3, 0).await else { return };
    let (dead, live) = (free_address().await, cluster.addresses());
    let store = RedisStore::connect(&cluster_url("", &[dead.clone(), live[1].clone()])).await;
    works(&cluster, store.expect("one of them is up")).await;
    let url = cluster_url("ann:s3cret@", &[dead.clone(), free_address().await]);
    let started = Instant::now();
    let connect = RedisStore::builder().connect_timeout(ms(300)).connect(&url);
    let text = format!("{:?}", soon("an error", connect).await.expect_err("both are down"));
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(text.contains(&dead) && text.contains("refused") && !text.contains("s3cret"), "{text}");
    // Nothing replies.
    (0..3).for_each(|node| cluster.freeze(node));
    let url = cluster.url();
    let connect = RedisStore::builder().connect_timeout(ms(300)).connect(&url);
    let text = format!("{:?}", soon("an error", connect).await.expect_err("all are stopped"));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert!(text.contains(&live[0]) && text.contains("timed out"), "{text}");
}

#[tokio::test]
async fn lazy_store_works_when_the_cluster_is_up() {
    let Some(cluster) = cluster(3, 0).await else { return };
    (0..3).for_each(|node| cluster.freeze(node));
    let log = Log::default();
    let _listening = log.listen();
    let locks = LockManager::new(RedisStore::connect_lazy(&cluster.url()).expect("an address"));
    // An outage of all nodes is no failover: a request that waits is rejected, too.
    let gone = cluster_url("", &[free_address().await, free_address().await]);
    let gone = LockManager::new(RedisStore::connect_lazy(&gone).expect("an address"));
    for locks in [&locks, &gone] {
        let waits = (0..4).map(|number| locks.lock(("n", number)).wait(Duration::from_secs(60)).into_future());
        for refused in join_all(waits).await {
            let Err(LockError::Store(error)) = refused else { panic!("{refused:?}") };
            assert!(matches!(error.kind(), StoreErrorKind::Timeout | StoreErrorKind::Unavailable), "{error:?}");
        }
    }
    locks.health().await.expect_err("nothing replies");
    until("a warning", async || log.text().contains("no node of the Redis Cluster replies")).await;
    (0..3).for_each(|node| cluster.thaw(node));
    until("it is ready", async || locks.health().await.is_ok()).await;
    until("a line of the log", async || log.text().contains("a node of the Redis Cluster replies again")).await;
    for node in 0..3 {
        locks.lock(key_at(&cluster, node).await).await.expect("free").release().await.expect("held");
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
    works(&cluster, RedisStore::connect(&url).await.expect("it is enough")).await;
    // Each of them is tried.
    for missing in ["+cluster|slots", "+cluster|info", "+asking"] {
        let rest: Vec<_> = rules.iter().filter(|rule| *rule != missing).cloned().collect();
        assert_eq!(rest.len() + 1, rules.len(), "{missing} is in {rules:?}");
        let url = cluster_user(&cluster, &rest).await;
        let error = RedisStore::connect(&url).await.expect_err(missing);
        assert!(matches!(error, RedisConnectError::PermissionDenied { .. }), "{missing}: {error:?}");
        let (text, name) = (whole(&error).to_lowercase(), missing.trim_start_matches('+'));
        assert!(text.contains(name) && text.contains("user `locks`") && !text.contains("secret"), "{text}");
    }
    // A half moved slot needs all of them.
    let url = cluster_user(&cluster, &rules).await;
    let locks = LockManager::new(RedisStore::connect(&url).await.expect("it is enough"));
    let key = key_at(&cluster, 0).await;
    cluster.begin_move(RedisCluster::slot(&format!("lock:{}", key.as_str())), 0, 1).await;
    locks.lock(key.clone()).await.expect("free").release().await.expect("held");
    locks.once(key).run(async |_| {}).await.expect("free");
}

/// `CLUSTER SLOTS` has no host then, and neither has `MOVED`.
#[tokio::test]
async fn nodes_without_a_host_are_at_that_of_the_named_one() {
    if !is_available() {
        return;
    }
    let options = RedisCluster::options().set("cluster-preferred-endpoint-type", "unknown-endpoint");
    let cluster = options.start(2, 0).await;
    let slots = cluster.command(0, &["CLUSTER", "SLOTS"]).await;
    assert_eq!(slots.items()[0].items()[2].items()[0], Reply::Nil, "{slots:?}");
    follows_moves(cluster).await;
}

#[tokio::test]
async fn nodes_are_reached_by_their_host_names() {
    if !is_available() {
        return;
    }
    let options = RedisCluster::options().set("cluster-announce-hostname", "localhost");
    let cluster = options.set("cluster-preferred-endpoint-type", "hostname").start(2, 0).await;
    let slots = cluster.command(0, &["CLUSTER", "SLOTS"]).await;
    assert_eq!(slots.items()[0].items()[2].items()[0].text(), Some("localhost"), "{slots:?}");
    follows_moves(cluster).await;
}

async fn follows_moves(mut cluster: RedisCluster) {
    cluster.add_empty_master().await;
    let locks = LockManager::new(RedisStore::connect(&cluster_url("", &cluster.addresses()[..1])).await.expect("up"));
    for key in [key_at(&cluster, 0).await, key_at(&cluster, 1).await] {
        let slot = RedisCluster::slot(&format!("lock:{}", key.as_str()));
        let from = cluster.owner_of_slot(slot).await;
        locks.lock(key.clone()).await.expect("free").release().await.expect("held");
        cluster.begin_move(slot, from, 2).await;
        let held = locks.lock(key.clone()).await.expect("free, by ASK");
        cluster.move_keys(slot, from, 2).await.expect("no key is on both nodes");
        cluster.finish_move(slot, from, 2).await;
        held.release().await.expect("held, by MOVED");
        locks.lock(key).await.expect("free").release().await.expect("held");
    }
    assert!(scripts(&cluster, 2).await >= 4);
    locks.health().await.expect("all are up");
}

/// Guarantee: G5.
#[tokio::test]
async fn master_that_joins_offers_its_keys_to_waiters() {
    let Some(mut cluster) = cluster(2, 0).await else { return };
    let instances = [instance(&cluster, "a").await, instance(&cluster, "b").await];
    let new = cluster.add_empty_master().await;
    let key = key_at(&cluster, 0).await;
    let slot = RedisCluster::slot(&format!("lock:{}", key.as_str()));
    let mut guard = instances[0].lock(key.clone()).await.expect("free");
    cluster.move_slot(slot, 0, new).await.expect("moved");
    let id = cluster.command(new, &["CLUSTER", "MYID"]).await.text().expect("an id").to_owned();
    let channels = format!("tower-lock:lock:in:{id}:*");
    until("both are subscribed there", async || {
        cluster.command(new, &["PUBSUB", "CHANNELS", &channels]).await.items().len() == 2
    })
    .await;
    let (before, began) = (scripts(&cluster, new).await, Instant::now());
    for turn in 0..20 {
        let next = &instances[(turn + 1) % 2];
        let waiting = tokio::spawn(next.lock(key.clone()).into_future());
        until("queued", async || cluster.command(new, &["KEYS", "tower-lock:lock:q:*"]).await.items().len() == 1).await;
        guard.release().await.expect("held");
        guard = soon("a grant", waiting).await.expect("no panic").expect("a grant");
    }
    let (count, polls) = (scripts(&cluster, new).await - before, 2 * (began.elapsed().as_secs() + 1));
    // Each waiter enqueues, and takes its offer. The first texts of the scripts are sent twice.
    assert!(count <= 3 * 20 + polls + 4, "{count} scripts and {polls} polls");
    guard.release().await.expect("held");

    // It leaves.
    cluster.move_slot(slot, new, 0).await.expect("moved");
    for node in 0..2 {
        cluster.command(node, &["CLUSTER", "FORGET", &id]).await;
    }
    cluster.kill(new);
    for locks in &instances {
        locks.lock(key.clone()).await.expect("free").release().await.expect("held");
        until("it is ready", async || locks.health().await.is_ok()).await;
    }
}

/// It had keys of a slot whose move was stopped, and is not asked any more.
#[tokio::test]
async fn listing_needs_no_node_that_has_left() {
    let Some(mut cluster) = cluster(2, 0).await else { return };
    let new = cluster.add_empty_master().await;
    let store = super::store(&cluster).await;
    let locks = LockManager::new(store.clone());
    let keys = keys_at(&cluster, 0, 2).await;
    let slot = RedisCluster::slot(&format!("lock:{}", keys[0].as_str()));
    cluster.begin_move(slot, 0, new).await;
    locks.lock(keys[0].clone()).await.expect("free").release().await.expect("held");
    cluster.stop_move(slot, 0, new).await;
    let id = cluster.command(new, &["CLUSTER", "MYID"]).await.text().expect("an id").to_owned();
    for node in 0..2 {
        cluster.command(node, &["CLUSTER", "FORGET", &id]).await;
    }
    cluster.kill(new);
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

#[tokio::test]
async fn nodes_without_slots_are_no_cluster_yet() {
    let Some(cluster) = cluster(1, 0).await else { return };
    // Redis refuses it while there are keys.
    cluster.command(0, &["FLUSHALL"]).await;
    assert_eq!(cluster.command(0, &["CLUSTER", "FLUSHSLOTS"]).await, Reply::Status("OK".to_owned()));
    let url = cluster.url();
    let error = RedisStore::builder().connect_timeout(ms(300)).connect(&url).await.expect_err("no slot has a master");
    let text = format!("{error:?}");
    assert!(text.contains("`redis-cli --cluster create`") && text.contains(&cluster.addresses()[0]), "{text}");
}
