//! Work that runs once for its key, and work of a leader.

use std::{
    future::{pending, ready},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    task::{AbortHandle, JoinSet},
    time::sleep,
};
use tower_lock::{
    HeldLock, LockError, LockKey, LockManager, RunError,
    lock::OnceOutcome,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    locks::store_and_locks,
    wait::{ms, settle, until},
};

const SECOND: Duration = Duration::from_secs(1);

/// Runs work that counts its runs, and takes a while.
async fn run(locks: &LockManager, runs: &AtomicUsize) -> OnceOutcome<usize> {
    let work = async |_: HeldLock| {
        sleep(ms(100)).await;
        runs.fetch_add(1, SeqCst)
    };
    locks.once(("job", 1)).keep_for(SECOND * 60).run(work).await.expect("a result")
}

fn calls(store: &TestStore) -> [usize; 4] {
    [StoreOp::Acquire, StoreOp::Release, StoreOp::Yield, StoreOp::Renew].map(|op| store.on(op).calls())
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn thousand_duplicates_in_one_process_cost_two_calls() {
    let (store, locks) = store_and_locks();
    let runs = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..1_000 {
        let (locks, runs) = (locks.clone(), Arc::clone(&runs));
        tasks.spawn(async move { run(&locks, &runs).await });
    }
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == OnceOutcome::Ran(0)).count(), 1);
    assert_eq!(runs.load(SeqCst), 1);
    assert_eq!(calls(&store), [1, 1, 0, 0]);
    assert_eq!(run(&locks, &runs).await, OnceOutcome::Already);
    assert_eq!(calls(&store), [2, 1, 0, 0], "one call later");
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn a_duplicate_in_another_process_waits_for_the_record() {
    let (store, one) = store_and_locks();
    let two = LockManager::new(store.clone());
    let runs = AtomicUsize::new(0);
    let (first, second) = tokio::join!(run(&one, &runs), async {
        settle().await;
        run(&two, &runs).await
    });
    assert_eq!((first, second, runs.load(SeqCst)), (OnceOutcome::Ran(0), OnceOutcome::Already, 1));
    assert_eq!(calls(&store)[..2], [3, 1], "an acquire of the first, and two of the second");
    assert_eq!(store.held_count(), 0);
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn the_work_runs_again_when_its_record_has_expired() {
    let (_, locks) = store_and_locks();
    let runs = AtomicUsize::new(0);
    run(&locks, &runs).await;
    sleep(SECOND * 61).await;
    assert_eq!(run(&locks, &runs).await, OnceOutcome::Ran(1));
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn failed_work_runs_again_at_once() {
    let (_, locks) = store_and_locks();
    let failed = locks.once(("job", 1)).try_run(async |_| Err::<(), _>("no mail server")).await;
    assert_eq!(failed.expect("a result"), OnceOutcome::Ran(Err("no mail server")));
    let done = locks.once(("job", 1)).wait(Duration::ZERO).try_run(async |_| Ok::<_, ()>(1)).await;
    assert_eq!(done.expect("a result"), OnceOutcome::Ran(Ok(1)));
    let again = locks.once(("job", 1)).wait(Duration::ZERO).try_run(async |_| Ok::<_, ()>(2)).await;
    assert_eq!(again.expect("a result"), OnceOutcome::Already);
}

/// Guarantee: G19.
#[tokio::test(start_paused = true)]
async fn dropped_work_is_not_done() {
    let (_, locks) = store_and_locks();
    let runs = AtomicUsize::new(0);
    tokio::select! {
        _ = run(&locks, &runs) => unreachable!("it takes longer"),
        () = sleep(ms(10)) => {}
    }
    assert_eq!(run(&locks, &runs).await, OnceOutcome::Ran(0), "after the lock-delay");
}

/// Guarantee: G19.
#[tokio::test(start_paused = true)]
async fn work_whose_lock_is_revoked_leaves_no_record() {
    let (_, locks) = store_and_locks();
    let revoke = async {
        sleep(ms(10)).await;
        locks.force_release(locks.once(("job", 1)).key().clone()).await.expect("revoked");
    };
    let runs = AtomicUsize::new(0);
    let work = async |_: HeldLock| sleep(SECOND * 5).await;
    let (lost, ()) = tokio::join!(locks.once(("job", 1)).run(work), revoke);
    assert!(matches!(lost, Err(RunError::Lost(_))), "{lost:?}");
    assert_eq!(run(&locks, &runs).await, OnceOutcome::Ran(0));
}

#[tokio::test(start_paused = true)]
async fn operator_sees_the_work_and_repeats_it() {
    let (store, locks) = store_and_locks();
    let runs = AtomicUsize::new(0);
    let status = async || {
        let status = locks.once(("job", 1)).inspect().await.expect("up");
        (status.holder().is_some(), status.record_left.is_some())
    };
    let forget = async || locks.once(("job", 1)).forget().await;
    assert_eq!((status().await, forget().await.expect("up")), ((false, false), false), "never run");
    tokio::join!(run(&locks, &runs), async {
        sleep(ms(10)).await;
        assert_eq!(status().await, (true, false), "it runs");
        match forget().await {
            Err(LockError::Busy { lease_left, ahead: 1, .. }) => assert!(lease_left > SECOND, "{lease_left:?}"),
            other => panic!("{other:?}"),
        }
    });
    assert_eq!((status().await, run(&locks, &runs).await), ((false, true), OnceOutcome::Already));
    assert!(forget().await.expect("up"));
    assert_eq!((status().await, run(&locks, &runs).await), ((false, false), OnceOutcome::Ran(1)));
    store.on(StoreOp::DeleteRecord).fault(Fault::Hang);
    assert!(matches!(forget().await, Err(LockError::Store(error)) if error.operation() == "delete-record"));
}

/// The lock of a caller has another name, whatever its tuple is.
#[tokio::test(start_paused = true)]
async fn lock_of_a_caller_is_not_that_of_work() {
    let (store, locks) = store_and_locks();
    let named = |namespace| LockKey::from((namespace, "job", 1));
    let mut held = Vec::new();
    for key in [named("once"), named("+once"), LockKey::from(("job", 1)), LockKey::raw("+once:job:1").expect("valid")] {
        held.push(locks.try_lock(key).await.expect("free"));
    }
    let runs = AtomicUsize::new(0);
    assert_eq!((run(&locks, &runs).await, store.held_count()), (OnceOutcome::Ran(0), 4));
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn the_record_is_left_although_a_reply_is_lost() {
    let (store, locks) = store_and_locks();
    let runs = AtomicUsize::new(0);
    store.on(StoreOp::Release).fault(Fault::LoseReply);
    assert_eq!(run(&locks, &runs).await, OnceOutcome::Ran(0));
    store.on(StoreOp::Release).fault(Fault::None);
    assert_eq!(run(&locks, &runs).await, OnceOutcome::Already);
    until("the release is repeated", async || store.on(StoreOp::Release).calls() > 1).await;
}

#[tokio::test(start_paused = true)]
async fn work_that_calls_itself_is_rejected() {
    let (_, locks) = store_and_locks();
    let inner = locks.once(("job", 1)).run(async |_| ());
    let nested = locks.once(("job", 1)).run(async |_| inner.await).await;
    let Ok(OnceOutcome::Ran(Err(RunError::NotStarted(LockError::WouldDeadlock)))) = nested else {
        panic!("{nested:?}")
    };
}

#[tokio::test(start_paused = true)]
async fn raw_key_is_another_occasion_than_its_text() {
    let (_, locks) = store_and_locks();
    assert_eq!(run(&locks, &AtomicUsize::new(0)).await, OnceOutcome::Ran(0));
    let raw = tower_lock::LockKey::raw("job:1").expect("a name");
    assert_eq!(locks.once(raw).run(async |_| 7).await.expect("a result"), OnceOutcome::Ran(7));
}

/// A guard of the same section outlives the work that leaves the record.
/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn record_is_left_when_the_last_guard_has_ended() {
    let (_, locks) = store_and_locks();
    let mut guard = None;
    let work = async |lock: HeldLock| guard = locks.lock(lock.key().clone()).await.ok();
    locks.once(("job", 1)).run(work).await.expect("a result");
    let busy = locks.once(("job", 1)).wait(Duration::ZERO).run(async |_| ()).await;
    assert!(matches!(busy, Err(RunError::NotStarted(LockError::Busy { .. }))), "{busy:?}");
    guard.expect("re-entered").release().await.expect("released");
    assert_eq!(run(&locks, &AtomicUsize::new(0)).await, OnceOutcome::Already);
}

// === lead ===

/// Spawns a process that leads until it is aborted, and logs the start of each term.
fn spawn_leader(
    tasks: &mut JoinSet<()>,
    locks: &LockManager,
    name: usize,
    terms: &Arc<Mutex<Vec<usize>>>,
) -> AbortHandle {
    let (locks, terms) = (locks.clone(), Arc::clone(terms));
    tasks.spawn(async move {
        locks
            .lead(("mover",), |_lock| {
                terms.lock().expect("not poisoned").push(name);
                pending::<()>()
            })
            .await;
    })
}

/// Guarantee: G20.
#[tokio::test(start_paused = true)]
async fn one_process_leads_and_another_one_takes_over() {
    let store = TestStore::new();
    let managers = [0, 1, 2].map(|_| LockManager::new(store.clone()));
    let (mut tasks, terms) = (JoinSet::new(), Arc::default());
    let handles: Vec<_> =
        managers.iter().enumerate().map(|(name, locks)| spawn_leader(&mut tasks, locks, name, &terms)).collect();
    let term = |n: usize| terms.lock().expect("not poisoned").get(n).copied();
    sleep(SECOND * 300).await;
    assert_eq!(terms.lock().expect("not poisoned").len(), 1, "the others wait");
    let first = term(0).expect("a leader");
    handles[first].abort();
    until("another one leads", async || term(1).is_some()).await;
    let second = term(1).expect("a leader");
    assert_ne!(first, second);
    managers[second].force_release(("mover",)).await.expect("revoked");
    until("the third one leads", async || term(2).is_some()).await;
    assert!(![first, second].contains(&term(2).expect("a leader")), "the second one pauses");
    for locks in &managers {
        locks.shutdown(SECOND).await;
    }
    while tasks.join_next().await.is_some() {}
    assert_eq!(store.held_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_leader_ends_with_the_shutdown() {
    let (_, locks) = store_and_locks();
    let (mut tasks, terms) = (JoinSet::new(), Arc::default());
    spawn_leader(&mut tasks, &locks, 0, &terms);
    until("it leads", async || !terms.lock().expect("not poisoned").is_empty()).await;
    assert_eq!(locks.shutdown(SECOND * 60).await, 0, "the work is dropped at once");
    tasks.join_next().await.expect("one task").expect("no panic");
    // After the shutdown has started.
    locks.lead(("mover",), |_| async { panic!("it shuts down") }).await;
}

/// Work that returns, and a store that fails, cause pauses of 1 s to 45 s.
#[tokio::test(start_paused = true)]
async fn a_leader_pauses_after_each_short_term() {
    let (store, locks) = store_and_locks();
    let terms = AtomicUsize::new(0);
    let lead = locks.lead(("mover",), |_| async { _ = terms.fetch_add(1, SeqCst) });
    let ended = tokio::time::timeout(SECOND * 3_600, lead).await;
    assert!(ended.is_err(), "it leads until the shutdown");
    let count = terms.load(SeqCst);
    assert!((70..140).contains(&count), "{count}");
    store.fault_all(Fault::Refuse);
    let before = store.on(StoreOp::Acquire).calls();
    let lead = locks.lead(("mover",), |_| ready(()));
    let _ = tokio::time::timeout(SECOND * 3_600, lead).await;
    let calls = store.on(StoreOp::Acquire).calls() - before;
    assert!((70..140).contains(&calls), "{calls}");
}
