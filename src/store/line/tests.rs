//! Locks of several processes against a model of a server, whose replies are lost, whose executions
//! are late, and whose sessions end.

#![allow(clippy::disallowed_methods, reason = "tests run within a runtime")]

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use fastrand::Rng;
use tokio::time::{Instant, sleep, timeout};

use super::{Block, Entry, Line, LineError, LineStore, Lines, OnEvent, OwnEntry, Page, SessionEvent};
use crate::{
    LockError, LockManager, LockPolicy,
    acquisition::AcquisitionId,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, IfBusy, LockStore, QueueConfig, ReleaseReply, ReleaseRequest, StoreError,
        StoreErrorKind,
    },
    sync::Mutex,
};

const LEASE: Duration = Duration::from_secs(6);
/// The lease, the lock-delay, and what a session needs.
const SESSION: Duration = Duration::from_secs(11);
const CALL: Duration = Duration::from_millis(500);
const ROUNDS: u32 = 6;
const MIN_HOLD: Duration = Duration::from_secs(2);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A server of lines. A node is `<key>/<sequence>`.
#[derive(Default)]
struct Server {
    lines: BTreeMap<String, Vec<(u64, String, u64)>>,
    blocks: BTreeMap<String, (u64, Instant, Option<String>)>,
    sequence: u64,
    /// The end of each session.
    sessions: HashMap<u64, Instant>,
    watches: Vec<(String, Weak<Process>)>,
    /// The cursor of each page.
    pages: Vec<String>,
}

/// A connection of a process.
struct Process {
    this: Weak<Self>,
    server: Arc<Mutex<Server>>,
    session: AtomicU64,
    on_event: OnceLock<OnEvent>,
    rng: Mutex<Rng>,
    /// The calls that a server may still execute.
    late: Mutex<Vec<Execute>>,
    has_faults: AtomicBool,
    heard_at: Mutex<Option<Instant>>,
    /// The time of each reply, in milliseconds.
    delay_ms: AtomicU64,
    /// No call reaches the leader before. The member may answer reads, by what it had.
    cut_until: Mutex<Option<Instant>>,
    answers_reads: AtomicBool,
}

type Execute = Box<dyn FnOnce(&mut Server) + Send>;

#[derive(Debug)]
struct Failed(StoreErrorKind, String);

impl LineError for Failed {
    fn of(kind: StoreErrorKind, text: impl Into<String>) -> Self {
        Self(kind, text.into())
    }
}

impl Server {
    fn handle(key: &str, sequence: u64) -> String {
        format!("{key}/{sequence}")
    }

    fn line(&mut self, key: &str) -> Line {
        self.expire();
        let block = self.blocks.get(key).map(|(sequence, end, revoked)| Block {
            handle: Self::handle(key, *sequence),
            left: end.saturating_duration_since(Instant::now()),
            revoked: revoked.clone(),
        });
        let entry =
            |(sequence, id, _): &(u64, String, u64)| Entry { handle: Self::handle(key, *sequence), name: id.clone() };
        Line { entries: self.lines.get(key).into_iter().flatten().map(entry).collect(), block }
    }

    fn append(&mut self, key: &str, id: String, session: u64) -> Option<OwnEntry> {
        self.expire();
        self.sessions.get(&session)?;
        self.sequence += 1;
        self.lines.entry(key.to_owned()).or_default().push((self.sequence, id, session));
        Some(OwnEntry { handle: Self::handle(key, self.sequence), fence: self.sequence })
    }

    fn delete(&mut self, handle: &str) -> bool {
        self.expire();
        let (key, sequence) = handle.rsplit_once('/').expect("a handle");
        let entries = self.lines.entry(key.to_owned()).or_default();
        let before = entries.len();
        entries.retain(|(other, ..)| other.to_string() != sequence);
        let mut was_there = entries.len() < before;
        was_there |= self.blocks.get(key).is_some_and(|(other, ..)| other.to_string() == sequence)
            && self.blocks.remove(key).is_some();
        if was_there {
            self.gone(handle);
        }
        was_there
    }

