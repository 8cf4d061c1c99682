//! What all clones of a handle share, and the thin shell around the decisions: it asks the store, wakes, and keeps time.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::Notify,
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{
    detached,
    driver_data::{Grant, GrantData, Section, TokioDriver, Waiter},
    watchdog::Watchdog,
};
use crate::proto::section::ReleaseOutcome;
use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    body::budget::Room,
    clock::{BootInstant, Clock, LazyNow},
    error::{LockError, LockLost},
    limits::{LOCK_DELAY, MAX_STORE_WAITERS, OFFER_TTL, QUEUE_ENTRY_TTL, RECHECK_INTERVAL},
    lock_key::LockKey,
    owner::Owner,
    process::Process,
    proto::{
        Action, Actions, Event, GuardEnd, LockRequest, QueuePosition, StoreCall, StoreOp, lease::LeaseBounds,
        table::LockTable,
    },
    store::{
        AcquireRequest, EventSink, LockStore, QueueConfig, ReleaseRequest, StoreError, StoreErrorKind, StoreEvent,
        StoreFuture, YieldRequest,
    },
    sync::Mutex,
    telemetry::{
        metrics::AcquireMetrics,
        reports::{Report, Reports},
        throttle::ThrottledLog,
    },
};

/// How every line is served.
pub(crate) const QUEUE: QueueConfig =
    QueueConfig::new(OFFER_TTL.saturating_add(LOCK_DELAY), QUEUE_ENTRY_TTL, MAX_STORE_WAITERS);

/// What all clones of a handle share.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(super) store: Arc<dyn LockStore>,
    pub(super) call_timeout: Duration,
    pub(super) clock: Clock,
    pub(super) watchdog: Watchdog,
    pub(super) detached: detached::Count,
    pub(super) ids: AcquisitionIds,
    process: Process,
    /// The process that this was made in. In a child of it, which has a copy, it is dead: it grants
    /// nothing, and sends nothing to the store.
    pid: u32,
    /// The longest lease that the store is asked for.
    pub(super) lease: Duration,
    store_warnings: ThrottledLog,
    reports: Reports,
    /// For the bodies of requests that are read before their lock is taken.
    bodies: Arc<Room>,
    /// I11: nothing of others runs under it, and nothing is awaited.
    table: Mutex<LockTable<TokioDriver>>,
    lag_notices: Mutex<LagNotices>,
    /// Nothing new is started. Never taken back.
    is_shutting_down: AtomicBool,
    /// The runtime on which something was last spawned: for what happens where none is.
    runtime: Mutex<Option<Handle>>,
    /// Keys whose alarm went with its runtime. Whoever comes from another one sees to them.
    lost_timers: Mutex<HashSet<LockKey>>,
    has_lost_timers: AtomicBool,
    /// Nothing is held, asked for or given back any more. Told while draining.
    idle: Notify,
}

/// Gaps in the messages of the store: who waits is told of many of them at once.
#[derive(Debug, Default)]
struct LagNotices {
    /// When those who wait were told last.
    sent_at: Option<BootInstant>,
    /// A task is about to tell them.
    is_pending: bool,
}

/// A task that tells those who wait of gaps. If it is dropped before, the next gap is told by another one.
struct PendingLagNotice(Arc<Driver>);

/// A question to the store that is under way. If its task is dropped, its answer is that there is none.
struct InFlightCall<T, F: FnOnce(Result<T, StoreError>) -> Event<TokioDriver>> {
    core: Arc<Driver>,
    key: LockKey,
    operation: &'static str,
    event: Option<F>,
    reply: std::marker::PhantomData<fn(T)>,
}

/// A task that wakes a conversation. If it is dropped before, somebody else has to.
struct WakeupTask {
    core: Arc<Driver>,
    key: LockKey,
    at: BootInstant,
    has_fired: bool,
}

