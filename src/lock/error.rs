use std::{error::Error, fmt, time::Duration};

use crate::store::StoreError;

/// Why there is no guard. Nothing is held, and nothing was started.
#[derive(Debug)]
#[non_exhaustive]
pub enum LockError {
    /// Somebody else has the key, and the call does not wait.
    Held {
        /// How long the holder's lease runs at most, as things stand.
        lease_left: Duration,
        /// How many would be served first, the holder included, as far as this process knows.
        ahead: usize,
    },
    /// The wait is over, and it never was our turn.
    TimedOut {
        /// How long it took.
        waited: Duration,
        /// How long the holder's lease runs at most, as things stand.
        lease_left: Duration,
        /// How many would still be served first, the holder included, as far as this process knows.
        ahead: usize,
    },
    /// So many wait that one more would only wait in vain: 256 for one key, 10 000 in the process.
    LineFull {
        /// How many would be served first, the holder included.
        ahead: usize,
    },
    /// The store could not say whether the key is free.
    Store(StoreError),
}

/// The lock is not ours any more: its deadline is over without a renewal, or the store gave it to somebody else.
///
/// What ran under it may have done a part of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockLost;

impl fmt::Display for LockLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the lock was lost before the work under it had ended")
    }
}

impl Error for LockLost {}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held { .. } => f.write_str("the lock is held by somebody else"),
            Self::TimedOut { waited, .. } => write!(f, "waited {waited:?} for the lock in vain"),
            Self::LineFull { ahead } => write!(f, "no place in the line for the lock, {ahead} are before this one"),
            Self::Store(_) => f.write_str("the store could not say whether the lock is free"),
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

impl From<StoreError> for LockError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