    fn exists(&mut self, handle: &str) -> bool {
        let (key, _) = handle.rsplit_once('/').expect("a handle");
        let line = self.line(key);
        line.before(handle).is_some() || line.block.is_some_and(|block| block.handle == handle)
    }

    fn gone(&mut self, handle: &str) {
        for (_, process) in self.watches.extract_if(.., |(node, _)| node == handle) {
            if let Some(process) = process.upgrade() {
                let node = handle.to_owned();
                tokio::spawn(async move {
                    process.pause(20).await;
                    if !process.is_cut() {
                        process.event(SessionEvent::Gone { node });
                    }
                });
            }
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        self.sessions.retain(|_, end| *end > now);
        let mut gone = Vec::new();
        for (key, entries) in &mut self.lines {
            let ended = entries.extract_if(.., |(_, _, session)| !self.sessions.contains_key(session));
            gone.extend(ended.map(|(sequence, ..)| Self::handle(key, sequence)));
        }
        let ended = self.blocks.extract_if(.., |_, (_, end, _)| *end <= now);
        gone.extend(ended.map(|(key, (sequence, ..))| Self::handle(&key, sequence)));
        gone.iter().for_each(|handle| self.gone(handle));
    }
}

impl Process {
    fn new(server: &Arc<Mutex<Server>>, seed: u64) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            server: Arc::clone(server),
            session: AtomicU64::new(0),
            on_event: OnceLock::new(),
            rng: Mutex::new(Rng::with_seed(seed)),
            late: Mutex::default(),
            has_faults: AtomicBool::new(true),
            heard_at: Mutex::default(),
            delay_ms: AtomicU64::new(0),
            cut_until: Mutex::default(),
            answers_reads: AtomicBool::default(),
        })
    }

    fn event(&self, event: SessionEvent) {
        if let Some(on_event) = self.on_event.get() {
            on_event(event);
        }
    }

    fn chance(&self, percent: u8) -> bool {
        self.rng.lock().u8(..100) < percent && self.has_faults.load(SeqCst)
    }

    fn is_cut(&self) -> bool {
        self.cut_until.lock().is_some_and(|until| until > Instant::now())
    }

    async fn pause(&self, below_ms: u64) {
        let pause = self.rng.lock().u64(..below_ms);
        sleep(ms(pause)).await;
    }

    /// Executes what is late, in any order.
    fn execute_late(&self) {
        let mut late = std::mem::take(&mut *self.late.lock());
        self.rng.lock().shuffle(&mut late);
        late.into_iter().for_each(|execute| execute(&mut self.server.lock()));
    }

    async fn call<T: Send + 'static>(
        &self,
        execute: impl FnOnce(&mut Server) -> T + Send + 'static,
    ) -> Result<T, Failed> {
        self.pause(20).await;
        let lost = Err(Failed::of(StoreErrorKind::Timeout, "no reply"));
        if self.is_cut() {
            sleep(CALL).await;
            return lost;
        }
        if self.chance(2) {
            // A new connection: the events of the one before are lost.
            let this = Weak::clone(&self.this);
            self.server.lock().watches.retain(|(_, process)| !process.ptr_eq(&this));
            self.event(SessionEvent::Connected);
        }
        if self.chance(50) {
            self.execute_late();
        }
        if self.chance(1) {
            // A new leader begins with full sessions.
            self.server.lock().sessions.values_mut().for_each(|end| *end = Instant::now() + SESSION);
        }
        if self.chance(3) {
            self.late.lock().push(Box::new(|server| drop(execute(server))));
            sleep(CALL).await;
            return lost;
        }
        let reply = execute(&mut self.server.lock());
        if self.chance(3) {
            sleep(CALL).await;
            return lost;
        }
        *self.heard_at.lock() = Some(Instant::now());
        self.pause(20).await;
        sleep(ms(self.delay_ms.load(SeqCst))).await;
        Ok(reply)
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Process")
    }
}

impl Lines for Arc<Process> {
    const STORE: &'static str = "model";
    type Error = Failed;

    fn store_error(&self, operation: &'static str, error: Failed) -> StoreError {
        StoreError::new(Self::STORE, operation, error.0).with_source(error.1)
    }

    fn on_event(&self, on_event: OnEvent) {
        let _ = self.on_event.set(on_event);
    }

