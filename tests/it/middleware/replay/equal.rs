//! Equal requests without a key run once.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
};
use tokio::time::sleep;
use tower_lock::{LockKey, LockManager, ReplayLayer, key};
use tower_lock_testkit::{
    app::send,
    locks::store_and_locks,
    wait::{ms, settle},
};

use super::{app, counted, created, layer, problem, request, run_of, spawn};

const WINDOW: Duration = Duration::from_secs(10);

fn post(uri: &str, body: &'static str) -> Request<Body> {
    Request::post(uri).body(Body::from(body)).expect("a request")
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn equal_requests_run_once_and_get_one_answer() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks).equal_requests(WINDOW), created);
    let clicks: Vec<_> = (0..10).map(|_| spawn(&app, post("/?q=1", "order"))).collect();
    let mut replayed = 0;
    for click in clicks {
        let response = click.await.expect("no panic");
        assert_eq!(
            (response.status(), response.headers()["location"].as_bytes()),
            (StatusCode::CREATED, &b"/runs/1"[..])
        );
        replayed += usize::from(run_of(response).await.1);
    }
    assert_eq!((runs(), replayed), (1, 9));
    sleep(WINDOW - ms(50)).await;
    assert_eq!(run_of(send(&app, post("/?q=1", "order")).await).await, (1, true), "within the window");
    sleep(ms(100)).await;
    assert_eq!(run_of(send(&app, post("/?q=1", "order")).await).await, (2, false), "it is over");
}

/// Guarantee: G18.
#[tokio::test(start_paused = true)]
async fn requests_that_differ_in_one_part_are_not_equal() {
    let (_store, locks) = store_and_locks();
    let scope =
        key::from_parts(|head| head.headers.get("user").map(|user| ("user", user.to_str().expect("text").to_owned())));
    let (handler, runs) = counted(created);
    let handler = handler.route_layer(ReplayLayer::new(&locks, scope).equal_requests(WINDOW));
    let app = Router::new().route("/", handler.clone()).route("/other", handler);
    let base = || Request::post("/").header("user", "ann").header("content-type", "text/plain");
    let body = |text: &'static str| Body::from(text);
    let all = [
        base().body(body("order")),
        base().body(body("order ")),
        base().uri("/other").body(body("order")),
        base().uri("/?again").body(body("order")),
        base().method("PATCH").body(body("order")),
        Request::post("/").header("user", "bob").header("content-type", "text/plain").body(body("order")),
        Request::post("/").header("user", "ann").header("content-type", "text/csv").body(body("order")),
        base().header("content-encoding", "gzip").body(body("order")),
    ];
    for (n, request) in all.into_iter().enumerate() {
        let response = send(&app, request.expect("a request")).await;
        if n != 4 {
            assert_eq!(run_of(response).await.0, runs());
        }
    }
    // The handler has no `PATCH`.
    assert_eq!(runs(), 7);
    assert_eq!(run_of(send(&app, base().body(body("order")).expect("a request")).await).await, (1, true));
}

#[tokio::test(start_paused = true)]
async fn key_of_the_client_and_other_methods_are_not_compared() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(
        layer(&locks).methods(["POST", "PUT"].map(|name| name.parse().expect("a method"))).equal_requests(WINDOW),
        created,
    );
    for key in ["a", "b"] {
        assert!(!run_of(send(&app, request(key, "order")).await).await.1);
    }
    assert!(!run_of(send(&app, post("/", "order")).await).await.1, "it has no key");
    assert!(run_of(send(&app, request("a", "order")).await).await.1, "a retry");
    for _ in 0..2 {
        let put = Request::put("/").body(Body::from("order")).expect("a request");
        assert!(!run_of(send(&app, put).await).await.1);
    }
    assert_eq!(runs(), 5);
}

/// The first one has failed: one of the others runs.
#[tokio::test(start_paused = true)]
async fn failure_is_no_answer_to_equal_requests() {
    let (_store, locks) = store_and_locks();
    let answer = |run| if run == 1 { (StatusCode::BAD_GATEWAY, "run 1") } else { (StatusCode::OK, "run 2") };
    let (app, runs) = app(layer(&locks).equal_requests(WINDOW), answer);
    let clicks: Vec<_> = (0..3).map(|_| spawn(&app, post("/", "order"))).collect();
    let mut statuses = Vec::new();
    for click in clicks {
        statuses.push(click.await.expect("no panic").status().as_u16());
    }
    assert_eq!((statuses, runs()), (vec![502, 200, 200], 2));
}

#[tokio::test(start_paused = true)]
async fn equal_request_waits_as_long_as_the_layer_says() {
    let (_store, locks) = store_and_locks();
    let (app, runs) = app(layer(&locks).equal_requests(WINDOW).wait(ms(50)), created);
    let first = spawn(&app, post("/", "order"));
    settle().await;
    problem(send(&app, post("/", "order")).await, 409, "in-flight").await;
    assert_eq!(run_of(first.await.expect("no panic")).await, (1, false));
    assert_eq!(runs(), 1);
}

/// Each of them counts on its own: an answer of ten seconds does not end the time of a day.
#[tokio::test(start_paused = true)]
async fn answers_of_equal_requests_do_not_use_up_those_of_keys() {
    let (_store, locks) = store_and_locks();
    let (app, _) = app(layer(&locks).scope_limits(2, 1 << 20).equal_requests(WINDOW), created);
    for (path, is_full) in [("/?1", false), ("/?2", false), ("/?3", true)] {
        let response = send(&app, post(path, "order")).await;
        assert_eq!(response.status().as_u16(), if is_full { 429 } else { 201 }, "{path}");
    }
    for (key, status) in [("a", 201), ("b", 201), ("c", 429)] {
        assert_eq!(send(&app, request(key, "x")).await.status().as_u16(), status, "{key}");
    }
    sleep(2 * WINDOW).await;
    assert_eq!(send(&app, post("/?4", "order")).await.status(), StatusCode::CREATED, "two windows later");
    assert_eq!(send(&app, request("d", "x")).await.status().as_u16(), 429, "and not a day later");
}

#[test]
fn required_key_is_still_required() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let (_store, locks) = store_and_locks();
        let (app, runs) = app(layer(&locks).required().equal_requests(WINDOW), created);
        problem(send(&app, post("/", "order")).await, 400, "idempotency-key-missing").await;
        assert_eq!(runs(), 0);
    });
}

#[test]
#[should_panic(expected = "`equal_requests(999ms)` cannot be set: it must be from 1s to 600s")]
fn shorter_window_of_equal_requests_panics() {
    let _ = layer(&LockManager::in_memory()).equal_requests(ms(999));
}

#[test]
#[should_panic(expected = "`equal_requests(600.001s)` cannot be set")]
fn longer_window_of_equal_requests_panics() {
    let _ = layer(&LockManager::in_memory()).equal_requests(ms(600_001));
}

#[test]
#[should_panic(expected = "`find_answer` cannot be set with `equal_requests`")]
fn equal_requests_with_found_answers_panic() {
    let found = |_: LockKey| async { Ok::<_, std::io::Error>(None::<Vec<u8>>) };
    let _ = layer(&LockManager::in_memory()).find_answer(found).equal_requests(WINDOW);
}

#[test]
#[should_panic(expected = "`fingerprint` cannot be set with `equal_requests`")]
fn equal_requests_with_a_fingerprint_of_values_panic() {
    let values = key::from_fn(async || ("order", 1));
    let _ = layer(&LockManager::in_memory()).equal_requests(WINDOW).fingerprint(values);
}
