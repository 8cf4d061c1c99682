//! Keys from the values that the handler will see.

use axum::{
    Extension, Form, Json, Router,
    body::{Body, Bytes},
    extract::{FromRef, Path, Query, Request as AnyRequest, State, rejection::JsonRejection},
    http::{HeaderMap, Method, Request, StatusCode, Uri},
    routing::{any, get, post},
};
use serde::Deserialize;
use tower_lock::{HeldLock, LockKey, LockLayer, LockManager, Rejection, key, test_util::StoreOp};
use tower_lock_testkit::{
    app::{fetch, post_json, send, text},
    locks::store_and_locks,
};

#[derive(Deserialize)]
struct Claim {
    family_id: u64,
    reward_type: String,
}

#[derive(Clone)]
struct Tenant(u64);

#[derive(Clone)]
struct App {
    tenant: Tenant,
}

impl FromRef<App> for Tenant {
    fn from_ref(app: &App) -> Self {
        app.tenant.clone()
    }
}

async fn show_key(lock: Option<HeldLock>) -> String {
    lock.map_or_else(|| "no lock".into(), |lock| lock.key().to_string())
}

fn named(Path(id): Path<u64>) -> LockKey {
    LockKey::from(("order", id))
}

async fn named_async(Path(id): Path<u64>, Json(c): Json<Claim>) -> Result<LockKey, StatusCode> {
    Ok(LockKey::from(("order", id, c.family_id)))
}

fn generic<T: tower_lock::key::KeyPart>(Path(id): Path<T>) -> (&'static str, T) {
    ("order", id)
}

