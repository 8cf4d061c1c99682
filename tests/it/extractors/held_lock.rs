//! What a handler sees of its lock.

use axum::{
    Json, Router,
    http::StatusCode,
    routing::{get, post},
};
use serde_json::{Value, json};
use tokio::time::{Duration, sleep};
use tower_lock::{FencingToken, HeldLock, LockLayer, LockManager, key};
use tower_lock_testkit::{
    app::{fetch, post_json, text},
    locks::{one_key, store_and_locks},
};

#[tokio::test(start_paused = true)]
async fn handler_sees_key_token_and_remaining_time() {
    let (_, locks) = store_and_locks();
    let handler = |lock: HeldLock| async move {
        let at_first = lock.remaining();
        sleep(Duration::from_secs(10)).await;
        let later = lock.remaining();
        sleep(Duration::from_secs(25)).await;
        Json(json!({
            "key": lock.key().as_str(),
            "token": lock.fencing_token().as_u64(),
            "ms": ([at_first, later, lock.remaining()].map(|left| left.as_secs_f64() * 1e3)),
        }))
    };
    let app = Router::new().route("/", get(handler).route_layer(LockLayer::new(&locks, key::from_fn(|| ("order", 7)))));
    let seen: Value = serde_json::from_str(&text(fetch(&app, "/").await).await).expect("JSON");
    assert_eq!(seen["key"], "order:7");
    assert_eq!(
        seen["ms"],
        json!([29_698.0, 19_698.0, 24_698.0]),
        "30 s, less 1 % and 2 ms; renewed every 10 s, the last time 5 s ago"
    );
}

/// Guarantee: G11.
#[tokio::test(start_paused = true)]
async fn later_section_has_a_larger_token() {
    async fn token(lock: HeldLock) -> String {
        lock.fencing_token().to_string()
    }
    let (_, locks) = store_and_locks();
    let app = Router::new().route("/", get(token).route_layer(LockLayer::new(&locks, one_key())));
    let mut last = 0;
    for _ in 0..100 {
        let token: u64 = text(fetch(&app, "/").await).await.parse().expect("a number");
        assert!(token > last);
        last = token;
    }
    let guard = locks.try_lock(("k",)).await.expect("free");
    let token: FencingToken = guard.fencing_token();
    assert!(token.as_u64() > last);
    assert_eq!(token, guard.held_lock().fencing_token());
}

#[tokio::test(start_paused = true)]
async fn missing_layer_is_a_500_that_names_layer_and_route() {
    async fn needs(_: HeldLock) -> &'static str {
        "ran"
    }
    async fn can_do_without(lock: Option<HeldLock>) -> String {
        format!("{}", lock.is_some())
    }
    let locks = LockManager::in_memory();
    let lock = || LockLayer::new(&locks, one_key());
    // Not on this route; added before `.route`; skipped; and a route that needs no lock.
    let no_key = || LockLayer::new(&locks, key::from_fn(|| None::<(&str, u8)>));
    let absent = "no `LockLayer` is around this handler";
    let apps = [
        (absent, Router::new().route("/", get(needs))),
        (absent, Router::new().route("/other", get(needs)).layer(lock()).route("/", get(needs))),
        (
            "the `LockLayer` of this route skipped it",
            Router::new().route("/", get(needs).route_layer(lock().skip(|_| true))),
        ),
        ("the key function of this route returned `None`", Router::new().route("/", get(needs).route_layer(no_key()))),
    ];
    for (reason, app) in apps {
        let response = fetch(&app, "/").await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let text = text(response).await;
        assert!(text.contains(reason) && text.contains("`Option<HeldLock>`"), "{text}");
        for word in ["route_layer(LockLayer::new(&locks, key::from_fn(..)))", "after `.route(..)`"] {
            assert_eq!(text.contains(word), reason == absent, "{word}: {text}");
        }
    }
    let app =
        Router::new().route("/without", get(can_do_without)).route("/with", get(can_do_without).route_layer(lock()));
    assert_eq!(text(fetch(&app, "/without").await).await, "false");
    assert_eq!(text(fetch(&app, "/with").await).await, "true");
}

#[tokio::test(start_paused = true)]
async fn nested_layers_hold_both_keys_and_show_the_inner_one() {
    let (store, locks) = store_and_locks();
    let app = Router::new()
        .route("/", post(|lock: HeldLock, _: String| async move { lock.key().to_string() }))
        .route_layer(LockLayer::new(&locks, key::from_fn(|body: String| ("inner", body.len()))))
        .route_layer(LockLayer::new(&locks, key::from_fn(|| ("outer",))));
    assert_eq!(text(post_json(&app, "/", "{}").await).await, "inner:2");
    let outer = locks.try_lock(("outer",)).await.expect("free");
    assert_eq!(post_json(&app, "/", "{}").await.status(), StatusCode::CONFLICT);
    outer.release().await.expect("the store is up");
    let _inner = locks.try_lock(("inner", 2)).await.expect("free");
    assert_eq!(post_json(&app, "/", "{}").await.status(), StatusCode::CONFLICT);
    assert_eq!(store.held_count(), 1, "the outer one was released");
}
