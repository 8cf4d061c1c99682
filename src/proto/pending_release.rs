//! The releases of one key until the store has replied.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;

use super::{DriverTypes, grant::Grant, section::Section};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::LockLost,
    limits::{LOCK_DELAY, QUEUE_ENTRY_TTL},
    store::{Heir, NewRecord, StoreError},
};

/// All pending releases of one key.
///
/// At most one of them blocks the next attempt: the release of the attempt that ended last, until
/// the store has replied to it for the first time. Otherwise the next attempt of this process would
/// be queued behind its own predecessor.
#[derive(Debug)]
pub(super) struct PendingReleases<D: DriverTypes>(Vec<PendingRelease<D>>);

/// The release of one acquisition that has ended (I9).
///
/// It is repeated until the store has replied or the lease has expired. If an earlier call of the
/// acquisition is in doubt, it is sent once more after the doubt (I8).
#[derive(Debug)]
pub(super) struct PendingRelease<D: DriverTypes> {
    pub(super) id: AcquisitionId,
    /// The next attempt waits for this release.
    pub(super) is_blocking: bool,
    /// The lock-delay, or the rest of `min_hold`.
    pub(super) block_for: Duration,
    /// The record to leave, and the section that leaves it.
    pub(super) record: Option<(Arc<Section<D>>, Arc<NewRecord>)>,
    /// The acquisition to leave the key to. A release that is repeated has it, too: an acquire of
    /// this id in its place may be in doubt.
    pub(super) heir: Option<Arc<Heir>>,
    /// The grant whose lease is renewed until the record is left: without it another process may
    /// run meanwhile.
    pub(super) grant: Option<Arc<Grant<D>>>,
    /// The longest lease that may have been requested, and when it was renewed for the last time.
    pub(super) lease: Duration,
    pub(super) lease_from: BootInstant,
    /// The number of an acquire in flight. Its reply is awaited before the release is sent.
    pub(super) awaited_acquire: Option<u64>,
    /// The number of the release in flight.
    pub(super) in_flight: Option<u64>,
    /// The release is due, and is sent when fewer releases of the process are under way (I2).
    pub(super) is_waiting: bool,
    pub(super) in_doubt_until: Option<BootInstant>,
    /// The instant of the newest release that was sent.
    pub(super) sent_at: BootInstant,
    pub(super) created_at: BootInstant,
    pub(super) failures: u32,
    pub(super) retry_at: Option<BootInstant>,
    pub(super) error: Option<StoreError>,
    /// The section whose guard waits for the outcome.
    pub(super) section: Option<Arc<Section<D>>>,
    /// The id was offered a key and is not known here. The release is not repeated, because the
    /// offer expires soon.
    pub(super) is_unclaimed_offer: bool,
}

/// What a section leaves in the store.
#[derive(Debug, Default)]
pub(super) struct Leaves {
    pub(super) record: Option<Arc<NewRecord>>,
    pub(super) heir: Option<Arc<Heir>>,
}

impl<D: DriverTypes> PendingReleases<D> {
    /// The bytes of the bodies of their records.
    pub(super) fn record_bytes(&self) -> usize {
        let records = self.iter().filter_map(|release| release.record.as_ref());
        records.filter_map(|(_, new)| new.record.body.as_ref()).map(Bytes::len).sum()
    }

    pub(super) fn has_id(&self, id: &AcquisitionId) -> bool {
        self.iter().any(|release| release.id == *id)
    }

    pub(super) fn add(&mut self, release: PendingRelease<D>) -> &mut PendingRelease<D> {
        // More than one release of a key is rare.
        self.reserve_exact(1);
        self.push(release);
        self.last_mut().expect("pushed above")
    }

    /// Lets the next attempt start.
    pub(super) fn unblock(&mut self) {
        for release in self.iter_mut() {
            release.is_blocking = false;
        }
    }

    /// The release of this id whose lease is renewed.
    pub(super) fn renewed(&mut self, id: &AcquisitionId) -> Option<&mut PendingRelease<D>> {
        self.iter_mut().find(|release| release.grant.is_some() && release.id == *id)
    }

    /// The release that blocks the next attempt.
    pub(super) fn blocking(&self) -> Option<&PendingRelease<D>> {
        self.iter().find(|release| release.is_blocking)
    }

    /// The instant of the next retry.
    pub(super) fn next_retry_at(&self) -> Option<BootInstant> {
        self.iter().filter_map(|release| release.retry_at).min()
    }
}

