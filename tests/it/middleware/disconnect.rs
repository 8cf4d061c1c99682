//! The client disconnects, or an outer timeout drops its request: the handler finishes detached, or
//! is cancelled.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Request,
    http::{Extensions, StatusCode},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get},
};
use futures_util::stream;
use tokio::{
    sync::Notify,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_lock::{
    HasLockKey, HeldLock, LockKey, LockLayer, LockManager, LockManagerLayer, Locked, OnDisconnect, key,
    middleware::{ClientConnection, ClientKey},
    test_util::{Fault, TestStore},
};
use tower_lock_testkit::{
    app::{fetch, send},
    locks::{one_key, store_and_locks},
    wait::{settle, soon},
};

const S: Duration = Duration::from_secs(1);

/// Handlers that record their events.
#[derive(Clone, Default)]
struct Work {
    said: Arc<Mutex<Vec<&'static str>>>,
    end: Arc<Notify>,
}

/// Records a drop before its end.
struct Unfinished(Option<Work>);

impl Work {
    fn say(&self, what: &'static str) {
        self.said.lock().expect("whole").push(what);
    }

    fn said(&self) -> Vec<&'static str> {
        self.said.lock().expect("whole").clone()
    }

    async fn run(self) {
        self.say("begins");
        let mut unfinished = Unfinished(Some(self.clone()));
        self.end.notified().await;
        unfinished.0 = None;
        self.say("ends");
    }

    fn handler(&self) -> MethodRouter {
        let work = self.clone();
        get(move || work.clone().run())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(work) = &self.0 {
            work.say("dropped");
        }
    }
}

/// A request that can be cancelled.
fn visit(app: &Router) -> JoinHandle<Response> {
    visit_at(app, "/")
}

fn visit_at(app: &Router, path: &'static str) -> JoinHandle<Response> {
    let app = app.clone();
    tokio::spawn(async move { fetch(&app, path).await })
}

/// Lets other tasks run until the condition holds, without time.
async fn settle_until(done: impl Fn() -> bool) {
    for _ in 0..100 {
        settle().await;
        if done() {
            // And its immediate effects.
            return settle().await;
        }
    }
    panic!("the condition never held");
}

async fn leave(request: JoinHandle<Response>) {
    request.abort();
    settle().await;
}

/// Guarantee: G4.
#[tokio::test(start_paused = true)]
async fn detached_handler_finishes_under_its_lock_and_releases_it() {
    let (store, locks) = store_and_locks();
    let work = Work::default();
    let app = Router::new().route("/", work.handler().route_layer(LockLayer::new(&locks, one_key())));
    let request = visit(&app);
    settle().await;
    leave(request).await;
    assert_eq!((work.said(), store.held_count()), (vec!["begins"], 1), "the handler continues without its client");
    // Beyond its first lease.
    sleep(40 * S).await;
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::CONFLICT);
    work.end.notify_one();
    settle().await;
    assert_eq!(work.said(), ["begins", "ends"]);
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)), "ended in order: no lock-delay");
}

/// Guarantee: G4.
#[tokio::test(start_paused = true)]
async fn outer_timeout_counts_as_a_disconnect() {
    let (_store, locks) = store_and_locks();
    let work = Work::default();
    let in_time = async |request: Request, next: Next| {
        timeout(S, next.run(request)).await.unwrap_or_else(|_| StatusCode::GATEWAY_TIMEOUT.into_response())
    };
    let app = Router::new()
        .route("/", work.handler().route_layer(LockLayer::new(&locks, one_key())))
        .layer(middleware::from_fn(in_time));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::GATEWAY_TIMEOUT);
    settle().await;
    assert!(locks.try_lock(("k",)).await.is_err());
    work.end.notify_one();
    settle().await;
    assert_eq!(work.said(), ["begins", "ends"]);
    locks.try_lock(("k",)).await.expect("free at once").release().await.expect("up");
}

/// It holds no lock yet, or its handler has already ended.
#[tokio::test(start_paused = true)]
async fn disconnect_before_the_handler_runs_ends_at_once() {
    let (store, locks) = store_and_locks();
    let work = Work::default();
    let outer = key::from_parts(|_| ("outer",));
    let app = Router::new()
        .route("/", work.handler())
        .route_layer(LockLayer::new(&locks, one_key()).wait(60 * S))
        .route_layer(LockLayer::new(&locks, outer).wait(60 * S));
    let held = locks.lock(("k",)).await.expect("free");
    let request = visit(&app);
    settle().await;
    assert_eq!(store.held_count(), 2, "it holds the outer lock and waits for the inner one");
    leave(request).await;
    held.release().await.expect("up");
    sleep(S).await;
    assert_eq!((work.said().len(), store.held_count(), locks.size()), (0, 0, (0, 0)));
}

