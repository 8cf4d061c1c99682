//! Slots that move from one master to another, or stop half-way.
//!
//! A script declares its keys, so that a master refuses it whole while one of them is elsewhere.
//! Only a renewal of one key is executed where that key is.

use std::{sync::Arc, time::Duration};

use tokio::sync::MappedMutexGuard;
use tower_lock::{
    AcquisitionId, LockError, LockKey, LockManager, RedisStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, DeleteRecordReply, Demand, EventSink, ForceReleaseReply,
        ForceReleaseRequest, IfBusy, LockStore, QueueConfig, Record, ReleaseReply, ReleaseRequest, RenewReply,
        RenewRequest, StoreError, StoreErrorKind, YieldRequest,
    },
};
use tower_lock_testkit::{RedisCluster, limits, locks::key, store::StoreExt, wait::until};

use super::{cluster, instance, shared_cluster, store};
use crate::support::{NAME, QUEUE};

const QUEUE_CONFIG: QueueConfig = QueueConfig::new(Duration::from_secs(3), Duration::from_secs(60), 100);
const RECORD: &str = "tower-lock:lock:r:{lock:k}";
const SLOW: Duration = Duration::from_secs(60);

/// A slot of two masters, and a store that knows them.
struct Move {
    cluster: MappedMutexGuard<'static, RedisCluster>,
    store: Arc<RedisStore>,
    key: LockKey,
    ids: AcquisitionIds,
    slot: u16,
    from: usize,
    to: usize,
    /// Without a sink its waiters would count as dead.
    _sink: Arc<()>,
}

impl Move {
    async fn new() -> Option<Self> {
        let cluster = shared_cluster().await?;
        let store = store(&cluster).await;
        let (slot, ids) = (RedisCluster::slot(NAME), AcquisitionIds::new("p", fastrand::u64(..)));
        let sink = Arc::new(());
        store.subscribe(EventSink::new(ids.next().manager().to_owned(), &sink, |_: &Arc<()>, _| {}));
        let from = cluster.owner_of_slot(slot).await;
        let to = (from + 1) % 3;
        Some(Self { store, key: key(), ids, slot, from, to, cluster, _sink: sink })
    }

    async fn begin(&self) {
        self.cluster.begin_move(self.slot, self.from, self.to).await;
    }

    /// As `redis-cli` does it: no key is replaced at the target.
    async fn finish(&self) {
        self.cluster.move_keys(self.slot, self.from, self.to).await.expect("no key is on both nodes");
        self.cluster.finish_move(self.slot, self.from, self.to).await;
    }

    async fn migrate(&self, keys: &[&str]) {
        self.cluster.migrate(self.from, self.to, keys).await.expect("it is moved");
    }

    /// The name of the fence of the slot, which a grant has made.
    async fn fence(&self) -> String {
        let keys = self.cluster.keys_in(self.from, self.slot, 100).await;
        keys.into_iter().find(|key| key.starts_with("tower-lock:lock:f:")).expect("a fence")
    }

    fn request(&self, id: &AcquisitionId) -> AcquireRequest {
        AcquireRequest::new(self.key.clone(), id.clone(), SLOW, IfBusy::Enqueue, QUEUE_CONFIG, limits::CALL)
    }

    async fn acquire(&self, id: &AcquisitionId) -> Result<AcquireReply, StoreError> {
        self.store.acquire_one(self.request(id)).await
    }

    async fn acquire_unless_recorded(&self, id: &AcquisitionId) -> Result<AcquireReply, StoreError> {
        self.store.acquire_one(self.request(id).demand(Demand::new().unless_recorded())).await
    }

    async fn granted(&self, id: &AcquisitionId) -> u64 {
        match self.acquire(id).await {
            Ok(AcquireReply::Granted { fence, .. }) => fence,
            reply => panic!("not granted: {reply:?}"),
        }
    }

    async fn enqueued(&self, id: &AcquisitionId) {
        let reply = self.acquire(id).await;
        assert!(matches!(reply, Ok(AcquireReply::Queued { .. })), "{reply:?}");
    }

    fn releases(&self, id: &AcquisitionId, block_for: Duration) -> ReleaseRequest {
        ReleaseRequest::new(self.key.clone(), id.clone(), block_for, QUEUE_CONFIG)
    }

    async fn release(&self, id: &AcquisitionId) -> Result<ReleaseReply, StoreError> {
        self.store.release_one(self.releases(id, Duration::ZERO)).await
    }

    async fn release_with_record(&self, id: &AcquisitionId) -> Result<ReleaseReply, StoreError> {
        self.store.release_one(self.releases(id, Duration::ZERO).record(record(), SLOW)).await
    }

    async fn force_release(&self) -> Result<ForceReleaseReply, StoreError> {
        self.store.force_release(ForceReleaseRequest::new(self.key.clone(), SLOW, QUEUE_CONFIG)).await
    }

    async fn renewed(&self, id: &AcquisitionId) -> RenewReply {
        let request = RenewRequest::new(self.key.clone(), id.clone(), SLOW);
        self.store.renew(vec![request]).await.expect("a reply")[0]
    }

