//! Locks in the memory of one process.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use self::records::{At, Records};
use super::{
    AcquireAsk, Acquired, CALL_TIMEOUT, ForceAsk, ForceReleaseReply, Inbox, Inspected, LockStore, ReleaseAsk, Released,
    RenewAsk, Renewed, StoreEvent, StoreFuture, YieldAsk, Yielded,
};
use crate::{acquisition::OwnerId, clock::Clock, lock_key::LockKey};

mod records;

/// Locks for one process: the embedded default, and the reference of the [`LockStore`] contract.
///
/// Several [`Locks`](crate::Locks) may share one store; they then exclude each other, as instances do that share a
/// server. Needs the feature `memory`.
///
/// A key that nobody has costs nothing. One that a [lock-delay](crate::Policy::lock_delay) or a
/// [`hold_at_least`](crate::Policy::hold_at_least) blocks costs some 200 bytes until then, and there is no bound to their number but what
/// requests come in that time: where clients choose the keys, a long `hold_at_least` wants a rate limit outside.
#[derive(Debug, Default)]
pub struct MemoryStore {
    state: Mutex<State>,
    clock: Clock,
}

#[derive(Debug, Default)]
struct State {
    records: Records,
    inboxes: HashMap<String, Inbox>,
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
        let listens = |owner: &OwnerId| inboxes.get(owner.process()).is_some_and(Inbox::is_open);
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
            let (StoreEvent::Offered { owner, .. } | StoreEvent::TakenAway { owner, .. }) = &event else { continue };
            let inbox = self.state().inboxes.get(owner.process()).cloned();
            if let Some(inbox) = inbox {
                inbox.tell(event);
            }
        }
    }
}

impl LockStore for MemoryStore {
    fn open(&self, inbox: Inbox) {
        let mut state = self.state();
        state.inboxes.retain(|_, inbox| inbox.is_open());
        state.inboxes.insert(inbox.process().to_owned(), inbox);
    }

    fn acquire(&self, ask: AcquireAsk) -> StoreFuture<Acquired> {
        self.verb(|records, at| records.acquire(at, &ask))
    }

    fn renew(&self, asks: Vec<RenewAsk>) -> StoreFuture<Vec<Renewed>> {
        self.verb(|records, at| asks.iter().map(|ask| records.renew(at.now, ask)).collect())
    }

    fn release(&self, ask: ReleaseAsk) -> StoreFuture<Released> {
        self.verb(|records, at| records.release(at, &ask))
    }

    fn yield_to_line(&self, ask: YieldAsk) -> StoreFuture<Yielded> {
        self.verb(|records, at| records.yield_to_line(at, &ask))
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<Inspected> {
        self.verb(|records, at| records.inspect(at.now, &key))
    }

    fn force_release(&self, ask: ForceAsk) -> StoreFuture<ForceReleaseReply> {
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
