//! Layers and extractors with several keys.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    body::Body,
    http::{Request, Response, StatusCode, request::Parts},
    routing::post,
};
use futures_util::future::join_all;
use tokio::{task::JoinHandle, time::sleep};
use tower_lock::{
    HasLockKeys, HeldLock, HeldLocks, LockKey, LockLayer, LockManager, LockManagerLayer, Locked, LogKey, Rejection,
    key::{self, AllKeys, KeySource},
    middleware::ClientKey,
    test_util::StoreOp,
};
use tower_lock_testkit::{
    app::{post_json, problem_type, send, text},
    locks::store_and_locks,
    log::Log,
    wait::settle,
};

const S: Duration = Duration::from_secs(1);

#[derive(Clone, serde::Deserialize)]
struct Transfer {
    accounts: Vec<u64>,
}

impl HasLockKeys for Transfer {
    fn lock_keys(&self) -> AllKeys {
        key::all(self.accounts.iter().map(|account| ("account", *account)))
    }
}

fn accounts() -> impl KeySource {
    key::from_fn(|Json(transfer): Json<Transfer>| {
        // No account: the request says that it needs none.
        (transfer.accounts != [0]).then(|| transfer.lock_keys())
    })
}

async fn show(locks: HeldLocks) -> String {
    let show = |lock: &HeldLock| format!("{} {}", lock.key(), lock.ensure_remaining(S).is_ok());
    locks.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn layer_locks_all_keys_of_a_request() {
    let (store, locks) = store_and_locks();
    let layer = LockLayer::new(&locks, accounts());
    let app = Router::new().route("/transfer", post(show).route_layer(layer));
    let response = post_json(&app, "/transfer", r#"{"accounts": [7, 5, 7]}"#).await;
    assert_eq!(text(response).await, "account:5 true, account:7 true");
    assert_eq!((store.held_count(), store.on(StoreOp::Acquire).calls(), store.on(StoreOp::Release).calls()), (0, 2, 2));
    for busy in [5, 7] {
        let held = locks.try_lock(("account", busy)).await.expect("free");
        let response = post_json(&app, "/transfer", r#"{"accounts": [5, 7]}"#).await;
        assert_eq!(response.status(), StatusCode::CONFLICT);
        assert!(matches!(response.extensions().get(), Some(Rejection::Busy { .. })));
        let body = text(response).await;
        assert!(body.contains(&problem_type("locked")) && !body.contains("account"), "{body}");
        held.release().await.expect("up");
    }
    settle().await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn empty_and_oversized_sets_of_keys_are_422() {
    let locks = LockManager::in_memory();
    let log = Log::default();
    let _listening = log.listen();
    let app = Router::new()
        .route("/layer", post(show).route_layer(LockLayer::new(&locks, accounts())))
        .route("/locked", post(async |_: Locked<Json<Transfer>, HeldLocks>| "ran"))
        .layer(LockManagerLayer::new(&locks));
    let many: &'static str =
        Box::leak(format!(r#"{{"accounts": {:?}}}"#, (1..66).collect::<Vec<_>>()).into_boxed_str());
    for path in ["/layer", "/locked"] {
        for (body, reason) in
            [(r#"{"accounts": []}"#, "the list of keys is empty"), (many, "more than 64 different keys")]
        {
            let response = post_json(&app, path, body).await;
            assert_eq!(response.status(), StatusCode::UNPROCESSABLE_ENTITY, "{path} {body}");
            let text = text(response).await;
            assert!(text.contains(&problem_type("invalid-key")) && text.contains("names no resource"), "{text}");
            assert!(log.text().lines().last().is_some_and(|line| line.contains(reason)), "{}", log.text());
        }
    }
    assert_eq!(locks.size(), (0, 0));
}

/// Guarantee: G21.
#[tokio::test]
async fn view_of_one_lock_names_the_view_of_several() {
    let locks = LockManager::in_memory();
    let layer = || LockLayer::new(&locks, accounts());
    let one = LockLayer::new(&locks, key::fixed(("one",)));
    let app = Router::new()
        .route("/one", post(async |_: HeldLock| "ran").route_layer(layer()))
        .route("/maybe", post(async |lock: Option<HeldLock>| format!("{}", lock.is_some())).route_layer(layer()))
        .route("/outer", post(async |_: HeldLock| "ran").route_layer(layer()).route_layer(one.clone()))
        .route(
            "/inner",
            post(async |lock: HeldLock, locks: HeldLocks| format!("{} {}", lock.key(), locks.iter().count()))
                .route_layer(one.clone())
                .route_layer(layer()),
        )
        .route("/all-of-one", post(show).route_layer(one))
        .route("/none", post(async |locks: Option<HeldLocks>| format!("{}", locks.is_some())).route_layer(layer()))
        .route("/unlocked", post(show).route_layer(layer()))
        .route("/bare", post(show));
    let two = r#"{"accounts": [1, 2]}"#;
    // The view depends on the key function, and not on the number of its keys.
    let single = r#"{"accounts": [1]}"#;
    for (path, body) in [("/one", two), ("/maybe", two), ("/outer", two), ("/one", single), ("/outer", single)] {
        let response = post_json(&app, path, body).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR, "{path}: {body}");
        assert!(text(response).await.contains("Use `HeldLocks`"), "{path}: {body}");
    }
    for (path, body, answer) in [
        ("/inner", two, "one 2"),
        ("/all-of-one", two, "one true"),
        ("/none", r#"{"accounts": [0]}"#, "false"),
        ("/unlocked", two, "account:1 true, account:2 true"),
        ("/unlocked", single, "account:1 true"),
    ] {
        assert_eq!(text(post_json(&app, path, body).await).await, answer, "{path}");
    }
    for (path, reason) in [("/unlocked", "returned `None`"), ("/bare", "no `LockLayer` is around")] {
        let response = post_json(&app, path, r#"{"accounts": [0]}"#).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = text(response).await;
        assert!(body.contains("no lock for `HeldLocks`") && body.contains(reason), "{path}: {body}");
    }
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn extractor_locks_all_keys_of_its_value() {
    let (store, locks) = store_and_locks();
    let again = locks.clone();
    let handler = async move |Locked(Json(transfer), views): Locked<Json<Transfer>, HeldLocks>| {
        let first = views.get(("account", transfer.accounts[0])).expect("locked").key().to_string();
        // The request is their owner and reenters.
        let guards = again.try_lock_all([("account", 1), ("account", 2)]).await.expect("its own");
        drop(guards.release());
        first
    };
    let app = Router::new().route("/", post(handler)).layer(LockManagerLayer::new(&locks));
    assert_eq!(text(post_json(&app, "/", r#"{"accounts": [2, 1]}"#).await).await, "account:2");
    settle().await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn handler_is_aborted_when_one_of_its_locks_is_lost() {
    let (store, locks) = store_and_locks();
    let finished = Arc::new(AtomicBool::new(false));
    let (revoked, ends) = (locks.clone(), Arc::clone(&finished));
    let handler = async move |locks: HeldLocks| {
        let key = locks.iter().nth(1).expect("two").key().clone();
        revoked.force_release(key).await.expect("up");
        sleep(60 * S).await;
        ends.store(true, SeqCst);
    };
    let app = Router::new().route("/", post(handler).route_layer(LockLayer::new(&locks, accounts())));
    let response = post_json(&app, "/", r#"{"accounts": [1, 2]}"#).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(text(response).await.contains(&problem_type("lost")));
    assert!(!finished.load(SeqCst));
    for account in [1, 2] {
        assert!(locks.try_lock(("account", account)).await.is_err(), "blocked for the lock-delay");
    }
    sleep(3 * S).await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// Each transfer moves money between two accounts, in either direction, and reads before it writes.
/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn transfers_in_both_directions_lose_no_money() {
    let (_, locks) = store_and_locks();
    let balances: Arc<[AtomicUsize; 4]> = Arc::new([100, 100, 100, 100].map(AtomicUsize::new));
    let books = Arc::clone(&balances);
    let handler = async move |_: HeldLocks, Json(Transfer { accounts }): Json<Transfer>| {
        let [from, to] = [0, 1].map(|at| &books[usize::try_from(accounts[at]).expect("small")]);
        let read = [from.load(SeqCst), to.load(SeqCst)];
        sleep(Duration::from_millis(3)).await;
        from.store(read[0] - 1, SeqCst);
        to.store(read[1] + 1, SeqCst);
    };
    let layer = LockLayer::new(&locks, accounts()).wait(60 * S);
    let app = Router::new().route("/", post(handler).route_layer(layer));
    let bodies =
        [r#"{"accounts": [0, 1]}"#, r#"{"accounts": [1, 0]}"#, r#"{"accounts": [1, 2]}"#, r#"{"accounts": [3, 0]}"#];
    let requests: Vec<_> = (0..80)
        .map(|n| {
            let app = app.clone();
            tokio::spawn(async move { post_json(&app, "/", bodies[n % bodies.len()]).await })
        })
        .collect();
    for request in requests {
        let response: Response<Body> = request.await.expect("no panic");
        assert_eq!(response.status(), StatusCode::OK);
    }
    let after: Vec<_> = balances.iter().map(|balance| balance.load(SeqCst)).collect();
    assert_eq!(after, [120, 80, 120, 80]);
}

/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn log_names_the_keys_as_far_as_it_may() {
    let (_, locks) = store_and_locks();
    for (log_key, shows) in [(LogKey::Full, true), (LogKey::Redacted, false)] {
        let log = Log::default();
        let _listening = log.listen();
        let app = Router::new().route("/", post(show).route_layer(LockLayer::new(&locks, accounts()).log_key(log_key)));
        let held = locks.try_lock(("account", 2)).await.expect("free");
        let response = post_json(&app, "/", r#"{"accounts": [1, 2]}"#).await;
        assert_eq!(response.status(), StatusCode::CONFLICT);
        let text = log.text();
        assert!(text.contains("keys=2") && text.contains("account:~") != shows, "{text}");
        assert_eq!(text.contains("key=\"account:1, account:2\""), shows, "{text}");
        held.release().await.expect("up");
    }
}

#[tokio::test(start_paused = true)]
async fn body_is_read_before_any_of_the_keys_is_locked() {
    let (store, locks) = store_and_locks();
    let seen = Arc::new(AtomicUsize::new(0));
    let (counter, store_here) = (Arc::clone(&seen), store.clone());
    let keys = key::from_parts(|_| key::all([("a", 1), ("b", 2)]));
    let handler = async move |body: String| {
        counter.store(store_here.held_count(), SeqCst);
        body
    };
    let app = Router::new().route("/", post(handler).route_layer(LockLayer::new(&locks, keys)));
    assert_eq!(text(post_json(&app, "/", "hello").await).await, "hello");
    assert_eq!((seen.load(SeqCst), store.held_count()), (2, 0));
    let key = LockKey::from(("b", 2));
    let _held = locks.try_lock(key).await.expect("free");
    assert_eq!(post_json(&app, "/", "hello").await.status(), StatusCode::CONFLICT);
}

/// Each request has a first key of its own, and waits for the same second one.
/// Guarantee: G15.
#[tokio::test(start_paused = true)]
async fn waiters_of_a_second_key_leave_budget_for_other_keys() {
    let (_, locks) = store_and_locks();
    let keys = key::from_parts(|parts: &Parts| {
        let number: u64 = parts.uri.query().and_then(|query| query.parse().ok()).unwrap_or_default();
        key::all([("a", number), ("z", 0)])
    });
    let app = Router::new()
        .route("/hot", post(async || "ran").route_layer(LockLayer::new(&locks, keys).wait(60 * S)))
        .route("/other", post(async || "ran").route_layer(LockLayer::new(&locks, key::fixed(("other",)))));
    let _held = locks.try_lock(("z", 0)).await.expect("free");
    let body: &'static str = Box::leak("x".repeat(1 << 20).into_boxed_str());
    let waiting: Vec<_> = (0..80)
        .map(|number| {
            let app = app.clone();
            tokio::spawn(async move { post_json(&app, &format!("/hot?{number}"), body).await })
        })
        .collect();
    settle().await;
    sleep(S / 10).await;
    assert!(waiting.iter().any(JoinHandle::is_finished), "some are rejected");
    assert_eq!(post_json(&app, "/other", body).await.status(), StatusCode::OK);
    waiting.iter().for_each(JoinHandle::abort);
}

/// A request of a client for accounts.
fn transfer_of(client: &str, accounts: &[u64]) -> Request<Body> {
    let request = Request::post("/pay").header("content-type", "application/json");
    let body = Body::from(format!(r#"{{"accounts": {accounts:?}}}"#));
    request.extension(ClientKey::new(client)).body(body).expect("a request")
}

/// A client names the accounts of others, beside one that it keeps busy: its requests would hold
/// those accounts while they wait.
///
/// Guarantee: G21.
#[tokio::test(start_paused = true)]
async fn waiting_requests_of_one_client_hold_a_part_of_the_keys() {
    let (store, locks) = store_and_locks();
    let layer = LockLayer::new(&locks, accounts()).wait(5 * S);
    let app = Router::new().route("/two", post(show).route_layer(layer.clone().max_keys(2)));
    let app = app.route("/pay", post(show).route_layer(layer));
    let busy = locks.try_lock(("account", 999_999)).await.expect("free");
    let spawn = |request: Request<Body>| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, request).await.status() })
    };
    let accounts = |n: u64| (100 + 63 * n..163 + 63 * n).chain([999_999]).collect::<Vec<_>>();
    let waiting: Vec<_> = (0..200).map(|n| spawn(transfer_of("mallory", &accounts(n)))).collect();
    sleep(S).await;
    let held = store.held_count();
    assert!((1_000..1_366).contains(&held), "{held} of 12,600: a third of 4,096 at most");
    // Another client waits for the busy account, and holds one.
    let other = spawn(transfer_of("ann", &[50, 999_999]));
    settle().await;
    assert_eq!((store.held_count(), other.is_finished()), (held + 1, false));
    let response = post_json(&app, "/two", r#"{"accounts": [1, 2, 3]}"#).await;
    assert_eq!(response.status(), StatusCode::UNPROCESSABLE_ENTITY);
    busy.release().await.expect("held");
    assert_eq!(other.await.expect("no panic"), StatusCode::OK);
    let statuses = join_all(waiting).await;
    let rejected = statuses.iter().filter(|status| matches!(status, Ok(StatusCode::CONFLICT))).count();
    assert!((170..200).contains(&rejected), "those beyond the bound have not waited: {rejected}");
    settle().await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}
