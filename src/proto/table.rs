//! The entries of one process, and their bounds.

use std::sync::Arc;

use super::{
    Action, Actions, DriverTypes, Env, Event, EventContext, FreeKey, GuardEnd, LockRequest, QueuePosition, Redeemed,
    Requested,
    entry::{Extra, LockEntry, StoredEntry},
    lease::LeaseBounds,
    section::{ReleaseOutcome, Section},
    sharing::Sharing,
    usage::Usage,
};
#[cfg(any(test, feature = "__internals"))]
use crate::limits::{LEASE, STORE_CALL_TIMEOUT};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    lock_key::{KeyMap, LockKey},
    owner::Owner,
    store::Heir,
};

/// All keys that this process waits for, holds, or has not released yet, or one shard of them.
///
/// I11: the table is bounded by the sections that run, and by the bounds of waiters and of pending
/// releases.
#[derive(Debug)]
pub struct LockTable<D: DriverTypes> {
    entries: KeyMap<Box<StoredEntry<D>>>,
    /// An entry without content, which the next new key uses.
    unused: Option<Box<StoredEntry<D>>>,
    /// Memory that the next key uses while it is requested.
    spare: Option<Box<Extra<D>>>,
    lease: LeaseBounds,
    /// What all tables of the process use.
    usage: Arc<Usage>,
    /// The keys in the store queue. Lost messages concern only these, however many keys are held.
    queued: KeyMap<()>,
    lagged_at: Option<BootInstant>,
    doubted_at: Option<BootInstant>,
    /// Of a request or a call.
    last_number: u64,
    is_shutting_down: bool,
}

#[cfg(any(test, feature = "__internals"))]
impl<D: DriverTypes> Default for LockTable<D> {
    fn default() -> Self {
        Self::new(LeaseBounds { longest: LEASE, call_timeout: STORE_CALL_TIMEOUT }, Arc::default())
    }
}

impl<D: DriverTypes> LockTable<D> {
    /// Creates a table whose acquires request these leases.
    pub fn new(lease: LeaseBounds, usage: Arc<Usage>) -> Self {
        Self {
            entries: KeyMap::default(),
            unused: None,
            spare: None,
            lease,
            usage,
            queued: KeyMap::default(),
            lagged_at: None,
            doubted_at: None,
            last_number: 0,
            is_shutting_down: false,
        }
    }

    /// Requests the key, which the store may have granted. Makes a waiter unless it is granted at
    /// once.
    pub fn request(
        &mut self,
        key: &LockKey,
        cx: EventContext<'_>,
        request: LockRequest<impl FnOnce() -> D::Waiter>,
        free: Option<FreeKey>,
        actions: &mut Actions<D>,
    ) -> Requested<D> {
        self.last_number += 1;
        let number = self.last_number;
        self.with(key, cx, actions, |entry, env| {
            if let Some(section) = free.and_then(|free| entry.hold_free(free, &request, env)) {
                return Requested::Granted(section);
            }
            let request = request.map_waiter(|make| make());
            let waiter = request.waiter.clone();
            entry.on_request(number, request, env);
            Requested::Waiting(number, waiter)
        })
    }

    /// Cancels a wait. Returns the position of the waiter, or `None` if its result has been sent or
    /// is about to be sent.
    pub fn cancel(
        &mut self,
        key: &LockKey,
        cx: EventContext<'_>,
        number: u64,
        actions: &mut Actions<D>,
    ) -> Option<QueuePosition> {
        self.with(key, cx, actions, |entry, env| entry.cancel(number, env))
    }

    /// Ends a guard of this section. Returns the outcome of its release, or `None` if
    /// [`Action::ReleaseOutcome`](super::Action::ReleaseOutcome) follows.
    ///
    /// After [`Released`](ReleaseOutcome::Released), the driver ends the checks of the grant, as
    /// after an [`Action::Untrack`], and frees the key without a call. If the store does not, it
    /// feeds in an [`Event::NotFreed`].
    pub fn end_guard(
        &mut self,
        cx: EventContext<'_>,
        section: &Arc<Section<D>>,
        end: GuardEnd,
        actions: &mut Actions<D>,
    ) -> Option<ReleaseOutcome> {
        let key = &section.grant.key;
        self.with(key, cx, actions, |entry, env| entry.on_guard_end(section, end, env))
    }

