//! One seed, one world: processes, connections, a server, faults, load; and what is looked at after every step.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque},
    fmt::Write,
    sync::Arc,
    time::Duration,
};

use tower_lock::{
    LockError, LockKey, OwnerId, StoreErrorKind,
    deadpool_redis::redis::Value,
    store::ForceAsk,
    test_util::{
        decisions::{CHECK_IN, Ending, HAND_OVER_TIME, LEASE, LINE, LOCK_DELAY, Moment, STORE_CALL, Section, Terms},
        redis_protocol::{Names, ScriptCall},
    },
};

use crate::{
    fake::Fake,
    mutants::{Mutant, Wrong},
    referee::{LocalClock, Referee},
    shell::{Effect, Lane, Settings, Shell, Timer, Who},
};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

/// What is done to a world beyond what is done to all.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Keys are taken away by an operator.
    pub force: bool,
    /// Redis forgets everything.
    pub flush: bool,
    /// The counter of the fences is lost.
    pub ctr: bool,
    /// The server's clock is set back.
    pub back: bool,
    /// The server's clock is set, forward too.
    pub step: bool,
    /// Others lock the same keys, as Redisson does.
    pub java: bool,
    /// All clocks run at one rate.
    pub one_rate: bool,
}

impl Options {
    /// This one, by its name. `None`: there is none.
    pub fn set(&mut self, name: &str) -> Option<()> {
        let option = match name {
            "force" => &mut self.force,
            "flush" => &mut self.flush,
            "ctr" => &mut self.ctr,
            "back" => &mut self.back,
            "step" => &mut self.step,
            "java" => &mut self.java,
            "one-rate" => &mut self.one_rate,
            _ => return None,
        };
        *option = true;
        Some(())
    }
}

/// What came of a world.
#[derive(Debug)]
pub struct Report {
    /// What was wrong, first of all.
    pub violation: Option<String>,
    /// Sections that began.
    pub sections: u64,
    /// Scripts that ran.
    pub scripts: u64,
    /// The longest time for which nobody was in though somebody waited, in parts of what is promised.
    pub idle: f64,
    /// Everything that happened, if it was asked for.
    pub trace: String,
}

/// Runs one world.
pub fn run(seed: u64, mutant: Option<&Mutant>, options: Options, trace: bool) -> Report {
    let mut world = World::new(seed, mutant, options, trace);
    world.live();
    Report {
        violation: world.violation,
        sections: world.referee.sections,
        scripts: world.scripts,
        idle: world.idle,
        trace: world.trace.unwrap_or_default(),
    }
}

type Job = Box<dyn FnOnce(&mut World)>;

struct Due {
    at: u64,
    number: u64,
    job: Job,
}

/// Where something comes from: what comes from one place comes in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Connection(usize),
    Inbox(u64),
    Request(Who),
    /// Of its own.
    Alone(u64),
}

struct Process {
    number: u64,
    label: String,
    clock: LocalClock,
    shell: Shell,
    alive: bool,
    frozen: bool,
    /// What has come while it was frozen.
    held_up: BTreeMap<Source, VecDeque<Job>>,
    thawed: u64,
    /// Into `connections`.
    lanes: [Option<usize>; 2],
    inbox: Inbox,
    /// Until then nothing reaches it, and nothing of it the server: it comes later.
    cut_off_until: u64,
    /// When it last heard an answer.
    heard: u64,
}

/// The connection for messages.
#[derive(Default)]
struct Inbox {
    /// Which one it is. What an older one brings is nothing any more.
    epoch: u64,
    /// Which one the server knows of.
    at_server: Option<u64>,
    last: u64,
}

struct Connection {
    process: (usize, u64),
    up: bool,
    last_out: u64,
    last_in: u64,
    /// What was sent and is not answered; without the script, once it ran.
    under_way: BTreeMap<u64, Option<ScriptCall>>,
}

struct Client {
    key: usize,
    process: usize,
    number: u64,
    waits: bool,
    patience: Option<u64>,
    work: u64,
    ending: Ending,
    terms: Terms,
    place: u64,
    since: u64,
    state: State,
    began: u64,
    /// Until when it may be in, as far as it knew last.
    valid_until: u64,
}

#[derive(Clone)]
enum State {
    /// It has not come yet.
    Away,
    Waits,
    /// It was told that it is its turn, and has not begun.
    Told(Arc<Section>),
    In(Arc<Section>),
    Over,
}

/// What the server knew of a key before a script.
#[derive(Clone, Debug, Default)]
struct Record {
    holders: Vec<(String, String)>,
    line: Vec<String>,
}

struct World {
    rng: fastrand::Rng,
    now: u64,
    due: BinaryHeap<Due>,
    next: u64,
    fake: Fake,
    /// What the server's clock is ahead of the true one, in microseconds.
    server_ahead: i64,
    processes: Vec<Process>,
    connections: Vec<Connection>,
    clients: Vec<Client>,
    keys: Vec<LockKey>,
    locks: Vec<String>,
    names: Names,
    referee: Referee,
    settings: Settings,
    options: Options,
    weather: Weather,
    calm: Option<u64>,
    paused_until: u64,
    paused_since: u64,
    forgotten: HashMap<String, u64>,
    given_back: HashSet<String>,
    top_fence: Vec<u64>,
    lined_up: HashMap<String, (u64, u64)>,
    idle_since: Vec<Option<u64>>,
    first_in_turn: HashMap<OwnerId, u64>,
    crashed: Vec<String>,
    foreign: HashSet<String>,
    foreign_until: Vec<u64>,
    violation: Option<String>,
    scripts: u64,
    steps: u64,
    /// How long all the long sections take.
    long_work: u64,
    idle: f64,
    trace: Option<String>,
}

