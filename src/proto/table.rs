//! All conversations of one process, and their bounds. Pure, too.

use std::sync::Arc;

use super::{
    Actions, DriverTypes, Env, Event, GuardEnd, LockRequest, QueuePosition, entry::LockEntry, lease::LeaseBounds,
    section::Section,
};
#[cfg(any(test, feature = "__internals"))]
use crate::{
    acquisition::AcquisitionId,
    limits::{LEASE, STORE_CALL_TIMEOUT},
};
use crate::{
    acquisition::AcquisitionIds,
    clock::{BootInstant, LazyNow},
    limits::{MAX_PENDING_RELEASES, MAX_UNCLAIMED_OFFER_RELEASES},
    lock_key::{KeyMap, LockKey},
    owner::Owner,
    proto::section::ReleaseOutcome,
    store::StoreError,
};

/// An entry is here while somebody wants a key, has it, or has not given it back yet.
///
/// I11: bounded by the sections that run, the waiters it admits, and the give-backs it admits.
#[derive(Debug)]
pub struct LockTable<D: DriverTypes> {
    entries: KeyMap<LockEntry<D>>,
    lease: LeaseBounds,
    waiting: usize,
    pending_releases: usize,
    /// Offers to ids that were forgotten, and are released.
    unclaimed_offer_releases: usize,
    /// Those that wait in the store's line: a gap in its messages is theirs alone, however many keys are held.
    queued: KeyMap<()>,
    lagged_at: Option<BootInstant>,
    /// Why the newest release that failed did, while there are releases that have not reached the store.
    release_error: Option<StoreError>,
    next_request: u64,
    is_shutting_down: bool,
}

#[cfg(any(test, feature = "__internals"))]
impl<D: DriverTypes> Default for LockTable<D> {
    fn default() -> Self {
        Self::new(LeaseBounds { longest: LEASE, call_timeout: STORE_CALL_TIMEOUT })
    }
}

impl<D: DriverTypes> LockTable<D> {
    /// The store is asked for such leases.
    pub fn new(lease: LeaseBounds) -> Self {
        Self {
            lease,
            entries: KeyMap::default(),
            waiting: 0,
            pending_releases: 0,
            unclaimed_offer_releases: 0,
            queued: KeyMap::default(),
            lagged_at: None,
            release_error: None,
            next_request: 0,
            is_shutting_down: false,
        }
    }

    /// Somebody wants the key. Its place, should it have to wait.
    pub fn request(
        &mut self,
        key: &LockKey,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        request: LockRequest<D::Waiter>,
        actions: &mut Actions<D>,
    ) -> u64 {
        let place = self.next_request;
        self.next_request += 1;
        self.handle_event(key, now, ids, Event::Request(place, request), actions);
        place
    }

    /// Whoever has this place has left. `None`: it was told already, or is about to be.
    pub fn cancel(
        &mut self,
        key: &LockKey,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        place: u64,
        actions: &mut Actions<D>,
    ) -> Option<QueuePosition> {
        self.with(key, now, ids, actions, |entry, env| entry.cancel(place, env))
    }

    /// A guard of this section is given back. What became of it; `None`: that follows.
    pub fn end_guard(
        &mut self,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        section: &Arc<Section<D>>,
        ending: GuardEnd,
        actions: &mut Actions<D>,
    ) -> Option<ReleaseOutcome> {
        let key = &section.grant.key;
        self.with(key, now, ids, actions, |entry, env| entry.on_guard_end(section, ending, env))
    }

    /// Something has happened.
    pub fn handle_event(
        &mut self,
        key: &LockKey,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        event: Event<D>,
        actions: &mut Actions<D>,
    ) {
        self.with(key, now, ids, actions, |entry, env| entry.handle_event(event, env));
    }

    /// Messages may have been lost. The keys whose conversations are to [hear of it](Event::Gap): those that wait in the store's line.
    /// What is asked at this moment notices the gap when its answer comes.
    pub fn lagged(&mut self, now: BootInstant) -> Vec<LockKey> {
        self.lagged_at = Some(now);
        self.queued.keys().cloned().collect()
    }

