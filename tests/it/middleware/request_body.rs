//! A body that is read for its key is replayed byte for byte, within the limit of the route.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, Path, Request as AnyRequest},
    http::{HeaderMap, Request, Response, StatusCode},
    routing::post,
};
use futures_util::{StreamExt, stream};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_http::limit::RequestBodyLimitLayer;
use tower_lock::{
    HasLockKey, LockKey, LockLayer, LockManager, LockManagerLayer, Locked, Rejection, RequestBodyMode, key,
    middleware::RequestBody, test_util::StoreOp,
};
use tower_lock_testkit::{
    app::{problem_type, send, serve, text},
    http::Http1,
    locks::store_and_locks,
    wait::{settle, soon},
};

/// Head, body and trailers as the handler saw them.
async fn echo(request: AnyRequest) -> String {
    let (parts, body) = request.into_parts();
    let exact = body.size_hint().exact();
    let body = body.collect().await.expect("a body");
    let trailers = body.trailers().cloned();
    format!("{:?} {exact:?} {:?} {trailers:?}", parts.headers, body.to_bytes())
}

async fn echo_server() -> SocketAddr {
    let locks = LockManager::in_memory();
    let by_body = || LockLayer::new(&locks, key::from_fn(|b: Bytes| ("len", b.len())));
    let app = Router::new()
        .route("/plain", post(echo))
        .route("/locked", post(echo).route_layer(by_body()))
        // Read twice, in two layers.
        .route(
            "/locked-twice",
            post(echo).route_layer(by_body()).route_layer(LockLayer::new(&locks, key::from_fn(|_: Bytes| ("outer",)))),
        )
        .layer(DefaultBodyLimit::max(4 << 20));
    serve(app).await
}

#[tokio::test]
async fn body_is_replayed_with_headers_trailers_and_length() {
    let server = echo_server().await;
    let big: String = (0..3_000_000_u32).map(|n| char::from(b'a' + (n % 23) as u8)).collect();
    let bodies = [
        "content-length: 0\r\n\r\n".to_owned(),
        "\r\n".to_owned(),
        "content-length: 5\r\n\r\n\0\r\n\x7fz".to_owned(),
        format!("content-length: {}\r\n\r\n{big}", big.len()),
        "transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n".to_owned(),
        "transfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n3\r\nabc\r\n0\r\nx-sum: 9\r\n\r\n".to_owned(),
        format!("transfer-encoding: chunked\r\n\r\n{0:x}\r\n{big}\r\n{0:x}\r\n{big}\r\n0\r\n\r\n", 1_000_000)
            .replace(&big, &big[..1_000_000]),
    ];
    for body in bodies {
        let mut responses = Vec::new();
        for path in ["/plain", "/locked", "/locked-twice"] {
            let mut wire = Http1::connect(server).await;
            wire.write(format!("POST {path} HTTP/1.1\r\nhost: x\r\nx-a: 1\r\nx-a: 2\r\n{body}")).await;
            let reply = wire.reply(false).await;
            assert_eq!(reply.status, 200);
            responses.push(String::from_utf8(reply.body).expect("text"));
        }
        // A body of unknown size has one now, except where trailers would be lost.
        let [plain, locked, twice] = <[String; 3]>::try_from(responses).expect("three");
        let had_size = if plain.contains("x-sum\": \"9") || !plain.contains(" None b") {
            plain
        } else {
            let len = if plain.contains("b\"abcdefg\"") { 7 } else { 2_000_000 };
            plain.replacen(" None b", &format!(" Some({len}) b"), 1)
        };
        let start: String = body.chars().take(80).collect();
        assert!(locked == had_size, "{start}: {} is not {}", cut(&locked), cut(&had_size));
        assert!(twice == had_size, "{start}: {} is not {}", cut(&twice), cut(&had_size));
    }
}

fn cut(text: &str) -> String {
    text.chars().take(300).collect()
}

