//! The entries of this process, and the ends of their leases. Pure.

use std::{
    collections::{HashMap, hash_map},
    mem::replace,
    time::Duration,
};

use super::lines::{Line, OwnEntry};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    lock_key::LockKey,
    store::{EventSink, StoreEvent},
};

/// An acquisition of this process that may have an entry.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) id: AcquisitionId,
    /// The name of its entry, which that of no other call has: what was sent for an earlier call
    /// removes no entry of this one.
    pub(super) name: String,
    /// `None`: the outcome of its call is unknown.
    pub(super) entry: Option<OwnEntry>,
    pub(super) state: State,
    /// Held since an earlier sweep.
    is_old: bool,
    /// The node whose end the acquisition waits for: the one before its entry, or that of the entry
    /// that holds the key, whose end by another process is a revocation.
    watches: Option<String>,
    /// The server has replied that it watches.
    is_watching: bool,
    /// The end of the lease, of the offer or of the queue entry, or of the call that makes the
    /// entry.
    pub(super) until: BootInstant,
    pub(super) offer_ttl: Duration,
}

/// What an acquisition does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum State {
    Waiting,
    Held,
    /// Its entry is being removed. A call that read the line before must not count on it.
    Ending,
}

/// The acquisitions of this process, its blocks, and its managers.
#[derive(Default)]
pub(super) struct Table {
    own: HashMap<LockKey, Vec<Own>>,
    /// The blocks that this process ends on time. Every process ends those that it finds expired.
    pub(super) blocks: Vec<(String, BootInstant)>,
    pub(super) sinks: HashMap<String, EventSink>,
    /// The acquisitions that wait for the end of each of these nodes.
    watched: HashMap<String, Vec<(LockKey, String)>>,
    calls: u64,
    /// The keys that a call without a wait has found busy, and when.
    busy: HashMap<LockKey, BootInstant>,
}

/// How long a key is expected to stay busy.
const BUSY_FOR: Duration = Duration::from_secs(1);
/// The keys that are expected to be busy.
const MAX_BUSY: usize = 1_024;
/// The holders that are watched in one sweep.
const MAX_WATCHES: usize = 128;

impl Table {
    pub(super) fn get(&mut self, key: &LockKey, id: &AcquisitionId) -> Option<&mut Own> {
        self.own.get_mut(key)?.iter_mut().find(|own| own.id == *id)
    }

    pub(super) fn named(&mut self, key: &LockKey, name: &str) -> Option<&mut Own> {
        self.own.get_mut(key)?.iter_mut().find(|own| own.name == name)
    }

    /// A call without a wait has found the key busy.
    pub(super) fn found_busy(&mut self, key: &LockKey, now: BootInstant) {
        if self.busy.len() >= MAX_BUSY {
            self.busy.clear();
        }
        self.busy.insert(key.clone(), now);
    }

    /// Whether a call without a wait had better read the line before it appends an entry: one that
    /// is refused would cost two writes.
    pub(super) fn may_be_busy(&self, key: &LockKey, now: BootInstant) -> bool {
        self.busy.get(key).is_some_and(|found_at| now.saturating_duration_since(*found_at) < BUSY_FOR)
    }

    /// Before the call that makes its entry: the caller may be gone when the call is executed.
    /// Returns the name of the entry. `None`: another call of the acquisition is under way.
    pub(super) fn begin(
        &mut self,
        key: &LockKey,
        id: &AcquisitionId,
        until: BootInstant,
        offer_ttl: Duration,
    ) -> Option<String> {
        if self.get(key, id).is_some() {
            return None;
        }
        self.calls += 1;
        let name = format!("{id}+{}", self.calls);
        let own = Own {
            id: id.clone(),
            name: name.clone(),
            entry: None,
            state: State::Waiting,
            is_old: false,
            watches: None,
            is_watching: false,
            until,
            offer_ttl,
        };
        self.own.entry(key.clone()).or_default().push(own);
        Some(name)
    }

    /// The call has made this entry. `false`: the call has ended since, and the entry was removed.
    pub(super) fn made(&mut self, key: &LockKey, name: &str, entry: &OwnEntry) -> bool {
        self.named(key, name).map(|own| own.entry = Some(entry.clone())).is_some()
    }

    pub(super) fn remove(&mut self, key: &LockKey, name: &str) {
        self.unwatch(key, name);
        if let hash_map::Entry::Occupied(mut all) = self.own.entry(key.clone()) {
            all.get_mut().retain(|own| own.name != name);
            if all.get().is_empty() {
                all.remove();
            }
        }
    }

