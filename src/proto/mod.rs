//! The lock state machine: which request gets which key, and which calls the store receives.
//!
//! The module is pure. Events go in, actions come out, and time is an argument: there is no I/O,
//! clock, runtime, task, notification, log or metric. The driver (module `lock`) executes the
//! actions; the simulator executes the same ones in virtual time.
//!
//! # How to drive it
//!
//! A [`LockTable`](table::LockTable) has one [entry](entry) for each key in use. Its methods are of
//! three kinds:
//!
//! - **Events**: [`request`](table::LockTable::request), [`cancel`](table::LockTable::cancel),
//!   [`end_guard`](table::LockTable::end_guard) and
//!   [`handle_event`](table::LockTable::handle_event) change the state of one key and append to
//!   `actions`. They are called under one mutex, and `now` never goes back.
//! - **Broadcasts**: [`lagged`](table::LockTable::lagged) and
//!   [`shut_down`](table::LockTable::shut_down) return keys. The driver then passes
//!   [`Event::Lagged`] or [`Event::Shutdown`] to each of them.
//! - **Queries** do not change which waiter gets the key.
//!
//! After each event, or after the events of several keys of one caller, the driver unlocks the
//! mutex, executes the actions in order, and then makes the [calls](calls::Calls) of the store. For
//! each request it feeds in exactly one event with its number: [`Acquired`](Event::Acquired),
//! [`Yielded`](Event::Yielded) or [`Released`](Event::Released). An error or a timeout is fed in as
//! a result, too. An event that results from an action is fed in after that action; the actions of
//! that event are executed after those of the first event. Each action is an obligation of the
//! driver:
//!
//! - [`Grant`](Action::Grant): send the section to the waiter, and call [`Section::delivered`] when
//!   the waiter receives it. Each grant ends by exactly one
//!   [`end_guard`](table::LockTable::end_guard) or [`Event::GuardEnded`]. If the waiter no longer
//!   exists, that event follows at once, with [`GuardEnd::Undelivered`].
//! - [`Recall`](Action::Recall): if the waiter has not received its section, replace it by the
//!   error and feed in [`GuardEnd::Undelivered`]. Otherwise do nothing.
//! - [`Reject`](Action::Reject): send the error to the waiter.
//! - [`Recorded`](Action::Recorded): send the record to the waiter, which holds nothing.
//! - [`Track`](Action::Track): from now on, call [`Grant::next_check`] at [`Grant::next_check_at`],
//!   and do what it returns. If the grant is tracked already, its next check may be earlier than
//!   before.
//! - [`Verify`](Action::Verify): call [`Grant::verify`], and track the grant anew if it returns
//!   `true`.
//! - [`Superseded`](Action::Superseded): notify the tasks that observe the section. Its work ends,
//!   and then its guards.
//! - [`Untrack`](Action::Untrack): stop the checks.
//! - [`Lost`](Action::Lost): report the loss of a section, for logs and metrics.
//! - [`RecordLost`](Action::RecordLost): report the loss of a record, for logs and metrics.
//! - [`SectionEnded`](Action::SectionEnded): notify the tasks that observe the section.
//! - [`ReleaseOutcome`](Action::ReleaseOutcome): send the outcome to the guard that waits for it.
//! - [`SendWaiting`](Action::SendWaiting): feed in [`Event::MaySendRelease`] for this other key.
//! - [`WakeAt`](Action::WakeAt): feed in one [`Timer`](Event::Timer) of the key with this instant,
//!   not earlier. If the timer is lost, call [`take_timer`](table::LockTable::take_timer).
//!
//! Messages of the store are fed in as [`Offered`](Event::Offered) and [`Revoked`](Event::Revoked)
//! if this process has issued their id. They are hints (I7).
//!
//! `docs/architecture.md` has the invariants I1 to I11, which comments cite where the code depends
//! on them.

#![allow(unreachable_pub, clippy::must_use_candidate, reason = "public for the simulator alone: feature `__internals`")]

use std::{fmt::Debug, sync::Arc, time::Duration};

use smallvec::SmallVec;