#[tokio::test]
async fn trailers_reach_the_inner_service_without_a_size_hint() {
    let locks = LockManager::in_memory();
    let inner = service_fn(|request: Request<RequestBody>| async {
        let exact = request.body().size_hint().exact();
        let body = request.into_body().collect().await.expect("a body");
        let trailers = body.trailers().map(|t| t["x-sum"].clone());
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(format!(
            "{exact:?} {trailers:?} {:?}",
            body.to_bytes()
        )))))
    });
    let service = LockLayer::new(&locks, key::from_fn(|b: Bytes| ("len", b.len()))).layer(inner);
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", "9".parse().expect("a value"));
    let frames =
        [Frame::data(Bytes::from_static(b"ab")), Frame::data(Bytes::from_static(b"cd")), Frame::trailers(trailers)];
    let body = StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>)));
    let response = service.oneshot(Request::new(body)).await.expect("infallible");
    assert_eq!(text(response).await, r#"None Some("9") b"abcd""#);
}

/// hyper sends `100 Continue` when the body is first polled.
/// Guarantee: G16.
#[tokio::test]
async fn rejected_client_is_not_asked_for_its_body() {
    let (store, locks) = store_and_locks();
    let held = locks.try_lock(("k",)).await.expect("free");
    let layer = |key| LockLayer::new(&locks, key);
    let app = Router::new()
        .route("/head-key", post(|b: Bytes| async { b }).route_layer(layer(key::from_fn(|_: HeaderMap| ("k",)))))
        .route(
            "/body-key",
            post(|b: Bytes| async { b }).route_layer(LockLayer::new(&locks, key::from_fn(|b: Bytes| ("len", b.len())))),
        )
        .route(
            "/short",
            post(|b: Bytes| async { b })
                .route_layer(LockLayer::new(&locks, key::from_fn(|b: Bytes| ("len", b.len()))))
                .layer(DefaultBodyLimit::max(4)),
        );
    let server = serve(app).await;
    let expect = |path: &str, length: usize| {
        format!("POST {path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n")
    };

    let mut wire = Http1::connect(server).await;
    wire.write(expect("/head-key", 5)).await;
    assert_eq!(wire.head().await.0, 409, "rejected, and no body was requested");
    let waits = LockLayer::new(&locks, key::from_fn(|_: HeaderMap| ("k",))).wait(std::time::Duration::from_secs(60));
    let server_that_waits = serve(Router::new().route("/", post(|b: Bytes| async { b }).route_layer(waits))).await;
    let mut wire = Http1::connect(server_that_waits).await;
    wire.write(expect("/", 5)).await;
    assert_eq!(wire.head().await.0, 100, "read before the lock");

    let mut wire = Http1::connect(server).await;
    wire.write(expect("/body-key", 5)).await;
    assert_eq!(wire.head().await.0, 100);
    wire.write("12345").await;
    let reply = wire.reply(false).await;
    assert_eq!((reply.status, &reply.body[..]), (200, &b"12345"[..]));

    for (path, length) in [("/short", 5), ("/body-key", 2 * 1024 * 1024 + 1)] {
        let mut wire = Http1::connect(server).await;
        wire.write(expect(path, length)).await;
        assert_eq!(wire.head().await.0, 413, "announced as too long: not requested");
    }
    held.release().await.expect("the store is up");
    assert_eq!(store.held_count(), 0);
}

