//! A retry gets the first answer, from instances that share a Redis.

use std::{
    collections::BTreeSet,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::State,
    http::{HeaderMap, HeaderValue, Request, StatusCode},
    response::{AppendHeaders, IntoResponse},
    routing::post,
};
use futures_util::future::{join, join_all};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tower_lock::{LockManager, RedisStore, ReplayLayer, key};
use tower_lock_testkit::{
    NetworkFault, Process, Request as Command,
    app::send,
    wait::{ms, soon, until},
};

use crate::{
    connecting::{smallest_acl, user},
    support::{Environment, environment},
};

/// The client of all requests, which no name in Redis may show.
const CLIENT: &str = "ann@example.org";

const KEEP_FOR: Duration = Duration::from_secs(3_600);

/// The URL of the Redis of a child process.
const URL: &str = "TOWER_LOCK_TEST_REPLAYS";

/// The work of a route, at all its instances.
struct Work {
    runs: AtomicUsize,
    inside: AtomicUsize,
    /// Handlers end while this is true.
    is_open: watch::Sender<bool>,
}

/// A response, and whether it is marked as replayed.
#[derive(Debug)]
struct Answer {
    status: StatusCode,
    is_replayed: bool,
    headers: HeaderMap,
    body: Bytes,
}

impl Work {
    fn new() -> Arc<Self> {
        let is_open = watch::Sender::new(true);
        Arc::new(Self { runs: AtomicUsize::new(0), inside: AtomicUsize::new(0), is_open })
    }

    /// Lets handlers end, or keeps them from ending.
    fn open(&self, is_open: bool) {
        self.is_open.send_replace(is_open);
    }

    fn runs(&self) -> usize {
        self.runs.load(SeqCst)
    }

    async fn has_started(&self, runs: usize) {
        until("it runs", async || self.runs() == runs).await;
    }
}

async fn run(State(work): State<Arc<Work>>) -> impl IntoResponse {
    assert_eq!(work.inside.fetch_add(1, SeqCst), 0, "two runs at the same time");
    let run = work.runs.fetch_add(1, SeqCst) + 1;
    let _ = work.is_open.subscribe().wait_for(|is_open| *is_open).await;
    work.inside.fetch_sub(1, SeqCst);
    let headers = AppendHeaders([
        ("location", HeaderValue::try_from(format!("/runs/{run}")).expect("text")),
        ("link", HeaderValue::from_static("</a>; rel=\"next\"")),
        ("x-bytes", HeaderValue::from_bytes(b"caf\xe9 \xff").expect("a value")),
        ("link", HeaderValue::from_static("</b>; rel=\"prev\"")),
    ]);
    (StatusCode::CREATED, headers, [format!("run {run} ").as_bytes(), &[0, 0xff, b'\r', b'\n']].concat())
}

fn app(locks: &LockManager, wait: Duration, work: &Arc<Work>) -> Router {
    let layer = ReplayLayer::new(locks, key::fixed(("user", CLIENT))).required().wait(wait).keep_for(KEEP_FOR);
    Router::new().route("/", post(run).route_layer(layer)).with_state(Arc::clone(work))
}

/// Two instances behind the proxy.
async fn instances(environment: &Environment, wait: Duration, work: &Arc<Work>) -> [Router; 2] {
    let instance = async |name| app(&environment.instance(name).await, wait, work);
    [instance("a").await, instance("b").await]
}

/// The answer to a request whose idempotency key has this number.
async fn ask(app: &Router, number: usize) -> Answer {
    let request = Request::post("/").header("idempotency-key", format!("\"{CLIENT} {number}\""));
    let response = send(app, request.body(Body::from("a claim")).expect("a request")).await;
    let (mut head, body) = response.into_parts();
    let is_replayed = head.headers.remove("idempotency-replayed").is_some();
    let body = to_bytes(body, 1 << 20).await.expect("a body");
    Answer { status: head.status, is_replayed, headers: head.headers, body }
}

/// Fails unless both are one answer, byte for byte, and the second one is replayed.
#[track_caller]
fn assert_replayed(first: &Answer, retry: &Answer) {
    assert!(first.status == StatusCode::CREATED && retry.is_replayed, "{first:?} and {retry:?}");
    assert_eq!((first.status, &first.body), (retry.status, &retry.body));
    assert!(first.headers.iter().eq(&retry.headers), "{:?} and {:?}", first.headers, retry.headers);
}

