//! Slots that move from one master to another, or stop half-way.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use tokio::sync::MappedMutexGuard;
use tower_lock::{
    AcquisitionId, LockError, LockKey, RedisStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, DeleteRecordReply, Demand, EventSink, ForceReleaseReply,
        ForceReleaseRequest, IfBusy, LockStore, QueueConfig, Record, ReleaseReply, ReleaseRequest, RenewReply,
        RenewRequest, StoreEvent, StoreFuture, StoreTraits, YieldReply, YieldRequest,
    },
    test_util::conformance,
};
use tower_lock_testkit::{
    RedisCluster, limits,
    locks::key,
    store::{Intercept, InterceptedStore, StoreExt},
    wait::until,
};

use super::{cluster, instance, shared_cluster, store};
use crate::support::{NAME, QUEUE};

const QUEUE_CONFIG: QueueConfig = QueueConfig::new(Duration::from_secs(3), Duration::from_secs(10), 100);
const RECORD: &str = "tower-lock:lock:r:{lock:k}";

fn unix_micros() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    u64::try_from(now.as_micros()).expect("it fits")
}

/// Keys whose slots move are in no queue.
#[derive(Debug)]
struct Moving;

impl Intercept for Moving {
    fn traits(&self, store: &Arc<dyn LockStore>) -> StoreTraits {
        store.traits().ordered(false).receivers_counted(false)
    }

    /// A holder cannot see whether others wait, and lets them have their turn. Without waiters the
    /// key is there when it asks again.
    fn yield_to_queue(&self, store: &Arc<dyn LockStore>, request: YieldRequest) -> StoreFuture<YieldReply> {
        let YieldRequest { key, id, lease, queue, valid_for, .. } = request.clone();
        let store = Arc::clone(store);
        let yields = store.yield_to_queue(request);
        StoreFuture::new(async move {
            match yields.await? {
                YieldReply::NotHolder(AcquireReply::Queued { poll_in: Some(_), ahead: 0, .. }) => {}
                reply => return Ok(reply),
            }
            let again = AcquireRequest::new(key, id, lease, IfBusy::Fail, queue, valid_for);
            match store.acquire_one(again).await? {
                AcquireReply::Granted { fence } => Ok(YieldReply::Extended { fence }),
                reply => panic!("nobody waits: {reply:?}"),
            }
        })
    }
}

/// Every slot is half moved, from the only master with slots to an empty one.
async fn half_move_all(cluster: &RedisCluster) {
    let ids = [id_of(cluster, 0).await, id_of(cluster, 1).await];
    let script = "for slot = 0, 16383 do redis.call('CLUSTER', 'SETSLOT', slot, ARGV[1], ARGV[2]) end";
    for (node, state, other) in [(1, "IMPORTING", &ids[0]), (0, "MIGRATING", &ids[1])] {
        cluster.command(node, &["EVAL", script, "0", state, other]).await;
    }
}

async fn id_of(cluster: &RedisCluster, node: usize) -> String {
    cluster.command(node, &["CLUSTER", "MYID"]).await.text().expect("an id").to_owned()
}

/// Guarantee: G1.
#[tokio::test]
async fn half_moved_cluster_passes_conformance() {
    let Some(mut cluster) = cluster(1, 0).await else { return };
    cluster.add_empty_master().await;
    let store = store(&cluster).await;
    half_move_all(&cluster).await;
    conformance::check(InterceptedStore::new(store, Moving)).await;
}

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
    events: Arc<Mutex<Vec<StoreEvent>>>,
}

impl Move {
    async fn new() -> Option<Self> {
        let cluster = shared_cluster().await?;
        let store = store(&cluster).await;
        let (slot, ids) = (RedisCluster::slot(NAME), AcquisitionIds::new("p", fastrand::u64(..)));
        // Without a sink its waiters would count as dead.
        let events = Arc::new(Mutex::new(Vec::new()));
        let note = |events: &Arc<Mutex<Vec<_>>>, event| events.lock().expect("no panic").push(event);
        store.subscribe(EventSink::new(ids.next().manager().to_owned(), &events, note));
        let from = cluster.owner_of_slot(slot).await;
        let to = (from + 1) % 3;
        Some(Self { store, key: key(), ids, slot, from, to, cluster, events })
    }

    async fn begin(&self) {
        self.cluster.begin_move(self.slot, self.from, self.to).await;
    }

