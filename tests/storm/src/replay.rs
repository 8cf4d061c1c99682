//! A storm of duplicates: each key is sent many times at once, while processes kill themselves and
//! connections break.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    convert::Infallible,
    fmt, fs, io,
    net::SocketAddr,
    os::unix::process::ExitStatusExt,
    path::Path,
    str::FromStr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    body::Bytes,
    http::{HeaderMap, Request, StatusCode},
};
use fastrand::Rng;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    runtime::Handle,
    time::{Instant, sleep, timeout},
};
use tower_lock_testkit::{Chaos, Direction, Proxy, RedisServer, limits, wait::until};

use crate::{
    cluster::{Service, ShutdownReport},
    database::Database,
};

/// The parameters of a storm of duplicates.
#[derive(Clone, Copy, Debug)]
pub struct ReplayStorm {
    /// The program of the service.
    pub program: &'static str,
    /// The number of keys.
    pub keys: u64,
    /// The number of processes that kill themselves.
    pub crashes: usize,
    /// Whether the layer finds the answers that handlers have committed.
    pub finds_answers: bool,
    /// The flag of a defect, `--correct`, or `--equal`: then no request has a key.
    pub flag: &'static str,
    /// The seed of the clients and of the faults.
    pub seed: u64,
}

/// When a process kills itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// The position in the handler.
    pub point: CrashPoint,
    /// The number of the first run that crashes. A run that ends before the point does not.
    pub run: u64,
}

/// Where in its handler a process kills itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashPoint {
    /// Before the commit.
    Work,
    /// After the commit, before the response.
    Commit,
    /// At most two milliseconds after the response: before, while or after the record is left.
    Release,
}

/// The answers to the clients, and the commits of the handlers.
#[derive(Debug)]
pub struct ReplayOutcome {
    finds_answers: bool,
    keys: u64,
    /// The end of each client, with its key.
    clients: Vec<(u64, ClientEnd)>,
    /// The commits of each key, in their order.
    commits: BTreeMap<u64, Vec<Commit>>,
    /// The names of the processes that have killed themselves.
    killed: BTreeSet<String>,
    /// The points at which they did.
    points: Vec<CrashPoint>,
    /// The processes that have reported a lost record, and the tokens of their sections.
    lost: BTreeSet<(String, u64)>,
    /// The number of attempts of all clients.
    pub attempts: usize,
    /// The number of faults between the services and their store.
    pub faults: u64,
}

/// The result of a client.
#[derive(Clone, Debug)]
enum ClientEnd {
    Answered(Answer),
    /// A response that no retry changes.
    Failed(String),
    NoAnswer,
}

/// A response with the headers that all attempts have in common.
#[derive(Clone, PartialEq, Eq)]
struct Answer {
    is_replayed: bool,
    status: StatusCode,
    headers: Vec<(String, Vec<u8>)>,
    body: Bytes,
}

#[derive(Clone, Debug)]
struct Commit {
    process: String,
    run: String,
    token: u64,
}

/// The processes of a storm. One that has killed itself is replaced.
struct Fleet<'a> {
    storm: &'a ReplayStorm,
    url: String,
    folder: String,
    services: Vec<Service>,
    names: Vec<String>,
    left: Vec<Crash>,
    killed: BTreeSet<String>,
    points: Vec<CrashPoint>,
}

/// Connections to the processes.
#[derive(Default)]
struct Connections {
    sends_keys: bool,
    addresses: Mutex<Vec<SocketAddr>>,
    idle: Mutex<HashMap<SocketAddr, Vec<http1::SendRequest<Full<Bytes>>>>>,
}

const PROCESSES: usize = 4;

const DUPLICATES: usize = 10;

/// The clients that send at the same time: twenty keys.
const CONCURRENCY: usize = 200;

/// Headers of one message.
const OF_THE_MESSAGE: [&str; 3] = ["date", "connection", "idempotency-replayed"];

// === impl ReplayStorm ===

