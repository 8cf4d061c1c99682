//! The driver of the state machine: it feeds events into the table, and executes the actions that
//! come out: store calls, wake-ups, notifications.

use std::{
    any::Any,
    marker::PhantomData,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

#[cfg(feature = "console")]
use tokio::sync::Semaphore;
use tokio::{
    runtime::Handle,
    sync::Notify,
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{
    driver_data::{Grant, NotGranted, Section, TokioDriver, Waiter},
    lost_timers::LostTimers,
    order::LockOrder,
    renewal_queue::{Inserted, RenewalQueue},
};
use crate::{
    acquisition::{AcquisitionId, AcquisitionIds},
    background::Background,
    clock::{BootInstant, Clock, LazyNow},
    error::{Forked, LockError, LockLost},
    limits::{DOUBT_INTERVAL, RECHECK_INTERVAL},
    lock_key::{LockKey, shards::KeyShards},
    owner::Owner,
    policy::{LockPolicy, LogKey},
    process::ProcessMark,
    proto::{
        Action, Actions, Event, EventContext, FreeKey, GuardEnd, LockRequest, QueuePosition, Redeemed, Requested,
        calls::{Calls, Numbered},
        lease::LeaseBounds,
        section::ReleaseOutcome,
        sharing::Sharing,
        table::LockTable,
        usage::Usage,
    },
    runtime,
    store::{
        AcquireReply, AcquireRequest, EventSink, Heir, LockStore, Many, ReceiveReply, ReleaseReply, StoreError,
        StoreErrorKind, StoreEvent, StoreFuture, StoreTraits, YieldReply,
    },
    sync::Mutex,
    telemetry::{self, metrics::AcquireMetrics, report::Report, throttle::ThrottledLog, waits::Waits},
    trace::Traces,
};

/// The state that all clones of a manager share.
///
/// Aligned, so that no field is in the cache line of its reference count, which each guard changes.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Driver {
    pub(super) store: Arc<dyn LockStore>,
    pub(super) clock: Clock,
    /// The grants that the watchdog renews.
    pub(super) renewals: RenewalQueue,
    start_watchdog: fn(&Arc<Self>),
    /// The bound of handlers that finish without their client, for the extension.
    pub(crate) max_detached: usize,
    /// The state that another module keeps with this manager.
    extension: OnceLock<Box<dyn Any + Send + Sync>>,
    /// One generator for each shard of the keys.
    pub(crate) ids: Box<[AcquisitionIds]>,
    /// The process that created this driver. The copy in a forked child grants nothing, and sends
    /// nothing to the store.
    pub(super) created_in: ProcessMark,
    /// The leases that are requested of the store.
    pub(crate) lease: LeaseBounds,
    pub(super) order: LockOrder,
    pub(crate) waits: Waits,
    /// A layer or a handle of this manager redacts its keys. Set once, and never cleared.
    redacts_keys: AtomicBool,
    /// One listing at a time, so that a page that reloads is no load on the store.
    #[cfg(feature = "console")]
    pub(crate) listing: Semaphore,
    store_warnings: ThrottledLog,
    background: Background,
    /// I11: no code of others runs under one of these mutexes, and nothing is awaited.
    shards: KeyShards<LockTable<TokioDriver>>,
    /// When the last notice that messages of the store may be lost was or will be sent to the
    /// waiters. Many are combined into one.
    lag_notice_at: Mutex<Option<BootInstant>>,
    /// The same of the last check of all grants.
    doubt_check_at: Mutex<Option<BootInstant>>,
    /// Set once, and never cleared.
    is_shutdown_announced: AtomicBool,
    is_shutting_down: AtomicBool,
    /// The runtime of the last call, for calls from threads without one.
    runtime: Mutex<Option<Handle>>,
    lost_timers: LostTimers,
    /// Notified when a shutdown starts.
    shutdown_started: Notify,
    /// Notified when the table becomes empty during a shutdown.
    idle: Notify,
}

/// A store call whose reply a task awaits. If the task is dropped, the call has failed.
struct AwaitedCall<T: Reply> {
    driver: Arc<Driver>,
    key: LockKey,
    number: u64,
    is_finished: bool,
    reply: PhantomData<fn(T)>,
}

/// The reply to a numbered call.
pub(super) trait Reply: Sized + Unpin + Send + 'static {
    const OPERATION: &'static str;

    const EVENT: fn(u64, Result<Self, StoreError>) -> Event<TokioDriver>;
}

/// A timer of one key. If it is dropped before it fires, it is a lost timer.
struct WakeupTask {
    driver: Arc<Driver>,
    key: LockKey,
    at: BootInstant,
    has_fired: bool,
}

