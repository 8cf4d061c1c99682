//! Stores that change some operations of another one.

use std::{fmt, sync::Arc, time::Duration};

use tower_lock::{
    LockKey,
    store::{
        AcquireReply, AcquireRequest, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus, ListReply,
        ListRequest, LockStore, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreError, StoreErrorKind,
        StoreEvent, StoreFuture, StoreTraits, YieldReply, YieldRequest,
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
        store.acquire(request)
    }

    /// Replaces [`LockStore::renew`].
    fn renew(&self, store: &Arc<dyn LockStore>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        store.renew(requests)
    }

    /// Replaces [`LockStore::release`].
    fn release(&self, store: &Arc<dyn LockStore>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        store.release(request)
    }

    /// Replaces [`LockStore::yield_to_queue`].
    fn yield_to_queue(&self, store: &Arc<dyn LockStore>, request: YieldRequest) -> StoreFuture<YieldReply> {
        store.yield_to_queue(request)
    }
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

/// Sends no events, and keeps no records: a store without [`StoreTraits`].
#[derive(Debug)]
pub struct WithoutTraits;

/// Keeps no records, and confirms them.
#[derive(Debug)]
pub struct ForgetsRecords;

/// Returns other records than it was given.
#[derive(Debug)]
pub struct ChangesRecords;

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

    fn acquire(&self, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.call(|| self.intercept.acquire(&self.inner, request))
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.call(|| self.intercept.renew(&self.inner, requests))
    }

    fn release(&self, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.call(|| self.intercept.release(&self.inner, request))
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        self.call(|| self.intercept.yield_to_queue(&self.inner, request))
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
                return store.release(request).await;
            };
            let mut of_another = request.clone();
            of_another.id = holder.id;
            store.release(of_another).await?;
            store.release(request).await
        })
    }
}

impl Intercept for WithoutTraits {
    fn subscribe(&self, store: &Arc<dyn LockStore>, sink: EventSink) {
        let manager: Arc<str> = sink.manager().into();
        store.subscribe(EventSink::new(manager, move |_: Option<StoreEvent>| sink.is_open()));
    }

    fn traits(&self, _: &Arc<dyn LockStore>) -> StoreTraits {
        StoreTraits::new()
    }

    fn acquire(&self, store: &Arc<dyn LockStore>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        if request.unless_recorded { unsupported("acquire") } else { store.acquire(request) }
    }

    fn release(&self, store: &Arc<dyn LockStore>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        if request.record.is_some() { unsupported("release") } else { store.release(request) }
    }

    fn yield_to_queue(&self, store: &Arc<dyn LockStore>, request: YieldRequest) -> StoreFuture<YieldReply> {
        if request.unless_recorded { unsupported("yield") } else { store.yield_to_queue(request) }
    }
}

fn unsupported<T>(operation: &'static str) -> StoreFuture<T> {
    StoreFuture::ready(Err(StoreError::new("small", operation, StoreErrorKind::Unsupported)))
}

impl Intercept for ForgetsRecords {
    fn release(&self, store: &Arc<dyn LockStore>, mut request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        request.record = None;
        store.release(request)
    }
}

impl Intercept for ChangesRecords {
    fn acquire(&self, store: &Arc<dyn LockStore>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let reply = store.acquire(request);
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

impl Intercept for ShortensLeases {
    fn acquire(&self, store: &Arc<dyn LockStore>, mut request: AcquireRequest) -> StoreFuture<AcquireReply> {
        request.lease /= TOO_FAST;
        store.acquire(request)
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
