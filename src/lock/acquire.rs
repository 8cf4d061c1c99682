//! One call of `lock` or `try_lock`, from its settings to its guard.

use std::{
    fmt,
    future::{Future, IntoFuture},
    pin::Pin,
    slice,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};
use tracing::Span;

use super::{
    HeldLock, LockGuard,
    driver::Driver,
    driver_data::{NotGranted, Section, TokioDriver, Waiter},
    request_scope::{Parent, RequestScope},
};
use crate::{
    error::{LockError, RunError},
    lock_key::LockKey,
    owner::Owner,
    policy::{LockPolicy, call_setters, settings},
    proto::{GuardEnd, LockRequest, QueuePosition, Requested, sharing::Sharing},
    store::{Demand, StoreError},
    telemetry::{
        metrics::AcquireMetrics,
        notice,
        route::Route,
        waits::{Caller, OpenWait},
    },
};

/// Builder of a call for a lock. Nothing happens before it is awaited.
///
/// Created by [`LockManager::lock`](super::LockManager::lock) and
/// [`LockManager::try_lock`](super::LockManager::try_lock). Awaiting it returns a [`LockGuard`].
///
/// # Errors
///
/// Fails with a [`LockError`] if another owner holds the lock, the wait times out, the queue is
/// full, the manager is shutting down, the store fails, or the call would deadlock.
///
/// # Cancel safety
///
/// If the future is dropped while it waits, it loses its position in the queue. A lock that was
/// granted to it meanwhile is released.
///
/// # Polling
///
/// A future that was polled once must be polled until it completes, or be dropped, because it
/// occupies its position in the queue. A grant that the future does not receive within 3 seconds
/// goes to the next waiter. This happens if nothing polls the future: in a `select!` loop that
/// polls another branch, in a buffered stream, or after `mem::forget`. Such a future ends with
/// [`LockError::TimedOut`], or with [`LockError::Busy`] if it does not wait. A future whose wait
/// has ended gets no grant.
#[derive(Debug)]
#[must_use = "nothing is locked before the call is awaited"]
pub struct LockBuilder {
    key: UnpolledKey,
    call: Call,
}

/// The key of a call until its first poll. The drop of a call that was never polled is logged.
#[derive(Debug)]
struct UnpolledKey(Option<LockKey>);

/// The settings of a call without HTTP.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) driver: Arc<Driver>,
    /// What this call sets.
    pub(super) policy: LockPolicy,
    pub(super) owner: Option<Owner>,
    pub(super) sharing: Sharing,
    /// What its handle sets.
    pub(super) of_handle: LockPolicy,
    pub(super) parent: Parent,
}

/// The parameters of a request for locks.
#[derive(Debug)]
pub(crate) struct LockParams {
    pub(crate) request: LockRequest<()>,
    /// `None`: one of several keys, which count as one call.
    pub(crate) metrics: Option<AcquireMetrics>,
    pub(crate) caller: Caller,
}

pin_project! {
    /// Future of a [`LockBuilder`]. Returns a [`LockGuard`].
    #[must_use = "futures do nothing unless you `.await` or poll them"]
    pub struct LockFuture {
        #[pin]
        state: State,
    }
}

pin_project! {
    /// What a call needs before and after its first poll shares its memory.
    #[project = StateProject]
    enum State {
        Created { call: Option<LockBuilder> },
        Sent { #[pin] request: AcquireFuture },
    }
}

pin_project! {
    /// Future of a request for one lock, or for the record of its key. The request was sent when
    /// the future was created.
    pub(crate) struct AcquireFuture {
        // `None` after its guard was returned.
        driver: Option<Arc<Driver>>,
        // The result of a request that was not enqueued.
        result: Option<Result<Arc<Section>, NotGranted>>,
        // `None` without a wait for the result, and after it.
        waiting: Option<Waiting>,
        owner: Option<Owner>,
        metrics: Option<AcquireMetrics>,
        wait: Duration,
        #[pin]
        timer: Option<Sleep>,
        // The timer of a call without a wait has fired once.
        is_last_round: bool,
        // The timeout coincided with the result, which is about to arrive.
        is_result_pending: bool,
    }

    impl PinnedDrop for AcquireFuture {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            // Before another waiter is woken: a recorder that blocks delays this task alone.
            this.metrics.take();
            let Some(driver) = this.driver else { return };
            match (this.waiting.take(), this.result.take()) {
                (Some(waiting), _) => waiting.cancel(driver),
                (None, Some(Ok(section))) => drop(driver.end_guard(&section, GuardEnd::ReleasedAfterFailure)),
                (None, _) => {}
            }
        }
    }
}