/// Guarantee: G15.
#[tokio::test]
async fn body_is_read_within_the_limit_of_the_route() {
    let (store, locks) = store_and_locks();
    let route = || {
        let layer = LockLayer::new(
            &locks,
            key::from_fn(|r: AnyRequest| async move {
                ("len", axum::body::to_bytes(r.into_body(), usize::MAX).await.expect("buffered").len())
            }),
        );
        Router::new().route("/", post(|b: Bytes| async move { b.len().to_string() }).route_layer(layer))
    };
    let sized = |len: usize| Body::from(vec![b'x'; len]);
    let chunked = |len: usize| {
        let chunks = vec![Ok::<_, Infallible>(Bytes::from(vec![b'x'; len / 4])); 4];
        Body::from_stream(stream::iter(chunks))
    };
    let two_mb = 2 * 1024 * 1024;
    for (what, app, limit) in [
        ("nothing set", route(), two_mb),
        ("lowered", route().layer(DefaultBodyLimit::max(100)), 100),
        ("raised", route().layer(DefaultBodyLimit::max(3_000_000)), 3_000_000),
        ("a layer of its own", route().layer(RequestBodyLimitLayer::new(400)), 400),
    ] {
        for (kind, body) in [("sized", sized(limit)), ("chunked", chunked(limit / 4 * 4))] {
            let response = send(&app, Request::post("/").body(body).expect("a request")).await;
            assert_eq!(response.status(), StatusCode::OK, "{what}, {kind}, at the limit");
        }
        for (kind, body) in [("sized", sized(limit + 1)), ("chunked", chunked(limit / 4 * 4 + 4))] {
            let asked = store.on(StoreOp::Acquire).calls();
            let response = send(&app, Request::post("/").body(body).expect("a request")).await;
            assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE, "{what}, {kind}, beyond the limit");
            assert_eq!(store.on(StoreOp::Acquire).calls(), asked, "{what}, {kind}: nothing is locked");
            // tower-http rejects by itself what it can see in the head.
            if what != "a layer of its own" || kind == "chunked" {
                assert!(matches!(response.extensions().get(), Some(Rejection::BodyTooLarge)), "{what}, {kind}");
            }
        }
    }
    let unlimited = route().layer(DefaultBodyLimit::disable());
    let response = send(&unlimited, Request::post("/").body(sized(3_000_000)).expect("a request")).await;
    assert_eq!(response.status(), StatusCode::OK);
    let response = send(&unlimited, Request::post("/").body(sized((64 << 20) + 1)).expect("a request")).await;
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE, "bounded as well");
}

/// Guarantee: G9.
#[tokio::test]
async fn truncated_body_is_an_invalid_key_and_locks_nothing() {
    let (store, locks) = store_and_locks();
    let layer = LockLayer::new(&locks, key::from_fn(|b: Bytes| ("len", b.len())));
    let app = Router::new().route("/", post(|| async { "ran" }).route_layer(layer));
    let frames = [Ok(Bytes::from_static(b"abc")), Err(std::io::Error::other("gone"))];
    let response =
        send(&app, Request::post("/").body(Body::from_stream(stream::iter(frames))).expect("a request")).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert!(text(response).await.contains(&problem_type("invalid-key")));
    assert_eq!(store.on(StoreOp::Acquire).calls(), 0);
}

/// The upload is read first: until it is complete, the key is free.
#[tokio::test]
async fn slow_upload_holds_no_lock() {
    let (store, locks) = store_and_locks();
    let layer = LockLayer::new(&locks, key::from_fn(|_: Bytes| ("k",)));
    let app = Router::new().route("/", post(|| async { "ran" }).route_layer(layer));
    let server = serve(app).await;
    let mut slow = Http1::connect(server).await;
    slow.write("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab").await;
    let mut quick = Http1::connect(server).await;
    quick.write("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nabcd").await;
    assert_eq!(quick.reply(false).await.status, 200);
    assert_eq!((store.on(StoreOp::Acquire).calls(), store.held_count()), (1, 0));
    slow.write("cd").await;
    assert_eq!(soon("the slow one", slow.reply(false)).await.status, 200);
}

const S: Duration = Duration::from_secs(1);

/// This many bytes at a time, with pauses.
fn drips(bytes: usize, each: Duration, times: usize) -> Body {
    let frames = stream::unfold(0, move |n| async move {
        if n < times {
            sleep(each).await;
        }
        (n < times).then(|| (Ok::<_, Infallible>(Bytes::from(vec![b'x'; bytes])), n + 1))
    });
    Body::from_stream(frames)
}

