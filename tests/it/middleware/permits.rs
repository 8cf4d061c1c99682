//! Layers with several holders of a key: permits, and readers beside each other.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{Method, Request, Response, StatusCode, header},
    routing::{any, get},
};
use tokio::{sync::Notify, task::JoinHandle};
use tower_lock::{
    HasLockKey, HeldLock, HeldLocks, HeldPermit, LockKey, LockLayer, LockManager, LockManagerLayer, Locked, Rejection,
    key::{self, KeySource},
    test_util::StoreOp,
};
use tower_lock_testkit::{
    app::{fetch, problem_type, send, text},
    locks::{key, one_key, store_and_locks},
    log::Log,
    wait::settle,
};

/// Handlers that run until a test ends them.
#[derive(Clone, Default)]
struct Handlers {
    running: Arc<AtomicUsize>,
    end: Arc<Notify>,
}

impl Handlers {
    async fn run(&self) {
        self.running.fetch_add(1, SeqCst);
        self.end.notified().await;
        self.running.fetch_sub(1, SeqCst);
    }

    fn app(&self, layer: LockLayer<impl KeySource>) -> Router {
        let handlers = self.clone();
        let handler = |_: HeldPermit| async move { handlers.run().await };
        Router::new().route("/", any(handler).layer(layer))
    }

    async fn running(&self) -> usize {
        settle().await;
        self.running.load(SeqCst)
    }
}

fn request(app: &Router, method: Method) -> JoinHandle<Response<Body>> {
    let app = app.clone();
    let request = Request::builder().method(method).uri("/").body(Body::empty()).expect("a request");
    tokio::spawn(async move { send(&app, request).await })
}

async fn problem(response: Response<Body>) -> serde_json::Value {
    serde_json::from_str(&text(response).await).expect("a problem")
}

/// Guarantee: G22.
#[tokio::test(start_paused = true)]
async fn request_above_the_limit_is_a_429_with_retry_after() {
    let (locks, handlers) = (LockManager::in_memory(), Handlers::default());
    let app = handlers.app(LockLayer::new(&locks, one_key()).at_most(2));
    let first = request(&app, Method::POST);
    let second = request(&app, Method::POST);
    assert_eq!((handlers.running().await, locks.held_count()), (2, 2));
    let refused = fetch(&app, "/").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key(header::RETRY_AFTER));
    assert!(matches!(refused.extensions().get(), Some(Rejection::NoPermit { .. })));
    let problem = problem(refused).await;
    assert_eq!((&problem["type"], &problem["outcome"]), (&problem_type("no-permit").into(), &"not-started".into()));
    handlers.end.notify_one();
    settle().await;
    let third = request(&app, Method::POST);
    assert_eq!(handlers.running().await, 2, "one place was free");
    handlers.end.notify_waiters();
    for handler in [first, second, third] {
        assert_eq!(handler.await.expect("no panic").status(), StatusCode::OK);
    }
    assert_eq!(locks.held_count(), 0);
}

/// Guarantee: G22.
#[tokio::test(start_paused = true)]
async fn waiter_for_a_permit_gets_the_next_one_or_429() {
    let (locks, handlers) = (LockManager::in_memory(), Handlers::default());
    let app = handlers.app(LockLayer::new(&locks, one_key()).at_most(2).wait(Duration::from_secs(5)));
    let all: Vec<_> = (0..3).map(|_| request(&app, Method::POST)).collect();
    assert_eq!(handlers.running().await, 2);
    handlers.end.notify_one();
    assert_eq!(handlers.running().await, 2, "the third one");
    let late = fetch(&app, "/").await;
    assert_eq!(late.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(problem(late).await["type"], problem_type("timed-out"));
    let status = StatusCode::SERVICE_UNAVAILABLE;
    let layer = LockLayer::new(&locks, one_key()).at_most(2).wait(Duration::from_secs(5)).wait_timeout_status(status);
    assert_eq!(fetch(&handlers.app(layer), "/").await.status(), status, "as set");
    handlers.end.notify_waiters();
    for handler in all {
        assert_eq!(handler.await.expect("no panic").status(), StatusCode::OK);
    }
}

#[tokio::test(start_paused = true)]
async fn span_of_a_permit_has_its_limit_and_no_fence() {
    let (locks, log) = (LockManager::in_memory(), Log::default());
    let _listening = log.listen();
    let handler = |_: HeldPermit| async { tracing::info!("at work") };
    let app = Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, one_key()).at_most(2)));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::OK);
    let text = log.text();
    let line = text.lines().find(|line| line.contains("at work")).expect("in the span");
    assert!(line.contains("limit=2") && line.contains("depth=1") && !line.contains("fence="), "{text}");
}

