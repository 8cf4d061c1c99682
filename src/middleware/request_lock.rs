//! One lock of a request, of one key or of several, and the record of its hold.

use std::{
    future::{Future, pending},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::Extensions;
use smallvec::SmallVec;
use tokio::time::{Instant, sleep_until};

use crate::{
    error::LockLost,
    lock::{HeldLock, HeldLocks, LockGuard, LockGuards, ReleaseAllFuture, ReleaseFuture, ReleaseOutcome, RequestScope},
    policy::LockPolicy,
    rejection::retry_after::HoldEstimate,
    store::{NewRecord, StoreError},
    telemetry::span::LockSpan,
};

/// One lock of a request. Its drop releases it after the lock-delay, as the drop of a guard does.
#[derive(Debug)]
pub(crate) struct RequestLock {
    pub(crate) span: LockSpan,
    hold_estimate: Arc<HoldEstimate>,
    /// `None` after the release.
    guards: Option<Guards>,
    abort_at: AbortAt,
}

/// The guards of one acquire.
#[derive(Debug)]
pub(super) enum Guards {
    One(LockGuard),
    Several(LockGuards),
}

/// Views of the locks of one acquire, for the handler.
#[derive(Clone, Debug)]
#[allow(unreachable_pub, reason = "in a hidden method of a public trait")]
pub enum Held {
    One(HeldLock),
    Several(HeldLocks),
}

/// The release of one acquire.
#[derive(Debug)]
pub(super) enum Release {
    One(ReleaseFuture),
    Several(ReleaseAllFuture),
}

/// Resolves when the work under a lock must be aborted.
pub(super) type AbortSignal = Pin<Box<dyn Future<Output = LockLost> + Send>>;

pub(super) type AbortSignals = SmallVec<[AbortSignal; 1]>;

/// When the work under a lock is aborted.
#[derive(Clone, Copy, Debug)]
enum AbortAt {
    /// When the lock is lost.
    Loss,
    /// At this instant, also if the lock is still held. `None`: later than any instant of the
    /// clock.
    Deadline(Option<Instant>),
}

impl RequestLock {
    pub(super) fn new(guards: Guards, span: LockSpan, hold_estimate: Arc<HoldEstimate>, policy: &LockPolicy) -> Self {
        let abort_at = if policy.continues_when_lost() {
            AbortAt::Deadline(Instant::now().checked_add(policy.request_max_hold()))
        } else {
            AbortAt::Loss
        };
        Self { span, hold_estimate, guards: Some(guards), abort_at }
    }

    fn guards(&self) -> &Guards {
        self.guards.as_ref().expect("a lock that is not released")
    }

    pub(crate) fn held(&self) -> Held {
        match self.guards() {
            Guards::One(guard) => Held::One(guard.held_lock()),
            Guards::Several(guards) => Held::Several(guards.held_locks()),
        }
    }

    /// The reason to abort the work under this lock, if there is one now.
    pub(super) fn abort_reason(&self) -> Option<LockLost> {
        match self.abort_at {
            AbortAt::Loss => self.guards().loss(),
            AbortAt::Deadline(end) => {
                end.is_some_and(|end| end <= Instant::now()).then_some(LockLost::HoldLimitReached)
            }
        }
    }

    /// Resolves when there is one.
    pub(super) fn abort_signal(&self) -> AbortSignal {
        match self.abort_at {
            AbortAt::Loss => match self.held() {
                Held::One(view) => Box::pin(async move { view.lost().await }),
                Held::Several(views) => Box::pin(async move { views.lost().await }),
            },
            AbortAt::Deadline(None) => Box::pin(pending()),
            AbortAt::Deadline(Some(end)) => Box::pin(async move {
                sleep_until(end).await;
                LockLost::HoldLimitReached
            }),
        }
    }

    /// Releases the lock of a client that disconnected. Nothing ran under it: no time blocks the
    /// key.
    pub(super) fn cancel(self) {
        self.span.disconnected();
        self.release_unused();
    }

    /// Releases a lock under which nothing ran.
    pub(crate) fn release_unused(self) {
        drop(self.release(true));
    }

    /// Starts the release. Also returns the rest of this lock, for the result in its span.
    pub(super) fn release(mut self, has_failed: bool) -> (Release, Self) {
        let release = match self.end(!has_failed) {
            Guards::One(guard) if has_failed => Release::One(guard.release_after_failure()),
            Guards::One(guard) => Release::One(guard.release()),
            Guards::Several(guards) if has_failed => Release::Several(guards.release_after_failure()),
            Guards::Several(guards) => Release::Several(guards.release()),
        };
        (release, self)
    }

    /// Starts the release, and leaves a record for retries.
    pub(super) fn release_with_record(mut self, answer: NewRecord) -> (Release, Self) {
        let Guards::One(guard) = self.end(false) else { unreachable!("a layer that keeps answers has one key") };
        (Release::One(guard.release_with_record(answer)), self)
    }

    /// Records the hold, before the guard ends and the next section starts. The key stays blocked
    /// for the `min_hold`, also if the work ends earlier.
    fn end(&mut self, keeps_min_hold: bool) -> Guards {
        let guards = self.guards.take().expect("a lock that is not released");
        let (hold, min_hold) = match &guards {
            Guards::One(guard) => (guard.held_for(), guard.min_hold()),
            Guards::Several(guards) => (guards.held_for(), guards.min_hold()),
        };
        self.hold_estimate.record(if keeps_min_hold { hold.max(min_hold) } else { hold });
        self.span.ended(hold);
        guards
    }
}

impl Held {
    /// For the layers and extractors further in.
    pub(crate) fn of_request(mut self, request: RequestScope) -> Self {
        match &mut self {
            Self::One(lock) => lock.set_request(request),
            Self::Several(locks) => locks.set_request(request),
        }
        self
    }

    /// Makes these the innermost locks.
    pub(crate) fn insert_into(self, extensions: &mut Extensions) {
        match self {
            Self::One(lock) => drop(extensions.insert(lock)),
            Self::Several(locks) => {
                // That of an outer layer is not the innermost one any more.
                extensions.remove::<HeldLock>();
                extensions.insert(locks);
            }
        }
    }
}

impl Guards {
    fn loss(&self) -> Option<LockLost> {
        match self {
            Self::One(guard) => guard.loss(),
            Self::Several(guards) => guards.loss(),
        }
    }
}

impl Release {
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<ReleaseOutcome, StoreError>> {
        match self {
            Self::One(release) => Pin::new(release).poll(cx),
            Self::Several(release) => Pin::new(release).poll(cx),
        }
    }
}

/// Polls all signals. Ready with the reason of the first one that is ready.
pub(super) fn poll_any(signals: &mut AbortSignals, cx: &mut Context<'_>) -> Poll<LockLost> {
    let ready = signals.iter_mut().find_map(|signal| match signal.as_mut().poll(cx) {
        Poll::Ready(why) => Some(why),
        Poll::Pending => None,
    });
    ready.map_or(Poll::Pending, Poll::Ready)
}

impl Drop for RequestLock {
    fn drop(&mut self) {
        if self.guards.is_some() {
            drop(self.end(false));
        }
    }
}
