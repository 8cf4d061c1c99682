//! Work that runs once for its key.

use std::{convert::Infallible, time::Duration};

use super::{HeldLock, LockBuilder, LockManager, LockStatus, driver_data::NotGranted};
use crate::{
    error::{LockError, RunError},
    limits::{KEEP_FOR, check_keep_for},
    lock_key::LockKey,
    policy::{LockPolicy, call_setters, settings},
    store::{DeleteRecordReply, NewRecord, Record, StoreError},
};

/// Builder of work that runs once for its key. Created by [`LockManager::once`].
#[derive(Debug)]
#[must_use = "nothing happens before `run`, `inspect` or `forget`"]
pub struct OnceBuilder {
    lock: LockBuilder,
    keep_for: Duration,
    /// The store keeps no records.
    refused: Option<StoreError>,
}

/// The result of work that runs once for its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnceOutcome<T> {
    /// The work ran now, with this output.
    Ran(T),
    /// The work was done before.
    Already,
}

impl LockManager {
    /// Creates a builder for work that runs once for this key, in all processes that share the
    /// store.
    ///
    /// The key names the work and not only its object, such as a job and its day. The first caller
    /// runs the work under the lock of the key. When it is done, the store keeps a record for
    /// [`keep_for`](OnceBuilder::keep_for). Every other caller waits, finds the record, and does
    /// nothing. If the first caller crashes or loses its lock, another one runs the work.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_lock::{LockManager, RunError, lock::OnceOutcome};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), RunError> {
    /// # let locks = LockManager::in_memory();
    /// # async fn send_digest() {}
    /// for expected in [OnceOutcome::Ran(()), OnceOutcome::Already] {
    ///     let outcome = locks
    ///         .once(("digest", "2026-11-22"))
    ///         .keep_for(Duration::from_secs(2 * 86_400))
    ///         .run(async |_lock| send_digest().await)
    ///         .await?;
    ///     assert_eq!(outcome, expected);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The lock has a name of its own, `+once:digest:2026-11-22`: it excludes no
    /// [`lock`](Self::lock) of the same tuple, and no other call can name it.
    /// [`inspect`](OnceBuilder::inspect) shows it, and [`forget`](OnceBuilder::forget) deletes its
    /// record.
    ///
    /// If the process is killed after the work and before its record, the work runs again. Only a
    /// record in the transaction of the work prevents that.
    pub fn once(&self, key: impl Into<LockKey>) -> OnceBuilder {
        let key = key.into().once();
        OnceBuilder { lock: self.lock(key), keep_for: KEEP_FOR, refused: self.records_refused("once") }
    }
}

impl OnceBuilder {
    settings!(call_setters);

    /// Sets each setting that this policy sets.
    pub fn policy(self, policy: LockPolicy) -> Self {
        Self { lock: self.lock.policy(policy), ..self }
    }

    /// Sets how long the work counts as done, from 1 second to 366 days. Default: 24 hours.
    ///
    /// The time must be longer than the time between the first and the last call with one key. The
    /// clocks of the callers may differ.
    ///
    /// # Panics
    ///
    /// Panics if the time is out of range.
    #[track_caller]
    pub fn keep_for(self, duration: Duration) -> Self {
        Self { keep_for: check_keep_for(duration), ..self }
    }

    /// Runs the work unless it was done before. Every output counts as done. For work that may
    /// fail, use [`try_run`](Self::try_run).
    ///
    /// The work is not polled after the lock is lost.
    ///
    /// # Errors
    ///
    /// Fails with [`RunError::NotStarted`] if the lock is not acquired: another caller ran the work
    /// for longer than the [`wait`](Self::wait), the store failed, or it keeps no
    /// [records](crate::store::StoreTraits::records). Fails with
    /// [`RunError::Lost`] if the lock is lost and the work is dropped at an await.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while the work runs, it drops the work, and the work does not count
    /// as done.
    pub async fn run<F, T>(self, work: F) -> Result<OnceOutcome<T>, RunError>
    where
        F: AsyncFnOnce(HeldLock) -> T,
    {
        Ok(match self.try_run(async |lock| Ok::<T, Infallible>(work(lock).await)).await? {
            OnceOutcome::Ran(Ok(done)) => OnceOutcome::Ran(done),
            OnceOutcome::Already => OnceOutcome::Already,
        })
    }

    /// Runs the work unless it was done before. Only an `Ok` counts as done. After an `Err` the
    /// next caller runs the work at once.
    ///
    /// # Errors
    ///
    /// The same as those of [`run`](Self::run). An error of the work is in the outcome.
    ///
    /// # Cancel safety
    ///
    /// The same as that of [`run`](Self::run).
    pub async fn try_run<F, T, E>(self, work: F) -> Result<OnceOutcome<Result<T, E>>, RunError>
    where
        F: AsyncFnOnce(HeldLock) -> Result<T, E>,
    {
        let Self { lock, keep_for, refused } = self;
        if let Some(error) = refused {
            return Err(LockError::Store(error).into());
        }
        let owner = lock.effective_owner();
        let guard = match lock.owner(&owner).claim().await {
            Ok(guard) => guard,
            Err(NotGranted::Recorded(_)) => return Ok(OnceOutcome::Already),
            Err(NotGranted::Rejected(error)) => return Err(error.into()),
        };
        let done = guard.while_held(owner.scope(work(guard.held_lock()))).await?;
        let release = match &done {
            Ok(_) => guard.release_with_record(NewRecord { record: Record::new("once", None), keep_for }),
            Err(_) => guard.release_after_failure(),
        };
        // An error of the store does not change the outcome: the release is repeated, and the key
        // stays held until then. In an outage this waits for some two seconds.
        let _ = release.await;
        Ok(OnceOutcome::Ran(done))
    }
    /// Returns the key of the lock under which the work runs, for
    /// [`force_release`](LockManager::force_release).
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.lock.key()
    }

    /// Returns the state of the work: its holder while it runs, and how long it counts as done.
    /// Changes nothing.
    ///
    /// # Errors
    ///
    /// Fails if the store does not reply within its call timeout.
    pub async fn inspect(self) -> Result<LockStatus, StoreError> {
        let (driver, key) = self.lock.into_key();
        driver.inspect(key).await
    }

    /// Deletes the record of the work, so that the next call runs it again. Returns whether there
    /// was one.
    ///
    /// ```
    /// # use tower_lock::{LockManager, RunError, lock::OnceOutcome};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), RunError> {
    /// # let locks = LockManager::in_memory();
    /// # async fn send_digest() {}
    /// locks.once(("digest", "2026-11-22")).run(async |_lock| send_digest().await).await?;
    /// assert!(locks.once(("digest", "2026-11-22")).forget().await?);
    /// let again = locks.once(("digest", "2026-11-22"));
    /// assert_eq!(again.run(async |_lock| send_digest().await).await?, OnceOutcome::Ran(()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Fails with [`LockError::Busy`] while the work runs, and with [`LockError::Store`] if the
    /// store does not reply within its call timeout, or keeps no
    /// [records](crate::store::StoreTraits::records).
    pub async fn forget(self) -> Result<bool, LockError> {
        let (driver, key) = self.lock.into_key();
        match driver.within("delete-record", |store| store.delete_record(key.clone())).await? {
            DeleteRecordReply::Deleted => Ok(true),
            DeleteRecordReply::NotFound => Ok(false),
            DeleteRecordReply::Busy => {
                let LockStatus { remaining, waiting, .. } = driver.inspect(key).await?;
                Err(LockError::busy(remaining, 1 + waiting))
            }
        }
    }
}
