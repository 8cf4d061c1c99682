//! Compares the fake Redis with a real one: random calls of the crate's scripts on both.
#![allow(clippy::disallowed_methods, reason = "tests run within a runtime")]

use std::time::Duration;

use tower_lock::{
    __internals::redis_wire::{InvalidName, Keyspace, RaiseRequest, ScriptCall},
    AcquisitionId, LockKey,
    deadpool_redis::redis::Value,
    store::{
        AcquireRequest, Demand, ForceReleaseRequest, Heir, IfBusy, QueueConfig, Record, ReleaseRequest, RenewRequest,
        YieldRequest,
    },
};
use tower_lock_simulator::fake::{Dump, FakeRedis};
use tower_lock_testkit::{Connection, RedisServer, Reply, skipped};

const SEQUENCES: u64 = 150;
const CALLS: usize = 30;
/// Three subscribed processes and one that is not.
const PROCESSES: [&str; 4] = ["a:01", "b:02", "c:03", "dead:04"];
/// Longer than the two clocks can differ on a busy machine, and shorter than the difference of any
/// two durations.
const TOLERANCE: i64 = 900;

struct Both {
    fake: FakeRedis,
    real: Connection,
    listener: Connection,
    names: Keyspace,
    keys: Vec<LockKey>,
    rng: fastrand::Rng,
    /// All calls, for a failure message.
    calls: Vec<String>,
}

/// Invalid fence counters. A larger number would be replaced by the clock of each server.
const NO_FENCES: [&str; 4] = ["0", "-5", "-inf", "1e15"];

impl Both {
    async fn new(server: &RedisServer) -> Self {
        let mut listener = server.connect().await;
        for process in &PROCESSES[..3] {
            listener.command(&["SUBSCRIBE", &format!("tower-lock:lock:in:{process}")]).await.expect("a reply");
        }
        listener.command(&["SUBSCRIBE", "end"]).await.expect("a reply");
        Self {
            fake: FakeRedis::new(&[]),
            real: server.connect().await,
            listener,
            names: Keyspace::new("lock").expect("a prefix"),
            keys: [LockKey::from(("n", 1)), LockKey::raw("shop{7} x").expect("a name")]
                .into_iter()
                .chain((2..6).map(|n| LockKey::from(("n", n))))
                .collect(),
            rng: fastrand::Rng::new(),
            calls: Vec::new(),
        }
    }

    async fn begin(&mut self, seed: u64) {
        self.rng = fastrand::Rng::with_seed(seed);
        self.calls = vec![format!("seed {seed}")];
        self.real.command(&["FLUSHALL"]).await.expect("a reply");
        self.fake.data().flush();
        let listens = |process: &&str| (format!("tower-lock:lock:in:{process}"), 1);
        self.fake.data().listeners = PROCESSES[..3].iter().map(listens).collect();
        self.fake.data().listeners.insert("end".to_owned(), 1);
    }

    fn id(&mut self) -> AcquisitionId {
        let process = PROCESSES[self.rng.usize(0..PROCESSES.len())];
        // One in four may be replaced.
        let kind = if self.rng.u8(0..4) == 0 { "/1" } else { "" };
        AcquisitionId::from_text(&format!("{process}:{}{kind}", self.rng.u8(0..3)))
    }

    /// An acquisition that may hold a key with others.
    fn share(&mut self) -> AcquisitionId {
        let (alone, limit) = (self.id(), [2, 3, 1_024][self.rng.usize(0..3)]);
        AcquisitionId::from_text(&format!("{}:{}/{limit}", alone.manager(), alone.sequence()))
    }

    fn demand(&mut self) -> Demand {
        if self.rng.bool() { Demand::new().unless_recorded() } else { Demand::new() }
    }

    fn seconds(&mut self) -> Duration {
        Duration::from_secs(2 * self.rng.u64(5..30))
    }

