//! Several held locks, as the code under them sees them.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::pin,
    slice,
    sync::Arc,
    time::Duration,
};

use super::{
    HeldLock,
    held::{LossSignal, poll_any, while_held},
};
use crate::{
    error::{InsufficientTime, LockLost},
    lock_key::LockKey,
};

/// Views of several locks that are held together, one for each key.
///
/// A clone is cheap. The views neither hold nor release the locks. With the feature `axum` this is
/// an extractor for handlers under a [`LockLayer`](crate::LockLayer) whose key function returns
/// [`key::all`](crate::key::all).
///
/// Each key has a fencing token of its own. Tokens of two keys cannot be compared.
#[derive(Clone)]
pub struct HeldLocks(
    /// In the order of the keys.
    Arc<[HeldLock]>,
);

impl HeldLocks {
    pub(crate) fn new(locks: impl IntoIterator<Item = HeldLock>) -> Self {
        Self(locks.into_iter().collect())
    }

    /// Returns the lock of this key, if it is one of them.
    #[must_use]
    pub fn get(&self, key: impl Into<LockKey>) -> Option<&HeldLock> {
        let key = key.into();
        self.iter().find(|lock| *lock.key() == key)
    }

    /// Iterates over the locks, in the order of their keys.
    pub fn iter(&self) -> slice::Iter<'_, HeldLock> {
        self.0.iter()
    }

    /// Returns how long all locks are held at least: the least of their
    /// [remaining times](HeldLock::remaining).
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.iter().map(HeldLock::remaining).min().unwrap_or_default()
    }

    /// Completes when one of the locks is not held any more. Returns the reason.
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe: a loss is not missed if the future is dropped and created again.
    pub async fn lost(&self) -> LockLost {
        let mut signals: Vec<_> = self.iter().cloned().map(HeldLock::into_loss_signal).collect();
        poll_fn(|cx| poll_any(&mut signals, cx)).await
    }

    pub(crate) fn into_loss_signal(self) -> LossSignal {
        Box::pin(async move { self.lost().await })
    }

    /// Checks that all locks are held for at least this time.
    ///
    /// # Errors
    ///
    /// Fails if less time remains for one of the locks, or if one of them is not held any more.
    pub fn ensure_remaining(&self, required: Duration) -> Result<(), InsufficientTime> {
        self.iter().try_for_each(|lock| lock.ensure_remaining(required))
    }

    /// Runs a future while all locks are held. The future is not polled after one of them is lost.
    ///
    /// # Errors
    ///
    /// Fails if a lock is lost. The future was then dropped at an await, or completed in a poll
    /// that took too long.
    ///
    /// # Cancel safety
    ///
    /// If the returned future is dropped, `work` is dropped.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        let mut lost = pin!(self.lost());
        while_held(pin!(work), || self.loss(), |cx| lost.as_mut().poll(cx)).await
    }

    /// Returns why one of the locks is not held any more, if one is not.
    pub(crate) fn loss(&self) -> Option<LockLost> {
        self.iter().find_map(HeldLock::loss)
    }
}

impl<'a> IntoIterator for &'a HeldLocks {
    type Item = &'a HeldLock;
    type IntoIter = slice::Iter<'a, HeldLock>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Debug for HeldLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