#[track_caller]
fn assert_rejected(answer: &Answer, status: u16, kind: &str) {
    let body = String::from_utf8_lossy(&answer.body);
    assert!(answer.status == status && body.contains(kind), "{status} {kind} expected: {} {body}", answer.status);
}

/// The names of the records in Redis.
async fn records(environment: &Environment) -> Vec<String> {
    environment.command(&["KEYS", "tower-lock:lock:r:*"]).await.texts().into_iter().map(str::to_owned).collect()
}

/// The TTL of the only lock.
async fn lease_left(environment: &Environment) -> Option<Duration> {
    let locks = environment.command(&["KEYS", "lock:*"]).await;
    let left = environment.command(&["PTTL", locks.texts().first()?]).await.integer()?;
    u64::try_from(left).ok().map(ms)
}

/// Identifies a release that leaves a record with a body.
fn is_release_with_record(request: &Command) -> bool {
    // EVALSHA, hash, number of keys, key, arguments .. An acquire has one argument more.
    let names_record = request.parts.iter().any(|part| part.starts_with(b"tower-lock:lock:r:"));
    request.name() == "EVALSHA" && names_record && request.parts.len() == 3 + 1 + 9
}

/// Guarantee: G18.
#[tokio::test]
async fn first_request_costs_two_scripts_and_a_retry_one() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let [a, b] = instances(&environment, Duration::ZERO, &work).await;
    // Loads the scripts.
    assert_replayed(&ask(&a, 0).await, &ask(&b, 0).await);

    let before = environment.scripts().await;
    let first = ask(&a, 1).await;
    assert_eq!(environment.scripts().await - before, 2);
    for (retries, app) in [(1, &a), (2, &b), (3, &a)] {
        assert_replayed(&first, &ask(app, 1).await);
        assert_eq!(environment.scripts().await - before, 2 + retries);
    }
    assert_eq!(work.runs(), 2);
}

/// Guarantee: G18.
#[tokio::test]
async fn thousand_duplicates_at_an_instance_cost_no_script() {
    let Some(environment) = environment().await else { return };
    for wait in [Duration::ZERO, Duration::from_secs(60)] {
        let work = Work::new();
        let [a, b] = instances(&environment, wait, &work).await;
        assert_replayed(&ask(&a, 0).await, &ask(&b, 0).await);
        environment.command(&["FLUSHALL"]).await;

        work.open(false);
        let (before, began) = (environment.scripts().await, Instant::now());
        let duplicates = async {
            work.has_started(2).await;
            let duplicates = join_all((0..1_000).map(|_| ask(&a, 1)));
            if wait.is_zero() {
                let duplicates = duplicates.await;
                work.open(true);
                return duplicates;
            }
            let opens = async {
                sleep(ms(100)).await;
                work.open(true);
            };
            join(duplicates, opens).await.0
        };
        let (first, duplicates) = join(ask(&a, 1), duplicates).await;
        for duplicate in duplicates {
            if wait.is_zero() {
                assert_rejected(&duplicate, 409, "in-flight");
            } else {
                assert_replayed(&first, &duplicate);
            }
        }
        // A section that is longer than ten seconds is renewed.
        let renewals = began.elapsed().as_secs() / 10;
        let scripts = environment.scripts().await - before;
        assert!((2..=2 + renewals).contains(&scripts), "{scripts} scripts in {:?}", began.elapsed());
        assert_eq!(work.runs(), 2);
    }
}

/// One acquire enqueues it, and another one, after a message, finds the record.
/// Guarantee: G18.
#[tokio::test]
async fn duplicate_that_waits_at_another_instance_costs_two_scripts() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let [a, b] = instances(&environment, Duration::from_secs(60), &work).await;
    assert_replayed(&ask(&a, 0).await, &ask(&b, 0).await);

    work.open(false);
    let before = environment.scripts().await;
    let waits = async {
        work.has_started(2).await;
        let began = Instant::now();
        let ends = async {
            until("queued", async || environment.command(&["KEYS", "tower-lock:lock:q:*"]).await.items().len() == 1)
                .await;
            work.open(true);
        };
        (join(ask(&b, 1), ends).await.0, began.elapsed())
    };
    let (first, (duplicate, took)) = join(ask(&a, 1), waits).await;
    assert_replayed(&first, &duplicate);
    let scripts = environment.scripts().await - before;
    // A waiter polls about once a second: only on a slow machine is it as long in the queue.
    let polls = u64::try_from(took.as_millis() / 800).expect("few");
    assert!((4..=4 + polls).contains(&scripts), "{scripts} scripts in {took:?}, 2 of them of the first request");
    assert_eq!(work.runs(), 2);
}