/// Guarantee: G4.
#[tokio::test(start_paused = true)]
async fn detached_handler_is_aborted_by_max_hold_and_loss() {
    for lost in [false, true] {
        let (store, locks) = store_and_locks();
        let work = Work::default();
        let layer = LockLayer::new(&locks, one_key()).max_hold(60 * S);
        let app = Router::new().route("/", work.handler().route_layer(layer));
        let request = visit(&app);
        settle().await;
        leave(request).await;
        if lost {
            store.fault_all(Fault::Fail);
        }
        sleep(if lost { 30 * S } else { 59 * S }).await;
        assert_eq!(work.said(), if lost { vec!["begins", "dropped"] } else { vec!["begins"] });
        sleep(S).await;
        settle().await;
        assert_eq!(work.said(), ["begins", "dropped"]);
    }
}

/// The layer with the outer lock decides: no lock is released while the handler runs.
#[tokio::test(start_paused = true)]
async fn nested_layers_detach_together_or_not_at_all() {
    for what in [OnDisconnect::Finish, OnDisconnect::Cancel] {
        let (store, locks) = store_and_locks();
        let work = Work::default();
        let app = Router::new()
            .route("/", work.handler())
            .route_layer(LockLayer::new(&locks, one_key()))
            .route_layer(LockLayer::new(&locks, key::from_parts(|_| ("outer",))).on_disconnect(what));
        let request = visit(&app);
        settle().await;
        leave(request).await;
        if what == OnDisconnect::Cancel {
            assert_eq!(work.said(), ["begins", "dropped"], "the inner layer does not finish on its own");
            sleep(S).await;
        } else {
            assert_eq!((work.said(), store.held_count()), (vec!["begins"], 2));
            work.end.notify_one();
            settle().await;
            assert_eq!(work.said(), ["begins", "ends"]);
        }
        assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
    }
}

/// I6 applies to the outer lock, too: a handler that lost it is never polled again.
#[tokio::test(start_paused = true)]
async fn lost_outer_lock_aborts_what_runs_under_an_inner_one() {
    let (store, locks) = store_and_locks();
    let work = Work::default();
    let app = Router::new()
        .route("/", work.handler())
        .route_layer(LockLayer::new(&locks, one_key()))
        .route_layer(LockLayer::new(&locks, key::from_parts(|_| ("outer",))).max_hold(5 * S));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    settle().await;
    assert_eq!(work.said(), ["begins", "dropped"]);
    sleep(S).await;
    assert_eq!(store.held_count(), 0);
}

struct OneKey;

impl HasLockKey for OneKey {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("k",)
    }
}

#[derive(Clone)]
struct Here;

impl std::ops::Deref for Here {
    type Target = OneKey;

    fn deref(&self) -> &OneKey {
        &OneKey
    }
}

impl<S: Send + Sync> axum::extract::FromRequestParts<S> for Here {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(_: &mut axum::http::request::Parts, _: &S) -> Result<Self, Self::Rejection> {
        Ok(Self)
    }
}

#[tokio::test(start_paused = true)]
async fn handler_that_holds_detaches_and_one_that_waits_cancels() {
    let (store, locks) = store_and_locks();
    let work = Work::default();
    let works = work.clone();
    let app = Router::new()
        .route("/", get(move |_: Locked<Here>| works.clone().run()))
        .layer(LockManagerLayer::new(&locks).wait(60 * S));
    let first = visit(&app);
    settle().await;
    let second = visit(&app);
    settle().await;
    leave(second).await;
    assert_eq!(locks.size(), (1, 0), "out of the queue");
    leave(first).await;
    assert_eq!((work.said(), store.held_count()), (vec!["begins"], 1));
    work.end.notify_one();
    settle().await;
    assert_eq!((work.said(), store.held_count(), locks.size()), (vec!["begins", "ends"], 0, (0, 0)));
}

