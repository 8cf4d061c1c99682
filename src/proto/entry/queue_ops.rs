//! Requests, re-entrancy and the queue of local waiters.

use std::{sync::Arc, time::Duration};

use super::LockEntry;
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::{LockError, QueueBound},
    limits::{DUPLICATE_SHARE_DIVISOR, MAX_DUPLICATES_PER_KEY, MAX_WAITERS_PER_KEY, WAITER_SHARE_DIVISOR},
    owner::Owner,
    proto::{
        Action, DriverTypes, Env, LockRequest, QueuePosition,
        attempt::{ActiveSection, Attempt, State},
        deliveries::DELIVERY_CHECK,
        sharing::Sharing,
    },
};

impl<D: DriverTypes> LockEntry<'_, D> {
    /// Handles a request. The number identifies its waiter until its result is sent.
    pub fn on_request(&mut self, number: u64, request: LockRequest<D::Waiter>, env: &mut Env<'_, D>) {
        if request.demand.joins_sections() && self.may_reenter(&request, env) {
            return self.reenter(request, env);
        }
        if let Some(own) = self.own_share(&request, env) {
            return self.reenter_share(own, request, env);
        }
        if env.is_shutting_down {
            return env.reject(request, LockError::ShuttingDown);
        }
        if request.waits() && self.would_deadlock(&request, env) {
            return env.reject(request, LockError::WouldDeadlock);
        }
        if self.may_join_readers(&request, env) {
            return self.start_beside(request, env);
        }
        if !request.waits() {
            self.check_expired(env);
            if self.is_contended(request.sharing) {
                let position = self.position(self.queue.len(), env.now());
                return env.reject(request, position.busy_error());
            }
        }
        // While no section runs, the first waiter is the one that the acquire is for. It does not
        // count.
        let requested = usize::from(!self.is_held());
        let (share, max_per_key) = if request.demand.takes_record() {
            (DUPLICATE_SHARE_DIVISOR, MAX_DUPLICATES_PER_KEY)
        } else {
            (WAITER_SHARE_DIVISOR, MAX_WAITERS_PER_KEY)
        };
        let capacity = env.max_waiters_of_key((share, max_per_key)) + requested;
        let is_first = self.attempt.is_none() && self.queue.is_empty();
        // The place of an older one that it replaces.
        let has_place = request.sharing == Sharing::Newest && self.reject_replaced(request.owner.as_ref(), env);
        if !has_place && (self.queue.len() >= capacity || !(env.queue_has_capacity() || is_first)) {
            let position = self.position(self.queue.len(), env.now());
            // A request without a wait gets `Busy` if the queue of its key is full: one of the
            // waiters gets the key before it.
            let error = if request.waits() || self.queue.len() < capacity {
                let is_full = self.queue.len() >= max_per_key + requested;
                let bound = if is_full { QueueBound::Key } else { QueueBound::Process };
                LockError::QueueFull { ahead: position.ahead, bound }
            } else {
                position.busy_error()
            };
            return env.reject(request, error);
        }
        if has_place {
            // Another id is behind those that have come to other processes meanwhile.
            self.abandon_if_unwanted(env);
        }
        let deadline = if request.waits() { env.now().saturating_add(request.wait) } else { BootInstant::FAR_FUTURE };
        if request.sharing == Sharing::Newest && !self.queue.is_empty() {
            // It asks the store after these waiters, and what it replaces ends now.
            self.supersede(AcquisitionId::is_replaceable, env);
        }
        self.queue.push(number, deadline, request);
        self.start_attempt(env);
        // The store may have become silent since its last reply. An acquire before the next poll
        // detects that in time for the wait of this request.
        let is_idle_in_queue =
            |attempt: &Attempt<D>| matches!(attempt.state, State::Queued) && attempt.in_flight.number().is_none();
        if self.attempt.as_ref().is_some_and(|a| {
            is_idle_in_queue(a)
                && env.now().saturating_duration_since(self.asking.last_reply_at) >= env.lease.call_timeout
        }) {
            self.send_acquire(env);
        }
    }

    /// The error that a request of this owner without a wait would get now, or `None` if the key
    /// may be free. Does not change the state.
    pub fn rejection_without_wait(&self, owner: &Owner, sharing: Sharing, now: BootInstant) -> Option<LockError> {
        let is_own = |active: &ActiveSection<D>| active.owner.as_ref() == Some(owner);
        if self.active_section().is_some_and(is_own) {
            return None;
        }
        if let Some(own) = self.active_sections().find(|active| is_own(active)) {
            let waits_for_itself = sharing.is_alone() && own.section.grant.id.max_holders() > 1;
            return waits_for_itself.then_some(LockError::WouldDeadlock);
        }
        if !self.is_contended(sharing) {
            return None;
        }
        Some(self.position(self.queue.len(), now).busy_error())
    }

    /// Returns `true` if the parent request of this task holds the key or waits for it. If the
    /// handler of the parent awaits the task, each would wait for the other. The same holds for a
    /// duplicate in its own section.
    fn would_deadlock(&self, request: &LockRequest<D::Waiter>, env: &Env<'_, D>) -> bool {
        let is_own_duplicate = |owner| !request.demand.joins_sections() && self.hold_count(owner, env.now()) > 0;
        if request.owner.as_ref().is_some_and(is_own_duplicate) {
            return true;
        }
        let Some(parent) = request.parent.as_ref().filter(|parent| !parent.is_closed()) else { return false };
        if self.queue.has_owner(parent) {
            return true;
        }
        self.hold_count(parent, env.now()) > 0
    }

    /// Whether the active section is one of the owner of this request.
    fn may_reenter(&mut self, request: &LockRequest<D::Waiter>, env: &mut Env<'_, D>) -> bool {
        let Some(owner) = request.owner.as_ref().filter(|owner| !owner.is_closed()) else { return false };
        let is_own = |entry: &Self| entry.active_section().is_some_and(|active| active.owner.as_ref() == Some(owner));
        if is_own(self) {
            self.check_expired(env);
        }
        is_own(self)
    }

    /// Grants the active section once more.
    fn reenter(&mut self, request: LockRequest<D::Waiter>, env: &mut Env<'_, D>) {
        let Some(Attempt { state: State::Holding(holding), .. }) = &mut self.attempt else { return };
        let Some(active) = &mut holding.active else { return };
        active.holds += 1;
        let waits = request.waits();
        let scheduled_at = holding.grant.next_check_at();
        holding.grant.lower_delivery_check(env.now().saturating_add(DELIVERY_CHECK));
        if holding.grant.next_check_at() < scheduled_at {
            env.actions.push(Action::Track(Arc::clone(&holding.grant)));
        }
        self.deliveries.send((request.waiter, waits), &active.section, env);
    }

    /// Returns `true` if the key is held, by too many for this request, or queued for, here or in
    /// the store, as far as this process knows.
    pub(super) fn is_contended(&self, sharing: Sharing) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| !matches!(attempt.state, State::Requesting))
            || self.shares.len() >= usize::from(sharing.max_holders())
    }

    /// Removes a waiter. Returns its position, or `None` if the waiter is not in the queue: then
    /// its result has been sent or is about to be sent.
    pub fn cancel(&mut self, number: u64, env: &mut Env<'_, D>) -> Option<QueuePosition> {
        let at = self.queue.find(number)?;
        let position = self.position_at_timeout(at, env);
        self.queue.remove(at)?;
        self.abandon_if_unwanted(env);
        Some(position)
    }

    /// A wait that is shorter than a call of the store is no failure of the store.
    fn position_at_timeout(&self, at: usize, env: &Env<'_, D>) -> QueuePosition {
        let mut position = self.position(at, env.now());
        let awaits_reply = |attempt: &Attempt<D>| attempt.awaits_first_reply(env.now(), env.lease.call_timeout);
        if self.attempt.as_ref().is_some_and(awaits_reply) {
            position.store_error = None;
        }
        position
    }

    pub(super) fn position(&self, at: usize, now: BootInstant) -> QueuePosition {
        let (lease_left, held_by) = match self.attempt.as_ref().map(|attempt| &attempt.state) {
            Some(State::Holding(holding) | State::Yielding { holding, .. }) => {
                let active = holding.active.as_ref();
                (holding.grant.remaining(now), active.and_then(|active| active.section.trace.clone()))
            }
            Some(_) => (self.asking.holder_expires_at.saturating_duration_since(now), self.asking.held_by.clone()),
            None => (self.shares.iter().map(|share| share.remaining(now)).min().unwrap_or_default(), None),
        };
        let store_error = match &self.attempt {
            Some(attempt) => attempt.store_error(),
            None => self.pending_releases.blocking().and_then(|release| release.error.clone()),
        };
        let is_contended = self.is_contended(Sharing::Alone);
        QueuePosition { lease_left, ahead: at + 1, store_error, is_contended, held_by }
    }

    /// Whether the first waiter needs no attempt, or one of another kind.
    pub(super) fn is_unwanted(&self) -> bool {
        let Some(attempt) = &self.attempt else { return false };
        self.queue.first().is_none_or(|first| !first.sharing.is_of(&attempt.id))
    }

    /// Releases an attempt that the first waiter does not need any more.
    pub(super) fn abandon_if_unwanted(&mut self, env: &mut Env<'_, D>) {
        if self.is_unwanted() && self.attempt.as_ref().is_some_and(Attempt::is_pending) {
            self.begin_release(Duration::ZERO, None, env);
        }
    }

    /// Rejects the waiters at the front whose wait has timed out. Called before a section starts or
    /// an acquire is sent: a call that is not polled any more does not cancel itself, and its
    /// undelivered grant would block the other waiters.
    pub(super) fn time_out_waiters(&mut self, env: &mut Env<'_, D>) {
        while !self.queue.is_empty()
            && let Some(request) = self.queue.pop_timed_out(env.now())
        {
            let error = self.position_at_timeout(0, env).timeout_error();
            env.reject(request, error);
        }
    }

    /// Rejects the waiters that a newer request of another owner replaces. Returns whether there
    /// were any.
    pub(super) fn reject_replaced(&mut self, owner: Option<&Owner>, env: &mut Env<'_, D>) -> bool {
        let waiting = self.queue.len();
        while let Some(request) = self.queue.remove_replaced(owner) {
            env.reject(request, LockError::Superseded);
        }
        self.queue.len() < waiting
    }

    pub(super) fn reject_all(&mut self, env: &mut Env<'_, D>, error: impl Fn(usize) -> LockError) {
        let mut ahead = 0;
        while let Some(request) = self.queue.pop() {
            ahead += 1;
            env.reject(request, error(ahead));
        }
    }

    /// Rejects the requests without a wait, because the key is busy.
    pub(super) fn reject_non_waiting(&mut self, env: &mut Env<'_, D>, error: impl Fn(QueuePosition) -> LockError) {
        self.reject_non_waiting_up_to(u16::MAX, env, error);
    }

    /// Rejects those of them that may hold the key beside this number at most.
    pub(super) fn reject_non_waiting_up_to(
        &mut self,
        max_holders: u16,
        env: &mut Env<'_, D>,
        error: impl Fn(QueuePosition) -> LockError,
    ) {
        if !self.queue.has_non_waiting() {
            return;
        }
        while let Some((at, request)) = self.queue.remove_non_waiting(max_holders) {
            env.reject(request, error(self.position(at, env.now())));
        }
    }
}
