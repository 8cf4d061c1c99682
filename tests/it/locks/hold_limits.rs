//! Limits of a hold: maximum, minimum, and the lock-delay.

use std::{future::IntoFuture, time::Duration};

use axum::{Router, http::StatusCode, response::IntoResponse, routing::get};
use tokio::time::{Instant, sleep};
use tower_lock::{
    Lease, LockError, LockLayer, LockLost, LockManager, LockPolicy, Rejection, RunError,
    lock::InsufficientTime,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    app::{fetch, problem_type, text},
    locks::{key, one_key, store_and_locks},
    wait::{settle, soon},
};

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[tokio::test(start_paused = true)]
async fn lock_is_lost_at_max_hold_despite_renewals() {
    for (policy, limit) in [
        (LockPolicy::new().max_hold(s(45)), 45),
        (LockPolicy::new().lease(Lease::Fixed(s(2))), 2),
        (LockPolicy::new().lease(Lease::Fixed(s(50))).max_hold(s(7)), 7),
    ] {
        let (store, locks) = store_and_locks();
        // The watchdog already sleeps for longer than this hold.
        let other = locks.lock(("n", 0)).await.expect("free");
        sleep(s(1)).await;
        let guard = locks.with_policy(policy).lock(key()).await.expect("free");
        let (began, view) = (Instant::now(), guard.held_lock());
        let required = s(limit) + s(1);
        let too_short = Err(InsufficientTime::TooShort { remaining: view.remaining(), required });
        assert!(view.remaining() <= s(limit));
        assert_eq!(view.ensure_remaining(required), too_short);
        assert_eq!((view.lost().await, began.elapsed().as_secs()), (LockLost::HoldLimitReached, limit));
        assert_eq!(
            (view.remaining(), view.ensure_remaining(Duration::ZERO)),
            (Duration::ZERO, Err(LockLost::HoldLimitReached.into()))
        );
        // The guard is not polled; its key is released nevertheless, after the lock-delay.
        drop(locks.lock(key()).await.expect("a grant").release());
        let free = began.elapsed();
        assert!(free >= s(limit + 1) && free <= s(limit + 1) + Duration::from_millis(20), "{free:?}");
        drop(guard);
        other.release().await.expect("up");
        settle().await;
        assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
    }
}

/// The limit is that of the section; the grant continues.
#[tokio::test(start_paused = true)]
async fn each_section_of_a_grant_has_its_own_max_hold() {
    let (store, locks) = store_and_locks();
    let short = locks.lock(key()).max_hold(s(5)).await.expect("free");
    let next = tokio::spawn(locks.lock(key()).max_hold(s(40)).into_future());
    settle().await;
    sleep(Duration::from_millis(50)).await;
    drop(short.release());
    let guard = soon("a grant", next).await.expect("no panic").expect("a grant");
    sleep(s(30)).await;
    assert!(guard.held_lock().remaining() > s(9) && guard.held_lock().remaining() <= s(10));
    assert_eq!(guard.held_lock().lost().await, LockLost::HoldLimitReached);
    assert_eq!(store.on(StoreOp::Acquire).calls(), 1, "handed off");
}