/// How bad it is.
struct Weather {
    delay: u64,
    spikes: f64,
    slow: u64,
    lossy: f64,
    doubled: f64,
    late: u64,
    storm: u64,
    impatient: f64,
    longest_delay: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    BreakAsks,
    BreakEnds,
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

impl World {
    fn new(seed: u64, mutant: Option<&Mutant>, options: Options, trace: bool) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut pick = |from: &[u64]| from[rng.usize(0..from.len())];
        let weather = Weather {
            delay: pick(&[300, 3_000, 30_000, 120_000]) * 1_000,
            spikes: pick(&[0, 2, 10]) as f64 / 100.0,
            slow: 1,
            lossy: pick(&[0, 0, 5, 30]) as f64 / 100.0,
            doubled: pick(&[0, 0, 5, 30]) as f64 / 100.0,
            late: pick(&[50, 300, 1_500]) * MS,
            storm: pick(&[15, 30, 60, 90]) * SECOND,
            impatient: pick(&[0, 0, 20, 90]) as f64 / 100.0,
            longest_delay: LOCK_DELAY,
        };
        let (keys, processes) = (pick(&[1, 1, 2]), pick(&[2, 2, 3, 4]));
        let settings = Settings { bare: pick(&[0, 1, 1, 1]) == 1, wrong: mutant.and_then(Mutant::wrong) };
        let keys: Vec<_> = (0..keys).map(|n| LockKey::from(("key", n))).collect();
        let names = Names::new("lock").expect("a prefix");
        let mut world = Self {
            now: 0,
            due: BinaryHeap::new(),
            next: 0,
            fake: Fake::new(mutant.map_or(&[], |mutant| mutant.patches())),
            server_ahead: 1_700_000_000_000_000,
            processes: Vec::new(),
            connections: Vec::new(),
            clients: Vec::new(),
            locks: keys.iter().map(|key| names.lock(key).expect("one spelling")).collect(),
            top_fence: vec![0; keys.len()],
            idle_since: vec![Some(0); keys.len()],
            foreign_until: vec![0; keys.len()],
            keys,
            names,
            referee: Referee::new(options.flush || options.step),
            settings,
            options,
            weather,
            calm: None,
            paused_until: 0,
            paused_since: 0,
            forgotten: HashMap::new(),
            given_back: HashSet::new(),
            lined_up: HashMap::new(),
            first_in_turn: HashMap::new(),
            crashed: Vec::new(),
            foreign: HashSet::new(),
            violation: None,
            scripts: 0,
            steps: 0,
            long_work: 0,
            idle: 0.0,
            trace: trace.then(String::new),
            rng,
        };
        for n in 0..processes {
            // As far apart as they may be, more often than not.
            let rate = match world.rng.u8(0..4) {
                _ if options.one_rate => 1.0,
                0 => 1.0 + 0.0099 * (2.0 * world.rng.f64() - 1.0),
                1 => 1.0099,
                _ => 0.9901,
            };
            let process = world.process(format!("p{n}"), rate);
            world.processes.push(process);
            world.subscribe(world.processes.len() - 1);
        }
        world.load();
        world.faults();
        world
    }

    fn process(&mut self, label: String, rate: f64) -> Process {
        let number = self.number();
        Process {
            number,
            clock: self.clock(rate),
            shell: Shell::new(&label, number, self.settings),
            label,
            alive: true,
            frozen: false,
            held_up: BTreeMap::new(),
            thawed: 0,
            lanes: [None; 2],
            inbox: Inbox::default(),
            cut_off_until: 0,
            heard: self.now,
        }
    }

    fn clock(&mut self, rate: f64) -> LocalClock {
        LocalClock::new((1 << 40) + self.rng.u64(0..1 << 40), rate)
    }

    // --- time -----------------------------------------------------------------------------------------------------

    fn live(&mut self) {
        let limit = self.weather.storm + 600 * SECOND;
        let is_busy =
            |w: &Self| w.clients.iter().any(|client| matches!(client.state, State::Away) || w.is_here(client));
        while self.violation.is_none() && (self.calm.is_none() || is_busy(self)) {
            if self.now > limit || self.steps > 3_000_000 {
                return self.wrong("somebody is never answered");
            }
            self.step();
        }
        // All are answered: when what is under way has come, nothing is left.
        let cut_off = self.processes.iter().map(|process| process.cut_off_until).max().unwrap_or(0);
        let end =
            self.now.max(self.paused_until).max(cut_off) + 8 * SECOND + self.weather.late + 20 * self.weather.delay;
        while self.violation.is_none() && self.due.peek().is_some_and(|due| due.at < end) {
            self.step();
        }
        if self.violation.is_none() {
            self.now = self.now.max(end);
            self.look_at_what_is_left();
        }
    }

    fn step(&mut self) {
        self.steps += 1;
        let Some(due) = self.due.pop() else { return self.wrong("nothing happens any more, and somebody waits") };
        self.now = self.now.max(due.at);
        (due.job)(self);
        if self.calm.is_some() {
            self.look_at_idle_keys();
        }
        self.look_at_silence();
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
        let mut delay = self.weather.delay * (20 + self.random(100)) / 100 * self.weather.slow;
        if self.calm.is_none() && self.chance(self.weather.spikes) {
            delay += self.exponential(400 * MS);
        }
        delay
    }

