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
    watchdog::Watchdog,
};
use crate::{error::LockLost, fencing::FencingToken, lock_key::LockKey};

/// A view of a lock that is held: what, under which token, for how long.
///
/// Clone it freely: it cannot give the lock back, and does not keep it. In a handler under a
/// [`LockLayer`](crate::LockLayer) it is an extractor (feature `axum`).
#[derive(Clone)]
pub struct HeldLock {
    section: Arc<Section>,
    core: Arc<Driver>,
}

impl HeldLock {
    pub(super) fn new(section: Arc<Section>, core: Arc<Driver>) -> Self {
        Self { section, core }
    }

    /// A view of a lock that nobody holds and nobody loses, for tests of a handler: it is called as a function, or finds this in
    /// the extensions of its request (`.layer(Extension(lock))`). Needs the feature `test-util`.
    ///
    /// ```
    /// # use tower_lock::HeldLock;
    /// async fn claim(lock: HeldLock) -> String {
    ///     format!("{} under {}", lock.key().as_str(), lock.fencing_token())
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let lock = HeldLock::for_test(("reward", 7), 42);
    /// assert_eq!(claim(lock).await, "reward:7 under 42");
    /// # }
    /// ```
    ///
    /// For a lock that *is* lost, take one from `LockManager` in a [`TestStore`](crate::test_util::TestStore), and let that fail.
    ///
    /// # Panics
    ///
    /// If the token does not fit into 63 bits.
    #[cfg(feature = "test-util")]
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    #[must_use]
    pub fn for_test(key: impl Into<LockKey>, token: u64) -> Self {
        let token = FencingToken::from_raw(token).expect("a token of 63 bits");
        let core = Arc::clone(super::LockManager::in_memory().core());
        let section = Section::detached(key.into(), token, core.ids.next());
        Self::new(Arc::new(section), core)
    }

    /// Not without the feature `test-util`.
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

    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.section.grant.key
    }

    /// The number to hand to whatever is written to under this lock: it refuses a smaller one than it has seen.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.section.token
    }

    /// For how long, at the least, nobody else has the lock, if nobody renews it and nobody gives it back. Zero: it is not
    /// ours any more, and never will be again. Redisson's `remainTimeToLive()`.
    ///
    /// Counted from before the store was asked, minus 1 % and 2 ms for clocks that do not run alike
    /// (I3, I4), and on a clock that goes on while the machine sleeps. Renewed every third of the
    /// lease of 30 seconds, it stays above 19 seconds as long as the store answers, unless a fixed
    /// lease or `max_hold` ends sooner. With another [lease](crate::LockManagerBuilder::lease) it stays
    /// above three fifths of that.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let left = self.section.remaining(self.core.clock.now());
        if left.is_zero() {
            SectionData::record_loss(&self.section);
        }
        left
    }

    /// Completes when the lock is not ours any more: lost, or given back. Says why.
    ///
    /// ```
    /// # use tower_lock::HeldLock;
    /// # async fn send_the_mail() {}
    /// async fn handler(lock: HeldLock) -> &'static str {
    ///     tokio::select! {
    ///         _why = lock.lost() => "somebody else may be at it",
    ///         () = send_the_mail() => "sent",
    ///     }
    /// }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropped and asked again, nothing is missed.
    pub async fn lost(&self) -> LockLost {
        let over = &self.section.grant.data.ended;
        let mut told = pin!(over.notified());
        // A timer of its own, because the watchdog may run on a runtime that nobody drives (I5).
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|cx| {
            loop {
                // The clock is asked at each poll: whoever polls this before something else never polls that too late (I6).
                let left = self.remaining();
                if left.is_zero() {
                    return Poll::Ready(());
                }
                if told.as_mut().poll(cx).is_ready() {
                    // It may have been said of another section under the same grant, or the watchdog may have gone with its runtime.
                    told.set(over.notified());
                    Watchdog::ensure_running(&self.core);
                    continue;
                }
                let timer = timer.get_or_insert_with(|| Box::pin(sleep(left)));
                if timer.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                // It was renewed since the timer was set.
                timer.as_mut().reset(tokio::time::Instant::now() + left);
            }
        })
        .await;
        self.why()
    }

    /// Whether the lock is good for at least so long: to be asked before a commit, which should not begin with less time than
    /// it takes.
    ///
    /// # Errors
    ///
    /// It is not. The fencing token is what makes a write that comes late all the same harmless.
    pub fn ensure_remaining(&self, at_least: Duration) -> Result<(), LockLost> {
        let remaining = self.remaining();
        if remaining.is_zero() {
            Err(self.why())
        } else if remaining < at_least {
            Err(LockLost::TooShort)
        } else {
            Ok(())
        }
    }

    /// Runs a future as long as the lock is ours, and not one poll longer (I6). The layer runs its handlers so. `Ok`: the lock was
    /// ours to its end.
    ///
    /// # Errors
    ///
    /// The lock was lost: the future was dropped where it stood, or came to its end in a poll that took too long.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it drops the future.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        let mut work = pin!(work);
        let mut lost = pin!(self.lost());
        poll_fn(|cx| {
            if self.remaining().is_zero() {
                return Poll::Ready(Err(self.why()));
            }
            if let Poll::Ready(done) = work.as_mut().poll(cx) {
                return Poll::Ready(if self.remaining().is_zero() { Err(self.why()) } else { Ok(done) });
            }
            // Only now: work that is done at once needs no timer.
            lost.as_mut().poll(cx).map(Err)
        })
        .await
    }

    fn why(&self) -> LockLost {
        self.section.end_reason().unwrap_or(LockLost::Expired)
    }
}

impl fmt::Debug for HeldLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldLock").field("key", self.key()).field("token", &self.section.token).finish_non_exhaustive()
    }
}