    /// As `redis-cli` does it: no key is replaced at the target.
    async fn finish(&self) {
        self.cluster.move_keys(self.slot, self.from, self.to).await.expect("no key is on both nodes");
        self.cluster.finish_move(self.slot, self.from, self.to).await;
    }

    fn request(&self, id: &AcquisitionId, if_busy: IfBusy) -> AcquireRequest {
        AcquireRequest::new(self.key.clone(), id.clone(), SLOW, if_busy, QUEUE_CONFIG, limits::CALL)
    }

    async fn acquire(&self, id: &AcquisitionId) -> AcquireReply {
        self.store.acquire_one(self.request(id, IfBusy::Enqueue)).await.expect("a reply")
    }

    async fn acquire_unless_recorded(&self, id: &AcquisitionId) -> AcquireReply {
        let request = self.request(id, IfBusy::Enqueue).demand(Demand::new().unless_recorded());
        self.store.acquire_one(request).await.expect("a reply")
    }

    async fn granted(&self, id: &AcquisitionId) -> u64 {
        match self.acquire(id).await {
            AcquireReply::Granted { fence } => fence,
            reply => panic!("not granted: {reply:?}"),
        }
    }

    async fn release(&self, id: &AcquisitionId) -> ReleaseReply {
        let request = ReleaseRequest::new(self.key.clone(), id.clone(), Duration::ZERO, QUEUE_CONFIG);
        self.store.release_one(request).await.expect("a reply")
    }

    async fn release_with_record(&self, id: &AcquisitionId) -> ReleaseReply {
        let request = ReleaseRequest::new(self.key.clone(), id.clone(), Duration::ZERO, QUEUE_CONFIG);
        self.store.release_one(request.record(record(), SLOW)).await.expect("a reply")
    }

    async fn renewed(&self, id: &AcquisitionId) -> RenewReply {
        let request = RenewRequest::new(self.key.clone(), id.clone(), SLOW);
        self.store.renew(vec![request]).await.expect("a reply")[0]
    }

    async fn keys(&self, node: usize) -> Vec<String> {
        self.cluster.keys_in(node, self.slot, 100).await
    }
}

fn record() -> Record {
    Record::new("paid", Some("body".into()))
}

/// Guarantee: G1.
#[tokio::test]
async fn held_lock_is_renewed_and_released_where_it_is() {
    let Some(m) = Move::new().await else { return };
    let (a, b) = (m.ids.next(), m.ids.next());
    let first = m.granted(&a).await;
    m.begin().await;
    assert_eq!(m.renewed(&a).await, RenewReply::Extended);
    let waits = m.acquire(&b).await;
    assert!(matches!(waits, AcquireReply::Queued { poll_in: Some(_), .. }), "its queue cannot be made: {waits:?}");
    assert_eq!(m.release(&a).await, ReleaseReply::Freed);
    assert_eq!(m.release(&a).await, ReleaseReply::NotHolder, "a copy changes nothing");
    let second = m.granted(&b).await;
    assert!(second > first, "{second} after {first}");
    let waits = m.acquire(&m.ids.next()).await;
    assert!(matches!(waits, AcquireReply::Queued { poll_in: Some(_), .. }), "{waits:?}");
    assert_eq!(m.keys(m.to).await, [NAME], "no fence and no queue are made there");
    m.finish().await;
    assert_eq!(m.renewed(&b).await, RenewReply::Extended);
    assert_eq!(m.granted(&b).await, second, "a repeated call finds its grant");
    assert_eq!(m.release(&b).await, ReleaseReply::Freed);
    assert!(m.granted(&a).await > second);
}

/// The fence of the slot is an hour ahead of the clock: that clock was set back.
/// Guarantee: G11.
#[tokio::test]
async fn fences_rise_while_a_slot_is_half_moved() {
    let Some(m) = Move::new().await else { return };
    m.granted(&m.ids.next()).await;
    let fence = m.keys(m.from).await.into_iter().find(|key| key.starts_with("tower-lock:lock:f:")).expect("a fence");
    let ahead = unix_micros() + 3_600_000_000;
    m.cluster.command(m.from, &["SET", &fence, &ahead.to_string()]).await;
    m.cluster.command(m.from, &["DEL", NAME]).await;
    m.begin().await;
    let mut last = ahead;
    for step in 0..6 {
        if step == 3 {
            m.cluster.migrate(m.from, m.to, &[&fence]).await.expect("it is moved");
        }
        let id = m.ids.next();
        let granted = m.granted(&id).await;
        assert!(granted > last, "step {step}: {granted} after {last}");
        assert_eq!(m.granted(&id).await, granted, "a repeated call finds its grant");
        last = granted;
        assert_eq!(m.release(&id).await, ReleaseReply::Freed);
    }
    m.finish().await;
    assert!(m.granted(&m.ids.next()).await > last);
}

