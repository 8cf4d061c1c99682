//! One process: the crate's decisions, and around them, in place of tasks and sockets, what a simulation hands to and fro.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use tower_lock::{
    AcquisitionId, LockError, LockKey, LockLost,
    deadpool_redis::redis::Value,
    store::{
        AcquireReply, AcquireRequest, IfBusy, ReleaseRequest, Released, RenewReply, RenewRequest, StoreError,
        StoreErrorKind, StoreEvent, YieldReply, YieldRequest,
    },
    test_util::{
        decisions::{
            self, AcquisitionIds, Action, Actions, BootInstant, Call, DriverTypes, Ending, Event, LEASE, LINE,
            LOCK_DELAY, LazyNow, Need, RECHECK_INTERVAL, RENEWAL_BATCH_WINDOW, Request, STORE_CALL_TIMEOUT, Table,
            Terms, Verb,
        },
        redis_protocol::{InTime, Names, ScriptCall, ServerClock, acquired, released, renewed, yielded},
    },
};

use crate::mutants::Wrong;

/// Who wants a key: a number of the simulation's.
pub type Who = u32;

/// The types of this driver.
#[derive(Debug)]
pub enum Simulated {}

impl DriverTypes for Simulated {
    type Waiter = Who;
    type GrantData = ();
    type SectionData = ();
}

/// A grant of the simulation.
pub type Grant = decisions::Grant<Simulated>;
/// A section of the simulation.
pub type Section = decisions::Section<Simulated>;

/// A process.
#[derive(Debug)]
pub struct Shell {
    table: Table<Simulated>,
    ids: AcquisitionIds,
    names: Names,
    server_clock: ServerClock,
    settings: Settings,
    /// What the store was asked and has not answered.
    calls: BTreeMap<u64, UnderWay>,
    next: u64,
    /// By the moment in which they need something.
    watched: Vec<(BootInstant, Arc<Grant>)>,
    next_look: Option<BootInstant>,
    /// Looks in a row that found nothing but a limit.
    spins: u32,
    /// Its inbox was heard once.
    listens: bool,
    /// Scripts in a row without an answer, for each lane.
    silent: [u32; 2],
    /// Ids that were sent, and are not forgotten.
    ids_sent: Vec<(LockKey, AcquisitionId)>,
    effects: VecDeque<Effect>,
    /// For what is wrong on purpose.
    memory: Memory,
}

/// How it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// The store is asked for the lease alone, without the lock-delay that would hide an overlap.
    pub bare: bool,
    /// What it does wrong.
    pub wrong: Option<Wrong>,
}

/// What a process wants done.
#[derive(Debug)]
pub enum Effect {
    /// A script is to be run; its reply comes under this number.
    Run(Lane, u64, ScriptCall),
    /// Nobody answers on this lane: the next script takes another connection.
    Replace(Lane),
    /// To be woken.
    Wake(BootInstant, Timer),
    /// It is this one's turn.
    Turn(Who, Arc<Section>),
    /// It will not be this one's turn.
    Refused(Who, LockError),
    /// As far as the process knows, nothing of this id is left, and nothing can come of it any more.
    Forgotten(LockKey, AcquisitionId),
    /// It wakes itself again and again, and nothing comes of it.
    Spins,
}

/// Connections of two kinds: what gives back does not wait behind what asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// `acquire` and `yield`.
    Asks,
    /// `release` and `renew`.
    Ends,
}

/// Why a process is to be woken.
#[derive(Clone, Debug)]
pub enum Timer {
    /// A call had time enough.
    Call(u64),
    /// An inbox that was never heard is not waited for any longer.
    FirstWord(u64),
    /// A conversation asked for it.
    Conversation(LockKey, BootInstant),
    /// Grants may have to be renewed.
    Watchdog,
}

#[derive(Debug)]
struct UnderWay {
    key: LockKey,
    ask: Ask,
    called: BootInstant,
    /// How often it was sent. Zero: it waits for the inbox.
    sent: u32,
    message: u64,
}

