//! The rules of the contract, without a clock: time is an argument.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::{
    key::LockKey,
    lease::OwnerId,
    store::{Acquired, Released, Renewed},
};

/// Who holds which key.
#[derive(Debug, Default)]
pub(super) struct Records {
    by_key: HashMap<LockKey, Record>,
    last_fence: u64,
    /// At this many records those of dead holders are looked for.
    sweep_at: usize,
}

#[derive(Debug)]
struct Record {
    owner: OwnerId,
    fence: u64,
    until: Instant,
}

impl Records {
    /// Below this many records nobody looks for dead ones.
    const SWEEP_FROM: usize = 64;

    pub(super) fn acquire(
        &mut self,
        now: Instant,
        wall_clock_us: u64,
        key: &LockKey,
        owner: &OwnerId,
        lease: Duration,
    ) -> Acquired {
        let until = end_of(lease, now);
        if let Some(record) = self.by_key.get_mut(key)
            && record.until > now
        {
            if record.owner != *owner {
                return Acquired::Held { lease_left: record.until - now };
            }
            record.until = until;
            return Acquired::Granted { fence: record.fence };
        }
        self.sweep(now);
        let fence = wall_clock_us.max(self.last_fence.saturating_add(1));
        self.last_fence = fence;
        self.by_key.insert(key.clone(), Record { owner: owner.clone(), fence, until });
        Acquired::Granted { fence }
    }

    pub(super) fn renew(&mut self, now: Instant, key: &LockKey, owner: &OwnerId, lease: Duration) -> Renewed {
        match self.by_key.get_mut(key) {
            Some(record) if record.owner == *owner && record.until > now => {
                record.until = end_of(lease, now);
                Renewed::Extended
            }
            _ => Renewed::NotOwner,
        }
    }

    /// I1
    pub(super) fn release(&mut self, now: Instant, key: &LockKey, owner: &OwnerId) -> Released {
        match self.by_key.get(key) {
            Some(record) if record.owner == *owner => {
                let in_time = record.until > now;
                self.by_key.remove(key);
                if in_time { Released::Freed } else { Released::NotOwner }
            }
            _ => Released::NotOwner,
        }
    }

    pub(super) fn held(&self, now: Instant) -> usize {
        self.by_key.values().filter(|record| record.until > now).count()
    }

    /// Holders that died leave their records. Looking for them each time the table has doubled costs a constant
    /// per acquisition and keeps it within twice the living.
    fn sweep(&mut self, now: Instant) {
        if self.by_key.len() >= self.sweep_at.max(Self::SWEEP_FROM) {
            self.by_key.retain(|_, record| record.until > now);
            self.sweep_at = 2 * self.by_key.len();
        }
    }
}

