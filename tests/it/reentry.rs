//! Who holds a key has it once more: a request never waits for itself.

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
use tower_lock::{HeldLock, LockError, LockKey, LockLayer, Locks, LocksLayer, Owner, Released, test_util::Verb};

use crate::support::{fetch, one_key, settle, soon, store_and_locks, text};

fn key() -> LockKey {
    LockKey::from(("k",))
}

#[tokio::test(start_paused = true)]
async fn an_owner_has_its_key_once_more_without_asking_anybody() {
    let (store, locks) = store_and_locks();
    let (me, other) = (Owner::new(), Owner::new());
    let first = locks.lock(key()).owner(&me).await.expect("free");
    let calls = store.on(Verb::Acquire).calls();
    let second = locks.try_lock(key()).owner(&me).await.expect("its own");
    assert_eq!((store.on(Verb::Acquire).calls(), first.hold_count(), second.hold_count()), (calls, 2, 2));
    assert_eq!((locks.hold_count(key(), &me), locks.hold_count(key(), &other)), (2, 0));
    assert_eq!(first.fencing_token(), second.fencing_token(), "one section");
    assert!(matches!(locks.try_lock(key()).owner(&other).await, Err(LockError::Held { ahead: 1, .. })));
    assert!(matches!(locks.try_lock(key()).await, Err(LockError::Held { .. })), "nobody in particular");

    // It ends with the last one, whichever that is.
    let view = first.view();
    assert_eq!(first.release().await.expect("up"), Released::StillHeld);
    assert!(view.ensure(Duration::from_secs(1)).is_ok() && store.held() == 1);
    assert_eq!(second.release().await.expect("up"), Released::Freed);
    assert_eq!((view.remaining(), store.held(), locks.hold_count(key(), &me)), (Duration::ZERO, 0, 0));
    assert_eq!((locks.size(), store.on(Verb::Release).calls()), ((0, 0), 1));
}

#[tokio::test(start_paused = true)]
async fn one_guard_that_is_dropped_makes_the_whole_section_end_badly() {
    let (store, locks) = store_and_locks();
    let me = Owner::new();
    let outer = locks.lock(key()).owner(&me).await.expect("free");
    drop(locks.lock(key()).owner(&me).await.expect("its own"));
    assert_eq!(store.on(Verb::Release).calls(), 0, "the outer one is there still");
    let ended = Instant::now();
    outer.release().await.expect("up");
    locks.lock(key()).await.expect("its turn").release().await.expect("up");
    assert!(ended.elapsed() >= Duration::from_secs(1), "a statement of the inner one may be on its way");
}

/// All of it: two layers with one key, the handler's own call, and what it does in a scope of its own.
#[tokio::test(start_paused = true)]
async fn nested_layers_and_the_handler_itself_re_enter() {
    let (store, locks) = store_and_locks();
    let handler = async |State(locks): State<Locks>, lock: HeldLock| {
        let guard = locks.lock(key()).await.expect("the request's own");
        let answer = format!("{} {}", guard.hold_count(), guard.fencing_token() == lock.fencing_token());
        let stranger = locks.try_lock(key()).owner(&Owner::new()).await;
        assert!(matches!(stranger, Err(LockError::Held { .. })), "who says that it is somebody else is");
        guard.release().await.expect("up");
        answer
    };
    let app = Router::new()
        .route("/", get(handler).route_layer(LockLayer::new(&locks, one_key())))
        .route_layer(LockLayer::new(&locks, one_key()))
        .with_state(locks.clone());
    for _ in 0..3 {
        let began = Instant::now();
        assert_eq!(text(fetch(&app, "/").await).await, "3 true");
        assert!(began.elapsed() < Duration::from_millis(10), "given back in order, and at once");
    }
    assert_eq!((store.held(), store.on(Verb::Acquire).calls(), store.on(Verb::Release).calls()), (0, 3, 3));
    assert_eq!(locks.size(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn branches_joined_in_one_request_are_one_owner() {
    let (store, locks) = store_and_locks();
    let held = locks.lock(key()).await.expect("free");
    let both = tokio::spawn({
        let locks = locks.clone();
        Owner::new().scope(async move {
            // Both wait; the one does not go on before the other has the lock, too.
            let (a, b) = tokio::join!(locks.lock(key()).into_future(), locks.lock(key()).into_future());
            let (a, b) = (a.expect("its turn"), b.expect("and so for its twin"));
            assert_eq!((a.hold_count(), a.fencing_token()), (2, b.fencing_token()));
            drop((a.release(), b.release()));
        })
    });
    settle().await;
    let behind = tokio::spawn(locks.lock(key()).into_future());
    settle().await;
    held.release().await.expect("up");
    soon("both branches", both).await.expect("no panic");
    drop(soon("the one behind", behind).await.expect("no panic").expect("its turn").release());
    settle().await;
    assert_eq!(store.held(), 0);
}

/// It has the extensions of the request, and so the owner; the response is out.
#[tokio::test(start_paused = true)]
async fn a_task_that_outlives_its_request_waits_like_a_stranger() {
    let (store, locks) = store_and_locks();
    let (told, hears) = oneshot::channel();
    let told = Arc::new(Mutex::new(Some(told)));
    let handler = {
        let locks = locks.clone();
        move |request: Request<Body>| {
            let (locks, told) = (locks.clone(), Arc::clone(&told));
            async move {
                let owner = request.extensions().get::<Owner>().expect("the layer says who it is").clone();
                let early = locks.try_lock(key()).owner(&owner).await.expect("its own, as long as the request runs");
                early.release().await.expect("up");
                #[expect(clippy::disallowed_methods, reason = "the test is about such a task")]
                tokio::spawn(async move {
                    assert!(Owner::current().is_none(), "a task is nobody until it is told");
                    sleep(Duration::from_secs(5)).await;
                    let outcome = locks.try_lock(key()).owner(&owner).await.map(|guard| drop(guard.release()));
                    drop(told.lock().expect("whole").take().expect("once").send(outcome));
                });
                "done".into_response()
            }
        }
    };
    let app = Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key())));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    let _next = locks.try_lock(key()).await.expect("the response is out, and the key free");
    let outcome = hears.await.expect("told");
    assert!(matches!(outcome, Err(LockError::Held { .. })), "{outcome:?}");
    assert_eq!(store.held(), 1);
}

