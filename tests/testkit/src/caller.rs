//! Calls of one key each, straight to a store.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;
use tower_lock::{
    AcquisitionId, LockKey,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, Demand, IfBusy, LockStore, QueueConfig, Record, ReleaseReply,
        ReleaseRequest, RenewReply, RenewRequest, StoreError, YieldReply, YieldRequest,
    },
};

use crate::{store::StoreExt, wait::ms};

/// A time that no test reaches.
pub const LONG: Duration = Duration::from_secs(600);

/// The calls of one process, of one key each.
#[derive(Debug)]
pub struct Caller<S> {
    store: Arc<S>,
    ids: AcquisitionIds,
}

impl<S: LockStore> Caller<S> {
    /// The calls of a process with this name.
    pub fn new(store: &Arc<S>, name: &str) -> Self {
        Self { store: Arc::clone(store), ids: AcquisitionIds::new(name, fastrand::u64(..)) }
    }

    /// A new acquisition.
    pub fn id(&self) -> AcquisitionId {
        self.ids.next()
    }

    /// Acquires, or returns the error.
    pub async fn acquire(
        &self,
        key: &LockKey,
        id: &AcquisitionId,
        lease: Duration,
        if_busy: IfBusy,
    ) -> Result<AcquireReply, StoreError> {
        self.store.acquire_one(request(key, id, lease, if_busy)).await
    }

    /// Acquires a key that has no record.
    pub async fn acquire_unless_recorded(&self, key: &LockKey, id: &AcquisitionId) -> AcquireReply {
        let request = request(key, id, LONG, IfBusy::Enqueue);
        self.store.acquire_one(request.demand(Demand::new().unless_recorded())).await.expect("a reply")
    }

    /// The fence of a grant.
    pub async fn granted(&self, key: &LockKey, id: &AcquisitionId, lease: Duration) -> u64 {
        match self.acquire(key, id, lease, IfBusy::Fail).await.expect("a reply") {
            AcquireReply::Granted { fence, .. } => fence,
            other => panic!("not granted, but {other:?}"),
        }
    }

    /// The fence of a grant whose lease has expired.
    pub async fn expired(&self, key: &LockKey) -> u64 {
        let fence = self.granted(key, &self.id(), ms(1)).await;
        sleep(ms(5)).await;
        fence
    }

    /// Releases without a record.
    pub async fn release(&self, key: &LockKey, id: &AcquisitionId, block_for: Duration) -> ReleaseReply {
        self.try_release(key, id, block_for).await.expect("a reply")
    }

    /// The same, or the error.
    pub async fn try_release(
        &self,
        key: &LockKey,
        id: &AcquisitionId,
        block_for: Duration,
    ) -> Result<ReleaseReply, StoreError> {
        self.store.release_one(ReleaseRequest::new(key.clone(), id.clone(), block_for, terms())).await
    }

    /// Releases, and leaves a record.
    pub async fn release_with(&self, key: &LockKey, id: &AcquisitionId, record: Record) -> ReleaseReply {
        self.try_release_with(key, id, record).await.expect("a reply")
    }

    /// The same, or the error.
    pub async fn try_release_with(
        &self,
        key: &LockKey,
        id: &AcquisitionId,
        record: Record,
    ) -> Result<ReleaseReply, StoreError> {
        let request = ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, terms());
        self.store.release_one(request.record(record, LONG)).await
    }

    /// The fence after a yield to no waiter.
    pub async fn extended(&self, key: &LockKey, id: &AcquisitionId, fence: u64) -> u64 {
        let request = YieldRequest::new(key.clone(), id.clone(), fence, self.id(), LONG, terms(), LONG);
        match self.store.yield_to_queue(request).await.expect("a reply") {
            YieldReply::Extended { fence } => fence,
            other => panic!("not extended, but {other:?}"),
        }
    }

    /// Renews one lease.
    pub async fn renew(&self, key: &LockKey, id: &AcquisitionId) -> RenewReply {
        self.try_renew(key, id).await.expect("a reply")
    }

    /// The same, or the error.
    pub async fn try_renew(&self, key: &LockKey, id: &AcquisitionId) -> Result<RenewReply, StoreError> {
        let request = RenewRequest::new(key.clone(), id.clone(), LONG);
        self.store.renew(vec![request]).await.map(|mut replies| replies.remove(0))
    }
}

/// A request of one key. It does not expire, and may wait long for a row.
pub fn request(key: &LockKey, id: &AcquisitionId, lease: Duration, if_busy: IfBusy) -> AcquireRequest {
    AcquireRequest::new(key.clone(), id.clone(), lease, if_busy, terms(), LONG)
}

/// Of a queue that no test fills.
pub fn terms() -> QueueConfig {
    QueueConfig::new(Duration::from_secs(60), LONG, 100)
}