impl ReplayStorm {
    /// Runs the storm on a Redis of its own, with network faults.
    ///
    /// # Panics
    ///
    /// Panics if a process does not start or ends by itself, or if anything is left in Redis except
    /// for records.
    pub async fn run(&self) -> ReplayOutcome {
        let redis = RedisServer::start().await;
        let proxy = Proxy::start(redis.address()).await;
        let folder = redis.folder().join("commits");
        let fleet = Fleet::start(self, proxy.url(), &folder).await;
        let chaos = Chaos::new(self.seed).cut(5).double(20).late(20, Duration::from_millis(20));
        let short = Duration::from_millis(1)..Duration::from_millis(900);
        proxy.chaos(Some(chaos.again(20, short.clone()).orphaned(5, short).drop_pushes(20).double_pushes(20)));
        let end = || {
            proxy.chaos(None);
            proxy.all().heal();
        };
        let outcome = fleet.run(gusts(&proxy, !self.seed), end).await;
        until("only records are left", async || {
            let keys = redis.command(&["KEYS", "*"]).await;
            keys.texts().iter().all(|key| *key == "tower-lock:lock:f" || key.starts_with("tower-lock:lock:r:"))
        })
        .await;
        ReplayOutcome { faults: proxy.fault_count(), ..outcome }
    }

    /// Runs the storm on this database, whose sessions are killed.
    ///
    /// # Panics
    ///
    /// Panics if a process does not start or ends by itself, or if a key stays locked.
    pub async fn run_on(&self, database: &Database) -> ReplayOutcome {
        let fleet = Fleet::start(self, database.url(), &database.folder().join("commits")).await;
        let mut rng = Rng::with_seed(!self.seed);
        let mut faults = 0;
        let kills = async {
            loop {
                sleep(Duration::from_millis(rng.u64(100..600))).await;
                faults += database.kill_sessions().await;
            }
        };
        let outcome = fleet.run(kills, || ()).await;
        database.is_left_clean().await;
        ReplayOutcome { faults, ..outcome }
    }

    /// The key of each client, and its random numbers. Duplicates are sent at about the same time.
    fn clients(&self) -> Vec<(u64, Rng)> {
        let mut rng = Rng::with_seed(self.seed);
        let mut clients: Vec<_> = (0..self.keys).flat_map(|key| [key; DUPLICATES]).collect();
        for wave in clients.chunks_mut(CONCURRENCY / 2) {
            rng.shuffle(wave);
        }
        clients.into_iter().map(|key| (key, rng.fork())).collect()
    }

    /// The crashes, the first one last.
    fn crashes(&self) -> Vec<Crash> {
        let mut rng = Rng::with_seed(self.seed);
        let points = [CrashPoint::Commit, CrashPoint::Work, CrashPoint::Release];
        // Early, so that each process reaches its crash, also one that has few runs on busy cores.
        let runs = (self.keys / u64::try_from(8 * self.crashes + 1).expect("few")).max(1);
        let crash = |number: usize| Crash { point: points[number % points.len()], run: rng.u64(1..=runs) };
        (0..self.crashes).map(crash).collect()
    }
}

/// Sometimes all connections between the services and Redis fail.
async fn gusts(proxy: &Proxy, seed: u64) -> Infallible {
    let mut rng = Rng::with_seed(seed);
    loop {
        sleep(Duration::from_millis(rng.u64(300..900))).await;
        let all = proxy.all();
        match rng.u8(0..4) {
            0 | 1 => all.cut(),
            2 => all.hold(Direction::Up),
            _ => all.hold(Direction::Down),
        }
        sleep(Duration::from_millis(rng.u64(20..200))).await;
        all.heal();
    }
}

/// The commits in a folder, by key.
fn commits(folder: &Path) -> BTreeMap<u64, Vec<Commit>> {
    let mut commits = BTreeMap::<u64, BTreeMap<u64, Commit>>::new();
    for file in fs::read_dir(folder).expect("a folder") {
        let path = file.expect("a file").path();
        // A process that was killed leaves files with another extension.
        let Some(order) = path.extension().and_then(|number| number.to_str()?.parse().ok()) else { continue };
        let content = fs::read(&path).expect("a file");
        let line = content.split(|byte| *byte == b'\n').next().expect("a line");
        let line = String::from_utf8(line.to_vec()).expect("text");
        let [key, process, run, token] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let token = token.parse().expect("a number");
        let commit = Commit { process: process.to_owned(), run: run.to_owned(), token };
        commits.entry(key.parse().expect("a number")).or_default().insert(order, commit);
    }
    commits.into_iter().map(|(key, commits)| (key, commits.into_values().collect())).collect()
}

