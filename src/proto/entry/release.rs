//! How an id ends: given back once, asked for until the store has answered.

use std::{sync::Arc, time::Duration};

use super::Conversation;
use crate::{
    clock::BootInstant,
    error::LockLost,
    proto::section::ReleaseOutcome,
    proto::{
        Action, Context, DriverTypes, Verb,
        attempt::{Attempt, State},
        in_flight::backoff,
        pending_release::GiveBack,
        section::Section,
    },
    store::{AcquireReply, ReleaseReply, StoreError, StoreErrorKind},
};

impl<D: DriverTypes> Conversation<D> {
    /// The attempt is over, in whatever state it is (I9: here, and nowhere else).
    pub(super) fn end(&mut self, block_for: Duration, section: Option<Arc<Section<D>>>, cx: &mut Context<'_, D>) {
        let Some(attempt) = self.attempt.take() else { return };
        let Attempt { owner, state, calls, .. } = attempt;
        let expects = calls.number();
        let mut give_back =
            GiveBack { void_at: calls.void_at, section, ..GiveBack::new(owner, block_for, cx.lease.longest, cx.now()) };
        match state {
            State::Asking | State::Queued => give_back.expects = expects,
            State::Held(held) | State::Yielding { held, .. } => {
                // First of all: nobody here claims to have it any more.
                held.grant.end(LockLost::Released);
                cx.actions.push(Action::Forget(held.grant));
            }
        }
        self.closing = Some(give_back.owner.sequence());
        self.give_back(give_back, cx);
    }

    pub(super) fn give_back(&mut self, mut give_back: GiveBack<D>, cx: &mut Context<'_, D>) {
        if give_back.expects.is_none() {
            send_release(&mut give_back, cx);
        }
        self.give_backs.push(give_back);
    }

    /// An answer for an id that is over already: now it is known what there is to be given back.
    pub(super) fn late_word(
        &mut self,
        number: u64,
        answer: &Result<AcquireReply, StoreError>,
        cx: &mut Context<'_, D>,
    ) {
        let Some(give_back) = self.give_backs.iter_mut().find(|give_back| give_back.expects == Some(number)) else {
            return;
        };
        give_back.expects = None;
        if answer.is_err() {
            let void_at = cx.now().saturating_add(cx.call_timeout);
            give_back.void_at = Some(give_back.void_at.map_or(void_at, |earlier| earlier.max(void_at)));
        }
        send_release(give_back, cx);
    }

    pub(super) fn released(&mut self, number: u64, answer: Result<ReleaseReply, StoreError>, cx: &mut Context<'_, D>) {
        let Some(at) = self.give_backs.iter().position(|give_back| give_back.sending == Some(number)) else { return };
        let give_back = &mut self.give_backs[at];
        give_back.sending = None;
        if answer.is_ok() && self.closing == Some(give_back.owner.sequence()) {
            self.closing = None;
        }
        if let Some(section) = give_back.section.take() {
            cx.actions.push(Action::Outcome(section, answer.clone().map(ReleaseOutcome::from)));
        }
        match answer {
            Ok(_) => match give_back.void_at.filter(|void_at| *void_at > give_back.sent_at) {
                // What got no answer may be done yet: once more, when it cannot (I8).
                Some(void_at) => {
                    give_back.block_for = Duration::ZERO;
                    give_back.again_at = Some(void_at.max(cx.now()).saturating_add(Duration::from_millis(1)));
                }
                None => {
                    self.give_backs.remove(at);
                }
            },
            Err(_) if give_back.stray => {
                self.give_backs.remove(at);
            }
            Err(error) => {
                give_back.failures += 1;
                give_back.again_at = Some(cx.now().saturating_add(backoff(give_back.failures, cx.die())));
                *cx.release_error = Some(error.clone());
                give_back.error = Some(error);
            }
        }
        self.start_attempt(cx);
    }

    /// Nobody waits for a give-back that has had no answer for so long already: the store is asked whose the key is.
    pub(super) fn give_up_closing(&mut self, cx: &Context<'_, D>) {
        let is_silent = |give_back: &GiveBack<D>| {
            self.closing == Some(give_back.owner.sequence()) && give_back.silent_at(cx.store_timeout()) <= cx.now()
        };
        if self.give_backs.iter().any(is_silent) {
            self.closing = None;
        }
    }

    /// The store answers: what failed before is not to wait for its time.
    pub(super) fn hurry_give_backs(&mut self, cx: &mut Context<'_, D>) {
        for give_back in &mut self.give_backs {
            if give_back.error.take().is_some() && give_back.again_at.take().is_some() {
                send_release(give_back, cx);
            }
        }
    }

    /// Why the release that the next attempt waits for has not reached the store.
    pub(super) fn closing_error(&self) -> Option<StoreError> {
        let give_back = self.give_backs.iter().find(|give_back| self.closing == Some(give_back.owner.sequence()))?;
        give_back.error.clone()
    }

    /// When those who wait for a give-back are told that nobody knows whose the key is.
    pub(super) fn silent_at(&self, timeout: Duration) -> Option<BootInstant> {
        let give_back = self.give_backs.iter().find(|give_back| self.closing == Some(give_back.owner.sequence()))?;
        (!self.line.is_empty()).then(|| give_back.silent_at(timeout))
    }

    /// What is to be repeated is; what is over anyway is forgotten; whoever waited for long enough is told.
    pub(super) fn repeat_give_backs(&mut self, cx: &mut Context<'_, D>) {
        let now = cx.now();
        let mut silent = None;
        let closing = self.closing;
        self.give_backs.retain(|give_back| {
            let closes = closing == Some(give_back.owner.sequence());
            let gives_up = give_back.gives_up_at() <= now && give_back.expects.is_none() && give_back.sending.is_none();
            if closes && (gives_up || give_back.silent_at(cx.store_timeout()) <= now) {
                let no_answer = || StoreError::new("lock", "release", StoreErrorKind::Timeout);
                silent = Some(give_back.error.clone().unwrap_or_else(no_answer));
            }
            if give_back.again_at.is_some_and(|at| at <= now) && !gives_up {
                give_back.again_at = None;
                send_release(give_back, cx);
            }
            !gives_up
        });
        if let Some(error) = silent {
            self.closing = None;
            if error.is_failover() {
                // The store is there: those who wait ask it whose the key is, until it can say so.
                self.refuse_those_who_do_not_wait(cx, |_, _| error.clone().into());
                return self.start_attempt(cx);
            }
            // No call for this key was answered for so long.
            self.refuse_line(cx, |_| error.clone().into());
        }
    }
}

/// I1: names the id that it gives back.
pub(super) fn send_release<D: DriverTypes>(give_back: &mut GiveBack<D>, cx: &mut Context<'_, D>) {
    if give_back.sending.is_none() {
        let call = cx.call(&give_back.owner, Verb::Release { block_for: give_back.block_for });
        give_back.sending = Some(call.number);
        give_back.sent_at = cx.now();
        cx.actions.push(Action::Send(call));
    }
}
