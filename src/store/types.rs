//! The requests and the replies of a [`LockStore`].

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use bytes::Bytes;

#[cfg(doc)]
use super::LockStore;
use crate::{acquisition::AcquisitionId, lock_key::LockKey};

/// Settings of the queue of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueConfig {
    /// The lease of an offer. A process that stops while the key is offered to it delays the next
    /// waiter by this time.
    pub offer_ttl: Duration,
    /// How long a queue entry lasts without another [`LockStore::acquire`] for it.
    pub entry_ttl: Duration,
    /// The maximum number of waiters of one key.
    pub capacity: usize,
}

/// The request of [`LockStore::acquire`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AcquireRequest {
    /// The key to lock.
    pub key: LockKey,
    /// The id of this acquisition.
    pub id: AcquisitionId,
    /// The lease of the grant, from the execution of the call in the store.
    pub lease: Duration,
    /// The action if the key is held, or is offered to another waiter.
    pub if_busy: IfBusy,
    /// The settings of the queue, if the key is free and has waiters.
    pub queue: QueueConfig,
    /// How long after the call the store may still execute it.
    pub valid_for: Duration,
    /// The part of the key that the acquisition needs. Default: all of it.
    pub share: Share,
    /// Whether a [`Record`] of the key stands in place of a grant. Default: `false`, records are
    /// ignored.
    pub unless_recorded: bool,
}

/// Part of a key: a weight, of a capacity that the holders of the key share.
///
/// A store without [`StoreTraits::permits`](super::StoreTraits::permits) supports only
/// [`EXCLUSIVE`](Self::EXCLUSIVE).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    weight: u32,
    capacity: u32,
}

/// Action of an `acquire` if the key is busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IfBusy {
    /// Reply [`Busy`](AcquireReply::Busy), and do not enqueue.
    Fail,
    /// Enqueue, and reply [`Queued`](AcquireReply::Queued).
    Enqueue,
}

/// The reply of [`LockStore::acquire`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireReply {
    /// The acquisition holds the key for the requested lease.
    Granted {
        /// The fence of this grant.
        fence: u64,
    },
    /// The key is busy, and the acquisition is in the queue.
    Queued {
        /// The number of waiters ahead, without the holder.
        ahead: usize,
        /// The remaining lease of the holder.
        lease_left: Duration,
    },
    /// The key is busy, and the acquisition is not in the queue.
    Busy {
        /// The remaining lease of the holder.
        lease_left: Duration,
    },
    /// The key is busy, and its queue is full.
    QueueFull {
        /// The remaining lease of the holder.
        lease_left: Duration,
        /// The number of waiters in the store, without the holder.
        waiting: usize,
    },
    /// The key has this record, and the request has
    /// [`unless_recorded`](AcquireRequest::unless_recorded). The acquisition holds nothing, and is
    /// not in the queue.
    Recorded(Record),
}

/// The result of a section, which its holder leaves with its release. Until it expires, an acquire
/// with [`unless_recorded`](AcquireRequest::unless_recorded) gets it in place of a grant.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// The part that lasts as long as the record. At most 64 KiB.
    pub head: Bytes,
    /// The part that a store with little memory may drop earlier. A store need not keep more than
    /// 1 MiB. `None`: there is none, or it was dropped.
    pub body: Option<Bytes>,
}

/// A [`Record`] and its duration, for [`ReleaseRequest::record`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewRecord {
    /// The record.
    pub record: Record,
    /// How long it lasts, from the execution of the release in the store.
    pub keep_for: Duration,
}

/// One renewal of [`LockStore::renew`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RenewRequest {
    /// The key.
    pub key: LockKey,
    /// The acquisition that holds it.
    pub id: AcquisitionId,
    /// The new lease, from the execution of the call in the store.
    pub lease: Duration,
}

/// The reply of [`LockStore::renew`] to one renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenewReply {
    /// The acquisition holds the key for at least the requested lease.
    Extended,
    /// The acquisition does not hold the key: its lease has expired, or the key was revoked.
    NotHolder,
    /// This renewal could not be executed; others of the batch could.
    Unknown,
}

/// The request of [`LockStore::release`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReleaseRequest {
    /// The key to release.
    pub key: LockKey,
    /// The acquisition to end.
    pub id: AcquisitionId,
    /// How long the key stays blocked, without a holder, before it is free or offered.
    pub block_for: Duration,
    /// The settings of the queue.
    pub queue: QueueConfig,
    /// The record to leave, if the acquisition holds the key. It replaces an earlier one. Default:
    /// none, and an earlier one stays.
    pub record: Option<NewRecord>,
}