/// Guarantee: G18.
#[tokio::test]
async fn record_is_found_on_either_node() {
    let Some(m) = Move::new().await else { return };
    let (a, b, c) = (m.ids.next(), m.ids.next(), m.ids.next());
    m.granted(&a).await;
    assert_eq!(m.release_with_record(&a).await, ReleaseReply::Freed);
    m.begin().await;
    let recorded = AcquireReply::Recorded(record());
    assert_eq!(m.acquire_unless_recorded(&b).await, recorded, "at the former node");
    assert_eq!(m.release(&b).await, ReleaseReply::NotHolder, "it holds nothing");
    m.cluster.migrate(m.from, m.to, &[RECORD]).await.expect("it is moved");
    assert_eq!(m.acquire_unless_recorded(&b).await, recorded, "at the next node");
    assert_eq!(m.store.delete_record(m.key.clone()).await.expect("a reply"), DeleteRecordReply::Deleted);
    assert!(matches!(m.acquire_unless_recorded(&c).await, AcquireReply::Granted { .. }));
    m.finish().await;
}

/// A release that leaves a record, of a lock that is still at the former node.
/// Guarantee: G18.
#[tokio::test]
async fn record_is_left_while_a_slot_is_half_moved() {
    let Some(m) = Move::new().await else { return };
    let (a, b) = (m.ids.next(), m.ids.next());
    m.granted(&a).await;
    assert!(matches!(m.acquire_unless_recorded(&b).await, AcquireReply::Queued { ahead: 0, .. }));
    m.begin().await;
    assert_eq!(m.release_with_record(&a).await, ReleaseReply::Freed);
    assert_eq!(m.release_with_record(&a).await, ReleaseReply::RecordedBefore);
    assert_eq!(m.acquire_unless_recorded(&b).await, AcquireReply::Recorded(record()));
    m.finish().await;
    assert_eq!(m.acquire_unless_recorded(&b).await, AcquireReply::Recorded(record()));
    assert_eq!(m.release_with_record(&a).await, ReleaseReply::RecordedBefore);
}

/// A record that an earlier section left is replaced where it is: a second one at the next node
/// would stop the move.
/// Guarantee: G18.
#[tokio::test]
async fn record_of_the_former_node_is_replaced_there() {
    let Some(m) = Move::new().await else { return };
    let (a, b) = (m.ids.next(), m.ids.next());
    m.granted(&a).await;
    m.release_with_record(&a).await;
    m.begin().await;
    m.granted(&b).await;
    assert_eq!(m.release_with_record(&b).await, ReleaseReply::Freed);
    assert!(m.keys(m.from).await.contains(&RECORD.to_owned()));
    assert_eq!(m.keys(m.to).await, Vec::<String>::new());
    assert_eq!(m.release_with_record(&b).await, ReleaseReply::RecordedBefore);
    m.finish().await;
    assert_eq!(m.release_with_record(&b).await, ReleaseReply::RecordedBefore);
}

/// The lock-delay of an aborted handler.
/// Guarantee: G3.
#[tokio::test]
async fn block_stays_while_a_slot_is_half_moved() {
    let Some(m) = Move::new().await else { return };
    let (a, b, c) = (m.ids.next(), m.ids.next(), m.ids.next());
    m.granted(&a).await;
    m.begin().await;
    let blocks = |id: &AcquisitionId| ReleaseRequest::new(m.key.clone(), id.clone(), SLOW, QUEUE_CONFIG);
    assert_eq!(m.store.release_one(blocks(&a)).await.expect("a reply"), ReleaseReply::Freed);
    assert!(matches!(m.acquire(&b).await, AcquireReply::Queued { .. }), "at the former node");
    let force = || ForceReleaseRequest::new(m.key.clone(), SLOW, QUEUE_CONFIG);
    let unblocked = m.store.force_release(force()).await.expect("a reply");
    assert!(matches!(unblocked, ForceReleaseReply::Unblocked { .. }), "{unblocked:?}");
    m.granted(&b).await;
    assert_eq!(m.store.release_one(blocks(&b)).await.expect("a reply"), ReleaseReply::Freed);
    assert!(matches!(m.acquire(&c).await, AcquireReply::Queued { .. }), "at the next node");
    m.finish().await;
    assert!(matches!(m.acquire(&c).await, AcquireReply::Queued { .. }), "after the move");
}

