//! One seed: processes, connections, a server, faults and load, with checks after every step.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque},
    fmt::Write,
    sync::Arc,
    time::Duration,
};

use tower_lock::{
    __internals::{
        proto::{
            BootInstant, GuardEnd, HoldLimits, LEASE, LOCAL_HANDOFF_TIME, LOCK_DELAY, LockRequest, QUEUE,
            QUEUE_POLL_INTERVAL, STORE_CALL_TIMEOUT, Sharing,
        },
        redis_wire::{Keyspace, ScriptCall},
    },
    AcquisitionId, Lease, LockError, LockKey,
    deadpool_redis::redis::Value,
    store::{Demand, ForceReleaseRequest, Record, StoreErrorKind},
};

use self::{
    batches::Batches,
    newest::Newest,
    records::Duplicates,
    several::Callers,
    shares::{Shares, is_block},
    tickets::{Plan, Tickets, is_ticket},
};
use crate::{
    checker::{Checker, LocalClock},
    fake::FakeRedis,
    mutants::{Mutant, Mutation},
    process::{ClientId, ConnectionKind, Effect, Section, Settings, SimProcess, Timer},
    record_checker::RecordChecker,
};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

/// Faults that only some simulations have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Force releases by an operator.
    pub force: bool,
    /// `FLUSHALL`.
    pub flush: bool,
    /// A lost fence counter.
    pub ctr: bool,
    /// The server clock is set back.
    pub back: bool,
    /// The server clock is set, forward or back.
    pub step: bool,
    /// Foreign clients lock the same keys as Redisson does, wait for them, and send and receive its
    /// messages. The keys are raw.
    pub java: bool,
    /// Requests are sent again after their reply.
    pub copies: bool,
    /// All clocks have the same rate.
    pub one_rate: bool,
    /// Some clients take the record of their key in place of a section.
    pub records: bool,
    /// Requests share calls: many keys at once, and one of another type.
    pub batches: bool,
    /// Some keys are granted and freed without a call.
    pub free: bool,
    /// Some callers need several keys.
    pub several: bool,
    /// Some clients hold their key with others.
    pub shares: bool,
    /// Some clients do the steps of longer work, whose key is left to a ticket in between.
    pub tickets: bool,
    /// Some clients replace older ones of their kind.
    pub supersede: bool,
}

impl Options {
    /// Sets an option by name. `None`: no such option.
    pub fn set(&mut self, name: &str) -> Option<()> {
        let option = match name {
            "force" => &mut self.force,
            "flush" => &mut self.flush,
            "ctr" => &mut self.ctr,
            "back" => &mut self.back,
            "step" => &mut self.step,
            "java" => &mut self.java,
            "copies" => &mut self.copies,
            "one-rate" => &mut self.one_rate,
            "records" => &mut self.records,
            "batches" => &mut self.batches,
            "free" => &mut self.free,
            "several" => &mut self.several,
            "shares" => &mut self.shares,
            "tickets" => &mut self.tickets,
            "supersede" => &mut self.supersede,
            _ => return None,
        };
        *option = true;
        Some(())
    }
}

/// The result of a simulation.
#[derive(Debug)]
pub struct Report {
    /// The first violation.
    pub violation: Option<String>,
    /// The number of sections that started.
    pub sections: u64,
    /// The number of scripts that ran.
    pub scripts: u64,
    /// The number of acquires and releases that ran in a script with others.
    pub shared: u64,
    /// The number of acquisitions that took the place of a ticket.
    pub redeemed: u64,
    /// The number of clients that a newer one has replaced.
    pub replaced: u64,
    /// The longest idle time of a key with waiters, as a part of the guaranteed maximum.
    pub idle: f64,
    /// All events, if requested.
    pub trace: String,
}

fn raw_key(number: u64) -> LockKey {
    LockKey::raw(format!("key-{number}")).expect("a name")
}

/// The arguments of a script after the names of a raw key.
fn args(script: &ScriptCall) -> Vec<String> {
    script.args().split_off(if script.is_raw() { 3 } else { 0 })
}