/// The reply of [`LockStore::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseReply {
    /// The key is free, or blocked for [`ReleaseRequest::block_for`].
    Freed,
    /// The key was offered to the next waiter.
    HandedOff,
    /// The acquisition did not hold the key: its lease has expired, or this is a repetition. Its
    /// queue entry, if it had one, was removed.
    NotHolder,
    /// The record of the request stands already: this is a repetition of a release that got no
    /// reply.
    RecordedBefore,
}

/// The request of [`LockStore::yield_to_queue`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct YieldRequest {
    /// The key.
    pub key: LockKey,
    /// The acquisition that holds it.
    pub id: AcquisitionId,
    /// The fence under which it holds the key.
    ///
    /// If the acquisition holds the key under another fence, an earlier copy of this request was
    /// executed. The reply then has that fence, and nothing changes.
    pub fence: u64,
    /// The id under which the same process enqueues if the key goes to another waiter.
    pub next_id: AcquisitionId,
    /// The lease of the grant, from the execution of the call in the store.
    pub lease: Duration,
    /// The settings of the queue.
    pub queue: QueueConfig,
    /// How long after the call the store may still execute it.
    pub valid_for: Duration,
    /// As in [`AcquireRequest::unless_recorded`], for [`next_id`](Self::next_id).
    pub unless_recorded: bool,
}

/// The reply of [`LockStore::yield_to_queue`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum YieldReply {
    /// The queue is empty: the acquisition still holds the key.
    Extended {
        /// Its new fence.
        fence: u64,
    },
    /// The acquisition does not hold the key any more. Contains the reply for
    /// [`next_id`](YieldRequest::next_id).
    NotHolder(AcquireReply),
}

/// The reply of [`LockStore::inspect`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyStatus {
    /// The holders: at most one without [`Share`]s. None if the key is free, or blocked without a
    /// holder.
    pub holders: Vec<Holder>,
    /// The remaining time of the lease or the block. Zero if the key is free.
    pub lease_left: Duration,
    /// The number of waiters in the queue.
    pub waiting: usize,
}

/// The holder of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The acquisition that holds the key.
    pub id: AcquisitionId,
    /// The fence of the grant. Zero if another program holds the key.
    pub fence: u64,
    /// The time of the grant, by the clock of the store. `None` if another program holds the key.
    pub since: Option<SystemTime>,
}

/// The request of [`LockStore::force_release`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ForceReleaseRequest {
    /// The key to revoke.
    pub key: LockKey,
    /// How long the key stays blocked, so that its former holder can stop.
    pub block_for: Duration,
    /// The settings of the queue.
    pub queue: QueueConfig,
}

/// The reply of [`LockStore::force_release`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForceReleaseReply {
    /// The key had no holder and was not blocked.
    Free,
    /// The key was revoked from this holder, which may belong to another program. The key stays
    /// blocked for [`ForceReleaseRequest::block_for`]. A second call within that time has the same
    /// reply.
    Revoked {
        /// The former holder.
        holder: AcquisitionId,
    },
    /// The key had no holder, but a minimum hold or a lock-delay blocked it. It is free now.
    Unblocked {
        /// The time that the block would have lasted. [`Duration::MAX`] if it had no end.
        blocked_for: Duration,
    },
}

// === impl QueueConfig ===

impl QueueConfig {
    /// Creates a configuration.
    #[must_use]
    pub const fn new(offer_ttl: Duration, entry_ttl: Duration, capacity: usize) -> Self {
        Self { offer_ttl, entry_ttl, capacity }
    }
}

// === impl of the requests ===

impl AcquireRequest {
    /// Creates a request to lock a key.
    #[must_use]
    pub fn new(
        key: LockKey,
        id: AcquisitionId,
        lease: Duration,
        if_busy: IfBusy,
        queue: QueueConfig,
        valid_for: Duration,
    ) -> Self {
        Self { key, id, lease, if_busy, queue, valid_for, share: Share::EXCLUSIVE, unless_recorded: false }
    }

    /// Sets [`share`](Self::share).
    #[must_use]
    pub fn share(mut self, share: Share) -> Self {
        self.share = share;
        self
    }

    /// Sets [`unless_recorded`](Self::unless_recorded).
    #[must_use]
    pub fn unless_recorded(mut self, unless_recorded: bool) -> Self {
        self.unless_recorded = unless_recorded;
        self
    }
}

impl RenewRequest {
    /// Creates a request to extend a lease.
    #[must_use]
    pub fn new(key: LockKey, id: AcquisitionId, lease: Duration) -> Self {
        Self { key, id, lease }
    }
}

