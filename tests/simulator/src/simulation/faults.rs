//! Faults.

use super::*;

impl Simulation {
    pub(super) fn faults(&mut self) {
        let Options { force, flush, ctr, back, step, java, .. } = self.options;
        let weight_if = |yes: bool, weight: u32| if yes { weight } else { 0 };
        let all = [
            (Fault::BreakAcquires, 4),
            (Fault::BreakReleases, 4),
            (Fault::BreakInbox, 4),
            (Fault::Freeze, 3),
            (Fault::Crash, 2),
            (Fault::Slow, 2),
            (Fault::Cancel, 5),
            (Fault::Drop, 2),
            (Fault::Pause, 1),
            (Fault::CutOff, [1, 2, 10][self.rng.usize(0..3)]),
        ];
        let mut choices: Vec<_> = all.into_iter().filter(|_| self.rng.u8(0..10) < 6).collect();
        choices.extend([
            (Fault::Force, weight_if(force, 3)),
            (Fault::Flush, weight_if(flush, 1)),
            (Fault::Step, weight_if(back || step, 3)),
            (Fault::Java, weight_if(java, 6)),
            (Fault::Counter, weight_if(ctr, 6)),
        ]);
        let sum: u32 = choices.iter().map(|(_, weight)| weight).sum();
        if sum == 0 {
            return;
        }
        let gap = [400, 1_200, 4_000][self.rng.usize(0..3)] * MS;
        let mut at = self.exponential(gap);
        while at < self.conditions.load_until {
            let mut roll = self.rng.u32(0..sum);
            let chosen = choices.iter().find(|(_, weight)| {
                let is_it = roll < *weight;
                roll = roll.saturating_sub(*weight);
                is_it
            });
            if let Some(&(fault, _)) = chosen {
                self.at(at, move |w| w.fault(fault));
            }
            at += self.exponential(gap);
        }
    }

    pub(super) fn fault(&mut self, fault: Fault) {
        let key = self.rng.usize(0..self.keys.len());
        let mut process = self.rng.usize(0..self.processes.len());
        let holder = self.checker.holder(&self.keys[key]);
        if let Some(at) = self.processes.iter().position(|target| Some(target.number) == holder)
            && self.rng.bool()
        {
            process = at;
        }
        match fault {
            Fault::BreakAcquires => self.break_connection(process, ConnectionKind::Acquires),
            Fault::BreakReleases => self.break_connection(process, ConnectionKind::Releases),
            Fault::BreakInbox => self.break_inbox(process),
            Fault::Freeze => {
                let part = [6, 15, 36][self.rng.usize(0..3)];
                let time = part * (300 + self.random(1_000)) * MS;
                self.freeze(process, time);
            }
            Fault::Crash => self.crash(process),
            Fault::Slow => {
                self.conditions.slow = [10, 40][self.rng.usize(0..2)];
                let time = self.random(2 * SECOND);
                self.after(time, |w| w.conditions.slow = 1);
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
                let target = &mut self.processes[process];
                if target.cut_off_until <= self.now {
                    target.cut_off_since = self.now;
                }
                target.cut_off_until = target.cut_off_until.max(self.now + time);
                let time = Duration::from_nanos(time);
                self.log(|w| format!("{} is cut off for {time:?}", w.processes[process].label));
            }
            Fault::Force => self.force(key),
            Fault::Flush => {
                self.log(|_| "FLUSHALL".to_owned());
                self.fake.data().flush();
                self.records.flushed();
            }
            Fault::Step => {
                self.expire_records();
                let ms = [20, 500, 5_000][self.rng.usize(0..3)];
                let forward = self.options.step && self.rng.bool();
                self.server_ahead += if forward { ms * 1_000 } else { -ms * 1_000 };
                self.log(|_| format!("the server's clock is set by {ms} ms, forward {forward}"));
            }
            Fault::Java => self.java(key),
            Fault::Counter => {
                self.log(|_| "the counter is lost".to_owned());
                self.fake.command(&["DEL", "tower-lock:lock:f"]);
            }
        }
    }

    pub(super) fn freeze(&mut self, process: usize, time: u64) {
        let target = &mut self.processes[process];
        if !target.alive || target.frozen {
            return;
        }
        target.frozen = true;
        let number = target.number;
        self.log(|w| format!("{} is frozen for {:?}", w.processes[process].label, Duration::from_nanos(time)));
        self.after(time, move |w| w.thaw(process, number));
    }

    /// Delayed events are handled in any order, but keep the order of each source.
    pub(super) fn thaw(&mut self, process: usize, number: u64) {
        let target = &mut self.processes[process];
        if target.number != number || !target.alive {
            return;
        }
        target.frozen = false;
        target.thawed = self.now;
        self.log(|w| format!("{} goes on", w.processes[process].label));
        let mut delayed = std::mem::take(&mut self.processes[process].delayed);
        while !delayed.is_empty() {
            let nth = self.rng.usize(0..delayed.len());
            let source = *delayed.keys().nth(nth).expect("one of them");
            let jobs = delayed.get_mut(&source).expect("there");
            let job = jobs.pop_front();
            if jobs.is_empty() {
                delayed.remove(&source);
            }
            if let Some(job) = job {
                job(self);
                self.apply_effects(process);
            }
        }
    }

