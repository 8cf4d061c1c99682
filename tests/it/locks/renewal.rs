//! A lock is renewed while its section runs, and a loss is detected.

use std::{
    future::IntoFuture,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{Router, body::Body, http::StatusCode, routing::get};
use futures_util::stream;
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tower_lock::test_util::TestStore;
use tower_lock::{
    HeldLock, LockError, LockLayer, LockLost, LockManager, MemoryStore, Rejection,
    lock::ReleaseOutcome,
    store::StoreErrorKind,
    test_util::{Fault, StoreOp},
};
use tower_lock_testkit::{
    app::{fetch, problem_type, text},
    body::{ScriptedBody, Step},
    locks::{key, one_key, store_and_locks},
    wait::settle,
};

const LEASE: Duration = Duration::from_secs(30);

/// Guarantee: G6.
#[tokio::test(start_paused = true)]
async fn section_that_outlives_ten_leases_keeps_its_key() {
    let store = TestStore::new();
    let (locks, other_manager) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let guard = locks.try_lock(key()).await.expect("free");
    let waiter = tokio::spawn(other_manager.lock(key()).wait(12 * LEASE).into_future());
    for _ in 0..300 {
        sleep(Duration::from_secs(1)).await;
        let left = guard.held_lock().remaining();
        assert!(left > Duration::from_secs(18) && left < LEASE, "{left:?}");
        assert!(!waiter.is_finished());
    }
    let renewals = store.on(StoreOp::Renew).calls();
    assert!((29..=30).contains(&renewals), "every third of a lease: {renewals}");
    let token = guard.fencing_token();
    guard.release().await.expect("the store is up");
    let next = waiter.await.expect("no panic").expect("a grant");
    assert!(next.fencing_token() > token);
}

/// Renewals have 128 keys in a call, and two calls are under way. The rest waits for its turn, and
/// is not sent twice.
///
/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn no_key_is_acquired_while_renewals_are_late() {
    let (store, locks) = store_and_locks();
    let mut guards = Vec::new();
    for n in 0..2_000 {
        guards.push(locks.try_lock(("n", n)).await.expect("free"));
    }
    store.on(StoreOp::Renew).latency(Duration::from_millis(450));
    sleep(Duration::from_secs(13)).await;
    let refused = locks.try_lock(key()).await.expect_err("the last renewals waited for three seconds");
    assert!(matches!(&refused, LockError::Store(e) if e.kind() == StoreErrorKind::Overloaded), "{refused:?}");
    assert!(format!("{refused:?}").contains("the renewals of held locks"), "{refused:?}");
    let held = locks.try_lock(("n", 0)).await.expect_err("held");
    assert!(matches!(held, LockError::Busy { .. }), "{held:?}");
    sleep(Duration::from_secs(3)).await;
    let _ = locks.try_lock(key()).await.expect("no renewal waits any more");
    assert_eq!(store.on(StoreOp::Renew).calls(), 2_000_usize.div_ceil(128));
    assert!(guards.iter().all(|guard| guard.held_lock().remaining() > Duration::from_secs(19)));
}

/// A store has time for the renewals if keys * latency * renewals in a lease are at most calls
/// under way * keys of a call * lease. With more keys, only those beyond that may be lost.
async fn only_the_surplus_is_lost(latencies_ms: &[u64]) {
    const LEASE_MS: u64 = 2_000;
    const LEASE: Duration = Duration::from_millis(LEASE_MS);
    for latency in latencies_ms {
        let capacity = 2 * 128 * LEASE_MS / (latency * 3);
        // Half as many, as many, one and a half times, and three times as many.
        for (keys, spread) in
            [1, 2, 3, 6].into_iter().flat_map(|half| [(half * capacity / 2, 0), (half * capacity / 2, 1)])
        {
            let case = format!("{latency} ms, {keys} of {capacity} keys, spread {spread}");
            let store = TestStore::new();
            let locks = LockManager::builder(store.clone()).lease(LEASE).build();
            store.on(StoreOp::Renew).latency(Duration::from_millis(*latency));
            let (mut guards, began) = (Vec::new(), Instant::now());
            for n in 0..keys {
                sleep_until(began + Duration::from_millis(spread * n * LEASE_MS / 3 / keys)).await;
                guards.extend(locks.try_lock(("n", n)).await.ok());
            }
            let left = || {
                let left = guards.iter().map(|guard| guard.held_lock().remaining());
                left.filter(|left| !left.is_zero()).collect::<Vec<_>>()
            };
            sleep(LEASE * 5).await;
            let at_the_peak = left().len() as u64;
            assert!(at_the_peak >= keys.min(capacity), "{case}: {at_the_peak} are held of {}", guards.len());
            store.on(StoreOp::Renew).latency(Duration::from_millis(1));
            sleep(LEASE * 2).await;
            let left = left();
            assert_eq!(left.len() as u64, at_the_peak, "{case}: the others recover");
            assert!(left.iter().all(|left| *left > LEASE / 2), "{case}: and are in time again");
        }
    }
}

/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn store_that_is_too_slow_loses_only_the_surplus() {
    only_the_surplus_is_lost(&[450, 200]).await;
}

mod long {
    #[tokio::test(start_paused = true)]
    async fn store_that_is_too_slow_loses_only_the_surplus() {
        super::only_the_surplus_is_lost(&[450, 200, 100, 50]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn released_locks_are_not_renewed_and_the_watchdog_stops() {
    let (store, locks) = store_and_locks();
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let (released, dropped) =
        (locks.try_lock(("n", 1)).await.expect("free"), locks.try_lock(("n", 2)).await.expect("free"));
    let views = [released.held_lock(), dropped.held_lock()];
    released.release().await.expect("the store is up");
    drop(dropped);
    for view in views {
        assert_eq!(view.remaining(), Duration::ZERO, "a released lock is not held");
        view.lost().await;
        assert!(view.ensure_remaining(Duration::ZERO).is_err());
    }
    sleep(Duration::from_secs(100)).await;
    assert_eq!(store.on(StoreOp::Renew).calls(), 0);
    assert_eq!(tasks(), before, "no lock, no watchdog");
    // It returns with the next lock.
    let _guard = locks.try_lock(key()).await.expect("free");
    sleep(Duration::from_secs(15)).await;
    assert_eq!(store.on(StoreOp::Renew).calls(), 1);
}

/// I5, I6: the store is down, hangs, or replies too late; the deadline is local.
/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn unrenewed_section_is_lost_and_not_polled_again() {
    for hangs in [false, true] {
        let (store, locks) = store_and_locks();
        let guard = locks.try_lock(key()).await.expect("free");
        let granted = Instant::now();
        if hangs {
            store.on(StoreOp::Renew).pause_before();
        } else {
            store.fault_all(Fault::Fail);
        }
        let last_poll = Arc::new(std::sync::Mutex::new(granted));
        let polled = Arc::clone(&last_poll);
        let work = async move {
            loop {
                sleep(Duration::from_millis(7)).await;
                *polled.lock().expect("whole") = Instant::now();
            }
        };
        let view = guard.held_lock();
        let (lost, _) = tokio::join!(guard.while_held(work), view.lost());
        assert!(lost.is_err());
        let deadline = Duration::from_millis(29_698);
        assert!(
            granted.elapsed() >= deadline && granted.elapsed() < deadline + Duration::from_millis(5),
            "{:?}",
            granted.elapsed()
        );
        assert!(*last_poll.lock().expect("whole") < granted + deadline, "not one poll longer");
        // The reply arrives after all: the loss is final.
        store.fault_all(Fault::None);
        store.on(StoreOp::Renew).resume();
        sleep(Duration::from_secs(5)).await;
        assert_eq!(view.remaining(), Duration::ZERO);
    }
}

#[tokio::test(start_paused = true)]
async fn view_of_a_released_lock_learns_it_at_once() {
    // With calls of the store, and without them.
    for locks in [store_and_locks().1, LockManager::in_memory()] {
        let guard = locks.lock(key()).await.expect("free");
        let (view, granted) = (guard.held_lock(), Instant::now());
        let lost = tokio::spawn(async move { view.lost().await });
        settle().await;
        guard.release().await.expect("held");
        assert_eq!(lost.await.expect("no panic"), LockLost::Released);
        assert_eq!(granted.elapsed(), Duration::ZERO);
    }
}

/// Guarantee: G3.
#[tokio::test(start_paused = true)]
async fn refused_renewal_loses_the_lock_at_once() {
    for is_noticed in [true, false] {
        let (store, locks) = store_and_locks();
        let guard = locks.try_lock(key()).await.expect("free");
        // The store loses its data, as after a restart, and another client acquires the key.
        store.restart();
        let thief = LockManager::new(store.clone());
        let _stolen = thief.try_lock(key()).await.expect("free for the store");
        if is_noticed {
            let began = Instant::now();
            guard.held_lock().lost().await;
            assert_eq!(began.elapsed().as_secs(), 10, "detected by the next renewal");
            drop(guard);
        } else {
            assert_eq!(guard.release().await.expect("up"), ReleaseOutcome::NotHeld);
        }
        sleep(Duration::from_secs(1)).await;
        assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })));
        assert_eq!(store.held_count(), 1, "the late holder does not free the next lock");
    }
}

