use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use super::{HeldLock, HeldLocks, LockGuard, ReleaseFuture};
use crate::{
    error::LockLost,
    lock_key::LockKey,
    proto::{GuardEnd, hold_limits::HoldLimits, section::ReleaseOutcome},
    store::StoreError,
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
    guards: Vec<LockGuard>,
    views: HeldLocks,
}

/// Future of the release of several locks. Returns their outcome.
///
/// The releases were sent before the future was returned, and continue if the future is dropped.
#[must_use = "the locks are released all the same; the result says whether they were held to the end"]
#[derive(Debug)]
pub struct ReleaseAllFuture {
    pending: Vec<ReleaseFuture>,
    outcome: Result<ReleaseOutcome, StoreError>,
}

/// Guards of locks under which nothing has run. Their drop releases the locks at once.
pub(super) struct UnusedGuards(pub(super) Vec<LockGuard>);

impl LockGuards {
    /// Returns views of the locks. They can be cloned, and release nothing.
    #[must_use]
    pub fn held_locks(&self) -> HeldLocks {
        self.views.clone()
    }

    /// Returns the lock of this key, if it is one of them.
    #[must_use]
    pub fn get(&self, key: impl Into<LockKey>) -> Option<&HeldLock> {
        self.views.get(key)
    }

    /// Runs a future while all locks are held. The future is not polled after one of them is lost.
    ///
    /// # Errors
    ///
    /// Fails if a lock is lost before the future completes.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        self.views.while_held(work).await
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
    pub fn release(self) -> ReleaseAllFuture {
        self.end_with(&GuardEnd::Released)
    }

    /// Releases the locks after work that has failed: a
    /// [`min_hold`](crate::LockPolicy::min_hold) does not block the keys. Otherwise the same as
    /// [`release`](Self::release).
    pub fn release_after_failure(self) -> ReleaseAllFuture {
        self.end_with(&GuardEnd::ReleasedAfterFailure)
    }

    fn end_with(mut self, end: &GuardEnd) -> ReleaseAllFuture {
        let pending = LockGuard::end_all(std::mem::take(&mut self.guards), end);
        ReleaseAllFuture { pending, outcome: Ok(ReleaseOutcome::Released) }
    }

    /// Why one of the locks is not held any more.
    pub(crate) fn loss(&self) -> Option<LockLost> {
        self.views.loss()
    }

    /// The time since the last grant.
    pub(crate) fn held_for(&self) -> Duration {
        self.guards.iter().map(LockGuard::held_for).min().unwrap_or_default()
    }

    /// The minimum hold, from the last grant on.
    pub(crate) fn min_hold(&self) -> Duration {
        self.guards.iter().map(LockGuard::min_hold).min().unwrap_or_default()
    }
}

impl UnusedGuards {
    /// The work under the locks starts: their limits count from now.
    pub(super) fn start(mut self, limits: HoldLimits, metrics: AcquireMetrics) -> LockGuards {
        let mut guards = std::mem::take(&mut self.0);
        guards.iter().for_each(|guard| guard.restart_limits(limits));
        if let Some(first) = guards.first_mut() {
            metrics.granted_all(first.metrics());
        }
        let views = HeldLocks::new(guards.iter().map(LockGuard::held_lock));
        LockGuards { guards, views }
    }

    pub(super) fn is_any_lost(&self) -> bool {
        self.0.iter().any(|guard| guard.loss().is_some())
    }
}

impl Drop for UnusedGuards {
    fn drop(&mut self) {
        drop(LockGuard::end_all(std::mem::take(&mut self.0), &GuardEnd::ReleasedAfterFailure));
    }
}

impl Future for ReleaseAllFuture {
    /// The most important outcome: [`NotHeld`](ReleaseOutcome::NotHeld) if one lock was lost before
    /// its release, [`StillHeld`](ReleaseOutcome::StillHeld) if other guards hold one of the keys.
    type Output = Result<ReleaseOutcome, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { pending, outcome } = &mut *self;
        pending.retain_mut(|release| match Pin::new(release).poll(cx) {
            Poll::Ready(next) => {
                if rank(&next) > rank(outcome) {
                    *outcome = next;
                }
                false
            }
            Poll::Pending => true,
        });
        if pending.is_empty() { Poll::Ready(outcome.clone()) } else { Poll::Pending }
    }
}

fn rank(outcome: &Result<ReleaseOutcome, StoreError>) -> u8 {
    match outcome {
        Ok(ReleaseOutcome::Released) => 0,
        Ok(ReleaseOutcome::HandedOff) => 1,
        Ok(ReleaseOutcome::StillHeld) => 2,
        Ok(ReleaseOutcome::NotHeld) => 3,
        Err(_) => 4,
    }
}

impl fmt::Debug for LockGuards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.guards).finish()
    }
}