/// A route may use half of the free permits: a flooded one leaves some for the next.
/// Guarantee: G4.
#[tokio::test(start_paused = true)]
async fn detached_handlers_are_bounded_per_process_and_route() {
    for (max, takes) in [(None, 512), (Some(10), 5), (Some(0), 0)] {
        let store = TestStore::new();
        let builder = LockManager::builder(store.clone());
        let locks = if let Some(max) = max { builder.max_detached(max) } else { builder }.build();
        let (flood, honest) = (Work::default(), Work::default());
        let key = key::from_fn(|path: axum::extract::Path<u32>| ("n", path.0));
        let layer = LockLayer::new(&locks, key);
        // One layer for both: the matched path distinguishes them.
        let app =
            Router::new().route("/{n}", flood.handler()).route("/honest/{n}", honest.handler()).route_layer(layer);
        let begin = |path: String| {
            let app = app.clone();
            tokio::spawn(async move { fetch(&app, &path).await })
        };
        let requests: Vec<_> = (0..takes + 6).map(|n| begin(format!("/{n}"))).collect();
        let client = begin("/honest/9999".to_owned());
        settle_until(|| flood.said().len() == takes + 6 && honest.said().len() == 1).await;
        for request in requests {
            request.abort();
        }
        let dropped = |work: &Work| work.said().iter().filter(|said| **said == "dropped").count();
        settle_until(|| dropped(&flood) == 6).await;
        leave(client).await;
        assert_eq!(dropped(&honest), usize::from(max == Some(0)), "{max:?}: a permit for another route");
        flood.end.notify_waiters();
        honest.end.notify_waiters();
        settle_until(|| flood.said().len() == 2 * (takes + 6)).await;
        sleep(S).await;
        assert_eq!((dropped(&flood), store.held_count(), locks.size()), (6, 0, (0, 0)), "{max:?}");
        if takes > 0 {
            assert_eq!(honest.said(), ["begins", "ends"]);
            // Permits are free again.
            let request = begin("/7".to_owned());
            settle().await;
            leave(request).await;
            flood.end.notify_one();
            settle().await;
            assert_eq!((dropped(&flood), flood.said().last()), (6, Some(&"ends")));
        }
    }
}

type Identify = Box<dyn Fn(bool, &mut Extensions)>;

/// A client may use a third of what its route has left, if the layer can identify its clients.
/// Guarantee: G4.
#[tokio::test(start_paused = true)]
async fn flooding_client_leaves_permits_for_others() {
    const MAX: usize = 30;
    let connections = [ClientConnection::new(|| false), ClientConnection::new(|| false)];
    let of_connection = move |is_honest: bool, extensions: &mut Extensions| {
        extensions.insert(connections[usize::from(is_honest)].clone());
    };
    let of_key = |is_honest: bool, extensions: &mut Extensions| {
        // A probe of each request does not matter then.
        extensions.insert(ClientConnection::new(|| false));
        extensions.insert(ClientKey::new(if is_honest { "honest" } else { "flood" }));
    };
    let ways: [(Identify, bool); 3] =
        [(Box::new(of_connection), true), (Box::new(of_key), true), (Box::new(|_, _| {}), false)];
    for (identify, is_known) in ways {
        let locks = LockManager::builder(TestStore::new()).max_detached(MAX).build();
        let work = Work::default();
        let key = key::from_fn(|path: axum::extract::Path<u32>| ("n", path.0));
        let app = Router::new().route("/{n}", work.handler().route_layer(LockLayer::new(&locks, key)));
        let begin = |n: usize, is_honest| {
            let mut request = Request::get(format!("/{n}")).body(Body::empty()).expect("a request");
            identify(is_honest, request.extensions_mut());
            let app = app.clone();
            tokio::spawn(async move { send(&app, request).await })
        };
        let flood: Vec<_> = (0..2 * MAX).map(|n| begin(n, false)).collect();
        let honest = begin(9_999, true);
        settle_until(|| work.said().len() == 2 * MAX + 1).await;
        for request in flood {
            request.abort();
        }
        let dropped = || work.said().iter().filter(|said| **said == "dropped").count();
        let left = if is_known { (MAX - MAX / 8) / 3 } else { MAX / 2 };
        settle_until(|| dropped() == 2 * MAX - left).await;
        leave(honest).await;
        settle().await;
        assert_eq!(dropped(), 2 * MAX - left + usize::from(!is_known));
    }
}

