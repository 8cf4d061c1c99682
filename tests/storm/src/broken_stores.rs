//! Stores with one defect each, which the checker must detect.

use std::{sync::Arc, time::Duration};

use tower_lock::{
    LockKey,
    store::{
        AcquireReply, AcquireRequest, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus, LockStore,
        ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreFuture, YieldReply, YieldRequest,
    },
};

/// Releases the key for any id: a `DEL` without a comparison of the holder.
#[derive(Debug)]
pub struct ReleasesAnyHolder(pub Arc<dyn LockStore>);

/// Shortens leases: its clock runs a hundred times too fast.
#[derive(Debug)]
pub struct ShortensLeases(pub Arc<dyn LockStore>);

const TOO_FAST: u32 = 100;

impl LockStore for ReleasesAnyHolder {
    fn subscribe(&self, inbox: EventSink) {
        self.0.subscribe(inbox);
    }

    fn acquire(&self, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.0.acquire(request)
    }

    fn renew(&self, requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        self.0.renew(requests)
    }

    fn release(&self, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let store = Arc::clone(&self.0);
        StoreFuture::new(async move {
            let found = store.inspect(request.key.clone()).await?;
            let Some(holder) = found.holder.filter(|holder| holder.id != request.id) else {
                return store.release(request).await;
            };
            let mut of_another = request.clone();
            of_another.id = holder.id;
            store.release(of_another).await?;
            store.release(request).await
        })
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        self.0.yield_to_queue(request)
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.0.inspect(key)
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.0.force_release(request)
    }

    fn call_timeout(&self) -> Duration {
        self.0.call_timeout()
    }

    fn health(&self) -> StoreFuture<()> {
        self.0.health()
    }
}

impl LockStore for ShortensLeases {
    fn subscribe(&self, inbox: EventSink) {
        self.0.subscribe(inbox);
    }

    fn acquire(&self, mut request: AcquireRequest) -> StoreFuture<AcquireReply> {
        request.lease /= TOO_FAST;
        self.0.acquire(request)
    }

    fn renew(&self, mut requests: Vec<RenewRequest>) -> StoreFuture<Vec<RenewReply>> {
        for request in &mut requests {
            request.lease /= TOO_FAST;
        }
        self.0.renew(requests)
    }

    fn release(&self, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.0.release(request)
    }

    fn yield_to_queue(&self, mut request: YieldRequest) -> StoreFuture<YieldReply> {
        request.lease /= TOO_FAST;
        self.0.yield_to_queue(request)
    }

    fn inspect(&self, key: LockKey) -> StoreFuture<KeyStatus> {
        self.0.inspect(key)
    }

    fn force_release(&self, request: ForceReleaseRequest) -> StoreFuture<ForceReleaseReply> {
        self.0.force_release(request)
    }

    fn call_timeout(&self) -> Duration {
        self.0.call_timeout()
    }

    fn health(&self) -> StoreFuture<()> {
        self.0.health()
    }
}
