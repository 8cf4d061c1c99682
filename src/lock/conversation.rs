//! The conversation about one key: who in this process wants it, what the store is asked for them, and whose turn it is.
//!
//! Pure: events in, actions out, time as an argument. Nothing here waits, wakes or asks by itself, so whatever drives it (the
//! [shell](super::drive), a simulator) sees the same decisions.
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

use std::{sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::{
    LockError, LockLost,
    attempt::{Attempt, GiveBack, Held, Running, State, backoff},
    grant::Grant,
    line::Line,
    owner::Owner,
    section::Section,
    terms::Terms,
};
use crate::{
    clock::{Moment, Now},
    defaults::{
        HAND_OVER_SECTIONS, HAND_OVER_TIME, LEASE, LINE_PER_KEY, LOCK_DELAY, MIN_RUN_DIVISOR, PLACE, STORE_CALL,
        STORE_TIMEOUT,
    },
    key::LockKey,
    lease::{FencingToken, OwnerId, OwnerIds},
    store::{Acquired, IfHeld, Released, StoreError, StoreErrorKind, Yielded},
};

/// One key in this process. `W` is whoever waits, and nothing here looks into it.
#[derive(Debug)]
pub struct Conversation<W> {
    /// Who waits, in order.
    line: Line<W>,
    attempt: Option<Attempt>,
    /// What is over, and not known to be given back.
    give_backs: SmallVec<[GiveBack; 1]>,
    /// The one of those that the next attempt waits for: until it is answered for the first time.
    closing: Option<u64>,
    /// Nothing more is started.
    draining: bool,
    /// The earliest moment at which somebody was asked to wake us.
    armed: Option<Moment>,
}

/// One who asks for the key.
#[derive(Debug)]
pub struct Request<W> {
    /// Who is told.
    pub waiter: W,
    /// Whether it waits while somebody else has the key; else it is refused.
    pub waits: bool,
    /// Under whose name it re-enters what is held already.
    pub owner: Option<Owner>,
    /// On which terms it will hold the key.
    pub terms: Terms,
}

/// What is to be done now, in this order.
#[derive(Debug)]
pub enum Action<W> {
    /// The store is to be asked; its answer comes back under this number.
    Send(Call),
    /// It is this one's turn.
    Start(W, Arc<Section>),
    /// It will not be this one's turn.
    Refuse(W, LockError),
    /// To be renewed from now on; or to be looked at earlier than was thought.
    Watch(Arc<Grant>),
    /// Not to be renewed any more.
    Forget(Arc<Grant>),
    /// What became of the give-back of this section, for whoever waits to hear it.
    Outcome(Arc<Section>, Result<Released, StoreError>),
    /// To be [woken](Event::Time) at this moment.
    WakeAt(Moment),
}

/// The actions of one event.
pub type Actions<W> = SmallVec<[Action<W>; 2]>;

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
pub enum Event<W> {
    /// Somebody wants the key; the number is its place, should it have to wait.
    Request(u64, Request<W>),
    /// An `acquire` has ended.
    Acquired(u64, Result<Acquired, StoreError>),
    /// A `yield_to_line` has ended.
    Yielded(u64, Result<Yielded, StoreError>),
    /// A `release` has ended.
    Released(u64, Result<Released, StoreError>),
    /// The store says that this owner's turn has come (I7: a hint).
    Offered(OwnerId),
    /// What the store says may have been lost.
    Gap,
    /// A guard of this section was given back in order, or not.
    GuardEnded(Arc<Section>, Ending),
    /// This owner has lost its grant, for this reason.
    Lost(OwnerId, LockLost),
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
}

/// What an event needs beside itself.
#[derive(Debug)]
pub struct Context<'a, W> {
    /// What is talked about.
    pub key: &'a LockKey,
    /// When it happens.
    pub now: &'a Now<'a>,
    /// Where new ids come from.
    pub ids: &'a OwnerIds,
    /// Whether one more may wait in this process.
    pub room: bool,
    /// Whether one more attempt may begin: I2, its way back is reserved first.
    pub way_back: bool,
    /// What is to be done.
    pub actions: &'a mut Actions<W>,
}

impl<W> Conversation<W> {
    /// Nobody has said anything yet.
    pub fn new(draining: bool) -> Self {
        Self { line: Line::new(), attempt: None, give_backs: SmallVec::new(), closing: None, draining, armed: None }
    }

