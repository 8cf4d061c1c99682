//! A layer with tickets: work of several requests under one key.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{HeaderValue, Request, Response, StatusCode},
    routing::post,
};
use tokio::{sync::Notify, time::sleep};
use tower_lock::{HeldLock, LockLayer, LockManager, MemoryStore, OnLost, Rejection, key, store::StoreErrorKind};
use tower_lock_testkit::{
    app::{problem_type, send, text},
    locks::one_key,
    log::Log,
    store::{InterceptedStore, WithoutTraits},
    wait::settle,
};

const GAP: Duration = Duration::from_secs(60);
const TICKET: &str = "lock-ticket";

/// `/{seat}/{step}`: `reserve` and `pay` keep the seat, `decline` fails, and `confirm` does not
/// keep it. `slow` ends when the test says so.
fn app(locks: &LockManager, total: Duration, end: Arc<Notify>) -> Router {
    let step = async move |Path((_, step)): Path<(String, String)>, seat: HeldLock| {
        match &*step {
            "reserve" | "pay" => drop(seat.keep(GAP).expect("the store has tickets")),
            "slow" => end.notified().await,
            _ => {}
        }
        if step == "decline" { StatusCode::PAYMENT_REQUIRED } else { StatusCode::OK }
    };
    let seat = key::from_fn(|Path((seat, _)): Path<(String, String)>| ("seat", seat));
    let layer = LockLayer::new(locks, seat).tickets(GAP, total);
    Router::new().route("/{seat}/{step}", post(step).route_layer(layer))
}

async fn call(app: &Router, path: &str, ticket: Option<&HeaderValue>) -> Response<Body> {
    let mut request = Request::post(path);
    if let Some(ticket) = ticket {
        request = request.header(TICKET, ticket);
    }
    send(app, request.body(Body::empty()).expect("a request")).await
}

