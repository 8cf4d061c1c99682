//! Callers that need several keys: the steps of the shipped code, with a client for each request.

use std::{collections::BTreeMap, ops::Range};

use tower_lock::__internals::proto::{Next, Several};

use super::*;

/// The callers of a simulation. Their random numbers are separate, so that a simulation without
/// them is the same as before.
pub(super) struct Callers {
    rng: fastrand::Rng,
    keys: u64,
    all: Vec<Caller>,
}

/// A caller that needs several keys, or none of them.
pub(super) struct Caller {
    /// Positions of keys, in their order.
    keys: Vec<usize>,
    process: usize,
    number: u64,
    waits: bool,
    patience: Option<u64>,
    work: u64,
    steps: Several,
    /// The keys that the requests of the current step are for.
    step: Range<usize>,
    /// The clients of the keys that are requested or held.
    clients: BTreeMap<usize, usize>,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Away,
    Acquires,
    Works,
    Done,
}

impl Callers {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x0073_6576_6572_616c);
        let keys = [3, 4, 6][rng.usize(0..3)];
        Self { rng, keys, all: Vec::new() }
    }

    pub(super) fn keys(&self) -> u64 {
        self.keys
    }

    pub(super) fn is_any_away(&self) -> bool {
        self.all.iter().any(|caller| caller.phase == Phase::Away)
    }
}

impl Simulation {
    pub(super) fn load_callers(&mut self) {
        let Some(mut callers) = self.callers.take() else { return };
        let rng = &mut callers.rng;
        let gap = [200, 800, 3_000][rng.usize(0..3)] * MS;
        let work = [5, 100, 800][rng.usize(0..3)] * MS;
        let mut at = 10 * MS;
        let mut arrivals = Vec::new();
        while at < self.conditions.load_until + 5 * SECOND && arrivals.len() < 80 {
            at += rng.u64(0..2 * gap);
            arrivals.push(at);
            let mut keys: Vec<_> = (0..self.keys.len()).collect();
            rng.shuffle(&mut keys);
            keys.truncate(rng.usize(2..=keys.len().min(4)));
            keys.sort_by_key(|at| self.keys[*at].clone());
            if self.is(Mutation::WaitsForSmaller) {
                rng.shuffle(&mut keys);
            }
            let waits = rng.u8(0..4) > 0;
            callers.all.push(Caller {
                steps: Several::new(keys.len(), waits),
                keys,
                process: 0,
                number: 0,
                waits,
                patience: [Some(500 * MS), Some(5 * SECOND), Some(60 * SECOND), None][rng.usize(0..4)],
                work: rng.u64(0..2 * work) + 100_000,
                step: 0..0,
                clients: BTreeMap::new(),
                phase: Phase::Away,
            });
        }
        self.callers = Some(callers);
        for (caller, at) in arrivals.into_iter().enumerate() {
            self.at(at, move |w| w.caller_arrives(caller));
        }
    }

    fn caller(&mut self, caller: usize) -> &mut Caller {
        &mut self.callers.as_mut().expect("it has callers").all[caller]
    }

    fn caller_arrives(&mut self, caller: usize) {
        let processes = self.processes.len();
        let process = self.callers.as_mut().expect("it has callers").rng.usize(0..processes);
        let number = self.processes[process].number;
        let is_alive = self.processes[process].alive;
        let it = self.caller(caller);
        (it.process, it.number) = (process, number);
        it.phase = if is_alive { Phase::Acquires } else { Phase::Done };
        let patience = it.patience.filter(|_| it.waits);
        let source = Source::Alone(self.number());
        self.deliver_to(process, number, source, move |w| w.request_step(caller));
        if let Some(patience) = patience {
            self.after(patience, move |w| {
                w.deliver_to(process, number, source, move |w| w.give_up_unless_it_works(caller));
            });
        }
    }