/// Runs one simulation.
pub fn run(seed: u64, mutant: Option<&Mutant>, options: Options, trace: bool) -> Report {
    let mut simulation = Simulation::new(seed, mutant, options, trace);
    simulation.live();
    Report {
        violation: simulation.violation,
        sections: simulation.checker.sections,
        scripts: simulation.scripts,
        shared: simulation.shared,
        redeemed: simulation.tickets.map_or(0, |tickets| tickets.redeemed),
        replaced: simulation.newest.map_or(0, |newest| newest.replaced),
        idle: simulation.idle,
        trace: simulation.trace.unwrap_or_default(),
    }
}

// In the order of a simulation.
mod clients;
mod several;
mod network;
mod batches;
mod free_keys;
mod shares;
mod tickets;
mod newest;
pub(crate) mod records;
mod server;
mod faults;
mod liveness;

type Job = Box<dyn FnOnce(&mut Simulation)>;

struct Due {
    at: u64,
    number: u64,
    job: Job,
}

/// The source of an event. Events of one source keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Connection(usize),
    Inbox(u64),
    Request(ClientId),
    /// An independent event.
    Alone(u64),
}

struct Process {
    number: u64,
    label: String,
    clock: LocalClock,
    process: SimProcess,
    alive: bool,
    frozen: bool,
    /// Events that arrived while it was frozen.
    delayed: BTreeMap<Source, VecDeque<Job>>,
    thawed: u64,
    /// Indexes into `connections` of the simulation.
    connections: [Option<usize>; 2],
    inbox: Subscription,
    /// Until then nothing arrives in either direction; it arrives later.
    cut_off_until: u64,
    cut_off_since: u64,
    /// The time of the last reply.
    last_reply: u64,
}

/// The connection for messages.
#[derive(Default)]
struct Subscription {
    /// Increased with each new connection; messages of older ones are ignored.
    epoch: u64,
    /// The epoch that the server knows.
    at_server: Option<u64>,
    last: u64,
}

struct Connection {
    process: (usize, u64),
    up: bool,
    last_out: u64,
    last_in: u64,
    /// Scripts without a delivered reply; `None` once the script ran.
    in_flight: BTreeMap<u64, Option<ScriptCall>>,
}

#[derive(Clone)]
struct Client {
    key: usize,
    process: usize,
    number: u64,
    waits: bool,
    patience: Option<u64>,
    /// By the clock of its process.
    wait_ends: Option<BootInstant>,
    work: u64,
    ending: GuardEnd,
    limits: HoldLimits,
    sharing: Sharing,
    ticket: u64,
    since: u64,
    state: State,
    began: u64,
    /// The time of the grant: the minimum hold counts from then.
    granted_at: u64,
    /// The last known deadline.
    valid_until: u64,
    /// How long the record of a duplicate is kept. `None`: the client ignores records.
    keep_for: Option<Duration>,
    has_result: bool,
    /// The caller that needs this key and others.
    caller: Option<usize>,
    /// The step of longer work.
    plan: Option<Plan>,
}

#[derive(Clone)]
enum State {
    /// Not arrived yet.
    Away,
    Waits,
    /// Granted, and not started.
    Granted(Arc<Section>),
    Holding(Arc<Section>),
    Done,
}

/// The data of a key before a script.
#[derive(Clone, Debug, Default)]
struct KeyData {
    holders: Vec<(String, String)>,
    queue: Vec<String>,
}

struct Simulation {
    rng: fastrand::Rng,
    now: u64,
    due: BinaryHeap<Due>,
    next: u64,
    fake: FakeRedis,
    /// How far the server clock is ahead of the true time, in microseconds.
    server_ahead: i64,
    processes: Vec<Process>,
    connections: Vec<Connection>,
    clients: Vec<Client>,
    keys: Vec<LockKey>,
    locks: Vec<String>,
    names: Keyspace,
    checker: Checker,
    records: RecordChecker,
    duplicates: Option<Duplicates>,
    batches: Option<Batches>,
    callers: Option<Callers>,
    shares: Option<Shares>,
    tickets: Option<Tickets>,
    newest: Option<Newest>,
    /// Decides which events find the server in their process. Random numbers of its own.
    free_keys: Option<fastrand::Rng>,
    /// The record that stood when the store sent the reply that is handled now.
    replied_record: Option<Record>,
    settings: Settings,
    options: Options,
    conditions: Conditions,
    quiet_since: Option<u64>,
    paused_until: u64,
    paused_since: u64,
    forgotten: HashMap<String, u64>,
    released: HashSet<String>,
    top_fence: Vec<u64>,
    enqueued: HashMap<String, (u64, u64)>,
    idle_since: Vec<Option<u64>>,
    first_section: HashMap<AcquisitionId, u64>,
    crashed: Vec<String>,
    /// Revoked acquisitions by the operator, with their fences.
    revoked: HashMap<String, u64>,
    /// The processes that got the message of it.
    notified: HashSet<(String, u64)>,
    foreign: HashSet<String>,
    foreign_until: Vec<u64>,
    /// The foreign clients that wait for each key.
    foreign_waiters: Vec<i64>,
    violation: Option<String>,
    scripts: u64,
    shared: u64,
    steps: u64,
    /// The total time of the long sections.
    long_work: u64,
    idle: f64,
    trace: Option<String>,
}

