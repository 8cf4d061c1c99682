//! The lock state machine: which request gets which key, and which calls the store receives for it.
//!
//! It is pure. Events go in, actions come out, and time is an argument: there is no I/O, clock,
//! runtime, task, notification, log or metric in this module. The driver (module `lock`) executes the
//! actions; the simulator executes the same ones in virtual time.
//!
//! # How to drive it
//!
//! A [`Table`](table::Table) holds one [entry](entry) per key. Its methods are of three kinds:
//!
//! - **Events**: [`request`](table::Table::request), [`leave`](table::Table::leave),
//!   [`guard_ended`](table::Table::guard_ended) and [`on`](table::Table::on) change the state and
//!   append to `actions`. They are called under one mutex, and `now` never goes back.
//! - **Broadcasts**: [`gap`](table::Table::gap) and [`drain`](table::Table::drain) return the keys
//!   that are to receive the event of the same name, one call of `on` each.
//! - **Queries** change nothing.
//!
//! After each event the driver unlocks the mutex and executes the actions in order. An action may
//! lead to further events; the driver feeds them in after it. It owes the machine, for each action:
//!
//! - [`Send`](Action::Send): exactly one event with the number of the call, also if the call failed or
//!   timed out ([`Acquired`](Event::Acquired), [`Yielded`](Event::Yielded),
//!   [`Released`](Event::Released)).
//! - [`Start`](Action::Start): the section reaches the waiter, which ends it by one
//!   [`guard_ended`](table::Table::guard_ended). If nothing receives it any more, that event follows
//!   at once, with [`Ending::Unheard`].
//! - [`Watch`](Action::Watch): from now on, and until [`Forget`](Action::Forget), the driver asks
//!   [`Grant::need`](grant::Grant::need) at the instants that it names, and does what it says.
//! - [`WakeAt`](Action::WakeAt): one [`Time`](Event::Time) with this instant, not earlier. If the timer
//!   is lost, the driver says so by [`orphan`](table::Table::orphan).
//! - [`Refuse`](Action::Refuse), [`Recall`](Action::Recall), [`Ended`](Action::Ended),
//!   [`Outcome`](Action::Outcome): a result or a notification. A recalled section that nothing has
//!   received is ended like one that could not be started.
//!
//! # Invariants
//!
//! Numbered, and cited where the code serves them.
//!
//! - **I1** A key is released or handed off only for the acquisition that holds it.
//! - **I2** No acquire is sent before the capacity for its release is reserved.
//! - **I3** A local deadline counts from before the request that was granted was sent, minus drift.
//! - **I4** A lock counts as held only before that deadline, and only a reply of the store moves it.
//! - **I5** The loss of a lock is signalled at the deadline at the latest, whether the store replies
//!   or not. The signal is final.
//! - **I6** The deadline is compared before every poll of the work under the lock.
//! - **I7** Messages may be lost, duplicated, late or forged: the records of the store decide.
//! - **I8** An acquisition whose outcome is unknown is released. A dropped store call is not a
//!   cancelled one.
//! - **I9** Each grant is released exactly once. `Drop` never waits, fails or panics.
//! - **I10** A section that ended abnormally (panic, abort, loss, drop) may still have a statement in
//!   flight: its key is granted again only after the lock-delay. The lease of the store is longer
//!   than the local one by as much.
//! - **I11** No mutex is held over an await; every queue, table, body and wait has a bound.

#![allow(unreachable_pub, clippy::must_use_candidate, reason = "public for the simulator alone: feature `__internals`")]

use std::{fmt::Debug, sync::Arc, time::Duration};

use smallvec::SmallVec;

pub use self::queue::LockRequest;
use self::{
    grant::Grant,
    section::{ReleaseOutcome, Section},
};
use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    clock::{BootInstant, LazyNow},
    error::{LockError, LockLost},
    limits::{FIRST_WAITER_RESERVE, MAX_WAITERS_PER_KEY, MAX_WAITERS_PER_PROCESS, WAITER_SHARE_DIVISOR},
    lock_key::LockKey,
    proto::lease::LeaseBounds,
    store::{AcquireReply, IfBusy, ReleaseReply, StoreError, YieldReply},
};

