//! Those in this process who want the key.

use std::{sync::Arc, time::Duration};

use super::{
    Conversation,
    hold::{DELIVERY, start},
};
use crate::{
    clock::BootInstant,
    error::{LockError, QueueBound},
    limits::MAX_WAITERS_PER_KEY,
    owner::Owner,
    proto::{
        Action, Ahead, Context, DriverTypes, Request,
        attempt::{Attempt, State},
    },
};

impl<D: DriverTypes> Conversation<D> {
    pub(super) fn request(&mut self, number: u64, request: Request<D::Waiter>, cx: &mut Context<'_, D>) {
        let Some(request) = self.reenter(request, cx) else { return };
        if self.draining {
            return cx.refuse(request, LockError::ShuttingDown);
        }
        if request.waits() && self.is_wanted_by_parent(&request, cx) {
            return cx.refuse(request, LockError::WouldDeadlock);
        }
        if !request.waits() {
            self.notice_loss(cx);
            if self.is_taken() {
                let ahead = self.ahead(self.line.len(), cx.now());
                return cx.refuse(request, refused(ahead.lease_left, ahead.places));
            }
        }
        // The first of the line is the one for whom the store is asked.
        let asked_for = usize::from(!self.is_held());
        let places = cx.share_of_key() + asked_for;
        let is_first = self.attempt.is_none() && self.line.is_empty();
        if self.line.len() >= places || !(cx.has_room() || is_first) {
            let ahead = self.ahead(self.line.len(), cx.now());
            // Of so many that ask at the same moment one will have it.
            let error = if request.waits() || self.line.len() < places {
                let is_full = self.line.len() >= MAX_WAITERS_PER_KEY + asked_for;
                let bound = if is_full { QueueBound::Key } else { QueueBound::Process };
                LockError::QueueFull { ahead: ahead.places, bound }
            } else {
                refused(ahead.lease_left, ahead.places)
            };
            return cx.refuse(request, error);
        }
        let until = if request.waits() { cx.now().saturating_add(request.wait) } else { BootInstant::FAR_FUTURE };
        self.line.push(number, until, request);
        self.start_attempt(cx);
        // Nobody may have noticed yet that the store is silent: it is asked before it is time to, so that this one is told in time.
        let in_line = |attempt: &Attempt<D>| matches!(attempt.state, State::Queued) && attempt.calls.number().is_none();
        if self
            .attempt
            .as_ref()
            .is_some_and(|a| in_line(a) && cx.now().saturating_duration_since(a.heard_at) >= cx.call_timeout)
        {
            self.ask(cx);
        }
    }

    /// What a request of this owner that does not wait would be told now. It changes nothing. `None`: it may have the key.
    pub fn refusal(&self, owner: &Owner, now: BootInstant) -> Option<LockError> {
        let is_own = self.running().is_some_and(|running| running.owner.as_ref() == Some(owner));
        if is_own || !self.is_taken() {
            return None;
        }
        let ahead = self.ahead(self.line.len(), now);
        Some(refused(ahead.lease_left, ahead.places))
    }

    /// Whether the request that started this task has the key, or waits for it: if its handler
    /// waits for the task, each would wait for the other.
    fn is_wanted_by_parent(&self, request: &Request<D::Waiter>, cx: &Context<'_, D>) -> bool {
        let Some(parent) = request.parent.as_ref().filter(|parent| !parent.is_retired()) else { return false };
        if self.line.has(parent) {
            return true;
        }
        self.holds(parent, cx.now()) > 0
    }

    /// Somebody who has the key already has it once more.
    pub(super) fn reenter(
        &mut self,
        request: Request<D::Waiter>,
        cx: &mut Context<'_, D>,
    ) -> Option<Request<D::Waiter>> {
        let Some(owner) = request.owner.as_ref().filter(|owner| !owner.is_retired()) else { return Some(request) };
        if self.running().is_some_and(|running| running.owner.as_ref() == Some(owner)) {
            self.notice_loss(cx);
        }
        let Some(Attempt { state: State::Held(held), .. }) = &mut self.attempt else { return Some(request) };
        match &mut held.running {
            Some(running) if running.owner.as_ref() == Some(owner) => {
                running.holds += 1;
                let waits = request.waits();
                let looked_at = held.grant.look_at();
                held.grant.delivery_by(cx.now().saturating_add(DELIVERY));
                if held.grant.look_at() < looked_at {
                    cx.actions.push(Action::Watch(Arc::clone(&held.grant)));
                }
                start(&mut self.deliveries, (request.waiter, waits), &running.section, cx);
                None
            }
            _ => Some(request),
        }
    }

    /// Somebody has the key, here or elsewhere, as far as we know; or has its turn in this moment.
    pub(super) fn is_taken(&self) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| !matches!(attempt.state, State::Asking))
    }

    /// Whoever has this place has left. Who was before it; `None`: it was not in the line any more, because it was told.
    pub fn leave(&mut self, number: u64, cx: &mut Context<'_, D>) -> Option<Ahead> {
        let at = self.line.find(number)?;
        let ahead = self.ahead(at, cx.now());
        self.line.remove(at)?;
        self.end_if_unwanted(cx);
        Some(ahead)
    }

    pub(super) fn ahead(&self, in_line: usize, now: BootInstant) -> Ahead {
        let lease_left = match self.attempt.as_ref().map(|attempt| (&attempt.state, attempt)) {
            Some((State::Held(held) | State::Yielding { held, .. }, _)) => held.grant.remaining(now),
            Some((_, attempt)) => attempt.held_until.saturating_duration_since(now),
            None => Duration::ZERO,
        };
        let silent = match &self.attempt {
            Some(attempt) => attempt.silent(),
            None => self.closing_error(),
        };
        Ahead { lease_left, places: in_line + 1, silent, is_taken: self.is_taken() }
    }

    /// Nobody wants what we ask for.
    pub(super) fn end_if_unwanted(&mut self, cx: &mut Context<'_, D>) {
        if self.line.is_empty() && self.attempt.as_ref().is_some_and(Attempt::waits_for_its_turn) {
            self.end(Duration::ZERO, None, cx);
        }
    }

    /// Waiters at the front whose wait is over time out here, as by their own timer, before a
    /// section begins or the store is asked for them. A forgotten call is never polled: its turn
    /// would cost the others the time of an undelivered grant.
    pub(super) fn skip_late(&mut self, cx: &mut Context<'_, D>) {
        while let Some(request) = self.line.pop_late(cx.now()) {
            let error = self.ahead(0, cx.now()).time_is_over();
            cx.refuse(request, error);
        }
    }

    pub(super) fn refuse_line(&mut self, cx: &mut Context<'_, D>, error: impl Fn(usize) -> LockError) {
        let mut ahead = 0;
        while let Some(request) = self.line.pop() {
            ahead += 1;
            cx.refuse(request, error(ahead));
        }
    }

    /// Those who do not wait: somebody else has its turn.
    pub(super) fn refuse_those_who_do_not_wait(
        &mut self,
        cx: &mut Context<'_, D>,
        error: impl Fn(Duration, usize) -> LockError,
    ) {
        let lease_left = self.ahead(0, cx.now()).lease_left;
        while let Some((at, request)) = self.line.remove_impatient() {
            cx.refuse(request, error(lease_left, at + 1));
        }
    }
}

pub(super) fn refused(lease_left: Duration, ahead: usize) -> LockError {
    LockError::Busy { lease_left, ahead }
}
