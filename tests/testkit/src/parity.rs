//! One contract for all stores: random sequences of calls, on a store and in memory.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::{StreamExt, stream};
use tokio::{sync::Semaphore, time::sleep};
use tower_lock::{
    AcquisitionId, LockKey, MemoryStore,
    store::{
        AcquireReply, AcquireRequest, AcquisitionIds, Demand, EventSink, ForceReleaseReply, ForceReleaseRequest,
        Holder, IfBusy, KeyStatus, ListRequest, LockStore, QueueConfig, Record, ReleaseRequest, RenewRequest,
        StoreEvent, StoreTraits, YieldReply, YieldRequest,
    },
};

use crate::{
    store::StoreExt,
    wait::{ms, until},
};

const SEQUENCES: u64 = 30;
const STEPS: usize = 40;
const PROCESSES: usize = 3;

/// Compares a store with the reference: the same random sequence of calls gives the same replies
/// and events on both stores. `SEED=` runs one sequence, and `SEQUENCES=` another number of them.
/// Each run has other ones.
pub async fn same_replies_as_memory(store: Arc<dyn LockStore>) {
    let number = |name| std::env::var(name).ok().map(|value| value.parse::<u64>().expect("a number"));
    let first = fastrand::u64(..1 << 32);
    let seeds = match number("SEED") {
        Some(seed) => seed..seed + 1,
        None => first..first + number("SEQUENCES").unwrap_or(SEQUENCES),
    };
    // A failure shows it.
    println!("SEED={} and the next ones, to {}", seeds.start, seeds.end - 1);
    let both = stream::iter(seeds).map(|seed| {
        let store = Arc::clone(&store);
        let traits = store.traits();
        async move {
            let memory = play(seed, Arc::new(MemoryStore::new()), traits).await;
            (seed, memory, play(seed, store, traits).await)
        }
    });
    // They sleep most of the time, and each has its own key.
    let mut both = both.buffer_unordered(15);
    while let Some((seed, by_memory, by_store)) = both.next().await {
        for (step, (memory, other)) in by_memory.iter().zip(&by_store).enumerate() {
            assert_eq!(memory, other, "SEED={seed}, step {step}, memory first; before it {:#?}", &by_memory[..step]);
        }
        assert_eq!(by_memory.len(), by_store.len(), "SEED={seed}");
    }
}