/// The lost records that the logs in a folder report.
fn lost_records(folder: &Path) -> BTreeSet<(String, u64)> {
    let mut lost = BTreeSet::new();
    for file in fs::read_dir(folder).expect("a folder") {
        let path = file.expect("a file").path();
        if path.extension().is_some_and(|extension| extension == "log") {
            let process = path.file_stem().expect("a name").to_str().expect("text").to_owned();
            let log = fs::read_to_string(&path).expect("text");
            for line in log.lines().filter(|line| line.contains("a record may be lost")) {
                let token = line.rsplit_once("fence=").expect("a token").1.parse().expect("a number");
                assert!(lost.insert((process.clone(), token)), "reported twice: {line}");
            }
        }
    }
    lost
}

// === impl Fleet ===

impl<'a> Fleet<'a> {
    async fn start(storm: &'a ReplayStorm, url: String, folder: &Path) -> Self {
        fs::create_dir(folder).expect("a folder");
        let folder = folder.to_str().expect("text").to_owned();
        let left = storm.crashes();
        let (services, names) = (Vec::new(), Vec::new());
        let mut fleet = Self { storm, url, folder, services, names, left, killed: BTreeSet::new(), points: Vec::new() };
        for number in 0..PROCESSES {
            let (service, name) = fleet.start_one(number).await;
            fleet.services.push(service);
            fleet.names.push(name);
        }
        fleet
    }

    /// Runs the storm beside faults, until all clients have an answer.
    async fn run(mut self, faults: impl Future<Output = Infallible>, end_of_faults: impl FnOnce()) -> ReplayOutcome {
        let (storm, folder) = (self.storm, self.folder.clone());
        let connections = Connections { sends_keys: storm.flag != "--equal", ..Connections::default() };
        *guarded(&connections.addresses) = self.addresses();
        let clients = stream::iter(storm.clients()).map(|(key, rng)| {
            let connections = &connections;
            async move {
                let (end, attempts) = connections.request_until_answered(key, rng).await;
                (key, end, attempts)
            }
        });
        let ends: Vec<_> = tokio::select! {
            ends = clients.buffer_unordered(CONCURRENCY).collect() => ends,
            never = self.replace_killed(&connections) => match never {},
            never = faults => match never {},
        };
        end_of_faults();
        let (killed, points) = self.end().await;
        ReplayOutcome {
            finds_answers: storm.finds_answers,
            keys: storm.keys,
            attempts: ends.iter().map(|(_, _, attempts)| attempts).sum(),
            clients: ends.into_iter().map(|(key, end, _)| (key, end)).collect(),
            commits: commits(Path::new(&folder)),
            killed,
            lost: lost_records(Path::new(&folder)),
            points,
            faults: 0,
        }
    }

    /// Starts the next process in this place, under a new name.
    async fn start_one(&mut self, number: usize) -> (Service, String) {
        let name = format!("{}.{}", ["a", "b", "c", "d"][number], self.points.len());
        // One process rejects duplicates, the others let them wait.
        let wait = ["--wait-ms=0", "--wait-ms=100", "--wait-ms=5000", "--wait-ms=1000"][number];
        let crash = self.left.pop().map(|crash| {
            self.points.push(crash.point);
            format!("--crash={crash}")
        });
        let mut arguments = vec![&*name, &*self.folder, wait, self.storm.flag];
        arguments.extend(self.storm.finds_answers.then_some("--finds-answers"));
        arguments.extend(crash.as_deref());
        let environment = HashMap::from([("LOCK_URL", self.url.clone())]);
        (Service::start(self.storm.program, &arguments, &environment, 1).await, name)
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        self.services.iter().map(|service| service.instances()[0]).collect()
    }

