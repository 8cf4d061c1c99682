//! Locks in the memory of one process.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use self::records::{OpContext, Records};
use super::{
    AcquireReply, AcquireRequest, CALL_TIMEOUT, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus,
    LockStore, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreEvent, StoreFuture, YieldReply,
    YieldRequest,
};
use crate::{acquisition::AcquisitionId, clock::Clock, lock_key::LockKey};

mod records;

/// Locks for one process: the embedded default, and the reference of the [`LockStore`] contract.
///
/// Several [`LockManager`](crate::LockManager) may share one store; they then exclude each other, as instances do that share a
/// server. Needs the feature `memory`.
///
/// A key that nobody has costs nothing. One that a [lock-delay](crate::LockPolicy::lock_delay) or a
/// [`min_hold`](crate::LockPolicy::min_hold) blocks costs some 200 bytes until then, and there is no bound to their number but what
/// requests come in that time: where clients choose the keys, a long `min_hold` wants a rate limit outside.
#[derive(Debug, Default)]
pub struct MemoryStore {
    state: Mutex<State>,
    clock: Clock,
}

#[derive(Debug, Default)]
struct State {
    records: Records,
    sinks: HashMap<String, EventSink>,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A store whose leases are measured by this clock.
    #[cfg(feature = "test-util")]
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        Self { clock, ..Self::default() }
    }

    /// How many keys are held.
    #[must_use]
    pub fn held_count(&self) -> usize {
        self.state().records.held_count(self.clock.now())
    }

    /// Of how many keys something is kept: held, waited for, or taken by nobody for a while.
    #[must_use]
    pub fn size(&self) -> usize {
        self.state().records.size(self.clock.now())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code of others runs under this mutex but the question whether an inbox is open: a poisoned one holds whole records.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn execute<T>(&self, verb: impl FnOnce(&mut Records, &mut OpContext<'_>) -> T) -> StoreFuture<T> {
        let mut events = Vec::new();
        let mut state = self.state();
        let State { records, sinks: inboxes } = &mut *state;
        let listens = |owner: &AcquisitionId| inboxes.get(owner.manager()).is_some_and(EventSink::is_open);
        let mut at =
            OpContext { now: self.clock.now(), wall_clock_us: &wall_clock_us, is_alive: &listens, events: &mut events };
        let answer = verb(records, &mut at);
        drop(state);
        self.send_events(events);
        StoreFuture::ready(Ok(answer))
    }

    /// Not under the mutex: whoever is told may ask again from in there.
    fn send_events(&self, events: Vec<StoreEvent>) {
        for event in events {
            let (StoreEvent::Offered { id: owner, .. } | StoreEvent::Revoked { id: owner, .. }) = &event else {
                continue;
            };
            let inbox = self.state().sinks.get(owner.manager()).cloned();
            if let Some(inbox) = inbox {
                inbox.send(event);
            }
        }
    }
}

impl LockStore for MemoryStore {
    fn subscribe(&self, inbox: EventSink) {
        let mut state = self.state();
        state.sinks.retain(|_, inbox| inbox.is_open());
        state.sinks.insert(inbox.manager().to_owned(), inbox);
    }

    fn acquire(&self, ask: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.execute(|records, at| records.acquire(at, &ask))
    }

    fn renew(&self, asks: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.execute(|records, at| asks.iter().map(|ask| records.renew(at.now, ask)).collect())
    }

    fn release(&self, ask: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.execute(|records, at| records.release(at, &ask))
    }

    fn yield_to_queue(&self, ask: YieldRequest) -> StoreFuture<YieldReply> {
        self.execute(|records, at| records.yield_to_queue(at, &ask))
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.execute(|records, at| records.inspect(at.now, &key))
    }

    fn force_release(&self, ask: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.execute(|records, at| records.force_release(at, &ask))
    }

    fn call_timeout(&self) -> Duration {
        CALL_TIMEOUT
    }

    fn health(&self) -> StoreFuture<()> {
        StoreFuture::ready(Ok(()))
    }
}

/// So that a restarted process mints larger fences than the one before it.
#[expect(clippy::disallowed_methods, reason = "the fence is the one thing here that outlives the process")]
fn wall_clock_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