/// Without a router there is no path: the layer stands for the route.
#[tokio::test(start_paused = true)]
async fn flooded_layer_leaves_permits_for_another_layer() {
    let store = TestStore::new();
    let locks = LockManager::builder(store.clone()).max_detached(4).build();
    let (flood, honest) = (Work::default(), Work::default());
    let app = |work: &Work, name: &'static str| {
        let key = key::from_parts(move |head| (name, head.uri.path().to_owned()));
        Router::new().fallback(work.handler()).layer(LockLayer::new(&locks, key))
    };
    let (flooded, other) = (app(&flood, "flood"), app(&honest, "honest"));
    let requests = ["/1", "/2", "/3", "/4"].map(|path| visit_at(&flooded, path));
    let client = visit(&other);
    settle_until(|| flood.said().len() == 4 && honest.said().len() == 1).await;
    for request in requests {
        leave(request).await;
    }
    leave(client).await;
    flood.end.notify_waiters();
    honest.end.notify_waiters();
    settle_until(|| flood.said().len() == 8 && honest.said().len() == 2).await;
    let dropped = flood.said().iter().filter(|said| **said == "dropped").count();
    assert_eq!((dropped, honest.said()), (2, vec!["begins", "ends"]));
}

/// Guarantee: G4.
#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_detached_handlers() {
    let (_store, locks) = store_and_locks();
    let work = Work::default();
    let app = Router::new().route("/", work.handler().route_layer(LockLayer::new(&locks, one_key())));
    let request = visit(&app);
    settle().await;
    leave(request).await;
    assert_eq!(locks.shutdown(S).await, 1);
    let shutdown = tokio::spawn({
        let locks = locks.clone();
        async move { locks.shutdown(60 * S).await }
    });
    settle().await;
    work.end.notify_one();
    assert_eq!(soon("the end", shutdown).await.expect("no panic"), 0);
    assert_eq!(work.said(), ["begins", "ends"]);
}

/// The body is not read.
#[tokio::test(start_paused = true)]
async fn unread_stream_is_dropped_and_frees_after_the_lock_delay() {
    let (store, locks) = store_and_locks();
    let end = Arc::new(Notify::new());
    let go = Arc::clone(&end);
    let handler = get(move || async move {
        go.notified().await;
        Body::from_stream(stream::pending::<Result<Bytes, std::convert::Infallible>>())
    });
    let app = Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())));
    let request = visit(&app);
    settle().await;
    leave(request).await;
    end.notify_one();
    settle().await;
    let began = Instant::now();
    let guard = locks.lock(("k",)).await.expect("a grant");
    assert!(began.elapsed() >= S);
    guard.release().await.expect("up");
    assert_eq!(store.held_count(), 0);
}

/// A copy of the view sends no acquire of its own.
#[tokio::test(start_paused = true)]
async fn detached_handler_still_sees_its_lock() {
    let (_store, locks) = store_and_locks();
    let end = Arc::new(Notify::new());
    let go = Arc::clone(&end);
    let seen = Arc::new(Mutex::new(None));
    let see = Arc::clone(&seen);
    let again = locks.clone();
    let handler = get(move |lock: HeldLock| async move {
        go.notified().await;
        let inner = again.try_lock(("k",)).await.expect("reentered");
        *see.lock().expect("whole") = Some((lock.ensure_remaining(S).is_ok(), inner.hold_count()));
        inner.release().await.expect("up");
    });
    let app = Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())));
    let request = visit(&app);
    settle().await;
    leave(request).await;
    end.notify_one();
    settle().await;
    assert_eq!(*seen.lock().expect("whole"), Some((true, 2)), "the same owner");
}

/// The usual setup: a layer for the router and one for the route. The first one has set the owner,
/// and holds no lock.
#[tokio::test(start_paused = true)]
async fn ended_outer_layer_takes_nothing_from_a_detached_handler() {
    for by_timeout in [false, true] {
        let (store, locks) = store_and_locks();
        let (work, again) = (Work::default(), locks.clone());
        let works = work.clone();
        let handler = get(move || async move {
            works.clone().run().await;
            again.try_lock(("k",)).await.expect("reentered").release().await.expect("up");
            works.say("re-entered its lock");
        });
        let limit = if by_timeout { S } else { 3600 * S };
        let in_time = move |request: Request, next: Next| async move {
            timeout(limit, next.run(request)).await.unwrap_or_else(|_| StatusCode::GATEWAY_TIMEOUT.into_response())
        };
        let app = Router::new()
            .route("/", handler.route_layer(LockLayer::new(&locks, one_key())))
            .layer(middleware::from_fn(in_time))
            .layer(LockManagerLayer::new(&locks));
        let request = visit(&app);
        settle().await;
        if by_timeout {
            assert_eq!(request.await.expect("no panic").status(), StatusCode::GATEWAY_TIMEOUT);
        } else {
            leave(request).await;
        }
        work.end.notify_one();
        settle().await;
        assert_eq!(work.said(), ["begins", "ends", "re-entered its lock"]);
        assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
    }
}

