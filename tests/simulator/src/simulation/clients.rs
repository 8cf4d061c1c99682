//! Clients: they request keys, wait, hold, and end in many ways.

use super::*;

impl Simulation {
    pub(super) fn is_here(&self, client: &Client) -> bool {
        let process = &self.processes[client.process];
        let is_under_way = !matches!(client.state, State::Done | State::Away);
        is_under_way && process.alive && process.number == client.number
    }

    pub(super) fn load(&mut self) {
        let gap = [60, 300, 1_200][self.rng.usize(0..3)] * MS;
        let work = [5, 100, 800][self.rng.usize(0..3)] * MS;
        let long = [0.0, 0.0, 0.05, 0.4][self.rng.usize(0..4)];
        let mut at = 10 * MS;
        for _ in 0..250 {
            at += self.exponential(gap);
            if at > self.conditions.load_until {
                break;
            }
            self.client(at, work, long);
        }
        // Some arrive after the faults have ended.
        let (calm, mut at) = (self.conditions.load_until, self.conditions.load_until + SECOND);
        self.at(calm, Self::quiet_down);
        for _ in 0..15 {
            at += self.exponential(300 * MS);
            self.client(at, work, 0.0);
        }
    }

    pub(super) fn client(&mut self, at: u64, work: u64, long: f64) {
        let mut work = self.random(2 * work) + 100_000;
        if self.chance(long) && self.long_work < 240 * SECOND {
            work = self.random(75 * SECOND);
            self.long_work += work;
        }
        let patience = [Some(300 * MS), Some(2 * SECOND), Some(100 * SECOND), None][self.rng.usize(0..4)];
        let waits = !self.chance(self.conditions.impatient);
        let ending = match self.rng.u8(0..100) {
            0..3 => GuardEnd::Dropped,
            3..6 => GuardEnd::ReleasedAfterFailure,
            _ => GuardEnd::Released,
        };
        let seconds = |rng: &mut fastrand::Rng, to: u64| Duration::from_millis(rng.u64(100..to));
        let lock_delay = match self.rng.u8(0..20) {
            _ if self.settings.bare => Duration::ZERO,
            0..4 => seconds(&mut self.rng, 4_000),
            4..8 => Duration::ZERO,
            _ => LOCK_DELAY,
        };
        let min_hold = if self.rng.u8(0..20) == 0 { seconds(&mut self.rng, 3_000) } else { Duration::ZERO };
        let roll = self.rng.u8(0..20);
        let max_hold = (roll == 0).then(|| seconds(&mut self.rng, 8_000));
        // Some need a shorter store lease than the other waiters of the key.
        let lease = if (1..4).contains(&roll) {
            Lease::Fixed(Duration::from_millis(at / MS % 8_000))
        } else {
            Lease::AutoRenew
        };
        self.conditions.longest_delay = self.conditions.longest_delay.max(lock_delay);
        let duplicate = self.duplicates.as_mut().and_then(Duplicates::next);
        let (keep_for, ending) = duplicate.map_or((None, ending), |(keep_for, ending)| (Some(keep_for), ending));
        let key = self.rng.usize(0..self.keys.len());
        // A record is that of a section that was alone.
        let sharing = match &mut self.shares {
            Some(shares) if keep_for.is_none() => shares.next(),
            _ => Sharing::Alone,
        };
        let may_replace = waits && keep_for.is_none() && sharing == Sharing::Alone;
        let replaces = may_replace && self.newest.as_mut().is_some_and(Newest::next);
        let sharing = if replaces { Sharing::Newest } else { sharing };
        let has_steps = keep_for.is_none() && sharing == Sharing::Alone;
        let plan = self.tickets.as_mut().filter(|_| has_steps).and_then(Tickets::next);
        let client = Client {
            key,
            process: 0,
            number: 0,
            waits,
            patience,
            wait_ends: None,
            work,
            ending,
            limits: HoldLimits { lease, max_hold, min_hold, lock_delay },
            sharing,
            ticket: 0,
            since: at,
            state: State::Away,
            began: 0,
            granted_at: 0,
            valid_until: 0,
            keep_for,
            has_result: false,
            caller: None,
            plan,
        };
        let index = self.clients.len();
        self.clients.push(client);
        let at = self.batches.as_ref().map_or(at, |batches| batches.arrival(at));
        self.at(at, move |w| w.client_arrives(index));
    }

