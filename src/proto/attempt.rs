//! One try to have one key: its id, what the store was asked, and what it said. Pure: time is an argument.

use std::{sync::Arc, time::Duration};

use super::{DriverTypes, grant::Grant, in_flight::InFlight, section::Section};
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
    pub(super) id: AcquisitionId,
    pub(super) state: State<D>,
    /// It asked for a place in the line. Once it has, it does so for ever: a place must not be lost by a question.
    pub(super) wants_queue: bool,
    pub(super) in_flight: InFlight,
    /// A hint has come while a call is under way: its answer may be older than the hint.
    pub(super) recheck_after_reply: bool,
    /// The key was taken away while a call is under way: the grant that it answers may be the one that is over.
    pub(super) revoked_meanwhile: bool,
    /// That was asked about once. A flood of messages must not keep it from beginning.
    pub(super) is_verified: bool,
    /// What the store was asked for.
    pub(super) lease: Duration,
    /// How long the store was asked to keep the key beyond the lease.
    pub(super) lock_delay: Duration,
    /// When to ask again.
    pub(super) retry_at: Option<BootInstant>,
    /// When the store said where it stands in the line.
    pub(super) last_reply_at: BootInstant,
    /// Until when somebody else has the key, as the store said.
    pub(super) holder_expires_at: BootInstant,
}

#[derive(Debug)]
pub(super) enum State<D: DriverTypes> {
    /// The store is asked, for the first time.
    Requesting,
    /// It has a place in the store's line.
    Queued,
    /// It has the key.
    Holding(Holding<D>),
    /// Between two sections: others may have their turn.
    Yielding {
        holding: Holding<D>,
        next_id: AcquisitionId,
        /// A renewal was refused meanwhile: because of the yield, or because of a revocation after
        /// it.
        is_renewal_refused: bool,
    },
}

/// What goes on under a grant.
#[derive(Debug)]
pub(super) struct Holding<D: DriverTypes> {
    pub(super) grant: Arc<Grant<D>>,
    pub(super) token: FencingToken,
    /// When the store last said that nobody else has its turn.
    pub(super) since: BootInstant,
    /// How many sections there were under this fence.
    pub(super) sections: u16,
    pub(super) active: Option<ActiveSection<D>>,
}

/// The section that runs, and who is in it.
#[derive(Debug)]
pub(super) struct ActiveSection<D: DriverTypes> {
    pub(super) section: Arc<Section<D>>,
    pub(super) owner: Option<Owner>,
    pub(super) holds: u32,
    /// One of its guards was dropped.
    pub(super) any_dropped: bool,
    /// One of its guards was given back in order.
    pub(super) any_released: bool,
}

impl<D: DriverTypes> Attempt<D> {
    pub(super) fn new(owner: AcquisitionId) -> Self {
        Self {
            id: owner,
            state: State::Requesting,
            wants_queue: false,
            in_flight: InFlight::default(),
            recheck_after_reply: false,
            revoked_meanwhile: false,
            is_verified: false,
            lease: Duration::ZERO,
            lock_delay: Duration::ZERO,
            retry_at: None,
            last_reply_at: BootInstant::default(),
            holder_expires_at: BootInstant::default(),
        }
    }

    /// It goes by this id, or will.
    #[cfg(any(test, feature = "__internals"))]
    pub(super) fn has_id(&self, id: &AcquisitionId) -> bool {
        self.id == *id || matches!(&self.state, State::Yielding { next_id, .. } if next_id == id)
    }

    pub(super) fn is_pending(&self) -> bool {
        matches!(self.state, State::Requesting | State::Queued)
    }

    /// When a request in the queue is to be told that the store is silent. Requests without a wait
    /// are told first, if there are any.
    pub(super) fn fails_at(&self, has_impatient: bool, timeout: Duration) -> Option<BootInstant> {
        if self.is_pending() { self.in_flight.fails_at(!has_impatient, timeout) } else { None }
    }

    pub(super) fn active_section(&self) -> Option<&ActiveSection<D>> {
        match &self.state {
            State::Holding(held) => held.active.as_ref(),
            _ => None,
        }
    }

    /// Why nobody knows whose the key is: the store has not said a word, or does not answer any more.
    pub(super) fn store_error(&self) -> Option<StoreError> {
        let no_word = matches!(self.state, State::Requesting);
        let no_answer = || StoreError::new("lock", "acquire", StoreErrorKind::Timeout);
        self.in_flight.error.clone().or_else(|| no_word.then(no_answer))
    }

    /// When a waiter asks again: about once a second, or when the holder's lease is over.
    pub(super) fn schedule_poll(&mut self, now: BootInstant, lease_left: Duration, die: f64) {
        let usual = QUEUE_POLL_INTERVAL.mul_f64(0.8 + 0.4 * die);
        // Rounded up: asked within the last millisecond of the lease it would be held once more.
        let free = lease_left.saturating_add(Duration::from_millis(2)).max(RETRY_MIN);
        self.retry_at = Some(now.saturating_add(usual.min(free)));
    }
}

impl<D: DriverTypes> ActiveSection<D> {
    /// Of what is lost, nobody holds anything.
    pub(super) fn hold_count(&self, now: BootInstant) -> u32 {
        if self.section.remaining(now).is_zero() { 0 } else { self.holds }
    }

    pub(super) fn is(&self, section: &Arc<Section<D>>) -> bool {
        Arc::ptr_eq(&self.section, section)
    }
}