impl Driver {
    pub(super) fn new(
        store: Arc<dyn LockStore>,
        clock: Clock,
        ids: &AcquisitionIds,
        lease: Duration,
        max_detached: usize,
        traces: Option<Arc<dyn Traces>>,
        start_watchdog: fn(&Arc<Self>),
    ) -> Arc<Self> {
        let lease = LeaseBounds { longest: lease, call_timeout: store.call_timeout() };
        let usage = Arc::<Usage>::default();
        let shards = KeyShards::new(|| LockTable::new(lease, Arc::clone(&usage)));
        let driver = Arc::new(Self {
            store,
            clock,
            renewals: RenewalQueue::default(),
            start_watchdog,
            max_detached,
            extension: OnceLock::new(),
            ids: (0..KeyShards::<()>::COUNT).map(|_| ids.for_shard()).collect(),
            created_in: ProcessMark::new(),
            lease,
            order: LockOrder::default(),
            waits: Waits::new(traces),
            redacts_keys: AtomicBool::new(false),
            #[cfg(feature = "console")]
            listing: Semaphore::new(1),
            store_warnings: ThrottledLog::default(),
            background: Background::default(),
            shards,
            lag_notice_at: Mutex::default(),
            doubt_check_at: Mutex::default(),
            is_shutdown_announced: AtomicBool::new(false),
            is_shutting_down: AtomicBool::new(false),
            runtime: Mutex::default(),
            lost_timers: LostTimers::default(),
            shutdown_started: Notify::new(),
            idle: Notify::new(),
        });
        let sink = EventSink::new(Arc::clone(ids.manager()), &driver, Self::on_store_event);
        driver.store.subscribe(sink);
        driver
    }

    /// Fails in a forked child. Its copy of the table shows the locks of its parent, whose ids it
    /// would use. The log names the reason, because a client and a leader do not get it.
    pub(super) fn check_process(&self, operation: &'static str) -> Result<(), StoreError> {
        if self.is_of_this_process() {
            return Ok(());
        }
        let error = StoreError::new("lock", operation, StoreErrorKind::Unavailable).with_source(Forked);
        // On this thread: another thread of the parent may have had a mutex when it forked.
        if let Some(warning) = self.store_warnings.store_failed(self.clock.now(), operation, &error) {
            telemetry::process(&warning);
        }
        Err(error)
    }