/// A job that three machines start in the same minute.
/// Guarantee: G13.
#[tokio::test(start_paused = true)]
async fn minimum_hold_keeps_the_key_after_a_release() {
    let store = TestStore::new();
    let mut ran = 0;
    for _ in 0..3 {
        let locks = LockManager::new(store.clone());
        let call = locks.try_lock(("nightly", "mail")).min_hold(s(10));
        match call.run(async |_| sleep(Duration::from_millis(20)).await).await {
            Ok(()) => ran += 1,
            Err(RunError::NotStarted(LockError::Busy { .. })) => {}
            Err(other) => panic!("{other}"),
        }
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(ran, 1);
    let locks = LockManager::new(store.clone());
    let began = Instant::now();
    // Failed work may be retried at once.
    let failed = locks.lock(("nightly", "mail")).min_hold(s(10)).await.expect("free again");
    assert!(began.elapsed() > s(9) && began.elapsed() < s(10), "{:?}", began.elapsed());
    failed.release_after_failure().await.expect("up");
    drop(locks.try_lock(("nightly", "mail")).await.expect("free").release());
}

/// Guarantee: G10, G13.
#[tokio::test(start_paused = true)]
async fn route_applies_minimum_hold_only_after_success() {
    let (_store, locks) = store_and_locks();
    for (status, free_after) in
        [(StatusCode::OK, 10), (StatusCode::BAD_REQUEST, 0), (StatusCode::INTERNAL_SERVER_ERROR, 0)]
    {
        let handler = get(move || async move { status.into_response() });
        let layer = LockLayer::new(&locks, one_key()).min_hold(s(10));
        let app = Router::new().route("/", handler.route_layer(layer));
        let began = Instant::now();
        assert_eq!(fetch(&app, "/").await.status(), status);
        drop(locks.lock(key()).await.expect("a grant").release());
        assert_eq!(began.elapsed().as_secs(), free_after, "{status}");
        settle().await;
    }
}

/// The hold estimate of a route with a minimum hold includes it.
#[tokio::test(start_paused = true)]
async fn retry_after_includes_the_minimum_hold() {
    let (_store, locks) = store_and_locks();
    let app = Router::new().route("/", get(|| async {}).route_layer(LockLayer::new(&locks, one_key()).min_hold(s(4))));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    let refused = fetch(&app, "/").await;
    let Some(Rejection::Busy { retry_after }) = refused.extensions().get() else { panic!("{refused:?}") };
    assert!(*retry_after >= s(3), "{retry_after:?}");
}

/// Guarantee: G9.
#[tokio::test(start_paused = true)]
async fn hanging_handler_is_aborted_after_max_hold() {
    let (store, locks) = store_and_locks();
    let app = |layer: LockLayer<_>| {
        Router::new().route("/", get(|| async { std::future::pending::<()>().await }).route_layer(layer))
    };
    for (app, limit) in [
        (app(LockLayer::new(&locks, one_key())), 300),
        (app(LockLayer::new(&locks, one_key()).max_hold(s(2))), 2),
        (app(LockLayer::new(&locks, one_key()).lease(Lease::Fixed(s(60)))), 60),
    ] {
        let began = Instant::now();
        let response = tower::ServiceExt::oneshot(app, axum::http::Request::new(axum::body::Body::empty()));
        let response = response.await.expect("infallible");
        assert_eq!((response.status(), began.elapsed().as_secs()), (StatusCode::SERVICE_UNAVAILABLE, limit));
        assert!(matches!(response.extensions().get(), Some(Rejection::HoldLimitReached)));
        let problem = text(response).await;
        assert!(
            problem.contains(&problem_type("hold-limit-reached")) && problem.contains(r#""outcome":"unknown""#),
            "{problem}"
        );
        sleep(s(1)).await;
        assert_eq!(store.held_count(), 0);
    }
}

/// I10 in the store: an unreported end adds the lock-delay to the lease.
/// Guarantee: G3.
#[tokio::test(start_paused = true)]
async fn lost_lock_is_free_after_the_lock_delay() {
    for delay in [s(0), s(1), s(5)] {
        let store = TestStore::new();
        let (one, two) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
        let guard = one.lock(key()).lock_delay(delay).await.expect("free");
        let view = guard.held_lock();
        // It gets no more replies and cannot report; the other process can.
        store.on(StoreOp::Renew).fault(Fault::Hang);
        store.on(StoreOp::Release).fault(Fault::Hang);
        let next = tokio::spawn(two.lock(key()).wait(s(100)).into_future());
        assert_eq!(view.lost().await, LockLost::Expired);
        let lost = Instant::now();
        let _held = soon("a grant", next).await.expect("no panic").expect("a grant");
        // The usable part of the lease ended slightly before the lease in the store.
        let least = delay.max(s(1));
        assert!(
            lost.elapsed() >= least && lost.elapsed() <= least + Duration::from_millis(320),
            "{:?}",
            lost.elapsed()
        );
    }
}

/// The machine was suspended: timers have not advanced, leases have.
/// Guarantee: G13.
#[tokio::test(start_paused = true)]
async fn minimum_hold_is_at_most_one_day() {
    let locks = LockManager::in_memory();
    let guard = locks.lock(key()).min_hold(s(24 * 60 * 60)).await.expect("free");
    guard.release().await.expect("in memory");
    let day = s(24 * 60 * 60);
    let remaining = locks.inspect(key()).await.expect("in memory").remaining;
    assert!(remaining <= day && remaining > day - s(1), "{remaining:?}");
    tokio::time::advance(day + s(1)).await;
    let _held = locks.try_lock(key()).await.expect("free after a day");
}

/// The same seed gives the same ids and the same jitter.
#[tokio::test(start_paused = true)]
async fn jitter_can_be_seeded() {
    let run = async |seed| {
        let store = TestStore::new();
        let (one, two) =
            (LockManager::new(store.clone()), LockManager::builder(store.clone()).seed(seed).instance("b").build());
        let _held = one.lock(key()).await.expect("free");
        let waiter = tokio::spawn(two.lock(key()).into_future());
        let (began, mut check_ins) = (Instant::now(), Vec::new());
        let mut calls = store.on(StoreOp::Acquire).calls();
        while check_ins.len() < 6 {
            sleep(Duration::from_millis(1)).await;
            if store.on(StoreOp::Acquire).calls() > calls {
                calls = store.on(StoreOp::Acquire).calls();
                check_ins.push(began.elapsed().as_millis());
            }
        }
        waiter.abort();
        check_ins
    };
    let (a, again, b) = (run(1).await, run(1).await, run(2).await);
    assert_eq!(a, again);
    assert_ne!(a, b);
}

#[tokio::test(start_paused = true)]
async fn run_releases_in_order_or_aborts_the_work() {
    let (store, locks) = store_and_locks();
    // It has the owner, and can run in a task.
    let nested =
        locks.lock(key()).run(async |_| locks.try_lock(key()).run(async |lock| lock.fencing_token()).await).await;
    assert!(nested.expect("free").is_ok(), "reentered");
    let done = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lock(key()).run(async |lock| lock.fencing_token()).await }
    });
    assert!(done.await.expect("no panic").is_ok());
    assert_eq!(locks.try_lock(key()).run(async |lock| lock.key().clone()).await.expect("free at once"), key());
    let _held = locks.lock(key()).await.expect("free");
    let refused = locks.try_lock(key()).run(async |_| panic!("not started")).await;
    assert!(matches!(refused, Err::<(), _>(RunError::NotStarted(LockError::Busy { .. }))));
    let lost = locks.lock(("n", 2)).max_hold(s(3)).run(async |_| std::future::pending::<()>().await).await;
    assert!(matches!(lost, Err(RunError::Lost(LockLost::HoldLimitReached))));
    settle().await;
    assert_eq!(store.held_count(), 1);
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest and the shortest settings work without overflow, panic or hang.
#[tokio::test(start_paused = true)]
async fn zero_and_unlimited_hold_limits_work() {
    for long in [Duration::MAX, Duration::from_secs(u64::MAX / 2), Duration::ZERO, Duration::from_nanos(1)] {
        let policy = LockPolicy::new().lease(Lease::Fixed(long)).max_hold(long);
        let policy = policy.min_hold(long.min(DAY)).lock_delay(long.min(DAY));
        let locks = LockManager::in_memory();
        let holder = locks.lock(("n", 1)).lock_delay(Duration::ZERO).await.expect("free");
        let waits = tokio::spawn(locks.with_policy(policy).lock(("n", 1)).wait(long.max(s(1))).into_future());
        settle().await;
        drop(holder);
        drop(waits.await.expect("no panic").map(|guard| drop(guard.release())));
        let guard = locks.with_policy(policy).lock(("n", 2)).wait(s(1)).await.expect("free");
        drop(guard);
        assert_eq!(locks.shutdown(Duration::ZERO).await, 0);
    }
}

