//! The page of `examples/edit_lock.html`: two users, and a document that one of them edits.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderMap, StatusCode, header::COOKIE},
    middleware::{self, Next},
    response::{Html, Response},
    routing::{get, put},
};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tower_lock::{
    HeldLock, LockLayer, key,
    test_util::{Fault, TestStore},
    tickets::{self, Access, RENEW_WITHIN},
};
use tower_lock_testkit::{
    app::{send, serve},
    locks::store_and_locks,
    wait::until,
};

use super::support::{Window, window, windows};

/// A clock that stands. `pass(seconds)` runs the timers that are due by then. It is false, and does
/// nothing, if there are none, or if the page waits for a reply, before which it plans no renewal.
const CLOCK: &str = "
    let now = 0, timers = []; performance.now = () => now;
    setTimeout = (run, ms) => { timers.push({ run, at: now + ms }); return timers.at(-1); };
    clearTimeout = (timer) => { timers = timers.filter((other) => other !== timer); };
    pass = (seconds) => {
        const due = timers.filter(({ at }) => at <= now + 1000 * seconds).sort((a, b) => a.at - b.at);
        if (due.length === 0 || timers.length < 2) return false;
        now += 1000 * seconds;
        for (const timer of due) if (timers.includes(timer)) { clearTimeout(timer); timer.run(); }
        return true;
    };";

const LOST: &str = "You do not edit it any more. Copy what is not saved.";

/// The service of `examples/edit_lock.rs`, with one document.
struct Service {
    store: TestStore,
    server: SocketAddr,
    app: Router,
    text: Arc<Mutex<String>>,
    /// A save waits for it under its lock.
    saves: Arc<Semaphore>,
    /// Each request, and once more with its status.
    requests: Arc<Mutex<Vec<String>>>,
}

/// The document, in the browser of a user.
struct Page(Window);

/// Each user may edit, and those named Ann may take over.
fn access((Path(id), headers): (Path<u64>, HeaderMap)) -> Access {
    let cookie = headers.get(COOKIE).and_then(|cookie| cookie.to_str().ok()?.strip_prefix("user="));
    let (key, Some(user)) = (("document", id).into(), cookie.map(str::to_owned)) else { return Access::Denied };
    if user.starts_with("Ann") { Access::TakeOver { key, user } } else { Access::Edit { key, user } }
}

async fn record(State(requests): State<Arc<Mutex<Vec<String>>>>, request: Request, next: Next) -> Response {
    let line = format!("{} {}", request.method(), request.uri().path());
    requests.lock().expect("no panic").push(line.clone());
    let response = next.run(request).await;
    requests.lock().expect("no panic").push(format!("{line} {}", response.status().as_u16()));
    response
}

impl Service {
    async fn start() -> Self {
        let ((store, locks), requests) = (store_and_locks(), Arc::default());
        let (text, saves) = (Arc::<Mutex<String>>::default(), Arc::new(Semaphore::new(1)));
        let (read, saved, turns) = (Arc::clone(&text), Arc::clone(&text), Arc::clone(&saves));
        let save = async move |lock: HeldLock, text: String| {
            let _turn = turns.acquire().await;
            *saved.lock().expect("no panic") = text;
            lock.keep(RENEW_WITHIN).map(drop).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
        };
        let of_document = key::from_fn(|Path(id): Path<u64>| ("document", id));
        let under_ticket = LockLayer::new(&locks, of_document).tickets(RENEW_WITHIN, 600 * RENEW_WITHIN);
        let page = get(async || Html(include_str!("../../../examples/edit_lock.html")));
        let app = Router::new()
            .route("/documents/{id}", put(save).route_layer(under_ticket).merge(page))
            .route("/documents/{id}/text", get(async move || read.lock().expect("no panic").clone()))
            .nest("/documents/{id}/lock", tickets::router(&locks, access))
            .layer(middleware::from_fn_with_state(Arc::clone(&requests), record));
        Self { store, server: serve(app.clone()).await, app, text, saves, requests }
    }

    /// Waits until so many of these requests were sent, or had this status.
    async fn until_requests(&self, line: &str, count: usize) {
        let sent = || self.requests.lock().expect("no panic").iter().filter(|sent| *sent == line).count();
        until(line, async || sent() == count).await;
    }
}

impl Page {
    async fn open(window: Window, service: &Service, user: &str) -> Self {
        let url = format!("http://{}/documents/7", service.server);
        window.browser.devtools("Network.setCookie", json!({ "name": "user", "value": user, "url": url })).await;
        window.browser.devtools("Page.addScriptToEvaluateOnNewDocument", json!({ "source": CLOCK })).await;
        window.browser.open(&url).await;
        until("a text", async || window.browser.find("#status").await.text().await != "Loading.").await;
        Self(window)
    }

    async fn script(&self, script: &str) -> Value {
        let script = json!({ "expression": script, "awaitPromise": true, "returnByValue": true });
        self.0.browser.devtools("Runtime.evaluate", script).await["result"]["value"].clone()
    }

    async fn click(&self, button: &str) {
        self.0.browser.find(&format!("#{button}")).await.click().await;
    }

    /// Waits for a state that begins with this text, and returns all of it.
    async fn until_it_says(&self, text: &str) -> String {
        let status = self.0.browser.find("#status").await;
        until(text, async || status.text().await.starts_with(text)).await;
        status.text().await
    }

    async fn edit(&self) {
        self.click("edit").await;
        self.until_it_says("You edit it.").await;
    }