    async fn replace_killed(&mut self, connections: &Connections) -> Infallible {
        loop {
            for number in 0..PROCESSES {
                if self.note_killed(number) {
                    let (service, name) = self.start_one(number).await;
                    (self.services[number], self.names[number]) = (service, name);
                    *guarded(&connections.addresses) = self.addresses();
                }
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Whether a process has killed itself.
    fn note_killed(&mut self, number: usize) -> bool {
        let Some(end) = self.services[number].process().ended() else { return false };
        assert_eq!(end.signal(), Some(9), "{} has ended: {end}", self.names[number]);
        self.killed.insert(self.names[number].clone());
        true
    }

    /// Ends all processes gracefully.
    async fn end(mut self) -> (BTreeSet<String>, Vec<CrashPoint>) {
        let is_killed: Vec<_> = (0..PROCESSES).map(|number| self.note_killed(number)).collect();
        for (service, is_killed) in self.services.into_iter().zip(is_killed) {
            if !is_killed {
                assert_eq!(service.terminate().await, ShutdownReport::default());
            }
        }
        (self.killed, self.points)
    }
}

// === impl Connections ===

impl Connections {
    /// Sends a request with the same key until it has an answer. Some attempts are abandoned.
    async fn request_until_answered(&self, key: u64, mut rng: Rng) -> (ClientEnd, usize) {
        let began = Instant::now();
        for attempt in 1.. {
            let patience = if attempt == 1 && rng.u8(0..5) == 0 {
                Duration::from_millis(rng.u64(1..15))
            } else {
                Duration::from_secs(20)
            };
            let address = {
                let addresses = guarded(&self.addresses);
                addresses[rng.usize(..addresses.len())]
            };
            if let Ok(Ok(answer)) = timeout(patience, self.send(address, key)).await {
                match answer.status.as_u16() {
                    201 => return (ClientEnd::Answered(answer), attempt),
                    409 | 503 if !answer.is_replayed => {}
                    status => {
                        let text = String::from_utf8_lossy(&answer.body);
                        return (ClientEnd::Failed(format!("{status} {text}")), attempt);
                    }
                }
            }
            if began.elapsed() > limits::BROKEN {
                return (ClientEnd::NoAnswer, attempt);
            }
            sleep(Duration::from_millis(rng.u64(50..200))).await;
        }
        unreachable!("it has an end")
    }

    async fn send(&self, to: SocketAddr, key: u64) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        let idle = guarded(&self.idle).get_mut(&to).and_then(Vec::pop).filter(|idle| !idle.is_closed());
        let mut connection = match idle {
            Some(idle) => idle,
            None => connect(to).await?,
        };
        let request = Request::post(format!("/claims/{key}")).header("host", "x");
        let request = match self.sends_keys {
            true => request.header("idempotency-key", format!("\"key {key}\"")),
            false => request,
        };
        let request = request.body(Full::from(format!("claim {key}"))).expect("a request");
        connection.ready().await?;
        let (head, body) = connection.send_request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        guarded(&self.idle).entry(to).or_default().push(connection);
        Ok(Answer {
            is_replayed: head.headers.get("idempotency-replayed").is_some_and(|value| value == "true"),
            status: head.status,
            headers: common_headers(&head.headers),
            body,
        })
    }
}

async fn connect(to: SocketAddr) -> io::Result<http1::SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    let (requests, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    Handle::current().spawn(connection);
    Ok(requests)
}

/// The headers in their order, without those of one message.
fn common_headers(headers: &HeaderMap) -> Vec<(String, Vec<u8>)> {
    let common = headers.iter().filter(|(name, _)| !OF_THE_MESSAGE.contains(&name.as_str()));
    common.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect()
}

fn guarded<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl ReplayOutcome ===

impl ReplayOutcome {
    /// The violations, by name, and an example of each.
    #[must_use]
    pub fn violations(&self) -> BTreeMap<&'static str, String> {
        let mut violations = BTreeMap::new();
        for key in 0..self.keys {
            let commits = self.commits.get(&key).map(Vec::as_slice).unwrap_or_default();
            let ends: Vec<_> = self.clients.iter().filter(|(of, _)| *of == key).map(|(_, end)| end).collect();
            for name in self.violations_of(commits, &ends) {
                violations.entry(name).or_insert_with(|| format!("key {key}: {commits:?}, {ends:?}"));
            }
        }
        violations
    }

    fn violations_of(&self, commits: &[Commit], ends: &[&ClientEnd]) -> Vec<&'static str> {
        let mut found = Vec::new();
        let mut check = |name, holds: bool| {
            if !holds {
                found.push(name);
            }
        };
        // Another run can follow only a run whose process was killed before its record, or whose
        // record was reported as lost.
        let earlier = &commits[..commits.len().saturating_sub(1)];
        let is_lost = |commit: &Commit| self.lost.contains(&(commit.process.clone(), commit.token));
        let is_excused =
            |commit: &Commit| !self.finds_answers && (self.killed.contains(&commit.process) || is_lost(commit));
        check("ran-twice", earlier.iter().all(is_excused));
        check("no-answer", ends.len() == DUPLICATES && !ends.iter().any(|end| matches!(end, ClientEnd::NoAnswer)));
        let failure = ends.iter().find_map(|end| end.failure());
        check("failed", failure.is_none());
        let mut first = BTreeMap::<_, &Answer>::new();
        for answer in ends.iter().filter_map(|end| end.answer()) {
            let run = answer.run();
            check("answer-without-commit", commits.iter().any(|commit| commit.run.as_bytes() == run));
            let same = first.entry(run).or_insert(answer);
            let is_equal = (same.status, &same.headers, &same.body) == (answer.status, &answer.headers, &answer.body);
            check("answers-differ", is_equal);
        }
        check("answers-differ", first.len() <= commits.len());
        let not_replayed = ends.iter().filter_map(|end| end.answer()).filter(|answer| !answer.is_replayed).count();
        check("answer-not-marked", not_replayed <= commits.len());
        found
    }

