//! Duplicates: clients that take the record of their key in place of a section.

use tower_lock::store::{NewRecord, Record, ReleaseRequest};

use super::*;
use crate::record_checker::head;

/// The duplicates of a simulation. Their random numbers are separate, so that a simulation without
/// records is the same as before.
pub(super) struct Duplicates {
    rng: fastrand::Rng,
    /// The part of the clients that are duplicates.
    share: f64,
    /// In milliseconds. Longer than a store call is valid: a late acquire can precede the release
    /// of its id, and never the next record.
    keep_for: std::ops::Range<u64>,
}

impl Duplicates {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x7265_636f_7264);
        let share = [0.3, 0.8, 1.0][rng.usize(0..3)];
        let keep_for = [600..3_000, 3_000..15_000, 300_000..300_001][rng.usize(0..3)].clone();
        Self { rng, share, keep_for }
    }

    pub(super) fn keys(&mut self) -> u64 {
        [1, 2, 4, 8][self.rng.usize(0..4)]
    }

    /// How long the next client keeps its record, and how its section ends. `None`: it is no
    /// duplicate.
    pub(super) fn next(&mut self) -> Option<(Duration, GuardEnd)> {
        if self.rng.f64() >= self.share {
            return None;
        }
        let ending = match self.rng.u8(0..100) {
            0..8 => GuardEnd::Dropped,
            8..20 => GuardEnd::ReleasedAfterFailure,
            _ => GuardEnd::Released,
        };
        Some((Duration::from_millis(self.rng.u64(self.keep_for.clone())), ending))
    }
}

impl Simulation {
    pub(super) fn server_ms(&self) -> i64 {
        self.server_us() / 1_000
    }

    /// Removes what has expired, before the clock is set: no record stands again, and no ticket.
    pub(super) fn expire_records(&mut self) {
        if self.options.records || self.options.tickets {
            let us = self.server_us();
            let mut data = self.fake.data();
            data.now_us = us;
            data.dump();
            drop(data);
            let now = self.server_ms();
            self.records.expire(now);
            if let Some(tickets) = &mut self.tickets {
                tickets.expire(now);
            }
        }
    }

    /// How a section ends whose work is done. That of a duplicate leaves a record of its client.
    pub(super) fn ending(&self, index: usize, section: &Arc<Section>) -> GuardEnd {
        let client = &self.clients[index];
        let Some(keep_for) = client.keep_for.filter(|_| client.ending == GuardEnd::Released) else {
            return client.ending.clone();
        };
        let label = &self.processes[client.process].label;
        let head = format!("{label}.{}/{index}/{}", client.number, section.token);
        let body = index.is_multiple_of(2).then(|| format!("body of {index}").into());
        GuardEnd::Recorded(new_record(Record::new(head, body), keep_for))
    }

    /// The record that stands for the key of this script.
    pub(super) fn standing_record(&self, script: &ScriptCall) -> Option<Record> {
        let key = self.locks.iter().position(|lock| Some(lock) == script.keys().first())?;
        self.records.standing(key, self.server_ms()).cloned()
    }

    /// A release leaves a record only for the holder, and no other script changes a record.
    pub(super) fn check_records(&mut self, script: &ScriptCall, before: &[KeyData]) {
        if let ("release", [head, body @ ..]) = (script.name(), script.data()) {
            let key = self.locks.iter().position(|lock| *lock == script.keys()[0]).expect("ours");
            let id = &super::args(script)[2];
            if before[key].holders.iter().any(|(holder, _)| holder == id) {
                let record = Record::new(head.clone(), body.first().cloned());
                let now = self.server_ms();
                let replaced = self.records.standing(key, now).filter(|standing| **standing != record).map(head_of);
                let is_excused = self.checker.lenient || self.checker.excused.contains(&AcquisitionId::from_text(id));
                if let Some(replaced) = replaced.filter(|_| !is_excused) {
                    return self.report_violation(format!("a second run of {id} replaces the record {replaced}"));
                }
                let until = now + super::args(script)[5].parse::<i64>().expect("milliseconds");
                if let Err(violation) = self.records.released(key, record, until) {
                    return self.report_violation(violation);
                }
            }
        }
        let now = self.server_ms();
        for key in 0..self.keys.len() {
            let name = self.names.record(self.locks[key].as_str().into()).to_string();
            let data = self.fake.data();
            let (fields, left) = (data.hash(&name), data.ms_left(&name));
            drop(data);
            let field = |name| fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.clone());
            let stored = field("head").map(|head| Record::new(head, field("body").map(Into::into)));
            if stored.is_some() && left == -1 {
                return self.report_violation(format!("{} leaves a record without an end", script.name()));
            }
            if let Err(violation) = self.records.check_stored(key, now, stored.map(|record| (record, now + left))) {
                return self.report_violation(format!("{} {violation}", script.name()));
            }
        }
    }

    /// A call that gets the record leaves nothing, and passes on what it was offered.
    pub(super) fn check_recorded_reply(&mut self, script: &ScriptCall) {
        let id = &super::args(script)[5];
        let key = self.locks.iter().position(|lock| *lock == script.keys()[0]).expect("ours");
        let data = self.key_data(key);
        if data.queue.contains(id) || data.holders.iter().any(|(holder, _)| holder == id) {
            self.report_violation(format!("{id} gets a record, and is still there: {data:?}"));
        } else if data.holders.is_empty() && data.queue.iter().any(|id| self.is_subscribed(id)) {
            self.report_violation(format!("{id} gets a record, and frees the key though a waiter exists: {data:?}"));
        }
    }

    /// While a record stands, no duplicate runs.
    pub(super) fn check_unrecorded(&mut self, index: usize, section: &Arc<Section>) {
        let client = &self.clients[index];
        let is_excused = self.checker.lenient || self.checker.excused.contains(&section.grant.id);
        if client.keep_for.is_none() || is_excused {
            return;
        }
        if let Some(record) = self.records.standing(client.key, self.server_ms()) {
            let violation = format!("{} begins a duplicate of the record {}", section.grant.id, head(record));
            self.report_violation(violation);
        }
    }

    /// A duplicate gets the record that stood when the store replied.
    pub(super) fn on_recorded(&mut self, index: ClientId, record: &Record) {
        let index = index as usize;
        let head = head(record);
        self.log(|w| {
            let label = &w.processes[w.clients[index].process].label;
            format!("{label} answers {index} with the record {head}")
        });
        self.check_only_result(index);
        if self.clients[index].keep_for.is_none() {
            return self.report_violation(format!("{index} gets the record {head}, and asked for none"));
        }
        match &self.replied_record {
            Some(standing) if standing == record => {}
            standing => {
                let standing = standing.as_ref().map(head_of);
                let violation = format!("{index} gets the record {head}, and the store has replied with {standing:?}");
                return self.report_violation(violation);
            }
        }
        self.clients[index].state = State::Done;
    }

    /// Each client gets one result.
    pub(super) fn check_only_result(&mut self, index: usize) {
        if std::mem::replace(&mut self.clients[index].has_result, true) {
            self.report_violation(format!("{index} gets a second result"));
        }
    }
}

/// A record for the end of a guard.
pub(crate) fn new_record(record: Record, keep_for: Duration) -> Arc<NewRecord> {
    let (key, id) = (LockKey::from(("key", 0)), AcquisitionId::from_text(""));
    let request = ReleaseRequest::new(key, id, Duration::ZERO, QUEUE).record(record, keep_for);
    request.record.expect("set above")
}

fn head_of(record: &Record) -> String {
    head(record)
}
