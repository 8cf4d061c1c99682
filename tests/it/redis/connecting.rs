//! Connecting to Redis: requirements, and the errors when one is not met.

use std::{
    collections::BTreeSet,
    error::Error,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    io::{AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpListener,
    runtime::{Builder, Handle, Runtime},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};
use tower_lock::{
    LockError, LockKey, LockManager, RedisStore,
    deadpool_redis::{Config, Runtime as PoolRuntime},
    store::{
        AcquireReply, AcquisitionIds, ConnectError, Credentials, IfBusy, ListRequest, LockStore, RedisConnectError,
        StoreErrorKind,
    },
};
use tower_lock_testkit::{
    RedisServer, Reply, limits,
    locks::key,
    log::Log,
    wait::{ms, soon, until},
};

use crate::support::{LONG, NAME, QUEUE, acquire, connect, environment, granted, hasty, pass, served};

async fn works(store: RedisStore) {
    pass(&LockManager::new(store)).await;
}

/// A store that tries to connect for a short time.
async fn connect_error(url: &str) -> RedisConnectError {
    limits::redis().connect_timeout(limits::SHORT).connect(url).await.expect_err("no connection")
}

/// An address without a server.
async fn nowhere() -> String {
    let port = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    port.local_addr().expect("bound").to_string()
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

#[tokio::test]
async fn store_takes_its_connections_from_a_pool() {
    let Some(environment) = environment().await else { return };
    let url = environment.redis.url();
    // One for each of the two connections of the store, and one for other users of the pool.
    let pool = Config::from_url(&url).create_pool(Some(PoolRuntime::Tokio1)).expect("a pool");
    pool.resize(1);
    let store = limits::redis().from_pool(pool.clone(), &url).await.expect("by a pool");
    drop(soon("a connection for others", pool.get()).await.expect("a connection"));
    works(store).await;
}

/// A manager of the store that this URL names. A task needs a future that is `Send`.
async fn locks_at(url: &str) -> Result<LockManager, ConnectError> {
    let url = url.to_owned();
    let connects = tokio::spawn(async move { LockManager::connect(&url).await });
    Ok(connects.await.expect("runs")?.lease(Duration::from_secs(5)).build())
}

#[tokio::test]
async fn one_url_names_the_store_of_its_scheme() {
    for url in ["memory:", " Memory:// "] {
        let locks = locks_at(url).await.expect(url);
        let guard = locks.try_lock(key()).await.expect("free");
        assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })), "{url}");
        assert!(guard.held_lock().remaining() <= Duration::from_secs(5), "{url}: the builder sets the lease");
        guard.release().await.expect("held");
    }
    if environment().await.is_none() {
        return;
    }
    let redis = RedisServer::options().set("requirepass", "a secret").set("unixsocket", "socket").start().await;
    let address = redis.address();
    let socket = redis.folder().join("socket").display().to_string();
    // The number of the database, and the prefix.
    for (url, database, prefix) in [
        (format!("redis://:a%20secret@{address}"), "0", "lock"),
        (format!("Valkey://default:a%20secret@{address}/3?prefix=shop"), "3", "shop"),
        (format!("unix://{socket}?pass=a%20secret&db=2&prefix=shop"), "2", "shop"),
        (format!("redis+unix://{socket}?pass=a%20secret&user=default"), "0", "lock"),
    ] {
        // On a busy machine its calls may time out.
        let mut held = None;
        until(&url, async || {
            if let Ok(locks) = locks_at(&url).await {
                held = locks.lock(key()).await.ok();
            }
            held.is_some()
        })
        .await;
        let mut connection = redis.connect().await;
        connection.command(&["SELECT", database]).await.expect("a reply");
        let exists = connection.command(&["EXISTS", &format!("{prefix}:k")]).await.expect("a reply");
        assert_eq!(exists, Reply::Integer(1), "{url}");
    }
}

