//! A service behind a replay layer, whose handlers commit their work to a folder.
//!
//! ```text
//! LOCK_URL=url replayer NAME FOLDER [--wait-ms=NUMBER] [--finds-answers]
//!     [--crash=work|commit|release:NUMBER] [--correct | --forgets-records
//!     | --equal | --changes-records | --ignores-commits]
//! ```
//!
//! A commit is a new file in the folder, which is the database of all processes: it is there with
//! all of its content, or not at all. The log of the process is in the folder, too. The process
//! prints the address that it listens on. SIGTERM starts a graceful shutdown.

use std::{
    error::Error,
    fs::{self, File},
    io,
    net::Ipv4Addr,
    path::{Path as FilePath, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Path, State},
    http::{HeaderValue, StatusCode},
    response::{AppendHeaders, IntoResponse, Response},
    routing::post,
};
use rustix::process::{Signal, getpid, kill_process};
use tokio::{
    net::TcpListener,
    runtime::Handle,
    signal::unix::{SignalKind, signal},
    time::sleep,
};
use tower_lock::{LockKey, LockManager, LockPolicy, Once, ReplayLayer, key, store::LockStore};
use tower_lock_storm::{Crash, CrashPoint, ShutdownReport, connect};
use tower_lock_testkit::{
    limits,
    store::{ChangesRecords, ForgetsRecords, InterceptedStore},
};

type Failure = Box<dyn Error + Send + Sync>;

struct App {
    name: String,
    folder: PathBuf,
    finds_answers: bool,
    crash: Option<Crash>,
    runs: AtomicU64,
}

/// Short, because a killed process blocks its keys for it.
const LEASE: Duration = Duration::from_secs(3);

/// Longer than a storm.
const WINDOW: Duration = Duration::from_secs(600);

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let (mut words, mut wait, mut finds_answers, mut crash) = (Vec::new(), Duration::ZERO, false, None);
    let (mut ignores_commits, mut is_equal) = (false, false);
    let mut store: Arc<dyn LockStore> = connect_patiently().await?;
    for argument in std::env::args().skip(1) {
        match argument.strip_prefix("--").map(|flag| flag.split_once('=').unwrap_or((flag, ""))) {
            None => words.push(argument),
            Some(("wait-ms", ms)) => wait = Duration::from_millis(ms.parse()?),
            Some(("finds-answers", _)) => finds_answers = true,
            Some(("crash", text)) => crash = Some(text.parse()?),
            Some(("correct", _)) => {}
            Some(("equal", _)) => is_equal = true,
            Some(("ignores-commits", _)) => ignores_commits = true,
            Some(("forgets-records", _)) => store = Arc::new(InterceptedStore::new(store, ForgetsRecords)),
            Some(("changes-records", _)) => store = Arc::new(InterceptedStore::new(store, ChangesRecords)),
            Some((other, _)) => return Err(format!("not known: {other}").into()),
        }
    }
    let [name, folder] = &*words else { return Err("replayer NAME FOLDER".into()) };
    let folder = PathBuf::from(folder);
    let log = File::create(folder.join(format!("{name}.log")))?;
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(log)
        .with_ansi(false)
        .init();
    let locks = LockManager::builder(store).instance(name).lease(LEASE).build();
    let locks = locks.with_policy(LockPolicy::new().lock_delay(Duration::from_millis(100)));
    let layer = ReplayLayer::new(&locks, key::fixed(("storm",)));
    let layer = if is_equal { layer.equal_requests(WINDOW) } else { layer.required() };
    let mut layer = layer.wait(wait);
    if finds_answers && !ignores_commits {
        let folder = folder.clone();
        layer = layer.find_answer(move |key| {
            let answer = find_answer(&folder, &key);
            async { answer }
        });
    }
    let app = Arc::new(App { name: name.clone(), folder, finds_answers, crash, runs: AtomicU64::new(0) });
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    println!("listening on {}", listener.local_addr()?);
    let app = Router::new().route("/claims/{number}", post(claim).route_layer(layer)).with_state(app);
    let mut terminated = signal(SignalKind::terminate())?;
    let stop = async move {
        terminated.recv().await;
    };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    let holding = locks.shutdown(limits::BROKEN).await;
    // The job that writes the log has started when a later one has ended. The runtime waits for it.
    tokio::task::spawn_blocking(|| ()).await?;
    println!("{}", serde_json::to_string(&ShutdownReport { holding, ..ShutdownReport::default() })?);
    Ok(())
}

