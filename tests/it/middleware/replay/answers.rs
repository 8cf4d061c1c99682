//! Which part of an answer a retry gets.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderValue, Method, Request, Response, StatusCode, header::SET_COOKIE},
    response::IntoResponse,
    routing::get,
};
use http_body_util::{BodyExt, Collected};
use tokio::time::sleep;
use tower_lock::{Keep, test_util::StoreOp};
use tower_lock_testkit::{
    app::{send, text},
    body::{ScriptedBody, Step, paused},
    locks::store_and_locks,
};

use super::{app, created, is_replayed, layer, problem, request, run_of};

type MakeBody = fn() -> Body;

/// The whole body, or the text of its error.
async fn bytes(response: Response<Body>) -> Result<Bytes, String> {
    response.into_body().collect().await.map(Collected::to_bytes).map_err(|error| error.to_string())
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn retry_gets_the_first_answer() {
    let (store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), created);
    let first = send(&app, request("\"a\"", "x")).await;
    assert!(first.status() == StatusCode::CREATED && !is_replayed(&first));
    assert_eq!(store.on(StoreOp::Acquire).calls() + store.on(StoreOp::Release).calls(), 2);
    for key in ["\"a\"", "a"] {
        let retry = send(&app, request(key, "x")).await;
        assert!(retry.status() == StatusCode::CREATED && is_replayed(&retry), "{retry:?}");
        assert_eq!(retry.headers()["location"], "/runs/1");
        assert_eq!(retry.headers()["content-type"], "text/plain; charset=utf-8");
        assert_eq!(retry.headers()["content-length"], "5");
        assert_eq!(text(retry).await, "run 1");
    }
    assert_eq!(store.on(StoreOp::Acquire).calls() + store.on(StoreOp::Release).calls(), 4, "one call for each retry");
    assert_eq!((runs(), store.held_count()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn status_headers_and_body_survive_byte_for_byte() {
    let (_store, locks) = store_and_locks();
    let every_byte: Vec<u8> = (0..=255).cycle().take(10_000).collect();
    let expected = Bytes::from(every_byte);
    let body = expected.clone();
    let (app, _) = app(layer(&locks), move |_| {
        // Two frames, and a length that the body does not announce.
        let (one, two) = (body.slice(..3), body.slice(3..));
        let frames = futures_util::stream::iter([one, two].map(Ok::<_, std::convert::Infallible>));
        let mut response = (StatusCode::ACCEPTED, Body::from_stream(frames)).into_response();
        for (name, value) in [
            ("location", &b"/runs/1"[..]),
            ("link", b"</a>; rel=\"next\""),
            ("x-bytes", b"caf\xe9 \xff"),
            ("link", b"</b>; rel=\"prev\""),
        ] {
            response.headers_mut().append(name, HeaderValue::from_bytes(value).expect("a value"));
        }
        response
    });
    let first = send(&app, request("a", "x")).await;
    assert_eq!(first.headers().get("content-length"), None);
    let mut headers = first.headers().clone();
    assert_eq!(bytes(first).await.expect("complete"), expected);
    let retry = send(&app, request("a", "x")).await;
    assert_eq!(
        (retry.status(), retry.headers()["content-length"].to_str().expect("text")),
        (StatusCode::ACCEPTED, "10000")
    );
    headers.insert("idempotency-replayed", HeaderValue::from_static("true"));
    headers.insert("content-length", HeaderValue::from_static("10000"));
    assert!(retry.headers().iter().eq(headers.iter()), "{:?} {headers:?}", retry.headers());
    assert_eq!(retry.headers().get_all("link").iter().count(), 2);
    assert_eq!(bytes(retry).await.expect("complete"), expected);
}

#[tokio::test(start_paused = true)]
async fn headers_of_the_first_attempt_are_not_replayed() {
    let (_store, locks) = store_and_locks();
    let headers = [("age", "7"), ("authentication-info", "nextnonce=1"), ("x-kept", "1")];
    let (app, _) = app(layer(&locks), move |_| (headers, "run 1"));
    assert_eq!(send(&app, request("a", "x")).await.headers()["age"], "7");
    let retry = send(&app, request("a", "x")).await;
    assert_eq!(headers.map(|(name, _)| retry.headers().contains_key(name)), [false, false, true]);
}

#[tokio::test(start_paused = true)]
async fn cookies_of_the_first_client_are_not_replayed() {
    let with_cookies = |_| {
        let mut response = "run 1".into_response();
        for value in ["a=1", "b=2"] {
            response.headers_mut().append(SET_COOKIE, HeaderValue::from_static(value));
        }
        response
    };
    for (keeps, expected) in [(false, vec![]), (true, vec!["a=1", "b=2"])] {
        let (_store, locks) = store_and_locks();
        let layer = if keeps { layer(&locks).keep_headers([SET_COOKIE]) } else { layer(&locks) };
        let (app, _) = app(layer, with_cookies);
        assert_eq!(send(&app, request("a", "x")).await.headers().get_all(SET_COOKIE).iter().count(), 2);
        let retry = send(&app, request("a", "x")).await;
        assert!(is_replayed(&retry));
        let cookies: Vec<_> = retry.headers().get_all(SET_COOKIE).iter().collect();
        assert_eq!(cookies, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn headers_of_the_connection_are_not_replayed() {
    let (_store, locks) = store_and_locks();
    let headers = [("connection", "x-hop, close"), ("x-hop", "1"), ("date", "Mon"), ("x-end", "2")];
    let (app, _) = app(layer(&locks), move |_| (headers, "run 1"));
    send(&app, request("a", "x")).await;
    let retry = send(&app, request("a", "x")).await;
    assert!(is_replayed(&retry));
    for (name, value) in headers {
        let expected = (name == "x-end").then_some(value);
        assert_eq!(retry.headers().get(name).map(|value| value.to_str().expect("text")), expected, "{name}");
    }
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn answer_that_is_not_kept_does_not_run_again() {
    let bodies: [(&str, MakeBody); 4] = [
        ("2 MiB", || Body::from(vec![b'x'; 2 << 20])),
        ("frames that are not ready", || Body::new(ScriptedBody::new(paused(&[Step::Data(3); 3])))),
        ("more frames than are read ahead", || Body::new(ScriptedBody::new([Step::Data(5_000); 40]))),
        ("trailers", || Body::new(ScriptedBody::new([Step::Data(3), Step::Trailers]))),
    ];
    for (name, body) in bodies {
        let (store, locks) = store_and_locks();
        let keep_for = Duration::from_secs(600);
        let (app, runs) = app(layer(&locks).keep_for(keep_for), move |run| {
            (StatusCode::CREATED, [("location", format!("/runs/{run}")), ("etag", "\"7\"".to_owned())], body())
        });
        let first = send(&app, request("a", "x")).await;
        assert_eq!(first.status(), StatusCode::CREATED);
        assert!(!bytes(first).await.expect("complete").is_empty());
        for _ in 0..3 {
            let retry = send(&app, request("a", "x")).await;
            assert_eq!(retry.headers()["location"], "/runs/1", "{name}");
            assert_eq!(retry.headers()["etag"], "\"7\"", "{name}");
            assert_eq!(retry.headers().get("retry-after"), None, "{name}");
            let problem = problem(retry, 409, "answer-not-kept").await;
            assert_eq!((&problem["outcome"], &problem["original_status"]), (&"done".into(), &201.into()));
            sleep(keep_for / 4).await;
        }
        problem(send(&app, request("a", "y")).await, 422, "idempotency-key-reused").await;
        assert_eq!((runs(), store.held_count()), (1, 0), "{name}");
        sleep(keep_for / 4).await;
        assert_eq!(send(&app, request("a", "x")).await.headers()["location"], "/runs/2", "{name}");
    }
}

/// A tunnel cannot be replayed.
/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn upgrade_does_not_run_again() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), |_| StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(send(&app, request("a", "x")).await.status(), StatusCode::SWITCHING_PROTOCOLS);
    let problem = problem(send(&app, request("a", "x")).await, 409, "answer-not-kept").await;
    assert_eq!((problem["original_status"].as_u64(), runs()), (Some(101), 1));
}

/// An answer to `HEAD` has the length of a body that is not in it.
#[tokio::test(start_paused = true)]
async fn head_request_has_no_record() {
    let (_store, locks) = store_and_locks();
    let layer = layer(&locks).methods([Method::HEAD, Method::GET]);
    let handler = |State(runs): State<Arc<AtomicUsize>>| async move {
        runs.fetch_add(1, SeqCst);
        vec![b'x'; 65_536]
    };
    let runs = Arc::<AtomicUsize>::default();
    let app = Router::new().route("/", get(handler).route_layer(layer)).with_state(Arc::clone(&runs));
    for run in 1..=2 {
        let head = Request::head("/").header("idempotency-key", "a").body(Body::empty()).expect("a request");
        let response = send(&app, head).await;
        assert_eq!((&response.headers()["content-length"], runs.load(SeqCst)), (&"65536".parse().expect("text"), run));
    }
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn failed_answer_is_not_cached() {
    for status in [StatusCode::INTERNAL_SERVER_ERROR, StatusCode::NOT_FOUND, StatusCode::BAD_REQUEST] {
        let (_store, locks) = store_and_locks();
        let (app, runs) =
            app(layer(&locks), move |run| (if run < 3 { status } else { StatusCode::OK }, format!("run {run}")));
        for run in 1..=3 {
            assert_eq!(run_of(send(&app, request("a", "x")).await).await, (run, false), "{status}: no delay");
        }
        assert_eq!(run_of(send(&app, request("a", "x")).await).await, (3, true));
        assert_eq!(runs(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn handler_and_layer_decide_what_is_kept() {
    let (_store, locks) = store_and_locks();
    let answer = |status: u16, keep: Option<Keep>| {
        move |run: usize| {
            let mut response = format!("run {run}").into_response();
            *response.status_mut() = StatusCode::from_u16(status).expect("a status");
            if let Some(keep) = keep {
                response.extensions_mut().insert(keep);
            }
            response
        }
    };
    let by_status = |layer: tower_lock::ReplayLayer<_>| layer.keep_if(|head| head.status == StatusCode::NOT_FOUND);
    for (n, (layer, status, keep, is_kept)) in [
        (layer(&locks), 502, Some(Keep::Yes), true),
        (layer(&locks), 200, Some(Keep::No), false),
        (by_status(layer(&locks)), 404, None, true),
        (by_status(layer(&locks)), 200, None, false),
        (by_status(layer(&locks)), 200, Some(Keep::Yes), true),
        (by_status(layer(&locks)), 404, Some(Keep::No), false),
    ]
    .into_iter()
    .enumerate()
    {
        let (app, _) = app(layer, answer(status, keep));
        let key = format!("key-{n}");
        assert_eq!(run_of(send(&app, request(&key, "x")).await).await, (1, false));
        let retry = send(&app, request(&key, "x")).await;
        assert_eq!(retry.status(), status);
        assert_eq!(run_of(retry).await, if is_kept { (1, true) } else { (2, false) }, "{status} {keep:?}");
    }
}

/// The client of the first attempt sees a response that ends early.
#[tokio::test(start_paused = true)]
async fn truncated_answer_is_not_replayed() {
    for announced in ["30", "10"] {
        let (_store, locks) = store_and_locks();
        let (app, runs) = app(layer(&locks), move |_| {
            let body = Body::new(ScriptedBody::new([Step::Data(10), Step::Data(10)]));
            ([("content-length", announced)], body)
        });
        send(&app, request("a", "x")).await;
        problem(send(&app, request("a", "x")).await, 409, "answer-not-kept").await;
        assert_eq!(runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn answer_of_many_small_frames_is_kept() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks), |_| Body::new(ScriptedBody::new([Step::Data(1_000); 60])));
    for is_retry in [false, true] {
        let response = send(&app, request("a", "x")).await;
        assert_eq!(is_replayed(&response), is_retry);
        assert_eq!(bytes(response).await.expect("complete").len(), 60_000);
    }
    assert_eq!(runs(), 1);
}
