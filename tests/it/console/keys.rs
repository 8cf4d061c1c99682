//! The keys of all processes, and one key.

use std::{future::IntoFuture, time::Duration};

use axum::{Router, http::StatusCode, routing::get};
use serde_json::json;
use tower::Layer;
use tower_lock::{
    LockKey, LockLayer, LockManager, LockManagerLayer, LockPolicy, LogKey, ReplayLayer,
    console::Access,
    key::fixed,
    test_util::{Fault, StoreOp, TestStore},
};
use tower_lock_testkit::{
    app::{fetch, text},
    locks::{key, store_and_locks},
    wait::settle,
};

use super::{AT, answer, app, json, operator, page, part, shown};

#[tokio::test(start_paused = true)]
async fn answer_says_who_holds_and_how_many_wait() {
    let store = TestStore::new();
    let locks = LockManager::builder(store.clone()).instance("api-7").build();
    let other = LockManager::builder(store.clone()).instance("api-8").build();
    let app = app(&locks, operator());
    let free = shown(&app, "/key?name=k").await;
    let nothing = "0 processes wait. 0 calls wait in this process. There is nothing to revoke.";
    assert_eq!(answer(&free), format!("Free: the next call gets it. {nothing}"));
    let guard = locks.lock(key()).await.expect("free");
    let waiters = [&other, &locks, &locks].map(|locks| tokio::spawn(locks.lock(key()).into_future()));
    settle().await;
    let held = shown(&app, "/key?name=k").await;
    let said = answer(&held);
    assert!(said.starts_with("Held by api-7 for "), "{said}");
    assert!(said.ends_with("1 process waits. 2 calls wait in this process. You may revoke it."), "{said}");
    assert!(held.contains("<title>One key – Locks</title>") && held.contains("<h1>One key</h1>"));
    for waiter in waiters {
        waiter.abort();
    }
    settle().await;
    drop(guard);
    settle().await;
    let blocked = shown(&app, "/key?name=k").await;
    assert!(answer(&blocked).starts_with("Without a holder, and blocked for another "), "{blocked}");
    assert!(blocked.contains("End the block"), "{blocked}");
}

#[tokio::test]
async fn page_of_a_ticket_shows_its_name_and_no_secret() {
    let (_, locks) = store_and_locks();
    let ticket = locks.lock(key()).await.expect("free").into_ticket(Duration::from_secs(60)).await.expect("held");
    let page = shown(&app(&locks, operator()), "/key?name=k").await;
    assert!(answer(&page).starts_with("Held by the ticket `ticket` for "), "{page}");
    assert!(!answer(&page).contains("not connected"), "no process could be: {page}");
    let secret = ticket.to_string();
    let (_, secret) = secret.rsplit_once("secret=").expect("its last part");
    assert!(!page.contains(secret), "{page}");
}

#[tokio::test]
async fn page_of_permits_shows_each_holder() {
    let (_, locks) = store_and_locks();
    let one = locks.permit(key(), 4).await.expect("free");
    let two = locks.permit(key(), 4).await.expect("free");
    let page = shown(&app(&locks, operator()), "/key?name=k").await;
    assert!(answer(&page).starts_with("Held by 2 holders: "), "{page}");
    assert_eq!(page.matches("<td>1 of 4</td>").count(), 2, "{page}");
    assert_eq!(page.matches("&amp;holder=").count(), 2, "{page}");
    assert!(page.contains(">Revoke all holders</button>"), "{page}");
    drop((one, two));
}

#[tokio::test(start_paused = true)]
async fn keys_that_processes_wait_for_are_listed_first() {
    let (store, locks) = store_and_locks();
    let other = LockManager::new(store);
    let guards = [locks.lock(("calm",)).await.expect("free"), locks.lock(("wanted",)).await.expect("free")];
    let waiter = tokio::spawn(other.lock(("wanted",)).into_future());
    settle().await;
    let page = shown(&app(&locks, Access::Read), "/keys").await;
    let (contended, all) = page.split_once("<h2>Keys in use</h2>").expect("both parts");
    assert!(contended.contains("wanted") && !contended.contains("calm"), "{contended}");
    assert!(all.contains("calm") && all.contains("wanted"), "{all}");
    waiter.abort();
    drop(guards);
}