/// A request whose result is awaited.
struct Waiting {
    key: LockKey,
    number: u64,
    waiter: Waiter,
    open: OpenWait,
}

impl LockBuilder {
    pub(super) fn new(call: Call, key: LockKey) -> Self {
        Self { key: UnpolledKey(Some(key)), call }
    }

    settings!(call_setters);

    /// Sets each setting that this policy sets.
    pub fn policy(mut self, policy: LockPolicy) -> Self {
        self.call.policy = policy.or(self.call.policy);
        self
    }

    /// Sets the owner. An owner that already holds the key gets another guard at once.
    ///
    /// Default: the owner of the [scope](Owner::scope) in which the call is awaited. Outside of a
    /// scope, a new owner.
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.call.owner = Some(owner.clone());
        self
    }

    /// Acquires the lock, runs the work under it, and releases it.
    ///
    /// The work is not polled after the lock is lost. It runs as the [`Owner`] of the lock, so that
    /// it can re-enter the lock.
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
    /// Every output of the work counts as a success, including an `Err`, so
    /// [`min_hold`](Self::min_hold) applies. For work that may fail, acquire a guard and call
    /// [`release_after_failure`](crate::LockGuard::release_after_failure).
    ///
    /// # Errors
    ///
    /// Fails with [`RunError::NotStarted`] if the lock is not acquired, and with [`RunError::Lost`]
    /// if the lock is lost and the work is dropped at an await.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while it waits, it loses its position in the queue. If it is
    /// dropped later, it drops the work and then the guard, and the key stays blocked for the
    /// lock-delay.
    pub async fn run<F, T>(self, work: F) -> Result<T, RunError>
    where
        F: AsyncFnOnce(HeldLock) -> T,
    {
        let owner = self.effective_owner();
        let guard = self.owner(&owner).await?;
        let done = guard.while_held(owner.scope(work(guard.held_lock()))).await?;
        // The outcome of the release does not matter: the lock was held to the end of the work.
        let _ = guard.release().await;
        Ok(done)
    }

    pub(super) fn sharing(mut self, sharing: Sharing) -> Self {
        self.call.sharing = sharing;
        self
    }

    pub(super) fn key(&self) -> &LockKey {
        self.key.0.as_ref().expect("not polled yet")
    }

    /// The key, for another call than that for the lock.
    pub(super) fn into_key(self) -> (Arc<Driver>, LockKey) {
        (self.call.driver, self.key.take())
    }

    /// The owner of the call, for the scope of its work.
    pub(super) fn effective_owner(&self) -> Owner {
        self.call.owner.clone().or_else(Owner::current).unwrap_or_else(Owner::new)
    }

    /// Requests the lock unless its key has a record.
    pub(super) fn claim(self) -> AcquireFuture {
        self.send(Demand::new().unless_recorded())
    }

    fn send(self, demand: Demand) -> AcquireFuture {
        let (driver, params) = self.call.into_params(demand);
        AcquireFuture::send(driver, self.key.take(), params)
    }
}

impl Call {
    /// The parameters of the call. Called at its first poll, because the task that polls decides on
    /// the owner and on the settings that are inherited.
    pub(super) fn into_params(self, demand: Demand) -> (Arc<Driver>, LockParams) {
        let Self { driver, policy, owner, sharing, of_handle, parent } = self;
        let (wait, limits) = match RequestScope::policy() {
            Some(request) => {
                let policy = policy.or(request).or(of_handle);
                (policy.request_wait(), policy.request_hold_limits())
            }
            None => {
                let policy = policy.or(of_handle);
                (policy.call_wait(), policy.call_hold_limits())
            }
        };
        let owner = owner.or_else(Owner::current);
        let parent = if owner.is_none() { parent.get() } else { None };
        let request = LockRequest { waiter: (), wait, owner, parent, limits, demand, sharing, trace: None };
        let metrics = Some(AcquireMetrics::start("none", false));
        let caller = driver.waits.caller(Route::default(), Span::current);
        (driver, LockParams { request, metrics, caller })
    }
}

impl IntoFuture for LockBuilder {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = LockFuture;

