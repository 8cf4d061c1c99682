//! A grant beside which others may hold the key, and its sections.

use std::{sync::Arc, time::Duration};

use super::{
    Action, DriverTypes, Env, LockRequest,
    attempt::ActiveSection,
    deliveries::{DELIVERY_CHECK, Deliveries},
    grant::Grant,
    section::Section,
};
use crate::{clock::BootInstant, error::LockLost, fencing::FencingToken, owner::Owner};

/// A grant beside which others may hold the key, and the sections that run under it.
#[derive(Debug)]
pub(super) struct Share<D: DriverTypes> {
    pub(super) grant: Arc<Grant<D>>,
    pub(super) token: FencingToken,
    /// One, or several of readers.
    pub(super) sections: Vec<SharedSection<D>>,
    /// The number of sections that have started.
    pub(super) started: u16,
    pub(super) is_of_readers: bool,
    pub(super) since: BootInstant,
    /// When the call was sent to which the store replied then (I3).
    pub(super) confirmed_at: BootInstant,
    pub(super) in_doubt_until: Option<BootInstant>,
    /// The end of the lock-delay or the minimum hold of a section that has ended.
    pub(super) blocked_until: BootInstant,
}

#[derive(Debug)]
pub(super) struct SharedSection<D: DriverTypes> {
    pub(super) active: ActiveSection<D>,
    pub(super) deliveries: Deliveries<D>,
}

impl<D: DriverTypes> Share<D> {
    pub(super) fn sections(&self) -> impl Iterator<Item = &ActiveSection<D>> {
        self.sections.iter().map(|shared| &shared.active)
    }

    /// Ends a section. Its place stays blocked for this time.
    pub(super) fn end_section(&mut self, nth: usize, why: LockLost, block_for: Duration, env: &mut Env<'_, D>) {
        let SharedSection { active: ActiveSection { section, .. }, .. } = self.sections.swap_remove(nth);
        section.end(why);
        if let Some(why) = section.end_reason().filter(|why| why.is_loss()) {
            env.actions.push(Action::Lost(Arc::clone(&section), why));
        }
        env.actions.push(Action::SectionEnded(section));
        self.blocked_until = self.blocked_until.max(env.now().saturating_add(block_for));
    }

    pub(super) fn remaining(&self, now: BootInstant) -> Duration {
        self.grant.remaining(now)
    }

    /// The instant of the next check, or a later one if the grant is not tracked yet.
    pub(super) fn next_check_at(&self) -> BootInstant {
        if self.sections.is_empty() { BootInstant::FAR_FUTURE } else { self.grant.next_check_at() }
    }

    pub(super) fn track_if_before(&self, scheduled_at: BootInstant, env: &mut Env<'_, D>) {
        if self.grant.next_check_at() < scheduled_at {
            env.actions.push(Action::Track(Arc::clone(&self.grant)));
        }
    }

    /// Recalls the sections that are not received, and plans the next check of the sections.
    pub(super) fn plan_checks(&mut self, waiting: usize, env: &mut Env<'_, D>) {
        let (now, lease_left) = (env.now(), self.grant.remaining(env.now()));
        let (mut limit, mut delivery_check) = (BootInstant::FAR_FUTURE, BootInstant::FAR_FUTURE);
        for SharedSection { active, deliveries } in &mut self.sections {
            limit = limit.min(active.section.limit());
            let next_check = deliveries.recall(&active.section, now, (lease_left, waiting), env.actions);
            delivery_check = delivery_check.min(next_check);
        }
        self.grant.set_limit(limit);
        self.grant.set_delivery_check(delivery_check);
        env.actions.push(Action::Track(Arc::clone(&self.grant)));
    }
}

impl<D: DriverTypes> SharedSection<D> {
    /// A section that no waiter has got yet.
    pub(super) fn new(section: Arc<Section<D>>, owner: Option<Owner>) -> Self {
        Self { active: ActiveSection::new(section, owner, 0), deliveries: Deliveries::new() }
    }

    /// Sends the section to one more waiter.
    pub(super) fn join(&mut self, request: LockRequest<D::Waiter>, env: &mut Env<'_, D>) {
        self.active.holds += 1;
        let waits = request.waits();
        let section = &self.active.section;
        section.grant.lower_delivery_check(env.now().saturating_add(DELIVERY_CHECK));
        self.deliveries.send((request.waiter, waits), section, env);
    }
}
