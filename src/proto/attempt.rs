//! One acquisition of a key: its id, its state, and the calls that were sent to the store.

use std::{sync::Arc, time::Duration};

use super::{DriverTypes, GuardEnd, grant::Grant, in_flight::InFlight, section::Section};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    fencing::FencingToken,
    limits::{QUEUE_POLL_INTERVAL, RETRY_MIN},
    owner::Owner,
    store::{Demand, NewRecord, StoreError},
    trace::SectionTrace,
};

/// Rounds up the end of a lease or a block: in its last millisecond the reply would be busy once
/// more.
pub(super) const BLOCK_GRACE: Duration = Duration::from_millis(2);

/// One acquisition id, from its first store call to its release.
#[derive(Debug)]
pub(super) struct Attempt<D: DriverTypes> {
    pub(super) id: AcquisitionId,
    pub(super) state: State<D>,
    /// An acquire of this id was sent that enqueues. Every later acquire enqueues, too: otherwise
    /// the store would remove the queue entry.
    pub(super) wants_queue: bool,
    pub(super) in_flight: InFlight,
    /// A call was sent, so that the store may have data of this id.
    pub(super) was_sent: bool,
    /// A message came during the call in flight, whose reply may be older.
    pub(super) recheck_after_reply: bool,
    /// A message that the key may be free came during the call in flight, whose reply may be older.
    pub(super) freed_meanwhile: bool,
    /// A revocation message came during the call in flight: the grant in its reply may be revoked.
    pub(super) revoked_meanwhile: bool,
    /// One more acquire or yield confirms a grant that may be revoked, before each section. Further
    /// messages do not delay that section.
    pub(super) is_verified: bool,
    /// What the last acquire or yield asked of the key.
    pub(super) demand: Demand,
}

/// The calls of an attempt, until it holds the key.
#[derive(Debug, Default)]
pub(super) struct Asking {
    /// The lease of the last acquire or yield.
    pub(super) lease: Duration,
    /// The lock-delay of the last acquire or yield: the store keeps the key for longer than the
    /// lease.
    pub(super) lock_delay: Duration,
    /// The instant of the next acquire.
    pub(super) retry_at: Option<BootInstant>,
    /// Until then a message that the key may be free causes no acquire: this id has repeated one.
    pub(super) next_recheck_at: BootInstant,
    /// The instant of the last reply that queued this id.
    pub(super) last_reply_at: BootInstant,
    /// The end of the holder's lease, by the last reply.
    pub(super) holder_expires_at: BootInstant,
    /// The section of the holder, by the last reply.
    pub(super) held_by: Option<SectionTrace>,
    /// The section before the next one of this process.
    pub(super) ended: Option<SectionTrace>,
}

#[derive(Debug)]
pub(super) enum State<D: DriverTypes> {
    /// The first acquire has no reply yet.
    Requesting,
    /// The id has an entry in the store queue.
    Queued,
    /// The store has granted the key.
    Holding(Holding<D>),
    /// A yield is in flight. No section runs.
    Yielding {
        holding: Holding<D>,
        next_id: Box<AcquisitionId>,
        /// A renewal was refused meanwhile, because of the yield or because of a later revocation.
        is_renewal_refused: bool,
        /// A message meanwhile was about the next id.
        is_next_revoked: bool,
    },
}

/// A grant, and the section that runs under it.
#[derive(Debug)]
pub(super) struct Holding<D: DriverTypes> {
    pub(super) grant: Arc<Grant<D>>,
    pub(super) token: FencingToken,
    /// The start of the batch of local sections: the last grant or extension.
    pub(super) since: BootInstant,
    /// When the call was sent to which the store replied then (I3).
    pub(super) confirmed_at: BootInstant,
    /// The number of sections since then.
    pub(super) sections: u16,
    /// What the grant was asked for.
    pub(super) demand: Demand,
    pub(super) active: Option<ActiveSection<D>>,
}

/// The section that runs, with its owner and hold count.
#[derive(Debug)]
pub(super) struct ActiveSection<D: DriverTypes> {
    pub(super) section: Arc<Section<D>>,
    pub(super) owner: Option<Owner>,
    pub(super) holds: u32,
    /// One of its guards was dropped.
    pub(super) any_dropped: bool,
    /// One of its guards was released in order.
    pub(super) any_released: bool,
    /// The record that one of its guards leaves.
    pub(super) record: Option<Arc<NewRecord>>,
}