#[tokio::test(start_paused = true)]
async fn failed_renewal_is_retried_soon() {
    let (store, locks) = store_and_locks();
    let guard = locks.try_lock(key()).await.expect("free");
    sleep(Duration::from_secs(9)).await;
    store.fault_all(Fault::Fail);
    sleep(Duration::from_secs(19)).await;
    assert!(
        (17..=19).contains(&store.on(StoreOp::Renew).calls()),
        "once a second: {}",
        store.on(StoreOp::Renew).calls()
    );
    assert!(guard.held_lock().ensure_remaining(Duration::from_secs(1)).is_ok());
    assert!(guard.held_lock().ensure_remaining(Duration::from_secs(2)).is_err(), "too little left for that");
    store.fault_all(Fault::None);
    sleep(Duration::from_millis(1100)).await;
    assert!(guard.held_lock().remaining() > Duration::from_secs(28), "two seconds before its deadline");
}

/// One renewal hangs for as long as a call may; later ones are not delayed.
#[tokio::test(start_paused = true)]
async fn hanging_renewal_delays_no_other() {
    let (store, locks) = store_and_locks();
    let _first = locks.try_lock(("n", 1)).await.expect("free");
    sleep(Duration::from_millis(700)).await;
    let second = locks.try_lock(("n", 2)).await.expect("free");
    store.on(StoreOp::Renew).pause_before();
    // All calls hang from now on; the second renewal is sent in time nevertheless.
    sleep(Duration::from_millis(9_350)).await;
    assert_eq!(store.on(StoreOp::Renew).calls(), 1, "the first one hangs");
    sleep(Duration::from_millis(700)).await;
    assert_eq!(store.on(StoreOp::Renew).calls(), 2);
    store.on(StoreOp::Renew).resume();
    settle().await;
    assert!(second.held_lock().remaining() > Duration::from_secs(29));
}

