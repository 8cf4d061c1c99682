//! Several processes want one key: handles on one store behave like instances of a service.

use std::{
    future::IntoFuture,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tower_lock::{
    LockError, LockManager, MemoryStore,
    lock::QueueBound,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    locks::{key, store_and_locks},
    store::{Intercept, InterceptedStore},
    wait::{settle, soon},
};

/// Calls without replies, from when the flag is set.
#[derive(Debug)]
struct Stall(Arc<AtomicBool>);

impl Intercept for Stall {
    fn replies(&self) -> bool {
        !self.0.load(SeqCst)
    }
}

fn two_processes() -> (TestStore, LockManager, LockManager) {
    let (store, one) = store_and_locks();
    let two = LockManager::new(store.clone());
    (store, one, two)
}

/// Single flight: calls that arrive during an acquire share its reply.
#[tokio::test(start_paused = true)]
async fn concurrent_requests_for_a_free_key_share_one_acquire() {
    let (store, locks) = store_and_locks();
    store.on(StoreOp::Acquire).pause_after();
    let mut calls = JoinSet::new();
    for _ in 0..100 {
        calls.spawn(locks.try_lock(key()).into_future());
    }
    store.on(StoreOp::Acquire).wait_until_paused().await;
    settle().await;
    store.on(StoreOp::Acquire).resume();
    let (mut guards, mut refused) = (Vec::new(), 0);
    while let Some(call) = calls.join_next().await {
        match call.expect("no panic") {
            Ok(guard) => guards.push(guard),
            Err(LockError::Busy { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!((guards.len(), refused, store.on(StoreOp::Acquire).calls()), (1, 99, 1));
}

#[tokio::test(start_paused = true)]
async fn local_rejection_costs_no_store_call() {
    let (store, one, two) = two_processes();
    let held = one.lock(key()).await.expect("free");
    let waiter = tokio::spawn(two.lock(key()).into_future());
    settle().await;
    let calls = store.on(StoreOp::Acquire).calls();
    for locks in [&one, &two] {
        for _ in 0..100 {
            assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })));
        }
    }
    assert_eq!(store.on(StoreOp::Acquire).calls(), calls);
    held.release().await.expect("up");
    drop(waiter.await.expect("no panic").expect("a grant").release());
}

#[tokio::test(start_paused = true)]
async fn local_handoff_needs_no_store_call() {
    let (store, locks) = store_and_locks();
    let mut tasks = JoinSet::new();
    let tokens = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..50 {
        let (locks, tokens) = (locks.clone(), Arc::clone(&tokens));
        tasks.spawn(async move {
            let guard = locks.lock(key()).await.expect("a grant");
            tokens.lock().expect("whole").push(guard.fencing_token());
            tokio::task::yield_now().await;
            guard.release().await.expect("up");
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.expect("no panic");
    }
    assert_eq!([StoreOp::Acquire, StoreOp::Yield, StoreOp::Release].map(|verb| store.on(verb).calls()), [1, 0, 1]);
    assert!(
        tokens.lock().expect("whole").is_sorted_by(|a, b| a < b),
        "each section has a larger token than the one before"
    );
}

/// After 100 ms or 1,000 sections at the latest; a fence has 1,024 sequence numbers.
#[tokio::test(start_paused = true)]
async fn local_handoffs_yield_every_100_ms_and_every_1000() {
    for (sections, takes, yields) in [(2_500, Duration::ZERO, 2), (50, Duration::from_millis(10), 4)] {
        let (store, locks) = store_and_locks();
        let mut last = None;
        let mut calls = (0..2).map(|_| locks.lock(key()).into_future()).map(Box::pin).collect::<Vec<_>>();
        for waiting in &mut calls {
            let _ = futures_util::poll!(waiting.as_mut());
        }
        for _ in 0..sections {
            let guard = calls.remove(0).await.expect("a grant");
            assert!(last < Some(guard.fencing_token()));
            last = Some(guard.fencing_token());
            calls.push(Box::pin(locks.lock(key()).into_future()));
            let _ = futures_util::poll!(calls[1].as_mut());
            sleep(takes).await;
            drop(guard.release());
        }
        let asked = store.on(StoreOp::Yield).calls();
        assert!((yields..=yields + 1).contains(&asked), "{asked} acquires for {sections} sections");
    }
}

/// One process floods with 64 waiters; the other one has a single waiter.
/// Guarantee: G5.
#[tokio::test(start_paused = true)]
async fn process_waits_at_most_one_handoff_window_per_predecessor() {
    const SECTION: Duration = Duration::from_millis(20);
    let (store, flood, single) = two_processes();
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for _ in 0..64 {
        let (flood, stop) = (flood.clone(), Arc::clone(&stop));
        tasks.spawn(async move {
            while !stop.load(SeqCst) {
                let guard = flood.lock(key()).await.expect("a grant within half a minute");
                sleep(SECTION).await;
                guard.release().await.expect("up");
            }
        });
    }
    sleep(Duration::from_secs(1)).await;
    for _ in 0..20 {
        let asked = Instant::now();
        let guard = soon("a grant of the single waiter", single.lock(key()).into_future()).await.expect("a grant");
        let waited = asked.elapsed();
        // A tenth of a second, the running section, and the two calls.
        assert!(waited <= Duration::from_millis(100) + SECTION + Duration::from_millis(10), "{waited:?}");
        sleep(SECTION).await;
        guard.release().await.expect("up");
    }
    stop.store(true, SeqCst);
    while let Some(task) = tasks.join_next().await {
        task.expect("no panic");
    }
    settle().await;
    assert_eq!((store.held_count(), flood.size(), single.size()), (0, (0, 0), (0, 0)));
}

/// I7: events are hints; the data of the store decides.
#[tokio::test(start_paused = true)]
async fn events_may_be_lost_duplicated_and_late() {
    for (events, at_most) in [
        (Fault::None, Duration::from_millis(10)),
        (Fault::Duplicate, Duration::from_millis(10)),
        // About a second: the next poll finds it.
        (Fault::Fail, Duration::from_millis(1_210)),
        (Fault::Delay(Duration::from_secs(20)), Duration::from_millis(1_210)),
    ] {
        let (store, one, two) = two_processes();
        store.fault_events(events);
        for _ in 0..3 {
            let held = one.lock(key()).await.expect("free");
            let waiter = tokio::spawn(two.lock(key()).into_future());
            settle().await;
            let asked = store.on(StoreOp::Acquire).calls();
            sleep(Duration::from_millis(4_300)).await;
            let polls = store.on(StoreOp::Acquire).calls() - asked;
            assert!((3..=5).contains(&polls), "{events:?}: about one poll a second: {polls}");
            let freed = Instant::now();
            held.release().await.expect("up");
            let guard = soon("a grant", waiter).await.expect("no panic").expect("a grant");
            assert!(freed.elapsed() <= at_most, "{events:?}: {:?}", freed.elapsed());
            // A late event frees nothing, for any id.
            sleep(Duration::from_secs(25)).await;
            assert!(guard.held_lock().remaining() > Duration::from_secs(10) && store.held_count() == 1);
            guard.release().await.expect("up");
        }
        sleep(Duration::from_secs(30)).await;
        assert_eq!((store.memory().size(), one.size(), two.size()), (0, (0, 0), (0, 0)), "{events:?}");
    }
}

/// A process keeps its queue position when one of its waiters leaves.
/// Guarantee: G5.
#[tokio::test(start_paused = true)]
async fn process_keeps_its_queue_position_while_it_has_waiters() {
    let (store, one, two) = two_processes();
    let three = LockManager::new(store.clone());
    let held = one.lock(key()).await.expect("free");
    let leaves = tokio::spawn(two.lock(key()).into_future());
    settle().await;
    let stays = tokio::spawn(two.lock(key()).into_future());
    settle().await;
    let later = tokio::spawn(three.lock(key()).into_future());
    settle().await;
    leaves.abort();
    sleep(Duration::from_secs(3)).await;
    held.release().await.expect("up");
    settle().await;
    assert!(stays.is_finished() && !later.is_finished(), "first come, first served");
    drop(stays.await.expect("no panic").expect("a grant").release());
    drop(soon("a grant of the last", later).await.expect("no panic").expect("a grant").release());
}

/// Guarantee: G7.
#[tokio::test(start_paused = true)]
async fn cancelled_waiter_leaves_the_store_queue() {
    let (store, one, two) = two_processes();
    let _held = one.lock(key()).await.expect("free");
    let waiter = tokio::spawn(two.lock(key()).into_future());
    sleep(Duration::from_millis(100)).await;
    assert_eq!(one.inspect(key()).await.expect("up").waiting, 1);
    waiter.abort();
    settle().await;
    assert_eq!((one.inspect(key()).await.expect("up").waiting, two.size()), (0, (0, 0)));
    let error = two.lock(key()).wait(Duration::from_secs(2)).await.expect_err("held");
    assert!(matches!(error, LockError::TimedOut { .. }));
    settle().await;
    assert_eq!((one.inspect(key()).await.expect("up").waiting, two.size()), (0, (0, 0)));
    assert_eq!(store.held_count(), 1);
}

/// A process that exists and does not respond costs an offer, and no lease.
#[tokio::test(start_paused = true)]
async fn process_stopped_at_its_turn_costs_an_offer_and_no_lease() {
    let store = TestStore::new();
    let (one, two) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let held = one.lock(key()).await.expect("free");
    // Its calls hang from now on.
    let stalls = Arc::new(AtomicBool::new(false));
    let stopped = LockManager::new(InterceptedStore::new(Arc::new(store), Stall(Arc::clone(&stalls))));
    let waiter = tokio::spawn(stopped.lock(key()).wait(Duration::from_secs(100)).into_future());
    settle().await;
    stalls.store(true, SeqCst);
    let next = tokio::spawn(two.lock(key()).into_future());
    settle().await;
    let freed = Instant::now();
    held.release().await.expect("up");
    let guard = soon("a grant of the next", next).await.expect("no panic").expect("a grant");
    assert!(freed.elapsed() <= Duration::from_millis(4_010), "three seconds and a lock-delay: {:?}", freed.elapsed());
    guard.release().await.expect("up");
    waiter.abort();
}

/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn silent_store_ends_no_wait_early() {
    for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply] {
        let (store, one, two) = two_processes();
        let held = one.lock(key()).await.expect("free");
        let waits = |wait| tokio::spawn(two.lock(key()).wait(Duration::from_secs(wait)).into_future());
        let (began, waiter, patient) = (Instant::now(), waits(10), waits(70));
        sleep(Duration::from_secs(3)).await;
        store.fault_all(fault);
        let error = waiter.await.expect("no panic").expect_err("silent");
        assert!(matches!(error, LockError::Store(_)), "{fault:?}: {error}");
        assert_eq!(began.elapsed().as_millis() / 10, 1_000, "{fault:?}");
        let asked = Instant::now();
        let error = two.try_lock(("n", 8)).await.expect_err("silent");
        assert!(matches!(error, LockError::Store(_)), "{fault:?}: {error}");
        assert!(asked.elapsed() <= Duration::from_millis(1_010), "{fault:?}: {:?}", asked.elapsed());
        store.fault_all(Fault::None);
        drop(held.release());
        drop(patient.await.expect("no panic").expect("a grant after the outage").release());
        sleep(Duration::from_secs(60)).await;
        assert_eq!((store.memory().size(), one.size(), two.size()), (0, (0, 0), (0, 0)), "{fault:?}: no data is left");
        drop(two.try_lock(key()).await.expect("it recovers without a restart").release());
    }
}

/// In memory the thread that releases a key also grants it to the next process, with or without a
/// runtime.
#[tokio::test(start_paused = true)]
async fn grant_outside_a_runtime_is_renewed() {
    let store = Arc::new(MemoryStore::new());
    let (one, two) = (LockManager::new(Arc::clone(&store)), LockManager::new(store));
    let held = one.lock(key()).await.expect("free");
    let waiter = tokio::spawn(two.lock(key()).into_future());
    settle().await;
    std::thread::spawn(move || drop(held.release())).join().expect("no panic");
    let guard = waiter.await.expect("no panic").expect("a grant");
    sleep(Duration::from_secs(300)).await;
    assert!(guard.held_lock().remaining() > Duration::from_secs(15));
}

/// I8: a repetition was granted, and the key handed on; then the first acquire runs.
#[tokio::test(start_paused = true)]
async fn late_acquire_and_lost_yield_leave_the_key_free() {
    let faults = [Fault::None, Fault::Fail, Fault::LoseReply, Fault::Hang, Fault::Delay(Duration::from_millis(300))];
    let cases = faults.iter().flat_map(|fault| [true, false].map(|others| (fault, others)));
    for ((fault, others), is_late) in cases.flat_map(|case| [true, false].map(|is_late| (case, is_late))) {
        let (store, one, two) = two_processes();
        if is_late {
            store.on(StoreOp::Acquire).fault(Fault::Delay(Duration::from_millis(450)));
        }
        let first = tokio::spawn(one.lock(key()).into_future());
        sleep(Duration::from_millis(1)).await;
        store.on(StoreOp::Acquire).fault(Fault::None);
        let first = first.await.expect("no panic").expect("the repeat was granted");
        let second = tokio::spawn(one.lock(key()).into_future());
        let other = others.then(|| tokio::spawn(two.lock(key()).into_future()));
        sleep(Duration::from_millis(110)).await;
        store.on(StoreOp::Yield).fault(*fault);
        drop(first.release());
        if let Some(other) = other {
            other.await.expect("no panic").expect("a grant").release().await.expect("up");
        }
        second.await.expect("no panic").expect("a grant").release().await.expect("up");
        sleep(Duration::from_secs(2)).await;
        let what = format!("{fault:?}, {others}, {is_late}");
        assert_eq!((store.memory().size(), one.size(), two.size()), (0, (0, 0), (0, 0)), "{what}");
    }
}

/// I10: the store blocks the key as the running section needs it, not as the previous one did.
#[tokio::test(start_paused = true)]
async fn handoff_and_yield_keep_the_next_lock_delay() {
    const LONG: Duration = Duration::from_secs(60);
    for first_delay in [Duration::from_secs(1), LONG] {
        for waited in [10, 110] {
            let (_store, locks) = store_and_locks();
            let first = locks.lock(key()).lock_delay(first_delay).await.expect("free");
            let second = tokio::spawn(locks.lock(key()).lock_delay(LONG).into_future());
            sleep(Duration::from_millis(waited)).await;
            drop(first.release());
            let second = second.await.expect("no panic").expect("a grant");
            let kept = locks.inspect(key()).await.expect("up").remaining;
            assert!(kept > LONG + Duration::from_secs(29), "{first_delay:?}, {waited} ms: {kept:?}");
            sleep(Duration::from_secs(15)).await;
            let kept = locks.inspect(key()).await.expect("up").remaining;
            assert!(kept > LONG + Duration::from_secs(20), "renewed: {kept:?}");
            drop(second.release());
        }
    }
}

/// A call is rejected because too many wait for other keys; this key is free.
#[tokio::test(start_paused = true)]
async fn free_key_is_granted_though_other_queues_are_full() {
    let locks = LockManager::in_memory();
    let (mut held, mut waiting) = (Vec::new(), JoinSet::new());
    for n in 0..50 {
        held.push(locks.lock(("n", n)).await.expect("free"));
        for _ in 0..200 {
            waiting.spawn(locks.lock(("n", n)).into_future());
        }
    }
    // When all tasks only wait.
    sleep(Duration::from_millis(1)).await;
    let waiting_now = locks.size().1;
    assert!((7_000..10_000).contains(&waiting_now), "{waiting_now}");
    let error = locks.lock(("n", 0)).await.expect_err("full");
    assert!(matches!(error, LockError::QueueFull { bound: QueueBound::Process, .. }), "{error}");
    held.push(locks.lock(("n", 50)).await.expect("free"));
    waiting.spawn(locks.lock(("n", 50)).into_future());
    sleep(Duration::from_millis(1)).await;
    assert_eq!(locks.size(), (51, waiting_now + 1), "a first waiter has an entry");
    for _ in 0..3 {
        locks.try_lock(key()).await.expect("free").release().await.expect("up");
    }
}
