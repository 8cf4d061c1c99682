//! The scripts and the codec of Redis against a recording of an earlier version, so that processes
//! of both versions can share a server. `recorded/README.md` describes the files.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tower_lock::{
    __internals::redis_wire::{
        FenceMark, Keyspace, ScriptCall, Timed, fence_mark, parse_acquire, parse_force, parse_inspect, parse_release,
        parse_renew, parse_self_test, parse_yield,
    },
    AcquisitionId, LockKey,
    deadpool_redis::redis::{Script, Value},
    store::{
        AcquireReply, AcquireRequest, ForceReleaseReply, ForceReleaseRequest, IfBusy, QueueConfig, ReleaseReply,
        ReleaseRequest, RenewReply, RenewRequest, StoreEvent, YieldReply, YieldRequest,
    },
};
use tower_lock_simulator::fake::{Dump, FakeRedis};

const SCRIPTS: [&str; 11] = [
    "acquire",
    "force",
    "inspect",
    "raw_acquire",
    "raw_force",
    "raw_release",
    "raw_yield",
    "release",
    "renew",
    "self_test",
    "yield",
];
const EXCHANGES: [&str; 10] = [
    "capacity",
    "fences",
    "force_release",
    "foreign",
    "lock_delay",
    "other_prefix",
    "queue",
    "random",
    "renewal",
    "yield",
];

/// Over all files of the recording, in the order above.
const SHA1: &str = "1c37732d1cf53c8cd56cc37a1a26bf9f11aba647";

// === the format of an exchange, one step per line ===

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Step {
    /// The first step: the prefix of the store, and the channels that have a subscriber.
    Begin { prefix: String, subscribed: Vec<String> },
    /// A command of another program.
    Command(Command),
    /// A call of a script.
    Call(Box<Call>),
}

#[derive(Debug, Deserialize)]
struct Command {
    now: i64,
    words: Vec<String>,
    /// How many times; once by default.
    repeat: Option<u32>,
}

#[derive(Debug, Deserialize)]
struct Call {
    /// The clock of the server, in microseconds.
    now: i64,
    request: Request,
    script: String,
    keys: Vec<String>,
    args: Vec<String>,
    reply: Json,
    /// The meaning of the reply. `None`: an error of the server, which is not decoded.
    means: Option<String>,
    #[serde(default)]
    messages: Vec<Message>,
    /// The keys that changed since the last call; null if one was removed. `None`: not recorded.
    data: Option<Data>,
}

/// The type, expiry by the server clock in milliseconds, and content of each key.
type Data = BTreeMap<String, Json>;

#[derive(Debug, PartialEq, Eq, Deserialize, Serialize)]
struct Message {
    channel: String,
    payload: String,
    means: String,
}

/// The names of keys are those of [`lock_key`]. Durations are in microseconds; -1 is the longest.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    Acquire {
        key: String,
        id: String,
        until: i64,
        lease: i64,
        queue: bool,
        terms: Terms,
        #[serde(default)]
        is_repeated: bool,
    },
    Renew(Vec<Renewal>),
    Release {
        key: String,
        id: String,
        block_for: i64,
        terms: Terms,
    },
    Yield {
        key: String,
        id: String,
        fence: u64,
        next: String,
        until: i64,
        lease: i64,
        terms: Terms,
    },
    ForceRelease {
        key: String,
        block_for: i64,
        terms: Terms,
    },
    Inspect {
        key: String,
    },
    SelfTest {
        key: String,
        inbox: String,
        message: String,
    },
}

#[derive(Debug, Deserialize)]
struct Renewal {
    key: String,
    id: String,
    lease: i64,
}

/// The queue: lease of an offer, TTL of an entry, capacity.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Terms(i64, i64, usize);

#[derive(Debug)]
struct Exchange {
    name: &'static str,
    steps: Vec<Step>,
}