#[derive(Clone, Debug)]
enum Ask {
    Acquire(u64, AcquireRequest),
    Yield(u64, YieldRequest),
    Release(u64, ReleaseRequest),
    /// Of these grants, each for the lease that it had when it was asked for.
    Renew(Vec<(Arc<Grant>, Duration)>, Vec<bool>),
}

/// What a wrong shell has to remember.
#[derive(Debug, Default)]
struct Memory {
    fences: HashMap<LockKey, u64>,
    given_back: HashSet<AcquisitionId>,
    unknown: HashSet<AcquisitionId>,
    yielded: HashSet<AcquisitionId>,
    failed: HashSet<AcquisitionId>,
    keys: HashMap<u64, LockKey>,
    waiting: HashMap<Who, (LockKey, bool)>,
}

/// What came of a call.
enum Outcome {
    Acquired(Result<AcquireReply, StoreError>),
    Yielded(Result<YieldReply, StoreError>),
    Released(Result<Released, StoreError>),
    Renewed(Vec<RenewReply>),
}

/// A script that came too late was not done: with a better idea of the server's clock it is sent so many times.
const LATE: u32 = 3;
/// How long who lines up waits for the inbox to be heard.
const FIRST_WORD: Duration = Duration::from_millis(250);

impl Shell {
    /// A new process of this name. The same random bits make the same one.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn new(instance: &str, random: u64, settings: Settings) -> Self {
        Self {
            table: Table::default(),
            ids: AcquisitionIds::new(instance, random),
            names: Names::new("lock").expect("a prefix"),
            server_clock: ServerClock::default(),
            settings,
            calls: BTreeMap::new(),
            next: 0,
            watched: Vec::new(),
            next_look: None,
            spins: 0,
            listens: false,
            silent: [0; 2],
            ids_sent: Vec::new(),
            effects: VecDeque::new(),
            memory: Memory::default(),
        }
    }

    /// The channel on which it listens.
    pub fn inbox(&self) -> String {
        self.names.inbox(self.ids.process())
    }

    /// What it wants done next.
    pub fn effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Whether it has something to do with no key.
    pub fn is_idle(&self) -> bool {
        self.table.is_empty() && self.calls.is_empty() && self.watched.is_empty()
    }

    /// Ids of which something may be left.
    pub fn ids_sent(&self) -> impl Iterator<Item = &(LockKey, AcquisitionId)> {
        self.ids_sent.iter()
    }

    /// What it has to do with this key, to be shown.
    pub fn describe(&self) -> String {
        format!("{:?} {:?}", self.table, self.calls)
    }

    // --- what happens ---------------------------------------------------------------------------------------------

    /// Somebody wants the key. Its place, should it have to wait.
    pub fn request(&mut self, now: BootInstant, key: &LockKey, who: Who, wait: Duration, terms: Terms) -> u64 {
        let mut actions = Actions::new();
        self.memory.waiting.insert(who, (key.clone(), !wait.is_zero()));
        let request = Request { waiter: who, wait, owner: None, parent: None, terms };
        let place = self.table.request(key, &LazyNow::fixed(now), &self.ids, request, &mut actions);
        self.perform(now, key, actions);
        place
    }

    /// Whoever has this place has left. Whether it was in the line still.
    pub fn leave(&mut self, now: BootInstant, key: &LockKey, who: Who, place: u64) -> bool {
        let mut actions = Actions::new();
        let ahead = self.table.leave(key, &LazyNow::fixed(now), &self.ids, place, &mut actions);
        self.memory.waiting.remove(&who);
        self.perform(now, key, actions);
        if self.is(Wrong::NoClose) && self.table.waiting_for(key) == 0 {
            let asks = |(_, call): &(&u64, &UnderWay)| call.key == *key && matches!(call.ask, Ask::Acquire(..));
            if let Some((&number, _)) = self.calls.iter().find(asks) {
                self.ended(now, number, Outcome::Acquired(Ok(AcquireReply::Busy { lease_left: Duration::ZERO })));
            }
        }
        ahead.is_some()
    }

    /// A section has ended.
    pub fn guard_ended(&mut self, now: BootInstant, section: &Arc<Section>, ending: Ending) {
        let mut actions = Actions::new();
        self.table.guard_ended(&LazyNow::fixed(now), &self.ids, section, ending, &mut actions);
        self.perform(now, &section.grant.key.clone(), actions);
    }

    /// A message in the inbox.
    pub fn message(&mut self, now: BootInstant, message: &str) {
        match self.names.event(message.as_bytes()) {
            StoreEvent::Offered { key, .. } if self.is(Wrong::SameId) => self.on(now, &key, Event::Gap),
            StoreEvent::Offered { key, id: owner } => {
                if !self.is(Wrong::PushIgnored) || self.table.knows(&key, &owner) {
                    self.on(now, &key, Event::Offered(owner));
                }
            }
            StoreEvent::Revoked { key, id: owner } => {
                if !self.is(Wrong::ForceDeaf) {
                    self.on(now, &key, Event::TakenAway(owner));
                }
            }
            _ => self.gap(now),
        }
    }

    /// The inbox is heard: for the first time, or again.
    pub fn listening(&mut self, now: BootInstant) {
        if self.listens {
            return self.gap(now);
        }
        self.listens = true;
        let waits = |(number, call): (&u64, &UnderWay)| (call.sent == 0).then_some(*number);
        let waiting: Vec<_> = self.calls.iter().filter_map(waits).collect();
        for number in waiting {
            self.run(number);
        }
    }

    /// A script was answered.
    pub fn reply(&mut self, now: BootInstant, message: u64, reply: &Value) {
        let Some(number) = self.call_of(message) else { return self.late_reply(now, message, reply) };
        self.heard(number);
        let Some(outcome) = self.read(now, number, reply) else { return };
        self.ended(now, number, outcome);
    }

    /// The connection of a script broke.
    pub fn cut(&mut self, now: BootInstant, message: u64) {
        let Some(number) = self.call_of(message) else { return };
        let call = &self.calls[&number];
        if call.lane() == Lane::Ends && call.sent == 1 && !self.is(Wrong::OneTry) {
            // Once more, on a new connection: it does no harm, done twice.
            self.run(number);
        } else {
            self.failed(now, number, StoreErrorKind::Unavailable);
        }
    }

    /// It is as late as was asked for.
    pub fn timer(&mut self, now: BootInstant, timer: &Timer) {
        match timer {
            Timer::Call(number) => {
                let Some(call) = self.calls.get(number) else { return };
                let (lane, was_sent) = (call.lane(), call.sent > 0);
                if was_sent {
                    let silent = &mut self.silent[lane as usize];
                    *silent += 1;
                    if *silent >= 3 {
                        *silent = 0;
                        self.effects.push_back(Effect::Replace(lane));
                    }
                }
                self.failed(now, *number, StoreErrorKind::Timeout);
            }
            Timer::FirstWord(number) => {
                if self.calls.get(number).is_some_and(|call| call.sent == 0) {
                    self.run(*number);
                }
            }
            Timer::Conversation(key, at) => self.on(now, key, Event::Time(*at)),
            Timer::Watchdog => self.look(now),
        }
    }

    fn gap(&mut self, now: BootInstant) {
        if self.is(Wrong::NoGapCheckin) {
            return;
        }
        // Not by the table, which knows no order.
        let mut keys: Vec<_> = self.ids_sent.iter().map(|(key, _)| key.clone()).collect();
        keys.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        keys.dedup();
        for key in keys {
            self.on(now, &key, Event::Gap);
        }
    }

    // --- what is done ---------------------------------------------------------------------------------------------

    fn on(&mut self, now: BootInstant, key: &LockKey, event: Event<Simulated>) {
        let mut actions = Actions::new();
        self.table.on(key, &LazyNow::fixed(now), &self.ids, event, &mut actions);
        self.perform(now, key, actions);
    }

    fn perform(&mut self, now: BootInstant, key: &LockKey, actions: Actions<Simulated>) {
        for action in actions {
            match action {
                Action::Send(call) => self.send(now, key, call),
                Action::Start(who, section) => {
                    section.taken();
                    self.memory.waiting.remove(&who);
                    self.effects.push_back(Effect::Turn(who, section));
                }
                Action::Refuse(who, error) => {
                    self.memory.waiting.remove(&who);
                    self.effects.push_back(Effect::Refused(who, error));
                }
                Action::Watch(grant) => {
                    if self.is(Wrong::RecvTime) {
                        grant.extend(grant.lease(), now, now);
                    }
                    self.watch(&grant);
                }
                Action::Doubt(grant) => {
                    if grant.doubt(now) {
                        self.watch(&grant);
                    }
                }
                Action::Forget(grant) => self.forget(&grant),
                // Its turns are taken at once.
                Action::Ended(_) | Action::Outcome(..) | Action::Recall(..) => {}
                Action::WakeAt(_) if self.is(Wrong::NoCheckin) => {}
                Action::WakeAt(at) => self.effects.push_back(Effect::Wake(at, Timer::Conversation(key.clone(), at))),
            }
        }
        let (table, effects) = (&self.table, &mut self.effects);
        let same_id = self.settings.wrong == Some(Wrong::SameId);
        self.ids_sent.retain(|(key, id)| {
            let is_known = table.knows(key, id);
            if !is_known {
                let id = if same_id { the_same(id) } else { id.clone() };
                effects.push_back(Effect::Forgotten(key.clone(), id));
            }
            is_known
        });
    }

    fn sent_id(&mut self, key: &LockKey, id: &AcquisitionId) {
        if self.table.knows(key, id) && !self.ids_sent.iter().any(|(_, sent)| sent == id) {
            self.ids_sent.push((key.clone(), id.clone()));
        }
    }

    fn send(&mut self, now: BootInstant, key: &LockKey, call: Call) {
        let Call { number, owner, verb } = call;
        self.sent_id(key, &owner);
        let ask = match verb {
            Verb::Acquire { if_held, lease } => {
                let patient = self.memory.waiting.values().any(|(wanted, waits)| wanted == key && *waits);
                let if_held = if self.is(Wrong::QFresh) && !patient { IfBusy::Fail } else { if_held };
                let ask = AcquireRequest::new(key.clone(), owner, self.lease(lease), if_held, LINE, STORE_CALL_TIMEOUT);
                Ask::Acquire(number, ask)
            }
            Verb::Yield { fence, next, lease } => {
                self.sent_id(key, &next);
                if self.is(Wrong::NoYield) {
                    let fence = self.memory.fences.entry(key.clone()).or_default();
                    *fence += 1;
                    let fence = *fence;
                    return self.on(now, key, Event::Yielded(number, Ok(YieldReply::Extended { fence })));
                }
                let ask =
                    YieldRequest::new(key.clone(), owner, fence, next, self.lease(lease), LINE, STORE_CALL_TIMEOUT);
                Ask::Yield(number, ask)
            }
            Verb::Release { block_for } => {
                let skipped = match self.settings.wrong {
                    Some(Wrong::LeaveOnce) => self.memory.given_back.contains(&owner),
                    Some(Wrong::NoGivebackUnknown) => self.memory.unknown.contains(&owner),
                    Some(Wrong::YieldClean) => self.memory.yielded.contains(&owner),
                    _ => false,
                };
                if skipped {
                    return self.on(now, key, Event::Released(number, Ok(Released::NotHolder)));
                }
                let frees = self.is(Wrong::AbandonReleases)
                    || self.is(Wrong::RepeatFrees) && self.memory.failed.contains(&owner);
                let block_for = if frees { Duration::ZERO } else { block_for };
                Ask::Release(number, ReleaseRequest::new(key.clone(), owner, block_for, LINE))
            }
        };
        self.call(now, key.clone(), ask);
    }

    fn call(&mut self, now: BootInstant, key: LockKey, mut ask: Ask) {
        if self.is(Wrong::SameId) {
            match &mut ask {
                Ask::Acquire(_, ask) => ask.id = the_same(&ask.id),
                Ask::Yield(_, ask) => (ask.id, ask.next_id) = (the_same(&ask.id), the_same(&ask.next_id)),
                Ask::Release(_, ask) => ask.id = the_same(&ask.id),
                Ask::Renew(..) => {}
            }
        }
        let lines_up = match &ask {
            Ask::Acquire(_, ask) => ask.if_busy == IfBusy::Enqueue,
            Ask::Yield(..) => true,
            Ask::Release(..) | Ask::Renew(..) => false,
        };
        let number = self.number();
        self.calls.insert(number, UnderWay { key, ask, called: now, sent: 0, message: 0 });
        self.effects.push_back(Effect::Wake(now.saturating_add(STORE_CALL_TIMEOUT), Timer::Call(number)));
        if lines_up && !self.listens {
            self.effects.push_back(Effect::Wake(now.saturating_add(FIRST_WORD), Timer::FirstWord(number)));
        } else {
            self.run(number);
        }
    }

    /// What the store does: a script, with the moment after which it is void.
    fn run(&mut self, number: u64) {
        let message = self.number();
        let Some(call) = self.calls.get_mut(&number) else { return };
        call.sent += 1;
        call.message = message;
        let until = if self.settings.wrong == Some(Wrong::NoUntil) {
            1 << 52
        } else {
            self.server_clock.until(call.called, STORE_CALL_TIMEOUT).unwrap_or(0)
        };
        let script = match &mut call.ask {
            Ask::Acquire(_, ask) => self.names.acquire(ask, until).expect("one spelling"),
            Ask::Yield(_, ask) => self.names.yield_to_queue(ask, until).expect("one spelling"),
            Ask::Release(_, ask) => self.names.release(ask).expect("one spelling"),
            Ask::Renew(grants, is_asked) => {
                let asks = grants.iter().map(|(grant, lease)| {
                    let lease = grant.with_delay(*lease);
                    let lease = if self.settings.bare { lease.saturating_sub(LOCK_DELAY) } else { lease };
                    let same_id = self.settings.wrong == Some(Wrong::SameId);
                    let owner = if same_id { the_same(&grant.owner) } else { grant.owner.clone() };
                    RenewRequest::new(grant.key.clone(), owner, lease)
                });
                let (script, asked) = self.names.renew(&asks.collect::<Vec<_>>());
                *is_asked = asked;
                script
            }
        };
        let lane = call.lane();
        self.memory.keys.insert(message, call.key.clone());
        self.effects.push_back(Effect::Run(lane, message, script));
    }

    /// What a reply says. `None`: nothing yet, it is asked once more.
    fn read(&mut self, now: BootInstant, number: u64, reply: &Value) -> Option<Outcome> {
        let call = &self.calls[&number];
        let called = call.called;
        match &call.ask {
            Ask::Acquire(..) => {
                let read = acquired(reply).map_err(|_| not_understood(reply));
                self.in_time(now, number, called, read).map(Outcome::Acquired)
            }
            Ask::Yield(..) => {
                let read = yielded(reply).map_err(|_| not_understood(reply));
                self.in_time(now, number, called, read).map(Outcome::Yielded)
            }
            Ask::Release(..) => Some(Outcome::Released(released(reply).map_err(|_| not_understood(reply)))),
            Ask::Renew(_, is_asked) => Some(Outcome::Renewed(renewed(reply, is_asked).unwrap_or_default())),
        }
    }

    fn in_time<T>(
        &mut self,
        now: BootInstant,
        number: u64,
        called: BootInstant,
        read: Result<(i64, InTime<T>), StoreError>,
    ) -> Option<Result<T, StoreError>> {
        let (server, answer) = match read {
            Ok(read) => read,
            Err(error) => return Some(Err(error)),
        };
        self.server_clock.said(server, if self.is(Wrong::UntilUpper) { called } else { now });
        match answer {
            InTime::Done(answer) => Some(Ok(answer)),
            InTime::Late
                if now.saturating_duration_since(called) < STORE_CALL_TIMEOUT && self.calls[&number].sent < LATE =>
            {
                self.run(number);
                None
            }
            InTime::Late => Some(Err(error(StoreErrorKind::Timeout))),
        }
    }

    fn failed(&mut self, now: BootInstant, number: u64, kind: StoreErrorKind) {
        let Some(call) = self.calls.get(&number) else { return };
        let outcome = match &call.ask {
            Ask::Acquire(..) => Outcome::Acquired(Err(error(kind))),
            Ask::Yield(..) => Outcome::Yielded(Err(error(kind))),
            Ask::Release(..) if self.is(Wrong::OneTry) => Outcome::Released(Ok(Released::NotHolder)),
            Ask::Release(..) => Outcome::Released(Err(error(kind))),
            Ask::Renew(..) => Outcome::Renewed(Vec::new()),
        };
        self.ended(now, number, outcome);
    }

    fn ended(&mut self, now: BootInstant, number: u64, outcome: Outcome) {
        let Some(UnderWay { key, ask, called, .. }) = self.calls.remove(&number) else { return };
        match (ask, outcome) {
            (Ask::Acquire(number, ask), Outcome::Acquired(answer)) => {
                match &answer {
                    Ok(AcquireReply::Granted { fence }) => drop(self.memory.fences.insert(key.clone(), *fence)),
                    Ok(_) => {}
                    Err(_) => drop(self.memory.unknown.insert(ask.id)),
                }
                self.on(now, &key, Event::Acquired(number, answer));
            }
            (Ask::Yield(number, ask), Outcome::Yielded(mut answer)) => {
                match &mut answer {
                    Ok(YieldReply::Extended { fence }) => drop(self.memory.fences.insert(key.clone(), *fence)),
                    Ok(YieldReply::NotHolder(_)) if self.is(Wrong::YieldKeeps) => {
                        let fence = self.memory.fences.entry(key.clone()).or_default();
                        *fence += 1;
                        answer = Ok(YieldReply::Extended { fence: *fence });
                    }
                    Ok(YieldReply::NotHolder(got)) => {
                        self.memory.yielded.insert(ask.id);
                        if let AcquireReply::Granted { fence } = got {
                            self.memory.fences.insert(key.clone(), *fence);
                        }
                    }
                    Ok(_) => {}
                    Err(_) => drop(self.memory.unknown.insert(ask.next_id)),
                }
                self.on(now, &key, Event::Yielded(number, answer));
            }
            (Ask::Release(number, ask), Outcome::Released(answer)) => {
                let which = if answer.is_ok() { &mut self.memory.given_back } else { &mut self.memory.failed };
                which.insert(ask.id);
                self.on(now, &key, Event::Released(number, answer));
            }
            (Ask::Renew(grants, _), Outcome::Renewed(answers)) => {
                let asked = if self.is(Wrong::RenewRecv) { now } else { called };
                for ((grant, lease), answer) in grants.iter().zip(answers) {
                    match answer {
                        RenewReply::Extended => grant.extend(*lease, asked, now),
                        RenewReply::NotHolder => {
                            self.on(now, &grant.key, Event::Lost(grant.owner.clone(), LockLost::Revoked));
                        }
                        _ => {}
                    }
                }
                for (grant, _) in grants {
                    if grant.asked(now) {
                        self.watch(&grant);
                    }
                }
            }
            _ => unreachable!("what was asked is what is answered"),
        }
    }

    /// An answer that nobody waits for any more.
    fn late_reply(&mut self, now: BootInstant, message: u64, reply: &Value) {
        if !self.is(Wrong::NoCorr) {
            return;
        }
        let Some(key) = self.memory.keys.get(&message) else { return };
        let asks = |(_, call): &(&u64, &UnderWay)| call.key == *key && matches!(call.ask, Ask::Acquire(..));
        if let (Some((&number, _)), Ok((_, InTime::Done(answer)))) = (self.calls.iter().find(asks), acquired(reply)) {
            self.ended(now, number, Outcome::Acquired(Ok(answer)));
        }
    }

    fn call_of(&self, message: u64) -> Option<u64> {
        self.calls.iter().find(|(_, call)| call.sent > 0 && call.message == message).map(|(number, _)| *number)
    }

    fn heard(&mut self, number: u64) {
        let lane = self.calls[&number].lane();
        self.silent[lane as usize] = 0;
    }

    fn lease(&self, lease: Duration) -> Duration {
        if self.settings.bare { lease.saturating_sub(LOCK_DELAY) } else { lease }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn is(&self, wrong: Wrong) -> bool {
        self.settings.wrong == Some(wrong)
    }

    // --- what is renewed ------------------------------------------------------------------------------------------

    fn watch(&mut self, grant: &Arc<Grant>) {
        if grant.why().is_some() {
            return;
        }
        self.forget(grant);
        let at = grant.look_at();
        self.watched.push((at, Arc::clone(grant)));
        self.look_by(at);
    }

    /// Whether the store is being asked who has this key, or will be after a pause.
    pub fn asks_about(&self, now: BootInstant, grant: &Arc<Grant>) -> bool {
        let is_it = |other: &Arc<Grant>| Arc::ptr_eq(other, grant);
        let asks = |call: &UnderWay| matches!(&call.ask, Ask::Renew(grants, _) if grants.iter().any(|(grant, _)| is_it(grant)));
        self.calls.values().any(asks) || grant.look_at() <= now.saturating_add(RECHECK_INTERVAL)
    }

    fn forget(&mut self, grant: &Arc<Grant>) {
        self.watched.retain(|(_, watched)| !Arc::ptr_eq(watched, grant));
    }

    fn look_by(&mut self, at: BootInstant) {
        if self.next_look.is_none_or(|look| at < look) {
            self.next_look = Some(at);
            self.effects.push_back(Effect::Wake(at, Timer::Watchdog));
        }
    }

    fn look(&mut self, now: BootInstant) {
        if self.next_look.is_none_or(|look| now < look) {
            return;
        }
        self.next_look = None;
        let soon = now.saturating_add(RENEWAL_BATCH_WINDOW);
        let (needy, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.watched).into_iter().partition(|(at, _)| *at <= soon);
        self.watched = rest;
        let (mut due, mut lost, mut limits) = (Vec::new(), Vec::new(), Vec::new());
        for (_, grant) in needy {
            match grant.need(now, soon) {
                Need::Rest(until) => self.watched.push((until, grant)),
                Need::Renewal(until) => {
                    self.watched.push((until, Arc::clone(&grant)));
                    let lease = grant.lease();
                    due.push((grant, lease));
                }
                Need::HoldLimitReached => limits.push(grant),
                Need::Over => lost.push(grant),
            }
        }
        if let Some(at) = self.watched.iter().map(|(at, _)| *at).min() {
            self.look_by(at.min(now.saturating_add(LEASE / 3)));
        }
        for grant in lost {
            let why = grant.why().unwrap_or(LockLost::Expired);
            self.on(now, &grant.key.clone(), Event::Lost(grant.owner.clone(), why));
        }
        self.spins = if limits.is_empty() { 0 } else { self.spins + 1 };
        if self.spins > 20 {
            self.effects.push_back(Effect::Spins);
        }
        for grant in limits {
            self.on(now, &grant.key.clone(), Event::Limit(grant.owner.clone()));
        }
        if !due.is_empty() && !self.is(Wrong::NoRenew) {
            let key = due[0].0.key.clone();
            self.call(now, key, Ask::Renew(due, Vec::new()));
        }
    }
}

impl UnderWay {
    fn lane(&self) -> Lane {
        match self.ask {
            Ask::Acquire(..) | Ask::Yield(..) => Lane::Asks,
            Ask::Release(..) | Ask::Renew(..) => Lane::Ends,
        }
    }
}

fn the_same(id: &AcquisitionId) -> AcquisitionId {
    AcquisitionId::from_text(&format!("{}:0", id.manager()))
}

fn error(kind: StoreErrorKind) -> StoreError {
    StoreError::new("simulated", "answer", kind)
}

fn not_understood(reply: &Value) -> StoreError {
    match reply {
        Value::SimpleString(text) if text.starts_with('-') => error(StoreErrorKind::Refused),
        _ => error(StoreErrorKind::Protocol),
    }
}
