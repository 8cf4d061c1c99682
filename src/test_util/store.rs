//! A store with hands: it counts, fails, stalls, repeats itself, or waits at a gate.

use std::{
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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
    lock_key::LockKey,
    store::{
        AcquireReply, AcquireRequest, CALL_TIMEOUT, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus,
        LockStore, MemoryStore, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreError, StoreErrorKind,
        StoreEvent, StoreFuture, YieldReply, YieldRequest,
    },
};

/// A [`MemoryStore`] with hands, for tests of what stands on a store. A clone is the same store.
///
/// No verb answers at once, as with a store behind a network; each has a [`FaultPoint`].
#[derive(Clone, Debug, Default)]
pub struct TestStore {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    memory: Mutex<Arc<MemoryStore>>,
    clock: Clock,
    sinks: Mutex<Vec<EventSink>>,
    fault_points: [FaultPoint; 7],
    call_timeout: Option<Duration>,
    event_fault: Mutex<Fault>,
    chaos: Mutex<Option<Chaos>>,
}

/// The verbs of a [`LockStore`].
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
}

/// What goes wrong with a verb, or with an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// It is not done, and an error says so at once.
    Fail,
    /// It is refused for good, as by wrong settings.
    Refuse,
    /// It is done, but an error is answered.
    LoseReply,
    /// It is not done, and there is no answer.
    Hang,
    /// It is done twice; the answer is that of the second time.
    Duplicate,
    /// An error is answered at once, and then, so much later, it is done; unless it is void by then.
    Delay(Duration),
}

/// One verb of a [`TestStore`].
#[derive(Debug)]
pub struct FaultPoint {
    calls: AtomicUsize,
    fault: Mutex<Fault>,
    latency: Mutex<Duration>,
    pause_at: watch::Sender<PauseAt>,
    paused: AtomicUsize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PauseAt {
    Never,
    /// Before it is done.
    Before,
    /// After it is done.
    After,
}

/// Faults by chance: which ones, how often, from which seed.
#[derive(Clone, Debug)]
pub struct Chaos {
    rng: fastrand::Rng,
    per_mille: u32,
}

// === impl TestStore ===

impl TestStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty store whose leases are measured by this clock.
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        let memory = Mutex::new(Arc::new(MemoryStore::with_clock(clock.clone())));
        Self { shared: Arc::new(Shared { memory, clock, ..Shared::default() }) }
    }

    /// An empty store whose calls may take this long.
    #[must_use]
    pub fn with_call_timeout(call_timeout: Duration) -> Self {
        Self { shared: Arc::new(Shared { call_timeout: Some(call_timeout), ..Shared::default() }) }
    }

    /// The hand of this verb.
    #[must_use]
    pub fn on(&self, verb: StoreOp) -> &FaultPoint {
        &self.shared.fault_points[verb as usize]
    }

    /// The same for all verbs.
    pub fn fault_all(&self, fault: Fault) {
        for hand in &self.shared.fault_points {
            hand.fault(fault);
        }
    }

    /// What goes wrong with events: they can be lost ([`Fault::Fail`]), told twice, or told late.
    pub fn fault_events(&self, fault: Fault) {
        *lock(&self.shared.event_fault) = fault;
    }

    /// Tells every process this event, though it did not happen: as somebody who can send messages, and nothing else.
    pub fn forge(&self, event: &StoreEvent) {
        let inboxes = lock(&self.shared.sinks).clone();
        for inbox in inboxes {
            inbox.send(event.clone());
        }
    }

    /// From now on things go wrong by chance; `None` ends it.
    pub fn chaos(&self, chaos: Option<Chaos>) {
        *lock(&self.shared.chaos) = chaos;
    }

    /// As a server that kept nothing over a restart.
    pub fn restart(&self) {
        let memory = Arc::new(MemoryStore::with_clock(self.shared.clock.clone()));
        for inbox in &*lock(&self.shared.sinks) {
            memory.subscribe(inbox.clone());
        }
        *lock(&self.shared.memory) = memory;
    }

    /// How many keys are held.
    #[must_use]
    pub fn held_count(&self) -> usize {
        self.memory().held_count()
    }

    /// The store behind it, where nothing goes wrong.
    #[must_use]
    pub fn memory(&self) -> Arc<MemoryStore> {
        Arc::clone(&lock(&self.shared.memory))
    }

    fn call<T: Unpin + Send + 'static>(
        &self,
        verb: StoreOp,
        valid_for: Option<Duration>,
        run: impl Fn(&MemoryStore) -> StoreFuture<T> + Send + 'static,
    ) -> StoreFuture<T> {
        let this = self.clone();
        let asked = Instant::now();
        this.on(verb).calls.fetch_add(1, SeqCst);
        let fault = this.random_fault().unwrap_or_else(|| *lock(&this.on(verb).fault));
        StoreFuture::new(async move {
            let hand = this.on(verb);
            let takes = *lock(&hand.latency);
            if !takes.is_zero() {
                sleep(takes).await;
            }
            match fault {
                Fault::Fail => return Err(failed(verb, StoreErrorKind::Unavailable)),
                Fault::Refuse => return Err(failed(verb, StoreErrorKind::Refused)),
                Fault::Hang => return std::future::pending().await,
                Fault::Delay(by) => {
                    let store = this.clone();
                    spawn(async move {
                        sleep(by).await;
                        if valid_for.is_none_or(|valid_for| asked.elapsed() <= valid_for) {
                            let _ = run(&store.memory()).await;
                        }
                    });
                    return Err(failed(verb, StoreErrorKind::Unavailable));
                }
                Fault::None | Fault::LoseReply | Fault::Duplicate => {}
            }
            hand.pause(PauseAt::Before).await;
            if valid_for.is_some_and(|valid_for| asked.elapsed() > valid_for) {
                return Err(failed(verb, StoreErrorKind::Timeout));
            }
            let mut answer = run(&this.memory()).await;
            if fault == Fault::Duplicate {
                answer = run(&this.memory()).await;
            }
            hand.pause(PauseAt::After).await;
            if fault == Fault::LoseReply { Err(failed(verb, StoreErrorKind::Unavailable)) } else { answer }
        })
    }

    fn random_fault(&self) -> Option<Fault> {
        lock(&self.shared.chaos).as_mut().map(Chaos::next_fault)
    }

    fn deliver(&self, inbox: &EventSink, event: StoreEvent) {
        match self.random_fault().unwrap_or_else(|| *lock(&self.shared.event_fault)) {
            Fault::None | Fault::LoseReply => inbox.send(event),
            Fault::Duplicate => {
                inbox.send(event.clone());
                inbox.send(event);
            }
            Fault::Delay(by) => {
                let inbox = inbox.clone();
                spawn(async move {
                    sleep(by).await;
                    inbox.send(event);
                });
            }
            Fault::Fail | Fault::Refuse | Fault::Hang => {}
        }
    }
}

