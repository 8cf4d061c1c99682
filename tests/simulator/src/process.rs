//! A process: the lock state machine, with simulated tasks and sockets around it.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    slice,
    sync::Arc,
    time::Duration,
};

use tower_lock::{
    __internals::{
        proto::{
            self, Action, Actions, BootInstant, Calls, DriverTypes, Event, EventContext, FreeKey, FreeKeys, GuardEnd,
            HoldLimits, LEASE, LOCK_DELAY, LazyNow, LeaseBounds, LockRequest, LockTable, NextCheck, Numbered, QUEUE,
            RECHECK_INTERVAL, RENEWAL_BATCH_WINDOW, Redeemed, ReleaseOutcome, Requested, STORE_CALL_TIMEOUT, Sharing,
        },
        redis_wire::{KeyReplies, Keyspace, ScriptCall, Timed, parse_acquire, parse_release, parse_renew, parse_yield},
        remote::{ServerClock, next_call},
    },
    AcquisitionId, LockError, LockKey, LockLost,
    deadpool_redis::redis::Value,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, Demand, Heir, IfBusy, Record, ReleaseReply, ReleaseRequest,
        RenewReply, RenewRequest, StoreError, StoreErrorKind, StoreEvent, YieldReply, YieldRequest,
    },
};

use crate::mutants::Mutation;

/// The number of a client in the simulation.
pub type ClientId = u32;

/// The types of this driver.
#[derive(Debug)]
pub enum Simulated {}

impl DriverTypes for Simulated {
    type Waiter = ClientId;
    type GrantData = ();
    type SectionData = ();
}

/// A grant of the simulation.
pub type Grant = proto::Grant<Simulated>;
/// A section of the simulation.
pub type Section = proto::Section<Simulated>;

/// A process.
#[derive(Debug)]
pub struct SimProcess {
    table: LockTable<Simulated>,
    ids: AcquisitionIds,
    names: Keyspace,
    server_clock: ServerClock,
    settings: Settings,
    /// Calls without a reply.
    calls: BTreeMap<u64, InFlightCall>,
    /// The calls of each connection that wait for the next shared one.
    waiting: [VecDeque<u64>; 2],
    shared: BTreeMap<u64, SharedCall>,
    next: u64,
    /// Grants, with the instant of their next check.
    watched: Vec<(BootInstant, Arc<Grant>)>,
    next_sweep: Option<BootInstant>,
    /// Successive sweeps in which only a hold limit was due.
    idle_sweeps: u32,
    /// Whether the subscription was ever confirmed.
    subscribed: bool,
    /// Successive timeouts of each connection.
    timeouts: [u32; 2],
    /// Ids that were sent and are not forgotten.
    ids_sent: Vec<(LockKey, AcquisitionId)>,
    effects: VecDeque<Effect>,
    /// State of the mutants.
    mutant_memory: MutantMemory,
}

/// The settings of a process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// Requests only the lease from the store, without the lock-delay that would hide an overlap.
    pub bare: bool,
    /// The mutation, if any.
    pub mutation: Option<Mutation>,
    /// Acquires share calls, and so do releases.
    pub batches: bool,
}

/// An effect that the process requests.
#[derive(Debug)]
pub enum Effect {
    /// Run a script; its reply has this number.
    Run(ConnectionKind, u64, ScriptCall),
    /// Replace this connection: it does not respond.
    Replace(ConnectionKind),
    /// Fire a timer.
    Wake(BootInstant, Timer),
    /// A call was granted.
    Granted(ClientId, Arc<Section>),
    /// A newer client waits for the end of a section.
    Superseded(Arc<Section>),
    /// A call was rejected.
    Rejected(ClientId, LockError),
    /// A call was answered with the record of its key.
    Recorded(ClientId, Arc<Record>),
    /// The ticket of a client does not hold its key.
    TicketRefused(ClientId),
    /// The process has no more data of this id, and expects none.
    Forgotten(LockKey, AcquisitionId),
    /// The watchdog wakes itself repeatedly without effect.
    BusyLoop,
}

/// The two connections: releases do not queue behind acquires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectionKind {
    /// `acquire` and `yield`.
    Acquires,
    /// `release` and `renew`.
    Releases,
}

/// A timer.
#[derive(Clone, Debug)]
pub enum Timer {
    /// A call has timed out.
    Call(u64),
    /// The wait for the first confirmation of the subscription has timed out.
    SubscribeWait(u64),
    /// The entry of a key requested it.
    Wakeup(LockKey, BootInstant),
    /// Grants may need a renewal.
    Watchdog,
}

#[derive(Debug)]
struct InFlightCall {
    key: LockKey,
    operation: Operation,
    called: BootInstant,
    /// The number of times it was sent. Zero: it waits for the subscription.
    sent: u32,
    message: u64,
}

/// One script for several calls.
#[derive(Debug)]
struct SharedCall {
    /// The calls, in the order of the requests.
    calls: Vec<u64>,
    requests: Requests,
    /// The instant of the first one.
    called: BootInstant,
    /// As in [`InFlightCall`].
    sent: u32,
    message: u64,
}

#[derive(Clone, Debug)]
enum Requests {
    Acquires(Vec<AcquireRequest>),
    Releases(Vec<ReleaseRequest>),
}

#[derive(Clone, Debug)]
enum Operation {
    Acquire(u64, AcquireRequest),
    /// In place of a ticket.
    Redeem(AcquireRequest, Step),
    Yield(u64, YieldRequest),
    Release(u64, ReleaseRequest),
    /// Grants, each with its lease at the time of the request.
    Renew(Vec<(Arc<Grant>, Duration)>),
}

/// A client that presents a ticket.
#[derive(Clone, Debug)]
pub struct Step {
    /// The client.
    pub client: ClientId,
    /// The ticket, and for how long it holds its key after this step has failed.
    pub ticket: Arc<Heir>,
    /// The limits of the section.
    pub limits: HoldLimits,
}

