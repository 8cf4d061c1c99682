use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use tokio::time::Instant;

use super::{LockLost, hold::Hold};
use crate::{key::LockKey, lease::FencingToken};

/// A view of a lock that is held: what, under which token, for how long.
///
/// Clone it freely: it cannot give the lock back, and does not keep it. In a handler under a
/// [`LockLayer`](crate::LockLayer) it is an extractor (feature `axum`).
#[derive(Clone, Debug)]
pub struct HeldLock {
    hold: Arc<Hold>,
}

impl HeldLock {
    pub(super) fn new(hold: Arc<Hold>) -> Self {
        Self { hold }
    }

    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.hold.key
    }

    /// The number to hand to whatever is written to under this lock: it refuses a smaller one than it has seen.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.hold.token
    }

    /// How long the store keeps the lock for us at the least, if nobody renews it and nobody gives it back. Zero: it is not
    /// ours any more, and never will be again.
    ///
    /// Counted from before the store was asked, minus 1 % and 2 ms for clocks that do not run alike (I3, I4). Renewed every
    /// third of the lease of 30 seconds, it stays above 19 seconds as long as the store answers.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.hold.remaining(Instant::now())
    }

    /// Completes when the lock is not ours any more: lost, or given back.
    ///
    /// ```
    /// # use tower_lock::HeldLock;
    /// # async fn send_the_mail() {}
    /// async fn handler(lock: HeldLock) -> &'static str {
    ///     tokio::select! {
    ///         () = lock.lost() => "somebody else may be at it",
    ///         () = send_the_mail() => "sent",
    ///     }
    /// }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropped and asked again, nothing is missed.
    pub async fn lost(&self) {
        self.hold.ended().await;
    }

    /// Whether the lock is good for at least so long: to be asked before a commit, which should not begin with less time than
    /// it takes.
    ///
    /// # Errors
    ///
    /// It is not. The fencing token is what makes a write that comes late all the same harmless.
    pub fn ensure(&self, at_least: Duration) -> Result<(), LockLost> {
        let remaining = self.remaining();
        if remaining.is_zero() || remaining < at_least { Err(LockLost) } else { Ok(()) }
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
            // First: it asks the clock.
            if lost.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(LockLost));
            }
            let done = work.as_mut().poll(cx);
            if done.is_ready() && self.remaining().is_zero() {
                return Poll::Ready(Err(LockLost));
            }
            done.map(Ok)
        })
        .await
    }
}