    /// Called for each request, each end of a guard and each store reply.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.created_in.is_current()
    }

    // === events ===

    /// Requests a lock.
    pub(super) fn request(
        self: &Arc<Self>,
        key: &LockKey,
        request: LockRequest<()>,
    ) -> Result<Requested<TokioDriver>, StoreError> {
        self.drive(|actions| self.feed_request(key, request, actions))
    }

    /// Requests locks of different keys. Their calls are made together: a store with shared calls
    /// gets one for all of them, however many workers the runtime has.
    pub(super) fn request_all(
        self: &Arc<Self>,
        requests: Vec<(LockKey, LockRequest<()>)>,
    ) -> Vec<Result<Requested<TokioDriver>, StoreError>> {
        self.drive(|actions| {
            requests.into_iter().map(|(key, request)| self.feed_request(&key, request, actions)).collect()
        })
    }

    fn feed_request(
        self: &Arc<Self>,
        key: &LockKey,
        request: LockRequest<()>,
        actions: &mut Actions<TokioDriver>,
    ) -> Result<Requested<TokioDriver>, StoreError> {
        self.check_process("acquire")?;
        if request.sharing != Sharing::Alone
            && let Some(why) = self.shares_refused(request.sharing, key.is_raw())
        {
            return Err(StoreError::new("lock", "acquire", StoreErrorKind::Unsupported).with_source(why));
        }
        self.rearm_lost_timers();
        let requested = self.feed(key, actions, |table, cx, actions| {
            // Under the mutex: of two requests that do not wait, one would else find the grant of
            // the other, which finds its entry, and both would be rejected.
            let free = if table.contains(key) { None } else { self.acquire_free(key, &request) };
            table.request(key, cx, request.map_waiter(|()| Waiter::default), free, actions)
        });
        if let Requested::Granted(section) = &requested {
            self.track(Arc::clone(&section.grant));
        }
        Ok(requested)
    }

    /// Why several callers cannot hold a key in this way. `None`: they can.
    pub(crate) fn shares_refused(&self, sharing: Sharing, is_raw: bool) -> Option<&'static str> {
        let StoreTraits { shares, ordered, supersedes, .. } = self.store.traits();
        if sharing == Sharing::Newest && !supersedes {
            return Some(
                "it tells no holder that a newer request waits: `MemoryStore`, `RedisStore` and `PostgresStore` do",
            );
        }
        if !shares && sharing != Sharing::Newest {
            return Some(
                "it grants a key to one holder at a time: `MemoryStore`, `RedisStore` and `PostgresStore` have permits",
            );
        }
        if sharing == Sharing::Reader && !ordered {
            return Some(
                "it has no queue, so that a stream of readers would keep a writer waiting for ever: `MemoryStore`, \
                 `RedisStore` and `PostgresStore` have reads",
            );
        }
        is_raw.then_some("a raw key has one holder, as other programs expect")
    }

    /// Acquires the key if the store grants it without a call.
    fn acquire_free(&self, key: &LockKey, request: &LockRequest<()>) -> Option<FreeKey> {
        let free_keys =
            self.store.free_keys().filter(|_| request.sharing == Sharing::Alone && !request.demand.takes_record())?;
        let (id, sent_at) = (self.ids_of(key).next(), self.clock.now());
        let (lease, lock_delay) = request.limits.lease_and_lock_delay(self.lease);
        let fence = free_keys.acquire(key, &id, lease.saturating_add(lock_delay), request.trace.as_ref())?;
        Some(FreeKey { id, fence, sent_at })
    }

    /// Cancels a request. Returns its position in the queue. `None`: its result was sent already,
    /// or is about to be.
    pub(super) fn cancel(self: &Arc<Self>, key: &LockKey, number: u64) -> Option<QueuePosition> {
        self.drive(|actions| self.feed(key, actions, |table, cx, actions| table.cancel(key, cx, number, actions)))
    }

    /// Ends a guard. Returns the outcome. `None`: the store was called, and the outcome is sent to
    /// the [section](super::driver_data::SectionData) later.
    pub(super) fn end_guard(self: &Arc<Self>, section: &Arc<Section>, end: GuardEnd) -> Option<ReleaseOutcome> {
        self.drive(|actions| self.feed_guard_end(section, end, actions))
    }

    /// Ends guards of different keys in the same way, in this order. Their calls are made together.
    pub(super) fn end_guards<'a>(
        self: &Arc<Self>,
        sections: impl Iterator<Item = &'a Arc<Section>>,
        end: &GuardEnd,
    ) -> Vec<Option<ReleaseOutcome>> {
        self.drive(|actions| sections.map(|section| self.feed_guard_end(section, end.clone(), actions)).collect())
    }

    fn feed_guard_end(
        &self,
        section: &Arc<Section>,
        end: GuardEnd,
        actions: &mut Actions<TokioDriver>,
    ) -> Option<ReleaseOutcome> {
        if !self.is_of_this_process() {
            // A copy in a forked child: the parent holds the lock, and releases it.
            section.grant.end(LockLost::Expired);
            section.data.ended.notify_waiters();
            return Some(ReleaseOutcome::NotHeld);
        }
        let end = section.data.end(end);
        let key = &section.grant.key;
        let (outcome, is_freed) = self.feed(key, actions, |table, cx, actions| {
            let outcome = table.end_guard(cx, section, end, actions);
            // Under the mutex: a table without an entry means that the key is free.
            let is_freed = self.store.free_keys().filter(|_| outcome == Some(ReleaseOutcome::Released));
            let is_freed = is_freed.map(|free_keys| free_keys.release(key, &section.grant.id));
            if is_freed == Some(false) {
                table.handle_event(key, cx, Event::NotFreed(Arc::clone(section)), actions);
            }
            (outcome, is_freed)
        });
        if is_freed.is_some() {
            self.renewals.remove(&section.grant);
            section.data.ended.notify_waiters();
        }
        outcome.filter(|_| is_freed != Some(false))
    }

    /// Calls the store for a request that is neither queued nor repeated.
    pub(super) async fn acquire_at_once(&self, request: AcquireRequest) -> Result<AcquireReply, StoreError> {
        self.check_process("acquire")?;
        if self.must_wait(&request) {
            return Err(renewals_come_first());
        }
        let reply = timeout(self.lease.call_timeout, self.store.acquire(request.into()).into_single()).await;
        let reply = reply.unwrap_or_else(|_| Err(StoreError::no_reply("acquire")));
        self.record_reply("acquire", &reply);
        reply
    }

    /// Starts a section under a key that was granted in place of a ticket.
    pub(super) fn hold_redeemed(
        self: &Arc<Self>,
        key: &LockKey,
        redeemed: Redeemed,
        ticket: &Arc<Heir>,
    ) -> Option<Arc<Section>> {
        self.drive(|actions| {
            self.feed(key, actions, |table, cx, actions| table.redeem(key, cx, redeemed, ticket, actions))
        })
    }

    /// Has a key go back to its ticket after a call without a reply.
    pub(super) fn leave_to_ticket(self: &Arc<Self>, key: &LockKey, id: AcquisitionId, ticket: &Arc<Heir>) {
        if self.is_of_this_process() {
            let until = self.now().saturating_add(self.lease.call_timeout);
            self.drive(|actions| {
                self.feed(key, actions, |table, cx, actions| {
                    table.leave_to_ticket(key, cx, id, ticket, until, actions);
                });
            });
        }
    }

    pub(super) fn grant_lost(self: &Arc<Self>, grant: &Grant, why: LockLost) {
        self.handle_event(&grant.key, Event::Lost(grant.id.clone(), why));
    }

    pub(super) fn superseded(self: &Arc<Self>, grant: &Grant) {
        self.handle_event(&grant.key, Event::Superseded(grant.id.clone()));
    }

    /// Checks whether the section under this grant has reached its limit or was not delivered.
    pub(super) fn check_section(self: &Arc<Self>, grant: &Grant) {
        self.handle_event(&grant.key, Event::CheckSection(grant.id.clone()));
    }

    /// Receives an event of the store. It is a hint (I7): another program may have forged it. An
    /// event with an id that was not issued here is ignored, and each event costs little, however
    /// many locks are held.
    fn on_store_event(self: &Arc<Self>, event: StoreEvent) {
        match event {
            StoreEvent::Offered { key, id } if self.ids_of(&key).has_issued(&id) => {
                self.handle_event(&key, Event::Offered(id));
            }
            StoreEvent::Revoked { key, id } if self.ids_of(&key).has_issued(&id) => {
                self.handle_event(&key, Event::Revoked(id));
            }
            StoreEvent::Offered { .. } | StoreEvent::Revoked { .. } => {}
            StoreEvent::Freed { key } => self.handle_event(&key, Event::Freed),
            StoreEvent::Lagged => self.on_lagged(),
            StoreEvent::Doubted => self.on_doubted(),
            StoreEvent::Recovered => self.on_recovered(),
        }
    }

    /// Notifies the waiters at once, and then at most once in each [`RECHECK_INTERVAL`].
    fn on_lagged(self: &Arc<Self>) {
        self.paced(&self.lag_notice_at, RECHECK_INTERVAL, Self::broadcast_lagged);
    }

    fn on_doubted(&self) {
        self.shards.iter().for_each(|shard| shard.lock().doubt(self.clock.now()));
    }

    /// Verifies all grants at once, and then at most once in an interval: a neighbour that flushes
    /// another database of the server causes each of them.
    fn on_recovered(self: &Arc<Self>) {
        self.on_doubted();
        let interval = DOUBT_INTERVAL.max(self.lease.longest / 30);
        self.paced(&self.doubt_check_at, interval, |driver| {
            for grant in driver.renewals.grants() {
                driver.execute(Action::Verify(grant));
            }
        });
    }

    /// Runs this now, or an interval after its last run. `last`: when it ran, or will run.
    fn paced(self: &Arc<Self>, last: &Mutex<Option<BootInstant>>, interval: Duration, run: fn(&Arc<Self>)) {
        let now = self.clock.now();
        let at = {
            let mut last = last.lock();
            let next = last.map_or(now, |last| last.saturating_add(interval).max(now));
            if last.is_some_and(|last| last > now) {
                return;
            }
            *last.insert(next)
        };
        if at == now {
            return run(self);
        }
        let driver = Arc::clone(self);
        let later = self.spawn(async move {
            sleep(at.saturating_duration_since(now)).await;
            run(&driver);
        });
        if later.is_none() {
            run(self);
        }
    }

    fn broadcast_lagged(self: &Arc<Self>) {
        for shard in self.shards.iter() {
            let waiting = shard.lock().lagged(self.clock.now());
            for key in waiting {
                self.handle_event(&key, Event::Lagged);
            }
        }
    }

    /// Rejects all waiters, and every later request.
    pub(super) fn shut_down(self: &Arc<Self>) {
        self.announce_shutdown();
        let keys: Vec<_> = self.shards.iter().flat_map(|shard| shard.lock().shut_down()).collect();
        self.is_shutting_down.store(true, Ordering::Release);
        self.shutdown_started.notify_waiters();
        for key in keys {
            self.handle_event(&key, Event::Shutdown);
        }
        self.notify_if_idle();
    }

    /// Announces a shutdown: requests are served until it starts.
    pub(super) fn announce_shutdown(&self) {
        self.is_shutdown_announced.store(true, Ordering::Release);
    }

    /// Whether every request is rejected, because of a shutdown.
    pub(super) fn rejects_all(&self) -> bool {
        self.is_shutting_down.load(Ordering::Acquire)
    }

    pub(super) fn is_shutdown_announced(&self) -> bool {
        self.is_shutdown_announced.load(Ordering::Acquire)
    }

    /// Completes when a shutdown has started.
    pub(super) async fn shutdown_started(&self) {
        let started = self.shutdown_started.notified();
        if !self.is_shutting_down.load(Ordering::Acquire) {
            started.await;
        }
    }

    /// Completes when no lock is held, requested or pending release. Only for use after
    /// [`shut_down`](Self::shut_down).
    pub(super) async fn wait_idle(self: &Arc<Self>) {
        self.rearm_lost_timers();
        loop {
            let notified = self.idle.notified();
            if self.is_idle() {
                return;
            }
            notified.await;
        }
    }

    /// Ends every section that still runs. Its key is free after the lock-delay (I10).
    #[cfg(feature = "signal")]
    pub(super) fn end_all(self: &Arc<Self>) {
        for grant in self.renewals.grants() {
            self.grant_lost(&grant, LockLost::ShuttingDown);
        }
    }

    pub(super) fn held_count(&self) -> usize {
        if !self.is_of_this_process() {
            return 0;
        }
        self.shards.iter().map(|shard| shard.lock().held_count()).sum()
    }

    /// The sections that run here, each with the numbers of its guards and of the waiters of its
    /// key.
    pub(super) fn sections(&self) -> Vec<(Arc<Section>, u32, usize)> {
        if !self.is_of_this_process() {
            return Vec::new();
        }
        self.shards.iter().flat_map(|shard| shard.lock().holding()).collect()
    }

    /// The number of keys that are held, requested or pending release. Without waiters, after
    /// [`shut_down`](Self::shut_down).
    pub(super) fn unfinished_count(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    /// How many requests want the key here, as far as this process knows. The holder counts.
    pub(crate) fn demand_for(&self, key: &LockKey, owner: &Owner) -> usize {
        let mut table = self.shards.of(key).lock();
        let is_busy = table.rejection_without_wait(key, owner, Sharing::Alone, self.clock.now()).is_some();
        table.waiting_for(key) + usize::from(is_busy)
    }

    pub(super) fn waiting_for(&self, key: &LockKey) -> usize {
        self.shards.of(key).lock().waiting_for(key)
    }

    pub(crate) fn hold_count(&self, key: &LockKey, owner: &Owner) -> u32 {
        if !self.is_of_this_process() {
            return 0;
        }
        self.shards.of(key).lock().hold_count(key, owner, self.clock.now())
    }

    /// The rejection that a request of this owner would get now if it did not wait, as far as this
    /// process knows. It is counted as the call of these metrics.
    pub(crate) fn rejection_without_wait(
        &self,
        key: &LockKey,
        owner: &Owner,
        sharing: Sharing,
        metrics: impl FnOnce() -> AcquireMetrics,
    ) -> Option<LockError> {
        if let Err(error) = self.check_process("acquire") {
            return Some(error.into());
        }
        let now = self.clock.now();
        let error = self.shards.of(key).lock().rejection_without_wait(key, owner, sharing, now)?;
        metrics().rejected(&error);
        Some(error)
    }

    pub(super) fn hold_count_of(&self, section: &Arc<Section>) -> u32 {
        self.shards.of(&section.grant.key).lock().hold_count_of(section, self.clock.now())
    }

    /// The time without a reply after which a request is rejected: one call and one repeat.
    pub(super) fn store_timeout(&self) -> Duration {
        2 * self.lease.call_timeout
    }

    /// The number of keys with an entry, and the number of waiters.
    #[cfg(any(test, feature = "__internals"))]
    pub(crate) fn size(&self) -> (usize, usize) {
        let sizes = self.shards.iter().map(|shard| {
            let table = shard.lock();
            (table.len(), table.waiting())
        });
        sizes.fold((0, 0), |sum, size| (sum.0 + size.0, sum.1 + size.1))
    }

    /// The state that another module keeps with this manager. The first call creates it.
    ///
    /// # Panics
    ///
    /// Calls name different types: a manager keeps one value.
    pub(crate) fn extension<T: Any + Send + Sync>(&self, create: impl FnOnce() -> T) -> &T {
        let state = self.extension.get_or_init(|| Box::new(create()));
        state.downcast_ref().expect("every call names the same type")
    }

    /// Notes the settings of a layer or a handle: the console then redacts the keys of all.
    pub(crate) fn note_policy(&self, policy: &LockPolicy) {
        if policy.log_key_setting() == Some(LogKey::Redacted) {
            self.redacts_keys.store(true, Ordering::Release);
        }
    }

    /// The name of this instance, and its random part.
    #[cfg(feature = "console")]
    pub(crate) fn instance(&self) -> &str {
        self.ids[0].manager()
    }

    #[cfg(feature = "console")]
    pub(crate) fn redacts_keys(&self) -> bool {
        self.redacts_keys.load(Ordering::Acquire)
    }

    pub(crate) fn now(&self) -> BootInstant {
        self.clock.now()
    }

    pub(super) fn handle_event(self: &Arc<Self>, key: &LockKey, event: Event<TokioDriver>) {
        if self.is_of_this_process() {
            self.drive(|actions| self.feed_event(key, event, actions));
        }
    }

    fn feed_event(&self, key: &LockKey, event: Event<TokioDriver>, actions: &mut Actions<TokioDriver>) {
        self.feed(key, actions, |table, cx, actions| table.handle_event(key, cx, event, actions));
    }

    /// Passes an event to the table of this key. Its mutex is locked meanwhile.
    fn feed<T>(
        &self,
        key: &LockKey,
        actions: &mut Actions<TokioDriver>,
        event: impl FnOnce(&mut LockTable<TokioDriver>, EventContext<'_>, &mut Actions<TokioDriver>) -> T,
    ) -> T {
        let mut table = self.shards.of(key).lock();
        // After the mutex is locked: the time of a table never goes back.
        let now = LazyNow::new(&self.clock);
        let cx = EventContext { now: &now, ids: self.ids_of(key), frees_keys: self.store.free_keys().is_some() };
        event(&mut table, cx, actions)
    }

    pub(super) fn ids_of(&self, key: &LockKey) -> &AcquisitionIds {
        &self.ids[KeyShards::<()>::index_of(key)]
    }

    /// Feeds events, and executes their actions and those that follow from them. The mutex of no
    /// table is locked meanwhile. A store that replies at once needs no task.
    fn drive<T>(self: &Arc<Self>, feed: impl FnOnce(&mut Actions<TokioDriver>) -> T) -> T {
        let mut actions = Actions::new();
        let result = feed(&mut actions);
        if !actions.is_empty() {
            self.execute_all(&mut actions);
        }
        self.notify_if_idle();
        result
    }

    fn execute_all(self: &Arc<Self>, actions: &mut Actions<TokioDriver>) {
        let mut following = Actions::new();
        // Two references are swapped, and not their content.
        let (mut actions, mut next) = (actions, &mut following);
        while !actions.is_empty() {
            for action in actions.list.drain(..) {
                if let Some((key, event)) = self.execute(action) {
                    self.feed_event(&key, event, next);
                }
            }
            self.call(&mut actions.calls, next);
            std::mem::swap(&mut actions, &mut next);
        }
    }

    // === actions ===

    /// Returns the event that follows, and its key.
    fn execute(self: &Arc<Self>, action: Action<TokioDriver>) -> Option<(LockKey, Event<TokioDriver>)> {
        let undelivered =
            |section: Arc<Section>| (section.grant.key.clone(), Event::GuardEnded(section, GuardEnd::Undelivered));
        match action {
            Action::SendWaiting(key) => return Some((key, Event::MaySendRelease)),
            // If its caller has disconnected, the section goes to the next waiter.
            Action::Grant(waiter, section) => return waiter.send(Ok(section)).err()?.ok().map(undelivered),
            Action::Recall(waiter, error) => return waiter.replace(Err(error.into()))?.ok().map(undelivered),
            Action::Reject(waiter, error) => drop(waiter.send(Err(error.into()))),
            Action::Recorded(waiter, record) => drop(waiter.send(Err(NotGranted::Recorded(record)))),
            Action::Track(grant) => self.track(grant),
            Action::Verify(grant) => {
                if grant.verify(self.clock.now()) {
                    self.track(grant);
                }
            }
            Action::Untrack(grant) => self.renewals.remove(&grant),
            Action::Lost(section, why) => {
                self.report(Report::Lost { key: section.grant.key.clone(), token: section.token, why });
            }
            Action::RecordLost(section) => {
                self.report(Report::RecordLost { key: section.grant.key.clone(), token: section.token });
            }
            Action::SectionEnded(section) | Action::Superseded(section) => section.data.ended.notify_waiters(),
            Action::ReleaseOutcome(section, outcome) => drop(section.data.release_outcome.send(outcome)),
            Action::WakeAt(key, at) => self.schedule_wakeup(key, at),
        }
        None
    }

    /// Makes these calls, and feeds in the replies that are ready.
    fn call(self: &Arc<Self>, calls: &mut Calls, next: &mut Actions<TokioDriver>) {
        let Calls { releases, acquires, yields } = calls;
        if !self.is_of_this_process() {
            *calls = Calls::default();
            return;
        }
        if let Some(Numbered { targets, requests }) = releases.take() {
            self.await_replies(targets, self.store.release(requests), next);
        }
        if let Some(acquires) = acquires.take() {
            if acquires.requests.iter().any(|request| self.must_wait(request)) {
                for (target, request) in acquires.into_requests() {
                    let refused = self.must_wait(&request).then(|| StoreFuture::ready(Err(renewals_come_first())));
                    let reply = refused.unwrap_or_else(|| self.store.acquire(request.into()).into_single());
                    self.await_reply(target, reply, next);
                }
            } else {
                let Numbered { targets, requests } = acquires;
                self.await_replies(targets, self.store.acquire(requests), next);
            }
        }
        for (target, request) in yields.take().into_iter().flat_map(Numbered::into_requests) {
            self.await_reply(target, self.store.yield_to_queue(request), next);
        }
    }

    /// Whether renewals of keys that are held come before this acquire. An acquire that was sent
    /// before may have a place in the queue, and keeps it by its polls.
    fn must_wait(&self, request: &AcquireRequest) -> bool {
        !request.is_repeated && self.renewals.are_late(&self.clock, || self.store.server_of(&request.key))
    }

    /// Receives the replies to requests, and feeds in those that are ready. A store that returns
    /// too few replies violates its contract.
    fn await_replies<T: Reply>(
        self: &Arc<Self>,
        targets: Many<(LockKey, u64)>,
        replies: Many<StoreFuture<T>>,
        next: &mut Actions<TokioDriver>,
    ) {
        let mut replies = replies.into_iter();
        for target in targets {
            let missing = || StoreFuture::ready(Err(StoreError::new("lock", T::OPERATION, StoreErrorKind::Protocol)));
            self.await_reply(target, replies.next().unwrap_or_else(missing), next);
        }
    }

    fn await_reply<T: Reply>(
        self: &Arc<Self>,
        (key, number): (LockKey, u64),
        reply: StoreFuture<T>,
        next: &mut Actions<TokioDriver>,
    ) {
        let reply = match reply.into_ready() {
            Ok(reply) => {
                self.record_reply(T::OPERATION, &reply);
                return self.feed_event(&key, (T::EVENT)(number, reply), next);
            }
            Err(reply) => reply.on_reply(self, &key, number),
        };
        let Err(reply) = reply else { return };
        let mut call = AwaitedCall { driver: Arc::clone(self), key, number, is_finished: false, reply: PhantomData };
        let call_timeout = self.lease.call_timeout;
        self.spawn(async move {
            let reply = timeout(call_timeout, reply).await;
            call.finish(reply.unwrap_or_else(|_| Err(StoreError::no_reply(T::OPERATION))));
        });
    }

    /// Counts an error, and logs it now and then.
    pub(super) fn record_reply<T>(&self, operation: &'static str, reply: &Result<T, StoreError>) {
        if let Err(error) = reply
            && error.kind() != StoreErrorKind::InvalidKey
        {
            self.report(Report::StoreFailed { operation, kind: error.kind() });
            if let Some(warning) = self.store_warnings.store_failed(self.clock.now(), operation, error) {
                self.report(warning);
            }
        }
    }

    /// Has the watchdog renew and check this grant.
    pub(super) fn track(self: &Arc<Self>, grant: Arc<Grant>) {
        match self.renewals.insert(grant) {
            Inserted::Planned => {}
            Inserted::Woken => self.share_wakeup(),
            Inserted::NeedsTask => (self.start_watchdog)(self),
        }
    }

    /// Starts the watchdog if it has ended with its runtime.
    pub(super) fn ensure_watchdog(self: &Arc<Self>) {
        if self.renewals.lacks_task() {
            (self.start_watchdog)(self);
        }
    }

    /// Notes that the watchdog was dropped with its runtime. Wakes the work under all locks: one
    /// that runs elsewhere starts another watchdog.
    pub(super) fn watchdog_dropped(&self) {
        self.renewals.task_dropped();
        for shard in self.shards.iter() {
            let sections = shard.lock().sections();
            sections.iter().for_each(|section| section.data.ended.notify_waiters());
        }
    }

    /// Moves a task that was just woken to the queue of all workers.
    ///
    /// A task that is woken on a worker runs next on that worker, and no other worker steals it: a
    /// recorder or a handler that blocks right now would delay all renewals. One more task behind
    /// it pushes it out of that slot.
    pub(super) fn share_wakeup(&self) {
        self.spawn(async {});
    }

    fn schedule_wakeup(self: &Arc<Self>, key: LockKey, at: BootInstant) {
        let mut timer = WakeupTask { driver: Arc::clone(self), key, at, has_fired: false };
        let left: Duration = at.saturating_duration_since(self.clock.now());
        self.spawn(async move {
            sleep(left).await;
            timer.has_fired = true;
            timer.driver.handle_event(&timer.key, Event::Timer(timer.at));
        });
    }

    /// Spawns on the current runtime, else on that of the last call. If that has ended, the task is
    /// dropped; tasks that must not get lost have a `Drop`.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
        Some(self.runtime()?.spawn(task).abort_handle())
    }

    fn runtime(&self) -> Option<Handle> {
        match runtime::current() {
            Some(runtime) => {
                *self.runtime.lock() = Some(runtime.clone());
                Some(runtime)
            }
            None => self.runtime.lock().clone(),
        }
    }

    /// Logs and counts in the background.
    pub(crate) fn report(&self, report: Report) {
        self.background.run(self.runtime().as_ref(), move || telemetry::process(&report));
    }

    /// Fires the timers that were lost, from this runtime.
    pub(super) fn rearm_lost_timers(self: &Arc<Self>) {
        if !self.lost_timers.is_any() || runtime::current().is_none() {
            return;
        }
        for key in self.lost_timers.take() {
            self.handle_event(&key, Event::Timer(self.clock.now()));
        }
    }

    pub(super) fn notify_if_idle(&self) {
        if self.is_shutting_down.load(Ordering::Acquire) && self.is_idle() {
            self.idle.notify_waiters();
        }
    }

    /// Whether no key is held, requested or pending release. During a shutdown no key is held anew,
    /// so that a table that was empty holds none.
    fn is_idle(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().is_empty())
    }
}