/// The state that mutants need.
#[derive(Debug, Default)]
struct MutantMemory {
    fences: HashMap<LockKey, u64>,
    released: HashSet<AcquisitionId>,
    unanswered: HashSet<AcquisitionId>,
    yielded: HashSet<AcquisitionId>,
    failed: HashSet<AcquisitionId>,
    keys: HashMap<u64, LockKey>,
    /// Whether they wait, and whether they get records.
    waiting: HashMap<ClientId, (LockKey, bool, bool)>,
    /// Keys that the store has granted whether they had a record or not.
    plain_grants: HashSet<LockKey>,
    tickets: HashMap<AcquisitionId, Arc<Heir>>,
}

/// The outcome of a call.
enum Outcome {
    Acquired(Result<AcquireReply, StoreError>),
    Yielded(Result<YieldReply, StoreError>),
    Released(Result<ReleaseReply, StoreError>),
    Renewed(Vec<RenewReply>),
}

/// A script that reached the server too late is sent again with a better estimate of its clock, up
/// to this often.
const MAX_SENDS: u32 = 3;
/// The shared calls of one connection that are under way at once.
const MAX_SHARED_CALLS: usize = 2;
/// How long an acquire waits for its shared call.
const SHARED_CALL_WAIT: Duration = STORE_CALL_TIMEOUT.checked_div(2).expect("not zero");
/// The bounds of all leases.
const BOUNDS: LeaseBounds = LeaseBounds { longest: LEASE, call_timeout: STORE_CALL_TIMEOUT };
/// How long a call that enqueues waits for the first confirmation of the subscription.
const SUBSCRIBE_WAIT: Duration = Duration::from_millis(250);