#[tokio::test]
async fn next_page_begins_where_the_page_before_ended() {
    let (_, locks) = store_and_locks();
    let mut guards = Vec::new();
    for n in 100..230 {
        guards.push(locks.lock(("n", n)).await.expect("free"));
    }
    let app = app(&locks, Access::Read);
    let first = shown(&app, "/keys").await;
    assert_eq!(first.matches("/key?name=n%3A").count(), 100);
    let next = part(part(&first, "id=\"keys-next\"", ">"), "href=\"/ops/locks", "\"").replace("&amp;", "&");
    let second = shown(&app, &next).await;
    assert_eq!(second.matches("/key?name=n%3A").count(), 30);
    assert!(!second.contains("keys-next") && !second.contains("Keys that processes wait for"), "{second}");
    let page = json(&app, "/api/keys").await;
    assert_eq!(page["all"]["keys"].as_array().map(Vec::len), Some(100));
    guards.clear();
}

#[tokio::test]
async fn wrong_cursor_and_wrong_name_are_400() {
    let (_, locks) = store_and_locks();
    let app = app(&locks, operator());
    let long = "x".repeat(257);
    for path in [
        "/keys?after=nonsense",
        "/keys?contended=1&after=nonsense",
        "/api/keys?after=nonsense",
        "/key",
        "/key?name=",
        "/key?name=a%00b",
        "/key?name=a%20b",
        "/key?name=%E2%80%AEb",
        &format!("/key?name={long}"),
        &format!("/key?raw=1&name={}", "x".repeat(1_025)),
        "/key?raw=1&name=a%7Bb",
        "/api/key?name=",
    ] {
        let (status, text) = page(&app, path).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}: {text}");
    }
    assert!(shown(&app, &format!("/key?raw=1&name={long}")).await.contains("x…</bdi>"));
}

#[tokio::test(start_paused = true)]
async fn second_listing_of_a_process_gets_503() {
    let (store, locks) = store_and_locks();
    let app = app(&locks, Access::Read);
    store.on(StoreOp::List).fault(Fault::Hang);
    let first = tokio::spawn({
        let app = app.clone();
        async move { fetch(&app, &format!("{AT}/keys")).await.status() }
    });
    settle().await;
    let second = fetch(&app, &format!("{AT}/api/keys")).await;
    assert_eq!(
        (second.status(), &second.headers()["retry-after"]),
        (StatusCode::SERVICE_UNAVAILABLE, &"1".parse().expect("a value"))
    );
    assert_eq!(store.on(StoreOp::List).calls(), 1);
    assert_eq!(first.await.expect("no panic"), StatusCode::SERVICE_UNAVAILABLE, "no reply");
    store.on(StoreOp::List).fault(Fault::None);
    assert_eq!(fetch(&app, &format!("{AT}/keys")).await.status(), StatusCode::OK);
    assert_eq!(store.on(StoreOp::List).calls(), 3, "two for a page");
}

#[tokio::test]
async fn error_of_the_store_is_a_503_without_its_cause() {
    let (store, locks) = store_and_locks();
    store.fault_all(Fault::Fail);
    let app = app(&locks, operator());
    for path in ["/keys", "/key?name=k"] {
        let (status, text) = page(&app, path).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(answer(&text).contains("store cannot be reached to "), "{text}");
    }
    assert!(shown(&app, "").await.contains("This process holds 0 locks"), "no call");
}

#[tokio::test]
async fn key_of_a_client_is_text_in_each_page() {
    let (_, locks) = store_and_locks();
    let name = "<script>alert('1')</script>\"\u{202e}\u{2066}\u{200f}&\n";
    let raw = LockKey::raw(name).expect("valid");
    let guard = locks.lock(raw.clone()).await.expect("free");
    let app = app(&locks, operator());
    let shown_name = "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot;\\u{202e}\\u{2066}\\u{200f}&amp;\\u{a}";
    for path in ["", "/keys"] {
        let page = shown(&app, path).await;
        assert!(page.contains(&format!("<bdi>{shown_name}</bdi>")), "{page}");
        assert!(!page.contains("<script") && !page.contains('\u{202e}'), "{page}");
        let link = part(&page, "href=\"/ops/locks/key?", "\"").replace("&amp;", "&");
        let page = shown(&app, &format!("/key?{link}")).await;
        assert!(page.contains(shown_name) && answer(&page).starts_with("Held by "), "{page}");
    }
    drop(guard);
}