    pub(super) fn client_arrives(&mut self, index: usize) {
        let process = self.rng.usize(0..self.processes.len());
        let number = self.processes[process].number;
        if !self.processes[process].alive {
            self.clients[index].state = State::Done;
            return;
        }
        let client = &mut self.clients[index];
        (client.process, client.number, client.since) = (process, number, self.now);
        client.state = State::Waits;
        self.deliver_to(process, number, Source::Request(id(index)), move |w| {
            if w.clients[index].plan.is_some_and(|plan| plan.redeems) {
                return w.present_ticket(index);
            }
            let now = w.local(process);
            let client = &w.clients[index];
            let (key, waits, limits, patience, sharing) =
                (w.keys[client.key].clone(), client.waits, client.limits, client.patience, client.sharing);
            let demand = if client.keep_for.is_some() { Demand::new().unless_recorded() } else { Demand::new() };
            w.log(|w| {
                let how = if sharing == Sharing::Alone { String::new() } else { format!(", {sharing:?}") };
                format!("{} asks: {index} for {key}, waits {waits} {patience:?}{how}", w.processes[process].label)
            });
            let wait = match patience {
                _ if !waits => Duration::ZERO,
                Some(patience) => Duration::from_nanos(patience),
                None => Duration::MAX,
            };
            w.clients[index].wait_ends = Some(now.saturating_add(wait));
            let request = LockRequest {
                waiter: id(index),
                wait,
                owner: None,
                parent: None,
                limits,
                demand,
                sharing,
                trace: None,
            };
            let ticket = w.event(process, |process, free_keys| process.request(now, &key, request, free_keys));
            w.clients[index].ticket = ticket;
            if let Some(patience) = patience.filter(|_| waits) {
                w.after(patience, move |w| {
                    w.deliver_to(process, number, Source::Request(id(index)), move |w| w.cancel_wait(index));
                });
            }
        });
    }

    /// The client cancels its wait.
    pub(super) fn cancel_wait(&mut self, index: usize) {
        let client = &self.clients[index];
        let (process, ticket, key) = (client.process, client.ticket, self.keys[client.key].clone());
        let redeems = client.plan.is_some_and(|plan| plan.redeems);
        let now = self.local(process);
        match client.state.clone() {
            State::Waits => {
                self.log(|w| format!("{} leaves: {index}", w.processes[process].label));
                self.clients[index].state = State::Done;
                if redeems {
                    return self.processes[process].process.stop_redeeming(now, id(index));
                }
                self.processes[process].process.leave(now, &key, id(index), ticket);
            }
            // Granted but already cancelled.
            State::Granted(section) => {
                self.clients[index].state = State::Done;
                let ending = if redeems { GuardEnd::Dropped } else { GuardEnd::Undelivered };
                self.guard_ended(process, &section, ending);
            }
            State::Away | State::Holding(_) | State::Done => {}
        }
    }

