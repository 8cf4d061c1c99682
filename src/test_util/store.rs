//! A store with fault injection: it counts calls, fails, hangs, duplicates, delays and pauses them.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep},
};

use crate::{
    clock::Clock,
    limits::STORE_CALL_TIMEOUT,
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus,
        ListReply, ListRequest, LockStore, Many, MemoryStore, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest,
        StoreError, StoreErrorKind, StoreEvent, StoreFuture, StoreTraits, YieldReply, YieldRequest,
    },
    sync::Mutex,
};

/// [`MemoryStore`] with fault injection, for tests of code that uses a store.
///
/// Each operation has a [`FaultPoint`]. As with a store behind a network, no reply is ready at
/// once. Clones share one store.
#[derive(Clone, Debug, Default)]
pub struct TestStore {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    memory: Mutex<Arc<MemoryStore>>,
    clock: Clock,
    sinks: Mutex<Vec<EventSink>>,
    fault_points: [FaultPoint; 9],
    call_timeout: Option<Duration>,
    event_fault: Mutex<Fault>,
    chaos: Mutex<Option<Chaos>>,
}

/// Operation of a [`LockStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOp {
    /// [`LockStore::acquire`]
    Acquire,
    /// [`LockStore::renew`]
    Renew,
    /// [`LockStore::release`]
    Release,
    /// [`LockStore::yield_to_queue`]
    Yield,
    /// [`LockStore::inspect`]
    Inspect,
    /// [`LockStore::force_release`]
    Force,
    /// [`LockStore::health`]
    Health,
    /// [`LockStore::list`]
    List,
    /// [`LockStore::delete_record`]
    DeleteRecord,
}

/// Fault of an operation or of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// No fault.
    #[default]
    None,
    /// The operation is not executed, and fails at once. A retry may succeed.
    Fail,
    /// The operation is not executed, and fails at once with [`StoreErrorKind::Refused`].
    Refuse,
    /// The operation is executed, but its reply is an error.
    LoseReply,
    /// The operation is not executed, and never replies.
    Hang,
    /// The operation is executed twice, and returns the second reply.
    Duplicate,
    /// The operation fails at once, and is executed after this time, unless it has expired by then.
    Delay(Duration),
}

/// Fault injection for one operation of a [`TestStore`].
#[derive(Debug, Default)]
pub struct FaultPoint {
    calls: AtomicUsize,
    fault: Mutex<Fault>,
    latency: Mutex<Duration>,
    /// Each paused call has a receiver.
    pause_at: watch::Sender<PauseAt>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PauseAt {
    #[default]
    Never,
    /// Before the operation is executed.
    Before,
    /// After the operation is executed, before its reply.
    After,
}

/// Generator of random faults.
#[derive(Clone, Debug)]
pub struct Chaos {
    rng: fastrand::Rng,
    per_mille: u32,
}

// === impl TestStore ===

impl TestStore {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty store whose leases are measured by this clock.
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        let memory = Mutex::new(Arc::new(MemoryStore::with_clock(clock.clone())));
        Self { shared: Arc::new(Shared { memory, clock, ..Shared::default() }) }
    }

    /// Creates an empty store with this call timeout.
    #[must_use]
    pub fn with_call_timeout(call_timeout: Duration) -> Self {
        Self { shared: Arc::new(Shared { call_timeout: Some(call_timeout), ..Shared::default() }) }
    }

    /// Returns the fault point of an operation.
    #[must_use]
    pub fn on(&self, op: StoreOp) -> &FaultPoint {
        &self.shared.fault_points[op as usize]
    }

    /// Sets the fault of all operations.
    pub fn fault_all(&self, fault: Fault) {
        for point in &self.shared.fault_points {
            point.fault(fault);
        }
    }

    /// Sets the fault of events: [`Fault::Fail`] loses them, [`Fault::Duplicate`] sends them twice,
    /// and [`Fault::Delay`] sends them later.
    pub fn fault_events(&self, fault: Fault) {
        *self.shared.event_fault.lock() = fault;
    }

