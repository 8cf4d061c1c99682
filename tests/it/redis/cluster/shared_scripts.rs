//! Keys of many slots that share a script, and those that it leaves as they are.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, SystemTime},
};

use futures_util::future::join_all;
use tower_lock::{
    AcquisitionId, LockKey, RedisStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, EventSink, IfBusy, LockStore, QueueConfig, ReleaseReply,
        ReleaseRequest, RenewReply, RenewRequest, StoreEvent,
    },
};
use tower_lock_testkit::{NetworkFault, Proxy, RedisCluster, Reply, Request, costs::runs, limits};

use super::{cluster, keys_at, name_of, scripts, shared_cluster, store};

const QUEUE_CONFIG: QueueConfig = QueueConfig::new(Duration::from_secs(3), Duration::from_secs(10), 100);
const LEASE: Duration = Duration::from_secs(60);

/// A process that locks several keys in one call.
struct Process {
    store: Arc<RedisStore>,
    ids: AcquisitionIds,
    /// How often it has learned that the server may have lost its locks.
    doubts: Arc<AtomicUsize>,
}

/// The keys of a process, each with the acquisition that holds or wants it.
type Wanted = Vec<(LockKey, AcquisitionId)>;

impl Process {
    async fn new(cluster: &RedisCluster) -> Self {
        Self::with(store(cluster).await)
    }

    fn with(store: Arc<RedisStore>) -> Self {
        let ids = AcquisitionIds::new("p", fastrand::u64(..));
        let doubts = Arc::new(AtomicUsize::new(0));
        let count = |doubts: &Arc<AtomicUsize>, event| {
            doubts.fetch_add(usize::from(event == StoreEvent::Doubted), SeqCst);
        };
        store.subscribe(EventSink::new(ids.next().manager().to_owned(), &doubts, count));
        Self { store, ids, doubts }
    }

    fn wants(&self, keys: &[LockKey]) -> Wanted {
        keys.iter().map(|key| (key.clone(), self.ids.next())).collect()
    }

    async fn acquire(&self, wanted: &Wanted, if_busy: IfBusy) -> Vec<AcquireReply> {
        let request = |(key, id): &(LockKey, AcquisitionId)| {
            AcquireRequest::new(key.clone(), id.clone(), LEASE, if_busy, QUEUE_CONFIG, limits::CALL)
        };
        let replies = join_all(self.store.acquire(wanted.iter().map(request).collect())).await;
        replies.into_iter().map(|reply| reply.expect("a reply")).collect()
    }

    async fn fences(&self, wanted: &Wanted) -> Vec<u64> {
        let fence = |reply| match reply {
            AcquireReply::Granted { fence } => fence,
            reply => panic!("not granted: {reply:?}"),
        };
        self.acquire(wanted, IfBusy::Fail).await.into_iter().map(fence).collect()
    }

    async fn release(&self, wanted: &Wanted) -> Vec<ReleaseReply> {
        let request = |(key, id): &(LockKey, AcquisitionId)| {
            ReleaseRequest::new(key.clone(), id.clone(), Duration::ZERO, QUEUE_CONFIG)
        };
        let replies = join_all(self.store.release(wanted.iter().map(request).collect())).await;
        replies.into_iter().map(|reply| reply.expect("a reply")).collect()
    }

    async fn renew(&self, wanted: &Wanted) -> Vec<RenewReply> {
        let request = |(key, id): &(LockKey, AcquisitionId)| RenewRequest::new(key.clone(), id.clone(), LEASE);
        self.store.renew(wanted.iter().map(request).collect()).await.expect("a reply")
    }
}

/// A call of a script without declared keys.
fn is_shared(request: &Request) -> bool {
    matches!(request.parts.as_slice(), [command, _, keys, ..] if command == b"EVALSHA" && keys == b"0")
}

/// Another key in the slot of this one.
fn in_slot_of(key: &LockKey) -> LockKey {
    let slot = |key: &LockKey| RedisCluster::slot(&name_of(key));
    let mut others = (0_u64..).map(|number| LockKey::from(("same", number)));
    others.find(|other| slot(other) == slot(key)).expect("numbers go on")
}

/// The names of the fences at a node.
async fn fences_at(cluster: &RedisCluster, node: usize) -> Vec<String> {
    let Reply::Array(names) = cluster.command(node, &["KEYS", "tower-lock:lock:f:*"]).await else { panic!("names") };
    names.iter().map(|name| name.text().expect("a name").to_owned()).collect()
}