/// Guarantee: G8.
#[tokio::test]
async fn revoked_lock_is_blocked_at_the_former_node() {
    let Some(m) = Move::new().await else { return };
    let (a, b) = (m.ids.next(), m.ids.next());
    m.granted(&a).await;
    m.begin().await;
    let force = ForceReleaseRequest::new(m.key.clone(), SLOW, QUEUE_CONFIG);
    let revoked = m.store.force_release(force).await.expect("a reply");
    assert_eq!(revoked, ForceReleaseReply::Revoked { holder: a.clone() });
    assert_eq!(m.renewed(&a).await, RenewReply::NotHolder);
    assert!(matches!(m.acquire(&b).await, AcquireReply::Queued { .. }), "it is blocked");
}

/// Waiters that were enqueued before the move, whose entries move last.
/// Guarantee: G5.
#[tokio::test]
async fn waiters_get_the_key_while_a_slot_is_half_moved() {
    let Some(m) = Move::new().await else { return };
    let holder = instance(&m.cluster, "a").await;
    let waiters = [instance(&m.cluster, "b").await, instance(&m.cluster, "c").await];
    let held = holder.lock(key()).await.expect("it is free");
    let waiting = waiters.each_ref().map(|locks| {
        let locks = locks.clone();
        tokio::spawn(async move {
            let guard = locks.lock(key()).wait(SLOW).await.expect("in time");
            let token = guard.fencing_token();
            guard.release().await.expect("it is held");
            token
        })
    });
    until("both are enqueued", async || m.store.inspect(key()).await.is_ok_and(|key| key.waiting == 2)).await;
    m.begin().await;
    let first = held.fencing_token();
    held.release().await.expect("it is held");
    let mut tokens = Vec::new();
    for waiter in waiting {
        tokens.push(waiter.await.expect("no panic"));
    }
    tokens.sort_unstable();
    assert!(first < tokens[0] && tokens[0] < tokens[1], "{first:?}, then {tokens:?}");
    assert!(!m.keys(m.from).await.contains(&QUEUE.to_owned()), "an entry would be offered the key after the move");
    m.finish().await;
    until("the key is free", async || m.store.inspect(key()).await.is_ok_and(|key| key.lease_left.is_zero())).await;
}

/// The queue has moved before the lock.
/// Guarantee: G5.
#[tokio::test]
async fn release_wakes_the_waiter_at_the_next_master() {
    let Some(m) = Move::new().await else { return };
    let (a, b) = (m.ids.next(), m.ids.next());
    m.granted(&a).await;
    assert!(matches!(m.acquire(&b).await, AcquireReply::Queued { ahead: 0, poll_in: None, .. }));
    m.begin().await;
    m.cluster.migrate(m.from, m.to, &[QUEUE]).await.expect("it is moved");
    m.events.lock().expect("no panic").clear();
    assert_eq!(m.release(&a).await, ReleaseReply::Freed);
    let offered = StoreEvent::Offered { key: key(), id: b.clone() };
    until("the waiter is woken", async || m.events.lock().expect("no panic").contains(&offered)).await;
    m.granted(&b).await;
    m.finish().await;
}

/// Redis does not replicate that a slot moves: the promoted replica of its former master has it.
/// The tokens of the two holders have the order of their grants. Valkey 8 replicates it.
/// Guarantee: G1.
#[tokio::test]
async fn failover_of_a_half_moved_slot_loses_its_locks() {
    let Some(cluster) = cluster(2, 1).await else { return };
    let (a, b) = (instance(&cluster, "a").await, instance(&cluster, "b").await);
    let (slot, from) = (RedisCluster::slot(NAME), cluster.owner(NAME).await);
    cluster.begin_move(slot, from, 1 - from).await;
    let held = a.lock(key()).await.expect("it is free");
    cluster.planned_failover(from).await;
    if cluster.command(from, &["INFO", "server"]).await.text().expect("a text").contains("valkey_version") {
        let lock = b.try_lock(key()).await;
        assert!(matches!(lock, Err(LockError::Busy { .. })), "the promoted replica knows the move: {lock:?}");
        return held.release().await.map(drop).expect("held");
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
    let before = m.keys(m.from).await;
    assert_eq!(m.renewed(&a).await, RenewReply::Extended);
    assert_eq!(m.release(&a).await, ReleaseReply::Freed);
    assert_eq!((before, m.keys(m.from).await), (Vec::new(), Vec::new()));
}