    /// Something has happened.
    pub fn on(&mut self, event: Event<W>, cx: &mut Context<'_, W>) {
        match event {
            Event::Request(number, request) => self.request(number, request, cx),
            Event::Acquired(number, answer) => self.acquired(number, answer, cx),
            Event::Yielded(number, answer) => self.yielded(number, answer, cx),
            Event::Released(number, answer) => self.released(number, answer, cx),
            Event::Offered(owner) => self.offered(&owner, cx),
            Event::Gap => self.hint(cx),
            Event::GuardEnded(section, ending) => {
                self.guard_ended(&section, ending, cx);
            }
            Event::Lost(owner, why) => self.lost(&owner, why, cx),
            Event::Time(at) => self.time(at, cx),
            Event::Drain => self.drain(cx),
        }
        self.arm(cx);
    }

    /// Nobody wants the key any more, and nothing of us is left in the store.
    pub fn is_over(&self) -> bool {
        self.attempt.is_none() && self.give_backs.is_empty() && self.line.is_empty()
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// How many ids are given back, and not known to be.
    pub fn giving_back(&self) -> usize {
        self.give_backs.len()
    }

    /// How often this owner has the key now.
    pub fn holds(&self, owner: &Owner) -> u32 {
        self.running().filter(|running| running.owner.as_ref() == Some(owner)).map_or(0, |running| running.holds)
    }

    /// How often this section is held now.
    pub fn holds_of(&self, section: &Arc<Section>) -> u32 {
        self.running().filter(|running| running.is(section)).map_or(0, |running| running.holds)
    }

    /// Whether a section runs.
    pub fn is_held(&self) -> bool {
        self.running().is_some()
    }

    fn running(&self) -> Option<&Running> {
        self.attempt.as_ref()?.running()
    }

    // --- those who want the key -----------------------------------------------------------------------------------

    fn request(&mut self, number: u64, request: Request<W>, cx: &mut Context<'_, W>) {
        let Some(request) = self.reenter(request, cx) else { return };
        if self.draining {
            return cx.refuse(request, LockError::ShuttingDown);
        }
        if !request.waits {
            self.notice_loss(cx);
            if self.is_taken() {
                let ahead = self.ahead(self.line.len(), cx.now());
                return cx.refuse(request, refused(ahead.lease_left, ahead.places));
            }
        }
        // The first of the line is the one for whom the store is asked.
        let places = LINE_PER_KEY + usize::from(!self.is_held());
        if self.line.len() >= places || !cx.room {
            let ahead = self.ahead(self.line.len(), cx.now());
            // One that does not wait is one of many that ask at the same moment: one of those will have it.
            let error = if request.waits {
                LockError::LineFull { ahead: ahead.places }
            } else {
                refused(ahead.lease_left, ahead.places)
            };
            return cx.refuse(request, error);
        }
        self.line.push(number, request);
        self.start_attempt(cx);
    }

    /// Somebody who has the key already has it once more.
    fn reenter(&mut self, request: Request<W>, cx: &mut Context<'_, W>) -> Option<Request<W>> {
        let Some(owner) = request.owner.as_ref().filter(|owner| !owner.is_retired()) else { return Some(request) };
        if self.holds(owner) > 0 {
            self.notice_loss(cx);
        }
        let Some(Attempt { state: State::Held(held), .. }) = &mut self.attempt else { return Some(request) };
        match &mut held.running {
            Some(running) if running.owner.as_ref() == Some(owner) => {
                running.holds += 1;
                cx.actions.push(Action::Start(request.waiter, Arc::clone(&running.section)));
                None
            }
            _ => Some(request),
        }
    }

    /// Somebody has the key, here or elsewhere, as far as we know; or has its turn in this moment.
    fn is_taken(&self) -> bool {
        self.attempt.as_ref().is_some_and(|attempt| !matches!(attempt.state, State::Asking))
    }

    /// Whoever has this place has left. Who was before it; `None`: it was not in the line any more, because it was told.
    pub fn leave(&mut self, number: u64, cx: &mut Context<'_, W>) -> Option<Ahead> {
        let at = self.line.find(number)?;
        let ahead = self.ahead(at, cx.now());
        self.line.remove(at)?;
        self.end_if_unwanted(cx);
        Some(ahead)
    }

    fn ahead(&self, in_line: usize, now: Moment) -> Ahead {
        let lease_left = match self.attempt.as_ref().map(|attempt| (&attempt.state, attempt)) {
            Some((State::Held(held) | State::Yielding { held, .. }, _)) => held.grant.remaining(now),
            Some((_, attempt)) => attempt.held_until.since(now),
            None => Duration::ZERO,
        };
        let silent = self.attempt.as_ref().and_then(Attempt::silent);
        Ahead { lease_left, places: in_line + 1, silent }
    }

    /// Nobody wants what we ask for.
    fn end_if_unwanted(&mut self, cx: &mut Context<'_, W>) {
        if self.line.is_empty() && self.attempt.as_ref().is_some_and(Attempt::waits_for_its_turn) {
            self.end(Duration::ZERO, None, cx);
        }
    }

    fn refuse_line(&mut self, cx: &mut Context<'_, W>, error: impl Fn(usize) -> LockError) {
        let mut ahead = 0;
        while let Some(request) = self.line.pop() {
            ahead += 1;
            cx.refuse(request, error(ahead));
        }
    }

    /// Those who do not wait: somebody else has its turn.
    fn refuse_those_who_do_not_wait(&mut self, cx: &mut Context<'_, W>, error: impl Fn(Duration, usize) -> LockError) {
        let lease_left = self.ahead(0, cx.now()).lease_left;
        while let Some((at, request)) = self.line.remove_impatient() {
            cx.refuse(request, error(lease_left, at + 1));
        }
    }

    // --- asking the store -----------------------------------------------------------------------------------------

    /// Single flight: one attempt, however many want the key. A client that saw its own answer end waits for that give-back.
    fn start_attempt(&mut self, cx: &mut Context<'_, W>) {
        if self.attempt.is_some() || self.closing.is_some() || self.line.is_empty() {
            return;
        }
        if !cx.way_back {
            let error = StoreError::new("lock", "release", StoreErrorKind::Unavailable);
            return self.refuse_line(cx, |_| error.clone().into());
        }
        self.attempt = Some(Attempt::new(cx.ids.next()));
        self.ask(cx);
    }

    fn ask(&mut self, cx: &mut Context<'_, W>) {
        let Some(attempt) = &mut self.attempt else { return };
        attempt.lines_up |= self.line.has_patient();
        let delay = self.line.requests().map(|request| request.terms.lock_delay).fold(LOCK_DELAY, Duration::max);
        let if_held = if attempt.lines_up { IfHeld::LineUp } else { IfHeld::Refuse };
        let call = cx.call(&attempt.owner, Verb::Acquire { if_held, lease: LEASE + delay });
        attempt.calls.begin(call.number, cx.now());
        attempt.hinted = false;
        attempt.ask_at = None;
        cx.actions.push(Action::Send(call));
    }

    fn acquired(&mut self, number: u64, answer: Result<Acquired, StoreError>, cx: &mut Context<'_, W>) {
        let ours = self.attempt.as_mut().and_then(|attempt| attempt.calls.ended(number));
        match ours {
            Some(asked) => self.word(asked, answer, cx),
            None => self.late_word(number, answer.is_err(), cx),
        }
    }

    /// The store's word for the attempt that goes on.
    fn word(&mut self, asked: Moment, answer: Result<Acquired, StoreError>, cx: &mut Context<'_, W>) {
        let Some(attempt) = &mut self.attempt else { return };
        if answer.is_ok() {
            attempt.calls.answered();
        }
        match answer {
            Ok(Acquired::Granted { fence }) => self.granted(asked, fence, cx),
            Ok(Acquired::InLine { lease_left, before: _ }) => {
                attempt.state = State::InLine;
                attempt.held_until = cx.now().after(lease_left);
                attempt.check_in(cx.now(), lease_left, cx.die());
                let hinted = attempt.hinted;
                self.refuse_those_who_do_not_wait(cx, refused);
                self.end_if_unwanted(cx);
                if hinted {
                    self.ask(cx);
                }
            }
            Ok(Acquired::Held { lease_left }) => {
                attempt.held_until = cx.now().after(lease_left);
                self.refuse_those_who_do_not_wait(cx, refused);
                if self.line.is_empty() {
                    self.nothing_left(cx);
                } else {
                    // Somebody who waits has come meanwhile.
                    self.ask(cx);
                }
            }
            Ok(Acquired::LineFull { .. }) => {
                self.refuse_line(cx, |ahead| LockError::LineFull { ahead });
                self.nothing_left(cx);
            }
            Err(error) => {
                let again =
                    if error.may_pass() { attempt.calls.failed(&error, asked, cx.now(), cx.die()) } else { None };
                match again {
                    Some(again) => attempt.ask_at = Some(again),
                    None => self.give_up(&error, asked, cx),
                }
            }
        }
    }

    fn give_up(&mut self, error: &StoreError, asked: Moment, cx: &mut Context<'_, W>) {
        if let Some(attempt) = &mut self.attempt {
            let _ = attempt.calls.failed(error, asked, cx.now(), 0.0);
        }
        self.refuse_line(cx, |_| error.clone().into());
        self.end(Duration::ZERO, None, cx);
    }

    /// The attempt is over, and the store has nothing of it; unless something is still under way.
    fn nothing_left(&mut self, cx: &mut Context<'_, W>) {
        if self.attempt.as_ref().is_some_and(|attempt| attempt.calls.void_at.is_some_and(|void_at| void_at > cx.now()))
        {
            return self.end(Duration::ZERO, None, cx);
        }
        self.attempt = None;
        self.start_attempt(cx);
    }

    /// A hint concerns this owner: it asks before anything runs (I7).
    fn offered(&mut self, owner: &OwnerId, cx: &mut Context<'_, W>) {
        match &self.attempt {
            Some(attempt) if attempt.owner == *owner => self.hint(cx),
            Some(Attempt { state: State::Yielding { next, .. }, .. }) if next == owner => {
                if let Some(attempt) = &mut self.attempt {
                    attempt.hinted = true;
                }
            }
            _ if self.give_backs.iter().any(|give_back| give_back.owner == *owner) => {}
            // Long forgotten: what was offered to it is not to wait for its end.
            _ => self.give_back(GiveBack::new(owner.clone(), Duration::ZERO, cx.now()), cx),
        }
    }

    fn hint(&mut self, cx: &mut Context<'_, W>) {
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.waits_for_its_turn()) else { return };
        if attempt.calls.number().is_some() {
            attempt.hinted = true;
        } else {
            self.ask(cx);
        }
    }

