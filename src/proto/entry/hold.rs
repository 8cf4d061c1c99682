//! Sections under a grant, one after the other.

use std::{sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::{Delivery, LockEntry, queue_ops::busy_error};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::{LockError, LockLost},
    fencing::FencingToken,
    limits::{LOCAL_HANDOFF_SECTIONS, LOCAL_HANDOFF_TIME, MIN_REMAINING_DIVISOR, OFFER_TTL, STORE_TIMEOUT},
    proto::section::ReleaseOutcome,
    proto::{
        Action, DriverTypes, Env, GuardEnd, LockRequest, StoreOp,
        attempt::{ActiveSection, Attempt, Holding, State},
        grant::Grant,
        pending_release::PendingRelease,
        section::Section,
    },
    store::{StoreError, StoreErrorKind, YieldReply},
};

/// When a delivery is looked at first. What is late then has another store timeout, so that it is
/// recalled when an offer of the store would be over.
pub(super) const DELIVERY_CHECK: Duration = OFFER_TTL.saturating_sub(STORE_TIMEOUT);

/// It is the turn of this request.
pub(super) fn deliver<D: DriverTypes>(
    deliveries: &mut SmallVec<[Delivery<D>; 1]>,
    (waiter, waits): (D::Waiter, bool),
    section: &Arc<Section<D>>,
    env: &mut Env<'_, D>,
) {
    if section.deliver() == 0 {
        // All earlier ones were taken: an owner that re-enters a million times leaves no list.
        deliveries.clear();
    }
    deliveries.push(Delivery {
        waiter: waiter.clone(),
        waits,
        check_at: env.now().saturating_add(DELIVERY_CHECK),
        was_checked: false,
    });
    env.actions.push(Action::Grant(waiter, Arc::clone(section)));
}

impl<D: DriverTypes> LockEntry<D> {
    pub(super) fn on_granted(&mut self, asked: BootInstant, fence: u64, env: &mut Env<'_, D>) {
        let Some(attempt) = &mut self.attempt else { return };
        let Some(token) = FencingToken::from_fence(fence) else {
            let error = StoreError::new("lock", "acquire", StoreErrorKind::Protocol);
            return self.fail_attempt(&error, asked, env);
        };
        let grant = Grant::new(env.key.clone(), attempt.id.clone(), token, attempt.lease, attempt.lock_delay, asked);
        let grant = Arc::new(grant);
        if grant.remaining(env.now()) < attempt.lease / MIN_REMAINING_DIVISOR {
            // It took too long to hear of it: given back, and asked for again.
            return self.begin_release(Duration::ZERO, None, env);
        }
        attempt.retry_at = None;
        attempt.state =
            State::Holding(Holding { grant: Arc::clone(&grant), token, since: env.now(), sections: 0, active: None });
        self.start_next(true, env);
    }

    /// The first of the line has its turn, with all others of the same owner. Nobody is there: the key is given back.
    pub(super) fn start_next(&mut self, watch: bool, env: &mut Env<'_, D>) {
        self.time_out_waiters(env);
        let Some(Attempt { state: State::Holding(holding), .. }) = &mut self.attempt else { return };
        let Some(first) = self.queue.first() else {
            return self.begin_release(Duration::ZERO, None, env);
        };
        if first.limits.lock_delay > holding.grant.lock_delay()
            || first.limits.store_lease(env.lease) > holding.grant.lease()
        {
            // I10: the store keeps the key for less than this one needs. A yield asks for more, and
            // the section begins after its answer.
            return self.send_yield(env);
        }
        let Some(first) = self.queue.pop() else { return };
        let waits = first.waits();
        let LockRequest { waiter, owner, limits: terms, wait: _, parent: _ } = first;
        let token = holding.token.with_sequence(holding.sections);
        holding.sections += 1;
        let looked_at = holding.grant.next_check_at();
        let section = Arc::new(Section::new(Arc::clone(&holding.grant), token, terms, env.now()));
        holding.grant.set_delivery_check(env.now().saturating_add(DELIVERY_CHECK));
        if watch || holding.grant.next_check_at() < looked_at {
            env.actions.push(Action::Track(Arc::clone(&holding.grant)));
        }
        let owner = owner.filter(|owner| !owner.is_closed());
        let mut holds = 1;
        deliver(&mut self.deliveries, (waiter, waits), &section, env);
        if let Some(owner) = &owner {
            while let Some(request) = self.queue.remove_owned_by(owner, env.now()) {
                holds += 1;
                let waits = request.waits();
                deliver(&mut self.deliveries, (request.waiter, waits), &section, env);
            }
        }
        holding.active = Some(ActiveSection { section, owner, holds, any_dropped: false, any_released: false });
        self.reject_non_waiting(env, busy_error);
    }

