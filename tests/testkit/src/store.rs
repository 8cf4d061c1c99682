//! Stores that change some operations of another one.

use std::{
    fmt,
    sync::{Arc, LazyLock},
    time::Duration,
};

use tower_lock::{
    LockKey,
    store::{
        AcquireReply, AcquireRequest, DeleteRecordReply, Demand, EventSink, ForceReleaseReply, ForceReleaseRequest,
        IfBusy, KeyStatus, ListReply, ListRequest, LockStore, Many, ReleaseReply, ReleaseRequest, RenewReply,
        RenewRequest, StoreError, StoreErrorKind, StoreEvent, StoreFuture, StoreTraits, YieldReply, YieldRequest,
    },
};

/// Changes to the operations of a store. By default an operation is unchanged.
pub trait Intercept: fmt::Debug + Send + Sync + 'static {
    /// Whether calls get a reply at all.
    fn replies(&self) -> bool {
        true
    }

    /// Replaces [`LockStore::subscribe`].
    fn subscribe(&self, store: &Arc<dyn LockStore>, sink: EventSink) {
        store.subscribe(sink);
    }

    /// Replaces [`LockStore::traits`].
    fn traits(&self, store: &Arc<dyn LockStore>) -> StoreTraits {
        store.traits()
    }

    /// Replaces [`LockStore::acquire`].
    fn acquire(&self, store: &Arc<dyn LockStore>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        store.acquire_one(request)
    }

    /// Replaces [`LockStore::renew`].
    fn renew(&self, store: &Arc<dyn LockStore>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        store.renew(requests)
    }

    /// Replaces [`LockStore::release`].
    fn release(&self, store: &Arc<dyn LockStore>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        store.release_one(request)
    }

    /// Replaces [`LockStore::delete_record`].
    fn delete_record(&self, store: &Arc<dyn LockStore>, key: LockKey) -> StoreFuture<DeleteRecordReply> {
        store.delete_record(key)
    }

    /// Replaces [`LockStore::yield_to_queue`].
    fn yield_to_queue(&self, store: &Arc<dyn LockStore>, request: YieldRequest) -> StoreFuture<YieldReply> {
        store.yield_to_queue(request)
    }
}

/// Calls with one request.
pub trait StoreExt {
    /// [`LockStore::acquire`] of one request.
    fn acquire_one(&self, request: AcquireRequest) -> StoreFuture<AcquireReply>;

    /// [`LockStore::release`] of one request.
    fn release_one(&self, request: ReleaseRequest) -> StoreFuture<ReleaseReply>;
}

impl<S: LockStore + ?Sized> StoreExt for S {
    fn acquire_one(&self, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.acquire(request.into()).into_single()
    }

    fn release_one(&self, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.release(request.into()).into_single()
    }
}

/// A sink that ignores its events, and is open until the process ends.
pub fn open_sink(manager: impl Into<Arc<str>>) -> EventSink {
    static PROCESS: LazyLock<Arc<()>> = LazyLock::new(Arc::default);
    EventSink::new(manager, &PROCESS, |_, _| {})
}

/// A store whose calls pass an [`Intercept`].
#[derive(Debug)]
pub struct InterceptedStore<I> {
    inner: Arc<dyn LockStore>,
    intercept: I,
}

/// Releases the key for any id: a `DEL` without a comparison of the holder.
#[derive(Debug)]
pub struct ReleasesAnyHolder;

/// Shortens leases: the clock of the store runs a hundred times too fast.
#[derive(Debug)]
pub struct ShortensLeases;

/// Sends no events, counts no receivers, and has neither records nor tickets.
#[derive(Debug)]
pub struct WithoutTraits;

/// Keeps no queue: each waiter asks again after [`Unordered::POLL`].
#[derive(Debug)]
pub struct Unordered;

/// Keeps no records, and confirms them.
#[derive(Debug)]
pub struct ForgetsRecords;

