//! The conversation about one key: who in this process wants it, what the store is asked for them, and whose turn it is.
//!
//! Pure: events in, actions out, time as an argument. Nothing here waits, wakes or asks by itself, so whatever drives it (the
//! driver, a simulator) sees the same decisions.
//!
//! ```text
//!            request                     granted              section ends, somebody waits here
//!  (nothing) ───────► Asking ───────────────────────► Held ◄──────────────────────────────────┐
//!                       │ in line                    ▲  │  └── 100 ms or 1 000 sections ──► Yielding
//!                       ▼               granted      │  │                                     │ others wait
//!                     Queued ────────────────────────┘  │ ended, lost                         ▼
//!                       │ nobody waits here any more    ▼                                   Queued, under a new id
//!                       └──────────────────────────► given back, until the store has answered
//! ```

use std::{fmt::Debug, sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::{
    Action, Context, DriverTypes, Event,
    attempt::{Attempt, Running, State},
    pending_release::GiveBack,
    queue::Line,
    section::Section,
};
#[cfg(any(test, feature = "__internals"))]
use crate::acquisition::AcquisitionId;
use crate::{clock::BootInstant, error::LockError, owner::Owner};

// In the order of a request: queued, acquired, held, released.
mod queue_ops;
mod acquire;
mod hold;
mod release;

/// One key in this process.
#[derive(Debug)]
pub struct Conversation<D: DriverTypes> {
    /// Who waits, in order.
    line: Line<D::Waiter>,
    attempt: Option<Attempt<D>>,
    /// Callers that the section that runs was sent to, and that are not known to have taken it.
    deliveries: SmallVec<[Delivery<D>; 1]>,
    /// What is over, and not known to be given back.
    give_backs: SmallVec<[GiveBack<D>; 1]>,
    /// The one of those that the next attempt waits for: until it is answered for the first time.
    closing: Option<u64>,
    /// Nothing more is started.
    draining: bool,
    /// The earliest moment at which somebody was asked to wake us.
    armed: Option<BootInstant>,
}

/// A section that was sent to a caller.
#[derive(Debug)]
struct Delivery<D: DriverTypes> {
    waiter: D::Waiter,
    waits: bool,
    /// When it is looked at next.
    due: BootInstant,
    /// It was looked at once already: a process that was stopped gets time to take it.
    is_late: bool,
}

impl<D: DriverTypes> Conversation<D> {
    /// Nobody has said anything yet.
    pub fn new(draining: bool) -> Self {
        Self {
            line: Line::new(),
            attempt: None,
            deliveries: SmallVec::new(),
            give_backs: SmallVec::new(),
            closing: None,
            draining,
            armed: None,
        }
    }

    /// Something has happened.
    pub fn on(&mut self, event: Event<D>, cx: &mut Context<'_, D>) {
        match event {
            Event::Request(number, request) => self.request(number, request, cx),
            Event::Acquired(number, answer) => self.acquired(number, answer, cx),
            Event::Yielded(number, answer) => self.yielded(number, answer, cx),
            Event::Released(number, answer) => self.released(number, answer, cx),
            Event::Offered(owner) => self.offered(&owner, cx),
            Event::TakenAway(owner) => self.taken_away(&owner, cx),
            Event::Gap => self.hint(cx),
            Event::GuardEnded(section, ending) => {
                self.guard_ended(&section, ending, cx);
            }
            Event::Lost(owner, why) => self.lost(&owner, why, cx),
            Event::Limit(owner) => self.limit(&owner, cx),
            Event::Time(at) => self.time(at, cx),
            Event::Drain => self.drain(cx),
        }
    }

    /// Nobody wants the key any more, and nothing of us is left in the store.
    pub fn is_over(&self) -> bool {
        self.attempt.is_none() && self.give_backs.is_empty() && self.line.is_empty()
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// Who waits.
    pub(super) fn waiters(&self) -> impl Iterator<Item = &D::Waiter> {
        self.line.requests().map(|request| &request.waiter)
    }

    /// How many ids are given back, and not known to be.
    pub fn giving_back(&self) -> usize {
        self.give_backs.len()
    }

    /// How many of those were offered to an id that was forgotten.
    pub(super) fn strays(&self) -> usize {
        self.give_backs.iter().filter(|give_back| give_back.stray).count()
    }

    /// Whether it has a place in the store's line, and waits for messages there.
    pub(super) fn is_in_line(&self) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| matches!(attempt.state, State::Queued))
    }

    /// Whether something of this id may be in the store still.
    #[cfg(any(test, feature = "__internals"))]
    pub fn knows(&self, id: &AcquisitionId) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| attempt.is(id))
            || self.give_backs.iter().any(|give_back| give_back.owner == *id)
    }

    /// How often this owner has the key now.
    pub fn holds(&self, owner: &Owner, now: BootInstant) -> u32 {
        let running = self.running().filter(|running| running.owner.as_ref() == Some(owner));
        running.map_or(0, |running| running.holds(now))
    }

    /// How often this section is held now.
    pub fn holds_of(&self, section: &Arc<Section<D>>, now: BootInstant) -> u32 {
        self.running().filter(|running| running.is(section)).map_or(0, |running| running.holds(now))
    }

    /// Whether a section runs.
    pub fn is_held(&self) -> bool {
        self.running().is_some()
    }

    fn running(&self) -> Option<&Running<D>> {
        self.attempt.as_ref()?.running()
    }

    // --- time, and the end ---------------------------------------------------------------------------------------

    fn time(&mut self, at: BootInstant, cx: &mut Context<'_, D>) {
        self.disarm(at);
        self.repeat_give_backs(cx);
        let Some(attempt) = self.attempt.as_ref().filter(|attempt| attempt.waits_for_its_turn()) else { return };
        if let Some(error) = attempt.calls.gives_up(cx.now(), true, cx.store_timeout()) {
            // A call that is under way is waited for by the give-back.
            self.refuse_line(cx, |_| error.clone().into());
            return self.end(Duration::ZERO, None, cx);
        }
        let is_due = attempt.ask_at.is_some_and(|at| at <= cx.now());
        if let Some(error) = attempt.calls.gives_up(cx.now(), false, cx.store_timeout()) {
            // During a failover those who wait go on asking.
            self.refuse_those_who_do_not_wait(cx, |_, _| error.clone().into());
            self.end_if_unwanted(cx);
        }
        if is_due {
            self.ask(cx);
        }
    }

    /// Asks to be woken, if nobody was asked to do so early enough. Behind every event.
    pub(super) fn arm(&mut self, cx: &mut Context<'_, D>) {
        let timeout = cx.store_timeout();
        let has_impatient = self.line.has_impatient();
        let asks =
            self.attempt.iter().flat_map(|attempt| [attempt.ask_at, attempt.gives_up_at(has_impatient, timeout)]);
        let asks = asks.flatten();
        let repeats = self.give_backs.iter().filter_map(|give_back| give_back.again_at);
        let Some(next) = asks.chain(repeats).chain(self.silent_at(timeout)).min() else { return };
        if self.armed.is_none_or(|armed| next < armed) {
            self.armed = Some(next);
            cx.actions.push(Action::WakeAt(next));
        }
    }

    /// Nobody will wake us at this moment any more. One that was asked for an earlier moment still will.
    pub fn disarm(&mut self, at: BootInstant) {
        self.armed.take_if(|armed| *armed == at);
    }

    fn drain(&mut self, cx: &mut Context<'_, D>) {
        self.draining = true;
        self.refuse_line(cx, |_| LockError::ShuttingDown);
        self.end_if_unwanted(cx);
    }
}
