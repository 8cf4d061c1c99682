//! The rules of the contract. Pure: time is an argument, and events are outputs.

use std::{
    collections::{BTreeSet, VecDeque, hash_map},
    time::{Duration, UNIX_EPOCH},
};

use smallvec::SmallVec;

use super::{list::Page, records::Records};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    lock_key::{KeyMap, LockKey},
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, ForceReleaseReply, ForceReleaseRequest, Holder, IfBusy,
        KeyStatus, QueueConfig, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreEvent, YieldReply,
        YieldRequest,
    },
    sync::Mutex,
    trace::SectionTrace,
};

/// Holder and queue of each key, of all keys or of one shard.
#[derive(Debug, Default)]
pub(super) struct Keys {
    by_key: KeyMap<KeyState>,
    last_fence: u64,
    /// The number of states at which expired ones are removed.
    sweep_threshold: usize,
    /// Blocked keys without a holder, by the end of the block. An entry may be out of date.
    blocked: BTreeSet<(BootInstant, LockKey)>,
}

/// The state of one key. A free key without waiters has no state.
#[derive(Debug, Default)]
struct KeyState {
    /// One, unless several acquisitions hold the key.
    places: SmallVec<[Place; 1]>,
    /// Most keys never have one.
    queue: Option<Box<Queue>>,
}

/// A place of a key, which is taken until its end. The place of an acquisition that holds the key
/// alone is the whole key.
#[derive(Debug)]
struct Place {
    id: AcquisitionId,
    state: PlaceState,
    until: BootInstant,
    /// The time of the grant in microseconds since the Unix epoch, or one more than the fence
    /// before it.
    fence: u64,
    trace: Option<SectionTrace>,
    /// The trace of the section before, of a place that was offered.
    after: Option<SectionTrace>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlaceState {
    Held,
    /// Without a holder.
    Blocked,
    /// Blocked after a forced release.
    Revoked,
}

/// What the free places of a key were used for.
#[derive(Default)]
struct Served {
    /// The fence of the requester, if it was its turn.
    fence: Option<u64>,
    has_offered: bool,
}

/// The waiters of one key.
#[derive(Debug, Default)]
struct Queue {
    ids: VecDeque<AcquisitionId>,
    /// The end of all queue entries, if no waiter repeats its `acquire`.
    expires_at: BootInstant,
}

/// The environment of one operation.
pub(super) struct OpContext<'a> {
    pub(super) now: BootInstant,
    pub(super) wall_clock_us: &'a dyn Fn() -> u64,
    /// Whether the process of an acquisition has an open sink.
    pub(super) is_alive: &'a dyn Fn(&AcquisitionId) -> bool,
    /// The records of all keys. Locked only for an operation that names a record.
    pub(super) records: &'a Mutex<Records>,
    /// Events to send after the operation.
    pub(super) events: &'a mut Vec<StoreEvent>,
    /// The trace of the section that the operation ends.
    pub(super) ended: Option<SectionTrace>,
}

impl Keys {
    /// Fewer states than this are not searched for expired ones.
    const SWEEP_MIN_LEN: usize = 64;
    /// The number of formerly blocked keys that each acquisition may remove: many more than one
    /// acquisition can block.
    const PRUNED_PER_ACQUIRE: usize = 64;

    pub(super) fn acquire(&mut self, cx: &mut OpContext<'_>, request: AcquireRequest) -> AcquireReply {
        self.sweep(cx.now);
        if request.demand.takes_record()
            && let Some(record) = cx.records.lock().get(&request.key, cx.now)
        {
            self.leave(cx, &request);
            return AcquireReply::Recorded(record);
        }
        if let Some(holder) = &request.in_place_of {
            return self.take_place(cx, &request, holder);
        }
        let Some(state) = self.by_key.get_mut(&request.key) else {
            let fence = self.insert(cx, request.key, request.id, request.lease, request.trace);
            return AcquireReply::granted(fence);
        };
        if state.is_superseded(&request.id, cx.now) {
            return AcquireReply::Superseded;
        }
        // A grant, or an offer that is accepted: the same fence, and a full lease. A delayed copy
        // must not shorten it.
        if let Some(place) = state.held_by(&request.id, cx.now) {
            place.until = place.until.max(cx.now.saturating_add(request.lease));
            place.trace = request.trace;
            return AcquireReply::Granted { fence: place.fence, after: place.after.clone() };
        }
        let requester = Some((&request.id, request.lease));
        let served = state.serve(cx, &request.key, request.queue, &mut self.last_fence, requester);
        if let Some(fence) = served.fence {
            if let Some(place) = state.held_by(&request.id, cx.now) {
                place.trace = request.trace;
            }
            return AcquireReply::granted(fence);
        }
        let lease_left = state.time_left_for(&request.id, cx.now);
        match request.if_busy {
            IfBusy::Fail => AcquireReply::Busy { lease_left, held_by: state.trace() },
            IfBusy::Enqueue => {
                let reply = state.enqueue(cx, &request.id, request.queue, lease_left);
                if matches!(reply, AcquireReply::Queued { .. }) {
                    let older = state.replaced_by(&request.id, cx.now);
                    cx.events.extend(older.map(|id| StoreEvent::Revoked { key: request.key.clone(), id: id.clone() }));
                }
                reply
            }
        }
    }

    /// Grants the key to an acquisition in place of its holder, and to no other.
    fn take_place(&mut self, cx: &OpContext<'_>, request: &AcquireRequest, holder: &AcquisitionId) -> AcquireReply {
        let Some(state) = self.by_key.get_mut(&request.key) else {
            return AcquireReply::busy(Duration::ZERO);
        };
        let until = cx.now.saturating_add(request.lease);
        if let Some(place) = state.held_by(&request.id, cx.now) {
            place.until = place.until.max(until);
            return AcquireReply::granted(place.fence);
        }
        match state.held_by(holder, cx.now) {
            Some(place) => {
                let new = Place::new(cx, &mut self.last_fence, request.id.clone(), request.lease);
                *place = Place { trace: request.trace.clone(), ..new };
                AcquireReply::granted(place.fence)
            }
            None => AcquireReply::Busy { lease_left: state.time_left(cx.now), held_by: state.trace() },
        }
    }

