//! The invariants of the lock state machine by number, tested through the public API.

use std::{
    future::IntoFuture,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::time::{Instant, sleep};
use tower_lock::{
    LockError, LockLost, LockManager,
    lock::{QueueBound, ReleaseOutcome},
    test_util::{Clock, Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    locks::{key, store_and_locks},
    wait::{settle, soon},
};

/// The usable part of a lease of 30 seconds.
const SAFE: Duration = Duration::from_millis(29_698);

/// Guarantee: G2.
#[tokio::test(start_paused = true)]
async fn i1_a_key_is_freed_only_for_the_acquisition_that_holds_it() {
    let store = TestStore::new();
    let (one, two) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    // Every release arrives twice, the second time late: the next holder has the key by then.
    for fault in [Fault::Duplicate, Fault::Delay(Duration::from_millis(5)), Fault::LoseReply] {
        let guard = one.lock(key()).await.expect("free");
        let next = tokio::spawn(two.lock(key()).into_future());
        settle().await;
        store.on(StoreOp::Release).fault(fault);
        drop(guard.release());
        let held = soon("a grant of the next", next).await.expect("no panic").expect("a grant");
        sleep(Duration::from_secs(45)).await;
        assert!(held.held_lock().remaining() > Duration::from_secs(15), "{fault:?}: still held");
        assert!(matches!(one.try_lock(key()).await, Err(LockError::Busy { .. })));
        store.on(StoreOp::Release).fault(Fault::None);
        assert_ne!(held.release().await.expect("up"), ReleaseOutcome::NotHeld, "{fault:?}");
    }
}

/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn i2_releases_under_way_are_bounded_and_holders_are_not() {
    const BOUND: usize = 10_000;
    let (store, locks) = store_and_locks();
    let releases = store.on(StoreOp::Release);
    releases.pause_before();
    for n in 0..9_000 {
        drop(locks.try_lock(("n", n)).await.expect("free").release());
    }
    let mut guards = Vec::new();
    for n in 9_000..14_000 {
        guards.push(locks.try_lock(("n", n)).await.expect("holders do not count"));
    }
    for guard in guards {
        drop(guard.release());
    }
    settle().await;
    assert!(releases.calls() <= BOUND && releases.calls() > BOUND - 200, "{} are under way", releases.calls());
    assert_eq!(locks.size(), (14_000, 0), "the rest waits");
    let acquires = store.on(StoreOp::Acquire).calls();
    let error = locks.lock(key()).await.expect_err("too many are pending");
    assert!(matches!(&error, LockError::Store(error) if error.operation() == "acquire"), "{error:?}");
    assert_eq!(store.on(StoreOp::Acquire).calls(), acquires);
    // All are sent, each once, as others end.
    releases.resume();
    sleep(Duration::from_secs(1)).await;
    assert_eq!((locks.size(), releases.calls(), store.held_count()), ((0, 0), 14_000, 0));
    drop(locks.lock(key()).await.expect("capacity again").release());
}

/// A store that does not reply frees no release, and each of them has its turn.
/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn i2_waiting_releases_are_sent_after_an_outage() {
    let (store, locks) = store_and_locks();
    let guards = futures_util::future::try_join_all((0..12_000).map(|n| locks.try_lock(("n", n)).into_future()));
    let guards = guards.await.expect("free");
    store.on(StoreOp::Release).fault(Fault::Hang);
    for guard in guards {
        drop(guard.release());
    }
    sleep(Duration::from_secs(5)).await;
    store.on(StoreOp::Release).fault(Fault::None);
    sleep(Duration::from_secs(5)).await;
    assert_eq!((locks.size(), store.held_count()), ((0, 0), 0));
}

#[tokio::test(start_paused = true)]
async fn i3_a_deadline_counts_from_before_its_request_was_sent() {
    const SLOW: Duration = Duration::from_millis(450);
    let store = TestStore::new();
    let (one, two) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    for verb in [StoreOp::Acquire, StoreOp::Renew, StoreOp::Yield] {
        store.on(verb).latency(SLOW);
    }
    // An acquire.
    let guard = one.lock(key()).await.expect("free");
    assert_eq!(guard.held_lock().remaining(), SAFE - SLOW);
    // A renewal.
    sleep(Duration::from_millis(10_100)).await;
    let left = guard.held_lock().remaining();
    assert!(left <= SAFE - SLOW && left > SAFE - SLOW - Duration::from_millis(150), "{left:?}");
    // A yield that goes on.
    let next = tokio::spawn(one.lock(key()).into_future());
    settle().await;
    drop(guard.release());
    let guard = next.await.expect("no panic").expect("a grant");
    assert_eq!(guard.held_lock().remaining(), SAFE - SLOW);
    // A claim of what was offered.
    let next = tokio::spawn(two.lock(key()).into_future());
    sleep(Duration::from_millis(500)).await;
    drop(guard.release());
    let guard = next.await.expect("no panic").expect("a grant");
    assert_eq!(guard.held_lock().remaining(), SAFE - SLOW);
}

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn i4_held_only_before_a_deadline_that_only_replies_extend() {
    let (store, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    let view = guard.held_lock();
    for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply, Fault::Delay(Duration::from_millis(100))] {
        store.on(StoreOp::Renew).fault(fault);
        let before = view.remaining();
        sleep(Duration::from_secs(3)).await;
        assert_eq!(view.remaining(), before - Duration::from_secs(3), "{fault:?}: no reply");
        assert_eq!(guard.hold_count(), 1);
        sleep(Duration::from_secs(9)).await;
        assert!(view.remaining() < SAFE - Duration::from_secs(11), "{fault:?}: not extended");
        store.on(StoreOp::Renew).fault(Fault::None);
        sleep(Duration::from_secs(2)).await;
        assert!(view.remaining() > Duration::from_secs(27), "{fault:?}: extended by a reply: {:?}", view.remaining());
    }
}

/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn i5_loss_fires_by_the_deadline_and_is_final() {
    for fault in [Fault::Fail, Fault::Hang, Fault::LoseReply] {
        let (store, locks) = store_and_locks();
        let guard = locks.lock(key()).await.expect("free");
        let (view, began) = (guard.held_lock(), Instant::now());
        store.on(StoreOp::Renew).fault(fault);
        assert_eq!((view.lost().await, began.elapsed()), (LockLost::Expired, SAFE + Duration::from_micros(0)));
        // The store responds again; the key may even be granted again.
        store.on(StoreOp::Renew).fault(Fault::None);
        let again = locks.lock(key()).await.expect("a grant");
        for _ in 0..20 {
            sleep(Duration::from_secs(5)).await;
            assert_eq!((view.remaining(), view.lost().await), (Duration::ZERO, LockLost::Expired));
        }
        assert!(
            view.ensure_remaining(Duration::ZERO).is_err()
                && again.held_lock().ensure_remaining(Duration::ZERO).is_ok()
        );
        assert!(began.elapsed() > SAFE && guard.release().await.expect("up") == ReleaseOutcome::NotHeld);
    }
}

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn i6_the_deadline_is_checked_before_every_poll() {
    let clock = Clock::default();
    let store = TestStore::with_clock(clock.clone());
    let locks = LockManager::builder(store).clock(clock.clone()).build();
    for jump in [SAFE - Duration::from_millis(1), SAFE] {
        let guard = locks.lock(key()).lock_delay(Duration::ZERO).await.expect("free");
        let polls = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&polls);
        // It wakes itself all the time, so that the last poll would be too late.
        let work = std::future::poll_fn(move |cx| {
            counts.fetch_add(1, SeqCst);
            cx.waker().wake_by_ref();
            std::task::Poll::<()>::Pending
        });
        let mut work = std::pin::pin!(guard.while_held(work));
        assert!(futures_util::poll!(work.as_mut()).is_pending());
        clock.jump(jump);
        let polled = futures_util::poll!(work.as_mut());
        let in_time = jump < SAFE;
        assert_eq!((polled.is_pending(), polls.load(SeqCst)), (in_time, if in_time { 2 } else { 1 }));
    }
}

/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn i7_events_are_hints_and_the_store_decides() {
    for events in [Fault::Fail, Fault::Duplicate, Fault::Delay(Duration::from_millis(700))] {
        let store = TestStore::new();
        store.fault_events(events);
        let all = [LockManager::new(store.clone()), LockManager::new(store.clone()), LockManager::new(store.clone())];
        let inside = Arc::new(AtomicUsize::new(0));
        let mut tasks = tokio::task::JoinSet::new();
        for locks in &all {
            for _ in 0..5 {
                let (locks, inside) = (locks.clone(), Arc::clone(&inside));
                tasks.spawn(async move {
                    let guard = locks.lock(key()).await.expect("a grant");
                    assert_eq!(inside.fetch_add(1, SeqCst), 0, "two sections overlap");
                    sleep(Duration::from_millis(60)).await;
                    inside.fetch_sub(1, SeqCst);
                    guard.release().await.expect("up");
                });
            }
        }
        let began = Instant::now();
        while let Some(task) = soon("a section", tasks.join_next()).await {
            task.expect("no panic");
        }
        assert!(began.elapsed() < Duration::from_secs(15), "{events:?}: {:?}", began.elapsed());
    }
}

/// Guarantee: G2.
#[tokio::test(start_paused = true)]
async fn i8_a_possible_grant_is_released() {
    for fault in [Fault::LoseReply, Fault::Hang, Fault::Delay(Duration::from_millis(490)), Fault::Duplicate] {
        for dropped in [false, true] {
            let (store, locks) = store_and_locks();
            store.on(StoreOp::Acquire).fault(fault);
            let call = tokio::spawn(locks.lock(key()).wait(Duration::from_millis(300)).into_future());
            sleep(Duration::from_millis(100)).await;
            if dropped {
                call.abort();
            }
            if let Ok(Ok(guard)) = call.await {
                drop(guard.release());
            }
            store.on(StoreOp::Acquire).fault(Fault::None);
            sleep(Duration::from_secs(2)).await;
            assert_eq!((store.memory().size(), locks.size()), (0, (0, 0)), "{fault:?}, dropped: {dropped}");
        }
    }
}

/// Guarantee: G2.
#[tokio::test(start_paused = true)]
async fn i9_each_grant_is_released_once_and_drop_never_blocks() {
    let (store, locks) = store_and_locks();
    for n in 0..100 {
        let guard = locks.lock(("n", n)).await.expect("free");
        match n % 4 {
            0 => drop(guard),
            1 => drop(guard.release()),
            2 => drop(guard.release().await),
            // Without a runtime.
            _ => std::thread::spawn(move || drop(guard)).join().expect("no panic"),
        }
    }
    sleep(Duration::from_secs(3)).await;
    assert_eq!((store.on(StoreOp::Release).calls(), store.memory().size(), locks.size()), (100, 0, (0, 0)));
    // During a panic, too.
    let guard = locks.lock(key()).await.expect("free");
    let panics = tokio::spawn(async move {
        let _guard = guard;
        panic!("in the middle");
    });
    assert!(panics.await.expect_err("a panic").is_panic());
    sleep(Duration::from_secs(3)).await;
    assert_eq!((store.on(StoreOp::Release).calls(), store.memory().size()), (101, 0));
}

/// Guarantee: G3.
#[tokio::test(start_paused = true)]
async fn i10_an_aborted_section_blocks_for_the_lock_delay() {
    const DELAY: Duration = Duration::from_secs(3);
    for how in ["dropped", "panicked", "aborted", "limit reached", "revoked"] {
        let (store, locks) = store_and_locks();
        let call = locks.lock(key()).lock_delay(DELAY).max_hold(Duration::from_secs(20)).into_future();
        let guard = call.await.expect("free");
        // A local waiter does not get it earlier.
        let next = tokio::spawn(locks.lock(key()).into_future());
        settle().await;
        let work = tokio::spawn(async move {
            match how {
                "dropped" => drop(guard),
                "panicked" => panic!("{}", guard.key()),
                _ => drop(guard.while_held(std::future::pending::<()>()).await),
            }
        });
        settle().await;
        match how {
            "aborted" => work.abort(),
            "limit reached" => sleep(Duration::from_secs(20)).await,
            "revoked" => drop(locks.force_release(key()).await.expect("up")),
            _ => {}
        }
        let ended = Instant::now();
        drop(soon("a grant", next).await.expect("no panic").expect("a grant").release());
        // The delay of a force release is the default: a second.
        let delay = if how == "revoked" { Duration::from_secs(1) } else { DELAY };
        assert!(
            ended.elapsed() >= delay && ended.elapsed() < delay + Duration::from_millis(20),
            "{how}: {:?}",
            ended.elapsed()
        );
        settle().await;
        assert_eq!((store.memory().size(), locks.size()), (0, (0, 0)), "{how}");
    }
}

/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn i11_queues_waits_and_memory_are_bounded() {
    let (store, locks) = store_and_locks();
    let held = locks.lock(key()).await.expect("free");
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..1_000 {
        calls.spawn(locks.lock(key()).wait(Duration::from_secs(5)).into_future());
    }
    settle().await;
    assert_eq!(locks.size(), (1, 256));
    let (mut full, mut timed_out) = (0, 0);
    while let Some(call) = calls.join_next().await {
        match call.expect("no panic") {
            Err(LockError::QueueFull { ahead: 257, bound: QueueBound::Key }) => full += 1,
            Err(LockError::TimedOut { .. }) => timed_out += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((full, timed_out, locks.size()), (744, 256, (1, 0)));
    held.release().await.expect("up");
    assert_eq!((store.memory().size(), locks.size()), (0, (0, 0)));
}