/// Guarantee: G16.
#[tokio::test(start_paused = true)]
async fn late_body_is_a_408_and_locks_nothing() {
    let (store, locks) = store_and_locks();
    let route =
        |layer| Router::new().route("/", post(|b: Bytes| async move { b.len().to_string() }).route_layer(layer));
    let layer = LockLayer::new(&locks, key::from_fn(|_: HeaderMap| ("k",)));
    let at_default = route(layer.clone());
    let at_any_rate = route(layer.min_body_rate(0));
    for (what, app, body, want) in [
        ("nothing", &at_default, drips(1, 3600 * S, 1), Err(10)),
        ("a byte each second", &at_default, drips(1, S, 100), Err(10)),
        (
            "fast, then a byte each second",
            &at_default,
            Body::from_stream(drips(1 << 20, S / 100, 1).into_data_stream().chain(drips(1, S, 99).into_data_stream())),
            Err(20),
        ),
        ("a byte each second, at any rate", &at_any_rate, drips(1, S, 100), Ok(100)),
        ("nothing, at any rate", &at_any_rate, drips(1, 3600 * S, 1), Err(10)),
        ("just fast enough", &at_default, drips(16 << 10, S, 100), Ok(100)),
        ("little, in time", &at_default, drips(1, 3 * S, 3), Ok(9)),
    ] {
        let began = Instant::now();
        let response = send(app, Request::post("/").body(body).expect("a request")).await;
        let (Ok(took) | Err(took)) = want;
        assert_eq!(began.elapsed().as_secs(), took, "{what}");
        if want.is_ok() {
            assert_eq!(response.status(), StatusCode::OK, "{what}");
            continue;
        }
        assert_eq!(response.status(), StatusCode::REQUEST_TIMEOUT, "{what}");
        assert!(matches!(response.extensions().get(), Some(Rejection::BodyTimeout)), "{what}");
        assert!(!response.headers().contains_key("retry-after"), "{what}");
        let problem: serde_json::Value = serde_json::from_str(&text(response).await).expect("JSON");
        assert_eq!(problem["type"], problem_type("body-timeout"), "{what}");
        assert_eq!((&problem["outcome"], &problem["status"]), (&"not-started".into(), &408.into()), "{what}");
    }
    assert_eq!((store.on(StoreOp::Acquire).calls(), store.held_count()), (3, 0), "for the bodies that arrived");
}

/// A client that is rejected anyway need not send its body.
/// Guarantee: G16.
#[tokio::test(start_paused = true)]
async fn invalid_head_is_rejected_before_the_body_is_read() {
    let (store, locks) = store_and_locks();
    let app = Router::new()
        .route(
            "/by/{id}",
            post(|| async {}).route_layer(LockLayer::new(&locks, key::from_fn(|Path(id): Path<u64>| ("k", id)))),
        )
        .route(
            "/by-body/{id}",
            post(|| async {})
                .route_layer(LockLayer::new(&locks, key::from_fn(|Path(id): Path<u64>, b: Bytes| ("k", id, b.len())))),
        )
        .route(
            "/fields/{id}",
            post(|| async {}).route_layer(LockLayer::new(
                &locks,
                key::from_fields("k", (key::json_field("n"), key::path_param("id"))),
            )),
        );
    let began = Instant::now();
    for path in ["/by/x", "/by-body/x", "/fields/07"] {
        let response = send(&app, Request::post(path).body(drips(1, 3600 * S, 1)).expect("a request")).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{path}");
        assert!(matches!(response.extensions().get(), Some(Rejection::InvalidKey { .. })), "{path}");
    }
    assert_eq!((began.elapsed(), store.on(StoreOp::Acquire).calls()), (Duration::ZERO, 0));
}

/// The bytes after the head belong to the tunnel, which has no end.
#[tokio::test(start_paused = true)]
async fn connect_request_has_no_body_to_read() {
    let layer = LockLayer::new(&LockManager::in_memory(), key::from_fn(|_: HeaderMap| ("k",)));
    let app = Router::new().fallback(async || ()).layer(layer);
    let began = Instant::now();
    let connect = Request::connect("shop.example:443").body(drips(1, 3600 * S, 1));
    let response = send(&app, connect.expect("a request")).await;
    assert_eq!((response.status(), began.elapsed()), (StatusCode::OK, Duration::ZERO));
}