    fn call(&mut self, now_us: i64) -> ScriptCall {
        let key = self.keys[usize::from(self.rng.u8(0..4) == 0)].clone();
        let queue = QueueConfig::new(self.seconds(), self.seconds(), self.rng.usize(1..4));
        let (id, lease) = (self.id(), self.seconds());
        let until = now_us + if self.rng.u8(0..10) == 0 { -1 } else { 1_000_000_000 };
        let valid_for = Duration::from_millis(500);
        let block_for = if self.rng.bool() { Duration::ZERO } else { self.seconds() };
        let call = match self.rng.u8(0..36) {
            0..6 => {
                let if_busy = if self.rng.u8(0..4) == 0 { IfBusy::Fail } else { IfBusy::Enqueue };
                let request = AcquireRequest::new(key, id, lease, if_busy, queue, valid_for).demand(self.demand());
                let request = request.repeated(self.rng.bool());
                self.names.acquire(&[request], until)
            }
            6..9 => {
                let request = ReleaseRequest::new(key, id, block_for, queue);
                let request = match self.rng.u8(0..6) {
                    0 => request.record(Record::new("head", Some("body".into())), self.seconds()),
                    1 => request.record(Record::new("", None), self.seconds()),
                    _ => request,
                };
                self.names.release(&[request])
            }
            9..11 => {
                let (next, lock) = (self.id(), self.names.lock(&key).expect("a valid name").to_string());
                let fence = self.fake.data().hash(&lock).first().and_then(|(_, fence)| fence.parse().ok());
                let fence = fence.filter(|_| self.rng.u8(0..4) > 0).unwrap_or(7);
                let request = YieldRequest::new(key, id, fence, next, lease, queue, valid_for);
                let request = request.demand(self.demand());
                self.names.yield_to_queue(&request, until)
            }
            11 => {
                let other = RenewRequest::new(self.keys[1].clone(), self.id(), self.seconds());
                return self.names.renew(&[RenewRequest::new(key, id, lease), other], true);
            }
            12..15 => {
                let keys = self.some_keys();
                let acquires = keys.into_iter().map(|key| {
                    let if_busy = if self.rng.u8(0..4) == 0 { IfBusy::Fail } else { IfBusy::Enqueue };
                    AcquireRequest::new(key, self.id(), self.seconds(), if_busy, queue, valid_for)
                        .repeated(self.rng.bool())
                });
                let acquires: Vec<_> = acquires.collect();
                self.names.acquire(&acquires, until)
            }
            15..18 => {
                let keys = self.some_keys();
                let releases = keys.into_iter().map(|key| {
                    let block_for = if self.rng.u8(0..3) > 0 { Duration::ZERO } else { self.seconds() };
                    let id = self.holder(&key).filter(|_| self.rng.u8(0..4) > 0).unwrap_or_else(|| self.id());
                    ReleaseRequest::new(key, id, block_for, queue)
                });
                let releases: Vec<_> = releases.collect();
                self.names.release(&releases)
            }
            18 => {
                let holder = if self.rng.bool() { None } else { Some(self.share()) };
                self.names.force(&ForceReleaseRequest::new(key, block_for, queue).holder(holder))
            }
            23..27 => {
                let if_busy = if self.rng.u8(0..4) == 0 { IfBusy::Fail } else { IfBusy::Enqueue };
                let request = AcquireRequest::new(self.keys[0].clone(), self.share(), lease, if_busy, queue, valid_for);
                self.names.acquire(&[request.repeated(self.rng.bool())], until)
            }
            27..29 => {
                let share = self.share();
                self.names.release(&[ReleaseRequest::new(self.keys[0].clone(), share, block_for, queue)])
            }
            29 => {
                let share = self.share();
                return self.names.renew(&[RenewRequest::new(self.keys[0].clone(), share, lease)], true);
            }
            30..36 => self.call_of_a_ticket(queue, until),
            20..23 => self.call_of_one_of_several(now_us, until),
            _ => self.names.inspect(&key),
        };
        call.expect("a valid name")
    }

    /// A call of a store on several servers.
    fn call_of_one_of_several(&mut self, now_us: i64, until: i64) -> Result<ScriptCall, InvalidName> {
        let keys = self.some_keys().into_iter().map(|key| {
            let id = self.holder(&key).filter(|_| self.rng.bool()).unwrap_or_else(|| self.id());
            (key, id)
        });
        let keys: Vec<_> = keys.collect();
        let (acquisitions, lease) = (keys.iter().map(|(key, id)| (key, id)), self.seconds());
        match self.rng.u8(0..5) {
            0..2 => self.names.vote(acquisitions, lease, until),
            2..4 => {
                let raises = keys.iter().map(|(key, id)| {
                    // Those of another server whose clock is ahead or behind, also by days.
                    let ahead = self.rng.i64(-1..3) * self.rng.i64(1..50_000_000_000);
                    let fence = u64::try_from(now_us + ahead).expect("after 1970");
                    RaiseRequest { key: key.clone(), id: id.clone(), fence, lease: self.seconds() }
                });
                let raises: Vec<_> = raises.collect();
                self.names.raise(&raises, until)
            }
            _ => self.names.withdraw(acquisitions),
        }
    }