    pub(super) fn on_granted(&mut self, index: ClientId, section: Arc<Section>) {
        let index = index as usize;
        self.check_only_result(index);
        let client = &mut self.clients[index];
        let (process, number) = (client.process, client.number);
        if !matches!(client.state, State::Waits) {
            return self.guard_ended(process, &section, GuardEnd::Undelivered);
        }
        let grant = Arc::clone(&section.grant);
        if grant.id.max_holders() > client.sharing.max_holders() {
            let wanted = client.sharing;
            return self.report_violation(format!("{} is granted to a client that needs {wanted:?}", grant.id));
        }
        let notified = (grant.id.to_string(), section.token.as_u64() >> 10);
        client.state = State::Granted(section);
        client.granted_at = self.now;
        // A section that was granted before the message may begin: the grant is verified meanwhile.
        // Messages of newer clients may have used up the confirmation before it.
        let is_confirmed = !grant.id.is_replaceable();
        if is_confirmed && self.notified.contains(&notified) {
            return self.report_violation(format!("{} is granted though it was notified of its revocation", grant.id));
        }
        if let Some(caller) = self.clients[index].caller {
            return self.caller_goes_on(caller);
        }
        let soon = self.random(MS);
        self.after(soon, move |w| {
            w.deliver_to(process, number, Source::Request(id(index)), move |w| w.begin_section(index));
        });
    }

    pub(super) fn begin_section(&mut self, index: usize) {
        let client = &self.clients[index];
        let (process, number, key) = (client.process, client.number, client.key);
        let State::Granted(section) = client.state.clone() else { return };
        let now = self.local(process);
        if section.remaining(now).is_zero() && !self.is(Mutation::NoDeadlineCheck) {
            self.clients[index].state = State::Done;
            return self.guard_ended(process, &section, GuardEnd::Dropped);
        }
        let left = section.remaining(now);
        self.log(|w| {
            let owner = &section.grant.id;
            format!("{} BEGINS: {index} as {owner}, token {}, {left:?} left", w.processes[process].label, section.token)
        });
        if left.is_zero() {
            return self.report_violation(format!("{} begins after its deadline", section.grant.id));
        }
        let clock = self.processes[process].clock;
        if let Err(violation) = self.checker.begins(self.now, number, clock, &section) {
            return self.report_violation(violation);
        }
        if self.foreign_until[key] > self.now && !self.checker.lenient {
            return self.report_violation(format!("{} begins while a foreign client holds the key", section.grant.id));
        }
        self.check_unrecorded(index, &section);
        self.check_local_handoffs(index, &section);
        self.plan_steps(index);
        let client = &mut self.clients[index];
        client.valid_until = clock.when(now.saturating_add(left));
        client.began = self.now;
        client.state = State::Holding(section);
        let work = client.work;
        self.idle_since[key] = None;
        // The work is polled in between.
        for part in [self.random(work), work] {
            self.after(part, move |w| {
                w.deliver_to(process, number, Source::Request(id(index)), move |w| w.poll_section(index, part == work));
            });
        }
    }

    pub(super) fn poll_section(&mut self, index: usize, is_last: bool) {
        let State::Holding(section) = self.clients[index].state.clone() else { return };
        self.check_deadline(index);
        let process = self.clients[index].process;
        let now = self.local(process);
        if section.remaining(now).is_zero() {
            if self.is(Mutation::NoDeadlineCheck) {
                return self.report_violation(format!("{} is polled after its deadline", section.grant.id));
            }
            return self.abort_section(index);
        }
        if is_last {
            let ending = self.ending_of_step(index).unwrap_or_else(|| self.ending(index, &section));
            self.end_section(index, ending);
        }
    }

    /// Aborts a section that has lost its lock.
    pub(super) fn abort_section(&mut self, index: usize) {
        let State::Holding(section) = &self.clients[index].state else { return };
        let client = &self.clients[index];
        let began_after_faults = self.quiet_since.is_some_and(|calm| client.began > calm + 5 * SECOND);
        let target = &self.processes[client.process];
        let was_stopped = target.thawed.max(target.cut_off_until) > client.began;
        let limit = client.limits.max_hold.is_some() || client.limits.lease != Lease::AutoRenew;
        if began_after_faults && !was_stopped && !limit && !self.has_weaker_guarantees() {
            let violation = format!("{} is lost though all is calm: {:?}", section.grant.id, section.end_reason());
            self.report_violation(violation);
        }
        self.end_section(index, GuardEnd::Dropped);
        self.end_others(index);
    }