    /// Requests the keys of the next step.
    fn request_step(&mut self, caller: usize) {
        let it = self.caller(caller);
        if it.phase != Phase::Acquires {
            return;
        }
        it.step = it.steps.step();
        let (process, number, step, waits, work) = (it.process, it.number, it.step.clone(), it.waits, it.work);
        let keys: Vec<_> = it.keys[step.clone()].to_vec();
        let mut requested = Vec::new();
        for (at, key) in step.clone().zip(keys) {
            let index = self.clients.len();
            self.clients.push(Client {
                key,
                process,
                number,
                waits: waits && at == step.start,
                patience: None,
                wait_ends: None,
                work,
                ending: GuardEnd::Released,
                limits: HoldLimits {
                    lease: Lease::AutoRenew,
                    max_hold: None,
                    min_hold: Duration::ZERO,
                    lock_delay: if self.settings.bare { Duration::ZERO } else { LOCK_DELAY },
                },
                sharing: Sharing::Alone,
                ticket: 0,
                since: self.now,
                state: State::Waits,
                began: 0,
                granted_at: 0,
                valid_until: 0,
                keep_for: None,
                has_result: false,
                plan: None,
                caller: Some(caller),
            });
            self.caller(caller).clients.insert(at, index);
            requested.push(index);
        }
        self.log(|w| format!("{} asks for several: {requested:?} of caller {caller}", w.processes[process].label));
        for index in requested {
            let now = self.local(process);
            let client = &self.clients[index];
            let (key, limits) = (self.keys[client.key].clone(), client.limits);
            let wait = if client.waits { Duration::MAX } else { Duration::ZERO };
            let demand = Demand::new();
            let request = LockRequest {
                waiter: id(index),
                wait,
                owner: None,
                parent: None,
                limits,
                demand,
                sharing: Sharing::Alone,
                trace: None,
            };
            let ticket = self.event(process, |process, free_keys| process.request(now, &key, request, free_keys));
            self.clients[index].ticket = ticket;
        }
    }

    /// A request of a caller has its result.
    pub(super) fn caller_goes_on(&mut self, caller: usize) {
        let it = self.caller(caller);
        if it.phase != Phase::Acquires {
            return;
        }
        let (step, clients) = (it.step.clone(), it.clients.clone());
        let state = |w: &Self, at: usize| clients.get(&at).map(|index| w.clients[*index].state.clone());
        let is_granted = |w: &Self, at| matches!(state(w, at), Some(State::Granted(_)));
        if step.clone().skip(1).any(|at| matches!(state(self, at), Some(State::Waits))) {
            return;
        }
        let keeps_greater = self.is(Mutation::KeepsGreater);
        if matches!(state(self, step.start), Some(State::Waits)) {
            // The first key is waited for. Greater ones must not be held meanwhile.
            for at in step.clone().skip(1) {
                if is_granted(self, at) && !keeps_greater {
                    self.release_unused(caller, at);
                }
            }
            self.caller(caller).step.end = step.start + 1;
            return self.check_order(caller);
        }
        let granted = step.clone().take_while(|at| is_granted(self, *at)).count();
        for at in step.clone().skip(granted) {
            if is_granted(self, at) && !keeps_greater {
                self.release_unused(caller, at);
            }
        }
        let it = self.caller(caller);
        if granted == 0 && it.waits {
            return self.give_up(caller);
        }
        match it.steps.replied(granted, granted < step.len()) {
            Next::Done => self.begin_work(caller),
            Next::Step => self.request_step(caller),
            Next::Reject => self.give_up(caller),
        }
    }

    /// While a caller waits, it holds smaller keys only.
    fn check_order(&mut self, caller: usize) {
        let it = self.caller(caller);
        let (start, clients, keys) = (it.step.start, it.clients.clone(), it.keys.clone());
        let waits_for = &self.keys[keys[start]];
        let greater = clients.iter().find(|(_, index)| {
            let client = &self.clients[**index];
            matches!(client.state, State::Granted(_)) && self.keys[client.key] > *waits_for
        });
        if let Some((_, index)) = greater {
            let held = self.keys[self.clients[*index].key].clone();
            let violation = format!("caller {caller} waits for {waits_for} while it holds the greater {held}");
            self.report_violation(violation);
        }
    }