/// Guarantee: G11.
#[tokio::test]
async fn shared_script_lowers_no_fence() {
    let Some(cluster) = shared_cluster().await else { return };
    let process = Process::new(&cluster).await;
    let mut keys = keys_at(&cluster, 0, 20).await;
    keys.push(in_slot_of(&keys[0]));
    let first = process.wants(&keys);
    process.fences(&first).await;
    process.release(&first).await;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_micros();
    let ahead = u64::try_from(now).expect("it fits") + 3_600_000_000;
    for name in fences_at(&cluster, 0).await {
        cluster.command(0, &["SET", &name, &ahead.to_string()]).await;
    }
    let mut last = vec![ahead; keys.len()];
    for round in 0..3 {
        let wanted = process.wants(&keys);
        let fences = process.fences(&wanted).await;
        assert!(fences.iter().zip(&last).all(|(fence, last)| fence > last), "{round}: {fences:?} after {last:?}");
        assert_eq!(process.release(&wanted).await, vec![ReleaseReply::Freed; keys.len()]);
        last = fences;
    }
}

/// The value of another program, and the values of a server that has lost its data.
#[tokio::test]
async fn shared_script_grants_nothing_without_a_valid_fence() {
    let Some(cluster) = shared_cluster().await else { return };
    let keys = keys_at(&cluster, 0, 20).await;
    let (maker, process) = (Process::new(&cluster).await, Process::new(&cluster).await);
    // The second process finds the fences of the first one, all by the shared script.
    let mut last = Vec::new();
    for process in [&maker, &process] {
        let wanted = process.wants(&keys);
        last = process.fences(&wanted).await;
        process.release(&wanted).await;
    }
    for command in [&["none"][..], &["SET", "x"], &["SET", "nan"], &["HSET", "x", "y"]] {
        for name in fences_at(&cluster, 0).await {
            cluster.command(0, &["DEL", &name]).await;
            if let [command, values @ ..] = command
                && !values.is_empty()
            {
                cluster.command(0, &[&[*command, &*name], values].concat()).await;
            }
        }
        let (wanted, doubts) = (process.wants(&keys), process.doubts.load(SeqCst));
        let fences = process.fences(&wanted).await;
        assert!(fences.iter().zip(&last).all(|(fence, last)| fence > last), "{command:?}: {fences:?} after {last:?}");
        assert!(process.doubts.load(SeqCst) > doubts, "{command:?}: the server may have lost its locks");
        process.release(&wanted).await;
        let mut replaced = 0;
        // That of the self-test stays.
        for name in fences_at(&cluster, 0).await {
            let fence = cluster.command(0, &["GET", &name]).await;
            replaced += usize::from(
                fence.text().and_then(|fence| fence.parse().ok()).is_some_and(|fence| fences.contains(&fence)),
            );
        }
        assert_eq!(replaced, keys.len(), "{command:?}");
        last = fences;
    }
}

/// Guarantee: G1.
#[tokio::test]
async fn keys_of_slots_that_move_share_calls_with_others() {
    let Some(cluster) = shared_cluster().await else { return };
    let (a, b) = (Process::new(&cluster).await, Process::new(&cluster).await);
    let keys = keys_at(&cluster, 0, 12).await;
    let first = a.wants(&keys);
    a.fences(&first).await;
    // Of the first three: held at the former master, at the next master, and free.
    a.release(&first[1..].to_vec()).await;
    for key in &keys[..3] {
        cluster.begin_move(RedisCluster::slot(&name_of(key)), 0, 1).await;
    }
    let held = a.wants(&keys[1..2]);
    a.fences(&held).await;
    let of_b = b.wants(&keys);
    let replies = b.acquire(&of_b, IfBusy::Fail).await;
    let busy: Vec<_> = (0..keys.len()).filter(|at| matches!(replies[*at], AcquireReply::Busy { .. })).collect();
    assert_eq!(busy, [0, 1], "{replies:?}");
    assert!(replies[2..].iter().all(|reply| matches!(reply, AcquireReply::Granted { .. })), "{replies:?}");
    let extended = |replies: &[RenewReply]| {
        (0..replies.len()).filter(|at| replies[*at] == RenewReply::Extended).collect::<Vec<_>>()
    };
    assert_eq!(extended(&b.renew(&of_b).await), (2..keys.len()).collect::<Vec<_>>());
    assert_eq!(extended(&a.renew(&first).await), [0]);
    assert_eq!(extended(&a.renew(&held).await), [0]);
    let released: Vec<_> = b.release(&of_b).await;
    assert_eq!(released[..2], [ReleaseReply::NotHolder; 2]);
    assert_eq!(released[2..], [ReleaseReply::Freed; 10]);
    assert_eq!(b.release(&of_b).await, [ReleaseReply::NotHolder; 12], "again");
    assert_eq!(a.release(&first).await[0], ReleaseReply::Freed);
    assert_eq!(a.release(&held).await, [ReleaseReply::Freed]);
    let all = a.wants(&keys);
    let fences = a.fences(&all).await;
    for (reply, fence) in replies.iter().zip(fences) {
        assert!(!matches!(reply, AcquireReply::Granted { fence: last } if *last >= fence), "{reply:?} before {fence}");
    }
}

