//! The conversation about one key: who in this process wants it, what the store is asked for them, and whose turn it is.
//!
//! Pure: events in, actions out, time as an argument. Nothing here waits, wakes or asks by itself, so whatever drives it (the
//! [shell](super::core), a simulator) sees the same decisions.
//!
//! ```text
//!            request                     granted              section ends, somebody waits here
//!  (nothing) ───────► Asking ───────────────────────► Held ◄──────────────────────────────────┐
//!                       │ in line                    ▲  │  └── 100 ms or 1 000 sections ──► Yielding
//!                       ▼               granted      │  │                                     │ others wait
//!                     InLine ────────────────────────┘  │ ended, lost                         ▼
//!                       │ nobody waits here any more    ▼                                   InLine, under a new id
//!                       └──────────────────────────► given back, until the store has answered
//! ```

use std::{fmt::Debug, sync::Arc, time::Duration};

use smallvec::SmallVec;

pub use super::line::Request;
use super::{
    LockError, LockLost,
    attempt::{Attempt, GiveBack, Running, State},
    grant::Grant,
    line::Line,
    owner::Owner,
    section::Section,
};
use crate::{
    clock::{Moment, Now},
    defaults::{LINE_PER_KEY, LINE_PER_PROCESS, LINE_RESERVE, LINE_SHARE_DIVISOR},
    key::LockKey,
    lease::{LeaseBounds, OwnerId, OwnerIds},
    store::{Acquired, IfHeld, Released, StoreError, Yielded},
};

// In the order in which a key is wanted, had and given back.
mod wanting;
mod asking;
mod holding;
mod giving_back;

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
    armed: Option<Moment>,
}

/// A section that was sent to a caller.
#[derive(Debug)]
struct Delivery<D: DriverTypes> {
    waiter: D::Waiter,
    waits: bool,
    /// When it is looked at next.
    due: Moment,
    /// It was looked at once already: a process that was stopped gets time to take it.
    is_late: bool,
}

/// What is to be done now, in this order.
#[derive(Debug)]
pub enum Action<D: DriverTypes> {
    /// The store is to be asked; its answer comes back under this number.
    Send(Call),
    /// It is this one's turn.
    Start(D::Waiter, Arc<Section<D>>),
    /// It will not be this one's turn.
    Refuse(D::Waiter, LockError),
    /// Its section was sent to it and goes to the next one, if it has not been taken; then this is
    /// the caller's answer instead.
    Recall(D::Waiter, LockError),
    /// To be renewed from now on; or to be looked at earlier than was thought.
    Watch(Arc<Grant<D>>),
    /// The store is to be [asked](Grant::doubt) whether it still is ours.
    Doubt(Arc<Grant<D>>),
    /// Not to be renewed any more: it is over, and whoever waits for that is told.
    Forget(Arc<Grant<D>>),
    /// A section under it is over, and whoever waits for that is told.
    Ended(Arc<Grant<D>>),
    /// What became of the give-back of this section, for whoever waits to hear it.
    Outcome(Arc<Section<D>>, Result<Released, StoreError>),
    /// To be [woken](Event::Time) at this moment.
    WakeAt(Moment),
}

/// The actions of one event.
pub type Actions<D> = SmallVec<[Action<D>; 2]>;

/// One question to the store.
#[derive(Clone, Debug)]
pub struct Call {
    /// Answers are known by it.
    pub number: u64,
    /// Who asks.
    pub owner: OwnerId,
    /// What is asked.
    pub verb: Verb,
}

/// What the store is asked.
#[derive(Clone, Debug)]
pub enum Verb {
    /// `acquire`
    Acquire {
        /// What to do if somebody else has the key.
        if_held: IfHeld,
        /// For how long, lock-delay included.
        lease: Duration,
    },
    /// `yield_to_line`
    Yield {
        /// Under which fence we have it.
        fence: u64,
        /// The id for the next turn.
        next: OwnerId,
        /// For how long, lock-delay included.
        lease: Duration,
    },
    /// `release`
    Release {
        /// How long the key stays taken.
        keep_taken: Duration,
    },
}

/// What has happened.
#[derive(Debug)]
pub enum Event<D: DriverTypes> {
    /// Somebody wants the key; the number is its place, should it have to wait.
    Request(u64, Request<D::Waiter>),
    /// An `acquire` has ended.
    Acquired(u64, Result<Acquired, StoreError>),
    /// A `yield_to_line` has ended.
    Yielded(u64, Result<Yielded, StoreError>),
    /// A `release` has ended.
    Released(u64, Result<Released, StoreError>),
    /// The store says that this owner's turn has come (I7: a hint).
    Offered(OwnerId),
    /// A message says that this owner's grant was taken away (I7: a hint, that anybody may have sent).
    TakenAway(OwnerId),
    /// What the store says may have been lost.
    Gap,
    /// A guard of this section was given back in order, or not.
    GuardEnded(Arc<Section<D>>, Ending),
    /// This owner has lost its grant, for this reason: the store's word, or the clock's.
    Lost(OwnerId, LockLost),
    /// The section that ran under this owner's grant has reached its limit, if it is still the same;
    /// or it is time to look at its delivery.
    Limit(OwnerId),
    /// It is as late as it was [asked for](Action::WakeAt).
    Time(Moment),
    /// Nothing more is to be started.
    Drain,
}