impl SimProcess {
    /// A new process. The same random bits give the same process.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn new(instance: &str, random: u64, settings: Settings) -> Self {
        Self {
            table: LockTable::default(),
            ids: AcquisitionIds::new(instance, random),
            names: Keyspace::new("lock").expect("a prefix"),
            server_clock: ServerClock::default(),
            settings,
            calls: BTreeMap::new(),
            waiting: Default::default(),
            shared: BTreeMap::new(),
            next: 0,
            watched: Vec::new(),
            next_sweep: None,
            idle_sweeps: 0,
            subscribed: false,
            timeouts: [0; 2],
            ids_sent: Vec::new(),
            effects: VecDeque::new(),
            mutant_memory: MutantMemory::default(),
        }
    }

    /// The channel of its messages.
    pub fn inbox(&self) -> String {
        self.names.inbox(self.ids.manager())
    }

    /// The next requested effect.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Whether it has no work for any key.
    pub fn is_idle(&self) -> bool {
        self.table.is_empty() && self.calls.is_empty() && self.watched.is_empty()
    }

    /// Ids of which the server may have data.
    pub fn ids_sent(&self) -> impl Iterator<Item = &(LockKey, AcquisitionId)> {
        self.ids_sent.iter()
    }

    /// Its internal state, for display.
    pub fn describe(&self) -> String {
        format!("{:?} {:?}", self.table, self.calls)
    }

    // --- events ---

    /// Requests the key. Returns the number of the request, if its result follows.
    pub fn request(
        &mut self,
        now: BootInstant,
        key: &LockKey,
        mut request: LockRequest<ClientId>,
        free_keys: Option<&dyn FreeKeys>,
    ) -> u64 {
        let client = request.waiter;
        self.mutant_memory
            .waiting
            .insert(request.waiter, (key.clone(), !request.wait.is_zero(), request.demand.unless_recorded));
        match self.settings.mutation {
            Some(Mutation::RecordForPlain) => request.demand.unless_recorded = true,
            Some(Mutation::JoinPlainGrant) if self.mutant_memory.plain_grants.contains(key) => {
                request.demand.unless_recorded = false;
            }
            Some(Mutation::ShareForAlone) if request.sharing == Sharing::Alone => request.sharing = Sharing::Permit(4),
            Some(Mutation::JoinOwner) if request.owner.is_some() => request.demand.unless_recorded = false,
            _ => {}
        }
        let request = request.map_waiter(|client| move || client);
        let free_keys = free_keys.filter(|_| request.demand == Demand::new());
        let free = free_keys.and_then(|free_keys| {
            let id = self.ids.next();
            let (lease, lock_delay) = request.limits.lease_and_lock_delay(BOUNDS);
            let fence = free_keys.acquire(key, &id, lease + lock_delay, None)?;
            Some(FreeKey { id, fence, sent_at: now })
        });
        let requested = self.drive(now, |table, cx, actions| table.request(key, cx, request, free, actions));
        match requested {
            Requested::Waiting(ticket, _) => ticket,
            Requested::Granted(section) => {
                self.watch(&section.grant);
                self.track_id(key, &section.grant.id);
                self.mutant_memory.waiting.remove(&client);
                self.effects.push_back(Effect::Granted(client, section));
                0
            }
        }
    }

    /// Presents a ticket, as `LockManager::redeem` does.
    pub fn redeem(&mut self, now: BootInstant, key: &LockKey, step: Step) {
        let (lease, lock_delay) = step.limits.lease_and_lock_delay(BOUNDS);
        let lease = self.lease(lease.saturating_add(lock_delay));
        let request = AcquireRequest::new(key.clone(), self.ids.next(), lease, IfBusy::Fail, QUEUE, STORE_CALL_TIMEOUT)
            .in_place_of(Some(step.ticket.id.clone()));
        self.call(now, key.clone(), Operation::Redeem(request, step));
    }

    /// Drops the future of a client that has presented a ticket.
    pub fn stop_redeeming(&mut self, now: BootInstant, client: ClientId) {
        let is_it =
            |call: &InFlightCall| matches!(&call.operation, Operation::Redeem(_, step) if step.client == client);
        let number = self.calls.iter().find_map(|(number, call)| is_it(call).then_some(*number));
        if let Some(InFlightCall { key, operation: Operation::Redeem(request, step), .. }) =
            number.and_then(|number| self.calls.remove(&number))
        {
            self.leave_to_ticket(now, &key, request.id, &step.ticket);
        }
    }

    /// The outcome of the call is unknown, so the key goes back to its ticket (I8).
    fn leave_to_ticket(&mut self, now: BootInstant, key: &LockKey, id: AcquisitionId, ticket: &Arc<Heir>) {
        self.ids_sent.push((key.clone(), id.clone()));
        let until = now.saturating_add(STORE_CALL_TIMEOUT);
        let is_forgotten = self.is(Mutation::NoReturnToTicket);
        self.drive(now, |table, cx, actions| {
            if !is_forgotten {
                table.leave_to_ticket(key, cx, id, ticket, until, actions);
            }
        });
    }

    fn on_redeemed(
        &mut self,
        (now, called): (BootInstant, BootInstant),
        key: &LockKey,
        (id, step): (AcquisitionId, Step),
        reply: Result<AcquireReply, StoreError>,
    ) {
        let Step { client, ticket, limits } = step;
        match reply {
            Ok(AcquireReply::Granted { fence, .. }) => {
                self.ids_sent.push((key.clone(), id.clone()));
                self.mutant_memory.tickets.insert(id.clone(), Arc::clone(&ticket));
                let redeemed = Redeemed { id, fence, sent_at: called, owner: None, limits, trace: None };
                let section = self.drive(now, |table, cx, actions| table.redeem(key, cx, redeemed, &ticket, actions));
                self.effects.push_back(match section {
                    Some(section) => Effect::Granted(client, section),
                    None => Effect::Rejected(client, error(StoreErrorKind::Timeout).into()),
                });
            }
            Ok(_) => {
                self.effects.push_back(Effect::Forgotten(key.clone(), id));
                self.effects.push_back(Effect::TicketRefused(client));
            }
            Err(error) => {
                self.leave_to_ticket(now, key, id, &ticket);
                self.effects.push_back(Effect::Rejected(client, error.into()));
            }
        }
    }

    /// Cancels a request. Returns whether it was still queued.
    pub fn leave(&mut self, now: BootInstant, key: &LockKey, client: ClientId, ticket: u64) -> bool {
        let ahead = self.drive(now, |table, cx, actions| table.cancel(key, cx, ticket, actions));
        self.mutant_memory.waiting.remove(&client);
        if self.is(Mutation::NoWaitForReply) && self.table.waiting_for(key) == 0 {
            let is_acquire = |(_, call): &(&u64, &InFlightCall)| {
                call.key == *key && matches!(call.operation, Operation::Acquire(..))
            };
            if let Some((&number, _)) = self.calls.iter().find(is_acquire) {
                self.finish(now, number, Outcome::Acquired(Ok(AcquireReply::busy(Duration::ZERO))));
            }
        }
        ahead.is_some()
    }

    /// Ends a section.
    pub fn guard_ended(
        &mut self,
        now: BootInstant,
        section: &Arc<Section>,
        mut ending: GuardEnd,
        free_keys: Option<&dyn FreeKeys>,
    ) {
        let key = &section.grant.key;
        let ticket = self.mutant_memory.tickets.get(&section.grant.id);
        if let Some(ticket) = ticket.filter(|_| ending == GuardEnd::Dropped && self.is(Mutation::DroppedIsKept)) {
            ending = GuardEnd::Kept(Arc::clone(ticket));
        }
        let is_delayed = section.grant.id.is_replaceable() && self.is(Mutation::DelayAfterReplaced);
        if is_delayed && ending == GuardEnd::ReleasedAfterFailure {
            ending = GuardEnd::Dropped;
        }
        let outcome = self.drive(now, |table, mut cx, actions| {
            cx.frees_keys = free_keys.is_some();
            let outcome = table.end_guard(cx, section, ending, actions);
            if outcome == Some(ReleaseOutcome::Released)
                && !free_keys.is_some_and(|free_keys| free_keys.release(key, &section.grant.id))
            {
                table.handle_event(key, cx, Event::NotFreed(Arc::clone(section)), actions);
            }
            outcome
        });
        if outcome == Some(ReleaseOutcome::Released) {
            self.forget(&section.grant);
        }
    }

    /// Handles a message.
    pub fn on_message(&mut self, now: BootInstant, message: &str) {
        match self.names.parse_event(message.as_bytes()) {
            StoreEvent::Offered { key, .. } if self.is(Mutation::SameId) => self.on(now, &key, Event::Lagged),
            StoreEvent::Offered { key, id } => {
                if !self.is(Mutation::IgnoreStaleOffer) || self.table.tracks(&key, &id) {
                    self.on(now, &key, Event::Offered(id));
                }
            }
            StoreEvent::Revoked { key, id } => {
                if !self.is(Mutation::IgnoreRevocation) {
                    self.on(now, &key, Event::Revoked(id));
                }
            }
            _ => self.on_gap(now),
        }
    }

    /// Handles a message that this key may be free.
    pub fn on_freed(&mut self, now: BootInstant, key: &LockKey) {
        self.on(now, key, Event::Freed);
    }

    /// Handles a confirmed subscription, the first one or a later one.
    pub fn on_subscribed(&mut self, now: BootInstant) {
        if self.subscribed {
            return self.on_gap(now);
        }
        self.subscribed = true;
        let waits =
            |(number, call): (&u64, &InFlightCall)| (call.sent == 0 && !self.is_shared(call)).then_some(*number);
        let waiting: Vec<_> = self.calls.iter().filter_map(waits).collect();
        for number in waiting {
            self.run(number);
        }
        let shared: Vec<_> =
            self.shared.iter().filter_map(|(number, call)| (call.sent == 0).then_some(*number)).collect();
        for number in shared {
            self.run_shared(now, number);
        }
    }

    /// Handles a reply.
    pub fn on_reply(&mut self, now: BootInstant, message: u64, reply: &Value) {
        if let Some(number) = self.shared_call_of(message) {
            return self.on_shared_reply(now, number, reply);
        }
        let Some(number) = self.call_of(message) else { return self.on_late_reply(now, message, reply) };
        self.reset_timeouts(number);
        let Some(outcome) = self.decode(now, number, reply) else { return };
        self.finish(now, number, outcome);
    }

    /// Handles a broken connection.
    pub fn on_disconnect(&mut self, now: BootInstant, message: u64) {
        if let Some(number) = self.shared_call_of(message) {
            let call = &self.shared[&number];
            let is_repeated = call.requests.connection_kind() == ConnectionKind::Releases && call.sent == 1;
            return if is_repeated && !self.is(Mutation::NoReleaseRetry) {
                self.run_shared(now, number);
            } else {
                self.fail_shared(now, number, StoreErrorKind::Unavailable);
            };
        }
        let Some(number) = self.call_of(message) else { return };
        let call = &self.calls[&number];
        if call.connection_kind() == ConnectionKind::Releases && call.sent == 1 && !self.is(Mutation::NoReleaseRetry) {
            // Repeated once on a new connection: the script is idempotent.
            self.run(number);
        } else {
            self.fail(now, number, StoreErrorKind::Unavailable);
        }
    }

    /// Handles a timer.
    pub fn on_timer(&mut self, now: BootInstant, timer: &Timer) {
        match timer {
            Timer::Call(number) => {
                if let Some(call) = self.shared.get(number) {
                    self.count_timeout(call.requests.connection_kind());
                    return self.fail_shared(now, *number, StoreErrorKind::Timeout);
                }
                let Some(call) = self.calls.get(number) else { return };
                let (kind, was_sent) = (call.connection_kind(), call.sent > 0);
                if was_sent {
                    self.count_timeout(kind);
                }
                self.fail(now, *number, StoreErrorKind::Timeout);
            }
            Timer::SubscribeWait(number) => {
                if self.shared.get(number).is_some_and(|call| call.sent == 0) {
                    return self.run_shared(now, *number);
                }
                if self.calls.get(number).is_some_and(|call| call.sent == 0) {
                    self.run(*number);
                }
            }
            Timer::Wakeup(key, at) => self.on(now, key, Event::Timer(*at)),
            Timer::Watchdog => self.sweep(now),
        }
    }

    /// A connection without replies is replaced.
    fn count_timeout(&mut self, kind: ConnectionKind) {
        let timeouts = &mut self.timeouts[kind as usize];
        *timeouts += 1;
        if *timeouts >= 3 {
            *timeouts = 0;
            self.effects.push_back(Effect::Replace(kind));
        }
    }

    fn on_gap(&mut self, now: BootInstant) {
        if self.is(Mutation::NoPollAfterGap) {
            return;
        }
        // In a fixed order: the table has none.
        let mut keys: Vec<_> = self.ids_sent.iter().map(|(key, _)| key.clone()).collect();
        keys.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        keys.dedup();
        for key in keys {
            self.on(now, &key, Event::Lagged);
        }
    }

    // --- actions ---

    fn on(&mut self, now: BootInstant, key: &LockKey, event: Event<Simulated>) {
        self.drive(now, |table, cx, actions| table.handle_event(key, cx, event, actions));
    }

    fn drive<T>(
        &mut self,
        now: BootInstant,
        event: impl FnOnce(&mut LockTable<Simulated>, EventContext<'_>, &mut Actions<Simulated>) -> T,
    ) -> T {
        let mut actions = Actions::new();
        let time = LazyNow::fixed(now);
        let result =
            event(&mut self.table, EventContext { now: &time, ids: &self.ids, frees_keys: false }, &mut actions);
        self.execute(now, actions);
        result
    }

    fn execute(&mut self, now: BootInstant, actions: Actions<Simulated>) {
        let Actions { list, calls: Calls { releases, acquires, yields } } = actions;
        for action in list {
            match action {
                Action::Grant(client, section) => {
                    section.delivered();
                    self.mutant_memory.waiting.remove(&client);
                    self.effects.push_back(Effect::Granted(client, section));
                }
                Action::Reject(client, error) => {
                    self.mutant_memory.waiting.remove(&client);
                    self.effects.push_back(Effect::Rejected(client, error));
                }
                Action::Recorded(client, record) => {
                    self.mutant_memory.waiting.remove(&client);
                    self.effects.push_back(Effect::Recorded(client, record));
                }
                Action::Track(grant) => {
                    if self.is(Mutation::DeadlineFromReply) {
                        grant.extend(grant.lease(), now, now);
                    }
                    self.watch(&grant);
                }
                Action::Verify(grant) => {
                    if grant.verify(now) {
                        self.watch(&grant);
                    }
                }
                Action::Untrack(grant) => self.forget(&grant),
                // Grants are taken at once.
                Action::Superseded(section) => self.effects.push_back(Effect::Superseded(section)),
                Action::Lost(..)
                | Action::RecordLost(_)
                | Action::SectionEnded(_)
                | Action::ReleaseOutcome(..)
                | Action::Recall(..) => {}
                Action::SendWaiting(key) => self.on(now, &key, Event::MaySendRelease),
                Action::WakeAt(..) if self.is(Mutation::NoPolls) => {}
                Action::WakeAt(key, at) => self.effects.push_back(Effect::Wake(at, Timer::Wakeup(key, at))),
            }
        }
        for ((key, number), request) in releases.into_iter().flat_map(Numbered::into_requests) {
            self.send_release(now, &key, number, request);
        }
        for ((key, number), request) in acquires.into_iter().flat_map(Numbered::into_requests) {
            self.send_acquire(now, &key, number, request);
        }
        for ((key, number), request) in yields.into_iter().flat_map(Numbered::into_requests) {
            self.send_yield(now, &key, number, request);
        }
        let (table, effects) = (&mut self.table, &mut self.effects);
        let same_id = self.settings.mutation == Some(Mutation::SameId);
        self.ids_sent.retain(|(key, id)| {
            let is_known = table.tracks(key, id);
            if !is_known {
                let id = if same_id { without_sequence(id) } else { id.clone() };
                effects.push_back(Effect::Forgotten(key.clone(), id));
            }
            is_known
        });
    }

    fn track_id(&mut self, key: &LockKey, id: &AcquisitionId) {
        if self.table.tracks(key, id) && !self.ids_sent.iter().any(|(_, sent)| sent == id) {
            self.ids_sent.push((key.clone(), id.clone()));
        }
    }

    fn send_release(&mut self, now: BootInstant, key: &LockKey, number: u64, mut request: ReleaseRequest) {
        let id = request.id.clone();
        self.track_id(key, &id);
        let skipped = match self.settings.mutation {
            Some(Mutation::ReleaseOnce) => self.mutant_memory.released.contains(&id),
            // The release without a call would be the only one.
            Some(Mutation::FreeDespiteDoubt) => {
                self.mutant_memory.released.contains(&id) && self.mutant_memory.unanswered.contains(&id)
            }
            Some(Mutation::NoReleaseInDoubt) => self.mutant_memory.unanswered.contains(&id),
            Some(Mutation::ForgetYieldedId) => self.mutant_memory.yielded.contains(&id),
            _ => false,
        };
        if skipped {
            return self.on(now, key, Event::Released(number, Ok(ReleaseReply::NotHolder)));
        }
        let without_delay = self.is(Mutation::NoLockDelay)
            || self.is(Mutation::NoLockDelayOnRetry) && self.mutant_memory.failed.contains(&id);
        if without_delay {
            request.block_for = Duration::ZERO;
        }
        self.mutant_memory.plain_grants.remove(key);
        let without_record = self.is(Mutation::NoRecordOnRetry) && self.mutant_memory.failed.contains(&id);
        if without_record {
            request.record = None;
        }
        let (released, failed) = (&self.mutant_memory.released, &self.mutant_memory.failed);
        if self.is(Mutation::NoHeirOnRetry) && (released.contains(&id) || failed.contains(&id)) {
            request.heir = None;
        }
        if let Some(new) = request.record.as_ref().filter(|_| self.is(Mutation::RecordBeforeReply)) {
            let waiting = &self.mutant_memory.waiting;
            let duplicates = waiting.iter().filter(|(_, (wanted, ..))| wanted == key);
            let first = duplicates.filter(|(_, (.., unless_recorded))| *unless_recorded).map(|(id, _)| *id).min();
            let record = Arc::new(new.record.clone());
            self.effects.extend(first.map(|client| Effect::Recorded(client, record)));
        }
        self.call(now, key.clone(), Operation::Release(number, request));
    }

    fn send_acquire(&mut self, now: BootInstant, key: &LockKey, number: u64, mut request: AcquireRequest) {
        self.track_id(key, &request.id);
        let is_waiting = self.mutant_memory.waiting.values().any(|(wanted, waits, _)| wanted == key && *waits);
        if self.is(Mutation::EnqueuePerCall) && !is_waiting {
            request.if_busy = IfBusy::Fail;
        }
        request.lease = self.lease(request.lease);
        self.call(now, key.clone(), Operation::Acquire(number, request));
    }

    fn send_yield(&mut self, now: BootInstant, key: &LockKey, number: u64, mut request: YieldRequest) {
        self.track_id(key, &request.id);
        self.track_id(key, &request.next_id);
        if self.is(Mutation::NoYield) {
            let fence = self.mutant_memory.fences.entry(key.clone()).or_default();
            *fence += 1;
            let fence = *fence;
            return self.on(now, key, Event::Yielded(number, Ok(YieldReply::Extended { fence })));
        }
        request.lease = self.lease(request.lease);
        self.call(now, key.clone(), Operation::Yield(number, request));
    }

    fn call(&mut self, now: BootInstant, key: LockKey, mut operation: Operation) {
        if self.is(Mutation::SameId) {
            match &mut operation {
                Operation::Acquire(_, request) | Operation::Redeem(request, _) => {
                    request.id = without_sequence(&request.id);
                }
                Operation::Yield(_, request) => {
                    (request.id, request.next_id) = (without_sequence(&request.id), without_sequence(&request.next_id));
                }
                Operation::Release(_, request) => request.id = without_sequence(&request.id),
                Operation::Renew(..) => {}
            }
        }
        let wants_queue = match &operation {
            Operation::Acquire(_, request) => request.if_busy == IfBusy::Enqueue,
            Operation::Yield(..) => true,
            Operation::Redeem(..) | Operation::Release(..) | Operation::Renew(..) => false,
        };
        let number = self.number();
        let call = InFlightCall { key, operation, called: now, sent: 0, message: 0 };
        let shares = self.is_shared(&call).then(|| call.connection_kind());
        self.calls.insert(number, call);
        if let Some(kind) = shares {
            self.waiting[kind as usize].push_back(number);
            return self.share_calls(now, kind);
        }
        self.effects.push_back(Effect::Wake(now.saturating_add(STORE_CALL_TIMEOUT), Timer::Call(number)));
        if wants_queue && !self.subscribed {
            self.effects.push_back(Effect::Wake(now.saturating_add(SUBSCRIBE_WAIT), Timer::SubscribeWait(number)));
        } else {
            self.run(number);
        }
    }

    /// The time after which a call expires, by the server's clock.
    fn expiry(&self, called: BootInstant) -> i64 {
        if self.is(Mutation::NoCallExpiry) {
            1 << 52
        } else {
            self.server_clock.expires_at(called, STORE_CALL_TIMEOUT).unwrap_or(0)
        }
    }

    /// Sends the script of a call, with the time after which it expires.
    fn run(&mut self, number: u64) {
        let message = self.number();
        let Some(called) = self.calls.get(&number).map(|call| call.called) else { return };
        let until = self.expiry(called);
        let call = self.calls.get_mut(&number).expect("found above");
        call.sent += 1;
        call.message = message;
        let script = match &mut call.operation {
            Operation::Acquire(_, request) | Operation::Redeem(request, _) => {
                self.names.acquire(slice::from_ref(request), until).expect("a valid name")
            }
            Operation::Yield(_, request) => self.names.yield_to_queue(request, until).expect("a valid name"),
            Operation::Release(_, request) => self.names.release(slice::from_ref(request)).expect("a valid name"),
            Operation::Renew(grants) => {
                let requests = grants.iter().map(|(grant, lease)| {
                    let lease = grant.store_lease(*lease);
                    let lease = if self.settings.bare { lease.saturating_sub(LOCK_DELAY) } else { lease };
                    let same_id = self.settings.mutation == Some(Mutation::SameId);
                    let id = if same_id { without_sequence(&grant.id) } else { grant.id.clone() };
                    RenewRequest::new(grant.key.clone(), id, lease)
                });
                self.names.renew(&requests.collect::<Vec<_>>(), true)
            }
        };
        let kind = call.connection_kind();
        self.mutant_memory.keys.insert(message, call.key.clone());
        self.effects.push_back(Effect::Run(kind, message, script));
    }

    /// Decodes a reply. `None`: the call was sent again.
    fn decode(&mut self, now: BootInstant, number: u64, reply: &Value) -> Option<Outcome> {
        let call = &self.calls[&number];
        let called = call.called;
        match &call.operation {
            Operation::Acquire(..) | Operation::Redeem(..) => {
                let read = parse_acquire(reply, 1).map_err(|_| unexpected_reply(reply)).map(one_of);
                self.check_expiry(now, number, called, read).map(Outcome::Acquired)
            }
            Operation::Yield(..) => {
                let read = parse_yield(reply).map_err(|_| unexpected_reply(reply));
                self.check_expiry(now, number, called, read).map(Outcome::Yielded)
            }
            Operation::Release(..) => {
                let read = parse_release(reply, 1).map_err(|_| unexpected_reply(reply));
                Some(Outcome::Released(
                    read.map(|mut replies| replies.remove(0).expect("only one of several fails alone")),
                ))
            }
            Operation::Renew(grants) => Some(Outcome::Renewed(parse_renew(reply, grants.len()).unwrap_or_default())),
        }
    }

    fn check_expiry<T>(
        &mut self,
        now: BootInstant,
        number: u64,
        called: BootInstant,
        read: Result<(i64, Timed<T>), StoreError>,
    ) -> Option<Result<T, StoreError>> {
        let (server, reply) = match read {
            Ok(read) => read,
            Err(error) => return Some(Err(error)),
        };
        self.server_clock.observe(server, if self.is(Mutation::ClockFromRequest) { called } else { now });
        match reply {
            Timed::Done(reply) => Some(Ok(reply)),
            Timed::Expired
                if now.saturating_duration_since(called) < STORE_CALL_TIMEOUT
                    && self.calls[&number].sent < MAX_SENDS =>
            {
                self.run(number);
                None
            }
            Timed::Expired => Some(Err(error(StoreErrorKind::Timeout))),
        }
    }

    fn fail(&mut self, now: BootInstant, number: u64, kind: StoreErrorKind) {
        let Some(call) = self.calls.get(&number) else { return };
        let outcome = match &call.operation {
            Operation::Acquire(..) | Operation::Redeem(..) => Outcome::Acquired(Err(error(kind))),
            Operation::Yield(..) => Outcome::Yielded(Err(error(kind))),
            Operation::Release(..) if self.is(Mutation::NoReleaseRetry) => {
                Outcome::Released(Ok(ReleaseReply::NotHolder))
            }
            Operation::Release(..) => Outcome::Released(Err(error(kind))),
            Operation::Renew(..) => Outcome::Renewed(Vec::new()),
        };
        self.finish(now, number, outcome);
    }

    fn finish(&mut self, now: BootInstant, number: u64, outcome: Outcome) {
        let Some(InFlightCall { key, operation, called, .. }) = self.calls.remove(&number) else { return };
        match (operation, outcome) {
            (Operation::Acquire(number, request), Outcome::Acquired(reply)) => {
                self.note_grant(&key, request.demand.unless_recorded);
                match &reply {
                    Ok(AcquireReply::Granted { fence, .. }) => {
                        self.mutant_memory.fences.insert(key.clone(), *fence);
                    }
                    Ok(_) => {}
                    Err(_) => drop(self.mutant_memory.unanswered.insert(request.id)),
                }
                self.on(now, &key, Event::Acquired(number, reply));
            }
            (Operation::Redeem(request, step), Outcome::Acquired(reply)) => {
                self.on_redeemed((now, called), &key, (request.id, step), reply);
            }
            (Operation::Yield(number, request), Outcome::Yielded(mut reply)) => {
                match &mut reply {
                    Ok(YieldReply::Extended { fence }) => drop(self.mutant_memory.fences.insert(key.clone(), *fence)),
                    Ok(YieldReply::NotHolder(_)) if self.is(Mutation::HoldAfterYield) => {
                        let fence = self.mutant_memory.fences.entry(key.clone()).or_default();
                        *fence += 1;
                        reply = Ok(YieldReply::Extended { fence: *fence });
                    }
                    Ok(YieldReply::NotHolder(got)) => {
                        self.note_grant(&key, request.demand.unless_recorded);
                        self.mutant_memory.yielded.insert(request.id);
                        if let AcquireReply::Granted { fence, .. } = got {
                            self.mutant_memory.fences.insert(key.clone(), *fence);
                        }
                    }
                    Ok(_) => {}
                    Err(_) => drop(self.mutant_memory.unanswered.insert(request.next_id)),
                }
                self.on(now, &key, Event::Yielded(number, reply));
            }
            (Operation::Release(number, request), Outcome::Released(mut reply)) => {
                if self.is(Mutation::RecordDespiteLoss) && request.record.is_some() && reply.is_ok() {
                    reply = Ok(ReleaseReply::RecordedBefore);
                }
                let which =
                    if reply.is_ok() { &mut self.mutant_memory.released } else { &mut self.mutant_memory.failed };
                which.insert(request.id);
                self.on(now, &key, Event::Released(number, reply));
            }
            (Operation::Renew(grants), Outcome::Renewed(replies)) => {
                let sent_at = if self.is(Mutation::RenewalFromReply) { now } else { called };
                for ((grant, lease), reply) in grants.iter().zip(replies) {
                    match reply {
                        RenewReply::Extended => grant.extend(*lease, sent_at, now),
                        RenewReply::Superseded => {
                            grant.extend(*lease, sent_at, now);
                            self.on(now, &grant.key, Event::Superseded(grant.id.clone()));
                        }
                        RenewReply::NotHolder => {
                            self.on(now, &grant.key, Event::Lost(grant.id.clone(), LockLost::Revoked));
                        }
                        _ => {}
                    }
                }
                for (grant, _) in grants {
                    if grant.renewal_finished(now) {
                        self.watch(&grant);
                    }
                }
            }
            _ => unreachable!("the reply matches its call"),
        }
    }

    // --- shared calls ---

    fn is_shared(&self, call: &InFlightCall) -> bool {
        self.settings.batches && matches!(call.operation, Operation::Acquire(..) | Operation::Release(..))
    }

    /// Sends the waiting calls, up to the number of shared calls under way.
    fn share_calls(&mut self, now: BootInstant, kind: ConnectionKind) {
        let is_of_kind = |call: &&SharedCall| call.requests.connection_kind() == kind;
        while self.shared.values().filter(is_of_kind).count() < MAX_SHARED_CALLS && self.share_next(now, kind) {}
    }

    /// Sends the next shared call. Returns whether a call waited.
    fn share_next(&mut self, now: BootInstant, kind: ConnectionKind) -> bool {
        // A mutant has ended some of them.
        let mut waiting = std::mem::take(&mut self.waiting[kind as usize]);
        waiting.retain(|number| self.calls.contains_key(number));
        let is_late = |number: &&u64| now.saturating_duration_since(self.calls[number].called) > SHARED_CALL_WAIT;
        let late = if kind == ConnectionKind::Acquires { waiting.iter().take_while(is_late).count() } else { 0 };
        let late: Vec<_> = waiting.drain(..late).collect();
        let (mut acquires, mut releases) = (Vec::new(), Vec::new());
        for number in &waiting {
            match &self.calls[number].operation {
                Operation::Acquire(_, request) => acquires.push(request.clone()),
                Operation::Release(_, request) => releases.push(request.clone()),
                Operation::Redeem(..) | Operation::Yield(..) | Operation::Renew(..) => {
                    unreachable!("they have calls of their own")
                }
            }
        }
        let requests = match kind {
            ConnectionKind::Acquires => {
                acquires.truncate(next_call(&acquires));
                Requests::Acquires(acquires)
            }
            ConnectionKind::Releases => {
                releases.truncate(next_call(&releases));
                Requests::Releases(releases)
            }
        };
        let calls: Vec<_> = waiting.drain(..requests.len()).collect();
        self.waiting[kind as usize] = waiting;
        let first = calls.first().map(|first| self.calls[first].called);
        if let Some(called) = first {
            let wants_queue = matches!(&requests, Requests::Acquires(requests) if requests.iter().any(|request| request.if_busy == IfBusy::Enqueue));
            let number = self.number();
            self.shared.insert(number, SharedCall { calls, requests, called, sent: 0, message: 0 });
            if wants_queue && !self.subscribed {
                self.effects.push_back(Effect::Wake(now.saturating_add(SUBSCRIBE_WAIT), Timer::SubscribeWait(number)));
            } else {
                self.run_shared(now, number);
            }
        }
        let is_any = first.is_some() || !late.is_empty();
        for number in late {
            self.fail(now, number, StoreErrorKind::Overloaded);
        }
        is_any
    }

    fn run_shared(&mut self, now: BootInstant, number: u64) {
        let message = self.number();
        let Some(call) = self.shared.get(&number) else { return };
        let is_first = call.sent == 0;
        let script = match &call.requests {
            Requests::Acquires(requests) => self.names.acquire(requests, self.expiry(call.called)),
            Requests::Releases(requests) => self.names.release(requests),
        };
        let kind = call.requests.connection_kind();
        let call = self.shared.get_mut(&number).expect("found above");
        call.sent += 1;
        call.message = message;
        if is_first {
            self.effects.push_back(Effect::Wake(now.saturating_add(STORE_CALL_TIMEOUT), Timer::Call(number)));
        }
        self.effects.push_back(Effect::Run(kind, message, script.expect("a valid name")));
    }

    fn on_shared_reply(&mut self, now: BootInstant, number: u64, reply: &Value) {
        let call = &self.shared[&number];
        let (called, sent, count) = (call.called, call.sent, call.calls.len());
        self.timeouts[call.requests.connection_kind() as usize] = 0;
        match &call.requests {
            Requests::Acquires(_) => {
                let replies = match parse_acquire(reply, count) {
                    Err(_) => vec![Err(unexpected_reply(reply)); count],
                    Ok((server, timed)) => {
                        let from_request = self.is(Mutation::ClockFromRequest);
                        self.server_clock.observe(server, if from_request { called } else { now });
                        match timed {
                            Timed::Done(replies) => replies
                                .into_iter()
                                .map(|reply| reply.map_err(|_| error(StoreErrorKind::Refused)))
                                .collect(),
                            Timed::Expired
                                if now.saturating_duration_since(called) < STORE_CALL_TIMEOUT && sent < MAX_SENDS =>
                            {
                                return self.run_shared(now, number);
                            }
                            Timed::Expired => vec![Err(error(StoreErrorKind::Timeout)); count],
                        }
                    }
                };
                self.finish_shared(now, number, replies.into_iter().map(Outcome::Acquired).collect());
            }
            Requests::Releases(_) => {
                let replies = match parse_release(reply, count) {
                    Err(_) => vec![Err(unexpected_reply(reply)); count],
                    Ok(replies) => {
                        replies.into_iter().map(|reply| reply.map_err(|_| error(StoreErrorKind::Refused))).collect()
                    }
                };
                self.finish_shared(now, number, replies.into_iter().map(Outcome::Released).collect());
            }
        }
    }

    fn fail_shared(&mut self, now: BootInstant, number: u64, kind: StoreErrorKind) {
        let Some(call) = self.shared.get(&number) else { return };
        let connection = call.requests.connection_kind();
        for (nth, call) in call.calls.clone().into_iter().enumerate() {
            let is_known = nth > 0 && self.is(Mutation::LostReplyOfFirstOnly);
            self.fail(now, call, if is_known { StoreErrorKind::Overloaded } else { kind });
        }
        self.shared.remove(&number);
        self.share_calls(now, connection);
    }

    /// The replies are handled while the call still counts as under way, as in a store.
    fn finish_shared(&mut self, now: BootInstant, number: u64, mut outcomes: Vec<Outcome>) {
        if self.is(Mutation::RepliesOutOfOrder) {
            outcomes.reverse();
        }
        let call = &self.shared[&number];
        let connection = call.requests.connection_kind();
        for (call, outcome) in call.calls.clone().into_iter().zip(outcomes) {
            self.finish(now, call, outcome);
        }
        self.shared.remove(&number);
        self.share_calls(now, connection);
    }

    fn shared_call_of(&self, message: u64) -> Option<u64> {
        self.shared.iter().find(|(_, call)| call.sent > 0 && call.message == message).map(|(number, _)| *number)
    }

    fn note_grant(&mut self, key: &LockKey, unless_recorded: bool) {
        if unless_recorded {
            self.mutant_memory.plain_grants.remove(key);
        } else {
            self.mutant_memory.plain_grants.insert(key.clone());
        }
    }

    /// A reply that no call awaits.
    fn on_late_reply(&mut self, now: BootInstant, message: u64, reply: &Value) {
        if !self.is(Mutation::UncorrelatedReplies) {
            return;
        }
        let Some(key) = self.mutant_memory.keys.get(&message) else { return };
        let is_acquire =
            |(_, call): &(&u64, &InFlightCall)| call.key == *key && matches!(call.operation, Operation::Acquire(..));
        if let (Some((&number, _)), Ok((_, Timed::Done(reply)))) =
            (self.calls.iter().find(is_acquire), parse_acquire(reply, 1).map(one_of))
        {
            self.finish(now, number, Outcome::Acquired(Ok(reply)));
        }
    }

    fn call_of(&self, message: u64) -> Option<u64> {
        self.calls.iter().find(|(_, call)| call.sent > 0 && call.message == message).map(|(number, _)| *number)
    }

    fn reset_timeouts(&mut self, number: u64) {
        let kind = self.calls[&number].connection_kind();
        self.timeouts[kind as usize] = 0;
    }

    fn lease(&self, lease: Duration) -> Duration {
        if self.settings.bare { lease.saturating_sub(LOCK_DELAY) } else { lease }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn is(&self, mutation: Mutation) -> bool {
        self.settings.mutation == Some(mutation)
    }

    // --- renewals ---

    fn watch(&mut self, grant: &Arc<Grant>) {
        if grant.end_reason().is_some() {
            return;
        }
        self.forget(grant);
        let at = grant.next_check_at();
        self.watched.push((at, Arc::clone(grant)));
        self.schedule_sweep(at);
    }

    /// Whether a renewal of this grant is in flight or due after the pause.
    pub fn verifies(&self, now: BootInstant, grant: &Arc<Grant>) -> bool {
        let matches = |other: &Arc<Grant>| Arc::ptr_eq(other, grant);
        let renews = |call: &InFlightCall| matches!(&call.operation, Operation::Renew(grants) if grants.iter().any(|(grant, _)| matches(grant)));
        self.calls.values().any(renews) || grant.next_check_at() <= now.saturating_add(RECHECK_INTERVAL)
    }

    fn forget(&mut self, grant: &Arc<Grant>) {
        self.watched.retain(|(_, watched)| !Arc::ptr_eq(watched, grant));
    }

    fn schedule_sweep(&mut self, at: BootInstant) {
        if self.next_sweep.is_none_or(|next| at < next) {
            self.next_sweep = Some(at);
            self.effects.push_back(Effect::Wake(at, Timer::Watchdog));
        }
    }

    fn sweep(&mut self, now: BootInstant) {
        if self.next_sweep.is_none_or(|next| now < next) {
            return;
        }
        self.next_sweep = None;
        let soon = now.saturating_add(RENEWAL_BATCH_WINDOW);
        let (due_soon, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.watched).into_iter().partition(|(at, _)| *at <= soon);
        self.watched = rest;
        let (mut due, mut lost, mut limits) = (Vec::new(), Vec::new(), Vec::new());
        for (_, grant) in due_soon {
            match grant.next_check(now, soon) {
                NextCheck::Sleep(until) => self.watched.push((until, grant)),
                NextCheck::Renew(until) => {
                    self.watched.push((until, Arc::clone(&grant)));
                    let lease = grant.lease();
                    due.push((grant, lease));
                }
                NextCheck::CheckSection => limits.push(grant),
                NextCheck::Ended => lost.push(grant),
            }
        }
        if let Some(at) = self.watched.iter().map(|(at, _)| *at).min() {
            self.schedule_sweep(at.min(now.saturating_add(LEASE / 3)));
        }
        for grant in lost {
            let why = grant.end_reason().unwrap_or(LockLost::Expired);
            self.on(now, &grant.key.clone(), Event::Lost(grant.id.clone(), why));
        }
        self.idle_sweeps = if limits.is_empty() { 0 } else { self.idle_sweeps + 1 };
        if self.idle_sweeps > 20 {
            self.effects.push_back(Effect::BusyLoop);
        }
        for grant in limits {
            self.on(now, &grant.key.clone(), Event::CheckSection(grant.id.clone()));
        }
        if !due.is_empty() && !self.is(Mutation::NoRenewal) {
            let key = due[0].0.key.clone();
            self.call(now, key, Operation::Renew(due));
        }
    }
}

impl ConnectionKind {
    /// The name in traces. It never changes, so that traces of different versions can be compared.
    pub fn trace_name(self) -> &'static str {
        match self {
            Self::Acquires => "Asks",
            Self::Releases => "Ends",
        }
    }
}