    /// A guard is given back. What became of it; `None`: the store is asked, and the [outcome](Action::Outcome) follows.
    pub fn on_guard_end(
        &mut self,
        section: &Arc<Section<D>>,
        ending: GuardEnd,
        env: &mut Env<'_, D>,
    ) -> Option<ReleaseOutcome> {
        self.check_expired(env);
        let Some(Attempt { state: State::Holding(holding), .. }) = &mut self.attempt else {
            return Some(ReleaseOutcome::NotHeld);
        };
        let Some(active) = holding.active.as_mut().filter(|active| active.is(section)) else {
            // Lost before, and given back then.
            return Some(ReleaseOutcome::NotHeld);
        };
        if ending == GuardEnd::Undelivered {
            section.delivered();
        }
        active.any_dropped |= ending == GuardEnd::Dropped;
        active.any_released |= ending == GuardEnd::Released;
        active.holds -= 1;
        if active.holds > 0 {
            return Some(ReleaseOutcome::StillHeld);
        }
        let (abnormal, in_order) = (active.any_dropped, active.any_released);
        holding.active = None;
        section.end(LockLost::Released);
        let block_for = match ending {
            // I10: a statement of it may be on its way still.
            _ if abnormal => section.limits.lock_delay,
            GuardEnd::Released => section.limits.min_hold_remaining(section.started_at, env.now()),
            // It says nothing of what others of its owner have done.
            GuardEnd::Undelivered if in_order => section.limits.min_hold_remaining(section.started_at, env.now()),
            GuardEnd::Undelivered | GuardEnd::ReleasedAfterFailure | GuardEnd::Dropped => Duration::ZERO,
        };
        // The handoff and its terms are those of the next waiter whose wait is not over.
        self.time_out_waiters(env);
        if abnormal || !block_for.is_zero() || self.queue.is_empty() {
            self.begin_release(block_for, Some(Arc::clone(section)), env);
            return None;
        }
        env.actions.push(Action::SectionEnded(Arc::clone(&section.grant)));
        self.hand_off(env);
        Some(ReleaseOutcome::HandedOff)
    }

    /// The section has ended, and somebody here waits: no round trip, unless others may have waited for long enough.
    pub(super) fn hand_off(&mut self, env: &mut Env<'_, D>) {
        let Some(Attempt { state: State::Holding(holding), .. }) = &self.attempt else { return };
        if self.queue.first().is_some_and(|next| next.limits.store_lease(env.lease) < holding.grant.lease()) {
            // A crash of the next one is to cost no more than that one needs. One id never gets
            // less than before, because a late renewal of it may still ask for the longer lease:
            // another id asks.
            return self.begin_release(Duration::ZERO, None, env);
        }
        // A revoked grant may run to its answer, but nothing new begins under it: the yield finds
        // out.
        let is_ours = !holding.grant.is_in_doubt()
            && env.now().saturating_duration_since(holding.since) < LOCAL_HANDOFF_TIME
            && holding.sections < LOCAL_HANDOFF_SECTIONS
            && self
                .queue
                .first()
                .is_none_or(|next| holding.grant.remaining(env.now()) >= next.limits.min_remaining(env.lease));
        if is_ours { self.start_next(false, env) } else { self.send_yield(env) }
    }

    pub(super) fn send_yield(&mut self, env: &mut Env<'_, D>) {
        let Some(attempt) = self.attempt.take() else { return };
        let State::Holding(holding) = attempt.state else { unreachable!("yielded while it is holding") };
        holding.grant.set_section_limit(BootInstant::FAR_FUTURE);
        let next = env.ids.next();
        let lock_delay = self.requested_lock_delay();
        // A yield sets the lease, and a renewal of the same id may have been done already: never
        // less than that asked for.
        let lease = holding.grant.lease().max(self.requested_lease(env));
        let verb = StoreOp::Yield {
            fence: holding.token.fence(),
            next_id: next.clone(),
            lease: lease.saturating_add(lock_delay),
        };
        let call = env.store_call(&attempt.id, verb);
        let mut attempt = Attempt {
            state: State::Yielding { holding, next_id: next, is_renewal_refused: false },
            lease,
            lock_delay,
            ..attempt
        };
        attempt.in_flight.start(call.number, env.now());
        attempt.recheck_after_reply = false;
        attempt.revoked_meanwhile = false;
        self.attempt = Some(attempt);
        env.actions.push(Action::Send(call));
    }