impl Driver {
    pub(super) fn new(
        store: Arc<dyn LockStore>,
        clock: Clock,
        ids: AcquisitionIds,
        process: Process,
        lease: Duration,
        max_detached: usize,
    ) -> Arc<Self> {
        let call_timeout = store.call_timeout();
        let core = Arc::new(Self {
            store,
            call_timeout,
            clock,
            watchdog: Watchdog::default(),
            detached: detached::Count::new(max_detached),
            ids,
            pid: process.id(),
            process,
            lease,
            store_warnings: ThrottledLog::default(),
            reports: Reports::default(),
            bodies: Arc::default(),
            table: Mutex::new(LockTable::new(LeaseBounds { longest: lease, call_timeout })),
            lag_notices: Mutex::default(),
            is_shutting_down: AtomicBool::new(false),
            runtime: Mutex::default(),
            lost_timers: Mutex::default(),
            has_lost_timers: AtomicBool::new(false),
            idle: Notify::new(),
        });
        let listener = Arc::downgrade(&core);
        let deliver = move |event| match (event, listener.upgrade()) {
            (_, None) => false,
            // The inbox of the parent: a child has its own.
            (_, Some(core)) if !core.is_of_this_process() => false,
            (None, Some(_)) => true,
            (Some(event), Some(core)) => {
                core.on_store_event(event);
                true
            }
        };
        core.store.subscribe(EventSink::new(Arc::clone(core.ids.manager()), deliver));
        core
    }

    /// For a child of the process that this was made in: with ids and an inbox of its own, and
    /// nothing held. What is held here belongs to the parent: here it is lost, and nothing is sent
    /// for it.
    pub(super) fn for_child(&self) -> Arc<Self> {
        self.watchdog.abandon();
        let ids = self.ids.for_child(self.process.random_bits());
        let (store, clock, process) = (Arc::clone(&self.store), self.clock.clone(), self.process.clone());
        Self::new(store, clock, ids, process, self.lease, self.detached.max())
    }

