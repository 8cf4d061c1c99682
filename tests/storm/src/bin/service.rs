//! A service whose handlers report their sections to the checker.
//!
//! ```text
//! CHECKER=address [LOCK_URL=url] service NAME [INSTANCES] [--lock-delay-ms=NUMBER]
//!     [--lease-ms=NUMBER] [--patient] [--newest]
//!     [--correct | --releases-any-holder | --shortens-leases | --skips-some
//!     | --releases-at-head | --skips-lock-delay]
//! ```
//!
//! Each instance has a `LockManager` of its own, and prints the address that it listens on. Without
//! `LOCK_URL` the store is the memory of this process. SIGTERM starts a graceful shutdown; the
//! process then prints the data that is left.

use std::{
    error::Error,
    net::Ipv4Addr,
    panic,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode, request::Parts},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::{Stream, future::join_all, stream};
use serde::Deserialize;
use tokio::{
    net::TcpListener,
    runtime::Handle,
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::sleep,
};
use tower_http::catch_panic::CatchPanicLayer;
use tower_lock::{
    HasLockKey, HeldLock, Lease, LockKey, LockLayer, LockManager, LockManagerBuilder, LockManagerLayer, LockPolicy,
    Locked, MemoryStore, OnDisconnect, ReleaseAt, key, store::LockStore,
};
use tower_lock_storm::{LockPath, Panics, Reply, Report, Reporter, Residue, ShutdownReport, Work, connect, now};
use tower_lock_testkit::{
    limits,
    store::{InterceptedStore, ReleasesAnyHolder, ShortensLeases},
    wait::until,
};

type Failure = Box<dyn Error + Send + Sync>;

/// A deliberate defect that the checker must detect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Wrong {
    #[default]
    Nothing,
    ReleasesAnyHolder,
    ShortensLeases,
    /// One request in a hundred runs without a lock.
    SkipsSome,
    /// The lock is released at the response head, while the stream continues.
    ReleasesAtHead,
    /// An aborted section has no lock-delay.
    SkipsLockDelay,
}

struct App {
    process: String,
    reporter: Reporter,
    lock_delay: Duration,
    sections: AtomicU64,
    inside: AtomicUsize,
}

/// A section, reported as ended on drop.
struct SectionGuard {
    app: Arc<App>,
    section: String,
    key: String,
    token: u64,
    /// After an abort.
    lock_delay: Duration,
    ended: bool,
}

/// The locked subject, for the extractor.
#[derive(Debug, Deserialize)]
struct Subject(u64);

/// Unplanned panics; planned ones do not reach the hook.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// The default lease.
const LEASE: Duration = Duration::from_secs(30);
/// The default lock-delay.
const LOCK_DELAY: Duration = Duration::from_secs(1);

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let (mut words, mut wrong) = (Vec::new(), Wrong::Nothing);
    let (mut lock_delay, mut lease, mut is_patient, mut replaces) = (LOCK_DELAY, LEASE, false, false);
    for argument in std::env::args().skip(1) {
        match argument.strip_prefix("--").map(|flag| flag.split_once('=').unwrap_or((flag, ""))) {
            None => words.push(argument),
            Some(("lock-delay-ms", ms)) => lock_delay = Duration::from_millis(ms.parse()?),
            Some(("patient", _)) => is_patient = true,
            Some(("newest", _)) => replaces = true,
            Some(("lease-ms", ms)) => lease = Duration::from_millis(ms.parse()?),
            Some((flag, _)) => wrong = Wrong::named(flag)?,
        }
    }
    let name = words.first().ok_or("service NAME [INSTANCES]")?.clone();
    let instances: usize = words.get(1).map_or(Ok(1), |number| number.parse())?;
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        usual(panic);
    }));
    let memory = Arc::new(MemoryStore::new());
    let url = std::env::var("LOCK_URL").ok();
    let reporter = Reporter::connect(std::env::var("CHECKER")?.parse()?).await?;
    let (stop, stopped) = watch::channel(false);
    let mut running = Vec::new();
    for number in 0..instances {
        let process = format!("{name}.{number}");
        let delay = if wrong == Wrong::SkipsLockDelay { Duration::ZERO } else { lock_delay };
        let locks = match wrong {
            Wrong::ReleasesAnyHolder | Wrong::ShortensLeases => {
                broken(wrong, url.as_deref(), is_patient, &memory).await?
            }
            _ => match &url {
                Some(url) if is_patient => LockManager::builder(connect(url, true).await?),
                Some(url) => LockManager::connect(url).await?,
                None => LockManager::builder(Arc::clone(&memory)),
            },
        };
        let locks = locks.instance(&process).lease(lease).build();
        let locks = locks.with_policy(LockPolicy::new().lock_delay(delay));
        let (sections, inside) = (AtomicU64::new(0), AtomicUsize::new(0));
        let cluster = Arc::new(App { process, reporter: reporter.clone(), lock_delay, sections, inside });
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        println!("listening on {}", listener.local_addr()?);
        let app = app(&locks, wrong, replaces, &cluster, &memory);
        running.push(serve(listener, app, locks, stopped.clone()));
    }
    let end_of_term = async {
        signal(SignalKind::terminate())?.recv().await;
        stop.send_replace(true);
        Ok::<_, Failure>(())
    };
    let (ended, terminated) = tokio::join!(join_all(running), end_of_term);
    terminated?;
    let holding = ended.into_iter().sum::<Result<usize, Failure>>()?;
    reporter.report(Report::Flush).await;
    drop(reporter);
    // Background tasks end when they are no longer needed.
    let alive = || Handle::current().metrics().num_alive_tasks();
    until("no task is left", async || alive() == 0).await;
    let panics = PANICS.load(Ordering::Relaxed);
    println!("{}", serde_json::to_string(&ShutdownReport { holding, panics })?);
    Ok(())
}

