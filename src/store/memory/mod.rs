//! Locks in the memory of one process.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use self::{
    keys::{Keys, OpContext},
    list::Page,
    records::Records,
};
use super::{
    AcquireReply, AcquireRequest, DeleteRecordReply, EventSink, ForceReleaseReply, ForceReleaseRequest, FreeKeys,
    KeyStatus, ListReply, ListRequest, LockStore, Many, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest,
    StoreError, StoreErrorKind, StoreEvent, StoreFuture, StoreTraits, YieldReply, YieldRequest,
};
use crate::{
    acquisition::AcquisitionId,
    clock::{BootInstant, Clock},
    limits::STORE_CALL_TIMEOUT,
    lock_key::{LockKey, shards::KeyShards},
    sync::Mutex,
    trace::SectionTrace,
};

mod keys;
mod list;
mod records;

/// Store of locks in the memory of one process, and the reference of the [`LockStore`] contract.
/// Needs the feature `memory`.
///
/// Several [`LockManager`](crate::LockManager)s may share one store. They then exclude each other
/// like instances of a service that share a server.
///
/// A [`Record`](super::Record) is in memory until it expires. At most 100,000 are kept: the one
/// that expires first is then forgotten. Their bodies use at most 64 MiB: those that expire first
/// are then dropped, and their heads stay.
///
/// A fence is the wall clock in microseconds, or more than each earlier fence of the key, if that
/// is larger. Fences therefore rise over a restart of the process, unless the clock is set back.
///
/// [`list`](LockStore::list) returns the keys in the order of their names. It visits each key of
/// the store, and sorts no more than one page of them.
///
/// A free key uses no memory. A key that a [lock-delay](crate::LockPolicy::lock_delay) or a
/// [`min_hold`](crate::LockPolicy::min_hold) blocks uses about 200 bytes until the block ends. Only
/// the rate of requests bounds the number of such keys. If clients choose the keys and `min_hold`
/// is long, limit the rate.
#[derive(Debug, Default)]
pub struct MemoryStore {
    keys: KeyShards<Keys>,
    /// Locked under the mutex of a shard, never before it.
    records: Mutex<Records>,
    /// By manager. Locked as `records`.
    sinks: Mutex<HashMap<String, EventSink>>,
    clock: Clock,
}

/// Reason of a refused acquire.
const TOO_MANY_RECORDS: &str = "the records of this `MemoryStore` use nine tenths of its bounds; keys with a record keep \
     it, and new ones are refused until records expire: shorten `keep_for`, or use Redis";

