//! From an address to a store: what is needed, and how it is said that something is missing.

use std::{
    collections::BTreeSet,
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    time::sleep,
};
use tower_lock::{
    LockError, LockManager, RedisStore,
    deadpool_redis::{Config, Runtime},
    store::{LockStore, RedisConnectError, StoreErrorKind},
    test_util::conformance,
};
use tower_lock_faults::{RedisServer, Reply};

use crate::support::{LINE, Log, NAME, key, ms, soon, until, world};

async fn works(store: RedisStore) {
    let locks = LockManager::new(store);
    locks.lock(key()).await.expect("free").release().await.expect("ours");
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
async fn a_store_is_made_of_an_url_a_configuration_or_a_pool_of_your_own() {
    if world().await.is_none() {
        return;
    }
    let redis = RedisServer::options().set("requirepass", "a secret").start().await;
    let url = redis.url().replace(' ', "%20");
    works(RedisStore::connect(&url).await.expect("by its URL")).await;
    works(RedisStore::connect(&format!("{url}/3?protocol=resp3")).await.expect("another database, another protocol"))
        .await;
    let config = Config::from_url(&url);
    works(RedisStore::from_config(&config).await.expect("by a configuration")).await;
    // One for each of the two connections it keeps, and one more for whoever else the pool is for.
    let pool = config.create_pool(Some(Runtime::Tokio1)).expect("a pool");
    pool.resize(1);
    let store = RedisStore::from_pool(pool.clone(), url.as_str()).await.expect("by a pool");
    assert_eq!(
        soon("a connection for others", pool.get()).await.map(|_| ()).map_err(|error| error.to_string()),
        Ok(())
    );
    works(store).await;
}

#[tokio::test]
async fn two_prefixes_are_two_applications() {
    let Some(world) = world().await else { return };
    let shop = RedisStore::builder().prefix("shop").connect(&world.redis.url()).await.expect("a prefix");
    let (shop, other) = (LockManager::new(shop), world.sound_instance("b").await);
    let (one, two) = (shop.try_lock(key()).await.expect("free"), other.try_lock(key()).await.expect("free"));
    assert_eq!(world.keys().await, ["lock:k", "shop:k"]);
    one.release().await.expect("ours");
    two.release().await.expect("ours");
    for prefix in ["", "a:b", "tower-lock"] {
        let error = RedisStore::builder().prefix(prefix).connect(&world.redis.url()).await.expect_err("no prefix");
        assert!(matches!(error, RedisConnectError::InvalidPrefix(_)), "{error}");
    }
}

#[tokio::test]
async fn an_address_that_is_none_is_said_to_be_none_and_nobody_there_is_no_panic() {
    let error = RedisStore::connect("http://localhost").await.expect_err("no Redis");
    assert!(matches!(error, RedisConnectError::InvalidUrl(_)), "{error}");
    let port = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound").port();
    let error = RedisStore::connect(&format!("redis://127.0.0.1:{port}")).await.expect_err("nobody there");
    assert!(matches!(error, RedisConnectError::Unreachable { .. }), "{error}");
    assert!(whole(&error).contains("is the server up, and the address correct?"), "{}", whole(&error));
    if std::env::var_os("REDIS_URL").is_none() {
        assert!(matches!(RedisStore::from_env().await, Err(RedisConnectError::MissingUrl)));
    }
    #[cfg(not(feature = "redis-tls"))]
    {
        let error = RedisStore::connect("rediss://localhost").await.expect_err("not built");
        assert!(error.to_string().ends_with("turn on its feature `redis-tls`"), "{error}");
    }
}

#[tokio::test]
async fn a_wrong_password_is_said_to_be_one() {
    if world().await.is_none() {
        return;
    }
    let redis = RedisServer::options().set("requirepass", "secret").start().await;
    for url in [format!("redis://{}", redis.address()), format!("redis://:wrong@{}", redis.address())] {
        let error = RedisStore::connect(&url).await.expect_err("not let in");
        assert!(whole(&error).contains("are user and password in the URL, and correct?"), "{}", whole(&error));
        assert!(!whole(&error).contains("wrong@"), "no secret in {}", whole(&error));
    }
}

/// A server that says which version it has, and to everything else that all is well.
async fn server_of_version(version: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("redis://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.expect("somebody");
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
async fn a_redis_older_than_seven_is_refused() {
    let error = RedisStore::connect(&server_of_version("6.2.14").await).await.expect_err("too old");
    assert!(error.to_string().ends_with("has version 6.2.14, but at least 7.0 is required"), "{error}");
}

/// That is no matter of rights, and passes.
#[tokio::test]
async fn a_replica_at_the_start_is_said_to_be_one() {
    let Some(world) = world().await else { return };
    let master = RedisServer::start().await;
    world.ask(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).await;
    let error = RedisStore::connect(&world.redis.url()).await.expect_err("a replica");
    assert!(matches!(error, RedisConnectError::Unreachable { .. }), "{error}");
    assert!(
        whole(&error).contains("READONLY") && whole(&error).contains("a failover is in progress"),
        "{}",
        whole(&error)
    );
}

#[tokio::test]
async fn messages_that_do_not_come_are_found_out_at_the_start() {
    let Some(world) = world().await else { return };
    world.proxy.all().drop_pushes();
    let error = RedisStore::connect(&world.proxy.url()).await.expect_err("deaf");
    assert!(matches!(error, RedisConnectError::PubSubUnavailable { receivers: 1, received: false, .. }), "{error:?}");
    assert!(error.to_string().contains(&world.proxy.address().to_string()), "{error}");
}

/// What `docs/redis.md` has.
fn smallest_acl() -> Vec<String> {
    let docs = include_str!("../../docs/redis.md");
    let (_, rest) = docs.split_once("ACL SETUSER locks ").expect("the smallest ACL");
    let rules = rest.split("\n```").next().expect("its end").replace("\\\n", " ");
    rules.split_whitespace().map(|rule| rule.trim_matches('\'').to_owned()).collect()
}

async fn user(redis: &RedisServer, rules: &[String]) -> String {
    let parts: Vec<_> =
        ["ACL", "SETUSER", "locks", "reset"].into_iter().chain(rules.iter().map(String::as_str)).collect();
    assert_eq!(redis.command(&parts).await, Reply::Status("OK".to_owned()));
    format!("redis://locks:secret@{}", redis.address())
}

#[tokio::test]
async fn the_smallest_acl_is_enough_for_everything_and_without_any_of_it_the_start_says_what_is_missing() {
    let Some(world) = world().await else { return };
    let rules = smallest_acl();
    let url = user(&world.redis, &rules).await;
    conformance::check(RedisStore::connect(&url).await.expect("it is enough")).await;
    let commands: BTreeSet<_> = rules.iter().filter(|rule| rule.starts_with('+')).collect();
    assert!(commands.len() > 20, "{commands:?}");
    for command in commands {
        let rest: Vec<_> = rules.iter().filter(|rule| *rule != command).cloned().collect();
        let url = user(&world.redis, &rest).await;
        // What is only used to say goodbye, or to see whether somebody is there, is not worth an error.
        match (command.as_str(), RedisStore::connect(&url).await) {
            ("+info" | "+unsubscribe" | "+ping", Ok(_)) => {}
            (_, Err(error @ (RedisConnectError::PermissionDenied { .. } | RedisConnectError::Unreachable { .. }))) => {
                let (text, name) = (whole(&error).to_lowercase(), command.trim_start_matches('+'));
                assert!(text.contains(name) || name.contains('|'), "without {command}: {text}");
                assert!(text.contains(&world.redis.address().to_string()), "without {command}: {text}");
            }
            (_, other) => panic!("without {command}: {other:?}"),
        }
    }
}

/// Another application on the same Redis, with the ACL of `docs/redis.md` for its own prefix.
#[tokio::test]
async fn a_neighbour_with_the_smallest_acl_cannot_touch_the_locks_of_another_prefix() {
    let Some(world) = world().await else { return };
    let (one, two) = (world.sound_instance("one").await, world.sound_instance("two").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("in line", async || world.ask(&["LLEN", LINE]).await.integer() == Some(1)).await;
    let waiter = world.ask(&["LRANGE", LINE, "0", "-1"]).await.texts()[0].to_owned();
    let inbox = format!("tower-lock:lock:in:{}", waiter.rsplit_once(':').expect("a number").0);

    let rules: Vec<_> = smallest_acl().iter().map(|rule| rule.replace("lock:*", "shop:*")).collect();
    let rules: Vec<_> = rules.iter().map(|rule| rule.replace(":lock:in", ":shop:in")).collect();
    let url = user(&world.redis, &rules).await;
    works(RedisStore::builder().prefix("shop").connect(&url).await.expect("its own prefix")).await;
    let error = RedisStore::connect(&url).await.expect_err("the prefix of others");
    assert!(matches!(error, RedisConnectError::PermissionDenied { .. }), "{error}");

    let mut neighbour = world.redis.connect().await;
    neighbour.command(&["AUTH", "locks", "secret"]).await.expect("an answer");
    let offer = format!("1 offered 1 {waiter} {NAME}");
    for attempt in [
        &["LRANGE", LINE, "0", "-1"][..],
        &["LPOP", LINE],
        &["DEL", LINE],
        &["RPUSH", LINE, "b:1:1"],
        &["PUBLISH", &inbox, &offer],
        &["SUBSCRIBE", &inbox],
        &["SET", "tower-lock:lock:f", "abc"],
        &["DEL", "tower-lock:lock:f"],
        &["HSET", NAME, &waiter, "1"],
        &["HDEL", NAME, &waiter],
        &["DEL", NAME],
    ] {
        let answer = neighbour.command(attempt).await.expect("an answer");
        assert!(answer.text().is_some_and(|text| text.starts_with("NOPERM")), "{attempt:?}: {answer:?}");
    }
    guard.release().await.expect("ours");
    soon("its turn", waiting).await.expect("runs").expect("its turn").release().await.expect("ours");
}

/// As a server is that somebody else runs: it says little of itself, and knows no `CONFIG`.
#[tokio::test]
async fn a_server_that_does_not_tell_its_version_is_warned_of_and_works() {
    let Some(world) = world().await else { return };
    let rules: Vec<_> = smallest_acl().into_iter().filter(|rule| rule != "+info").collect();
    let url = user(&world.redis, &rules).await;
    let log = Log::default();
    let guard = log.listen();
    let store = RedisStore::connect(&url).await.expect("it works");
    drop(guard);
    assert!(log.text().contains("WARN tower_lock: Redis: its version cannot be read"), "{}", log.text());
    works(store).await;
}

#[tokio::test]
async fn a_server_that_may_throw_locks_away_is_warned_of() {
    let Some(world) = world().await else { return };
    let warned = async || {
        let log = Log::default();
        let guard = log.listen();
        let store = RedisStore::connect(&world.redis.url()).await.expect("it works");
        drop((guard, store));
        log.text()
    };
    world.ask(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;
    assert_eq!(warned().await, "", "without a limit it throws nothing away");
    world.ask(&["CONFIG", "SET", "maxmemory", "100mb"]).await;
    assert!(warned().await.contains("use `noeviction`"), "{}", warned().await);
    world.ask(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await;
    assert_eq!(warned().await, "");
}

/// A certificate of our own, for this machine.
#[cfg(feature = "redis-tls")]
fn certificate(folder: &std::path::Path) -> bool {
    let script = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key -out crt -days 2 \
                  -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext basicConstraints=critical,CA:false";
    let made = std::process::Command::new("sh").args(["-c", script]).current_dir(folder).output();
    made.is_ok_and(|made| made.status.success())
}

#[cfg(feature = "redis-tls")]
#[tokio::test]
async fn a_redis_is_reached_by_tls_and_one_that_nobody_vouches_for_is_not() {
    use tower_lock::deadpool_redis::{
        Manager, Pool,
        redis::{Client, TlsCertificates},
    };
    let Some(world) = world().await else { return };
    let folder = world.redis.folder();
    if !certificate(folder) {
        return tower_lock_faults::skipped("TLS", "openssl");
    }
    let file = |name: &str| folder.join(name).to_str().expect("text").to_owned();
    let port = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound").port();
    for (name, value) in [
        ("tls-cert-file", file("crt")),
        ("tls-key-file", file("key")),
        ("tls-ca-cert-file", file("crt")),
        ("tls-auth-clients", "no".to_owned()),
        ("tls-port", port.to_string()),
    ] {
        let answer = world.ask(&["CONFIG", "SET", name, &value]).await;
        assert_eq!(answer, Reply::Status("OK".to_owned()), "{name}");
    }
    let url = format!("rediss://localhost:{port}");
    let error = RedisStore::connect(&url).await.expect_err("nobody vouches for it");
    let text = whole(&error);
    assert!(text.contains("certificate") && text.contains("`SSL_CERT_FILE` names other roots"), "{text}");
    let ours = std::fs::read(file("crt")).expect("made");
    let client = Client::build_with_tls(url, TlsCertificates { client_tls: None, root_cert: Some(ours) });
    let address = client.expect("a certificate").get_connection_info().clone();
    let pool = Pool::builder(Manager::new(address.clone()).expect("an address")).build().expect("a pool");
    works(RedisStore::from_pool(pool, address).await.expect("we do")).await;
}

/// Connections go with the runtime on which they were made.
#[test]
fn a_store_outlives_the_runtime_it_was_made_on() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let servers = runtime();
    let Some(world) = servers.block_on(world()) else { return };
    let one = runtime();
    let locks = one.block_on(world.sound_instance("a"));
    let guard = one.block_on(locks.lock(key()).into_future()).expect("free");
    drop(one);
    runtime().block_on(async {
        guard.release().await.expect("given back from another one");
        locks.lock(key()).await.expect("free").release().await.expect("ours");
        let channels = async || world.ask(&["PUBSUB", "CHANNELS"]).await.items().len();
        until("it listens from here", async || channels().await == 1).await;
    });
    // Where no runtime is, nothing panics.
    drop(locks);
}

/// It is there still, and does nothing.
#[test]
fn a_store_works_though_the_runtime_it_was_made_on_stands_still() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (servers, still) = (runtime(), runtime());
    let Some(world) = servers.block_on(world()) else { return };
    let locks = still.block_on(world.sound_instance("a"));
    servers.block_on(async {
        until("it works", async || match locks.lock(key()).await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        })
        .await;
        let channels = async || world.ask(&["PUBSUB", "CHANNELS"]).await.items().len();
        until("and it listens from here", async || {
            let _ = locks.lock(key()).await.map(|guard| drop(guard.release()));
            channels().await == 1
        })
        .await;
    });
    drop(still);
}

/// Connections, channels and tasks are as before.
#[tokio::test]
async fn a_store_that_is_dropped_leaves_nothing() {
    let Some(world) = world().await else { return };
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let clients = async || world.ask(&["CLIENT", "LIST"]).await.text().map_or(0, |text| text.lines().count());
    let channels = async || world.ask(&["PUBSUB", "CHANNELS"]).await.items().len();
    // Whoever asked before may not have been seen to leave yet.
    until("one who asks", async || clients().await == 1).await;
    let before = (1, tasks());
    let (one, two) = (world.sound_instance("a").await, world.sound_instance("b").await);
    let guard = one.lock(key()).await.expect("free");
    let waiting = tokio::spawn(two.lock(key()).into_future());
    until("both listen", async || channels().await == 2).await;
    until("three each", async || clients().await == before.0 + 6).await;
    guard.release().await.expect("ours");
    soon("its turn", waiting).await.expect("runs").expect("its turn").release().await.expect("ours");
    // A handle that is dropped is heard no more, though its store lives on.
    let store: Arc<dyn LockStore> = Arc::new(RedisStore::connect(&world.redis.url()).await.expect("it is up"));
    drop((one, two));
    until("nobody listens", async || channels().await == 0).await;
    let third = LockManager::new(Arc::clone(&store));
    until("it listens", async || channels().await == 1).await;
    drop(third);
    until("it does not", async || channels().await == 0).await;
    drop(store);
    until("as before", async || (clients().await, tasks()) == before).await;
    assert_eq!(world.keys().await, [""; 0]);
}

/// Both are started at once, and Redis takes a moment longer.
#[tokio::test]
async fn a_server_that_comes_up_a_moment_later_is_found() {
    if world().await.is_none() {
        return;
    }
    let mut redis = RedisServer::start().await;
    redis.kill();
    let (url, limit) = (redis.url(), Duration::from_secs(30));
    let connects = tokio::spawn(async move { RedisStore::builder().connect_timeout(limit).connect(&url).await });
    sleep(ms(300)).await;
    assert!(!connects.is_finished(), "it tries again");
    redis.restart().await;
    works(connects.await.expect("runs").expect("it is up now")).await;
}

#[tokio::test]
async fn a_lazy_store_starts_without_redis_and_works_as_soon_as_it_is_there() {
    if world().await.is_none() {
        return;
    }
    let mut redis = RedisServer::start().await;
    redis.kill();
    let locks = LockManager::new(RedisStore::connect_lazy(&redis.url()).expect("an address"));
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Store(_))));
    assert_eq!(locks.health().await.expect_err("down").kind(), StoreErrorKind::Unavailable);
    redis.restart().await;
    until("it is ready", async || locks.health().await.is_ok()).await;
    locks.lock(key()).await.expect("up").release().await.expect("ours");
    redis.freeze();
    assert_eq!(locks.health().await.expect_err("stopped").kind(), StoreErrorKind::Timeout);
    redis.thaw();
    until("it is ready again", async || locks.health().await.is_ok()).await;
    assert!(matches!(RedisStore::connect_lazy("localhost:6379"), Err(RedisConnectError::InvalidUrl(_))));
    let error = RedisStore::builder().prefix("a:b").connect_lazy(&redis.url()).expect_err("no prefix");
    assert!(matches!(error, RedisConnectError::InvalidPrefix(_)), "{error}");
}