    /// Starts a section under a key that was granted in place of a ticket. `None`: the key cannot
    /// be used, and goes back to the ticket.
    pub fn redeem(
        &mut self,
        key: &LockKey,
        cx: EventContext<'_>,
        redeemed: Redeemed,
        ticket: &Arc<Heir>,
        actions: &mut Actions<D>,
    ) -> Option<Arc<Section<D>>> {
        self.with(key, cx, actions, |entry, env| entry.redeem(redeemed, ticket, env))
    }

    /// Has the key go back to its ticket after a call whose outcome is unknown: it may be executed
    /// until `in_doubt_until`.
    pub fn leave_to_ticket(
        &mut self,
        key: &LockKey,
        cx: EventContext<'_>,
        id: AcquisitionId,
        ticket: &Arc<Heir>,
        in_doubt_until: BootInstant,
        actions: &mut Actions<D>,
    ) {
        self.with(key, cx, actions, |entry, env| entry.leave_to_ticket(id, ticket, Some(in_doubt_until), env));
    }

    /// Passes an event to the entry of the key.
    pub fn handle_event(&mut self, key: &LockKey, cx: EventContext<'_>, event: Event<D>, actions: &mut Actions<D>) {
        self.with(key, cx, actions, |entry, env| entry.handle_event(event, env));
    }

    /// Records that messages of the store may have been lost. Returns the keys that are to receive
    /// [`Event::Lagged`]: those in the store queue. A call in flight notices the loss when its
    /// reply comes.
    pub fn lagged(&mut self, now: BootInstant) -> Vec<LockKey> {
        self.lagged_at = Some(now);
        self.queued.keys().cloned().collect()
    }

    /// Records that the store may have lost locks. The next section of a held key begins with a
    /// call of the store.
    pub fn doubt(&mut self, now: BootInstant) {
        self.doubted_at = Some(now);
    }

    /// Rejects new keys from now on. Returns the keys that are to receive [`Event::Shutdown`].
    pub fn shut_down(&mut self) -> Vec<LockKey> {
        self.is_shutting_down = true;
        self.entries.keys().cloned().collect()
    }

    /// Forgets the timer of this key for this instant, because it will not fire. Returns the
    /// waiters of the key.
    pub(crate) fn take_timer(&mut self, key: &LockKey, at: BootInstant) -> Vec<D::Waiter> {
        let waiters = self.look(key, |entry| {
            entry.wakeup_fired(at);
            entry.waiters().cloned().collect()
        });
        waiters.unwrap_or_default()
    }

    /// The number of guards that this owner has of the active section.
    pub fn hold_count(&mut self, key: &LockKey, owner: &Owner, now: BootInstant) -> u32 {
        self.look(key, |entry| entry.hold_count(owner, now)).unwrap_or(0)
    }

    /// The error that a request of this owner without a wait would get now, or `None` if the key
    /// may be free.
    pub fn rejection_without_wait(
        &mut self,
        key: &LockKey,
        owner: &Owner,
        sharing: Sharing,
        now: BootInstant,
    ) -> Option<crate::error::LockError> {
        self.look(key, |entry| entry.rejection_without_wait(owner, sharing, now)).flatten()
    }

    /// The number of guards of this section, zero if it is not active.
    pub fn hold_count_of(&mut self, section: &Arc<Section<D>>, now: BootInstant) -> u32 {
        self.look(&section.grant.key, |entry| entry.hold_count_of(section, now)).unwrap_or(0)
    }

    /// Whether this process waits for the key, holds it, or has not released it yet.
    pub(crate) fn contains(&self, key: &LockKey) -> bool {
        self.entries.contains_key(key)
    }