    /// Grants a key without a state. `None`: the key has one.
    pub(super) fn acquire_free(
        &mut self,
        cx: &OpContext<'_>,
        key: &LockKey,
        id: &AcquisitionId,
        lease: Duration,
        trace: Option<&SectionTrace>,
    ) -> Option<u64> {
        self.sweep(cx.now);
        let is_free = !self.by_key.contains_key(key);
        is_free.then(|| self.insert(cx, key.clone(), id.clone(), lease, trace.cloned()))
    }

    /// Frees a key that this acquisition holds, and that never had a waiter.
    pub(super) fn release_free(&mut self, now: BootInstant, key: &LockKey, id: &AcquisitionId) -> bool {
        let is_only = |state: &mut KeyState| state.held_by(id, now).is_some() && state.queue.is_none();
        let is_freed = self.by_key.get_mut(key).is_some_and(is_only);
        if is_freed {
            self.by_key.remove(key);
        }
        is_freed
    }

    pub(super) fn renew(&mut self, now: BootInstant, request: &RenewRequest) -> RenewReply {
        let Some(state) = self.by_key.get_mut(&request.key) else { return RenewReply::NotHolder };
        let Some(place) = state.held_by(&request.id, now) else { return RenewReply::NotHolder };
        // A delayed renewal must not shorten the lease that a later call has set.
        place.until = place.until.max(now.saturating_add(request.lease));
        if state.is_superseded(&request.id, now) { RenewReply::Superseded } else { RenewReply::Extended }
    }

    /// Changes only what this acquisition owns (I1).
    pub(super) fn release(&mut self, cx: &mut OpContext<'_>, request: &ReleaseRequest) -> ReleaseReply {
        let Some(state) = self.by_key.get_mut(&request.key) else { return not_holder(cx, request) };
        cx.ended.clone_from(&request.trace);
        state.dequeue(&request.id);
        if let Some(heir) = &request.heir {
            if let Some(place) = state.held_by(&request.id, cx.now) {
                (place.id, place.until) = (heir.id.clone(), cx.now.saturating_add(heir.lease));
                return ReleaseReply::Freed;
            }
            if state.held_by(&heir.id, cx.now).is_some() {
                return ReleaseReply::Freed;
            }
        }
        let reply = match state.held_by(&request.id, cx.now) {
            None => not_holder(cx, request),
            Some(place) => {
                (place.state, place.until) = (PlaceState::Blocked, cx.now.saturating_add(request.block_for));
                if let Some(new) = &request.record {
                    cx.records.lock().insert(request.key.clone(), request.id.clone(), new, cx.now);
                }
                if !request.block_for.is_zero() {
                    self.blocked.insert((place.until, request.key.clone()));
                }
                ReleaseReply::Freed
            }
        };
        // A waiter has left: those behind it may fit beside the holders.
        let may_fit = reply == ReleaseReply::Freed || state.time_left(cx.now) > Duration::ZERO;
        let has_offered =
            may_fit && state.serve(cx, &request.key, request.queue, &mut self.last_fence, None).has_offered;
        if state.is_garbage(cx.now) {
            self.by_key.remove(&request.key);
        }
        if reply == ReleaseReply::Freed && has_offered { ReleaseReply::HandedOff } else { reply }
    }

    pub(super) fn yield_to_queue(&mut self, cx: &mut OpContext<'_>, request: &YieldRequest) -> YieldReply {
        let acquire = AcquireRequest::new(
            request.key.clone(),
            request.next_id.clone(),
            request.lease,
            IfBusy::Enqueue,
            request.queue,
            request.valid_for,
        )
        .demand(request.demand);
        let acquire = AcquireRequest { trace: request.trace.clone(), ..acquire };
        cx.ended.clone_from(&request.ended);
        if let Some(state) = self.by_key.get_mut(&request.key)
            && let Some(place) = state.held_by(&request.id, cx.now)
        {
            if place.fence != request.fence {
                return YieldReply::Extended { fence: place.fence };
            }
            place.until = cx.now;
            if !state.serve(cx, &request.key, request.queue, &mut self.last_fence, None).has_offered {
                let place = state.grant(cx, &mut self.last_fence, request.id.clone(), request.lease);
                place.trace = acquire.trace;
                return YieldReply::Extended { fence: place.fence };
            }
        }
        YieldReply::NotHolder(self.acquire(cx, acquire))
    }

    pub(super) fn delete_record(&self, cx: &OpContext<'_>, key: &LockKey) -> DeleteRecordReply {
        if self.by_key.get(key).is_some_and(|state| state.is_held(cx.now)) {
            return DeleteRecordReply::Busy;
        }
        cx.records.lock().delete(key, cx.now)
    }

    pub(super) fn inspect(&self, now: BootInstant, key: &LockKey) -> KeyStatus {
        self.by_key.get(key).map_or(KeyStatus::new(None, Duration::ZERO, 0), |state| state.status(now))
    }

    /// Adds the keys after a position to the page, in their order.
    pub(super) fn list(&self, now: BootInstant, after: Option<&LockKey>, contended_only: bool, page: &mut Page) {
        let is_listed = |state: &KeyState| {
            if contended_only { state.waiting(now) > 0 } else { !state.is_garbage(now) }
        };
        for (key, state) in &self.by_key {
            if page.has_place_for(key) && is_listed(state) && after.is_none_or(|after| key > after) {
                page.add(key.clone(), state.status(now));
            }
        }
    }

