//! The rules of the contract, without a clock: time is an argument, events are a return value.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, VecDeque, hash_map},
    time::Duration,
};

use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    lock_key::{KeyMap, LockKey},
    store::{
        AcquireReply, AcquireRequest, ForceReleaseReply, ForceReleaseRequest, Holder, IfBusy, KeyStatus, QueueConfig,
        ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreEvent, YieldReply, YieldRequest,
    },
};

/// Who holds which key, and who waits for it.
#[derive(Debug, Default)]
pub(super) struct Records {
    by_key: KeyMap<Record>,
    last_fence: u64,
    /// At this many records those of the dead are looked for.
    sweep_threshold: usize,
    /// Keys that nobody has and that are blocked, the one first that is free first. An entry may be out of date.
    blocked: BinaryHeap<Reverse<Blocked>>,
}

/// A key that is blocked until then.
#[derive(Debug)]
struct Blocked {
    until: BootInstant,
    key: LockKey,
}

/// What is kept of one key. Nothing is kept of a free one for which nobody waits.
#[derive(Debug)]
struct Record {
    /// `None`: taken by nobody, until the moment below.
    holder: Option<Holder>,
    expires_at: BootInstant,
    /// The owner that it was revoked from by force, and the end of that lock-delay.
    revoked: Option<(AcquisitionId, BootInstant)>,
    queue: VecDeque<AcquisitionId>,
    /// Until when the places in the line last if nobody asks again.
    queue_expires_at: BootInstant,
}

/// What a verb needs beside its ask.
pub(super) struct OpContext<'a> {
    pub(super) now: BootInstant,
    pub(super) wall_clock_us: &'a dyn Fn() -> u64,
    /// Whether a process has an open inbox; one that has none is dead.
    pub(super) is_alive: &'a dyn Fn(&AcquisitionId) -> bool,
    /// What is to be told when the verb is over.
    pub(super) events: &'a mut Vec<StoreEvent>,
}

impl Records {
    /// Below this many records nobody looks for dead ones.
    const SWEEP_MIN_LEN: usize = 64;
    /// So many keys that are not blocked any more are forgotten with each acquisition: many more than one acquisition can block.
    const PRUNED_PER_ACQUIRE: usize = 64;

    pub(super) fn acquire(&mut self, at: &mut OpContext<'_>, ask: &AcquireRequest) -> AcquireReply {
        self.sweep(at.now);
        let record = match self.by_key.entry(ask.key.clone()) {
            hash_map::Entry::Occupied(occupied) => occupied.into_mut(),
            hash_map::Entry::Vacant(vacant) => vacant.insert(Record::free(at.now)),
        };
        // A grant, or an offer that has come: the same fence, a full lease. A late copy must not
        // shorten it.
        if let Some(fence) = record.fence_of(&ask.id, at.now) {
            record.expires_at = record.expires_at.max(at.now.saturating_add(ask.lease));
            return AcquireReply::Granted { fence };
        }
        if record.is_free(at.now) {
            let first = record.offer_next(at, &ask.key, ask.queue, &mut self.last_fence, Some(&ask.id));
            if !first {
                let fence = next_fence(&mut self.last_fence, (at.wall_clock_us)());
                record.grant(ask.id.clone(), fence, at.now.saturating_add(ask.lease));
                return AcquireReply::Granted { fence };
            }
        }
        let lease_left = record.expires_at.saturating_duration_since(at.now);
        match ask.if_busy {
            IfBusy::Fail => AcquireReply::Busy { lease_left },
            IfBusy::Enqueue => record.enqueue(at, &ask.id, ask.queue, lease_left),
        }
    }

    pub(super) fn renew(&mut self, now: BootInstant, ask: &RenewRequest) -> RenewReply {
        match self.by_key.get_mut(&ask.key) {
            Some(record) if record.fence_of(&ask.id, now).is_some() => {
                // A renewal that is done late must not shorten the lease that a later call has got.
                record.expires_at = record.expires_at.max(now.saturating_add(ask.lease));
                RenewReply::Extended
            }
            _ => RenewReply::NotHolder,
        }
    }

