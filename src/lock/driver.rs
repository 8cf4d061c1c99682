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
    driver_data::{Attached, Grant, GrantData, Section, Waiter},
    watchdog::Watchdog,
};
use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    body::budget::Room,
    clock::{BootInstant, Clock, LazyNow},
    error::{LockError, LockLost},
    limits::{LOCK_DELAY, MAX_STORE_WAITERS, OFFER_TTL, QUEUE_ENTRY_TTL, RECHECK_INTERVAL},
    lock_key::LockKey,
    owner::Owner,
    process::Process,
    proto::{Action, Actions, Ahead, Call, Ending, Event, Request, Verb, lease::LeaseBounds, table::Table},
    store::{
        AcquireRequest, EventSink, LockStore, QueueConfig, ReleaseRequest, Released, StoreError, StoreErrorKind,
        StoreEvent, StoreFuture, YieldRequest,
    },
    sync::Mutex,
    telemetry::{
        metrics::AcquireMetrics,
        reports::{Report, Reports},
        throttle::ThrottledLog,
    },
};

/// How every line is served.
pub(super) const LINE: QueueConfig =
    QueueConfig::new(OFFER_TTL.saturating_add(LOCK_DELAY), QUEUE_ENTRY_TTL, MAX_STORE_WAITERS);

/// What all clones of a handle share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(super) store: Arc<dyn LockStore>,
    pub(super) call_timeout: Duration,
    pub(super) clock: Clock,
    pub(super) watchdog: Watchdog,
    pub(super) detached: detached::Count,
    pub(super) ids: AcquisitionIds,
    process: Process,
    /// The process that this was made in. In a child of it, which has a copy, it is dead: it grants
    /// nothing, and sends nothing to the store.
    made_in: u32,
    /// The longest lease that the store is asked for.
    pub(super) lease: Duration,
    store_warnings: ThrottledLog,
    reports: Reports,
    /// For the bodies of requests that are read before their lock is taken.
    bodies: Arc<Room>,
    /// I11: nothing of others runs under it, and nothing is awaited.
    table: Mutex<Table<Attached>>,
    gaps: Mutex<Gaps>,
    /// Nothing new is started. Never taken back.
    is_draining: AtomicBool,
    /// The runtime on which something was last spawned: for what happens where none is.
    runtime: Mutex<Option<Handle>>,
    /// Keys whose alarm went with its runtime. Whoever comes from another one sees to them.
    orphans: Mutex<HashSet<LockKey>>,
    has_orphans: AtomicBool,
    /// Nothing is held, asked for or given back any more. Told while draining.
    empty: Notify,
}

/// Gaps in the messages of the store: who waits is told of many of them at once.
#[derive(Debug, Default)]
struct Gaps {
    /// When those who wait were told last.
    told_at: Option<BootInstant>,
    /// A task is about to tell them.
    is_pending: bool,
}

/// A task that tells those who wait of gaps. If it is dropped before, the next gap is told by another one.
struct PendingGap(Arc<Core>);

/// A question to the store that is under way. If its task is dropped, its answer is that there is none.
struct UnderWay<T, F: FnOnce(Result<T, StoreError>) -> Event<Attached>> {
    core: Arc<Core>,
    key: LockKey,
    verb: &'static str,
    event: Option<F>,
    answer: std::marker::PhantomData<fn(T)>,
}

/// A task that wakes a conversation. If it is dropped before, somebody else has to.
struct Alarm {
    core: Arc<Core>,
    key: LockKey,
    at: BootInstant,
    has_rung: bool,
}

