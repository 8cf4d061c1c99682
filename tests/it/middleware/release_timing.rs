//! When the lock ends: before a complete response is sent, or at the end of a stream.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Request, Response, StatusCode, header},
    routing::get,
};
use futures_util::stream;
use http_body::{Body as HttpBody, Frame};
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tower::{Layer, ServiceExt, service_fn};
use tower_lock::{LockLayer, LockManager, MemoryStore, middleware::RequestBody, test_util::StoreOp};
use tower_lock_testkit::{
    app::{fetch, serve, text},
    body::{ScriptedBody, Step, paused, trailers},
    http::Http1,
    locks::{one_key, store_and_locks},
    wait::settle,
};

/// The response of the layer with this body.
async fn response<B>(
    locks: &LockManager,
    body: B,
) -> Response<Pin<Box<impl HttpBody<Data = Bytes, Error = axum::BoxError>>>>
where
    B: HttpBody<Data = Bytes, Error: Into<axum::BoxError>> + Send + 'static,
{
    let body = Arc::new(std::sync::Mutex::new(Some(body)));
    let responses = service_fn(move |_: Request<RequestBody>| {
        let body = body.lock().expect("whole").take().expect("once");
        async { Ok::<_, Infallible>(Response::new(body)) }
    });
    let response = LockLayer::new(locks, one_key()).layer(responses).oneshot(Request::new(Body::empty()));
    response.await.expect("infallible").map(Box::pin)
}

/// Guarantee: G10.
#[tokio::test]
async fn complete_response_releases_before_its_head_is_sent() {
    let (store, locks) = store_and_locks();
    let frames = |n: usize, len: usize| {
        Body::from_stream(stream::iter((0..n).map(move |_| Ok::<_, Infallible>(Bytes::from(vec![b'x'; len])))))
    };
    for (what, body, len) in [
        ("empty", Body::empty(), 0),
        ("text", Body::from("hello"), 5),
        ("of any size, if one frame", Body::from(vec![b'x'; 3 << 20]), 3 << 20),
        ("ready frames", frames(16, 10), 160),
        (
            "a large one and a small one",
            Body::from_stream(stream::iter([vec![b'x'; 1 << 20], vec![b'x'; 10]].map(Ok::<_, Infallible>))),
            (1 << 20) + 10,
        ),
        (
            "data and trailers",
            Body::new(Full::new(Bytes::from_static(b"abc")).with_trailers(std::future::ready(Some(Ok(trailers()))))),
            3,
        ),
    ] {
        let response = response(&locks, body).await;
        assert_eq!(store.held_count(), 0, "{what}: not a byte was read");
        let body = response.into_body().collect().await.expect("a body");
        assert_eq!(body.trailers().is_some(), what == "data and trailers");
        assert_eq!(body.to_bytes().len(), len, "{what}");
    }
    for (what, body) in [("too many frames", frames(18, 10)), ("too many bytes", frames(3, 40_000))] {
        let response = response(&locks, body).await;
        assert_eq!(store.held_count(), 1, "{what}: a stream");
        drop(response.into_body().collect().await.expect("a body"));
        assert_eq!(store.held_count(), 0, "{what}");
    }
}

#[tokio::test]
async fn response_without_content_releases_at_once() {
    let (store, locks) = store_and_locks();
    let endless = || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
    let status =
        |status| get(move || async move { Response::builder().status(status).body(endless()).expect("a response") });
    let layer = || LockLayer::new(&locks, one_key());
    let app = Router::new()
        .route("/204", status(204).route_layer(layer()))
        .route("/304", status(304).route_layer(layer()))
        .route("/200", status(200).route_layer(layer()));
    for path in ["/204", "/304"] {
        let _answer = fetch(&app, path).await;
        assert_eq!(store.held_count(), 0, "{path}");
    }
    let head = Request::head("/200").body(Body::empty()).expect("a request");
    let _answer = app.clone().oneshot(head).await.expect("infallible");
    assert_eq!(store.held_count(), 0, "HEAD");
    let response = fetch(&app, "/200").await;
    assert_eq!(store.held_count(), 1, "a stream by setting");
    drop(response);
    settle().await;
    assert_eq!(store.held_count(), 0);
}