pub use self::queue::LockRequest;
use self::{
    calls::Calls,
    grant::Grant,
    hold_limits::HoldLimits,
    section::{ReleaseOutcome, Section},
    usage::Usage,
};
use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    clock::{BootInstant, LazyNow},
    error::{LockError, LockLost},
    limits::{
        FIRST_WAITER_RESERVE, LOCK_DELAY, MAX_STORE_WAITERS, MAX_WAITERS_PER_PROCESS, OFFER_TTL, QUEUE_ENTRY_TTL,
        REPEATED_OFFER_TTL,
    },
    lock_key::LockKey,
    owner::Owner,
    proto::lease::LeaseBounds,
    store::{AcquireReply, Heir, NewRecord, QueueConfig, Record, ReleaseReply, StoreError, YieldReply},
    trace::SectionTrace,
};

pub(crate) mod table;
pub(crate) mod calls;
pub(crate) mod several;
pub(crate) mod usage;
pub(crate) mod entry;
mod attempt;
mod in_flight;
mod pending_release;
mod deliveries;
mod share;
mod queue;
pub(crate) mod grant;
pub(crate) mod section;
mod deadline;
pub(crate) mod hold_limits;
pub(crate) mod sharing;
pub(crate) mod lease;
#[cfg(test)]
mod tests;

/// The queue of every key in the store.
pub(crate) const QUEUE: QueueConfig =
    QueueConfig::new(OFFER_TTL.saturating_add(LOCK_DELAY), QUEUE_ENTRY_TTL, MAX_STORE_WAITERS);
/// The same for an acquire, which finds a key free that no holder has released. Its offer outlasts
/// two calls: otherwise no waiter of a slow store would accept one in time.
pub(crate) fn queue_of_acquire(call_timeout: Duration) -> QueueConfig {
    let offer_ttl = call_timeout.saturating_mul(2).clamp(REPEATED_OFFER_TTL, QUEUE.offer_ttl);
    QueueConfig::new(offer_ttl, QUEUE_ENTRY_TTL, MAX_STORE_WAITERS)
}

/// The types that a driver attaches to the objects of the state machine.
///
/// The state machine stores the values and never reads them.
pub trait DriverTypes: Debug {
    /// The receiver of the result of one request.
    type Waiter: Clone + Debug;
    /// Stored with each grant.
    type GrantData: Debug + Default;
    /// Stored with each section.
    type SectionData: Debug + Default;
}

/// An effect that the driver executes after the event, in the order of the list.
///
/// The page of this module describes what the driver must do for each of them.
#[derive(Debug)]
pub enum Action<D: DriverTypes> {
    /// Grants the section to the waiter.
    Grant(D::Waiter, Arc<Section<D>>),
    /// Rejects the waiter.
    Reject(D::Waiter, LockError),
    /// Answers the waiter with the record of the key.
    Recorded(D::Waiter, Arc<Record>),
    /// Replaces a section that the waiter has not received by this error.
    Recall(D::Waiter, LockError),
    /// Adds the grant to those that are checked and renewed, or reschedules its next check.
    Track(Arc<Grant<D>>),
    /// [Verifies](Grant::verify) the grant: its next renewal shows whether the store still keeps
    /// it.
    Verify(Arc<Grant<D>>),
    /// A newer request waits for the end of the section, which is still held.
    Superseded(Arc<Section<D>>),
    /// Ends the checks of the grant, which has ended.
    Untrack(Arc<Grant<D>>),
    /// The section was lost before its last guard ended.
    Lost(Arc<Section<D>>, LockLost),
    /// The section has ended, and its lease before the store has confirmed its record. Once for
    /// each record.
    RecordLost(Arc<Section<D>>),
    /// Notifies the tasks that observe the section, which has ended.
    SectionEnded(Arc<Section<D>>),
    /// Sends the outcome of the release to the guard of this section.
    ReleaseOutcome(Arc<Section<D>>, Result<ReleaseOutcome, StoreError>),
    /// Schedules a [timer](Event::Timer) of this key for this instant.
    WakeAt(LockKey, BootInstant),
    /// Feeds [`Event::MaySendRelease`] to another key, whose release waits until fewer are sent.
    SendWaiting(LockKey),
}

/// The output of one event, or of events of several keys.
#[derive(Debug)]
pub struct Actions<D: DriverTypes> {
    /// In order.
    pub list: SmallVec<[Action<D>; 2]>,
    /// The calls of the store, which follow the actions.
    pub calls: Calls,
}

