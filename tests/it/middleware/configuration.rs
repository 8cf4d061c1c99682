//! How a request behaves while its key is busy.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Extension, Router,
    body::Body,
    http::{Method, Request, StatusCode},
    response::IntoResponse,
    routing::get,
};
use tokio::{sync::Notify, time::Instant};
use tower_lock::{
    HasLockKey, HeldLock, LockKey, LockLayer, LockManager, LockManagerLayer, LockPolicy, Locked, key,
    test_util::StoreOp,
};
use tower_lock_testkit::{
    app::{fetch, send, text},
    locks::{one_key, store_and_locks},
    wait::settle,
};

const A_WHILE: Duration = Duration::from_secs(10);

/// A handler that runs until it is notified.
fn until_notified(order: &Arc<Mutex<Vec<String>>>, end: &Arc<Notify>) -> axum::routing::MethodRouter {
    let (order, end) = (Arc::clone(order), Arc::clone(end));
    get(move |uri: axum::http::Uri| async move {
        order.lock().expect("whole").push(uri.to_string());
        end.notified().await;
        "done"
    })
}

/// Route, nearest `LockManagerLayer`, outer `LockManagerLayer`, `LockManager`, default: each
/// overrides the next.
#[tokio::test(start_paused = true)]
async fn nearest_setting_wins() {
    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }
    let plain = LockManager::in_memory();
    let with_policy = plain.with_policy(LockPolicy::new().wait(s(4)));
    let with_another = plain.with_policy(LockPolicy::new().wait(s(6)));
    let _held = plain.try_lock(("k",)).await.expect("free");
    let route = |locks: &LockManager| {
        Router::new().route("/", get(|| async { "ran" }).route_layer(LockLayer::new(locks, one_key())))
    };
    let own = |locks: &LockManager| {
        Router::new().route("/", get(|| async { "ran" }).route_layer(LockLayer::new(locks, one_key()).wait(s(1))))
    };
    let router = |app: Router, wait| app.layer(LockManagerLayer::new(&plain).wait(wait));
    for (what, app, waited) in [
        ("default", route(&plain), s(0)),
        ("locks", route(&with_policy), s(4)),
        ("router", router(route(&plain), s(2)), s(2)),
        ("router over locks", router(route(&with_policy), s(2)), s(2)),
        ("nearest router", router(router(route(&with_policy), s(2)), s(3)), s(2)),
        (
            "outer router, nearest without settings",
            router(route(&plain).layer(LockManagerLayer::new(&plain)), s(3)),
            s(3),
        ),
        (
            "outer router over the locks of the nearest",
            router(route(&plain).layer(LockManagerLayer::new(&with_policy)), s(3)),
            s(3),
        ),
        ("locks of the router", route(&plain).layer(LockManagerLayer::new(&with_policy)), s(4)),
        (
            "locks of the route over those of the router",
            route(&with_policy).layer(LockManagerLayer::new(&with_another)),
            s(4),
        ),
        ("route", own(&plain), s(1)),
        ("route over router over locks", router(own(&with_policy), s(2)), s(1)),
        (
            "route set to reject again",
            router(
                Router::new()
                    .route("/", get(|| async { "ran" }).route_layer(LockLayer::new(&plain, one_key()).wait(s(0)))),
                s(2),
            ),
            s(0),
        ),
        (
            "a whole policy",
            Router::new().route(
                "/",
                get(|| async { "ran" })
                    .route_layer(LockLayer::new(&with_policy, one_key()).policy(LockPolicy::new().wait(s(5)))),
            ),
            s(5),
        ),
    ] {
        let asked = Instant::now();
        assert_eq!(fetch(&app, "/").await.status(), StatusCode::CONFLICT);
        assert_eq!(asked.elapsed().as_secs(), waited.as_secs(), "{what}");
    }
}

