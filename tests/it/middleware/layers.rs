//! Positions of the layer, and its effect on a service: only the lock.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Path,
    http::{Method, Request, Response, StatusCode},
    routing::{any, get, post},
};
use http_body_util::Full;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_http::{catch_panic::CatchPanicLayer, cors::CorsLayer};
use tower_lock::{
    HeldLock, LockLayer, LockManager, LockManagerLayer, Owner, key, middleware::RequestBody, test_util::StoreOp,
};
use tower_lock_testkit::{
    app::{fetch, send, text},
    locks::{one_key, store_and_locks},
    wait::{settle, soon},
};

async fn show_key(lock: HeldLock) -> String {
    lock.key().to_string()
}

fn is_shared<T: Clone + Send + Sync + 'static>(_: &T) {}

#[tokio::test(start_paused = true)]
async fn layer_works_on_routers_method_routers_and_routes() {
    let locks = LockManager::in_memory();
    let lock = || LockLayer::new(&locks, key::from_fn(|Path(id): Path<u64>| ("order", id)));
    let apps = [
        Router::new().route("/{id}", get(show_key)).layer(lock()),
        Router::new().route("/{id}", get(show_key)).route_layer(lock()),
        Router::new().route("/{id}", get(show_key).layer(lock())),
        Router::new().route("/{id}", get(show_key).post(show_key).route_layer(lock())),
        Router::new().nest("/n", Router::new().route("/{id}", get(show_key)).layer(lock())),
        Router::new().nest("/n", Router::new().route("/{id}", get(show_key)).route_layer(lock())),
        Router::new().nest("/n", Router::new().route("/{id}", get(show_key))).layer(lock()),
        Router::new().route("/{id}", get(show_key).layer(lock())).layer(LockManagerLayer::new(&locks)),
    ];
    for (n, app) in apps.into_iter().enumerate() {
        let path = if (4..7).contains(&n) { "/n/7" } else { "/7" };
        assert_eq!((n, text(fetch(&app, path).await).await.as_str()), (n, "order:7"));
    }
}

#[tokio::test(start_paused = true)]
async fn layer_works_on_a_tower_service_with_any_body() {
    let locks = LockManager::in_memory();
    let hello = service_fn(|request: Request<RequestBody>| async move {
        let key = request.extensions().get::<HeldLock>().map(|lock| lock.key().to_string());
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(key.unwrap_or_default()))))
    });
    let request = || Request::get("/a").body(Full::<Bytes>::default()).expect("a request");

    let by_path = LockLayer::new(&locks, key::from_parts(|parts| ("path", parts.uri.path().to_owned())));
    let service = by_path.layer(hello);
    is_shared(&by_path);
    is_shared(&service);
    assert_eq!(text(service.oneshot(request()).await.expect("infallible")).await, "path:%2Fa".replace("%2F", "/"));

    // By extractors, too.
    let by_method = LockLayer::new(&locks, key::from_fn(|method: axum::http::Method| ("method", method.to_string())));
    let service = ServiceBuilder::new().layer(by_method).service(hello);
    is_shared(&service);
    assert_eq!(text(service.oneshot(request()).await.expect("infallible")).await, "method:GET");

    // The service sees the same body for every key source.
    let by_body = LockLayer::new(&locks, key::from_fn(|b: Bytes| ("len", b.len())));
    let echo =
        service_fn(|request: Request<RequestBody>| async { Ok::<_, Infallible>(Response::new(request.into_body())) });
    let service = by_body.layer(echo);
    is_shared(&service);
    let request = Request::new(Full::new(Bytes::from_static(b"12345")));
    assert_eq!(text(service.oneshot(request).await.expect("infallible")).await, "12345");
}