#[tokio::test]
async fn record_is_a_hash_with_a_ttl_and_a_name_without_personal_data() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let [a, b] = instances(&environment, Duration::ZERO, &work).await;
    let first = ask(&a, 1).await;
    assert_replayed(&first, &ask(&b, 1).await);
    let keys = environment.keys().await;
    let [record] = &*keys else { panic!("{keys:?}: one record, and nothing else") };
    let digest = record.strip_prefix("tower-lock:lock:r:{lock:+replay:~").and_then(|rest| rest.strip_suffix('}'));
    let digest = digest.unwrap_or_else(|| panic!("{record}"));
    assert!(digest.len() == 32 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{record}");
    assert_eq!(environment.command(&["TYPE", record]).await.text(), Some("hash"));
    let fields = environment.command(&["HKEYS", record]).await;
    let fields: BTreeSet<_> = fields.texts().into_iter().collect();
    assert_eq!(fields, BTreeSet::from(["id", "head", "body"]));
    let body = environment.command(&["HSTRLEN", record, "body"]).await.integer();
    assert_eq!(body, i64::try_from(first.body.len()).ok());
    let ttl = environment.command(&["TTL", record]).await.integer().expect("a number");
    assert!((3_500..=3_600).contains(&ttl), "{ttl}");
}

/// Never returns in the child process. Does nothing in the test itself.
async fn run_in_child_process() {
    let Ok(url) = std::env::var(URL) else { return };
    let work = Work::new();
    work.open(false);
    ask(&app(&short_lease(&url, "killed").await, Duration::ZERO, &work), 1).await;
    unreachable!("it is killed");
}

/// An instance with the shortest lease.
async fn short_lease(url: &str, name: &str) -> LockManager {
    let store = RedisStore::connect(url).await.expect("it is up");
    LockManager::builder(store).instance(name).lease(ms(2_000)).build()
}

/// Guarantee: G19.
#[tokio::test]
async fn retry_of_a_killed_handler_runs_after_lease_and_lock_delay() {
    run_in_child_process().await;
    let Some(environment) = environment().await else { return };
    let mut process = Process::command(std::env::current_exe().expect("this test"));
    let test = "replay::retry_of_a_killed_handler_runs_after_lease_and_lock_delay";
    process.args(["--exact", test]).env(URL, environment.redis.url()).stdout(Stdio::null());
    let process = Process::start(process).expect("it starts");
    let work = Work::new();
    let next = app(&short_lease(&environment.redis.url(), "next").await, Duration::ZERO, &work);
    until("it has the key", async || lease_left(&environment).await.is_some()).await;
    assert_rejected(&ask(&next, 1).await, 409, "in-flight");
    process.kill();
    let killed = Instant::now();
    let left = lease_left(&environment).await.expect("still held");
    assert!(left <= ms(3_000), "{left:?}: a lease of two seconds and a lock-delay of one");
    let mut rejected = 0;
    let first = loop {
        let answer = ask(&next, 1).await;
        if answer.status == StatusCode::CREATED {
            break answer;
        }
        assert_rejected(&answer, 409, "in-flight");
        rejected += 1;
        sleep(ms(50)).await;
    };
    let took = killed.elapsed();
    assert!(took + ms(100) >= left && took < left + Duration::from_secs(5), "{took:?}, and {left:?} were left");
    assert!(rejected > 0 && !first.is_replayed, "{first:?}");
    assert_replayed(&first, &ask(&next, 1).await);
    assert_eq!(work.runs(), 1);
}

/// Simultaneous retries at two instances: one of them runs, and all get its answer.
async fn assert_one_runs(apps: &[Router; 2], work: &Work, number: usize) {
    let before = work.runs();
    let mut answers = join_all((0..40).map(|n| ask(&apps[n % 2], number))).await;
    answers.sort_by_key(|answer| answer.is_replayed);
    for retry in &answers[1..] {
        assert_replayed(&answers[0], retry);
    }
    assert_eq!((work.runs(), answers[0].is_replayed), (before + 1, false));
}

