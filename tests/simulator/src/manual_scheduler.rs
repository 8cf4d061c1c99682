//! Three processes and one key, and nothing moves unless it is moved by hand.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tower_lock::{
    AcquisitionId, LockError, LockKey,
    deadpool_redis::redis::Value,
    store::{AcquireRequest, ForceReleaseRequest, IfBusy, QueueConfig},
    test_util::{
        decisions::{BootInstant, Ending, LEASE, LINE, STORE_CALL_TIMEOUT, Terms},
        redis_protocol::{Names, ScriptCall},
    },
};

use crate::{
    checker::{LocalClock, Referee},
    fake::Fake,
    mutants::Mutant,
    process::{Effect, Section, Settings, Shell, Timer, Who},
};

/// One of the three.
pub type Process = usize;

/// The first one.
pub const A: Process = 0;
/// The second one.
pub const B: Process = 1;
/// The third one.
pub const C: Process = 2;

/// A server, its clients, and everything that is under way between them.
#[derive(Debug)]
pub struct Lab {
    /// In nanoseconds.
    now: u64,
    server_ahead: i64,
    /// What it runs.
    pub fake: Fake,
    /// What is locked.
    pub key: LockKey,
    names: Names,
    shells: Vec<Shell>,
    clock: LocalClock,
    timers: Vec<(u64, Process, Timer)>,
    scripts: Vec<Sent>,
    /// What was published and has not come: to whom, and what.
    pub messages: Vec<(Process, String)>,
    referee: Referee,
    sections: BTreeMap<Who, (Process, Arc<Section>)>,
    places: BTreeMap<Who, (Process, u64)>,
    /// Who was refused, and why.
    pub refused: Vec<(Who, LockError)>,
    /// Ids of which nothing is known any more.
    pub forgotten: HashSet<String>,
    /// Whatever was wrong.
    pub wrong: Vec<String>,
}

#[derive(Debug)]
struct Sent {
    process: Process,
    message: u64,
    script: ScriptCall,
    reply: Option<Value>,
    is_over: bool,
}

/// A script that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Script(usize);

impl Lab {
    /// With something wrong in it, perhaps; and all inboxes heard. The store keeps nothing beyond the lease, if it is bare.
    pub fn new(mutant: Option<&Mutant>, bare: bool) -> Self {
        Self::with_rate(mutant, bare, 1.0)
    }

