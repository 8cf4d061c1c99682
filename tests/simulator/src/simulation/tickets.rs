//! Work of several steps, whose key is left to a ticket in between.

use tower_lock::{
    __internals::redis_wire::{Timed, parse_acquire},
    store::{AcquireReply, Heir},
};

use super::*;
use crate::process::Step;

/// The work of a simulation. Its random numbers are separate, so that a simulation without tickets
/// is the same as before.
pub(super) struct Tickets {
    rng: fastrand::Rng,
    /// In the order of the sequences of their tickets.
    works: Vec<Work>,
    /// The keys of the tickets that hold them by the record of the server, and the ends in
    /// milliseconds.
    held: BTreeMap<String, (usize, i64)>,
    /// The works of the acquisitions that have taken the place of a ticket.
    redeemers: HashMap<String, usize>,
    /// The fences of the first sections that leave their key to a ticket.
    keepers: HashMap<String, u64>,
    /// The acquisitions that may free their key.
    finished: HashSet<String>,
    /// The number of sections that have begun in place of a ticket.
    pub(super) redeemed: u64,
}

struct Work {
    ticket: AcquisitionId,
    gap: Duration,
    /// The last section has ended, and the key is left to no ticket any more.
    has_ended: bool,
    /// The acquisition that has left its key to the ticket.
    keeper: Option<AcquisitionId>,
    /// When the key was left to the ticket, and until when, if no other step was under way then,
    /// and none has presented the ticket since.
    kept: Option<(u64, u64)>,
}

/// The step of a client.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    work: usize,
    /// It presents the ticket of an earlier step.
    pub(super) redeems: bool,
    /// For how long the key is kept after an orderly end.
    keep_for: Option<Duration>,
    /// Nothing has happened by which the ticket could have lost its key.
    is_owed: bool,
}

impl Tickets {
    pub(super) const LONGEST_GAP: u64 = 10 * SECOND;

    pub(super) fn new(seed: u64) -> Self {
        Self {
            rng: fastrand::Rng::with_seed(seed ^ 0x7469_636b_6574),
            works: Vec::new(),
            held: BTreeMap::new(),
            redeemers: HashMap::new(),
            keepers: HashMap::new(),
            finished: HashSet::new(),
            redeemed: 0,
        }
    }

    /// The first step of a work. `None`: the next client has no other steps.
    pub(super) fn next(&mut self) -> Option<Plan> {
        let (work, gap) = (self.works.len(), self.gap());
        (self.rng.u8(0..3) > 0).then(|| {
            let ticket = AcquisitionId::from_text(&format!("work:~{:x}:{work}", self.rng.u64(..)));
            self.works.push(Work { ticket, gap, has_ended: false, keeper: None, kept: None });
            Plan { work, redeems: false, keep_for: Some(gap), is_owed: false }
        })
    }

    fn gap(&mut self) -> Duration {
        let longest = [2 * SECOND, Self::LONGEST_GAP][self.rng.usize(0..2)];
        Duration::from_millis(self.rng.u64(1_000..=longest / MS))
    }

    /// Forgets the tickets whose gap has passed at this millisecond.
    pub(super) fn expire(&mut self, now: i64) {
        self.held.retain(|_, (_, until)| now <= *until);
    }

    fn work_of(&mut self, ticket: &str) -> (usize, &mut Work) {
        let work = usize::try_from(AcquisitionId::from_text(ticket).sequence()).expect("few");
        (work, &mut self.works[work])
    }
}

/// Whether a ticket holds a key with this id, and no process.
pub(super) fn is_ticket(id: &str) -> bool {
    id.contains(":~")
}

impl Simulation {
    /// The steps after a first section that has begun: at random times, some of them two at once.
    pub(super) fn plan_steps(&mut self, first: usize) {
        let (Some(tickets), Some(plan)) = (&mut self.tickets, self.clients[first].plan) else { return };
        if plan.redeems {
            return;
        }
        let (gap, mut at) = (nanos(tickets.works[plan.work].gap), self.now + self.clients[first].work);
        let mut steps = Vec::new();
        for _ in 0..tickets.rng.u8(1..6) {
            // Some come while a call of the step before may still be executed.
            let latest = [100 * MS, gap + gap / 3, gap + gap / 3][tickets.rng.usize(0..3)];
            at += tickets.rng.u64(0..latest);
            for _ in 0..1 + usize::from(tickets.rng.u8(0..4) == 0) {
                let keep_for = tickets.rng.bool().then(|| tickets.gap());
                let ending = match tickets.rng.u8(0..10) {
                    0 => GuardEnd::Dropped,
                    1..4 => GuardEnd::ReleasedAfterFailure,
                    _ => GuardEnd::Released,
                };
                let most = [50, 1_000][tickets.rng.usize(0..2)] * MS;
                steps.push(Client {
                    waits: false,
                    patience: (tickets.rng.u8(0..8) == 0).then(|| tickets.rng.u64(0..300 * MS)),
                    work: tickets.rng.u64(MS..most),
                    ending,
                    since: at,
                    state: State::Away,
                    began: 0,
                    has_result: false,
                    plan: Some(Plan { redeems: true, keep_for, ..plan }),
                    ..self.clients[first].clone()
                });
            }
        }
        for step in steps {
            let (index, at) = (self.clients.len(), step.since);
            self.clients.push(step);
            self.at(at, move |w| w.client_arrives(index));
        }
    }