    /// The keys at the former and at the next master.
    async fn keys(&self) -> [Vec<String>; 2] {
        let mut keys = [Vec::new(), Vec::new()];
        for (keys, node) in keys.iter_mut().zip([self.from, self.to]) {
            *keys = self.cluster.keys_in(node, self.slot, 100).await;
            keys.sort_unstable();
        }
        keys
    }
}

fn record() -> Record {
    Record::new("paid", Some("body".into()))
}

/// The error of a server that may have changed nothing.
fn waits<T: std::fmt::Debug>(reply: Result<T, StoreError>) {
    let error = reply.expect_err("the slot moves");
    assert_eq!(error.kind(), StoreErrorKind::Failover, "{error:?}");
}

/// The queue, which its renewal also reads, is not there.
///
/// Guarantee: G25.
#[tokio::test]
async fn lock_that_newer_ones_replace_is_renewed_while_it_moves() {
    let Some(m) = Move::new().await else { return };
    let (held, newer) = (m.ids.next_replaceable(), m.ids.next_replaceable());
    let fence = m.granted(&held).await;
    m.begin().await;
    assert_eq!(m.renewed(&held).await, RenewReply::Extended, "where it is");
    m.migrate(&[NAME]).await;
    assert_eq!(m.renewed(&held).await, RenewReply::Extended, "at the next master");
    m.finish().await;
    m.enqueued(&newer).await;
    assert_eq!(m.renewed(&held).await, RenewReply::Superseded);
    assert_eq!(m.acquire(&held).await.expect("a reply"), AcquireReply::Superseded, "under {fence}");
    for id in [&held, &newer] {
        m.release(id).await.expect("a reply");
    }
}

/// Guarantee: G1, G3, G8, G11, G18.
#[tokio::test]
async fn half_moved_keys_are_refused_whole_but_renewed() {
    let Some(m) = Move::new().await else { return };
    for at_the_next in ["lock", "queue", "fence", "record", "lock queue", "fence record", "lock queue fence record"] {
        let [former, held, waiter, other] = [(); 4].map(|()| m.ids.next());
        m.granted(&former).await;
        m.release_with_record(&former).await.expect("held");
        let fence = m.granted(&held).await;
        m.enqueued(&waiter).await;
        let name = m.fence().await;
        let names = [("lock", NAME), ("queue", QUEUE), ("fence", &name), ("record", RECORD)];
        let moved: Vec<_> = names.iter().filter(|(key, _)| at_the_next.contains(key)).map(|(_, name)| *name).collect();
        m.begin().await;
        m.migrate(&moved).await;
        let before = m.keys().await;
        waits(m.acquire_unless_recorded(&other).await);
        waits(m.release_with_record(&held).await);
        let next = YieldRequest::new(m.key.clone(), held.clone(), fence, other, SLOW, QUEUE_CONFIG, limits::CALL);
        waits(m.store.yield_to_queue(next.demand(Demand::new().unless_recorded())).await);
        if ["lock", "queue", "fence", "lock queue"].contains(&at_the_next) {
            waits(m.acquire(&held).await);
            waits(m.release(&held).await);
            waits(m.force_release().await);
        }
        if ["lock", "queue", "record", "lock queue"].contains(&at_the_next) {
            waits(m.store.inspect(m.key.clone()).await);
        }
        if ["lock", "record"].contains(&at_the_next) {
            waits(m.store.delete_record(m.key.clone()).await);
        }
        assert_eq!(m.renewed(&held).await, RenewReply::Extended, "{at_the_next}");
        assert_eq!(m.keys().await, before, "{at_the_next}");
        m.finish().await;
        assert_eq!(m.granted(&held).await, fence, "{at_the_next}: a repeated call finds its grant");
        assert_eq!(m.store.inspect(m.key.clone()).await.expect("a reply").waiting, 1, "{at_the_next}");
        assert_eq!(m.release_with_record(&held).await.expect("a reply"), ReleaseReply::HandedOff);
        assert_eq!(m.acquire_unless_recorded(&waiter).await.expect("a reply"), AcquireReply::Recorded(record()));
        let again = m.ids.next();
        assert!(m.granted(&again).await > fence, "{at_the_next}");
        m.release(&again).await.expect("held");
        assert_eq!(m.store.delete_record(m.key.clone()).await.expect("a reply"), DeleteRecordReply::Deleted);
        m.cluster.move_slot(m.slot, m.to, m.from).await.expect("it is moved");
    }
}

/// All keys of the lock are at the former master, which executes a script, and refuses to make the
/// lock again that it has deleted.
/// Guarantee: G3.
#[tokio::test]
async fn release_in_a_slot_that_moves_frees_the_key_or_waits() {
    let Some(m) = Move::new().await else { return };
    let (a, b) = (m.ids.next(), m.ids.next());
    m.granted(&a).await;
    m.enqueued(&b).await;
    m.begin().await;
    waits(m.release(&a).await);
    m.finish().await;
    assert_eq!(m.release(&a).await.expect("a reply"), ReleaseReply::NotHolder, "it was executed");
    m.granted(&b).await;
}