#[tokio::test]
async fn error_of_one_url_keeps_its_source_and_no_password() {
    let address = nowhere().await;
    let error = locks_at(&format!("redis://ann:s3cret@{address}")).await.expect_err("no server");
    assert!(matches!(error, ConnectError::Redis(RedisConnectError::Unreachable { .. })), "{error}");
    let text = format!("{error:?}");
    assert!(text.contains("is the server up, and the address correct?"), "{text}");
    assert!(!text.contains("s3cret") && !text.contains("ann") && !text.contains('\n'), "{text}");
    assert_eq!(text.matches("refused").count(), 1, "{text}");
    assert_eq!((text, error.to_string()), (whole(&error), format!("could not connect to Redis at {address}")));
    for (url, says) in [
        ("s3cret", "invalid URL of a lock store: it has no scheme"),
        ("oracle://ann:s3cret@host", "its scheme is none of `memory`, `mysql`, `postgres`, `redis`"),
        ("redis://:s3cret@host?protocol=resp3", "invalid Redis URL: a parameter is not one of `prefix`"),
        ("redis+cluster://:s3cret@a,b/1", "invalid Redis URL: a Cluster has only the database 0"),
        ("redis+redlock://:s3cret@a,b", "a RedlockStore has 3, 5, 7 or 9 servers, and not 2"),
    ] {
        let text = format!("{:?}", locks_at(url).await.expect_err(url));
        assert!(text.contains(says) && !text.contains("s3cret"), "{url}: {text}");
    }
}

/// One of them would be ignored.
#[tokio::test]
async fn settings_of_url_and_builder_that_differ_are_an_error() {
    let Some(environment) = environment().await else { return };
    let url = format!("{}?prefix=shop&min_replicas=0", environment.redis.url());
    let store = limits::redis().prefix("shop").min_replicas(0, ms(100)).connect(&url).await;
    let locks = LockManager::new(store.expect("no contradiction"));
    let guard = locks.lock(key()).await.expect("free");
    assert_eq!(environment.keys().await, ["shop:k"]);
    guard.release().await.expect("held");
    for (builder, parameter) in [
        (RedisStore::builder().prefix("other"), "prefix"),
        (RedisStore::builder().min_replicas(1, ms(100)), "min_replicas"),
    ] {
        let says = format!("its parameter `{parameter}` is not that of the builder");
        let error = builder.clone().connect(&url).await.expect_err("two values");
        assert!(error.to_string().ends_with(&says), "{error}");
        let error = builder.connect_lazy(&url).expect_err("two values");
        assert!(error.to_string().ends_with(&says), "{error}");
    }
    let of = async |parameters: &str| connect_error(&format!("{}?{parameters}", environment.redis.url())).await;
    let error = of("prefix=a:b").await;
    assert!(matches!(error, RedisConnectError::InvalidPrefix(_)), "{error}");
    let error = of("min_replicas=1&min_replicas_timeout_ms=2501").await;
    assert!(matches!(error, RedisConnectError::InvalidTimeout { setting: "min_replicas", .. }), "{error}");
    let error = of("min_replicas=1").await;
    assert!(whole(&error).contains("are enough replicas up"), "{}", whole(&error));
}

/// Guarantee: G1.
#[tokio::test]
async fn two_prefixes_are_isolated() {
    let Some(environment) = environment().await else { return };
    let shop = limits::redis().prefix("shop").connect(&environment.redis.url()).await.expect("a prefix");
    let (shop, other) = (LockManager::new(shop), environment.direct_instance("b").await);
    let (one, two) = (shop.try_lock(key()).await.expect("free"), other.try_lock(key()).await.expect("free"));
    assert_eq!(environment.keys().await, ["lock:k", "shop:k"]);
    one.release().await.expect("held");
    two.release().await.expect("held");
    for prefix in ["", "a:b", "tower-lock"] {
        let error = RedisStore::builder().prefix(prefix).connect_lazy(&environment.redis.url()).expect_err("no prefix");
        assert!(matches!(error, RedisConnectError::InvalidPrefix(_)), "{error}");
    }
}

#[tokio::test]
async fn wrong_password_is_reported() {
    if environment().await.is_none() {
        return;
    }
    let redis = RedisServer::options().set("requirepass", "secret").start().await;
    for (user, says) in [
        ("", "the URL has none: write `:password@` or"),
        // Perhaps the password.
        ("s3cret@", "the URL has none: write `:password@` or"),
        (":s3cret@", "the server refused user `default`"),
        ("ann:s3cret@", "the server refused user `ann`"),
    ] {
        let url = format!("redis://{user}{}", redis.address());
        let text = whole(&limits::redis().connect(&url).await.expect_err("not authenticated"));
        assert!(text.contains(says) && !text.contains("s3cret"), "{user}: {text}");
    }
}

