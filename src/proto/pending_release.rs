//! The release of an acquisition, repeated until the store has replied.

use std::{sync::Arc, time::Duration};

use super::{DriverTypes, section::Section};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    limits::{LOCK_DELAY, QUEUE_ENTRY_TTL},
    store::StoreError,
};

/// An attempt that is over and has to be given back (I9): asked for until the store has answered, and once more when
/// nothing of it can be under way any more.
#[derive(Debug)]
pub(super) struct PendingRelease<D: DriverTypes> {
    pub(super) id: AcquisitionId,
    pub(super) block_for: Duration,
    /// The longest lease that may have been asked for.
    pub(super) lease: Duration,
    /// An `acquire` whose answer is awaited first.
    pub(super) awaited_acquire: Option<u64>,
    /// A `release` is under way.
    pub(super) in_flight: Option<u64>,
    pub(super) in_doubt_until: Option<BootInstant>,
    /// When the newest `release` was sent.
    pub(super) sent_at: BootInstant,
    pub(super) created_at: BootInstant,
    pub(super) failures: u32,
    pub(super) retry_at: Option<BootInstant>,
    pub(super) error: Option<StoreError>,
    /// Who wants to hear what became of it.
    pub(super) section: Option<Arc<Section<D>>>,
    /// It was offered to an id that nothing is known of any more: its lease is short, and ends it if this does not.
    pub(super) is_unclaimed_offer: bool,
}

impl<D: DriverTypes> PendingRelease<D> {
    pub(super) fn new(owner: AcquisitionId, block_for: Duration, lease: Duration, began: BootInstant) -> Self {
        Self {
            id: owner,
            block_for,
            lease,
            awaited_acquire: None,
            in_flight: None,
            in_doubt_until: None,
            sent_at: began,
            created_at: began,
            failures: 0,
            retry_at: None,
            error: None,
            section: None,
            is_unclaimed_offer: false,
        }
    }

    /// By then its lease is over, and so is its place.
    pub(super) fn expires_at(&self) -> BootInstant {
        self.created_at.saturating_add((self.lease + QUEUE_ENTRY_TTL).saturating_add(self.block_for.max(LOCK_DELAY)))
    }

    /// By then whoever waits for it is told that nobody knows.
    pub(super) fn times_out_at(&self, timeout: Duration) -> BootInstant {
        self.created_at.saturating_add(timeout)
    }
}
