//! What all keys of a process use of its bounds.

use std::{
    collections::VecDeque,
    sync::atomic::{
        AtomicBool, AtomicUsize,
        Ordering::{Acquire, Relaxed, Release, SeqCst},
    },
};

use super::entry::EntryCounts;
use crate::{
    acquisition::AcquisitionId,
    limits::{MAX_PENDING_RECORD_BYTES, MAX_RELEASES_UNDER_WAY, MAX_UNCLAIMED_OFFER_RELEASES},
    lock_key::LockKey,
    store::StoreError,
    sync::Mutex,
};

/// The use of the bounds of one process (I11). The tables of all its shards share it. Two events
/// that are handled at the same time may exceed a bound by one.
#[derive(Debug, Default)]
pub struct Usage {
    waiting: AtomicUsize,
    pending_releases: AtomicUsize,
    releases_under_way: AtomicUsize,
    /// The keys whose releases wait until fewer are under way, the longest wait first. Bounded by
    /// the pending releases.
    waiting_releases: Mutex<VecDeque<LockKey>>,
    /// Spares the mutex where no release waits, which is nearly always.
    has_waiting_releases: AtomicBool,
    /// The pending releases of offers to unknown ids.
    unclaimed_offer_releases: AtomicUsize,
    /// The bytes of the bodies of the records of pending releases.
    pending_record_bytes: AtomicUsize,
    /// The newest revoked id that no entry knew: its call in place of a ticket may be in flight.
    /// Only one, because messages may be forged.
    revoked: Mutex<Option<AcquisitionId>>,
    /// The error of the newest release that failed, while releases are pending.
    release_error: Mutex<Option<StoreError>>,
    /// Spares the mutex where no release has failed, which is nearly always.
    has_release_error: AtomicBool,
}

impl Usage {
    /// The number of waiters.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }

    /// Whether so few releases are pending that a key may be acquired (I2). Keys that are held do
    /// not count: they would bound how many a process can hold.
    pub(super) fn may_acquire(&self) -> bool {
        self.pending_releases.load(Relaxed) < MAX_RELEASES_UNDER_WAY
    }

    /// Whether one more release may be sent (I2).
    pub(super) fn may_send_release(&self) -> bool {
        self.releases_under_way.load(SeqCst) < MAX_RELEASES_UNDER_WAY
    }

    /// Has a release of this key wait for [`next_waiting_release`](Self::next_waiting_release).
    pub(super) fn push_waiting_release(&self, key: LockKey) {
        self.waiting_releases.lock().push_back(key);
        // Before the caller checks once more whether a release may be sent: of two threads, one of
        // which ends a release while the other one has its release wait, one sees the other.
        self.has_waiting_releases.store(true, SeqCst);
    }

    /// Takes the key whose release is sent next. `None`: no release waits, or too many are under
    /// way.
    pub(super) fn next_waiting_release(&self) -> Option<LockKey> {
        if !self.has_waiting_releases.load(SeqCst) || !self.may_send_release() {
            return None;
        }
        let mut waiting = self.waiting_releases.lock();
        let next = waiting.pop_front();
        self.has_waiting_releases.store(!waiting.is_empty(), SeqCst);
        next
    }

    /// Whether an offer to an unknown id may be released.
    pub(super) fn can_release_unclaimed_offer(&self) -> bool {
        self.unclaimed_offer_releases.load(Relaxed) < MAX_UNCLAIMED_OFFER_RELEASES
    }

    /// A revocation message names an id that its entry does not know.
    pub(super) fn revoked_unknown(&self, id: &AcquisitionId) {
        *self.revoked.lock() = Some(id.clone());
    }

    /// Whether the newest of these messages names this id.
    pub(super) fn was_revoked(&self, id: &AcquisitionId) -> bool {
        self.revoked.lock().as_ref() == Some(id)
    }

    /// The largest body of a record that a release may keep until the store has it.
    pub(super) fn max_record_body(&self) -> usize {
        MAX_PENDING_RECORD_BYTES.saturating_sub(self.pending_record_bytes.load(Relaxed))
    }

    pub(super) fn release_error(&self) -> Option<StoreError> {
        self.release_error.lock().clone()
    }

    pub(super) fn release_failed(&self, error: &StoreError) {
        *self.release_error.lock() = Some(error.clone());
        self.has_release_error.store(true, Release);
    }

    /// Counts the change of one entry.
    pub(super) fn change(&self, before: EntryCounts, after: EntryCounts) {
        change(&self.waiting, before.waiting, after.waiting);
        change(&self.pending_releases, before.pending_releases, after.pending_releases);
        change(&self.releases_under_way, before.releases_under_way, after.releases_under_way);
        change(&self.unclaimed_offer_releases, before.unclaimed_offer_releases, after.unclaimed_offer_releases);
        change(&self.pending_record_bytes, before.record_bytes, after.record_bytes);
        if self.has_release_error.load(Acquire) && self.pending_releases.load(Relaxed) == 0 {
            // The error does not concern releases that are created later.
            self.has_release_error.store(false, Release);
            *self.release_error.lock() = None;
        }
    }
}

fn change(total: &AtomicUsize, before: usize, after: usize) {
    if after > before {
        total.fetch_add(after - before, SeqCst);
    } else if after < before {
        total.fetch_sub(before - after, SeqCst);
    }
}