fn recorded(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("recorded").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn recorded_script(name: &str) -> String {
    recorded(&format!("scripts/{name}.lua"))
}

fn exchanges() -> Vec<Exchange> {
    let read = |name| {
        let text = recorded(&format!("exchanges/{name}.jsonl"));
        let steps = text
            .lines()
            .enumerate()
            .map(|(at, line)| serde_json::from_str(line).unwrap_or_else(|error| panic!("{name}, step {at}: {error}")));
        Exchange { name, steps: steps.collect() }
    };
    EXCHANGES.into_iter().map(read).collect()
}

// === the current version ===

const NAMED: [&str; 5] = ["order", "other", "tag", "raw", "reserved"];

fn lock_key(name: &str) -> LockKey {
    let raw = |text| LockKey::raw(text).expect("a name");
    match name {
        "order" => LockKey::from(("order", 7, "a b")),
        "other" => LockKey::from(("n", 1)),
        "tag" => raw("shop{7} x"),
        "raw" => raw("myLock"),
        // Stores reject it.
        "reserved" => raw("tower-lock:lock:f"),
        _ => panic!("{name}"),
    }
}

fn named(key: &LockKey) -> &'static str {
    NAMED.into_iter().find(|name| lock_key(name) == *key).expect("a key of the recording")
}

fn id(text: &str) -> AcquisitionId {
    AcquisitionId::from_text(text)
}

fn duration(us: i64) -> Duration {
    u64::try_from(us).map_or(Duration::MAX, Duration::from_micros)
}

impl Terms {
    fn current(self) -> QueueConfig {
        QueueConfig::new(duration(self.0), duration(self.1), self.2)
    }
}

impl Request {
    /// The call of a script, and which renewals of the batch it has.
    fn encoded(&self, names: &Keyspace) -> (ScriptCall, Vec<bool>) {
        // Not sent: `until` is.
        let in_doubt_after = Duration::from_millis(500);
        let call = match self {
            Self::Acquire { key, id: of, until, lease, queue, terms, is_repeated } => {
                let if_busy = if *queue { IfBusy::Enqueue } else { IfBusy::Fail };
                let (lease, terms) = (duration(*lease), terms.current());
                let request = AcquireRequest::new(lock_key(key), id(of), lease, if_busy, terms, in_doubt_after);
                let request = request.repeated(*is_repeated);
                names.acquire(&[request], *until)
            }
            Self::Renew(renewals) => {
                let renewal = |renewal: &Renewal| {
                    RenewRequest::new(lock_key(&renewal.key), id(&renewal.id), duration(renewal.lease))
                };
                return names.renew(&renewals.iter().map(renewal).collect::<Vec<_>>());
            }
            Self::Release { key, id: of, block_for, terms } => {
                names.release(&[ReleaseRequest::new(lock_key(key), id(of), duration(*block_for), terms.current())])
            }
            Self::Yield { key, id: of, fence, next, until, lease, terms } => {
                let (lease, terms) = (duration(*lease), terms.current());
                let request = YieldRequest::new(lock_key(key), id(of), *fence, id(next), lease, terms, in_doubt_after);
                names.yield_to_queue(&request, *until)
            }
            Self::ForceRelease { key, block_for, terms } => {
                names.force(&ForceReleaseRequest::new(lock_key(key), duration(*block_for), terms.current()))
            }
            Self::Inspect { key } => names.inspect(&lock_key(key)),
            Self::SelfTest { key, inbox, message } => {
                let key = lock_key(key);
                names.lock(&key).map(|lock| names.self_test(&lock.to_string(), inbox, message))
            }
        };
        (call.expect("a name that is accepted"), Vec::new())
    }

