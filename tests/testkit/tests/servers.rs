//! The faults that other tests rely on without noticing: a fault that does nothing would let them
//! pass.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime and wait in real time")]

use std::{io::BufRead, process::Stdio, time::Duration};

use tokio::time::{Instant, sleep, timeout};
use tower_lock_testkit::{
    Chaos, Connection, Direction, MariaDb, NetworkFault, Process, Proxy, RedisCluster, RedisServer, Reply, skipped,
    wait::{soon, until},
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
        until("the count", async || self.count().await == to).await;
    }
}

async fn is_silent(client: &mut Connection) -> bool {
    timeout(A_WHILE, client.next()).await.is_err()
}

const INCR: &[&str] = &["INCR", "n"];

#[tokio::test]
async fn fault_of_a_request_applies_once() {
    let Some(environment) = Environment::new("faults of requests").await else { return };
    // The value in the reply, and how often the request runs.
    for (fault, reply, runs) in [
        (NetworkFault::CutBefore, None, 0),
        (NetworkFault::Refused, Some(None), 0),
        (NetworkFault::CutBeforeReply, None, 1),
        (NetworkFault::CutInReply(2), None, 1),
        (NetworkFault::Double, Some(Some(2)), 2),
        (NetworkFault::Late(A_WHILE), Some(Some(1)), 1),
        (NetworkFault::Again(A_WHILE), Some(Some(1)), 2),
        (NetworkFault::Orphaned(A_WHILE), None, 1),
    ] {
        environment.redis.command(&["DEL", "n"]).await;
        let mut client = environment.client().await;
        environment.proxy.all().next_of("incr", fault);
        client.command(&["PING"]).await.expect("not this one");
        let sent = Instant::now();
        let got = client.command(INCR).await.ok().map(|reply| reply.integer());
        assert_eq!(got, reply, "{fault:?}");
        assert_eq!(client.unfinished(), if fault == NetworkFault::CutInReply(2) { b":1" } else { &b""[..] });
        assert!(!matches!(fault, NetworkFault::Late(_)) || sent.elapsed() >= A_WHILE, "{fault:?}");
        // A copy runs without its connection.
        drop(client);
        environment.counts(runs).await;
        let has_a_copy = matches!(fault, NetworkFault::Again(_) | NetworkFault::Orphaned(_));
        assert!(!has_a_copy || sent.elapsed() >= A_WHILE, "{fault:?}");
        assert_eq!(environment.client().await.command(INCR).await.expect("a reply"), Reply::Integer(runs + 1));
    }
    assert_eq!(environment.proxy.fault_count(), 8);
}

#[tokio::test]
async fn bytes_are_held_swallowed_and_delayed_in_a_direction() {
    let Some(environment) = Environment::new("faults of bytes").await else { return };
    let mut runs = 0;
    for direction in [Direction::Up, Direction::Down, Direction::Both] {
        let arrives = i64::from(direction == Direction::Down);
        let mut client = environment.client().await;
        environment.proxy.all().hold(direction);
        client.send(INCR).await.expect("taken");
        environment.counts(runs + arrives).await;
        assert!(is_silent(&mut client).await && environment.count().await == runs + arrives, "{direction:?}");
        environment.proxy.all().heal();
        runs += 1;
        assert_eq!(soon("a message", client.next()).await.expect("a reply"), Reply::Integer(runs));

        environment.proxy.all().delay(direction, A_WHILE);
        let sent = Instant::now();
        runs += 1;
        assert_eq!(client.command(INCR).await.expect("a reply"), Reply::Integer(runs));
        assert!(sent.elapsed() >= A_WHILE, "{direction:?}");
        environment.proxy.all().heal();

        environment.proxy.all().swallow(direction);
        client.send(INCR).await.expect("taken");
        runs += arrives;
        environment.counts(runs).await;
        assert!(is_silent(&mut client).await && environment.count().await == runs, "{direction:?}");
        environment.proxy.all().heal();
        assert!(soon("a message", client.next()).await.is_err(), "a connection that lost data breaks");
    }
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
            until("both sides are closed", async || environment.proxy.connections().is_empty()).await;
        }
        environment.proxy.all().heal();
        environment.counts(counts).await;
        until("both sides are closed", async || environment.proxy.connections().is_empty()).await;
    }
    // Old connections stay.
    let mut old = environment.client().await;
    environment.proxy.refuse(true).await;
    let refused = Connection::open(environment.proxy.address()).await.map(drop);
    assert_eq!(refused.expect_err("refused").kind(), std::io::ErrorKind::ConnectionRefused);
    old.command(&["PING"]).await.expect("it goes on");
}

#[tokio::test]
async fn messages_are_dropped_duplicated_and_rewritten() {
    let Some(environment) = Environment::new("messages").await else { return };
    for protocol in ["2", "3"] {
        let mut listener = environment.client().await;
        listener.command(&["HELLO", protocol]).await.expect("a reply");
        listener.command(&["SUBSCRIBE", "a"]).await.expect("a reply");
        environment.proxy.all().drop_pushes();
        assert_eq!(environment.redis.command(&["PUBLISH", "a", "lost"]).await, Reply::Integer(1));
        soon("a reply", listener.command(&["PING"])).await.expect("the message is dropped, the reply is not");
        environment.proxy.all().double_pushes();
        environment.redis.command(&["PUBLISH", "a", "twice"]).await;
        let mut got = [listener.next().await.expect("a message"), listener.next().await.expect("a message")].to_vec();
        environment.proxy.all().rewrite_pushes(|push| [&push.channel[..], b":", &push.payload].concat());
        environment.redis.command(&["PUBLISH", "a", "other"]).await;
        got.push(listener.next().await.expect("a message"));
        environment.proxy.all().heal();
        environment.redis.command(&["PUBLISH", "a", "as it is"]).await;
        got.push(listener.next().await.expect("a message"));
        let payloads: Vec<_> = got.iter().map(|message| message.items()[2].text().expect("text")).collect();
        assert_eq!(payloads, ["twice", "twice", "a:other", "as it is"]);
        assert_eq!(matches!(got[2], Reply::Push(_)), protocol == "3");
        // Messages between the copies and the replies of one connection.
        environment.proxy.all().next_of("ECHO", NetworkFault::Double);
        assert!(protocol == "2" || listener.command(&["ECHO", "x"]).await.expect("a reply").text() == Some("x"));
        environment.proxy.all().cut();
    }
}

#[tokio::test]
async fn chaos_hits_some_requests_once_each() {
    let Some(environment) = Environment::new("chaos").await else { return };
    environment.proxy.chaos(Some(Chaos::new(1).cut(100).double(200)));
    let (mut answered, mut broken) = (0, 0);
    for _ in 0..100 {
        let mut client = Connection::open(environment.proxy.address()).await.expect("it listens");
        if client.command(INCR).await.is_ok() { answered += 1 } else { broken += 1 }
    }
    let (runs, faults) = (environment.count().await, environment.proxy.fault_count());
    assert!(broken > 0 && i64::try_from(faults).expect("few") > broken, "{broken} broken, {faults} faults");
    assert!(runs > answered, "{runs} runs, {answered} answered: some twice, some without a reply");
}

/// A move that does not begin would let the tests of slots that move pass.
#[tokio::test]
async fn half_moved_slot_of_a_cluster_redirects() {
    if !RedisServer::is_available() {
        return skipped("slots that move", "redis-server");
    }
    let mut cluster = RedisCluster::start(1, 0).await;
    let (from, to) = (0, cluster.add_empty_master().await);
    let slot = RedisCluster::slot("b{a}{c}");
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
    until("all of them have ended", async || running() == 0).await;
}