    // --- holding --------------------------------------------------------------------------------------------------

    fn granted(&mut self, asked: Moment, fence: u64, cx: &mut Context<'_, W>) {
        let Some(attempt) = &mut self.attempt else { return };
        let Some(token) = FencingToken::of_grant(fence) else {
            let error = StoreError::new("lock", "acquire", StoreErrorKind::Protocol);
            return self.give_up(&error, asked, cx);
        };
        let grant = Arc::new(Grant::new(cx.key.clone(), attempt.owner.clone(), token, asked));
        if grant.remaining(cx.now()) < LEASE / MIN_RUN_DIVISOR {
            // It took too long to hear of it: given back, and asked for again.
            return self.end(Duration::ZERO, None, cx);
        }
        attempt.ask_at = None;
        attempt.state =
            State::Held(Held { grant: Arc::clone(&grant), token, since: cx.now(), sections: 0, running: None });
        self.next_section(true, cx);
    }

    /// The first of the line has its turn, with all others of the same owner. Nobody is there: the key is given back.
    fn next_section(&mut self, watch: bool, cx: &mut Context<'_, W>) {
        let Some(Attempt { state: State::Held(held), .. }) = &mut self.attempt else { return };
        let Some(request) = self.line.pop() else {
            return self.end(Duration::ZERO, None, cx);
        };
        let token = held.token.of_section(held.sections);
        held.sections += 1;
        let looked_at = held.grant.look_at();
        let section = Arc::new(Section::new(Arc::clone(&held.grant), token, request.terms, cx.now()));
        if watch || held.grant.look_at() < looked_at {
            cx.actions.push(Action::Watch(Arc::clone(&held.grant)));
        }
        let owner = request.owner.filter(|owner| !owner.is_retired());
        let mut holds = 1;
        cx.actions.push(Action::Start(request.waiter, Arc::clone(&section)));
        if let Some(owner) = &owner {
            while let Some(request) = self.line.remove_of(owner) {
                holds += 1;
                cx.actions.push(Action::Start(request.waiter, Arc::clone(&section)));
            }
        }
        held.running = Some(Running { section, owner, holds, abnormal: false });
        self.refuse_those_who_do_not_wait(cx, refused);
    }

