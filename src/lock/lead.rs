//! Work that one process of a fleet does at a time.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::Poll,
};

use tokio::time::{Instant, sleep};

use super::{HeldLock, LockManager};
use crate::{
    error::LockError,
    limits::{LEAD_PAUSE_MAX, LEAD_PAUSE_MIN, LEAD_WAIT},
    lock_key::LockKey,
    owner::Owner,
};

impl LockManager {
    /// Runs the work in one process at a time, until the manager [shuts down](Self::shutdown).
    ///
    /// Every process of a fleet calls this with the same key. One of them, the leader, holds the
    /// lock and runs the work. The others wait. If the leader shuts down, another process leads a
    /// lock-delay later, 1 second by default. If it dies, another one leads after the lease and the
    /// lock-delay, 31 seconds by default.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tower_lock::LockManager;
    /// # async fn move_outbox(token: i64) {}
    /// # async fn start(locks: LockManager) {
    /// tokio::spawn(async move {
    ///     locks
    ///         .lead(("outbox", "mover"), |lock| async move {
    ///             loop {
    ///                 move_outbox(lock.fencing_token().as_i64()).await;
    ///                 tokio::time::sleep(Duration::from_secs(1)).await;
    ///             }
    ///         })
    ///         .await;
    /// });
    /// # }
    /// ```
    ///
    /// The work is dropped at an await if the lock is lost or the manager shuts down. A write that
    /// was sent before may still be executed, so writes should check the fencing token. If the work
    /// returns, the process releases the lock and calls again after a pause: 1 second at first, and
    /// twice the last pause if the term was shorter than 30 seconds, up to 30 seconds. A lost lock
    /// and an outage of the store have the same pause. The lock has the settings of the manager,
    /// such as [`max_hold`](crate::LockPolicy::max_hold). A panic of the work is not caught. In a
    /// [forked child](LockManager#fork) the call returns at once.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the work is dropped, and the key stays blocked for the lock-delay.
    pub async fn lead<F, Fut>(&self, key: impl Into<LockKey>, mut work: F)
    where
        F: FnMut(HeldLock) -> Fut,
        Fut: Future<Output = ()>,
    {
        let key = key.into();
        let mut shutdown = pin!(self.driver().shutdown_started());
        let mut pause = LEAD_PAUSE_MIN;
        loop {
            let began = Instant::now();
            match unless(shutdown.as_mut(), self.lead_once(&key, &mut work)).await {
                None | Some(Err(LockError::ShuttingDown)) => return,
                // Another process leads.
                Some(Err(LockError::TimedOut { .. })) => continue,
                // A forked child never gets the lock. The log has the reason.
                Some(Err(_)) if !self.driver().is_of_this_process() => return,
                Some(_) => {}
            }
            if began.elapsed() > LEAD_PAUSE_MAX {
                pause = LEAD_PAUSE_MIN;
            }
            let jittered = pause.mul_f64(1.0 + self.driver().ids[0].jitter() / 2.0);
            if unless(shutdown.as_mut(), sleep(jittered)).await.is_none() {
                return;
            }
            pause = (pause * 2).min(LEAD_PAUSE_MAX);
        }
    }

    /// One term. Ends without an error when the work returns or the lock is lost.
    async fn lead_once<F, Fut>(&self, key: &LockKey, work: &mut F) -> Result<(), LockError>
    where
        F: FnMut(HeldLock) -> Fut,
        Fut: Future<Output = ()>,
    {
        // A new owner: the work of one process must not join that of another task.
        let owner = Owner::new();
        let guard = self.lock(key.clone()).owner(&owner).wait(LEAD_WAIT).await?;
        if guard.while_held(owner.scope(work(guard.held_lock()))).await.is_ok() {
            let _ = guard.release().await;
        }
        Ok(())
    }
}

/// Runs the future, and drops it when `stop` completes.
async fn unless<T>(mut stop: Pin<&mut impl Future<Output = ()>>, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|cx| match stop.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => work.as_mut().poll(cx).map(Some),
    })
    .await
}
