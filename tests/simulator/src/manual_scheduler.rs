//! Three processes and one key, where each step is made explicitly.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tower_lock::{
    __internals::{
        proto::{BootInstant, GuardEnd, HoldLimits, LEASE, LockRequest, QUEUE, STORE_CALL_TIMEOUT, Sharing},
        redis_wire::{Keyspace, ScriptCall},
    },
    AcquisitionId, Lease, LockError, LockKey, Owner,
    deadpool_redis::redis::Value,
    store::{AcquireRequest, Demand, ForceReleaseRequest, IfBusy, QueueConfig, Record},
};

use crate::{
    checker::{Checker, LocalClock},
    fake::FakeRedis,
    mutants::Mutant,
    process::{ClientId, Effect, Section, Settings, SimProcess, Timer},
    record_checker::head,
    simulation::records::new_record,
};

/// The index of a process.
pub type Process = usize;

/// The first process.
pub const A: Process = 0;
/// The second process.
pub const B: Process = 1;
/// The third process.
pub const C: Process = 2;

const NO_DELAY: HoldLimits =
    HoldLimits { lease: Lease::AutoRenew, max_hold: None, min_hold: Duration::ZERO, lock_delay: Duration::ZERO };
const KEEP_FOR: Duration = Duration::from_secs(60);

/// A server, its clients, and everything in flight between them.
#[derive(Debug)]
pub struct ManualScheduler {
    /// In nanoseconds.
    now: u64,
    server_ahead: i64,
    /// The server.
    pub fake: FakeRedis,
    /// The locked key.
    pub key: LockKey,
    names: Keyspace,
    processes: Vec<SimProcess>,
    clock: LocalClock,
    timers: Vec<(u64, Process, Timer)>,
    scripts: Vec<Sent>,
    /// Published messages that have not been delivered: the process and the text.
    pub messages: Vec<(Process, String)>,
    checker: Checker,
    sections: BTreeMap<ClientId, (Process, Arc<Section>)>,
    tickets: BTreeMap<ClientId, (Process, u64)>,
    /// Rejected calls and their errors.
    pub rejected: Vec<(ClientId, LockError)>,
    /// Calls that were answered with a record, and the record.
    pub recorded: Vec<(ClientId, Arc<Record>)>,
    /// All violations.
    pub violations: Vec<String>,
}

#[derive(Debug)]
struct Sent {
    process: Process,
    message: u64,
    script: ScriptCall,
    reply: Option<Value>,
    is_done: bool,
}

/// A script that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Script(usize);

