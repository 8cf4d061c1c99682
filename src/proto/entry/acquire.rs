//! What the store is asked, and what its word means.

use std::time::Duration;

use super::{Conversation, queue_ops::refused};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::{LockError, PendingReleases, QueueBound},
    limits::{LOCK_DELAY, MAX_WAITERS_PER_PROCESS},
    proto::{
        Action, Context, DriverTypes, Verb,
        attempt::{Attempt, State},
        pending_release::GiveBack,
    },
    store::{AcquireReply, IfBusy, StoreError, StoreErrorKind},
};

impl<D: DriverTypes> Conversation<D> {
    /// Single flight: one attempt, however many want the key. A client that saw its own answer end waits for that give-back.
    pub(super) fn start_attempt(&mut self, cx: &mut Context<'_, D>) {
        self.give_up_closing(cx);
        if self.attempt.is_some() || self.closing.is_some() {
            return;
        }
        self.skip_late(cx);
        if self.line.is_empty() {
            return;
        }
        if !cx.way_back {
            let error = StoreError::new("lock", "acquire", StoreErrorKind::Unavailable)
                .with_source(PendingReleases { last_error: cx.release_error.clone() });
            return self.refuse_line(cx, |_| error.clone().into());
        }
        self.attempt = Some(Attempt::new(cx.ids.next()));
        self.ask(cx);
    }

    pub(super) fn ask(&mut self, cx: &mut Context<'_, D>) {
        let (lease, lock_delay) = (self.lease(cx), self.lock_delay());
        let Some(attempt) = &mut self.attempt else { return };
        attempt.lines_up |= self.line.has_patient();
        attempt.lease = lease;
        attempt.lock_delay = lock_delay;
        let if_held = if attempt.lines_up { IfBusy::Enqueue } else { IfBusy::Fail };
        let lease = lease.saturating_add(lock_delay);
        let call = cx.call(&attempt.owner, Verb::Acquire { if_held, lease });
        attempt.calls.begin(call.number, cx.now());
        attempt.hinted = false;
        attempt.taken_away = false;
        attempt.ask_at = None;
        cx.actions.push(Action::Send(call));
    }

    /// The lease that the first waiter needs, so that a crash of it costs no more. The first waiter
    /// may be another one at the next acquire. Of two acquires the store keeps the longer lease.
    pub(super) fn lease(&self, cx: &Context<'_, D>) -> Duration {
        self.line.first().map_or(cx.lease.longest, |request| request.terms.store_lease(cx.lease))
    }

    /// I10: as long as the longest of those who wait want it.
    pub(super) fn lock_delay(&self) -> Duration {
        self.line.requests().map(|request| request.terms.lock_delay).fold(LOCK_DELAY, Duration::max)
    }

    pub(super) fn acquired(&mut self, number: u64, answer: Result<AcquireReply, StoreError>, cx: &mut Context<'_, D>) {
        let ours = self.attempt.as_mut().and_then(|attempt| attempt.calls.ended(number));
        match ours {
            Some(asked) => self.word(asked, answer, cx),
            None => self.late_word(number, &answer, cx),
        }
    }