    /// From now on nothing new is started. The keys whose conversations are to [hear of it](Event::Drain).
    pub fn shut_down(&mut self) -> Vec<LockKey> {
        self.is_shutting_down = true;
        self.entries.keys().cloned().collect()
    }

    /// Whoever was to wake this entry at that moment will not. Who waits in it.
    pub(crate) fn take_timer(&mut self, key: &LockKey, at: BootInstant) -> Vec<D::Waiter> {
        let Some(entry) = self.entries.get_mut(key) else { return Vec::new() };
        entry.wakeup_fired(at);
        entry.waiters().cloned().collect()
    }

    /// How often this owner has this key.
    pub fn hold_count(&self, key: &LockKey, owner: &Owner, now: BootInstant) -> u32 {
        self.entries.get(key).map_or(0, |entry| entry.hold_count(owner, now))
    }

    /// What a request of this owner that does not wait would be told now, as far as is known here.
    pub fn rejection_without_wait(
        &self,
        key: &LockKey,
        owner: &Owner,
        now: BootInstant,
    ) -> Option<crate::error::LockError> {
        self.entries.get(key)?.rejection_without_wait(owner, now)
    }

    /// How often this section is held.
    pub fn hold_count_of(&self, section: &Arc<Section<D>>, now: BootInstant) -> u32 {
        self.entries.get(&section.grant.key).map_or(0, |entry| entry.hold_count_of(section, now))
    }

    /// How many wait for this key.
    pub fn waiting_for(&self, key: &LockKey) -> usize {
        self.entries.get(key).map_or(0, LockEntry::waiting)
    }

    /// Whether something of this owner may be in the store still, as far as is known here.
    #[cfg(any(test, feature = "__internals"))]
    pub fn tracks(&self, key: &LockKey, owner: &AcquisitionId) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.tracks(owner))
    }

    /// How many sections run.
    pub fn held_count(&self) -> usize {
        self.entries.values().filter(|entry| entry.is_held()).count()
    }

    /// How many wait.
    #[cfg(any(test, feature = "__internals"))]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Of how many keys something is known.
    #[cfg(any(test, feature = "__internals"))]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Nobody wants, has or gives back anything.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn with<T>(
        &mut self,
        key: &LockKey,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        actions: &mut Actions<D>,
        event: impl FnOnce(&mut LockEntry<D>, &mut Env<'_, D>) -> T,
    ) -> T {
        let mut env = Env {
            key,
            now,
            ids,
            lease: self.lease,
            call_timeout: self.lease.call_timeout,
            waiting: self.waiting,
            can_reserve_release: self.pending_releases < MAX_PENDING_RELEASES,
            can_release_unclaimed_offer: self.unclaimed_offer_releases < MAX_UNCLAIMED_OFFER_RELEASES,
            lagged_at: self.lagged_at,
            release_error: &mut self.release_error,
            actions,
        };
        if let Some(entry) = self.entries.get_mut(key) {
            let (waited, gave_back) = (entry.waiting(), entry.pending_release_count());
            let (strayed, was_in_line) = (entry.unclaimed_offer_releases(), entry.is_queued());
            let answer = event(entry, &mut env);
            entry.schedule_wakeup(&mut env);
            self.waiting = self.waiting - waited + entry.waiting();
            self.pending_releases = self.pending_releases - gave_back + entry.pending_release_count();
            self.unclaimed_offer_releases = self.unclaimed_offer_releases - strayed + entry.unclaimed_offer_releases();
            match (was_in_line, entry.is_queued()) {
                (false, true) => drop(self.queued.insert(key.clone(), ())),
                (true, false) => drop(self.queued.remove(key)),
                _ => {}
            }
            if self.pending_releases == 0 {
                // It says nothing of releases that are pending later.
                self.release_error = None;
            }
            if entry.is_idle() {
                self.entries.remove(key);
            }
            return answer;
        }
        let mut entry = LockEntry::new(self.is_shutting_down);
        let answer = event(&mut entry, &mut env);
        entry.schedule_wakeup(&mut env);
        self.waiting += entry.waiting();
        self.pending_releases += entry.pending_release_count();
        self.unclaimed_offer_releases += entry.unclaimed_offer_releases();
        if !entry.is_idle() {
            self.entries.insert(key.clone(), entry);
        }
        answer
    }
}
