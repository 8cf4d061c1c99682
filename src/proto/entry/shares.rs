//! Grants beside which others hold the key: permits and readers.
//!
//! The attempt of an entry asks for its first waiter. A grant of the whole key stays in the
//! attempt. A share leaves it, so that the next waiter asks for its own at once. So does the grant
//! of a request that a newer one replaces: the queue of the store knows which one is newer. Readers
//! of one process run beside each other under one share: a grant for each would cost two calls of
//! the store, and exclusive sections, which are handed off locally, cost none.

use std::{sync::Arc, time::Duration};

use super::LockEntry;
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::{LockError, LockLost},
    fencing::FencingToken,
    limits::{LOCAL_HANDOFF_SECTIONS, LOCAL_HANDOFF_TIME},
    owner::Owner,
    proto::{
        Action, DriverTypes, Env, GuardEnd, LockRequest,
        grant::Grant,
        pending_release::PendingRelease,
        section::{ReleaseOutcome, Section},
        share::{Share, SharedSection},
        sharing::Sharing,
    },
    store::Heir,
};

impl<D: DriverTypes> LockEntry<'_, D> {
    /// Starts the section of the first waiter under a share, and those of readers behind it. The
    /// next waiter asks at once.
    pub(super) fn start_share(
        &mut self,
        grant: Grant<D>,
        token: FencingToken,
        sent_at: BootInstant,
        env: &mut Env<'_, D>,
    ) {
        self.time_out_waiters(env);
        let Some(first) = self.queue.first().filter(|_| !self.is_unwanted()) else {
            return self.begin_release(Duration::ZERO, None, env);
        };
        if first.limits.lock_delay > grant.lock_delay() || first.limits.store_lease(env.lease) > grant.lease() {
            // I10: the store keeps the place for less than this section needs. Another acquire of
            // the same id extends its lease.
            return self.send_acquire(env);
        }
        let (Some(attempt), Some(first)) = (self.attempt.take(), self.queue.pop()) else { return };
        let grant = Arc::new(grant);
        if attempt.revoked_meanwhile {
            env.actions.push(Action::Verify(Arc::clone(&grant)));
        }
        self.shares.push(Share {
            grant,
            token,
            sections: Vec::with_capacity(1),
            started: 0,
            is_of_readers: first.sharing == Sharing::Reader,
            since: env.now(),
            confirmed_at: sent_at,
            in_doubt_until: attempt.in_flight.in_doubt_until(),
            blocked_until: BootInstant::default(),
        });
        self.start_beside(first, env);
        self.time_out_waiters(env);
        while self.queue.first().is_some_and(|next| self.may_read(next, env))
            && let Some(next) = self.queue.pop()
        {
            self.start_beside(next, env);
            self.time_out_waiters(env);
        }
        self.start_attempt(env);
    }

    /// Whether a reader may run under the grant of other readers of this process, and no waiter
    /// comes before it.
    pub(super) fn may_join_readers(&self, request: &LockRequest<D::Waiter>, env: &Env<'_, D>) -> bool {
        self.attempt.is_none() && self.queue.is_empty() && self.may_read(request, env)
    }

    /// Whether the newest share is one of readers that this one may join. Its grant is shared for
    /// as long as local handoffs take. Then the queue of the store decides which process is next.
    fn may_read(&self, request: &LockRequest<D::Waiter>, env: &Env<'_, D>) -> bool {
        let Some(share) = self.shares.last().filter(|share| share.is_of_readers) else { return false };
        let grant = &share.grant;
        request.sharing == Sharing::Reader
            && env.now().saturating_duration_since(share.since) < LOCAL_HANDOFF_TIME
            && share.started < LOCAL_HANDOFF_SECTIONS
            // I7
            && !grant.is_in_doubt()
            && env.doubted_at.is_none_or(|doubted_at| share.confirmed_at > doubted_at)
            // A longer lease would block the key for longer after a crash.
            && request.limits.store_lease(env.lease) == grant.lease()
            && request.limits.lock_delay <= grant.lock_delay()
            && grant.remaining(env.now()) >= request.limits.min_remaining(env.lease)
    }

    /// Starts a section under the newest share. Other requests of its owner join it.
    pub(super) fn start_beside(&mut self, request: LockRequest<D::Waiter>, env: &mut Env<'_, D>) {
        let Some(share) = self.shares.last_mut() else { return };
        let token = share.token.with_sequence(share.started);
        share.started += 1;
        let scheduled_at = share.next_check_at();
        let section = Arc::new(Section::beside(Arc::clone(&share.grant), token, request.limits, env.now()));
        let owner = request.owner.clone().filter(|owner| !owner.is_closed());
        let mut shared = SharedSection::new(section, owner.clone());
        shared.join(request, env);
        let is_whole = share.grant.id.max_holders() == 1;
        while let Some(owner) = &owner
            && let Some(again) =
                self.queue.remove_owned_by(owner, env.now(), |again| is_whole || !again.sharing.is_alone())
        {
            shared.join(again, env);
        }
        while let Some(owner) = &owner
            && let Some(alone) = self.queue.remove_owned_by(owner, env.now(), |_| true)
        {
            // It would wait for the end of this section.
            env.reject(alone, LockError::WouldDeadlock);
        }
        share.sections.push(shared);
        share.track_if_before(scheduled_at, env);
    }

    /// The section under a share that the owner of this request has, by its indexes.
    pub(super) fn own_share(
        &mut self,
        request: &LockRequest<D::Waiter>,
        env: &mut Env<'_, D>,
    ) -> Option<(usize, usize)> {
        let owner = request.owner.as_ref().filter(|owner| !owner.is_closed() && request.demand.joins_sections())?;
        let (at, nth) = self.share_of(owner)?;
        if self.shares[at].sections[nth].active.section.loss(env.now()).is_some() {
            self.check_share(at, env);
            return None;
        }
        Some((at, nth))
    }

    /// Grants a section under a share once more, to its owner.
    pub(super) fn reenter_share(
        &mut self,
        (at, nth): (usize, usize),
        request: LockRequest<D::Waiter>,
        env: &mut Env<'_, D>,
    ) {
        if request.sharing.is_alone() && self.shares[at].grant.id.max_holders() > 1 {
            // The key is not free for this owner before its own section has ended.
            return env.reject(request, LockError::WouldDeadlock);
        }
        let share = &mut self.shares[at];
        let scheduled_at = share.next_check_at();
        share.sections[nth].join(request, env);
        share.track_if_before(scheduled_at, env);
    }

    /// The indexes of the share and the section that this owner has.
    fn share_of(&self, owner: &Owner) -> Option<(usize, usize)> {
        self.shares.iter().enumerate().find_map(|(at, share)| {
            let is_own = |shared: &SharedSection<D>| shared.active.owner.as_ref() == Some(owner);
            Some((at, share.sections.iter().position(is_own)?))
        })
    }

    /// The index of the share with this grant.
    pub(super) fn share_with(&self, is_grant: impl Fn(&Arc<Grant<D>>) -> bool) -> Option<usize> {
        self.shares.iter().position(|share| is_grant(&share.grant))
    }

    /// Ends one hold of a section under a share. Returns the outcome of the release, or `None` if
    /// the store is called.
    pub(super) fn on_shared_guard_end(
        &mut self,
        section: &Arc<Section<D>>,
        end: GuardEnd,
        env: &mut Env<'_, D>,
    ) -> Option<ReleaseOutcome> {
        let find = |entry: &Self| entry.share_with(|grant| Arc::ptr_eq(grant, &section.grant));
        if section.loss(env.now()).is_some()
            && let Some(at) = find(self)
        {
            self.check_share(at, env);
        }
        let Some(at) = find(self) else { return Some(ReleaseOutcome::NotHeld) };
        let share = &mut self.shares[at];
        let Some(nth) = share.sections.iter().position(|shared| shared.active.is(section)) else {
            return Some(ReleaseOutcome::NotHeld);
        };
        let (active, heir) = (&mut share.sections[nth].active, end.heir());
        let Some(block_for) = active.end_hold(end, env.now()) else {
            return Some(ReleaseOutcome::StillHeld);
        };
        let heir = heir.filter(|_| !active.any_dropped);
        share.end_section(nth, LockLost::Released, block_for, env);
        if !share.sections.is_empty() {
            return Some(ReleaseOutcome::StillHeld);
        }
        self.release_share(at, Some(Arc::clone(section)), heir, env);
        None
    }

    /// I7: the next renewal shows whether the store keeps the share.
    pub(super) fn verify_share(&self, at: usize, env: &mut Env<'_, D>) {
        env.actions.push(Action::Verify(Arc::clone(&self.shares[at].grant)));
    }

    /// A newer request waits for the end of the sections under these shares.
    pub(super) fn supersede(&self, is_meant: impl Fn(&AcquisitionId) -> bool, env: &mut Env<'_, D>) {
        let shares = self.shares.iter().filter(|share| is_meant(&share.grant.id));
        for active in shares.flat_map(Share::sections) {
            active.section.supersede(env.now());
            env.actions.push(Action::Superseded(Arc::clone(&active.section)));
        }
    }

    /// Ends the sections whose limit has passed, and recalls those that are not received.
    pub(super) fn check_share(&mut self, at: usize, env: &mut Env<'_, D>) {
        let share = &mut self.shares[at];
        if share.grant.remaining(env.now()).is_zero() {
            let reason = share.grant.end_reason().unwrap_or(LockLost::Expired);
            return self.on_share_lost(at, reason, env);
        }
        for nth in (0..share.sections.len()).rev() {
            let section = &share.sections[nth].active.section;
            if let Some(why) = section.loss(env.now()) {
                let lock_delay = section.lock_delay();
                share.end_section(nth, why, lock_delay, env);
            }
        }
        if share.sections.is_empty() {
            return self.release_share(at, None, None, env);
        }
        share.plan_checks(self.queue.len(), env);
    }

    /// Ends all sections under a share that is lost.
    pub(super) fn on_share_lost(&mut self, at: usize, reason: LockLost, env: &mut Env<'_, D>) {
        let share = &mut self.shares[at];
        share.grant.end(reason);
        let reason = share.grant.end_reason().unwrap_or(reason);
        while let Some(last) = share.sections.len().checked_sub(1) {
            let lock_delay = share.sections[last].active.section.lock_delay();
            share.end_section(last, reason, lock_delay, env);
        }
        self.release_share(at, None, None, env);
    }

    /// Releases a share without sections. An attempt of this process may be queued already, and the
    /// release does not block it.
    fn release_share(
        &mut self,
        at: usize,
        section: Option<Arc<Section<D>>>,
        heir: Option<Arc<Heir>>,
        env: &mut Env<'_, D>,
    ) {
        let Share { grant, in_doubt_until, blocked_until, .. } = self.shares.remove(at);
        // The grant ends before the release is sent: it must not count as held after that.
        grant.end(LockLost::Released);
        let block_for = blocked_until.saturating_duration_since(env.now());
        let release = PendingRelease {
            in_doubt_until,
            section,
            heir,
            ..PendingRelease::new(grant.id.clone(), block_for, env.lease.longest, env.now())
        };
        env.actions.push(Action::Untrack(grant));
        self.queue_release(release, env);
        if !block_for.is_zero() {
            self.poll_after(block_for, env);
        }
    }
}