    /// Sends a forged event to every manager, like an attacker with access to messages only.
    pub fn forge(&self, event: &StoreEvent) {
        let sinks = self.shared.sinks.lock().clone();
        for sink in sinks {
            sink.send(event.clone());
        }
    }

    /// Sets random faults. `None` turns them off.
    pub fn chaos(&self, chaos: Option<Chaos>) {
        *self.shared.chaos.lock() = chaos;
    }

    /// Restarts the store. All locks and queues are lost.
    pub fn restart(&self) {
        let memory = Arc::new(MemoryStore::with_clock(self.shared.clock.clone()));
        for sink in &*self.shared.sinks.lock() {
            memory.subscribe(sink.clone());
        }
        *self.shared.memory.lock() = memory;
    }

    /// Returns the number of keys with a holder.
    #[must_use]
    pub fn held_count(&self) -> usize {
        self.memory().held_count()
    }

    /// Returns the store without faults.
    #[must_use]
    pub fn memory(&self) -> Arc<MemoryStore> {
        Arc::clone(&self.shared.memory.lock())
    }

    fn call<T: Unpin + Send + 'static>(
        &self,
        op: StoreOp,
        valid_for: Option<Duration>,
        run: impl Fn(&MemoryStore) -> StoreFuture<T> + Send + 'static,
    ) -> StoreFuture<T> {
        let this = self.clone();
        let called_at = Instant::now();
        this.on(op).calls.fetch_add(1, SeqCst);
        let fault = this.random_fault().unwrap_or_else(|| *this.on(op).fault.lock());
        StoreFuture::new(async move {
            let point = this.on(op);
            let latency = *point.latency.lock();
            if !latency.is_zero() {
                sleep(latency).await;
            }
            match fault {
                Fault::Fail => return Err(failed(op, StoreErrorKind::Unavailable)),
                Fault::Refuse => return Err(failed(op, StoreErrorKind::Refused)),
                Fault::Hang => return std::future::pending().await,
                Fault::Delay(by) => {
                    let store = this.clone();
                    spawn(async move {
                        sleep(by).await;
                        if valid_for.is_none_or(|valid_for| called_at.elapsed() <= valid_for) {
                            let _ = run(&store.memory()).await;
                        }
                    });
                    return Err(failed(op, StoreErrorKind::Unavailable));
                }
                Fault::None | Fault::LoseReply | Fault::Duplicate => {}
            }
            point.pause(PauseAt::Before).await;
            if valid_for.is_some_and(|valid_for| called_at.elapsed() > valid_for) {
                return Err(failed(op, StoreErrorKind::Timeout));
            }
            let mut reply = run(&this.memory()).await;
            if fault == Fault::Duplicate {
                reply = run(&this.memory()).await;
            }
            point.pause(PauseAt::After).await;
            if fault == Fault::LoseReply { Err(failed(op, StoreErrorKind::Unavailable)) } else { reply }
        })
    }

    fn random_fault(&self) -> Option<Fault> {
        self.shared.chaos.lock().as_mut().map(Chaos::next_fault)
    }

    fn deliver(&self, sink: &EventSink, event: StoreEvent) {
        match self.random_fault().unwrap_or_else(|| *self.shared.event_fault.lock()) {
            Fault::None | Fault::LoseReply => sink.send(event),
            Fault::Duplicate => {
                sink.send(event.clone());
                sink.send(event);
            }
            Fault::Delay(by) => {
                let sink = sink.clone();
                spawn(async move {
                    sleep(by).await;
                    sink.send(event);
                });
            }
            Fault::Fail | Fault::Refuse | Fault::Hang => {}
        }
    }
}

