//! The idempotency key, its scope, and the request that it belongs to.

use std::collections::BTreeSet;

use axum::{
    Extension, Json, Router,
    body::Body,
    http::{
        HeaderName, HeaderValue, Method, Request, Response, StatusCode,
        header::{CONTENT_ENCODING, CONTENT_TYPE},
    },
    middleware::{Next, from_fn},
};
use serde::Deserialize;
use tower_lock::{
    LockKey, Rejection, ReplayLayer, key, replay,
    store::{ListRequest, LockStore},
    test_util::{Fault, StoreOp},
};
use tower_lock_testkit::{
    app::send,
    body::{ScriptedBody, Step},
    locks::store_and_locks,
    wait::settle,
};

use super::{app, counted, created, is_replayed, layer, problem, request, run_of, spawn};

#[derive(Clone)]
struct User(&'static str);

#[derive(Deserialize)]
struct Claim {
    family_id: u64,
    reward_type: u32,
}

fn json(body: &'static str) -> Request<Body> {
    let mut request = request("a", body);
    request.headers_mut().insert("content-type", "application/json".parse().expect("a value"));
    request
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn two_scopes_with_one_key_never_share_an_answer() {
    let (_store, locks) = store_and_locks();
    let scope = key::from_fn(|Extension(user): Extension<User>| ("user", user.0));
    let (app, runs) = app(ReplayLayer::new(&locks, scope), created);
    let as_user = |user: &'static str, body| {
        let mut request = request("a", body);
        request.extensions_mut().insert(User(user));
        request
    };
    let users = ["ann", "bob", "Ann", "an", "ann:a", ""];
    for (n, user) in users.into_iter().enumerate() {
        assert_eq!(run_of(send(&app, as_user(user, "x")).await).await, (n + 1, false), "{user:?}");
    }
    for (n, user) in users.into_iter().enumerate() {
        assert_eq!(run_of(send(&app, as_user(user, "x")).await).await, (n + 1, true), "{user:?}");
    }
    // Without the authentication, there is no scope and no answer.
    assert_eq!(send(&app, request("a", "x")).await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(runs(), users.len());
}

#[tokio::test(start_paused = true)]
async fn request_without_a_scope_runs_without_a_record() {
    let (store, locks) = store_and_locks();
    let scope = key::from_fn(|user: Option<Extension<User>>| user.map(|user| ("user", user.0.0)));
    let (app, _) = app(ReplayLayer::new(&locks, scope), created);
    for run in 1..=2 {
        assert_eq!(run_of(send(&app, request("a", "x")).await).await, (run, false));
    }
    assert_eq!(store.on(StoreOp::Acquire).calls(), 0);
}

#[tokio::test(start_paused = true)]
async fn request_without_a_required_scope_is_rejected() {
    let (store, locks) = store_and_locks();
    let scope = key::from_fn(|user: Option<Extension<User>>| user.map(|user| ("user", user.0.0)));
    let (app, runs) = app(ReplayLayer::new(&locks, scope).required(), created);
    problem(send(&app, request("a", "x")).await, 400, "invalid-key").await;
    assert_eq!((runs(), store.on(StoreOp::Acquire).calls()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn encoding_and_media_type_of_a_body_belong_to_its_request() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    let of = |headers: &[(HeaderName, &'static str)]| {
        let mut request = request("a", "x");
        for (name, value) in headers {
            request.headers_mut().append(name, HeaderValue::from_static(value));
        }
        request
    };
    let two = [(CONTENT_TYPE, "text/plain"), (CONTENT_TYPE, "application/json")];
    let of_two = problem(send(&app, of(&two)).await, 400, "invalid-key").await;
    assert!(of_two["detail"].as_str().is_some_and(|text| text.contains("content-type")), "{of_two}");
    assert_eq!(runs(), 0);
    let lists = [[(CONTENT_ENCODING, "gzip"), (CONTENT_ENCODING, "br")].to_vec(), vec![(CONTENT_ENCODING, "GZIP, br")]];
    assert_eq!(run_of(send(&app, of(&lists[0])).await).await, (1, false));
    assert_eq!(run_of(send(&app, of(&lists[1])).await).await, (1, true), "the same list");
    for other in [&[][..], &[(CONTENT_ENCODING, "gzip")]] {
        problem(send(&app, of(other)).await, 422, "idempotency-key-reused").await;
    }
}

#[tokio::test(start_paused = true)]
async fn truncated_request_body_claims_nothing() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks).required(), created);
    let mut cut = request("a", "");
    *cut.body_mut() = Body::new(ScriptedBody::new([Step::Text("half of"), Step::Error("reset")]));
    let response = send(&app, cut).await;
    assert!(response.status().is_client_error(), "{response:?}");
    assert_eq!((runs(), store.on(StoreOp::Acquire).calls()), (0, 0));
    assert_eq!(run_of(send(&app, request("a", "half of it")).await).await, (1, false), "at once");
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn key_of_another_request_is_rejected() {
    let (_store, locks) = store_and_locks();
    let layer = layer(&locks).methods([Method::POST, Method::PUT]);
    let (handler, runs) = counted(created);
    let routes = Router::new().route("/a", handler.clone()).route("/b", handler.clone()).route("/a/put", handler);
    let app = Router::new().nest("/v1", routes.clone()).nest("/v2", routes).layer(layer);
    let of = |method: &str, path: &str, media_type: &str, body: &'static str| {
        let request = Request::builder().method(method).uri(path).header("content-type", media_type);
        request.header("idempotency-key", "a").body(Body::from(body)).expect("a request")
    };
    assert_eq!(run_of(send(&app, of("POST", "/v1/a?n=1", "text/plain", "x")).await).await, (1, false));
    for other in [
        of("POST", "/v1/a?n=1", "text/plain", "y"),
        of("POST", "/v1/a?n=1", "text/plain", ""),
        of("POST", "/v1/a?n=1", "text/html", "x"),
        of("POST", "/v1/a?n=2", "text/plain", "x"),
        of("POST", "/v1/a", "text/plain", "x"),
        of("POST", "/v1/b?n=1", "text/plain", "x"),
        of("POST", "/v2/a?n=1", "text/plain", "x"),
        of("PUT", "/v1/a?n=1", "text/plain", "x"),
    ] {
        let name = format!("{} {}", other.method(), other.uri());
        let problem = problem(send(&app, other).await, 422, "idempotency-key-reused").await;
        assert_eq!(problem["outcome"], "not-started", "{name}");
    }
    assert_eq!(run_of(send(&app, of("POST", "/v1/a?n=1", "text/plain", "x")).await).await, (1, true), "it stands");
    assert_eq!(runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn json_in_another_order_is_the_same_request_by_its_values() {
    let (first, other_order) = (r#"{"family_id":1,"reward_type":2}"#, r#"{ "reward_type": 2, "family_id": 1 }"#);
    let (_store, locks) = store_and_locks();
    let (bytewise, _) = app(layer(&locks), created);
    send(&bytewise, json(first)).await;
    problem(send(&bytewise, json(other_order)).await, 422, "idempotency-key-reused").await;

    let (_store, locks) = store_and_locks();
    let values = key::from_fn(|Json(c): Json<Claim>| ("claim", c.family_id, c.reward_type));
    let (by_values, runs) = app(layer(&locks).fingerprint(values), created);
    send(&by_values, json(first)).await;
    assert_eq!(run_of(send(&by_values, json(other_order)).await).await, (1, true));
    let other = json(r#"{"family_id":1,"reward_type":3}"#);
    problem(send(&by_values, other).await, 422, "idempotency-key-reused").await;
    assert_eq!(send(&by_values, json("{")).await.status(), StatusCode::BAD_REQUEST, "that of the extractor");
    assert_eq!(runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn missing_key_is_rejected_if_it_is_required() {
    let (store, locks) = store_and_locks();
    let without_key = || Request::post("/").body(Body::from("x")).expect("a request");
    let (required, runs) = app(layer(&locks).required(), created);
    let problem = problem(send(&required, without_key()).await, 400, "idempotency-key-missing").await;
    let detail = "An idempotency key is required: header `idempotency-key` is missing. The request was not processed.";
    assert_eq!((&problem["detail"], &problem["outcome"]), (&detail.into(), &"not-started".into()));
    assert_eq!(runs(), 0);
    let (optional, runs) = app(layer(&locks), created);
    for run in 1..=2 {
        assert_eq!(run_of(send(&optional, without_key()).await).await, (run, false));
    }
    assert_eq!((runs(), store.on(StoreOp::Acquire).calls()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn invalid_key_is_rejected_before_a_claim() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    let longer = "x".repeat(256);
    let values: [&[&[u8]]; 9] = [
        &[b""],
        &[b"\"\""],
        &[b"\"a"],
        &[b"a b"],
        &[b"\"a\";v=1"],
        &[b"\"a\", \"b\""],
        &[b"caf\xe9"],
        &[b"a", b"a"],
        &[longer.as_bytes()],
    ];
    for lines in values {
        let mut request = Request::post("/").body(Body::from("x")).expect("a request");
        for line in lines {
            let value = HeaderValue::from_bytes(line).expect("a value");
            request.headers_mut().append("idempotency-key", value);
        }
        let problem = problem(send(&app, request).await, 400, "idempotency-key-invalid").await;
        assert_eq!(problem["outcome"], "not-started", "{lines:?}");
    }
    assert_eq!((runs(), store.on(StoreOp::Acquire).calls()), (0, 0));
    let longest = &longer[1..];
    assert_eq!(run_of(send(&app, request(longest, "x")).await).await, (1, false));
    assert_eq!(run_of(send(&app, request(&format!("\"{longest}\""), "x")).await).await, (1, true));
}

#[tokio::test(start_paused = true)]
async fn key_can_be_a_field_of_the_body() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks).key(key::json_field("request_id")).required(), created);
    let of = |body: &'static str| {
        let request = Request::post("/").header("content-type", "application/json");
        request.body(Body::from(body)).expect("a request")
    };
    let first = r#"{"request_id": "a b", "n": 1}"#;
    assert_eq!(run_of(send(&app, of(first)).await).await, (1, false), "the handler reads the body, too");
    assert_eq!(run_of(send(&app, of(first)).await).await, (1, true));
    problem(send(&app, of(r#"{"request_id": "a b", "n": 2}"#)).await, 422, "idempotency-key-reused").await;
    problem(send(&app, of(r#"{"n": 1}"#)).await, 400, "idempotency-key-missing").await;
    problem(send(&app, of(r#"{"request_id": ""}"#)).await, 400, "idempotency-key-invalid").await;
    assert_eq!(runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn other_methods_pass_through() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    for (n, method) in ["GET", "DELETE", "PUT", "GET"].into_iter().enumerate() {
        let request = Request::builder().method(method).uri("/").header("idempotency-key", "a");
        let response = send(&app, request.body(Body::empty()).expect("a request")).await;
        assert_eq!(run_of(response).await, (n + 1, false), "{method}");
    }
    assert_eq!((runs(), store.on(StoreOp::Acquire).calls()), (4, 0));
}

/// A client must not get past `required` by its method.
#[tokio::test(start_paused = true)]
async fn required_key_is_required_by_each_unsafe_method() {
    let (_store, locks) = store_and_locks();
    let (every, _) = app(layer(&locks).required(), created);
    let (some, _) = app(layer(&locks).required().methods([Method::PUT]), created);
    let without_key = |method: &str| Request::builder().method(method).uri("/").body(Body::empty()).expect("a request");
    for (app, method, is_rejected) in [
        (&every, "POST", true),
        (&every, "PUT", true),
        (&every, "DELETE", true),
        (&every, "GET", false),
        (&some, "PUT", true),
        (&some, "DELETE", false),
    ] {
        let status = send(app, without_key(method)).await.status();
        assert_eq!(status == StatusCode::BAD_REQUEST, is_rejected, "{method}: {status}");
    }
}

#[tokio::test(start_paused = true)]
async fn rejections_of_a_key_link_to_the_documentation() {
    let (store, locks) = store_and_locks();
    let layer = || layer(&locks).required().docs("https://example.com/keys");
    let (built_in, _) = app(layer(), created);
    let (custom, _) = app(
        layer().on_reject(|rejection: &Rejection| {
            let status = if rejection.outcome() == "done" { StatusCode::GONE } else { StatusCode::IM_A_TEAPOT };
            Response::builder().status(status).body(rejection.code().to_owned()).expect("a response")
        }),
        created,
    );
    let missing = || Request::post("/").body(Body::from("x")).expect("a request");
    assert_eq!(send(&built_in, request("a", "x")).await.headers().get("link"), None);
    let first = spawn(&built_in, request("b", "x"));
    settle().await;
    for (request, status) in [
        (missing as fn() -> Request<Body>, 400),
        (|| request("a b", "x"), 400),
        (|| request("a", "y"), 422),
        (|| request("b", "x"), 409),
    ] {
        for (app, status) in [(&built_in, status), (&custom, 418)] {
            let response = send(app, request()).await;
            assert_eq!(response.status(), status);
            assert_eq!(response.headers()["link"], "<https://example.com/keys>; rel=\"describedby\"", "{response:?}");
            assert!(response.extensions().get::<Rejection>().is_some());
        }
    }
    first.await.expect("no panic");
    assert_eq!(send(&built_in, request("a", "x")).await.headers().get("link"), None, "replayed");
    store.fault_all(Fault::Fail);
    let response = send(&built_in, request("c", "x")).await;
    assert_eq!((response.status().as_u16(), response.headers().get("link")), (503, None));
}

/// Keys may be personal data, and scopes are.
#[tokio::test(start_paused = true)]
async fn scope_and_key_are_hashed_in_the_store() {
    let (store, locks) = store_and_locks();
    let (app, _) = app(ReplayLayer::new(&locks, key::fixed(("user", "ann@example.org"))), created);
    let first = spawn(&app, request("order-of-ann", "x"));
    settle().await;
    let list = store.list(ListRequest::new(10)).await.expect("up");
    let keys: BTreeSet<_> = list.entries.iter().map(|key| key.key.to_string()).collect();
    assert!(keys.len() == 1 && keys.iter().all(|key| key.starts_with("+replay:~") && !key.contains("ann")), "{keys:?}");
    first.await.expect("no panic");
}

/// A layer that inserts an extension, as authentication does, may be inside of a router.
#[tokio::test(start_paused = true)]
async fn scope_of_an_outer_layer_is_found() {
    let (_store, locks) = store_and_locks();
    let scope = key::from_fn(|Extension(user): Extension<User>| LockKey::from(("user", user.0)));
    let (app, _) = app(ReplayLayer::new(&locks, scope), created);
    let app = app.layer(from_fn(|mut request: Request<Body>, next: Next| async move {
        request.extensions_mut().insert(User("ann"));
        next.run(request).await
    }));
    send(&app, request("a", "x")).await;
    assert!(is_replayed(&send(&app, request("a", "x")).await));
}

#[tokio::test(start_paused = true)]
async fn operator_finds_the_lock_of_an_idempotency_key() {
    let (_store, locks) = store_and_locks();
    let (app, _runs) = app(layer(&locks), created);
    let inspect = async |scope: LockKey| locks.inspect(replay::lock_key(scope, "a")).await.expect("up");
    let first = spawn(&app, request("a", "x"));
    settle().await;
    let running = inspect(("everyone",).into()).await;
    assert!(running.holder().is_some() && running.record_left.is_none(), "{running}");
    assert!(inspect(("someone",).into()).await.holder().is_none());
    assert_eq!(run_of(first.await.expect("no panic")).await, (1, false));
    let done = inspect(("everyone",).into()).await;
    assert!(done.holder().is_none() && done.record_left.is_some(), "{done}");
}