    /// I1
    pub(super) fn release(&mut self, at: &mut OpContext<'_>, ask: &ReleaseRequest) -> ReleaseReply {
        let hash_map::Entry::Occupied(mut occupied) = self.by_key.entry(ask.key.clone()) else {
            return ReleaseReply::NotHolder;
        };
        let record = occupied.get_mut();
        if record.fence_of(&ask.id, at.now).is_none() {
            record.queue.retain(|waiting| *waiting != ask.id);
            if record.is_garbage(at.now) {
                occupied.remove();
            }
            return ReleaseReply::NotHolder;
        }
        record.holder = None;
        record.expires_at = at.now.saturating_add(ask.block_for);
        if !record.is_free(at.now) {
            self.blocked.push(Reverse(Blocked { until: record.expires_at, key: ask.key.clone() }));
            return ReleaseReply::Freed;
        }
        if record.offer_next(at, &ask.key, ask.queue, &mut self.last_fence, None) {
            return ReleaseReply::HandedOff;
        }
        occupied.remove();
        ReleaseReply::Freed
    }

    pub(super) fn yield_to_queue(&mut self, at: &mut OpContext<'_>, ask: &YieldRequest) -> YieldReply {
        let acquire = AcquireRequest::new(
            ask.key.clone(),
            ask.next_id.clone(),
            ask.lease,
            IfBusy::Enqueue,
            ask.queue,
            ask.valid_for,
        );
        if let Some(record) = self.by_key.get_mut(&ask.key)
            && let Some(fence) = record.fence_of(&ask.id, at.now)
        {
            if fence != ask.fence {
                return YieldReply::Extended { fence };
            }
            record.holder = None;
            if !record.offer_next(at, &ask.key, ask.queue, &mut self.last_fence, None) {
                let fence = next_fence(&mut self.last_fence, (at.wall_clock_us)());
                record.grant(ask.id.clone(), fence, at.now.saturating_add(ask.lease));
                return YieldReply::Extended { fence };
            }
        }
        YieldReply::NotHolder(self.acquire(at, &acquire))
    }

    pub(super) fn inspect(&self, now: BootInstant, key: &LockKey) -> KeyStatus {
        let Some(record) = self.by_key.get(key) else { return KeyStatus::new(None, Duration::ZERO, 0) };
        let holder = record.holder.as_ref().filter(|_| record.expires_at > now);
        let waiting = if record.queue_expires_at > now { record.queue.len() } else { 0 };
        KeyStatus::new(holder.cloned(), record.expires_at.saturating_duration_since(now), waiting)
    }

    pub(super) fn force_release(&mut self, at: &mut OpContext<'_>, ask: &ForceReleaseRequest) -> ForceReleaseReply {
        let hash_map::Entry::Occupied(mut occupied) = self.by_key.entry(ask.key.clone()) else {
            return ForceReleaseReply::Free;
        };
        let record = occupied.get_mut();
        let left = record.expires_at.saturating_duration_since(at.now);
        let revoked = record.revoked.as_ref().filter(|(_, until)| *until == record.expires_at);
        let reply = match (record.holder.take(), revoked) {
            _ if left.is_zero() => ForceReleaseReply::Free,
            (Some(Holder { id: owner, .. }), _) => {
                record.expires_at = at.now.saturating_add(ask.block_for);
                record.revoked = Some((owner.clone(), record.expires_at));
                self.blocked.push(Reverse(Blocked { until: record.expires_at, key: ask.key.clone() }));
                at.events.push(StoreEvent::Revoked { key: ask.key.clone(), id: owner.clone() });
                ForceReleaseReply::Revoked { holder: owner }
            }
            // Its holder may still run: the message of the earlier call may be lost.
            (None, Some((owner, _))) => {
                at.events.push(StoreEvent::Revoked { key: ask.key.clone(), id: owner.clone() });
                ForceReleaseReply::Revoked { holder: owner.clone() }
            }
            (None, None) => {
                record.expires_at = at.now;
                ForceReleaseReply::Unblocked { blocked_for: left }
            }
        };
        if record.is_free(at.now) && !record.offer_next(at, &ask.key, ask.queue, &mut self.last_fence, None) {
            occupied.remove();
        }
        reply
    }

    /// How many keys are held by somebody.
    pub(super) fn held_count(&self, now: BootInstant) -> usize {
        self.by_key.values().filter(|record| record.holder.is_some() && record.expires_at > now).count()
    }