impl Core {
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
            made_in: process.id(),
            process,
            lease,
            store_warnings: ThrottledLog::default(),
            reports: Reports::default(),
            bodies: Arc::default(),
            table: Mutex::new(Table::new(LeaseBounds { longest: lease, call_timeout })),
            gaps: Mutex::default(),
            is_draining: AtomicBool::new(false),
            runtime: Mutex::default(),
            orphans: Mutex::default(),
            has_orphans: AtomicBool::new(false),
            empty: Notify::new(),
        });
        let listener = Arc::downgrade(&core);
        let deliver = move |event| match (event, listener.upgrade()) {
            (_, None) => false,
            // The inbox of the parent: a child has its own.
            (_, Some(core)) if !core.is_of_this_process() => false,
            (None, Some(_)) => true,
            (Some(event), Some(core)) => {
                core.told(event);
                true
            }
        };
        core.store.subscribe(EventSink::new(Arc::clone(core.ids.process()), deliver));
        core
    }

    /// For a child of the process that this was made in: with ids and an inbox of its own, and
    /// nothing held. What is held here belongs to the parent: here it is lost, and nothing is sent
    /// for it.
    pub(super) fn of_child(&self) -> Arc<Self> {
        self.watchdog.disown();
        let ids = self.ids.of_child(self.process.random_bits());
        let (store, clock, process) = (Arc::clone(&self.store), self.clock.clone(), self.process.clone());
        Self::new(store, clock, ids, process, self.lease, self.detached.max())
    }

    /// One `getpid`: with each request, each end of a guard, and each answer of the store.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.process.id() == self.made_in
    }

    // --- what happens ---------------------------------------------------------------------------------------------

    /// Somebody wants the key. Its place, should it have to wait.
    pub(super) fn request(self: &Arc<Self>, key: &LockKey, request: Request<Waiter>) -> u64 {
        if !self.is_of_this_process() {
            // A call that was made before the fork, and is polled first behind it. The copied table
            // says what the parent holds.
            let error = StoreError::new("lock", "acquire", StoreErrorKind::Unavailable);
            drop(request.waiter.tell(Err(error.into())));
            return 0;
        }
        self.adopt_orphans();
        let mut actions = Actions::new();
        let place = self.table.lock().request(key, &LazyNow::new(&self.clock), &self.ids, request, &mut actions);
        self.perform(key, actions);
        place
    }

    /// Whoever has this place has left. `None`: it was told already, or is about to be.
    pub(super) fn leave(self: &Arc<Self>, key: &LockKey, place: u64) -> Option<Ahead> {
        let mut actions = Actions::new();
        let ahead = self.table.lock().leave(key, &LazyNow::new(&self.clock), &self.ids, place, &mut actions);
        self.perform(key, actions);
        ahead
    }

    /// A guard is given back. What became of it; `None`: the [outcome](Section::outcome) follows.
    pub(super) fn guard_ended(self: &Arc<Self>, section: &Arc<Section>, ending: Ending) -> Option<Released> {
        if !self.is_of_this_process() {
            // A copied guard: the parent has the lock, and releases it.
            section.grant.end(LockLost::Expired);
            section.grant.data.ended.notify_waiters();
            return Some(Released::NotHolder);
        }
        let mut actions = Actions::new();
        let said = self.table.lock().guard_ended(&LazyNow::new(&self.clock), &self.ids, section, ending, &mut actions);
        self.perform(&section.grant.key, actions);
        said
    }

    pub(super) fn lost(self: &Arc<Self>, key: &LockKey, owner: &AcquisitionId, why: LockLost) {
        self.on(key, Event::Lost(owner.clone(), why));
    }

    /// The section under this grant may have reached its limit.
    pub(super) fn limit(self: &Arc<Self>, grant: &Grant) {
        self.on(&grant.key, Event::Limit(grant.owner.clone()));
    }

    /// The store has told us something. It is a hint (I7), and may be forged by anybody who can send messages: what names an id that was not
    /// given out here is none of ours, and all of it costs little, whatever is held.
    fn told(self: &Arc<Self>, event: StoreEvent) {
        match event {
            StoreEvent::Offered { key, id: owner } if self.ids.has_issued(&owner) => {
                self.on(&key, Event::Offered(owner));
            }
            StoreEvent::Revoked { key, id: owner } if self.ids.has_issued(&owner) => {
                self.on(&key, Event::TakenAway(owner));
            }
            StoreEvent::Offered { .. } | StoreEvent::Revoked { .. } => {}
            StoreEvent::Lagged => self.gap(),
        }
    }

    /// Those who wait are told at once, and then no more often than each [`RECHECK_INTERVAL`].
    fn gap(self: &Arc<Self>) {
        let now = self.clock.now();
        let mut gaps = self.gaps.lock();
        if gaps.is_pending {
            return;
        }
        let left = gaps
            .told_at
            .map_or(Duration::ZERO, |told_at| told_at.saturating_add(RECHECK_INTERVAL).saturating_duration_since(now));
        if left.is_zero() {
            gaps.told_at = Some(now);
            drop(gaps);
            self.tell_of_gap();
        } else {
            gaps.is_pending = true;
            drop(gaps);
            let pending = PendingGap(Arc::clone(self));
            self.spawn(async move {
                sleep(left).await;
                pending.0.gaps.lock().told_at = Some(pending.0.clock.now());
                let core = Arc::clone(&pending.0);
                // Before they are told: a gap that comes meanwhile is one of its own.
                drop(pending);
                core.tell_of_gap();
            });
        }
    }

    fn tell_of_gap(self: &Arc<Self>) {
        let waiting = self.table.lock().gap(self.clock.now());
        for key in waiting {
            self.on(&key, Event::Gap);
        }
    }

    /// Nothing new is started from now on.
    pub(super) fn drain(self: &Arc<Self>) {
        let keys = self.table.lock().drain();
        self.is_draining.store(true, Ordering::Release);
        for key in keys {
            self.on(&key, Event::Drain);
        }
        self.tell_if_empty();
    }

    /// Completes when nothing is held, asked for or given back any more; while draining.
    pub(super) async fn emptied(self: &Arc<Self>) {
        self.adopt_orphans();
        loop {
            let told = self.empty.notified();
            if self.table.lock().is_empty() {
                return;
            }
            told.await;
        }
    }

    /// Every section that still runs is lost. Its key is free a lock-delay later (I10).
    #[cfg(feature = "signal")]
    pub(super) fn revoke_all(self: &Arc<Self>) {
        for grant in self.watchdog.grants() {
            self.lost(&grant.key, &grant.owner, LockLost::ShuttingDown);
        }
    }

    pub(super) fn held(&self) -> usize {
        self.table.lock().held()
    }

    pub(super) fn waiting_for(&self, key: &LockKey) -> usize {
        self.table.lock().waiting_for(key)
    }

    pub(crate) fn holds(&self, key: &LockKey, owner: &Owner) -> u32 {
        self.table.lock().holds(key, owner, self.clock.now())
    }

    /// What a request of this owner that does not wait would be told now, as far as is known here.
    /// It is counted under this route as the call that it stands for.
    pub(crate) fn refusal(
        &self,
        key: &LockKey,
        owner: &Owner,
        route: impl FnOnce() -> Option<Arc<str>>,
    ) -> Option<LockError> {
        let error = self.table.lock().refusal(key, owner, self.clock.now())?;
        AcquireMetrics::start(route().as_ref()).rejected(&error);
        Some(error)
    }

    pub(super) fn holds_of(&self, section: &Arc<Section>) -> u32 {
        self.table.lock().holds_of(section, self.clock.now())
    }

    /// After this time without a reply a request is rejected: one call and one repeat.
    pub(super) fn store_timeout(&self) -> Duration {
        2 * self.call_timeout
    }

    /// Keys that something is known of, and waiters.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn size(&self) -> (usize, usize) {
        let table = self.table.lock();
        (table.len(), table.waiting())
    }

    pub(crate) fn bodies(&self) -> &Arc<Room> {
        &self.bodies
    }

    fn on(self: &Arc<Self>, key: &LockKey, event: Event<Attached>) {
        if !self.is_of_this_process() {
            return;
        }
        let mut actions = Actions::new();
        self.table.lock().on(key, &LazyNow::new(&self.clock), &self.ids, event, &mut actions);
        self.perform(key, actions);
    }

    // --- what is done ---------------------------------------------------------------------------------------------

    /// Not under the mutex of the table. What a store in memory answers at once is done at once, without a task.
    fn perform(self: &Arc<Self>, key: &LockKey, mut actions: Actions<Attached>) {
        while !actions.is_empty() {
            let mut next = Actions::new();
            for action in actions {
                if let Some(event) = self.act(key, action) {
                    self.table.lock().on(key, &LazyNow::new(&self.clock), &self.ids, event, &mut next);
                }
            }
            actions = next;
        }
        self.tell_if_empty();
    }

    fn act(self: &Arc<Self>, key: &LockKey, action: Action<Attached>) -> Option<Event<Attached>> {
        match action {
            Action::Send(call) => return self.send(key, call),
            Action::Start(waiter, section) => {
                // Chosen, and gone: it passes its turn on.
                return waiter.tell(Ok(section)).err()?.ok().map(|section| Event::GuardEnded(section, Ending::Unheard));
            }
            Action::Recall(waiter, error) => {
                let recalled = waiter.recall(Err(error))?.ok();
                return recalled.map(|section| Event::GuardEnded(section, Ending::Unheard));
            }
            // Nobody there to be told is told nothing.
            Action::Refuse(waiter, error) => drop(waiter.tell(Err(error))),
            Action::Watch(grant) => Watchdog::watch(self, &grant),
            Action::Doubt(grant) => Watchdog::doubt(self, &grant),
            Action::Forget(grant) => {
                self.watchdog.forget(&grant);
                grant.data.ended.notify_waiters();
                if let Some(why) = GrantData::loss_to_report(&grant) {
                    self.report(Report::Lost { fence: grant.fence(), why });
                }
            }
            Action::Ended(grant) => grant.data.ended.notify_waiters(),
            Action::Outcome(section, outcome) => drop(section.data.release_outcome.tell(outcome)),
            Action::WakeAt(at) => self.wake_at(key, at),
        }
        None
    }

    fn send(self: &Arc<Self>, key: &LockKey, call: Call) -> Option<Event<Attached>> {
        if !self.is_of_this_process() {
            return None;
        }
        let Call { number, owner, verb } = call;
        let store = &self.store;
        match verb {
            Verb::Acquire { if_held, lease } => {
                let ask = AcquireRequest::new(key.clone(), owner, lease, if_held, LINE, self.call_timeout);
                self.answer(key, "acquire", store.acquire(ask), move |answer| Event::Acquired(number, answer))
            }
            Verb::Yield { fence, next, lease } => {
                let ask = YieldRequest::new(key.clone(), owner, fence, next, lease, LINE, self.call_timeout);
                self.answer(key, "yield", store.yield_to_queue(ask), move |answer| Event::Yielded(number, answer))
            }
            Verb::Release { block_for } => {
                let ask = ReleaseRequest::new(key.clone(), owner, block_for, LINE);
                self.answer(key, "release", store.release(ask), move |answer| Event::Released(number, answer))
            }
        }
    }

    fn answer<T: Unpin + Send + 'static>(
        self: &Arc<Self>,
        key: &LockKey,
        verb: &'static str,
        answer: StoreFuture<T>,
        event: impl FnOnce(Result<T, StoreError>) -> Event<Attached> + Send + 'static,
    ) -> Option<Event<Attached>> {
        match answer.into_ready() {
            Ok(answer) => {
                self.answered(verb, &answer);
                Some(event(answer))
            }
            Err(answer) => {
                let under_way = UnderWay {
                    core: Arc::clone(self),
                    key: key.clone(),
                    verb,
                    event: Some(event),
                    answer: std::marker::PhantomData,
                };
                self.spawn(async move {
                    let answer = timeout(under_way.core.call_timeout, answer).await;
                    under_way
                        .ends(answer.unwrap_or_else(|_| Err(StoreError::new("lock", verb, StoreErrorKind::Timeout))));
                });
                None
            }
        }
    }

    /// Counted, and complained of.
    pub(super) fn answered<T>(&self, verb: &'static str, answer: &Result<T, StoreError>) {
        if let Err(error) = answer
            && error.kind() != StoreErrorKind::InvalidKey
        {
            self.report(Report::StoreFailed { operation: verb, kind: error.kind() });
            if let Some(warning) = self.store_warnings.store_failed(self.clock.now(), verb, error) {
                self.report(warning);
            }
        }
    }

    fn wake_at(self: &Arc<Self>, key: &LockKey, at: BootInstant) {
        let mut alarm = Alarm { core: Arc::clone(self), key: key.clone(), at, has_rung: false };
        let left: Duration = at.saturating_duration_since(self.clock.now());
        self.spawn(async move {
            sleep(left).await;
            alarm.has_rung = true;
            alarm.core.on(&alarm.key, Event::Time(alarm.at));
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
    pub(super) fn adopt_orphans(self: &Arc<Self>) {
        if !self.has_orphans.load(Ordering::Acquire) || Handle::try_current().is_err() {
            return;
        }
        self.has_orphans.store(false, Ordering::Release);
        let orphans = std::mem::take(&mut *self.orphans.lock());
        for key in orphans {
            self.on(&key, Event::Time(self.clock.now()));
        }
    }

    fn tell_if_empty(&self) {
        if self.is_draining.load(Ordering::Acquire) && self.table.lock().is_empty() {
            self.empty.notify_waiters();
        }
    }
}

impl<T, F: FnOnce(Result<T, StoreError>) -> Event<Attached>> UnderWay<T, F> {
    fn ends(mut self, answer: Result<T, StoreError>) {
        self.tell(answer);
    }

    fn tell(&mut self, answer: Result<T, StoreError>) {
        if let Some(event) = self.event.take() {
            self.core.answered(self.verb, &answer);
            self.core.on(&self.key, event(answer));
        }
    }
}

impl<T, F: FnOnce(Result<T, StoreError>) -> Event<Attached>> Drop for UnderWay<T, F> {
    fn drop(&mut self) {
        // The runtime has ended. What is tried next ends the same way, until somebody comes from another one.
        self.tell(Err(StoreError::new("lock", self.verb, StoreErrorKind::Unavailable)));
    }
}

impl Drop for PendingGap {
    fn drop(&mut self) {
        self.0.gaps.lock().is_pending = false;
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if self.has_rung {
            return;
        }
        let waiters = self.core.table.lock().orphan(&self.key, self.at);
        self.core.orphans.lock().insert(self.key.clone());
        self.core.has_orphans.store(true, Ordering::Release);
        // Whoever waits on another runtime comes and adopts it.
        for waiter in waiters {
            waiter.nudge();
        }
    }
}