    fn session_time(&self) -> Duration {
        SESSION
    }

    async fn heartbeat(&self) -> Result<(), Failed> {
        let session = self.session.load(SeqCst);
        // A member tells the leader of its sessions now and then.
        let early = ms(self.rng.lock().u64(..2_000));
        let alive = self.call(move |server| {
            server.expire();
            let end = Instant::now() + SESSION - early;
            server.sessions.get_mut(&session).map(|until| *until = end.max(*until)).is_some()
        });
        // A process that has heard nothing for so long begins another one.
        let is_over = self.heard_at.lock().is_some_and(|heard_at| heard_at.elapsed() > SESSION);
        if !is_over && alive.await? {
            return Ok(());
        }
        self.event(SessionEvent::Ended);
        let session = self.call(|server| {
            server.sequence += 1;
            server.sessions.insert(server.sequence, Instant::now() + SESSION);
            server.sequence
        });
        self.session.store(session.await?, SeqCst);
        Ok(())
    }

    async fn join(&self, key: &LockKey, name: &str, only_if_free: bool) -> Result<(Option<OwnEntry>, Line), Failed> {
        let (key, id) = (key.as_str().to_owned(), name.to_owned());
        // Of the session of the connection, which may be a later one than that of the caller.
        self.pause(20).await;
        let session = self.session.load(SeqCst);
        let joined = self.call(move |server| {
            let line = server.line(&key);
            if only_if_free && !line.is_free() {
                return Some((None, line));
            }
            let own = server.append(&key, id, session)?;
            Some((Some(own), server.line(&key)))
        });
        joined.await?.ok_or(Failed::of(StoreErrorKind::Unavailable, "the session has ended"))
    }

    async fn line(&self, key: &LockKey) -> Result<Line, Failed> {
        let key = key.as_str().to_owned();
        self.call(move |server| server.line(&key)).await
    }

    async fn leave(&self, key: &LockKey, handle: &str) -> Result<(bool, Line), Failed> {
        let (key, handle) = (key.as_str().to_owned(), handle.to_owned());
        self.call(move |server| (server.delete(&handle), server.line(&key))).await
    }

    async fn purge(&self, key: &LockKey, name: &str) -> Result<(), Failed> {
        let (key, name) = (key.as_str().to_owned(), name.to_owned());
        self.execute_late();
        self.call(move |server| {
            let line = server.line(&key);
            line.entries.iter().filter(|entry| entry.name == name).for_each(|entry| {
                server.delete(&entry.handle);
            });
        })
        .await
    }

    async fn replace(&self, key: &LockKey, handle: &str, name: &str) -> Result<Option<(OwnEntry, Line)>, Failed> {
        let (key, handle, id) = (key.as_str().to_owned(), handle.to_owned(), name.to_owned());
        let session = self.session.load(SeqCst);
        self.call(move |server| {
            let was_there = server.delete(&handle);
            let own = was_there.then(|| server.append(&key, id, session)).flatten();
            own.map(|own| (own, server.line(&key)))
        })
        .await
    }

    async fn block(
        &self,
        key: &LockKey,
        handle: &str,
        time: Duration,
        revoked: Option<&str>,
    ) -> Result<Option<String>, Failed> {
        let (key, handle, revoked) = (key.as_str().to_owned(), handle.to_owned(), revoked.map(str::to_owned));
        self.call(move |server| {
            server.delete(&handle).then(|| {
                server.sequence += 1;
                server.blocks.insert(key.clone(), (server.sequence, Instant::now() + time, revoked));
                Server::handle(&key, server.sequence)
            })
        })
        .await
    }

    async fn unblock(&self, handle: &str) -> Result<(), Failed> {
        let handle = handle.to_owned();
        self.call(move |server| server.delete(&handle)).await.map(|_| ())
    }

    async fn exist(&self, handles: &[String]) -> Result<Vec<bool>, Failed> {
        if self.is_cut() && self.answers_reads.load(SeqCst) {
            return Ok(vec![true; handles.len()]);
        }
        let handles = handles.to_vec();
        self.call(move |server| handles.iter().map(|handle| server.exists(handle)).collect()).await
    }

