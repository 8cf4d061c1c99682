//! A held lock: its guard, and its release.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use smallvec::SmallVec;

use super::{HeldLock, driver::Driver, driver_data::Section};
use crate::{
    error::LockLost,
    fencing::FencingToken,
    lock_key::LockKey,
    owner::Owner,
    proto::{GuardEnd, hold_limits::HoldLimits, section::ReleaseOutcome},
    store::{NewRecord, StoreError},
    telemetry::{
        metrics::{AcquireMetrics, GuardMetrics},
        notice,
    },
};

/// Guard of a held lock. The lock is released when the guard is dropped or
/// [released](Self::release).
///
/// Call [`release`](Self::release) when the work is complete: the next waiter then gets the lock at
/// once. A guard cannot be cloned. [`held_lock`](Self::held_lock) returns a view that can be
/// cloned. An [`Owner`](crate::Owner) that acquires the lock again gets another guard.
///
/// The drop of a guard also releases the lock, and does not wait. However, the work may have been
/// interrupted: the future that contains the guard may have been dropped while a statement was in
/// flight. The key therefore stays blocked for the [lock-delay](crate::LockPolicy::lock_delay), 1
/// second by default. If the guard is dropped on a thread without a runtime, the runtime of the
/// last call sends the release. If that runtime has ended, the lease expires.
///
/// A guard that is neither released nor dropped (`mem::forget`, a reference cycle, a task that
/// never ends) holds its key. The lease is renewed until [`max_hold`](crate::LockPolicy::max_hold)
/// if the call has one, otherwise until the process ends.
#[must_use = "a guard that is dropped, as by `let _ =`, blocks its key for the lock-delay: bind it, and call `release`"]
pub struct LockGuard {
    driver: Arc<Driver>,
    section: Arc<Section>,
    metrics: GuardMetrics,
    /// Whether the permit is counted as that of this guard.
    counts_permit: bool,
    is_ended: bool,
}

/// Future of the release of a lock, or of several together. Returns the outcome.
///
/// The release was sent before the future was returned, and continues if the future is dropped.
#[must_use = "the lock is released all the same; the result says whether it was held to the end"]
pub struct ReleaseFuture {
    /// The sections whose outcome the store has not sent yet.
    pending: SmallVec<[Arc<Section>; 1]>,
    /// The most important one of the others.
    outcome: Result<ReleaseOutcome, StoreError>,
}

impl LockGuard {
    pub(super) fn new(driver: Arc<Driver>, section: Arc<Section>, metrics: GuardMetrics) -> Self {
        Self { driver, section, metrics, counts_permit: false, is_ended: false }
    }

    pub(super) fn section(&self) -> &Section {
        &self.section
    }

