//! A holder reenters its key: a request never waits for itself.

use std::{
    future::IntoFuture,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Request, StatusCode},
    response::IntoResponse,
    routing::get,
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep},
};
use tower_lock::{
    HeldLock, LockError, LockGuard, LockLayer, LockManager, LockManagerLayer, LockPolicy, Owner, lock::ReleaseOutcome,
    test_util::StoreOp,
};
use tower_lock_testkit::{
    app::{fetch, send, text},
    locks::{key, one_key, store_and_locks},
    wait::{settle, soon},
};

/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn owner_reenters_without_a_store_call() {
    let (store, locks) = store_and_locks();
    let (me, other) = (Owner::new(), Owner::new());
    let first = locks.lock(key()).owner(&me).await.expect("free");
    let calls = store.on(StoreOp::Acquire).calls();
    let second = locks.try_lock(key()).owner(&me).await.expect("reentered");
    assert_eq!((store.on(StoreOp::Acquire).calls(), first.hold_count(), second.hold_count()), (calls, 2, 2));
    assert_eq!((locks.hold_count(key(), &me), locks.hold_count(key(), &other)), (2, 0));
    assert_eq!(first.fencing_token(), second.fencing_token(), "one section");
    assert!(matches!(locks.try_lock(key()).owner(&other).await, Err(LockError::Busy { ahead: 1, .. })));
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })), "without an owner");

    // It ends with the last one, in any order.
    let view = first.held_lock();
    assert_eq!(first.release().await.expect("up"), ReleaseOutcome::StillHeld);
    assert!(view.ensure_remaining(Duration::from_secs(1)).is_ok() && store.held_count() == 1);
    assert_eq!(second.release().await.expect("up"), ReleaseOutcome::Released);
    assert_eq!((view.remaining(), store.held_count(), locks.hold_count(key(), &me)), (Duration::ZERO, 0, 0));
    assert_eq!((locks.size(), store.on(StoreOp::Release).calls()), ((0, 0), 1));
}

/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn one_dropped_guard_aborts_the_whole_section() {
    let (store, locks) = store_and_locks();
    let me = Owner::new();
    let outer = locks.lock(key()).owner(&me).await.expect("free");
    drop(locks.lock(key()).owner(&me).await.expect("reentered"));
    assert_eq!(store.on(StoreOp::Release).calls(), 0, "the outer hold remains");
    let ended = Instant::now();
    outer.release().await.expect("up");
    locks.lock(key()).await.expect("a grant").release().await.expect("up");
    assert!(ended.elapsed() >= Duration::from_secs(1), "a statement of the inner handler may be in flight");
}

/// Two layers with one key, a call of the handler, and a call in a scope of its own.
/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn nested_layers_and_the_handler_reenter() {
    let (store, locks) = store_and_locks();
    let handler = async |State(locks): State<LockManager>, lock: HeldLock| {
        let guard = locks.lock(key()).await.expect("the request's own");
        let response = format!("{} {}", guard.hold_count(), guard.fencing_token() == lock.fencing_token());
        let other = locks.try_lock(key()).owner(&Owner::new()).await;
        assert!(matches!(other, Err(LockError::Busy { .. })), "another owner is rejected");
        guard.release().await.expect("up");
        response
    };
    let app = Router::new()
        .route("/", get(handler).route_layer(LockLayer::new(&locks, one_key())))
        .route_layer(LockLayer::new(&locks, one_key()))
        .with_state(locks.clone());
    for _ in 0..3 {
        let began = Instant::now();
        assert_eq!(text(fetch(&app, "/").await).await, "3 true");
        assert!(began.elapsed() < Duration::from_millis(10), "released in order, at once");
    }
    assert_eq!((store.held_count(), store.on(StoreOp::Acquire).calls(), store.on(StoreOp::Release).calls()), (0, 3, 3));
    assert_eq!(locks.size(), (0, 0));
}

/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn branches_joined_in_one_request_are_one_owner() {
    let (store, locks) = store_and_locks();
    let held = locks.lock(key()).await.expect("free");
    let both = tokio::spawn({
        let locks = locks.clone();
        Owner::new().scope(async move {
            // Both wait; each goes on only when the other one has the lock, too.
            let (a, b) = tokio::join!(locks.lock(key()).into_future(), locks.lock(key()).into_future());
            let (a, b) = (a.expect("a grant"), b.expect("a grant for the other branch"));
            assert_eq!((a.hold_count(), a.fencing_token()), (2, b.fencing_token()));
            drop((a.release(), b.release()));
        })
    });
    settle().await;
    let behind = tokio::spawn(locks.lock(key()).into_future());
    settle().await;
    held.release().await.expect("up");
    soon("both branches", both).await.expect("no panic");
    drop(soon("the next waiter", behind).await.expect("no panic").expect("a grant").release());
    settle().await;
    assert_eq!(store.held_count(), 0);
}