/// The token of a cloud opens no connection after its end.
#[tokio::test]
async fn each_connect_asks_for_user_and_password() {
    if environment().await.is_none() {
        return;
    }
    let redis = RedisServer::options().set("requirepass", "secret").start().await;
    let url = format!("redis://:secret@{}", redis.address());
    let mut admin = redis.connect().await;
    let mut set_password = async |password: &str| {
        for command in [
            &["AUTH", "secret"][..],
            &["ACL", "SETUSER", "ann", "reset", "on", password, "~*", "&*", "+@all"],
            &["CLIENT", "KILL", "USER", "ann"],
        ] {
            admin.command(command).await.expect("a reply");
        }
    };
    set_password(">first").await;
    let token = Arc::new(Mutex::new(Some("first")));
    let calls = Arc::new(AtomicUsize::new(0));
    let (current, asked) = (Arc::clone(&token), Arc::clone(&calls));
    let builder = hasty().credentials(move || {
        let token = *current.lock().expect("no panic");
        asked.fetch_add(1, SeqCst);
        async move {
            assert_ne!(token, Some("bug"), "a bug");
            Ok(Credentials::new("ann", token.ok_or("no token")?))
        }
    });
    let error = builder.clone().connect(&url).await.expect_err("two passwords");
    assert!(whole(&error).contains("`credentials` of the builder"), "{error:?}");
    let locks = LockManager::new(builder.connect(&format!("redis://{}", redis.address())).await.expect("its password"));
    pass(&locks).await;
    set_password(">second").await;
    let fails_with = async |text: &str| {
        let failed = locks.try_lock(key()).await.err().map(|error| format!("{error:?}"));
        failed.is_some_and(|error| error.contains(text))
    };
    until("the first one opens none", async || fails_with("the server refused the user of `credentials`").await).await;
    *token.lock().expect("no panic") = None;
    until("the function fails", async || fails_with("the function `credentials` failed: no token").await).await;
    *token.lock().expect("no panic") = Some("bug");
    until("a panic is an error", async || fails_with("the function `credentials` failed: it panicked").await).await;
    let before = calls.load(SeqCst);
    let call = || async { locks.try_lock(key()).await.expect_err("a bug") };
    join_all((0..100).map(|_| call())).await;
    let more = calls.load(SeqCst) - before;
    assert!(more < 100, "{more}: callers share a connect, and there is a pause before the next one");
    *token.lock().expect("no panic") = Some("second");
    until("the next one counts", async || locks.try_lock(key()).await.is_ok()).await;
}

/// A server that reports this version and accepts all other commands.
async fn server_of_version(version: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("redis://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.expect("a client");
            tokio::spawn(async move {
                let mut request = vec![0; 4096];
                while let Ok(read @ 1..) = client.read(&mut request).await {
                    let text = String::from_utf8_lossy(&request[..read]).into_owned();
                    let info = format!("# Server\r\nredis_version:{version}\r\n");
                    for _ in text.matches('*') {
                        let reply = match text.contains("INFO") {
                            true if text.contains("server") => format!("${}\r\n{info}\r\n", info.len()),
                            true => "$0\r\n\r\n".to_owned(),
                            false => "+OK\r\n".to_owned(),
                        };
                        client.write_all(reply.as_bytes()).await.expect("it listens");
                    }
                }
            });
        }
    });
    url
}

#[tokio::test]
async fn redis_before_7_is_rejected() {
    let error = limits::redis().connect(&server_of_version("6.2.14").await).await.expect_err("too old");
    assert!(error.to_string().ends_with("has version 6.2.14, but at least 7.0 is required"), "{error}");
}

/// The cause is temporary, unlike a missing right.
#[tokio::test]
async fn replica_at_start_is_reported() {
    let Some(environment) = environment().await else { return };
    environment.command(&["REPLICAOF", "127.0.0.1", "1"]).await;
    let text = whole(&connect_error(&environment.redis.url()).await);
    assert!(text.contains("READONLY") && text.contains("a failover is in progress"), "{text}");
}

#[tokio::test]
async fn missing_pubsub_is_detected_at_start() {
    let Some(environment) = environment().await else { return };
    environment.proxy.all().drop_pushes();
    let error = hasty().connect(&environment.proxy.url()).await.expect_err("deaf");
    assert!(matches!(error, RedisConnectError::PubSubUnavailable { receivers: 1, received: false, .. }), "{error:?}");
    assert!(error.to_string().contains(&environment.proxy.address().to_string()), "{error}");
}