    async fn is_read_only(&self) -> bool {
        self.0.browser.find("#text").await.attribute("readonly").await.is_some()
    }

    /// Lets the time pass until the next renewal, which the page plans after the one before.
    async fn pass_a_period(&self) {
        until("a timer of 20 seconds", async || self.script("pass(20)").await == true).await;
    }
}

#[tokio::test]
async fn document_has_one_editor_in_two_browsers() {
    let Some([of_ann, of_bob]) = windows().await else { return };
    let service = Service::start().await;
    let (ann, bob) = (Page::open(of_ann, &service, "Ann").await, Page::open(of_bob, &service, "Bob").await);
    let time = async || ann.script("new Date().toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' })").await;
    let (before, ()) = (time().await, ann.edit().await);
    let locked = [before, time().await]
        .map(|time| format!("Locked by Ann since {}.", time.as_str().expect("a text").replace('\u{202f}', " ")));
    bob.0.browser.reload().await;
    let said = bob.until_it_says("Locked by").await.replace('\u{202f}', " ");
    assert!(locked.contains(&said) && bob.is_read_only().await, "{said}, and not {locked:?}");
    ann.0.browser.find("#text").await.type_text("of Ann").await;
    ann.click("save").await;
    ann.until_it_says("Saved.").await;
    assert_eq!(*service.text.lock().expect("no panic"), "of Ann");
    assert_eq!((ann.0.browser.log().await, bob.0.browser.log().await), (vec![], vec![]));
    bob.click("take-over").await;
    bob.until_it_says("You may not do that. Locked by Ann since ").await;
    bob.click("edit").await;
    bob.until_it_says("Locked by Ann since ").await;
    ann.click("close").await;
    ann.until_it_says("Closed.").await;
    bob.edit().await;
    assert_eq!(bob.script("document.querySelector('textarea').value").await, "of Ann");
    ann.click("edit").await;
    ann.until_it_says("Locked by Bob since ").await;
    ann.click("take-over").await;
    ann.until_it_says("You edit it.").await;
    assert!(!bob.is_read_only().await, "it does not know yet");
    bob.pass_a_period().await;
    bob.until_it_says(&format!("{LOST} Locked by Ann since ")).await;
    assert!(bob.is_read_only().await && !ann.is_read_only().await);
}

#[tokio::test]
async fn refused_save_ends_the_edit_and_keeps_its_text() {
    let Some(window) = window().await else { return };
    let service = Service::start().await;
    let bob = Page::open(window, &service, "Bob").await;
    bob.edit().await;
    bob.0.browser.find("#text").await.type_text("of Bob").await;
    let request = Request::post("/documents/7/lock/take-over").header("x-tower-lock", "1");
    let request = request.header(COOKIE, "user=Ann<b>Lee</b>").body(Body::empty());
    assert_eq!(send(&service.app, request.expect("a request")).await.status(), StatusCode::CREATED);
    bob.click("save").await;
    bob.until_it_says(&format!("{LOST} Locked by Ann<b>Lee</b> since ")).await;
    assert!(bob.is_read_only().await);
    assert_eq!(bob.script("document.querySelector('textarea').value").await, "of Bob");
    assert_eq!(*service.text.lock().expect("no panic"), "");
}

#[tokio::test]
async fn page_that_is_left_frees_its_document_at_once() {
    let Some(window) = window().await else { return };
    let service = Service::start().await;
    let bob = Page::open(window, &service, "Bob").await;
    bob.edit().await;
    // The browser keeps the page, and may show it again.
    bob.script("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))").await;
    bob.until_it_says("Closed.").await;
    assert!(bob.is_read_only().await);
    service.until_requests("DELETE /documents/7/lock 204", 1).await;
    bob.edit().await;
    // The tab closes, and not the last one.
    bob.0.browser.devtools("Target.createTarget", json!({ "url": "about:blank" })).await;
    bob.0.browser.devtools("Page.close", json!({})).await;
    service.until_requests("DELETE /documents/7/lock 204", 2).await;
}

#[tokio::test]
async fn edit_is_renewed_in_turns_and_ends_with_its_time() {
    let Some(window) = window().await else { return };
    let service = Service::start().await;
    let bob = Page::open(window, &service, "Bob").await;
    bob.edit().await;
    let saving = service.saves.acquire().await;
    bob.click("save").await;
    service.until_requests("PUT /documents/7", 1).await;
    bob.pass_a_period().await;
    // After a renewal that waits for nothing, which would be refused.
    bob.script("fetch('/documents/7/lock').then(() => 0)").await;
    service.until_requests("PUT /documents/7/lock", 0).await;
    drop(saving);
    service.until_requests("PUT /documents/7/lock 200", 1).await;
    for count in 2..=4 {
        bob.pass_a_period().await;
        service.until_requests("PUT /documents/7/lock 200", count).await;
    }
    bob.until_it_says("Saved.").await;
    service.store.fault_all(Fault::Fail);
    bob.pass_a_period().await;
    service.until_requests("PUT /documents/7/lock 503", 1).await;
    service.store.fault_all(Fault::None);
    bob.pass_a_period().await;
    service.until_requests("PUT /documents/7/lock 200", 5).await;
    let offline = json!({ "offline": true, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1 });
    bob.0.browser.devtools("Network.enable", json!({})).await;
    bob.0.browser.devtools("Network.emulateNetworkConditions", offline).await;
    bob.pass_a_period().await;
    bob.pass_a_period().await;
    bob.pass_a_period().await;
    bob.until_it_says(LOST).await;
}