    fn into_future(self) -> LockFuture {
        LockFuture { state: State::Created { call: Some(self) } }
    }
}

impl Future for LockFuture {
    type Output = Result<LockGuard, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            match state.as_mut().project() {
                StateProject::Created { call } => {
                    let request = call.take().expect("sent once").send(Demand::new());
                    state.set(State::Sent { request });
                }
                StateProject::Sent { request } => return request.poll(cx).map_err(NotGranted::into_error),
            }
        }
    }
}

impl AcquireFuture {
    /// Sends a request.
    pub(crate) fn send(driver: Arc<Driver>, key: LockKey, params: LockParams) -> Self {
        let LockParams { mut request, metrics, caller } = params;
        request.trace = driver.waits.trace_of(&caller);
        if !request.wait.is_zero() {
            driver.order.waits(request.owner.as_ref(), slice::from_ref(&key));
        }
        let (owner, wait) = (request.owner.clone(), request.wait);
        let requested = driver.request(&key, request);
        Self::sent(driver, key, requested, owner, wait, (metrics, caller))
    }

    /// Sends requests of different keys together. Their metrics are those of the caller.
    pub(super) fn send_all(
        driver: &Arc<Driver>,
        requests: Vec<(LockKey, LockRequest<()>)>,
        caller: &Caller,
    ) -> Vec<Self> {
        let sent: Vec<_> =
            requests.iter().map(|(key, request)| (key.clone(), request.owner.clone(), request.wait)).collect();
        let sent = driver.request_all(requests).into_iter().zip(sent);
        let send = |(requested, (key, owner, wait))| {
            Self::sent(Arc::clone(driver), key, requested, owner, wait, (None, caller.clone()))
        };
        sent.map(send).collect()
    }

    fn sent(
        driver: Arc<Driver>,
        key: LockKey,
        requested: Result<Requested<TokioDriver>, StoreError>,
        owner: Option<Owner>,
        wait: Duration,
        (metrics, caller): (Option<AcquireMetrics>, Caller),
    ) -> Self {
        let (result, waiting) = match requested {
            Ok(Requested::Waiting(number, waiter)) => {
                (None, Some(Waiting { key, number, waiter, open: OpenWait::start(caller) }))
            }
            Ok(Requested::Granted(section)) => (Some(Ok(section)), None),
            Err(error) => (Some(Err(LockError::from(error).into())), None),
        };
        Self {
            driver: Some(driver),
            result,
            waiting,
            owner,
            metrics,
            wait,
            timer: None,
            is_last_round: false,
            is_result_pending: false,
        }
    }

    /// The result of a request that is awaited.
    fn poll_waiting(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Arc<Section>, NotGranted>> {
        let mut this = self.project();
        let Waiting { key, number, waiter, .. } = this.waiting.as_ref().expect("not polled after completion");
        let driver = this.driver.as_ref().expect("not polled after completion");
        let mut result = loop {
            if let Poll::Ready(result) = waiter.poll_recv(cx) {
                break result;
            }
            if *this.is_result_pending {
                return Poll::Pending;
            }
            // The table replies to a call without a wait in time. Its timer is a safety net.
            let waits = !this.wait.is_zero();
            if this.timer.is_none() {
                this.timer.set(Some(sleep(if waits { *this.wait } else { 2 * driver.store_timeout() })));
            }
            // A runtime may have ended with timers that have to fire. If that was before the waker
            // of this task was known, nothing has woken it.
            driver.rearm_lost_timers();
            if let Some(timer) = this.timer.as_mut().as_pin_mut() {
                ready!(timer.poll(cx));
            }
            if !waits && !*this.is_last_round {
                // After a stop of the process (SIGSTOP, a suspended machine) all timers fire at
                // once, this one perhaps before the reply of the store is processed.
                *this.is_last_round = true;
                this.timer.set(None);
                continue;
            }
            if let Some(position) = driver.cancel(key, *number) {
                break Err(if waits { position.timeout_error() } else { no_reply_error(position) }.into());
            }
            // No longer in the queue: the result was just sent, or is about to be.
            *this.is_result_pending = true;
        };
        if let Some(Waiting { key, open, .. }) = this.waiting.take() {
            let after = result.as_ref().ok().and_then(|section| section.after.as_ref());
            driver.waits.ended(open, &key, result_name(&result), after);
        }
        match &mut result {
            Ok(section) => section.delivered(),
            // The table does not know the limit of the wait.
            Err(NotGranted::Rejected(LockError::TimedOut { waited, .. })) => *waited = *this.wait,
            Err(_) => {}
        }
        Poll::Ready(result)
    }
}

impl Future for AcquireFuture {
    type Output = Result<LockGuard, NotGranted>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = match self.as_mut().project().result.take() {
            Some(result) => result,
            None => ready!(self.as_mut().poll_waiting(cx)),
        };
        let this = self.project();
        let metrics = this.metrics.take();
        Poll::Ready(match result {
            Ok(section) => {
                let driver = this.driver.take().expect("not polled after completion");
                Ok(LockGuard::of_call(driver, section, this.owner.take(), metrics))
            }
            Err(why) => {
                match (&why, metrics) {
                    (NotGranted::Recorded(_), Some(metrics)) => metrics.recorded(),
                    (NotGranted::Rejected(error), Some(metrics)) => metrics.rejected(error),
                    (_, None) => {}
                }
                Err(why)
            }
        })
    }
}

