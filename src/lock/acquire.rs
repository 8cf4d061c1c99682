use std::{
    fmt,
    future::{Future, IntoFuture},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

use super::{
    HeldLock, LockGuard,
    driver::Driver,
    driver_data::Waiter,
    request_scope::{InRequest, Parent},
};
use crate::{
    error::{LockError, RunError},
    lock_key::LockKey,
    owner::Owner,
    policy::{LockPolicy, call_setters, settings},
    proto::{GuardEnd, LockRequest, QueuePosition, hold_limits::HoldLimits},
    store::{StoreError, StoreErrorKind},
    telemetry::metrics::AcquireMetrics,
};

/// A lock to be taken; nothing happens before it is awaited.
///
/// # Errors
///
/// [`LockError`] says why there is no guard: held, waited in vain, no place in the line, shutting down, or the store failed.
///
/// # Cancel safety
///
/// Dropped while it waits, it leaves the line and loses its place. What the store granted in the meantime is given back.
///
/// # Polling
///
/// A call that was polled once must be polled until it completes, or dropped: its place in the
/// queue is kept for it meanwhile. A grant that is not picked up within 3 seconds goes to the next
/// waiter (a `select!` loop that polls something else, a buffered stream, `mem::forget`). Such a
/// call ends with [`LockError::TimedOut`], or with [`LockError::Busy`] if it does not wait. A call
/// whose wait is over is skipped: it gets no grant.
#[derive(Debug)]
#[must_use = "nothing is locked before the call is awaited"]
pub struct LockBuilder {
    core: Arc<Driver>,
    key: LockKey,
    /// What this call sets.
    policy: LockPolicy,
    owner: Option<Owner>,
    handle: OfHandle,
}

/// What a call has from the handle that it was made with.
#[derive(Debug)]
struct OfHandle {
    policy: LockPolicy,
    parent: Parent,
}

/// What is asked of the table.
#[derive(Debug)]
pub(crate) struct LockParams {
    pub(crate) key: LockKey,
    /// Zero: refused while somebody else has the key.
    pub(crate) wait: Duration,
    pub(crate) terms: HoldLimits,
    pub(crate) owner: Option<Owner>,
    /// What it is counted under.
    pub(crate) route: Option<Arc<str>>,
}

pin_project! {
    /// The way to a guard. Made by awaiting a [`LockBuilder`].
    #[must_use = "futures do nothing unless you `.await` or poll them"]
    pub struct LockFuture {
        core: Option<Arc<Driver>>,
        // What is asked at the first poll.
        ask: Option<LockParams>,
        // Of a call: what it sets, and what it has from its handle. What it inherits is known where it
        // is polled first, as its owner is.
        call: Option<(LockPolicy, OfHandle)>,
        // What came of it.
        place: Option<PendingAcquire>,
        wait: Duration,
        #[pin]
        timer: Option<Sleep>,
        // A call without a wait: its timer has fired once already.
        is_last_round: bool,
        // Its time is over in the moment in which it is told: it hears what.
        is_late: bool,
    }

    impl PinnedDrop for LockFuture {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            if let (Some(core), Some(place)) = (&this.core, this.place.take()) {
                place.give_up(core);
            }
        }
    }
}

/// A place in the line, until it is told.
struct PendingAcquire {
    key: LockKey,
    number: u64,
    waiter: Waiter,
    waiting: AcquireMetrics,
}

impl LockBuilder {
    pub(super) fn new(core: Arc<Driver>, key: LockKey, policy: LockPolicy, parent: Parent) -> Self {
        Self { core, key, policy: LockPolicy::new(), owner: None, handle: OfHandle { policy, parent } }
    }

    settings!(call_setters);

    /// Sets what this policy sets.
    pub fn policy(self, policy: LockPolicy) -> Self {
        Self { policy: policy.or(self.policy), ..self }
    }

    /// Who asks: for a key that it holds already, it has it once more. Default: the one whose [scope](Owner::scope) this is awaited in,
    /// else somebody new.
    pub fn owner(self, owner: &Owner) -> Self {
        Self { owner: Some(owner.clone()), ..self }
    }