    async fn watch(&self, handle: &str) -> Result<bool, Failed> {
        let (handle, this) = (handle.to_owned(), Weak::clone(&self.this));
        self.call(move |server| {
            let exists = server.exists(&handle);
            if exists {
                server.watches.push((handle, this));
            }
            exists
        })
        .await
    }

    async fn detail(&self, handle: &str) -> Result<Option<(u64, u64)>, Failed> {
        let (handle, sequence) = (handle.to_owned(), handle.rsplit_once('/').expect("a handle").1.parse());
        self.call(move |server| server.exists(&handle).then(|| (sequence.expect("a number"), 0))).await
    }

    async fn page(&self, after: &str) -> Result<Page, Failed> {
        let after = after.to_owned();
        self.call(move |server| {
            let next = (after.len() < 2).then(|| format!("{after}+"));
            server.pages.push(after);
            Page { lines: Vec::new(), next }
        })
        .await
    }

    fn close(&self) {
        self.server.lock().sessions.remove(&self.session.load(SeqCst));
    }
}

/// The sections of one key.
#[derive(Default)]
struct Sections {
    inside: Option<String>,
    blocked_until: Option<Instant>,
    last_fence: u64,
    count: u32,
}

/// A task of a process locks keys, again and again.
async fn sections(
    process: Arc<Process>,
    locks: LockManager,
    name: String,
    all: Arc<Mutex<BTreeMap<String, Sections>>>,
    seed: u64,
) {
    let mut rng = Rng::with_seed(seed);
    let waiting = locks.with_policy(LockPolicy::default().min_hold(MIN_HOLD));
    let mut rounds = 0;
    while rounds < ROUNDS {
        let key = format!("key{}", rng.u8(..2));
        let has_min_hold = rng.u8(..100) < 10;
        let chosen = if has_min_hold { &waiting } else { &locks };
        let guard = if rng.bool() {
            chosen.lock((key.as_str(),)).wait(ms(rng.u64(50..40_000))).await
        } else {
            chosen.try_lock((key.as_str(),)).await
        };
        let guard = match guard {
            Ok(guard) => guard,
            Err(LockError::Store(_) | LockError::TimedOut { .. } | LockError::Busy { .. }) => {
                sleep(ms(rng.u64(..1_000))).await;
                continue;
            }
            Err(error) => panic!("{error:?}"),
        };
        rounds += 1;
        let fence = guard.fencing_token().as_u64();
        {
            let mut all = all.lock();
            let sections = all.entry(key.clone()).or_default();
            assert_eq!(sections.inside, None, "{key} of {name}");
            assert!(sections.last_fence < fence, "{key} of {name}: {fence} after {}", sections.last_fence);
            let now = Instant::now();
            let left = sections.blocked_until.map(|until| until.saturating_duration_since(now)).unwrap_or_default();
            assert!(left.is_zero(), "{key} of {name} is blocked for {left:?}");
            (sections.inside, sections.last_fence) = (Some(name.clone()), fence);
            sections.blocked_until = None;
            sections.count += 1;
        }
        let hold = ms(if rng.u8(..10) == 0 { rng.u64(..40_000) } else { rng.u64(..300) });
        if rng.u8(..100) < 8 {
            process.answers_reads.store(rng.bool(), SeqCst);
            *process.cut_until.lock() = Some(Instant::now() + ms(rng.u64(..30_000)));
        }
        let entered = Instant::now();
        let is_lost = timeout(hold, guard.held_lock().lost()).await.is_ok();
        // A guard that is only dropped blocks its key for the lock-delay.
        let is_released = rng.bool();
        {
            let mut all = all.lock();
            let sections = all.get_mut(&key).expect("entered");
            sections.inside = None;
            sections.blocked_until = (has_min_hold && is_released && !is_lost).then(|| entered + MIN_HOLD);
        }
        if is_released {
            drop(guard.release().await);
        }
    }
}

