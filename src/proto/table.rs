//! All conversations of one process, and their bounds. Pure, too.

use std::sync::Arc;

use super::{
    Actions, Ahead, Context, DriverTypes, Ending, Event, Request, entry::Conversation, lease::LeaseBounds,
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
pub struct Table<D: DriverTypes> {
    by_key: KeyMap<Conversation<D>>,
    lease: LeaseBounds,
    waiting: usize,
    giving_back: usize,
    /// Offers to ids that were forgotten, and are released.
    strays: usize,
    /// Those that wait in the store's line: a gap in its messages is theirs alone, however many keys are held.
    in_line: KeyMap<()>,
    gap_at: Option<BootInstant>,
    /// Why the newest release that failed did, while there are releases that have not reached the store.
    release_error: Option<StoreError>,
    next_place: u64,
    draining: bool,
}

#[cfg(any(test, feature = "__internals"))]
impl<D: DriverTypes> Default for Table<D> {
    fn default() -> Self {
        Self::new(LeaseBounds { longest: LEASE, call_timeout: STORE_CALL_TIMEOUT })
    }
}

impl<D: DriverTypes> Table<D> {
    /// The store is asked for such leases.
    pub fn new(lease: LeaseBounds) -> Self {
        Self {
            lease,
            by_key: KeyMap::default(),
            waiting: 0,
            giving_back: 0,
            strays: 0,
            in_line: KeyMap::default(),
            gap_at: None,
            release_error: None,
            next_place: 0,
            draining: false,
        }
    }

    /// Somebody wants the key. Its place, should it have to wait.
    pub fn request(
        &mut self,
        key: &LockKey,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        request: Request<D::Waiter>,
        actions: &mut Actions<D>,
    ) -> u64 {
        let place = self.next_place;
        self.next_place += 1;
        self.on(key, now, ids, Event::Request(place, request), actions);
        place
    }

    /// Whoever has this place has left. `None`: it was told already, or is about to be.
    pub fn leave(
        &mut self,
        key: &LockKey,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        place: u64,
        actions: &mut Actions<D>,
    ) -> Option<Ahead> {
        self.with(key, now, ids, actions, |conversation, cx| conversation.leave(place, cx))
    }

    /// A guard of this section is given back. What became of it; `None`: that follows.
    pub fn guard_ended(
        &mut self,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        section: &Arc<Section<D>>,
        ending: Ending,
        actions: &mut Actions<D>,
    ) -> Option<ReleaseOutcome> {
        let key = &section.grant.key;
        self.with(key, now, ids, actions, |conversation, cx| conversation.guard_ended(section, ending, cx))
    }

    /// Something has happened.
    pub fn on(
        &mut self,
        key: &LockKey,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        event: Event<D>,
        actions: &mut Actions<D>,
    ) {
        self.with(key, now, ids, actions, |conversation, cx| conversation.on(event, cx));
    }

    /// Messages may have been lost. The keys whose conversations are to [hear of it](Event::Gap): those that wait in the store's line.
    /// What is asked at this moment notices the gap when its answer comes.
    pub fn gap(&mut self, now: BootInstant) -> Vec<LockKey> {
        self.gap_at = Some(now);
        self.in_line.keys().cloned().collect()
    }

    /// From now on nothing new is started. The keys whose conversations are to [hear of it](Event::Drain).
    pub fn drain(&mut self) -> Vec<LockKey> {
        self.draining = true;
        self.by_key.keys().cloned().collect()
    }

    /// Whoever was to wake this conversation at that moment will not. Who waits in it.
    pub(crate) fn orphan(&mut self, key: &LockKey, at: BootInstant) -> Vec<D::Waiter> {
        let Some(conversation) = self.by_key.get_mut(key) else { return Vec::new() };
        conversation.disarm(at);
        conversation.waiters().cloned().collect()
    }

    /// How often this owner has this key.
    pub fn holds(&self, key: &LockKey, owner: &Owner, now: BootInstant) -> u32 {
        self.by_key.get(key).map_or(0, |conversation| conversation.holds(owner, now))
    }

    /// What a request of this owner that does not wait would be told now, as far as is known here.
    pub fn refusal(&self, key: &LockKey, owner: &Owner, now: BootInstant) -> Option<crate::error::LockError> {
        self.by_key.get(key)?.refusal(owner, now)
    }

    /// How often this section is held.
    pub fn holds_of(&self, section: &Arc<Section<D>>, now: BootInstant) -> u32 {
        self.by_key.get(&section.grant.key).map_or(0, |conversation| conversation.holds_of(section, now))
    }

    /// How many wait for this key.
    pub fn waiting_for(&self, key: &LockKey) -> usize {
        self.by_key.get(key).map_or(0, Conversation::waiting)
    }

    /// Whether something of this owner may be in the store still, as far as is known here.
    #[cfg(any(test, feature = "__internals"))]
    pub fn knows(&self, key: &LockKey, owner: &AcquisitionId) -> bool {
        self.by_key.get(key).is_some_and(|conversation| conversation.knows(owner))
    }

    /// How many sections run.
    pub fn held(&self) -> usize {
        self.by_key.values().filter(|conversation| conversation.is_held()).count()
    }

    /// How many wait.
    #[cfg(any(test, feature = "__internals"))]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Of how many keys something is known.
    #[cfg(any(test, feature = "__internals"))]
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Nobody wants, has or gives back anything.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    fn with<T>(
        &mut self,
        key: &LockKey,
        now: &LazyNow<'_>,
        ids: &AcquisitionIds,
        actions: &mut Actions<D>,
        event: impl FnOnce(&mut Conversation<D>, &mut Context<'_, D>) -> T,
    ) -> T {
        let mut cx = Context {
            key,
            now,
            ids,
            lease: self.lease,
            call_timeout: self.lease.call_timeout,
            waiting: self.waiting,
            way_back: self.giving_back < MAX_PENDING_RELEASES,
            stray_room: self.strays < MAX_UNCLAIMED_OFFER_RELEASES,
            gap_at: self.gap_at,
            release_error: &mut self.release_error,
            actions,
        };
        if let Some(conversation) = self.by_key.get_mut(key) {
            let (waited, gave_back) = (conversation.waiting(), conversation.giving_back());
            let (strayed, was_in_line) = (conversation.strays(), conversation.is_in_line());
            let answer = event(conversation, &mut cx);
            conversation.arm(&mut cx);
            self.waiting = self.waiting - waited + conversation.waiting();
            self.giving_back = self.giving_back - gave_back + conversation.giving_back();
            self.strays = self.strays - strayed + conversation.strays();
            match (was_in_line, conversation.is_in_line()) {
                (false, true) => drop(self.in_line.insert(key.clone(), ())),
                (true, false) => drop(self.in_line.remove(key)),
                _ => {}
            }
            if self.giving_back == 0 {
                // It says nothing of releases that are pending later.
                self.release_error = None;
            }
            if conversation.is_over() {
                self.by_key.remove(key);
            }
            return answer;
        }
        let mut conversation = Conversation::new(self.draining);
        let answer = event(&mut conversation, &mut cx);
        conversation.arm(&mut cx);
        self.waiting += conversation.waiting();
        self.giving_back += conversation.giving_back();
        self.strays += conversation.strays();
        if !conversation.is_over() {
            self.by_key.insert(key.clone(), conversation);
        }
        answer
    }
}