#[tokio::test]
async fn connection_that_breaks_during_the_test_is_no_missing_pubsub() {
    let Some(environment) = environment().await else { return };
    let dropped = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&dropped);
    environment.proxy.all().pushes(move |_| {
        count.fetch_add(1, SeqCst);
        Vec::new()
    });
    let url = environment.proxy.url();
    let connecting = tokio::spawn(async move { limits::redis().connect(&url).await });
    until("two messages are lost", async || dropped.load(SeqCst) == 2).await;
    environment.proxy.all().heal();
    environment.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    soon("a retry", connecting).await.expect("runs").expect("the next connection works");
}

/// The ACL of the guide.
pub(crate) fn smallest_acl() -> Vec<String> {
    let docs = include_str!("../../../docs/guide/redis-in-production.md");
    let (_, rest) = docs.split_once("ACL SETUSER locks ").expect("the smallest ACL");
    let rules = rest.split("\n```").next().expect("its end").replace("\\\n", " ");
    rules.split_whitespace().map(|rule| rule.trim_matches('\'').to_owned()).collect()
}

pub(crate) async fn user(redis: &RedisServer, rules: &[String]) -> String {
    let parts: Vec<_> =
        ["ACL", "SETUSER", "locks", "reset"].into_iter().chain(rules.iter().map(String::as_str)).collect();
    assert_eq!(redis.command(&parts).await, Reply::Status("OK".to_owned()));
    format!("redis://locks:secret@{}", redis.address())
}

/// `redis_store_passes_conformance` shows that it suffices.
#[tokio::test]
async fn missing_rights_of_the_smallest_acl_are_named() {
    let Some(environment) = environment().await else { return };
    let rules = smallest_acl();
    let commands: BTreeSet<_> = rules.iter().filter(|rule| rule.starts_with('+')).collect();
    assert!(commands.len() > 20, "{commands:?}");
    for command in commands {
        let rest: Vec<_> = rules.iter().filter(|rule| *rule != command).cloned().collect();
        let url = user(&environment.redis, &rest).await;
        // Commands that only close a connection or check it are optional.
        match (command.as_str(), limits::redis().connect_timeout(limits::OUTAGE).connect(&url).await) {
            ("+info" | "+unsubscribe" | "+ping" | "+role" | "+client|id" | "+client|tracking", Ok(_)) => {}
            (_, Err(error @ (RedisConnectError::PermissionDenied { .. } | RedisConnectError::Unreachable { .. }))) => {
                let (text, name) = (whole(&error).to_lowercase(), command.trim_start_matches('+'));
                assert!(text.contains(name) || name.contains('|'), "without {command}: {text}");
                assert!(text.contains(&environment.redis.address().to_string()), "without {command}: {text}");
                assert!(text.contains("user `locks`"), "without {command}: {text}");
            }
            (_, other) => panic!("without {command}: {other:?}"),
        }
    }
    let rest: Vec<_> = rules.iter().filter(|rule| !rule.starts_with('&')).cloned().collect();
    let error = whole(&limits::redis().connect(&user(&environment.redis, &rest).await).await.expect_err("no channel"));
    assert!(error.contains("(the ACL needs `~lock:* ~tower-lock:lock:* &tower-lock:lock:in:*`)"), "{error}");
}

/// A script declares all its keys: Redis refuses it before it begins.
/// Guarantee: G9.
#[tokio::test]
async fn script_without_permission_for_a_key_changes_nothing() {
    let Some(environment) = environment().await else { return };
    let rules = smallest_acl();
    let user_with = async |names: &[&str]| {
        let others = rules.iter().filter(|rule| !rule.starts_with("~tower-lock")).cloned();
        let names = names.iter().map(|name| format!("~tower-lock:lock:{name}"));
        user(&environment.redis, &others.chain(names).collect::<Vec<_>>()).await
    };
    let url = user_with(&["*"]).await;
    let locks = LockManager::new(connect(&url).await);
    let other = environment.direct_instance("other").await;
    for names in [&["q:*", "r:*"][..], &["f", "r:*"]] {
        user_with(names).await;
        let error = locks.try_lock(key()).await.expect_err("refused");
        assert!(matches!(&error, LockError::Store(error) if error.kind() == StoreErrorKind::Refused), "{error:?}");
        assert_eq!(environment.command(&["EXISTS", NAME]).await.integer(), Some(0), "{names:?}: nothing is granted");
    }
    for names in [&["q:*", "r:*"][..], &["f", "r:*"]] {
        user_with(&["*"]).await;
        let guard = locks.lock(key()).await.expect("free");
        let waiting = environment.waiter(&other).await;
        let before = environment.command(&["HGETALL", NAME]).await;
        user_with(names).await;
        guard.release().await.expect_err("refused");
        assert_eq!(environment.command(&["HGETALL", NAME]).await, before, "{names:?}: nothing is released");
        // The release is repeated.
        user_with(&["*"]).await;
        granted(waiting).await.release().await.expect("held");
        until("released", async || locks.size() == (0, 0)).await;
    }
    // Of two keys that share a call, one is refused.
    let store = connect(&url).await;
    let ids = AcquisitionIds::new("a", 1);
    let two: Vec<_> = (0..2).map(|n| (LockKey::from(("n", n)), ids.next())).collect();
    user_with(&["f", "q:{lock:n:1}"]).await;
    let requests = two.iter().map(|(key, id)| acquire(key, id, IfBusy::Fail)).collect();
    let replies = futures_util::future::join_all(store.acquire(requests)).await;
    assert!(matches!(replies[..], [Err(_), Ok(AcquireReply::Granted { .. })]), "{replies:?}");
}

