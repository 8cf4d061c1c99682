//! Keys of many slots in one call of a store.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tower_lock::{
    AcquisitionId, LockKey, RedisStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, IfBusy, LockStore, QueueConfig, ReleaseReply, ReleaseRequest,
        RenewReply, RenewRequest, StoreError, StoreErrorKind,
    },
};
use tower_lock_testkit::{RedisCluster, costs::runs, limits};

use super::{cluster, keys_at, name_of, scripts, shared_cluster, store};

const QUEUE_CONFIG: QueueConfig = QueueConfig::new(Duration::from_secs(3), Duration::from_secs(10), 100);
const LEASE: Duration = Duration::from_secs(60);

/// A process that locks several keys in one call.
struct Process {
    store: Arc<RedisStore>,
    ids: AcquisitionIds,
}

/// The keys of a process, each with the acquisition that holds or wants it.
type Wanted = Vec<(LockKey, AcquisitionId)>;

impl Process {
    async fn new(cluster: &RedisCluster) -> Self {
        Self::with(store(cluster).await)
    }

    fn with(store: Arc<RedisStore>) -> Self {
        Self { store, ids: AcquisitionIds::new("p", fastrand::u64(..)) }
    }

    fn wants(&self, keys: &[LockKey]) -> Wanted {
        keys.iter().map(|key| (key.clone(), self.ids.next())).collect()
    }

    async fn acquire(&self, wanted: &Wanted, if_busy: IfBusy) -> Vec<Result<AcquireReply, StoreError>> {
        let request = |(key, id): &(LockKey, AcquisitionId)| {
            AcquireRequest::new(key.clone(), id.clone(), LEASE, if_busy, QUEUE_CONFIG, limits::CALL)
        };
        join_all(self.store.acquire(wanted.iter().map(request).collect())).await
    }

    async fn release(&self, wanted: &Wanted) -> Vec<Result<ReleaseReply, StoreError>> {
        let request = |(key, id): &(LockKey, AcquisitionId)| {
            ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, QUEUE_CONFIG)
        };
        join_all(self.store.release(wanted.iter().map(request).collect())).await
    }

    async fn renew(&self, wanted: &Wanted) -> Vec<RenewReply> {
        let request = |(key, id): &(LockKey, AcquisitionId)| RenewRequest::new(key.clone(), id.clone(), LEASE);
        self.store.renew(wanted.iter().map(request).collect()).await.expect("a reply")
    }
}

fn is_granted(reply: &Result<AcquireReply, StoreError>) -> bool {
    matches!(reply, Ok(AcquireReply::Granted { .. }))
}

fn waits<T>(reply: &Result<T, StoreError>) -> bool {
    reply.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Failover)
}

/// Another key in the slot of this one.
fn in_slot_of(key: &LockKey) -> LockKey {
    let slot = |key: &LockKey| RedisCluster::slot(&name_of(key));
    let mut others = (0_u64..).map(|number| LockKey::from(("same", number)));
    others.find(|other| slot(other) == slot(key)).expect("numbers go on")
}

/// Guarantee: G1.
#[tokio::test]
async fn slot_that_moves_delays_no_other_key_of_a_call() {
    let Some(cluster) = shared_cluster().await else { return };
    let process = Process::new(&cluster).await;
    let keys = keys_at(&cluster, 0, 12).await;
    let held = process.wants(&keys);
    assert!(process.acquire(&held, IfBusy::Fail).await.iter().all(is_granted));
    let names: Vec<_> = keys[..2].iter().map(name_of).collect();
    for name in &names {
        cluster.begin_move(RedisCluster::slot(name), 0, 1).await;
    }
    cluster.migrate(0, 1, &[&names[0]]).await.expect("it is moved");
    assert_eq!(process.renew(&held).await, [RenewReply::Extended; 12], "each where it is");
    let released = process.release(&held).await;
    assert!(released[..2].iter().all(waits), "{released:?}");
    assert!(released[2..].iter().all(|reply| matches!(reply, Ok(ReleaseReply::Freed))), "{released:?}");
    let again = process.wants(&keys);
    let acquired = process.acquire(&again, IfBusy::Fail).await;
    assert!(acquired[..2].iter().all(waits), "{acquired:?}");
    assert!(acquired[2..].iter().all(is_granted), "{acquired:?}");
}

/// A second round trip would need a second call timeout.
#[tokio::test]
async fn scripts_of_a_call_wait_once_for_the_replicas() {
    let Some(cluster) = cluster(1, 1).await else { return };
    let store = limits::redis().min_replicas(1, limits::REPLICAS).connect(&cluster.url()).await.expect("it is up");
    let process = Process::with(Arc::new(store));
    let mut keys = keys_at(&cluster, 0, 12).await;
    keys.push(in_slot_of(&keys[11]));
    let counts = async || (scripts(&cluster, 0).await, runs(cluster.node(0), "wait").await);
    // Loads the script.
    process.acquire(&process.wants(&[LockKey::from(("other",))]), IfBusy::Fail).await;
    let before = counts().await;
    assert!(process.acquire(&process.wants(&keys), IfBusy::Fail).await.iter().all(is_granted));
    let after = counts().await;
    assert_eq!((after.0 - before.0, after.1 - before.1), (12, 1), "a script for each slot, and one wait");
}