pub(crate) mod table;
pub(crate) mod entry;
mod attempt;
mod in_flight;
mod pending_release;
mod queue;
pub(crate) mod grant;
pub(crate) mod section;
mod deadline;
pub(crate) mod hold_limits;
pub(crate) mod lease;
#[cfg(test)]
mod tests;

/// The types that a driver attaches to objects of the state machine.
///
/// The state machine stores them and hands them back. It never looks into them.
pub trait DriverTypes: Debug {
    /// Receives the result of one request.
    type Waiter: Clone + Debug;
    /// Stored with each grant.
    type GrantData: Debug + Default;
    /// Stored with each section.
    type SectionData: Debug + Default;
}

/// What is to be done now, in this order.
#[derive(Debug)]
pub enum Action<D: DriverTypes> {
    /// The store is to be asked; its answer comes back under this number.
    Send(StoreCall),
    /// It is this one's turn.
    Grant(D::Waiter, Arc<Section<D>>),
    /// It will not be this one's turn.
    Reject(D::Waiter, LockError),
    /// Its section was sent to it and goes to the next one, if it has not been taken; then this is
    /// the caller's answer instead.
    Recall(D::Waiter, LockError),
    /// To be renewed from now on; or to be looked at earlier than was thought.
    Track(Arc<Grant<D>>),
    /// The store is to be [asked](Grant::doubt) whether it still is ours.
    Verify(Arc<Grant<D>>),
    /// Not to be renewed any more: it is over, and whoever waits for that is told.
    Untrack(Arc<Grant<D>>),
    /// A section under it is over, and whoever waits for that is told.
    SectionEnded(Arc<Grant<D>>),
    /// What became of the give-back of this section, for whoever waits to hear it.
    ReleaseOutcome(Arc<Section<D>>, Result<ReleaseOutcome, StoreError>),
    /// To be [woken](Event::Time) at this moment.
    WakeAt(BootInstant),
}

/// The actions of one event.
pub type Actions<D> = SmallVec<[Action<D>; 2]>;

/// One question to the store.
#[derive(Clone, Debug)]
pub struct StoreCall {
    /// Answers are known by it.
    pub number: u64,
    /// Who asks.
    pub id: AcquisitionId,
    /// What is asked.
    pub op: StoreOp,
}

/// What the store is asked.
#[derive(Clone, Debug)]
pub enum StoreOp {
    /// `acquire`
    Acquire {
        /// What to do if somebody else has the key.
        if_busy: IfBusy,
        /// For how long, lock-delay included.
        lease: Duration,
    },
    /// `yield_to_queue`
    Yield {
        /// Under which fence we have it.
        fence: u64,
        /// The id for the next turn.
        next_id: AcquisitionId,
        /// For how long, lock-delay included.
        lease: Duration,
    },
    /// `release`
    Release {
        /// How long the key stays taken.
        block_for: Duration,
    },
}

/// What has happened.
#[derive(Debug)]
pub enum Event<D: DriverTypes> {
    /// Somebody wants the key; the number is its place, should it have to wait.
    Request(u64, LockRequest<D::Waiter>),
    /// An `acquire` has ended.
    Acquired(u64, Result<AcquireReply, StoreError>),
    /// A `yield_to_queue` has ended.
    Yielded(u64, Result<YieldReply, StoreError>),
    /// A `release` has ended.
    Released(u64, Result<ReleaseReply, StoreError>),
    /// The store says that this owner's turn has come (I7: a hint).
    Offered(AcquisitionId),
    /// A message says that this owner's grant was taken away (I7: a hint, that anybody may have sent).
    Revoked(AcquisitionId),
    /// What the store says may have been lost.
    Lagged,
    /// A guard of this section was given back in order, or not.
    GuardEnded(Arc<Section<D>>, GuardEnd),
    /// This owner has lost its grant, for this reason: the store's word, or the clock's.
    Lost(AcquisitionId, LockLost),
    /// The section that ran under this owner's grant has reached its limit, if it is still the same;
    /// or it is time to look at its delivery.
    CheckSection(AcquisitionId),
    /// It is as late as it was [asked for](Action::WakeAt).
    Timer(BootInstant),
    /// Nothing more is to be started.
    Shutdown,
}