/// A lease past the end of the clock is as good as one that ends there.
fn end_of(lease: Duration, now: Instant) -> Instant {
    now.checked_add(lease).unwrap_or_else(|| now + Duration::from_secs(u32::MAX.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::OwnerIds;

    const LEASE: Duration = Duration::from_secs(30);

    fn key() -> LockKey {
        LockKey::from(("order", 1))
    }

    fn fence(acquired: Acquired) -> u64 {
        let Acquired::Granted { fence } = acquired else { panic!("not granted: {acquired:?}") };
        fence
    }

    #[test]
    fn a_key_has_one_owner_until_it_is_given_back() {
        let (mut records, ids, now) = (Records::default(), OwnerIds::new(0), Instant::now());
        let (a, b) = (ids.next(), ids.next());
        fence(records.acquire(now, 0, &key(), &a, LEASE));
        let later = now + Duration::from_secs(10);
        assert_eq!(
            records.acquire(later, 0, &key(), &b, LEASE),
            Acquired::Held { lease_left: Duration::from_secs(20) }
        );
        assert_eq!(records.release(later, &key(), &b), Released::NotOwner, "a stranger frees nothing");
        assert_eq!(records.release(later, &key(), &a), Released::Freed);
        assert_eq!(records.release(later, &key(), &a), Released::NotOwner, "the second time there is nothing to free");
        fence(records.acquire(later, 0, &key(), &b, LEASE));
    }

    #[test]
    fn a_crashed_holder_blocks_no_longer_than_its_lease() {
        let (mut records, ids, now) = (Records::default(), OwnerIds::new(0), Instant::now());
        let (a, b) = (ids.next(), ids.next());
        fence(records.acquire(now, 0, &key(), &a, LEASE));
        assert!(matches!(
            records.acquire(now + LEASE - Duration::from_millis(1), 0, &key(), &b, LEASE),
            Acquired::Held { .. }
        ));
        fence(records.acquire(now + LEASE, 0, &key(), &b, LEASE));
        assert_eq!(
            records.release(now + LEASE, &key(), &a),
            Released::NotOwner,
            "a late holder frees nobody else's lock"
        );
        assert_eq!(records.held(now + LEASE), 1);
    }

    #[test]
    fn an_acquire_that_is_repeated_answers_the_same_fence() {
        let (mut records, ids, now) = (Records::default(), OwnerIds::new(0), Instant::now());
        let a = ids.next();
        let first = fence(records.acquire(now, 5, &key(), &a, LEASE));
        let again = fence(records.acquire(now + LEASE / 2, 9, &key(), &a, LEASE));
        assert_eq!(first, again);
        assert_eq!(records.held(now + LEASE), 1, "and its lease is full again");
    }

    #[test]
    fn a_lease_is_renewed_for_its_owner_while_it_lasts_and_for_nobody_else() {
        let (mut records, ids, now) = (Records::default(), OwnerIds::new(0), Instant::now());
        let (a, b) = (ids.next(), ids.next());
        assert_eq!(records.renew(now, &key(), &a, LEASE), Renewed::NotOwner, "a free key is nobody's");
        let first = fence(records.acquire(now, 5, &key(), &a, LEASE));
        assert_eq!(records.renew(now + LEASE / 2, &key(), &b, LEASE), Renewed::NotOwner, "a stranger");
        assert_eq!(records.renew(now + LEASE / 2, &key(), &a, LEASE), Renewed::Extended);
        assert_eq!(records.held(now + LEASE), 1, "renewed");
        assert_eq!(fence(records.acquire(now + LEASE, 9, &key(), &a, LEASE)), first, "under the same fence");
        assert_eq!(records.renew(now + 3 * LEASE, &key(), &a, LEASE), Renewed::NotOwner, "what is over stays over");
    }

    #[test]
    fn a_fence_rises_over_a_restart_and_over_a_clock_that_steps_back() {
        let (mut records, ids, now) = (Records::default(), OwnerIds::new(0), Instant::now());
        let mut last = 0;
        for (n, clock) in [1_000, 1_000, 2_000, 500, 500, 2_500].into_iter().enumerate() {
            let next = fence(records.acquire(now, clock, &LockKey::from(("n", n)), &ids.next(), LEASE));
            assert!(next > last, "{next} after {last}");
            last = next;
        }
        let mut restarted = Records::default();
        assert!(fence(restarted.acquire(now, 3_000, &key(), &ids.next(), LEASE)) > last);
    }

    #[test]
    fn a_free_lock_leaves_nothing_and_dead_holders_are_swept() {
        let (mut records, ids, mut now) = (Records::default(), OwnerIds::new(0), Instant::now());
        let owner = ids.next();
        fence(records.acquire(now, 0, &key(), &owner, LEASE));
        records.release(now, &key(), &owner);
        assert!(records.by_key.is_empty());
        for n in 0..10_000 {
            now += Duration::from_secs(1);
            fence(records.acquire(now, 0, &LockKey::from(("n", n)), &ids.next(), LEASE));
        }
        assert!(records.by_key.len() <= 2 * Records::SWEEP_FROM, "{} records for 30 holders", records.by_key.len());
    }

    #[test]
    fn a_lease_without_end_is_no_panic() {
        let (mut records, ids) = (Records::default(), OwnerIds::new(0));
        fence(records.acquire(Instant::now(), u64::MAX - 1, &key(), &ids.next(), Duration::MAX));
    }
}