/// Guarantee: G10.
#[tokio::test]
async fn stream_holds_to_its_end_and_ends_after_the_release() {
    let (store, locks) = store_and_locks();
    for (what, exact, last) in [
        ("the end itself", None, None),
        ("trailers", None, Some(Step::Trailers)),
        ("the last frame of a body that knows it", Some(6), Some(Step::Text("def"))),
    ] {
        let (tell, body) = ScriptedBody::fed();
        let body = if let Some(size) = exact { body.announce(size).know_end() } else { body };
        let mut body = response(&locks, body).await.into_body();
        tell.send(Step::Text("abc")).expect("open");
        let first = body.frame().await.expect("a frame").expect("no error");
        assert_eq!(first.into_data().expect("data"), "abc", "{what}: passes unchanged");
        assert_eq!(store.held_count(), 1, "{what}");
        assert!(!body.is_end_stream(), "{what}: hyper would not poll again");

        // The release takes its time: until then the end is not visible.
        store.on(StoreOp::Release).pause_before();
        let has_last = last.is_some();
        if let Some(last) = last {
            tell.send(last).expect("open");
        }
        drop(tell);
        assert!(futures_util::poll!(body.frame()).is_pending(), "{what}: withheld");
        assert!(!body.is_end_stream(), "{what}: nor by its size hint");
        store.on(StoreOp::Release).resume();
        assert_eq!(body.frame().await.is_some(), has_last, "{what}");
        assert_eq!(store.held_count(), 0, "{what}");
        assert!(body.is_end_stream(), "{what}");
        assert!(body.frame().await.is_none(), "{what}: and stays ended");
    }
}

#[tokio::test]
async fn failed_body_releases_the_lock() {
    let (store, locks) = store_and_locks();
    // After the head, and before it.
    for before in [false, true] {
        let (tell, body) = ScriptedBody::fed();
        if before {
            tell.send(Step::Text("abc")).expect("open");
            tell.send(Step::Error("broken")).expect("open");
        }
        let mut body = response(&locks, body).await.into_body();
        if !before {
            tell.send(Step::Text("abc")).expect("open");
            tell.send(Step::Error("broken")).expect("open");
        }
        assert!(body.frame().await.expect("a frame").is_ok());
        assert_eq!(body.frame().await.expect("a frame").expect_err("broken").to_string(), "broken");
        settle().await;
        assert_eq!(store.held_count(), 0);
        assert!(body.is_end_stream() && body.frame().await.is_none());
    }
}

/// The client must not take the part for the whole, though all of it was ready before the head was
/// sent.
#[tokio::test]
async fn body_shorter_than_announced_is_not_made_complete() {
    let locks = LockManager::in_memory();
    let handler = |last: Option<Step>| {
        get(move || async move {
            let steps: Vec<_> = [Step::Data(10); 4].into_iter().chain(last).collect();
            Response::new(Body::new(ScriptedBody::new(steps).announce(100)))
        })
    };
    let app = Router::new()
        .route("/error", handler(Some(Step::Error("broken"))))
        .route("/end", handler(None))
        .route_layer(LockLayer::new(&locks, one_key()));
    let server = serve(app).await;
    for path in ["/error", "/end"] {
        let mut wire = Http1::connect(server).await;
        wire.write(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
        let all = String::from_utf8(wire.rest().await).expect("text").to_lowercase();
        let whole = all.split_once("content-length: ").is_some_and(|(_, rest)| !rest.starts_with("100\r\n"));
        assert!(!whole && !all.ends_with("0\r\n\r\n"), "{path}: closed before 100 bytes, or without a response: {all}");
    }
    assert!(locks.try_lock(("k",)).await.is_ok());
}

/// A transaction in a body is rolled back or committed before the next request starts.
/// Guarantee: G2.
#[tokio::test]
async fn body_is_dropped_before_the_next_section_starts() {
    struct Owned(Arc<MemoryStore>, Arc<AtomicUsize>);
    impl Drop for Owned {
        fn drop(&mut self) {
            self.1.fetch_add(1 + 10 * (1 - self.0.held_count()), SeqCst);
        }
    }
    // In memory a lock is released as soon as its section is dropped.
    let store = Arc::new(MemoryStore::new());
    let locks = LockManager::new(Arc::clone(&store));
    let dropped = Arc::new(AtomicUsize::new(0));
    let layer = || LockLayer::new(&locks, one_key());
    let body = |frames: usize, paused: bool, fails: bool| {
        let owned = Owned(Arc::clone(&store), Arc::clone(&dropped));
        Body::from_stream(stream::unfold((0, owned), move |(n, owned)| async move {
            if paused {
                tokio::task::yield_now().await;
            }
            match n {
                n if n < frames => Some((Ok("row"), (n + 1, owned))),
                n if n == frames && fails => Some((Err("broken"), (n + 1, owned))),
                // The stream has ended, and still owns its data, as a `map` over a transaction
                // does.
                _ => None,
            }
        }))
    };
    for (what, status, method, frames, paused, fails) in [
        ("ready", 200, "GET", 3, false, false),
        ("stream", 200, "GET", 3, true, false),
        ("long", 200, "GET", 40, false, false),
        ("ready error", 200, "GET", 3, false, true),
        ("stream error", 200, "GET", 3, true, true),
        ("HEAD", 200, "HEAD", 3, false, false),
        ("204", 204, "GET", 3, true, false),
        ("304", 304, "GET", 0, true, false),
    ] {
        dropped.store(0, SeqCst);
        let keeper = Arc::new(Mutex::new(Some(OwningBody {
            body: body(frames, paused, fails),
            _owned: Owned(Arc::clone(&store), Arc::clone(&dropped)),
        })));
        let handler = get(move || async move {
            let body = keeper.lock().expect("whole").take().expect("one request");
            Response::builder().status(status).body(Body::new(body)).expect("a response")
        });
        let app = Router::new().route("/", handler.route_layer(layer()));
        let request = Request::builder().method(method).uri("/").body(Body::empty()).expect("a request");
        let response = app.oneshot(request).await.expect("infallible");
        if method == "GET" {
            drop(response.into_body().collect().await);
        }
        settle().await;
        // The stream and the body around it each own a value. Both are dropped while the key is
        // held.
        assert_eq!(dropped.load(SeqCst), 2, "{what}");
        assert_eq!(store.held_count(), 0, "{what}");
    }
}

/// A body that owns a value to its own end, not only to its last frame.
struct OwningBody<O> {
    body: Body,
    _owned: O,
}

impl<O: Unpin + Send> HttpBody for OwningBody<O> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }
}