impl ReleaseRequest {
    /// Creates a request to release a key, or to leave its queue.
    #[must_use]
    pub fn new(key: LockKey, id: AcquisitionId, block_for: Duration, queue: QueueConfig) -> Self {
        Self { key, id, block_for, queue, record: None }
    }

    /// Leaves this record for `keep_for`, if the acquisition holds the key.
    #[must_use]
    pub fn record(mut self, record: Record, keep_for: Duration) -> Self {
        self.record = Some(NewRecord { record, keep_for });
        self
    }
}

impl YieldRequest {
    /// Creates a request to pass a key to the next waiter, if there is one.
    #[must_use]
    pub fn new(
        key: LockKey,
        id: AcquisitionId,
        fence: u64,
        next_id: AcquisitionId,
        lease: Duration,
        queue: QueueConfig,
        valid_for: Duration,
    ) -> Self {
        Self { key, id, fence, next_id, lease, queue, valid_for, unless_recorded: false }
    }

    /// Sets [`unless_recorded`](Self::unless_recorded).
    #[must_use]
    pub fn unless_recorded(mut self, unless_recorded: bool) -> Self {
        self.unless_recorded = unless_recorded;
        self
    }
}

impl ForceReleaseRequest {
    /// Creates a request to revoke a key from its holder.
    #[must_use]
    pub fn new(key: LockKey, block_for: Duration, queue: QueueConfig) -> Self {
        Self { key, block_for, queue }
    }
}

// === impl Share ===

impl Share {
    /// The whole key: 1 of 1.
    pub const EXCLUSIVE: Self = Self { weight: 1, capacity: 1 };

    /// Creates a share. Returns `None` if the weight is zero, or larger than the capacity.
    #[must_use]
    pub const fn new(weight: u32, capacity: u32) -> Option<Self> {
        if weight == 0 || weight > capacity { None } else { Some(Self { weight, capacity }) }
    }

    /// Returns the weight.
    #[must_use]
    pub const fn weight(self) -> u32 {
        self.weight
    }

    /// Returns the capacity of the key.
    #[must_use]
    pub const fn capacity(self) -> u32 {
        self.capacity
    }
}

impl Default for Share {
    fn default() -> Self {
        Self::EXCLUSIVE
    }
}

// === impl Record ===

impl Record {
    /// Creates a record.
    #[must_use]
    pub fn new(head: impl Into<Bytes>, body: Option<Bytes>) -> Self {
        Self { head: head.into(), body }
    }
}

impl fmt::Debug for Record {
    /// Without the contents, which are the response to a client.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body_len = self.body.as_ref().map(Bytes::len);
        f.debug_struct("Record").field("head_len", &self.head.len()).field("body_len", &body_len).finish()
    }
}

// === impl KeyStatus ===

impl KeyStatus {
    /// Creates a status.
    #[must_use]
    pub fn new(holders: impl IntoIterator<Item = Holder>, lease_left: Duration, waiting: usize) -> Self {
        Self { holders: holders.into_iter().collect(), lease_left, waiting }
    }

    /// Returns the first holder.
    #[must_use]
    pub fn holder(&self) -> Option<&Holder> {
        self.holders.first()
    }
}

impl Holder {
    /// Creates a holder with an unknown time of the grant.
    #[must_use]
    pub fn new(id: AcquisitionId, fence: u64) -> Self {
        Self { id, fence, since: None }
    }

    /// Sets [`since`](Self::since).
    #[must_use]
    pub fn since(mut self, since: SystemTime) -> Self {
        self.since = Some(since);
        self
    }
}

// === impl ForceReleaseReply ===

impl ForceReleaseReply {
    /// Returns the holder that the key was revoked from.
    #[must_use]
    pub fn holder(&self) -> Option<&AcquisitionId> {
        if let Self::Revoked { holder } = self { Some(holder) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_at_least_one_and_at_most_the_capacity() {
        let share = |weight, capacity| Share::new(weight, capacity).map(|share| (share.weight(), share.capacity()));
        assert_eq!([share(1, 1), share(3, 3), share(2, u32::MAX)], [(1, 1), (3, 3), (2, u32::MAX)].map(Some));
        assert_eq!([share(0, 0), share(0, 1), share(2, 1)], [None; 3]);
        assert_eq!((Share::default(), Share::new(1, 1)), (Share::EXCLUSIVE, Some(Share::EXCLUSIVE)));
    }

    #[test]
    fn debug_of_a_record_has_no_contents() {
        let record = Record::new("secret", Some("password".into()));
        assert_eq!(format!("{record:?}"), "Record { head_len: 6, body_len: Some(8) }");
        assert_eq!(format!("{:?}", Record::new("", None)), "Record { head_len: 0, body_len: None }");
    }
}