/// Runs a sequence and records the replies: fences by their order, ids by their number, times in
/// steps that are longer than scheduling delays.
async fn play(seed: u64, store: Arc<dyn LockStore>, traits: StoreTraits) -> Vec<String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    // In every other sequence, and in each third one.
    let (shares, replaces) = (traits.shares && seed.is_multiple_of(2), traits.supersedes && seed.is_multiple_of(3));
    let key = LockKey::from(("parity", seed));
    let events = Arc::new(Mutex::new(Vec::new()));
    let processes: Vec<_> = (0..PROCESSES)
        .map(|n| {
            let ids = AcquisitionIds::new(&format!("p{n}"), fastrand::u64(..));
            let process = ids.next().manager().to_owned();
            let note = move |events: &Arc<Mutex<Vec<_>>>, event| {
                events.lock().unwrap_or_else(PoisonError::into_inner).push((n, event));
            };
            store.subscribe(EventSink::new(process, &events, note));
            ids
        })
        .collect();
    // A call of an unsubscribed process waits for its subscription.
    for (n, ids) in processes.iter().enumerate() {
        let request =
            AcquireRequest::new(LockKey::from(("hello", seed, n)), ids.next(), ms(1), IfBusy::Enqueue, terms(), LONG);
        store.acquire_one(request).await.expect("a reply");
    }
    let mut names = Names::default();
    let mut owners: Vec<AcquisitionId> = Vec::new();
    let (mut outcomes, mut has_recorded, mut blocked) = (Vec::new(), HashSet::new(), HashSet::new());
    for _ in 0..STEPS {
        // Mostly an earlier id.
        if owners.is_empty() || rng.u8(0..4) == 0 {
            let limit = if shares { [1, 2, 3, 1_024][rng.usize(0..4)] } else { 1 };
            let ids = &processes[rng.usize(0..PROCESSES)];
            let is_replaceable = replaces && limit == 1 && rng.u8(0..3) > 0;
            owners.push(if is_replaceable { ids.next_replaceable() } else { ids.next_share(limit) });
        }
        let owner = owners[rng.usize(owners.len().saturating_sub(6)..owners.len())].clone();
        let (id, is_share) = (names.owner(&owner), owner.max_holders() > 1);
        let mut is_short = false;
        let outcome = match rng.u8(0..12) {
            // The place of a share that was blocked is not taken by the same id once more.
            0..=4 if !blocked.contains(&owner) => {
                let if_busy = if rng.u8(0..4) == 0 { IfBusy::Fail } else { IfBusy::Enqueue };
                let lease = if rng.u8(0..5) == 0 { SHORT } else { LONG };
                is_short = lease == SHORT;
                // As a caller that leaves records. An id with two of them has the first one or the
                // second one, by the kind of the store.
                let unless = !is_share && (rng.bool() || has_recorded.contains(&owner));
                let request = AcquireRequest::new(key.clone(), owner, lease, if_busy, terms(), LONG);
                let got = store.acquire_one(request.demand(demand(unless))).await.expect("a reply");
                format!("acquire({id}, {if_busy:?}, {lease:?}, {unless}): {}", names.acquired(got, is_share))
            }
            5..=6 => {
                let block_for = [Duration::ZERO, Duration::ZERO, SHORT, LONG / 2][rng.usize(0..4)];
                let mut request = ReleaseRequest::new(key.clone(), owner.clone(), block_for, terms());
                if is_share && !block_for.is_zero() {
                    blocked.insert(owner.clone());
                }
                if !is_share && rng.u8(0..3) == 0 {
                    has_recorded.insert(owner);
                    let body = rng.bool().then(|| vec![0xff; rng.usize(0..9)].into());
                    let keep_for = if rng.bool() { SHORT } else { LONG };
                    request = request.record(Record::new(vec![0; rng.usize(0..9)], body), keep_for);
                }
                is_short = block_for == SHORT || request.record.as_ref().is_some_and(|new| new.keep_for == SHORT);
                let released = format!("release({id}, {block_for:?}, {:?})", request.record);
                format!("{released}: {:?}", store.release_one(request).await.expect("a reply"))
            }
            7 => {
                let asks = vec![RenewRequest::new(key.clone(), owner, LONG)];
                format!("renew({id}): {:?}", store.renew(asks).await.expect("a reply"))
            }
            8 if !is_share => {
                let next = processes[rng.usize(0..PROCESSES)].next();
                owners.push(next.clone());
                let then = names.owner(&next);
                // Mostly the current fence; otherwise the request is a copy of an earlier one.
                let stands =
                    store.inspect(key.clone()).await.expect("a reply").holder().map_or(7, |holder| holder.fence);
                let fence = if rng.u8(0..4) == 0 { 7 } else { stands };
                let unless = rng.bool();
                let request = YieldRequest::new(key.clone(), owner, fence, next, LONG, terms(), LONG);
                let yielded = match store.yield_to_queue(request.demand(demand(unless))).await.expect("a reply") {
                    YieldReply::Extended { fence } => format!("extended, {}", names.fence(fence)),
                    YieldReply::NotHolder(got) => names.acquired(got, false),
                    other => format!("{other:?}"),
                };
                format!("yield({id}, {then}, {unless}): {yielded}")
            }
            9 if rng.bool() => {
                is_short = rng.bool();
                let block_for = if is_short { SHORT } else { Duration::ZERO };
                let meant = (shares && rng.bool()).then_some(owner);
                let request = ForceReleaseRequest::new(key.clone(), block_for, terms()).holder(meant);
                match store.force_release(request).await.expect("a reply") {
                    ForceReleaseReply::Free => "force: free".to_owned(),
                    ForceReleaseReply::Revoked { holders } => {
                        let mut holders: Vec<_> = holders.iter().map(|holder| names.owner(holder)).collect();
                        holders.sort();
                        format!("force: from {holders:?}")
                    }
                    ForceReleaseReply::Unblocked { blocked_for } => format!("force: unblocked, {}", left(blocked_for)),
                    other => format!("{other:?}"),
                }
            }
            _ => {
                let found = store.inspect(key.clone()).await.expect("a reply");
                let is_alone = |holder: &Holder| holder.id.max_holders() == 1;
                let since = found.holders.iter().filter(|holder| is_alone(holder)).all(|holder| holder.since.is_some());
                assert!(since, "SEED={seed}: {found:?}");
                let holders = found.holders.iter().map(|holder| {
                    let fence = if is_alone(holder) { names.fence(holder.fence) } else { String::new() };
                    (names.owner(&holder.id), fence)
                });
                let mut holders: Vec<_> = holders.collect();
                holders.sort();
                format!("inspect: {holders:?}, {}, {} wait", left(found.lease_left), found.waiting)
            }
        };
        outcomes.push(outcome);
        if is_short {
            // After this pause short durations have passed and long ones have not, on any machine.
            sleep(SHORT + ms(15)).await;
        }
    }
    outcomes.push(match listed(&*store, &key).await {
        Some(status) => {
            let mut holders: Vec<_> = status.holders.iter().map(|holder| names.owner(&holder.id)).collect();
            holders.sort();
            format!("listed: {holders:?}, {}, {} wait", left(status.lease_left), status.waiting)
        }
        None => "not listed".to_owned(),
    });
    // Messages of one process arrive in order, and this one is the last.
    for (n, ids) in processes.iter().enumerate() {
        let last = LockKey::from(("last", seed, n));
        let request = AcquireRequest::new(last.clone(), ids.next(), LONG, IfBusy::Fail, terms(), LONG);
        store.acquire_one(request).await.expect("a reply");
        store.force_release(ForceReleaseRequest::new(last.clone(), Duration::ZERO, terms())).await.expect("a reply");
        let is_last = |event: &StoreEvent| matches!(event, StoreEvent::Revoked { key, .. } if *key == last);
        let has_come = || {
            let mut events = events.lock().unwrap_or_else(PoisonError::into_inner);
            let before = events.len();
            events.retain(|(_, event)| !is_last(event));
            events.len() < before
        };
        until("the last message of a process", async || has_come()).await;
    }
    let events = std::mem::take(&mut *events.lock().unwrap_or_else(PoisonError::into_inner));
    for n in 0..PROCESSES {
        outcomes.push(format!("p{n} was notified"));
        let first = outcomes.len();
        for (_, event) in events.iter().filter(|(process, event)| *process == n && *event != StoreEvent::Lagged) {
            outcomes.push(match event {
                StoreEvent::Offered { id: owner, .. } => format!("offered {}", names.owner(owner)),
                StoreEvent::Revoked { id: owner, .. } => format!("revoked {}", names.owner(owner)),
                other => format!("{other:?}"),
            });
        }
        // Those of one call, and what it offers, have any order.
        if shares || replaces {
            outcomes[first..].sort();
        }
    }
    outcomes
}