impl MemoryStore {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty store whose leases are measured by this clock.
    #[cfg(feature = "test-util")]
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        Self { clock, ..Self::default() }
    }

    /// Returns the number of keys with a holder.
    #[must_use]
    pub fn held_count(&self) -> usize {
        let now = self.clock.now();
        self.keys.iter().map(|keys| keys.lock().held_count(now)).sum()
    }

    /// Returns the number of keys that use memory: held, blocked, or with waiters.
    #[must_use]
    pub fn size(&self) -> usize {
        let now = self.clock.now();
        self.keys.iter().map(|keys| keys.lock().size(now)).sum()
    }

    fn execute<T>(
        &self,
        keys: &Mutex<Keys>,
        operation: impl FnOnce(&mut Keys, &mut OpContext<'_>) -> T,
    ) -> StoreFuture<T> {
        StoreFuture::ready(Ok(self.change(keys, operation)))
    }

    fn change<T>(&self, keys: &Mutex<Keys>, operation: impl FnOnce(&mut Keys, &mut OpContext<'_>) -> T) -> T {
        let mut events = Vec::new();
        let is_alive = |id: &AcquisitionId| self.is_alive(id);
        let mut locked = keys.lock();
        let mut cx = OpContext {
            now: self.clock.now(),
            wall_clock_us: &wall_clock_us,
            is_alive: &is_alive,
            records: &self.records,
            events: &mut events,
            ended: None,
        };
        let reply = operation(&mut locked, &mut cx);
        drop(locked);
        self.send_events(events);
        reply
    }

    /// Whether the process of an acquisition has an open sink. Runs no code of others.
    fn is_alive(&self, id: &AcquisitionId) -> bool {
        self.sinks.lock().get(id.manager()).is_some_and(EventSink::is_open)
    }

    /// Adds to the status of a key what its own state does not have.
    fn complete(&self, key: &LockKey, status: &mut KeyStatus, now: BootInstant) {
        for holder in &mut status.holders {
            holder.connected = Some(self.is_alive(&holder.id));
        }
        status.record_left = self.records.lock().left(key, now);
    }

    /// Sends without a mutex: the receiver may call this store from within `send`.
    fn send_events(&self, events: Vec<StoreEvent>) {
        for event in events {
            let (StoreEvent::Offered { id, .. } | StoreEvent::Revoked { id, .. }) = &event else {
                continue;
            };
            let sink = self.sinks.lock().get(id.manager()).cloned();
            if let Some(sink) = sink {
                sink.send(event);
            }
        }
    }

    fn list_after(&self, limit: usize, after: Option<&LockKey>, contended_only: bool) -> ListReply {
        let now = self.clock.now();
        let mut page = Page::new(limit);
        for keys in self.keys.iter() {
            keys.lock().list(now, after, contended_only, &mut page);
        }
        let mut reply = page.finish();
        for entry in &mut reply.entries {
            self.complete(&entry.key, &mut entry.status, now);
        }
        reply
    }
}

impl LockStore for MemoryStore {
    fn subscribe(&self, sink: EventSink) {
        let mut sinks = self.sinks.lock();
        sinks.retain(|_, sink| sink.is_open());
        sinks.insert(sink.manager().to_owned(), sink);
    }

    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
        requests.map(|request: AcquireRequest| {
            if request.demand.takes_record() && self.records.lock().are_full_for(&request.key, self.clock.now()) {
                let error = StoreError::new("memory", "acquire", StoreErrorKind::Refused);
                return StoreFuture::ready(Err(error.with_source(TOO_MANY_RECORDS)));
            }
            self.execute(self.keys.of(&request.key), |keys, cx| keys.acquire(cx, request))
        })
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        // Each renewal is atomic; the batch is not.
        let now = self.clock.now();
        let renew = |request: &RenewRequest| self.keys.of(&request.key).lock().renew(now, request);
        StoreFuture::ready(Ok(requests.iter().map(renew).collect()))
    }

    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
        let release =
            |request: ReleaseRequest| self.execute(self.keys.of(&request.key), |keys, cx| keys.release(cx, &request));
        requests.map(release)
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        self.execute(self.keys.of(&request.key), |keys, cx| keys.yield_to_queue(cx, &request))
    }

    fn delete_record(&self, key: LockKey) -> StoreFuture<DeleteRecordReply> {
        self.execute(self.keys.of(&key), |keys, cx| keys.delete_record(cx, &key))
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        let now = self.clock.now();
        let mut status = self.keys.of(&key).lock().inspect(now, &key);
        self.complete(&key, &mut status, now);
        StoreFuture::ready(Ok(status))
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        let after = request.after.as_ref().map(list::parse_cursor);
        if after == Some(None) {
            return StoreFuture::ready(Err(StoreError::new("memory", "list", StoreErrorKind::Unsupported)));
        }
        StoreFuture::ready(Ok(self.list_after(request.limit, after.flatten().as_ref(), request.contended_only)))
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.execute(self.keys.of(&request.key), |keys, cx| keys.force_release(cx, &request))
    }

    fn traits(&self) -> StoreTraits {
        let traits = StoreTraits::new().events(true).receivers_counted(true).records(true).ordered(true);
        traits.shares(true).tickets(true).traces(true).supersedes(true)
    }

    fn call_timeout(&self) -> Duration {
        STORE_CALL_TIMEOUT
    }

    fn health(&self) -> StoreFuture<()> {
        StoreFuture::ready(Ok(()))
    }

    fn free_keys(&self) -> Option<&dyn FreeKeys> {
        Some(self)
    }
}

impl FreeKeys for MemoryStore {
    fn acquire(&self, key: &LockKey, id: &AcquisitionId, lease: Duration, trace: Option<&SectionTrace>) -> Option<u64> {
        // Neither operation makes an offer, which would be an event.
        self.change(self.keys.of(key), |keys, cx| keys.acquire_free(cx, key, id, lease, trace))
    }

    fn release(&self, key: &LockKey, id: &AcquisitionId) -> bool {
        self.keys.of(key).lock().release_free(self.clock.now(), key, id)
    }
}

/// The wall clock, so that a restarted process issues larger fences than the one before it.
#[expect(clippy::disallowed_methods, reason = "the fence is the one value here that outlives the process")]
fn wall_clock_us() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX)
}
