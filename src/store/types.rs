//! The requests and the replies of a [`LockStore`].

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;

#[cfg(doc)]
use super::LockStore;
use crate::{acquisition::AcquisitionId, limits::MAX_LISTED_HOLDERS, lock_key::LockKey, trace::SectionTrace};

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
    /// What the acquisition asks of the key.
    pub demand: Demand,
    /// Whether an acquire with this id was sent before. A hint: the store most likely has a queue
    /// entry or an offer of this id. Default: `false`.
    pub is_repeated: bool,
    /// The holder that this acquisition replaces. The reply is
    /// [`Granted`](AcquireReply::Granted), with a new fence, if that acquisition holds the key, or
    /// if this one does already. Otherwise the reply is [`Busy`](AcquireReply::Busy), also if the
    /// key is free. [`if_busy`](Self::if_busy) and [`demand`](Self::demand) are not used. Default:
    /// none.
    ///
    /// A store without [`StoreTraits::tickets`](super::StoreTraits::tickets) refuses such a
    /// request.
    pub in_place_of: Option<AcquisitionId>,
    /// The trace of the section that a grant is for, for those that find the key busy. Default:
    /// none.
    ///
    /// A store without [`StoreTraits::traces`](super::StoreTraits::traces) ignores it.
    pub trace: Option<SectionTrace>,
}

/// What an acquisition asks of its key.
///
/// Default: the key, whether it has a record or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Demand {
    /// Whether a [`Record`] of the key stands in place of a grant. Default: `false`, records are
    /// ignored.
    ///
    /// A store without [`StoreTraits::records`](super::StoreTraits::records) refuses `true`.
    pub unless_recorded: bool,
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
        /// The trace that the release or yield had left which offered the key to this acquisition.
        /// Of a repeated call, it may be missing.
        after: Option<SectionTrace>,
    },
    /// The key is busy, and the acquisition is in the queue. A store that is not
    /// [`ordered`](super::StoreTraits::ordered) has no queue, and keeps nothing.
    Queued {
        /// The number of waiters ahead, without the holder. Zero if the store does not know it.
        ahead: usize,
        /// The remaining lease of the holder.
        lease_left: Duration,
        /// When the caller repeats its `acquire` if no event comes before: at least 10 ms later.
        /// `None`: after about a second, or when the lease of the holder has expired.
        poll_in: Option<Duration>,
        /// The [trace](AcquireRequest::trace) of the holder. A store need not reply with it to a
        /// request without one.
        held_by: Option<SectionTrace>,
    },
    /// The key is busy, and the acquisition is not in the queue.
    Busy {
        /// The remaining lease of the holder.
        lease_left: Duration,
        /// As of [`Queued`](Self::Queued).
        held_by: Option<SectionTrace>,
    },
    /// The key is busy, and its queue is full.
    QueueFull {
        /// The remaining lease of the holder.
        lease_left: Duration,
        /// The number of waiters in the store, without the holder.
        waiting: usize,
    },
    /// A newer acquisition waits for the key, both are
    /// [replaceable](AcquisitionId::is_replaceable), and this one was in the queue, or holds the
    /// key. Nothing has changed: the caller releases it.
    Superseded,
    /// The key has this record, and the request is made
    /// [`unless_recorded`](Demand::unless_recorded). The acquisition holds nothing, and is not in
    /// the queue.
    Recorded(Record),
}

/// The result of a section, which its holder leaves with its release. Until it expires, an acquire
/// that is made [`unless_recorded`](Demand::unless_recorded) gets it in place of a grant.
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
    /// The same, and a newer acquisition waits for the key: both are
    /// [replaceable](AcquisitionId::is_replaceable).
    Superseded,
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
    pub record: Option<Arc<NewRecord>>,
    /// The acquisition that holds the key from then on, in the same step and under the same fence.
    /// No waiter is served, and nothing is blocked. A repetition finds the heir, and changes
    /// nothing. Default: none.
    ///
    /// A store without [`StoreTraits::tickets`](super::StoreTraits::tickets) refuses such a
    /// request.
    pub heir: Option<Arc<Heir>>,
    /// The trace of the section that has ended, for the waiter that is offered the key. Default:
    /// none.
    ///
    /// A store without [`StoreTraits::traces`](super::StoreTraits::traces) ignores it.
    pub trace: Option<SectionTrace>,
}