    /// A guard is given back. What became of it; `None`: the store is asked, and the [outcome](Action::Outcome) follows.
    pub fn guard_ended(&mut self, section: &Arc<Section>, ending: Ending, cx: &mut Context<'_, W>) -> Option<Released> {
        self.notice_loss(cx);
        let Some(Attempt { state: State::Held(held), .. }) = &mut self.attempt else { return Some(Released::NotOwner) };
        let Some(running) = held.running.as_mut().filter(|running| running.is(section)) else {
            // Lost before, and given back then.
            return Some(Released::NotOwner);
        };
        running.abnormal |= ending == Ending::Dropped;
        running.holds -= 1;
        if running.holds > 0 {
            return Some(Released::StillHeld);
        }
        let abnormal = running.abnormal;
        held.running = None;
        section.end(LockLost::GivenBack);
        let keep_taken = match ending {
            // I10: a statement of it may be on its way still.
            _ if abnormal => section.terms.lock_delay,
            Ending::Released => section.terms.still_to_hold(section.began, cx.now()),
            Ending::Failed | Ending::Dropped => Duration::ZERO,
        };
        if abnormal || !keep_taken.is_zero() || self.line.is_empty() {
            self.end(keep_taken, Some(Arc::clone(section)), cx);
            return None;
        }
        self.hand_over(cx);
        Some(Released::HandedOn)
    }