/// With "ready, then call" the request for the other key would queue behind the waiting one.
#[tokio::test(start_paused = true)]
async fn waiter_does_not_occupy_inner_capacity() {
    let locks = LockManager::in_memory();
    let inner = service_fn(|_: Request<RequestBody>| async { Ok::<_, Infallible>(Response::new(Body::empty())) });
    let service = LockLayer::new(&locks, key::from_parts(|parts| ("path", parts.uri.path().to_owned())))
        .wait(Duration::from_secs(60))
        .layer(ConcurrencyLimit::new(inner, 1));
    let request = |path| Request::get(path).body(Body::empty()).expect("a request");

    let held = locks.try_lock(("path", "/a")).await.expect("free");
    let waiter = tokio::spawn(service.clone().oneshot(request("/a")));
    settle().await;
    let other = soon("the section of the other key", service.clone().oneshot(request("/b"))).await.expect("infallible");
    assert_eq!(other.status(), StatusCode::OK);
    assert!(!waiter.is_finished());
    held.release().await.expect("the store is up");
    let waited = soon("the section of the waiter", waiter).await.expect("no panic").expect("infallible");
    assert_eq!(waited.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn inner_service_gets_ready_under_the_lock_or_releases_it() {
    #[derive(Clone)]
    struct Broken {
        when_ready: bool,
        locks: LockManager,
        seen_held: Arc<AtomicUsize>,
    }
    impl Service<Request<RequestBody>> for Broken {
        type Response = Response<Body>;
        type Error = &'static str;
        type Future = std::future::Ready<Result<Response<Body>, &'static str>>;

        fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), &'static str>> {
            let mut taken =
                std::pin::pin!(std::future::IntoFuture::into_future(self.locks.try_lock(("k",)).owner(&Owner::new())));
            if let std::task::Poll::Ready(Err(_)) = taken.as_mut().poll(cx) {
                self.seen_held.fetch_add(1, SeqCst);
            }
            std::task::Poll::Ready(if self.when_ready { Err("not ready") } else { Ok(()) })
        }

        fn call(&mut self, _: Request<RequestBody>) -> Self::Future {
            std::future::ready(Err("broken"))
        }
    }
    let (store, locks) = store_and_locks();
    for (when_ready, error) in [(true, "not ready"), (false, "broken")] {
        let inner = Broken { when_ready, locks: locks.clone(), seen_held: Arc::default() };
        let service = LockLayer::new(&locks, one_key()).layer(inner.clone());
        assert_eq!(service.oneshot(Request::new(Body::empty())).await.expect_err("its own error"), error);
        assert_eq!(inner.seen_held.load(SeqCst), 1, "polled for readiness once, under the lock");
        assert_eq!(store.held_count(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn layer_is_ready_before_its_inner_service() {
    #[derive(Clone)]
    struct NeverReady;
    impl Service<Request<RequestBody>> for NeverReady {
        type Response = Response<Body>;
        type Error = Infallible;
        type Future = std::future::Pending<Result<Response<Body>, Infallible>>;

        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
            std::task::Poll::Pending
        }

        fn call(&mut self, _: Request<RequestBody>) -> Self::Future {
            std::future::pending()
        }
    }
    let mut service = LockLayer::new(&LockManager::in_memory(), one_key()).layer(NeverReady);
    assert!(futures_util::poll!(ServiceExt::<Request<Body>>::ready(&mut service)).is_ready());
}

/// I10.
/// Guarantee: G2.
#[tokio::test(start_paused = true)]
async fn handler_panic_propagates_and_frees_after_the_lock_delay() {
    let (store, locks) = store_and_locks();
    let app = Router::new()
        .route(
            "/",
            get(|| async {
                if true {
                    panic!("a handler's panic")
                }
            }),
        )
        .route_layer(LockLayer::new(&locks, one_key()))
        .layer(CatchPanicLayer::new());
    for _ in 0..3 {
        let response = fetch(&app, "/").await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR, "the outer layer responds");
        tokio::time::sleep(Duration::from_millis(990)).await;
        assert_eq!(fetch(&app, "/").await.status(), StatusCode::CONFLICT, "a statement may still be in flight");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(store.on(StoreOp::Release).calls(), 3, "each is released once");
}

#[tokio::test(start_paused = true)]
async fn preflight_404_and_405_never_reach_the_store() {
    let (store, locks) = store_and_locks();
    let ran = || post(|| async { "ran" });
    let on_the_handler = Router::new().route("/order/{id}", ran().route_layer(LockLayer::new(&locks, one_key())));
    let on_the_router = Router::new().route("/order/{id}", ran()).route_layer(LockLayer::new(&locks, one_key()));
    for app in [on_the_handler.clone(), on_the_router] {
        let app = app.layer(CorsLayer::permissive());
        let preflight = Request::options("/order/1")
            .header("origin", "https://example.org")
            .header("access-control-request-method", "POST")
            .body(Body::empty());
        let response = send(&app, preflight.expect("a request")).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["access-control-allow-methods"], "*");
        assert_eq!(fetch(&app, "/nowhere").await.status(), StatusCode::NOT_FOUND);
    }
    assert_eq!(fetch(&on_the_handler, "/order/1").await.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(store.on(StoreOp::Acquire).calls(), 0);
}

/// As hyper does with each connection. (The compiler must prove it for all lifetimes, including
/// that of the namespace.)
#[tokio::test(start_paused = true)]
async fn response_futures_are_send_for_every_key_source() {
    async fn show(request: Request<RequestBody>) -> Result<Response<Body>, Infallible> {
        let lock = request.extensions().get::<HeldLock>().expect("held");
        Ok(Response::new(lock.key().as_str().to_owned().into()))
    }
    macro_rules! served {
        ($key:expr) => {{
            let service = LockLayer::new(&LockManager::in_memory(), $key).layer(service_fn(show));
            let task = tokio::spawn(async move {
                let request = Request::get("/7").header("x-n", "7").body(Body::empty()).expect("a request");
                service.clone().oneshot(request).await.expect("infallible").map(Body::new)
            });
            text(task.await.expect("no panic")).await
        }};
    }
    assert_eq!(served!(key::from_parts(|parts| ("k", parts.uri.path().to_owned()))), "k:/7");
    assert_eq!(served!(key::from_parts(|_| Some(("k", 7)))), "k:7");
    assert_eq!(served!(key::from_fn(|uri: axum::http::Uri| ("k", uri.path().len()))), "k:2");
    assert_eq!(served!(key::from_fn(async |uri: axum::http::Uri| Ok::<_, StatusCode>(("k", uri.path().len())))), "k:2");
    assert_eq!(served!(key::from_fn(|uri: axum::http::Uri, body: String| ("k", uri.path().len(), body))), "k:2:");
    assert_eq!(served!(tower_lock::key::from_fields("k", tower_lock::key::header("x-n"))), "k:7");
    assert_eq!(served!(tower_lock::key::fixed(("k", 7))), "k:7");
}

/// An outer layer that responds by itself needs a body: the timeout of `tower-http` uses `Default`.
#[tokio::test(start_paused = true)]
async fn outer_layer_can_respond_with_a_default_body() {
    fn answers_by_itself<B: Default>() -> Response<B> {
        Response::default()
    }
    assert_eq!(text(answers_by_itself::<tower_lock::middleware::ResponseBody<Body>>()).await, "");
}

/// A layer on a whole router also gets unmatched requests. They never run without a lock, and are
/// not an error of the service.
#[tokio::test(start_paused = true)]
async fn unknown_url_under_a_router_layer_is_a_404() {
    let (store, locks) = store_and_locks();
    let routes = || Router::new().route("/order/{id}", post(|| async { "ran" }));
    let fallback = || routes().fallback(async || "ran without a lock");
    let by_path = LockLayer::new(&locks, key::from_fn(|Path(id): Path<u64>| ("order", id)));
    let by_field = LockLayer::new(&locks, tower_lock::key::from_fields("order", tower_lock::key::path_param("id")));
    for app in [
        routes().layer(by_path.clone()),
        fallback().layer(by_path),
        routes().layer(by_field.clone()),
        fallback().layer(by_field),
    ] {
        let response = fetch(&app, "/nowhere").await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        assert!(text(response).await.contains("No route matches"));
        let known = Request::post("/order/1").body(Body::empty()).expect("a request");
        assert_eq!(text(send(&app, known).await).await, "ran");
    }
    // On a matched route it is one.
    let lacks = LockLayer::new(&locks, key::from_fn(|axum::Extension(id): axum::Extension<u64>| ("order", id)));
    let response =
        send(&routes().layer(lacks), Request::post("/order/1").body(Body::empty()).expect("a request")).await;
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(store.held_count(), 0);
}

fn request(method: Method, path: &str) -> Request<Body> {
    Request::builder().method(method).uri(path).body(Body::empty()).expect("a request")
}

/// As documented at the layer.
#[tokio::test(start_paused = true)]
async fn router_layer_locks_unknown_routes_and_route_layer_does_not() {
    let lock = || LockLayer::new(&LockManager::in_memory(), key::from_fn(|Path(id): Path<u64>| ("order", id)));
    let router = || Router::new().route("/{id}/pay", post(async || "paid"));
    let status = async |app: Router, path: &str| fetch(&app, path).await.status().as_u16();
    assert_eq!(status(router().layer(lock()), "/nope").await, 404, "by the lock layer");
    assert_eq!(status(router().route_layer(lock()), "/nope").await, 404);
    assert_eq!(status(router().route_layer(lock()), "/x/pay").await, 400, "the key function before the 405");
    let methods = Router::new().route("/{id}/pay", post(async || "paid").route_layer(lock()));
    assert_eq!(status(methods.clone(), "/nope").await, 404);
    assert_eq!(status(methods, "/x/pay").await, 405);
}

/// Axum adds these handlers outside the layer. The docs of the layer list them.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn extractor_detects_a_method_added_outside_the_lock() {
    let lock = || LockLayer::new(&LockManager::in_memory(), key::from_fn(|Path(id): Path<u64>| ("order", id)));
    let work = async |lock: HeldLock| lock.key().to_string();
    for (how, locked, unlocked, methods) in [
        ("a fallback", Method::POST, Method::DELETE, post(work).fallback(work).route_layer(lock())),
        ("any", Method::GET, Method::DELETE, any(work).get(work).route_layer(lock())),
        ("merge", Method::POST, Method::GET, post(work).route_layer(lock()).merge(get(work))),
        ("a later method", Method::POST, Method::PUT, post(work).route_layer(lock()).put(work)),
    ] {
        let app = Router::new().route("/{id}", methods);
        assert_eq!(text(send(&app, request(locked, "/7")).await).await, "order:7", "{how}");
        let response = send(&app, request(unlocked, "/7")).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR, "{how}");
        let text = text(response).await;
        assert!(text.contains("holds no lock for `HeldLock`: no `LockLayer` is around this handler"), "{how}: {text}");
        assert!(text.contains("methods and routes that were added before it"), "{how}: {text}");
    }
    // The alternative from the docs.
    for (method, methods) in [
        (Method::DELETE, post(work).fallback(work).layer(lock())),
        (Method::DELETE, any(work).get(work).layer(lock())),
        (Method::GET, post(work).merge(get(work)).route_layer(lock())),
        (Method::PUT, post(work).put(work).route_layer(lock())),
    ] {
        let app = Router::new().route("/{id}", methods);
        assert_eq!(text(send(&app, request(method, "/7")).await).await, "order:7");
    }
}