    /// A release that leaves the key to a ticket, or an acquire in place of one.
    fn call_of_a_ticket(&mut self, queue: QueueConfig, until: i64) -> Result<ScriptCall, InvalidName> {
        // A raw key has no tickets.
        let key = self.keys[0].clone();
        let ticket = AcquisitionId::from_text(&format!("work:~ab:{}", self.rng.u8(0..2)));
        let id = if self.rng.u8(0..6) == 0 { self.share() } else { self.id() };
        let holder = self.holder(&key).filter(|_| self.rng.u8(0..4) > 0);
        let lease = self.seconds();
        if self.rng.bool() {
            let request = ReleaseRequest::new(key.clone(), holder.unwrap_or(id), Duration::ZERO, queue);
            return self.names.release(&[request.heir(Heir::new(ticket, lease))]);
        }
        let request = AcquireRequest::new(key.clone(), id, lease, IfBusy::Fail, queue, Duration::from_millis(500));
        self.names.acquire(&[request.in_place_of(Some(holder.unwrap_or(ticket)))], until)
    }

    /// Two to six keys, in any order.
    fn some_keys(&mut self) -> Vec<LockKey> {
        let mut keys = self.keys.clone();
        self.rng.shuffle(&mut keys);
        keys.truncate(self.rng.usize(2..=6));
        keys
    }

    fn holder(&self, key: &LockKey) -> Option<AcquisitionId> {
        let lock = self.names.lock(key).expect("a valid name").to_string();
        self.fake.data().hash(&lock).first().map(|(id, _)| AcquisitionId::from_text(id))
    }

    /// A change that no script of the crate makes.
    async fn disturb(&mut self) {
        let key = &self.keys[[0, 2][usize::from(self.rng.bool())]];
        let lock = self.names.lock(key).expect("a valid name").to_string();
        let queue = format!("tower-lock:lock:q:{{{lock}}}");
        let later = (self.now().await + 80_000_000_000).to_string();
        let record = self.names.record(lock.as_str().into()).to_string();
        let command: &[&str] = match self.rng.u8(0..12) {
            // An expired lease.
            0..3 => &["DEL", &lock],
            3 => &["DEL", &queue],
            4 => &["SET", "tower-lock:lock:f", &later],
            5 => &["DEL", "tower-lock:lock:f"],
            6 => &["SET", &lock, "text"],
            11 => &["SET", &queue, "text"],
            8 | 9 => &["DEL", &record],
            7 => &["SET", "tower-lock:lock:f", NO_FENCES[self.rng.usize(0..NO_FENCES.len())]],
            _ => &["HSET", &lock, "foreign:1", "1"],
        };
        self.both(command).await;
    }

    async fn both(&mut self, command: &[&str]) {
        self.calls.push(format!("{command:?}"));
        let real = self.real.command(command).await.expect("a reply");
        let fake = self.fake.command(command);
        assert!(same(&fake, &real), "the fake: {fake:?}, Redis: {real:?}\n{}", self.calls.join("\n"));
    }

    async fn now(&mut self) -> i64 {
        let time = self.real.command(&["TIME"]).await.expect("a reply");
        let [seconds, us] = time.items() else { panic!("{time:?}") };
        seconds.integer().expect("a number") * 1_000_000 + us.integer().expect("a number")
    }

    /// Runs the same call on both and compares replies, keys, leases and messages.
    async fn compare(&mut self, call: &ScriptCall) {
        let now = self.now().await;
        self.fake.data().now_us = now;
        self.calls.push(format!("{} {:?} {:?} {:?}", call.name(), call.keys(), call.args(), call.data()));
        let (keys, args) = (call.keys(), call.args());
        let count = keys.len().to_string();
        let mut command = vec!["EVAL", call.text(), &count];
        command.extend(keys.iter().chain(&args).map(String::as_str));
        command.extend(call.data().iter().map(|data| std::str::from_utf8(data).expect("text")));
        let real = self.real.command(&command).await.expect("a reply");
        let fake = self.fake.run(call);
        assert!(same(&fake, &real), "the fake: {fake:?}, Redis: {real:?}\n{}", self.calls.join("\n"));
        self.compare_messages().await;
        self.compare_keys().await;
    }