/// As the README has it.
#[tokio::test(start_paused = true)]
async fn a_spawned_task_that_is_given_the_owner_of_its_request_reenters() {
    let (store, locks) = store_and_locks();
    let handler = {
        let locks = locks.clone();
        async move || {
            let me = Owner::current().expect("a request");
            #[expect(clippy::disallowed_methods, reason = "the test is about such a task")]
            let task =
                tokio::spawn(async move { locks.try_lock(key()).owner(&me).await.expect("its own").release().await });
            assert_eq!(task.await.expect("no panic").expect("up"), Released::StillHeld);
            "done"
        }
    };
    let app = Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key())));
    assert_eq!(text(fetch(&app, "/").await).await, "done");
    assert_eq!(store.held(), 0);
}

/// A task of the handler that holds a guard of its own keeps the section; but nothing is added to it once the response is out.
#[tokio::test(start_paused = true)]
async fn a_section_ends_with_its_last_guard_wherever_that_is() {
    let (store, locks) = store_and_locks();
    let handler = {
        let locks = locks.clone();
        move || {
            let locks = locks.clone();
            async move {
                let (mine, owner) = (locks.lock(key()).await.expect("its own"), Owner::current().expect("the request"));
                #[expect(clippy::disallowed_methods, reason = "the test is about such a task")]
                tokio::spawn(async move {
                    sleep(Duration::from_secs(3)).await;
                    let late = locks.try_lock(key()).owner(&owner).await;
                    assert!(matches!(late, Err(LockError::Held { .. })), "{late:?}");
                    mine.release().await
                });
            }
        }
    };
    let app = Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key())));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::CONFLICT, "another request is another owner");
    let began = Instant::now();
    drop(locks.lock(key()).await.expect("its turn").release());
    settle().await;
    assert_eq!((began.elapsed().as_secs(), store.held()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn two_keys_in_opposite_order_end_by_timeout_and_not_for_ever() {
    let (store, locks) = store_and_locks();
    let (one, two) = (LockKey::from(("n", 1)), LockKey::from(("n", 2)));
    let take = |first: LockKey, second: LockKey| {
        let locks = locks.clone();
        async move {
            let first = locks.lock(first).await?;
            sleep(Duration::from_millis(10)).await;
            let second = locks.lock(second).wait(Duration::from_secs(5)).await;
            first.release().await?;
            second?.release().await?;
            Ok::<_, LockError>(())
        }
    };
    let began = Instant::now();
    let (a, b) = tokio::join!(take(one.clone(), two.clone()), take(two, one));
    assert!(
        matches!((&a, &b), (Err(LockError::TimedOut { .. }), _) | (_, Err(LockError::TimedOut { .. }))),
        "{a:?} {b:?}"
    );
    assert!(began.elapsed() <= Duration::from_secs(6), "{:?}", began.elapsed());
    settle().await;
    assert_eq!((store.held(), locks.size()), (0, (0, 0)));
}

/// The response streams, and its body asks for what the request holds.
#[tokio::test(start_paused = true)]
async fn a_streaming_body_does_not_wait_for_its_own_lock() {
    let (store, locks) = store_and_locks();
    let handler = async |State(locks): State<Locks>| {
        Body::from_stream(futures_util::stream::once(async move {
            sleep(Duration::from_millis(5)).await;
            let again = locks.try_lock(key()).await.expect("its own");
            drop(again.release());
            Ok::<_, std::convert::Infallible>("x")
        }))
    };
    let app =
        Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key()))).with_state(locks.clone());
    // The second one has named the owner, and its part of the answer is over before the stream is.
    for app in [app.clone(), app.layer(LocksLayer::new(&locks))] {
        assert_eq!(text(fetch(&app, "/").await).await, "x");
        assert_eq!(store.held(), 0);
    }
}
