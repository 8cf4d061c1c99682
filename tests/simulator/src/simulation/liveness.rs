//! Guarantees that hold when no more faults occur.

use super::*;

impl Simulation {
    pub(super) fn quiet_down(&mut self) {
        self.log(|_| "it is calm".to_owned());
        self.quiet_since = Some(self.now);
        self.conditions.slow = 1;
        for key in 0..self.keys.len() {
            if self.idle_since[key].is_some() || !self.checker.is_held(&self.keys[key], self.now) {
                self.idle_since[key] = Some(self.now);
            }
        }
    }

    pub(super) fn is(&self, mutation: Mutation) -> bool {
        self.settings.mutation == Some(mutation)
    }

    /// Whether options are active that weaken the guarantees.
    pub(super) fn has_weaker_guarantees(&self) -> bool {
        self.checker.lenient || self.options.back || self.options.copies || self.options.force || self.options.java
    }

    pub(super) fn waits(&self, client: &Client) -> bool {
        matches!(client.state, State::Waits) && self.is_here(client) && !self.processes[client.process].frozen
    }

    /// A key with waiters is idle at most for an unreleased lease.
    pub(super) fn check_idle_keys(&mut self) {
        if self.checker.lenient || self.options.back || self.options.copies {
            return;
        }
        let Some(calm) = self.quiet_since else { return };
        let limit = LEASE
            + QUEUE.offer_ttl
            + 2 * self.conditions.longest_delay
            + 3 * QUEUE_POLL_INTERVAL
            + 4 * STORE_CALL_TIMEOUT;
        let limit = nanos(limit) / 100 * 102 + 3 * SECOND + 20 * self.conditions.delay;
        for key in 0..self.keys.len() {
            // A section is open. A frozen caller may still believe that it holds this key.
            let Some(idle) = self.idle_since[key] else { continue };
            if self.is_kept(key) || self.is_left_to_a_ticket(key) {
                self.idle_since[key] = Some(self.now);
                continue;
            }
            let waiting = self.clients.iter().filter(|client| client.key == key && self.waits(client));
            let Some(first) = waiting.map(|client| client.since).min() else { continue };
            let thawed =
                self.processes.iter().map(|process| process.thawed.max(process.cut_off_until)).max().unwrap_or(0);
            let since = idle.max(first).max(calm).max(self.paused_until).max(thawed);
            let gap = self.now.saturating_sub(since);
            #[expect(clippy::cast_precision_loss, reason = "a ratio")]
            let part = gap as f64 / limit as f64;
            self.idle = self.idle.max(part);
            if gap > limit {
                let gap = Duration::from_nanos(gap);
                return self.report_violation(format!("{} is idle for {gap:?} with waiters", self.locks[key]));
            }
        }
    }

    /// Waiters that enqueued later are not served first.
    pub(super) fn check_overtaking(&mut self, key: usize, got: &str) {
        if self.has_weaker_guarantees() {
            return;
        }
        let Some(calm) = self.quiet_since else { return };
        let since = self.enqueued.get(got).map_or(self.now, |(since, _)| *since);
        let thawed = self.processes.iter().map(|process| process.thawed.max(process.cut_off_until)).max().unwrap_or(0);
        let settled = calm.max(thawed).max(self.paused_until) + 5 * SECOND;
        let listens = |process: &&Process| process.alive && !process.frozen && process.inbox.at_server.is_some();
        let passed = self.processes.iter().filter(listens).find_map(|process| {
            let has_waiter = self
                .clients
                .iter()
                .any(|client| self.waits(client) && client.key == key && client.number == process.number);
            let mut ids = process.process.ids_sent().filter(|(wanted, _)| has_waiter && *wanted == self.keys[key]);
            ids.find_map(|(_, id)| {
                let text = id.to_string();
                let (first, _) = *self.enqueued.get(&text)?;
                (text != got && settled < first && first < since).then(|| (text, since - first))
            })
        });
        if let Some((passed, by)) = passed {
            let by = Duration::from_nanos(by);
            self.report_violation(format!("{got} is served before {passed}, which enqueued {by:?} before it"));
        }
    }

