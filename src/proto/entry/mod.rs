//! The state of one key: its local waiters, its attempt and its pending releases.
//!
//! ```text
//!                         granted
//!              ┌──────────────────────────────────────┐
//!              │                                      ▼
//!       ┌──────┴─────┐ queued ┌────────┐ granted ┌─────────┐ batch used up ┌──────────┐
//!   ───►│ Requesting ├───────►│ Queued ├────────►│ Holding ├──────────────►│ Yielding │
//!       └──┬─────────┘        └───┬────┘         │         │◄──────────────┤          │
//!          │     ▲                │   ▲          └────┬────┘   extended    └──┬────┬──┘
//!          │     │                │   └───────────────┼── not holder, queued ─┘    │
//!          │     │ waiters left   │ no waiter left    │ ended or lost              │ error
//!          │     │                ▼                   ▼                            ▼
//!          │   ┌─┴───────────────────────────────────────────────────────────────────┐
//!          └──►│                              Releasing                              ├─► no entry
//!              └─────────────────────────────────────────────────────────────────────┘ no waiter
//! ```
//!
//! `Releasing` is no state of an attempt: the attempt has ended, and its release blocks the
//! next attempt until the store has replied to it. A busy or full reply ends an attempt without a
//! release. `docs/architecture.md` has the table of all transitions.

use std::{fmt::Debug, sync::Arc, time::Duration};

use super::{
    Action, DriverTypes, Env, Event,
    attempt::{ActiveSection, Asking, Attempt, State},
    deliveries::Deliveries,
    pending_release::PendingReleases,
    queue::WaitQueue,
    section::{ReleaseOutcome, Section},
    share::Share,
};
#[cfg(any(test, feature = "__internals"))]
use crate::acquisition::AcquisitionId;
use crate::{clock::BootInstant, error::LockError, owner::Owner};

// The modules follow the order of a request: enqueue, acquire, hold, release.
mod queue_ops;
mod acquire;
mod hold;
mod shares;
mod tickets;
mod release;

/// One key in this process.
#[derive(Debug)]
pub(super) struct StoredEntry<D: DriverTypes> {
    attempt: Option<Attempt<D>>,
    /// A key that is only held has none.
    extra: Option<Box<Extra<D>>>,
}

/// What a key needs while it is requested, waited for or released.
#[derive(Debug)]
pub(super) struct Extra<D: DriverTypes> {
    queue: WaitQueue<D::Waiter>,
    deliveries: Deliveries<D>,
    /// The grants beside which others hold the key, the newest one last.
    shares: Vec<Share<D>>,
    pending_releases: PendingReleases<D>,
    asking: Asking,
    /// The earliest scheduled timer.
    wakeup_at: Option<BootInstant>,
}

/// One key during an event.
#[derive(Debug)]
pub struct LockEntry<'a, D: DriverTypes> {
    attempt: &'a mut Option<Attempt<D>>,
    queue: &'a mut WaitQueue<D::Waiter>,
    deliveries: &'a mut Deliveries<D>,
    shares: &'a mut Vec<Share<D>>,
    pending_releases: &'a mut PendingReleases<D>,
    asking: &'a mut Asking,
    wakeup_at: &'a mut Option<BootInstant>,
}

/// What an entry counts towards the bounds of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EntryCounts {
    pub(super) waiting: usize,
    pub(super) pending_releases: usize,
    /// Those of them that were sent and have no reply.
    pub(super) releases_under_way: usize,
    /// Of offers to unknown ids.
    pub(super) unclaimed_offer_releases: usize,
    /// Of the records of pending releases.
    pub(super) record_bytes: usize,
    /// Whether the attempt of an entry has an entry in the store queue, so that messages are sent
    /// to it.
    pub(super) is_queued: bool,
}

impl<D: DriverTypes> StoredEntry<D> {
    /// An entry without content.
    pub(super) fn new() -> Self {
        Self { attempt: None, extra: None }
    }