    pub(super) fn force_release(&mut self, cx: &mut OpContext<'_>, request: &ForceReleaseRequest) -> ForceReleaseReply {
        let hash_map::Entry::Occupied(mut occupied) = self.by_key.entry(request.key.clone()) else {
            return ForceReleaseReply::Free;
        };
        let state = occupied.get_mut();
        let (left, until) = (state.time_left(cx.now), cx.now.saturating_add(request.block_for));
        let mut holders = Vec::new();
        let is_meant = |place: &Place| request.holder.as_ref().is_none_or(|holder| *holder == place.id);
        for place in state.places.iter_mut().filter(|place| place.until > cx.now && is_meant(place)) {
            if place.state == PlaceState::Held {
                (place.state, place.until) = (PlaceState::Revoked, until);
                self.blocked.insert((until, request.key.clone()));
            }
            // The former holder may still run: the event of an earlier call may be lost.
            if place.state == PlaceState::Revoked {
                cx.events.push(StoreEvent::Revoked { key: request.key.clone(), id: place.id.clone() });
                holders.push(place.id.clone());
            }
        }
        let reply = if !holders.is_empty() {
            ForceReleaseReply::Revoked { holders }
        } else if left.is_zero() || request.holder.is_some() {
            ForceReleaseReply::Free
        } else {
            state.places.clear();
            ForceReleaseReply::Unblocked { blocked_for: left }
        };
        state.serve(cx, &request.key, request.queue, &mut self.last_fence, None);
        if state.is_garbage(cx.now) {
            occupied.remove();
        }
        reply
    }

    /// The number of keys with a holder.
    pub(super) fn held_count(&self, now: BootInstant) -> usize {
        self.by_key.values().filter(|state| state.is_held(now)).count()
    }

    /// The number of keys that need a state.
    pub(super) fn size(&self, now: BootInstant) -> usize {
        self.by_key.values().filter(|state| !state.is_garbage(now)).count()
    }

    /// Removes the states of crashed holders. A search each time the table has doubled has a
    /// constant cost per acquisition, and bounds the table to twice the live keys.
    fn sweep(&mut self, now: BootInstant) {
        self.prune_unblocked(now);
        if self.by_key.len() >= self.sweep_threshold.max(Self::SWEEP_MIN_LEN) {
            self.by_key.retain(|_, state| !state.is_garbage(now));
            self.sweep_threshold = 2 * self.by_key.len();
        }
    }
}

impl Keys {
    /// Grants a key that has no state.
    fn insert(
        &mut self,
        cx: &OpContext<'_>,
        key: LockKey,
        id: AcquisitionId,
        lease: Duration,
        trace: Option<SectionTrace>,
    ) -> u64 {
        let place = Place { trace, ..Place::new(cx, &mut self.last_fence, id, lease) };
        let fence = place.fence;
        self.by_key.insert(key, KeyState { places: SmallVec::from_buf([place]), queue: None });
        fence
    }

    /// Ends an acquisition that gets a record: its offer, or the free key, goes to the next waiter.
    fn leave(&mut self, cx: &mut OpContext<'_>, request: &AcquireRequest) {
        let hash_map::Entry::Occupied(mut occupied) = self.by_key.entry(request.key.clone()) else { return };
        let state = occupied.get_mut();
        state.dequeue(&request.id);
        if let Some(place) = state.held_by(&request.id, cx.now) {
            place.until = cx.now;
        }
        state.serve(cx, &request.key, request.queue, &mut self.last_fence, None);
        if occupied.get().is_garbage(cx.now) {
            occupied.remove();
        }
    }

    /// Removes the states of keys whose block has ended, a few with each acquisition, and shrinks
    /// the table: a client that causes many lock-delays leaves no memory behind.
    fn prune_unblocked(&mut self, now: BootInstant) {
        for _ in 0..Self::PRUNED_PER_ACQUIRE {
            if self.blocked.first().is_none_or(|(until, _)| *until > now) {
                break;
            }
            if let Some((_, key)) = self.blocked.pop_first()
                && let hash_map::Entry::Occupied(occupied) = self.by_key.entry(key)
                && occupied.get().is_garbage(now)
            {
                occupied.remove();
            }
        }
        // The cost of a shrink is proportional to the entries that remain.
        if self.by_key.capacity() / 4 > self.by_key.len().max(Self::SWEEP_MIN_LEN) {
            self.by_key.shrink_to(2 * self.by_key.len());
            self.sweep_threshold = 2 * self.by_key.len();
        }
    }
}

impl Place {
    /// A place with the next fence, which is larger than each one before it, and at least the
    /// clock.
    fn new(cx: &OpContext<'_>, last_fence: &mut u64, id: AcquisitionId, lease: Duration) -> Self {
        *last_fence = (cx.wall_clock_us)().max(last_fence.saturating_add(1));
        let until = cx.now.saturating_add(lease);
        Self { id, state: PlaceState::Held, until, fence: *last_fence, trace: None, after: None }
    }

    fn is_held(&self, now: BootInstant) -> bool {
        self.state == PlaceState::Held && self.until > now
    }

    fn holder(&self) -> Holder {
        let since = UNIX_EPOCH.checked_add(Duration::from_micros(self.fence));
        Holder { since, ..Holder::new(self.id.clone(), self.fence) }
    }
}

impl KeyState {
    fn is_held(&self, now: BootInstant) -> bool {
        self.places.iter().any(|place| place.is_held(now))
    }

    /// Whether the state can be removed.
    fn is_garbage(&self, now: BootInstant) -> bool {
        self.time_left(now).is_zero() && self.waiting(now) == 0
    }

    /// The number of waiters.
    fn waiting(&self, now: BootInstant) -> usize {
        self.queue.as_ref().filter(|queue| queue.expires_at > now).map_or(0, |queue| queue.ids.len())
    }

    fn status(&self, now: BootInstant) -> KeyStatus {
        let holders = self.places.iter().filter(|place| place.is_held(now)).map(Place::holder);
        KeyStatus::new(holders, self.time_left(now), self.waiting(now))
    }

    /// The time until the last place is free.
    fn time_left(&self, now: BootInstant) -> Duration {
        let until = self.places.iter().map(|place| place.until).max();
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }

    /// The time until this acquisition may fit: the end of the last place, or beside others that of
    /// the first one.
    fn time_left_for(&self, id: &AcquisitionId, now: BootInstant) -> Duration {
        if id.max_holders() == 1 {
            return self.time_left(now);
        }
        let left = self.places.iter().map(|place| place.until.saturating_duration_since(now));
        left.filter(|left| !left.is_zero()).min().unwrap_or_default()
    }

    /// The place that this acquisition holds.
    fn held_by(&mut self, id: &AcquisitionId, now: BootInstant) -> Option<&mut Place> {
        self.places.iter_mut().find(|place| place.id == *id && place.is_held(now))
    }

    /// Whether one place is the whole key.
    fn is_taken_whole(&self) -> bool {
        self.places.iter().any(|place| place.id.max_holders() == 1)
    }

    /// Whether an acquisition fits beside those that have a place.
    fn fits(&self, id: &AcquisitionId) -> bool {
        !self.is_taken_whole() && self.places.len() < usize::from(id.max_holders())
    }

    /// Removes this acquisition from the queue.
    fn dequeue(&mut self, id: &AcquisitionId) {
        if let Some(queue) = &mut self.queue {
            queue.ids.retain(|waiting| waiting != id);
        }
    }

    /// Whether a newer acquisition replaces this one, which waits for the key or holds it.
    fn is_superseded(&self, id: &AcquisitionId, now: BootInstant) -> bool {
        let Some(queue) = self.queue.as_ref().filter(|queue| id.is_replaceable() && queue.expires_at > now) else {
            return false;
        };
        let at = queue.ids.iter().position(|waiting| waiting == id);
        let is_known = at.is_some() || self.places.iter().any(|place| place.id == *id && place.is_held(now));
        is_known && queue.ids.iter().skip(at.map_or(0, |at| at + 1)).any(AcquisitionId::is_replaceable)
    }

    /// The acquisition that this one replaces, which is in the queue: the nearest waiter before it,
    /// or else the holder. Those before that waiter were notified when it came, and ask once a
    /// second.
    fn replaced_by(&self, id: &AcquisitionId, now: BootInstant) -> Option<&AcquisitionId> {
        let holders = self.places.iter().filter(|place| place.is_held(now)).map(|place| &place.id);
        let waiting = self.queue.iter().flat_map(|queue| &queue.ids).take_while(|waiting| *waiting != id);
        holders.chain(waiting).filter(|older| id.is_replaceable() && older.is_replaceable()).last()
    }

    /// The trace of the first holder.
    fn trace(&self) -> Option<SectionTrace> {
        let place = self.places.first().filter(|place| place.state == PlaceState::Held)?;
        place.trace.clone()
    }

    /// Grants a place.
    fn grant(&mut self, cx: &OpContext<'_>, last_fence: &mut u64, id: AcquisitionId, lease: Duration) -> &mut Place {
        self.dequeue(&id);
        self.places.retain(|place| place.until > cx.now);
        self.places.push(Place::new(cx, last_fence, id, lease));
        self.places.last_mut().expect("pushed above")
    }

    /// Offers the free places to the first live waiters, as long as they fit. The first one that
    /// does not fit keeps those behind it waiting. Grants the requester a place if it is its turn.
    fn serve(
        &mut self,
        cx: &mut OpContext<'_>,
        key: &LockKey,
        config: QueueConfig,
        last_fence: &mut u64,
        requester: Option<(&AcquisitionId, Duration)>,
    ) -> Served {
        let mut served = Served::default();
        self.places.retain(|place| place.until > cx.now);
        // A request for the whole key serves others only if the key is free. Those that fit beside
        // the holders ask again.
        let is_for_all = requester.is_some_and(|(id, _)| id.max_holders() == 1);
        if self.is_taken_whole() || is_for_all && !self.places.is_empty() {
            return served;
        }
        if let Some(queue) = &mut self.queue {
            queue.expire(cx.now);
        }
        while let Some(first) = self.queue.as_ref().and_then(|queue| queue.ids.front()).cloned() {
            let own = requester.filter(|(id, _)| **id == first);
            if own.is_none() && !(cx.is_alive)(&first) {
                self.dequeue(&first);
                continue;
            }
            if !self.fits(&first) {
                return served;
            }
            if let Some((_, lease)) = own {
                served.fence = Some(self.grant(cx, last_fence, first, lease).fence);
            } else {
                cx.events.push(StoreEvent::Offered { key: key.clone(), id: first.clone() });
                let ended = cx.ended.take();
                self.grant(cx, last_fence, first, config.offer_ttl).after = ended;
                served.has_offered = true;
            }
        }
        if let Some((id, lease)) = requester.filter(|(id, _)| served.fence.is_none() && self.fits(id)) {
            served.fence = Some(self.grant(cx, last_fence, id.clone(), lease).fence);
        }
        served
    }

    fn enqueue(
        &mut self,
        cx: &OpContext<'_>,
        id: &AcquisitionId,
        config: QueueConfig,
        lease_left: Duration,
    ) -> AcquireReply {
        let held_by = self.trace();
        let queue = self.queue.get_or_insert_default();
        queue.expire(cx.now);
        let position = queue.ids.iter().position(|waiting| waiting == id);
        if position.is_none() && queue.ids.len() >= config.capacity {
            queue.ids.retain(|waiting| (cx.is_alive)(waiting));
            if queue.ids.len() >= config.capacity {
                return AcquireReply::QueueFull { lease_left, waiting: queue.ids.len() };
            }
        }
        queue.expires_at = cx.now.saturating_add(config.entry_ttl);
        let ahead = position.unwrap_or_else(|| {
            queue.ids.push_back(id.clone());
            queue.ids.len() - 1
        });
        AcquireReply::Queued { ahead, lease_left, poll_in: None, held_by }
    }
}

impl Queue {
    /// Removes the waiters if none of them has repeated its `acquire` in time.
    fn expire(&mut self, now: BootInstant) {
        if self.expires_at <= now {
            self.ids.clear();
        }
    }
}