/// The acquisition that holds a key after the release of another one. No process renews it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Heir {
    /// Its id.
    pub id: AcquisitionId,
    /// How long it holds the key, from the execution of the release in the store.
    pub lease: Duration,
}

/// The reply of [`LockStore::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseReply {
    /// The key is free, blocked for [`ReleaseRequest::block_for`], or held by
    /// [`ReleaseRequest::heir`].
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
    /// What [`next_id`](Self::next_id) asks of the key.
    pub demand: Demand,
    /// As [`ReleaseRequest::trace`]. Default: none.
    pub ended: Option<SectionTrace>,
    /// As [`AcquireRequest::trace`]. Default: none.
    pub trace: Option<SectionTrace>,
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
    /// The holders: several if they share the key, at most 64 of them. None if the key is free, or
    /// blocked without a holder.
    pub holders: Vec<Holder>,
    /// The number of holders.
    pub holding: usize,
    /// The remaining time of the last lease or block. Zero if the key is free.
    pub lease_left: Duration,
    /// The number of waiters in the queue. Zero in a store without one.
    pub waiting: usize,
    /// The remaining time of the [`Record`] of the key. `None`: the key has none.
    pub record_left: Option<Duration>,
    /// The transaction of an application that keeps a key without a holder, in words.
    /// [`inspect`](LockStore::inspect) of a store without such transactions, and a list, have none.
    pub kept_by: Option<String>,
}

/// The holder of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The acquisition that holds the key.
    pub id: AcquisitionId,
    /// The fence of the grant. Zero if another program holds the key, and for a permit or a read on
    /// Redis, PostgreSQL and MySQL.
    pub fence: u64,
    /// The time of the grant, by the clock of the store. `None` if another program holds the key,
    /// and for a permit or a read on Redis, which keeps no time of it.
    pub since: Option<SystemTime>,
    /// Whether the process of the holder is connected to the store. `None`: the store does not
    /// know it, or another program holds the key.
    pub connected: Option<bool>,
}

/// The reply of [`LockStore::delete_record`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeleteRecordReply {
    /// The key has no record any more.
    Deleted,
    /// The key had no record.
    NotFound,
    /// The key has a holder, whose work may depend on the record. Nothing has changed.
    Busy,
}

/// The request of [`LockStore::force_release`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ForceReleaseRequest {
    /// The key to revoke.
    pub key: LockKey,
    /// The holder to revoke it from. `None`: all of them.
    pub holder: Option<AcquisitionId>,
    /// How long the place of each former holder stays blocked, so that it can stop.
    pub block_for: Duration,
    /// The settings of the queue.
    pub queue: QueueConfig,
}

/// The reply of [`LockStore::force_release`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForceReleaseReply {
    /// The key had no holder and was not blocked, or
    /// [`ForceReleaseRequest::holder`] does not hold it.
    Free,
    /// The key was revoked from these holders, which may belong to another program. It stays
    /// blocked for [`ForceReleaseRequest::block_for`]. A second call within that time has the same
    /// reply.
    Revoked {
        /// The former holders.
        holders: Vec<AcquisitionId>,
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
        let demand = Demand::default();
        Self { key, id, lease, if_busy, queue, valid_for, demand, is_repeated: false, in_place_of: None, trace: None }
    }

    /// Sets [`in_place_of`](Self::in_place_of).
    #[must_use]
    pub fn in_place_of(mut self, holder: Option<AcquisitionId>) -> Self {
        self.in_place_of = holder;
        self
    }

    /// Sets [`demand`](Self::demand).
    #[must_use]
    pub fn demand(mut self, demand: Demand) -> Self {
        self.demand = demand;
        self
    }

    /// Sets [`is_repeated`](Self::is_repeated).
    #[must_use]
    pub fn repeated(mut self, is_repeated: bool) -> Self {
        self.is_repeated = is_repeated;
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
        Self { key, id, block_for, queue, record: None, heir: None, trace: None }
    }

    /// Leaves the key to this acquisition, if that of the request holds it.
    #[must_use]
    pub fn heir(mut self, heir: Heir) -> Self {
        self.heir = Some(Arc::new(heir));
        self
    }

    /// Leaves this record for `keep_for`, if the acquisition holds the key.
    #[must_use]
    pub fn record(mut self, record: Record, keep_for: Duration) -> Self {
        self.record = Some(Arc::new(NewRecord { record, keep_for }));
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
        let demand = Demand::default();
        Self { key, id, fence, next_id, lease, queue, valid_for, demand, ended: None, trace: None }
    }

    /// Sets [`demand`](Self::demand).
    #[must_use]
    pub fn demand(mut self, demand: Demand) -> Self {
        self.demand = demand;
        self
    }
}