    async fn compare_messages(&mut self) {
        self.real.command(&["PUBLISH", "end", ""]).await.expect("a reply");
        let mut real = Vec::new();
        loop {
            let message = self.listener.next().await.expect("a message");
            let [_, channel, message] = message.items() else { panic!("{message:?}") };
            if channel.text() == Some("end") {
                break;
            }
            real.push((channel.text().expect("text").to_owned(), message.text().expect("text").to_owned()));
        }
        let fake = std::mem::take(&mut self.fake.data().published);
        // The third part is a fence.
        let equal = |(fake, real): (&(String, String), &(String, String))| {
            let (fake_parts, real_parts) = (fake.1.splitn(4, ' '), real.1.splitn(4, ' '));
            fake.0 == real.0 && fake_parts.zip(real_parts).all(|(fake, real)| same_text(fake, real))
        };
        assert!(
            fake.len() == real.len() && fake.iter().zip(&real).all(equal),
            "the fake: {fake:?}, Redis: {real:?}\n{}",
            self.calls.join("\n")
        );
    }

    async fn compare_keys(&mut self) {
        let fake = self.fake.data().dump();
        let all = self.real.command(&["KEYS", "*"]).await.expect("a reply");
        let real = all.texts();
        assert_eq!(fake.keys().map(String::as_str).collect::<Vec<_>>(), real, "{}", self.calls.join("\n"));
        for (key, dump) in fake {
            let real = self.real_dump(&key, dump.kind).await;
            let equal = dump.kind == real.kind
                && near(dump.ms_left, real.ms_left)
                && dump.content.len() == real.content.len()
                && by_member(&dump).zip(by_member(&real)).all(|(fake, real)| same_text(fake, real));
            assert!(equal, "{key}: the fake: {dump:?}, Redis: {real:?}\n{}", self.calls.join("\n"));
            // A fence drawn from the clock a few microseconds later is made equal for the next
            // calls.
            match real.kind {
                "string" if dump.content != real.content => {
                    self.fake.command(&["SET", &key, &real.content[0]]);
                }
                "zset" => real.content.chunks(2).for_each(|pair| {
                    self.fake.command(&["ZADD", &key, &pair[1], &pair[0]]);
                }),
                "hash" => real.content.chunks(2).for_each(|pair| {
                    self.fake.command(&["HSET", &key, &pair[0], &pair[1]]);
                }),
                _ => {}
            }
        }
    }

    async fn real_dump(&mut self, key: &str, kind: &str) -> Dump {
        let command: &[&str] = match kind {
            "hash" => &["HGETALL", key],
            "list" => &["LRANGE", key, "0", "-1"],
            "zset" => &["ZRANGE", key, "0", "-1", "WITHSCORES"],
            _ => &["GET", key],
        };
        let content = self.real.command(command).await.expect("a reply");
        let real_kind = match &content {
            Reply::Error(_) => "another",
            _ => match kind {
                "hash" => "hash",
                "list" => "list",
                "zset" => "zset",
                _ => "string",
            },
        };
        let texts = |items: &[Reply]| items.iter().map(|item| item.text().expect("text").to_owned()).collect();
        let mut content: Vec<String> = match &content {
            Reply::Array(items) => texts(items),
            one => texts(std::slice::from_ref(one)),
        };
        if kind == "hash" {
            let mut pairs: Vec<_> = content.chunks(2).map(<[String]>::to_vec).collect();
            pairs.sort();
            content = pairs.concat();
        }
        let ms_left = self.real.command(&["PTTL", key]).await.expect("a reply").integer().expect("a number");
        Dump { kind: real_kind, content, ms_left }
    }
}

/// Times of the same server within the tolerance; other numbers must be equal.
fn near(fake: i64, real: i64) -> bool {
    let tolerance = match fake {
        ..30 => 0,
        30..2_000 => TOLERANCE / 2,
        // Durations, and times in milliseconds.
        2_000..1_000_000_000 | 1_000_000_000_000..100_000_000_000_000 => TOLERANCE,
        _ => 1_000 * TOLERANCE,
    };
    (fake - real).abs() <= tolerance
}

/// The content, in the order of the members: a later clock may change the order of the scores.
fn by_member(dump: &Dump) -> impl Iterator<Item = &String> {
    let mut pairs: Vec<_> =
        dump.content.chunks(if dump.kind == "zset" { 2 } else { dump.content.len().max(1) }).collect();
    pairs.sort();
    pairs.into_iter().flatten()
}