impl<D: DriverTypes> Default for PendingReleases<D> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<D: DriverTypes> Deref for PendingReleases<D> {
    type Target = Vec<PendingRelease<D>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<D: DriverTypes> DerefMut for PendingReleases<D> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl<D: DriverTypes> PendingRelease<D> {
    pub(super) fn new(id: AcquisitionId, block_for: Duration, lease: Duration, created_at: BootInstant) -> Self {
        Self {
            id,
            is_blocking: false,
            block_for,
            record: None,
            heir: None,
            grant: None,
            lease,
            lease_from: created_at,
            awaited_acquire: None,
            in_flight: None,
            is_waiting: false,
            in_doubt_until: None,
            sent_at: created_at,
            created_at,
            failures: 0,
            retry_at: None,
            error: None,
            section: None,
            is_unclaimed_offer: false,
        }
    }

    /// A call that failed may still be executed until this instant.
    pub(super) fn extend_doubt(&mut self, until: BootInstant) {
        self.in_doubt_until = Some(self.in_doubt_until.map_or(until, |earlier| earlier.max(until)));
    }

    /// The end of a doubt that the newest release cannot have ended, because it was sent before.
    pub(super) fn doubt_after_release(&self) -> Option<BootInstant> {
        self.in_doubt_until.filter(|until| *until > self.sent_at)
    }

    /// The instant at which the lease, the lock-delay and the queue entry have expired in the
    /// store.
    pub(super) fn expires_at(&self) -> BootInstant {
        if self.grant.is_some() {
            return BootInstant::FAR_FUTURE;
        }
        self.lease_from.saturating_add((self.lease + QUEUE_ENTRY_TTL).saturating_add(self.block_for.max(LOCK_DELAY)))
    }

    /// Ends the renewals. The release is repeated until the lease has expired.
    pub(super) fn stop_renewing(&mut self, reason: LockLost, now: BootInstant) -> Option<Arc<Grant<D>>> {
        let grant = self.grant.take()?;
        grant.end(reason);
        self.lease_from = now;
        Some(grant)
    }

    /// The instant from which waiters are not kept waiting for this release any more.
    pub(super) fn times_out_at(&self, timeout: Duration) -> BootInstant {
        self.created_at.saturating_add(timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        acquisition::AcquisitionIds,
        limits::{LEASE, STORE_TIMEOUT},
        proto::NoDriver,
    };

    const START: BootInstant = BootInstant::from_nanos(1 << 40);

    fn release(ids: &AcquisitionIds) -> PendingRelease<NoDriver> {
        PendingRelease::new(ids.next(), Duration::ZERO, LEASE, START)
    }

    #[test]
    fn one_release_blocks_the_next_attempt_until_it_is_unblocked() {
        let (ids, mut releases) = (AcquisitionIds::new("test", 1), PendingReleases::default());
        let first = releases.add(release(&ids)).id.clone();
        let second = releases.add(PendingRelease { is_blocking: true, ..release(&ids) }).id.clone();
        assert_eq!(releases.blocking().map(|release| &release.id), Some(&second));
        releases.remove(0);
        assert!(releases.has_id(&second) && !releases.has_id(&first));
        releases.unblock();
        assert!(releases.blocking().is_none() && !releases.is_empty());
    }

    #[test]
    fn the_next_retry_is_the_earliest_of_all_releases() {
        let (ids, mut releases) = (AcquisitionIds::new("test", 1), PendingReleases::default());
        assert_eq!(releases.next_retry_at(), None);
        for delay in [None, Some(STORE_TIMEOUT), Some(STORE_TIMEOUT * 2)] {
            let retry_at = delay.map(|delay| START.saturating_add(delay));
            releases.add(PendingRelease { retry_at, ..release(&ids) });
        }
        assert_eq!(releases.next_retry_at(), Some(START.saturating_add(STORE_TIMEOUT)));
    }

    /// I8: a release that was sent during the doubt may have been executed before the call in
    /// doubt.
    #[test]
    fn a_doubt_ends_with_a_release_that_was_sent_after_it() {
        let mut release = release(&AcquisitionIds::new("test", 1));
        let until = START.saturating_add(STORE_TIMEOUT);
        release.extend_doubt(until);
        release.extend_doubt(START);
        assert_eq!(release.doubt_after_release(), Some(until));
        release.sent_at = until;
        assert_eq!(release.doubt_after_release(), None);
    }

    #[test]
    fn a_release_expires_after_everything_that_the_store_may_keep() {
        let mut release = release(&AcquisitionIds::new("test", 1));
        assert_eq!(release.expires_at(), START.saturating_add(LEASE + QUEUE_ENTRY_TTL + LOCK_DELAY));
        release.block_for = LOCK_DELAY * 5;
        assert_eq!(release.expires_at(), START.saturating_add(LEASE + QUEUE_ENTRY_TTL + LOCK_DELAY * 5));
    }
}