/// Guarantee: G5.
#[tokio::test]
async fn free_key_with_a_waiter_is_not_granted_to_others() {
    let Some(cluster) = shared_cluster().await else { return };
    let (a, b) = (Process::new(&cluster).await, Process::new(&cluster).await);
    let keys = keys_at(&cluster, 0, 12).await;
    let held = a.wants(&keys);
    a.fences(&held).await;
    let waiter = b.wants(&keys[4..5]);
    let replies = b.acquire(&waiter, IfBusy::Enqueue).await;
    assert!(matches!(replies[..], [AcquireReply::Queued { .. }]), "{replies:?}");
    a.release(&[&held[..4], &held[5..]].concat()).await;
    cluster.command(0, &["DEL", &name_of(&keys[4])]).await;
    let others = a.wants(&keys);
    let replies = a.acquire(&others, IfBusy::Fail).await;
    let busy: Vec<_> = (0..keys.len()).filter(|at| matches!(replies[*at], AcquireReply::Busy { .. })).collect();
    assert_eq!(busy, [4], "{replies:?}");
    b.fences(&waiter).await;
}

/// As a service does that requires declared keys.
#[tokio::test]
async fn keys_have_scripts_of_their_own_if_the_shared_one_is_refused() {
    let Some(cluster) = cluster(1, 0).await else { return };
    let proxy = Proxy::start(cluster.node(0).address()).await;
    let address = proxy.address();
    cluster.command(0, &["CONFIG", "SET", "cluster-announce-port", &address.port().to_string()]).await;
    let url = format!("redis+cluster://{address}");
    let process = Process::with(Arc::new(limits::redis().connect(&url).await.expect("it is up")));
    let keys = keys_at(&cluster, 0, 12).await;
    for fault in [None, Some(NetworkFault::Refused)] {
        let (wanted, refused) = (process.wants(&keys), proxy.fault_count());
        let arm = || fault.into_iter().for_each(|fault| proxy.all().next_where(is_shared, fault));
        arm();
        process.fences(&wanted).await;
        arm();
        assert_eq!(process.renew(&wanted).await, [RenewReply::Extended; 12]);
        arm();
        assert_eq!(process.release(&wanted).await, [ReleaseReply::Freed; 12]);
        assert_eq!(proxy.fault_count() - refused, if fault.is_some() { 3 } else { 0 });
    }
}

/// A second step would need a second call timeout.
#[tokio::test]
async fn busy_keys_of_a_call_cost_one_step() {
    let Some(cluster) = cluster(1, 1).await else { return };
    let (a, b) = (Process::new(&cluster).await, Process::new(&cluster).await);
    let mut keys = keys_at(&cluster, 0, 12).await;
    keys.push(in_slot_of(&keys[11]));
    let held = a.wants(&keys[..8]);
    a.fences(&held).await;
    // The first lock of a slot has a script of its own.
    let others = b.wants(&keys[8..]);
    b.fences(&others).await;
    b.release(&others).await;
    let before = scripts(&cluster, 0).await;
    let all = b.wants(&keys);
    let replies = b.acquire(&all, IfBusy::Fail).await;
    assert_eq!(scripts(&cluster, 0).await - before, 1);
    for (at, reply) in replies.iter().enumerate() {
        let is_busy =
            matches!(reply, AcquireReply::Busy { lease_left } if *lease_left > LEASE / 2 && *lease_left <= LEASE);
        assert!(if at < 8 { is_busy } else { matches!(reply, AcquireReply::Granted { .. }) }, "{at}: {reply:?}");
    }
    a.release(&held).await;
    b.release(&all).await;

    let store = limits::redis().min_replicas(1, limits::REPLICAS).connect(&cluster.url()).await.expect("it is up");
    let acknowledged = Process::with(Arc::new(store));
    let waits = async || runs(cluster.node(0), "wait").await;
    a.fences(&held).await;
    let before = waits().await;
    let refused = acknowledged.acquire(&acknowledged.wants(&keys[..8]), IfBusy::Enqueue).await;
    assert!(refused.iter().all(|reply| matches!(reply, AcquireReply::Queued { .. })), "{refused:?}");
    assert_eq!(waits().await - before, 1, "all together wait for the replicas once");
    let before = waits().await;
    acknowledged.fences(&acknowledged.wants(&keys[8..])).await;
    assert_eq!(waits().await - before, 1, "and no grant counts without it");
}