/// An input of the state machine.
#[derive(Debug)]
pub enum Event<D: DriverTypes> {
    /// The result of an acquire, with the number of the call.
    Acquired(u64, Result<AcquireReply, StoreError>),
    /// The result of a yield, with the number of the call.
    Yielded(u64, Result<YieldReply, StoreError>),
    /// The result of a release, with the number of the call.
    Released(u64, Result<ReleaseReply, StoreError>),
    /// The store has offered the key to this acquisition (I7: a hint).
    Offered(AcquisitionId),
    /// A message says that the grant of this acquisition was revoked (I7: a hint that may be
    /// forged).
    Revoked(AcquisitionId),
    /// A message says that the key may be free (I7: a hint).
    Freed,
    /// A release of this key that waits may be sent. Fed in after an [`Action::SendWaiting`].
    MaySendRelease,
    /// Messages of the store may have been lost. Fed in for each key that
    /// [`LockTable::lagged`](table::LockTable::lagged) returns.
    Lagged,
    /// A guard of this section has ended.
    GuardEnded(Arc<Section<D>>, GuardEnd),
    /// The store did not free the key of this section without a call.
    NotFreed(Arc<Section<D>>),
    /// The grant of this acquisition is lost: the store has refused its renewal, or its deadline
    /// has passed.
    Lost(AcquisitionId, LockLost),
    /// The store has renewed the grant of this acquisition, and a newer one waits for it.
    Superseded(AcquisitionId),
    /// [`NextCheck::CheckSection`](grant::NextCheck::CheckSection) was returned for the grant of
    /// this acquisition.
    CheckSection(AcquisitionId),
    /// The instant of an [`Action::WakeAt`] has come.
    Timer(BootInstant),
    /// Rejects all waiters and all later requests. Fed in for each key that
    /// [`LockTable::shut_down`](table::LockTable::shut_down) returns.
    Shutdown,
}

/// How a guard ended. It decides for how long the key stays blocked, and whether it has a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuardEnd {
    /// Released in order: the key stays blocked for the rest of `min_hold`.
    Released,
    /// Released in order. The section leaves this record when its last guard has ended.
    Recorded(Arc<NewRecord>),
    /// Released in order. If this is the last guard, the key is left to this acquisition.
    Kept(Arc<Heir>),
    /// Released in order after a failure: `min_hold` does not apply.
    ReleasedAfterFailure,
    /// The waiter never received the section: it no longer existed, or the section was recalled.
    Undelivered,
    /// Dropped, perhaps in the middle of a statement: the lock-delay applies (I10).
    Dropped,
}

/// The position of a waiter that was removed, for the error of its call.
#[derive(Clone, Debug)]
pub struct QueuePosition {
    /// The rest of the holder's lease, as far as this process knows.
    pub lease_left: Duration,
    /// The number of callers before this one, the holder included.
    pub ahead: usize,
    /// The error of the store, if the holder is unknown because of it.
    pub store_error: Option<StoreError>,
    /// Whether the key is held or queued for, as far as this process knows.
    pub is_contended: bool,
    /// The section that has taken the grant of the key, as far as this process knows.
    pub held_by: Option<SectionTrace>,
}

/// What the driver passes with each event.
#[derive(Clone, Copy, Debug)]
pub struct EventContext<'a> {
    /// The time of the event. It never goes back.
    pub now: &'a LazyNow<'a>,
    /// The source of acquisition ids and jitter.
    pub ids: &'a AcquisitionIds,
    /// Whether the store frees keys without a call.
    pub frees_keys: bool,
}

/// A key that the store has granted without a call. It comes with its request, for which the table
/// has no entry.
#[derive(Debug)]
pub struct FreeKey {
    /// The acquisition that holds the key.
    pub id: AcquisitionId,
    /// Its fence.
    pub fence: u64,
    /// Before the store granted it.
    pub sent_at: BootInstant,
}

/// A key that the store has granted in place of a ticket.
#[derive(Debug)]
pub struct Redeemed {
    /// The acquisition that holds the key.
    pub id: AcquisitionId,
    /// Its fence.
    pub fence: u64,
    /// Before the call was sent.
    pub sent_at: BootInstant,
    /// The owner of the section.
    pub owner: Option<Owner>,
    /// Its limits.
    pub limits: HoldLimits,
    /// Its trace.
    pub trace: Option<SectionTrace>,
}

