//! A call can be dropped at every await: the key becomes free, and nothing of the call is left.

use std::{future::IntoFuture, pin::Pin, task::Poll, time::Duration};

use tokio::time::{Instant, sleep};
use tower_lock::{
    LockError, LockGuard, LockManager,
    lock::LockFuture,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    locks::{key, store_and_locks},
    wait::{settle, soon},
};

/// A call, polled once.
async fn asked(locks: &LockManager) -> Pin<Box<LockFuture>> {
    let mut call = Box::pin(locks.lock(key()).into_future());
    assert!(futures_util::poll!(call.as_mut()).is_pending());
    call
}

/// Holds the calls before or after the store executes them.
fn pause(store: &TestStore, op: StoreOp, before: bool) {
    if before { store.on(op).pause_before() } else { store.on(op).pause_after() }
}

/// Checks that nothing is left in the process and the store, and that the key is free.
async fn assert_free(store: &TestStore, all: &[&LockManager], what: &str) {
    sleep(Duration::from_secs(2)).await;
    for locks in all {
        assert_eq!(locks.size(), (0, 0), "{what}");
    }
    assert_eq!(store.memory().size(), 0, "{what}");
    drop(all[0].try_lock(key()).await.unwrap_or_else(|error| panic!("{what}: {error}")).release());
    settle().await;
}

/// What the others do when a caller in the first process drops its call.
#[derive(Clone, Copy, Debug, Default)]
struct Situation {
    /// The process of the holder.
    holder: Option<usize>,
    /// The process of the next waiter.
    next: Option<usize>,
    /// The holder releases before the call is dropped, and not after it.
    releases_first: bool,
    /// A call of the store is held, before or after the store executes it.
    held_call: Option<(StoreOp, bool)>,
}

impl Situation {
    async fn cancel(self) {
        let (store, one) = store_and_locks();
        let all = [one, LockManager::new(store.clone()), LockManager::new(store.clone())];
        let mut held = None;
        if let Some(process) = self.holder {
            held = Some(all[process].lock(key()).await.expect("free"));
        }
        let waits = || self.held_call.iter().for_each(|(op, before)| pause(&store, *op, *before));
        if held.is_none() {
            waits();
        }
        let call = asked(&all[0]).await;
        settle().await;
        let mut next = None;
        if let Some(process) = self.next {
            next = Some(asked(&all[process]).await);
        }
        let yields = matches!(self.held_call, Some((StoreOp::Yield, _)));
        if yields {
            // Longer than the batch of a process.
            sleep(Duration::from_millis(150)).await;
        }
        if self.releases_first {
            waits();
            held.take().expect("a holder").release().await.expect("up");
        }
        if let Some((op, _)) = self.held_call {
            store.on(op).wait_until_paused().await;
        }
        if yields {
            assert!(matches!(all[0].try_lock(key()).await, Err(LockError::Busy { .. })), "refused without the store");
        }
        let left = Instant::now();
        drop(call);
        settle().await;
        if held.is_some() {
            let elsewhere = self.next.is_some_and(|next| Some(next) != self.holder);
            let waiting = all[1].inspect(key()).await.expect("up").waiting;
            assert_eq!(waiting, usize::from(elsewhere), "{self:?}: its queue entry is removed at once");
        }
        self.held_call.iter().for_each(|(op, _)| store.on(*op).resume());
        if let Some(held) = held {
            held.release().await.expect("up");
        }
        if let Some(next) = next {
            let guard = soon("a grant of the next", next).await.expect("a grant");
            assert_eq!(left.elapsed(), Duration::ZERO, "{self:?}: no lock-delay");
            guard.release().await.expect("up");
        }
        assert_free(&store, &all.each_ref(), &format!("{self:?}")).await;
        if self.holder.is_none() {
            assert_eq!(store.on(StoreOp::Release).calls(), 2, "released once for any reply; and the last one");
        }
    }
}