    /// Before the call that watches a node. `false`: the server watches it.
    pub(super) fn watch(&mut self, key: &LockKey, name: &str, node: &str) -> bool {
        let Some(own) = self.named(key, name) else { return false };
        if own.watches.as_deref() == Some(node) {
            return !own.is_watching;
        }
        self.unwatch(key, name);
        if let Some(own) = self.named(key, name) {
            (own.watches, own.is_watching) = (Some(node.to_owned()), false);
        }
        self.watched.entry(node.to_owned()).or_default().push((key.clone(), name.to_owned()));
        true
    }

    /// The reply to the call that watches.
    pub(super) fn is_watched(&mut self, key: &LockKey, name: &str, node: &str) {
        if let Some(own) = self.named(key, name) {
            own.is_watching = own.watches.as_deref() == Some(node);
        }
    }

    pub(super) fn unwatch(&mut self, key: &LockKey, name: &str) {
        let Some(node) = self.named(key, name).and_then(|own| own.watches.take()) else { return };
        if let hash_map::Entry::Occupied(mut all) = self.watched.entry(node) {
            all.get_mut().retain(|(_, other)| other != name);
            if all.get().is_empty() {
                all.remove();
            }
        }
    }

    /// The events of all watches are lost.
    pub(super) fn forget_watches(&mut self) {
        self.watched.clear();
        self.own.values_mut().flatten().for_each(|own| (own.watches, own.is_watching) = (None, false));
    }

    /// The entries that hold their keys since the call before, and are not watched.
    pub(super) fn old_holders(&mut self) -> Vec<(LockKey, String, String)> {
        let all = self.own.iter_mut().flat_map(|(key, all)| all.iter_mut().map(move |own| (key, own)));
        let old = |(key, own): (&LockKey, &mut Own)| {
            let is_old = own.state == State::Held && replace(&mut own.is_old, true) && !own.is_watching;
            is_old.then_some((key.clone(), own.name.clone(), own.entry.clone()?.handle))
        };
        all.filter_map(old).take(MAX_WATCHES).collect()
    }

    /// A node is gone: what the managers learn. An end by this process itself is no event.
    pub(super) fn gone(&mut self, node: &str, now: BootInstant) -> Vec<(EventSink, StoreEvent)> {
        let mut events = Vec::new();
        for (key, name) in self.watched.remove(node).unwrap_or_default() {
            let Some(own) = self.named(&key, &name) else { continue };
            (own.watches, own.is_watching) = (None, false);
            let id = own.id.clone();
            let is_its_own = own.entry.as_ref().is_some_and(|entry| entry.handle == node);
            let (manager, event) = match (own.state, is_its_own) {
                (State::Held, true) => {
                    self.remove(&key, &name);
                    (id.manager().to_owned(), StoreEvent::Revoked { key, id })
                }
                // Its entry is the first one, or its next acquire learns that it is not.
                (State::Waiting, false) => {
                    own.until = now.saturating_add(own.offer_ttl);
                    (id.manager().to_owned(), StoreEvent::Offered { key, id })
                }
                _ => continue,
            };
            events.extend(self.sinks.get(&manager).map(|sink| (sink.clone(), event)));
        }
        events
    }

    /// Ends all acquisitions: the next session does not keep their entries, which may be there for
    /// a while. What the managers of their holders learn.
    pub(super) fn end_all(&mut self, now: BootInstant) -> Vec<(EventSink, StoreEvent)> {
        let mut events = Vec::new();
        for (key, own) in self.own.iter_mut().flat_map(|(key, all)| all.iter_mut().map(move |own| (key, own))) {
            let is_held = replace(&mut own.state, State::Ending) == State::Held;
            own.until = now;
            if let Some(sink) = self.sinks.get(own.id.manager()).filter(|_| is_held) {
                events.push((sink.clone(), StoreEvent::Revoked { key: key.clone(), id: own.id.clone() }));
            }
        }
        events
    }

    /// Ends the acquisitions of this key, or of all keys, whose time has passed, and those that
    /// wait for a manager that is gone. Their entries are to be removed.
    pub(super) fn take_ended(&mut self, key: Option<&LockKey>, now: BootInstant) -> Vec<(LockKey, String)> {
        let (mut ended, sinks) = (Vec::new(), &self.sinks);
        let mut end = |key: &LockKey, own: &mut Own| {
            let is_gone = || sinks.get(own.id.manager()).is_some_and(|sink| !sink.is_open());
            if own.until <= now || own.state == State::Waiting && is_gone() {
                own.state = State::Ending;
                ended.push((key.clone(), own.name.clone()));
            }
        };
        match key {
            Some(key) => self.own.get_mut(key).into_iter().flatten().for_each(|own| end(key, own)),
            None => self.own.iter_mut().for_each(|(key, all)| all.iter_mut().for_each(|own| end(key, own))),
        }
        ended
    }

    /// A block that ends now.
    pub(super) fn ended_block(&self, now: BootInstant) -> Option<String> {
        self.blocks.iter().find(|(_, until)| *until <= now).map(|(handle, _)| handle.clone())
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