    /// One `getpid`: with each request, each end of a guard, and each answer of the store.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.process.id() == self.pid
    }

    // --- what happens ---------------------------------------------------------------------------------------------

    /// Somebody wants the key. Its place, should it have to wait.
    pub(super) fn request(self: &Arc<Self>, key: &LockKey, request: LockRequest<Waiter>) -> u64 {
        if !self.is_of_this_process() {
            // A call that was made before the fork, and is polled first behind it. The copied table
            // says what the parent holds.
            let error = StoreError::new("lock", "acquire", StoreErrorKind::Unavailable);
            drop(request.waiter.send(Err(error.into())));
            return 0;
        }
        self.rearm_lost_timers();
        let mut actions = Actions::new();
        let place = self.table.lock().request(key, &LazyNow::new(&self.clock), &self.ids, request, &mut actions);
        self.execute_all(key, actions);
        place
    }

    /// Whoever has this place has left. `None`: it was told already, or is about to be.
    pub(super) fn cancel(self: &Arc<Self>, key: &LockKey, place: u64) -> Option<QueuePosition> {
        let mut actions = Actions::new();
        let ahead = self.table.lock().cancel(key, &LazyNow::new(&self.clock), &self.ids, place, &mut actions);
        self.execute_all(key, actions);
        ahead
    }

    /// A guard is given back. What became of it; `None`: the [outcome](Section::outcome) follows.
    pub(super) fn end_guard(self: &Arc<Self>, section: &Arc<Section>, ending: GuardEnd) -> Option<ReleaseOutcome> {
        if !self.is_of_this_process() {
            // A copied guard: the parent has the lock, and releases it.
            section.grant.end(LockLost::Expired);
            section.grant.data.ended.notify_waiters();
            return Some(ReleaseOutcome::NotHeld);
        }
        let mut actions = Actions::new();
        let said = self.table.lock().end_guard(&LazyNow::new(&self.clock), &self.ids, section, ending, &mut actions);
        self.execute_all(&section.grant.key, actions);
        said
    }

    pub(super) fn grant_lost(self: &Arc<Self>, key: &LockKey, owner: &AcquisitionId, why: LockLost) {
        self.handle_event(key, Event::Lost(owner.clone(), why));
    }

    /// The section under this grant may have reached its limit.
    pub(super) fn check_section(self: &Arc<Self>, grant: &Grant) {
        self.handle_event(&grant.key, Event::CheckSection(grant.id.clone()));
    }

    /// The store has told us something. It is a hint (I7), and may be forged by anybody who can send messages: what names an id that was not
    /// given out here is none of ours, and all of it costs little, whatever is held.
    fn on_store_event(self: &Arc<Self>, event: StoreEvent) {
        match event {
            StoreEvent::Offered { key, id: owner } if self.ids.has_issued(&owner) => {
                self.handle_event(&key, Event::Offered(owner));
            }
            StoreEvent::Revoked { key, id: owner } if self.ids.has_issued(&owner) => {
                self.handle_event(&key, Event::Revoked(owner));
            }
            StoreEvent::Offered { .. } | StoreEvent::Revoked { .. } => {}
            StoreEvent::Lagged => self.on_lagged(),
        }
    }

    /// Those who wait are told at once, and then no more often than each [`RECHECK_INTERVAL`].
    fn on_lagged(self: &Arc<Self>) {
        let now = self.clock.now();
        let mut gaps = self.lag_notices.lock();
        if gaps.is_pending {
            return;
        }
        let left = gaps
            .sent_at
            .map_or(Duration::ZERO, |told_at| told_at.saturating_add(RECHECK_INTERVAL).saturating_duration_since(now));
        if left.is_zero() {
            gaps.sent_at = Some(now);
            drop(gaps);
            self.broadcast_lagged();
        } else {
            gaps.is_pending = true;
            drop(gaps);
            let pending = PendingLagNotice(Arc::clone(self));
            self.spawn(async move {
                sleep(left).await;
                pending.0.lag_notices.lock().sent_at = Some(pending.0.clock.now());
                let core = Arc::clone(&pending.0);
                // Before they are told: a gap that comes meanwhile is one of its own.
                drop(pending);
                core.broadcast_lagged();
            });
        }
    }

    fn broadcast_lagged(self: &Arc<Self>) {
        let waiting = self.table.lock().lagged(self.clock.now());
        for key in waiting {
            self.handle_event(&key, Event::Lagged);
        }
    }

    /// Nothing new is started from now on.
    pub(super) fn shut_down(self: &Arc<Self>) {
        let keys = self.table.lock().shut_down();
        self.is_shutting_down.store(true, Ordering::Release);
        for key in keys {
            self.handle_event(&key, Event::Shutdown);
        }
        self.notify_if_idle();
    }

    /// Completes when nothing is held, asked for or given back any more; while draining.
    pub(super) async fn wait_idle(self: &Arc<Self>) {
        self.rearm_lost_timers();
        loop {
            let told = self.idle.notified();
            if self.table.lock().is_empty() {
                return;
            }
            told.await;
        }
    }

    /// Every section that still runs is lost. Its key is free a lock-delay later (I10).
    #[cfg(feature = "signal")]
    pub(super) fn end_all(self: &Arc<Self>) {
        for grant in self.watchdog.grants() {
            self.grant_lost(&grant.key, &grant.id, LockLost::ShuttingDown);
        }
    }

    pub(super) fn held_count(&self) -> usize {
        self.table.lock().held_count()
    }

    pub(super) fn waiting_for(&self, key: &LockKey) -> usize {
        self.table.lock().waiting_for(key)
    }

    pub(crate) fn hold_count(&self, key: &LockKey, owner: &Owner) -> u32 {
        self.table.lock().hold_count(key, owner, self.clock.now())
    }

    /// What a request of this owner that does not wait would be told now, as far as is known here.
    /// It is counted under this route as the call that it stands for.
    pub(crate) fn rejection_without_wait(
        &self,
        key: &LockKey,
        owner: &Owner,
        route: impl FnOnce() -> Option<Arc<str>>,
    ) -> Option<LockError> {
        let error = self.table.lock().rejection_without_wait(key, owner, self.clock.now())?;
        AcquireMetrics::start(route().as_ref()).rejected(&error);
        Some(error)
    }

    pub(super) fn hold_count_of(&self, section: &Arc<Section>) -> u32 {
        self.table.lock().hold_count_of(section, self.clock.now())
    }

    /// After this time without a reply a request is rejected: one call and one repeat.
    pub(super) fn store_timeout(&self) -> Duration {
        2 * self.call_timeout
    }

    /// Keys that something is known of, and waiters.
    #[cfg(any(test, feature = "__internals"))]
    pub(crate) fn size(&self) -> (usize, usize) {
        let table = self.table.lock();
        (table.len(), table.waiting())
    }

    pub(crate) fn bodies(&self) -> &Arc<Room> {
        &self.bodies
    }

    fn handle_event(self: &Arc<Self>, key: &LockKey, event: Event<TokioDriver>) {
        if !self.is_of_this_process() {
            return;
        }
        let mut actions = Actions::new();
        self.table.lock().handle_event(key, &LazyNow::new(&self.clock), &self.ids, event, &mut actions);
        self.execute_all(key, actions);
    }

    // --- what is done ---------------------------------------------------------------------------------------------

    /// Not under the mutex of the table. What a store in memory answers at once is done at once, without a task.
    fn execute_all(self: &Arc<Self>, key: &LockKey, mut actions: Actions<TokioDriver>) {
        while !actions.is_empty() {
            let mut next = Actions::new();
            for action in actions {
                if let Some(event) = self.execute(key, action) {
                    self.table.lock().handle_event(key, &LazyNow::new(&self.clock), &self.ids, event, &mut next);
                }
            }
            actions = next;
        }
        self.notify_if_idle();
    }

    fn execute(self: &Arc<Self>, key: &LockKey, action: Action<TokioDriver>) -> Option<Event<TokioDriver>> {
        match action {
            Action::Send(call) => return self.send(key, call),
            Action::Grant(waiter, section) => {
                // Chosen, and gone: it passes its turn on.
                return waiter
                    .send(Ok(section))
                    .err()?
                    .ok()
                    .map(|section| Event::GuardEnded(section, GuardEnd::Undelivered));
            }
            Action::Recall(waiter, error) => {
                let recalled = waiter.replace(Err(error))?.ok();
                return recalled.map(|section| Event::GuardEnded(section, GuardEnd::Undelivered));
            }
            // Nobody there to be told is told nothing.
            Action::Reject(waiter, error) => drop(waiter.send(Err(error))),
            Action::Track(grant) => Watchdog::track(self, &grant),
            Action::Verify(grant) => Watchdog::verify(self, &grant),
            Action::Untrack(grant) => {
                self.watchdog.untrack(&grant);
                grant.data.ended.notify_waiters();
                if let Some(why) = GrantData::loss_to_report(&grant) {
                    self.report(Report::Lost { fence: grant.fence(), why });
                }
            }
            Action::SectionEnded(grant) => grant.data.ended.notify_waiters(),
            Action::ReleaseOutcome(section, outcome) => drop(section.data.release_outcome.send(outcome)),
            Action::WakeAt(at) => self.schedule_wakeup(key, at),
        }
        None
    }

    fn send(self: &Arc<Self>, key: &LockKey, call: StoreCall) -> Option<Event<TokioDriver>> {
        if !self.is_of_this_process() {
            return None;
        }
        let StoreCall { number, id: owner, op: verb } = call;
        let store = &self.store;
        match verb {
            StoreOp::Acquire { if_busy: if_held, lease } => {
                let ask = AcquireRequest::new(key.clone(), owner, lease, if_held, QUEUE, self.call_timeout);
                self.await_reply(key, "acquire", store.acquire(ask), move |answer| Event::Acquired(number, answer))
            }
            StoreOp::Yield { fence, next_id: next, lease } => {
                let ask = YieldRequest::new(key.clone(), owner, fence, next, lease, QUEUE, self.call_timeout);
                self.await_reply(key, "yield", store.yield_to_queue(ask), move |answer| Event::Yielded(number, answer))
            }
            StoreOp::Release { block_for } => {
                let ask = ReleaseRequest::new(key.clone(), owner, block_for, QUEUE);
                self.await_reply(key, "release", store.release(ask), move |answer| Event::Released(number, answer))
            }
        }
    }

    fn await_reply<T: Unpin + Send + 'static>(
        self: &Arc<Self>,
        key: &LockKey,
        verb: &'static str,
        answer: StoreFuture<T>,
        event: impl FnOnce(Result<T, StoreError>) -> Event<TokioDriver> + Send + 'static,
    ) -> Option<Event<TokioDriver>> {
        match answer.into_ready() {
            Ok(answer) => {
                self.record_reply(verb, &answer);
                Some(event(answer))
            }
            Err(answer) => {
                let under_way = InFlightCall {
                    core: Arc::clone(self),
                    key: key.clone(),
                    operation: verb,
                    event: Some(event),
                    reply: std::marker::PhantomData,
                };
                self.spawn(async move {
                    let answer = timeout(under_way.core.call_timeout, answer).await;
                    under_way
                        .finish(answer.unwrap_or_else(|_| Err(StoreError::new("lock", verb, StoreErrorKind::Timeout))));
                });
                None
            }
        }
    }

    /// Counted, and complained of.
    pub(super) fn record_reply<T>(&self, verb: &'static str, answer: &Result<T, StoreError>) {
        if let Err(error) = answer
            && error.kind() != StoreErrorKind::InvalidKey
        {
            self.report(Report::StoreFailed { operation: verb, kind: error.kind() });
            if let Some(warning) = self.store_warnings.store_failed(self.clock.now(), verb, error) {
                self.report(warning);
            }
        }
    }

    fn schedule_wakeup(self: &Arc<Self>, key: &LockKey, at: BootInstant) {
        let mut alarm = WakeupTask { core: Arc::clone(self), key: key.clone(), at, has_fired: false };
        let left: Duration = at.saturating_duration_since(self.clock.now());
        self.spawn(async move {
            sleep(left).await;
            alarm.has_fired = true;
            alarm.core.handle_event(&alarm.key, Event::Timer(alarm.at));
        });
    }

    /// On the runtime we are on, else on the last one we were on. If that has ended, the task is dropped, and says so where it must.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
        Some(self.runtime()?.spawn(task).abort_handle())
    }

    fn runtime(&self) -> Option<Handle> {
        match Handle::try_current() {
            Ok(runtime) => {
                *self.runtime.lock() = Some(runtime.clone());
                Some(runtime)
            }
            Err(_) => self.runtime.lock().clone(),
        }
    }

    /// Tells those who operate the service, where nobody waits for it.
    pub(super) fn report(&self, report: Report) {
        self.reports.send(report, self.runtime().as_ref());
    }

    /// Wakes from this runtime what was to be woken from one that has ended.
    pub(super) fn rearm_lost_timers(self: &Arc<Self>) {
        if !self.has_lost_timers.load(Ordering::Acquire) || Handle::try_current().is_err() {
            return;
        }
        self.has_lost_timers.store(false, Ordering::Release);
        let orphans = std::mem::take(&mut *self.lost_timers.lock());
        for key in orphans {
            self.handle_event(&key, Event::Timer(self.clock.now()));
        }
    }

    fn notify_if_idle(&self) {
        if self.is_shutting_down.load(Ordering::Acquire) && self.table.lock().is_empty() {
            self.idle.notify_waiters();
        }
    }
}

