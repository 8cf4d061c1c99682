//! The guards of one lock or of several, which are released together.

use std::{fmt, future::Future, mem};

use smallvec::{SmallVec, smallvec};

use super::{HeldLock, HeldLocks, LockGuard, ReleaseFuture};
use crate::{
    error::LockLost,
    lock_key::LockKey,
    proto::{GuardEnd, hold_limits::HoldLimits},
    telemetry::metrics::AcquireMetrics,
};

/// Guards of several locks that were acquired together. Created by
/// [`LockManager::lock_all`](super::LockManager::lock_all).
///
/// The locks are released together when the guards are [released](Self::release) or dropped. A drop
/// blocks the keys for their [lock-delay](crate::LockPolicy::lock_delay), as the drop of a
/// [`LockGuard`] does.
#[must_use = "guards that are dropped block their keys for the lock-delay: call `release`"]
pub struct LockGuards {
    /// In the order of the keys. Empty after the release.
    guards: SmallVec<[LockGuard; 1]>,
    /// Nothing has run under the locks: their drop leaves the keys free.
    are_unused: bool,
}

impl LockGuards {
    /// The guard of the only key of a call.
    pub(super) fn one(guard: LockGuard) -> Self {
        Self { guards: smallvec![guard], are_unused: false }
    }

    /// Guards of locks under which nothing has run.
    pub(super) fn unused(guards: impl IntoIterator<Item = LockGuard>) -> Self {
        Self { guards: guards.into_iter().collect(), are_unused: true }
    }

    /// The work under the locks starts: their limits count from now.
    pub(super) fn start(&mut self, limits: HoldLimits, metrics: Option<AcquireMetrics>) {
        self.are_unused = false;
        self.guards.iter().for_each(|guard| guard.restart_limits(limits));
        if let (Some(first), Some(metrics)) = (self.guards.first_mut(), metrics) {
            first.count(metrics);
        }
    }

    pub(super) fn push(&mut self, guard: LockGuard) {
        self.guards.push(guard);
    }

    pub(super) fn len(&self) -> usize {
        self.guards.len()
    }

    /// Returns views of the locks. They can be cloned, and release nothing.
    #[must_use]
    pub fn held_locks(&self) -> HeldLocks {
        HeldLocks::new(self.guards.iter().map(LockGuard::held_lock))
    }

    /// Returns the lock of this key, if it is one of them.
    #[must_use]
    pub fn get(&self, key: impl Into<LockKey>) -> Option<HeldLock> {
        let key = key.into();
        self.guards.iter().find(|guard| *guard.key() == key).map(LockGuard::held_lock)
    }

    /// Runs a future while all locks are held. The future is not polled after one of them is lost.
    ///
    /// # Errors
    ///
    /// Fails if a lock is lost before the future completes.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        self.held_locks().while_held(work).await
    }

    /// Releases the locks together. The future returns the outcome.
    ///
    /// This call sends the releases, not the await.
    ///
    /// # Errors
    ///
    /// Fails if the store does not reply to one of the releases within its call timeout. That
    /// release is repeated until the lease has expired and the key is free.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the locks are released nevertheless.
    pub fn release(mut self) -> ReleaseFuture {
        self.end(GuardEnd::Released)
    }

    /// Releases the locks after work that has failed: a
    /// [`min_hold`](crate::LockPolicy::min_hold) does not block the keys. Otherwise the same as
    /// [`release`](Self::release).
    pub fn release_after_failure(mut self) -> ReleaseFuture {
        self.end(GuardEnd::ReleasedAfterFailure)
    }

    /// The guards, for a request.
    pub(crate) fn into_guards(mut self) -> SmallVec<[LockGuard; 1]> {
        mem::take(&mut self.guards)
    }

    /// Why one of the locks is not held any more.
    pub(super) fn loss(&self) -> Option<LockLost> {
        self.guards.iter().find_map(LockGuard::loss)
    }

    /// Starts the release, once.
    fn end(&mut self, end: GuardEnd) -> ReleaseFuture {
        LockGuard::end_all(mem::take(&mut self.guards), end)
    }
}

impl Drop for LockGuards {
    fn drop(&mut self) {
        if self.are_unused {
            drop(self.end(GuardEnd::ReleasedAfterFailure));
        }
    }
}

impl fmt::Debug for LockGuards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.guards).finish()
    }
}