    /// The meaning of a reply, in words that do not depend on names of the current version.
    fn decoded(&self, reply: &Value, is_sent: &[bool]) -> String {
        let means = match self {
            Self::Acquire { .. } => parse_acquire(reply, 1).map(|(now, acquired)| match acquired {
                Timed::Expired => format!("{now}: expired"),
                Timed::Done(mut acquired) => {
                    format!("{now}: {}", acquired_means(acquired.remove(0).expect("no error")))
                }
            }),
            Self::Yield { .. } => parse_yield(reply).map(|(now, yielded)| match yielded {
                Timed::Expired => format!("{now}: expired"),
                Timed::Done(YieldReply::Extended { fence }) => format!("{now}: extended, fence {fence}"),
                Timed::Done(YieldReply::NotHolder(acquired)) => format!("{now}: lost, {}", acquired_means(acquired)),
                Timed::Done(other) => panic!("{other:?}"),
            }),
            Self::Renew(_) => parse_renew(reply, is_sent).map(|renewed| {
                let means = renewed.iter().map(|renewed| match renewed {
                    RenewReply::Extended => "extended",
                    RenewReply::NotHolder => "not holder",
                    RenewReply::Unknown => "unknown",
                    other => panic!("{other:?}"),
                });
                means.collect::<Vec<_>>().join(", ")
            }),
            Self::Release { .. } => parse_release(reply, 1).map(|released| {
                match released[0].as_ref().expect("only one of several fails alone") {
                    ReleaseReply::Freed => "freed".to_owned(),
                    ReleaseReply::HandedOff => "offered".to_owned(),
                    ReleaseReply::NotHolder => "not holder".to_owned(),
                    other => panic!("{other:?}"),
                }
            }),
            Self::ForceRelease { .. } => parse_force(reply).map(|forced| match forced {
                ForceReleaseReply::Free => "free".to_owned(),
                ForceReleaseReply::Revoked { holder } => format!("revoked from {holder}"),
                ForceReleaseReply::Unblocked { blocked_for } => format!("unblocked, {}", left(blocked_for)),
                other => panic!("{other:?}"),
            }),
            Self::Inspect { .. } => parse_inspect(reply).map(|inspected| {
                let holder = inspected.holder().map(|holder| format!("{}, fence {}", holder.id, holder.fence));
                let holder = holder.unwrap_or_else(|| "no holder".to_owned());
                format!("{holder}, {}, {} waiters", left(inspected.lease_left), inspected.waiting)
            }),
            Self::SelfTest { .. } => parse_self_test(reply).map(|tested| {
                format!(
                    "{}: {} receivers, {:?}, {:?}",
                    tested.now, tested.receivers, tested.invalid_fence, tested.refused
                )
            }),
        };
        let means = means.unwrap_or_else(|_| "no reply of ours".to_owned());
        match fence_mark(reply) {
            Some(FenceMark::Replaced) => format!("{means}, fence replaced"),
            Some(FenceMark::Missing) => format!("{means}, fence missing"),
            None => means,
        }
    }
}

fn acquired_means(acquired: AcquireReply) -> String {
    match acquired {
        AcquireReply::Granted { fence } => format!("granted, fence {fence}"),
        AcquireReply::Queued { ahead, lease_left, poll_in: _ } => {
            format!("queued behind {ahead}, {}", left(lease_left))
        }
        AcquireReply::Busy { lease_left } => format!("busy, {}", left(lease_left)),
        AcquireReply::QueueFull { lease_left, waiting } => {
            format!("queue full, {}, {waiting} waiters", left(lease_left))
        }
        other => panic!("{other:?}"),
    }
}

fn left(left: Duration) -> String {
    if left == Duration::MAX { "no end".to_owned() } else { format!("{} ms left", left.as_millis()) }
}

fn message(names: &Keyspace, (channel, payload): (String, String)) -> Message {
    let means = match names.parse_event(payload.as_bytes()) {
        StoreEvent::Offered { key, id: owner } => format!("{} is offered to {owner}", named(&key)),
        StoreEvent::Revoked { key, id: owner } => format!("{} is revoked from {owner}", named(&key)),
        StoreEvent::Lagged => "unknown".to_owned(),
        other => panic!("{other:?}"),
    };
    Message { channel, payload, means }
}

// === replies and data as JSON ===

fn as_json(reply: &Value) -> Json {
    match reply {
        Value::Nil => Json::Null,
        Value::Int(number) => json!(number),
        Value::BulkString(text) => json!(String::from_utf8(text.clone()).expect("text")),
        // The fake server marks errors this way.
        Value::SimpleString(text) => json!({ "error": text.strip_prefix('-').expect("an error") }),
        Value::Array(items) => items.iter().map(as_json).collect(),
        other => panic!("{other:?}"),
    }
}