/// The entry of a key in a listing of the whole store.
async fn listed(store: &dyn LockStore, key: &LockKey) -> Option<KeyStatus> {
    // One at a time: each reads the keys of all sequences.
    static LISTING: Semaphore = Semaphore::const_new(1);
    let _permit = LISTING.acquire().await.expect("never closed");
    let mut request = ListRequest::new(100);
    loop {
        let page = store.list(request.clone()).await.expect("a reply");
        let entry = page.entries.into_iter().find(|entry| entry.key == *key);
        if entry.is_some() || page.next.is_none() {
            return entry.map(|entry| entry.status);
        }
        request = request.after(page.next?);
    }
}

const SHORT: Duration = ms(10);
const LONG: Duration = Duration::from_secs(600);

fn demand(unless_recorded: bool) -> Demand {
    if unless_recorded { Demand::new().unless_recorded() } else { Demand::new() }
}

fn terms() -> QueueConfig {
    QueueConfig::new(LONG * 2, Duration::from_secs(60), 4)
}

fn left(left: Duration) -> &'static str {
    match left {
        Duration::ZERO => "nothing left",
        left if left <= LONG => "a lease left",
        _ => "an offer left",
    }
}

/// Ids are random and fences are clock values: only their identity can be compared.
#[derive(Default)]
struct Names {
    owners: HashMap<AcquisitionId, usize>,
    fences: Vec<u64>,
}

impl Names {
    fn owner(&mut self, owner: &AcquisitionId) -> String {
        let next = self.owners.len();
        format!("{}#{}", owner.instance(), self.owners.entry(owner.clone()).or_insert(next))
    }

    fn fence(&mut self, fence: u64) -> String {
        if let Some(at) = self.fences.iter().position(|known| *known == fence) {
            return format!("fence {at}");
        }
        let rises = self.fences.iter().max().is_none_or(|last| *last < fence);
        self.fences.push(fence);
        format!("fence {}{}", self.fences.len() - 1, if rises { "" } else { ", which does not rise" })
    }

    fn acquired(&mut self, got: AcquireReply, is_share: bool) -> String {
        match got {
            AcquireReply::Granted { .. } if is_share => "granted".to_owned(),
            AcquireReply::Granted { fence, .. } => format!("granted, {}", self.fence(fence)),
            AcquireReply::Queued { ahead: before, lease_left, poll_in: _, .. } => {
                format!("queued behind {before}, {}", left(lease_left))
            }
            AcquireReply::Busy { lease_left, .. } => format!("held, {}", left(lease_left)),
            AcquireReply::QueueFull { lease_left, waiting } => format!("full of {waiting}, {}", left(lease_left)),
            other => format!("{other:?}"),
        }
    }
}