/// Returns other records than it was given.
#[derive(Debug)]
pub struct ChangesRecords;

/// Claims to keep no queue, and keeps one.
#[derive(Debug)]
pub struct DeniesItsQueue;

/// Claims to keep no records, and keeps them.
#[derive(Debug)]
pub struct DeniesItsRecords;

const TOO_FAST: u32 = 100;

// === impl InterceptedStore ===

impl<I: Intercept> InterceptedStore<I> {
    /// Puts an intercept in front of a store.
    pub fn new(inner: Arc<dyn LockStore>, intercept: I) -> Self {
        Self { inner, intercept }
    }

    fn call<T: Unpin + Send + 'static>(&self, call: impl FnOnce() -> StoreFuture<T>) -> StoreFuture<T> {
        if self.intercept.replies() { call() } else { StoreFuture::new(std::future::pending()) }
    }
}

impl<I: Intercept> LockStore for InterceptedStore<I> {
    fn subscribe(&self, sink: EventSink) {
        self.intercept.subscribe(&self.inner, sink);
    }

    fn acquire(&self, requests: Many<AcquireRequest>) -> Many<StoreFuture<AcquireReply>> {
        let acquire = |request| self.call(|| self.intercept.acquire(&self.inner, request));
        requests.into_iter().map(acquire).collect()
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.call(|| self.intercept.renew(&self.inner, requests))
    }

    fn release(&self, requests: Many<ReleaseRequest>) -> Many<StoreFuture<ReleaseReply>> {
        let release = |request| self.call(|| self.intercept.release(&self.inner, request));
        requests.into_iter().map(release).collect()
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        self.call(|| self.intercept.yield_to_queue(&self.inner, request))
    }

    fn delete_record(&self, key: LockKey) -> StoreFuture<DeleteRecordReply> {
        self.call(|| self.intercept.delete_record(&self.inner, key))
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.call(|| self.inner.inspect(key))
    }

    fn list(&self, request: ListRequest) -> StoreFuture<ListReply> {
        self.call(|| self.inner.list(request))
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.call(|| self.inner.force_release(request))
    }

    fn traits(&self) -> StoreTraits {
        self.intercept.traits(&self.inner)
    }

    fn call_timeout(&self) -> Duration {
        self.inner.call_timeout()
    }

    fn health(&self) -> StoreFuture<()> {
        self.inner.health()
    }
}

// === impl Intercept ===

impl Intercept for ReleasesAnyHolder {
    fn release(&self, store: &Arc<dyn LockStore>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let store = Arc::clone(store);
        StoreFuture::new(async move {
            let found = store.inspect(request.key.clone()).await?;
            let Some(holder) = found.holder().cloned().filter(|holder| holder.id != request.id) else {
                return store.release_one(request).await;
            };
            let mut of_another = request.clone();
            of_another.id = holder.id;
            store.release_one(of_another).await?;
            store.release_one(request).await
        })
    }
}

impl Intercept for WithoutTraits {
    fn subscribe(&self, store: &Arc<dyn LockStore>, sink: EventSink) {
        store.subscribe(sink.wrap(|_, _: StoreEvent| {}));
    }

    fn traits(&self, _: &Arc<dyn LockStore>) -> StoreTraits {
        StoreTraits::new().ordered(true)
    }

    fn acquire(&self, store: &Arc<dyn LockStore>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let is_plain = request.demand == Demand::new() && request.in_place_of.is_none();
        if is_plain { store.acquire_one(request) } else { unsupported("acquire") }
    }

    fn release(&self, store: &Arc<dyn LockStore>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let is_plain = request.record.is_none() && request.heir.is_none();
        if is_plain { store.release_one(request) } else { unsupported("release") }
    }

    fn yield_to_queue(&self, store: &Arc<dyn LockStore>, request: YieldRequest) -> StoreFuture<YieldReply> {
        if request.demand != Demand::new() { unsupported("yield") } else { store.yield_to_queue(request) }
    }

