use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use tokio::time::{Sleep, sleep};

use super::{
    driver::Driver,
    driver_data::{Section, SectionData},
};
use crate::{
    error::{InsufficientTime, LockLost},
    fencing::FencingToken,
    lock_key::LockKey,
};

/// A view of a lock that is held: its key, its fencing token, and the time that remains.
///
/// A clone is cheap. A view does not release the lock, and does not keep it. In a handler under a
/// [`LockLayer`](crate::LockLayer) it is an extractor (feature `axum`).
#[derive(Clone)]
pub struct HeldLock {
    section: Arc<Section>,
    driver: Arc<Driver>,
}

impl HeldLock {
    pub(crate) fn new(section: Arc<Section>, driver: Arc<Driver>) -> Self {
        Self { section, driver }
    }

    /// Creates a view of a lock for tests of a handler. Needs the feature `test-util`.
    #[cfg(not(feature = "test-util"))]
    #[doc(hidden)]
    #[must_use]
    #[expect(clippy::missing_panics_doc, reason = "it cannot be called")]
    pub fn for_test(_key: impl Into<LockKey>, _token: u64) -> Self
    where
        for<'a> crate::missing::Missing<'a>: crate::missing::TestUtil,
    {
        unreachable!("nothing meets the bound")
    }

    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.section.grant.key
    }

    /// Returns the fencing token. A database that stores it with each write can reject a smaller
    /// one.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.section.token
    }

    /// Returns for how long the lock is held at least, if it is neither renewed nor released. Zero
    /// if it is not held any more, which is final.
    ///
    /// The time counts from before the request was sent to the store, minus 1 % and 2 ms for clocks
    /// that run at different rates (I3, I4), on a clock that includes the time in which the machine
    /// is suspended. With the default lease of 30 seconds, which is renewed every third of it, the
    /// time stays above 19 seconds while the store replies, unless a fixed lease or `max_hold` ends
    /// sooner. With another [lease](crate::LockManagerBuilder::lease) it stays above three fifths
    /// of that.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let left = self.section.remaining(self.driver.clock.now());
        if left.is_zero() {
            SectionData::record_loss(&self.section);
        }
        left
    }

    /// Completes when the lock is not held any more, and returns why: it was lost or released.
    ///
    /// ```
    /// # use tower_lock::HeldLock;
    /// # async fn send_the_mail() {}
    /// async fn handler(lock: HeldLock) -> &'static str {
    ///     tokio::select! {
    ///         _why = lock.lost() => "another request may be sending it",
    ///         () = send_the_mail() => "sent",
    ///     }
    /// }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe: a loss is not missed if the future is dropped and created again.
    pub async fn lost(&self) -> LockLost {
        let ended = &self.section.grant.data.ended;
        let mut notified = pin!(ended.notified());
        // A timer of its own, because the watchdog may run on a runtime that nothing drives (I5).
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|cx| {
            loop {
                // The clock is read at each poll, so that work that is polled after this is never
                // polled too late (I6).
                let left = self.remaining();
                if left.is_zero() {
                    return Poll::Ready(());
                }
                if notified.as_mut().poll(cx).is_ready() {
                    // Another section under the same grant may have ended, or the watchdog may have
                    // ended with its runtime.
                    notified.set(ended.notified());
                    self.driver.ensure_watchdog();
                    continue;
                }
                let timer = timer.get_or_insert_with(|| Box::pin(sleep(left)));
                if timer.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                // The lock was renewed since the timer was set.
                timer.as_mut().reset(tokio::time::Instant::now() + left);
            }
        })
        .await;
        self.loss_reason()
    }

    /// Checks whether the lock is held for at least this long, for example before a commit, which
    /// should not start with less time than it takes.
    ///
    /// # Errors
    ///
    /// The lock was lost, or less time remains. A write that is late nevertheless is detected by
    /// the fencing token only.
    pub fn ensure_remaining(&self, required: Duration) -> Result<(), InsufficientTime> {
        let remaining = self.remaining();
        if remaining.is_zero() {
            Err(self.loss_reason().into())
        } else if remaining < required {
            Err(InsufficientTime::TooShort { remaining, required })
        } else {
            Ok(())
        }
    }

    /// Returns why the lock is not held any more, if it is not.
    pub(crate) fn loss(&self) -> Option<LockLost> {
        self.remaining().is_zero().then(|| self.loss_reason())
    }

    /// Runs a future while the lock is held. The future is not polled after the lock is lost (I6).
    /// The layers run their handlers in the same way. `Ok` means that the lock was held until the
    /// future completed.
    ///
    /// # Errors
    ///
    /// The lock was lost: the future was dropped at an await, or completed in a poll that took too
    /// long.
    ///
    /// # Cancel safety
    ///
    /// If it is dropped, the future is dropped.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        let mut work = pin!(work);
        let mut lost = pin!(self.lost());
        poll_fn(|cx| {
            if self.remaining().is_zero() {
                return Poll::Ready(Err(self.loss_reason()));
            }
            if let Poll::Ready(output) = work.as_mut().poll(cx) {
                return Poll::Ready(if self.remaining().is_zero() { Err(self.loss_reason()) } else { Ok(output) });
            }
            // After the work, because work that completes at once needs no timer.
            lost.as_mut().poll(cx).map(Err)
        })
        .await
    }

    fn loss_reason(&self) -> LockLost {
        self.section.end_reason().unwrap_or(LockLost::Expired)
    }
}

impl fmt::Debug for HeldLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldLock").field("key", self.key()).field("token", &self.section.token).finish_non_exhaustive()
    }
}
