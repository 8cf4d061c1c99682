//! The routes of locks for editors.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{HeaderMap, Method, Request, StatusCode},
    routing::put,
};
use tokio::{sync::Notify, time::sleep};
use tower_lock::{
    HeldLock, LockLayer, LockManager, MemoryStore, key,
    test_util::StoreOp,
    tickets::{self, Access, EDIT_WITHIN, RENEW_WITHIN},
};
use tower_lock_testkit::{
    app::{send, text},
    locks::store_and_locks,
    log::Log,
    store::{InterceptedStore, WithoutTraits},
    wait::settle,
};

/// An application in which the header `user` is the login. `Eve` is no editor, and `Boss` may take
/// over. A save ends when the test says so.
struct App {
    router: Router,
    saved: Arc<Notify>,
}

fn document(id: u64) -> (&'static str, u64) {
    ("document", id)
}

fn access((Path(id), headers): (Path<u64>, HeaderMap)) -> Access {
    let user = headers.get("user").map(|name| String::from_utf8_lossy(name.as_bytes()).into_owned());
    let key = document(id).into();
    match user {
        None => Access::Denied,
        Some(user) if user == "Eve" => Access::Denied,
        Some(user) if user == "Boss" => Access::TakeOver { key, user },
        Some(user) => Access::Edit { key, user },
    }
}

impl App {
    fn new(locks: &LockManager) -> Self {
        let saved = Arc::<Notify>::default();
        let save = {
            let saved = Arc::clone(&saved);
            async move |lock: HeldLock| {
                saved.notified().await;
                lock.keep(RENEW_WITHIN).map(drop).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
            }
        };
        let layer =
            LockLayer::new(locks, key::from_fn(|Path(id): Path<u64>| document(id))).tickets(RENEW_WITHIN, EDIT_WITHIN);
        let router = Router::new()
            .route("/documents/{id}", put(save).route_layer(layer))
            .nest("/documents/{id}/lock", tickets::router(locks, access));
        Self { router, saved }
    }

    /// A request of a page of this user. Returns the status, and the JSON or the text of the
    /// response.
    async fn call(&self, method: Method, path: &str, user: &str, ticket: Option<&str>) -> (u16, serde_json::Value) {
        let mut request = Request::builder().method(method).uri(format!("/documents/7{path}")).header("user", user);
        request = request.header("sec-fetch-site", "same-origin");
        if let Some(ticket) = ticket {
            request = request.header("lock-ticket", ticket);
        }
        let response = send(&self.router, request.body(Body::empty()).expect("a request")).await;
        let status = response.status().as_u16();
        let is_stored = response.headers().get("cache-control").is_none_or(|value| value != "no-store");
        let body = text(response).await;
        assert!(!body.starts_with('{') || !is_stored, "it may have a ticket: {body}");
        (status, serde_json::from_str(&body).unwrap_or_else(|_| body.into()))
    }

