//! Connections and the data in flight on them.

use super::*;

impl Simulation {
    pub(super) fn send(&mut self, process: usize, kind: ConnectionKind, message: u64, script: ScriptCall) {
        let target = &self.processes[process];
        let (number, connection) = (target.number, target.connections[kind as usize]);
        let at = match connection.filter(|at| self.connections[*at].up) {
            Some(at) => at,
            None => {
                let opens_at = self.now + self.delay() + self.delay();
                self.connections.push(Connection {
                    process: (process, number),
                    up: true,
                    last_out: opens_at,
                    last_in: 0,
                    in_flight: BTreeMap::new(),
                });
                let at = self.connections.len() - 1;
                self.processes[process].connections[kind as usize] = Some(at);
                at
            }
        };
        let arrives = self.connections[at].last_out.max(self.now + self.delay());
        self.connections[at].last_out = arrives;
        self.connections[at].in_flight.insert(message, Some(script));
        self.at(arrives, move |w| w.script_arrives(at, message));
    }

    pub(super) fn script_arrives(&mut self, at: usize, message: u64) {
        let (process, number) = self.connections[at].process;
        let late = self.paused_until.max(self.cut_off_until(process, number));
        if self.now < late {
            return self.at(late, move |w| w.script_arrives(at, message));
        }
        let Some(script) = self.connections[at].in_flight.get_mut(&message).and_then(Option::take) else { return };
        let reply = self.execute(Some(process), &script);
        let record = self.standing_record(&script);
        if self.quiet_since.is_none() && self.chance(self.conditions.duplicates) {
            self.execute(Some(process), &script);
        }
        if self.options.copies && self.quiet_since.is_none() && self.chance(0.1) {
            let copy = script.clone();
            let late = self.random(self.conditions.late);
            self.after(late, move |w| w.runs_late(process, copy));
        }
        let returns_at = self.connections[at].last_in.max(self.now + self.delay());
        self.connections[at].last_in = returns_at;
        self.at(returns_at, move |w| w.reply_arrives(at, message, reply, record));
    }

    pub(super) fn reply_arrives(&mut self, at: usize, message: u64, reply: Value, record: Option<Record>) {
        let (process, number) = self.connections[at].process;
        let late = self.cut_off_until(process, number);
        if self.now < late {
            return self.at(late, move |w| w.reply_arrives(at, message, reply, record));
        }
        self.deliver_to(process, number, Source::Connection(at), move |w| {
            if w.connections[at].up && w.connections[at].in_flight.remove(&message).is_some() {
                let now = w.local(process);
                w.processes[process].last_reply = w.now;
                w.replied_record = record;
                w.processes[process].process.on_reply(now, message, &reply);
            }
        });
    }

    pub(super) fn cut_off_until(&self, process: usize, number: u64) -> u64 {
        let target = &self.processes[process];
        if target.number == number { target.cut_off_until } else { 0 }
    }

    /// Most of the data sent is in the buffers of the server: it still runs, later, and its replies
    /// are lost.
    pub(super) fn break_connection(&mut self, process: usize, kind: ConnectionKind) {
        let Some(at) = self.processes[process].connections[kind as usize].take() else { return };
        self.log(|w| format!("{} loses its connection that {}", w.processes[process].label, kind.trace_name()));
        self.connections[at].up = false;
        let mut late = self.now;
        let in_flight = std::mem::take(&mut self.connections[at].in_flight);
        let parts = u64::try_from(in_flight.len()).expect("few") + 1;
        for (message, script) in in_flight {
            if let Some(script) = script
                && self.chance(0.7)
            {
                late += self.random(self.conditions.late / parts);
                self.at(late, move |w| w.runs_late(process, script));
            }
            let number = self.processes[process].number;
            let soon = self.random(2 * MS);
            self.after(soon, move |w| {
                w.deliver_to(process, number, Source::Connection(at), move |w| {
                    let now = w.local(process);
                    w.processes[process].process.on_disconnect(now, message);
                });
            });
        }
    }

    pub(super) fn runs_late(&mut self, process: usize, script: ScriptCall) {
        if self.now < self.paused_until {
            return self.at(self.paused_until, move |w| w.runs_late(process, script));
        }
        self.execute(Some(process), &script);
    }

    pub(super) fn subscribe(&mut self, process: usize) {
        let delay = self.delay();
        let target = &mut self.processes[process];
        target.inbox.epoch += 1;
        let (number, epoch) = (target.number, target.inbox.epoch);
        self.after(delay, move |w| w.subscribes(process, number, epoch));
    }

    pub(super) fn subscribes(&mut self, process: usize, number: u64, epoch: u64) {
        if self.now < self.paused_until {
            return self.at(self.paused_until, move |w| w.subscribes(process, number, epoch));
        }
        let target = &mut self.processes[process];
        if !target.alive || target.number != number || target.inbox.epoch != epoch {
            return;
        }
        target.inbox.at_server = Some(epoch);
        self.fake.data().listeners.insert(self.processes[process].process.inbox(), 1);
        let returns_at = self.now + self.delay();
        let inbox = &mut self.processes[process].inbox;
        inbox.last = inbox.last.max(returns_at);
        self.at(returns_at, move |w| {
            w.deliver_to(process, number, Source::Inbox(epoch), move |w| {
                if w.processes[process].inbox.epoch == epoch {
                    let now = w.local(process);
                    w.processes[process].process.on_subscribed(now);
                }
            });
        });
    }

