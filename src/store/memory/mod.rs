//! Locks in the memory of one process.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::time::Instant;

use self::records::Records;
use super::{AcquireAsk, Acquired, LockStore, ReleaseAsk, Released, RenewAsk, Renewed, StoreFuture};

mod records;

/// Locks for one process: the embedded default, and the reference of the [`LockStore`] contract.
///
/// Several [`Locks`](crate::Locks) may share one store; they then exclude each other, as instances do that share a
/// server. Needs the feature `memory`.
#[derive(Debug, Default)]
pub struct MemoryStore {
    records: Mutex<Records>,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many keys are held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.records().held(Instant::now())
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        // No code of others runs under this mutex: a poisoned one holds whole records.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LockStore for MemoryStore {
    fn acquire<'a>(&'a self, ask: AcquireAsk<'a>) -> StoreFuture<'a, Acquired> {
        let acquired = self.records().acquire(Instant::now(), wall_clock_us(), ask.key, ask.owner, ask.lease);
        StoreFuture::ready(Ok(acquired))
    }

    fn renew<'a>(&'a self, asks: &'a [RenewAsk<'a>]) -> StoreFuture<'a, Vec<Renewed>> {
        let (mut records, now) = (self.records(), Instant::now());
        StoreFuture::ready(Ok(asks.iter().map(|ask| records.renew(now, ask.key, ask.owner, ask.lease)).collect()))
    }

    fn release<'a>(&'a self, ask: ReleaseAsk<'a>) -> StoreFuture<'a, Released> {
        StoreFuture::ready(Ok(self.records().release(Instant::now(), ask.key, ask.owner)))
    }
}

/// So that a restarted process mints larger fences than the one before it.
#[expect(clippy::disallowed_methods, reason = "the fence is the one thing here that outlives the process")]
fn wall_clock_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