    async fn take(&self, user: &str) -> String {
        let (status, body) = self.call(Method::POST, "/lock", user, None).await;
        assert_eq!((status, &body["renew_within_ms"]), (201, &60_000.into()), "{body}");
        body["ticket"].as_str().expect("a ticket").to_owned()
    }
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn edit_lock_is_taken_renewed_and_freed() {
    let app = App::new(&LockManager::in_memory());
    let free = app.call(Method::GET, "/lock", "Bob", None).await;
    assert_eq!((free.0, &free.1["locked"], &free.1["by"]), (200, &false.into(), &serde_json::Value::Null));
    let ticket = app.take("Ann").await;
    for _ in 0..5 {
        sleep(RENEW_WITHIN / 3).await;
        assert_eq!(app.call(Method::PUT, "/lock", "Ann", Some(&ticket)).await.0, 200, "the same ticket");
    }
    let (status, holder) = app.call(Method::POST, "/lock", "Bob", None).await;
    assert_eq!((status, &holder["locked"], &holder["by"]), (409, &true.into(), &"Ann".into()));
    assert!(holder["since_unix_ms"].as_u64().is_some_and(|since| since > 1_700_000_000_000), "{holder}");
    assert!(holder["left_ms"].as_u64().is_some_and(|left| (59_000..=60_000).contains(&left)), "{holder}");
    assert!(holder.get("ticket").is_none() && !holder.to_string().contains("secret"), "{holder}");
    assert_eq!(app.call(Method::DELETE, "/lock", "Ann", Some(&ticket)).await.0, 204);
    app.take("Bob").await;
    let (status, problem) = app.call(Method::PUT, "/lock", "Ann", Some(&ticket)).await;
    assert!(status == 409 && problem["type"].as_str().is_some_and(|of| of.ends_with("#ticket-not-held")), "{problem}");
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn page_that_is_closed_frees_its_document() {
    let app = App::new(&LockManager::in_memory());
    app.take("Ann").await;
    sleep(RENEW_WITHIN + Duration::from_millis(10)).await;
    app.take("Bob").await;
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn lock_is_taken_over_by_those_who_may() {
    let app = App::new(&LockManager::in_memory());
    let log = Log::default();
    let _listening = log.listen();
    let events = || log.text().matches("lock taken over").count();
    let of_ann = app.take("Ann").await;
    let (status, holder) = app.call(Method::POST, "/lock/take-over", "Bob", None).await;
    assert_eq!((status, &holder["by"], events()), (403, &"Ann".into(), 0));
    let (status, taken) = app.call(Method::POST, "/lock/take-over", "Boss", None).await;
    assert_eq!((status, events()), (201, 1), "{}", log.text());
    assert!(log.text().contains("user=Boss by=Ann") && !log.text().contains("secret"), "{}", log.text());
    assert_eq!(app.call(Method::PUT, "/lock", "Ann", Some(&of_ann)).await.0, 409, "it is not hers any more");
    let of_boss = taken["ticket"].as_str().expect("a ticket");
    assert_eq!(app.call(Method::PUT, "/lock", "Boss", Some(of_boss)).await.0, 200);
    assert_eq!(app.call(Method::DELETE, "/lock", "Boss", Some(of_boss)).await.0, 204);
    // Of a free document, and from another page of the same user.
    assert_eq!(app.call(Method::POST, "/lock/take-over", "Ann", None).await.0, 201);
    assert_eq!(app.call(Method::POST, "/lock/take-over", "Ann", None).await.0, 201);
    assert_eq!(events(), 2);
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn save_runs_under_the_ticket_of_its_editor() {
    let app = App::new(&LockManager::in_memory());
    let ticket = app.take("Ann").await;
    let save = |ticket: Option<String>| {
        let router = app.router.clone();
        tokio::spawn(async move {
            let mut request = Request::put("/documents/7");
            if let Some(ticket) = &ticket {
                request = request.header("lock-ticket", ticket);
            }
            let response = send(&router, request.body(Body::empty()).expect("a request")).await;
            (response.status().as_u16(), response.headers().contains_key("lock-ticket"))
        })
    };
    assert_eq!(save(None).await.expect("no panic"), (409, false), "without the ticket");
    let saving = save(Some(ticket.clone()));
    settle().await;
    let (_, holder) = app.call(Method::GET, "/lock", "Bob", None).await;
    assert_eq!((&holder["locked"], &holder["by"]), (&true.into(), &serde_json::Value::Null));
    assert_eq!(app.call(Method::PUT, "/lock", "Ann", Some(&ticket)).await.0, 409, "in use");
    assert_eq!(app.call(Method::POST, "/lock/take-over", "Boss", None).await.0, 409, "in use");
    app.saved.notify_one();
    assert_eq!(saving.await.expect("no panic"), (200, true));
    assert_eq!(app.call(Method::PUT, "/lock", "Ann", Some(&ticket)).await.0, 200);
}

#[tokio::test(start_paused = true)]
async fn request_without_access_or_of_another_site_changes_nothing() {
    let app = App::new(&LockManager::in_memory());
    let ticket = app.take("Ann").await;
    for (method, path) in
        [(Method::POST, "/lock"), (Method::PUT, "/lock"), (Method::DELETE, "/lock"), (Method::POST, "/lock/take-over")]
    {
        for (site, user, status) in [
            (Some("cross-site"), "Ann", 403),
            (Some("same-site"), "Ann", 403),
            (Some("none"), "Ann", 403),
            (None, "Ann", 403),
            (Some("same-origin"), "Eve", 403),
        ] {
            let mut request = Request::builder().method(method.clone()).uri(format!("/documents/7{path}"));
            if let Some(site) = site {
                request = request.header("sec-fetch-site", site);
            }
            let request = request.header("user", user).header("lock-ticket", &ticket).body(Body::empty());
            let response = send(&app.router, request.expect("a request")).await;
            assert_eq!(response.status().as_u16(), status, "{method} {path} {site:?} {user}");
            let why = if user == "Eve" { "Sign in as a user who may" } else { "with `x-tower-lock: 1`" };
            assert!(text(response).await.contains(why), "it says what to do");
        }
    }
    assert_eq!(app.call(Method::GET, "/lock", "Eve", None).await.0, 403);
    let program = Request::put("/documents/7/lock").header("user", "Ann").header("x-tower-lock", "1");
    let program = program.header("lock-ticket", &ticket).body(Body::empty()).expect("a request");
    assert_eq!(send(&app.router, program).await.status(), StatusCode::OK);
    for ticket in [None, Some("a ticket"), Some(&*ticket.replace("document", "other"))] {
        let (status, why) = app.call(Method::PUT, "/lock", "Ann", ticket).await;
        assert!(status == 400 && why.to_string().contains("lock-ticket"), "{ticket:?}: {why}");
    }
}

#[tokio::test(start_paused = true)]
async fn name_of_a_user_may_have_any_characters() {
    let store = Arc::new(MemoryStore::new());
    for (name, shown) in [
        ("Jörg: <b>&amp;", "Jörg: <b>&amp;".to_owned()),
        ("a b+c%20", "a b+c%20".to_owned()),
        (&*"ö".repeat(40), "ö".repeat(32)),
        ("", String::new()),
    ] {
        let app = App::new(&LockManager::new(Arc::clone(&store)));
        let ticket = app.take(name).await;
        let (_, holder) = app.call(Method::GET, "/lock", "Bob", None).await;
        assert_eq!(holder["by"], shown);
        assert_eq!(app.call(Method::DELETE, "/lock", name, Some(&ticket)).await.0, 204);
    }
}

/// Two users may have the name that a ticket shows.
/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn name_that_is_not_of_one_user_takes_nothing_over() {
    let of = |bytes: usize| "a".repeat(bytes);
    let cut = of(64);
    for (name, status) in
        [("Ann", 201), (&*of(60), 201), ("", 403), ("ticket", 403), (&*of(61), 403), (&*cut, 403), (&*of(90), 403)]
    {
        let app = App::new(&LockManager::in_memory());
        app.take(name).await;
        assert_eq!(app.call(Method::POST, "/lock/take-over", name, None).await.0, status, "{name}");
        assert!(status == 201 || app.call(Method::POST, "/lock/take-over", &cut, None).await.0 == 403, "{name}");
        assert_eq!(app.call(Method::POST, "/lock/take-over", "Boss", None).await.0, 201);
    }
}

#[tokio::test(start_paused = true)]
async fn take_over_of_a_client_that_disconnects_is_logged() {
    let (store, locks) = store_and_locks();
    let app = App::new(&locks);
    app.take("Ann").await;
    let log = Log::default();
    let _listening = log.listen();
    store.on(StoreOp::Release).pause_before();
    let taking = tokio::spawn(async move { app.call(Method::POST, "/lock/take-over", "Boss", None).await });
    settle().await;
    taking.abort();
    assert!(taking.await.expect_err("aborted").is_cancelled());
    assert!(log.text().contains("lock taken over"), "the ticket of Ann has ended: {}", log.text());
}

#[test]
#[should_panic(expected = "`tickets::router` needs another store")]
fn edit_locks_of_a_store_without_tickets_panic() {
    let locks = LockManager::new(InterceptedStore::new(Arc::new(MemoryStore::new()), WithoutTraits));
    let _: Router = tickets::router(&locks, access);
}