    pub(super) fn end_section(&mut self, index: usize, ending: GuardEnd) {
        let State::Holding(section) = std::mem::replace(&mut self.clients[index].state, State::Done) else { return };
        let client = &self.clients[index];
        let (process, key, limits, granted_at, valid_until) =
            (client.process, client.key, client.limits, client.granted_at, client.valid_until);
        self.log(|w| {
            let why = section.end_reason();
            format!("{} ends: {index} as {}, {ending:?} {why:?}", w.processes[process].label, section.grant.id)
        });
        let (now, ended) = (self.now, self.now.min(valid_until));
        let (blocked_until, why) = match ending {
            _ if self.settings.bare && ending == GuardEnd::Dropped => (0, ""),
            GuardEnd::Dropped => (ended + nanos(limits.lock_delay), "ended badly"),
            GuardEnd::Kept(ref heir) => ((now + nanos(heir.lease)).min(valid_until), "leaves it to a ticket"),
            GuardEnd::Released | GuardEnd::Recorded(_) => {
                let held = now - granted_at;
                // The local clock may be fast.
                let left = nanos(limits.min_hold).saturating_sub(held + held / 100) / 100 * 98;
                // The store blocks no longer than the lease if the release is lost.
                (if left == 0 { 0 } else { (now + left).min(valid_until) }, "holds it for a while")
            }
            _ => (0, ""),
        };
        if let GuardEnd::Recorded(new) = &ending
            && section.end_reason().is_none()
        {
            self.records.completed(&new.record);
        }
        self.checker.ends(&section, blocked_until, why);
        if !self.checker.is_held(&self.keys[key], now) {
            self.idle_since[key] = Some(now.max(blocked_until));
        }
        self.guard_ended(process, &section, ending);
    }

    pub(super) fn on_rejected(&mut self, index: ClientId, error: &LockError) {
        let index = index as usize;
        self.log(|w| format!("{} refuses {index}: {error}", w.processes[w.clients[index].process].label));
        self.check_only_result(index);
        if matches!(error, LockError::Superseded) {
            self.check_replaced_waiter(index);
        }
        self.clients[index].state = State::Done;
        if let Some(caller) = self.clients[index].caller {
            self.caller_goes_on(caller);
        }
        let LockError::Store(error) = error else { return };
        let is_defect = matches!(error.kind(), StoreErrorKind::Protocol | StoreErrorKind::Refused);
        if is_defect && !self.had_other_type(self.clients[index].key) {
            self.report_violation(format!("an error that cannot be: {error}"));
        } else if !is_defect && self.clients[index].waits && !self.wait_has_ended(index) {
            self.report_violation(format!("{index} is rejected before its wait has ended: {error}"));
        }
    }

    /// Whether the wait of this client has ended, by the clock of its process.
    fn wait_has_ended(&self, index: usize) -> bool {
        let client = &self.clients[index];
        client.wait_ends.is_some_and(|ends| self.local(client.process) >= ends)
    }

    /// Checks that this id has no data, now and later.
    pub(super) fn check_forgotten(&mut self, process: usize, key: &LockKey, id: &AcquisitionId) {
        let text = id.to_string();
        self.log(|_| format!("{text} is forgotten"));
        self.enqueued.remove(&text);
        // Its lease expires, and its queue entry too, unless other waiters keep the queue: then it
        // releases the offer.
        let silent = self.now.saturating_sub(self.processes[process].last_reply) > nanos(LEASE + QUEUE.entry_ttl);
        if self.checker.lenient || self.options.back || self.options.copies || silent {
            return;
        }
        self.forgotten.insert(text.clone(), self.now);
        let Some(at) = self.keys.iter().position(|known| known == key) else { return };
        let data = self.key_data(at);
        if data.holders.iter().any(|(holder, _)| *holder == text) || data.queue.contains(&text) {
            self.report_violation(format!("{text} is forgotten, and still there: {data:?}"));
        }
    }
}