impl Requests {
    fn len(&self) -> usize {
        match self {
            Self::Acquires(requests) => requests.len(),
            Self::Releases(requests) => requests.len(),
        }
    }

    fn connection_kind(&self) -> ConnectionKind {
        match self {
            Self::Acquires(_) => ConnectionKind::Acquires,
            Self::Releases(_) => ConnectionKind::Releases,
        }
    }
}

impl InFlightCall {
    fn connection_kind(&self) -> ConnectionKind {
        match self.operation {
            Operation::Acquire(..) | Operation::Redeem(..) | Operation::Yield(..) => ConnectionKind::Acquires,
            Operation::Release(..) | Operation::Renew(..) => ConnectionKind::Releases,
        }
    }
}

fn without_sequence(id: &AcquisitionId) -> AcquisitionId {
    AcquisitionId::from_text(&format!("{}:0", id.manager()))
}

fn error(kind: StoreErrorKind) -> StoreError {
    StoreError::new("simulated", "answer", kind)
}

fn unexpected_reply(reply: &Value) -> StoreError {
    match reply {
        Value::SimpleString(text) if text.starts_with('-') => error(StoreErrorKind::Refused),
        _ => error(StoreErrorKind::Protocol),
    }
}

/// The reply of a call of one request.
fn one_of((now, replies): (i64, Timed<KeyReplies<AcquireReply>>)) -> (i64, Timed<AcquireReply>) {
    let one = |mut replies: KeyReplies<AcquireReply>| replies.remove(0).expect("only one of several fails alone");
    match replies {
        Timed::Done(replies) => (now, Timed::Done(one(replies))),
        Timed::Expired => (now, Timed::Expired),
    }
}