    /// Of how many keys something is kept.
    pub(super) fn size(&self, now: BootInstant) -> usize {
        self.by_key.values().filter(|record| !record.is_garbage(now)).count()
    }

    /// Those who died leave their records. Looking for them each time the table has doubled costs a constant
    /// per acquisition and keeps it within twice the living.
    fn sweep(&mut self, now: BootInstant) {
        self.prune_unblocked(now);
        if self.by_key.len() >= self.sweep_threshold.max(Self::SWEEP_MIN_LEN) {
            self.by_key.retain(|_, record| !record.is_garbage(now));
            self.sweep_threshold = 2 * self.by_key.len();
        }
    }
}

impl Records {
    /// Keys whose sections ended badly leave their records, too. With each acquisition some go that are due, and their memory with them: a
    /// client that ends badly with many keys leaves nothing behind.
    fn prune_unblocked(&mut self, now: BootInstant) {
        for _ in 0..Self::PRUNED_PER_ACQUIRE {
            if self.blocked.peek().is_none_or(|Reverse(first)| first.until > now) {
                break;
            }
            let Some(Reverse(Blocked { key, .. })) = self.blocked.pop() else { break };
            if let hash_map::Entry::Occupied(occupied) = self.by_key.entry(key)
                && occupied.get().is_garbage(now)
            {
                occupied.remove();
            }
        }
        // To shrink costs as much as what is left.
        if self.blocked.capacity() / 4 > self.blocked.len().max(Self::SWEEP_MIN_LEN) {
            self.blocked.shrink_to(2 * self.blocked.len());
        }
        if self.by_key.capacity() / 4 > self.by_key.len().max(Self::SWEEP_MIN_LEN) {
            self.by_key.shrink_to(2 * self.by_key.len());
            self.sweep_threshold = 2 * self.by_key.len();
        }
    }
}

impl PartialEq for Blocked {
    fn eq(&self, other: &Self) -> bool {
        self.until == other.until
    }
}

impl Eq for Blocked {}

impl PartialOrd for Blocked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Blocked {
    fn cmp(&self, other: &Self) -> Ordering {
        self.until.cmp(&other.until)
    }
}

impl Record {
    fn free(now: BootInstant) -> Self {
        Self { holder: None, expires_at: now, revoked: None, queue: VecDeque::new(), queue_expires_at: now }
    }

    fn is_free(&self, now: BootInstant) -> bool {
        self.expires_at <= now
    }

    /// Nothing is to be kept of it.
    fn is_garbage(&self, now: BootInstant) -> bool {
        self.is_free(now) && (self.queue.is_empty() || self.queue_expires_at <= now)
    }

    /// Whether this owner has the key, and under which fence.
    fn fence_of(&self, owner: &AcquisitionId, now: BootInstant) -> Option<u64> {
        let holder = self.holder.as_ref().filter(|holder| holder.id == *owner && self.expires_at > now)?;
        Some(holder.fence)
    }

    fn grant(&mut self, owner: AcquisitionId, fence: u64, until: BootInstant) {
        self.queue.retain(|waiting| *waiting != owner);
        self.holder = Some(Holder::new(owner, fence));
        self.expires_at = until;
    }

    /// Offers the free key to the first of the line who listens. `false`: nobody does, or the first one is `asker`, who is to be
    /// granted it.
    fn offer_next(
        &mut self,
        at: &mut OpContext<'_>,
        key: &LockKey,
        terms: QueueConfig,
        last_fence: &mut u64,
        asker: Option<&AcquisitionId>,
    ) -> bool {
        if self.queue_expires_at <= at.now {
            self.queue.clear();
        }
        while let Some(first) = self.queue.pop_front() {
            if Some(&first) == asker {
                return false;
            }
            if !(at.is_alive)(&first) {
                continue;
            }
            at.events.push(StoreEvent::Offered { key: key.clone(), id: first.clone() });
            let fence = next_fence(last_fence, (at.wall_clock_us)());
            self.grant(first, fence, at.now.saturating_add(terms.offer_ttl));
            return true;
        }
        false
    }

