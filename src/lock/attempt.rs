//! One try to have one key: its id, what the store was asked, and what it said. Pure: time is an argument.

use std::{sync::Arc, time::Duration};

use super::{conversation::DriverTypes, grant::Grant, owner::Owner, section::Section};
use crate::{
    clock::Moment,
    defaults::{CHECK_IN, LOCK_DELAY, PLACE, RETRY_MAX, RETRY_MIN},
    lease::{FencingToken, OwnerId},
    store::{StoreError, StoreErrorKind},
};

/// One owner id, from the first question to the moment in which nothing of it can be left in the store.
#[derive(Debug)]
pub(super) struct Attempt<D: DriverTypes> {
    pub(super) owner: OwnerId,
    pub(super) state: State<D>,
    /// It asked for a place in the line. Once it has, it does so for ever: a place must not be lost by a question.
    pub(super) lines_up: bool,
    pub(super) calls: Calls,
    /// A hint has come while a call is under way: its answer may be older than the hint.
    pub(super) hinted: bool,
    /// The key was taken away while a call is under way: the grant that it answers may be the one that is over.
    pub(super) taken_away: bool,
    /// That was asked about once. A flood of messages must not keep it from beginning.
    pub(super) checked: bool,
    /// What the store was asked for.
    pub(super) lease: Duration,
    /// How long the store was asked to keep the key beyond the lease.
    pub(super) lock_delay: Duration,
    /// When to ask again.
    pub(super) ask_at: Option<Moment>,
    /// When the store said where it stands in the line.
    pub(super) heard_at: Moment,
    /// Until when somebody else has the key, as the store said.
    pub(super) held_until: Moment,
}

#[derive(Debug)]
pub(super) enum State<D: DriverTypes> {
    /// The store is asked, for the first time.
    Asking,
    /// It has a place in the store's line.
    InLine,
    /// It has the key.
    Held(Held<D>),
    /// Between two sections: others may have their turn.
    Yielding {
        held: Held<D>,
        next: OwnerId,
        /// A renewal was refused meanwhile: because of the yield, or because of a revocation after
        /// it.
        is_refused: bool,
    },
}

/// What goes on under a grant.
#[derive(Debug)]
pub(super) struct Held<D: DriverTypes> {
    pub(super) grant: Arc<Grant<D>>,
    pub(super) token: FencingToken,
    /// When the store last said that nobody else has its turn.
    pub(super) since: Moment,
    /// How many sections there were under this fence.
    pub(super) sections: u16,
    pub(super) running: Option<Running<D>>,
}

/// The section that runs, and who is in it.
#[derive(Debug)]
pub(super) struct Running<D: DriverTypes> {
    pub(super) section: Arc<Section<D>>,
    pub(super) owner: Option<Owner>,
    pub(super) holds: u32,
    /// One of its guards was dropped.
    pub(super) abnormal: bool,
    /// One of its guards was given back in order.
    pub(super) in_order: bool,
}

/// The calls of one attempt: at most one is under way at a time, and each ends: with an answer, or without one in time.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Its number, and when it was made (I3).
    under_way: Option<(u64, Moment)>,
    /// What got no answer may still be done until this moment.
    pub(super) void_at: Option<Moment>,
    /// Since when the store has not answered, though it was asked.
    silent_since: Option<Moment>,
    /// The same for waiters: a failover error restarts it, because the store is there.
    lost_since: Option<Moment>,
    failures: u32,
    error: Option<StoreError>,
}

/// An attempt that is over and has to be given back (I9): asked for until the store has answered, and once more when
/// nothing of it can be under way any more.
#[derive(Debug)]
pub(super) struct GiveBack<D: DriverTypes> {
    pub(super) owner: OwnerId,
    pub(super) keep_taken: Duration,
    /// The longest lease that may have been asked for.
    pub(super) lease: Duration,
    /// An `acquire` whose answer is awaited first.
    pub(super) expects: Option<u64>,
    /// A `release` is under way.
    pub(super) sending: Option<u64>,
    pub(super) void_at: Option<Moment>,
    /// When the newest `release` was sent.
    pub(super) sent_at: Moment,
    pub(super) began: Moment,
    pub(super) failures: u32,
    pub(super) again_at: Option<Moment>,
    pub(super) error: Option<StoreError>,
    /// Who wants to hear what became of it.
    pub(super) section: Option<Arc<Section<D>>>,
    /// It was offered to an id that nothing is known of any more: its lease is short, and ends it if this does not.
    pub(super) stray: bool,
}

impl<D: DriverTypes> Attempt<D> {
    pub(super) fn new(owner: OwnerId) -> Self {
        Self {
            owner,
            state: State::Asking,
            lines_up: false,
            calls: Calls::default(),
            hinted: false,
            taken_away: false,
            checked: false,
            lease: Duration::ZERO,
            lock_delay: Duration::ZERO,
            ask_at: None,
            heard_at: Moment::default(),
            held_until: Moment::default(),
        }
    }

    /// It goes by this id, or will.
    #[cfg(any(test, feature = "test-util"))]
    pub(super) fn is(&self, id: &OwnerId) -> bool {
        self.owner == *id || matches!(&self.state, State::Yielding { next, .. } if next == id)
    }