    /// Local handoffs are bounded in time while other processes wait.
    pub(super) fn check_local_handoffs(&mut self, index: usize, section: &Arc<Section>) {
        let Client { process, key, granted_at, caller, .. } = self.clients[index];
        // A caller of several keys waits for others after that.
        let handed_off = if caller.is_some() { granted_at } else { self.now };
        let id = section.grant.id.clone();
        let first = *self.first_section.entry(id).or_insert(handed_off);
        let Some(calm) = self.quiet_since.filter(|_| !self.has_weaker_guarantees()) else { return };
        let longest = self.clients.iter().filter(|client| client.key == key && client.process == process);
        let longest =
            longest.filter(|client| client.began > 0 || matches!(client.state, State::Granted(_) | State::Waits));
        let longest = longest.filter(|client| client.since > calm || client.began + client.work > calm);
        let longest = longest.map(|client| client.work).max().unwrap_or(0);
        let limit = nanos(LOCAL_HANDOFF_TIME) / 100 * 102 + 2 * longest + 20 * self.conditions.delay + 50 * MS;
        let thawed = self.processes[process].thawed.max(self.processes[process].cut_off_until);
        for id in self.key_data(key).queue {
            let Some((_, since)) = self.enqueued.get(&id) else { continue };
            let since = (*since).max(first).max(calm).max(thawed).max(self.paused_until);
            if handed_off.saturating_sub(since) > limit {
                let time = Duration::from_nanos(handed_off - since);
                let label = &self.processes[process].label;
                let violation = format!("{id} waits for {time:?} during local handoffs of {label}");
                return self.report_violation(violation);
            }
        }
    }

    /// Requests without a wait are rejected while the server does not respond.
    pub(super) fn check_unanswered_waiters(&mut self) {
        const MAX_REJECT_DELAY: u64 = 3_300 * MS;
        let paused = (self.now < self.paused_until).then_some(self.paused_since);
        let is_silent = |process: &Process| self.now < process.cut_off_until;
        if self.violation.is_some() || paused.is_none() && !self.processes.iter().any(is_silent) {
            return;
        }
        let slow = 4 * self.conditions.delay * 40;
        for index in 0..self.clients.len() {
            let client = &self.clients[index];
            if client.waits || !self.waits(client) {
                continue;
            }
            let process = &self.processes[client.process];
            let cut_off = is_silent(process).then_some(process.cut_off_since);
            let Some(silent) = paused.into_iter().chain(cut_off).min() else { continue };
            // The local clock may be slow.
            let since = client.since.max(silent).max(process.thawed);
            let is_busy = self.clients.iter().any(|other| {
                other.key == client.key
                    && other.process == client.process
                    && (matches!(other.state, State::Holding(_) | State::Granted(_))
                        || other.began + other.work > since)
            });
            if !is_busy && self.now > since + MAX_REJECT_DELAY + slow {
                let time = Duration::from_nanos(self.now - since);
                return self.report_violation(format!("{index} waits for {time:?} for a server that does not respond"));
            }
        }
    }

    pub(super) fn check_leftovers(&mut self) {
        if self.checker.lenient || self.options.back || self.options.copies {
            return;
        }
        for key in 0..self.keys.len() {
            let data = self.key_data(key);
            let holders = data.holders.iter().map(|(id, _)| id);
            for id in holders.chain(&data.queue) {
                let of_crashed = self.crashed.iter().any(|crashed| id.starts_with(&format!("{crashed}:")));
                if !of_crashed && !is_block(id) && !self.foreign.contains(id) {
                    return self.report_violation(format!("{id} is left: {data:?}"));
                }
            }
        }
        let busy = self.processes.iter().find(|process| process.alive && !process.frozen && !process.process.is_idle());
        if let Some(process) = busy {
            let violation = format!("{} still does something: {}", process.label, process.process.describe());
            self.report_violation(violation);
        }
    }
}