/// How a guard ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuardEnd {
    /// Given back in order.
    Released,
    /// Given back in order, though what ran under it failed: nothing keeps it for its least time.
    ReleasedAfterFailure,
    /// Its turn never reached anybody: it was told to one who had left.
    Undelivered,
    /// Dropped, perhaps in the middle of something (I10).
    Dropped,
}

/// Who is before one that has left.
#[derive(Clone, Debug)]
pub struct QueuePosition {
    /// How long the holder's lease runs, as things stand.
    pub lease_left: Duration,
    /// How many would have been served first, the holder included.
    pub ahead: usize,
    /// The store does not answer, so that nobody knows.
    pub store_error: Option<StoreError>,
    /// Somebody has the key, or its turn, as far as is known here.
    pub is_contended: bool,
}

/// What an event needs beside itself.
#[derive(Debug)]
pub struct Env<'a, D: DriverTypes> {
    /// What is talked about.
    pub key: &'a LockKey,
    /// When it happens.
    pub now: &'a LazyNow<'a>,
    /// Where new ids come from.
    pub ids: &'a AcquisitionIds,
    /// What the store is asked for.
    pub lease: LeaseBounds,
    /// How long one call of the store may take.
    pub call_timeout: Duration,
    /// How many wait in this process.
    pub waiting: usize,
    /// Whether one more attempt may begin: I2, its way back is reserved first.
    pub can_reserve_release: bool,
    /// Whether one more offer to an id that is not known may be released.
    pub can_release_unclaimed_offer: bool,
    /// When messages were last known to be lost.
    pub lagged_at: Option<BootInstant>,
    /// Why the newest release that failed did; of all keys.
    pub release_error: &'a mut Option<StoreError>,
    /// What is to be done.
    pub actions: &'a mut Actions<D>,
}

impl QueuePosition {
    /// The answer of a call whose wait is over. The call itself knows how long that was.
    pub(crate) fn timeout_error(self) -> LockError {
        let Self { lease_left, ahead: places, store_error: silent, is_contended: _ } = self;
        match silent {
            Some(error) => error.into(),
            None => LockError::TimedOut { waited: Duration::ZERO, lease_left, ahead: places },
        }
    }
}

impl<D: DriverTypes> Env<'_, D> {
    /// Numbers of calls are never used again, not even by another entry about the same key.
    fn store_call(&self, owner: &AcquisitionId, verb: StoreOp) -> StoreCall {
        StoreCall { number: self.ids.next_call_id(), id: owner.clone(), op: verb }
    }

    fn now(&self) -> BootInstant {
        self.now.get()
    }

    /// Whether one more may wait in this process.
    fn queue_has_capacity(&self) -> bool {
        self.waiting < MAX_WAITERS_PER_PROCESS
    }

    /// How many may wait for one key now. It shrinks with what is left of the bound of the process
    /// (a dynamic threshold, Choudhury and Hahne 1998), so that a flood on some keys always leaves
    /// room for others; and never below one.
    fn max_waiters_of_key(&self) -> usize {
        let left = (MAX_WAITERS_PER_PROCESS - FIRST_WAITER_RESERVE).saturating_sub(self.waiting);
        (left / WAITER_SHARE_DIVISOR).clamp(1, MAX_WAITERS_PER_KEY)
    }

    /// After this time without a reply, one call and one repeat, those who wait are told so.
    fn store_timeout(&self) -> Duration {
        2 * self.call_timeout
    }

    fn jitter(&self) -> f64 {
        self.ids.jitter()
    }

    fn reject(&mut self, request: LockRequest<D::Waiter>, error: LockError) {
        self.actions.push(Action::Reject(request.waiter, error));
    }
}

/// The types of tests: their waiters are numbers.
#[cfg(test)]
#[derive(Debug)]
pub(super) enum NoDriver {}

#[cfg(test)]
impl DriverTypes for NoDriver {
    type Waiter = u32;
    type GrantData = ();
    type SectionData = ();
}