#[tokio::test(start_paused = true)]
async fn key_functions_take_extractors_and_return_any_key_output() {
    let locks = &LockManager::in_memory();
    let app = App { tenant: Tenant(9) };
    let captured = String::from("eu");
    macro_rules! routes {
        ($($key_fn:expr => $want:expr,)*) => {{
            let mut wants = Vec::new();
            let router = Router::new();
            $(
                let router = router.route(
                    &format!("/{}/{{id}}", wants.len()),
                    post(show_key).route_layer(LockLayer::new(locks, $key_fn)),
                );
                wants.push($want);
            )*
            (router, wants)
        }};
    }
    let (router, wants) = routes! {
        // No to four extractors, the last of which may read the body.
        key::from_fn(|| ("nightly",)) => "nightly",
        key::from_fn(|Path(id): Path<u64>| ("order", id)) => "order:7",
        key::from_fn(|Json(c): Json<Claim>| ("reward", c.family_id, c.reward_type)) => "reward:1:gold",
        key::from_fn(|Path(id): Path<u64>, Json(c): Json<Claim>| ("order", id, c.reward_type)) => "order:7:gold",
        key::from_fn(|Path(id): Path<u64>, _: HeaderMap, m: Method, b: Bytes| ("raw", id, m.to_string(), b.len())) => "raw:7:POST:38",
        key::from_fn(|Path(id): Path<u64>, _: HeaderMap, _: Method, u: Uri| ("uri", id, u.path().len())) => "uri:7:4",
        key::from_fn(|b: String| ("text", b.len())) => "text:38",
        key::from_fn(|r: AnyRequest| ("method", r.method().to_string())) => "method:POST",
        // Functions, async blocks, async closures.
        key::from_fn(named) => "order:7",
        key::from_fn(named_async) => "order:7:1",
        key::from_fn(generic::<u32>) => "order:7",
        key::from_fn(|Path(id): Path<u64>| async move { ("order", id) }) => "order:7",
        key::from_fn(async |Json(c): Json<Claim>| ("reward", c.family_id)) => "reward:1",
        // An `Option`, a `Result`, both.
        key::from_fn(|m: Method, Path(id): Path<u64>| (m == Method::POST).then_some(("order", id))) => "order:7",
        key::from_fn(|m: Method, Path(id): Path<u64>| (m == Method::GET).then_some(("order", id))) => "no lock",
        key::from_fn(|Path(id): Path<u64>| Ok::<_, StatusCode>(("order", id))) => "order:7",
        key::from_fn(|_: Uri| -> Result<Option<LockKey>, StatusCode> { Ok(None) }) => "no lock",
        key::from_fn(|Path(id): Path<u64>| async move { Ok::<_, (StatusCode, String)>(Some(("order", id))) }) => "order:7",
        // Extractors that may fail or be absent.
        key::from_fn(|c: Option<Json<Claim>>| c.map(|Json(c)| ("reward", c.family_id))) => "reward:1",
        key::from_fn(|c: Result<Json<Claim>, JsonRejection>| c.map(|Json(c)| ("reward", c.family_id))) => "reward:1",
        key::from_fn(|Extension(t): Extension<Tenant>| ("tenant", t.0)) => "tenant:9",
        // State, whole and in part, and captured values.
        key::from_fn_with_state(app.clone(), |State(t): State<Tenant>, Path(id): Path<u64>| ("order", t.0, id)) => "order:9:7",
        key::from_fn_with_state(app.clone(), |State(a): State<App>, Json(c): Json<Claim>| async move { ("t", a.tenant.0, c.family_id) }) => "t:9:1",
        key::from_fn(move |Path(id): Path<u64>| ("order", captured.clone(), id)) => "order:eu:7",
    };
    let router = router.layer(Extension(Tenant(9)));
    for (n, want) in wants.into_iter().enumerate() {
        let response = post_json(&router, &format!("/{n}/7"), r#"{"family_id":1,"reward_type":"gold"}  "#).await;
        assert_eq!((n, text(response).await.as_str()), (n, want));
    }
}

/// All texts of one value give one key, or are rejected before the handler runs.
/// Guarantee: G14.
#[tokio::test(start_paused = true)]
async fn equal_values_give_one_key_or_are_rejected() {
    #[derive(Deserialize)]
    struct Id {
        id: u64,
    }
    let locks = &LockManager::in_memory();
    let app = Router::new()
        .route(
            "/path/{id}",
            any(show_key).layer(LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("order", id)))),
        )
        .route(
            "/query",
            get(show_key).route_layer(LockLayer::new(locks, key::from_fn(|Query(q): Query<Id>| ("order", q.id)))),
        )
        .route(
            "/form",
            post(show_key).route_layer(LockLayer::new(locks, key::from_fn(|Form(f): Form<Id>| ("order", f.id)))),
        )
        .route(
            "/json",
            post(show_key).route_layer(LockLayer::new(locks, key::from_fn(|Json(j): Json<Id>| ("order", j.id)))),
        );
    let (json, form) = ("application/json", "application/x-www-form-urlencoded");
    let one_key = [
        ("GET", "/path/1", "", ""),
        ("POST", "/path/1", "", ""),
        ("GET", "/path/01", "", ""),
        ("GET", "/path/+1", "", ""),
        ("GET", "/path/%31", "", ""),
        ("GET", "/path/%2B1", "", ""),
        ("GET", "/path/1?id=2", "", ""),
        ("GET", "/query?id=1", "", ""),
        ("GET", "/query?id=01", "", ""),
        ("GET", "/query?id=%31", "", ""),
        ("GET", "/query?id=%2B1", "", ""),
        ("GET", "/query?x=2&id=1", "", ""),
        ("POST", "/form", form, "id=1"),
        ("POST", "/form", form, "id=%31"),
        ("POST", "/json", json, r#"{"id":1}"#),
        ("POST", "/json", json, r#" { "x" : 2, "\u0069d" : 1 } "#),
    ];
    let refused = [
        ("GET", "/path/1.0", "", ""),
        ("GET", "/path/1/", "", ""),
        ("GET", "/path//1", "", ""),
        ("GET", "/path/-1", "", ""),
        ("GET", "/path/1%20", "", ""),
        ("GET", "/path/%EF%BC%91", "", ""),            // a full-width 1
        ("GET", "/path/18446744073709551617", "", ""), // 1 + 2^64
        ("GET", "/query?id=+1", "", ""),               // a blank and a 1
        ("GET", "/query?id=1.0", "", ""),
        ("GET", "/query?id=1&id=1", "", ""),
        ("GET", "/query?id=1&id=2", "", ""),
        ("GET", "/query?id=2&i%64=1", "", ""),
        ("GET", "/query", "", ""),
        ("POST", "/form", form, "id=1&id=2"),
        ("POST", "/json", json, r#"{"id":1.0}"#),
        ("POST", "/json", json, r#"{"id":1e0}"#),
        ("POST", "/json", json, r#"{"id":01}"#),
        ("POST", "/json", json, r#"{"id":+1}"#),
        ("POST", "/json", json, r#"{"id":"1"}"#),
        ("POST", "/json", json, r#"{"id":1,"id":2}"#),
        ("POST", "/json", json, r#"{"id":2,"id":1}"#),
        ("POST", "/json", "text/plain", r#"{"id":1}"#),
        ("POST", "/json", json, ""),
    ];
    let response = async |(method, uri, kind, body): (&str, &str, &str, &'static str)| {
        let request = Request::builder().method(method).uri(uri).header("content-type", kind).body(Body::from(body));
        send(&app, request.expect("a request")).await
    };
    for spelling in one_key {
        let response = response(spelling).await;
        assert_eq!((response.status(), text(response).await.as_str()), (StatusCode::OK, "order:1"), "{spelling:?}");
    }
    for spelling in refused {
        let status = response(spelling).await.status();
        assert!(status.is_client_error() && status != StatusCode::CONFLICT, "{spelling:?}: {status}");
    }
}

#[tokio::test(start_paused = true)]
async fn head_and_get_have_the_same_key() {
    let (store, locks) = store_and_locks();
    let app = Router::new().route(
        "/{id}",
        get(show_key).route_layer(LockLayer::new(&locks, key::from_fn(|Path(id): Path<u64>| ("order", id)))),
    );
    let held = locks.try_lock(("order", 1)).await.expect("free");
    let head = send(&app, Request::head("/1").body(Body::empty()).expect("a request")).await;
    assert_eq!(head.status(), StatusCode::CONFLICT, "no way past the lock");
    held.release().await.expect("the store is up");
    assert_eq!(send(&app, Request::head("/1").body(Body::empty()).expect("a request")).await.status(), StatusCode::OK);
    assert_eq!(store.held_count(), 0);
}

/// Status, headers and body are those of the same route without a lock.
#[tokio::test(start_paused = true)]
async fn extractor_rejection_is_returned_unchanged_before_locking() {
    async fn claim(Path(_): Path<u64>, Json(c): Json<Claim>) -> String {
        c.reward_type
    }
    let (store, locks) = store_and_locks();
    let key = key::from_fn(|Path(id): Path<u64>, Json(c): Json<Claim>| ("reward", id, c.family_id));
    let plain = Router::new().route("/{id}", post(claim));
    let locked = Router::new().route("/{id}", post(claim).route_layer(LockLayer::new(&locks, key)));
    for (uri, kind, body, status) in [
        ("/1", "application/json", r#"{"family_id":"x"}"#, 422),
        ("/1", "application/json", r#"{"family_id":1,"family_id":2,"reward_type":"a"}"#, 422),
        ("/1", "application/json", "{", 400),
        ("/1", "text/plain", "{}", 415),
        ("/x", "application/json", r#"{"family_id":1,"reward_type":"a"}"#, 400),
    ] {
        let request = || Request::post(uri).header("content-type", kind).body(Body::from(body)).expect("a request");
        let (without, with) = (send(&plain, request()).await, send(&locked, request()).await);
        assert_eq!(with.status(), status, "{body}");
        assert_eq!(with.status(), without.status());
        assert_eq!(with.headers(), without.headers());
        let rejection = with.extensions().get::<Rejection>();
        let Some(Rejection::InvalidKey { status: sent, field: None, extractor: Some(extractor) }) = rejection else {
            panic!("{rejection:?}")
        };
        assert_eq!(*sent, with.status());
        assert_eq!(extractor, if uri == "/x" { "Path<u64>" } else { "Json<Claim>" });
        assert_eq!(text(with).await, text(without).await);
    }
    assert_eq!(store.on(StoreOp::Acquire).calls(), 0, "no store call");
}

#[tokio::test(start_paused = true)]
async fn error_of_a_key_function_is_the_response() {
    let (store, locks) = store_and_locks();
    let key = key::from_fn(|headers: HeaderMap| match headers.get("x-order") {
        Some(order) => Ok(("order", order.len())),
        None => Err((StatusCode::BAD_REQUEST, [("x-why", "no order")], "name the order")),
    });
    let app = Router::new().route("/", get(show_key).route_layer(LockLayer::new(&locks, key)));
    let response = fetch(&app, "/").await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(response.headers()["x-why"], "no order");
    assert_eq!(text(response).await, "name the order");
    assert_eq!(store.on(StoreOp::Acquire).calls(), 0);
}

#[tokio::test(start_paused = true)]
async fn raw_name_from_the_request_is_exact_or_a_400() {
    let (store, locks) = store_and_locks();
    let key = key::from_fn(|Path(name): Path<String>| LockKey::raw(name));
    let app = Router::new().route("/{name}", get(show_key).route_layer(LockLayer::new(&locks, key)));
    assert_eq!(text(fetch(&app, "/order:7").await).await, "order:7");
    let response = fetch(&app, "/a%7Bb").await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert!(text(response).await.contains("braces"));
    assert_eq!(store.on(StoreOp::Acquire).calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn handler_sees_the_same_request_as_without_a_lock() {
    async fn everything(Path(id): Path<String>, Query(q): Query<Vec<(String, String)>>, request: AnyRequest) -> String {
        let (parts, body) = request.into_parts();
        let body = axum::body::to_bytes(body, 1000).await.expect("a body");
        format!("{id} {q:?} {} {} {:?} {body:?}", parts.method, parts.uri, parts.headers)
    }
    let locks = LockManager::in_memory();
    let key = key::from_fn(|Path(id): Path<String>, _: HeaderMap, b: Bytes| ("order", id, b.len()));
    let request = || {
        Request::post("/o/a%2Fb?x=1&x=2")
            .header("x-a", "1")
            .header("x-a", "2")
            .body(Body::from("{ \"a\" :1}"))
            .expect("a request")
    };
    let plain = text(send(&Router::new().route("/o/{id}", post(everything)), request()).await).await;
    let app = Router::new().route("/o/{id}", post(everything).route_layer(LockLayer::new(&locks, key)));
    assert_eq!(text(send(&app, request()).await).await, plain);
}

/// The layers are also named in a signature.
#[tokio::test(start_paused = true)]
async fn layer_can_be_returned_from_a_function() {
    fn order_lock(locks: &LockManager) -> LockLayer<impl tower_lock::key::KeySource> {
        LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| ("order", id)))
    }
    fn job_lock(locks: &LockManager, name: &str) -> LockLayer<key::Fixed> {
        LockLayer::new(locks, key::fixed(("job", name)))
    }
    let locks = LockManager::in_memory();
    let app = Router::new()
        .route("/{id}", get(show_key).route_layer(order_lock(&locks)))
        .route("/jobs/mail", get(show_key).route_layer(job_lock(&locks, &String::from("mail"))));
    assert_eq!(text(fetch(&app, "/7").await).await, "order:7");
    assert_eq!(text(fetch(&app, "/jobs/mail").await).await, "job:mail");
}