/// The first result of a request.
#[derive(Debug)]
pub enum Requested<D: DriverTypes> {
    /// The caller has a guard of this section. The driver tracks its grant, as after an
    /// [`Action::Track`].
    Granted(Arc<Section<D>>),
    /// The result follows, and is sent to the waiter. The number identifies it until then.
    Waiting(u64, D::Waiter),
}

/// The context of an event: the state of the process that an entry needs.
#[derive(Debug)]
pub struct Env<'a, D: DriverTypes> {
    /// The key of the entry.
    pub key: &'a LockKey,
    /// The part that the driver passes.
    pub cx: EventContext<'a>,
    /// The number of the last request or call.
    pub last_number: &'a mut u64,
    /// The leases that calls of the store request.
    pub lease: LeaseBounds,
    /// What this process uses of its bounds.
    pub usage: &'a Usage,
    /// The instant of the last [`LockTable::lagged`](table::LockTable::lagged).
    pub lagged_at: Option<BootInstant>,
    /// The instant of the last [`LockTable::doubt`](table::LockTable::doubt).
    pub doubted_at: Option<BootInstant>,
    /// No waiter is queued any more.
    pub is_shutting_down: bool,
    /// The output of the event.
    pub actions: &'a mut Actions<D>,
}

impl GuardEnd {
    /// The acquisition that the last guard leaves the key to.
    fn heir(&self) -> Option<Arc<Heir>> {
        if let Self::Kept(heir) = self { Some(Arc::clone(heir)) } else { None }
    }
}

impl QueuePosition {
    /// The error of a call that has timed out. The call fills in how long it has waited.
    pub(crate) fn timeout_error(self) -> LockError {
        let Self { lease_left, ahead, store_error, is_contended: _, held_by } = self;
        match store_error {
            Some(error) => error.into(),
            None => LockError::TimedOut { waited: Duration::ZERO, lease_left, ahead, held_by },
        }
    }

    /// The error of a call without a wait.
    pub(crate) fn busy_error(self) -> LockError {
        LockError::Busy { lease_left: self.lease_left, ahead: self.ahead, held_by: self.held_by }
    }
}

impl<D: DriverTypes> Actions<D> {
    /// No output yet.
    pub fn new() -> Self {
        Self { list: SmallVec::new(), calls: Calls::default() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.calls.is_empty()
    }

    fn push(&mut self, action: Action<D>) {
        self.list.push(action);
    }
}

impl<D: DriverTypes> Default for Actions<D> {
    fn default() -> Self {
        Self::new()
    }
}

impl<D: DriverTypes> Env<'_, D> {
    /// The number of the next request of the store. It is never used again, not even by another
    /// entry of the same key.
    fn next_call(&mut self) -> u64 {
        *self.last_number += 1;
        *self.last_number
    }

    fn now(&self) -> BootInstant {
        self.cx.now.get()
    }

    /// Whether one more request may be queued in this process.
    fn queue_has_capacity(&self) -> bool {
        self.usage.waiting() < MAX_WAITERS_PER_PROCESS
    }

    /// The number of waiters that one key may have now. It shrinks with the unused part of the
    /// bound of the process (a dynamic threshold, Choudhury and Hahne 1998), so that a flood on
    /// some keys always leaves capacity for others. It is at least one.
    ///
    /// `share` is the part of the rest that the key may have, and `max` its bound.
    fn max_waiters_of_key(&self, (share, max): (usize, usize)) -> usize {
        let remaining = (MAX_WAITERS_PER_PROCESS - FIRST_WAITER_RESERVE).saturating_sub(self.usage.waiting());
        (remaining / share).clamp(1, max)
    }

    /// The time without a reply after which waiters are rejected: one call and one retry.
    fn store_timeout(&self) -> Duration {
        2 * self.lease.call_timeout
    }

    fn jitter(&self) -> f64 {
        self.cx.ids.jitter()
    }

    fn reject(&mut self, request: LockRequest<D::Waiter>, error: LockError) {
        self.actions.push(Action::Reject(request.waiter, error));
    }
}

/// The types of tests: a waiter is a number.
#[cfg(test)]
#[derive(Debug)]
pub(super) enum NoDriver {}

#[cfg(test)]
impl DriverTypes for NoDriver {
    type Waiter = u32;
    type GrantData = ();
    type SectionData = ();
}
