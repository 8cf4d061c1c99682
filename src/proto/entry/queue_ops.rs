//! Those in this process who want the key.

use std::{sync::Arc, time::Duration};

use super::{
    LockEntry,
    hold::{DELIVERY_CHECK, deliver},
};
use crate::{
    clock::BootInstant,
    error::{LockError, QueueBound},
    limits::MAX_WAITERS_PER_KEY,
    owner::Owner,
    proto::{
        Action, DriverTypes, Env, LockRequest, QueuePosition,
        attempt::{Attempt, State},
    },
};

impl<D: DriverTypes> LockEntry<D> {
    pub(super) fn on_request(&mut self, number: u64, request: LockRequest<D::Waiter>, env: &mut Env<'_, D>) {
        let Some(request) = self.try_reenter(request, env) else { return };
        if self.is_shutting_down {
            return env.reject(request, LockError::ShuttingDown);
        }
        if request.waits() && self.would_deadlock(&request, env) {
            return env.reject(request, LockError::WouldDeadlock);
        }
        if !request.waits() {
            self.check_expired(env);
            if self.is_contended() {
                let ahead = self.position(self.queue.len(), env.now());
                return env.reject(request, busy_error(ahead.lease_left, ahead.ahead));
            }
        }
        // The first of the line is the one for whom the store is asked.
        let asked_for = usize::from(!self.is_held());
        let places = env.max_waiters_of_key() + asked_for;
        let is_first = self.attempt.is_none() && self.queue.is_empty();
        if self.queue.len() >= places || !(env.queue_has_capacity() || is_first) {
            let ahead = self.position(self.queue.len(), env.now());
            // Of so many that ask at the same moment one will have it.
            let error = if request.waits() || self.queue.len() < places {
                let is_full = self.queue.len() >= MAX_WAITERS_PER_KEY + asked_for;
                let bound = if is_full { QueueBound::Key } else { QueueBound::Process };
                LockError::QueueFull { ahead: ahead.ahead, bound }
            } else {
                busy_error(ahead.lease_left, ahead.ahead)
            };
            return env.reject(request, error);
        }
        let until = if request.waits() { env.now().saturating_add(request.wait) } else { BootInstant::FAR_FUTURE };
        self.queue.push(number, until, request);
        self.start_attempt(env);
        // Nobody may have noticed yet that the store is silent: it is asked before it is time to, so that this one is told in time.
        let in_line =
            |attempt: &Attempt<D>| matches!(attempt.state, State::Queued) && attempt.in_flight.number().is_none();
        if self
            .attempt
            .as_ref()
            .is_some_and(|a| in_line(a) && env.now().saturating_duration_since(a.last_reply_at) >= env.call_timeout)
        {
            self.send_acquire(env);
        }
    }

    /// What a request of this owner that does not wait would be told now. It changes nothing. `None`: it may have the key.
    pub fn rejection_without_wait(&self, owner: &Owner, now: BootInstant) -> Option<LockError> {
        let is_own = self.active_section().is_some_and(|active| active.owner.as_ref() == Some(owner));
        if is_own || !self.is_contended() {
            return None;
        }
        let ahead = self.position(self.queue.len(), now);
        Some(busy_error(ahead.lease_left, ahead.ahead))
    }

    /// Whether the request that started this task has the key, or waits for it: if its handler
    /// waits for the task, each would wait for the other.
    fn would_deadlock(&self, request: &LockRequest<D::Waiter>, env: &Env<'_, D>) -> bool {
        let Some(parent) = request.parent.as_ref().filter(|parent| !parent.is_closed()) else { return false };
        if self.queue.has_owner(parent) {
            return true;
        }
        self.hold_count(parent, env.now()) > 0
    }