fn renewals_come_first() -> StoreError {
    StoreError::new("lock", "acquire", StoreErrorKind::Overloaded)
        .with_source("the renewals of held locks wait for their turn, and come first")
}

impl<T: Reply> ReceiveReply<T> for Driver {
    fn receive(self: Arc<Self>, key: &LockKey, number: u64, reply: Result<T, StoreError>) {
        self.record_reply(T::OPERATION, &reply);
        self.handle_event(key, (T::EVENT)(number, reply));
    }
}

impl Reply for AcquireReply {
    const OPERATION: &'static str = "acquire";
    const EVENT: fn(u64, Result<Self, StoreError>) -> Event<TokioDriver> = Event::Acquired;
}

impl Reply for YieldReply {
    const OPERATION: &'static str = "yield";
    const EVENT: fn(u64, Result<Self, StoreError>) -> Event<TokioDriver> = Event::Yielded;
}

impl Reply for ReleaseReply {
    const OPERATION: &'static str = "release";
    const EVENT: fn(u64, Result<Self, StoreError>) -> Event<TokioDriver> = Event::Released;
}

impl<T: Reply> AwaitedCall<T> {
    fn finish(&mut self, reply: Result<T, StoreError>) {
        self.is_finished = true;
        Arc::clone(&self.driver).receive(&self.key, self.number, reply);
    }
}

impl<T: Reply> Drop for AwaitedCall<T> {
    fn drop(&mut self) {
        // The runtime has ended. Repeats fail the same way until a call comes from another runtime.
        if !self.is_finished {
            let reply = Err::<T, _>(StoreError::new("lock", T::OPERATION, StoreErrorKind::Unavailable));
            let (driver, key, number) = (Arc::clone(&self.driver), self.key.clone(), self.number);
            runtime::at_end(move || driver.receive(&key, number, reply));
        }
    }
}

impl Drop for WakeupTask {
    fn drop(&mut self) {
        if self.has_fired {
            return;
        }
        let waiters = self.driver.shards.of(&self.key).lock().take_timer(&self.key, self.at);
        self.driver.lost_timers.insert(self.key.clone());
        // A waiter on another runtime fires it.
        for waiter in waiters {
            waiter.wake();
        }
    }
}