/// Two calls of one owner: one does the work; the other one was granted and never polled.
#[tokio::test(start_paused = true)]
async fn untaken_grant_does_not_end_the_minimum_hold() {
    let locks = LockManager::in_memory();
    let me = tower_lock::Owner::new();
    let before = locks.lock(key()).await.expect("free");
    let call = || Box::pin(locks.lock(key()).owner(&me).min_hold(s(60)).into_future());
    let (mut works, mut leaves) = (call(), call());
    assert!(futures_util::poll!(works.as_mut()).is_pending() && futures_util::poll!(leaves.as_mut()).is_pending());
    drop(before.release());
    drop(works.await.expect("a grant").release());
    drop(leaves);
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })));
}

#[tokio::test(start_paused = true)]
async fn lost_lock_has_no_holder() {
    // Granted within the call, and not checked since.
    let locks = LockManager::in_memory();
    let me = tower_lock::Owner::new();
    let guard = locks.lock(key()).owner(&me).lease(Lease::Fixed(Duration::ZERO)).await.expect("free");
    assert_eq!(
        (guard.held_lock().remaining(), guard.hold_count(), locks.hold_count(key(), &me)),
        (Duration::ZERO, 0, 0)
    );
}

/// The watchdog sweeps while the section ends; the next one has no limit.
#[test]
fn max_hold_of_a_section_never_ends_the_next_one() {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    let locks = LockManager::in_memory();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().expect("a runtime");
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    // So that it sweeps all the time.
    let noise = runtime.spawn({
        let (locks, stop) = (locks.clone(), std::sync::Arc::clone(&stop));
        async move {
            for n in 0.. {
                if stop.load(SeqCst) {
                    return;
                }
                let call = locks.try_lock(("noise", n)).lease(Lease::Fixed(Duration::from_nanos(1)));
                drop(call.lock_delay(Duration::ZERO).await.map(|guard| drop(guard.release())));
                tokio::task::yield_now().await;
            }
        }
    });
    let mut handed_on = 0;
    for n in 0..300 {
        let call = locks.lock(("n", n)).lease(Lease::Fixed(Duration::from_micros(400))).lock_delay(Duration::ZERO);
        let first = runtime.block_on(call.into_future()).expect("free");
        let next = runtime.spawn(locks.lock(("n", n)).into_future());
        let view = first.held_lock();
        // As close to its end as possible.
        while view.remaining() > Duration::from_nanos(500 << (n % 8)) {
            std::hint::spin_loop();
        }
        let said = runtime.block_on(first.release());
        let next = runtime.block_on(next).expect("no panic").expect("a grant");
        std::thread::yield_now();
        handed_on += usize::from(matches!(said, Ok(tower_lock::lock::ReleaseOutcome::HandedOff)));
        assert_eq!(next.held_lock().ensure_remaining(Duration::ZERO), Ok(()), "{n}: {said:?}");
        drop(next.release());
    }
    stop.store(true, SeqCst);
    runtime.block_on(noise).expect("no panic");
    assert!(handed_on > 0, "some of them were in time");
}