    /// The entry for an event. `spare` has memory that no entry uses.
    pub(super) fn open(&mut self, spare: &mut Option<Box<Extra<D>>>) -> LockEntry<'_, D> {
        let extra = self.extra.get_or_insert_with(|| spare.take().unwrap_or_default());
        let Extra { queue, deliveries, shares, pending_releases, asking, wakeup_at } = &mut **extra;
        LockEntry { attempt: &mut self.attempt, queue, deliveries, shares, pending_releases, asking, wakeup_at }
    }

    /// Returns the memory that the entry does not need after an event.
    pub(super) fn close(&mut self, spare: &mut Option<Box<Extra<D>>>) {
        let Some(extra) = self.extra.as_mut().filter(|extra| extra.queue.is_empty()) else { return };
        extra.queue.shrink();
        let asks = self.attempt.as_ref().is_some_and(|attempt| !matches!(attempt.state, State::Holding(_)));
        if !asks && extra.is_empty() {
            // Another key gets it, which may be held.
            extra.asking = Asking::default();
            *spare = self.extra.take();
        }
    }

    /// Makes an idle entry one without content.
    pub(super) fn reset(&mut self, spare: &mut Option<Box<Extra<D>>>) {
        if let Some(extra) = &mut self.extra {
            extra.deliveries.clear();
            extra.wakeup_at = None;
        }
        self.close(spare);
    }

    /// The number of waiters.
    pub(super) fn waiting(&self) -> usize {
        self.extra.as_ref().map_or(0, |extra| extra.queue.len())
    }

    #[cfg(test)]
    pub(super) fn has_extra(&self) -> bool {
        self.extra.is_some()
    }

    /// The active sections.
    pub(super) fn sections(&self) -> impl Iterator<Item = &Arc<Section<D>>> {
        self.active_sections().map(|active| &active.section)
    }

    /// The active sections, with the guards of each.
    pub(super) fn active_sections(&self) -> impl Iterator<Item = &ActiveSection<D>> {
        let alone = self.attempt.as_ref().and_then(Attempt::active_section);
        let shares = self.extra.iter().flat_map(|extra| &extra.shares).flat_map(Share::sections);
        alone.into_iter().chain(shares)
    }
}

impl<D: DriverTypes> Extra<D> {
    fn is_empty(&self) -> bool {
        self.queue.is_empty()
            && self.deliveries.is_empty()
            && self.shares.is_empty()
            && self.pending_releases.is_empty()
            && self.wakeup_at.is_none()
    }
}

impl<D: DriverTypes> Default for Extra<D> {
    fn default() -> Self {
        Self {
            queue: WaitQueue::new(),
            deliveries: Deliveries::new(),
            shares: Vec::new(),
            pending_releases: PendingReleases::default(),
            asking: Asking::default(),
            wakeup_at: None,
        }
    }
}