fn same_text(fake: &str, real: &str) -> bool {
    // Incomplete fences.
    if let (Some(fake), Some(real)) = (fake.strip_suffix('?'), real.strip_suffix('?')) {
        return same_text(fake, real);
    }
    match (fake.parse(), real.parse()) {
        (Ok(fake), Ok(real)) => near(fake, real),
        _ => fake == real,
    }
}

fn same(fake: &Value, real: &Reply) -> bool {
    match (fake, real) {
        (Value::Nil, Reply::Nil) => true,
        (Value::Int(fake), Reply::Integer(real)) => near(*fake, *real),
        (Value::BulkString(fake), Reply::Bulk(_)) => {
            same_text(&String::from_utf8_lossy(fake), real.text().expect("text"))
        }
        // Redis appends the script name.
        (Value::SimpleString(fake), Reply::Error(real)) => {
            let kind = |text: &str| text.split(' ').next().map(str::to_owned);
            fake.strip_prefix('-').is_some_and(|fake| kind(fake) == kind(real))
        }
        (Value::SimpleString(fake), Reply::Status(real)) => fake == real,
        (Value::Array(fake), Reply::Array(real)) => {
            fake.len() == real.len() && fake.iter().zip(real).all(|(fake, real)| same(fake, real))
        }
        _ => false,
    }
}

fn has_redis(test: &str) -> bool {
    let is_available = RedisServer::is_available();
    if !is_available {
        skipped(test, "redis-server");
    }
    is_available
}

#[tokio::test]
async fn fake_behaves_like_redis() {
    if !has_redis("the fake Redis against a real one") {
        return;
    }
    let server = RedisServer::start().await;
    let mut both = Both::new(&server).await;
    for seed in 0..SEQUENCES {
        both.begin(seed).await;
        for _ in 0..CALLS {
            if both.rng.u8(0..8) == 0 {
                both.disturb().await;
            }
            let now = both.now().await;
            let call = both.call(now);
            both.compare(&call).await;
        }
    }
}

const LEASE: Duration = Duration::from_secs(32);
const QUEUE: QueueConfig = QueueConfig::new(Duration::from_secs(3), Duration::from_secs(60), 9);

fn acquire(names: &Keyspace, keys: &[(LockKey, AcquisitionId)], is_repeated: bool) -> ScriptCall {
    let request = |(key, id): &(LockKey, AcquisitionId)| {
        AcquireRequest::new(key.clone(), id.clone(), LEASE, IfBusy::Enqueue, QUEUE, Duration::from_millis(500))
            .repeated(is_repeated)
    };
    names.acquire(&keys.iter().map(request).collect::<Vec<_>>(), i64::MAX >> 10).expect("valid names")
}

fn release(names: &Keyspace, keys: &[(LockKey, AcquisitionId)]) -> ScriptCall {
    let request =
        |(key, id): &(LockKey, AcquisitionId)| ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, QUEUE);
    names.release(&keys.iter().map(request).collect::<Vec<_>>()).expect("valid names")
}

/// The number of commands that a call runs.
fn commands_of(redis: &mut FakeRedis, call: &ScriptCall) -> u64 {
    // A fence of the same microsecond takes one more.
    redis.data().now_us += 1;
    let before = redis.data().commands;
    redis.run(call);
    redis.data().commands - before
}

#[test]
fn commands_of_a_call_grow_with_its_keys() {
    let names = Keyspace::new("lock").expect("a prefix");
    for count in [1, 2, 64] {
        let mut redis = FakeRedis::new(&[]);
        let id = |n| AcquisitionId::from_text(&format!("a:01:{n}"));
        let keys: Vec<_> = (0..count).map(|n| (LockKey::from(("n", n)), id(n))).collect();
        assert_eq!(commands_of(&mut redis, &acquire(&names, &keys, false)), 3 + 2 * count);
        assert_eq!(commands_of(&mut redis, &release(&names, &keys)), 1 + count);
    }
}

#[test]
fn handoff_costs_17_commands() {
    let names = Keyspace::new("lock").expect("a prefix");
    let mut redis = FakeRedis::new(&[]);
    redis.data().listeners.insert("tower-lock:lock:in:b:02".to_owned(), 1);
    let [holder, waiter] = ["a:01:1", "b:02:1"].map(|id| [(LockKey::from(("n", 1)), AcquisitionId::from_text(id))]);
    redis.run(&acquire(&names, &holder, false));
    let enqueued = commands_of(&mut redis, &acquire(&names, &waiter, false));
    let offered = commands_of(&mut redis, &release(&names, &holder));
    let accepted = commands_of(&mut redis, &acquire(&names, &waiter, true));
    assert_eq!((enqueued, offered, accepted), (7, 7, 3));
}