/// The locks of one instance, in a store with a defect.
async fn broken(
    wrong: Wrong,
    url: Option<&str>,
    is_patient: bool,
    memory: &Arc<MemoryStore>,
) -> Result<LockManagerBuilder, Failure> {
    let store: Arc<dyn LockStore> = match url {
        Some(url) => connect(url, is_patient).await?,
        None => Arc::<MemoryStore>::clone(memory),
    };
    Ok(match wrong {
        Wrong::ReleasesAnyHolder => LockManager::builder(InterceptedStore::new(store, ReleasesAnyHolder)),
        _ => LockManager::builder(InterceptedStore::new(store, ShortensLeases)),
    })
}

async fn serve(
    listener: TcpListener,
    app: Router,
    locks: LockManager,
    mut stopped: watch::Receiver<bool>,
) -> Result<usize, Failure> {
    let stop = async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    Ok(locks.shutdown(limits::BROKEN).await)
}

fn app(locks: &LockManager, wrong: Wrong, replaces: bool, cluster: &Arc<App>, memory: &Arc<MemoryStore>) -> Router {
    let left = {
        let (locks, cluster, memory) = (locks.clone(), Arc::clone(cluster), Arc::clone(memory));
        move || async move {
            let (known, waiting) = locks.size();
            let inside = cluster.inside.load(Ordering::SeqCst);
            Json(Residue { inside, held: locks.held_count(), known, waiting, kept: memory.size() })
        }
    };
    let mut app = Router::new().route("/left", get(left));
    // Some stores refuse it.
    if replaces {
        let newest = LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("newest", id)));
        let newest = newest.newest_wins(Duration::ZERO).wait(Duration::from_secs(60));
        app = app.route("/newest/{id}", post(visit_newest).route_layer(newest));
    }
    for mode in LockPath::all() {
        let mut subjects = subjects(locks, wrong, mode);
        if mode.is_caught {
            // Outside the lock: the section of a caught panic is dropped after the unwinding.
            subjects = subjects.layer(CatchPanicLayer::new());
        }
        let prefix = mode.to_string();
        app = if prefix.is_empty() { app.merge(subjects) } else { app.nest(&prefix, subjects) };
    }
    app.with_state(Arc::clone(cluster))
}

fn subjects(locks: &LockManager, wrong: Wrong, mode: LockPath) -> Router<Arc<App>> {
    let patience = Duration::from_secs(60);
    let fixed = Lease::Fixed(Duration::from_millis(400));
    let policies = [
        ("refuse", LockPolicy::new()),
        ("briefly", LockPolicy::new().wait(Duration::from_millis(5))),
        ("wait", LockPolicy::new().wait(patience)),
        ("fixed", LockPolicy::new().wait(patience).lease(fixed)),
    ];
    let mut subjects = Router::new();
    for (name, policy) in policies {
        let hold = if wrong == Wrong::ReleasesAtHead { ReleaseAt::ResponseHead } else { ReleaseAt::BodyEnd };
        let on_disconnect = if mode.is_dropped { OnDisconnect::Cancel } else { OnDisconnect::Finish };
        let policy = policy.release_at(hold).on_disconnect(on_disconnect);
        let path = format!("/{name}/{{id}}");
        subjects = if mode.is_extracted {
            subjects.route(&path, post(visit_extracted).layer(LockManagerLayer::new(locks).policy(policy)))
        } else {
            let layer = LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("subject", id))).policy(policy);
            let layer = if wrong == Wrong::SkipsSome { layer.skip(is_a_hundredth) } else { layer };
            subjects.route(&path, post(visit).route_layer(layer))
        };
    }
    subjects
}

fn is_a_hundredth(head: &Parts) -> bool {
    let name = head.headers.get("x-request").and_then(|name| name.to_str().ok()).unwrap_or_default();
    name.trim_start_matches('r').parse().is_ok_and(|number: u64| number.is_multiple_of(100))
}

async fn visit_extracted(
    Locked(Path(Subject(id)), lock): Locked<Path<Subject>>,
    cluster: State<Arc<App>>,
    work: Query<Work>,
    headers: HeaderMap,
) -> Response {
    visit(Some(lock), cluster, Path(id), work, headers).await
}

