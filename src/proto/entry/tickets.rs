//! Sections under a key that was left to a ticket.
//!
//! The store grants such a key at once, or not at all. So its grant has no attempt: other requests
//! of this process may wait in the one of the key meanwhile. It is a share beside which no other
//! one fits.

use std::{sync::Arc, time::Duration};

use super::LockEntry;
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    fencing::FencingToken,
    proto::{
        Action, DriverTypes, Env, Redeemed,
        grant::Grant,
        pending_release::PendingRelease,
        section::Section,
        share::{Share, SharedSection},
    },
    store::Heir,
};

impl<D: DriverTypes> LockEntry<'_, D> {
    /// Starts a section under a key that was granted in place of a ticket. The caller receives it:
    /// nothing is delivered. `None`: too little of the lease is left, or a message says that the
    /// grant was revoked before its reply. The key goes back, if this acquisition still holds it
    /// (I7).
    pub(in crate::proto) fn redeem(
        &mut self,
        redeemed: Redeemed,
        ticket: &Arc<Heir>,
        env: &mut Env<'_, D>,
    ) -> Option<Arc<Section<D>>> {
        let Redeemed { id, fence, sent_at, owner, limits, trace } = redeemed;
        let (lease, lock_delay) = limits.lease_and_lock_delay(env.lease);
        let token = FencingToken::from_fence(fence).filter(|_| !env.is_shutting_down && !env.usage.was_revoked(&id));
        let grant =
            token.map(|token| (token, Grant::new(env.key.clone(), id.clone(), token, lease, lock_delay, sent_at)));
        let is_usable = |grant: &Grant<D>| grant.remaining(env.now()) >= limits.min_remaining(env.lease);
        let Some((token, grant)) = grant.filter(|(_, grant)| is_usable(grant)) else {
            self.leave_to_ticket(id, ticket, None, env);
            return None;
        };
        let grant = Arc::new(grant);
        let section = Section::new(Arc::clone(&grant), token.with_sequence(0), limits, env.now());
        let section = Arc::new(section.traced(trace, None));
        let mut shared = SharedSection::new(Arc::clone(&section), owner.filter(|owner| !owner.is_closed()));
        shared.active.holds = 1;
        env.actions.push(Action::Track(Arc::clone(&grant)));
        self.shares.push(Share {
            grant,
            token,
            sections: vec![shared],
            started: 1,
            is_of_readers: false,
            since: env.now(),
            confirmed_at: sent_at,
            in_doubt_until: None,
            blocked_until: BootInstant::default(),
        });
        Some(section)
    }

    /// Leaves the key to its ticket again, if this acquisition holds it or may hold it later.
    pub(in crate::proto) fn leave_to_ticket(
        &mut self,
        id: AcquisitionId,
        ticket: &Arc<Heir>,
        in_doubt_until: Option<BootInstant>,
        env: &mut Env<'_, D>,
    ) {
        let release = PendingRelease {
            heir: Some(Arc::clone(ticket)),
            in_doubt_until,
            ..PendingRelease::new(id, Duration::ZERO, env.lease.longest, env.now())
        };
        self.queue_release(release, env);
    }
}