    pub(super) fn on_yield_reply(&mut self, number: u64, answer: Result<YieldReply, StoreError>, env: &mut Env<'_, D>) {
        let Some(mut attempt) = self.attempt.take_if(|attempt| attempt.in_flight.number() == Some(number)) else {
            return;
        };
        let asked = attempt.in_flight.finish(number).unwrap_or(env.now());
        let State::Yielding { mut holding, next_id: next, is_renewal_refused: is_refused } = attempt.state else {
            unreachable!("it was asked to yield")
        };
        let token = match &answer {
            // One that does not rise is none.
            Ok(YieldReply::Extended { fence }) => {
                FencingToken::from_fence(*fence).filter(|token| *token > holding.token)
            }
            _ => None,
        };
        if let Some(token) = token {
            if is_refused {
                // It was ours when the yield was done, so the refusal is newer: a loss indeed.
                holding.grant.end(LockLost::Revoked);
            }
            holding.grant.extend(attempt.lease, asked, env.now());
            holding.grant.set_fence(token, attempt.lease, attempt.lock_delay);
            attempt.in_flight.succeeded();
            let doubted = attempt.revoked_meanwhile;
            let lost = holding.grant.remaining(env.now()).is_zero();
            let holding = Holding { token, since: env.now(), sections: 0, ..holding };
            self.attempt = Some(Attempt { state: State::Holding(holding), ..attempt });
            // It may not be watched yet: the first one under a grant may have wanted another lock-delay.
            if lost {
                return self.begin_release(Duration::ZERO, None, env);
            }
            self.start_next(true, env);
            if doubted {
                self.verify(env);
            }
            return;
        }
        // The old id is over. What becomes of the new one?
        holding.grant.end(LockLost::Released);
        holding.active = None;
        env.actions.push(Action::Untrack(holding.grant));
        let Attempt { recheck_after_reply: hinted, revoked_meanwhile: taken_away, lease, lock_delay, .. } = attempt;
        let new = Attempt {
            wants_queue: true,
            recheck_after_reply: hinted,
            revoked_meanwhile: taken_away,
            lease,
            lock_delay,
            ..Attempt::new(next)
        };
        let mut old = PendingRelease {
            in_doubt_until: attempt.in_flight.in_doubt_until,
            ..PendingRelease::new(attempt.id, Duration::ZERO, env.lease.longest, env.now())
        };
        match answer {
            Ok(YieldReply::NotHolder(acquired)) => {
                // I8: an acquire of the old id that got no answer may still be done.
                if let Some(void_at) = old.in_doubt_until.filter(|void_at| *void_at > asked) {
                    old.retry_at = Some(void_at.saturating_add(Duration::from_millis(1)));
                    self.pending_releases.push(old);
                }
                self.attempt = Some(new);
                self.on_acquire_reply(asked, Ok(acquired), env);
            }
            // Not known: the old one is given back, and the new one asks.
            answer => {
                let unknown = || StoreError::new("lock", "yield", StoreErrorKind::Protocol);
                let error = answer.err().unwrap_or_else(unknown);
                let new = self.attempt.insert(new);
                new.in_flight.failed(&error, asked, env.call_timeout, env.now(), 0.0);
                self.queue_release(old, env);
                if self.queue.is_empty() {
                    self.begin_release(Duration::ZERO, None, env);
                } else {
                    self.send_acquire(env);
                }
            }
        }
    }

    /// The section that runs under this grant may have reached its limit. If another one runs by now, it has a limit of its own.
    pub(super) fn on_check_section(&mut self, owner: &AcquisitionId, env: &mut Env<'_, D>) {
        if self.attempt.as_ref().is_none_or(|attempt| attempt.id != *owner) {
            return;
        }
        self.check_expired(env);
        self.recall_undelivered(env);
        if let Some(Attempt { state: State::Holding(holding) | State::Yielding { holding, .. }, .. }) = &self.attempt {
            env.actions.push(Action::Track(Arc::clone(&holding.grant)));
        }
    }