    pub(super) fn waits_for_its_turn(&self) -> bool {
        matches!(self.state, State::Asking | State::InLine)
    }

    /// When a request in the queue is to be told that the store is silent. Requests without a wait
    /// are told first, if there are any.
    pub(super) fn gives_up_at(&self, has_impatient: bool, timeout: Duration) -> Option<Moment> {
        if self.waits_for_its_turn() { self.calls.gives_up_at(!has_impatient, timeout) } else { None }
    }

    pub(super) fn running(&self) -> Option<&Running<D>> {
        match &self.state {
            State::Held(held) => held.running.as_ref(),
            _ => None,
        }
    }

    /// Why nobody knows whose the key is: the store has not said a word, or does not answer any more.
    pub(super) fn silent(&self) -> Option<StoreError> {
        let no_word = matches!(self.state, State::Asking);
        let no_answer = || StoreError::new("lock", "acquire", StoreErrorKind::Timeout);
        self.calls.error.clone().or_else(|| no_word.then(no_answer))
    }

    /// When a waiter asks again: about once a second, or when the holder's lease is over.
    pub(super) fn check_in(&mut self, now: Moment, lease_left: Duration, die: f64) {
        let usual = CHECK_IN.mul_f64(0.8 + 0.4 * die);
        // Rounded up: asked within the last millisecond of the lease it would be held once more.
        let free = lease_left.saturating_add(Duration::from_millis(2)).max(RETRY_MIN);
        self.ask_at = Some(now.after(usual.min(free)));
    }
}

impl Calls {
    pub(super) fn begin(&mut self, number: u64, now: Moment) {
        self.under_way = Some((number, now));
        self.silent_since.get_or_insert(now);
        self.lost_since.get_or_insert(now);
    }

    /// The number of the call that is under way.
    pub(super) fn number(&self) -> Option<u64> {
        self.under_way.map(|(number, _)| number)
    }

    /// When the call with this number was made; it is under way no longer. `None`: it is not ours.
    pub(super) fn ended(&mut self, number: u64) -> Option<Moment> {
        let (_, asked) = self.under_way.take_if(|(under_way, _)| *under_way == number)?;
        Some(asked)
    }

    /// There was an answer.
    pub(super) fn answered(&mut self) {
        self.silent_since = None;
        self.lost_since = None;
        self.failures = 0;
        self.error = None;
    }

    /// When it is not worth to ask on, after a first failure: for a request that waits, or for one
    /// that does not.
    fn gives_up_at(&self, waits: bool, timeout: Duration) -> Option<Moment> {
        self.error.as_ref()?;
        let since = if waits { self.lost_since } else { self.silent_since };
        Some(since?.after(timeout))
    }

    /// Why it is not worth to ask on, at this moment.
    pub(super) fn gives_up(&self, now: Moment, waits: bool, timeout: Duration) -> Option<StoreError> {
        self.error.clone().filter(|_| self.gives_up_at(waits, timeout).is_some_and(|at| at <= now))
    }

    /// There was none, so that it may still be done. When to ask again.
    pub(super) fn failed(
        &mut self,
        error: &StoreError,
        asked: Moment,
        call_timeout: Duration,
        now: Moment,
        die: f64,
    ) -> Moment {
        self.error = Some(error.clone());
        let void_at = asked.after(call_timeout);
        self.void_at = Some(self.void_at.map_or(void_at, |earlier| earlier.max(void_at)));
        self.silent_since.get_or_insert(asked);
        if error.is_failover() {
            self.lost_since = None;
        } else {
            self.lost_since.get_or_insert(asked);
        }
        self.failures += 1;
        now.after(backoff(self.failures, die))
    }
}

impl<D: DriverTypes> GiveBack<D> {
    /// By then its lease is over, and so is its place.
    pub(super) fn gives_up_at(&self) -> Moment {
        self.began.after((self.lease + PLACE).saturating_add(self.keep_taken.max(LOCK_DELAY)))
    }

    /// By then whoever waits for it is told that nobody knows.
    pub(super) fn silent_at(&self, timeout: Duration) -> Moment {
        self.began.after(timeout)
    }
}

impl<D: DriverTypes> Running<D> {
    /// Of what is lost, nobody holds anything.
    pub(super) fn holds(&self, now: Moment) -> u32 {
        if self.section.remaining(now).is_zero() { 0 } else { self.holds }
    }

    pub(super) fn is(&self, section: &Arc<Section<D>>) -> bool {
        Arc::ptr_eq(&self.section, section)
    }
}

impl<D: DriverTypes> GiveBack<D> {
    pub(super) fn new(owner: OwnerId, keep_taken: Duration, lease: Duration, began: Moment) -> Self {
        Self {
            owner,
            keep_taken,
            lease,
            expects: None,
            sending: None,
            void_at: None,
            sent_at: began,
            began,
            failures: 0,
            again_at: None,
            error: None,
            section: None,
            stray: false,
        }
    }
}

/// How long to wait after so many failures in a row: doubled each time, and spread.
pub(super) fn backoff(failures: u32, die: f64) -> Duration {
    let doubled = RETRY_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(RETRY_MAX).mul_f64(1.0 + die).min(RETRY_MAX)
}