/// Guarantee: G18.
#[tokio::test]
async fn lost_record_lets_one_retry_run() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let apps = instances(&environment, Duration::from_secs(30), &work).await;
    assert_one_runs(&apps, &work, 1).await;
    for is_flushed in [false, true] {
        let lost = records(&environment).await;
        match is_flushed {
            false => environment.command(&["DEL", &lost[0]]).await,
            true => environment.command(&["FLUSHALL"]).await,
        };
        assert_one_runs(&apps, &work, 1).await;
    }

    // The lock is lost, too: its handler finishes in time, and leaves no record.
    work.open(false);
    let flushed = async {
        work.has_started(4).await;
        environment.command(&["FLUSHALL"]).await;
        work.open(true);
    };
    let (first, ()) = join(ask(&apps[0], 2), flushed).await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(records(&environment).await, [""; 0]);
    assert_one_runs(&apps, &work, 2).await;
}

/// Guarantee: G18.
#[tokio::test]
async fn release_without_memory_is_repeated_and_nothing_runs_twice() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let apps = instances(&environment, Duration::ZERO, &work).await;
    work.open(false);
    let memory = async |bytes| environment.command(&["CONFIG", "SET", "maxmemory", bytes]).await;
    let full = async {
        work.has_started(1).await;
        memory("1").await;
        work.open(true);
        Instant::now()
    };
    let (first, ended) = join(ask(&apps[0], 1), full).await;
    assert!(first.status == StatusCode::CREATED && ended.elapsed() < ms(5_000), "{first:?}");
    while ended.elapsed() < ms(1_500) {
        // The first call to release lasts for a second. Until then the instance sends no other call
        // for its key.
        let retry = ask(&apps[0], 1).await;
        if retry.status != StatusCode::SERVICE_UNAVAILABLE {
            assert_rejected(&retry, 409, "in-flight");
        }
        assert_rejected(&ask(&apps[1], 1).await, 409, "in-flight");
        sleep(ms(50)).await;
    }
    assert_eq!(records(&environment).await, [""; 0]);
    memory("0").await;
    until("the record is left", async || records(&environment).await.len() == 1).await;
    for app in &apps {
        soon("released", async {
            // The instance may not know yet that its release is done.
            while ask(app, 1).await.status != StatusCode::CREATED {
                sleep(ms(5)).await;
            }
        })
        .await;
        assert_replayed(&first, &ask(app, 1).await);
    }
    assert_eq!(work.runs(), 1);
}

/// The release is not repeated for ever. Without memory nothing runs.
/// Guarantee: G18.
#[tokio::test]
async fn answer_is_lost_if_memory_is_short_for_longer_than_the_lease() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let url = environment.redis.url();
    let apps = [
        app(&short_lease(&url, "a").await, Duration::ZERO, &work),
        app(&short_lease(&url, "b").await, Duration::ZERO, &work),
    ];
    work.open(false);
    let full = async {
        work.has_started(1).await;
        environment.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
        work.open(true);
    };
    let (first, ()) = join(ask(&apps[0], 1), full).await;
    assert_eq!(first.status, StatusCode::CREATED);
    let mut seen = [0, 0];
    while seen[1] < 20 {
        for app in &apps {
            let answer = ask(app, 1).await;
            let kind = usize::from(answer.status == StatusCode::SERVICE_UNAVAILABLE);
            assert_rejected(&answer, [409, 503][kind], ["in-flight", "store-unavailable"][kind]);
            seen[kind] += 1;
        }
        sleep(ms(50)).await;
    }
    assert!(seen[0] > 0, "it was held for the rest of its lease: {seen:?}");
    assert_eq!((work.runs(), records(&environment).await.len()), (1, 0));
    environment.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    until("one runs again", async || ask(&apps[1], 1).await.status == StatusCode::CREATED).await;
    let retry = ask(&apps[0], 1).await;
    assert!(retry.is_replayed && retry.headers["location"] == "/runs/2", "{retry:?}");
    assert_eq!(work.runs(), 2);
}