/// What `connect` would have said is said as soon as it is known.
#[tokio::test]
async fn a_lazy_store_reports_what_its_redis_cannot_do() {
    let Some(world) = world().await else { return };
    let log = Log::default();
    let guard = log.listen();
    let old = LockManager::new(RedisStore::connect_lazy(&server_of_version("6.2.14").await).expect("an address"));
    let mut reason = String::new();
    until("it is told", async || {
        reason = whole(&old.health().await.expect_err("too old"));
        reason.contains("6.2.14")
    })
    .await;
    until("it is in the log", async || log.text().contains("6.2.14")).await;
    drop((old, guard));

    let rules: Vec<_> = smallest_acl().into_iter().filter(|rule| rule != "+publish").collect();
    let url = user(&world.redis, &rules).await;
    let locks = LockManager::new(RedisStore::connect_lazy(&url).expect("an address"));
    until("a right is missing", async || {
        let error = locks.health().await.expect_err("no right to publish");
        error.kind() == StoreErrorKind::Refused && whole(&error).contains("PUBLISH")
    })
    .await;
    user(&world.redis, &smallest_acl()).await;
    until("it has the right now", async || locks.health().await.is_ok()).await;
}

#[tokio::test]
async fn the_timeouts_of_a_store_have_bounds() {
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

/// As `main` prints it: `Debug`.
#[tokio::test]
async fn an_address_that_does_not_work_is_named_without_its_password_and_each_cause_once() {
    let short = || RedisStore::builder().connect_timeout(ms(50));
    let said = async |url: &str| format!("{:?}", short().connect(url).await.expect_err("nobody there"));
    let port = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound").port();
    let text = said(&format!("redis://ann:s3cret@127.0.0.1:{port}")).await;
    assert!(text.contains(&format!("127.0.0.1:{port}")) && !text.contains("s3cret") && !text.contains("ann"), "{text}");
    assert_eq!(text.matches("refused").count(), 1, "{text}");
    for (url, says) in [
        ("localhost:6379", "did you mean `redis://localhost:6379`?"),
        ("ann:s3cret@localhost:6379", "did you mean `redis://localhost:6379`?"),
        ("", "it is empty"),
        ("http://localhost", "its scheme is not `redis`"),
        ("redis://ann:s3#cret@127.0.0.1:1", "must be encoded: `%40`, `%23`"),
        ("redis://:12#s3cret@127.0.0.1:1", "must be encoded: `%40`, `%23`"),
        ("redis://ann:s3@cret@127.0.0.1:1", "must be encoded: `%40`, `%23`"),
    ] {
        let text = said(url).await;
        assert!(text.contains(says) && !text.contains("cret"), "{url}: {text}");
    }
}

/// A server that lies: what it sends has no end.
#[tokio::test]
async fn a_reply_without_an_end_is_cut_and_does_not_fill_the_memory() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("redis://{}", listener.local_addr().expect("bound"));
    let most = Arc::new(AtomicUsize::new(0));
    let sent = Arc::clone(&most);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let sent = Arc::clone(&sent);
            tokio::spawn(async move {
                let part = vec![b'x'; 1 << 16];
                let mut bytes = client.write(b"+").await.unwrap_or(0);
                while let Ok(written) = client.write(&part).await {
                    bytes += written;
                    sent.fetch_max(bytes, SeqCst);
                }
            });
        }
    });
    let error = RedisStore::builder().connect_timeout(ms(300)).connect(&url).await.expect_err("no Redis");
    assert!(whole(&error).contains("more than 1024 KiB"), "{}", whole(&error));
    // The limit, and what the kernel keeps on both sides.
    let most = most.load(SeqCst);
    assert!(most > 1 << 20 && most < 64 << 20, "{most}");
}