    fn wrong(&mut self, what: impl Into<String>) {
        let what = what.into();
        self.log(|_| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    fn log(&mut self, what: impl FnOnce(&Self) -> String) {
        if let Some(mut trace) = self.trace.take() {
            let what = what(self);
            #[expect(clippy::cast_precision_loss, reason = "to be read")]
            let _ = writeln!(trace, "{:12.3} {what}", self.now as f64 / MS as f64);
            self.trace = Some(trace);
        }
    }

    // --- processes ------------------------------------------------------------------------------------------------

    fn local(&self, process: usize) -> Moment {
        self.processes[process].clock.at(self.now)
    }

    /// Something reaches a process, if it is the same still; one that is frozen finds it when it goes on.
    fn feel(&mut self, process: usize, number: u64, source: Source, job: impl FnOnce(&mut Self) + 'static) {
        let there = &mut self.processes[process];
        if !there.alive || there.number != number {
            return;
        }
        if there.frozen {
            there.held_up.entry(source).or_default().push_back(Box::new(job));
        } else {
            job(self);
            self.settle(process);
        }
    }

    /// What a process wants done is done, and whoever has lost its lock is thrown out.
    fn settle(&mut self, process: usize) {
        while let Some(effect) = self.processes[process].shell.effect() {
            let number = self.processes[process].number;
            match effect {
                Effect::Run(lane, message, script) => self.send(process, lane, message, script),
                Effect::Replace(lane) => {
                    self.log(|w| format!("{} replaces {lane:?}", w.processes[process].label));
                    self.processes[process].lanes[lane as usize] = None;
                }
                Effect::Wake(at, timer) => {
                    let late = self.random(MS);
                    let at = self.processes[process].clock.when(at) + late;
                    let source = Source::Alone(self.number());
                    self.at(at, move |w| w.feel(process, number, source, move |w| w.wake(process, &timer)));
                }
                Effect::Turn(who, section) => self.turn(who, section),
                Effect::Refused(who, error) => self.refused(who, &error),
                Effect::Forgotten(key, id) => self.forgets(process, &key, &id),
                Effect::Spins => {
                    let label = &self.processes[process].label;
                    self.wrong(format!("the watchdog of {label} wakes itself again and again"));
                }
            }
        }
        let now = self.local(process);
        for who in 0..self.clients.len() {
            let client = &mut self.clients[who];
            if client.process != process {
                continue;
            }
            let State::In(section) = &client.state else { continue };
            if section.why().is_some() {
                self.throw_out(who);
            } else {
                let left = section.remaining(now);
                if !left.is_zero() {
                    client.valid_until = self.processes[process].clock.when(now.after(left));
                }
            }
        }
    }

    fn wake(&mut self, process: usize, timer: &Timer) {
        let now = self.local(process);
        self.processes[process].shell.timer(now, timer);
    }

    // --- clients --------------------------------------------------------------------------------------------------

    fn is_here(&self, client: &Client) -> bool {
        let process = &self.processes[client.process];
        let is_under_way = !matches!(client.state, State::Over | State::Away);
        is_under_way && process.alive && process.number == client.number
    }

    fn load(&mut self) {
        let gap = [60, 300, 1_200][self.rng.usize(0..3)] * MS;
        let work = [5, 100, 800][self.rng.usize(0..3)] * MS;
        let long = [0.0, 0.0, 0.05, 0.4][self.rng.usize(0..4)];
        let mut at = 10 * MS;
        for _ in 0..250 {
            at += self.exponential(gap);
            if at > self.weather.storm {
                break;
            }
            self.client(at, work, long);
        }
        // Some come when it is calm.
        let (calm, mut at) = (self.weather.storm, self.weather.storm + SECOND);
        self.at(calm, Self::calm_down);
        for _ in 0..15 {
            at += self.exponential(300 * MS);
            self.client(at, work, 0.0);
        }
    }

    fn client(&mut self, at: u64, work: u64, long: f64) {
        let mut work = self.random(2 * work) + 100_000;
        if self.chance(long) && self.long_work < 240 * SECOND {
            work = self.random(75 * SECOND);
            self.long_work += work;
        }
        let patience = [Some(300 * MS), Some(2 * SECOND), Some(100 * SECOND), None][self.rng.usize(0..4)];
        let waits = !self.chance(self.weather.impatient);
        let ending = match self.rng.u8(0..100) {
            0..3 => Ending::Dropped,
            3..6 => Ending::Failed,
            _ => Ending::Released,
        };
        let seconds = |rng: &mut fastrand::Rng, to: u64| Duration::from_millis(rng.u64(100..to));
        let lock_delay = match self.rng.u8(0..20) {
            _ if self.settings.bare => Duration::ZERO,
            0 => seconds(&mut self.rng, 4_000),
            1..5 => Duration::ZERO,
            _ => LOCK_DELAY,
        };
        let hold_at_least = if self.rng.u8(0..20) == 0 { seconds(&mut self.rng, 3_000) } else { Duration::ZERO };
        let max_hold = (self.rng.u8(0..20) == 0).then(|| seconds(&mut self.rng, 8_000));
        self.weather.longest_delay = self.weather.longest_delay.max(lock_delay);
        let key = self.rng.usize(0..self.keys.len());
        let client = Client {
            key,
            process: 0,
            number: 0,
            waits,
            patience,
            work,
            ending,
            terms: Terms { max_hold, hold_at_least, lock_delay, ..Terms::default() },
            place: 0,
            since: at,
            state: State::Away,
            began: 0,
            valid_until: 0,
        };
        let who = self.clients.len();
        self.clients.push(client);
        self.at(at, move |w| w.comes(who));
    }

    fn comes(&mut self, who: usize) {
        let process = self.rng.usize(0..self.processes.len());
        let number = self.processes[process].number;
        if !self.processes[process].alive {
            self.clients[who].state = State::Over;
            return;
        }
        let client = &mut self.clients[who];
        (client.process, client.number, client.since) = (process, number, self.now);
        client.state = State::Waits;
        self.feel(process, number, Source::Request(id(who)), move |w| {
            let now = w.local(process);
            let client = &w.clients[who];
            let (key, waits, terms, patience) =
                (w.keys[client.key].clone(), client.waits, client.terms, client.patience);
            w.log(|w| format!("{} asks: {who} for {key}, waits {waits} {patience:?}", w.processes[process].label));
            w.clients[who].place = w.processes[process].shell.request(now, &key, id(who), waits, terms);
            if let Some(patience) = patience.filter(|_| waits) {
                w.after(patience, move |w| w.feel(process, number, Source::Request(id(who)), move |w| w.gives_up(who)));
            }
        });
    }

    /// It does not wait any longer.
    fn gives_up(&mut self, who: usize) {
        let client = &self.clients[who];
        let (process, place, key) = (client.process, client.place, self.keys[client.key].clone());
        let now = self.local(process);
        match client.state.clone() {
            State::Waits => {
                self.log(|w| format!("{} leaves: {who}", w.processes[process].label));
                self.clients[who].state = State::Over;
                self.processes[process].shell.leave(now, &key, id(who), place);
            }
            // Chosen, and gone.
            State::Told(section) => {
                self.clients[who].state = State::Over;
                self.processes[process].shell.guard_ended(now, &section, Ending::Unheard);
            }
            State::Away | State::In(_) | State::Over => {}
        }
    }

    fn turn(&mut self, who: Who, section: Arc<Section>) {
        let who = who as usize;
        let client = &mut self.clients[who];
        let (process, number) = (client.process, client.number);
        if !matches!(client.state, State::Waits) {
            let now = self.local(process);
            return self.processes[process].shell.guard_ended(now, &section, Ending::Unheard);
        }
        client.state = State::Told(section);
        let soon = self.random(MS);
        self.after(soon, move |w| w.feel(process, number, Source::Request(id(who)), move |w| w.begins(who)));
    }

    fn begins(&mut self, who: usize) {
        let client = &self.clients[who];
        let (process, number, key) = (client.process, client.number, client.key);
        let State::Told(section) = client.state.clone() else { return };
        let now = self.local(process);
        if section.remaining(now).is_zero() && !self.is(Wrong::NoPollCheck) {
            self.clients[who].state = State::Over;
            return self.processes[process].shell.guard_ended(now, &section, Ending::Dropped);
        }
        let left = section.remaining(now);
        self.log(|w| {
            let owner = &section.grant.owner;
            format!("{} BEGINS: {who} as {owner}, token {}, {left:?} left", w.processes[process].label, section.token)
        });
        if left.is_zero() {
            return self.wrong(format!("{} begins after its deadline", section.grant.owner));
        }
        let clock = self.processes[process].clock;
        if let Err(wrong) = self.referee.begins(self.now, number, clock, &section) {
            return self.wrong(wrong);
        }
        if self.foreign_until[key] > self.now && !self.referee.lenient {
            return self.wrong(format!("{} begins while a stranger is in", section.grant.owner));
        }
        self.look_at_turns(process, key, &section);
        let client = &mut self.clients[who];
        client.valid_until = clock.when(now.after(left));
        client.began = self.now;
        client.state = State::In(section);
        let work = client.work;
        self.idle_since[key] = None;
        // It is polled in between.
        for part in [self.random(work), work] {
            self.after(part, move |w| {
                w.feel(process, number, Source::Request(id(who)), move |w| w.polled(who, part == work));
            });
        }
    }

    fn polled(&mut self, who: usize, is_last: bool) {
        let State::In(section) = self.clients[who].state.clone() else { return };
        let process = self.clients[who].process;
        let now = self.local(process);
        if section.remaining(now).is_zero() {
            if self.is(Wrong::NoPollCheck) {
                return self.wrong(format!("{} is polled after its deadline", section.grant.owner));
            }
            return self.throw_out(who);
        }
        if is_last {
            self.leaves(who, self.clients[who].ending);
        }
    }

    /// Its lock is lost, and it is dropped.
    fn throw_out(&mut self, who: usize) {
        let State::In(section) = &self.clients[who].state else { return };
        let client = &self.clients[who];
        let is_of_age = self.calm.is_some_and(|calm| client.began > calm + 5 * SECOND);
        let there = &self.processes[client.process];
        let thawed = there.thawed.max(there.cut_off_until) > client.began;
        let limit = client.terms.max_hold.is_some();
        if is_of_age && !thawed && !limit && !self.is_odd() {
            let what = format!("{} is lost though all is calm: {:?}", section.grant.owner, section.why());
            self.wrong(what);
        }
        self.leaves(who, Ending::Dropped);
    }

    fn leaves(&mut self, who: usize, ending: Ending) {
        let State::In(section) = std::mem::replace(&mut self.clients[who].state, State::Over) else { return };
        let client = &self.clients[who];
        let (process, key, terms, began, valid_until) =
            (client.process, client.key, client.terms, client.began, client.valid_until);
        self.log(|w| {
            let why = section.why();
            format!("{} ends: {who} as {}, {ending:?} {why:?}", w.processes[process].label, section.grant.owner)
        });
        let (now, ended) = (self.now, self.now.min(valid_until));
        let (taken, why) = match ending {
            _ if self.settings.bare && ending == Ending::Dropped => (0, ""),
            Ending::Dropped => (ended + nanos(terms.lock_delay), "ended badly"),
            Ending::Released => {
                let held = now - began;
                // By a clock that may be fast.
                let left = nanos(terms.hold_at_least).saturating_sub(held + held / 100) / 100 * 98;
                // The store keeps it no longer than the lease, if the give-back is lost.
                (if left == 0 { 0 } else { (now + left).min(valid_until) }, "holds it for a while")
            }
            _ => (0, ""),
        };
        self.referee.ends(&section, taken, why);
        if !self.referee.is_held(&self.keys[key], now) {
            self.idle_since[key] = Some(now.max(taken));
        }
        let local = self.local(process);
        self.processes[process].shell.guard_ended(local, &section, ending);
    }

    fn refused(&mut self, who: Who, error: &LockError) {
        let who = who as usize;
        self.log(|w| format!("{} refuses {who}: {error}", w.processes[w.clients[who].process].label));
        self.clients[who].state = State::Over;
        if let LockError::Store(error) = error
            && matches!(error.kind(), StoreErrorKind::Protocol | StoreErrorKind::Refused)
        {
            self.wrong(format!("an error that cannot be: {error}"));
        }
    }

    /// Nothing of this id may be there, and nothing may come.
    fn forgets(&mut self, process: usize, key: &LockKey, id: &OwnerId) {
        let text = id.to_string();
        self.log(|_| format!("{text} is forgotten"));
        self.lined_up.remove(&text);
        // It gives up when its lease is over, and its place, unless others keep the line: then it gives back what it is offered.
        let silent = self.now.saturating_sub(self.processes[process].heard) > nanos(LEASE + LINE.place);
        if self.referee.lenient || self.options.back || silent {
            return;
        }
        self.forgotten.insert(text.clone(), self.now);
        let Some(at) = self.keys.iter().position(|known| known == key) else { return };
        let record = self.record(at);
        if record.holders.iter().any(|(holder, _)| *holder == text) || record.line.contains(&text) {
            self.wrong(format!("{text} is forgotten, and still there: {record:?}"));
        }
    }

    // --- connections ----------------------------------------------------------------------------------------------

    fn send(&mut self, process: usize, lane: Lane, message: u64, script: ScriptCall) {
        let there = &self.processes[process];
        let (number, lane_of) = (there.number, there.lanes[lane as usize]);
        let at = match lane_of.filter(|at| self.connections[*at].up) {
            Some(at) => at,
            None => {
                let made = self.now + self.delay() + self.delay();
                self.connections.push(Connection {
                    process: (process, number),
                    up: true,
                    last_out: made,
                    last_in: 0,
                    under_way: BTreeMap::new(),
                });
                let at = self.connections.len() - 1;
                self.processes[process].lanes[lane as usize] = Some(at);
                at
            }
        };
        let arrives = self.connections[at].last_out.max(self.now + self.delay());
        self.connections[at].last_out = arrives;
        self.connections[at].under_way.insert(message, Some(script));
        self.at(arrives, move |w| w.arrives(at, message));
    }

    fn arrives(&mut self, at: usize, message: u64) {
        let (process, number) = self.connections[at].process;
        let late = self.paused_until.max(self.cut_off_until(process, number));
        if self.now < late {
            return self.at(late, move |w| w.arrives(at, message));
        }
        let Some(script) = self.connections[at].under_way.get_mut(&message).and_then(Option::take) else { return };
        let reply = self.execute(Some(process), &script);
        if self.calm.is_none() && self.chance(self.weather.doubled) {
            self.execute(Some(process), &script);
        }
        let back = self.connections[at].last_in.max(self.now + self.delay());
        self.connections[at].last_in = back;
        self.at(back, move |w| w.answers(at, message, reply));
    }

    fn answers(&mut self, at: usize, message: u64, reply: Value) {
        let (process, number) = self.connections[at].process;
        let late = self.cut_off_until(process, number);
        if self.now < late {
            return self.at(late, move |w| w.answers(at, message, reply));
        }
        self.feel(process, number, Source::Connection(at), move |w| {
            if w.connections[at].up && w.connections[at].under_way.remove(&message).is_some() {
                let now = w.local(process);
                w.processes[process].heard = w.now;
                w.processes[process].shell.reply(now, message, &reply);
            }
        });
    }

    fn cut_off_until(&self, process: usize, number: u64) -> u64 {
        let there = &self.processes[process];
        if there.number == number { there.cut_off_until } else { 0 }
    }

    /// Most of what was sent is in the server's buffers: it runs all the same, later. Nobody hears of it.
    fn break_connection(&mut self, process: usize, lane: Lane) {
        let Some(at) = self.processes[process].lanes[lane as usize].take() else { return };
        self.log(|w| format!("{} loses its connection that {lane:?}", w.processes[process].label));
        self.connections[at].up = false;
        let mut late = self.now;
        let under_way = std::mem::take(&mut self.connections[at].under_way);
        let parts = u64::try_from(under_way.len()).expect("few") + 1;
        for (message, script) in under_way {
            if let Some(script) = script
                && self.chance(0.7)
            {
                late += self.random(self.weather.late / parts);
                self.at(late, move |w| w.runs_late(process, script));
            }
            let number = self.processes[process].number;
            let soon = self.random(2 * MS);
            self.after(soon, move |w| {
                w.feel(process, number, Source::Connection(at), move |w| {
                    let now = w.local(process);
                    w.processes[process].shell.cut(now, message);
                });
            });
        }
    }

    fn runs_late(&mut self, process: usize, script: ScriptCall) {
        if self.now < self.paused_until {
            return self.at(self.paused_until, move |w| w.runs_late(process, script));
        }
        self.execute(Some(process), &script);
    }

    // --- messages -------------------------------------------------------------------------------------------------

    fn subscribe(&mut self, process: usize) {
        let delay = self.delay();
        let there = &mut self.processes[process];
        there.inbox.epoch += 1;
        let (number, epoch) = (there.number, there.inbox.epoch);
        self.after(delay, move |w| w.subscribes(process, number, epoch));
    }

    fn subscribes(&mut self, process: usize, number: u64, epoch: u64) {
        if self.now < self.paused_until {
            return self.at(self.paused_until, move |w| w.subscribes(process, number, epoch));
        }
        let there = &mut self.processes[process];
        if !there.alive || there.number != number || there.inbox.epoch != epoch {
            return;
        }
        there.inbox.at_server = Some(epoch);
        self.fake.data().listeners.insert(self.processes[process].shell.inbox(), 1);
        let back = self.now + self.delay();
        let inbox = &mut self.processes[process].inbox;
        inbox.last = inbox.last.max(back);
        self.at(back, move |w| {
            w.feel(process, number, Source::Inbox(epoch), move |w| {
                if w.processes[process].inbox.epoch == epoch {
                    let now = w.local(process);
                    w.processes[process].shell.listening(now);
                }
            });
        });
    }

    fn break_inbox(&mut self, process: usize) {
        let there = &mut self.processes[process];
        let (number, epoch, channel) = (there.number, there.inbox.epoch, there.shell.inbox());
        // Nothing comes from the old one any more.
        there.inbox.epoch += 1;
        let next = there.inbox.epoch;
        self.log(|w| format!("{} loses its inbox", w.processes[process].label));
        let missed = self.random(30 * MS);
        self.after(missed, move |w| w.unsubscribes(process, number, epoch, &channel));
        // It notices at once, or when it looks.
        let noticed = if self.chance(0.7) { self.random(60 * MS) } else { self.random(1_500 * MS) };
        self.after(noticed, move |w| {
            w.feel(process, number, Source::Inbox(epoch), move |w| {
                if w.processes[process].inbox.epoch == next {
                    w.subscribe(process);
                }
            });
        });
    }

    fn unsubscribes(&mut self, process: usize, number: u64, epoch: u64, channel: &str) {
        let there = &mut self.processes[process];
        if there.number != number || there.inbox.at_server == Some(epoch) {
            if there.number == number {
                there.inbox.at_server = None;
            }
            self.fake.data().listeners.remove(channel);
        }
    }

    fn deliver(&mut self) {
        let published = std::mem::take(&mut self.fake.data().published);
        for (channel, message) in published {
            let Some(process) = self.processes.iter().position(|there| there.shell.inbox() == channel) else {
                continue;
            };
            let Some(epoch) = self.processes[process].inbox.at_server else { continue };
            if self.calm.is_none() && self.chance(self.weather.lossy) {
                self.log(|_| format!("lost: {message}"));
                continue;
            }
            let copies = 1 + usize::from(self.calm.is_none() && self.chance(self.weather.doubled));
            for _ in 0..copies {
                let number = self.processes[process].number;
                let comes = self.processes[process].inbox.last.max(self.now + self.delay());
                self.processes[process].inbox.last = comes;
                let message = message.clone();
                self.at(comes, move |w| w.tells(process, number, epoch, message));
            }
        }
    }

    fn tells(&mut self, process: usize, number: u64, epoch: u64, message: String) {
        let late = self.cut_off_until(process, number);
        if self.now < late {
            return self.at(late, move |w| w.tells(process, number, epoch, message));
        }
        self.feel(process, number, Source::Inbox(epoch), move |w| {
            if w.processes[process].inbox.epoch != epoch {
                return;
            }
            w.log(|w| format!("{} hears: {message}", w.processes[process].label));
            let now = w.local(process);
            w.processes[process].shell.message(now, &message);
            w.settle(process);
            let goes_on = |client: &Client| match &client.state {
                State::In(section) => message.starts_with(&format!("1 taken 0 {} ", section.grant.owner)),
                _ => false,
            };
            if w.clients.iter().any(goes_on) {
                w.wrong(format!("somebody goes on though it was told: {message}"));
            }
        });
    }

    // --- the server -----------------------------------------------------------------------------------------------

    fn server_us(&self) -> i64 {
        self.server_ahead + i64::try_from(self.now / 1_000).expect("some minutes")
    }

    fn record(&self, key: usize) -> Record {
        let mut data = self.fake.data();
        data.now_us = self.server_us();
        let line = format!("tower-lock:q:{{{}}}", self.locks[key]);
        Record { holders: data.hash(&self.locks[key]), line: data.list(&line) }
    }

    fn execute(&mut self, process: Option<usize>, script: &ScriptCall) -> Value {
        self.scripts += 1;
        let before: Vec<_> = (0..self.keys.len()).map(|key| self.record(key)).collect();
        let reply = self.fake.run(script);
        self.log(|w| {
            let from = process.map_or("somebody", |process| w.processes[process].label.as_str());
            format!("    {from} {} {:?} -> {}", script.name(), script.args(), show(&reply))
        });
        for (key, before) in before.iter().enumerate() {
            self.look_at_record(key, before, script);
        }
        self.look_at_reply(script, &reply, &before);
        self.deliver();
        reply
    }

    fn look_at_reply(&mut self, script: &ScriptCall, reply: &Value, before: &[Record]) {
        match (script.name(), reply) {
            (_, Value::SimpleString(error)) if error.starts_with('-') => {
                self.wrong(format!("{} is an error: {error}", script.name()));
            }
            ("release", Value::BulkString(said)) if said != b"not owner" => {
                self.given_back.insert(script.args()[0].clone());
                let key = self.locks.iter().position(|lock| *lock == script.keys()[1]).expect("ours");
                let record = self.record(key);
                if record.holders.is_empty() && record.line.iter().any(|id| self.listens(id)) {
                    self.wrong(format!("a release frees the key though somebody waits: {record:?}"));
                }
            }
            ("renew", Value::Array(answers)) => {
                for (id, answer) in script.args().chunks(2).map(|pair| &pair[0]).zip(answers) {
                    let of_the_dead = self.crashed.iter().any(|dead| id.starts_with(&format!("{dead}:")));
                    if *answer == Value::Int(1) && of_the_dead {
                        // It was under way, and the lease counts from now. Accepted: nobody is in, and nobody can be.
                        let now = self.now;
                        self.idle_since.iter_mut().flatten().for_each(|since| *since = now);
                    }
                    let has = |record: &Record| record.holders.iter().any(|(holder, _)| holder == id);
                    if *answer == Value::Int(1) && !before.iter().any(has) {
                        return self.wrong(format!("{id} is renewed and has nothing"));
                    }
                    if *answer == Value::Int(1) && self.given_back.contains(id) && !self.referee.lenient {
                        return self.wrong(format!("{id} is renewed after it was given back"));
                    }
                }
            }
            _ => {}
        }
    }

    fn look_at_record(&mut self, key: usize, before: &Record, script: &ScriptCall) {
        let (asks, script) = (script.args().first(), script.name());
        let after = self.record(key);
        let lock = &self.locks[key];
        let left = self.fake.data().ms_left(lock);
        if left == -1 {
            return self.wrong(format!("{script} leaves {lock} without an end: {after:?}"));
        }
        if after.holders.len() > 1 {
            return self.wrong(format!("{script} leaves two holders: {after:?}"));
        }
        let mut line = after.line.clone();
        line.sort();
        line.dedup();
        if line.len() < after.line.len() {
            return self.wrong(format!("{script} leaves one twice in a line: {after:?}"));
        }
        for id in after.line.iter().filter(|id| !before.line.contains(id)) {
            let first = self.lined_up.get(id).map_or(self.now, |(first, _)| *first);
            self.lined_up.insert(id.clone(), (first, self.now));
            self.look_at_new(id, script);
        }
        let Some((id, fence)) = after.holders.first().filter(|holder| !before.holders.contains(holder)) else { return };
        if id.ends_with(":end") || self.foreign.contains(id) {
            return;
        }
        let is_new = before.holders.iter().all(|(holder, _)| holder != id);
        if is_new {
            let passed = before.line.iter().take_while(|waits| *waits != id).find(|waits| self.listens(waits)).cloned();
            if asks != Some(id) && !self.listens(id) {
                return self.wrong(format!("{script} offers the key to {id}, which does not listen"));
            }
            if let Some(passed) = passed {
                return self.wrong(format!("{script} lets {id} past {passed}: {before:?}"));
            }
            self.look_at_new(id, script);
            self.look_at_overtaken(key, id);
            self.lined_up.remove(id);
        }
        let fence: u64 = fence.parse().unwrap_or(0);
        if fence <= self.top_fence[key] {
            return self.wrong(format!("{script} gives {id} the fence {fence} after {}", self.top_fence[key]));
        }
        self.top_fence[key] = fence;
    }

    fn listens(&self, id: &str) -> bool {
        let process = id.rsplit_once(':').map_or(id, |(process, _)| process);
        self.fake.data().listeners.get(&format!("tower-lock:in:{process}")).is_some_and(|heard| *heard > 0)
    }

    fn look_at_new(&mut self, id: &str, script: &str) {
        if let Some(then) = self.forgotten.get(id) {
            let ago = Duration::from_nanos(self.now - then);
            self.wrong(format!("{script} makes something for {id}, {ago:?} after it was forgotten"));
        }
    }

    // --- faults ---------------------------------------------------------------------------------------------------

    fn faults(&mut self) {
        let Options { force, flush, ctr, back, step, java, .. } = self.options;
        let often = |yes: bool, weight: u32| if yes { weight } else { 0 };
        let all = [
            (Fault::BreakAsks, 4),
            (Fault::BreakEnds, 4),
            (Fault::BreakInbox, 4),
            (Fault::Freeze, 3),
            (Fault::Crash, 2),
            (Fault::Slow, 2),
            (Fault::Cancel, 5),
            (Fault::Drop, 2),
            (Fault::Pause, 1),
            (Fault::CutOff, [1, 2, 10][self.rng.usize(0..3)]),
        ];
        let mut menu: Vec<_> = all.into_iter().filter(|_| self.rng.u8(0..10) < 6).collect();
        menu.extend([
            (Fault::Force, often(force, 3)),
            (Fault::Flush, often(flush, 1)),
            (Fault::Step, often(back || step, 3)),
            (Fault::Java, often(java, 6)),
            (Fault::Counter, often(ctr, 6)),
        ]);
        let sum: u32 = menu.iter().map(|(_, weight)| weight).sum();
        if sum == 0 {
            return;
        }
        let gap = [400, 1_200, 4_000][self.rng.usize(0..3)] * MS;
        let mut at = self.exponential(gap);
        while at < self.weather.storm {
            let mut throw = self.rng.u32(0..sum);
            let chosen = menu.iter().find(|(_, weight)| {
                let is_it = throw < *weight;
                throw = throw.saturating_sub(*weight);
                is_it
            });
            if let Some(&(fault, _)) = chosen {
                self.at(at, move |w| w.fault(fault));
            }
            at += self.exponential(gap);
        }
    }

    fn fault(&mut self, fault: Fault) {
        let key = self.rng.usize(0..self.keys.len());
        let mut process = self.rng.usize(0..self.processes.len());
        let holder = self.referee.holder(&self.keys[key]);
        if let Some(at) = self.processes.iter().position(|there| Some(there.number) == holder)
            && self.rng.bool()
        {
            process = at;
        }
        match fault {
            Fault::BreakAsks => self.break_connection(process, Lane::Asks),
            Fault::BreakEnds => self.break_connection(process, Lane::Ends),
            Fault::BreakInbox => self.break_inbox(process),
            Fault::Freeze => {
                let part = [6, 15, 36][self.rng.usize(0..3)];
                let time = part * (300 + self.random(1_000)) * MS;
                self.freeze(process, time);
            }
            Fault::Crash => self.crash(process),
            Fault::Slow => {
                self.weather.slow = [10, 40][self.rng.usize(0..2)];
                let time = self.random(2 * SECOND);
                self.after(time, |w| w.weather.slow = 1);
            }
            Fault::Cancel | Fault::Drop => self.disturb_a_client(fault),
            Fault::Pause => {
                let most = [1, 1, 5, 20][self.rng.usize(0..4)] * SECOND;
                let time = self.random(most);
                if self.now >= self.paused_until {
                    self.paused_since = self.now;
                }
                self.paused_until = self.paused_until.max(self.now + time);
                self.log(|_| format!("the server stands still for {:?}", Duration::from_nanos(time)));
            }
            Fault::CutOff => {
                let most = [1, 5, 60][self.rng.usize(0..3)] * SECOND;
                let time = self.random(most);
                let there = &mut self.processes[process];
                there.cut_off_until = there.cut_off_until.max(self.now + time);
                let time = Duration::from_nanos(time);
                self.log(|w| format!("{} is cut off for {time:?}", w.processes[process].label));
            }
            Fault::Force => self.force(key),
            Fault::Flush => {
                self.log(|_| "FLUSHALL".to_owned());
                self.fake.data().flush();
            }
            Fault::Step => {
                let ms = [20, 500, 5_000][self.rng.usize(0..3)];
                let forward = self.options.step && self.rng.bool();
                self.server_ahead += if forward { ms * 1_000 } else { -ms * 1_000 };
                self.log(|_| format!("the server's clock is set by {ms} ms, forward {forward}"));
            }
            Fault::Java => self.java(key),
            Fault::Counter => {
                self.log(|_| "the counter is lost".to_owned());
                self.fake.command(&["DEL", "tower-lock:f"]);
            }
        }
    }

    fn freeze(&mut self, process: usize, time: u64) {
        let there = &mut self.processes[process];
        if !there.alive || there.frozen {
            return;
        }
        there.frozen = true;
        let number = there.number;
        self.log(|w| format!("{} is frozen for {:?}", w.processes[process].label, Duration::from_nanos(time)));
        self.after(time, move |w| w.thaw(process, number));
    }

    /// What has come meanwhile is noticed in any order, but that of its source.
    fn thaw(&mut self, process: usize, number: u64) {
        let there = &mut self.processes[process];
        if there.number != number || !there.alive {
            return;
        }
        there.frozen = false;
        there.thawed = self.now;
        self.log(|w| format!("{} goes on", w.processes[process].label));
        let mut held_up = std::mem::take(&mut self.processes[process].held_up);
        while !held_up.is_empty() {
            let nth = self.rng.usize(0..held_up.len());
            let source = *held_up.keys().nth(nth).expect("one of them");
            let jobs = held_up.get_mut(&source).expect("there");
            let job = jobs.pop_front();
            if jobs.is_empty() {
                held_up.remove(&source);
            }
            if let Some(job) = job {
                job(self);
                self.settle(process);
            }
        }
    }

    fn crash(&mut self, process: usize) {
        if !self.processes[process].alive {
            return;
        }
        self.log(|w| format!("{} CRASHES", w.processes[process].label));
        self.break_connection(process, Lane::Asks);
        self.break_connection(process, Lane::Ends);
        let there = &mut self.processes[process];
        there.alive = false;
        let (number, epoch, channel) = (there.number, there.inbox.epoch, there.shell.inbox());
        let (label, clock) = (there.label.clone(), there.clock);
        self.crashed.push(channel.trim_start_matches("tower-lock:in:").to_owned());
        for who in 0..self.clients.len() {
            let client = &mut self.clients[who];
            if client.process != process || client.number != number || matches!(client.state, State::Away) {
                continue;
            }
            if let State::In(section) = std::mem::replace(&mut client.state, State::Over) {
                let ended = self.now.min(client.valid_until);
                let delay = if self.settings.bare { 0 } else { nanos(client.terms.lock_delay) };
                let key = client.key;
                self.referee.ends(&section, ended + delay, "has crashed");
                if !self.referee.is_held(&self.keys[key], self.now) {
                    self.idle_since[key] = Some(self.now);
                }
            }
        }
        let noticed = self.random(50 * MS);
        self.after(noticed, move |w| {
            w.unsubscribes(process, number, epoch, &channel);
            w.fake.data().listeners.remove(&channel);
        });
        let back = 60 * MS + self.random(4 * SECOND);
        self.after(back, move |w| {
            let mut fresh = w.process(label, 1.0);
            fresh.clock = clock;
            w.processes[process] = fresh;
            w.subscribe(process);
        });
    }

    fn disturb_a_client(&mut self, fault: Fault) {
        let is_one = |client: &Client| match client.state {
            State::Waits | State::Told(_) => fault == Fault::Cancel,
            State::In(_) => fault == Fault::Drop,
            State::Away | State::Over => false,
        };
        let all: Vec<_> = (0..self.clients.len())
            .filter(|who| is_one(&self.clients[*who]) && self.is_here(&self.clients[*who]))
            .collect();
        if all.is_empty() {
            return;
        }
        let who = all[self.rng.usize(0..all.len())];
        let (process, number) = (self.clients[who].process, self.clients[who].number);
        self.feel(process, number, Source::Request(id(who)), move |w| {
            if fault == Fault::Cancel {
                w.gives_up(who);
            } else {
                w.leaves(who, Ending::Dropped);
            }
        });
    }

    fn force(&mut self, key: usize) {
        let keep = Duration::from_millis([0, 0, 1_000][self.rng.usize(0..3)]);
        for (holder, _) in self.record(key).holders {
            self.referee.excused.insert(OwnerId::from_text(holder.trim_end_matches(":end")));
        }
        let lock = self.keys[key].clone();
        self.referee.pardon(&lock);
        let script = self.names.force(&ForceAsk::new(lock, keep, LINE)).expect("one spelling");
        self.execute(None, &script);
    }

    /// As Redisson locks and unlocks.
    fn java(&mut self, key: usize) {
        const LOCK: &str = "if redis.call('exists', KEYS[1]) == 0 or redis.call('hexists', KEYS[1], ARGV[2]) == 1 then
            redis.call('hincrby', KEYS[1], ARGV[2], 1) redis.call('pexpire', KEYS[1], ARGV[1]) return nil end
            return redis.call('pttl', KEYS[1])";
        let id = format!("8b1b3cd2:{}", self.number());
        self.foreign.insert(id.clone());
        let lock = self.locks[key].clone();
        self.fake.data().now_us = self.server_us();
        if self.fake.eval(LOCK, &[&lock], &["30000", &id]) != Value::Nil {
            return;
        }
        self.log(|_| format!("a stranger locks {lock}"));
        if self.referee.is_held(&self.keys[key], self.now) {
            return self.wrong(format!("a stranger is let into {lock}"));
        }
        let time = self.random(8 * SECOND);
        self.foreign_until[key] = self.now + time;
        self.after(time, move |w| {
            w.log(|_| format!("a stranger unlocks {lock}"));
            w.fake.data().now_us = w.server_us();
            w.fake.command(&["DEL", &lock]);
            w.foreign_until[key] = 0;
            w.idle_since[key] = Some(w.now);
        });
    }

    // --- when it is calm ------------------------------------------------------------------------------------------

    fn calm_down(&mut self) {
        self.log(|_| "it is calm".to_owned());
        self.calm = Some(self.now);
        self.weather.slow = 1;
        for key in 0..self.keys.len() {
            if self.idle_since[key].is_some() || !self.referee.is_held(&self.keys[key], self.now) {
                self.idle_since[key] = Some(self.now);
            }
        }
    }

    fn is(&self, wrong: Wrong) -> bool {
        self.settings.wrong == Some(wrong)
    }

    /// Things were done after which less is promised.
    fn is_odd(&self) -> bool {
        self.referee.lenient || self.options.back || self.options.force || self.options.java
    }

    fn waits(&self, client: &Client) -> bool {
        matches!(client.state, State::Waits) && self.is_here(client) && !self.processes[client.process].frozen
    }

    /// A key for which somebody waits is not idle for longer than a lease that nobody gave back.
    fn look_at_idle_keys(&mut self) {
        if self.referee.lenient || self.options.back {
            return;
        }
        let Some(calm) = self.calm else { return };
        let limit = LEASE + LINE.offer + 2 * self.weather.longest_delay + 3 * CHECK_IN + 4 * STORE_CALL;
        let limit = nanos(limit) / 100 * 102 + 3 * SECOND + 20 * self.weather.delay;
        for key in 0..self.keys.len() {
            let Some(idle) = self.idle_since[key] else { continue };
            let waiting = self.clients.iter().filter(|client| client.key == key && self.waits(client));
            let Some(first) = waiting.map(|client| client.since).min() else { continue };
            let thawed =
                self.processes.iter().map(|process| process.thawed.max(process.cut_off_until)).max().unwrap_or(0);
            let since = idle.max(first).max(calm).max(self.paused_until).max(thawed);
            let gap = self.now.saturating_sub(since);
            #[expect(clippy::cast_precision_loss, reason = "a part")]
            let part = gap as f64 / limit as f64;
            self.idle = self.idle.max(part);
            if gap > limit {
                let gap = Duration::from_nanos(gap);
                return self.wrong(format!("{} is idle for {gap:?} while somebody waits", self.locks[key]));
            }
        }
    }

    /// Who lined up later is not served first.
    fn look_at_overtaken(&mut self, key: usize, got: &str) {
        if self.is_odd() {
            return;
        }
        let Some(calm) = self.calm else { return };
        let since = self.lined_up.get(got).map_or(self.now, |(since, _)| *since);
        let thawed = self.processes.iter().map(|process| process.thawed.max(process.cut_off_until)).max().unwrap_or(0);
        let settled = calm.max(thawed).max(self.paused_until) + 5 * SECOND;
        let listens = |process: &&Process| process.alive && !process.frozen && process.inbox.at_server.is_some();
        let passed = self.processes.iter().filter(listens).find_map(|process| {
            let is_wanted = self
                .clients
                .iter()
                .any(|client| self.waits(client) && client.key == key && client.number == process.number);
            let mut ids = process.shell.ids_sent().filter(|(wanted, _)| is_wanted && *wanted == self.keys[key]);
            ids.find_map(|(_, id)| {
                let text = id.to_string();
                let (first, _) = *self.lined_up.get(&text)?;
                (text != got && settled < first && first < since).then(|| (text, since - first))
            })
        });
        if let Some((passed, by)) = passed {
            let by = Duration::from_nanos(by);
            self.wrong(format!("{got} is served before {passed}, which lined up {by:?} before it"));
        }
    }

    /// A process hands a key on within itself for a while only, if others wait.
    fn look_at_turns(&mut self, process: usize, key: usize, section: &Arc<Section>) {
        let owner = section.grant.owner.clone();
        let first = *self.first_in_turn.entry(owner).or_insert(self.now);
        let Some(calm) = self.calm.filter(|_| !self.is_odd()) else { return };
        let longest = self.clients.iter().filter(|client| client.key == key && client.process == process);
        let longest =
            longest.filter(|client| client.began > 0 || matches!(client.state, State::Told(_) | State::Waits));
        let longest = longest.filter(|client| client.since > calm || client.began + client.work > calm);
        let longest = longest.map(|client| client.work).max().unwrap_or(0);
        let limit = nanos(HAND_OVER_TIME) / 100 * 102 + 2 * longest + 20 * self.weather.delay + 50 * MS;
        let thawed = self.processes[process].thawed.max(self.processes[process].cut_off_until);
        for id in self.record(key).line {
            let Some((_, since)) = self.lined_up.get(&id) else { continue };
            let since = (*since).max(first).max(calm).max(thawed).max(self.paused_until);
            if self.now.saturating_sub(since) > limit {
                let time = Duration::from_nanos(self.now - since);
                let label = &self.processes[process].label;
                let what = format!("{id} waits for {time:?} while {label} hands the key on within itself");
                return self.wrong(what);
            }
        }
    }

    /// While the server stands still, whoever waits for it is told so.
    fn look_at_silence(&mut self) {
        const TOLD_BY: u64 = 3_300 * MS;
        if self.now >= self.paused_until || self.now < self.paused_since + TOLD_BY || self.violation.is_some() {
            return;
        }
        let slow = 4 * self.weather.delay * 40;
        for who in 0..self.clients.len() {
            let client = &self.clients[who];
            if !self.waits(client) {
                continue;
            }
            let process = &self.processes[client.process];
            // By a clock that may be slow.
            let since = client.since.max(self.paused_since).max(process.thawed);
            let is_busy = self.clients.iter().any(|other| {
                other.key == client.key
                    && other.process == client.process
                    && (matches!(other.state, State::In(_) | State::Told(_)) || other.began + other.work > since)
            });
            if !is_busy && self.now > since + TOLD_BY + slow {
                let time = Duration::from_nanos(self.now - since);
                return self.wrong(format!("{who} waits for {time:?} for a server that does not answer"));
            }
        }
    }

    fn look_at_what_is_left(&mut self) {
        if self.options.back || self.referee.lenient {
            return;
        }
        for key in 0..self.keys.len() {
            let record = self.record(key);
            let holders = record.holders.iter().map(|(id, _)| id);
            for id in holders.chain(&record.line) {
                let of_the_dead = self.crashed.iter().any(|dead| id.starts_with(&format!("{dead}:")));
                if !of_the_dead && !id.ends_with(":end") && !self.foreign.contains(id) {
                    return self.wrong(format!("{id} is left: {record:?}"));
                }
            }
        }
        let busy = self.processes.iter().find(|process| process.alive && !process.frozen && !process.shell.is_idle());
        if let Some(process) = busy {
            let what = format!("{} still does something: {}", process.label, process.shell.describe());
            self.wrong(what);
        }
    }
}

fn id(who: usize) -> Who {
    Who::try_from(who).expect("a few hundred")
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

// The earliest is the greatest.
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