    /// How a section ends whose work is done: as `Keeping::end` in the crate.
    pub(super) fn ending_of_step(&self, index: usize) -> Option<GuardEnd> {
        let (client, tickets) = (&self.clients[index], self.tickets.as_ref()?);
        let Plan { work, redeems, keep_for, .. } = client.plan?;
        let Work { ticket, gap, .. } = &tickets.works[work];
        let lease = match client.ending {
            GuardEnd::Released => keep_for,
            GuardEnd::ReleasedAfterFailure => redeems.then_some(*gap),
            _ => None,
        };
        Some(GuardEnd::Kept(Arc::new(Heir::new(ticket.clone(), lease?))))
    }

    pub(super) fn present_ticket(&mut self, index: usize) {
        let (now, Client { process, key, limits, patience, number, .. }) =
            (self.local(self.clients[index].process), self.clients[index].clone());
        let Some(plan) = self.clients[index].plan else { return };
        let is_owed = self.is_owed(plan.work);
        let Some(tickets) = &mut self.tickets else { return };
        let work = &mut tickets.works[plan.work];
        work.kept = None;
        let ticket = Arc::new(Heir::new(work.ticket.clone(), work.gap));
        // One of two steps gets the key.
        for other in self.clients.iter_mut().filter_map(|client| client.plan.as_mut()) {
            other.is_owed &= other.work != plan.work;
        }
        self.clients[index].plan = Some(Plan { is_owed, ..plan });
        self.log(|w| format!("{} redeems: {index} for {}, owed {is_owed}", w.processes[process].label, ticket.id));
        let (key, step) = (self.keys[key].clone(), Step { client: id(index), ticket, limits });
        self.processes[process].process.redeem(now, &key, step);
        if let Some(patience) = patience {
            self.after(patience, move |w| {
                w.deliver_to(process, number, Source::Request(id(index)), move |w| w.cancel_wait(index));
            });
        }
    }

    /// Without faults, a ticket can be redeemed within its gap, if no other step has redeemed it.
    fn is_owed(&self, work: usize) -> bool {
        let kept = self.tickets.as_ref().and_then(|tickets| tickets.works[work].kept);
        let Some((kept_at, until)) = kept else { return false };
        let Some(calm) = self.quiet_since.filter(|_| !self.has_weaker_guarantees()) else { return false };
        let thawed = self.processes.iter().map(|process| process.thawed.max(process.cut_off_until)).max().unwrap_or(0);
        let settled = calm.max(thawed).max(self.paused_until) + 5 * SECOND;
        // A call of an earlier step may be executed for as long as it is valid.
        let slack = 2 * nanos(STORE_CALL_TIMEOUT) + 20 * self.conditions.delay + 50 * MS;
        let is_in_time = self.now > kept_at + slack && self.now + slack < kept_at + (until - kept_at) / 100 * 98;
        kept_at > settled && is_in_time
    }

    /// The ticket of a client does not hold its key.
    pub(super) fn on_ticket_refused(&mut self, index: ClientId) {
        let index = index as usize;
        self.log(|w| format!("{} refuses the ticket of {index}", w.processes[w.clients[index].process].label));
        self.check_only_result(index);
        self.clients[index].state = State::Done;
        if self.clients[index].plan.is_some_and(|plan| plan.is_owed) {
            self.report_violation(format!("{index} is refused within the gap of its ticket, though all is calm"));
        }
    }

    /// A section has ended in its process.
    pub(super) fn note_end_of_step(&mut self, process: usize, section: &Arc<Section>, ending: &GuardEnd) {
        let (is_lost, id, now) =
            (section.remaining(self.local(process)).is_zero(), section.grant.id.to_string(), self.now);
        let Some(tickets) = &mut self.tickets else { return };
        match ending {
            GuardEnd::Kept(heir) if !is_lost => {
                let (nth, work) = tickets.work_of(&heir.id.to_string());
                let is_other = |client: &Client| {
                    let is_under_way = matches!(client.state, State::Waits | State::Granted(_) | State::Holding(_));
                    is_under_way && client.plan.is_some_and(|plan| plan.work == nth)
                };
                work.keeper = Some(section.grant.id.clone());
                work.kept = (!self.clients.iter().any(is_other)).then(|| (now, now + nanos(heir.lease)));
                if !tickets.redeemers.contains_key(&id) {
                    tickets.keepers.insert(id, section.token.as_u64() >> 10);
                }
            }
            _ => {
                if let Some(work) = tickets.redeemers.get(&id) {
                    tickets.works[*work].has_ended |= !matches!(ending, GuardEnd::Kept(_));
                }
                tickets.finished.insert(id);
            }
        }
    }