impl<D: DriverTypes> LockEntry<'_, D> {
    /// Changes the state by one event and appends the actions.
    pub fn handle_event(&mut self, event: Event<D>, env: &mut Env<'_, D>) {
        match event {
            Event::Acquired(number, reply) => self.on_acquired(number, reply, env),
            Event::Yielded(number, reply) => self.on_yield_reply(number, reply, env),
            Event::Released(number, reply) => self.on_release_reply(number, reply, env),
            Event::Offered(id) => self.on_offer(&id, env),
            Event::Revoked(id) => self.on_revoked(&id, env),
            Event::Freed => self.on_freed(env),
            Event::MaySendRelease => self.send_waiting_release(env),
            Event::Lagged => self.recheck(env),
            Event::GuardEnded(section, end) => {
                if self.on_guard_end(&section, end, env) == Some(ReleaseOutcome::Released) {
                    env.actions.push(Action::SectionEnded(Arc::clone(&section)));
                    self.release_section(section, env);
                }
            }
            Event::NotFreed(section) => self.release_section(section, env),
            Event::Lost(id, reason) => self.on_lost(&id, reason, env),
            Event::Superseded(id) => self.supersede(|of| *of == id, env),
            Event::CheckSection(id) => self.on_check_section(&id, env),
            Event::Timer(at) => self.on_timer(at, env),
            Event::Shutdown => self.on_shutdown(env),
        }
    }

    /// Returns `true` if no waiter is left, and nothing of this process is left in the store.
    pub fn is_idle(&self) -> bool {
        self.attempt.is_none() && self.shares.is_empty() && self.pending_releases.is_empty() && self.queue.is_empty()
    }

    /// The number of waiters.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn waiters(&self) -> impl Iterator<Item = &D::Waiter> {
        self.queue.requests().map(|request| &request.waiter)
    }

    /// What this entry counts towards the bounds of the process.
    pub(super) fn counts(&self) -> EntryCounts {
        EntryCounts {
            waiting: self.queue.len(),
            pending_releases: self.pending_releases.len(),
            releases_under_way: self.pending_releases.iter().filter(|release| release.in_flight.is_some()).count(),
            unclaimed_offer_releases: self.pending_releases.iter().filter(|release| release.is_unclaimed_offer).count(),
            record_bytes: self.pending_releases.record_bytes(),
            is_queued: self.attempt.as_ref().is_some_and(|attempt| matches!(attempt.state, State::Queued)),
        }
    }

    /// Returns `true` if a record of this id may be left in the store.
    #[cfg(any(test, feature = "__internals"))]
    pub fn tracks(&self, id: &AcquisitionId) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| attempt.has_id(id))
            || self.share_with(|grant| grant.id == *id).is_some()
            || self.pending_releases.has_id(id)
    }

    /// The number of guards that this owner has of an active section.
    pub fn hold_count(&self, owner: &Owner, now: BootInstant) -> u32 {
        let active = self.active_sections().find(|active| active.owner.as_ref() == Some(owner));
        active.map_or(0, |active| active.hold_count(now))
    }

    /// The number of guards of this section, zero if it is not active.
    pub fn hold_count_of(&self, section: &Arc<Section<D>>, now: BootInstant) -> u32 {
        self.active_sections().find(|active| active.is(section)).map_or(0, |active| active.hold_count(now))
    }

    fn active_sections(&self) -> impl Iterator<Item = &ActiveSection<D>> {
        self.active_section().into_iter().chain(self.shares.iter().flat_map(Share::sections))
    }

    /// Returns `true` if the section of the attempt is active.
    fn is_held(&self) -> bool {
        self.active_section().is_some()
    }

    fn active_section(&self) -> Option<&ActiveSection<D>> {
        self.attempt.as_ref()?.active_section()
    }

    fn on_timer(&mut self, at: BootInstant, env: &mut Env<'_, D>) {
        self.wakeup_fired(at);
        self.retry_due_releases(env);
        let Some(attempt) = self.attempt.as_ref().filter(|attempt| attempt.is_pending()) else { return };
        let is_due = self.asking.retry_at.is_some_and(|at| at <= env.now());
        if let Some(error) = attempt.in_flight.failure_at(env.now(), env.store_timeout()) {
            // The acquire is repeated for requests with a wait, until it ends.
            self.reject_non_waiting(env, |_| error.clone().into());
            self.abandon_if_unwanted(env);
        }
        if !is_due {
            return;
        }
        // A call that is not polled any more does not leave the queue by itself, and those behind
        // it may fit.
        self.time_out_waiters(env);
        if self.is_unwanted() {
            self.begin_release(Duration::ZERO, None, env);
        } else {
            self.send_acquire(env);
        }
    }

    /// Schedules a timer for the next retry or timeout, unless an earlier one is scheduled. Called
    /// after every event.
    pub(super) fn schedule_wakeup(&mut self, env: &mut Env<'_, D>) {
        let next = self.next_wakeup(env.store_timeout());
        if next < self.wakeup_at.unwrap_or(BootInstant::FAR_FUTURE) {
            *self.wakeup_at = Some(next);
            env.actions.push(Action::WakeAt(env.key.clone(), next));
        }
    }

    /// The instant of the next retry or timeout.
    fn next_wakeup(&self, store_timeout: Duration) -> BootInstant {
        let attempt = self.attempt.as_ref();
        let instants = [
            attempt.and(self.asking.retry_at),
            attempt.filter(|_| self.queue.has_non_waiting()).and_then(|attempt| attempt.fails_at(store_timeout)),
            self.pending_releases.next_retry_at(),
            self.blocking_release_timeout_at(store_timeout),
        ];
        instants
            .map(|at| at.unwrap_or(BootInstant::FAR_FUTURE))
            .into_iter()
            .fold(BootInstant::FAR_FUTURE, BootInstant::min)
    }

    /// Forgets the timer for this instant. A timer for an earlier instant stays scheduled.
    pub fn wakeup_fired(&mut self, at: BootInstant) {
        self.wakeup_at.take_if(|scheduled| *scheduled == at);
    }

    fn on_shutdown(&mut self, env: &mut Env<'_, D>) {
        self.reject_all(env, |_| LockError::ShuttingDown);
        self.abandon_if_unwanted(env);
    }
}
