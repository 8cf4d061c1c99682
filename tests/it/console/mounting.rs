//! Links from each place that a router can be put at.

use axum::{Router, body::Body, extract::State, http::Request, routing::get};
use tower_lock::console;
use tower_lock_testkit::{
    app::{fetch, send, text},
    locks::{key, store_and_locks},
};

use super::operator;

#[tokio::test]
async fn links_have_the_prefix_of_each_mount() {
    let (_, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    let console = || console::router(&locks, |_| operator());
    let twice = Router::new().nest("/ops", Router::new().nest("/locks", console()));
    let by_name = Router::new().nest_service("/{tenant}/ops", console());
    for (prefix, app) in [
        ("/ops/locks", Router::new().nest("/ops/locks", console())),
        ("/ops/locks", twice),
        ("/ops/locks", Router::new().nest_service("/ops/locks", console())),
        ("/a&#39;b/ops", by_name),
        ("", Router::new().route("/health", get(|| async {})).merge(console())),
    ] {
        let path = prefix.replace("&#39;", "'");
        let root = if path.is_empty() { "/" } else { &path };
        let page = text(fetch(&app, root).await).await;
        for link in [
            format!("href=\"{}\"", if prefix.is_empty() { "/" } else { prefix }),
            format!("href=\"{prefix}/style.css\""),
            format!("href=\"{prefix}/keys\""),
            format!("action=\"{prefix}/key\""),
            format!("href=\"{prefix}/key?name=k\""),
        ] {
            assert!(page.contains(&link), "no {link} in {page}");
        }
        assert!(fetch(&app, &format!("{path}/style.css")).await.status().is_success());
        let request = Request::post(format!("{path}/revoke?name=other")).header("x-tower-lock", "1");
        let moved = send(&app, request.body(Body::empty()).expect("a request")).await;
        assert_eq!(moved.headers()["location"], format!("{path}/key?name=other&done=free"));
    }
    drop(guard);
}

#[tokio::test]
async fn console_nests_in_an_application_with_a_state() {
    let (_, locks) = store_and_locks();
    let app = Router::new()
        .route("/state", get(|State(state): State<u8>| async move { state.to_string() }))
        .route("/{*all}", get(|| async { "the application" }))
        .nest("/ops/locks", console::router(&locks, |_| operator()))
        .fallback(|| async { "another page" })
        .with_state(7);
    assert_eq!(text(fetch(&app, "/state").await).await, "7");
    assert!(text(fetch(&app, "/ops/locks").await).await.contains("<h1>Locks of "));
    assert!(text(fetch(&app, "/ops/locks/keys").await).await.contains("<h1>All keys</h1>"));
}
