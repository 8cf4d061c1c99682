//! One try to have one key: its id, what the store was asked, and what it said. Pure: time is an argument.

use std::{sync::Arc, time::Duration};

use super::{DriverTypes, grant::Grant, in_flight::Calls, section::Section};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    fencing::FencingToken,
    limits::{QUEUE_POLL_INTERVAL, RETRY_MIN},
    owner::Owner,
    store::{StoreError, StoreErrorKind},
};

/// One owner id, from the first question to the moment in which nothing of it can be left in the store.
#[derive(Debug)]
pub(super) struct Attempt<D: DriverTypes> {
    pub(super) owner: AcquisitionId,
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
    pub(super) ask_at: Option<BootInstant>,
    /// When the store said where it stands in the line.
    pub(super) heard_at: BootInstant,
    /// Until when somebody else has the key, as the store said.
    pub(super) held_until: BootInstant,
}

#[derive(Debug)]
pub(super) enum State<D: DriverTypes> {
    /// The store is asked, for the first time.
    Asking,
    /// It has a place in the store's line.
    Queued,
    /// It has the key.
    Held(Held<D>),
    /// Between two sections: others may have their turn.
    Yielding {
        held: Held<D>,
        next: AcquisitionId,
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
    pub(super) since: BootInstant,
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

impl<D: DriverTypes> Attempt<D> {
    pub(super) fn new(owner: AcquisitionId) -> Self {
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
            heard_at: BootInstant::default(),
            held_until: BootInstant::default(),
        }
    }

    /// It goes by this id, or will.
    #[cfg(any(test, feature = "__internals"))]
    pub(super) fn is(&self, id: &AcquisitionId) -> bool {
        self.owner == *id || matches!(&self.state, State::Yielding { next, .. } if next == id)
    }

    pub(super) fn waits_for_its_turn(&self) -> bool {
        matches!(self.state, State::Asking | State::Queued)
    }

    /// When a request in the queue is to be told that the store is silent. Requests without a wait
    /// are told first, if there are any.
    pub(super) fn gives_up_at(&self, has_impatient: bool, timeout: Duration) -> Option<BootInstant> {
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
    pub(super) fn check_in(&mut self, now: BootInstant, lease_left: Duration, die: f64) {
        let usual = QUEUE_POLL_INTERVAL.mul_f64(0.8 + 0.4 * die);
        // Rounded up: asked within the last millisecond of the lease it would be held once more.
        let free = lease_left.saturating_add(Duration::from_millis(2)).max(RETRY_MIN);
        self.ask_at = Some(now.saturating_add(usual.min(free)));
    }
}

impl<D: DriverTypes> Running<D> {
    /// Of what is lost, nobody holds anything.
    pub(super) fn holds(&self, now: BootInstant) -> u32 {
        if self.section.remaining(now).is_zero() { 0 } else { self.holds }
    }

    pub(super) fn is(&self, section: &Arc<Section<D>>) -> bool {
        Arc::ptr_eq(&self.section, section)
    }
}