/// Guarantee: G18.
#[tokio::test]
async fn record_stands_although_its_release_is_lost_late_or_repeated() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let apps = instances(&environment, Duration::from_secs(30), &work).await;
    let faults = [
        NetworkFault::CutBefore,
        NetworkFault::CutBeforeReply,
        NetworkFault::CutInReply(9),
        NetworkFault::Double,
        NetworkFault::Late(ms(600)),
        NetworkFault::Again(ms(300)),
        NetworkFault::Orphaned(ms(300)),
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        let faulty = environment.proxy.fault_count();
        environment.proxy.all().next_where(is_release_with_record, fault);
        let first = ask(&apps[0], number).await;
        // Before and after the fault has ended.
        for app in [&apps[1], &apps[0], &apps[1]] {
            assert_replayed(&first, &ask(app, number).await);
            sleep(ms(200)).await;
        }
        assert_eq!(environment.proxy.fault_count(), faulty + 1, "{fault:?}");
        assert_eq!((work.runs(), records(&environment).await.len()), (number + 1, number + 1), "{fault:?}");
    }
}

/// Guarantee: G18.
#[tokio::test]
async fn redis_that_stops_before_the_release_has_the_record() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let apps = instances(&environment, Duration::ZERO, &work).await;
    work.open(false);
    let stops = async {
        work.has_started(1).await;
        environment.redis.freeze();
        // The record of a request that is not running may exist: it is not known.
        assert_rejected(&ask(&apps[1], 1).await, 503, "store-unavailable");
        assert_rejected(&ask(&apps[1], 2).await, 503, "store-unavailable");
        assert_rejected(&ask(&apps[0], 1).await, 409, "in-flight");
        work.open(true);
    };
    let (first, ()) = join(ask(&apps[0], 1), stops).await;
    assert_eq!(first.status, StatusCode::CREATED, "sent without the confirmation of Redis");
    environment.redis.thaw();
    until("the record is left", async || records(&environment).await.len() == 1).await;
    let retry = async || ask(&apps[1], 1).await;
    until("it is connected again", async || retry().await.status == StatusCode::CREATED).await;
    assert_replayed(&first, &retry().await);
    assert_eq!(work.runs(), 1);
}

/// A record that cannot be read may be an answer of a later version: nothing runs.
/// Guarantee: G18.
#[tokio::test]
async fn unreadable_record_rejects_its_requests() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let apps = instances(&environment, Duration::ZERO, &work).await;
    assert_eq!(ask(&apps[0], 1).await.status, StatusCode::CREATED);
    let record = records(&environment).await.remove(0);
    let later_version = format!("\u{2}{}", "x".repeat(60));
    let truncated = format!("\u{1}{}", "x".repeat(20));
    for foreign in [
        &["SET", &record, "text"][..],
        &["RPUSH", &record, "item"],
        &["HSET", &record, "id", "a:1:1", "head", "garbage", "body", "text"],
        &["HSET", &record, "head", ""],
        &["HSET", &record, "head", &later_version],
        &["HSET", &record, "head", &truncated],
    ] {
        environment.command(&["DEL", &record]).await;
        environment.command(foreign).await;
        for app in &apps {
            assert_rejected(&ask(app, 1).await, 503, "store-unavailable");
        }
        assert_eq!(work.runs(), 1, "{foreign:?}");
        until("nothing is held", async || lease_left(&environment).await.is_none()).await;
    }

    environment.command(&["DEL", &record]).await;
    environment.command(&["HSET", &record, "name", "of another program"]).await;
    let first = ask(&apps[0], 1).await;
    assert!(!first.is_replayed, "a hash without a head is no record: {first:?}");
    assert_replayed(&first, &ask(&apps[1], 1).await);
}

#[tokio::test]
async fn smallest_acl_suffices_for_replay() {
    let Some(environment) = environment().await else { return };
    let url = user(&environment.redis, &smallest_acl()).await;
    let work = Work::new();
    let instance = async || {
        let store = RedisStore::connect(&url).await.expect("the smallest ACL");
        app(&LockManager::new(store), Duration::from_secs(30), &work)
    };
    let apps = [instance().await, instance().await];
    assert_one_runs(&apps, &work, 1).await;
    let log = environment.command(&["ACL", "LOG"]).await;
    assert!(log.items().is_empty(), "{log:?}");
}
