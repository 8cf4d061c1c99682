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
    driver_data::{NotGranted, Section, TokioDriver, Waiter},
    request_scope::{Parent, RequestScope},
};
use crate::{
    error::{LockError, RunError},
    lock_key::LockKey,
    owner::Owner,
    policy::{LockPolicy, call_setters, settings},
    proto::{GuardEnd, LockRequest, QueuePosition, Requested, hold_limits::HoldLimits},
    store::{Demand, StoreError},
    telemetry::{
        metrics::{AcquireMetrics, GuardMetrics},
        notice,
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
    driver: Arc<Driver>,
    key: UnpolledKey,
    /// What this call sets.
    policy: LockPolicy,
    owner: Option<Owner>,
    handle: HandleSettings,
}

/// The key of a call until its first poll. The drop of a call that was never polled is logged.
#[derive(Debug)]
struct UnpolledKey(Option<LockKey>);

/// The settings of a call that come from its handle.
#[derive(Debug)]
pub(super) struct HandleSettings {
    pub(super) policy: LockPolicy,
    pub(super) parent: Parent,
}

/// The parameters of a request for a lock.
#[derive(Debug)]
pub(crate) struct LockParams {
    pub(crate) key: LockKey,
    /// Zero: rejected while another owner holds the key.
    pub(crate) wait: Duration,
    pub(crate) limits: HoldLimits,
    pub(crate) owner: Option<Owner>,
    /// The label of its metrics.
    pub(crate) route: Option<Arc<str>>,
    /// Whether it is that of a replay layer.
    pub(crate) is_claim: bool,
    /// What it asks of the key.
    pub(crate) demand: Demand,
}

pin_project! {
    /// Future of a [`LockBuilder`]. Returns a [`LockGuard`].
    #[must_use = "futures do nothing unless you `.await` or poll them"]
    pub struct LockFuture {
        #[pin]
        acquire: AcquireFuture,
    }
}

pin_project! {
    /// Future of a request for a lock, or for the record of its key.
    pub(crate) struct AcquireFuture {
        driver: Option<Arc<Driver>>,
        #[pin]
        state: State,
    }

    impl PinnedDrop for AcquireFuture {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            let Some(driver) = this.driver else { return };
            let pending = match this.state.project() {
                StateProject::Created { .. } => None,
                StateProject::Sent { sent } => sent.take().map(|(pending, _)| pending),
                StateProject::Waiting { pending, .. } => pending.take().map(Ok),
            };
            match pending {
                Some(Ok(pending)) => pending.cancel(driver),
                Some(Err((Ok(section), ..))) => drop(driver.end_guard(&section, GuardEnd::ReleasedAfterFailure, None)),
                Some(Err((Err(_), ..))) | None => {}
            }
        }
    }
}

pin_project! {
    /// What a request needs before and after its first poll shares its memory.
    #[project = StateProject]
    enum State {
        // Sent at the first poll.
        Created { request: Option<Request> },
        // Sent with those of other keys.
        Sent { sent: Option<Sent> },
        Waiting {
            // `None` after completion.
            pending: Option<PendingAcquire>,
            wait: Duration,
            #[pin]
            timer: Option<Sleep>,
            // The timer of a call without a wait has fired once.
            is_last_round: bool,
            // The timeout coincided with the result, which is about to arrive.
            is_result_pending: bool,
        },
    }
}

/// A request that was not sent yet.
enum Request {
    Layer(LockParams),
    /// A call without HTTP. Its settings are merged at the first poll, because the task that polls
    /// decides on the owner and on the settings that are inherited.
    Call {
        key: UnpolledKey,
        owner: Option<Owner>,
        policy: LockPolicy,
        handle: HandleSettings,
        demand: Demand,
    },
}

/// The result of a request, its owner, and its metrics. `None`: one of several keys, which count as
/// one.
type Finished = (Result<Arc<Section>, NotGranted>, Option<Owner>, Option<AcquireMetrics>);

/// A request that was sent: with its wait, or with its result.
type Sent = (Result<PendingAcquire, Finished>, Duration);

/// A request whose result is awaited.
struct PendingAcquire {
    key: LockKey,
    number: u64,
    waiter: Waiter,
    owner: Option<Owner>,
    waiting: Option<AcquireMetrics>,
}

impl LockBuilder {
    pub(super) fn new(driver: Arc<Driver>, key: LockKey, policy: LockPolicy, parent: Parent) -> Self {
        let key = UnpolledKey(Some(key));
        Self { driver, key, policy: LockPolicy::new(), owner: None, handle: HandleSettings { policy, parent } }
    }

    settings!(call_setters);

    /// Sets each setting that this policy sets.
    pub fn policy(self, policy: LockPolicy) -> Self {
        Self { policy: policy.or(self.policy), ..self }
    }

