//! Connecting to sentinels, and to the master that they name.

use tower_lock::{LockManager, RedisStore};
use tower_lock_testkit::{RedisServer, SentinelGroup, limits, locks::key, log::Log, skipped, wait::until};

use crate::support::{instance_of, sentinel_group};

#[tokio::test]
async fn passwords_of_sentinels_and_servers_can_differ() {
    if !RedisServer::is_available() {
        return skipped("the passwords of sentinels", "redis-server");
    }
    let group = SentinelGroup::options().sentinel_password("of-sentinels").start(1).await;
    let url = group.url();
    let locks = LockManager::new(
        limits::redis().connect(&format!("{url}?sentinel_password=of-sentinels")).await.expect("both"),
    );
    locks.lock(key()).await.expect("free").release().await.expect("it is up");
    let error = RedisStore::connect(&url).await.expect_err("the sentinels want a password");
    let text = format!("{error:?}");
    assert!(text.contains("NOMASTER") && text.contains("NOAUTH") && !text.contains("of-servers"), "{text}");
}

#[tokio::test]
async fn error_of_a_connect_names_the_server_and_its_cause() {
    let Some(group) = sentinel_group(1).await else { return };
    let error = async |url: &str| {
        let connect = RedisStore::builder().connect_timeout(limits::OUTAGE).connect(url);
        format!("{:?}", connect.await.expect_err("refused"))
    };
    let text = error(&format!("redis://{}", group.sentinel_addresses()[0])).await;
    assert!(text.contains("is this a sentinel? its URL is `redis+sentinel://"), "{text}");
    // The sentinels may name an address that only they reach: that of a server that has ended.
    let unreachable = RedisServer::start().await.address();
    group.monitor("unreachable", unreachable.port()).await;
    let text = error(&group.url().replace("/mymaster", "/unreachable")).await;
    assert!(text.contains(&format!("at {unreachable}, which the sentinels name")), "{text}");
    assert!(text.contains("can this process reach the address"), "{text}");
    // The hint of an error that the master has sent is that of a server without sentinels. Its
    // sentinels and its replica have connections.
    group.servers()[0].command(&["CONFIG", "SET", "maxclients", "1"]).await;
    let text = error(&group.url()).await;
    assert!(text.contains("max number of clients reached") && text.contains("`maxclients`"), "{text}");
}

/// A connection that breaks is not replaced without a sentinel: the master may be another server.
#[tokio::test]
async fn connections_outlast_the_sentinels_and_a_warning_is_logged() {
    let Some(group) = sentinel_group(1).await else { return };
    let log = Log::default();
    let _listening = log.listen();
    group.freeze_sentinel(0);
    let locks = instance_of(&group, "a").await;
    locks.lock(key()).await.expect("free, with one sentinel stopped").release().await.expect("it is up");
    let hasty = limits::redis().call_timeout(limits::SHORT).connect(&group.url()).await.expect("it is up");
    let hasty = LockManager::new(hasty);
    for number in 1..group.sentinel_addresses().len() {
        group.freeze_sentinel(number);
    }
    until("a warning", async || log.text().contains("no sentinel replies")).await;
    locks.lock(key()).await.expect("free").release().await.expect("it is up");
    group.servers()[0].command(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    let error = hasty.try_lock(key()).await.expect_err("no connection");
    assert!(format!("{error:?}").contains("NOMASTER"), "{error:?}");
}

/// The permissions of `docs/guide/topologies.md`.
#[tokio::test]
async fn smallest_acl_of_sentinels_suffices() {
    let Some(group) = sentinel_group(1).await else { return };
    for number in 0..group.sentinel_addresses().len() {
        let user = ["ACL", "SETUSER", "locks", "on", ">of-sentinels", "resetchannels", "&+switch-master", "-@all"];
        let reply = group.sentinel_command(number, &[&user[..], &["+sentinel|master", "+subscribe"]].concat()).await;
        assert_eq!(reply.text(), Some("OK"), "{reply:?}");
    }
    let url = format!("{}?sentinel_username=locks&sentinel_password=of-sentinels", group.url());
    let locks = LockManager::new(limits::redis().connect(&url).await.expect("the smallest ACL"));
    let held = locks.lock(key()).await.expect("free");
    let has_subscribed = async || {
        let clients = group.sentinel_command(0, &["CLIENT", "LIST"]).await;
        clients.text().is_some_and(|clients| {
            clients.lines().any(|client| client.contains(" sub=1 ") && client.contains(" user=locks "))
        })
    };
    until("its subscription", has_subscribed).await;
    held.release().await.expect("it is up");
    let log = group.sentinel_command(0, &["ACL", "LOG"]).await;
    assert!(log.items().is_empty(), "{log:?}");
}