/// How a guard ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Given back in order.
    Released,
    /// Given back in order, though what ran under it failed: nothing keeps it for its least time.
    Failed,
    /// Its turn never reached anybody: it was told to one who had left.
    Unheard,
    /// Dropped, perhaps in the middle of something (I10).
    Dropped,
}

/// Who is before one that has left.
#[derive(Clone, Debug)]
pub struct Ahead {
    /// How long the holder's lease runs, as things stand.
    pub lease_left: Duration,
    /// How many would have been served first, the holder included.
    pub places: usize,
    /// The store does not answer, so that nobody knows.
    pub silent: Option<StoreError>,
    /// Somebody has the key, or its turn, as far as is known here.
    pub is_taken: bool,
}

/// What an event needs beside itself.
#[derive(Debug)]
pub struct Context<'a, D: DriverTypes> {
    /// What is talked about.
    pub key: &'a LockKey,
    /// When it happens.
    pub now: &'a Now<'a>,
    /// Where new ids come from.
    pub ids: &'a OwnerIds,
    /// What the store is asked for.
    pub lease: LeaseBounds,
    /// How long one call of the store may take.
    pub call_timeout: Duration,
    /// How many wait in this process.
    pub waiting: usize,
    /// Whether one more attempt may begin: I2, its way back is reserved first.
    pub way_back: bool,
    /// Whether one more offer to an id that is not known may be released.
    pub stray_room: bool,
    /// When messages were last known to be lost.
    pub gap_at: Option<Moment>,
    /// Why the newest release that failed did; of all keys.
    pub release_error: &'a mut Option<StoreError>,
    /// What is to be done.
    pub actions: &'a mut Actions<D>,
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
        self.attempt.as_ref().is_some_and(|attempt| matches!(attempt.state, State::InLine))
    }

    /// Whether something of this id may be in the store still.
    #[cfg(any(test, feature = "test-util"))]
    pub fn knows(&self, id: &OwnerId) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| attempt.is(id))
            || self.give_backs.iter().any(|give_back| give_back.owner == *id)
    }

    /// How often this owner has the key now.
    pub fn holds(&self, owner: &Owner, now: Moment) -> u32 {
        let running = self.running().filter(|running| running.owner.as_ref() == Some(owner));
        running.map_or(0, |running| running.holds(now))
    }

    /// How often this section is held now.
    pub fn holds_of(&self, section: &Arc<Section<D>>, now: Moment) -> u32 {
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

    fn time(&mut self, at: Moment, cx: &mut Context<'_, D>) {
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
    pub fn disarm(&mut self, at: Moment) {
        self.armed.take_if(|armed| *armed == at);
    }

    fn drain(&mut self, cx: &mut Context<'_, D>) {
        self.draining = true;
        self.refuse_line(cx, |_| LockError::ShuttingDown);
        self.end_if_unwanted(cx);
    }
}

impl Ahead {
    /// The answer of a call whose wait is over. The call itself knows how long that was.
    pub(in crate::lock) fn time_is_over(self) -> LockError {
        let Self { lease_left, places, silent, is_taken: _ } = self;
        match silent {
            Some(error) => error.into(),
            None => LockError::TimedOut { waited: Duration::ZERO, lease_left, ahead: places },
        }
    }
}

impl<D: DriverTypes> Context<'_, D> {
    /// Numbers of calls are never used again, not even by another conversation about the same key.
    fn call(&self, owner: &OwnerId, verb: Verb) -> Call {
        Call { number: self.ids.next_call(), owner: owner.clone(), verb }
    }

    fn now(&self) -> Moment {
        self.now.get()
    }

    /// Whether one more may wait in this process.
    fn has_room(&self) -> bool {
        self.waiting < LINE_PER_PROCESS
    }

    /// How many may wait for one key now. It shrinks with what is left of the bound of the process
    /// (a dynamic threshold, Choudhury and Hahne 1998), so that a flood on some keys always leaves
    /// room for others; and never below one.
    fn share_of_key(&self) -> usize {
        let left = (LINE_PER_PROCESS - LINE_RESERVE).saturating_sub(self.waiting);
        (left / LINE_SHARE_DIVISOR).clamp(1, LINE_PER_KEY)
    }

    /// After this time without a reply, one call and one repeat, those who wait are told so.
    fn store_timeout(&self) -> Duration {
        2 * self.call_timeout
    }

    fn die(&self) -> f64 {
        self.ids.die()
    }

    fn refuse(&mut self, request: Request<D::Waiter>, error: LockError) {
        self.actions.push(Action::Refuse(request.waiter, error));
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