impl ManualScheduler {
    /// Three processes with live subscriptions and clocks of this rate, and possibly a mutant. The
    /// store blocks a key for the lease only.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn new(mutant: Option<&Mutant>, rate: f64) -> Self {
        let settings = Settings { bare: true, mutation: mutant.and_then(Mutant::mutation), batches: false };
        let mut scheduler = Self {
            now: 0,
            server_ahead: 1_700_000_000_000_000,
            fake: FakeRedis::new(mutant.map_or(&[], Mutant::patches)),
            key: LockKey::from(("key", 0)),
            names: Keyspace::new("lock").expect("a prefix"),
            processes: (0..3).map(|n| SimProcess::new(["a", "b", "c"][n], n as u64, settings)).collect(),
            clock: LocalClock::new(1 << 40, rate),
            timers: Vec::new(),
            scripts: Vec::new(),
            messages: Vec::new(),
            checker: Checker::default(),
            sections: BTreeMap::new(),
            tickets: BTreeMap::new(),
            rejected: Vec::new(),
            recorded: Vec::new(),
            violations: Vec::new(),
        };
        for process in [A, B, C] {
            let inbox = scheduler.processes[process].inbox();
            scheduler.fake.data().listeners.insert(inbox, 1);
            let now = scheduler.local();
            scheduler.processes[process].on_subscribed(now);
            // This makes the server clock known to them.
            let other = LockKey::from(("other", process));
            scheduler.send_request(process, &other, lock_request(1_000 + id(process), HoldLimits::default()));
            scheduler.run_all(&[process]);
            scheduler.end(1_000 + id(process), GuardEnd::Released);
            scheduler.run_all(&[process]);
        }
        scheduler.scripts.clear();
        scheduler
    }

    // --- clients ---

    /// A client of this process requests the key.
    pub fn request(&mut self, process: Process, client: ClientId) {
        self.send_request(process, &self.key.clone(), lock_request(client, NO_DELAY));
    }

    fn send_request(&mut self, process: Process, key: &LockKey, request: LockRequest<ClientId>) {
        let (now, client) = (self.local(), request.waiter);
        let ticket = self.processes[process].request(now, key, request, None);
        self.tickets.insert(client, (process, ticket));
        self.settle(process);
    }

    /// A duplicate requests the key, perhaps for an owner.
    pub fn claim(&mut self, process: Process, client: ClientId, owner: Option<&Owner>) {
        let request = LockRequest { owner: owner.cloned(), ..duplicate(client, NO_DELAY) };
        self.send_request(process, &self.key.clone(), request);
    }

    /// A duplicate requests the key with these hold limits.
    pub fn claim_with_limits(&mut self, process: Process, client: ClientId, limits: HoldLimits) {
        self.send_request(process, &self.key.clone(), duplicate(client, limits));
    }

    /// A client of this owner requests the key.
    pub fn request_for(&mut self, process: Process, client: ClientId, owner: &Owner) {
        let request = LockRequest { owner: Some(owner.clone()), ..lock_request(client, NO_DELAY) };
        self.send_request(process, &self.key.clone(), request);
    }

    /// The section of the client ends with this record.
    pub fn complete(&mut self, client: ClientId, head: &'static str, body: Option<&'static str>) {
        self.end(client, GuardEnd::Recorded(new_record(Record::new(head, body.map(Into::into)), KEEP_FOR)));
    }

    /// The clients that got a record, and its head.
    pub fn heads(&self) -> Vec<(ClientId, String)> {
        self.recorded.iter().map(|(client, record)| (*client, head(record))).collect()
    }

    /// The client cancels its call.
    pub fn leave(&mut self, client: ClientId) {
        let now = self.local();
        let (process, ticket) = self.tickets[&client];
        let key = self.key.clone();
        self.processes[process].leave(now, &key, client, ticket);
        self.settle(process);
    }

    /// The section of the client ends, if it has one.
    pub fn end(&mut self, client: ClientId, ending: GuardEnd) {
        let now = self.local();
        let Some((process, section)) = self.sections.remove(&client) else { return };
        self.checker.ends(&section, 0, "");
        self.processes[process].guard_ended(now, &section, ending, None);
        self.settle(process);
    }

    /// Whether the client holds the key and its deadline has not passed.
    pub fn is_holding(&self, client: ClientId) -> bool {
        self.sections.get(&client).is_some_and(|(_, section)| !section.remaining(self.local()).is_zero())
    }

    // --- scripts ---

    /// The latest script with this name that this process has sent.
    ///
    /// # Panics
    ///
    /// Panics if there is none.
    pub fn last(&self, process: Process, name: &str) -> Script {
        let is_one = |sent: &Sent| sent.process == process && sent.script.name() == name;
        let at = self.scripts.iter().rposition(is_one);
        Script(at.unwrap_or_else(|| panic!("{process} has sent no {name}")))
    }

    /// The number of scripts with this name that this process has sent.
    pub fn count(&self, process: Process, name: &str) -> usize {
        self.scripts.iter().filter(|sent| sent.process == process && sent.script.name() == name).count()
    }

    /// The arguments of a script.
    pub fn args(&self, script: Script) -> Vec<String> {
        self.scripts[script.0].script.args()
    }

    /// Runs the script on the server.
    pub fn run(&mut self, script: Script) -> Value {
        let call = self.scripts[script.0].script.clone();
        let reply = self.execute(&call);
        self.scripts[script.0].reply = Some(reply.clone());
        reply
    }

    /// Delivers the reply of the script, if it ran.
    pub fn deliver_reply(&mut self, script: Script) {
        let now = self.local();
        let sent = &mut self.scripts[script.0];
        let Some(reply) = sent.reply.clone().filter(|_| !sent.is_done) else { return };
        sent.is_done = true;
        let (process, message) = (sent.process, sent.message);
        self.processes[process].on_reply(now, message, &reply);
        self.settle(process);
    }

    /// Runs the script and delivers its reply.
    pub fn run_and_reply(&mut self, script: Script) -> Value {
        let reply = self.run(script);
        self.deliver_reply(script);
        reply
    }

    /// Breaks the connection of the script: it may still run, and its reply is lost.
    pub fn cut(&mut self, script: Script) {
        let now = self.local();
        let sent = &mut self.scripts[script.0];
        sent.is_done = true;
        let (process, message) = (sent.process, sent.message);
        self.processes[process].on_disconnect(now, message);
        self.settle(process);
    }

    /// Runs all scripts of these processes and delivers all replies and messages.
    pub fn run_all(&mut self, processes: &[Process]) {
        for _ in 0..100 {
            let is_due = |sent: &Sent| processes.contains(&sent.process) && !sent.is_done && sent.reply.is_none();
            if let Some(at) = self.scripts.iter().position(is_due) {
                self.run_and_reply(Script(at));
            } else if let Some(at) = self.messages.iter().position(|(process, _)| processes.contains(process)) {
                self.deliver_message(at);
            } else {
                return;
            }
        }
    }

    /// Runs an acquire of a foreign client that enqueues.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn foreign_client_enqueues(&mut self, id: &str, capacity: usize) -> Value {
        let queue = QueueConfig::new(QUEUE.offer_ttl, QUEUE.entry_ttl, capacity);
        let id = AcquisitionId::from_text(id);
        let request = AcquireRequest::new(self.key.clone(), id, LEASE, IfBusy::Enqueue, queue, STORE_CALL_TIMEOUT);
        let call = self.names.acquire(&[request], i64::MAX >> 10).expect("a valid name");
        self.execute(&call)
    }

    /// Runs a force release.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn force(&mut self, block_for: Duration) -> Value {
        self.checker.excuse(&self.key);
        let call =
            self.names.force(&ForceReleaseRequest::new(self.key.clone(), block_for, QUEUE)).expect("a valid name");
        self.execute(&call)
    }

    fn deliver_message(&mut self, at: usize) {
        let now = self.local();
        let (process, message) = self.messages.remove(at);
        self.processes[process].on_message(now, &message);
        self.settle(process);
    }

    /// Reports a gap in the messages.
    pub fn gap(&mut self, process: Process) {
        let now = self.local();
        self.processes[process].on_subscribed(now);
        self.settle(process);
    }

    // --- time ---

    /// Advances the time and fires due timers. Scripts of these processes run and are answered at
    /// once.
    pub fn advance(&mut self, ms: u64, processes: &[Process]) {
        let end = self.now + ms * 1_000_000;
        while let Some(at) = (0..self.timers.len()).min_by_key(|at| self.timers[*at].0) {
            if self.timers[at].0 > end || !self.violations.is_empty() {
                break;
            }
            let (due, process, timer) = self.timers.remove(at);
            self.now = self.now.max(due);
            let now = self.local();
            self.processes[process].on_timer(now, &timer);
            self.settle(process);
            self.run_all(processes);
        }
        self.now = end;
    }

    /// The local time of the processes.
    pub fn local(&self) -> BootInstant {
        self.clock.at(self.now)
    }

    /// The time of the server.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn server_us(&self) -> i64 {
        self.server_ahead + i64::try_from(self.now / 1_000).expect("some minutes")
    }

    // --- state ---

    /// The holder of the key.
    pub fn holder(&mut self) -> Option<String> {
        let name = self.name();
        Some(self.data().hash(&name).first()?.0.clone())
    }

    /// The queue of the key.
    pub fn queue(&mut self) -> Vec<String> {
        let name = format!("tower-lock:lock:q:{{{}}}", self.name());
        self.data().list(&name)
    }

    /// The name of the key.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn name(&self) -> String {
        self.names.lock(&self.key).expect("a valid name").to_string()
    }

    /// Whether nothing is left of these processes, on the server or in themselves.
    pub fn is_clean(&mut self, processes: &[Process]) -> bool {
        self.violations.is_empty()
            && self.holder().is_none_or(|holder| holder.ends_with(":end"))
            && self.queue().is_empty()
            && processes.iter().all(|process| self.processes[*process].is_idle())
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
            let process = self.processes.iter().position(|process| process.inbox() == channel).expect("one of three");
            self.messages.push((process, message));
        }
        reply
    }

    fn settle(&mut self, process: Process) {
        while let Some(effect) = self.processes[process].next_effect() {
            match effect {
                Effect::Run(_, message, script) => {
                    self.scripts.push(Sent { process, message, script, reply: None, is_done: false });
                }
                Effect::Wake(at, timer) => self.timers.push((self.clock.when(at), process, timer)),
                Effect::Granted(client, section) => {
                    let begins = self.checker.begins(self.now, process as u64, self.clock, &section);
                    self.violations.extend(begins.err());
                    self.sections.insert(client, (process, section));
                }
                Effect::Rejected(client, error) => self.rejected.push((client, error)),
                Effect::Recorded(client, record) => self.recorded.push((client, record)),
                Effect::BusyLoop => self.violations.push("the watchdog wakes itself again and again".to_owned()),
                Effect::Forgotten(..) | Effect::Replace(_) => {}
                // No step presents a ticket, or replaces another client.
                Effect::TicketRefused(_) | Effect::Superseded(_) => {}
            }
        }
        // Sections that have lost their lock are aborted.
        let lost = self.sections.iter().filter(|(_, (of, section))| *of == process && section.end_reason().is_some());
        let lost: Vec<_> = lost.map(|(client, _)| *client).collect();
        for client in lost {
            self.end(client, GuardEnd::Dropped);
        }
    }
}

fn lock_request(client: ClientId, limits: HoldLimits) -> LockRequest<ClientId> {
    LockRequest {
        waiter: client,
        wait: Duration::MAX,
        owner: None,
        parent: None,
        limits,
        demand: Demand::new(),
        sharing: Sharing::Alone,
        trace: None,
    }
}

fn duplicate(client: ClientId, limits: HoldLimits) -> LockRequest<ClientId> {
    LockRequest { demand: Demand::new().unless_recorded(), ..lock_request(client, limits) }
}

fn id(process: Process) -> ClientId {
    ClientId::try_from(process).expect("one of three")
}