/// A section that is replaced has no lock-delay.
async fn visit_newest(
    lock: HeldLock,
    cluster: State<Arc<App>>,
    subject: Path<u64>,
    work: Query<Work>,
    headers: HeaderMap,
) -> Response {
    visit_with(Duration::ZERO, Some(lock), cluster, subject, work, headers).await
}

async fn visit(
    lock: Option<HeldLock>,
    cluster: State<Arc<App>>,
    subject: Path<u64>,
    work: Query<Work>,
    headers: HeaderMap,
) -> Response {
    visit_with(cluster.lock_delay, lock, cluster, subject, work, headers).await
}

async fn visit_with(
    lock_delay: Duration,
    lock: Option<HeldLock>,
    State(cluster): State<Arc<App>>,
    Path(subject): Path<u64>,
    Query(work): Query<Work>,
    headers: HeaderMap,
) -> Response {
    let Some(request) = headers.get("x-request").and_then(|name| name.to_str().ok()) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let inside = SectionGuard::enter(&cluster, lock, subject, request, lock_delay).await;
    if work.frames > 0 {
        return Body::from_stream(frames(inside, work)).into_response();
    }
    work_on(work).await;
    let token = inside.token;
    match inside.finish(work.panics).await {
        Reply::Accepted => token.to_string().into_response(),
        _ => StatusCode::PRECONDITION_FAILED.into_response(),
    }
}

/// The section ends with the last frame.
fn frames(inside: SectionGuard, work: Work) -> impl Stream<Item = Result<Bytes, &'static str>> {
    stream::unfold((Some(inside), 0), move |(mut inside, sent)| async move {
        if sent < work.frames {
            work_on(work).await;
            return Some((Ok(Bytes::from_static(b"row")), (inside, sent + 1)));
        }
        match inside.take()?.finish(work.panics).await {
            Reply::Accepted => None,
            _ => Some((Err("came too late"), (None, sent))),
        }
    })
}

async fn work_on(work: Work) {
    if work.block_ms > 0 {
        // Other tasks of this process go on; only this handler blocks.
        #[expect(clippy::disallowed_methods, reason = "a handler that blocks on purpose")]
        tokio::task::block_in_place(|| std::thread::sleep(Duration::from_millis(work.block_ms)));
    }
    if work.work_ms > 0 {
        sleep(Duration::from_millis(work.work_ms)).await;
    }
}

impl HasLockKey for Subject {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("subject", self.0)
    }
}

// === impl Inside ===

impl SectionGuard {
    async fn enter(
        cluster: &Arc<App>,
        lock: Option<HeldLock>,
        subject: u64,
        request: &str,
        lock_delay: Duration,
    ) -> Self {
        let section = format!("{}-{}", cluster.process, cluster.sections.fetch_add(1, Ordering::Relaxed));
        // In this order: a pause in between shortens the reported section. Without a lock the
        // section has no deadline.
        let at = now();
        let remaining = lock.as_ref().map_or(Duration::from_secs(30), HeldLock::remaining);
        // The subject that it changes, whatever key it has locked.
        let key = format!("subject:{subject}");
        let token = lock.map_or(0, |lock| lock.fencing_token().as_u64());
        cluster.inside.fetch_add(1, Ordering::SeqCst);
        let inside = Self { app: Arc::clone(cluster), section, key, token, lock_delay, ended: false };
        let entered = cluster.reporter.report(Report::Enter {
            section: inside.section.clone(),
            key: inside.key.clone(),
            token,
            process: cluster.process.clone(),
            request: request.to_owned(),
            at,
            deadline: at.saturating_add(nanos(remaining)),
        });
        entered.await;
        inside
    }

    /// Writes, and reports whether the write was accepted.
    async fn finish(mut self, panics: Option<Panics>) -> Reply {
        if panics == Some(Panics::Before) {
            panic::resume_unwind(Box::new("as planned"));
        }
        let reporter = &self.app.reporter;
        // Sent before the first await: an abort cannot prevent it.
        let written = reporter.report(Report::Write { key: self.key.clone(), token: self.token }).await;
        if panics == Some(Panics::After) {
            panic::resume_unwind(Box::new("as planned"));
        }
        self.ended = true;
        self.app.reporter.report(Report::Exit { section: self.section.clone(), at: now() }).await;
        written
    }
}

impl Drop for SectionGuard {
    fn drop(&mut self) {
        if !self.ended {
            let (section, at) = (self.section.clone(), now());
            let until = at.saturating_add(nanos(self.lock_delay));
            drop(self.app.reporter.report(Report::Abort { section, at, until }));
        }
        self.app.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

// === impl Wrong ===

impl Wrong {
    fn named(flag: &str) -> Result<Self, Failure> {
        Ok(match flag {
            "correct" => Self::Nothing,
            "releases-any-holder" => Self::ReleasesAnyHolder,
            "shortens-leases" => Self::ShortensLeases,
            "skips-some" => Self::SkipsSome,
            "releases-at-head" => Self::ReleasesAtHead,
            "skips-lock-delay" => Self::SkipsLockDelay,
            other => return Err(format!("not known: {other}").into()),
        })
    }
}