    fn delete_record(&self, _: &Arc<dyn LockStore>, _: LockKey) -> StoreFuture<DeleteRecordReply> {
        unsupported("delete-record")
    }
}

fn unsupported<T>(operation: &'static str) -> StoreFuture<T> {
    StoreFuture::ready(Err(StoreError::new("small", operation, StoreErrorKind::Unsupported)))
}

impl Unordered {
    /// When a waiter asks again.
    pub const POLL: Duration = Duration::from_millis(400);

    fn without_queue(reply: AcquireReply, if_busy: IfBusy) -> AcquireReply {
        match reply {
            AcquireReply::Busy { lease_left, .. } if if_busy == IfBusy::Enqueue => {
                AcquireReply::Queued { ahead: 0, lease_left, poll_in: Some(Self::POLL), held_by: None }
            }
            reply => reply,
        }
    }
}

impl Intercept for Unordered {
    fn traits(&self, store: &Arc<dyn LockStore>) -> StoreTraits {
        store.traits().ordered(false).supersedes(false)
    }

    fn acquire(&self, store: &Arc<dyn LockStore>, mut request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let if_busy = std::mem::replace(&mut request.if_busy, IfBusy::Fail);
        let reply = store.acquire_one(request);
        StoreFuture::new(async move { Ok(Self::without_queue(reply.await?, if_busy)) })
    }

    fn yield_to_queue(&self, store: &Arc<dyn LockStore>, request: YieldRequest) -> StoreFuture<YieldReply> {
        let store = Arc::clone(store);
        let (key, next_id, queue) = (request.key.clone(), request.next_id.clone(), request.queue);
        // Executed in time, whenever the future is polled.
        let reply = store.yield_to_queue(request);
        StoreFuture::new(async move {
            let reply = reply.await?;
            let YieldReply::NotHolder(AcquireReply::Queued { lease_left, .. }) = reply else { return Ok(reply) };
            store.release_one(ReleaseRequest::new(key, next_id, Duration::ZERO, queue)).await?;
            let busy = AcquireReply::Busy { lease_left, held_by: None };
            Ok(YieldReply::NotHolder(Self::without_queue(busy, IfBusy::Enqueue)))
        })
    }
}

impl Intercept for ForgetsRecords {
    fn release(&self, store: &Arc<dyn LockStore>, mut request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        request.record = None;
        store.release_one(request)
    }
}

impl Intercept for ChangesRecords {
    fn acquire(&self, store: &Arc<dyn LockStore>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let reply = store.acquire_one(request);
        StoreFuture::new(async move {
            let mut reply = reply.await?;
            if let AcquireReply::Recorded(record) = &mut reply {
                record.body = record.body.take().map(|body| [&*body, b"."].concat().into());
            }
            Ok(reply)
        })
    }
}

impl Intercept for DeniesItsRecords {
    fn traits(&self, store: &Arc<dyn LockStore>) -> StoreTraits {
        store.traits().records(false)
    }
}

impl Intercept for DeniesItsQueue {
    fn traits(&self, store: &Arc<dyn LockStore>) -> StoreTraits {
        store.traits().ordered(false).supersedes(false)
    }
}

impl Intercept for ShortensLeases {
    fn acquire(&self, store: &Arc<dyn LockStore>, mut request: AcquireRequest) -> StoreFuture<AcquireReply> {
        request.lease /= TOO_FAST;
        store.acquire_one(request)
    }

    fn renew(&self, store: &Arc<dyn LockStore>, mut requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        for request in &mut requests {
            request.lease /= TOO_FAST;
        }
        store.renew(requests)
    }

    fn yield_to_queue(&self, store: &Arc<dyn LockStore>, mut request: YieldRequest) -> StoreFuture<YieldReply> {
        request.lease /= TOO_FAST;
        store.yield_to_queue(request)
    }
}
