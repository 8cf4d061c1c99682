//! The servers of a store, at its start and later.

use futures_util::future::join_all;
use tower_lock::{LockManager, RedlockStore, store::RedisConnectError};
use tower_lock_testkit::{Proxy, RedisServer, limits, locks::key, wait::until};

use super::{Servers, servers};

async fn refused(urls: &[String]) -> String {
    let error = limits::redlock().connect(urls).await.expect_err("refused");
    assert!(matches!(error, RedisConnectError::NotIndependent { .. }), "{error}");
    error.to_string()
}

#[tokio::test]
async fn store_has_an_odd_number_of_servers_from_3_to_9() {
    let url = |number: usize| format!("redis://127.0.0.{number}");
    for count in [0, 1, 2, 4, 6, 8, 10, 11] {
        let error = RedlockStore::builder().connect_lazy((1..=count).map(url)).expect_err("refused");
        assert!(matches!(error, RedisConnectError::InvalidServerCount(_)), "{count}: {error}");
    }
    for count in [3, 5, 7, 9] {
        assert!(RedlockStore::builder().connect_lazy((1..=count).map(url)).is_ok(), "{count}");
    }
    let several = ["redis://a", "redis://b", "redis+sentinel://c,d/mymaster"];
    let error = RedlockStore::builder().connect_lazy(several).expect_err("refused").to_string();
    assert!(error.contains("each server of a RedlockStore is independent"), "{error}");
}

/// Guarantee: G1.
#[tokio::test]
async fn one_server_with_two_addresses_is_refused() {
    let Some(servers) = servers(3).await else { return };
    let mut urls = servers.urls();
    urls[2] = urls[0].clone();
    let error = refused(&urls).await;
    assert!(error.ends_with("its address is named twice"), "{error}");
    // Another name of the first one.
    urls[2] = servers.redis[0].url();
    let error = refused(&urls).await;
    assert!(error.ends_with("is the same server"), "{error}");
    // Another database of it.
    urls[2] = format!("{}/1", urls[0]);
    assert!(refused(&urls).await.ends_with("its address is named twice"));
}

/// Guarantee: G1.
#[tokio::test]
async fn replica_and_cluster_node_are_refused() {
    let Some(servers) = servers(3).await else { return };
    let cluster = RedisServer::options().set("cluster-enabled", "yes").start().await;
    let mut urls = servers.urls();
    urls[1] = cluster.url();
    let error = refused(&urls).await;
    assert!(error.contains(&cluster.address().to_string()), "{error}");
    assert!(error.ends_with("it is a node of a Redis Cluster"), "{error}");
    let master = servers.redis[0].port().to_string();
    servers.redis[2].command(&["REPLICAOF", "127.0.0.1", &master]).await;
    let error = refused(&servers.urls()).await;
    assert!(error.ends_with("it is a replica"), "{error}");
}

/// A server that lacks a permission, although the others would be a majority.
#[tokio::test]
async fn defect_of_one_server_fails_at_once_and_names_it() {
    let Some(mut servers) = servers(3).await else { return };
    let rules = ["reset", "on", "nopass", "~*", "&*", "+@all", "-hset"];
    servers.redis[1] = RedisServer::options().user("admin", "secret", rules).start().await;
    let mut urls = servers.urls();
    urls[1] = format!("redis://{}", servers.redis[1].address());
    let error = limits::redlock().connect(&urls).await.expect_err("refused");
    let RedisConnectError::PermissionDenied { address, refusals, .. } = &error else { panic!("{error}") };
    assert_eq!(*address, servers.redis[1].address().to_string());
    assert!(refusals.iter().all(|refusal| refusal.starts_with("HSET: ")), "{error}");
    let rules = ["reset", "on", "nopass", "~*", "&*", "+@all", "-info"];
    servers.redis[1] = RedisServer::options().user("admin", "secret", rules).start().await;
    urls[1] = format!("redis://{}", servers.redis[1].address());
    let error = limits::redlock().connect(&urls).await.expect_err("refused");
    assert!(matches!(error, RedisConnectError::PermissionDenied { .. }), "{error}");
    assert!(error.to_string().contains("'info'"), "{error}");
}

