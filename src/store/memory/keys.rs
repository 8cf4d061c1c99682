//! The rules of the contract. Pure: time is an argument, and events are outputs.

use std::{
    collections::{BTreeSet, VecDeque, hash_map},
    time::{Duration, UNIX_EPOCH},
};

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
#[derive(Debug)]
struct KeyState {
    /// `None`: the key is free, or blocked until `expires_at`.
    grant: Option<Grant>,
    expires_at: BootInstant,
    /// The holder that the key was revoked from, and the end of the block that followed.
    revoked: Option<Box<(AcquisitionId, BootInstant)>>,
    /// Most keys never have one.
    queue: Option<Box<Queue>>,
}

/// The holder of a key.
#[derive(Debug)]
struct Grant {
    id: AcquisitionId,
    fence: u64,
    /// The time of the grant, in microseconds since the Unix epoch.
    wall_clock_us: u64,
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
        let Some(state) = self.by_key.get_mut(&request.key) else {
            let fence = self.insert(cx, request.key, request.id, request.lease);
            return AcquireReply::Granted { fence };
        };
        // A grant, or an offer that is accepted: the same fence, and a full lease. A delayed copy
        // must not shorten it.
        if let Some(fence) = state.fence_of(&request.id, cx.now) {
            state.expires_at = state.expires_at.max(cx.now.saturating_add(request.lease));
            return AcquireReply::Granted { fence };
        }
        if state.is_free(cx.now) {
            let first = state.offer_next(cx, &request.key, request.queue, &mut self.last_fence, Some(&request.id));
            if !first {
                let fence = state.grant(cx, &mut self.last_fence, request.id, request.lease);
                return AcquireReply::Granted { fence };
            }
        }
        let lease_left = state.expires_at.saturating_duration_since(cx.now);
        match request.if_busy {
            IfBusy::Fail => AcquireReply::Busy { lease_left },
            IfBusy::Enqueue => state.enqueue(cx, &request.id, request.queue, lease_left),
        }
    }

    /// Grants a key without a state. `None`: the key has one.
    pub(super) fn acquire_free(
        &mut self,
        cx: &OpContext<'_>,
        key: &LockKey,
        id: &AcquisitionId,
        lease: Duration,
    ) -> Option<u64> {
        self.sweep(cx.now);
        let is_free = !self.by_key.contains_key(key);
        is_free.then(|| self.insert(cx, key.clone(), id.clone(), lease))
    }

    /// Frees a key that this acquisition holds, and that never had a waiter.
    pub(super) fn release_free(&mut self, now: BootInstant, key: &LockKey, id: &AcquisitionId) -> bool {
        let is_only = |state: &KeyState| state.fence_of(id, now).is_some() && state.queue.is_none();
        let is_freed = self.by_key.get(key).is_some_and(is_only);
        if is_freed {
            self.by_key.remove(key);
        }
        is_freed
    }

    pub(super) fn renew(&mut self, now: BootInstant, request: &RenewRequest) -> RenewReply {
        match self.by_key.get_mut(&request.key) {
            Some(state) if state.fence_of(&request.id, now).is_some() => {
                // A delayed renewal must not shorten the lease that a later call has set.
                state.expires_at = state.expires_at.max(now.saturating_add(request.lease));
                RenewReply::Extended
            }
            _ => RenewReply::NotHolder,
        }
    }

    /// Changes only what this acquisition owns (I1).
    pub(super) fn release(&mut self, cx: &mut OpContext<'_>, request: &ReleaseRequest) -> ReleaseReply {
        let Some(state) = self.by_key.get_mut(&request.key) else { return not_holder(cx, request) };
        if state.fence_of(&request.id, cx.now).is_none() {
            state.dequeue(&request.id);
            if state.is_garbage(cx.now) {
                self.by_key.remove(&request.key);
            }
            return not_holder(cx, request);
        }
        state.grant = None;
        if let Some(new) = &request.record {
            cx.records.lock().insert(request.key.clone(), request.id.clone(), new, cx.now);
        }
        state.expires_at = cx.now.saturating_add(request.block_for);
        if !state.is_free(cx.now) {
            self.blocked.insert((state.expires_at, request.key.clone()));
            return ReleaseReply::Freed;
        }
        if state.offer_next(cx, &request.key, request.queue, &mut self.last_fence, None) {
            return ReleaseReply::HandedOff;
        }
        self.by_key.remove(&request.key);
        ReleaseReply::Freed
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
        if let Some(state) = self.by_key.get_mut(&request.key)
            && let Some(fence) = state.fence_of(&request.id, cx.now)
        {
            if fence != request.fence {
                return YieldReply::Extended { fence };
            }
            state.grant = None;
            if !state.offer_next(cx, &request.key, request.queue, &mut self.last_fence, None) {
                let fence = state.grant(cx, &mut self.last_fence, request.id.clone(), request.lease);
                return YieldReply::Extended { fence };
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
        let left = state.expires_at.saturating_duration_since(cx.now);
        let revoked = state.revoked.as_deref().filter(|(_, until)| *until == state.expires_at);
        let reply = match (state.grant.take(), revoked) {
            _ if left.is_zero() => ForceReleaseReply::Free,
            (Some(Grant { id, .. }), _) => {
                state.expires_at = cx.now.saturating_add(request.block_for);
                state.revoked = Some(Box::new((id.clone(), state.expires_at)));
                self.blocked.insert((state.expires_at, request.key.clone()));
                cx.events.push(StoreEvent::Revoked { key: request.key.clone(), id: id.clone() });
                ForceReleaseReply::Revoked { holder: id }
            }
            // The former holder may still run: the event of the earlier call may be lost.
            (None, Some((id, _))) => {
                cx.events.push(StoreEvent::Revoked { key: request.key.clone(), id: id.clone() });
                ForceReleaseReply::Revoked { holder: id.clone() }
            }
            (None, None) => {
                state.expires_at = cx.now;
                ForceReleaseReply::Unblocked { blocked_for: left }
            }
        };
        if state.is_free(cx.now) && !state.offer_next(cx, &request.key, request.queue, &mut self.last_fence, None) {
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
    fn insert(&mut self, cx: &OpContext<'_>, key: LockKey, id: AcquisitionId, lease: Duration) -> u64 {
        let mut state = KeyState { grant: None, expires_at: cx.now, revoked: None, queue: None };
        let fence = state.grant(cx, &mut self.last_fence, id, lease);
        self.by_key.insert(key, state);
        fence
    }

    /// Ends an acquisition that gets a record: its offer, or the free key, goes to the next waiter.
    fn leave(&mut self, cx: &mut OpContext<'_>, request: &AcquireRequest) {
        let hash_map::Entry::Occupied(mut occupied) = self.by_key.entry(request.key.clone()) else { return };
        let state = occupied.get_mut();
        state.dequeue(&request.id);
        if state.fence_of(&request.id, cx.now).is_some() {
            state.grant = None;
            state.expires_at = cx.now;
        }
        if state.is_free(cx.now) {
            state.offer_next(cx, &request.key, request.queue, &mut self.last_fence, None);
        }
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

impl Grant {
    fn holder(&self) -> Holder {
        let since = UNIX_EPOCH.checked_add(Duration::from_micros(self.wall_clock_us));
        Holder { since, ..Holder::new(self.id.clone(), self.fence) }
    }
}

impl KeyState {
    fn is_free(&self, now: BootInstant) -> bool {
        self.expires_at <= now
    }

    fn is_held(&self, now: BootInstant) -> bool {
        self.grant.is_some() && !self.is_free(now)
    }

    /// Whether the state can be removed.
    fn is_garbage(&self, now: BootInstant) -> bool {
        self.is_free(now) && self.waiting(now) == 0
    }

    /// The number of waiters.
    fn waiting(&self, now: BootInstant) -> usize {
        self.queue.as_ref().filter(|queue| queue.expires_at > now).map_or(0, |queue| queue.ids.len())
    }

    fn status(&self, now: BootInstant) -> KeyStatus {
        let grant = self.grant.as_ref().filter(|_| self.expires_at > now);
        KeyStatus::new(grant.map(Grant::holder), self.expires_at.saturating_duration_since(now), self.waiting(now))
    }

    /// The fence, if this acquisition holds the key.
    fn fence_of(&self, id: &AcquisitionId, now: BootInstant) -> Option<u64> {
        let grant = self.grant.as_ref().filter(|grant| grant.id == *id && self.expires_at > now)?;
        Some(grant.fence)
    }

    /// Removes this acquisition from the queue.
    fn dequeue(&mut self, id: &AcquisitionId) {
        if let Some(queue) = &mut self.queue {
            queue.ids.retain(|waiting| waiting != id);
        }
    }

    /// Grants the key. Returns the fence, which is larger than each one before it, and at least the
    /// clock.
    fn grant(&mut self, cx: &OpContext<'_>, last_fence: &mut u64, id: AcquisitionId, lease: Duration) -> u64 {
        self.dequeue(&id);
        let wall_clock_us = (cx.wall_clock_us)();
        *last_fence = wall_clock_us.max(last_fence.saturating_add(1));
        self.grant = Some(Grant { id, fence: *last_fence, wall_clock_us });
        self.expires_at = cx.now.saturating_add(lease);
        *last_fence
    }

    /// Offers the free key to the first live waiter. `false`: there is none, or it is `requester`,
    /// which the caller grants the key to.
    fn offer_next(
        &mut self,
        cx: &mut OpContext<'_>,
        key: &LockKey,
        config: QueueConfig,
        last_fence: &mut u64,
        requester: Option<&AcquisitionId>,
    ) -> bool {
        if let Some(queue) = &mut self.queue {
            queue.expire(cx.now);
        }
        while let Some(first) = self.queue.as_mut().and_then(|queue| queue.ids.pop_front()) {
            if Some(&first) == requester {
                return false;
            }
            if !(cx.is_alive)(&first) {
                continue;
            }
            cx.events.push(StoreEvent::Offered { key: key.clone(), id: first.clone() });
            self.grant(cx, last_fence, first, config.offer_ttl);
            return true;
        }
        false
    }

    fn enqueue(
        &mut self,
        cx: &OpContext<'_>,
        id: &AcquisitionId,
        config: QueueConfig,
        lease_left: Duration,
    ) -> AcquireReply {
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
        AcquireReply::Queued { ahead, lease_left, poll_in: None }
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
        store::{Cursor, ListReply, memory::list::parse_cursor},
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
            let mut cx = OpContext { now: *now, wall_clock_us: &wall_clock_us, is_alive: &is_alive, records, events };
            operation(keys, &mut cx)
        }

        fn acquire(&mut self, key: &LockKey, id: &AcquisitionId, if_busy: IfBusy) -> AcquireReply {
            let request = AcquireRequest::new(key.clone(), id.clone(), LEASE, if_busy, queue_config(), LEASE);
            self.run(|keys, cx| keys.acquire(cx, request))
        }

        fn fence(&mut self, id: &AcquisitionId) -> u64 {
            match self.acquire(&key(), id, IfBusy::Enqueue) {
                AcquireReply::Granted { fence } => fence,
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
            self.run(|keys, cx| keys.acquire_free(cx, &key(), id, LEASE))
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
        let held = AcquireReply::Busy { lease_left: Duration::from_millis(1) };
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
                AcquireReply::Queued { ahead, lease_left: LEASE, poll_in: None },
            );
        }
        store.dead.push(dead);
        store.advance(LEASE);
        // The holder crashed: the last waiter polls, and the first live one is offered the key.
        let queue = &mut store.keys.by_key.get_mut(&key()).expect("held").queue;
        queue.as_mut().expect("waiters").expires_at = BootInstant::FAR_FUTURE;
        assert_eq!(
            store.acquire(&key(), &c, IfBusy::Enqueue),
            AcquireReply::Queued { ahead: 0, lease_left: OFFER_TTL, poll_in: None }
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
            AcquireReply::Queued { ahead: 2, lease_left: LEASE, poll_in: None }
        );
        store.dead.push(c);
        assert_eq!(
            store.acquire(&key(), &e, IfBusy::Enqueue),
            AcquireReply::Queued { ahead: 2, lease_left: LEASE, poll_in: None }
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