    /// Sets the owner. An owner that already holds the key gets another guard at once.
    ///
    /// Default: the owner of the [scope](Owner::scope) in which the call is awaited. Outside of a
    /// scope, a new owner.
    pub fn owner(self, owner: &Owner) -> Self {
        Self { owner: Some(owner.clone()), ..self }
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

    pub(super) fn key(&self) -> &LockKey {
        self.key.0.as_ref().expect("not polled yet")
    }

    /// The key, for another call than that for the lock.
    pub(super) fn into_key(self) -> (Arc<Driver>, LockKey) {
        (self.driver, self.key.take())
    }

    /// The owner of the call, for the scope of its work.
    pub(super) fn effective_owner(&self) -> Owner {
        self.owner.clone().or_else(Owner::current).unwrap_or_else(Owner::new)
    }

    /// Requests the lock unless its key has a record.
    pub(super) fn claim(self) -> AcquireFuture {
        self.acquire(Demand::new().unless_recorded())
    }

    fn acquire(self, demand: Demand) -> AcquireFuture {
        let Self { driver, key, policy, owner, handle } = self;
        AcquireFuture::with_request(driver, Request::Call { key, owner, policy, handle, demand })
    }
}

impl IntoFuture for LockBuilder {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = LockFuture;

    fn into_future(self) -> LockFuture {
        LockFuture { acquire: self.acquire(Demand::new()) }
    }
}

impl AcquireFuture {
    pub(crate) fn new(driver: Arc<Driver>, params: LockParams) -> Self {
        Self::with_request(driver, Request::Layer(params))
    }

    fn with_request(driver: Arc<Driver>, request: Request) -> Self {
        Self { driver: Some(driver), state: State::Created { request: Some(request) } }
    }

    /// Sends requests of different keys together, now. Their metrics are those of the caller.
    pub(super) fn send_all(driver: &Arc<Driver>, requests: Vec<(LockKey, LockRequest<()>)>) -> Vec<Self> {
        let sent: Vec<_> =
            requests.iter().map(|(key, request)| (key.clone(), request.owner.clone(), request.wait)).collect();
        let sent = driver.request_all(requests).into_iter().zip(sent);
        let future = |(requested, (key, owner, wait))| {
            let sent = (PendingAcquire::sent(key, requested, owner, None), wait);
            Self { driver: Some(Arc::clone(driver)), state: State::Sent { sent: Some(sent) } }
        };
        sent.map(future).collect()
    }
}

impl Future for AcquireFuture {
    type Output = Result<LockGuard, NotGranted>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let driver = this.driver.as_ref().expect("not polled after completion");
        let sent = match this.state.as_mut().project() {
            StateProject::Created { request } => {
                let (params, parent) = request.take().expect("sent once").resolve();
                let wait = params.wait;
                Some((PendingAcquire::send(driver, params, parent), wait))
            }
            StateProject::Sent { sent } => sent.take(),
            StateProject::Waiting { .. } => None,
        };
        if let Some((pending, wait)) = sent {
            let pending = match pending {
                Ok(pending) => Some(pending),
                Err(finished) => return Poll::Ready(finish(this.driver, finished)),
            };
            this.state.set(State::Waiting {
                pending,
                wait,
                timer: None,
                is_last_round: false,
                is_result_pending: false,
            });
        }
        let StateProject::Waiting { pending: slot, wait, mut timer, is_last_round, is_result_pending } =
            this.state.project()
        else {
            unreachable!("sent above")
        };
        let pending = slot.as_mut().expect("not polled after completion");
        let mut result = loop {
            if let Poll::Ready(result) = pending.waiter.poll_recv(cx) {
                break result;
            }
            if *is_result_pending {
                return Poll::Pending;
            }
            // The table replies to a call without a wait in time. Its timer is a safety net.
            let waits = !wait.is_zero();
            if timer.is_none() {
                timer.set(Some(sleep(if waits { *wait } else { 2 * driver.store_timeout() })));
            } else {
                // Woken without a result: a runtime may have ended, with timers that have to fire.
                driver.rearm_lost_timers();
            }
            if let Some(timer) = timer.as_mut().as_pin_mut() {
                ready!(timer.poll(cx));
            }
            if !waits && !*is_last_round {
                // After a stop of the process (SIGSTOP, a suspended machine) all timers fire at
                // once, this one perhaps before the reply of the store is processed.
                *is_last_round = true;
                timer.set(None);
                continue;
            }
            if let Some(position) = driver.cancel(&pending.key, pending.number) {
                break Err(if waits { position.timeout_error() } else { no_reply_error(position) }.into());
            }
            // No longer in the queue: the result was just sent, or is about to be.
            *is_result_pending = true;
        };
        // The table does not know the limit of the wait.
        if let Err(NotGranted::Rejected(LockError::TimedOut { waited, .. })) = &mut result {
            *waited = *wait;
        }
        let Some(PendingAcquire { owner, waiting, .. }) = slot.take() else { unreachable!("it was polled above") };
        if let Ok(section) = &result {
            section.delivered();
        }
        Poll::Ready(finish(this.driver, (result, owner, waiting)))
    }
}

impl Future for LockFuture {
    type Output = Result<LockGuard, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().acquire.poll(cx).map_err(NotGranted::into_error)
    }
}