impl LockStore for TestStore {
    fn subscribe(&self, sink: EventSink) {
        let this = Arc::downgrade(&self.shared);
        let proxy = sink.wrap(move |sink, event| {
            if let Some(shared) = this.upgrade() {
                Self { shared }.deliver(sink, event);
            }
        });
        self.memory().subscribe(proxy.clone());
        self.shared.sinks.lock().push(proxy);
    }

    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
        let acquire = |request: AcquireRequest| {
            let valid_for = request.valid_for;
            let run = move |memory: &MemoryStore| memory.acquire(request.clone().into()).into_single();
            self.call(StoreOp::Acquire, Some(valid_for), run)
        };
        requests.map(acquire)
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.call(StoreOp::Renew, None, move |memory| memory.renew(requests.clone()))
    }

    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
        let release = |request: ReleaseRequest| {
            self.call(StoreOp::Release, None, move |memory| memory.release(request.clone().into()).into_single())
        };
        requests.map(release)
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        self.call(StoreOp::Yield, Some(request.valid_for), move |memory| memory.yield_to_queue(request.clone()))
    }

    fn delete_record(&self, key: LockKey) -> StoreFuture<DeleteRecordReply> {
        self.call(StoreOp::DeleteRecord, None, move |memory| memory.delete_record(key.clone()))
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.call(StoreOp::Inspect, None, move |memory| memory.inspect(key.clone()))
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        self.call(StoreOp::List, None, move |memory| memory.list(request.clone()))
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.call(StoreOp::Force, None, move |memory| memory.force_release(request.clone()))
    }

    fn traits(&self) -> StoreTraits {
        self.memory().traits()
    }

    fn call_timeout(&self) -> Duration {
        self.shared.call_timeout.unwrap_or(STORE_CALL_TIMEOUT)
    }

    fn health(&self) -> StoreFuture<()> {
        self.call(StoreOp::Health, None, MemoryStore::health)
    }
}

// === impl FaultPoint ===

impl FaultPoint {
    /// Returns the number of calls.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls.load(SeqCst)
    }

    /// Sets the fault, from the next call on.
    pub fn fault(&self, fault: Fault) {
        *self.fault.lock() = fault;
    }

    /// Sets the delay before the operation is executed.
    pub fn latency(&self, time: Duration) {
        *self.latency.lock() = time;
    }

    /// Pauses each call from now on before it is executed.
    pub fn pause_before(&self) {
        self.pause_at.send_replace(PauseAt::Before);
    }

    /// Pauses each call from now on after it is executed, before its reply.
    pub fn pause_after(&self) {
        self.pause_at.send_replace(PauseAt::After);
    }

    /// Resumes all paused calls.
    pub fn resume(&self) {
        self.pause_at.send_replace(PauseAt::Never);
    }

    /// Waits until a call is paused.
    ///
    /// # Panics
    ///
    /// Panics if no call is paused after 10,000 yields to the runtime.
    pub async fn wait_until_paused(&self) {
        for _ in 0..10_000 {
            if self.pause_at.receiver_count() > 0 {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("no call was paused");
    }

    async fn pause(&self, here: PauseAt) {
        if *self.pause_at.borrow() == here {
            // The sender lives as long as the store.
            let _ = self.pause_at.subscribe().wait_for(|current| *current != here).await;
        }
    }
}

// === impl Chaos ===

impl Chaos {
    /// Creates a generator of faults that affects this many of a thousand calls and events, each in
    /// a random way.
    #[must_use]
    pub fn new(seed: u64, per_mille: u32) -> Self {
        Self { rng: fastrand::Rng::with_seed(seed), per_mille }
    }

    fn next_fault(&mut self) -> Fault {
        if self.rng.u32(0..1000) >= self.per_mille {
            return Fault::None;
        }
        match self.rng.u8(0..5) {
            0 => Fault::Fail,
            1 => Fault::LoseReply,
            2 => Fault::Hang,
            3 => Fault::Duplicate,
            _ => Fault::Delay(Duration::from_millis(self.rng.u64(1..700))),
        }
    }
}

fn failed(op: StoreOp, kind: StoreErrorKind) -> StoreError {
    let operation = match op {
        StoreOp::Acquire => "acquire",
        StoreOp::Renew => "renew",
        StoreOp::Release => "release",
        StoreOp::Yield => "yield",
        StoreOp::Inspect => "inspect",
        StoreOp::Force => "force-release",
        StoreOp::Health => "health",
        StoreOp::List => "list",
        StoreOp::DeleteRecord => "delete-record",
    };
    StoreError::new("test", operation, kind).with_source(std::io::Error::other("fault injected by the test"))
}

/// Spawns a delayed event or call. Without a runtime it is lost.
fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(task);
    }
}