/// Another application on the same Redis, with the ACL of the guide for its own prefix.
/// Guarantee: G1.
#[tokio::test]
async fn smallest_acl_cannot_touch_another_prefix() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.direct_instance("one").await, environment.direct_instance("two").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = environment.waiter(&two).await;
    let waiter = environment.command(&["LRANGE", QUEUE, "0", "-1"]).await.texts()[0].to_owned();
    let inbox = format!("tower-lock:lock:in:{}", waiter.rsplit_once(':').expect("a number").0);

    let rules: Vec<_> = smallest_acl().iter().map(|rule| rule.replace("lock:*", "shop:*")).collect();
    let rules: Vec<_> = rules.iter().map(|rule| rule.replace(":lock:in", ":shop:in")).collect();
    let url = user(&environment.redis, &rules).await;
    works(limits::redis().prefix("shop").connect(&url).await.expect("its own prefix")).await;
    let error = limits::redis().connect(&url).await.expect_err("the prefix of others");
    assert!(matches!(error, RedisConnectError::PermissionDenied { .. }), "{error}");

    let mut neighbour = environment.redis.connect().await;
    neighbour.command(&["AUTH", "locks", "secret"]).await.expect("a reply");
    let offer = format!("1 offered 1 {waiter} {NAME}");
    for attempt in [
        &["LRANGE", QUEUE, "0", "-1"][..],
        &["LPOP", QUEUE],
        &["DEL", QUEUE],
        &["RPUSH", QUEUE, "b:1:1"],
        &["PUBLISH", &inbox, &offer],
        &["SUBSCRIBE", &inbox],
        &["SET", "tower-lock:lock:f", "abc"],
        &["DEL", "tower-lock:lock:f"],
        &["HSET", NAME, &waiter, "1"],
        &["HDEL", NAME, &waiter],
        &["DEL", NAME],
    ] {
        let reply = neighbour.command(attempt).await.expect("a reply");
        assert!(reply.text().is_some_and(|text| text.starts_with("NOPERM")), "{attempt:?}: {reply:?}");
    }
    guard.release().await.expect("held");
    served(waiting).await;
}

/// `list` is for operators: a service works without its permission.
#[tokio::test]
async fn missing_permission_of_scan_fails_only_listings() {
    let Some(environment) = environment().await else { return };
    let url = user(&environment.redis, &smallest_acl()).await;
    let store = connect(&url).await;
    let error = store.list(ListRequest::new(10)).await.expect_err("no permission");
    assert_eq!(error.kind(), StoreErrorKind::Refused, "{error:?}");
    pass(&LockManager::new(store)).await;
    let rules: Vec<_> = smallest_acl().into_iter().chain(["+scan".to_owned()]).collect();
    let url = user(&environment.redis, &rules).await;
    let store = connect(&url).await;
    assert_eq!(store.list(ListRequest::new(10)).await.expect("permitted").entries, []);
}

/// A managed server: it reports little about itself, and has no `CONFIG`.
#[tokio::test]
async fn server_without_a_version_is_warned_of_and_works() {
    let Some(environment) = environment().await else { return };
    let rules: Vec<_> = smallest_acl().into_iter().filter(|rule| rule != "+info").collect();
    let url = user(&environment.redis, &rules).await;
    let log = Log::default();
    let guard = log.listen();
    let locks = LockManager::new(connect(&url).await);
    let warning = "WARN tower_lock: Redis: its version cannot be read";
    until("a warning", async || log.text().contains(warning)).await;
    drop(guard);
    pass(&locks).await;
}

