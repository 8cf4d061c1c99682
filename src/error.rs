use std::{fmt, time::Duration};

use thiserror::Error;

use crate::{limits::MAX_PENDING_RELEASES, store::StoreError};

/// The reason why a lock was not acquired. Nothing is held, and nothing was started.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another owner holds the lock, and the call does not wait.
    #[error("the lock is held by another owner")]
    Busy {
        /// The rest of the holder's lease. The holder may release sooner, or renew.
        lease_left: Duration,
        /// The number of owners that are served first, the holder included, as far as this process
        /// knows.
        ahead: usize,
    },
    /// The lock was not acquired within the wait.
    #[error("timed out after {waited:?} waiting for the lock")]
    TimedOut {
        /// The limit of the wait.
        waited: Duration,
        /// The rest of the holder's lease. The holder may release sooner, or renew.
        lease_left: Duration,
        /// The number of owners that are served first, the holder included, as far as this process
        /// knows.
        ahead: usize,
    },
    /// Too many callers wait already.
    #[error("{bound}: {ahead} are ahead")]
    QueueFull {
        /// The number that is served first, the holder included: callers in this process, or, for
        /// [`QueueBound::Store`], processes.
        ahead: usize,
        /// Which bound was reached.
        bound: QueueBound,
    },
    /// The store failed or did not reply in time; or 10,000 releases have not reached it, and
    /// nothing is acquired until they have. The [source](std::error::Error::source) has the reason.
    #[error("the lock store failed")]
    Store(#[source] StoreError),
    /// The request in which this task was spawned holds the lock, or waits for it. If its handler
    /// waits for the task, each would wait for the other. See
    /// [`Owner`](crate::Owner#spawned-tasks).
    #[error(
        "the request that spawned this task holds the lock or waits for it: share the lock with \
         `.owner(&owner)`, where `owner` is `Owner::current()` taken before the spawn, or wait for \
         the request to end with `.owner(&Owner::new())`"
    )]
    WouldDeadlock,
    /// The manager is [shutting down](crate::LockManager::shutdown).
    #[error("the lock manager is shutting down")]
    ShuttingDown,
}

/// A bound on the number of waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueBound {
    /// 256 callers wait for the key in this process.
    Key,
    /// Callers of other keys use up the bound of this process, at most 10,000. One key gets a share
    /// of the rest, so that a flood on some keys leaves capacity for others.
    Process,
    /// 1,024 processes wait for the key in the store.
    Store,
}

/// The reason why a lock is not held any more. This is final.
///
/// The work under the lock may be partially done.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockLost {
    /// Its deadline has passed without a successful renewal. The store may have granted the key to
    /// another owner.
    #[error("the lock was lost: its lease expired before a renewal succeeded")]
    Expired,
    /// The store reports another holder or none: an operator has
    /// [revoked](crate::LockManager::force_release) the lock, or the store has lost its data.
    #[error("the lock was lost: it was revoked")]
    Revoked,
    /// Its fixed lease or its `max_hold` has passed.
    #[error("the lock was lost: it was held for too long")]
    HoldLimitReached,
    /// Its process shuts down, and the [budget](crate::LockManager::shutdown_on_signal) is used up.
    #[error("the lock was lost: its process shuts down")]
    ShuttingDown,
    /// It was released. This is no loss.
    #[error("the lock was released")]
    Released,
}

/// The lock is not held for the required time. Error of
/// [`HeldLock::ensure_remaining`](crate::HeldLock::ensure_remaining).
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InsufficientTime {
    /// The lock was lost.
    #[error(transparent)]
    Lost(#[from] LockLost),
    /// The lock is held, and its lease may end before the required time has passed.
    #[error("the lock is held for {remaining:?} at least, but {required:?} is required")]
    TooShort {
        /// For how long the lock is held at least, unless it is renewed.
        remaining: Duration,
        /// The time that the caller requires.
        required: Duration,
    },
}

/// Why [`LockBuilder::run`](crate::lock::LockBuilder::run) did not come to its end.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum RunError {
    /// The lock was not acquired. Nothing was started.
    #[error("the work was not started: its lock was not acquired")]
    NotStarted(#[from] LockError),
    /// The lock was lost, and the work was dropped at an await. It may be partially done.
    #[error("the work was dropped: its lock was lost")]
    Lost(#[from] LockLost),
}

/// Too many releases have not reached the store.
#[derive(Clone, Debug, Error)]
#[error("{MAX_PENDING_RELEASES} releases have not reached the store; acquisitions are rejected until they have")]
pub(super) struct PendingReleases {
    /// Why the newest of them failed. `None` if none has failed yet.
    #[source]
    pub(super) last_error: Option<StoreError>,
}

impl LockError {
    pub(super) fn busy(lease_left: Duration, ahead: usize) -> Self {
        Self::Busy { lease_left, ahead }
    }
}

impl LockLost {
    /// The reasons with a code, which an atomic deadline stores in place of an instant.
    const CODED: [Self; 5] = [Self::Expired, Self::Revoked, Self::HoldLimitReached, Self::ShuttingDown, Self::Released];

    pub(super) fn code(self) -> u64 {
        self as u64
    }

    /// Whether the lock was lost, and not released or shut down.
    pub(super) fn is_loss(self) -> bool {
        matches!(self, Self::Expired | Self::Revoked | Self::HoldLimitReached)
    }

    pub(super) fn from_code(code: u64) -> Option<Self> {
        Self::CODED.get(usize::try_from(code).ok()?).copied()
    }
}

impl fmt::Display for QueueBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "the queue of the lock is full",
            Self::Process => "too many callers wait for locks in this process",
            Self::Store => "too many processes wait for the lock",
        })
    }
}

impl From<StoreError> for LockError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