fn as_reply(json: &Json) -> Value {
    match json {
        Json::Number(number) => Value::Int(number.as_i64().expect("a whole number")),
        Json::String(text) => Value::BulkString(text.clone().into_bytes()),
        Json::Array(items) => Value::Array(items.iter().map(as_reply).collect()),
        other => panic!("{other}"),
    }
}

fn data(fake: &FakeRedis) -> Data {
    let mut data = fake.data();
    let now = data.now_us / 1_000;
    let as_json = |dump: Dump| {
        let expires = (dump.ms_left >= 0).then_some(now + dump.ms_left);
        json!([dump.kind, expires, dump.content])
    };
    data.dump().into_iter().map(|(key, dump)| (key, as_json(dump))).collect()
}

fn texts(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

fn names(exchange: &Exchange) -> Keyspace {
    let Some(Step::Begin { prefix, .. }) = exchange.steps.first() else { panic!("{}: no beginning", exchange.name) };
    Keyspace::new(prefix).expect("a prefix")
}

/// The scripts of raw keys have files of their own.
fn script_name(call: &ScriptCall) -> String {
    format!("{}{}", if call.is_raw() { "raw_" } else { "" }, call.name())
}

fn calls(exchange: &Exchange) -> impl Iterator<Item = (String, &Call)> {
    exchange.steps.iter().enumerate().filter_map(|(at, step)| match step {
        Step::Call(call) => Some((format!("{}, line {}", exchange.name, at + 1), &**call)),
        _ => None,
    })
}

// === replays ===

/// Runs all exchanges; `is_current` selects the calls that run the current script.
fn replay(is_current: impl Fn(usize) -> bool) {
    let old: BTreeMap<_, _> = SCRIPTS.into_iter().map(|name| (name, recorded_script(name))).collect();
    for exchange in exchanges() {
        let names = names(&exchange);
        let mut fake = FakeRedis::new(&[]);
        let mut number = 0;
        let mut expected = Data::new();
        for (at, step) in exchange.steps.iter().enumerate() {
            match step {
                Step::Begin { subscribed, .. } => {
                    fake.data().listeners = subscribed.iter().map(|channel| (channel.clone(), 1)).collect();
                }
                Step::Command(Command { now, words, repeat }) => {
                    fake.data().now_us = *now;
                    for _ in 0..repeat.unwrap_or(1) {
                        fake.command(&texts(words));
                    }
                }
                Step::Call(call) => {
                    let (current, _) = call.request.encoded(&names);
                    let is_current = is_current(number);
                    let script = if is_current { current.text() } else { &old[call.script.as_str()] };
                    let version = if is_current { "current" } else { "recorded" };
                    let which = format!("{}, line {}: {} {}", exchange.name, at + 1, version, call.script);
                    number += 1;
                    fake.data().now_us = call.now;
                    let reply = fake.eval(script, &texts(&call.keys), &texts(&call.args));
                    assert_eq!(as_json(&reply), call.reply, "the reply of {which}");
                    let published = std::mem::take(&mut fake.data().published);
                    let recorded = call.messages.iter();
                    let recorded = recorded.map(|message| (message.channel.clone(), message.payload.clone()));
                    assert_eq!(published, recorded.collect::<Vec<_>>(), "the messages of {which}");
                    if let Some(changed) = &call.data {
                        expected.extend(changed.clone());
                        expected.retain(|_, entry| !entry.is_null());
                        assert_eq!(data(&fake), expected, "the data after {which}");
                    }
                }
            }
        }
    }
}

/// Executes the requests and the commands of all exchanges with the current scripts, and writes
/// what happens in place of the recording.
fn record() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("recorded");
    let mut scripts = BTreeMap::new();
    for exchange in exchanges() {
        let text = recorded(&format!("exchanges/{}.jsonl", exchange.name));
        let (names, mut fake, mut before) = (names(&exchange), FakeRedis::new(&[]), Data::new());
        let mut lines = String::new();
        for (step, line) in exchange.steps.iter().zip(text.lines()) {
            let mut line: Json = serde_json::from_str(line).expect("parsed before");
            match step {
                Step::Begin { subscribed, .. } => {
                    fake.data().listeners = subscribed.iter().map(|channel| (channel.clone(), 1)).collect();
                }
                Step::Command(Command { now, words, repeat }) => {
                    fake.data().now_us = *now;
                    for _ in 0..repeat.unwrap_or(1) {
                        fake.command(&texts(words));
                    }
                }
                Step::Call(call) => {
                    let (current, is_sent) = call.request.encoded(&names);
                    scripts.insert(script_name(&current), current.text());
                    fake.data().now_us = call.now;
                    let reply = fake.eval(current.text(), &texts(&current.keys()), &texts(&current.args()));
                    let published = std::mem::take(&mut fake.data().published);
                    let messages: Vec<_> = published.into_iter().map(|sent| message(&names, sent)).collect();
                    let recorded = line["call"].as_object_mut().expect("a call");
                    recorded.insert("script".to_owned(), json!(script_name(&current)));
                    recorded.insert("keys".to_owned(), json!(current.keys()));
                    recorded.insert("args".to_owned(), json!(current.args()));
                    recorded.insert("reply".to_owned(), as_json(&reply));
                    if call.means.is_some() {
                        recorded.insert("means".to_owned(), json!(call.request.decoded(&reply, &is_sent)));
                    }
                    recorded.remove("messages");
                    if !messages.is_empty() {
                        recorded.insert("messages".to_owned(), json!(messages));
                    }
                    let after = data(&fake);
                    if call.data.is_some() {
                        let gone =
                            before.keys().filter(|key| !after.contains_key(*key)).map(|key| (key.clone(), Json::Null));
                        let changed = after.iter().filter(|(key, value)| before.get(*key) != Some(value));
                        let changed = changed.map(|(key, value)| (key.clone(), value.clone()));
                        recorded.insert("data".to_owned(), json!(changed.chain(gone).collect::<Data>()));
                        before = after;
                    }
                }
            }
            lines += &format!("{line}\n");
        }
        fs::write(folder.join(format!("exchanges/{}.jsonl", exchange.name)), lines).expect("written");
    }
    for (name, text) in scripts {
        fs::write(folder.join(format!("scripts/{name}.lua")), text).expect("written");
    }
}