/// Under the lock the handler gets the error, and decides on the response.
/// Guarantee: G16.
#[tokio::test(start_paused = true)]
async fn slow_upload_under_a_lock_ends_with_an_error() {
    let (store, locks) = store_and_locks();
    let handler = |body: Body| async move {
        let began = Instant::now();
        let read = body.collect().await;
        let after = began.elapsed().as_secs();
        match read {
            Ok(body) => format!("{} bytes after {after} s", body.to_bytes().len()),
            Err(error) => format!("{error} after {after} s"),
        }
    };
    let layer = LockLayer::new(&locks, key::from_fn(|_: HeaderMap| ("k",))).request_body(RequestBodyMode::Stream);
    let app = Router::new().route("/", post(handler).route_layer(layer));
    for (body, said) in [
        (drips(1, 3600 * S, 1), "no byte was transferred for `body_idle_timeout` after 10 s"),
        (drips(1, S, 100), "fewer bytes were transferred than `min_body_rate` requires after 10 s"),
        (drips(16 << 10, S, 100), "1638400 bytes after 100 s"),
    ] {
        let asked = store.on(StoreOp::Acquire).calls();
        let response = send(&app, Request::post("/").body(body).expect("a request")).await;
        assert_eq!(text(response).await, said);
        assert_eq!((store.on(StoreOp::Acquire).calls(), store.held_count()), (asked + 1, 0), "under its lock");
    }

    // A slow handler is not a slow client.
    let slow = |body: Body| async move {
        let mut frames = body.into_data_stream();
        let mut len = 0;
        while let Some(frame) = frames.next().await {
            len += frame.expect("no error").len();
            sleep(20 * S).await;
        }
        len.to_string()
    };
    let layer = LockLayer::new(&locks, key::from_fn(|_: HeaderMap| ("k",))).request_body(RequestBodyMode::Stream);
    let app = Router::new().route("/", post(slow).route_layer(layer));
    let response = send(&app, Request::post("/").body(drips(1, S, 5)).expect("a request")).await;
    assert_eq!(text(response).await, "5");
}

/// It delays no other request.
/// Guarantee: G16.
#[tokio::test(start_paused = true)]
async fn body_read_without_a_lock_may_be_slow() {
    let locks = LockManager::in_memory();
    let app = Router::new()
        .route("/", post(|body: Bytes| async move { body.len().to_string() }))
        .layer(LockManagerLayer::new(&locks));
    let response = send(&app, Request::post("/").body(drips(1, 15 * S, 3)).expect("a request")).await;
    assert_eq!(text(response).await, "3");
}

struct Order(u64);

impl HasLockKey for Order {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("order", self.0)
    }
}

impl<'de> serde::Deserialize<'de> for Order {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        u64::deserialize(from).map(Self)
    }
}

/// An extractor of the head that locks, before one that reads the body; and one that locks by the
/// body.
fn by_extractors(layer: LockManagerLayer) -> Router {
    let by_head = |_: Locked<Path<Order>>, body: Bytes| async move { body.len().to_string() };
    let by_body = |Locked(Json(order), _): Locked<Json<Order>>| async move { order.0.to_string() };
    Router::new().route("/by-head/{id}", post(by_head)).route("/by-body", post(by_body)).layer(layer)
}

fn json(path: &str, body: Body) -> Request<Body> {
    Request::post(path).header("content-type", "application/json").body(body).expect("a request")
}

/// Guarantee: G16.
#[tokio::test(start_paused = true)]
async fn extractor_locks_after_the_body_is_complete() {
    let (store, locks) = store_and_locks();
    let app = by_extractors(LockManagerLayer::new(&locks));
    for (path, expected) in [("/by-head/7", "2"), ("/by-body", "77")] {
        let (more, body) = tokio::sync::mpsc::unbounded_channel::<Result<Bytes, Infallible>>();
        let body = Body::from_stream(stream::unfold(body, |mut body| async { Some((body.recv().await?, body)) }));
        let app = app.clone();
        let asked = store.on(StoreOp::Acquire).calls();
        let answered = tokio::spawn(async move { send(&app, json(path, body)).await });
        more.send(Ok("7".into())).expect("read");
        settle().await;
        assert_eq!(
            (store.on(StoreOp::Acquire).calls(), store.held_count()),
            (asked, 0),
            "{path}: still in transmission"
        );
        more.send(Ok("7".into())).expect("read");
        drop(more);
        let response = answered.await.expect("no panic");
        assert_eq!((text(response).await.as_str(), store.held_count()), (expected, 0), "{path}");
        assert_eq!(store.on(StoreOp::Acquire).calls(), asked + 1, "{path}");
    }
}

