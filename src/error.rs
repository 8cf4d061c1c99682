//! The errors of acquiring a lock, and of holding it.

use std::{fmt, time::Duration};

use thiserror::Error;

use crate::{
    limits::MAX_RELEASES_UNDER_WAY,
    lock_key::{KeyCountError, LockKey},
    store::StoreError,
    trace::SectionTrace,
};

/// Reason why a lock was not acquired. No lock is held, and no work was started.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another owner holds the lock, or as many hold the key as the call allows, and the call does
    /// not wait.
    #[error(
        "the lock is held by another owner, or by as many as the call allows, or its key is blocked ({lease_left:?} left): \
         `LockManager::inspect` shows by what"
    )]
    Busy {
        /// The rest of the holder's lease. The holder may release sooner, or renew.
        lease_left: Duration,
        /// The number of owners that are served first, the holder included, as far as this process
        /// knows.
        ahead: usize,
        /// The section that has taken the grant of the key, or an earlier one of its process. Only
        /// with [traces](crate::LockManagerBuilder::traces).
        held_by: Option<SectionTrace>,
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
        /// As of [`Busy`](Self::Busy).
        held_by: Option<SectionTrace>,
    },
    /// Too many callers wait already.
    #[error("{bound} ({ahead} callers are ahead)")]
    QueueFull {
        /// The number of callers in this process that are served first, the holder included. For
        /// [`QueueBound::Store`], the number of processes.
        ahead: usize,
        /// The bound that was reached.
        bound: QueueBound,
    },
    /// The store failed or did not reply in time. The text and the sources are those of the error
    /// of the store.
    ///
    /// It is also returned while 10,000 releases have not reached the store, because no lock is
    /// acquired then.
    #[error(transparent)]
    Store(StoreError),
    /// The call would wait for itself.
    ///
    /// Either its owner holds a permit or a read of the key and asks for the key alone, which is
    /// free for it only after its own section; or the call would wait in a task whose request holds
    /// the lock or waits for it, and if the handler of the request awaits the task, each would wait
    /// for the other. See [`Owner`](crate::Owner#spawned-tasks).
    #[error(
        "the call would wait for itself: its owner holds a permit or a read of the key, which it must release first, \
         or the request that spawned this task holds the lock or waits for it: share the lock with \
         `.owner(&owner)`, where `owner` is `Owner::current()` taken before the spawn, or wait for \
         the request to end with `.owner(&Owner::new())`"
    )]
    WouldDeadlock,
    /// A newer request has replaced this one while it waited: see
    /// [`LockLayer::newest_wins`](crate::LockLayer::newest_wins).
    #[error("a newer request for the key has replaced this one")]
    Superseded,
    /// The manager is [shutting down](crate::LockManager::shutdown).
    #[error("the lock manager is shutting down")]
    ShuttingDown,
}

/// Bound on the number of waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueBound {
    /// 256 callers wait for the key in this process.
    Key,
    /// The waiters of all keys in this process leave no capacity for this key.
    ///
    /// At most 10,000 callers wait for the locks of one [`LockManager`](crate::LockManager) and its
    /// clones. One key may use only a part of the remaining capacity, so that a flood on some keys
    /// leaves capacity for others.
    Process,
    /// 1,024 processes wait for the key in the store.
    Store,
}

/// Reason why a lock is not held any more, which is final.
///
/// The work under the lock may be partially done.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockLost {
    /// The deadline of the lock has passed without a successful renewal. The store may have granted
    /// the key to another owner.
    #[error(
        "the lock was lost: its lease expired before a renewal succeeded (the store did not reply, the process was stopped, or a handler blocked its thread)"
    )]
    Expired,
    /// The store reports another holder or none: an operator has
    /// [revoked](crate::LockManager::force_release) the lock, or the store has lost its data.
    #[error("the lock was lost: it was revoked, or the store has lost its data")]
    Revoked,
    /// The fixed lease or the `max_hold` of the lock has passed.
    #[error("the lock was lost: its hold limit was reached (`max_hold` or a fixed lease)")]
    HoldLimitReached,
    /// The process is shutting down, and the [budget](crate::LockManager::shutdown_on_signal) is
    /// used up.
    #[error("the lock was lost: its process shuts down")]
    ShuttingDown,
    /// A newer request has [replaced](crate::LockLayer::newest_wins) that of the lock, whose work
    /// was dropped. This is not a loss: the lock was held until then.
    #[error("a newer request for the key has replaced this one")]
    Superseded,
    /// The lock was released. This is not a loss.
    #[error("the lock was released")]
    Released,
}

/// Error of [`HeldLock::ensure_remaining`](crate::HeldLock::ensure_remaining): the lock is not held
/// for the required time.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InsufficientTime {
    /// The lock was lost.
    #[error(transparent)]
    Lost(#[from] LockLost),
    /// The lock is held, but may end before the required time has passed.
    #[error("the lock is held for {remaining:?} at least, but {required:?} is required")]
    TooShort {
        /// The time for which the lock is held at least, if it is not renewed.
        remaining: Duration,
        /// The time that the caller requires.
        required: Duration,
    },
}

/// Error of [`LockBuilder::run`](crate::lock::LockBuilder::run): its work was not started, or did
/// not complete.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum RunError {
    /// The lock was not acquired. The work was not started.
    #[error("the work was not started: its lock was not acquired")]
    NotStarted(#[from] LockError),
    /// The lock was lost, and the work was dropped at an await. It may be partially done.
    #[error("the work was dropped: its lock was lost")]
    Lost(#[from] LockLost),
}

/// Reason why several locks were not acquired. None of them is held, and no work was started.
///
/// The text names no key. [`NotAcquired`](Self::NotAcquired) has the key that was not acquired.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum LockAllError {
    /// There is no key, or there are more than 64.
    #[error(transparent)]
    Keys(#[from] KeyCountError),
    /// One of the locks was not acquired.
    #[error("one of the locks was not acquired: {source}")]
    NotAcquired {
        /// The key of that lock: the first one in the order of the keys.
        key: LockKey,
        /// The reason.
        source: LockError,
    },
}

/// Too many releases have not reached the store.
#[derive(Clone, Debug, Error)]
#[error("{MAX_RELEASES_UNDER_WAY} releases have not reached the store; acquisitions are rejected until they have")]
pub(super) struct PendingReleases {
    /// Why the newest of them failed. `None` if none has failed yet.
    #[source]
    pub(super) last_error: Option<StoreError>,
}

/// The manager is the copy of one of the parent process.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("this process is a forked child: create the store and the `LockManager` after the fork")]
pub(super) struct Forked;

impl LockError {
    pub(super) fn busy(lease_left: Duration, ahead: usize) -> Self {
        Self::Busy { lease_left, ahead, held_by: None }
    }

    pub(super) fn held_by(&self) -> Option<&SectionTrace> {
        if let Self::Busy { held_by, .. } | Self::TimedOut { held_by, .. } = self { held_by.as_ref() } else { None }
    }

    /// The result of a call in spans and metrics.
    pub(super) fn result(&self) -> &'static str {
        match self {
            Self::Busy { .. } | Self::WouldDeadlock => "locked",
            Self::TimedOut { .. } => "timed_out",
            Self::QueueFull { .. } => "queue_full",
            Self::Store(_) => "store_unavailable",
            Self::Superseded => "superseded",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

impl LockLost {
    /// Whether the lock was lost, and not released or shut down.
    pub(super) fn is_loss(self) -> bool {
        matches!(self, Self::Expired | Self::Revoked | Self::HoldLimitReached)
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