    /// The section has ended, and somebody here waits: no round trip, unless others may have waited for long enough.
    fn hand_over(&mut self, cx: &mut Context<'_, W>) {
        let Some(Attempt { state: State::Held(held), .. }) = &self.attempt else { return };
        let is_ours = cx.now().since(held.since) < HAND_OVER_TIME
            && held.sections < HAND_OVER_SECTIONS
            && held.grant.remaining(cx.now()) >= LEASE / MIN_RUN_DIVISOR;
        if is_ours { self.next_section(false, cx) } else { self.yield_turn(cx) }
    }

    fn yield_turn(&mut self, cx: &mut Context<'_, W>) {
        let Some(attempt) = self.attempt.take() else { return };
        let State::Held(held) = attempt.state else { unreachable!("yielded while it is held") };
        let next = cx.ids.next();
        let call = cx.call(&attempt.owner, Verb::Yield { next: next.clone(), lease: LEASE + LOCK_DELAY });
        let mut attempt = Attempt { state: State::Yielding { held, next }, ..attempt };
        attempt.calls.begin(call.number, cx.now());
        attempt.hinted = false;
        self.attempt = Some(attempt);
        cx.actions.push(Action::Send(call));
    }

    fn yielded(&mut self, number: u64, answer: Result<Yielded, StoreError>, cx: &mut Context<'_, W>) {
        let Some(mut attempt) = self.attempt.take_if(|attempt| attempt.calls.number() == Some(number)) else { return };
        let asked = attempt.calls.ended(number).unwrap_or(cx.now());
        let State::Yielding { mut held, next } = attempt.state else { unreachable!("it was asked to yield") };
        let token = match &answer {
            Ok(Yielded::Extended { fence }) => FencingToken::of_grant(*fence),
            _ => None,
        };
        if let Some(token) = token {
            held.grant.extend(asked, cx.now());
            held.grant.refence(token);
            attempt.calls.answered();
            let lost = held.grant.remaining(cx.now()).is_zero();
            let held = Held { token, since: cx.now(), sections: 0, ..held };
            self.attempt = Some(Attempt { state: State::Held(held), ..attempt });
            return if lost { self.end(Duration::ZERO, None, cx) } else { self.next_section(false, cx) };
        }
        // The old id is over. What becomes of the new one?
        held.grant.end(LockLost::GivenBack);
        held.running = None;
        cx.actions.push(Action::Forget(held.grant));
        let hinted = attempt.hinted;
        let mut new = Attempt::new(next);
        new.lines_up = true;
        new.hinted = hinted;
        match answer {
            Ok(Yielded::Over(acquired)) => {
                self.attempt = Some(new);
                self.word(asked, Ok(acquired), cx);
            }
            // Not known: the old one is given back, and the new one asks.
            answer => {
                let unknown = || StoreError::new("lock", "yield", StoreErrorKind::Protocol);
                let error = answer.err().unwrap_or_else(unknown);
                let old = GiveBack { void_at: Some(asked), ..GiveBack::new(attempt.owner, Duration::ZERO, cx.now()) };
                let _ = new.calls.failed(&error, asked, cx.now(), 0.0);
                self.attempt = Some(new);
                self.give_back(old, cx);
                if self.line.is_empty() { self.end(Duration::ZERO, None, cx) } else { self.ask(cx) }
            }
        }
    }

