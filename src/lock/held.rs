//! A held lock, as the code under it sees it: its remaining time and its loss.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

use super::{driver::Driver, driver_data::Section, request_scope::RequestScope};
use crate::{
    acquisition::AcquisitionId,
    error::{InsufficientTime, LockLost},
    fencing::FencingToken,
    lock_key::LockKey,
};

/// View of a held lock: its key, its fencing token, and the time that remains.
///
/// A clone is cheap. A view neither holds nor releases the lock. With the feature `axum` it is an
/// extractor for handlers under a [`LockLayer`](crate::LockLayer).
#[derive(Clone)]
pub struct HeldLock {
    section: Arc<Section>,
    driver: Arc<Driver>,
    /// The request that its layer holds the lock for, for the layers and extractors further in.
    request: Option<RequestScope>,
}

/// Resolves when work must not continue, because its lock is lost.
pub(crate) type LossSignal = Pin<Box<dyn Future<Output = LockLost> + Send>>;

impl HeldLock {
    pub(crate) fn new(section: Arc<Section>, driver: Arc<Driver>) -> Self {
        Self { section, driver, request: None }
    }

    /// The view for another request: that of a layer further in.
    pub(crate) fn in_request(self, request: RequestScope) -> Self {
        Self { request: Some(request), ..self }
    }

    pub(super) fn section(&self) -> &Section {
        &self.section
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(crate) fn request(&self) -> Option<&RequestScope> {
        self.request.as_ref()
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

    /// Returns the id of the acquisition. Together with the fencing token, it proves this lock to
    /// the functions of a `PostgresStore`, and the procedures of a `MysqlStore`, that check a
    /// fence.
    ///
    /// The id has a random part, which all ids of this process have in common. Do not send it to a
    /// client.
    #[must_use]
    pub fn acquisition_id(&self) -> &AcquisitionId {
        &self.section.grant.id
    }

    /// Returns how long the lock is held at least, if it is neither renewed nor released. Zero if
    /// it is not held any more. Zero is final.
    ///
    /// The time counts from before the request was sent to the store. It is reduced by 1 % and 2
    /// ms, because clocks run at different rates. The clock includes the time in which the machine
    /// is suspended.
    ///
    /// The lock is renewed after each third of its lease. With the default lease of 30 seconds the
    /// result therefore stays above 19 seconds while the store replies, unless a fixed lease or
    /// `max_hold` ends sooner. With another [lease](crate::LockManagerBuilder::lease) it stays
    /// above three fifths of that lease.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.section.remaining(self.driver.clock.now())
    }

    /// Completes when the lock is not held any more. Returns the reason: a loss or the release.
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
        let ended = &self.section.data.ended;
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
                    // The watchdog may have ended with its runtime.
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
        self.section.loss_reason()
    }

    /// Completes when a newer request waits for the key, under
    /// [`LockLayer::newest_wins`](crate::LockLayer::newest_wins): end the work, and return. The
    /// lock is still held. After the grace of the layer, the handler is dropped.
    ///
    /// Under any other lock this method never completes, nor after the end of the lock: in a task
    /// of your own, wait for [`lost`](Self::lost), too. In a handler with several locks, only that
    /// of the layer completes.
    ///
    /// ```
    /// # use tower_lock::HeldLock;
    /// # async fn next_token() -> Option<String> { None }
    /// async fn turn(lock: HeldLock) -> String {
    ///     let mut text = String::new();
    ///     loop {
    ///         tokio::select! {
    ///             () = lock.superseded() => return text, // .. and note where the turn was stopped
    ///             token = next_token() => match token {
    ///                 Some(token) => text.push_str(&token),
    ///                 None => return text,
    ///             },
    ///         }
    ///     }
    /// }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe.
    pub async fn superseded(&self) {
        let ended = &self.section.data.ended;
        let mut notified = pin!(ended.notified());
        loop {
            // Before the check, so that no notification is missed.
            notified.as_mut().enable();
            if self.superseded_for().is_some() {
                return;
            }
            notified.as_mut().await;
            notified.set(ended.notified());
        }
    }

    /// Since how long a newer request waits.
    pub(crate) fn superseded_for(&self) -> Option<Duration> {
        self.section.superseded_for(self.driver.clock.now())
    }

    /// Checks that the lock is held for at least this time, for example before a commit.
    ///
    /// # Errors
    ///
    /// Fails with [`InsufficientTime::TooShort`] if less time remains, and with
    /// [`InsufficientTime::Lost`] if the lock is not held any more. A write that takes longer than
    /// `required` is detected by the fencing token only.
    pub fn ensure_remaining(&self, required: Duration) -> Result<(), InsufficientTime> {
        let remaining = self.remaining();
        if remaining.is_zero() {
            Err(self.section.loss_reason().into())
        } else if remaining < required {
            Err(InsufficientTime::TooShort { remaining, required })
        } else {
            Ok(())
        }
    }

    /// Runs a future while the lock is held. The future is not polled after the lock is lost.
    ///
    /// `Ok` means that the lock was held until the future completed. The layers run their handlers
    /// in the same way.
    ///
    /// # Errors
    ///
    /// Fails if the lock is lost. The future was then dropped at an await, or completed in a poll
    /// that took too long.
    ///
    /// # Cancel safety
    ///
    /// If the returned future is dropped, `work` is dropped.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        let mut lost = pin!(self.lost());
        while_held(pin!(work), || self.loss(), |cx| lost.as_mut().poll(cx)).await
    }

    pub(crate) fn into_loss_signal(self) -> LossSignal {
        Box::pin(async move { self.lost().await })
    }

    /// Returns why the lock is not held any more, if it is not.
    pub(crate) fn loss(&self) -> Option<LockLost> {
        self.section.loss(self.driver.clock.now())
    }
}

/// Runs a future while there is no loss. It is not polled after one (I6).
pub(crate) async fn while_held<F: Future>(
    mut work: Pin<&mut F>,
    loss: impl Fn() -> Option<LockLost>,
    mut poll_lost: impl FnMut(&mut Context<'_>) -> Poll<LockLost>,
) -> Result<F::Output, LockLost> {
    poll_fn(|cx| {
        if let Some(why) = loss() {
            return Poll::Ready(Err(why));
        }
        if let Poll::Ready(output) = work.as_mut().poll(cx) {
            // The output of a poll that outlasted the lock is not that of work under it. Work that
            // a newer request replaces has the lock to its end.
            return Poll::Ready(loss().filter(|why| *why != LockLost::Superseded).map_or(Ok(output), Err));
        }
        // After the work, because work that completes at once needs no timer.
        poll_lost(cx).map(Err)
    })
    .await
}

/// Polls all signals. Ready with the reason of the first one that is ready.
pub(crate) fn poll_any(signals: &mut [LossSignal], cx: &mut Context<'_>) -> Poll<LockLost> {
    let ready = signals.iter_mut().find_map(|signal| match signal.as_mut().poll(cx) {
        Poll::Ready(why) => Some(why),
        Poll::Pending => None,
    });
    ready.map_or(Poll::Pending, Poll::Ready)
}

impl fmt::Debug for HeldLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldLock").field("key", self.key()).field("token", &self.section.token).finish_non_exhaustive()
    }
}