#[tokio::test]
async fn majority_is_enough_to_connect_and_less_is_an_error() {
    let Some(mut servers) = servers(3).await else { return };
    servers.proxies[0].all().swallow(tower_lock_testkit::Direction::Both);
    let locks = servers.hasty_instance("a").await;
    until("a majority grants", async || locks.try_lock(key()).await.is_ok()).await;
    servers.redis[1].kill();
    let builder = || limits::redlock().call_timeout(limits::SHORT).connect_timeout(limits::OUTAGE);
    let error = builder().connect(servers.urls()).await.expect_err("one server");
    let RedisConnectError::NoMajority { servers: 3, passed: 1, errors } = &error else { panic!("{error}") };
    for server in [0, 1] {
        let address = servers.proxies[server].address().to_string();
        assert!(errors.iter().any(|error| error.contains(&address)), "{error}");
    }
    // Without a wait for them.
    let lazy = LockManager::new(builder().connect_lazy(servers.urls()).expect("valid"));
    assert!(lazy.try_lock(key()).await.is_err() && lazy.health().await.is_err());
    servers.redis[1].restart_empty().await;
    until("a majority is there", async || lazy.try_lock(key()).await.is_ok()).await;
    until("it is ready", async || lazy.health().await.is_ok()).await;
}

/// The third server counts from then on: the first one may go.
#[tokio::test]
async fn server_that_comes_later_counts() {
    let Some(servers) = servers(3).await else { return };
    servers.proxies[2].refuse(true).await;
    let locks = servers.instance("a").await;
    servers.proxies[2].refuse(false).await;
    until("it has granted a key", async || {
        locks.lock(key()).await.expect("a majority").release().await.expect("held");
        servers.redis[2].command(&["EXISTS", super::FENCE]).await.integer() == Some(1)
    })
    .await;
    servers.redis[0].kill();
    until("the others are a majority", async || locks.try_lock(key()).await.is_ok()).await;
}

/// Its address leads to the first server, or to a replica: two votes of one server are no majority.
/// Guarantee: G1.
#[tokio::test]
async fn server_that_comes_later_and_is_not_independent_never_counts() {
    let Some(servers) = servers(3).await else { return };
    servers.proxies[2].refuse(true).await;
    let locks = servers.hasty_instance("a").await;
    servers.proxies[2].redirect(servers.redis[0].address());
    servers.proxies[2].refuse(false).await;
    servers.redis[1].kill();
    let is_refused = async |reason: &str| {
        let error = locks.health().await.expect_err("one server").to_string();
        assert!(locks.try_lock(key()).await.is_err(), "{error}");
        error.contains(reason)
    };
    until("it is known", async || is_refused("is the same server").await).await;
    let replica =
        RedisServer::options().set("replicaof", &format!("127.0.0.1 {}", servers.redis[0].port())).start().await;
    servers.proxies[2].redirect(replica.address());
    until("it is known", async || is_refused("it is a replica").await).await;
    servers.proxies[2].redirect(servers.redis[2].address());
    until("it is another server", async || locks.try_lock(key()).await.is_ok()).await;
}

#[tokio::test]
async fn two_prefixes_are_isolated_on_all_servers() {
    let Some(servers) = servers(3).await else { return };
    let urls = servers.urls();
    let prefixes = ["shop", "blog"].map(|prefix| limits::redlock().prefix(prefix).connect(&urls));
    let stores = join_all(prefixes).await.into_iter().map(|store| LockManager::new(store.expect("up")));
    let guards = join_all(stores.map(|locks| async move { locks.try_lock(key()).await })).await;
    assert!(guards.iter().all(Result::is_ok), "two locks");
    let Servers { redis, .. } = &servers;
    assert!(redis[0].command(&["KEYS", "shop:*"]).await.texts() == ["shop:k"]);
}

/// The passwords of the URLs.
#[tokio::test]
async fn no_error_has_a_password() {
    let proxy = Proxy::start("127.0.0.1:1".parse().expect("an address")).await;
    let url = |name: &str| format!("redis://:secret@{name}");
    let urls = [url(&proxy.address().to_string()), url("127.0.0.1:2"), url("127.0.0.1:3")];
    let error = limits::redlock().connect_timeout(limits::SHORT).connect(&urls).await.expect_err("no server");
    assert!(!format!("{error:?}{error}").contains("secret"), "{error}");
    let store = RedlockStore::builder().connect_lazy(&urls).expect("valid");
    assert!(!format!("{store:?}").contains("secret"));
}