/// The warnings of a store that connects to this server.
async fn warnings(redis: &RedisServer) -> String {
    // The last check: its warning is the last one of the log, which has a thread of its own.
    redis.command(&["SET", "tower-lock:lock:f", "abc"]).await;
    let log = Log::default();
    let guard = log.listen();
    let store = connect(&redis.url()).await;
    let last = |text: &str| text.find("`DEL tower-lock:lock:f`");
    until("the last warning", async || last(&log.text()).is_some()).await;
    drop((guard, store));
    let text = log.text();
    text[..text[..last(&text).expect("just found")].rfind('\n').map_or(0, |end| end + 1)].to_owned()
}

/// On load Redis checks the writes of scripts against its default user.
#[tokio::test]
async fn default_user_that_loses_the_append_only_file_is_warned_of() {
    if environment().await.is_none() {
        return;
    }
    for (rules, is_enough) in [(&["off"][..], false), (&["off", "~*", "&*", "+@all"], true)] {
        let options = RedisServer::options().set("appendonly", "yes").set("appendfsync", "always");
        let mut redis = options.user("locks", "secret", rules.iter().copied()).start().await;
        let warnings = warnings(&redis).await;
        assert!(warnings.is_empty() == is_enough, "{rules:?}: {warnings}");
        assert!(is_enough || warnings.contains("`user default off ~* &* +@all`"), "{warnings}");
        let locks = LockManager::builder(connect(&redis.url()).await).lease(LONG).build();
        locks.once(("job",)).run(async |_| {}).await.expect("free");
        let held = locks.lock(key()).await.expect("free");
        redis.restart().await;
        redis.loaded().await;
        let kept = redis.command(&["EXISTS", "lock:k", "tower-lock:lock:r:{lock:+once:job}"]).await.integer();
        // Redis may learn to keep them.
        assert!(kept == Some(2) || !is_enough, "{kept:?}, {rules:?}");
        drop(held);
    }
}

