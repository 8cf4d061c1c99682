use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use super::{
    HeldLock,
    driver::Driver,
    driver_data::{Section, SectionData},
};
use crate::{
    error::LockLost, fencing::FencingToken, lock_key::LockKey, proto::GuardEnd, proto::section::ReleaseOutcome,
    store::StoreError, telemetry::metrics::GuardMetrics,
};

/// The duty to give a lock back.
///
/// It cannot be cloned; [`held_lock`](Self::held_lock) can, and an [`Owner`](crate::Owner) that asks again gets a guard of its own. [`release`](Self::release) ends it in
/// order: the next one has the key at once.
///
/// Dropped, it gives the lock back without waiting, but nobody can tell whether that was the end of the work or the middle of it: the
/// future it lived in may have been dropped while a statement was on its way. So the key stays taken for the
/// [lock-delay](crate::LockPolicy::lock_delay) of a second. Where no runtime is, the last one that these locks were used in
/// asks the store; if that has ended, the lease does.
///
/// A guard that is neither released nor dropped (`mem::forget`, a reference cycle, a task that never
/// ends) holds its key, and the lease is renewed: until [`max_hold`](crate::LockPolicy::max_hold) if the
/// call set one, else until the process ends.
#[must_use = "a guard that is dropped keeps its key taken for the lock-delay: call `release`"]
pub struct LockGuard {
    core: Arc<Driver>,
    section: Arc<Section>,
    metrics: GuardMetrics,
    is_ended: bool,
}

/// What becomes of a lock that is given back. The giving back has begun already, and goes on if this is dropped.
#[must_use = "the lock is given back all the same; awaited, this says when, and whether it was ours to the end"]
pub struct ReleaseFuture {
    said: Option<ReleaseOutcome>,
    section: Arc<Section>,
}

impl LockGuard {
    pub(super) fn new(core: Arc<Driver>, section: Arc<Section>, metrics: GuardMetrics) -> Self {
        Self { core, section, metrics, is_ended: false }
    }

    /// What is locked. Redisson's `getName()`.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.section.grant.key
    }

    /// The number to hand to whatever is written to under this lock.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.section.token
    }

    /// What a handler sees of the lock: it can be cloned, and gives nothing back.
    #[must_use]
    pub fn held_lock(&self) -> HeldLock {
        HeldLock::new(Arc::clone(&self.section), Arc::clone(&self.core))
    }

    /// How many guards of this lock its owner has: the lock ends with the last one. Redisson's `getHoldCount()`. Zero: it was lost.
    #[must_use]
    pub fn hold_count(&self) -> u32 {
        self.core.hold_count_of(&self.section)
    }

    #[cfg(all(test, tower_lock_shuttle))]
    pub(super) fn grant(&self) -> &Arc<crate::proto::grant::Grant> {
        &self.section.grant
    }

    /// For how long its key stays taken at the least, from the grant on.
    pub(crate) fn min_hold(&self) -> Duration {
        self.section.limits.min_hold
    }

    /// Runs a future as long as the lock is ours, and not one poll longer. See [`HeldLock::while_held`].
    ///
    /// # Errors
    ///
    /// The lock was lost; the future was dropped where it stood.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        self.held_lock().while_held(work).await
    }

    /// Gives the lock back in order; the future says what became of it. Redisson's `unlock()`.
    ///
    /// The giving back begins with this call, not with the await: where nobody can wait, `drop(guard.release())` ends a lock in
    /// order, too. If this was the last guard of its owner the next one in line has its turn, here or elsewhere; or, if it
    /// was asked for with [`min_hold`](crate::LockPolicy::min_hold), when that is over.
    ///
    /// # Errors
    ///
    /// The store has not answered yet, within half a second. It is asked on, for as long as the lease lasts; then the key is free anyway.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the lock is given back all the same.
    pub fn release(self) -> ReleaseFuture {
        self.end(GuardEnd::Released)
    }

    /// Gives the lock back in order, though what ran under it has failed: a [`min_hold`](crate::LockPolicy::min_hold) does not keep the key
    /// taken, so that another one can try at once. Else as [`release`](Self::release).
    pub fn release_after_failure(self) -> ReleaseFuture {
        self.end(GuardEnd::ReleasedAfterFailure)
    }

    fn end(mut self, ending: GuardEnd) -> ReleaseFuture {
        let said = self.give_back(ending);
        ReleaseFuture { said, section: Arc::clone(&self.section) }
    }

    fn give_back(&mut self, ending: GuardEnd) -> Option<ReleaseOutcome> {
        self.is_ended = true;
        // Before the next waiter is woken: a recorder that blocks delays this task alone.
        SectionData::record_loss(&self.section);
        let held_for = self.core.clock.now().saturating_duration_since(self.section.started_at);
        self.metrics.finish(&self.section.data.metrics, held_for);
        self.core.end_guard(&self.section, ending)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if !self.is_ended {
            self.give_back(GuardEnd::Dropped);
        }
    }
}

impl Future for ReleaseFuture {
    type Output = Result<ReleaseOutcome, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.said {
            Some(said) => Poll::Ready(Ok(said)),
            None => self.section.data.release_outcome.poll_recv(cx),
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard").field("key", self.key()).field("token", &self.section.token).finish_non_exhaustive()
    }
}

impl fmt::Debug for ReleaseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Release").field("key", &self.section.grant.key).finish_non_exhaustive()
    }
}