impl<D: DriverTypes> Holding<D> {
    /// A grant of the store, before its first section.
    pub(super) fn new(
        grant: Arc<Grant<D>>,
        token: FencingToken,
        demand: Demand,
        confirmed_at: BootInstant,
        since: BootInstant,
    ) -> Self {
        Self { grant, token, since, confirmed_at, sections: 0, demand, active: None }
    }
}

impl<D: DriverTypes> Attempt<D> {
    pub(super) fn new(id: AcquisitionId) -> Self {
        Self {
            id,
            state: State::Requesting,
            wants_queue: false,
            in_flight: InFlight::default(),
            was_sent: false,
            recheck_after_reply: false,
            freed_meanwhile: false,
            revoked_meanwhile: false,
            is_verified: false,
            demand: Demand::new(),
        }
    }

    /// Returns `true` for the id of this attempt, or the next id of its yield.
    #[cfg(any(test, feature = "__internals"))]
    pub(super) fn has_id(&self, id: &AcquisitionId) -> bool {
        self.id == *id || matches!(&self.state, State::Yielding { next_id, .. } if **next_id == *id)
    }

    pub(super) fn is_pending(&self) -> bool {
        matches!(self.state, State::Requesting | State::Queued)
    }

    /// The instant at which requests without a wait are rejected because the store does not reply.
    pub(super) fn fails_at(&self, timeout: Duration) -> Option<BootInstant> {
        if self.is_pending() { self.in_flight.fails_at(timeout) } else { None }
    }

    pub(super) fn active_section(&self) -> Option<&ActiveSection<D>> {
        match &self.state {
            State::Holding(holding) => holding.active.as_ref(),
            _ => None,
        }
    }

    /// Whether the holder is unknown because the first reply is still in time.
    pub(super) fn awaits_first_reply(&self, now: BootInstant, call_timeout: Duration) -> bool {
        matches!(self.state, State::Requesting)
            && self.in_flight.error().is_none()
            && !self.in_flight.is_overdue(now, call_timeout)
    }

    /// The error of the store, if the holder is unknown because of it.
    pub(super) fn store_error(&self) -> Option<StoreError> {
        let has_no_reply = matches!(self.state, State::Requesting);
        let timeout = || StoreError::no_reply("acquire");
        self.in_flight.error().cloned().or_else(|| has_no_reply.then(timeout))
    }
}

impl Asking {
    /// Schedules the next acquire of a queued id: when the store says so, otherwise about a second
    /// later, or when the lease of the holder ends.
    pub(super) fn schedule_poll(
        &mut self,
        now: BootInstant,
        poll_in: Option<Duration>,
        lease_left: Duration,
        jitter: f64,
    ) {
        let interval = QUEUE_POLL_INTERVAL.mul_f64(0.8 + 0.4 * jitter);
        let lease_end = lease_left.saturating_add(BLOCK_GRACE);
        let delay = poll_in.unwrap_or(interval.min(lease_end)).max(RETRY_MIN);
        self.retry_at = Some(now.saturating_add(delay));
    }
}

impl<D: DriverTypes> ActiveSection<D> {
    pub(super) fn new(section: Arc<Section<D>>, owner: Option<Owner>, holds: u32) -> Self {
        Self { section, owner, holds, any_dropped: false, any_released: false, record: None }
    }

    /// The number of guards, zero if the section is lost.
    pub(super) fn hold_count(&self, now: BootInstant) -> u32 {
        if self.section.remaining(now).is_zero() { 0 } else { self.holds }
    }

    pub(super) fn is(&self, section: &Arc<Section<D>>) -> bool {
        Arc::ptr_eq(&self.section, section)
    }

    /// Ends one hold. Returns for how long the key stays blocked, if it was the last one.
    #[inline]
    pub(super) fn end_hold(&mut self, end: GuardEnd, now: BootInstant) -> Option<Duration> {
        let keeps_min_hold = match end {
            GuardEnd::Released | GuardEnd::Kept(_) => true,
            GuardEnd::Recorded(record) => {
                self.record = Some(record);
                true
            }
            GuardEnd::Undelivered => {
                self.section.delivered();
                // Other guards of the same owner may have been received.
                self.any_released
            }
            GuardEnd::Dropped => {
                self.any_dropped = true;
                false
            }
            GuardEnd::ReleasedAfterFailure => false,
        };
        self.any_released |= keeps_min_hold;
        self.holds -= 1;
        (self.holds == 0).then(|| match keeps_min_hold {
            // I10: a statement of the section may still be in flight.
            _ if self.any_dropped => self.section.lock_delay(),
            true => self.section.min_hold_remaining(now),
            false => Duration::ZERO,
        })
    }
}