    /// The store's word for the attempt that goes on.
    pub(super) fn word(
        &mut self,
        asked: BootInstant,
        answer: Result<AcquireReply, StoreError>,
        cx: &mut Context<'_, D>,
    ) {
        let Some(attempt) = &mut self.attempt else { return };
        if answer.is_ok() {
            attempt.calls.answered();
            self.hurry_give_backs(cx);
        }
        let Some(attempt) = &mut self.attempt else { return };
        match answer {
            // What was taken away meanwhile is not begun: the store says whether it was this (I7).
            Ok(AcquireReply::Granted { .. }) if attempt.taken_away && !attempt.checked => {
                attempt.checked = true;
                self.ask(cx);
            }
            Ok(AcquireReply::Granted { fence }) => {
                let doubted = attempt.taken_away;
                self.granted(asked, fence, cx);
                if doubted {
                    self.doubt(cx);
                }
            }
            Ok(AcquireReply::Queued { lease_left, ahead: _ }) => {
                // The first caller of each key asks the store though the process is full: the key may
                // be free. If it is not, the bound holds for it, too.
                if matches!(attempt.state, State::Asking) && cx.waiting > MAX_WAITERS_PER_PROCESS {
                    let bound = QueueBound::Process;
                    self.refuse_line(cx, |ahead| LockError::QueueFull { ahead, bound });
                    return self.end(Duration::ZERO, None, cx);
                }
                attempt.state = State::Queued;
                attempt.heard_at = cx.now();
                attempt.held_until = cx.now().saturating_add(lease_left);
                attempt.check_in(cx.now(), lease_left, cx.die());
                // Where it was asked before a gap, what it was told since may be lost.
                let hinted = attempt.hinted || cx.gap_at.is_some_and(|gap_at| asked < gap_at);
                self.refuse_those_who_do_not_wait(cx, refused);
                self.end_if_unwanted(cx);
                if hinted {
                    self.ask(cx);
                }
            }
            // It was asked for a place: asked again and again, it would say the same for ever.
            Ok(AcquireReply::Busy { .. }) if attempt.lines_up => {
                self.give_up(&StoreError::new("lock", "acquire", StoreErrorKind::Protocol), asked, cx);
            }
            Ok(AcquireReply::Busy { lease_left }) => {
                attempt.held_until = cx.now().saturating_add(lease_left);
                self.refuse_those_who_do_not_wait(cx, refused);
                if self.line.is_empty() {
                    self.nothing_left(asked, cx);
                } else {
                    // Somebody who waits has come meanwhile.
                    self.ask(cx);
                }
            }
            Ok(AcquireReply::QueueFull { waiting, .. }) => {
                let bound = QueueBound::Store;
                self.refuse_line(cx, |ahead| LockError::QueueFull { ahead: waiting + ahead, bound });
                self.nothing_left(asked, cx);
            }
            Err(error) if error.is_transient() => {
                let again = attempt.calls.failed(&error, asked, cx.call_timeout, cx.now(), cx.die());
                attempt.ask_at = Some(again);
            }
            Err(error) => self.give_up(&error, asked, cx),
        }
    }

    pub(super) fn give_up(&mut self, error: &StoreError, asked: BootInstant, cx: &mut Context<'_, D>) {
        if let Some(attempt) = &mut self.attempt {
            attempt.calls.failed(error, asked, cx.call_timeout, cx.now(), 0.0);
        }
        self.refuse_line(cx, |_| error.clone().into());
        self.end(Duration::ZERO, None, cx);
    }

    /// The attempt is over, and the store has nothing of it; unless something is still under way.
    pub(super) fn nothing_left(&mut self, asked: BootInstant, cx: &mut Context<'_, D>) {
        if self.attempt.as_ref().is_some_and(|attempt| attempt.calls.void_at.is_some_and(|void_at| void_at > asked)) {
            return self.end(Duration::ZERO, None, cx);
        }
        self.attempt = None;
        self.start_attempt(cx);
    }

    /// A hint concerns this owner: it asks before anything runs (I7).
    pub(super) fn offered(&mut self, owner: &AcquisitionId, cx: &mut Context<'_, D>) {
        match &self.attempt {
            Some(attempt) if attempt.owner == *owner => self.hint(cx),
            Some(Attempt { state: State::Yielding { next, .. }, .. }) if next == owner => {
                if let Some(attempt) = &mut self.attempt {
                    attempt.hinted = true;
                }
            }
            _ if self.give_backs.iter().any(|give_back| give_back.owner == *owner) => {}
            // Long forgotten: what was offered to it is not to wait for its end. A few at a time, because anybody can send offers.
            _ if cx.stray_room => {
                let stray = GiveBack {
                    stray: true,
                    ..GiveBack::new(owner.clone(), Duration::ZERO, cx.lease.longest, cx.now())
                };
                self.give_back(stray, cx);
            }
            _ => {}
        }
    }

    pub(super) fn hint(&mut self, cx: &mut Context<'_, D>) {
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.waits_for_its_turn()) else { return };
        if attempt.calls.number().is_some() {
            attempt.hinted = true;
        } else {
            self.ask(cx);
        }
    }
}