/// Guarantee: G2.
#[tokio::test]
async fn dropped_body_releases_the_lock() {
    let (store, locks) = store_and_locks();
    let (tell, body) = ScriptedBody::fed();
    let mut body = response(&locks, body).await.into_body();
    tell.send(Step::Text("abc")).expect("open");
    drop(body.frame().await);
    assert_eq!(store.held_count(), 1);
    drop(body);
    settle().await;
    assert_eq!(store.held_count(), 0);
    drop(tell);
}

/// hyper would send a `Content-Length` for a body with an exact size, and then no trailers.
#[tokio::test]
async fn size_hint_stays_as_exact_as_it_was() {
    let locks = LockManager::in_memory();
    let size = |body: &dyn HttpBody<Data = Bytes, Error = axum::BoxError>| body.size_hint().exact();
    assert_eq!(size(&*response(&locks, Body::empty()).await.into_body()), Some(0));
    assert_eq!(size(&*response(&locks, Body::from("hello")).await.into_body()), Some(5));
    let ready = Body::from_stream(stream::iter([Ok::<_, Infallible>("abc")]));
    let ready = response(&locks, ready).await.into_body();
    assert_eq!((size(&*ready), ready.size_hint().lower()), (None, 3));

    let (tell, body) = ScriptedBody::fed();
    tell.send(Step::Text("abc")).expect("open");
    let mut streaming = response(&locks, body.announce(6).know_end()).await.into_body();
    assert_eq!(size(&*streaming), Some(6), "inspected frames count");
    drop(streaming.frame().await);
    assert_eq!(size(&*streaming), Some(3));
    tell.send(Step::Text("def")).expect("open");
    drop(streaming.frame().await);
    assert_eq!(size(&*streaming), Some(0));
}