    /// The number of waiters of this key.
    pub fn waiting_for(&mut self, key: &LockKey) -> usize {
        self.look(key, |entry| entry.waiting()).unwrap_or(0)
    }

    /// Returns `true` if a record of this id may be left in the store.
    #[cfg(any(test, feature = "__internals"))]
    pub fn tracks(&mut self, key: &LockKey, id: &AcquisitionId) -> bool {
        self.look(key, |entry| entry.tracks(id)).unwrap_or(false)
    }

    /// The active sections.
    pub(crate) fn sections(&self) -> Vec<Arc<Section<D>>> {
        self.entries.values().flat_map(|entry| entry.sections()).cloned().collect()
    }

    /// The active sections, each with the numbers of its guards and of the waiters of its key.
    pub(crate) fn holding(&self) -> Vec<(Arc<Section<D>>, u32, usize)> {
        let entries = self.entries.values().flat_map(|entry| {
            let waiting = entry.waiting();
            entry.active_sections().map(move |active| (Arc::clone(&active.section), active.holds, waiting))
        });
        entries.collect()
    }

    /// The number of active sections.
    pub fn held_count(&self) -> usize {
        self.entries.values().map(|entry| entry.sections().count()).sum()
    }

    /// The number of waiters.
    #[cfg(any(test, feature = "__internals"))]
    pub fn waiting(&self) -> usize {
        self.entries.values().map(|stored| stored.waiting()).sum()
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns `true` if no key is waited for, held, or pending release.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of keys that are not only held.
    #[cfg(test)]
    pub(super) fn with_extra(&self) -> usize {
        self.entries.values().filter(|stored| stored.has_extra()).count()
    }

    /// Looks at an entry. `None`: there is none.
    fn look<T>(&mut self, key: &LockKey, look: impl FnOnce(&mut LockEntry<'_, D>) -> T) -> Option<T> {
        let stored = self.entries.get_mut(key)?;
        let result = look(&mut stored.open(&mut self.spare));
        stored.close(&mut self.spare);
        Some(result)
    }

    fn with<T>(
        &mut self,
        key: &LockKey,
        cx: EventContext<'_>,
        actions: &mut Actions<D>,
        event: impl FnOnce(&mut LockEntry<'_, D>, &mut Env<'_, D>) -> T,
    ) -> T {
        let mut env = Env {
            key,
            cx,
            last_number: &mut self.last_number,
            lease: self.lease,
            usage: &self.usage,
            lagged_at: self.lagged_at,
            doubted_at: self.doubted_at,
            is_shutting_down: self.is_shutting_down,
            actions,
        };
        let mut new = None;
        let stored = match self.entries.get_mut(key) {
            Some(stored) => stored,
            None => new.insert(self.unused.take().unwrap_or_else(|| Box::new(StoredEntry::new()))),
        };
        let mut entry = stored.open(&mut self.spare);
        let before = entry.counts();
        let result = event(&mut entry, &mut env);
        entry.schedule_wakeup(&mut env);
        let (after, is_idle) = (entry.counts(), entry.is_idle());
        if is_idle {
            stored.reset(&mut self.spare);
        } else {
            stored.close(&mut self.spare);
        }
        if before != after {
            self.usage.change(before, after);
            match (before.is_queued, after.is_queued) {
                (false, true) => drop(self.queued.insert(key.clone(), ())),
                (true, false) => drop(self.queued.remove(key)),
                _ => {}
            }
        }
        // I2: after each event, because it may have ended a release, or may have had one wait.
        if let Some(key) = self.usage.next_waiting_release() {
            actions.push(Action::SendWaiting(key));
        }
        match new {
            Some(entry) if !is_idle => drop(self.entries.insert(key.clone(), entry)),
            Some(entry) => self.unused = Some(entry),
            None if is_idle => self.unused = self.entries.remove(key),
            None => {}
        }
        result
    }
}
