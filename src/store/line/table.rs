//! The entries of this process, and the ends of their leases. Pure.

use std::{
    collections::{HashMap, hash_map},
    time::Duration,
};

use super::lines::{Line, OwnEntry};
use crate::{acquisition::AcquisitionId, clock::BootInstant, lock_key::LockKey, store::EventSink};

/// An acquisition of this process that may have an entry.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) id: AcquisitionId,
    /// The call that makes its entry.
    pub(super) call: u64,
    /// `None`: the outcome of its call is unknown.
    pub(super) entry: Option<OwnEntry>,
    pub(super) is_held: bool,
    /// The end of the lease, of the offer or of the queue entry, or of the call that makes the
    /// entry.
    pub(super) until: BootInstant,
    pub(super) offer_ttl: Duration,
}

/// The acquisitions of this process, its blocks, and its managers.
#[derive(Default)]
pub(super) struct Table {
    own: HashMap<LockKey, Vec<Own>>,
    /// The blocks that this process ends on time. Every process ends those that it finds expired.
    pub(super) blocks: Vec<(String, BootInstant)>,
    pub(super) sinks: HashMap<String, EventSink>,
    /// The entries that wait for the one before them.
    pub(super) watchers: HashMap<String, Watcher>,
    calls: u64,
}

/// An entry that waits for the one before it.
pub(super) struct Watcher {
    pub(super) key: LockKey,
    pub(super) id: AcquisitionId,
    /// The server has replied that it watches.
    pub(super) is_set: bool,
}

impl Table {
    pub(super) fn get(&mut self, key: &LockKey, id: &AcquisitionId) -> Option<&mut Own> {
        self.own.get_mut(key)?.iter_mut().find(|own| own.id == *id)
    }

    /// Before the call that makes its entry: the caller may be gone when the call is executed.
    /// Returns the number of the call.
    pub(super) fn begin(&mut self, key: &LockKey, id: &AcquisitionId, until: BootInstant, offer_ttl: Duration) -> u64 {
        self.calls += 1;
        let call = self.calls;
        let own = Own { id: id.clone(), call, entry: None, is_held: false, until, offer_ttl };
        self.own.entry(key.clone()).or_default().push(own);
        call
    }

    /// The call has made this entry. `false`: the session has ended since, or another call has
    /// taken its place, and the entry is to be removed.
    pub(super) fn made(&mut self, key: &LockKey, id: &AcquisitionId, call: u64, entry: &OwnEntry) -> bool {
        let own = self.get(key, id).filter(|own| own.call == call);
        own.map(|own| own.entry = Some(entry.clone())).is_some()
    }

    pub(super) fn remove(&mut self, key: &LockKey, id: &AcquisitionId) {
        if let hash_map::Entry::Occupied(mut all) = self.own.entry(key.clone()) {
            all.get_mut().retain(|own| own.id != *id);
            if all.get().is_empty() {
                all.remove();
            }
        }
    }

    /// The session has ended, and all entries with it.
    pub(super) fn clear(&mut self) {
        self.own.clear();
        self.watchers.clear();
    }

    /// The acquisitions of this key that have ended.
    pub(super) fn ended_of(&self, key: &LockKey, now: BootInstant) -> Vec<AcquisitionId> {
        let own = self.own.get(key).into_iter().flatten();
        own.filter(|own| own.until <= now).map(|own| own.id.clone()).collect()
    }

    /// The acquisitions that have ended, or whose manager is gone while they wait.
    pub(super) fn ended(&self, now: BootInstant) -> Vec<(LockKey, AcquisitionId)> {
        let is_gone = |own: &Own| self.sinks.get(own.id.manager()).is_some_and(|sink| !sink.is_open());
        let has_ended = |own: &&Own| own.until <= now || is_gone(own) && !own.is_held;
        let of_key = |(key, all): (&LockKey, &Vec<Own>)| {
            all.iter().filter(has_ended).map(|own| (key.clone(), own.id.clone())).collect::<Vec<_>>()
        };
        self.own.iter().flat_map(of_key).collect()
    }

    /// The blocks that end now.
    pub(super) fn take_ended_blocks(&mut self, now: BootInstant) -> Vec<String> {
        self.blocks.extract_if(.., |(_, until)| *until <= now).map(|(handle, _)| handle).collect()
    }

    /// When the next of these ends.
    pub(super) fn next_end(&self) -> Option<BootInstant> {
        let own = self.own.values().flatten().map(|own| own.until);
        own.chain(self.blocks.iter().map(|(_, until)| *until)).min()
    }

    /// The time until the key may be free: known for a holder of this process, otherwise at most
    /// that of a session.
    pub(super) fn lease_left(&self, key: &LockKey, line: &Line, session: Duration, now: BootInstant) -> Duration {
        if let Some(block) = &line.block {
            return block.left;
        }
        let Some(first) = line.entries.first() else { return Duration::ZERO };
        let is_first = |own: &&Own| own.entry.as_ref().is_some_and(|entry| entry.handle == first.handle);
        let own = self.own.get(key).into_iter().flatten().find(is_first);
        own.map_or(session, |own| own.until.saturating_duration_since(now))
    }
}