/// The client sends the next request as soon as the response is complete: it never meets its own
/// lock.
/// Guarantee: G10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_never_meets_the_lock_of_its_previous_request() {
    let (store, locks) = store_and_locks();
    // As long as a round trip to a remote store.
    store.on(StoreOp::Release).latency(Duration::from_millis(2));
    let chunks = || {
        Body::from_stream(stream::unfold(0, |n| async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            (n < 3).then(|| (Ok::<_, Infallible>("0123456789"), n + 1))
        }))
    };
    let with_trailers =
        || Full::new(Bytes::from_static(b"abc")).with_trailers(std::future::ready(Some(Ok(trailers()))));
    let app = Router::new()
        .route("/text", get(|| async { "hello" }))
        .route("/empty", get(|| async {}))
        .route("/204", get(|| async { StatusCode::NO_CONTENT }))
        .route("/304", get(|| async { StatusCode::NOT_MODIFIED }))
        .route("/big", get(|| async { vec![7_u8; 500_000] }))
        .route("/stream", get(move || async move { chunks() }))
        .route("/trailers", get(move || async move { ([(header::TRAILER, "x-end")], Body::new(with_trailers())) }))
        .route_layer(LockLayer::new(&locks, one_key()));
    let server = serve(app).await;
    const PATHS: [&str; 7] = ["/text", "/empty", "/204", "/304", "/big", "/stream", "/trailers"];

    let mut wire = Http1::connect(server).await;
    for path in PATHS {
        for (method, round) in [("GET", 0), ("GET", 1), ("HEAD", 2)].into_iter().cycle().take(15) {
            wire.write(format!("{method} {path} HTTP/1.1\r\nhost: x\r\nte: trailers\r\n\r\n")).await;
            let reply = wire.reply(method == "HEAD").await;
            assert_ne!(reply.status, 409, "{method} {path} {round}");
            if path == "/text" {
                assert!(reply.head.contains("content-length: 5"), "{method}: {}", reply.head);
            }
            if path == "/stream" && method == "GET" {
                assert!(reply.head.contains("transfer-encoding: chunked") && reply.body.ends_with(b"0\r\n\r\n"));
            }
        }
    }
    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http::<Body>();
    for path in PATHS {
        for _ in 0..10 {
            let response =
                client.get(format!("http://{server}{path}").parse().expect("a URI")).await.expect("a response");
            assert_ne!(response.status(), StatusCode::CONFLICT, "{path} over HTTP/2");
            let body = response.into_body().collect().await.expect("a body");
            assert_eq!(body.trailers().is_some(), path == "/trailers");
        }
    }
    assert_eq!(store.held_count(), 0);
}

#[tokio::test]
async fn trailers_after_a_chunked_stream_arrive() {
    let (store, locks) = store_and_locks();
    let stream = || Body::new(ScriptedBody::new(paused(&[Step::Text("abc"), Step::Trailers])));
    let handler = get(move || async move { ([(header::TRAILER, "x-end")], stream()) });
    let server = serve(Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())))).await;
    let mut wire = Http1::connect(server).await;
    wire.write("GET / HTTP/1.1\r\nhost: x\r\nte: trailers\r\nconnection: close\r\n\r\n").await;
    let all = String::from_utf8(wire.rest().await).expect("text");
    assert!(all.ends_with("0\r\nx-end: 1\r\n\r\n"), "{all}");
    assert_eq!(store.held_count(), 0);
}

/// The release never delays a complete response for longer than this.
/// Guarantee: G10.
#[tokio::test(start_paused = true)]
async fn complete_response_waits_250_ms_at_most_for_its_release() {
    let (store, locks) = store_and_locks();
    store.on(StoreOp::Release).pause_before();
    let app = Router::new().route("/", get(|| async { "ran" }).route_layer(LockLayer::new(&locks, one_key())));
    let asked = tokio::time::Instant::now();
    assert_eq!(text(fetch(&app, "/").await).await, "ran");
    assert!((250..260).contains(&asked.elapsed().as_millis()), "{:?}", asked.elapsed());
    assert_eq!(store.held_count(), 1, "still in transmission");
    store.on(StoreOp::Release).resume();
    settle().await;
    assert_eq!(store.held_count(), 0);
}

/// The body and error types need nothing that hyper does not require.
#[tokio::test]
async fn body_needs_no_unpin_and_its_error_no_send() {
    struct Odd(std::marker::PhantomPinned);
    struct NotSend(#[expect(dead_code, reason = "it makes the type !Send")] std::rc::Rc<()>);
    impl From<NotSend> for axum::BoxError {
        fn from(_: NotSend) -> Self {
            "odd".into()
        }
    }
    impl HttpBody for Odd {
        type Data = Bytes;
        type Error = NotSend;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, NotSend>>> {
            Poll::Ready(Some(Err(NotSend(std::rc::Rc::default()))))
        }
    }
    let locks = LockManager::in_memory();
    let mut body = response(&locks, Odd(std::marker::PhantomPinned)).await.into_body();
    assert_eq!(body.frame().await.expect("a frame").expect_err("odd").to_string(), "odd");
}