#[tokio::test(start_paused = true)]
async fn limit_comes_from_the_request() {
    let ((store, locks), handlers, log) = (store_and_locks(), Handlers::default(), Log::default());
    let _listening = log.listen();
    let limit =
        |head: &axum::http::request::Parts| head.headers["x-plan"].to_str().expect("a number").parse().unwrap_or(0);
    let app = handlers.app(LockLayer::new(&locks, one_key()).at_most_by(limit));
    let with_plan = |plan: &str| {
        let request = Request::builder().uri("/").header("x-plan", plan).body(Body::empty()).expect("a request");
        let app = app.clone();
        async move { send(&app, request).await }
    };
    let none = with_plan("0").await;
    assert_eq!((none.status(), store.on(StoreOp::Acquire).calls()), (StatusCode::TOO_MANY_REQUESTS, 0));
    assert!(none.headers().contains_key(header::RETRY_AFTER));
    assert!(log.text().contains("result=\"locked\""), "{}", log.text());
    let running = tokio::spawn(with_plan("1"));
    assert_eq!(handlers.running().await, 1);
    assert_eq!(with_plan("1").await.status(), StatusCode::TOO_MANY_REQUESTS);
    handlers.end.notify_waiters();
    assert_eq!(running.await.expect("no panic").status(), StatusCode::OK);
    assert_eq!(with_plan("1025").await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(log.text().contains("`at_most_by` returned 1025, and 1024 is the most"), "{}", log.text());
}

/// Guarantee: G23.
#[tokio::test(start_paused = true)]
async fn readers_share_and_writers_are_alone() {
    async fn write(lock: HeldLock, permit: HeldPermit) -> String {
        format!("{} {}", lock.fencing_token().as_u64() > 0, lock.key() == permit.key())
    }
    let (locks, readers) = (LockManager::in_memory(), Handlers::default());
    let read = {
        let readers = readers.clone();
        |_: HeldPermit| async move { readers.run().await }
    };
    let layer = LockLayer::new(&locks, one_key()).shared_for([Method::GET, Method::HEAD]);
    let app = Router::new().route("/", get(read).put(write).route_layer(layer));
    let all: Vec<_> = [Method::GET, Method::GET, Method::HEAD].map(|method| request(&app, method)).into();
    assert_eq!(readers.running().await, 3);
    let refused = request(&app, Method::PUT).await.expect("no panic");
    assert_eq!(refused.status(), StatusCode::CONFLICT);
    assert_eq!(problem(refused).await["type"], problem_type("locked"));
    readers.end.notify_waiters();
    for reader in all {
        assert_eq!(reader.await.expect("no panic").status(), StatusCode::OK);
    }
    let writer = request(&app, Method::PUT).await.expect("no panic");
    assert_eq!(text(writer).await, "true true");
    let _writer = locks.lock(key()).await.expect("free");
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::CONFLICT, "no reader beside a writer");
}

