//! Permits and reads: a key that several callers hold at the same time.

use std::{
    fmt,
    future::{Future, IntoFuture},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;

use super::{HeldLock, LockBuilder, LockFuture, LockGuard, LockManager, ReleaseFuture};
use crate::{
    error::{InsufficientTime, LockError, LockLost, RunError},
    limits::check_max_holders,
    lock_key::LockKey,
    owner::Owner,
    policy::{LockPolicy, call_setters, settings},
    proto::sharing::Sharing,
};

/// Builder of a call for a permit. Nothing happens before it is awaited.
///
/// Created by [`LockManager::permit`] and [`LockManager::read`]. Awaiting it returns a
/// [`PermitGuard`]. Errors, cancel safety and polling are those of a
/// [`LockBuilder`](super::LockBuilder).
#[derive(Debug)]
#[must_use = "nothing is acquired before the call is awaited"]
pub struct PermitBuilder(LockBuilder);

pin_project! {
    /// Future of a [`PermitBuilder`]. Returns a [`PermitGuard`].
    #[must_use = "futures do nothing unless you `.await` or poll them"]
    pub struct PermitFuture {
        #[pin]
        lock: LockFuture,
    }
}

/// Guard of a permit, or of a read. The permit is released when the guard is dropped or
/// [released](Self::release).
///
/// The same as a [`LockGuard`], without a fencing token: several permits are valid at once, and
/// each has its own lease. If the guard is dropped, the place of this holder stays blocked for the
/// lock-delay.
#[must_use = "a guard that is dropped, as by `let _ =`, blocks its place for the lock-delay: bind it, and call `release`"]
pub struct PermitGuard(LockGuard);

/// View of a permit, or of a read: its key, and the time that remains.
///
/// The same as a [`HeldLock`], without a fencing token. A clone is cheap. A view neither holds nor
/// releases the permit.
#[derive(Clone)]
pub struct HeldPermit(HeldLock);

impl LockManager {
    /// Acquires one of `limit` permits of the key, in all processes that share the store, and waits
    /// for it as [`lock`](Self::lock) does.
    ///
    /// The permit is granted if fewer than `limit` callers hold the key, and none of them alone.
    /// Waiters are served in order of arrival within a process, and processes take turns. If the
    /// first waiter does not fit, those behind it wait, too, so that no caller starves. The permits
    /// of a process that crashes are free after their leases.
    ///
    /// ```
    /// # use tower_lock::{LockManager, LockError};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// # let locks = LockManager::in_memory();
    /// let tenant = 7;
    /// let permit = locks.permit(("export", tenant), 4).await?;
    /// // .. at most four exports of this tenant run at a time
    /// permit.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Calls with different limits may use the same key. Each counts all holders, and compares
    /// their number with its own limit. With a limit of 1 the call excludes all others until it
    /// ends, as `lock` does. [Readers](Self::read) of one process count as one. An [`Owner`] that
    /// holds a permit of the key gets the same one again.
    ///
    /// # Errors
    ///
    /// Those of [`lock`](Self::lock). Fails with [`LockError::WouldDeadlock`] if the call has a
    /// limit of 1 and its owner holds a permit. Fails with [`LockError::Store`] if the store has no
    /// [shares](crate::store::StoreTraits::shares).
    ///
    /// # Panics
    ///
    /// Panics if the limit is zero or above 1,024.
    #[track_caller]
    pub fn permit(&self, key: impl Into<LockKey>, limit: u16) -> PermitBuilder {
        PermitBuilder(self.lock(key).sharing(Sharing::permit(check_max_holders(limit))))
    }

    /// Acquires the key together with other readers, and waits for it as [`lock`](Self::lock) does.
    /// A call of `lock` with the same key is the writer.
    ///
    /// Readers run beside each other, and a writer runs alone. Waiters are served in order of
    /// arrival: readers that come after a waiting writer wait for it, so that neither starves.
    ///
    /// Readers of one process share a grant of the store for up to 100 ms, so that most reads need
    /// no call. The grant is released when the last of them has ended. A key has at most 1,024
    /// grants of readers at a time.
    ///
    /// ```
    /// # use tower_lock::{LockManager, LockError};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// # let locks = LockManager::in_memory();
    /// let one = locks.read(("document", 7)).await?;
    /// let another = locks.read(("document", 7)).await?;
    /// assert!(locks.try_lock(("document", 7)).await.is_err(), "no writer beside readers");
    /// # one.release().await?;
    /// # another.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`lock`](Self::lock), and [`LockError::Store`] if the store has no
    /// [shares](crate::store::StoreTraits::shares). An [`Owner`] that reads and asks for `lock` of
    /// the same key gets [`LockError::WouldDeadlock`].
    pub fn read(&self, key: impl Into<LockKey>) -> PermitBuilder {
        PermitBuilder(self.lock(key).sharing(Sharing::Reader))
    }
}

impl PermitBuilder {
    settings!(call_setters);

    /// Sets each setting that this policy sets.
    pub fn policy(self, policy: LockPolicy) -> Self {
        Self(self.0.policy(policy))
    }

    /// Sets the owner. An owner that already holds the key gets another guard at once.
    ///
    /// Default: as of [`LockBuilder::owner`](super::LockBuilder::owner).
    pub fn owner(self, owner: &Owner) -> Self {
        Self(self.0.owner(owner))
    }

    /// Acquires the permit, runs the work under it, and releases it.
    ///
    /// The same as [`LockBuilder::run`](super::LockBuilder::run).
    ///
    /// # Errors
    ///
    /// Fails with [`RunError::NotStarted`] if the permit is not acquired, and with
    /// [`RunError::Lost`] if the permit is lost and the work is dropped at an await.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while it waits, it loses its position in the queue. If it is
    /// dropped later, it drops the work and then the guard.
    pub async fn run<F, T>(self, work: F) -> Result<T, RunError>
    where
        F: AsyncFnOnce(HeldPermit) -> T,
    {
        self.0.run(async |lock| work(HeldPermit(lock)).await).await
    }
}

impl IntoFuture for PermitBuilder {
    type Output = Result<PermitGuard, LockError>;
    type IntoFuture = PermitFuture;

    fn into_future(self) -> PermitFuture {
        PermitFuture { lock: self.0.into_future() }
    }
}

impl Future for PermitFuture {
    type Output = Result<PermitGuard, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(ready!(self.project().lock.poll(cx)).map(PermitGuard))
    }
}