/// It has the owner of the request; the response is complete.
/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn task_that_outlives_its_request_is_another_owner() {
    let (store, locks) = store_and_locks();
    let (sender, receiver) = oneshot::channel();
    let sender = Arc::new(Mutex::new(Some(sender)));
    let handler = {
        let locks = locks.clone();
        move || {
            let (locks, sender) = (locks.clone(), Arc::clone(&sender));
            async move {
                let owner = Owner::current().expect("a request");
                let early = locks.try_lock(key()).owner(&owner).await.expect("its own, as long as the request runs");
                early.release().await.expect("up");
                #[expect(clippy::disallowed_methods, reason = "the test needs a spawned task")]
                tokio::spawn(async move {
                    assert!(Owner::current().is_none(), "a spawned task has no owner");
                    sleep(Duration::from_secs(5)).await;
                    let outcome = locks.try_lock(key()).owner(&owner).await.map(|guard| drop(guard.release()));
                    drop(sender.lock().expect("whole").take().expect("once").send(outcome));
                });
                "done".into_response()
            }
        }
    };
    let app = Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key())));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    let _next = locks.try_lock(key()).await.expect("the response is sent and the key is free");
    let outcome = receiver.await.expect("sent");
    assert!(matches!(outcome, Err(LockError::Busy { .. })), "{outcome:?}");
    assert_eq!(store.held_count(), 1);
}

/// A task with a guard of its own keeps the section; but no guard is added after the response.
/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn section_ends_with_its_last_guard() {
    let (store, locks) = store_and_locks();
    let handler = {
        let locks = locks.clone();
        move || {
            let locks = locks.clone();
            async move {
                let (mine, owner) =
                    (locks.lock(key()).await.expect("reentered"), Owner::current().expect("the request"));
                #[expect(clippy::disallowed_methods, reason = "the test needs a spawned task")]
                tokio::spawn(async move {
                    sleep(Duration::from_secs(3)).await;
                    let late = locks.try_lock(key()).owner(&owner).await;
                    assert!(matches!(late, Err(LockError::Busy { .. })), "{late:?}");
                    mine.release().await
                });
            }
        }
    };
    let app = Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key())));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::CONFLICT, "another request is another owner");
    let began = Instant::now();
    drop(locks.lock(key()).await.expect("a grant").release());
    settle().await;
    assert_eq!((began.elapsed().as_secs(), store.held_count()), (3, 0));
}

/// The response streams, and its body requests the key that the request holds.
#[tokio::test(start_paused = true)]
async fn streaming_body_does_not_wait_for_its_own_lock() {
    let (store, locks) = store_and_locks();
    let handler = async |State(locks): State<LockManager>| {
        Body::from_stream(futures_util::stream::once(async move {
            sleep(Duration::from_millis(5)).await;
            let again = locks.try_lock(key()).await.expect("reentered");
            drop(again.release());
            Ok::<_, std::convert::Infallible>("x")
        }))
    };
    let app =
        Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key()))).with_state(locks.clone());
    // The second one has set the owner, and its part of the response ends before the stream.
    for app in [app.clone(), app.layer(LockManagerLayer::new(&locks))] {
        assert_eq!(text(fetch(&app, "/").await).await, "x");
        assert_eq!(store.held_count(), 0);
    }
}

/// The result of a call for a busy key, and how long it waited.
async fn waited(call: impl IntoFuture<Output = Result<LockGuard, LockError>>) -> String {
    let began = Instant::now();
    let outcome = match call.into_future().await {
        Err(LockError::Busy { .. }) => "held",
        Err(LockError::TimedOut { .. }) => "timed out",
        other => panic!("{other:?}"),
    };
    format!("{outcome} {}", began.elapsed().as_millis())
}

/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn call_in_a_handler_inherits_the_wait_of_its_route() {
    let (_store, locks) = store_and_locks();
    let ms = Duration::from_millis;
    let _held = locks.lock(("busy",)).await.expect("free");
    let inherits = async |State(locks): State<LockManager>| waited(locks.lock(("busy",))).await;
    let own = async |State(locks): State<LockManager>| waited(locks.lock(("busy",)).wait(Duration::from_secs(5))).await;
    let elsewhere = async |State(locks): State<LockManager>| {
        let call = locks.lock(("busy",)).into_future();
        #[expect(clippy::disallowed_methods, reason = "the test needs a spawned task")]
        tokio::spawn(waited(call)).await.expect("no panic")
    };
    let scoped = async |State(locks): State<LockManager>| Owner::new().scope(waited(locks.lock(("busy",)))).await;
    let layer = |policy| LockLayer::new(&locks, one_key()).policy(policy);
    let none = LockPolicy::new();
    let app = Router::new()
        .route("/router", get(inherits).route_layer(layer(none)))
        .route("/route", get(inherits).route_layer(layer(none.wait(ms(700)))))
        .route("/client", get(inherits).route_layer(layer(none.max_client_wait(Duration::from_secs(3)))))
        .route("/zero", get(inherits).route_layer(layer(none.wait(Duration::ZERO))))
        .route("/own", get(own).route_layer(layer(none)))
        .route("/elsewhere", get(elsewhere).route_layer(layer(none)))
        .route("/scoped", get(scoped).route_layer(layer(none)))
        .route("/unlocked", get(inherits))
        .with_state(locks.clone());
    let router = app.clone().layer(LockManagerLayer::new(&locks).wait(ms(200)));
    for (path, want) in [
        ("/router", "timed out 200"),
        ("/route", "timed out 700"),
        ("/client", "timed out 2000"),
        ("/zero", "held 0"),
        ("/own", "timed out 5000"),
        ("/elsewhere", "timed out 30000"),
        ("/scoped", "timed out 200"),
        ("/unlocked", "timed out 200"),
    ] {
        let request = Request::get(path).header("prefer", "wait=2").body(Body::empty()).expect("a request");
        assert_eq!(text(send(&router, request).await).await, want, "{path}");
    }
    assert_eq!(
        text(fetch(&app, "/router").await).await,
        "held 0",
        "no setting of its own: as the route, it does not wait"
    );
    assert_eq!(text(fetch(&app, "/unlocked").await).await, "timed out 30000", "no layer, no request");
    let patient = locks.with_policy(none.wait(ms(900)));
    let app = Router::new().route("/", get(inherits).route_layer(layer(none))).with_state(patient);
    assert_eq!(text(fetch(&app, "/").await).await, "timed out 900", "set only at the handle");
}