    /// A section that was sent and not taken within the time of an offer goes to the next one: its
    /// caller may never be polled again. Each caller counts as one hold.
    fn recall_undelivered(&mut self, env: &mut Env<'_, D>) {
        let Some(Attempt { state: State::Holding(holding) | State::Yielding { holding, .. }, .. }) = &self.attempt
        else {
            return;
        };
        let (now, lease_left, ahead) = (env.now(), holding.grant.remaining(env.now()), self.queue.len());
        if holding.active.as_ref().is_none_or(|active| active.section.is_delivered()) {
            self.deliveries.clear();
        }
        let mut next = BootInstant::FAR_FUTURE;
        self.deliveries.retain(|delivery| {
            if delivery.check_at <= now && delivery.was_checked {
                let error = if delivery.waits {
                    LockError::TimedOut { waited: Duration::ZERO, lease_left, ahead }
                } else {
                    busy_error(lease_left, ahead)
                };
                env.actions.push(Action::Recall(delivery.waiter.clone(), error));
                return false;
            }
            if delivery.check_at <= now {
                delivery.was_checked = true;
                delivery.check_at = now.saturating_add(STORE_TIMEOUT);
            }
            next = next.min(delivery.check_at);
            true
        });
        holding.grant.set_delivery_check(next);
    }

    /// What is past its deadline or its limit is lost, whoever looks first.
    pub(super) fn check_expired(&mut self, env: &mut Env<'_, D>) {
        let lost = match self.attempt.as_ref().map(|attempt| (attempt, &attempt.state)) {
            Some((attempt, State::Holding(holding))) => {
                let over = match &holding.active {
                    Some(active) => active.section.remaining(env.now()).is_zero().then(|| active.section.end_reason()),
                    None => holding.grant.remaining(env.now()).is_zero().then(|| holding.grant.end_reason()),
                };
                over.map(|why| (attempt.id.clone(), why.unwrap_or(LockLost::Expired)))
            }
            _ => None,
        };
        if let Some((owner, why)) = lost {
            self.on_lost(&owner, why, env);
        }
    }

    /// A message says that the store has taken the key away from this owner. Anybody who can send messages can say so: the store is asked,
    /// and its word alone ends what runs (I7).
    pub(super) fn on_revoked(&mut self, owner: &AcquisitionId, env: &mut Env<'_, D>) {
        let Some(attempt) = &mut self.attempt else { return };
        let is_next = matches!(&attempt.state, State::Yielding { next_id, .. } if next_id == owner);
        if attempt.id == *owner || is_next {
            // The grant that the awaited answer tells of may be the one that is over.
            attempt.revoked_meanwhile = attempt.in_flight.number().is_some();
            self.verify(env);
        }
    }

    pub(super) fn verify(&mut self, env: &mut Env<'_, D>) {
        if let Some(Attempt { state: State::Holding(holding), .. }) = &self.attempt {
            env.actions.push(Action::Verify(Arc::clone(&holding.grant)));
        }
    }

    /// Whoever waits here asks anew, under another id, in the same order.
    pub(super) fn on_lost(&mut self, owner: &AcquisitionId, why: LockLost, env: &mut Env<'_, D>) {
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.id == *owner) else { return };
        let delay = match &mut attempt.state {
            State::Holding(holding) => {
                let active = holding.active.take();
                if let Some(active) = &active {
                    active.section.end(holding.grant.end_reason().unwrap_or(why));
                }
                holding.grant.end(why);
                active.map_or(Duration::ZERO, |active| active.section.limits.lock_delay)
            }
            // Nothing runs; the answer that is awaited says what is left of it. A renewal behind
            // the yield is refused as one behind a revocation: to end the grant here would tell of
            // a loss that is none.
            State::Yielding { is_renewal_refused: is_refused, .. } if why == LockLost::Revoked => {
                *is_refused = true;
                return;
            }
            State::Yielding { holding, .. } => return holding.grant.end(why),
            State::Requesting | State::Queued => return,
        };
        self.begin_release(delay, None, env);
    }
}