    pub(super) fn break_inbox(&mut self, process: usize) {
        let target = &mut self.processes[process];
        let (number, epoch, channel) = (target.number, target.inbox.epoch, target.process.inbox());
        // Messages of the old connection are ignored.
        target.inbox.epoch += 1;
        let next = target.inbox.epoch;
        self.log(|w| format!("{} loses its inbox", w.processes[process].label));
        let missed = self.random(30 * MS);
        self.after(missed, move |w| w.unsubscribes(process, number, epoch, &channel));
        // Noticed at once or by a health check.
        let noticed = if self.chance(0.7) { self.random(60 * MS) } else { self.random(1_500 * MS) };
        self.after(noticed, move |w| {
            w.deliver_to(process, number, Source::Inbox(epoch), move |w| {
                if w.processes[process].inbox.epoch == next {
                    w.subscribe(process);
                }
            });
        });
    }

    pub(super) fn unsubscribes(&mut self, process: usize, number: u64, epoch: u64, channel: &str) {
        let target = &mut self.processes[process];
        if target.number != number || target.inbox.at_server == Some(epoch) {
            if target.number == number {
                target.inbox.at_server = None;
            }
            self.fake.data().listeners.remove(channel);
        }
    }

    pub(super) fn deliver(&mut self) {
        let published = std::mem::take(&mut self.fake.data().published);
        for (channel, message) in published {
            self.deliver_wakeup(&channel);
            let Some(process) = self.processes.iter().position(|target| target.process.inbox() == channel) else {
                continue;
            };
            let Some(epoch) = self.processes[process].inbox.at_server else { continue };
            if self.quiet_since.is_none() && self.chance(self.conditions.loss) {
                self.log(|_| format!("lost: {message}"));
                continue;
            }
            let copies = 1 + usize::from(self.quiet_since.is_none() && self.chance(self.conditions.duplicates));
            for _ in 0..copies {
                let number = self.processes[process].number;
                let arrives = self.processes[process].inbox.last.max(self.now + self.delay());
                self.processes[process].inbox.last = arrives;
                let message = message.clone();
                self.at(arrives, move |w| w.message_arrives(process, number, epoch, message));
            }
        }
    }

    /// A message of a raw key goes to all processes, and to the foreign clients that wait.
    fn deliver_wakeup(&mut self, channel: &str) {
        let lock = channel.strip_prefix("redisson_lock__channel:{").and_then(|rest| rest.strip_suffix('}'));
        let Some(key) = self.locks.iter().position(|name| Some(name.as_str()) == lock) else { return };
        for process in 0..self.processes.len() {
            let target = &self.processes[process];
            let (number, epoch) = (target.number, target.inbox.epoch);
            // A reservation, a lost message, or a process without a waiter.
            if target.inbox.at_server.is_none() || self.chance(0.3) {
                continue;
            }
            let delay = self.delay();
            self.after(delay, move |w| {
                w.deliver_to(process, number, Source::Inbox(epoch), move |w| {
                    let (now, key) = (w.local(process), w.keys[key].clone());
                    w.processes[process].process.on_freed(now, &key);
                });
            });
        }
        if self.foreign_waiters[key] > 0 {
            let delay = self.delay();
            self.after(delay, move |w| {
                w.java_locks(key);
            });
        }
    }

    pub(super) fn message_arrives(&mut self, process: usize, number: u64, epoch: u64, message: String) {
        let late = self.cut_off_until(process, number);
        if self.now < late {
            return self.at(late, move |w| w.message_arrives(process, number, epoch, message));
        }
        self.deliver_to(process, number, Source::Inbox(epoch), move |w| {
            if w.processes[process].inbox.epoch != epoch {
                return;
            }
            w.log(|w| format!("{} hears: {message}", w.processes[process].label));
            let now = w.local(process);
            w.processes[process].process.on_message(now, &message);
            w.apply_effects(process);
            let id = message.strip_prefix("1 revoked 0 ").and_then(|rest| rest.split(' ').next());
            if let Some((id, fence)) = id.and_then(|id| w.revoked.get_key_value(id)) {
                w.notified.insert((id.clone(), *fence));
            }
            // A message alone ends nothing, because any client can send one: the store verifies it.
            let goes_on = |client: &Client| match &client.state {
                State::Holding(section) => {
                    message.starts_with(&format!("1 revoked 0 {} ", section.grant.id))
                        && !w.processes[process].process.verifies(now, &section.grant)
                }
                _ => false,
            };
            if w.clients.iter().any(goes_on) {
                w.report_violation(format!("a section continues without a verification by the store: {message}"));
            }
        });
    }
}