/// It holds its lock, and waits until the service is ready.
/// Guarantee: G3.
#[tokio::test(start_paused = true)]
async fn handler_is_not_called_after_a_disconnect() {
    let (store, locks) = store_and_locks();
    let work = Work::default();
    let key = key::from_fn(|path: axum::extract::Path<u32>| ("n", path.0));
    let layers = tower::ServiceBuilder::new()
        .layer(LockLayer::new(&locks, key))
        .layer(tower::limit::GlobalConcurrencyLimitLayer::new(1));
    let app = Router::new().route("/{n}", work.handler().route_layer(layers));
    let first = visit_at(&app, "/1");
    settle().await;
    let second = visit_at(&app, "/2");
    settle().await;
    assert_eq!((work.said(), store.held_count()), (vec!["begins"], 2));
    leave(second).await;
    let free = locks.try_lock(("n", 2)).await.expect("at once: no statement is in flight");
    free.release().await.expect("up");
    assert_eq!(store.held_count(), 1);
    work.end.notify_one();
    assert_eq!(first.await.expect("no panic").status(), StatusCode::OK);
    settle().await;
    assert_eq!((work.said(), store.held_count()), (vec!["begins", "ends"], 0));
}

/// A job that reuses the parts of its last request for the next one.
#[test]
fn reused_extensions_keep_nothing_of_finished_requests() {
    let chain = async {
        let (store, locks) = store_and_locks();
        let (send, last) = std::sync::mpsc::channel();
        let handler = get(move |request: Request| async move { drop(send.send(request.into_parts().0)) });
        let handler = handler.route_layer(LockLayer::new(&locks, one_key()));
        let app = Router::new().route("/", handler).layer(LockManagerLayer::new(&locks));
        let mut request = Request::get("/").body(Body::empty()).expect("a request");
        for _ in 0..2_500 {
            assert_eq!(tower_lock_testkit::app::send(&app, request).await.status(), StatusCode::OK);
            request = Request::from_parts(last.recv().expect("it ran"), Body::empty());
        }
        assert_eq!(store.held_count(), 0);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().expect("one");
    // With a small stack.
    let thread = std::thread::Builder::new().stack_size(1 << 18).spawn(move || runtime.block_on(chain));
    thread.expect("a thread").join().expect("no panic");
}

/// A retry while the first attempt is detached; a hedged request.
#[tokio::test(start_paused = true)]
async fn two_calls_of_a_route_for_one_request_are_two_owners() {
    let (store, locks) = store_and_locks();
    let work = Work::default();
    let retries = async |request: Request, next: Next| {
        let (parts, _) = request.into_parts();
        let again = || Request::from_parts(parts.clone(), Body::empty());
        if timeout(S, next.clone().run(again())).await.is_ok() {
            panic!("the handler runs");
        }
        let (retry, hedge) = tokio::join!(next.clone().run(again()), next.run(again()));
        assert_eq!((retry.status(), hedge.status()), (StatusCode::CONFLICT, StatusCode::CONFLICT));
        retry
    };
    let app = Router::new()
        .route("/", work.handler().route_layer(LockLayer::new(&locks, one_key())))
        .layer(middleware::from_fn(retries))
        .layer(LockManagerLayer::new(&locks));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::CONFLICT);
    assert_eq!(work.said(), ["begins"]);
    work.end.notify_one();
    settle().await;
    assert_eq!((work.said(), store.held_count()), (vec!["begins", "ends"], 0));
}

/// A layer between two locks responds and lets the work go on: the outer lock ends with the
/// response, the inner one does not.
#[tokio::test(start_paused = true)]
async fn detached_inner_handler_keeps_its_owner() {
    let (store, locks) = store_and_locks();
    let (work, again) = (Work::default(), locks.clone());
    let works = work.clone();
    let handler = get(move || async move {
        works.clone().run().await;
        again.try_lock(("k",)).await.expect("reentered").release().await.expect("up");
        works.say("re-entered its lock");
    });
    let accepts = async |request: Request, next: Next| {
        tokio::spawn(next.run(request));
        settle().await;
        StatusCode::ACCEPTED
    };
    let app = Router::new()
        .route("/", handler.route_layer(LockLayer::new(&locks, one_key())))
        .layer(middleware::from_fn(accepts))
        .layer(LockLayer::new(&locks, key::from_parts(|_| ("outer",))));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::ACCEPTED);
    assert_eq!((work.said(), store.held_count()), (vec!["begins"], 1));
    work.end.notify_one();
    settle().await;
    assert_eq!((work.said().last(), store.held_count()), (Some(&"re-entered its lock"), 0));
}