/// Guarantee: G16.
#[tokio::test(start_paused = true)]
async fn locking_extractor_rejects_late_and_oversized_bodies() {
    let (store, locks) = store_and_locks();
    let app = by_extractors(LockManagerLayer::new(&locks)).layer(DefaultBodyLimit::max(100));
    for path in ["/by-head/7", "/by-body"] {
        let began = Instant::now();
        let late = send(&app, json(path, drips(1, 3600 * S, 1))).await;
        assert_eq!(late.status(), StatusCode::REQUEST_TIMEOUT, "{path}");
        assert!(matches!(late.extensions().get(), Some(Rejection::BodyTimeout)), "{path}");
        assert_eq!(began.elapsed(), 10 * S, "{path}");
        let large = send(&app, json(path, drips(60, S, 2))).await;
        assert_eq!(large.status(), StatusCode::PAYLOAD_TOO_LARGE, "{path}");
        assert!(matches!(large.extensions().get(), Some(Rejection::BodyTooLarge)), "{path}");
    }
    assert_eq!((store.on(StoreOp::Acquire).calls(), store.held_count()), (0, 0));
}

/// A request without a wait, while its key is held locally.
/// Guarantee: G16.
#[tokio::test(start_paused = true)]
async fn head_extractor_rejects_without_reading_the_body() {
    let (_, locks) = store_and_locks();
    let app = by_extractors(LockManagerLayer::new(&locks));
    let held = locks.try_lock(("order", 7)).await.expect("free");
    let began = Instant::now();
    let response = send(&app, json("/by-head/7", drips(1, 3600 * S, 1))).await;
    assert_eq!((response.status(), began.elapsed()), (StatusCode::CONFLICT, Duration::ZERO));
    held.release().await.expect("the store is up");
}

/// It does not wait for its lock: the full budget of the waiters is no reason to reject it.
/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn extractor_without_wait_reports_held_before_body_budget() {
    let (_, locks) = store_and_locks();
    let at_once = by_extractors(LockManagerLayer::new(&locks));
    let patient =
        by_extractors(LockManagerLayer::new(&locks.clone().with_policy(tower_lock::LockPolicy::new().wait(3600 * S))));
    let held = locks.try_lock(("order", 7)).await.expect("free");
    let padded = || json("/by-body", Body::from(" ".repeat(2_000_000) + "7"));
    let mut waiting = Vec::new();
    for _ in 0..8 {
        let patient = patient.clone();
        waiting.push(tokio::spawn(async move { send(&patient, padded()).await.status() }));
    }
    settle().await;
    assert_eq!(locks.size().1, 3, "the others have no budget for their bodies");
    assert_eq!(send(&at_once, padded()).await.status(), StatusCode::CONFLICT);
    for waits in waiting {
        waits.abort();
    }
    held.release().await.expect("the store is up");
}

/// A reader that comes too early gets an error, not an empty body.
/// Guarantee: G16.
#[tokio::test(start_paused = true)]
async fn late_body_is_not_an_empty_body_to_an_extractor() {
    let (_, locks) = store_and_locks();
    let handler = |body: Result<Locked<Path<Order>>, Response<Body>>, rest: Body| async move {
        let rest = rest.collect().await.map(|rest| rest.to_bytes().len()).map_err(|error| error.to_string());
        format!("{:?} {rest:?}", body.map_err(|response| response.status().as_u16()).map(|locked| locked.0.0.0))
    };
    let app = Router::new().route("/{id}", post(handler)).layer(LockManagerLayer::new(&locks));
    let response = send(&app, json("/7", drips(1, 3600 * S, 1))).await;
    assert_eq!(
        text(response).await,
        "Err(408) Err(\"an extractor that acquires a lock has not read this request body to its end\")"
    );
    let response = send(&app, json("/7", drips(1, S, 3))).await;
    assert_eq!(text(response).await, "Ok(7) Ok(3)");
}

/// If the route is configured so.
/// Guarantee: G16.
#[tokio::test(start_paused = true)]
async fn streaming_body_under_an_extractor_lock_is_watched() {
    let (store, locks) = store_and_locks();
    let app = by_extractors(LockManagerLayer::new(&locks).request_body(RequestBodyMode::Stream));
    let began = Instant::now();
    let response = send(&app, json("/by-head/7", drips(1, 3600 * S, 1))).await;
    assert!(response.status().is_client_error(), "{}", response.status());
    assert_eq!((began.elapsed().as_secs(), store.held_count()), (10, 0));
    assert_eq!(store.on(StoreOp::Acquire).calls(), 1, "under its lock");
    let response = send(&app, json("/by-head/7", drips(1, S, 5))).await;
    assert_eq!(text(response).await, "5");
}