/// Each mix-up is a 500 that names the remedy.
///
/// Guarantee: G22.
#[tokio::test(start_paused = true)]
async fn wrong_view_is_a_500_that_names_the_other_one() {
    async fn locked(_: HeldLock) {}
    async fn perhaps(_: Option<HeldLock>) {}
    async fn several(_: HeldLocks) {}
    async fn perhaps_several(_: Option<HeldLocks>) {}
    async fn permitted(_: HeldPermit) {}
    async fn perhaps_permitted(_: Option<HeldPermit>) {}
    let locks = LockManager::in_memory();
    let permits = || LockLayer::new(&locks, one_key()).at_most(2);
    let shared = || LockLayer::new(&locks, one_key()).shared_for([Method::GET]);
    let alone = || LockLayer::new(&locks, one_key());
    for (app, remedy) in [
        (get(locked).route_layer(permits()), "Use `HeldPermit`"),
        (get(perhaps).route_layer(permits()), "Use `HeldPermit`"),
        (get(several).route_layer(permits()), "Use `HeldPermit`"),
        (get(perhaps_several).route_layer(permits()), "Use `HeldPermit`"),
        (get(locked).route_layer(shared()), "Use `HeldPermit`"),
        (get(permitted).route_layer(alone()), "Use `HeldLock`, or set `.at_most(..)`"),
        (get(perhaps_permitted).route_layer(alone()), "Use `HeldLock`, or set `.at_most(..)`"),
        (get(permitted), "no `LockLayer` is around this handler"),
    ] {
        let response = fetch(&Router::new().route("/", app), "/").await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR, "{remedy}");
        let text = text(response).await;
        assert!(text.contains(remedy), "{text}");
    }
    let log = Log::default();
    let _listening = log.listen();
    let keys = key::from_fn(|| key::all([("k", 1), ("k", 2)]));
    let app = Router::new().route("/", get(several).route_layer(LockLayer::new(&locks, keys).at_most(2)));
    let response = fetch(&app, "/").await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let body = text(response).await;
    assert!(body.contains("The service is not set up for this request."), "{body}");
    assert!(log.text().contains("`at_most` and `shared_for` are for one key"), "{}", log.text());
    let raw = key::from_fn(|| LockKey::raw("of-others").expect("a name"));
    let app = Router::new().route("/", get(permitted).route_layer(LockLayer::new(&locks, raw).at_most(2)));
    assert_eq!(fetch(&app, "/").await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(log.text().contains("are not for raw keys, which have one holder"), "{}", log.text());
    let either = get(perhaps_permitted);
    assert_eq!(fetch(&Router::new().route("/", either), "/").await.status(), StatusCode::OK, "no lock at all");
}

/// A tenant of an organization: each has a limit, and the inner one is the smaller one.
#[tokio::test(start_paused = true)]
async fn nested_layers_hold_a_permit_of_each_limit() {
    let (locks, handlers) = (LockManager::in_memory(), Handlers::default());
    let of = |part: &'static str| {
        key::from_fn(
            move |Path((organization, tenant)): Path<(u64, u64)>| {
                if part == "organization" { (part, organization) } else { (part, tenant) }
            },
        )
    };
    let seen = |permit: HeldPermit, handlers: Handlers| async move {
        handlers.run().await;
        permit.key().to_string()
    };
    let running = handlers.clone();
    let route = get(move |permit: HeldPermit| seen(permit, running))
        .route_layer(LockLayer::new(&locks, of("tenant")).at_most(2))
        .route_layer(LockLayer::new(&locks, of("organization")).at_most(3));
    let app = Router::new().route("/{organization}/{tenant}", route);
    let call = |path: &'static str| {
        let app = app.clone();
        tokio::spawn(async move { fetch(&app, path).await })
    };
    let mut all = vec![call("/1/7"), call("/1/7")];
    assert_eq!((handlers.running().await, locks.held_count()), (2, 4));
    let refused = call("/1/7").await.expect("no panic");
    assert_eq!((refused.status(), locks.held_count()), (StatusCode::TOO_MANY_REQUESTS, 4), "the outer one is back");
    all.push(call("/1/8"));
    assert_eq!(handlers.running().await, 3);
    assert_eq!(call("/1/9").await.expect("no panic").status(), StatusCode::TOO_MANY_REQUESTS, "of the organization");
    handlers.end.notify_waiters();
    let mut keys = Vec::new();
    for handler in all {
        keys.push(text(handler.await.expect("no panic")).await);
    }
    assert_eq!(keys, ["tenant:7", "tenant:7", "tenant:8"]);
    assert_eq!(locks.held_count(), 0);
}

