//! A retry gets the first answer, from instances that share a Redis.

use std::{
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
use tower_lock::{LockManager, ReplayLayer, key, test_util::Clock};
use tower_lock_testkit::{
    NetworkFault, Process, Request as Command,
    app::send,
    limits,
    wait::{ms, until},
};

use crate::support::{Environment, environment};

/// The client of all requests, which no name in Redis may show.
const CLIENT: &str = "ann@example.org";

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
    let layer = ReplayLayer::new(locks, key::fixed(("user", CLIENT))).required().wait(wait);
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

/// The name of the only lock.
async fn held(environment: &Environment) -> Option<String> {
    environment.command(&["KEYS", "lock:*"]).await.texts().first().map(|name| (*name).to_owned())
}

/// Lets the lease of the only lock and its lock-delay pass.
async fn expire(environment: &Environment) {
    let lock = held(environment).await.expect("held");
    environment.command(&["PEXPIRE", &lock, "1"]).await;
    until("it has expired", async || held(environment).await.is_none()).await;
}

/// Identifies a release that leaves a record with a body.
fn is_release_with_record(request: &Command) -> bool {
    // EVALSHA, hash, number of keys, four keys, arguments .. An acquire has one argument more.
    let names_record = request.parts.iter().any(|part| part.starts_with(b"tower-lock:lock:r:"));
    request.name() == "EVALSHA" && names_record && request.parts.len() == 3 + 4 + 8
}

/// Guarantee: G18.
#[tokio::test]
async fn first_request_costs_two_scripts_and_a_retry_one() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let [a, b] = instances(&environment, Duration::ZERO, &work).await;
    // Loads the scripts.
    assert_replayed(&ask(&a, 0).await, &ask(&b, 0).await);
    let keys = environment.keys().await;
    let [record] = &*keys else { panic!("{keys:?}: one record, and nothing else") };
    assert!(record.starts_with("tower-lock:lock:r:{lock:+replay:~") && !record.contains(CLIENT), "{record}");

    let before = environment.scripts().await;
    let first = ask(&a, 1).await;
    assert_eq!(environment.scripts().await - before, 2);
    for (retries, app) in [(1, &a), (2, &b), (3, &a)] {
        assert_replayed(&first, &ask(app, 1).await);
        assert_eq!(environment.scripts().await - before, 2 + retries);
    }
    assert_eq!(work.runs(), 2);
}

/// One acquire enqueues it, and another one, after a message, finds the record.
/// Guarantee: G18.
#[tokio::test]
async fn duplicate_that_waits_at_another_instance_costs_two_scripts() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let [a, b] = instances(&environment, limits::BROKEN, &work).await;
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

/// Never returns in the child process. Does nothing in the test itself.
async fn run_in_child_process() {
    let Ok(url) = std::env::var(URL) else { return };
    let work = Work::new();
    work.open(false);
    let store = limits::redis().connect(&url).await.expect("it is up");
    ask(&app(&LockManager::new(store), Duration::ZERO, &work), 1).await;
    unreachable!("it is killed");
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
    let next = app(&environment.direct_instance("next").await, Duration::ZERO, &work);
    until("it has the key", async || held(&environment).await.is_some()).await;
    process.kill();
    assert_rejected(&ask(&next, 1).await, 409, "in-flight");
    let lock = held(&environment).await.expect("still held");
    let left = environment.command(&["PTTL", &lock]).await.integer();
    assert!(left.is_some_and(|left| (1..=31_000).contains(&left)), "a lease and a lock-delay: {left:?}");
    expire(&environment).await;
    let first = ask(&next, 1).await;
    assert!(first.status == StatusCode::CREATED && !first.is_replayed, "{first:?}");
    assert_replayed(&first, &ask(&next, 1).await);
    assert_eq!(work.runs(), 1);
}

/// Simultaneous retries at two instances: one of them runs, and all get its answer.
async fn assert_one_runs(apps: &[Router; 2], work: &Work, number: usize) {
    let before = work.runs();
    let mut answers = join_all((0..8).map(|n| ask(&apps[n % 2], number))).await;
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
    let apps = instances(&environment, limits::BROKEN, &work).await;
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

/// The answer is sent. Then its record is left when there is memory, or its lease expires first,
/// and the answer is lost. Without memory nothing runs.
/// Guarantee: G18.
#[tokio::test]
async fn release_without_memory_is_repeated_until_the_lease_expires() {
    for has_expired in [false, true] {
        let Some(environment) = environment().await else { return };
        let (work, clock) = (Work::new(), Clock::default());
        let locks = LockManager::builder(environment.store().await).clock(clock.clone()).build();
        let apps = [app(&locks, Duration::ZERO, &work), app(&environment.instance("b").await, Duration::ZERO, &work)];
        work.open(false);
        let memory = async |bytes| environment.command(&["CONFIG", "SET", "maxmemory", bytes]).await;
        let full = async {
            work.has_started(1).await;
            memory("1").await;
            work.open(true);
        };
        let (first, ()) = join(ask(&apps[0], 1), full).await;
        assert_eq!(first.status, StatusCode::CREATED);
        assert_rejected(&ask(&apps[1], 1).await, 409, "in-flight");
        if has_expired {
            expire(&environment).await;
            clock.jump(Duration::from_secs(31));
            until("it is not repeated for ever", async || locks.size() == (0, 0)).await;
            for app in &apps {
                assert_rejected(&ask(app, 1).await, 503, "store-unavailable");
            }
        }
        assert_eq!((work.runs(), records(&environment).await.len()), (1, 0));
        memory("0").await;
        for app in [&apps[1], &apps[0]] {
            // The instance may not know yet that its release is done.
            until("an answer", async || ask(app, 1).await.status == StatusCode::CREATED).await;
        }
        let retry = ask(&apps[1], 1).await;
        match has_expired {
            false => assert_replayed(&first, &retry),
            true => assert!(retry.is_replayed && retry.headers["location"] == "/runs/2", "{retry:?}"),
        }
        assert_eq!(work.runs(), 1 + usize::from(has_expired));
    }
}

/// Guarantee: G18.
#[tokio::test]
async fn record_stands_although_its_release_is_lost_late_or_repeated() {
    let Some(environment) = environment().await else { return };
    let work = Work::new();
    let apps = instances(&environment, limits::BROKEN, &work).await;
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