impl LockStore for TestStore {
    fn subscribe(&self, inbox: EventSink) {
        let (this, told) = (Arc::downgrade(&self.shared), inbox.clone());
        let between = EventSink::new(inbox.manager(), move |event| match (event, this.upgrade()) {
            (Some(event), Some(shared)) => {
                Self { shared }.deliver(&told, event);
                true
            }
            (Some(_), None) => false,
            (None, _) => told.is_open(),
        });
        self.memory().subscribe(between.clone());
        lock(&self.shared.sinks).push(between);
    }

    fn acquire(&self, ask: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.call(StoreOp::Acquire, Some(ask.valid_for), move |memory| memory.acquire(ask.clone()))
    }

    fn renew(&self, asks: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.call(StoreOp::Renew, None, move |memory| memory.renew(asks.clone()))
    }

    fn release(&self, ask: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.call(StoreOp::Release, None, move |memory| memory.release(ask.clone()))
    }

    fn yield_to_queue(&self, ask: YieldRequest) -> StoreFuture<YieldReply> {
        self.call(StoreOp::Yield, Some(ask.valid_for), move |memory| memory.yield_to_queue(ask.clone()))
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.call(StoreOp::Inspect, None, move |memory| memory.inspect(key.clone()))
    }

    fn force_release(&self, ask: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.call(StoreOp::Force, None, move |memory| memory.force_release(ask.clone()))
    }

    fn call_timeout(&self) -> Duration {
        self.shared.call_timeout.unwrap_or(CALL_TIMEOUT)
    }

    fn health(&self) -> StoreFuture<()> {
        self.call(StoreOp::Health, None, MemoryStore::health)
    }
}

// === impl Hand ===

impl FaultPoint {
    /// How often it was called.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls.load(SeqCst)
    }

    /// What goes wrong from the next call on.
    pub fn fault(&self, fault: Fault) {
        *lock(&self.fault) = fault;
    }

    /// How long it takes before it is done.
    pub fn latency(&self, time: Duration) {
        *lock(&self.latency) = time;
    }

    /// From now on it waits before it is done.
    pub fn pause_before(&self) {
        self.pause_at.send_replace(PauseAt::Before);
    }

    /// From now on it is done, and then waits with its answer.
    pub fn pause_after(&self) {
        self.pause_at.send_replace(PauseAt::After);
    }

    /// Lets everybody pass.
    pub fn resume(&self) {
        self.pause_at.send_replace(PauseAt::Never);
    }

    /// Until somebody stands at the gate.
    ///
    /// # Panics
    ///
    /// Nobody comes, though everybody else has nothing to do but wait.
    pub async fn wait_until_paused(&self) {
        for _ in 0..10_000 {
            if self.paused.load(SeqCst) > 0 {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("nobody came to the gate");
    }

    async fn pause(&self, here: PauseAt) {
        struct Standing<'a>(&'a AtomicUsize);
        impl Drop for Standing<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, SeqCst);
            }
        }
        let mut gate = self.pause_at.subscribe();
        if *gate.borrow_and_update() != here {
            return;
        }
        self.paused.fetch_add(1, SeqCst);
        let _standing = Standing(&self.paused);
        // The gate is as old as the store.
        let _ = gate.wait_for(|gate| *gate != here).await;
    }
}

impl Default for FaultPoint {
    fn default() -> Self {
        Self {
            calls: AtomicUsize::new(0),
            fault: Mutex::default(),
            latency: Mutex::default(),
            pause_at: watch::Sender::new(PauseAt::Never),
            paused: AtomicUsize::new(0),
        }
    }
}

// === impl Chaos ===

impl Chaos {
    /// So many calls and events of a thousand go wrong, each in a way of its own.
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

fn failed(verb: StoreOp, kind: StoreErrorKind) -> StoreError {
    let operation = match verb {
        StoreOp::Acquire => "acquire",
        StoreOp::Renew => "renew",
        StoreOp::Release => "release",
        StoreOp::Yield => "yield",
        StoreOp::Inspect => "inspect",
        StoreOp::Force => "force-release",
        StoreOp::Health => "health",
    };
    StoreError::new("test", operation, kind).with_source(std::io::Error::other("the test pulled the plug"))
}

/// What is late may be told where no runtime is: then it is lost.
fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(task);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