    /// What is past its deadline or its limit is lost, whoever looks first.
    fn notice_loss(&mut self, cx: &mut Context<'_, W>) {
        let lost = match self.attempt.as_ref().map(|attempt| (attempt, &attempt.state)) {
            Some((attempt, State::Held(held))) => {
                let over = match &held.running {
                    Some(running) => running.section.remaining(cx.now()).is_zero().then(|| running.section.why()),
                    None => held.grant.remaining(cx.now()).is_zero().then(|| held.grant.why()),
                };
                over.map(|why| (attempt.owner.clone(), why.unwrap_or(LockLost::Unrenewed)))
            }
            _ => None,
        };
        if let Some((owner, why)) = lost {
            self.lost(&owner, why, cx);
        }
    }

    /// Whoever waits here asks anew, under another id, in the same order.
    fn lost(&mut self, owner: &OwnerId, why: LockLost, cx: &mut Context<'_, W>) {
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.owner == *owner) else { return };
        let delay = match &mut attempt.state {
            State::Held(held) => {
                let running = held.running.take();
                if let Some(running) = &running {
                    running.section.end(held.grant.why().unwrap_or(why));
                }
                held.grant.end(why);
                running.map_or(Duration::ZERO, |running| running.section.terms.lock_delay)
            }
            // Nothing runs; the answer that is awaited says what is left of it.
            State::Yielding { held, .. } => return held.grant.end(why),
            State::Asking | State::InLine => return,
        };
        self.end(delay, None, cx);
    }

    // --- giving back ----------------------------------------------------------------------------------------------

    /// The attempt is over, in whatever state it is (I9: here, and nowhere else).
    fn end(&mut self, keep_taken: Duration, section: Option<Arc<Section>>, cx: &mut Context<'_, W>) {
        let Some(attempt) = self.attempt.take() else { return };
        let Attempt { owner, state, calls, .. } = attempt;
        let expects = calls.number();
        let mut give_back = GiveBack { void_at: calls.void_at, section, ..GiveBack::new(owner, keep_taken, cx.now()) };
        match state {
            State::Asking | State::InLine => give_back.expects = expects,
            State::Held(held) | State::Yielding { held, .. } => {
                // First of all: nobody here claims to have it any more.
                held.grant.end(LockLost::GivenBack);
                cx.actions.push(Action::Forget(held.grant));
            }
        }
        self.closing = Some(give_back.owner.number());
        self.give_back(give_back, cx);
    }

    fn give_back(&mut self, mut give_back: GiveBack, cx: &mut Context<'_, W>) {
        if give_back.expects.is_none() {
            send_release(&mut give_back, cx);
        }
        self.give_backs.push(give_back);
    }

    /// An answer for an id that is over already: now it is known what there is to be given back.
    fn late_word(&mut self, number: u64, unknown: bool, cx: &mut Context<'_, W>) {
        let Some(give_back) = self.give_backs.iter_mut().find(|give_back| give_back.expects == Some(number)) else {
            return;
        };
        give_back.expects = None;
        if unknown {
            let void_at = cx.now().after(STORE_CALL);
            give_back.void_at = Some(give_back.void_at.map_or(void_at, |earlier| earlier.max(void_at)));
        }
        send_release(give_back, cx);
    }

    fn released(&mut self, number: u64, answer: Result<Released, StoreError>, cx: &mut Context<'_, W>) {
        let Some(at) = self.give_backs.iter().position(|give_back| give_back.sending == Some(number)) else { return };
        let give_back = &mut self.give_backs[at];
        give_back.sending = None;
        let closes = self.closing == Some(give_back.owner.number());
        let was_silent = answer.is_err() && cx.now().since(give_back.began) >= STORE_TIMEOUT;
        if closes && (answer.is_ok() || was_silent) {
            self.closing = None;
        }
        if let Some(section) = give_back.section.take() {
            cx.actions.push(Action::Outcome(section, answer.clone()));
        }
        let give_up_at = give_back.began.after(LEASE + LOCK_DELAY + PLACE);
        match answer {
            Ok(_) => match give_back.void_at.filter(|void_at| *void_at > cx.now()) {
                // What got no answer may be done yet: once more, when it cannot (I8).
                Some(void_at) => {
                    give_back.keep_taken = Duration::ZERO;
                    give_back.again_at = Some(void_at.after(Duration::from_millis(1)));
                }
                None => {
                    self.give_backs.remove(at);
                }
            },
            Err(error) => {
                give_back.failures += 1;
                give_back.again_at = Some(cx.now().after(backoff(give_back.failures, cx.die())));
                // By then its lease is over, and so is its place.
                if cx.now() >= give_up_at {
                    self.give_backs.remove(at);
                }
                if closes && was_silent {
                    // They waited for us alone: whose the key is, nobody knows.
                    self.refuse_those_who_do_not_wait(cx, |_, _| error.clone().into());
                }
            }
        }
        self.start_attempt(cx);
    }

    // --- time, and the end ----------------------------------------------------------------------------------------

    fn time(&mut self, at: Moment, cx: &mut Context<'_, W>) {
        self.disarm(at);
        for give_back in &mut self.give_backs {
            if give_back.again_at.is_some_and(|at| at <= cx.now()) {
                give_back.again_at = None;
                send_release(give_back, cx);
            }
        }
        let Some(attempt) = self.attempt.as_ref().filter(|attempt| attempt.waits_for_its_turn()) else { return };
        if let Some(error) = attempt.calls.gives_up(cx.now()) {
            // A call that is under way is waited for by the give-back.
            self.refuse_line(cx, |_| error.clone().into());
            self.end(Duration::ZERO, None, cx);
        } else if attempt.ask_at.is_some_and(|at| at <= cx.now()) {
            self.ask(cx);
        }
    }

    /// Asks to be woken, if nobody was asked to do so early enough.
    fn arm(&mut self, cx: &mut Context<'_, W>) {
        let asks = self.attempt.iter().flat_map(|attempt| [attempt.ask_at, attempt.gives_up_at()]).flatten();
        let Some(next) = asks.chain(self.give_backs.iter().filter_map(|give_back| give_back.again_at)).min() else {
            return;
        };
        if self.armed.is_none_or(|armed| next < armed) {
            self.armed = Some(next);
            cx.actions.push(Action::WakeAt(next));
        }
    }

    /// Nobody will wake us at this moment any more. One that was asked for an earlier moment still will.
    pub fn disarm(&mut self, at: Moment) {
        self.armed.take_if(|armed| *armed == at);
    }

    fn drain(&mut self, cx: &mut Context<'_, W>) {
        self.draining = true;
        self.refuse_line(cx, |_| LockError::ShuttingDown);
        self.end_if_unwanted(cx);
    }
}

fn refused(lease_left: Duration, ahead: usize) -> LockError {
    LockError::Held { lease_left, ahead }
}

/// I1: names the id that it gives back.
fn send_release<W>(give_back: &mut GiveBack, cx: &mut Context<'_, W>) {
    if give_back.sending.is_none() {
        let call = cx.call(&give_back.owner, Verb::Release { keep_taken: give_back.keep_taken });
        give_back.sending = Some(call.number);
        cx.actions.push(Action::Send(call));
    }
}

impl<W> Context<'_, W> {
    /// Numbers of calls are never used again, not even by another conversation about the same key.
    fn call(&self, owner: &OwnerId, verb: Verb) -> Call {
        Call { number: self.ids.next_call(), owner: owner.clone(), verb }
    }

    fn now(&self) -> Moment {
        self.now.get()
    }

    fn die(&self) -> f64 {
        self.ids.die()
    }

    fn refuse(&mut self, request: Request<W>, error: LockError) {
        self.actions.push(Action::Refuse(request.waiter, error));
    }
}
