//! The requests and the replies of a [`LockStore`].

use std::time::Duration;

#[cfg(doc)]
use super::LockStore;
use crate::{acquisition::AcquisitionId, lock_key::LockKey};

/// How a line is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueConfig {
    /// The lease of an offer: what a process costs that stops in the moment of its turn.
    pub offer_ttl: Duration,
    /// How long a place lasts that nobody asks for again.
    pub entry_ttl: Duration,
    /// How many places there are.
    pub capacity: usize,
}

/// What [`LockStore::acquire`] is asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AcquireRequest {
    /// What to lock.
    pub key: LockKey,
    /// For whom.
    pub id: AcquisitionId,
    /// For how long, from the moment the store decides.
    pub lease: Duration,
    /// What to do if somebody else has it.
    pub if_busy: IfBusy,
    /// How the line is served, if this finds the key free and somebody in it.
    pub queue: QueueConfig,
    /// How long after the call this may still be done.
    pub valid_for: Duration,
}

/// What an owner does that cannot have the key now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IfBusy {
    /// Nothing of it is left.
    Fail,
    /// It has a place in the line.
    Enqueue,
}

/// What [`LockStore::acquire`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireReply {
    /// The owner has the key, for the lease it asked for.
    Granted {
        /// The fence of this grant.
        fence: u64,
    },
    /// Somebody else has it, and the owner has a place.
    Queued {
        /// How many are before it in the line, the holder not counted.
        ahead: usize,
        /// How long the holder's lease runs, as things stand.
        lease_left: Duration,
    },
    /// Somebody else has it, and nothing of this owner is there.
    Busy {
        /// How long the holder's lease runs, as things stand.
        lease_left: Duration,
    },
    /// Somebody else has it, and no place is left.
    QueueFull {
        /// How long the holder's lease runs, as things stand.
        lease_left: Duration,
        /// How many wait in the store, the holder not counted.
        waiting: usize,
    },
}

/// What [`LockStore::renew`] is asked of one grant.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RenewRequest {
    /// What is locked.
    pub key: LockKey,
    /// Who has it.
    pub id: AcquisitionId,
    /// For how long from now on.
    pub lease: Duration,
}

/// What [`LockStore::renew`] answers of one grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenewReply {
    /// The lease is full again.
    Extended,
    /// The owner does not have it: its lease was over, or it was taken away.
    NotHolder,
    /// This one could not be asked for; others of the batch could.
    Unknown,
}

/// What [`LockStore::release`] is asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReleaseRequest {
    /// What to give back.
    pub key: LockKey,
    /// Who does.
    pub id: AcquisitionId,
    /// How long the key stays taken, by nobody, before it is given on.
    pub block_for: Duration,
    /// How the line is served.
    pub queue: QueueConfig,
}

/// What [`LockStore::release`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseReply {
    /// The key is free, or stays taken for a while as it was asked.
    Freed,
    /// The next one in line has it.
    HandedOff,
    /// The owner did not have it: its lease was over, or this is the second time. Its place, if it had one, is gone.
    NotHolder,
}

/// What [`LockStore::yield_to_queue`] is asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct YieldRequest {
    /// What is locked.
    pub key: LockKey,
    /// Who has it.
    pub id: AcquisitionId,
    /// Under which fence. If the owner has it under another one, this yield was done before: that fence is the answer, and nothing changes.
    pub fence: u64,
    /// Under which id the same process lines up again, if somebody else has its turn.
    pub next_id: AcquisitionId,
    /// For how long, from the moment the store decides.
    pub lease: Duration,
    /// How the line is served.
    pub queue: QueueConfig,
    /// How long after the call this may still be done.
    pub valid_for: Duration,
}

/// What [`LockStore::yield_to_queue`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum YieldReply {
    /// Nobody waits: the owner goes on.
    Extended {
        /// Its new fence.
        fence: u64,
    },
    /// The owner does not have the key any more. What became of its next one.
    NotHolder(AcquireReply),
}

/// What [`LockStore::inspect`] answers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyStatus {
    /// Who has the key. `None`: it is free, or stays taken by nobody for a while.
    pub holder: Option<Holder>,
    /// How long the key stays taken, as things stand. Zero: it is free.
    pub lease_left: Duration,
    /// How many processes wait in the line.
    pub waiting: usize,
}

/// Who has a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The owner.
    pub id: AcquisitionId,
    /// The fence of the grant: the store's clock when it was made, in microseconds. Zero: a stranger has it, and nobody knows since when.
    pub fence: u64,
}

/// What [`LockStore::force_release`] is asked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ForceReleaseRequest {
    /// What to take away.
    pub key: LockKey,
    /// How long the key stays taken, by nobody, so that its holder can hear of it and stop.
    pub block_for: Duration,
    /// How the line is served.
    pub queue: QueueConfig,
}

/// What [`LockStore::force_release`] answers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForceReleaseReply {
    /// Nobody had the key, and nothing blocked it.
    Free,
    /// It was revoked from this owner, which may be of another library. It stays blocked for
    /// [`ForceReleaseRequest::block_for`], and a second call within that time has the same answer.
    Revoked {
        /// The owner it was revoked from.
        holder: AcquisitionId,
    },
    /// Nobody had it: a minimum hold or a lock-delay blocked it. It is free now.
    Unblocked {
        /// How much longer it would have been blocked. [`Duration::MAX`]: without end.
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

// === impl the asks ===

impl AcquireRequest {
    /// Asks for this key, for this owner, for this long.
    #[must_use]
    pub fn new(
        key: LockKey,
        id: AcquisitionId,
        lease: Duration,
        if_busy: IfBusy,
        queue: QueueConfig,
        valid_for: Duration,
    ) -> Self {
        Self { key, id, lease, if_busy, queue, valid_for }
    }
}

impl RenewRequest {
    /// Asks for more time for this key of this owner.
    #[must_use]
    pub fn new(key: LockKey, id: AcquisitionId, lease: Duration) -> Self {
        Self { key, id, lease }
    }
}

impl ReleaseRequest {
    /// Gives this key of this owner back, or its place.
    #[must_use]
    pub fn new(key: LockKey, id: AcquisitionId, block_for: Duration, queue: QueueConfig) -> Self {
        Self { key, id, block_for, queue }
    }
}

impl YieldRequest {
    /// Lets others have their turn, if there are others.
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
        Self { key, id, fence, next_id, lease, queue, valid_for }
    }
}

impl ForceReleaseRequest {
    /// Takes this key away from whoever has it.
    #[must_use]
    pub fn new(key: LockKey, block_for: Duration, queue: QueueConfig) -> Self {
        Self { key, block_for, queue }
    }
}

// === impl Inspected ===

impl KeyStatus {
    /// What stands there.
    #[must_use]
    pub fn new(holder: Option<Holder>, lease_left: Duration, waiting: usize) -> Self {
        Self { holder, lease_left, waiting }
    }
}

impl Holder {
    /// This owner, under this fence.
    #[must_use]
    pub fn new(id: AcquisitionId, fence: u64) -> Self {
        Self { id, fence }
    }
}

// === impl ForceReleaseReply ===

impl ForceReleaseReply {
    /// The owner that the key was revoked from.
    #[must_use]
    pub fn holder(&self) -> Option<&AcquisitionId> {
        if let Self::Revoked { holder } = self { Some(holder) } else { None }
    }
}