/// RFC 7240.
#[tokio::test(start_paused = true)]
async fn client_chooses_its_wait_where_allowed() {
    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }
    let locks = LockManager::in_memory();
    let route = |policy: LockPolicy| {
        let handler = || get(async |_: HeldLock| "ran").layer(LockLayer::new(&locks, one_key()).policy(policy));
        let locked = get(async |_: Locked<Extension<Anything>>| "ran");
        Router::new()
            .route("/", handler())
            .route("/twice", handler().layer(LockLayer::new(&locks, key::from_parts(|_| ("outer",))).policy(policy)))
            .route("/locked", locked.layer(LockManagerLayer::new(&locks).policy(policy)))
            .layer(Extension(Anything))
    };
    let send = async |app: &Router, path: &str, prefer: Option<&str>| {
        let mut request = Request::get(path);
        if let Some(prefer) = prefer {
            request = request.header("prefer", prefer);
        }
        let asked = Instant::now();
        let response = send(app, request.body(Body::empty()).expect("a request")).await;
        let mut applied = response
            .headers()
            .get_all("preference-applied")
            .iter()
            .map(|value| value.to_str().expect("text").to_owned());
        let (applied, another) = (applied.next(), applied.next());
        assert_eq!(another, None);
        (response.status().as_u16(), asked.elapsed().as_secs(), applied)
    };
    let (never, up_to_5) =
        (route(LockPolicy::new().wait(s(2))), route(LockPolicy::new().wait(s(2)).max_client_wait(s(5))));
    for path in ["/", "/locked", "/twice"] {
        assert_eq!(
            send(&up_to_5, path, Some("wait=4")).await,
            (200, 0, Some("wait=4".into())),
            "the key is free, and the header is applied"
        );
        let held = locks.try_lock(("k",)).await.expect("free");
        assert_eq!(send(&never, path, Some("wait=4")).await, (409, 2, None), "not read");
        assert_eq!(send(&up_to_5, path, None).await, (409, 2, None), "the route's own");
        assert_eq!(send(&up_to_5, path, Some("wait=soon")).await, (409, 2, None));
        for (wait, waits) in [("wait=4", 4), ("wait=60, respond-async", 5), ("wait=1", 1), ("wait=0", 0)] {
            let applied = Some(format!("wait={waits}"));
            assert_eq!(send(&up_to_5, path, Some(wait)).await, (409, waits, applied), "{wait}");
        }
        held.release().await.expect("up");
    }
    let unlocked =
        Router::new().route("/none", get(async || "ran")).layer(LockManagerLayer::new(&locks).max_client_wait(s(5)));
    assert_eq!(send(&unlocked, "/none", Some("wait=4")).await, (200, 0, None), "no wait");
}

#[derive(Clone)]
struct Anything;

impl HasLockKey for Anything {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("k",)
    }
}

/// Rejection handlers are inherited as settings are.
#[tokio::test(start_paused = true)]
async fn nearest_rejection_handler_wins() {
    let locks = LockManager::in_memory();
    let _held = locks.try_lock(("k",)).await.expect("free");
    let say = |status: StatusCode| move |_: &tower_lock::Rejection| status.into_response();
    let route = |layer| Router::new().route("/", get(|| async { "ran" }).route_layer(layer));
    let plain = || LockLayer::new(&locks, one_key());
    let router = |status| LockManagerLayer::new(&locks).on_reject(say(status));
    for (app, status) in [
        (route(plain()).layer(router(StatusCode::LOCKED)), 423),
        (route(plain()).layer(router(StatusCode::LOCKED)).layer(router(StatusCode::GONE)), 423),
        (route(plain()).layer(LockManagerLayer::new(&locks)).layer(router(StatusCode::GONE)), 410),
        (route(plain().on_reject(say(StatusCode::IM_A_TEAPOT))).layer(router(StatusCode::GONE)), 418),
        (route(plain()).layer(LockManagerLayer::new(&locks)), 409),
    ] {
        let response = fetch(&app, "/").await;
        assert_eq!(response.status().as_u16(), status);
        assert!(response.extensions().get::<tower_lock::Rejection>().is_some());
    }
}