/// The ticket of a response.
fn ticket(response: &Response<Body>) -> Option<HeaderValue> {
    response.headers().get(TICKET).cloned()
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn work_of_several_requests_holds_its_key() {
    let store = Arc::new(MemoryStore::new());
    let [a, b] = [(); 2].map(|()| app(&LockManager::new(Arc::clone(&store)), 10 * GAP, Arc::default()));
    let reserved = call(&a, "/12F/reserve", None).await;
    let first = ticket(&reserved).expect("it is kept");
    assert!(reserved.status() == StatusCode::OK && first.is_sensitive());
    let other = call(&b, "/12F/reserve", None).await;
    assert!(matches!(other.extensions().get(), Some(Rejection::Busy { .. })));
    assert_eq!(ticket(&other), None);
    for (step, status) in [("pay", 200), ("decline", 402), ("pay", 200)] {
        sleep(GAP / 2).await;
        let response = call(&b, &format!("/12F/{step}"), Some(&first)).await;
        assert_eq!((response.status().as_u16(), ticket(&response)), (status, Some(first.clone())), "{step}");
    }
    let confirmed = call(&a, "/12F/confirm", Some(&first)).await;
    assert_eq!((confirmed.status(), ticket(&confirmed)), (StatusCode::OK, None));
    assert_eq!(call(&b, "/12F/confirm", None).await.status(), StatusCode::OK, "the seat is free");
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn ticket_that_does_not_hold_its_key_is_a_409() {
    let (locks, end) = (LockManager::in_memory(), Arc::<Notify>::default());
    let app = app(&locks, GAP, Arc::clone(&end));
    let kept = ticket(&call(&app, "/12F/reserve", None).await).expect("it is kept");
    let running = tokio::spawn({
        let (app, kept) = (app.clone(), kept.clone());
        async move { call(&app, "/12F/slow", Some(&kept)).await.status() }
    });
    settle().await;
    let log = Log::default();
    let _listening = log.listen();
    let in_use = call(&app, "/12F/pay", Some(&kept)).await;
    assert_eq!(in_use.status(), StatusCode::CONFLICT);
    assert!(matches!(in_use.extensions().get(), Some(Rejection::TicketNotHeld)));
    assert!(in_use.headers().get("retry-after").is_none() && ticket(&in_use).is_none());
    let problem = text(in_use).await;
    assert!(problem.contains(&problem_type("ticket-not-held")) && problem.contains("not-started"), "{problem}");
    let logged = log.text();
    assert!(logged.contains("ticket_not_held") && !logged.contains("secret"), "{logged}");
    end.notify_one();
    assert_eq!(running.await.expect("no panic"), StatusCode::OK);
    let used = call(&app, "/12F/pay", Some(&kept)).await;
    assert!(matches!(used.extensions().get(), Some(Rejection::TicketNotHeld)), "it did not keep the seat");
}

#[tokio::test(start_paused = true)]
async fn wrong_ticket_is_a_400() {
    let app = app(&LockManager::in_memory(), GAP, Arc::default());
    let kept = ticket(&call(&app, "/12F/reserve", None).await).expect("it is kept");
    let text_of_it = kept.to_str().expect("text");
    let long = text_of_it.replace("by=ticket", &format!("by={}", "a".repeat(400)));
    for (path, value) in [("/12G/pay", text_of_it), ("/12F/pay", "a ticket"), ("/12F/pay", &*long)] {
        let wrong = call(&app, path, Some(&value.parse().expect("a value"))).await;
        assert_eq!(wrong.status(), StatusCode::BAD_REQUEST, "{path} {value}");
        let problem = text(wrong).await;
        assert!(problem.contains("header `lock-ticket` is not a ticket for this resource"), "{problem}");
    }
    let twice = Request::post("/12F/pay").header(TICKET, &kept).header(TICKET, &kept);
    let twice = send(&app, twice.body(Body::empty()).expect("a request")).await;
    assert_eq!(twice.status(), StatusCode::BAD_REQUEST);
    assert!(text(twice).await.contains("is duplicated"));
    assert_eq!(call(&app, "/12F/pay", Some(&kept)).await.status(), StatusCode::OK, "the ticket holds the seat");
}

/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn total_bounds_the_gap_of_a_ticket() {
    let app = app(&LockManager::in_memory(), Duration::from_secs(5), Arc::default());
    let kept = ticket(&call(&app, "/12F/reserve", None).await).expect("it is kept");
    sleep(Duration::from_secs(5)).await;
    assert_eq!(call(&app, "/12F/pay", Some(&kept)).await.status(), StatusCode::CONFLICT);
    assert_eq!(call(&app, "/12F/confirm", None).await.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn streamed_response_keeps_its_key_at_its_end() {
    let locks = LockManager::in_memory();
    let handler = async |lock: HeldLock| {
        lock.keep(GAP).expect("the store has tickets");
        let frames = [Ok::<_, std::io::Error>("a"), Ok("b")];
        let frames = frames.into_iter().enumerate().map(|(n, frame)| async move {
            sleep(Duration::from_secs(n as u64)).await;
            frame
        });
        Body::from_stream(futures_util::stream::iter(frames).then(|frame| frame))
    };
    use futures_util::StreamExt;
    let app = Router::new().route("/", post(handler).layer(LockLayer::new(&locks, one_key()).tickets(GAP, GAP)));
    let response = call(&app, "/", None).await;
    let kept = ticket(&response).expect("it is kept");
    assert_eq!(locks.held_count(), 1, "the response streams");
    assert_eq!(text(response).await, "ab");
    settle().await;
    assert_eq!(locks.held_count(), 0);
    let ticket = kept.to_str().expect("text").parse().expect("a ticket");
    assert!(locks.redeem(&ticket).await.is_ok(), "kept at the end of the body");
}

/// Its client would never get the ticket.
#[tokio::test]
async fn layer_without_tickets_keeps_no_key() {
    let locks = LockManager::in_memory();
    let handler = {
        let locks = locks.clone();
        async move |lock: HeldLock| {
            let error = lock.keep(GAP).expect_err("refused");
            let why = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            assert!(error.kind() == StoreErrorKind::Unsupported && why.contains("`LockLayer::tickets`"), "{why}");
            // The application has the ticket of its own guard.
            let guard = locks.lock(("other",)).await.expect("free");
            guard.into_ticket(GAP).await.expect("held").to_string()
        }
    };
    let app = Router::new().route("/", post(handler).layer(LockLayer::new(&locks, one_key())));
    let response = call(&app, "/", None).await;
    assert_eq!((response.status(), ticket(&response)), (StatusCode::OK, None));
    let of_guard = text(response).await.parse().expect("a ticket");
    assert!(locks.redeem(&of_guard).await.is_ok());
    assert!(locks.try_lock(tower_lock_testkit::locks::key()).await.is_ok(), "the key of the request is free");
}

/// Another client may have the key.
/// Guarantee: G24.
#[tokio::test(start_paused = true)]
async fn lost_lock_that_continues_leaves_no_ticket() {
    let locks = LockManager::in_memory();
    let handler = {
        let locks = locks.clone();
        async move |lock: HeldLock| {
            lock.keep(GAP).expect("the store has tickets");
            locks.force_release(lock.key().clone()).await.expect("it is up");
            lock.lost().await;
        }
    };
    let layer = LockLayer::new(&locks, one_key()).tickets(GAP, GAP).on_lost(OnLost::Continue);
    let response = call(&Router::new().route("/", post(handler).layer(layer)), "/", None).await;
    assert_eq!((response.status(), ticket(&response)), (StatusCode::OK, None));
}

#[tokio::test]
async fn request_with_several_keys_and_tickets_is_a_500() {
    let locks = LockManager::in_memory();
    let both = key::from_parts(|_| key::all([("a",), ("b",)]));
    let layer = LockLayer::new(&locks, both).tickets(GAP, GAP);
    let app = Router::new().route("/", post(async || {}).layer(layer));
    let log = Log::default();
    let _listening = log.listen();
    assert_eq!(call(&app, "/", None).await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(log.text().contains("`tickets` is for one key"), "{}", log.text());
}

#[test]
#[should_panic(expected = "`tickets` is for keys with one holder")]
fn tickets_and_permits_panic() {
    let _ = LockLayer::new(&LockManager::in_memory(), one_key()).tickets(GAP, GAP).at_most(2);
}

#[test]
#[should_panic(expected = "`tickets` needs another store: it has no tickets")]
fn tickets_of_a_store_without_them_panic() {
    let locks = LockManager::new(InterceptedStore::new(Arc::new(MemoryStore::new()), WithoutTraits));
    let _ = LockLayer::new(&locks, one_key()).tickets(GAP, GAP);
}