    /// Takes the lock, works under it as long as it is ours and not one poll longer, and gives it back in order. The work is done as the
    /// [`Owner`] of the lock, which so has it once more where it asks.
    ///
    /// ```
    /// # use tower_lock::{LockManager, RunError};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), RunError> {
    /// # let locks = LockManager::in_memory();
    /// let balance = locks
    ///     .lock(("account", 7))
    ///     .run(async |lock| {
    ///         // .. write under lock.fencing_token()
    ///         42
    ///     })
    ///     .await?;
    /// # assert_eq!(balance, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Whatever the work answers, an `Err` of its own included, is an end in order: a [`min_hold`](Self::min_hold) counts. A job that may fail
    /// takes a guard, and says so with [`release_after_failure`](crate::LockGuard::release_after_failure).
    ///
    /// # Errors
    ///
    /// The lock could not be had, and nothing was started; or it was lost, and the work was dropped where it stood.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it leaves the line; or it drops the work, and then the lock, whose key stays taken for the lock-delay.
    pub async fn run<F, T>(self, work: F) -> Result<T, RunError>
    where
        F: AsyncFnOnce(HeldLock) -> T,
    {
        let owner = self.owner.clone().or_else(Owner::current).unwrap_or_else(Owner::new);
        let guard = self.owner(&owner).await?;
        let done = guard.while_held(owner.scope(work(guard.held_lock()))).await?;
        // What became of it does not change what was done: the lock was ours to the end of the work.
        let _ = guard.release().await;
        Ok(done)
    }
}

impl IntoFuture for LockBuilder {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = LockFuture;

    fn into_future(self) -> LockFuture {
        let Self { core, key, policy, owner, handle } = self;
        // Wait and terms are set with the first poll.
        let ask = LockParams { key, wait: Duration::ZERO, terms: HoldLimits::default(), owner, route: None };
        LockFuture::make(core, ask, Some((policy, handle)))
    }
}

impl LockFuture {
    pub(crate) fn new(core: Arc<Driver>, ask: LockParams) -> Self {
        Self::make(core, ask, None)
    }

    fn make(core: Arc<Driver>, ask: LockParams, call: Option<(LockPolicy, OfHandle)>) -> Self {
        let wait = ask.wait;
        Self {
            core: Some(core),
            ask: Some(ask),
            call,
            place: None,
            wait,
            timer: None,
            is_last_round: false,
            is_late: false,
        }
    }
}

impl Future for LockFuture {
    type Output = Result<LockGuard, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let core = this.core.as_ref().expect("not polled after its end");
        if let Some(mut ask) = this.ask.take() {
            let parent = this.call.take().and_then(|(policy, handle)| {
                (ask.wait, ask.terms) = settle(policy, handle.policy);
                *this.wait = ask.wait;
                handle.parent.get()
            });
            *this.place = Some(PendingAcquire::ask(core, ask, parent));
        }
        let place = this.place.as_mut().expect("asked with the first poll");
        let mut told = loop {
            if let Poll::Ready(told) = place.waiter.poll_recv(cx) {
                break told;
            }
            if *this.is_late {
                return Poll::Pending;
            }
            // A call without a wait is answered by the table, in time; its timer is in case it is not.
            let waits = !this.wait.is_zero();
            match this.timer {
                ref mut timer if timer.is_none() => {
                    timer.set(Some(sleep(if waits { *this.wait } else { 2 * core.store_timeout() })));
                }
                // Woken for nothing: a runtime may have ended, and what was to be done from there is for us to do.
                _ => core.rearm_lost_timers(),
            }
            if let Some(timer) = this.timer.as_mut().as_pin_mut() {
                ready!(timer.poll(cx));
            }
            if !waits && !*this.is_last_round {
                // After a stop of the process (SIGSTOP, a suspended machine) all timers fire at once,
                // this one before the table has heard the store. It gets the time to do so.
                *this.is_last_round = true;
                this.timer.set(None);
                continue;
            }
            if let Some(ahead) = core.cancel(&place.key, place.number) {
                break Err(if waits { ahead.timeout_error() } else { no_reply_error(ahead) });
            }
            // Out of the line without our doing: we were told in this very moment, or are about to be.
            *this.is_late = true;
        };
        // The table does not say how long its caller would have waited.
        if let Err(LockError::TimedOut { waited, .. }) = &mut told {
            *waited = *this.wait;
        }
        let Some(PendingAcquire { waiting, .. }) = this.place.take() else { unreachable!("it was just looked at") };
        Poll::Ready(match told {
            Ok(section) => {
                section.delivered();
                let metrics = waiting.granted(&section.data.metrics);
                Ok(LockGuard::new(this.core.take().expect("until its end"), section, metrics))
            }
            Err(error) => {
                waiting.rejected(&error);
                Err(error)
            }
        })
    }
}