/// It would wait for its own outer layer.
///
/// Guarantee: G23.
#[tokio::test(start_paused = true)]
async fn upgrade_within_a_request_is_a_409_that_names_both_routes() {
    let (locks, log) = (LockManager::in_memory(), Log::default());
    let _listening = log.listen();
    let alone = LockLayer::new(&locks, one_key()).route_name("inner").wait(Duration::from_secs(60));
    let shared = LockLayer::new(&locks, one_key()).route_name("outer").at_most(4);
    let service = tower::ServiceBuilder::new()
        .layer(shared)
        .layer(alone)
        .service_fn(|_| async { Ok::<_, std::convert::Infallible>(Response::new(Body::empty())) });
    let response = tower::ServiceExt::oneshot(service, Request::new(Body::empty())).await.expect("a response");
    assert_eq!(response.status(), StatusCode::CONFLICT);
    let rejection = response.extensions().get().cloned();
    let Some(Rejection::WouldDeadlock { held_by, asked_by }) = rejection else { panic!("{rejection:?}") };
    assert_eq!((&*held_by, &*asked_by), ("outer", "inner"));
    assert!(log.text().contains("asks for it alone"), "{}", log.text());
}

/// Whether that layer has a permit, or no lock inside of one that has a permit.
#[tokio::test(start_paused = true)]
async fn extractor_has_the_settings_of_the_innermost_layer() {
    #[derive(serde::Deserialize)]
    struct Item(u64);
    impl HasLockKey for Item {
        fn lock_key(&self) -> impl Into<LockKey> {
            ("item", self.0)
        }
    }
    async fn take(_: Locked<Path<Item>>) {}
    const WAIT: Duration = Duration::from_secs(60);
    let locks = LockManager::in_memory();
    let other = || LockLayer::new(&locks, key::from_parts(|_| ("other", 1)));
    for route in [
        get(take).route_layer(other().at_most(2).wait(WAIT)).route_layer(LockLayer::new(&locks, one_key())),
        get(take).route_layer(LockManagerLayer::new(&locks).wait(WAIT)).route_layer(other().at_most(2)),
    ] {
        let held = locks.lock(("item", 7)).await.expect("free");
        let app = Router::new().route("/{item}", route);
        let waiting = tokio::spawn(async move { fetch(&app, "/7").await });
        settle().await;
        assert!(!waiting.is_finished(), "it waits as the inner layer says");
        held.release().await.expect("in memory");
        assert_eq!(waiting.await.expect("no panic").status(), StatusCode::OK);
    }
}

/// Under the whole key, a permit of it is the same section.
#[tokio::test(start_paused = true)]
async fn permit_under_the_lock_of_the_request_joins_it() {
    let locks = LockManager::in_memory();
    let handler = |lock: HeldLock, permit: HeldPermit| async move { (lock.key() == permit.key()).to_string() };
    let route = get(handler)
        .route_layer(LockLayer::new(&locks, one_key()).at_most(4))
        .route_layer(LockLayer::new(&locks, one_key()));
    let response = fetch(&Router::new().route("/", route), "/").await;
    assert_eq!((response.status(), &*text(response).await), (StatusCode::OK, "true"));
    assert_eq!(locks.held_count(), 0);
}

#[test]
#[should_panic(expected = "0 permits are not possible")]
fn layer_without_permits_panics() {
    let _ = LockLayer::new(&LockManager::in_memory(), one_key()).at_most(0);
}