/// A process that replaces another one may start while connections break.
async fn connect_patiently() -> Result<Arc<dyn LockStore>, Failure> {
    let url = std::env::var("LOCK_URL")?;
    for _ in 0..20 {
        if let Ok(store) = connect(&url, false).await {
            return Ok(store);
        }
        sleep(Duration::from_millis(50)).await;
    }
    connect(&url, false).await
}

async fn claim(State(app): State<Arc<App>>, Path(number): Path<u64>, once: Once) -> Result<Response, Response> {
    let run = app.runs.fetch_add(1, Relaxed) + 1;
    sleep(Duration::from_micros(fastrand::u64(0..8_000))).await;
    app.crash_at(CrashPoint::Work, run);
    let name = format!("{}-{run}", app.name);
    let headers = AppendHeaders([
        ("location", HeaderValue::try_from(format!("/claims/{number}")).expect("text")),
        ("link", HeaderValue::from_static("</a>; rel=\"next\"")),
        ("x-run", HeaderValue::try_from(&name).expect("text")),
        ("link", HeaderValue::from_bytes(b"</caf\xe9>; rel=\"prev\"").expect("a value")),
    ]);
    let body: Vec<u8> = (0..fastrand::usize(0..3_000)).map(|_| fastrand::u8(..)).collect();
    let response = (StatusCode::CREATED, headers, Body::from(body)).into_response();
    let line = format!("{number} {} {name} {}\n", app.name, once.fencing_token());
    let response = if app.finds_answers {
        let answer = once.answer(response).await.map_err(IntoResponse::into_response)?;
        app.commit(&once, line, answer.as_bytes());
        answer.into_response()
    } else {
        app.commit(&once, line, b"");
        response
    };
    app.crash_at(CrashPoint::Commit, run);
    sleep(Duration::from_micros(fastrand::u64(0..8_000))).await;
    if app.crashes(CrashPoint::Release, run) {
        Handle::current().spawn(async {
            sleep(Duration::from_micros(fastrand::u64(0..2_000))).await;
            kill_self();
        });
    }
    Ok(response)
}

impl App {
    fn crash_at(&self, point: CrashPoint, run: u64) {
        if self.crashes(point, run) {
            kill_self();
        }
    }

    fn crashes(&self, point: CrashPoint, run: u64) -> bool {
        self.crash.is_some_and(|crash| crash.point == point && crash.run <= run)
    }

    /// Writes the next commit of this key.
    fn commit(&self, once: &Once, mut line: String, answer: &[u8]) {
        let new = self.folder.join(format!("{}.new", line.trim_end().replace(' ', "-")));
        let content = [std::mem::take(&mut line).as_bytes(), answer].concat();
        fs::write(&new, content).expect("a folder");
        // A link to a name that exists is an error: the step is atomic in all processes.
        let next = (0..).find(|number| fs::hard_link(&new, commit_file(&self.folder, once.key(), *number)).is_ok());
        next.expect("a free number");
        fs::remove_file(new).expect("it was written");
    }
}

fn commit_file(folder: &FilePath, key: &LockKey, number: u64) -> PathBuf {
    folder.join(format!("{key}.{number}"))
}

/// The answer of the first commit.
fn find_answer(folder: &FilePath, key: &LockKey) -> io::Result<Option<Vec<u8>>> {
    match fs::read(commit_file(folder, key, 0)) {
        Ok(content) => {
            let line = content.iter().position(|byte| *byte == b'\n').ok_or(io::ErrorKind::InvalidData)?;
            Ok(Some(content[line + 1..].to_vec()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn kill_self() {
    kill_process(getpid(), Signal::KILL).expect("it runs");
}