    pub(super) fn crash(&mut self, process: usize) {
        if !self.processes[process].alive {
            return;
        }
        self.log(|w| format!("{} CRASHES", w.processes[process].label));
        self.break_connection(process, ConnectionKind::Acquires);
        self.break_connection(process, ConnectionKind::Releases);
        let target = &mut self.processes[process];
        target.alive = false;
        let (number, epoch, channel) = (target.number, target.inbox.epoch, target.process.inbox());
        let (label, clock) = (target.label.clone(), target.clock);
        self.crashed.push(channel.trim_start_matches("tower-lock:lock:in:").to_owned());
        for index in 0..self.clients.len() {
            let client = &mut self.clients[index];
            if client.process != process || client.number != number || matches!(client.state, State::Away) {
                continue;
            }
            if let State::Holding(section) = std::mem::replace(&mut client.state, State::Done) {
                let ended = self.now.min(client.valid_until);
                let delay = if self.settings.bare { 0 } else { nanos(client.limits.lock_delay) };
                let key = client.key;
                self.note_end_of_step(process, &section, &GuardEnd::Dropped);
                self.checker.ends(&section, ended + delay, "has crashed");
                if !self.checker.is_held(&self.keys[key], self.now) {
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
            let mut restarted = w.process(label, 1.0);
            restarted.clock = clock;
            w.processes[process] = restarted;
            w.subscribe(process);
        });
    }

    pub(super) fn disturb_a_client(&mut self, fault: Fault) {
        let is_one = |client: &Client| match client.state {
            State::Waits | State::Granted(_) => fault == Fault::Cancel,
            State::Holding(_) => fault == Fault::Drop,
            State::Away | State::Done => false,
        };
        let all: Vec<_> = (0..self.clients.len())
            .filter(|index| is_one(&self.clients[*index]) && self.is_here(&self.clients[*index]))
            .collect();
        if all.is_empty() {
            return;
        }
        let index = all[self.rng.usize(0..all.len())];
        let (process, number) = (self.clients[index].process, self.clients[index].number);
        self.deliver_to(process, number, Source::Request(id(index)), move |w| match (w.clients[index].caller, fault) {
            (Some(caller), Fault::Cancel) => w.give_up_unless_it_works(caller),
            (None, Fault::Cancel) => w.cancel_wait(index),
            _ => {
                w.end_section(index, GuardEnd::Dropped);
                w.end_others(index);
            }
        });
    }

    pub(super) fn force(&mut self, key: usize) {
        let block_for = Duration::from_millis([0, 0, 1_000][self.rng.usize(0..3)]);
        for (holder, fence) in self.key_data(key).holders {
            self.revoked.insert(holder.clone(), fence.parse().unwrap_or(0));
            self.checker
                .excused
                .insert(AcquisitionId::from_text(holder.trim_end_matches(":end").trim_end_matches(":forced")));
        }
        let lock = self.keys[key].clone();
        self.checker.excuse(&lock);
        let script = self.names.force(&ForceReleaseRequest::new(lock, block_for, QUEUE)).expect("a valid name");
        self.execute(None, &script);
    }

    /// Locks as Redisson does, or waits for it.
    pub(super) fn java(&mut self, key: usize) {
        if self.java_locks(key) {
            return;
        }
        // Until it has the key, or gives up.
        self.foreign_waiters[key] += 1;
        self.java_listens(key);
        let patience = self.random(20 * SECOND);
        self.after(patience, move |w| w.java_leaves(key));
    }

    /// The processes listen to both channels, a foreign client to its own one.
    pub(super) fn java_listens(&mut self, key: usize) {
        let ours = i64::try_from(self.processes.len()).expect("few");
        let lock = &self.locks[key];
        let mut data = self.fake.data();
        data.listeners.insert(format!("redisson_lock__channel:{{{lock}}}"), ours + self.foreign_waiters[key]);
        data.listeners.insert(format!("tower-lock:lock:in:raw:{{{lock}}}"), ours);
    }

    fn java_leaves(&mut self, key: usize) {
        if self.foreign_waiters[key] > 0 {
            self.foreign_waiters[key] -= 1;
            self.java_listens(key);
        }
    }

    /// Locks the key if it is free, and unlocks it later. Returns whether it was free.
    pub(super) fn java_locks(&mut self, key: usize) -> bool {
        const LOCK: &str = "if redis.call('exists', KEYS[1]) == 0 or redis.call('hexists', KEYS[1], ARGV[2]) == 1 then
            redis.call('hincrby', KEYS[1], ARGV[2], 1) redis.call('pexpire', KEYS[1], ARGV[1]) return nil end
            return redis.call('pttl', KEYS[1])";
        let id = format!("8b1b3cd2:{}", self.number());
        self.foreign.insert(id.clone());
        let lock = self.locks[key].clone();
        self.fake.data().now_us = self.server_us();
        if self.fake.eval(LOCK, &[&lock], &["30000", &id]) != Value::Nil {
            return false;
        }
        self.java_leaves(key);
        self.log(|_| format!("a stranger locks {lock}"));
        if self.checker.is_held(&self.keys[key], self.now) {
            self.report_violation(format!("a foreign client is let into {lock}"));
            return true;
        }
        let time = self.random(8 * SECOND);
        self.foreign_until[key] = self.now + time;
        self.after(time, move |w| {
            w.log(|_| format!("a stranger unlocks {lock}"));
            w.fake.data().now_us = w.server_us();
            w.fake.command(&["DEL", &lock]);
            w.fake.command(&["PUBLISH", &format!("redisson_lock__channel:{{{lock}}}"), "0"]);
            w.foreign_until[key] = 0;
            w.idle_since[key] = Some(w.now);
            w.deliver();
        });
        true
    }
}
