//! Each fault has the documented effect on a real server and its clients.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::{
    io::BufRead,
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::{sleep, timeout};
use tower_lock_testkit::{
    Chaos, Connection, Direction, MariaDb, NetworkFault, Process, Proxy, RedisCluster, RedisServer, Reply, skipped,
    wait::soon,
};

/// Long enough to show that nothing arrives.
const A_WHILE: Duration = Duration::from_millis(200);

struct Environment {
    redis: RedisServer,
    proxy: Proxy,
}

impl Environment {
    /// Returns `None`, with a note on stderr, if there is no server.
    async fn new(test: &str) -> Option<Self> {
        if !RedisServer::is_available() {
            skipped(test, "redis-server");
            return None;
        }
        let redis = RedisServer::start().await;
        let proxy = Proxy::start(redis.address()).await;
        Some(Self { redis, proxy })
    }

    async fn client(&self) -> Connection {
        let mut client = Connection::open(self.proxy.address()).await.expect("it listens");
        client.command(&["PING"]).await.expect("a reply");
        client
    }

    /// The counter on the server, read without the proxy.
    async fn count(&self) -> i64 {
        self.redis.command(&["GET", "n"]).await.integer().unwrap_or(0)
    }

    async fn counts(&self, to: i64) {
        soon("the exchange", async {
            while self.count().await != to {
                sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }

    async fn has_connections(&self, numbers: &[u64]) {
        soon("the exchange", async {
            while self.proxy.connections() != numbers {
                sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }
}

async fn is_silent(client: &mut Connection) -> bool {
    timeout(A_WHILE, client.next()).await.is_err()
}

const INCR: &[&str] = &["INCR", "n"];

#[tokio::test]
async fn cut_before_loses_the_request_and_cut_before_reply_runs_it() {
    let Some(environment) = Environment::new("cuts").await else { return };
    let mut client = environment.client().await;
    environment.proxy.all().next_of("incr", NetworkFault::CutBefore);
    client.command(&["PING"]).await.expect("not this one");
    assert!(client.command(INCR).await.is_err());
    environment.has_connections(&[]).await;
    assert_eq!(environment.count().await, 0);

    let mut client = environment.client().await;
    environment.proxy.connection(1).next(NetworkFault::CutBeforeReply);
    assert!(client.command(INCR).await.is_err() && client.unfinished().is_empty());
    assert_eq!((environment.count().await, environment.proxy.fault_count()), (1, 2));
    // The fault applies once.
    assert_eq!(environment.client().await.command(INCR).await.expect("a reply"), Reply::Integer(2));
}

#[tokio::test]
async fn cut_in_reply_truncates_the_reply() {
    let Some(environment) = Environment::new("a cut in a reply").await else { return };
    environment.redis.command(&["SET", "a", "0123456789"]).await;
    let mut client = environment.client().await;
    environment.proxy.all().next_of("GET", NetworkFault::CutInReply(8));
    assert!(client.command(&["GET", "a"]).await.is_err());
    assert_eq!(client.unfinished(), b"$10\r\n012");
}

#[tokio::test]
async fn cut_closes_both_sides_of_one_connection() {
    let Some(environment) = Environment::new("a cut at once").await else { return };
    let (mut one, mut other) = (environment.client().await, environment.client().await);
    environment.proxy.connection(0).cut();
    assert!(soon("a message", one.next()).await.is_err());
    environment.has_connections(&[1]).await;
    other.command(&["PING"]).await.expect("it goes on");
    soon("the exchange", async {
        // The remaining client, and the connection of this command.
        while environment.redis.command(&["CLIENT", "LIST"]).await.text().expect("text").lines().count() != 2 {
            sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn duplicated_request_runs_twice_and_has_one_reply() {
    let Some(environment) = Environment::new("doubles").await else { return };
    let mut client = environment.client().await;
    environment.proxy.all().next_of("INCR", NetworkFault::Double);
    // Replies match their requests in a pipeline, too.
    for command in [&["ECHO", "before"], INCR, &["ECHO", "after"]] {
        client.send(command).await.expect("sent");
    }
    assert_eq!(client.next().await.expect("a reply").text(), Some("before"));
    assert_eq!(client.next().await.expect("a reply"), Reply::Integer(2), "the second one");
    assert_eq!(client.next().await.expect("a reply").text(), Some("after"));
    assert_eq!(environment.count().await, 2);
}

#[tokio::test]
async fn copy_of_a_request_runs_later_without_its_connection() {
    let Some(environment) = Environment::new("copies").await else { return };
    let mut client = environment.client().await;
    environment.proxy.all().next_of("INCR", NetworkFault::Again(A_WHILE * 2));
    assert_eq!(client.command(INCR).await.expect("a reply"), Reply::Integer(1));
    drop(client);
    sleep(A_WHILE).await;
    assert_eq!(environment.count().await, 1);
    environment.counts(2).await;
}

#[tokio::test]
async fn held_bytes_arrive_after_heal() {
    let Some(environment) = Environment::new("held back").await else { return };
    let mut client = environment.client().await;
    environment.proxy.all().hold(Direction::Up);
    client.send(INCR).await.expect("taken");
    assert!(is_silent(&mut client).await && environment.count().await == 0);
    environment.proxy.all().heal();
    assert_eq!(soon("a message", client.next()).await.expect("a reply"), Reply::Integer(1));

    environment.proxy.all().hold(Direction::Down);
    client.send(INCR).await.expect("taken");
    environment.counts(2).await;
    assert!(is_silent(&mut client).await);
    environment.proxy.all().heal();
    assert_eq!(soon("a message", client.next()).await.expect("a reply"), Reply::Integer(2));
}

/// A disconnect does not revoke the requests that were sent.
#[tokio::test]
async fn held_bytes_outlive_their_client_unless_cut() {
    let Some(environment) = Environment::new("ghosts").await else { return };
    for (cut, counts) in [(true, 0), (false, 1)] {
        let mut client = environment.client().await;
        environment.proxy.all().hold(Direction::Both);
        client.send(INCR).await.expect("taken");
        drop(client);
        sleep(A_WHILE).await;
        assert_eq!(environment.count().await, 0);
        if cut {
            environment.proxy.all().cut();
            environment.has_connections(&[]).await;
        }
        environment.proxy.all().heal();
        environment.counts(counts).await;
        environment.has_connections(&[]).await;
    }
}

#[tokio::test]
async fn swallowed_bytes_are_lost_and_heal_cuts_the_connection() {
    let Some(environment) = Environment::new("swallowed").await else { return };
    for (direction, counts) in [(Direction::Up, 0), (Direction::Down, 1), (Direction::Both, 1)] {
        let (mut client, mut idle) = (environment.client().await, environment.client().await);
        environment.proxy.all().swallow(direction);
        client.send(INCR).await.expect("taken");
        assert!(is_silent(&mut client).await);
        assert_eq!(environment.count().await, counts);
        environment.proxy.all().heal();
        assert!(soon("a message", client.next()).await.is_err(), "a connection that lost data breaks");
        idle.command(&["PING"]).await.expect("an idle connection lost no data");
    }
}

#[tokio::test]
async fn delays_are_per_direction_and_per_request() {
    let Some(environment) = Environment::new("delays").await else { return };
    let mut client = environment.client().await;
    environment.proxy.all().delay(Direction::Up, A_WHILE * 2);
    client.send(INCR).await.expect("taken");
    assert!(is_silent(&mut client).await && environment.count().await == 0);
    assert_eq!(soon("a message", client.next()).await.expect("a reply"), Reply::Integer(1));
    environment.proxy.all().heal();

    environment.proxy.all().delay(Direction::Down, A_WHILE * 4);
    client.send(INCR).await.expect("taken");
    environment.counts(2).await;
    assert!(is_silent(&mut client).await);
    assert_eq!(soon("a message", client.next()).await.expect("a reply"), Reply::Integer(2));
    environment.proxy.all().heal();

    environment.proxy.all().next_of("INCR", NetworkFault::Late(A_WHILE * 2));
    client.send(INCR).await.expect("taken");
    assert!(is_silent(&mut client).await && environment.count().await == 2);
    assert_eq!(soon("a message", client.next()).await.expect("a reply"), Reply::Integer(3));
}

#[tokio::test]
async fn messages_are_dropped_duplicated_and_rewritten() {
    let Some(environment) = Environment::new("messages").await else { return };
    let (mut listener, other) = (environment.client().await, environment.client().await);
    listener.send(&["SUBSCRIBE", "a", "b"]).await.expect("sent");
    for channel in ["a", "b"] {
        assert_eq!(listener.next().await.expect("a reply").items()[1].text(), Some(channel));
    }
    assert_eq!(environment.proxy.subscribers(), [0]);
    drop(other);
    let payload = |message: &Reply| message.items()[2].text().map(str::to_owned);

    environment.proxy.all().drop_pushes();
    assert_eq!(environment.redis.command(&["PUBLISH", "a", "lost"]).await, Reply::Integer(1));
    let pong = soon("a reply", listener.command(&["PING"])).await.expect("a reply");
    assert_eq!(pong.items()[0].text(), Some("pong"), "the message is dropped, the reply is not");

    environment.proxy.connection(0).double_pushes();
    environment.redis.command(&["PUBLISH", "a", "twice"]).await;
    for _ in 0..2 {
        assert_eq!(payload(&soon("a message", listener.next()).await.expect("a message")).as_deref(), Some("twice"));
    }
    environment.proxy.all().rewrite_pushes(|push| [&push.channel[..], b":", &push.payload].concat());
    environment.redis.command(&["PUBLISH", "b", "other"]).await;
    let message = soon("a message", listener.next()).await.expect("a message");
    assert_eq!((payload(&message).as_deref(), message.items()[1].text()), (Some("b:other"), Some("b")));
    environment.proxy.all().heal();
    environment.redis.command(&["PUBLISH", "b", "as it is"]).await;
    assert_eq!(payload(&soon("a message", listener.next()).await.expect("a message")).as_deref(), Some("as it is"));
    assert!(is_silent(&mut listener).await);
}

#[tokio::test]
async fn resp3_is_understood() {
    let Some(environment) = Environment::new("RESP3").await else { return };
    let mut client = environment.client().await;
    client.command(&["HELLO", "3"]).await.expect("a reply");
    client.command(&["SUBSCRIBE", "a"]).await.expect("a reply");
    environment.proxy.all().rewrite_pushes(|_| b"other".to_vec());
    environment.redis.command(&["PUBLISH", "a", "one"]).await;
    let message = soon("a message", client.next()).await.expect("a message");
    assert!(matches!(&message, Reply::Push(items) if items[2].text() == Some("other")), "{message:?}");
    // Messages between the copies and the replies on one connection.
    environment.proxy.all().next_of("INCR", NetworkFault::Double);
    assert_eq!(client.command(INCR).await.expect("a reply"), Reply::Integer(2));
    environment.proxy.all().next_of("INCR", NetworkFault::CutBeforeReply);
    assert!(client.command(INCR).await.is_err());
    assert_eq!(environment.count().await, 3);
}

#[tokio::test]
async fn new_connections_are_refused_and_old_ones_stay() {
    let Some(environment) = Environment::new("refused").await else { return };
    let mut old = environment.client().await;
    environment.proxy.refuse(true).await;
    let refused = Connection::open(environment.proxy.address()).await.map(drop);
    assert_eq!(refused.expect_err("refused").kind(), std::io::ErrorKind::ConnectionRefused);
    old.command(&["PING"]).await.expect("it goes on");
    environment.proxy.refuse(false).await;
    environment.client().await;
    assert_eq!(environment.proxy.arrived(), 2);
}

#[tokio::test]
async fn requests_are_counted_and_observed() {
    let Some(environment) = Environment::new("the observer").await else { return };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let see = Arc::clone(&seen);
    environment.proxy.observe(move |request| see.lock().expect("no panic").push(request.parts.concat()));
    let mut client = environment.client().await;
    client.command(&["set", "a", "1"]).await.expect("a reply");
    assert_eq!(*seen.lock().expect("no panic"), [b"PING".to_vec(), b"seta1".to_vec()]);
    let counts = environment.proxy.requests();
    assert_eq!((counts["PING"], counts["SET"]), (1, 1));
    environment.proxy.forget_requests();
    assert!(environment.proxy.requests().is_empty());
}

#[tokio::test]
async fn chaos_hits_some_requests_once_each() {
    let Some(environment) = Environment::new("chaos").await else { return };
    environment.proxy.chaos(Some(Chaos::new(1).cut(20).double(100).late(50, Duration::from_millis(2))));
    let (mut answered, mut broken, mut client) = (0, 0, None);
    for _ in 0..500 {
        let asked = match &mut client {
            Some(client) => Connection::command(client, INCR).await,
            None => {
                let fresh = client.insert(Connection::open(environment.proxy.address()).await.expect("it listens"));
                fresh.command(INCR).await
            }
        };
        match asked {
            Ok(_) => answered += 1,
            Err(_) => (broken, client) = (broken + 1, None),
        }
    }
    let (done, faults) = (environment.count().await, environment.proxy.fault_count());
    assert_eq!(answered + broken, 500);
    assert!(broken > 0 && i64::try_from(faults).expect("few") > broken, "{broken} broken, {faults} faults");
    assert!(done > answered, "{done} done, {answered} answered: some twice, some without a reply");
    environment.proxy.chaos(None);
    let before = environment.proxy.fault_count();
    let mut client = environment.client().await;
    for _ in 0..100 {
        client.command(INCR).await.expect("nothing goes wrong");
    }
    assert_eq!((environment.count().await - done, environment.proxy.fault_count()), (100, before));
}

#[tokio::test]
async fn other_protocols_pass_unchanged() {
    let Some(environment) = Environment::new("other protocols").await else { return };
    for proxy in [Proxy::start(environment.redis.address()).await, Proxy::start_raw(environment.redis.address()).await]
    {
        let mut plain = tokio::net::TcpStream::connect(proxy.address()).await.expect("it listens");
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        plain.write_all(b"PING in line\r\n*1\r\n$4\r\nPING\r\n").await.expect("taken");
        let mut read = Vec::new();
        while !read.ends_with(b"+PONG\r\n") {
            assert_ne!(soon("more bytes", plain.read_buf(&mut read)).await.expect("open"), 0);
        }
        proxy.all().delay(Direction::Up, A_WHILE * 2);
        plain.write_all(b"PING\r\n").await.expect("taken");
        assert!(timeout(A_WHILE, plain.read_buf(&mut read)).await.is_err(), "delays are for all");
    }
}

#[tokio::test]
async fn cluster_serves_all_slots_and_a_failover_promotes_a_replica() {
    if !RedisServer::is_available() {
        return skipped("a cluster", "redis-server");
    }
    let mut cluster = RedisCluster::start(3, 1).await;
    assert_eq!(cluster.masters().await, [0, 1, 2]);
    for key in ["", "a", "{a}b", "{}a", "b{a", "b{a}{c}", "ü"] {
        let slot = cluster.command(0, &["CLUSTER", "KEYSLOT", key]).await;
        assert_eq!(slot.integer(), Some(RedisCluster::slot(key).into()), "{key:?}");
    }
    for key in 0..20 {
        let key = &*key.to_string();
        assert_eq!(cluster.command_for(key, &["SET", key, "1"]).await.text(), Some("OK"));
    }

    let master = cluster.owner("a").await;
    cluster.command_for("a", &["SET", "a", "1"]).await;
    let promoted = cluster.failover(master).await;
    assert_eq!((promoted, cluster.owner("a").await), (master + 3, promoted));
    assert_eq!(cluster.command_for("a", &["GET", "a"]).await.integer(), Some(1));
    cluster.restart(master).await;
    assert_eq!(cluster.replicas_of(promoted).await, [master]);
    assert_eq!(cluster.planned_failover(promoted).await, master);
    assert_eq!(cluster.command_for("a", &["GET", "a"]).await.integer(), Some(1));

    // A stopped master is replaced, and is a replica when it goes on.
    let other = (master + 1) % 3;
    cluster.freeze(other);
    assert_eq!(cluster.promoted(other).await, other + 3);
    cluster.thaw(other);
    cluster.rejoined(other).await;
    assert_eq!(cluster.replicas_of(other + 3).await, [other]);
}

#[tokio::test]
async fn slots_move_with_their_keys_and_half_moved_ones_redirect() {
    if !RedisServer::is_available() {
        return skipped("slots that move", "redis-server");
    }
    let mut cluster = RedisCluster::options().user("someone", "secret").start(1, 1).await;
    assert_eq!(cluster.url(), format!("redis+cluster://someone:secret@{}", cluster.addresses().join(",")));
    let (from, to) = (0, cluster.add_empty_master().await);
    assert_eq!((cluster.masters().await, to), (vec![from], 2));
    let slot = RedisCluster::slot("{a}");
    for key in ["{a}1", "{a}2"] {
        assert_eq!(cluster.command_for(key, &["SET", key, "1"]).await.text(), Some("OK"));
    }
    cluster.begin_move(slot, from, to).await;
    cluster.migrate(from, to, &["{a}1"]).await.expect("it responds");
    let ask = cluster.command(from, &["GET", "{a}1"]).await;
    assert_eq!(ask.text(), Some(&*format!("ASK {slot} {}", cluster.addresses()[to])));
    assert_eq!(cluster.command(from, &["GET", "{a}2"]).await.integer(), Some(1));
    let both = cluster.command(from, &["MGET", "{a}1", "{a}2"]).await;
    assert!(both.text().is_some_and(|text| text.starts_with("TRYAGAIN")), "{both:?}");
    cluster.stop_move(slot, from, to).await;
    assert_eq!((cluster.owner("{a}").await, cluster.keys_in(to, slot, 9).await), (from, vec!["{a}1".to_owned()]));

    // The key at both nodes stops the move.
    cluster.command(from, &["SET", "{a}1", "other"]).await;
    let refused = cluster.move_slot(slot, from, to).await.expect_err("a key at both");
    assert!(refused.contains("BUSYKEY"), "{refused}");
    cluster.command(from, &["DEL", "{a}1"]).await;
    cluster.move_keys(slot, from, to).await.expect("it responds");
    cluster.finish_move(slot, from, to).await;
    assert_eq!((cluster.owner("{a}").await, cluster.keys_in(from, slot, 9).await), (to, Vec::new()));
    assert_eq!(cluster.command_for("{a}2", &["GET", "{a}2"]).await.integer(), Some(1));

    // `redis-cli` takes the first slots. Slot 0 has the empty key.
    cluster.command(from, &["SET", "", "1"]).await;
    cluster.begin_move(0, from, to).await;
    cluster.migrate(from, to, &[""]).await.expect("it responds");
    cluster.stop_move(0, from, to).await;
    cluster.command(from, &["SET", "", "other"]).await;
    match cluster.reshard(2, from, to).await {
        Err(missing) if missing.contains("not there") => return skipped("a reshard", "redis-cli"),
        refused => assert!(refused.as_ref().is_err_and(|said| said.contains("Target key exists")), "{refused:?}"),
    }
    cluster.command(from, &["DEL", ""]).await;
    cluster.move_keys(0, from, to).await.expect("it responds");
    cluster.finish_move(0, from, to).await;
    cluster.reshard(2, from, to).await.expect("no key at both");
    assert_eq!(cluster.slots_of(to).await, [0, 1, 2, slot]);
}

/// The killed process is this test program, started again.
#[tokio::test]
async fn servers_die_with_a_killed_test() {
    const CHILD: &str = "TOWER_LOCK_FAULTS_WAITS_TO_BE_KILLED";
    if !RedisServer::is_available() {
        return skipped("death of a test", "redis-server");
    }
    if std::env::var_os(CHILD).is_some() {
        let redis = RedisServer::start().await;
        let mariadb = if MariaDb::is_available() { Some(MariaDb::start(&[]).await) } else { None };
        // MariaDB runs as another user; a change of the user clears the parent-death signal.
        println!("\npids {} {}", redis.pid(), mariadb.as_ref().map_or(redis.pid(), MariaDb::pid));
        std::future::pending::<()>().await;
    }
    let mut command = Process::command(std::env::current_exe().expect("a path"));
    command.args(["--exact", "--nocapture", "servers_die_with_a_killed_test"]);
    command.env(CHILD, "1").stdout(Stdio::piped()).stderr(Stdio::null());
    let test = Process::start(command).expect("it starts");
    let mut lines = std::io::BufReader::new(test.take_stdout().expect("piped")).lines();
    let pids =
        lines.find_map(|line| Some(line.expect("text").strip_prefix("pids ")?.to_owned())).expect("the process ids");
    let programs: Vec<_> = pids.split(' ').map(|pid| format!("/proc/{pid}/exe")).collect();
    // A zombie process has no program.
    let running = || programs.iter().filter(|program| std::fs::read_link(program).is_ok()).count();
    assert_eq!(running(), 2);
    test.kill();
    soon("the exchange", async {
        while running() != 0 {
            sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}