#[tokio::test]
async fn evicting_server_is_warned_of() {
    let Some(environment) = environment().await else { return };
    for (policy, memory, evicts) in
        [("allkeys-lru", "0", false), ("allkeys-lru", "100mb", true), ("noeviction", "100mb", false)]
    {
        environment.command(&["CONFIG", "SET", "maxmemory-policy", policy]).await;
        environment.command(&["CONFIG", "SET", "maxmemory", memory]).await;
        let warnings = warnings(&environment.redis).await;
        assert!(
            warnings.contains("use `noeviction`") == evicts && warnings.is_empty() != evicts,
            "{policy}: {warnings}"
        );
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Connections end with the runtime that opened them. One that exists may be blocked.
#[test]
fn store_works_after_the_runtime_it_was_built_on() {
    for is_dropped in [true, false] {
        let (servers, first, second) = (runtime(), runtime(), runtime());
        let Some(environment) = servers.block_on(environment()) else { return };
        let store = first.block_on(hasty().connect(&environment.redis.url())).expect("it is up");
        let locks = LockManager::new(store);
        let guard = first.block_on(locks.lock(key()).into_future());
        let first = (!is_dropped).then_some(first);
        second.block_on(async {
            drop(guard.map(tower_lock::LockGuard::release));
            let works = async || match locks.lock(key()).await {
                Ok(guard) => guard.release().await.is_ok(),
                Err(_) => false,
            };
            until("it works on another runtime", works).await;
            until("and it listens from here", async || works().await && environment.listeners().await == 1).await;
        });
        // Without a runtime nothing panics.
        drop(second);
        drop((locks, first));
    }
}

/// Connections, channels and tasks are as before.
#[tokio::test]
async fn dropped_store_leaves_nothing() {
    let Some(environment) = environment().await else { return };
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let clients = async || environment.command(&["CLIENT", "LIST"]).await.text().map_or(0, |text| text.lines().count());
    // An earlier connection may still be listed.
    until("one connection", async || clients().await == 1).await;
    let before = (1, tasks());
    let (one, two) = (environment.direct_instance("a").await, environment.direct_instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = environment.waiter(&two).await;
    until("both listen", async || environment.listeners().await == 2).await;
    until("three each", async || clients().await == before.0 + 6).await;
    guard.release().await.expect("held");
    served(waiting).await;
    // A dropped handle gets no more messages, though its store lives on.
    let store: Arc<dyn LockStore> = environment.direct_store().await;
    drop((one, two));
    until("no subscription", async || environment.listeners().await == 0).await;
    let third = LockManager::new(Arc::clone(&store));
    until("it listens", async || environment.listeners().await == 1).await;
    drop(third);
    until("it does not", async || environment.listeners().await == 0).await;
    drop(store);
    until("as before", async || (clients().await, tasks()) == before).await;
    assert_eq!(environment.keys().await, [""; 0]);
}

/// Both start at once, and Redis takes longer.
#[tokio::test]
async fn server_that_starts_shortly_later_is_found() {
    let Some(mut environment) = environment().await else { return };
    environment.redis.kill();
    let url = environment.proxy.url();
    let connects = tokio::spawn(async move { limits::redis().connect(&url).await });
    until("it tries again", async || environment.proxy.arrived() > 9).await;
    assert!(!connects.is_finished());
    environment.redis.restart().await;
    works(connects.await.expect("runs").expect("it is up now")).await;
}

#[tokio::test]
async fn lazy_store_starts_without_redis() {
    if environment().await.is_none() {
        return;
    }
    let mut redis = RedisServer::start().await;
    redis.kill();
    let (log, reason) = (Log::default(), format!("Redis at {}: Connection refused", redis.address()));
    let guard = log.listen();
    let locks = LockManager::new(
        limits::redis().connect_timeout(limits::SHORT).connect_lazy(&redis.url()).expect("an address"),
    );
    // Before any request.
    until("a warning", async || log.text().contains(&reason)).await;
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Store(_))));
    let error = locks.health().await.expect_err("down");
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    for text in [error.to_string(), format!("{error:?}"), whole(&error)] {
        assert_eq!((text.matches(&reason).count(), text.matches("Connection refused").count()), (1, 1), "{text}");
    }
    redis.restart().await;
    until("it is ready", async || locks.health().await.is_ok()).await;
    let recovered = format!("Redis at {} can be reached again", redis.address());
    until("a line of the log", async || log.text().contains(&recovered)).await;
    let outage = "requests get 503 until Redis can be reached";
    assert_eq!((log.text().matches(outage).count(), log.text().matches(&recovered).count()), (1, 1), "{}", log.text());
    drop(guard);
    redis.freeze();
    assert_eq!(locks.health().await.expect_err("stopped").kind(), StoreErrorKind::Timeout);
    redis.thaw();
    until("it is ready again", async || locks.health().await.is_ok()).await;
    assert!(matches!(RedisStore::builder().connect_lazy("localhost:6379"), Err(RedisConnectError::InvalidUrl(_))));
}

/// A lazy store reports the errors of `connect` as soon as they are known.
#[tokio::test]
async fn lazy_store_reports_missing_capabilities() {
    let Some(environment) = environment().await else { return };
    let log = Log::default();
    let guard = log.listen();
    let old = LockManager::new(limits::redis().connect_lazy(&server_of_version("6.2.14").await).expect("an address"));
    let mut reason = String::new();
    until("a rejection", async || {
        reason = whole(&old.health().await.expect_err("too old"));
        reason.contains("6.2.14")
    })
    .await;
    until("the log has it", async || log.text().contains("6.2.14")).await;
    drop((old, guard));

    let rules: Vec<_> = smallest_acl().into_iter().filter(|rule| rule != "+publish").collect();
    let url = user(&environment.redis, &rules).await;
    let locks = LockManager::new(limits::redis().connect_lazy(&url).expect("an address"));
    until("a right is missing", async || {
        let error = locks.health().await.expect_err("no right to publish");
        error.kind() == StoreErrorKind::Refused && whole(&error).contains("PUBLISH")
    })
    .await;
    user(&environment.redis, &smallest_acl()).await;
    until("it has the right now", async || locks.health().await.is_ok()).await;
}

#[tokio::test]
async fn store_timeouts_have_bounds() {
    for (setting, builder) in [
        ("call_timeout", RedisStore::builder().call_timeout(ms(10))),
        ("call_timeout", RedisStore::builder().call_timeout(Duration::MAX)),
        ("connect_timeout", RedisStore::builder().connect_timeout(Duration::ZERO)),
        ("connect_timeout", RedisStore::builder().connect_timeout(ms(61_000))),
    ] {
        let error = builder.connect("redis://127.0.0.1:1").await.expect_err("out of bounds");
        assert!(matches!(error, RedisConnectError::InvalidTimeout { setting: s, .. } if s == setting), "{error}");
        assert!(error.to_string().starts_with(&format!("`{setting}`")), "{error}");
    }
    let store = RedisStore::builder().call_timeout(ms(1_500)).connect_lazy("redis://127.0.0.1:1").expect("in bounds");
    assert_eq!(store.call_timeout(), ms(1_500));
}