impl<T, F: FnOnce(Result<T, StoreError>) -> Event<TokioDriver>> InFlightCall<T, F> {
    fn finish(mut self, answer: Result<T, StoreError>) {
        self.report(answer);
    }

    fn report(&mut self, answer: Result<T, StoreError>) {
        if let Some(event) = self.event.take() {
            self.core.record_reply(self.operation, &answer);
            self.core.handle_event(&self.key, event(answer));
        }
    }
}

impl<T, F: FnOnce(Result<T, StoreError>) -> Event<TokioDriver>> Drop for InFlightCall<T, F> {
    fn drop(&mut self) {
        // The runtime has ended. What is tried next ends the same way, until somebody comes from another one.
        self.report(Err(StoreError::new("lock", self.operation, StoreErrorKind::Unavailable)));
    }
}

impl Drop for PendingLagNotice {
    fn drop(&mut self) {
        self.0.lag_notices.lock().is_pending = false;
    }
}

impl Drop for WakeupTask {
    fn drop(&mut self) {
        if self.has_fired {
            return;
        }
        let waiters = self.core.table.lock().take_timer(&self.key, self.at);
        self.core.lost_timers.lock().insert(self.key.clone());
        self.core.has_lost_timers.store(true, Ordering::Release);
        // Whoever waits on another runtime comes and adopts it.
        for waiter in waiters {
            waiter.wake();
        }
    }
}