    /// The number of keys that ran again.
    fn ran_again(&self) -> usize {
        self.commits.values().filter(|commits| commits.len() > 1).count()
    }

    /// Checks that all kinds of events occurred, and prints their numbers.
    ///
    /// # Panics
    ///
    /// Panics if one did not.
    pub fn check_coverage(&self, storm: &ReplayStorm) {
        let answers = || self.clients.iter().filter_map(|(_, end)| end.answer());
        let replayed = answers().filter(|answer| answer.is_replayed).count();
        println!(
            "{} keys, {} clients, {} attempts, {} faults, {} replayed, {} killed at {:?}, {} lost records, {} keys ran again",
            self.keys,
            self.clients.len(),
            self.attempts,
            self.faults,
            replayed,
            self.killed.len(),
            self.points,
            self.lost.len(),
            self.ran_again()
        );
        // One process may reach two of them.
        assert_eq!(self.points.len(), storm.crashes, "killed at {:?}: {:?}", self.points, self.killed);
        // Their number depends on how many requests share a call, and so on the speed of the
        // machine.
        assert!(self.faults > 0);
        assert!(replayed > self.clients.len() / 2, "{replayed} replayed");
        // A process that is killed after a commit leaves no record of it.
        assert_eq!(self.ran_again() > 0, !self.finds_answers);
    }
}

impl ClientEnd {
    fn answer(&self) -> Option<&Answer> {
        match self {
            Self::Answered(answer) => Some(answer),
            _ => None,
        }
    }

    fn failure(&self) -> Option<&str> {
        match self {
            Self::Failed(response) => Some(response),
            _ => None,
        }
    }
}

impl Answer {
    /// The name of the run that gave it.
    fn run(&self) -> &[u8] {
        self.headers.iter().find(|(name, _)| name == "x-run").map(|(_, run)| &**run).unwrap_or_default()
    }
}

impl fmt::Debug for Answer {
    /// Without most of the body, which is random.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer")
            .field("status", &self.status)
            .field("run", &String::from_utf8_lossy(self.run()))
            .field("is_replayed", &self.is_replayed)
            .field("headers", &self.headers.len())
            .field("body_len", &self.body.len())
            .field("body_end", &self.body.slice(self.body.len().saturating_sub(4)..))
            .finish()
    }
}

// === impl Crash ===

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let point = match self.point {
            CrashPoint::Work => "work",
            CrashPoint::Commit => "commit",
            CrashPoint::Release => "release",
        };
        write!(f, "{point}:{}", self.run)
    }
}

impl FromStr for Crash {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (point, run) = text.split_once(':').ok_or("POINT:NUMBER")?;
        let point = match point {
            "work" => CrashPoint::Work,
            "commit" => CrashPoint::Commit,
            "release" => CrashPoint::Release,
            other => return Err(format!("not known: {other}")),
        };
        Ok(Self { point, run: run.parse().map_err(|error| format!("{run}: {error}"))? })
    }
}