/// The `Debug` text, which `main` prints.
#[tokio::test]
async fn connect_error_hides_the_password() {
    for (url, says) in [
        ("localhost:6379", "did you mean `redis://localhost:6379`?"),
        ("ann:s3cret@localhost:6379", "did you mean `redis://localhost:6379`?"),
        ("redis:localhost", "did you mean `redis://localhost`?"),
        ("s3cret", "it has no scheme (example: `redis://user:password@host:6379/0`)"),
        ("redis://ann:s3cret@127.0.0.1:1?protocol=resp3", "a parameter is not one of `prefix`"),
        ("ann:s3cret", "it has no scheme (example: `redis://user:password@host:6379/0`)"),
        ("", "it is empty"),
        ("redis://", "it has no host"),
        ("redis://:s3cret:127.0.0.1:1", "no `@` after its password"),
        ("redis://127.0.0.1:65536", "its port is not a number from 1 to 65535"),
        ("redis://127.0.0.1:1/s3cret", "its path is not the number of a database"),
        ("tcp://127.0.0.1:1", "its scheme is not `redis`"),
        ("http://localhost", "its scheme is not `redis`"),
        ("redis://ann:s3#cret@127.0.0.1:1", "must be encoded: `%40`, `%23`"),
        ("redis://:12#s3cret@127.0.0.1:1", "must be encoded: `%40`, `%23`"),
        ("redis://ann:s3/@cret@127.0.0.1:1", "must be encoded: `%40`, `%23`"),
        // The last one ends the password.
        ("redis://ann:s3@cret@127.0.0.1:1", "Redis at 127.0.0.1:1: Connection refused"),
    ] {
        let text = format!("{:?}", connect_error(url).await);
        assert!(text.contains(says) && !text.contains("cret"), "{url}: {text}");
    }
}

/// A malicious server: its reply does not end.
/// Guarantee: G15.
#[tokio::test]
async fn endless_reply_is_cut_and_does_not_fill_memory() {
    let Some(environment) = environment().await else { return };
    let folder = environment.redis.folder();
    let certificate = tower_lock_testkit::certificate(folder).then(|| ["crt", "key"].map(|name| folder.join(name)));
    if certificate.is_none() {
        tower_lock_testkit::skipped("an endless reply with TLS", "openssl");
    }
    for certificate in [None].into_iter().chain(certificate.map(Some)) {
        let acceptor = certificate.as_ref().map(|[crt, key]| acceptor(crt, key));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let most = Arc::new(AtomicUsize::new(0));
        let sent = Arc::clone(&most);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let sent = Arc::clone(&sent);
                match &acceptor {
                    None => drop(tokio::spawn(send_endless(client, sent))),
                    Some(tls) => {
                        let accepts = tls.accept(client);
                        tokio::spawn(async move { send_endless(accepts.await.expect("trusted"), sent).await });
                    }
                }
            }
        });
        let mut url = format!("redis://{address}");
        if let Some([crt, _]) = &certificate {
            url = format!("rediss://{address}?sslrootcert={}", crt.display());
        }
        let locks = LockManager::new(limits::redis().connect_lazy(&url).expect("an address"));
        until("it is cut", async || whole(&locks.health().await.expect_err("no Redis")).contains("more than 2048 KiB"))
            .await;
        drop(locks);
        // The limit, and the socket buffers of both sides.
        let most = most.load(SeqCst);
        assert!(most > 2 << 20 && most < 64 << 20, "{url}: {most}");
    }
}

async fn send_endless(mut client: impl AsyncWrite + Unpin, sent: Arc<AtomicUsize>) {
    let part = vec![b'x'; 1 << 16];
    let mut bytes = client.write(b"+").await.unwrap_or(0);
    while let Ok(written) = client.write(&part).await {
        bytes += written;
        sent.fetch_max(bytes, SeqCst);
    }
}

fn acceptor(crt: &Path, key: &Path) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().expect("known");
    let (crt, key) = (CertificateDer::from_pem_file(crt), PrivateKeyDer::from_pem_file(key));
    let config = config.with_no_client_auth().with_single_cert(vec![crt.expect("made")], key.expect("made"));
    Arc::new(config.expect("a pair")).into()
}