#[test]
fn permit_costs_14_commands_beside_any_number_of_others() {
    let names = Keyspace::new("lock").expect("a prefix");
    let mut redis = FakeRedis::new(&[]);
    let id = |n: u64| [(LockKey::from(("n", 1)), AcquisitionId::from_text(&format!("a:01:{n}/1024")))];
    for n in 0..100 {
        let acquired = commands_of(&mut redis, &acquire(&names, &id(n), false));
        assert_eq!(acquired, if n == 0 { 7 } else { 8 }, "{n}");
    }
    for n in 0..100 {
        assert_eq!(commands_of(&mut redis, &release(&names, &id(n))), if n == 99 { 5 } else { 6 }, "{n}");
    }
}

/// In real time and therefore few: the expiry of a lease, an offer and an entry.
#[tokio::test]
async fn expiry_is_equal_in_both() {
    if !has_redis("leases of the fake Redis against those of a real one") {
        return;
    }
    let server = RedisServer::start().await;
    let mut both = Both::new(&server).await;
    both.begin(0).await;
    let (short, long) = (Duration::from_millis(600), Duration::from_secs(20));
    let id = |text: &str| AcquisitionId::from_text(text);
    let request = |names: &Keyspace, key: &LockKey, text: &str, lease, offer, entry_ttl| {
        let queue = QueueConfig::new(offer, entry_ttl, 9);
        let request = AcquireRequest::new(key.clone(), id(text), lease, IfBusy::Enqueue, queue, long);
        names.acquire(&[request], i64::MAX >> 10).expect("a valid name")
    };
    let key = both.keys[0].clone();
    let names = both.names.clone();
    both.compare(&request(&names, &key, "a:01:1", short, long, long)).await;
    both.compare(&request(&names, &key, "b:02:1", long, short, long)).await;
    tokio::time::sleep(2 * short).await;
    // The key goes to the first waiter, for the short TTL of an offer.
    both.compare(&request(&names, &key, "c:03:1", long, short, short)).await;
    tokio::time::sleep(2 * short).await;
    both.compare(&names.inspect(&key).expect("a valid name")).await;
    both.compare(&request(&names, &key, "a:01:2", long, long, long)).await;
    assert_eq!(both.fake.data().hash("lock:n:1")[0].0, "a:01:2", "the other queue entry expired as well");
}

/// The conversion of script results and errors.
#[tokio::test]
async fn script_results_and_errors_translate_like_redis() {
    if !has_redis("replies of the fake Redis against those of a real one") {
        return;
    }
    let server = RedisServer::start().await;
    let mut both = Both::new(&server).await;
    both.begin(0).await;
    for script in [
        "return 3.99",
        "return -3.99",
        "return {1, 2, nil, 3}",
        "return {1, {2, 'x', false}, true}",
        "return nil",
        "return false",
        "return true",
        "return {err = 'OWN text'}",
        "return {ok = 'fine'}",
        "return redis.call('GET', 'nothing')",
        "return redis.call('SET', 'text', 1.0)",
        "return redis.call('GET', 'text')",
        "return redis.call('SET', 'number', 1700000000000000)",
        "return redis.call('GET', 'number')",
        "return redis.call('HSET', 'text', 'a', 1)",
        "return redis.pcall('HSET', 'text', 'a', 1)",
        "return type(redis.pcall('HSET', 'text', 'a', 1).err)",
        "return tostring((pcall(redis.call, 'HSET', 'text', 'a', 1)))",
        "return redis.call('LPOS', 'nothing', 'a')",
        "return redis.call('LRANGE', 'nothing', 0, -1)",
        "return {unpack({})}",
        "return string.format('%.0f', 1700000000000001)",
        "return 9007199254740991",
        "x = 1",
        "return y",
        "return redis.call('GET', {})",
    ] {
        both.calls = vec![script.to_owned()];
        let real = both.real.command(&["EVAL", script, "0"]).await.expect("a reply");
        let fake = both.fake.eval(script, &[], &[]);
        assert!(same(&fake, &real), "{script}: the fake: {fake:?}, Redis: {real:?}");
    }
}