impl UnpolledKey {
    fn take(mut self) -> LockKey {
        self.0.take().expect("taken once")
    }
}

impl Drop for UnpolledKey {
    fn drop(&mut self) {
        if let Some(key) = &self.0 {
            notice::dropped_unpolled(key);
        }
    }
}

impl Waiting {
    /// Cancels the request. A lock that was granted to it goes to the next waiter.
    fn cancel(self, driver: &Arc<Driver>) {
        let Self { key, number, waiter, open } = self;
        driver.waits.ended(open, &key, "cancelled", None);
        match waiter.close() {
            // It was granted, and not received: it counts as an empty section.
            Some(Ok(section)) => drop(driver.end_guard(&section, GuardEnd::Undelivered)),
            Some(Err(_)) => {}
            None => drop(driver.cancel(&key, number)),
        }
    }
}

fn result_name(result: &Result<Arc<Section>, NotGranted>) -> &'static str {
    match result {
        Ok(_) => "granted",
        Err(NotGranted::Recorded(_)) => "recorded",
        Err(NotGranted::Rejected(error)) => error.result(),
    }
}

/// The error of a call without a wait that got no result in time. It did not wait, so it is no
/// timeout.
fn no_reply_error(position: QueuePosition) -> LockError {
    match position.store_error {
        Some(error) => error.into(),
        None if position.is_contended => position.busy_error(),
        None => StoreError::no_reply("acquire").into(),
    }
}

impl fmt::Debug for LockFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            State::Created { .. } => "LockFuture(created)",
            State::Sent { request } if request.waiting.is_some() => "LockFuture(waiting)",
            State::Sent { .. } => "LockFuture(done)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreErrorKind;

    /// The timer for the end of the lock-delay is lost after the request, before its first poll.
    #[cfg(feature = "memory")]
    #[test]
    fn waiter_fires_a_timer_that_was_lost_before_its_first_poll() {
        let runtime = || {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            builder.enable_time().start_paused(true).build().expect("a runtime")
        };
        let (locks, first, second) = (crate::LockManager::in_memory(), runtime(), runtime());
        let guard = first.block_on(locks.lock(("k",)).into_future()).expect("free");
        let waiting = {
            let _entered = second.enter();
            locks.lock(("k",)).wait(Duration::from_secs(60)).send(Demand::new())
        };
        first.block_on(async move { drop(guard) });
        drop(first);
        assert!(second.block_on(waiting).is_ok(), "granted after the lock-delay");
    }

    /// Guarantee: G6.
    #[test]
    fn call_without_wait_never_reports_a_timeout() {
        let position = |is_contended, store_error| QueuePosition {
            lease_left: Duration::from_secs(3),
            ahead: 2,
            store_error,
            is_contended,
            held_by: None,
        };
        let error = || StoreError::new("test", "acquire", StoreErrorKind::Unavailable);
        assert!(
            matches!(no_reply_error(position(true, None)), LockError::Busy { ahead: 2, lease_left, .. } if !lease_left.is_zero())
        );
        assert!(
            matches!(no_reply_error(position(false, None)), LockError::Store(e) if e.kind() == StoreErrorKind::Timeout)
        );
        assert!(matches!(no_reply_error(position(true, Some(error()))), LockError::Store(e) if e.store() == "test"));
    }
}