fn check(seed: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let (server, all) = (Arc::<Mutex<Server>>::default(), Arc::default());
        let (mut processes, mut managers, mut tasks) = (Vec::new(), Vec::new(), Vec::new());
        for n in 0..3 {
            let seed = seed * 10 + n;
            let process = Process::new(&server, seed);
            let locks = LockManager::builder(LineStore::new(Arc::clone(&process), CALL)).instance(format!("p{n}"));
            let locks = locks.lease(LEASE).seed(seed).build();
            for task in 0..2 {
                let (process, name) = (Arc::clone(&process), format!("p{n}.{task}"));
                let sections = sections(process, locks.clone(), name, Arc::clone(&all), seed * 2 + task);
                tasks.push(tokio::spawn(sections));
            }
            processes.push(process);
            managers.push(locks);
        }
        for task in tasks {
            timeout(Duration::from_secs(3_600), task).await.expect("progress").expect("no overlap");
        }
        for process in &processes {
            process.has_faults.store(false, SeqCst);
            process.cut_until.lock().take();
            process.execute_late();
        }
        // Their sessions live, and what they have begun has ended.
        sleep(2 * LEASE).await;
        let mut server = server.lock();
        server.expire();
        assert!(server.lines.values().all(Vec::is_empty), "{:?}", server.lines);
        let counts: u32 = all.lock().values().map(|sections: &Sections| sections.count).sum();
        assert_eq!(counts, 6 * ROUNDS);
    });
}

async fn acquire(
    store: &LineStore<Arc<Process>>,
    id: &str,
    lease: Duration,
    if_busy: IfBusy,
) -> Result<AcquireReply, StoreError> {
    let (key, id) = (LockKey::from(("key",)), AcquisitionId::from_text(id));
    let queue = QueueConfig::new(ms(200), 2 * SESSION, 9);
    let request = AcquireRequest::new(key, id, lease, if_busy, queue, LEASE);
    store.acquire(request.into()).into_single().await
}

fn store(server: &Arc<Mutex<Server>>) -> (Arc<Process>, LineStore<Arc<Process>>) {
    let process = Process::new(server, 0);
    process.has_faults.store(false, SeqCst);
    (Arc::clone(&process), LineStore::new(process, CALL))
}

/// An offer ends while a call is under way that has read the line before.
///
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn acquisition_that_ends_during_its_call_is_not_granted() {
    let server = Arc::default();
    let ((_, holder), (process, waiter)) = (store(&server), store(&server));
    acquire(&holder, "a:1:1", LEASE, IfBusy::Fail).await.expect("free");
    assert!(matches!(acquire(&waiter, "b:1:1", LEASE, IfBusy::Enqueue).await, Ok(AcquireReply::Queued { .. })));
    let id = AcquisitionId::from_text("a:1:1");
    let request = ReleaseRequest::new(("key",).into(), id, Duration::ZERO, QueueConfig::new(LEASE, LEASE, 9));
    holder.release(request.into()).into_single().await.expect("held");
    // The event is there, and the offer lasts for some more milliseconds.
    sleep(ms(60)).await;
    process.delay_ms.store(400, SeqCst);
    let reply = acquire(&waiter, "b:1:1", LEASE, IfBusy::Enqueue).await;
    assert!(reply.is_err(), "{reply:?}");
    process.delay_ms.store(0, SeqCst);
    assert!(matches!(acquire(&waiter, "b:1:1", LEASE, IfBusy::Enqueue).await, Ok(AcquireReply::Granted { .. })));
}

/// A process that was cut off begins another session, while the servers still have the one before.
///
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn entry_of_an_earlier_session_is_not_granted() {
    let server = Arc::default();
    let ((_, holder), (process, waiter), (_, other)) = (store(&server), store(&server), store(&server));
    acquire(&holder, "a:1:1", LEASE, IfBusy::Fail).await.expect("free");
    acquire(&waiter, "b:1:1", LEASE, IfBusy::Enqueue).await.expect("a queue");
    *process.cut_until.lock() = Some(Instant::now() + SESSION + ms(1_000));
    sleep(SESSION).await;
    // A new leader has begun with full sessions, a while ago.
    server.lock().sessions.values_mut().for_each(|end| *end = Instant::now() + ms(4_000));
    sleep(ms(2_000)).await;
    waiter.health().await.expect("up");
    let granted = acquire(&waiter, "b:1:1", LEASE, IfBusy::Enqueue).await;
    assert!(matches!(granted, Ok(AcquireReply::Granted { .. })), "{granted:?}");
    sleep(ms(3_000)).await;
    let busy = acquire(&other, "c:1:1", LEASE, IfBusy::Fail).await;
    assert!(matches!(busy, Ok(AcquireReply::Busy { .. })), "{busy:?}");
}