/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn lost_lock_drops_the_handler_with_an_unknown_outcome() {
    struct Dropped(Arc<AtomicUsize>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let (store, locks) = store_and_locks();
    let (began, ended, dropped) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (b, e, d) = (Arc::clone(&began), Arc::clone(&ended), Arc::clone(&dropped));
    let handler = get(move || async move {
        let _dropped = Dropped(d);
        b.fetch_add(1, SeqCst);
        sleep(Duration::from_secs(60)).await;
        e.fetch_add(1, SeqCst);
    });
    let app = Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())));
    let request = tokio::spawn(async move { fetch(&app, "/").await });
    settle().await;
    store.fault_all(Fault::Fail);
    let response = request.await.expect("no panic");
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(matches!(response.extensions().get(), Some(Rejection::Lost)));
    assert!(!response.headers().contains_key("retry-after"), "not to be retried automatically");
    assert_eq!((began.load(SeqCst), ended.load(SeqCst), dropped.load(SeqCst)), (1, 0, 1));
    let problem = text(response).await;
    assert!(problem.contains(&problem_type("lost")) && problem.contains(r#""outcome":"unknown""#), "{problem}");
}

#[tokio::test(start_paused = true)]
async fn long_handlers_and_streams_keep_their_lock() {
    let store = TestStore::new();
    let (locks, other_manager) = (LockManager::new(store.clone()), LockManager::new(store.clone()));
    let handler = get(|lock: HeldLock| async move {
        sleep(3 * LEASE).await;
        assert!(lock.remaining() > LEASE / 2);
        Body::from_stream(stream::unfold(0, |n| async move {
            sleep(LEASE).await;
            (n < 3).then(|| (Ok::<_, std::convert::Infallible>("x"), n + 1))
        }))
    });
    let app = Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())));
    let request = tokio::spawn(async move {
        let response =
            timeout(10 * LEASE, tower::ServiceExt::oneshot(app, axum::http::Request::new(Body::empty()))).await;
        let response = response.expect("in time").expect("infallible");
        let body = timeout(10 * LEASE, response.into_body().collect()).await.expect("in time");
        body.expect("a body").to_bytes()
    });
    settle().await;
    for _ in 0..6 {
        sleep(LEASE).await;
        assert!(matches!(other_manager.try_lock(key()).await, Err(LockError::Busy { .. })));
    }
    assert_eq!(request.await.expect("no panic"), "xxx");
    assert_eq!(store.held_count(), 0);
}

/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn stream_that_loses_its_lock_ends_with_an_error() {
    let (store, locks) = store_and_locks();
    let endless = || {
        Body::from_stream(stream::unfold((), |()| async {
            sleep(Duration::from_secs(1)).await;
            Some((Ok::<_, std::convert::Infallible>("x"), ()))
        }))
    };
    let handler = get(move || async move { endless() });
    let app = Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())));
    let mut body = fetch(&app, "/").await.into_body();
    drop(body.frame().await);
    store.fault_all(Fault::Fail);
    let (mut frames, began) = (0, Instant::now());
    let error = loop {
        match body.frame().await.expect("no end that looks complete") {
            Ok(_) => frames += 1,
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("its lease expired before a renewal succeeded"), "{error}");
    assert!(frames >= 27 && began.elapsed() < LEASE, "{frames}");
    assert!(body.frame().await.is_none());
}

