use std::{error::Error, fmt, time::Duration};

use crate::{limits::MAX_PENDING_RELEASES, store::StoreError};

/// Why there is no guard. Nothing is held, and nothing was started.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LockError {
    /// Somebody else has the key, and the call does not wait.
    Busy {
        /// How long the holder's lease runs at most, as things stand.
        lease_left: Duration,
        /// How many would be served first, the holder included, as far as this process knows.
        ahead: usize,
    },
    /// The wait is over, and it never was our turn.
    TimedOut {
        /// How long: the limit of the wait.
        waited: Duration,
        /// How long the holder's lease runs at most, as things stand.
        lease_left: Duration,
        /// How many would still be served first, the holder included, as far as this process knows.
        ahead: usize,
    },
    /// So many wait that one more would only wait in vain.
    QueueFull {
        /// How many would be served first, the holder included: callers in this process, or, for
        /// [`QueueBound::Store`], processes.
        ahead: usize,
        /// Which bound was reached.
        bound: QueueBound,
    },
    /// The store could not say whether the key is free; or 10 000 releases have not reached it, and
    /// nothing new is acquired until they have. The [source](Error::source) says which.
    Store(StoreError),
    /// The request in which this task was spawned holds the lock, or waits for it. If its handler waits
    /// for the task, each would wait for the other. See [`Owner`](crate::Owner#spawned-tasks).
    WouldDeadlock,
    /// These locks are being [shut down](crate::LockManager::shutdown).
    ShuttingDown,
}

/// A bound on the number of waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueBound {
    /// 256 callers wait for the key in this process.
    Key,
    /// So many callers wait in this process, 10 000 at most, that no more may wait for this key. One
    /// key gets a share of what is left, so that a flood on some keys leaves room for others.
    Process,
    /// 1 024 processes wait for the key in the store.
    Store,
}

/// The lock is not ours any more, and why. It never is again.
///
/// What ran under it may have done a part of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockLost {
    /// Its deadline is over, and the store has not answered a renewal: it may have given the key to somebody else.
    Expired,
    /// The store has given it to somebody else, has forgotten it, or an operator has [taken it away](crate::LockManager::force_release).
    Revoked,
    /// Its fixed lease, or its `max_hold`, is over.
    HoldLimitReached,
    /// Its process shuts down, and the [budget](crate::LockManager::shutdown_on_signal) for that was spent.
    ShuttingDown,
    /// It was given back, in time.
    Released,
    /// It is ours still, but not for as long as was asked. Only [`ensure_remaining`](crate::HeldLock::ensure_remaining) says so.
    TooShort,
}

/// Why [`LockBuilder::run`](crate::lock::LockBuilder::run) did not come to its end.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RunError {
    /// The lock could not be had. Nothing was started.
    NotStarted(LockError),
    /// The lock was lost, and the work dropped where it stood. What it has done is not known.
    Lost(LockLost),
}

/// The bound of releases that have not reached the store is reached.
#[derive(Clone, Debug)]
pub(super) struct PendingReleases {
    /// Why the newest of them failed. `None`: none has failed yet, the store has not answered.
    pub(super) last_error: Option<StoreError>,
}

impl LockLost {
    /// Those for which a lock is over. They are written down where a deadline stands otherwise, as moments that are long gone.
    const OVER: [Self; 5] = [Self::Expired, Self::Revoked, Self::HoldLimitReached, Self::ShuttingDown, Self::Released];

    pub(super) fn code(self) -> u64 {
        self as u64
    }

    /// It was not given back.
    pub(super) fn is_loss(self) -> bool {
        matches!(self, Self::Expired | Self::Revoked | Self::HoldLimitReached)
    }

    pub(super) fn from_code(code: u64) -> Option<Self> {
        Self::OVER.get(usize::try_from(code).ok()?).copied()
    }
}

impl fmt::Display for LockLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "the lock was lost before the work under it had ended: the store did not renew it in time",
            Self::Revoked => "the lock was lost before the work under it had ended: it was taken away",
            Self::HoldLimitReached => "the lock was lost before the work under it had ended: it was held for too long",
            Self::ShuttingDown => "the lock was lost before the work under it had ended: its process shuts down",
            Self::Released => "the lock was given back already",
            Self::TooShort => "the lock is not ours for as long as was asked",
        })
    }
}

impl Error for LockLost {}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy { .. } => f.write_str("the lock is held by somebody else"),
            Self::TimedOut { waited, .. } => write!(f, "waited {waited:?} for the lock in vain"),
            Self::QueueFull { ahead, bound } => {
                f.write_str(match bound {
                    QueueBound::Key => "the queue for the lock is full",
                    QueueBound::Process => "too many callers wait for locks in this process",
                    QueueBound::Store => "too many processes wait for the lock",
                })?;
                write!(f, ": {ahead} are ahead")
            }
            Self::WouldDeadlock => f.write_str(
                "the request that spawned this task holds the lock or waits for it: share the lock with \
                 `.owner(&owner)`, where `owner` is `Owner::current()` taken before the spawn, or wait for the \
                 request to end with `.owner(&Owner::new())`",
            ),
            Self::Store(_) => f.write_str("the store could not say whether the lock is free"),
            Self::ShuttingDown => {
                f.write_str("no lock is taken any more: the locks of this process are being shut down")
            }
        }
    }
}

impl Error for LockError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Store(error) => Some(error),
            _ => None,
        }
    }
}

impl fmt::Display for PendingReleases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{MAX_PENDING_RELEASES} releases have not reached the store yet; acquisitions are rejected until they have"
        )
    }
}

impl Error for PendingReleases {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.last_error.as_ref().map(|error| error as &(dyn Error + 'static))
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarted(_) => "the work was not started: there was no lock for it",
            Self::Lost(_) => "the work was broken off: its lock was lost",
        })
    }
}

impl Error for RunError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::NotStarted(error) => Some(error),
            Self::Lost(lost) => Some(lost),
        }
    }
}

impl From<LockError> for RunError {
    fn from(error: LockError) -> Self {
        Self::NotStarted(error)
    }
}

impl From<LockLost> for RunError {
    fn from(lost: LockLost) -> Self {
        Self::Lost(lost)
    }
}

impl From<StoreError> for LockError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