impl Request {
    /// The parameters, and the parent request of a call.
    fn resolve(self) -> (LockParams, Option<Owner>) {
        match self {
            Self::Layer(params) => (params, None),
            Self::Call { key, owner, policy, handle, demand } => {
                let (wait, limits) = effective_settings(policy, handle.policy);
                let key = key.take();
                (LockParams { key, wait, limits, owner, route: None, is_claim: false, demand }, handle.parent.get())
            }
        }
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

impl PendingAcquire {
    /// Sends a request. An error has its result.
    fn send(driver: &Arc<Driver>, params: LockParams, parent: Option<Owner>) -> Result<Self, Finished> {
        let LockParams { key, wait, limits, owner, route, is_claim, demand } = params;
        let waiting = AcquireMetrics::start(route.as_ref(), is_claim);
        let owner = owner.or_else(Owner::current);
        let parent = parent.filter(|_| owner.is_none());
        if !wait.is_zero() {
            driver.order.waits(owner.as_ref(), &key);
        }
        let request = LockRequest { waiter: (), wait, owner: owner.clone(), parent, limits, demand };
        let requested = driver.request(&key, request, None);
        Self::sent(key, requested, owner, Some(waiting))
    }

    fn sent(
        key: LockKey,
        requested: Result<Requested<TokioDriver>, StoreError>,
        owner: Option<Owner>,
        waiting: Option<AcquireMetrics>,
    ) -> Result<Self, Finished> {
        match requested {
            Ok(Requested::Waiting(number, waiter)) => Ok(Self { key, number, waiter, owner, waiting }),
            Ok(Requested::Granted(section)) => Err((Ok(section), owner, waiting)),
            Err(error) => Err((Err(LockError::from(error).into()), owner, waiting)),
        }
    }

    /// Cancels the request. A lock that was granted to it goes to the next waiter.
    fn cancel(self, driver: &Arc<Driver>) {
        let Self { key, number, waiter, owner: _, mut waiting } = self;
        // Before another waiter is woken: a recorder that blocks delays this task alone.
        waiting.take();
        match waiter.close() {
            // It was granted, and not received: it counts as an empty section.
            Some(Ok(section)) => drop(driver.end_guard(&section, GuardEnd::Undelivered, None)),
            Some(Err(_)) => {}
            None => drop(driver.cancel(&key, number)),
        }
    }
}

fn finish(driver: &mut Option<Arc<Driver>>, (result, owner, waiting): Finished) -> Result<LockGuard, NotGranted> {
    match result {
        Ok(section) => {
            if let Some(owner) = owner {
                owner.acquired(Arc::clone(&section) as _);
            }
            let metrics = match waiting {
                Some(waiting) => waiting.granted(&section.data.metrics),
                None => GuardMetrics::of_several(&section.data.metrics),
            };
            let driver = driver.take().expect("not polled after completion");
            Ok(LockGuard::new(driver, section, metrics))
        }
        Err(why) => {
            match (waiting, &why) {
                (Some(waiting), NotGranted::Recorded(_)) => waiting.recorded(),
                (Some(waiting), NotGranted::Rejected(error)) => waiting.rejected(error),
                (None, _) => {}
            }
            Err(why)
        }
    }
}

/// The wait and the hold limits of a call without HTTP.
pub(super) fn effective_settings(call: LockPolicy, handle: LockPolicy) -> (Duration, HoldLimits) {
    match RequestScope::policy() {
        Some(request) => {
            let policy = call.or(request).or(handle);
            (policy.request_wait(), policy.request_hold_limits())
        }
        None => {
            let policy = call.or(handle);
            (policy.call_wait(), policy.call_hold_limits())
        }
    }
}

/// The error of a call without a wait that got no result in time. It did not wait, so it is no
/// timeout.
fn no_reply_error(position: QueuePosition) -> LockError {
    match position.store_error {
        Some(error) => error.into(),
        None if position.is_contended => LockError::busy(position.lease_left, position.ahead),
        None => StoreError::no_reply("acquire").into(),
    }
}

impl fmt::Debug for LockFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.acquire.state {
            State::Created { request: Some(_) } => "LockFuture(created)",
            State::Waiting { pending: Some(_), .. } => "LockFuture(waiting)",
            _ => "LockFuture(done)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreErrorKind;

    /// Guarantee: G6.
    #[test]
    fn call_without_wait_never_reports_a_timeout() {
        let position = |is_contended, store_error| QueuePosition {
            lease_left: Duration::from_secs(3),
            ahead: 2,
            store_error,
            is_contended,
        };
        let error = || StoreError::new("test", "acquire", StoreErrorKind::Unavailable);
        assert!(
            matches!(no_reply_error(position(true, None)), LockError::Busy { ahead: 2, lease_left } if !lease_left.is_zero())
        );
        assert!(
            matches!(no_reply_error(position(false, None)), LockError::Store(e) if e.kind() == StoreErrorKind::Timeout)
        );
        assert!(matches!(no_reply_error(position(true, Some(error()))), LockError::Store(e) if e.store() == "test"));
    }
}