    /// The same, with clocks that run so fast.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn with_rate(mutant: Option<&Mutant>, bare: bool, rate: f64) -> Self {
        let settings = Settings { bare, wrong: mutant.and_then(Mutant::wrong) };
        let mut scheduler = Self {
            now: 0,
            server_ahead: 1_700_000_000_000_000,
            fake: Fake::new(mutant.map_or(&[], Mutant::patches)),
            key: LockKey::from(("key", 0)),
            names: Names::new("lock").expect("a prefix"),
            shells: (0..3).map(|n| Shell::new(["a", "b", "c"][n], n as u64, settings)).collect(),
            clock: LocalClock::new(1 << 40, rate),
            timers: Vec::new(),
            scripts: Vec::new(),
            messages: Vec::new(),
            referee: Referee::default(),
            sections: BTreeMap::new(),
            places: BTreeMap::new(),
            refused: Vec::new(),
            forgotten: HashSet::new(),
            wrong: Vec::new(),
        };
        for process in [A, B, C] {
            let inbox = scheduler.shells[process].inbox();
            scheduler.fake.data().listeners.insert(inbox, 1);
            let now = scheduler.local();
            scheduler.shells[process].listening(now);
            // They know what time it is at the server.
            let other = LockKey::from(("other", process));
            scheduler.ask_for(process, 1_000 + id(process), true, &other, Terms::default());
            scheduler.flow(&[process]);
            scheduler.end(1_000 + id(process), Ending::Released);
            scheduler.flow(&[process]);
        }
        scheduler.scripts.clear();
        scheduler
    }

    // --- clients --------------------------------------------------------------------------------------------------

    /// Somebody of this process wants the key.
    pub fn ask(&mut self, process: Process, who: Who, waits: bool) {
        self.ask_on(process, who, waits, Terms { lock_delay: Duration::ZERO, ..Terms::default() });
    }

    /// Somebody wants the key on these terms.
    pub fn ask_on(&mut self, process: Process, who: Who, waits: bool, terms: Terms) {
        let key = self.key.clone();
        self.ask_for(process, who, waits, &key, terms);
    }

    fn ask_for(&mut self, process: Process, who: Who, waits: bool, key: &LockKey, terms: Terms) {
        let now = self.local();
        let wait = if waits { Duration::MAX } else { Duration::ZERO };
        let place = self.shells[process].request(now, key, who, wait, terms);
        self.places.insert(who, (process, place));
        self.settle(process);
    }

    /// It does not want it any more.
    pub fn leave(&mut self, who: Who) {
        let now = self.local();
        let (process, place) = self.places[&who];
        let key = self.key.clone();
        self.shells[process].leave(now, &key, who, place);
        self.settle(process);
    }

    /// Its section ends, if it is in.
    pub fn end(&mut self, who: Who, ending: Ending) {
        let now = self.local();
        let Some((process, section)) = self.sections.remove(&who) else { return };
        self.referee.ends(&section, 0, "");
        self.shells[process].guard_ended(now, &section, ending);
        self.settle(process);
    }

    /// Whether it is in, and may be.
    pub fn is_in(&self, who: Who) -> bool {
        self.sections.get(&who).is_some_and(|(_, section)| !section.remaining(self.local()).is_zero())
    }

    // --- scripts --------------------------------------------------------------------------------------------------

    /// The newest script of this name that this process has sent.
    ///
    /// # Panics
    ///
    /// There is none.
    pub fn last(&self, process: Process, name: &str) -> Script {
        self.find(process, name).unwrap_or_else(|| panic!("{process} has sent no {name}"))
    }

    /// The same, if there is one.
    pub fn find(&self, process: Process, name: &str) -> Option<Script> {
        let is_one = |sent: &Sent| sent.process == process && sent.script.name() == name;
        self.scripts.iter().rposition(is_one).map(Script)
    }

    /// How many of this name this process has sent.
    pub fn count(&self, process: Process, name: &str) -> usize {
        self.scripts.iter().filter(|sent| sent.process == process && sent.script.name() == name).count()
    }

    /// Its arguments.
    pub fn args(&self, script: Script) -> &[String] {
        self.scripts[script.0].script.args()
    }

    /// It runs at the server.
    pub fn run(&mut self, script: Script) -> Value {
        let call = self.scripts[script.0].script.clone();
        let reply = self.execute(&call);
        self.scripts[script.0].reply = Some(reply.clone());
        reply
    }

    /// Its reply comes, if it ran.
    pub fn answer(&mut self, script: Script) {
        let now = self.local();
        let sent = &mut self.scripts[script.0];
        let Some(reply) = sent.reply.clone().filter(|_| !sent.is_over) else { return };
        sent.is_over = true;
        let (process, message) = (sent.process, sent.message);
        self.shells[process].reply(now, message, &reply);
        self.settle(process);
    }

    /// Both.
    pub fn go(&mut self, script: Script) -> Value {
        let reply = self.run(script);
        self.answer(script);
        reply
    }

    /// Its connection breaks: it may run still, and nobody hears of it.
    pub fn cut(&mut self, script: Script) {
        let now = self.local();
        let sent = &mut self.scripts[script.0];
        sent.is_over = true;
        let (process, message) = (sent.process, sent.message);
        self.shells[process].cut(now, message);
        self.settle(process);
    }

    /// Everything that these processes ask is run and answered at once, and they hear every message.
    pub fn flow(&mut self, processes: &[Process]) {
        for _ in 0..100 {
            let is_due = |sent: &Sent| processes.contains(&sent.process) && !sent.is_over && sent.reply.is_none();
            if let Some(at) = self.scripts.iter().position(is_due) {
                self.go(Script(at));
            } else if let Some(at) = self.messages.iter().position(|(process, _)| processes.contains(process)) {
                self.hear(at);
            } else {
                return;
            }
        }
    }

    /// Everything of this process but this script.
    pub fn flow_but(&mut self, process: Process, slow: Script) {
        let before = std::mem::replace(&mut self.scripts[slow.0].is_over, true);
        self.flow(&[process]);
        self.scripts[slow.0].is_over = before;
    }

    /// Somebody else's script.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn stranger_lines_up(&mut self, owner: &str, places: usize) -> Value {
        let line = QueueConfig::new(LINE.offer_ttl, LINE.entry_ttl, places);
        let owner = AcquisitionId::from_text(owner);
        let ask = AcquireRequest::new(self.key.clone(), owner, LEASE, IfBusy::Enqueue, line, STORE_CALL_TIMEOUT);
        let call = self.names.acquire(&ask, i64::MAX >> 10).expect("one spelling");
        self.execute(&call)
    }

    /// An operator takes the key away.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn force(&mut self, block_for: Duration) -> Value {
        self.referee.pardon(&self.key);
        let call =
            self.names.force(&ForceReleaseRequest::new(self.key.clone(), block_for, LINE)).expect("one spelling");
        self.execute(&call)
    }

    /// This message comes.
    pub fn hear(&mut self, at: usize) {
        let now = self.local();
        let (process, message) = self.messages.remove(at);
        self.shells[process].message(now, &message);
        self.settle(process);
    }

    /// Messages may have been lost.
    pub fn gap(&mut self, process: Process) {
        let now = self.local();
        self.shells[process].listening(now);
        self.settle(process);
    }

    /// It does nothing any more, and is counted as a listener still.
    pub fn freeze(&mut self, process: Process) {
        self.timers.retain(|(_, of, _)| *of != process);
    }

    /// Nobody listens there any more.
    pub fn dies(&mut self, process: Process) {
        let inbox = self.shells[process].inbox();
        self.fake.data().listeners.remove(&inbox);
        self.timers.retain(|(_, of, _)| *of != process);
        self.sections.retain(|_, (of, _)| *of != process);
    }

    // --- time -----------------------------------------------------------------------------------------------------

    /// Time passes, and whoever asked for it is woken. What these processes ask is run and answered at once.
    pub fn later(&mut self, ms: u64, processes: &[Process]) {
        let end = self.now + ms * 1_000_000;
        while let Some(at) = (0..self.timers.len()).min_by_key(|at| self.timers[*at].0) {
            if self.timers[at].0 > end || !self.wrong.is_empty() {
                break;
            }
            let (due, process, timer) = self.timers.remove(at);
            self.now = self.now.max(due);
            let now = self.local();
            self.shells[process].timer(now, &timer);
            self.settle(process);
            self.flow(processes);
        }
        self.now = end;
    }

    /// What a clock of a process shows.
    pub fn local(&self) -> BootInstant {
        self.clock.at(self.now)
    }

    /// What the server's clock shows.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn server_us(&self) -> i64 {
        self.server_ahead + i64::try_from(self.now / 1_000).expect("some minutes")
    }

    // --- what is there --------------------------------------------------------------------------------------------

    /// Who has the key.
    pub fn holder(&mut self) -> Option<String> {
        let name = self.name();
        Some(self.data().hash(&name).first()?.0.clone())
    }

    /// Who waits.
    pub fn line(&mut self) -> Vec<String> {
        let name = format!("tower-lock:lock:q:{{{}}}", self.name());
        self.data().list(&name)
    }

    /// For how long the key is taken yet.
    pub fn ms_left(&mut self) -> i64 {
        let name = self.name();
        self.data().ms_left(&name)
    }

    /// Its name.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn name(&self) -> String {
        self.names.lock(&self.key).expect("one spelling")
    }

    /// Whether nothing is left of these processes, there or here.
    pub fn is_clean(&mut self, processes: &[Process]) -> bool {
        self.wrong.is_empty()
            && self.holder().is_none_or(|holder| holder.ends_with(":end"))
            && self.line().is_empty()
            && processes.iter().all(|process| self.shells[*process].is_idle())
    }

    fn data(&mut self) -> std::cell::RefMut<'_, crate::fake::Data> {
        let now = self.server_us();
        let mut data = self.fake.data();
        data.now_us = now;
        data
    }

    fn execute(&mut self, script: &ScriptCall) -> Value {
        drop(self.data());
        let reply = self.fake.run(script);
        let published = std::mem::take(&mut self.fake.data().published);
        for (channel, message) in published {
            let process = self.shells.iter().position(|shell| shell.inbox() == channel).expect("one of three");
            self.messages.push((process, message));
        }
        reply
    }

    fn settle(&mut self, process: Process) {
        while let Some(effect) = self.shells[process].effect() {
            match effect {
                Effect::Run(_, message, script) => {
                    self.scripts.push(Sent { process, message, script, reply: None, is_over: false });
                }
                Effect::Wake(at, timer) => self.timers.push((self.clock.when(at), process, timer)),
                Effect::Turn(who, section) => {
                    let begins = self.referee.begins(self.now, process as u64, self.clock, &section);
                    self.wrong.extend(begins.err());
                    self.sections.insert(who, (process, section));
                }
                Effect::Refused(who, error) => self.refused.push((who, error)),
                Effect::Forgotten(_, id) => drop(self.forgotten.insert(id.to_string())),
                Effect::Spins => self.wrong.push("the watchdog wakes itself again and again".to_owned()),
                Effect::Replace(_) => {}
            }
        }
        // Whoever has lost its lock is thrown out.
        let lost = self.sections.iter().filter(|(_, (of, section))| *of == process && section.why().is_some());
        let lost: Vec<_> = lost.map(|(who, _)| *who).collect();
        for who in lost {
            self.end(who, Ending::Dropped);
        }
    }
}

fn id(process: Process) -> Who {
    Who::try_from(process).expect("one of three")
}
