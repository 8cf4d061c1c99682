//! The conformance suite, run on the stores of this crate.

use std::time::Duration;

use tower_lock::{
    MemoryStore,
    store::{
        AcquireReply, AcquireRequest, EventSink, ForceReleaseReply, ForceReleaseRequest, KeyStatus, LockStore,
        ReleaseReply, ReleaseRequest, RenewReply, RenewRequest, StoreFuture, YieldReply, YieldRequest,
    },
    test_util::{Fault, StoreOp, TestStore, conformance},
};

#[tokio::test(start_paused = true)]
async fn memory_store_passes_conformance() {
    conformance::check(MemoryStore::new()).await;
}

/// The same rules with delayed and duplicated calls.
#[tokio::test(start_paused = true)]
async fn store_with_duplicated_calls_passes_conformance() {
    let store = TestStore::new();
    for verb in [StoreOp::Acquire, StoreOp::Renew] {
        store.on(verb).fault(Fault::Duplicate);
    }
    store.fault_events(Fault::Duplicate);
    conformance::check(store).await;
}

/// A release that deletes any holder: a frequent mistake.
#[derive(Debug)]
struct ReleasesAnyHolder(MemoryStore);

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
        let force = ForceReleaseRequest::new(request.key.clone(), request.block_for, request.queue);
        StoreFuture::ready(Ok(match futures_util::FutureExt::now_or_never(self.0.force_release(force)) {
            Some(Ok(ForceReleaseReply::Revoked { .. })) => ReleaseReply::Freed,
            _ => ReleaseReply::NotHolder,
        }))
    }

    fn yield_to_queue(&self, request: YieldRequest) -> StoreFuture<YieldReply> {
        self.0.yield_to_queue(request)
    }

    fn inspect(&self, key: tower_lock::LockKey) -> StoreFuture<KeyStatus> {
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

#[tokio::test(start_paused = true)]
#[should_panic(expected = "release_of_others_and_second_release_change_nothing")]
async fn broken_store_fails_with_the_violated_clause() {
    conformance::check(ReleasesAnyHolder(MemoryStore::new())).await;
}
