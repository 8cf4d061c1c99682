use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    slice,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use super::{HeldLock, request_scope::RequestScope};
use crate::{
    error::{InsufficientTime, LockLost},
    lock_key::LockKey,
};

/// Views of several locks that are held together, one for each key.
///
/// A clone is cheap. The views neither hold nor release the locks. With the feature `axum` this is
/// an extractor for handlers under a [`LockLayer`](crate::LockLayer) whose key function returns
/// [`key::all`](crate::key::all).
///
/// Each key has a fencing token of its own. Tokens of two keys cannot be compared.
#[derive(Clone)]
pub struct HeldLocks {
    /// In the order of the keys.
    locks: Arc<[HeldLock]>,
    /// The request that the layer holds the locks for.
    request: Option<RequestScope>,
}

/// Completes when one of the locks is lost.
pub(super) struct AnyLost<'a>(Vec<Pin<Box<dyn Future<Output = LockLost> + Send + 'a>>>);

impl HeldLocks {
    pub(crate) fn new(locks: impl IntoIterator<Item = HeldLock>) -> Self {
        Self { locks: locks.into_iter().collect(), request: None }
    }

    /// Changes the request of the views in the extensions: a layer further in.
    pub(crate) fn set_request(&mut self, request: RequestScope) {
        self.request = Some(request);
    }

    pub(crate) fn request(&self) -> Option<&RequestScope> {
        self.request.as_ref()
    }

    /// Returns the lock of this key, if it is one of them.
    #[must_use]
    pub fn get(&self, key: impl Into<LockKey>) -> Option<&HeldLock> {
        let key = key.into();
        self.locks.iter().find(|lock| *lock.key() == key)
    }

    /// Iterates over the locks, in the order of their keys.
    pub fn iter(&self) -> slice::Iter<'_, HeldLock> {
        self.locks.iter()
    }

    /// Returns how long all locks are held at least: the least of their
    /// [remaining times](HeldLock::remaining).
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.locks.iter().map(HeldLock::remaining).min().unwrap_or_default()
    }

    /// Completes when one of the locks is not held any more. Returns the reason.
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe: a loss is not missed if the future is dropped and created again.
    pub async fn lost(&self) -> LockLost {
        let mut lost = AnyLost::of(&self.locks);
        poll_fn(|cx| lost.poll(cx)).await
    }

    /// Checks that all locks are held for at least this time.
    ///
    /// # Errors
    ///
    /// Fails if less time remains for one of the locks, or if one of them is not held any more.
    pub fn ensure_remaining(&self, required: Duration) -> Result<(), InsufficientTime> {
        self.locks.iter().try_for_each(|lock| lock.ensure_remaining(required))
    }

    /// Runs a future while all locks are held. The future is not polled after one of them is lost.
    ///
    /// # Errors
    ///
    /// Fails if a lock is lost. The future was then dropped at an await, or completed in a poll
    /// that took too long.
    ///
    /// # Cancel safety
    ///
    /// If the returned future is dropped, `work` is dropped.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        let mut work = pin!(work);
        let mut lost = None;
        poll_fn(|cx| {
            if let Some(why) = self.loss() {
                return Poll::Ready(Err(why));
            }
            if let Poll::Ready(output) = work.as_mut().poll(cx) {
                return Poll::Ready(self.loss().map_or(Ok(output), Err));
            }
            // After the work, because work that completes at once needs no timer.
            lost.get_or_insert_with(|| AnyLost::of(&self.locks)).poll(cx).map(Err)
        })
        .await
    }

    /// Returns why one of the locks is not held any more, if one is not.
    pub(crate) fn loss(&self) -> Option<LockLost> {
        self.locks.iter().find_map(HeldLock::loss)
    }
}

impl<'a> IntoIterator for &'a HeldLocks {
    type Item = &'a HeldLock;
    type IntoIter = slice::Iter<'a, HeldLock>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a> AnyLost<'a> {
    pub(super) fn of(locks: &'a [HeldLock]) -> Self {
        let lost = |lock: &'a HeldLock| Box::pin(lock.lost()) as Pin<Box<dyn Future<Output = LockLost> + Send + 'a>>;
        Self(locks.iter().map(lost).collect())
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<LockLost> {
        let ready = self.0.iter_mut().find_map(|lost| match lost.as_mut().poll(cx) {
            Poll::Ready(why) => Some(why),
            Poll::Pending => None,
        });
        ready.map_or(Poll::Pending, Poll::Ready)
    }
}

impl fmt::Debug for HeldLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.locks.iter()).finish()
    }
}