/// The lock-delay of an aborted handler, and that of an operator.
/// Guarantee: G3, G8.
#[tokio::test]
async fn lock_that_is_ended_in_a_slot_that_moves_is_blocked() {
    let Some(m) = Move::new().await else { return };
    for is_forced in [false, true] {
        let (a, b) = (m.ids.next(), m.ids.next());
        m.granted(&a).await;
        m.enqueued(&b).await;
        m.begin().await;
        if is_forced {
            assert_eq!(
                m.force_release().await.expect("a reply"),
                ForceReleaseReply::Revoked { holders: vec![a.clone()] }
            );
        } else {
            let released = m.store.release_one(m.releases(&a, SLOW)).await.expect("a reply");
            assert_eq!(released, ReleaseReply::Freed);
        }
        assert_eq!(m.renewed(&a).await, RenewReply::NotHolder);
        m.finish().await;
        m.enqueued(&b).await;
        let status = m.store.inspect(m.key.clone()).await.expect("a reply");
        assert!(status.holders.is_empty() && status.lease_left > SLOW / 2, "{status:?}");
        m.cluster.move_slot(m.slot, m.to, m.from).await.expect("it is moved");
        m.cluster.command(m.from, &["DEL", NAME]).await;
        m.release(&b).await.expect("a reply");
    }
}

/// Guarantee: G5.
#[tokio::test]
async fn requests_outlast_the_move_of_their_slot() {
    let Some(m) = Move::new().await else { return };
    let (holder, first) = (instance(&m.cluster, "a").await, instance(&m.cluster, "b").await);
    let second = instance(&m.cluster, "c").await;
    let held = holder.lock(key()).await.expect("it is free");
    let token = held.fencing_token();
    let wait = |locks: &LockManager| {
        let locks = locks.clone();
        tokio::spawn(async move {
            let guard = locks.lock(key()).wait(SLOW).await.expect("in time");
            let token = guard.fencing_token();
            guard.release().await.expect("it is held");
            token
        })
    };
    let first = wait(&first);
    until("it is enqueued", async || m.store.inspect(key()).await.is_ok_and(|key| key.waiting == 1)).await;
    m.begin().await;
    m.migrate(&[QUEUE]).await;
    let second = wait(&second);
    let hasty = limits::redis().call_timeout(limits::SHORT).connect(&m.cluster.url()).await.expect("it is up");
    let refused = LockManager::new(hasty).try_lock(key()).await;
    assert!(matches!(&refused, Err(LockError::Store(_))), "without a wait: {refused:?}");
    assert!(held.release().await.is_err(), "it is repeated");
    m.finish().await;
    let (first, second) = (first.await.expect("no panic"), second.await.expect("no panic"));
    assert!(token < first && first < second, "in their order: {token:?}, {first:?}, {second:?}");
}

/// Redis does not replicate that a slot moves: the promoted replica of its former master has the
/// slot, and not the locks that have moved. The tokens of the two holders have the order of their
/// grants. Valkey 8 replicates it.
/// Guarantee: G1.
#[tokio::test]
async fn failover_of_a_half_moved_slot_loses_its_locks() {
    let Some(cluster) = cluster(2, 1).await else { return };
    let (a, b) = (instance(&cluster, "a").await, instance(&cluster, "b").await);
    let (slot, from) = (RedisCluster::slot(NAME), cluster.owner(NAME).await);
    let held = a.lock(key()).await.expect("it is free");
    cluster.begin_move(slot, from, 1 - from).await;
    cluster.migrate(from, 1 - from, &[NAME]).await.expect("it is moved");
    // A master that imports a slot from a replaced one knows no owner of the slot, and is down.
    cluster.command(1 - from, &["CLUSTER", "SETSLOT", &slot.to_string(), "STABLE"]).await;
    cluster.planned_failover(from).await;
    if cluster.command(from, &["INFO", "server"]).await.text().expect("a text").contains("valkey_version") {
        let lock = b.try_lock(key()).await;
        assert!(matches!(lock, Err(LockError::Store(_))), "the promoted replica knows the move: {lock:?}");
        return;
    }
    let again = b.lock(key()).wait(SLOW).await.expect("the promoted replica does not know the lock");
    assert!(!held.held_lock().remaining().is_zero() && again.fencing_token() > held.fencing_token());
}

/// A copy of a call that reaches the former master, which has lost the slot.
/// Guarantee: G1.
#[tokio::test]
async fn former_master_executes_nothing() {
    let Some(m) = Move::new().await else { return };
    let a = m.ids.next();
    m.granted(&a).await;
    m.begin().await;
    m.finish().await;
    assert_eq!(m.renewed(&a).await, RenewReply::Extended);
    assert_eq!(m.release(&a).await.expect("a reply"), ReleaseReply::Freed);
    assert_eq!(m.keys().await[0], Vec::<String>::new());
}