/// The severity of the faults.
struct Conditions {
    delay: u64,
    spikes: f64,
    slow: u64,
    loss: f64,
    duplicates: f64,
    late: u64,
    load_until: u64,
    impatient: f64,
    longest_delay: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    BreakAcquires,
    BreakReleases,
    BreakInbox,
    Freeze,
    Crash,
    Slow,
    Cancel,
    Drop,
    Pause,
    CutOff,
    Force,
    Flush,
    Step,
    Java,
    Counter,
}

impl Simulation {
    fn new(seed: u64, mutant: Option<&Mutant>, options: Options, trace: bool) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut pick = |from: &[u64]| from[rng.usize(0..from.len())];
        let conditions = Conditions {
            delay: pick(&[300, 3_000, 30_000, 120_000]) * 1_000,
            spikes: pick(&[0, 2, 10]) as f64 / 100.0,
            slow: 1,
            loss: pick(&[0, 0, 5, 30]) as f64 / 100.0,
            duplicates: pick(&[0, 0, 5, 30]) as f64 / 100.0,
            late: pick(&[50, 300, 1_500]) * MS,
            load_until: pick(&[15, 30, 60, 90]) * SECOND,
            impatient: pick(&[0, 0, 20, 90]) as f64 / 100.0,
            longest_delay: LOCK_DELAY,
        };
        let (keys, processes) = (pick(&[1, 1, 2]), pick(&[2, 2, 3, 4]));
        let (bare, mutation) = (pick(&[0, 1, 1]) == 1, mutant.and_then(Mutant::mutation));
        let settings = Settings { bare, mutation, batches: options.batches };
        let mut duplicates = options.records.then(|| Duplicates::new(seed));
        let keys = duplicates.as_mut().map_or(keys, Duplicates::keys);
        let batches = options.batches.then(|| Batches::new(seed));
        let keys = batches.as_ref().map_or(keys, Batches::keys);
        let callers = options.several.then(|| Callers::new(seed));
        let keys = callers.as_ref().map_or(keys, |callers| keys.max(callers.keys()));
        let keys = if options.shares { Shares::KEYS } else { keys };
        let keys: Vec<_> =
            (0..keys).map(|n| if options.java { raw_key(n) } else { LockKey::from(("key", n)) }).collect();
        let names = Keyspace::new("lock").expect("a prefix");
        let mut simulation = Self {
            now: 0,
            due: BinaryHeap::new(),
            next: 0,
            fake: FakeRedis::new(mutant.map_or(&[], |mutant| mutant.patches())),
            server_ahead: 1_700_000_000_000_000,
            processes: Vec::new(),
            connections: Vec::new(),
            clients: Vec::new(),
            locks: keys.iter().map(|key| names.lock(key).expect("a valid name").to_string()).collect(),
            top_fence: vec![0; keys.len()],
            idle_since: vec![Some(0); keys.len()],
            foreign_until: vec![0; keys.len()],
            foreign_waiters: vec![0; keys.len()],
            records: RecordChecker::new(keys.len()),
            duplicates,
            batches,
            callers,
            shares: options.shares.then(|| Shares::new(seed)),
            tickets: options.tickets.then(|| Tickets::new(seed)),
            newest: options.supersede.then(|| Newest::new(seed)),
            free_keys: options.free.then(|| fastrand::Rng::with_seed(seed ^ 0x6672_6565)),
            replied_record: None,
            keys,
            names,
            checker: Checker::new(options.flush || options.step),
            settings,
            options,
            conditions,
            quiet_since: None,
            paused_until: 0,
            paused_since: 0,
            forgotten: HashMap::new(),
            released: HashSet::new(),
            enqueued: HashMap::new(),
            first_section: HashMap::new(),
            crashed: Vec::new(),
            revoked: HashMap::new(),
            notified: HashSet::new(),
            foreign: HashSet::new(),
            violation: None,
            scripts: 0,
            shared: 0,
            steps: 0,
            long_work: 0,
            idle: 0.0,
            trace: trace.then(String::new),
            rng,
        };
        for n in 0..processes {
            // Mostly as far apart as allowed.
            let rate = match simulation.rng.u8(0..4) {
                _ if options.one_rate => 1.0,
                0 => 1.0 + 0.0099 * (2.0 * simulation.rng.f64() - 1.0),
                1 => 1.0099,
                _ => 0.9901,
            };
            let process = simulation.process(format!("p{n}"), rate);
            simulation.processes.push(process);
            simulation.subscribe(simulation.processes.len() - 1);
        }
        if options.java {
            (0..simulation.keys.len()).for_each(|key| simulation.java_listens(key));
        }
        simulation.put_other_type();
        simulation.load();
        simulation.load_callers();
        simulation.faults();
        simulation
    }

    fn process(&mut self, label: String, rate: f64) -> Process {
        let number = self.number();
        Process {
            number,
            clock: self.clock(rate),
            process: SimProcess::new(&label, number, self.settings),
            label,
            alive: true,
            frozen: false,
            delayed: BTreeMap::new(),
            thawed: 0,
            connections: [None; 2],
            inbox: Subscription::default(),
            cut_off_until: 0,
            cut_off_since: 0,
            last_reply: self.now,
        }
    }

    fn clock(&mut self, rate: f64) -> LocalClock {
        LocalClock::new((1 << 40) + self.rng.u64(0..1 << 40), rate)
    }

    fn live(&mut self) {
        let limit = self.conditions.load_until + 600 * SECOND;
        let is_busy = |w: &Self| {
            let is_busy = |client: &Client| matches!(client.state, State::Away) || w.is_here(client);
            w.clients.iter().any(is_busy) || w.callers.as_ref().is_some_and(Callers::is_any_away)
        };
        while self.violation.is_none() && (self.quiet_since.is_none() || is_busy(self)) {
            if self.now > limit || self.steps > 3_000_000 {
                return self.report_violation("a call never gets a reply");
            }
            self.step();
        }
        // All calls have replies: after everything in flight has arrived, no data is left.
        let cut_off = self.processes.iter().map(|process| process.cut_off_until).max().unwrap_or(0);
        let end = self.now.max(self.paused_until).max(cut_off)
            + 8 * SECOND
            + self.conditions.late
            + self.tickets.as_ref().map_or(0, |_| Tickets::LONGEST_GAP)
            + 20 * self.conditions.delay;
        while self.violation.is_none() && self.due.peek().is_some_and(|due| due.at < end) {
            self.step();
        }
        if self.violation.is_none() {
            self.now = self.now.max(end);
            self.check_leftovers();
        }
    }

    fn step(&mut self) {
        self.steps += 1;
        let Some(due) = self.due.pop() else {
            return self.report_violation("no more events, but a waiter remains");
        };
        self.now = self.now.max(due.at);
        (due.job)(self);
        if self.quiet_since.is_some() {
            self.check_idle_keys();
        }
        self.check_unanswered_waiters();
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn at(&mut self, at: u64, job: impl FnOnce(&mut Self) + 'static) {
        let number = self.number();
        self.due.push(Due { at: at.max(self.now), number, job: Box::new(job) });
    }

    fn after(&mut self, by: u64, job: impl FnOnce(&mut Self) + 'static) {
        self.at(self.now + by, job);
    }

    fn random(&mut self, below: u64) -> u64 {
        self.rng.u64(0..below.max(1))
    }

    fn chance(&mut self, p: f64) -> bool {
        self.rng.f64() < p
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "seconds")]
    fn exponential(&mut self, mean: u64) -> u64 {
        (-(1.0 - self.rng.f64()).ln() * mean as f64) as u64
    }

    fn delay(&mut self) -> u64 {
        let mut delay = self.conditions.delay * (20 + self.random(100)) / 100 * self.conditions.slow;
        if self.quiet_since.is_none() && self.chance(self.conditions.spikes) {
            delay += self.exponential(400 * MS);
        }
        delay
    }

    fn report_violation(&mut self, text: impl Into<String>) {
        let text = text.into();
        self.log(|_| format!("VIOLATION {text}"));
        self.violation.get_or_insert(text);
    }

    fn log(&mut self, text: impl FnOnce(&Self) -> String) {
        if let Some(mut trace) = self.trace.take() {
            let text = text(self);
            #[expect(clippy::cast_precision_loss, reason = "for display")]
            let _ = writeln!(trace, "{:12.3} {text}", self.now as f64 / MS as f64);
            self.trace = Some(trace);
        }
    }

    // --- processes ---

    fn local(&self, process: usize) -> BootInstant {
        self.processes[process].clock.at(self.now)
    }

    /// Delivers an event to a process, if it is still the same; a frozen process gets it later.
    fn deliver_to(&mut self, process: usize, number: u64, source: Source, job: impl FnOnce(&mut Self) + 'static) {
        let target = &mut self.processes[process];
        if !target.alive || target.number != number {
            return;
        }
        if target.frozen {
            target.delayed.entry(source).or_default().push_back(Box::new(job));
        } else {
            job(self);
            self.apply_effects(process);
        }
    }

    /// Applies the requested effects, and aborts sections that have lost their lock.
    fn apply_effects(&mut self, process: usize) {
        while let Some(effect) = self.processes[process].process.next_effect() {
            let number = self.processes[process].number;
            match effect {
                Effect::Run(kind, message, script) => self.send(process, kind, message, script),
                Effect::Replace(kind) => {
                    self.log(|w| format!("{} replaces {}", w.processes[process].label, kind.trace_name()));
                    self.processes[process].connections[kind as usize] = None;
                }
                Effect::Wake(at, timer) => {
                    let late = self.random(MS);
                    let at = self.processes[process].clock.when(at) + late;
                    let source = Source::Alone(self.number());
                    self.at(at, move |w| w.deliver_to(process, number, source, move |w| w.wake(process, &timer)));
                }
                Effect::Granted(index, section) => self.on_granted(index, section),
                Effect::Superseded(section) => self.on_superseded(process, &section),
                Effect::Rejected(index, error) => self.on_rejected(index, &error),
                Effect::Recorded(index, record) => self.on_recorded(index, &record),
                Effect::TicketRefused(index) => self.on_ticket_refused(index),
                Effect::Forgotten(key, id) => self.check_forgotten(process, &key, &id),
                Effect::BusyLoop => {
                    let label = &self.processes[process].label;
                    self.report_violation(format!("the watchdog of {label} wakes itself again and again"));
                }
            }
        }
        self.check_losses(process);
        self.replied_record = None;
        let now = self.local(process);
        for index in 0..self.clients.len() {
            if self.clients[index].process == process {
                self.check_deadline(index);
            }
            let client = &mut self.clients[index];
            if client.process != process {
                continue;
            }
            let State::Holding(section) = &client.state else { continue };
            if section.end_reason().is_some() {
                self.abort_section(index);
            } else {
                let left = section.remaining(now);
                if !left.is_zero() {
                    client.valid_until = self.processes[process].clock.when(now.saturating_add(left));
                }
            }
        }
    }

    fn wake(&mut self, process: usize, timer: &Timer) {
        let now = self.local(process);
        self.processes[process].process.on_timer(now, timer);
    }
}

fn id(index: usize) -> ClientId {
    ClientId::try_from(index).expect("a few hundred clients")
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("short")
}

fn show(value: &Value) -> String {
    match value {
        Value::Nil => "nil".to_owned(),
        Value::Int(number) => number.to_string(),
        Value::BulkString(text) => String::from_utf8_lossy(text).into_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::Array(items) => format!("[{}]", items.iter().map(show).collect::<Vec<_>>().join(", ")),
        other => format!("{other:?}"),
    }
}

// Reversed: a heap returns its greatest element.
impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}