impl PermitGuard {
    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.0.key()
    }

    /// Returns a view of the permit. It can be cloned, and does not release the permit.
    #[must_use]
    pub fn held_permit(&self) -> HeldPermit {
        HeldPermit(self.0.held_lock())
    }

    /// Returns the number of guards that the owner has for this permit. Zero if the permit was
    /// lost.
    #[must_use]
    pub fn hold_count(&self) -> u32 {
        self.0.hold_count()
    }

    /// Runs a future while the permit is held. The future is not polled after the permit is lost.
    /// See [`HeldLock::while_held`].
    ///
    /// # Errors
    ///
    /// Fails if the permit is lost before the future completes.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        self.0.while_held(work).await
    }

    /// Releases the permit. The future returns the outcome. See [`LockGuard::release`].
    ///
    /// # Errors
    ///
    /// Fails if the store does not reply within its call timeout. The release is then repeated.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the permit is released nevertheless.
    pub fn release(self) -> ReleaseFuture {
        self.0.release()
    }

    /// Releases the permit after work that has failed: a
    /// [`min_hold`](crate::LockPolicy::min_hold) does not block its place.
    pub fn release_after_failure(self) -> ReleaseFuture {
        self.0.release_after_failure()
    }
}

impl HeldPermit {
    pub(crate) fn new(lock: HeldLock) -> Self {
        Self(lock)
    }

    /// The view of the lock, whose token has no meaning.
    pub(crate) fn lock(&self) -> &HeldLock {
        &self.0
    }

    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.0.key()
    }

    /// Returns how long the permit is held at least, if it is neither renewed nor released. Zero if
    /// it is not held any more. Zero is final. See [`HeldLock::remaining`].
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    /// Completes when the permit is not held any more. Returns the reason: a loss or the release.
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe: a loss is not missed if the future is dropped and created again.
    pub async fn lost(&self) -> LockLost {
        self.0.lost().await
    }

    /// Checks that the permit is held for at least this time.
    ///
    /// # Errors
    ///
    /// Fails with [`InsufficientTime::TooShort`] if less time remains, and with
    /// [`InsufficientTime::Lost`] if the permit is not held any more.
    pub fn ensure_remaining(&self, required: Duration) -> Result<(), InsufficientTime> {
        self.0.ensure_remaining(required)
    }

    /// Runs a future while the permit is held. See [`HeldLock::while_held`].
    ///
    /// # Errors
    ///
    /// Fails if the permit is lost before the future completes.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        self.0.while_held(work).await
    }
}

impl fmt::Debug for PermitFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PermitFuture").field(&self.lock).finish()
    }
}

impl fmt::Debug for PermitGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitGuard").field("key", self.key()).finish_non_exhaustive()
    }
}

impl fmt::Debug for HeldPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldPermit").field("key", self.key()).finish_non_exhaustive()
    }
}