#[test]
fn recording_is_never_edited() {
    let scripts = SCRIPTS.map(recorded_script).concat();
    let exchanges = EXCHANGES.map(|name| recorded(&format!("exchanges/{name}.jsonl"))).concat();
    assert_eq!(Script::new(&(scripts + &exchanges)).get_hash(), SHA1);
}

#[test]
fn fake_server_runs_recorded_scripts_as_recorded() {
    replay(|_| false);
}

/// With the environment variable `RECORD`, makes the recording anew.
#[test]
fn current_scripts_reproduce_the_recording() {
    if std::env::var_os("RECORD").is_some() {
        return record();
    }
    replay(|_| true);
}

#[test]
fn current_and_recorded_scripts_share_a_server() {
    replay(|call| call % 2 == 0);
    replay(|call| call % 2 == 1);
}

#[test]
fn requests_are_encoded_as_recorded() {
    for exchange in exchanges() {
        let names = names(&exchange);
        for (which, call) in calls(&exchange) {
            let (encoded, _) = call.request.encoded(&names);
            assert_eq!(script_name(&encoded), call.script, "the script of {which}");
            assert_eq!(encoded.keys(), call.keys, "KEYS of {which}: {:?}", call.request);
            assert_eq!(encoded.args(), call.args, "ARGV of {which}: {:?}", call.request);
        }
    }
}

#[test]
fn replies_and_messages_are_decoded_as_recorded() {
    for exchange in exchanges() {
        let names = names(&exchange);
        for (which, call) in calls(&exchange) {
            if let Some(means) = &call.means {
                let (_, is_sent) = call.request.encoded(&names);
                let reply = as_reply(&call.reply);
                assert_eq!(call.request.decoded(&reply, &is_sent), *means, "{which}: {}", call.reply);
            }
            for recorded in &call.messages {
                let now = message(&names, (recorded.channel.clone(), recorded.payload.clone()));
                assert_eq!(now, *recorded, "{which}");
                if let Some(owner) = recorded.payload.split(' ').nth(3) {
                    assert_eq!(names.inbox(id(owner).manager()), recorded.channel, "{which}");
                }
            }
        }
    }
}