    fn begin_work(&mut self, caller: usize) {
        let it = self.caller(caller);
        let (process, clients) = (it.process, it.clients.clone());
        let now = self.local(process);
        let is_lost = |w: &Self, index: usize| match &w.clients[index].state {
            State::Granted(section) => section.remaining(now).is_zero(),
            _ => true,
        };
        if clients.values().any(|index| is_lost(self, *index)) {
            return self.start_over(caller);
        }
        self.caller(caller).phase = Phase::Works;
        for index in clients.into_values() {
            self.begin_section(index);
        }
    }

    /// A key that the caller held was lost before the others were granted.
    fn start_over(&mut self, caller: usize) {
        self.log(|_| format!("caller {caller} starts over"));
        self.release_all(caller);
        self.caller(caller).steps.lost();
        self.request_step(caller);
    }

    /// The caller cancels its wait.
    pub(super) fn give_up_unless_it_works(&mut self, caller: usize) {
        if self.caller(caller).phase == Phase::Acquires {
            self.give_up(caller);
        }
    }

    /// The caller is rejected.
    fn give_up(&mut self, caller: usize) {
        self.log(|_| format!("caller {caller} gives up"));
        self.caller(caller).phase = Phase::Done;
        self.release_all(caller);
    }

    fn release_all(&mut self, caller: usize) {
        let clients = self.caller(caller).clients.clone();
        let last_granted =
            clients.iter().rev().find(|(_, index)| matches!(self.clients[**index].state, State::Granted(_)));
        let forgotten = last_granted.map(|(at, _)| *at).filter(|_| self.is(Mutation::ForgetsOneAtALoss));
        for (at, index) in clients {
            match self.clients[index].state {
                State::Waits => self.cancel_wait(index),
                State::Granted(_) if Some(at) == forgotten => self.clients[index].state = State::Done,
                State::Granted(_) => self.release_unused(caller, at),
                State::Away | State::Holding(_) | State::Done => {}
            }
        }
        self.caller(caller).clients.clear();
    }

    fn release_unused(&mut self, caller: usize, at: usize) {
        let Some(index) = self.caller(caller).clients.remove(&at) else { return };
        let State::Granted(section) = std::mem::replace(&mut self.clients[index].state, State::Done) else { return };
        let (process, key) = (self.clients[index].process, self.clients[index].key);
        // It has held the key until now.
        (self.clients[index].began, self.clients[index].work) = (self.now, 0);
        if !self.checker.is_held(&self.keys[key], self.now) {
            self.idle_since[key] = Some(self.now);
        }
        self.guard_ended(process, &section, GuardEnd::ReleasedAfterFailure);
    }

    /// The loss of one key is the loss of all.
    pub(super) fn check_losses(&mut self, process: usize) {
        let Some(callers) = &self.callers else { return };
        let is_lost = |index: &usize| matches!(&self.clients[*index].state, State::Granted(section) if section.end_reason().is_some());
        let is_here = |caller: &Caller| caller.process == process && caller.number == self.processes[process].number;
        let lost = |caller: &Caller| {
            is_here(caller) && caller.phase == Phase::Acquires && caller.clients.values().any(is_lost)
        };
        let lost: Vec<_> = (0..callers.all.len()).filter(|caller| lost(&callers.all[*caller])).collect();
        for caller in lost {
            self.start_over(caller);
        }
    }

    /// One section of a caller has ended badly: so do the others.
    pub(super) fn end_others(&mut self, index: usize) {
        let Some(caller) = self.clients[index].caller else { return };
        self.caller(caller).phase = Phase::Done;
        for other in self.caller(caller).clients.clone().into_values() {
            if other != index && matches!(self.clients[other].state, State::Holding(_)) {
                self.end_section(other, GuardEnd::Dropped);
            }
        }
    }

    /// Whether a caller holds this key while it waits for others.
    pub(super) fn is_kept(&self, key: usize) -> bool {
        let keeps = |client: &Client| client.caller.is_some() && matches!(client.state, State::Granted(_));
        self.callers.is_some() && self.clients.iter().any(|client| client.key == key && keeps(client))
    }
}