/// The inner service is not called late: it may do its work in `call`.
#[tokio::test(start_paused = true)]
async fn service_that_gets_ready_too_late_is_not_called() {
    #[derive(Clone)]
    struct SlowToBeReady(Arc<AtomicUsize>, Arc<std::sync::Mutex<std::pin::Pin<Box<tokio::time::Sleep>>>>);
    impl tower::Service<axum::http::Request<tower_lock::middleware::RequestBody>> for SlowToBeReady {
        type Response = axum::http::Response<Body>;
        type Error = std::convert::Infallible;
        type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

        fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
            self.1.lock().expect("whole").as_mut().poll(cx).map(Ok)
        }

        fn call(&mut self, _: axum::http::Request<tower_lock::middleware::RequestBody>) -> Self::Future {
            self.0.fetch_add(1, SeqCst);
            std::future::ready(Ok(axum::http::Response::new(Body::empty())))
        }
    }
    let (store, locks) = store_and_locks();
    let calls = Arc::new(AtomicUsize::new(0));
    let ready = Box::pin(sleep(Duration::from_secs(100)));
    let inner = SlowToBeReady(Arc::clone(&calls), Arc::new(std::sync::Mutex::new(ready)));
    let service = tower::Layer::layer(&LockLayer::new(&locks, one_key()), inner);
    let request = tokio::spawn(tower::ServiceExt::oneshot(service, axum::http::Request::new(Body::empty())));
    settle().await;
    store.fault_all(Fault::Fail);
    let began = Instant::now();
    let response = request.await.expect("no panic").expect("infallible");
    assert_eq!((response.status(), calls.load(SeqCst)), (StatusCode::SERVICE_UNAVAILABLE, 0));
    assert!(began.elapsed() < LEASE);
}

/// One poll that takes longer than the lease: its result does not count as done under the lock.
/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn work_that_ends_past_its_deadline_is_lost() {
    let locks = LockManager::in_memory();
    let guard = locks.try_lock(key()).await.expect("free");
    let blocks = std::future::poll_fn(|_| {
        futures_util::future::FutureExt::now_or_never(tokio::time::advance(LEASE));
        std::task::Poll::Ready(())
    });
    assert!(guard.while_held(blocks).await.is_err());
}

/// The watchdog ends with its runtime; the next hold starts another one.
/// Guarantee: G8.
#[test]
fn watchdog_is_replaced_after_its_runtime_ended() {
    let store = Arc::new(MemoryStore::new());
    let locks = LockManager::new(Arc::clone(&store));
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    let first = runtime();
    let _kept = first.block_on(locks.try_lock(("n", 1)).into_future()).expect("free");
    drop(first);
    runtime().block_on(async {
        let guard = locks.try_lock(("n", 2)).await.expect("free");
        sleep(5 * LEASE).await;
        assert!(guard.held_lock().remaining() > LEASE / 2);
    });
}

/// Tokio runs a task that was just woken next on the same worker, and no other worker takes it: the
/// watchdog would wait for a handler that blocks.
/// Guarantee: G8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn task_that_blocks_its_worker_delays_no_renewal() {
    let lease = Duration::from_secs(2);
    let locks = LockManager::builder(MemoryStore::new()).lease(lease).build();
    let held = locks.lock(("held",)).await.expect("free");
    let blocks = {
        let locks = locks.clone();
        tokio::spawn(async move {
            // Its limit is due before the renewal of the other lock, so that it wakes the watchdog.
            let _guard = locks.lock(("blocks",)).max_hold(Duration::from_millis(300)).await.expect("free");
            std::thread::sleep(lease + lease / 2);
        })
    };
    blocks.await.expect("no panic");
    assert!(!held.held_lock().remaining().is_zero(), "renewed meanwhile");
}

/// I6: ready frames are read before the head is sent; but not past the deadline, and then they are
/// not sent.
/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn body_polled_past_the_deadline_is_not_sent() {
    for late_poll in [1, 2, 3] {
        let clock = tower_lock::test_util::Clock::default();
        let locks = LockManager::builder(MemoryStore::with_clock(clock.clone())).clock(clock.clone()).build();
        let polls = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&polls);
        let handler = get(move || async move {
            Body::new(ScriptedBody::new([Step::Data(1); 2]).on_poll(move || {
                if counts.fetch_add(1, SeqCst) + 1 == late_poll {
                    clock.jump(Duration::from_secs(60));
                }
            }))
        });
        let app = Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())));
        let response = fetch(&app, "/").await;
        assert_eq!((response.status(), polls.load(SeqCst)), (StatusCode::SERVICE_UNAVAILABLE, late_poll));
        assert!(matches!(response.extensions().get(), Some(Rejection::Lost)));
    }
}