    /// The guard that a call has got.
    pub(super) fn of_call(
        driver: Arc<Driver>,
        section: Arc<Section>,
        owner: Option<Owner>,
        metrics: Option<AcquireMetrics>,
    ) -> Self {
        if let Some(owner) = owner {
            owner.acquired(Arc::clone(&section) as _);
        }
        let of_guard = GuardMetrics::new(&section.data.metrics);
        let mut guard = Self::new(driver, section, of_guard);
        if let Some(metrics) = metrics {
            guard.count(metrics);
        }
        guard
    }

    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.section.grant.key
    }

    /// Returns the fencing token. Store it with each write under this lock.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.section.token
    }

    /// Returns a view of the lock. It can be cloned, and does not release the lock.
    #[must_use]
    pub fn held_lock(&self) -> HeldLock {
        HeldLock::new(Arc::clone(&self.section), Arc::clone(&self.driver))
    }

    /// Returns the number of guards that the owner has for this lock. Zero if the lock was lost.
    ///
    /// The lock is released with the last guard.
    #[must_use]
    pub fn hold_count(&self) -> u32 {
        self.driver.hold_count_of(&self.section)
    }

    #[cfg(all(test, tower_lock_shuttle))]
    pub(super) fn grant(&self) -> &Arc<super::driver_data::Grant> {
        &self.section.grant
    }

    /// Returns why the lock is not held any more, if it is not.
    pub(crate) fn loss(&self) -> Option<LockLost> {
        self.section.loss(self.driver.clock.now())
    }

    /// The time since the grant.
    pub(crate) fn held_for(&self) -> Duration {
        self.driver.clock.now().saturating_duration_since(self.section.started_at)
    }

    /// The minimum hold, from the grant on.
    pub(crate) fn min_hold(&self) -> Duration {
        self.section.min_hold()
    }

    /// Runs a future while the lock is held. The future is not polled after the lock is lost. See
    /// [`HeldLock::while_held`].
    ///
    /// # Errors
    ///
    /// Fails if the lock is lost before the future completes.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        self.held_lock().while_held(work).await
    }

    /// Releases the lock. The future returns the outcome.
    ///
    /// This call sends the release, not the await. In code that cannot await,
    /// `drop(guard.release())` also releases the lock without a lock-delay. If this was the last
    /// guard of its owner, the next waiter gets the lock, in this process or in another one. With
    /// [`min_hold`](crate::LockPolicy::min_hold) it gets the lock when that time has passed.
    ///
    /// # Errors
    ///
    /// Fails if the store does not reply within its call timeout, half a second by default. The
    /// release is then repeated until the lease has expired and the key is free.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lock is released nevertheless.
    pub fn release(self) -> ReleaseFuture {
        self.end_with(GuardEnd::Released)
    }

    /// Releases the lock after work that has failed.
    ///
    /// A [`min_hold`](crate::LockPolicy::min_hold) then does not block the key, so that another
    /// caller can try at once. Otherwise the same as [`release`](Self::release).
    pub fn release_after_failure(self) -> ReleaseFuture {
        self.end_with(GuardEnd::ReleasedAfterFailure)
    }

    /// Releases the lock, and leaves this record in the same step of the store, if the lock is held
    /// until then.
    pub(crate) fn release_with_record(self, record: NewRecord) -> ReleaseFuture {
        self.end_with(GuardEnd::Recorded(Arc::new(record)))
    }

    fn end_with(mut self, end: GuardEnd) -> ReleaseFuture {
        let outcome = self.end(end);
        ReleaseFuture::new().with(&self.section, outcome)
    }

    fn end(&mut self, end: GuardEnd) -> Option<ReleaseOutcome> {
        self.finish_metrics();
        self.driver.end_guard(&self.section, end)
    }

    fn finish_metrics(&mut self) {
        self.is_ended = true;
        // Before the next waiter is woken: a recorder that blocks delays this task alone.
        self.metrics.finish(&self.section.data.metrics, self.counts_permit, || self.held_for());
    }

    /// Ends guards of different keys together.
    pub(crate) fn end_all(mut guards: SmallVec<[Self; 1]>, end: GuardEnd) -> ReleaseFuture {
        match &mut *guards {
            [] => ReleaseFuture::new(),
            [guard] => {
                let outcome = guard.end(end);
                ReleaseFuture::new().with(&guard.section, outcome)
            }
            [first, ..] => {
                let driver = Arc::clone(&first.driver);
                guards.iter_mut().for_each(Self::finish_metrics);
                let outcomes = driver.end_guards(guards.iter().map(|guard| &guard.section), &end);
                let ended = guards.iter().zip(outcomes);
                ended.fold(ReleaseFuture::new(), |release, (guard, outcome)| release.with(&guard.section, outcome))
            }
        }
    }

    /// Counts the call whose guard this is, the first one of its keys.
    pub(super) fn count(&mut self, call: AcquireMetrics) {
        let is_permit = self.section.grant.id.max_holders() > 1;
        self.counts_permit = call.granted(&mut self.metrics, &self.section.data.metrics, is_permit);
    }

    /// Has the limits of the section count from now, if this is its only guard: another one has
    /// started it.
    pub(super) fn restart_limits(&self, limits: HoldLimits) {
        if self.hold_count() == 1 {
            let now = self.driver.now();
            self.section.restart_limits(limits, now);
            self.driver.track(Arc::clone(&self.section.grant));
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if !self.is_ended {
            if self.loss().is_none() {
                notice::dropped_guard(self.key(), self.section.token);
            }
            self.end(GuardEnd::Dropped);
        }
    }
}

impl ReleaseFuture {
    fn new() -> Self {
        Self { pending: SmallVec::new(), outcome: Ok(ReleaseOutcome::Released) }
    }

    fn with(mut self, section: &Arc<Section>, outcome: Option<ReleaseOutcome>) -> Self {
        match outcome {
            Some(outcome) => keep_greater(&mut self.outcome, Ok(outcome)),
            None => self.pending.push(Arc::clone(section)),
        }
        self
    }
}

impl Future for ReleaseFuture {
    /// That of several locks is the most important one: [`NotHeld`](ReleaseOutcome::NotHeld) if one
    /// was lost before its release, [`StillHeld`](ReleaseOutcome::StillHeld) if other guards hold
    /// one of the keys.
    type Output = Result<ReleaseOutcome, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { pending, outcome } = &mut *self;
        pending.retain(|section| match section.data.release_outcome.poll_recv(cx) {
            Poll::Ready(next) => {
                keep_greater(outcome, next);
                false
            }
            Poll::Pending => true,
        });
        if pending.is_empty() { Poll::Ready(outcome.clone()) } else { Poll::Pending }
    }
}

fn keep_greater(outcome: &mut Result<ReleaseOutcome, StoreError>, next: Result<ReleaseOutcome, StoreError>) {
    let rank = |outcome: &Result<_, _>| match outcome {
        Ok(ReleaseOutcome::Released) => 0,
        Ok(ReleaseOutcome::HandedOff) => 1,
        Ok(ReleaseOutcome::StillHeld) => 2,
        Ok(ReleaseOutcome::NotHeld) => 3,
        Err(_) => 4,
    };
    if rank(&next) > rank(outcome) {
        *outcome = next;
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard").field("key", self.key()).field("token", &self.section.token).finish_non_exhaustive()
    }
}

impl fmt::Debug for ReleaseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReleaseFuture").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}