    /// Somebody who has the key already has it once more.
    pub(super) fn try_reenter(
        &mut self,
        request: LockRequest<D::Waiter>,
        env: &mut Env<'_, D>,
    ) -> Option<LockRequest<D::Waiter>> {
        let Some(owner) = request.owner.as_ref().filter(|owner| !owner.is_closed()) else { return Some(request) };
        if self.active_section().is_some_and(|active| active.owner.as_ref() == Some(owner)) {
            self.check_expired(env);
        }
        let Some(Attempt { state: State::Holding(holding), .. }) = &mut self.attempt else { return Some(request) };
        match &mut holding.active {
            Some(active) if active.owner.as_ref() == Some(owner) => {
                active.holds += 1;
                let waits = request.waits();
                let looked_at = holding.grant.next_check_at();
                holding.grant.lower_delivery_check(env.now().saturating_add(DELIVERY_CHECK));
                if holding.grant.next_check_at() < looked_at {
                    env.actions.push(Action::Track(Arc::clone(&holding.grant)));
                }
                deliver(&mut self.deliveries, (request.waiter, waits), &active.section, env);
                None
            }
            _ => Some(request),
        }
    }

    /// Somebody has the key, here or elsewhere, as far as we know; or has its turn in this moment.
    pub(super) fn is_contended(&self) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| !matches!(attempt.state, State::Requesting))
    }

    /// Whoever has this place has left. Who was before it; `None`: it was not in the line any more, because it was told.
    pub fn cancel(&mut self, number: u64, env: &mut Env<'_, D>) -> Option<QueuePosition> {
        let at = self.queue.find(number)?;
        let ahead = self.position(at, env.now());
        self.queue.remove(at)?;
        self.abandon_if_unwanted(env);
        Some(ahead)
    }

    pub(super) fn position(&self, in_line: usize, now: BootInstant) -> QueuePosition {
        let lease_left = match self.attempt.as_ref().map(|attempt| (&attempt.state, attempt)) {
            Some((State::Holding(holding) | State::Yielding { holding, .. }, _)) => holding.grant.remaining(now),
            Some((_, attempt)) => attempt.holder_expires_at.saturating_duration_since(now),
            None => Duration::ZERO,
        };
        let silent = match &self.attempt {
            Some(attempt) => attempt.store_error(),
            None => self.blocking_release_error(),
        };
        QueuePosition { lease_left, ahead: in_line + 1, store_error: silent, is_contended: self.is_contended() }
    }

    /// Nobody wants what we ask for.
    pub(super) fn abandon_if_unwanted(&mut self, env: &mut Env<'_, D>) {
        if self.queue.is_empty() && self.attempt.as_ref().is_some_and(Attempt::is_pending) {
            self.begin_release(Duration::ZERO, None, env);
        }
    }

    /// Waiters at the front whose wait is over time out here, as by their own timer, before a
    /// section begins or the store is asked for them. A forgotten call is never polled: its turn
    /// would cost the others the time of an undelivered grant.
    pub(super) fn time_out_waiters(&mut self, env: &mut Env<'_, D>) {
        while let Some(request) = self.queue.pop_timed_out(env.now()) {
            let error = self.position(0, env.now()).timeout_error();
            env.reject(request, error);
        }
    }

    pub(super) fn reject_all(&mut self, env: &mut Env<'_, D>, error: impl Fn(usize) -> LockError) {
        let mut ahead = 0;
        while let Some(request) = self.queue.pop() {
            ahead += 1;
            env.reject(request, error(ahead));
        }
    }

    /// Those who do not wait: somebody else has its turn.
    pub(super) fn reject_non_waiting(&mut self, env: &mut Env<'_, D>, error: impl Fn(Duration, usize) -> LockError) {
        let lease_left = self.position(0, env.now()).lease_left;
        while let Some((at, request)) = self.queue.remove_non_waiting() {
            env.reject(request, error(lease_left, at + 1));
        }
    }
}

pub(super) fn busy_error(lease_left: Duration, ahead: usize) -> LockError {
    LockError::Busy { lease_left, ahead }
}