/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn call_in_a_handler_inherits_the_limits_of_its_route() {
    let (_store, locks) = store_and_locks();
    let handler = async |State(locks): State<LockManager>| {
        let inherits = locks.lock(("other", 1)).await.expect("free");
        let own = locks.lock(("other", 2)).max_hold(Duration::from_secs(7)).await.expect("free");
        let left = [&inherits, &own].map(|guard| guard.held_lock().remaining().as_secs_f64().round());
        drop((inherits.release(), own.release()));
        format!("{left:?}")
    };
    let app = Router::new()
        .route("/", get(handler).route_layer(LockLayer::new(&locks, one_key()).max_hold(Duration::from_secs(3))))
        .with_state(locks.clone());
    assert_eq!(text(fetch(&app, "/").await).await, "[3.0, 7.0]");
}

/// It is awaited in the handler: each would wait for the other.
/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn awaited_task_is_rejected_while_its_request_holds_the_lock() {
    let (store, locks) = store_and_locks();
    let handler = async |State(locks): State<LockManager>| {
        let began = Instant::now();
        let (one, two, three) = (locks.clone(), locks.clone(), locks.with_policy(LockPolicy::new()));
        let owner = Owner::current().expect("the request");
        #[expect(clippy::disallowed_methods, reason = "the test needs spawned tasks")]
        let (plain, shared, other) = (
            tokio::spawn(async move { one.lock(key()).await.map(|_| ()) }),
            tokio::spawn(async move { two.lock(key()).owner(&owner).await.map(|guard| guard.hold_count()) }),
            tokio::spawn(async move { three.lock(("another",)).await.map(|guard| guard.hold_count()) }),
        );
        let error = plain.await.expect("no panic").expect_err("it would wait for its own request");
        assert!(matches!(error, LockError::WouldDeadlock), "{error:?}");
        for says in ["Owner::current()", "Owner::new()"] {
            assert!(error.to_string().contains(says), "{error}");
        }
        assert_eq!((shared.await.expect("no panic").ok(), other.await.expect("no panic").ok()), (Some(2), Some(1)));
        #[expect(clippy::disallowed_methods, reason = "the test needs spawned tasks")]
        let refused = tokio::spawn(async move { locks.try_lock(key()).await.map(|_| ()) }).await.expect("no panic");
        assert!(matches!(refused, Err(LockError::Busy { .. })), "it does not wait: {refused:?}");
        assert_eq!(began.elapsed(), Duration::ZERO);
    };
    let app =
        Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key()))).with_state(locks.clone());
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    sleep(Duration::from_secs(2)).await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// Guarantee: G12.
#[tokio::test(start_paused = true)]
async fn task_with_its_own_owner_locks_after_the_response() {
    let (store, locks) = store_and_locks();
    let (sender, receiver) = oneshot::channel();
    let sender = Arc::new(Mutex::new(Some(sender)));
    let handler = move |State(locks): State<LockManager>| {
        let sender = sender.lock().expect("whole").take().expect("once");
        async move {
            #[expect(clippy::disallowed_methods, reason = "the test needs a spawned task")]
            tokio::spawn(async move {
                let guard = locks.lock(key()).owner(&Owner::new()).await.expect("a grant");
                drop(guard.release());
                // The request has ended: the handle is independent of it.
                let again = locks.lock(key()).await.expect("free");
                drop((sender.send(()), again.release()));
            });
            sleep(Duration::from_secs(2)).await;
        }
    };
    let app =
        Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key()))).with_state(locks.clone());
    let began = Instant::now();
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    receiver.await.expect("it held both locks");
    assert_eq!(began.elapsed().as_secs(), 2);
    settle().await;
    assert_eq!(store.held_count(), 0);
}