impl ForceReleaseRequest {
    /// Creates a request to revoke a key from its holder.
    #[must_use]
    pub fn new(key: LockKey, block_for: Duration, queue: QueueConfig) -> Self {
        Self { key, holder: None, block_for, queue }
    }

    /// Sets [`holder`](Self::holder).
    #[must_use]
    pub fn holder(mut self, holder: Option<AcquisitionId>) -> Self {
        self.holder = holder;
        self
    }
}

// === impl AcquireReply ===

impl AcquireReply {
    /// Creates a grant, without the trace of the section before.
    #[must_use]
    pub const fn granted(fence: u64) -> Self {
        Self::Granted { fence, after: None }
    }

    /// Creates a reply for a key that is busy, without the trace of its holder.
    #[must_use]
    pub const fn busy(lease_left: Duration) -> Self {
        Self::Busy { lease_left, held_by: None }
    }
}

// === impl Heir ===

impl Heir {
    /// Creates an heir.
    #[must_use]
    pub fn new(id: AcquisitionId, lease: Duration) -> Self {
        Self { id, lease }
    }
}

// === impl Demand ===

impl Demand {
    /// Asks for the key, whether it has a record or not.
    #[must_use]
    pub const fn new() -> Self {
        Self { unless_recorded: false }
    }

    /// Takes the record of the key in place of a grant.
    #[must_use]
    pub const fn unless_recorded(mut self) -> Self {
        self.unless_recorded = true;
        self
    }

    /// Whether a request with this demand runs under a grant that was made for another one.
    pub(crate) fn is_met_by(self, granted: Self) -> bool {
        granted.unless_recorded || !self.unless_recorded
    }

    /// Whether a request with this demand joins a section that its owner runs.
    pub(crate) fn joins_sections(self) -> bool {
        !self.unless_recorded
    }

    /// Whether a record answers a request with this demand.
    pub(crate) fn takes_record(self) -> bool {
        self.unless_recorded
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
        let mut holders: Vec<_> = holders.into_iter().collect();
        let holding = holders.len();
        holders.truncate(MAX_LISTED_HOLDERS);
        Self { holders, holding, lease_left, waiting, record_left: None, kept_by: None }
    }

    /// Sets [`holding`](Self::holding).
    #[must_use]
    pub fn holding(mut self, count: usize) -> Self {
        self.holding = count;
        self
    }

    /// Sets [`record_left`](Self::record_left).
    #[must_use]
    pub fn record_left(mut self, left: Option<Duration>) -> Self {
        self.record_left = left;
        self
    }

    /// Sets [`kept_by`](Self::kept_by).
    #[must_use]
    pub fn kept_by(mut self, transaction: Option<String>) -> Self {
        self.kept_by = transaction;
        self
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
        Self { id, fence, since: None, connected: None }
    }

    /// Sets [`connected`](Self::connected).
    #[must_use]
    pub fn connected(mut self, connected: bool) -> Self {
        self.connected = Some(connected);
        self
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
    /// Returns the first holder that the key was revoked from.
    #[must_use]
    pub fn holder(&self) -> Option<&AcquisitionId> {
        if let Self::Revoked { holders } = self { holders.first() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_of_a_record_has_no_contents() {
        let record = Record::new("secret", Some("password".into()));
        assert_eq!(format!("{record:?}"), "Record { head_len: 6, body_len: Some(8) }");
        assert_eq!(format!("{:?}", Record::new("", None)), "Record { head_len: 0, body_len: None }");
    }
}