    pub(super) fn check_tickets(&mut self, script: &ScriptCall, before: &[KeyData], reply: &Value) {
        let Some(mut tickets) = self.tickets.take_if(|_| !self.checker.lenient) else { return };
        if let Err(violation) = self.check_script_of_ticket(&mut tickets, script, before, reply) {
            self.report_violation(violation);
        }
        let now = self.server_ms();
        for (ticket, (key, until)) in &tickets.held {
            let data = self.key_data(*key);
            let holds = data.holders.iter().any(|(id, _)| id == ticket);
            // An operator revokes a ticket, too.
            let is_revoked = script.name() == "force" && !holds;
            if holds != (now <= *until) && !is_revoked {
                let left = until - now;
                self.report_violation(format!("{} leaves {ticket} with {left} ms of its gap: {data:?}", script.name()));
            }
        }
        let is_held = |key: usize, ticket: &String| self.key_data(key).holders.iter().any(|(id, _)| id == ticket);
        tickets.held.retain(|ticket, (key, until)| now <= *until && is_held(*key, ticket));
        self.tickets = Some(tickets);
    }

    fn check_script_of_ticket(
        &mut self,
        tickets: &mut Tickets,
        script: &ScriptCall,
        before: &[KeyData],
        reply: &Value,
    ) -> Result<(), String> {
        let (args, locks) = (super::args(script), script.keys());
        let key = self.locks.iter().position(|lock| Some(lock) == locks.first()).unwrap_or_default();
        let (after, held) = (self.key_data(key), &before[key].holders);
        let had = |wanted: &String| held.iter().find(|(id, _)| id == wanted);
        match (script.name(), &args[..]) {
            ("keep", [_, id, ticket, lease]) => {
                let Some((_, fence)) = had(id) else {
                    let is_same = after.holders == *held && !after.queue.contains(id);
                    return if is_same { Ok(()) } else { Err(format!("a late keep of {id} leaves {after:?}")) };
                };
                self.released.insert(id.clone());
                let (_, work) = tickets.work_of(ticket);
                if work.has_ended {
                    return Err(format!("{id} leaves its key to {ticket}, whose work has ended"));
                }
                if after.holders != [(ticket.clone(), fence.clone())] {
                    return Err(format!("{id} leaves its key to {ticket} and has {fence}, and not {after:?}"));
                }
                let until = self.server_ms() + lease.parse::<i64>().expect("milliseconds");
                tickets.held.insert(ticket.clone(), (key, until));
            }
            ("redeem", [.., id, _, ticket, _]) => {
                let Ok((_, Timed::Done(mut replies))) = parse_acquire(reply, 1) else { return Ok(()) };
                let Ok(AcquireReply::Granted { fence, .. }) = replies.remove(0) else {
                    let is_refused = had(ticket).is_some() || had(id).is_some();
                    return if is_refused { Err(format!("{ticket} is refused and holds its key")) } else { Ok(()) };
                };
                if had(ticket).is_none() && had(id).is_none() {
                    return Err(format!("{id} redeems {ticket}, which has no key: {held:?}"));
                }
                if after.holders != [(id.clone(), fence.to_string())] {
                    return Err(format!("{id} redeems {ticket} and leaves {after:?}"));
                }
                let (nth, work) = tickets.work_of(ticket);
                if work.has_ended && had(id).is_none() {
                    return Err(format!("{id} redeems {ticket}, whose work has ended"));
                }
                if let Some(keeper) = &work.keeper {
                    self.checker.lift(&self.keys[key], keeper);
                }
                tickets.redeemed += u64::from(tickets.redeemers.insert(id.clone(), nth).is_none());
                tickets.held.remove(ticket);
            }
            ("release", _) => {
                for request in self.requests(script) {
                    let holders = &before[request.key].holders;
                    let Some((id, fence)) = holders.iter().find(|(id, _)| *id == request.id) else { continue };
                    let is_redeemer = tickets.redeemers.contains_key(id) && !tickets.finished.contains(id);
                    if is_redeemer || tickets.keepers.get(id).is_some_and(|kept| kept.to_string() == *fence) {
                        return Err(format!("{id} leaves its key to no ticket"));
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether a ticket holds this key.
    pub(super) fn is_left_to_a_ticket(&self, key: usize) -> bool {
        self.tickets.as_ref().is_some_and(|tickets| {
            tickets.held.values().any(|(held, until)| *held == key && self.server_ms() <= *until)
        })
    }
}