#[tokio::test]
async fn json_has_stable_names_and_the_values_of_the_pages() {
    let store = TestStore::new();
    let locks = LockManager::builder(store).instance("api-7").seed(7).build();
    let guard = locks.lock(key()).await.expect("free");
    let permit = locks.permit(LockKey::from(("p",)), 4).await.expect("free");
    let app = app(&locks, Access::Read);
    let holding = json(&app, "/api/holding").await;
    let [first, second] = &holding["holding"].as_array().expect("a list")[..] else { panic!("{holding}") };
    let fields =
        |value: &serde_json::Value| value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(fields(&holding), "held holding instance keys_redacted shutting_down waits");
    assert_eq!(fields(first), "fencing_token guards held_ms id key limit raw remaining_ms waiting");
    assert_eq!((&first["key"], &first["limit"], &first["raw"]), (&json!("k"), &json!(1), &json!(false)));
    assert_eq!(first["fencing_token"], guard.fencing_token().as_u64());
    assert_eq!((&second["limit"], &second["fencing_token"]), (&json!(4), &json!(null)));
    let keys = json(&app, "/api/keys").await;
    assert_eq!(fields(&keys), "all contended keys_redacted");
    assert_eq!((fields(&keys["all"]), fields(&keys["all"]["keys"][0])), ("keys next".into(), "key raw status".into()));
    let one = json(&app, "/api/key?name=k").await;
    assert_eq!(fields(&one), "key keys_redacted may_revoke raw status");
    let status = serde_json::to_value(locks.inspect(key()).await.expect("up")).expect("JSON");
    assert_eq!(one["status"]["holders"], status["holders"]);
    drop((guard, permit));
}

#[tokio::test]
async fn keys_are_redacted_if_the_manager_or_a_layer_does() {
    let redacted = LockPolicy::new().log_key(LogKey::Redacted);
    let shows = async |locks: &LockManager| {
        let guard = locks.lock(("account", "ann")).await.expect("free");
        let app = app(locks, operator());
        let mut shown_in = Vec::new();
        for path in ["", "/keys", "/api/holding", "/api/keys"] {
            let page = shown(&app, path).await;
            shown_in.push(page.contains("account:ann") || page.contains("account%3Aann"));
            if !shown_in[0] && !path.starts_with("/api") {
                assert!(page.contains("account:~") && page.contains("id=\"redacted\""), "{page}");
                assert!(!page.contains("/key?name="), "{page}");
            }
        }
        let page = shown(&app, "/key?name=account%3Aann").await;
        assert_eq!(page.contains("<bdi>account:ann</bdi>"), shown_in[0]);
        assert!(answer(&page).starts_with("Held by "), "a key is opened by its name");
        guard.release().await.expect("up");
        assert!(shown_in.iter().all(|shown| *shown == shown_in[0]), "{shown_in:?}");
        shown_in[0]
    };
    let new = || LockManager::new(TestStore::new());
    assert!(shows(&new()).await);
    assert!(!shows(&new().with_policy(redacted)).await);
    let locks = new();
    let _ = LockLayer::new(&locks, fixed(("a",)))
        .log_key(LogKey::Redacted)
        .layer(tower::service_fn(|()| async { Ok::<_, ()>(()) }));
    assert!(!shows(&locks).await);
    assert!(shows(&locks.with_policy(LockPolicy::new().log_key(LogKey::Full))).await, "chosen for the console");
    let locks = new();
    let _ = LockManagerLayer::new(&locks).log_key(LogKey::Redacted).layer(());
    assert!(!shows(&locks).await);
    let locks = new();
    let _ = ReplayLayer::new(&locks, fixed(("a",))).policy(redacted).layer(());
    assert!(!shows(&locks).await);
    let locks = new();
    let _ = LockLayer::new(&locks.with_policy(redacted), fixed(("a",))).layer(());
    assert!(!shows(&locks).await);
    // The layer of another manager, whose settings a route inherits.
    let locks = new();
    let route = get(|| async {}).route_layer(LockLayer::new(&locks, fixed(("a",))));
    let outer = LockManagerLayer::new(&new()).log_key(LogKey::Redacted);
    let service = Router::new().route("/", route).layer(outer);
    assert_eq!(fetch(&service, "/").await.status(), StatusCode::OK);
    assert!(!shows(&locks).await);
}

#[tokio::test(start_paused = true)]
async fn console_works_while_its_process_shuts_down() {
    let (_, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    let stopping = tokio::spawn({
        let locks = locks.clone();
        async move { locks.shutdown(Duration::from_secs(9)).await }
    });
    settle().await;
    let app = app(&locks, operator());
    assert!(answer(&shown(&app, "").await).contains("It is shutting down"));
    for path in ["/keys", "/key?name=k"] {
        assert!(shown(&app, path).await.contains("<bdi>k</bdi>"));
    }
    guard.release().await.expect("up");
    assert_eq!(stopping.await.expect("no panic"), 0);
    let style = fetch(&app, &format!("{AT}/style.css")).await;
    assert!(text(style).await.contains("prefers-color-scheme"));
}
