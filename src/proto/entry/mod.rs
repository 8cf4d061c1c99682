//! The entry about one key: who in this process wants it, what the store is asked for them, and whose turn it is.
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
    Action, DriverTypes, Env, Event,
    attempt::{ActiveSection, Attempt, State},
    pending_release::PendingRelease,
    queue::WaitQueue,
    section::Section,
};
#[cfg(any(test, feature = "__internals"))]
use crate::acquisition::AcquisitionId;
use crate::{clock::BootInstant, error::LockError, owner::Owner};

// In the order of a request: queued, acquired, holding, released.
mod queue_ops;
mod acquire;
mod hold;
mod release;

/// One key in this process.
#[derive(Debug)]
pub struct LockEntry<D: DriverTypes> {
    /// Who waits, in order.
    queue: WaitQueue<D::Waiter>,
    attempt: Option<Attempt<D>>,
    /// Callers that the section that runs was sent to, and that are not known to have taken it.
    deliveries: SmallVec<[Delivery<D>; 1]>,
    /// What is over, and not known to be given back.
    pending_releases: SmallVec<[PendingRelease<D>; 1]>,
    /// The one of those that the next attempt waits for: until it is answered for the first time.
    blocking_release: Option<u64>,
    /// Nothing more is started.
    is_shutting_down: bool,
    /// The earliest moment at which somebody was asked to wake us.
    wakeup_at: Option<BootInstant>,
}

/// A section that was sent to a caller.
#[derive(Debug)]
struct Delivery<D: DriverTypes> {
    waiter: D::Waiter,
    waits: bool,
    /// When it is looked at next.
    check_at: BootInstant,
    /// It was looked at once already: a process that was stopped gets time to take it.
    was_checked: bool,
}

impl<D: DriverTypes> LockEntry<D> {
    /// Nobody has said anything yet.
    pub fn new(draining: bool) -> Self {
        Self {
            queue: WaitQueue::new(),
            attempt: None,
            deliveries: SmallVec::new(),
            pending_releases: SmallVec::new(),
            blocking_release: None,
            is_shutting_down: draining,
            wakeup_at: None,
        }
    }

    /// Something has happened.
    pub fn handle_event(&mut self, event: Event<D>, env: &mut Env<'_, D>) {
        match event {
            Event::Request(number, request) => self.on_request(number, request, env),
            Event::Acquired(number, answer) => self.on_acquired(number, answer, env),
            Event::Yielded(number, answer) => self.on_yield_reply(number, answer, env),
            Event::Released(number, answer) => self.on_release_reply(number, answer, env),
            Event::Offered(owner) => self.on_offer(&owner, env),
            Event::Revoked(owner) => self.on_revoked(&owner, env),
            Event::Lagged => self.recheck(env),
            Event::GuardEnded(section, ending) => {
                self.on_guard_end(&section, ending, env);
            }
            Event::Lost(owner, why) => self.on_lost(&owner, why, env),
            Event::CheckSection(owner) => self.on_check_section(&owner, env),
            Event::Timer(at) => self.on_timer(at, env),
            Event::Shutdown => self.on_shutdown(env),
        }
    }

    /// Nobody wants the key any more, and nothing of us is left in the store.
    pub fn is_idle(&self) -> bool {
        self.attempt.is_none() && self.pending_releases.is_empty() && self.queue.is_empty()
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Who waits.
    pub(super) fn waiters(&self) -> impl Iterator<Item = &D::Waiter> {
        self.queue.requests().map(|request| &request.waiter)
    }

    /// How many ids are given back, and not known to be.
    pub fn pending_release_count(&self) -> usize {
        self.pending_releases.len()
    }

    /// How many of those were offered to an id that was forgotten.
    pub(super) fn unclaimed_offer_releases(&self) -> usize {
        self.pending_releases.iter().filter(|release| release.is_unclaimed_offer).count()
    }

    /// Whether it has a place in the store's line, and waits for messages there.
    pub(super) fn is_queued(&self) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| matches!(attempt.state, State::Queued))
    }

    /// Whether something of this id may be in the store still.
    #[cfg(any(test, feature = "__internals"))]
    pub fn tracks(&self, id: &AcquisitionId) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| attempt.has_id(id))
            || self.pending_releases.iter().any(|release| release.id == *id)
    }

    /// How often this owner has the key now.
    pub fn hold_count(&self, owner: &Owner, now: BootInstant) -> u32 {
        let active = self.active_section().filter(|active| active.owner.as_ref() == Some(owner));
        active.map_or(0, |active| active.hold_count(now))
    }

    /// How often this section is holding now.
    pub fn hold_count_of(&self, section: &Arc<Section<D>>, now: BootInstant) -> u32 {
        self.active_section().filter(|active| active.is(section)).map_or(0, |active| active.hold_count(now))
    }

    /// Whether a section runs.
    pub fn is_held(&self) -> bool {
        self.active_section().is_some()
    }

    fn active_section(&self) -> Option<&ActiveSection<D>> {
        self.attempt.as_ref()?.active_section()
    }

    // --- time, and the end ---------------------------------------------------------------------------------------

    fn on_timer(&mut self, at: BootInstant, env: &mut Env<'_, D>) {
        self.wakeup_fired(at);
        self.retry_due_releases(env);
        let Some(attempt) = self.attempt.as_ref().filter(|attempt| attempt.is_pending()) else { return };
        if let Some(error) = attempt.in_flight.failure_at(env.now(), true, env.store_timeout()) {
            // A call that is under way is waited for by the give-back.
            self.reject_all(env, |_| error.clone().into());
            return self.begin_release(Duration::ZERO, None, env);
        }
        let is_due = attempt.retry_at.is_some_and(|at| at <= env.now());
        if let Some(error) = attempt.in_flight.failure_at(env.now(), false, env.store_timeout()) {
            // During a failover those who wait go on asking.
            self.reject_non_waiting(env, |_, _| error.clone().into());
            self.abandon_if_unwanted(env);
        }
        if is_due {
            self.send_acquire(env);
        }
    }

    /// Asks to be woken, if nobody was asked to do so early enough. Behind every event.
    pub(super) fn schedule_wakeup(&mut self, env: &mut Env<'_, D>) {
        let timeout = env.store_timeout();
        let has_impatient = self.queue.has_non_waiting();
        let asks = self.attempt.iter().flat_map(|attempt| [attempt.retry_at, attempt.fails_at(has_impatient, timeout)]);
        let asks = asks.flatten();
        let repeats = self.pending_releases.iter().filter_map(|release| release.retry_at);
        let Some(next) = asks.chain(repeats).chain(self.blocking_release_timeout_at(timeout)).min() else { return };
        if self.wakeup_at.is_none_or(|armed| next < armed) {
            self.wakeup_at = Some(next);
            env.actions.push(Action::WakeAt(next));
        }
    }

    /// Nobody will wake us at this moment any more. One that was asked for an earlier moment still will.
    pub fn wakeup_fired(&mut self, at: BootInstant) {
        self.wakeup_at.take_if(|armed| *armed == at);
    }

    fn on_shutdown(&mut self, env: &mut Env<'_, D>) {
        self.is_shutting_down = true;
        self.reject_all(env, |_| LockError::ShuttingDown);
        self.abandon_if_unwanted(env);
    }
}