impl PendingAcquire {
    fn ask(core: &Arc<Driver>, ask: LockParams, parent: Option<Owner>) -> Self {
        let LockParams { key, wait, terms, owner, route } = ask;
        let waiting = AcquireMetrics::start(route.as_ref());
        let waiter: Waiter = Arc::default();
        let owner = owner.or_else(Owner::current);
        let parent = parent.filter(|_| owner.is_none());
        let request = LockRequest { waiter: Arc::clone(&waiter), wait, owner, parent, limits: terms };
        let number = core.request(&key, request);
        Self { key, number, waiter, waiting }
    }

    /// Nobody wants it any more; a turn that was on its way to it goes to the next.
    fn give_up(self, core: &Arc<Driver>) {
        let Self { key, number, waiter, waiting } = self;
        // Before anybody is woken: a recorder that blocks keeps nobody back but this one.
        drop(waiting);
        match waiter.close() {
            // Chosen, and never came: it passes its turn on, as if its section had been empty.
            Some(Ok(section)) => drop(core.end_guard(&section, GuardEnd::Undelivered)),
            Some(Err(_)) => {}
            None => drop(core.cancel(&key, number)),
        }
    }
}

/// How long a call waits, and on which terms it holds its key.
fn settle(call: LockPolicy, handle: LockPolicy) -> (Duration, HoldLimits) {
    match InRequest::policy() {
        Some(request) => {
            let policy = call.or(request).or(handle);
            (policy.request_wait(), policy.request_terms())
        }
        None => {
            let policy = call.or(handle);
            (policy.call_wait(), policy.call_terms())
        }
    }
}

/// The answer of a call without a wait that the table has not answered: it never waited, so it never
/// times out.
fn no_reply_error(ahead: QueuePosition) -> LockError {
    let QueuePosition { lease_left, ahead: places, store_error: silent, is_contended: is_taken } = ahead;
    match silent {
        Some(error) => error.into(),
        None if is_taken => LockError::Busy { lease_left, ahead: places },
        None => StoreError::new("lock", "acquire", StoreErrorKind::Timeout).into(),
    }
}

impl fmt::Debug for LockFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (&self.ask, &self.place) {
            (Some(_), _) => "LockFuture(asking)",
            (None, Some(_)) => "LockFuture(waiting)",
            (None, None) => "LockFuture(ended)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_without_wait_never_reports_a_timeout() {
        let ahead = |is_taken, silent| QueuePosition {
            lease_left: Duration::from_secs(3),
            ahead: 2,
            store_error: silent,
            is_contended: is_taken,
        };
        let error = || StoreError::new("test", "acquire", StoreErrorKind::Unavailable);
        assert!(
            matches!(no_reply_error(ahead(true, None)), LockError::Busy { ahead: 2, lease_left } if !lease_left.is_zero())
        );
        assert!(
            matches!(no_reply_error(ahead(false, None)), LockError::Store(e) if e.kind() == StoreErrorKind::Timeout)
        );
        assert!(matches!(no_reply_error(ahead(true, Some(error()))), LockError::Store(e) if e.store() == "test"));
    }
}