/// Guarantee: G7.
#[tokio::test(start_paused = true)]
async fn call_can_be_cancelled_at_each_instant() {
    let none = Situation::default();
    for before in [true, false] {
        Situation { held_call: Some((StoreOp::Acquire, before)), ..none }.cancel().await;
    }
    // In the queue of the process or of the store, with and without a waiter behind it.
    for (holder, next) in [(0, None), (0, Some(0)), (0, Some(1)), (1, None), (1, Some(0)), (1, Some(2))] {
        let queued = Situation { holder: Some(holder), next, ..none };
        queued.cancel().await;
        // The offer and the cancellation cross: the call is granted, and was not polled.
        let granted = Situation { releases_first: true, ..queued };
        granted.cancel().await;
        let op = if holder == 0 { StoreOp::Yield } else { StoreOp::Acquire };
        for before in [true, false] {
            Situation { held_call: Some((op, before)), ..granted }.cancel().await;
        }
    }
}

/// Polled once and abandoned: a `select!` loop that polls other branches, `mem::forget`.
/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn grant_that_is_not_polled_goes_to_the_next_waiter() {
    for another_process in [false, true] {
        let (store, locks) = store_and_locks();
        let other = LockManager::new(store.clone());
        let held = locks.lock(key()).await.expect("free");
        let mut late = Box::pin(locks.lock(key()).wait(Duration::from_secs(5)).into_future());
        assert!(futures_util::poll!(late.as_mut()).is_pending());
        let next = if another_process { &other } else { &locks };
        let next = tokio::spawn(next.lock(key()).into_future());
        settle().await;
        held.release().await.expect("up");
        let released = Instant::now();
        let guard = soon("a grant", next).await.expect("no panic").expect("a grant");
        let took = released.elapsed();
        assert!(took >= Duration::from_secs(3) && took < Duration::from_secs(5), "{took:?}");
        let Err(LockError::TimedOut { waited, .. }) = late.await else { panic!("the grant arrived too late") };
        assert_eq!(waited, Duration::from_secs(5));
        guard.release().await.expect("up");
        assert_free(&store, &[&locks, &other], "not picked up").await;
    }
}

/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn forgotten_call_frees_its_key_and_does_not_delay_shutdown() {
    let (store, locks) = store_and_locks();
    for _ in 0..2 {
        let call = asked(&locks).await;
        std::mem::forget(call);
    }
    settle().await;
    assert_eq!(locks.held_count(), 1);
    assert_eq!(locks.shutdown(Duration::from_secs(10)).await, 0);
    assert_eq!(store.held_count(), 0);
}

/// It is polled slightly late: the caller has the grant, and keeps it.
/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn grant_that_is_polled_in_time_is_kept() {
    let (store, locks) = store_and_locks();
    let mut call = asked(&locks).await;
    sleep(Duration::from_millis(2_900)).await;
    let guard = soon("it was granted", call.as_mut()).await.expect("in time");
    sleep(Duration::from_secs(120)).await;
    assert!(!guard.held_lock().remaining().is_zero() && store.held_count() == 1);
    guard.release().await.expect("up");
    assert_free(&store, &[&locks], "in time").await;
}

