//! The waiters of one section that are not known to have received it.

use std::{sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::{Action, Actions, DriverTypes, Env, section::Section};
use crate::{
    clock::BootInstant,
    error::LockError,
    limits::{OFFER_TTL, STORE_TIMEOUT},
};

/// The delay of the first check of a delivery. The second check follows after a store timeout, so
/// that a section is recalled when an offer of the store would have expired.
pub(super) const DELIVERY_CHECK: Duration = OFFER_TTL.saturating_sub(STORE_TIMEOUT);

/// The waiters that a section was sent to, with the instant of their next check.
#[derive(Debug)]
pub(super) struct Deliveries<D: DriverTypes>(SmallVec<[Delivery<D>; 1]>);

#[derive(Debug)]
struct Delivery<D: DriverTypes> {
    waiter: D::Waiter,
    waits: bool,
    check_at: BootInstant,
    /// A process that was stopped gets a second check, because its waiters were stopped, too.
    was_checked: bool,
}

impl<D: DriverTypes> Deliveries<D> {
    pub(super) fn new() -> Self {
        Self(SmallVec::new())
    }

    /// Sends the section to a waiter. `waits`: its request has a wait.
    pub(super) fn send(&mut self, (waiter, waits): (D::Waiter, bool), section: &Arc<Section<D>>, env: &mut Env<'_, D>) {
        self.push(waiter.clone(), waits, section, env.now());
        env.actions.push(Action::Grant(waiter, Arc::clone(section)));
    }

    /// Records that the section is sent to this waiter.
    fn push(&mut self, waiter: D::Waiter, waits: bool, section: &Section<D>, now: BootInstant) {
        if section.deliver() == 0 {
            // The list stays short if an owner re-enters a million times.
            self.0.clear();
        }
        self.0.push(Delivery { waiter, waits, check_at: now.saturating_add(DELIVERY_CHECK), was_checked: false });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Recalls the section from waiters that have not received it within the time of an offer:
    /// their calls may never be polled again. Each recalled waiter ends one hold. Returns the
    /// instant of the next check.
    pub(super) fn recall(
        &mut self,
        section: &Section<D>,
        now: BootInstant,
        (lease_left, ahead): (Duration, usize),
        actions: &mut Actions<D>,
    ) -> BootInstant {
        if section.is_delivered() {
            self.0.clear();
        }
        self.check(now, |waiter, waits| {
            let error = if waits {
                LockError::TimedOut { waited: Duration::ZERO, lease_left, ahead, held_by: None }
            } else {
                LockError::busy(lease_left, ahead)
            };
            actions.push(Action::Recall(waiter.clone(), error));
        })
    }

    /// Calls `recall` for each waiter that was checked twice, and forgets it. Returns the instant
    /// of the next check.
    fn check(&mut self, now: BootInstant, mut recall: impl FnMut(&D::Waiter, bool)) -> BootInstant {
        let mut next_check = BootInstant::FAR_FUTURE;
        self.0.retain(|delivery| {
            if delivery.check_at <= now && delivery.was_checked {
                recall(&delivery.waiter, delivery.waits);
                return false;
            }
            if delivery.check_at <= now {
                delivery.was_checked = true;
                delivery.check_at = now.saturating_add(STORE_TIMEOUT);
            }
            next_check = next_check.min(delivery.check_at);
            true
        });
        next_check
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        acquisition::AcquisitionIds,
        fencing::FencingToken,
        limits::LEASE,
        lock_key::LockKey,
        proto::{NoDriver, grant::Grant, hold_limits::HoldLimits},
    };

    const START: BootInstant = BootInstant::from_nanos(1 << 40);

    fn section() -> Section<NoDriver> {
        let (key, id) = (LockKey::from(("n", 1)), AcquisitionIds::new("test", 1).next());
        let token = FencingToken::from_fence(1).expect("small");
        let grant = Grant::new(key, id, token, LEASE, Duration::ZERO, START);
        Section::new(Arc::new(grant), token, HoldLimits::default(), START)
    }

    #[test]
    fn a_delivery_is_recalled_at_its_second_check() {
        let (section, mut deliveries, mut recalled) = (section(), Deliveries::new(), Vec::new());
        deliveries.push(1, true, &section, START);
        let first = START.saturating_add(DELIVERY_CHECK);
        let second = first.saturating_add(STORE_TIMEOUT);
        assert_eq!(deliveries.check(START, |_, _| panic!("too early")), first);
        assert_eq!(deliveries.check(first, |_, _| panic!("checked once")), second);
        let next = deliveries.check(second, |waiter, waits| recalled.push((*waiter, waits)));
        assert_eq!((next, recalled), (BootInstant::FAR_FUTURE, vec![(1, true)]));
    }

    #[test]
    fn received_deliveries_are_forgotten_by_the_next_one() {
        let (section, mut deliveries) = (section(), Deliveries::new());
        for waiter in 0..3 {
            deliveries.push(waiter, false, &section, START);
            section.delivered();
        }
        assert_eq!(deliveries.0.len(), 1);
        deliveries.push(3, false, &section, START);
        deliveries.push(4, false, &section, START);
        assert_eq!(deliveries.0.len(), 2);
    }
}
