//! Locks in the memory of one process.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use self::records::{At, Records};
use super::{
    AcquireReply, AcquireRequest, CALL_TIMEOUT, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus,
    LockStore, ReleaseRequest, Released, RenewReply, RenewRequest, StoreEvent, StoreFuture, YieldReply, YieldRequest,
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
    inboxes: HashMap<String, EventSink>,
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
    pub fn held(&self) -> usize {
        self.state().records.held(self.clock.now())
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

    fn verb<T>(&self, verb: impl FnOnce(&mut Records, &mut At<'_>) -> T) -> StoreFuture<T> {
        let mut events = Vec::new();
        let mut state = self.state();
        let State { records, inboxes } = &mut *state;
        let listens = |owner: &AcquisitionId| inboxes.get(owner.manager()).is_some_and(EventSink::is_open);
        let mut at =
            At { now: self.clock.now(), wall_clock_us: &wall_clock_us, listens: &listens, events: &mut events };
        let answer = verb(records, &mut at);
        drop(state);
        self.tell(events);
        StoreFuture::ready(Ok(answer))
    }

    /// Not under the mutex: whoever is told may ask again from in there.
    fn tell(&self, events: Vec<StoreEvent>) {
        for event in events {
            let (StoreEvent::Offered { id: owner, .. } | StoreEvent::Revoked { id: owner, .. }) = &event else {
                continue;
            };
            let inbox = self.state().inboxes.get(owner.manager()).cloned();
            if let Some(inbox) = inbox {
                inbox.send(event);
            }
        }
    }
}

impl LockStore for MemoryStore {
    fn subscribe(&self, inbox: EventSink) {
        let mut state = self.state();
        state.inboxes.retain(|_, inbox| inbox.is_open());
        state.inboxes.insert(inbox.manager().to_owned(), inbox);
    }

    fn acquire(&self, ask: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.verb(|records, at| records.acquire(at, &ask))
    }

    fn renew(&self, asks: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.verb(|records, at| asks.iter().map(|ask| records.renew(at.now, ask)).collect())
    }

    fn release(&self, ask: ReleaseRequest) -> StoreFuture<Released> {
        self.verb(|records, at| records.release(at, &ask))
    }

    fn yield_to_queue(&self, ask: YieldRequest) -> StoreFuture<YieldReply> {
        self.verb(|records, at| records.yield_to_queue(at, &ask))
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.verb(|records, at| records.inspect(at.now, &key))
    }

    fn force_release(&self, ask: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.verb(|records, at| records.force_release(at, &ask))
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
