//! Sections, one after another, and the grant that they run under.

use std::{sync::Arc, time::Duration};

use super::LockEntry;
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::LockLost,
    fencing::FencingToken,
    limits::{LOCAL_HANDOFF_SECTIONS, LOCAL_HANDOFF_TIME, MIN_REMAINING_DIVISOR},
    proto::{
        Action, DriverTypes, Env, FreeKey, GuardEnd, LockRequest, QUEUE, QueuePosition,
        attempt::{ActiveSection, Asking, Attempt, Holding, State},
        calls::Numbered,
        deliveries::DELIVERY_CHECK,
        grant::Grant,
        pending_release::{Leaves, PendingRelease},
        section::{ReleaseOutcome, Section},
    },
    store::{StoreError, StoreErrorKind, YieldReply, YieldRequest},
    trace::SectionTrace,
};

impl<D: DriverTypes> LockEntry<'_, D> {
    pub(super) fn on_granted(
        &mut self,
        sent_at: BootInstant,
        fence: u64,
        after: Option<SectionTrace>,
        env: &mut Env<'_, D>,
    ) {
        let Some(attempt) = &mut self.attempt else { return };
        let Some(token) = FencingToken::from_fence(fence) else {
            let error = StoreError::new("lock", "acquire", StoreErrorKind::Protocol);
            return self.fail_attempt(&error, sent_at, env);
        };
        let (lease, lock_delay) = (self.asking.lease, self.asking.lock_delay);
        let grant = Grant::new(env.key.clone(), attempt.id.clone(), token, lease, lock_delay, sent_at);
        if grant.remaining(env.now()) < lease / MIN_REMAINING_DIVISOR {
            // The reply took too long: too little of the lease is left for a section.
            return self.begin_release(Duration::ZERO, None, env);
        }
        if attempt.id.max_holders() > 1 || attempt.id.is_replaceable() {
            return self.start_share(grant, token, sent_at, env);
        }
        self.asking.retry_at = None;
        self.asking.ended = after;
        attempt.state = State::Holding(Holding::new(Arc::new(grant), token, attempt.demand, sent_at, env.now()));
        self.start_next(true, env);
    }

    /// Starts a section under a key that the store has granted without a call. The caller receives
    /// it: nothing is delivered. A key that cannot be used is released.
    pub(in crate::proto) fn hold_free<W>(
        &mut self,
        free: FreeKey,
        request: &LockRequest<W>,
        env: &mut Env<'_, D>,
    ) -> Option<Arc<Section<D>>> {
        let FreeKey { id, fence, sent_at } = free;
        let can_hold = self.is_idle() && !env.is_shutting_down;
        let Some(token) = FencingToken::from_fence(fence).filter(|_| can_hold) else {
            let release = PendingRelease::new(id, Duration::ZERO, env.lease.longest, env.now());
            self.queue_release(release, env);
            return None;
        };
        let (lease, lock_delay) = request.limits.lease_and_lock_delay(env.lease);
        let grant = Arc::new(Grant::new(env.key.clone(), id.clone(), token, lease, lock_delay, sent_at));
        let section = Section::new(Arc::clone(&grant), token.with_sequence(0), request.limits, sent_at);
        let section = Arc::new(section.traced(request.trace.clone(), None));
        let owner = request.owner.clone().filter(|owner| !owner.is_closed());
        let state = State::Holding(Holding {
            sections: 1,
            active: Some(ActiveSection::new(Arc::clone(&section), owner, 1)),
            ..Holding::new(grant, token, request.demand, sent_at, sent_at)
        });
        *self.attempt = Some(Attempt { state, was_sent: true, ..Attempt::new(id) });
        Some(section)
    }

    /// Starts a section for the first waiter and all other requests of the same owner. Without a
    /// waiter, releases the key.
    pub(super) fn start_next(&mut self, track: bool, env: &mut Env<'_, D>) {
        self.time_out_waiters(env);
        let Some(Attempt { state: State::Holding(holding), .. }) = &mut self.attempt else { return };
        let Some(first) = self.queue.first() else {
            return self.begin_release(Duration::ZERO, None, env);
        };
        if !first.sharing.is_alone() || !first.demand.is_met_by(holding.demand) {
            // The grant was asked for something else. A new acquire asks for this.
            return self.begin_release(Duration::ZERO, None, env);
        }
        if first.limits.lock_delay > holding.grant.lock_delay()
            || first.limits.store_lease(env.lease) > holding.grant.lease()
        {
            // I10: the store keeps the key for less than this section needs. A yield extends the
            // lease, and the section starts after its reply.
            return self.send_yield(env);
        }
        let Some(first) = self.queue.pop() else { return };
        let waits = first.waits();
        let LockRequest { waiter, owner, limits, trace, .. } = first;
        let token = holding.token.with_sequence(holding.sections);
        holding.sections += 1;
        let scheduled_at = holding.grant.next_check_at();
        let section = Section::new(Arc::clone(&holding.grant), token, limits, env.now());
        let section = Arc::new(section.traced(trace, self.asking.ended.take()));
        holding.grant.set_delivery_check(env.now().saturating_add(DELIVERY_CHECK));
        if track || holding.grant.next_check_at() < scheduled_at {
            env.actions.push(Action::Track(Arc::clone(&holding.grant)));
        }
        let owner = owner.filter(|owner| !owner.is_closed());
        let mut holds = 1;
        self.deliveries.send((waiter, waits), &section, env);
        if let Some(owner) = &owner {
            while let Some(request) = self.queue.remove_owned_by(owner, env.now(), |_| true) {
                holds += 1;
                let waits = request.waits();
                self.deliveries.send((request.waiter, waits), &section, env);
            }
        }
        holding.active = Some(ActiveSection::new(section, owner, holds));
        self.reject_non_waiting(env, QueuePosition::busy_error);
    }

    /// Ends one hold of the section. Returns the outcome of the release, or `None` if the store is
    /// called and [`Action::ReleaseOutcome`] follows.
    pub fn on_guard_end(
        &mut self,
        section: &Arc<Section<D>>,
        end: GuardEnd,
        env: &mut Env<'_, D>,
    ) -> Option<ReleaseOutcome> {
        if self.share_with(|grant| Arc::ptr_eq(grant, &section.grant)).is_some() {
            return self.on_shared_guard_end(section, end, env);
        }
        self.check_expired(env);
        // The section was lost before, and its release has begun.
        let lost = |env: &mut Env<'_, D>| {
            if matches!(end, GuardEnd::Recorded(_)) {
                env.actions.push(Action::RecordLost(Arc::clone(section)));
            }
            Some(ReleaseOutcome::NotHeld)
        };
        let Some(Attempt { state: State::Holding(holding), in_flight, .. }) = &mut self.attempt else {
            return lost(env);
        };
        let is_in_doubt = in_flight.in_doubt_until().is_some();
        let Some(active) = holding.active.as_mut().filter(|active| active.is(section)) else { return lost(env) };
        let heir = end.heir();
        let Some(block_for) = active.end_hold(end, env.now()) else { return Some(ReleaseOutcome::StillHeld) };
        let Some(ActiveSection { section, any_dropped, record, .. }) = holding.active.take() else {
            unreachable!("it has a guard")
        };
        let heir = heir.filter(|_| !any_dropped && record.is_none());
        section.end(LockLost::Released);
        // The handoff depends on the limits of the next waiter that has not timed out.
        self.time_out_waiters(env);
        let is_free = block_for.is_zero() && record.is_none() && heir.is_none() && self.queue.is_empty();
        // I8: a call in doubt may be executed later, so that one release is not enough.
        if is_free && env.cx.frees_keys && !is_in_doubt {
            // The grant ends before the key is free: it must not count as held after that.
            section.grant.end(LockLost::Released);
            *self.attempt = None;
            return Some(ReleaseOutcome::Released);
        }
        env.actions.push(Action::SectionEnded(Arc::clone(&section)));
        if any_dropped || record.is_some() || heir.is_some() || !block_for.is_zero() || self.queue.is_empty() {
            self.begin_release_with(block_for, Leaves { record, heir }, Some(section), env);
            return None;
        }
        self.hand_off(section.ended_trace(env.now()), env);
        Some(ReleaseOutcome::HandedOff)
    }

    /// Passes the key to the next local waiter. Until the batch is used up, this needs no store
    /// call.
    pub(super) fn hand_off(&mut self, ended: Option<SectionTrace>, env: &mut Env<'_, D>) {
        let Some(Attempt { state: State::Holding(holding), .. }) = &self.attempt else { return };
        self.asking.ended = ended;
        if self.queue.first().is_some_and(|next| next.limits.store_lease(env.lease) < holding.grant.lease()) {
            // The next section needs a shorter lease, and a longer one would block the key for
            // longer after a crash. An id never gets a shorter lease, because a late renewal may
            // still request the longer one. So the next section runs under another id.
            return self.begin_release(Duration::ZERO, None, env);
        }
        if self.queue.first().is_some_and(|next| !next.sharing.is_alone() || !next.demand.is_met_by(holding.demand)) {
            // A yield would queue a duplicate, although its key may have a record, and a share
            // would run alone.
            return self.begin_release(Duration::ZERO, None, env);
        }
        // I7: a section that runs under a grant in doubt continues, but no other section starts
        // under it. The yield shows whether the grant was revoked. The same applies to a store that
        // may have lost the grant.
        let may_continue = !holding.grant.is_in_doubt()
            && env.doubted_at.is_none_or(|doubted_at| holding.confirmed_at > doubted_at)
            && env.now().saturating_duration_since(holding.since) < LOCAL_HANDOFF_TIME
            && holding.sections < LOCAL_HANDOFF_SECTIONS
            && self
                .queue
                .first()
                .is_none_or(|next| holding.grant.remaining(env.now()) >= next.limits.min_remaining(env.lease));
        if may_continue { self.start_next(false, env) } else { self.send_yield(env) }
    }

    pub(super) fn send_yield(&mut self, env: &mut Env<'_, D>) {
        let Some(attempt) = self.attempt.take() else { return };
        let State::Holding(holding) = attempt.state else { unreachable!("only a holder yields") };
        holding.grant.set_section_limit(BootInstant::FAR_FUTURE);
        let next_id = env.cx.ids.next();
        let lock_delay = self.requested_lock_delay();
        // The yield sets the lease. A renewal of the same id may have been executed already, so the
        // lease must not be shorter than before.
        let lease = holding.grant.lease().max(self.requested_lease(env));
        let next = self.queue.first();
        let demand = next.map(|request| request.demand).unwrap_or_default();
        let trace = next.and_then(|request| request.trace.clone());
        let request = YieldRequest::new(
            env.key.clone(),
            attempt.id.clone(),
            holding.token.fence(),
            next_id.clone(),
            lease.saturating_add(lock_delay),
            QUEUE,
            env.lease.call_timeout,
        );
        let number = env.next_call();
        let request = YieldRequest { ended: self.asking.ended.clone(), trace, ..request.demand(demand) };
        Numbered::push(&mut env.actions.calls.yields, env.key, number, request);
        let mut attempt = Attempt {
            state: State::Yielding {
                holding,
                next_id: Box::new(next_id),
                is_renewal_refused: false,
                is_next_revoked: false,
            },
            demand,
            ..attempt
        };
        (self.asking.lease, self.asking.lock_delay) = (lease, lock_delay);
        attempt.in_flight.start(number, env.now());
        attempt.recheck_after_reply = false;
        attempt.freed_meanwhile = false;
        attempt.revoked_meanwhile = false;
        *self.attempt = Some(attempt);
    }

    pub(super) fn on_yield_reply(&mut self, number: u64, reply: Result<YieldReply, StoreError>, env: &mut Env<'_, D>) {
        let Some(mut attempt) = self.attempt.take_if(|attempt| attempt.in_flight.number() == Some(number)) else {
            return;
        };
        let sent_at = attempt.in_flight.finish(number).unwrap_or(env.now());
        let State::Yielding { mut holding, next_id, is_renewal_refused, is_next_revoked } = attempt.state else {
            unreachable!("the reply to a yield")
        };
        let token = match &reply {
            // A fence that does not increase is a protocol error.
            Ok(YieldReply::Extended { fence }) => {
                FencingToken::from_fence(*fence).filter(|token| *token > holding.token)
            }
            _ => None,
        };
        if let Some(token) = token {
            if is_renewal_refused {
                // The yield found the grant intact, so the refusal is newer than the yield: the
                // grant is lost.
                holding.grant.end(LockLost::Revoked);
            }
            holding.grant.extend(self.asking.lease, sent_at, env.now());
            holding.grant.set_fence(token, self.asking.lease, self.asking.lock_delay);
            attempt.in_flight.succeeded();
            let may_be_revoked = attempt.revoked_meanwhile;
            let must_confirm = may_be_revoked && !attempt.is_verified && !self.queue.is_empty();
            attempt.is_verified = must_confirm;
            let is_lost = holding.grant.remaining(env.now()).is_zero();
            let holding = Holding { token, since: env.now(), confirmed_at: sent_at, sections: 0, ..holding };
            *self.attempt = Some(Attempt { state: State::Holding(holding), ..attempt });
            // The grant is tracked again: it may have yielded before its first section, and then it
            // is not tracked yet.
            if is_lost {
                return self.begin_release(Duration::ZERO, None, env);
            }
            // I7: a grant that may have been revoked is confirmed by another yield before its next
            // section starts.
            if must_confirm {
                return self.send_yield(env);
            }
            self.start_next(true, env);
            if may_be_revoked {
                self.verify(env);
            }
            return;
        }
        // The old id has ended. The next id continues, or the key is released.
        holding.grant.end(LockLost::Released);
        holding.active = None;
        env.actions.push(Action::Untrack(holding.grant));
        let Asking { lease, lock_delay, .. } = *self.asking;
        *self.asking = Asking { lease, lock_delay, ..Asking::default() };
        let Attempt { recheck_after_reply, freed_meanwhile, demand, .. } = attempt;
        let new = Attempt {
            wants_queue: true,
            recheck_after_reply,
            freed_meanwhile,
            // A message about the old id would use up the one acquire that confirms this one.
            revoked_meanwhile: is_next_revoked,
            demand,
            ..Attempt::new(*next_id)
        };
        let mut old = PendingRelease {
            in_doubt_until: attempt.in_flight.in_doubt_until(),
            ..PendingRelease::new(attempt.id, Duration::ZERO, env.lease.longest, env.now())
        };
        match reply {
            Ok(YieldReply::NotHolder(acquire_reply)) => {
                // I8: an acquire of the old id is in doubt. It may be executed after the yield.
                if let Some(in_doubt_until) = old.in_doubt_until.filter(|in_doubt_until| *in_doubt_until > sent_at) {
                    old.retry_at = Some(in_doubt_until.saturating_add(Duration::from_millis(1)));
                    self.pending_releases.add(old);
                }
                *self.attempt = Some(new);
                self.on_acquire_reply(sent_at, Ok(acquire_reply), env);
            }
            // The result of the yield is not known: the old id is released, and the next id sends
            // an acquire.
            reply => {
                let protocol_error = || StoreError::new("lock", "yield", StoreErrorKind::Protocol);
                let error = reply.err().unwrap_or_else(protocol_error);
                let new = self.attempt.insert(Attempt { was_sent: true, ..new });
                new.in_flight.failed(&error, sent_at, env.lease.call_timeout, env.now(), 0.0);
                self.queue_release(old, env);
                if self.is_unwanted() {
                    self.begin_release(Duration::ZERO, None, env);
                } else {
                    self.send_acquire(env);
                }
            }
        }
    }

    /// Checks the limit and the delivery of the active section. The section that the check was
    /// scheduled for may have ended: then the active one is not due, and stays.
    pub(super) fn on_check_section(&mut self, id: &AcquisitionId, env: &mut Env<'_, D>) {
        if let Some(release) = self.pending_releases.renewed(id) {
            release.stop_renewing(LockLost::HoldLimitReached, env.now());
            return;
        }
        if let Some(at) = self.share_with(|grant| grant.id == *id) {
            return self.check_share(at, env);
        }
        if self.attempt.as_ref().is_none_or(|attempt| attempt.id != *id) {
            return;
        }
        self.check_expired(env);
        self.recall_undelivered(env);
        if let Some(Attempt { state: State::Holding(holding) | State::Yielding { holding, .. }, .. }) = &self.attempt {
            env.actions.push(Action::Track(Arc::clone(&holding.grant)));
        }
    }

    /// Recalls the active section from waiters that have not received it.
    fn recall_undelivered(&mut self, env: &mut Env<'_, D>) {
        let Some(Attempt { state: State::Holding(holding) | State::Yielding { holding, .. }, .. }) = &self.attempt
        else {
            return;
        };
        let Some(active) = &holding.active else { return self.deliveries.clear() };
        let left = (holding.grant.remaining(env.now()), self.queue.len());
        let next_check = self.deliveries.recall(&active.section, env.now(), left, env.actions);
        holding.grant.set_delivery_check(next_check);
    }

    /// Ends a section or grant whose limit or deadline has passed.
    pub(super) fn check_expired(&mut self, env: &mut Env<'_, D>) {
        let Some(Attempt { id, state: State::Holding(holding), .. }) = &self.attempt else { return };
        let lost = match &holding.active {
            Some(active) => active.section.loss(env.now()),
            None => holding.grant.remaining(env.now()).is_zero().then_some(LockLost::Expired),
        };
        if let Some(why) = lost {
            self.on_lost(&id.clone(), why, env);
        }
    }

    /// I7: a revocation message may be forged. It makes the driver verify the grant. Only a reply
    /// of the store ends the section.
    pub(super) fn on_revoked(&mut self, id: &AcquisitionId, env: &mut Env<'_, D>) {
        if let Some(at) = self.share_with(|grant| grant.id == *id) {
            return self.verify_share(at, env);
        }
        // Of a request that was replaced: the message of a newer one.
        let unknown = |env: &Env<'_, D>| {
            if !id.is_replaceable() {
                env.usage.revoked_unknown(id);
            }
        };
        let Some(attempt) = &mut self.attempt else { return unknown(env) };
        // The grant in the reply that is awaited may be the revoked one.
        let is_awaited = attempt.in_flight.number().is_some();
        match &mut attempt.state {
            State::Yielding { next_id, is_next_revoked, .. } if **next_id == *id => *is_next_revoked = true,
            _ if attempt.id == *id => {
                attempt.revoked_meanwhile = is_awaited;
                if id.is_replaceable() {
                    // The next acquire shows whether a newer one has come.
                    self.on_freed(env);
                }
            }
            _ => return unknown(env),
        }
        self.verify(env);
    }

    pub(super) fn verify(&mut self, env: &mut Env<'_, D>) {
        if let Some(Attempt { state: State::Holding(holding), .. }) = &self.attempt {
            env.actions.push(Action::Verify(Arc::clone(&holding.grant)));
        }
    }

    /// Ends a lost grant and its section. Local waiters are served by another attempt, in the same
    /// order.
    pub(super) fn on_lost(&mut self, id: &AcquisitionId, reason: LockLost, env: &mut Env<'_, D>) {
        if let Some(release) = self.pending_releases.renewed(id) {
            release.stop_renewing(reason, env.now());
            return;
        }
        if let Some(at) = self.share_with(|grant| grant.id == *id) {
            return self.on_share_lost(at, reason, env);
        }
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.id == *id) else { return };
        let block_for = match &mut attempt.state {
            State::Holding(holding) => {
                let active = holding.active.take();
                if let Some(active) = &active {
                    active.section.end(holding.grant.end_reason().unwrap_or(reason));
                    env.actions.push(Action::SectionEnded(Arc::clone(&active.section)));
                    if let Some(why) = active.section.end_reason().filter(|why| why.is_loss()) {
                        env.actions.push(Action::Lost(Arc::clone(&active.section), why));
                    }
                    if active.record.is_some() {
                        env.actions.push(Action::RecordLost(Arc::clone(&active.section)));
                    }
                }
                holding.grant.end(reason);
                active.map_or(Duration::ZERO, |active| active.section.lock_delay())
            }
            // No section runs. The yield itself makes the store refuse later renewals of this id,
            // so a refusal may not be a loss. Only the reply to the yield tells.
            State::Yielding { is_renewal_refused, .. } if reason == LockLost::Revoked => {
                *is_renewal_refused = true;
                return;
            }
            State::Yielding { holding, .. } => return holding.grant.end(reason),
            State::Requesting | State::Queued => return,
        };
        self.begin_release(block_for, None, env);
    }
}