/// Layers that several routers share keep what they inherit, but only for requests of one of them.
#[tokio::test(start_paused = true)]
async fn shared_layers_inherit_for_each_request_anew() {
    let locks = LockManager::in_memory();
    let _held = locks.try_lock(("k",)).await.expect("free");
    let say = |status: StatusCode| move |_: &tower_lock::Rejection| status.into_response();
    let (layer, inner) = (LockLayer::new(&locks, one_key()), LockManagerLayer::new(&locks));
    let outer = |status| inner.clone().on_reject(say(status));
    let route = || Router::new().route("/", get(|| async { "ran" }).route_layer(layer.clone()));
    let (gone, locked) = (outer(StatusCode::GONE), outer(StatusCode::LOCKED));
    let apps = [
        (route(), 409),
        (route().layer(inner.clone()), 409),
        (route().layer(gone.clone()), 410),
        (route().layer(locked.clone()), 423),
        (route().layer(inner.clone()).layer(gone), 410),
        (route().layer(inner.clone()).layer(locked), 423),
    ];
    for (app, status) in apps.iter().chain(apps.iter().rev()) {
        assert_eq!(fetch(app, "/").await.status().as_u16(), *status);
    }
}

#[tokio::test(start_paused = true)]
async fn only_skipped_requests_run_without_a_lock() {
    async fn is_locked(lock: Option<HeldLock>) -> String {
        lock.is_some().to_string()
    }
    let (store, locks) = store_and_locks();
    let layer = LockLayer::new(&locks, key::from_fn(|_: String| ("k",)))
        .skip_methods([Method::GET, Method::PUT])
        .skip(|head| head.headers.contains_key("x-dry-run"));
    let app = Router::new().route("/", get(is_locked).post(is_locked).put(is_locked).route_layer(layer));
    let _held = locks.try_lock(("k",)).await.expect("free");
    for (method, dry_run, runs) in [
        (Method::GET, false, true),
        (Method::PUT, false, true),
        (Method::POST, false, false),
        (Method::POST, true, true),
        // Axum runs the handler of GET; the method is not skipped.
        (Method::HEAD, false, false),
    ] {
        let mut request = Request::builder().method(&method).uri("/");
        if dry_run {
            request = request.header("x-dry-run", "1");
        }
        let response = send(&app, request.body(Body::from("x")).expect("a request")).await;
        let status = if runs { StatusCode::OK } else { StatusCode::CONFLICT };
        assert_eq!(response.status(), status, "{method} {dry_run}");
        if runs {
            assert_eq!(text(response).await, "false", "{method} {dry_run}");
        }
    }
    assert_eq!(store.on(StoreOp::Acquire).calls(), 1, "the holder's own");
}

/// Guarantee: G7.
#[tokio::test(start_paused = true)]
async fn disconnect_while_waiting_leaves_the_queue() {
    let (store, locks) = store_and_locks();
    let (order, end) = (Arc::default(), Arc::new(Notify::new()));
    let app = Router::new()
        .route("/", until_notified(&order, &end))
        .route_layer(LockLayer::new(&locks, one_key()).wait(A_WHILE));
    let spawn = |path: &'static str| {
        let app = app.clone();
        tokio::spawn(async move { fetch(&app, path).await.status() })
    };
    let first = spawn("/?first");
    settle().await;
    let leaves = spawn("/?leaves");
    settle().await;
    let last = spawn("/?last");
    settle().await;
    leaves.abort();
    settle().await;
    for request in [first, last] {
        end.notify_one();
        assert_eq!(request.await.expect("no panic"), StatusCode::OK);
        settle().await;
    }
    assert_eq!(*order.lock().expect("whole"), ["/?first", "/?last"]);
    assert_eq!(store.held_count(), 0);
}