/// The reply to a release that finds nothing to release.
fn not_holder(cx: &OpContext<'_>, request: &ReleaseRequest) -> ReleaseReply {
    let recorded_before = request.record.is_some() && cx.records.lock().is_of(&request.key, &request.id, cx.now);
    if recorded_before { ReleaseReply::RecordedBefore } else { ReleaseReply::NotHolder }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        acquisition::AcquisitionIds,
        store::{Cursor, Heir, ListReply, memory::list::parse_cursor},
    };

    const LEASE: Duration = Duration::from_secs(30);
    const OFFER_TTL: Duration = Duration::from_secs(4);

    /// Keys with a clock.
    struct Store {
        keys: Keys,
        now: BootInstant,
        wall_clock_us: u64,
        records: Mutex<Records>,
        events: Vec<StoreEvent>,
        dead: Vec<AcquisitionId>,
    }

    fn store() -> Store {
        Store {
            keys: Keys::default(),
            now: BootInstant::default(),
            wall_clock_us: 0,
            records: Mutex::default(),
            events: Vec::new(),
            dead: Vec::new(),
        }
    }

    impl Store {
        fn run<T>(&mut self, operation: impl FnOnce(&mut Keys, &mut OpContext<'_>) -> T) -> T {
            let Self { keys, now, wall_clock_us, records, events, dead } = self;
            let is_alive = |id: &AcquisitionId| !dead.contains(id);
            let wall_clock_us = || *wall_clock_us;
            let mut cx = OpContext {
                now: *now,
                wall_clock_us: &wall_clock_us,
                is_alive: &is_alive,
                records,
                events,
                ended: None,
            };
            operation(keys, &mut cx)
        }

        fn acquire(&mut self, key: &LockKey, id: &AcquisitionId, if_busy: IfBusy) -> AcquireReply {
            let request = AcquireRequest::new(key.clone(), id.clone(), LEASE, if_busy, queue_config(), LEASE);
            self.run(|keys, cx| keys.acquire(cx, request))
        }

        fn fence(&mut self, id: &AcquisitionId) -> u64 {
            match self.acquire(&key(), id, IfBusy::Enqueue) {
                AcquireReply::Granted { fence, .. } => fence,
                other => panic!("not granted: {other:?}"),
            }
        }

        fn release(&mut self, id: &AcquisitionId, block_for: Duration) -> ReleaseReply {
            let request = ReleaseRequest::new(key(), id.clone(), block_for, queue_config());
            self.run(|keys, cx| keys.release(cx, &request))
        }

        fn renew(&mut self, id: &AcquisitionId) -> RenewReply {
            self.keys.renew(self.now, &RenewRequest::new(key(), id.clone(), LEASE))
        }

        fn advance(&mut self, by: Duration) {
            self.now = self.now.saturating_add(by);
        }

        fn drain_offers(&mut self) -> Vec<AcquisitionId> {
            let offered = |event| match event {
                StoreEvent::Offered { id, .. } => id,
                other => panic!("{other:?}"),
            };
            self.events.drain(..).map(offered).collect()
        }
    }

    fn key() -> LockKey {
        LockKey::from(("order", 1))
    }

    fn queue_config() -> QueueConfig {
        QueueConfig::new(OFFER_TTL, Duration::from_secs(10), 3)
    }

    fn ids<const N: usize>() -> [AcquisitionId; N] {
        let ids = AcquisitionIds::new("test", 0);
        std::array::from_fn(|_| ids.next())
    }

    impl Store {
        fn acquire_free(&mut self, id: &AcquisitionId) -> Option<u64> {
            self.run(|keys, cx| keys.acquire_free(cx, &key(), id, LEASE, None))
        }

        fn release_free(&mut self, id: &AcquisitionId) -> bool {
            self.keys.release_free(self.now, &key(), id)
        }
    }

    #[test]
    fn key_without_a_state_is_granted_and_freed_without_a_call() {
        let (mut store, [one, other]) = (store(), ids());
        let fence = store.acquire_free(&one).expect("free");
        assert!(!store.release_free(&other), "it does not hold the key");
        assert_eq!(store.fence(&one), fence, "a call finds the grant");
        assert!(store.release_free(&one));
        assert!(store.acquire_free(&other).is_some_and(|next| next > fence));
        store.advance(LEASE);
        assert!(!store.release_free(&other), "its lease has expired");
    }

    #[test]
    fn key_in_use_is_neither_granted_nor_freed_without_a_call() {
        let (mut store, [holder, waiter, other]) = (store(), ids());
        store.fence(&holder);
        assert_eq!(store.acquire_free(&other), None, "it is held");
        store.acquire(&key(), &waiter, IfBusy::Enqueue);
        assert!(!store.release_free(&holder), "another acquisition waits");
        store.release(&holder, Duration::ZERO);
        assert_eq!(store.drain_offers().first(), Some(&waiter));
        assert_eq!(store.acquire_free(&other), None, "it is offered");
        store.release(&waiter, LEASE);
        assert_eq!(store.acquire_free(&other), None, "it is blocked");
        assert!(!store.release_free(&waiter), "it is blocked");
        store.advance(LEASE);
        assert!(store.acquire_free(&other).is_some(), "the block has ended");
    }

    #[test]
    fn free_key_with_waiters_is_not_granted_without_a_call() {
        let (mut store, [holder, waiter, other]) = (store(), ids());
        store.fence(&holder);
        store.advance(LEASE - Duration::from_secs(1));
        store.acquire(&key(), &waiter, IfBusy::Enqueue);
        store.advance(Duration::from_secs(1));
        assert_eq!(store.acquire_free(&other), None, "the lease has expired, and another acquisition waits");
    }

    #[test]
    fn crashed_holder_blocks_no_longer_than_its_lease() {
        let ([a, b], mut store) = (ids(), store());
        store.fence(&a);
        store.advance(LEASE - Duration::from_millis(1));
        let held = AcquireReply::Busy { lease_left: Duration::from_millis(1), held_by: None };
        assert_eq!(store.acquire(&key(), &b, IfBusy::Fail), held);
        store.advance(Duration::from_millis(1));
        store.fence(&b);
        assert_eq!(store.release(&a, Duration::ZERO), ReleaseReply::NotHolder, "a late release changes no other grant");
        assert_eq!(store.keys.held_count(store.now), 1);
    }

    #[test]
    fn only_the_owner_can_renew_and_only_in_time() {
        let ([a, b], mut store) = (ids(), store());
        assert_eq!(store.renew(&a), RenewReply::NotHolder, "the key is free");
        let first = store.fence(&a);
        store.advance(LEASE / 2);
        assert_eq!((store.renew(&b), store.renew(&a)), (RenewReply::NotHolder, RenewReply::Extended));
        store.advance(LEASE / 2);
        assert_eq!(store.fence(&a), first, "under the same fence");
        store.advance(2 * LEASE);
        assert_eq!(store.renew(&a), RenewReply::NotHolder, "an expired lease stays expired");
    }

    /// Guarantee: G11.
    #[test]
    fn fence_rises_over_restarts_and_clock_steps() {
        let [a, b] = ids();
        let (mut store, mut last) = (store(), 0);
        for clock in [1_000, 1_000, 2_000, 500, 500, 2_500] {
            store.wall_clock_us = clock;
            let next = store.fence(&a);
            assert!(next > last, "{next} after {last}");
            last = next;
            store.release(&a, Duration::ZERO);
        }
        store.keys = Keys::default();
        store.wall_clock_us = 3_000;
        assert!(store.fence(&b) > last);
    }

    #[test]
    fn free_key_goes_to_the_first_live_waiter() {
        let ([a, dead, b, c], mut store) = (ids(), store());
        store.fence(&a);
        for (ahead, waiter) in [&dead, &b, &c].into_iter().enumerate() {
            assert_eq!(
                store.acquire(&key(), waiter, IfBusy::Enqueue),
                AcquireReply::Queued { ahead, lease_left: LEASE, poll_in: None, held_by: None },
            );
        }
        store.dead.push(dead);
        store.advance(LEASE);
        // The holder crashed: the last waiter polls, and the first live one is offered the key.
        let queue = &mut store.keys.by_key.get_mut(&key()).expect("held").queue;
        queue.as_mut().expect("waiters").expires_at = BootInstant::FAR_FUTURE;
        assert_eq!(
            store.acquire(&key(), &c, IfBusy::Enqueue),
            AcquireReply::Queued { ahead: 0, lease_left: OFFER_TTL, poll_in: None, held_by: None }
        );
        assert_eq!(store.drain_offers(), std::slice::from_ref(&b));
        assert_eq!(store.release(&b, Duration::ZERO), ReleaseReply::HandedOff);
        assert_eq!(store.drain_offers(), std::slice::from_ref(&c));
        store.advance(OFFER_TTL - Duration::from_millis(1));
        store.fence(&c);
        store.advance(LEASE - Duration::from_millis(1));
        assert_eq!(store.renew(&c), RenewReply::Extended, "an accepted offer has a full lease");
    }

    #[test]
    fn full_queue_drops_dead_waiters_first() {
        let ([a, b, c, d, e], mut store) = (ids(), store());
        store.fence(&a);
        for waiter in [&b, &c, &d] {
            assert!(matches!(store.acquire(&key(), waiter, IfBusy::Enqueue), AcquireReply::Queued { .. }));
        }
        assert_eq!(
            store.acquire(&key(), &e, IfBusy::Enqueue),
            AcquireReply::QueueFull { lease_left: LEASE, waiting: 3 }
        );
        assert_eq!(
            store.acquire(&key(), &d, IfBusy::Enqueue),
            AcquireReply::Queued { ahead: 2, lease_left: LEASE, poll_in: None, held_by: None }
        );
        store.dead.push(c);
        assert_eq!(
            store.acquire(&key(), &e, IfBusy::Enqueue),
            AcquireReply::Queued { ahead: 2, lease_left: LEASE, poll_in: None, held_by: None }
        );
        store.advance(Duration::from_secs(10));
        assert_eq!(store.release(&a, Duration::ZERO), ReleaseReply::Freed, "no waiter has polled for ten seconds");
    }

    /// Guarantee: G15.
    #[test]
    fn free_locks_leave_nothing_and_dead_ones_are_swept() {
        let ([a, b], mut store) = (ids(), store());
        store.fence(&a);
        store.acquire(&key(), &b, IfBusy::Fail);
        store.acquire(&key(), &b, IfBusy::Enqueue);
        store.release(&b, Duration::ZERO);
        store.release(&a, Duration::ZERO);
        assert!(store.keys.by_key.is_empty());
        for n in 0..10_000 {
            store.advance(Duration::from_secs(1));
            assert!(matches!(
                store.acquire(&LockKey::from(("n", n)), &a, IfBusy::Enqueue),
                AcquireReply::Granted { .. }
            ));
        }
        let states = store.keys.by_key.len();
        assert!(states <= 2 * Keys::SWEEP_MIN_LEN, "{states} states for 30 holders");
    }

    /// Ids of acquisitions that share a key, so many of them.
    fn shares<const N: usize>(limit: u16) -> [AcquisitionId; N] {
        let ids = AcquisitionIds::new("shares", u64::from(limit));
        std::array::from_fn(|_| ids.next_share(limit))
    }

    fn waits(store: &mut Store, id: &AcquisitionId) -> (usize, Duration) {
        match store.acquire(&key(), id, IfBusy::Enqueue) {
            AcquireReply::Queued { ahead, lease_left, .. } => (ahead, lease_left),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn limit_is_kept_and_each_holder_has_its_own_lease() {
        let ([a, b, c], [alone], mut store) = (shares(2), ids(), store());
        store.fence(&a);
        store.advance(LEASE / 3);
        store.fence(&b);
        let left = |first, last| {
            (
                AcquireReply::Busy { lease_left: first, held_by: None },
                AcquireReply::Busy { lease_left: last, held_by: None },
            )
        };
        let refused =
            |store: &mut Store| (store.acquire(&key(), &c, IfBusy::Fail), store.acquire(&key(), &alone, IfBusy::Fail));
        assert_eq!(refused(&mut store), left(LEASE - LEASE / 3, LEASE), "the first and the last end");
        assert_eq!((store.renew(&a), store.renew(&c)), (RenewReply::Extended, RenewReply::NotHolder));
        store.advance(LEASE);
        let holders = |store: &Store| store.keys.inspect(store.now, &key()).holders.len();
        assert_eq!(holders(&store), 0, "each of them expires");
        store.fence(&a);
        store.fence(&b);
        assert_eq!(store.release(&a, Duration::ZERO), ReleaseReply::Freed);
        assert_eq!((holders(&store), store.release(&a, Duration::ZERO)), (1, ReleaseReply::NotHolder));
        store.fence(&c);
        assert_eq!(
            store.acquire(&key(), &alone, IfBusy::Fail),
            AcquireReply::Busy { lease_left: LEASE, held_by: None }
        );
        store.release(&b, Duration::ZERO);
        store.release(&c, Duration::ZERO);
        store.fence(&alone);
        assert_eq!(store.acquire(&key(), &a, IfBusy::Fail), AcquireReply::Busy { lease_left: LEASE, held_by: None });
        store.release(&alone, Duration::ZERO);
        assert_eq!(store.keys.size(store.now), 0);
    }

    /// Two readers that wait behind a writer come in together after it.
    #[test]
    fn first_waiter_that_does_not_fit_keeps_those_behind_it_waiting() {
        let ([a, b, c], [writer, dead], mut store) = (shares(1_024), ids(), store());
        store.fence(&a);
        for (ahead, id) in [&dead, &writer, &b, &c].into_iter().enumerate().take(3) {
            assert_eq!(waits(&mut store, id), (ahead, LEASE));
        }
        store.dead.push(dead);
        assert_eq!(waits(&mut store, &c), (2, LEASE), "a waiter whose process has ended is skipped");
        assert_eq!(store.release(&a, Duration::ZERO), ReleaseReply::HandedOff);
        assert_eq!(store.drain_offers(), std::slice::from_ref(&writer));
        store.fence(&writer);
        assert_eq!(store.release(&writer, Duration::ZERO), ReleaseReply::HandedOff);
        assert_eq!(store.drain_offers(), [b.clone(), c.clone()]);
        store.fence(&b);
        store.advance(OFFER_TTL);
        store.fence(&a);
        assert_eq!(store.release(&c, Duration::ZERO), ReleaseReply::NotHolder, "its offer has expired");
        assert_eq!(store.renew(&b), RenewReply::Extended);
    }

    #[test]
    fn waiter_that_leaves_lets_those_behind_it_in() {
        let ([a, b], [writer], mut store) = (shares(1_024), ids(), store());
        store.fence(&a);
        waits(&mut store, &writer);
        waits(&mut store, &b);
        assert_eq!(store.release(&writer, Duration::ZERO), ReleaseReply::NotHolder);
        assert_eq!(store.drain_offers(), [b]);
    }

    #[test]
    fn block_keeps_one_place() {
        let ([a, b, c], mut store) = (shares(2), store());
        store.fence(&a);
        store.fence(&b);
        assert_eq!(store.release(&a, Duration::from_secs(1)), ReleaseReply::Freed);
        assert_eq!(waits(&mut store, &c), (0, Duration::from_secs(1)));
        store.advance(Duration::from_secs(1));
        store.fence(&c);
        assert_eq!(store.renew(&b), RenewReply::Extended, "it holds its place");
    }

    #[test]
    fn forced_release_revokes_each_holder() {
        let ([a, b, c], mut store) = (shares(2), store());
        store.fence(&a);
        store.fence(&b);
        waits(&mut store, &c);
        let request = ForceReleaseRequest::new(key(), Duration::from_secs(1), queue_config());
        for _ in 0..2 {
            let reply = store.run(|keys, cx| keys.force_release(cx, &request));
            assert!(matches!(reply, ForceReleaseReply::Revoked { .. }), "{reply:?}");
            let revoked = store.events.drain(..).map(|event| match event {
                StoreEvent::Revoked { id, .. } => id,
                other => panic!("{other:?}"),
            });
            assert_eq!(revoked.collect::<Vec<_>>(), [a.clone(), b.clone()], "the first event may be lost");
        }
        store.advance(Duration::from_secs(1));
        store.fence(&c);
        assert_eq!(
            (store.renew(&a), store.release(&b, Duration::ZERO)),
            (RenewReply::NotHolder, ReleaseReply::NotHolder)
        );
    }

    /// As in a deployment that changes the number.
    #[test]
    fn limits_of_one_key_may_differ() {
        let ([a, b, c], [small], mut store) = (shares(8), shares(2), store());
        for id in [&a, &b, &c] {
            store.fence(id);
        }
        assert_eq!(waits(&mut store, &small), (0, LEASE));
        store.release(&a, Duration::ZERO);
        assert_eq!(store.drain_offers(), [], "two hold the key");
        store.release(&b, Duration::ZERO);
        assert_eq!(store.drain_offers(), [small]);
    }

    impl Store {
        /// Releases, and leaves the key to a ticket for this time.
        fn keep(&mut self, id: &AcquisitionId, ticket: &AcquisitionId, gap: Duration) -> ReleaseReply {
            let heir = Heir::new(ticket.clone(), gap);
            let request = ReleaseRequest::new(key(), id.clone(), Duration::ZERO, queue_config()).heir(heir);
            self.run(|keys, cx| keys.release(cx, &request))
        }

        /// Acquires in place of a ticket.
        fn redeem(&mut self, id: &AcquisitionId, ticket: &AcquisitionId) -> Option<u64> {
            let request = AcquireRequest::new(key(), id.clone(), LEASE, IfBusy::Enqueue, queue_config(), LEASE)
                .in_place_of(Some(ticket.clone()));
            match self.run(|keys, cx| keys.acquire(cx, request)) {
                AcquireReply::Granted { fence, .. } => Some(fence),
                AcquireReply::Busy { .. } => None,
                other => panic!("{other:?}"),
            }
        }
    }

    /// Guarantee: G24.
    #[test]
    fn release_leaves_the_key_to_a_ticket_for_its_gap() {
        let ([a, waiter, ticket], mut store, gap) = (ids(), store(), 2 * LEASE);
        assert_eq!(store.keep(&a, &ticket, gap), ReleaseReply::NotHolder, "the key is free");
        let fence = store.fence(&a);
        waits(&mut store, &waiter);
        assert_eq!(store.keep(&waiter, &ticket, gap), ReleaseReply::NotHolder, "it waits, and leaves the queue");
        waits(&mut store, &waiter);
        assert_eq!(store.keep(&a, &ticket, gap), ReleaseReply::Freed);
        store.advance(LEASE);
        assert_eq!(store.keep(&a, &ticket, gap), ReleaseReply::Freed, "a repetition finds the ticket");
        assert_eq!((store.renew(&a), store.events.len()), (RenewReply::NotHolder, 0), "no waiter is served");
        let held = store.keys.inspect(store.now, &key());
        assert_eq!((&held.holders[0].id, held.holders[0].fence, held.lease_left), (&ticket, fence, gap - LEASE));
        store.advance(gap - LEASE);
        assert_eq!(store.redeem(&a, &ticket), None, "its gap has passed");
        assert_eq!(store.keep(&a, &ticket, gap), ReleaseReply::NotHolder);
        store.fence(&waiter);
    }

    /// Guarantee: G24.
    #[test]
    fn acquisition_takes_the_place_of_a_ticket_and_of_nothing_else() {
        let ([a, b, c, ticket], mut store) = (ids(), store());
        assert_eq!(store.redeem(&b, &ticket), None, "the key is free");
        assert_eq!(store.keys.size(store.now), 0);
        let first = store.fence(&a);
        assert_eq!(store.redeem(&b, &ticket), None, "a section holds the key");
        store.keep(&a, &ticket, Duration::from_secs(1));
        let second = store.redeem(&b, &ticket).expect("the ticket holds the key");
        assert!(second > first, "{second} after {first}");
        store.advance(LEASE / 2);
        assert_eq!(store.redeem(&b, &ticket), Some(second), "a repetition finds its grant");
        assert_eq!(store.redeem(&c, &ticket), None, "one of two");
        assert_eq!(waits(&mut store, &c), (0, LEASE), "the repetition has extended the lease");
        assert_eq!(store.release(&b, Duration::ZERO), ReleaseReply::HandedOff);
        assert_eq!(store.drain_offers(), [c]);
        assert_eq!(store.redeem(&b, &ticket), None, "the work has ended");
    }

    fn page(store: &Store, limit: usize, after: Option<&LockKey>, contended_only: bool) -> ListReply {
        let mut page = Page::new(limit);
        store.keys.list(store.now, after, contended_only, &mut page);
        page.finish()
    }

    #[test]
    fn pages_of_a_listing_are_in_order_and_bounded() {
        let ([a, b], mut store) = (ids(), store());
        let mut all: Vec<_> = (0..25).map(|n| LockKey::from(("n", n))).collect();
        // The same text, in another kind.
        all.push(LockKey::raw("n:7").expect("valid"));
        all.sort();
        for key in &all {
            store.acquire(key, &a, IfBusy::Fail);
        }
        for limit in [1, 7, 26, 27] {
            let (mut listed, mut after) = (Vec::new(), None);
            loop {
                let page = page(&store, limit, after.as_ref(), false);
                assert!(page.entries.len() <= limit);
                listed.extend(page.entries.into_iter().map(|entry| entry.key));
                let Some(next) = page.next else { break };
                after = Some(parse_cursor(&next).expect("a cursor"));
            }
            assert_eq!(listed, all, "pages of {limit}");
        }
        store.acquire(&all[3], &b, IfBusy::Enqueue);
        let contended = page(&store, 9, None, true).entries;
        assert_eq!(contended.iter().map(|entry| &entry.key).collect::<Vec<_>>(), [&all[3]]);
        store.advance(LEASE);
        assert_eq!(page(&store, 9, None, false).entries, [], "nothing is held any more");
        assert!(["", "x", "é"].map(|text| parse_cursor(&Cursor::new(text))).iter().all(Option::is_none));
    }

    /// A client that causes a lock-delay of one key after the other.
    /// Guarantee: G15.
    #[test]
    fn aborted_keys_are_swept_by_later_acquisitions() {
        const KEYS: usize = 50_000;
        let (mut store, ids) = (store(), AcquisitionIds::new("test", 1));
        for n in 0..KEYS {
            let (key, id) = (LockKey::from(("k", n)), ids.next());
            store.acquire(&key, &id, IfBusy::Fail);
            let request = ReleaseRequest::new(key, id, Duration::from_secs(1), queue_config());
            assert_eq!(store.run(|keys, cx| keys.release(cx, &request)), ReleaseReply::Freed);
        }
        assert_eq!(store.keys.by_key.len(), KEYS, "blocked");
        store.advance(Duration::from_secs(2));
        for _ in 0..KEYS / Keys::PRUNED_PER_ACQUIRE + 2 {
            let id = ids.next();
            store.fence(&id);
            store.release(&id, Duration::ZERO);
        }
        let Keys { by_key, blocked, .. } = &store.keys;
        assert_eq!((by_key.len(), blocked.len()), (0, 0));
        assert!(by_key.capacity() < 1024, "{}", by_key.capacity());
    }
}