    fn enqueue(
        &mut self,
        at: &OpContext<'_>,
        owner: &AcquisitionId,
        terms: QueueConfig,
        lease_left: Duration,
    ) -> AcquireReply {
        if self.queue_expires_at <= at.now {
            self.queue.clear();
        }
        let place = self.queue.iter().position(|waiting| waiting == owner);
        if place.is_none() && self.queue.len() >= terms.capacity {
            self.queue.retain(|waiting| (at.is_alive)(waiting));
            if self.queue.len() >= terms.capacity {
                return AcquireReply::QueueFull { lease_left, waiting: self.queue.len() };
            }
        }
        self.queue_expires_at = at.now.saturating_add(terms.entry_ttl);
        let before = place.unwrap_or_else(|| {
            self.queue.push_back(owner.clone());
            self.queue.len() - 1
        });
        AcquireReply::Queued { ahead: before, lease_left }
    }
}

/// The next fence: above all before it, and never behind the clock.
fn next_fence(last: &mut u64, wall_clock_us: u64) -> u64 {
    *last = wall_clock_us.max(last.saturating_add(1));
    *last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acquisition::AcquisitionIds;

    const LEASE: Duration = Duration::from_secs(30);
    const OFFER: Duration = Duration::from_secs(4);

    /// Records, and a clock.
    struct Store {
        records: Records,
        now: BootInstant,
        wall_clock_us: u64,
        events: Vec<StoreEvent>,
        dead: Vec<AcquisitionId>,
    }

    fn store() -> Store {
        Store {
            records: Records::default(),
            now: BootInstant::default(),
            wall_clock_us: 0,
            events: Vec::new(),
            dead: Vec::new(),
        }
    }

    impl Store {
        fn run<T>(&mut self, verb: impl FnOnce(&mut Records, &mut OpContext<'_>) -> T) -> T {
            let Self { records, now, wall_clock_us, events, dead } = self;
            let listens = |owner: &AcquisitionId| !dead.contains(owner);
            let wall_clock_us = || *wall_clock_us;
            verb(records, &mut OpContext { now: *now, wall_clock_us: &wall_clock_us, is_alive: &listens, events })
        }

        fn acquire(&mut self, key: &LockKey, owner: &AcquisitionId, if_held: IfBusy) -> AcquireReply {
            let ask = AcquireRequest::new(key.clone(), owner.clone(), LEASE, if_held, queue_config(), LEASE);
            self.run(|records, at| records.acquire(at, &ask))
        }

        fn fence(&mut self, owner: &AcquisitionId) -> u64 {
            match self.acquire(&key(), owner, IfBusy::Enqueue) {
                AcquireReply::Granted { fence } => fence,
                other => panic!("not granted: {other:?}"),
            }
        }

        fn release(&mut self, owner: &AcquisitionId, block_for: Duration) -> ReleaseReply {
            let ask = ReleaseRequest::new(key(), owner.clone(), block_for, queue_config());
            self.run(|records, at| records.release(at, &ask))
        }

        fn renew(&mut self, owner: &AcquisitionId) -> RenewReply {
            self.records.renew(self.now, &RenewRequest::new(key(), owner.clone(), LEASE))
        }

        fn advance(&mut self, by: Duration) {
            self.now = self.now.saturating_add(by);
        }

        fn drain_offers(&mut self) -> Vec<AcquisitionId> {
            let offered = |event| match event {
                StoreEvent::Offered { id: owner, .. } => owner,
                other => panic!("{other:?}"),
            };
            self.events.drain(..).map(offered).collect()
        }
    }

    fn key() -> LockKey {
        LockKey::from(("order", 1))
    }

    fn queue_config() -> QueueConfig {
        QueueConfig::new(OFFER, Duration::from_secs(10), 3)
    }

    fn ids<const N: usize>() -> [AcquisitionId; N] {
        let ids = AcquisitionIds::new("test", 0);
        std::array::from_fn(|_| ids.next())
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
        assert_eq!(
            store.release(&a, Duration::ZERO),
            ReleaseReply::NotHolder,
            "a late holder frees nobody else's lock"
        );
        assert_eq!(store.records.held_count(store.now), 1);
    }

    #[test]
    fn only_the_owner_can_renew_and_only_in_time() {
        let ([a, b], mut store) = (ids(), store());
        assert_eq!(store.renew(&a), RenewReply::NotHolder, "a free key is nobody's");
        let first = store.fence(&a);
        store.advance(LEASE / 2);
        assert_eq!((store.renew(&b), store.renew(&a)), (RenewReply::NotHolder, RenewReply::Extended));
        store.advance(LEASE / 2);
        assert_eq!(store.fence(&a), first, "under the same fence");
        store.advance(2 * LEASE);
        assert_eq!(store.renew(&a), RenewReply::NotHolder, "what is over stays over");
    }

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
        store.records = Records::default();
        store.wall_clock_us = 3_000;
        assert!(store.fence(&b) > last);
    }

    #[test]
    fn free_key_goes_to_the_first_live_waiter() {
        let ([a, dead, b, c], mut store) = (ids(), store());
        store.fence(&a);
        for (before, waiter) in [&dead, &b, &c].into_iter().enumerate() {
            assert_eq!(
                store.acquire(&key(), waiter, IfBusy::Enqueue),
                AcquireReply::Queued { ahead: before, lease_left: LEASE },
            );
        }
        store.dead.push(dead);
        store.advance(LEASE);
        // Nobody gave it back: the last of the line asks, and the first one has it.
        store.records.by_key.get_mut(&key()).expect("held").queue_expires_at = BootInstant::FAR_FUTURE;
        assert_eq!(store.acquire(&key(), &c, IfBusy::Enqueue), AcquireReply::Queued { ahead: 0, lease_left: OFFER });
        assert_eq!(store.drain_offers(), std::slice::from_ref(&b));
        assert_eq!(store.release(&b, Duration::ZERO), ReleaseReply::HandedOff);
        assert_eq!(store.drain_offers(), std::slice::from_ref(&c));
        store.advance(OFFER - Duration::from_millis(1));
        store.fence(&c);
        store.advance(LEASE - Duration::from_millis(1));
        assert_eq!(store.renew(&c), RenewReply::Extended, "an offer that is asked for is a full lease");
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
        assert_eq!(store.acquire(&key(), &d, IfBusy::Enqueue), AcquireReply::Queued { ahead: 2, lease_left: LEASE });
        store.dead.push(c);
        assert_eq!(store.acquire(&key(), &e, IfBusy::Enqueue), AcquireReply::Queued { ahead: 2, lease_left: LEASE });
        store.advance(Duration::from_secs(10));
        assert_eq!(store.release(&a, Duration::ZERO), ReleaseReply::Freed, "nobody has asked for ten seconds");
    }

    #[test]
    fn free_locks_leave_nothing_and_dead_ones_are_swept() {
        let ([a, b], mut store) = (ids(), store());
        store.fence(&a);
        store.acquire(&key(), &b, IfBusy::Fail);
        store.acquire(&key(), &b, IfBusy::Enqueue);
        store.release(&b, Duration::ZERO);
        store.release(&a, Duration::ZERO);
        assert!(store.records.by_key.is_empty());
        for n in 0..10_000 {
            store.advance(Duration::from_secs(1));
            assert!(matches!(
                store.acquire(&LockKey::from(("n", n)), &a, IfBusy::Enqueue),
                AcquireReply::Granted { .. }
            ));
        }
        let records = store.records.by_key.len();
        assert!(records <= 2 * Records::SWEEP_MIN_LEN, "{records} records for 30 holders");
    }

    /// A client that ends badly with one key after the other.
    #[test]
    fn aborted_keys_are_swept_by_later_acquisitions() {
        const KEYS: usize = 50_000;
        let (mut store, ids) = (store(), AcquisitionIds::new("test", 1));
        for n in 0..KEYS {
            let (key, owner) = (LockKey::from(("k", n)), ids.next());
            store.acquire(&key, &owner, IfBusy::Fail);
            let ask = ReleaseRequest::new(key, owner, Duration::from_secs(1), queue_config());
            assert_eq!(store.run(|records, at| records.release(at, &ask)), ReleaseReply::Freed);
        }
        assert_eq!(store.records.by_key.len(), KEYS, "blocked");
        store.advance(Duration::from_secs(2));
        for _ in 0..KEYS / Records::PRUNED_PER_ACQUIRE + 2 {
            let owner = ids.next();
            store.fence(&owner);
            store.release(&owner, Duration::ZERO);
        }
        let Records { by_key, blocked, .. } = &store.records;
        assert_eq!((by_key.len(), blocked.len()), (0, 0));
        assert!(by_key.capacity() < 1024 && blocked.capacity() < 1024, "{} {}", by_key.capacity(), blocked.capacity());
    }
}