/// The process was stopped (SIGSTOP, a suspended machine) while the store replied: when it goes on,
/// all timers fire before the reply is handled.
/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn stopped_call_without_wait_never_times_out() {
    let (store, locks) = store_and_locks();
    let other = LockManager::new(store.clone());
    let (acquire, release) = (store.on(StoreOp::Acquire), store.on(StoreOp::Release));
    acquire.pause_after();
    let mut call = Box::pin(locks.try_lock(key()).into_future());
    assert!(futures_util::poll!(call.as_mut()).is_pending());
    acquire.wait_until_paused().await;
    acquire.resume();
    release.pause_after();
    // Longer than the lease: the grant has expired when its reply is handled.
    tokio::time::advance(Duration::from_secs(34)).await;
    release.wait_until_paused().await;
    assert!(futures_util::poll!(call.as_mut()).is_pending(), "the reply of the store is still missing");
    let _held = other.try_lock(key()).await.expect("its lease has expired");
    release.resume();
    match call.await {
        Err(LockError::Busy { ahead: 1, lease_left, .. }) => {
            assert!(lease_left > Duration::from_secs(25), "{lease_left:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn cancel_without_a_store_reply() {
    for fault in [Fault::Fail, Fault::LoseReply, Fault::Hang, Fault::Delay(Duration::from_millis(300))] {
        for after in [1, 400, 510, 700, 990] {
            let (store, locks) = store_and_locks();
            store.on(StoreOp::Acquire).fault(fault);
            let call = asked(&locks).await;
            sleep(Duration::from_millis(after)).await;
            drop(call);
            store.on(StoreOp::Acquire).fault(Fault::None);
            assert_free(&store, &[&locks], &format!("{fault:?}, {after} ms")).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn cancel_during_release() {
    for before in [true, false] {
        let (store, locks) = store_and_locks();
        let guard: LockGuard = locks.lock(key()).await.expect("free");
        pause(&store, StoreOp::Release, before);
        let mut release = Box::pin(guard.release());
        assert_eq!(futures_util::poll!(release.as_mut()).map(|_| ()), Poll::Pending);
        drop(release);
        let behind = asked(&locks).await;
        settle().await;
        drop(behind);
        store.on(StoreOp::Release).resume();
        assert_free(&store, &[&locks], "released").await;
    }
}

/// Its timeout and its grant come at the same time.
#[tokio::test(start_paused = true)]
async fn cancel_at_the_timeout() {
    let (store, locks) = store_and_locks();
    for ms in [99, 100, 101] {
        let held = locks.lock(key()).await.expect("free");
        let waits = tokio::spawn(locks.lock(key()).wait(Duration::from_millis(100)).into_future());
        settle().await;
        sleep(Duration::from_millis(ms)).await;
        drop(held.release());
        match waits.await.expect("no panic") {
            Ok(guard) => drop(guard.release()),
            Err(LockError::TimedOut { waited, .. }) => assert_eq!(waited, Duration::from_millis(100)),
            Err(other) => panic!("{other}"),
        }
        assert_free(&store, &[&locks], "late").await;
    }
}

/// Calls in flight end with their runtime; other runtimes find the key free after a lease at the
/// latest.
#[test]
fn cancel_by_runtime_shutdown() {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    for (verb, before) in [
        (StoreOp::Acquire, true),
        (StoreOp::Acquire, false),
        (StoreOp::Release, true),
        (StoreOp::Release, false),
        (StoreOp::Yield, false),
    ] {
        let (store, locks) = store_and_locks();
        let other = LockManager::new(store.clone());
        let first = runtime();
        let kept = first.block_on(async {
            let mut kept = Vec::new();
            if verb == StoreOp::Acquire {
                pause(&store, verb, before);
                kept.push(asked(&locks).await);
            } else {
                let held = locks.lock(key()).await.expect("free");
                if verb == StoreOp::Yield {
                    kept.push(asked(&locks).await);
                    sleep(Duration::from_millis(150)).await;
                }
                pause(&store, verb, before);
                drop(held.release());
            }
            store.on(verb).wait_until_paused().await;
            kept
        });
        drop(first);
        drop(kept);
        store.on(verb).resume();
        runtime().block_on(async {
            for locks in [&locks, &other, &locks] {
                let guard = locks.lock(key()).wait(Duration::from_secs(40)).await;
                let guard = guard.unwrap_or_else(|error| panic!("{verb:?}, {before}: {error}"));
                guard.release().await.expect("up");
            }
        });
    }
}

/// Timed out waiters need no grant: all of them are skipped at once, not one in 3 s.
/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn forgotten_queued_calls_are_skipped_after_their_timeout() {
    // In the queue of the process, and in the queue of the store.
    for is_elsewhere in [false, true] {
        let (store, locks) = store_and_locks();
        let other = LockManager::new(store.clone());
        let held = if is_elsewhere { &other } else { &locks }.lock(key()).await.expect("free");
        for _ in 0..50 {
            let mut call = Box::pin(locks.lock(key()).wait(Duration::from_secs(1)).into_future());
            assert!(futures_util::poll!(call.as_mut()).is_pending());
            std::mem::forget(call);
        }
        sleep(Duration::from_secs(5)).await;
        let next = tokio::spawn(locks.lock(key()).wait(Duration::from_secs(600)).into_future());
        settle().await;
        held.release().await.expect("up");
        let released = Instant::now();
        let guard = next.await.expect("no panic").expect("a grant");
        assert_eq!(released.elapsed(), Duration::ZERO, "50 timed out calls");
        guard.release().await.expect("up");
        assert_free(&store, &[&locks, &other], "forgotten").await;
    }
}