/// A key that was busy a moment ago is read first: a refused entry costs two writes.
#[tokio::test(start_paused = true)]
async fn refused_call_appends_no_entry_while_the_key_is_busy() {
    let server = Arc::default();
    let ((_, holder), (_, other)) = (store(&server), store(&server));
    acquire(&holder, "a:1:1", LEASE, IfBusy::Fail).await.expect("free");
    let mut appended = Vec::new();
    for n in 0..4 {
        let busy = acquire(&other, &format!("b:1:{n}"), LEASE, IfBusy::Fail).await;
        assert!(matches!(busy, Ok(AcquireReply::Busy { .. })), "{busy:?}");
        appended.push(server.lock().sequence);
        sleep(if n == 2 { ms(1_000) } else { ms(1) }).await;
    }
    let entries: Vec<_> = appended.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(entries, [0, 0, 1]);
}

/// Reading a page ends the blocks that have expired, also those of processes that have ended.
#[tokio::test(start_paused = true)]
async fn process_visits_all_pages_in_turns() {
    let server = Arc::default();
    let (_process, store) = store(&server);
    store.health().await.expect("up");
    sleep(Duration::from_secs(45)).await;
    assert_eq!(server.lock().pages, ["", "+", "++", "", "+"]);
}

/// The server is slow, and the caller has given up.
#[tokio::test(start_paused = true)]
async fn late_grant_is_removed_again() {
    let server = Arc::default();
    let (process, store) = store(&server);
    store.health().await.expect("up");
    process.delay_ms.store(7_000, SeqCst);
    let error = acquire(&store, "a:1:1", LEASE, IfBusy::Fail).await.expect_err("late");
    assert_eq!(error.kind(), StoreErrorKind::Timeout);
    assert!(server.lock().lines.values().all(Vec::is_empty));
}

/// The caller has dropped its call, and releases.
#[tokio::test(start_paused = true)]
async fn release_of_an_unknown_grant_frees_the_key() {
    let server = Arc::default();
    let (process, store) = store(&server);
    store.health().await.expect("up");
    process.delay_ms.store(500, SeqCst);
    assert!(timeout(ms(200), acquire(&store, "a:1:1", LEASE, IfBusy::Fail)).await.is_err(), "dropped");
    assert!(!server.lock().lines["key"].is_empty(), "executed");
    let id = AcquisitionId::from_text("a:1:1");
    let request = ReleaseRequest::new(("key",).into(), id, Duration::ZERO, QueueConfig::new(LEASE, LEASE, 9));
    assert!(matches!(store.release(request.into()).into_single().await, Ok(ReleaseReply::NotHolder)));
    assert!(server.lock().lines["key"].is_empty());
}

/// The proof of life may be two seconds old, and the servers may have counted from two seconds
/// before it.
///
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn lease_is_at_most_the_session_less_four_seconds() {
    let (_process, store) = store(&Arc::default());
    let error = acquire(&store, "a:1:1", SESSION - ms(3_999), IfBusy::Fail).await.expect_err("too long");
    assert_eq!(error.kind(), StoreErrorKind::Refused);
    let granted = acquire(&store, "a:1:1", SESSION - ms(4_000), IfBusy::Fail).await;
    assert!(matches!(granted, Ok(AcquireReply::Granted { .. })), "{granted:?}");
}

/// Guarantee: G1.
#[test]
fn sections_do_not_overlap_beside_faults() {
    let number = |name| std::env::var(name).ok().and_then(|number| number.parse::<u64>().ok());
    let seeds = 0..number("SCALE").unwrap_or(1) * 50;
    for seed in number("SEED").map_or(seeds, |seed| seed..seed + 1) {
        let checked = std::panic::catch_unwind(|| check(seed));
        assert!(checked.is_ok(), "SEED={seed}");
    }
}
