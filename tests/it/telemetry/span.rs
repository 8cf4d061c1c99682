//! One span `lock` per request that needs a lock.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fmt::Debug,
    sync::{Arc, Mutex, Once},
    time::Duration,
};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    http::{Request, Response},
    routing::post,
};
use tokio::sync::Notify;
use tower::{Layer as _, ServiceExt, service_fn};
use tower_lock::{
    HasLockKey, HeldLock, Lease, LockKey, LockLayer, LockManager, LockManagerLayer, LockPolicy, Locked, LogKey, OnLost,
    ReplayLayer, key, test_util::Fault,
};
use tower_lock_testkit::{
    app::{fetch, post_json},
    locks::{one_key, store_and_locks},
    wait::settle,
};
use tracing_subscriber::{Layer, Registry, layer::SubscriberExt, registry::LookupSpan};

pub(super) type Fields = BTreeMap<String, String>;

/// The fields of every span `lock` of this test, in order; the last event is in the field `event`.
#[derive(Clone, Default)]
pub(super) struct Recorder(Arc<Mutex<Vec<Fields>>>);

thread_local! {
    /// A test runs on one thread, and is recorded there.
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
    /// The warnings and errors since.
    static WARNED: RefCell<Warned> = RefCell::default();
}

/// Shared with the runtime threads that log in the background.
type Warned = Arc<Mutex<Vec<String>>>;

/// Ends the recording of this test.
pub(super) struct Recording;

/// The only subscriber of the process. (With one per thread, a span that is first seen on a thread
/// without a subscriber may stay disabled on all of them: `tracing` caches the first interest.)
struct PerThread;

struct At(Recorder, usize);

struct Writer<'a>(&'a mut Fields);

impl tracing::field::Visit for Writer<'_> {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        let value = format!("{value:?}").trim_matches('"').to_owned();
        // A subscriber may print each value that a field gets, and not the last one.
        let earlier = self.0.get(field.name()).filter(|_| field.name() == "result");
        let value = earlier.map_or(value.clone(), |earlier| format!("{earlier}, then {value}"));
        self.0.insert(field.name().to_owned(), value);
    }
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for PerThread {
    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        id: &tracing::span::Id,
        context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        let here = RECORDER.with_borrow(Clone::clone);
        if let ("lock", Some(recorder)) = (attributes.metadata().name(), here) {
            let mut fields = Fields::new();
            attributes.record(&mut Writer(&mut fields));
            let mut all = recorder.0.lock().expect("whole");
            context.span(id).expect("new").extensions_mut().insert(At(recorder.clone(), all.len()));
            all.push(fields);
        }
    }

    fn on_record(
        &self,
        id: &tracing::span::Id,
        values: &tracing::span::Record<'_>,
        context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        if let Some(At(recorder, at)) = context.span(id).expect("open").extensions().get() {
            values.record(&mut Writer(&mut recorder.0.lock().expect("whole")[*at]));
        }
    }

    fn on_event(&self, event: &tracing::Event<'_>, context: tracing_subscriber::layer::Context<'_, S>) {
        if *event.metadata().level() <= tracing::Level::WARN {
            let mut fields = Fields::new();
            event.record(&mut Writer(&mut fields));
            let message = fields.remove("message").unwrap_or_default();
            WARNED.with_borrow(|warned| warned.lock().expect("whole").push(format!("{message} {fields:?}")));
        }
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(At(recorder, at)) = span.extensions().get() {
                let mut fields = Fields::new();
                event.record(&mut Writer(&mut fields));
                let message = fields.remove("message").unwrap_or_default();
                let mut all = recorder.0.lock().expect("whole");
                if *event.metadata().level() != tracing::Level::DEBUG {
                    all[*at].insert("level".into(), event.metadata().level().to_string());
                    all[*at].insert("event".into(), message);
                    continue;
                }
                let times: usize = all[*at].get("events").and_then(|n| n.parse().ok()).unwrap_or_default();
                all[*at].insert("events".into(), (times + 1).to_string());
                for (name, value) in fields {
                    all[*at].insert(format!("event.{name}"), value);
                }
                all[*at].insert("event".into(), message);
            }
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RECORDER.set(None);
    }
}

impl Recorder {
    pub(super) fn start() -> (Self, Recording) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            tracing::subscriber::set_global_default(Registry::default().with(PerThread)).expect("the only subscriber");
        });
        let recorder = Self::default();
        RECORDER.set(Some(recorder.clone()));
        WARNED.set(Warned::default());
        (recorder, Recording)
    }

    pub(super) fn all(&self) -> Vec<Fields> {
        self.0.lock().expect("whole").clone()
    }

    pub(super) fn last(&self) -> Fields {
        self.0.lock().expect("whole").last().cloned().expect("a span")
    }

    fn count(&self) -> usize {
        self.0.lock().expect("whole").len()
    }
}

fn number(fields: &Fields, field: &str) -> f64 {
    fields[field].parse().unwrap_or_else(|_| panic!("{field} is {}", fields[field]))
}

#[tokio::test(start_paused = true)]
async fn span_has_route_key_wait_hold_and_fence() {
    let (recorder, _guard) = Recorder::start();
    let locks = LockManager::in_memory();
    let layer = LockLayer::new(&locks, key::from_fn(|body: String| ("order", body))).wait(Duration::from_secs(9));
    let handler = post(|| async {
        tracing::info!("working");
        tokio::time::sleep(Duration::from_millis(1500)).await;
    });
    let app = Router::new().route("/orders/{id}", handler.route_layer(layer));
    let held = locks.try_lock(("order", "x")).await.expect("free");
    let request = tokio::spawn(async move { post_json(&app, "/orders/secret?x=1", "x").await });
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(recorder.last().get("result"), None, "it waits");
    held.release().await.expect("the store is up");
    assert_eq!(request.await.expect("no panic").status(), 200);

    let seen = recorder.last();
    let shown: Vec<_> = seen.keys().map(String::as_str).collect();
    assert_eq!(shown, ["depth", "event", "fence", "hold_ms", "key", "level", "result", "route", "wait_ms"]);
    assert_eq!((&*seen["route"], &*seen["key"], &*seen["result"]), ("/orders/{id}", "order:x", "granted"));
    assert_eq!((&*seen["depth"], &*seen["event"]), ("1", "working"), "the handler runs inside");
    assert!((2500.0..2600.0).contains(&number(&seen, "wait_ms")), "{seen:?}");
    assert!((1500.0..1600.0).contains(&number(&seen, "hold_ms")), "{seen:?}");
    assert!(number(&seen, "fence") > 1e18);
    assert_eq!(recorder.count(), 1, "one span per request");
}

#[tokio::test(start_paused = true)]
async fn span_of_a_rejected_request_has_the_reason() {
    let (recorder, _guard) = Recorder::start();
    let (store, locks) = store_and_locks();
    let app = |wait| {
        let layer = LockLayer::new(
            &locks,
            key::from_fn(|body: String| body.parse().map(|n: u64| ("order", n)).map_err(|_| "bad")),
        );
        Router::new()
            .route("/", post(|| async {}).route_layer(layer.wait(wait)))
            .layer(axum::extract::DefaultBodyLimit::max(10))
    };
    let (at_once, patient) = (app(Duration::ZERO), app(Duration::from_secs(1)));
    let held = locks.try_lock(("order", 1)).await.expect("free");

    post_json(&at_once, "/", "1").await;
    assert_eq!(recorder.last()["result"], "locked");
    post_json(&patient, "/", "1").await;
    assert_eq!(recorder.last()["result"], "timed_out");
    assert!(number(&recorder.last(), "wait_ms") >= 1000.0);
    let waiter = tokio::spawn({
        let app = patient.clone();
        async move { post_json(&app, "/", "1").await }
    });
    settle().await;
    waiter.abort();
    settle().await;
    assert_eq!(recorder.last()["result"], "cancelled");
    post_json(&patient, "/", "no number").await;
    assert_eq!((&*recorder.last()["result"], recorder.last().get("key")), ("invalid_key", None));
    post_json(&patient, "/", "01234567890").await;
    assert_eq!(recorder.last()["result"], "body_too_large");
    let named = Router::new().route(
        "/",
        post(|| async {})
            .route_layer(LockLayer::new(&locks, tower_lock::key::from_fields("n", tower_lock::key::json_field("id")))),
    );
    post_json(&named, "/", "{}").await;
    assert_eq!((&*recorder.last()["result"], recorder.last().get("key")), ("invalid_key", None));
    let unlimited = Router::new()
        .route(
            "/",
            post(|| async {})
                .route_layer(LockLayer::new(&locks, key::from_fn(|_: Bytes| ("order", 1))).wait(Duration::MAX)),
        )
        .layer(axum::extract::DefaultBodyLimit::disable());
    let whole = Request::post("/").body(Body::from(vec![0; 64 << 20])).expect("a request");
    let waiter = tokio::spawn(unlimited.clone().oneshot(whole));
    settle().await;
    post_json(&unlimited, "/", "1").await;
    assert_eq!((&*recorder.last()["result"], recorder.last().get("key")), ("body_buffer_full", None));
    waiter.abort();
    settle().await;
    held.release().await.expect("the store is up");
    store.fault_all(Fault::Fail);
    post_json(&patient, "/", "1").await;
    assert_eq!(recorder.last()["result"], "store_unavailable");
    assert!(!recorder.last().contains_key("hold_ms") && !recorder.last().contains_key("fence"));
    store.fault_all(Fault::None);

    // 256 queued, and one more.
    let go_on = Arc::new(Notify::new());
    let _held = locks.try_lock(("order", 1)).await.expect("free");
    let waiters: Vec<_> = (0..256)
        .map(|_| {
            let (app, go_on) = (patient.clone(), Arc::clone(&go_on));
            tokio::spawn(async move {
                tokio::select! { _ = post_json(&app, "/", "1") => {}, () = go_on.notified() => {} }
            })
        })
        .collect();
    settle().await;
    post_json(&patient, "/", "1").await;
    assert_eq!(recorder.last()["result"], "queue_full");
    go_on.notify_waiters();
    for waiter in waiters {
        waiter.await.expect("no panic");
    }
}

#[tokio::test(start_paused = true)]
async fn request_without_a_lock_has_no_span() {
    let (recorder, _guard) = Recorder::start();
    let locks = LockManager::in_memory();
    let app = Router::new()
        .route("/none", post(|| async {}).route_layer(LockLayer::new(&locks, key::from_fn(|| None::<LockKey>))))
        .route("/skip", post(|| async {}).route_layer(LockLayer::new(&locks, key::from_fn(|| ("k",))).skip(|_| true)));
    post_json(&app, "/none", "").await;
    post_json(&app, "/skip", "").await;
    assert_eq!(recorder.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn key_can_be_redacted_and_a_plain_service_named() {
    let (recorder, _guard) = Recorder::start();
    let locks = LockManager::in_memory();
    let inner = service_fn(|_: Request<tower_lock::middleware::RequestBody>| async {
        Ok::<_, std::convert::Infallible>(Response::new(Body::empty()))
    });
    let layer = LockLayer::new(&locks, key::from_parts(|parts| ("account", parts.uri.path().to_owned())));
    let request = || Request::get("/ann").body(Body::empty()).expect("a request");

    layer.layer(inner).oneshot(request()).await.expect("infallible");
    assert_eq!((&*recorder.last()["route"], &*recorder.last()["key"]), ("none", "account:/ann"));
    layer.route_name("greet").log_key(LogKey::Redacted).layer(inner).oneshot(request()).await.expect("infallible");
    let seen = recorder.last();
    assert_eq!(seen["route"], "greet");
    assert!(seen["key"].starts_with("account:~") && !seen["key"].contains("ann"), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn span_says_how_a_request_with_a_key_was_answered() {
    let (recorder, _guard) = Recorder::start();
    let locks = LockManager::in_memory();
    let replay = ReplayLayer::new(&locks, key::fixed(("everyone",))).required().keep_up_to(3);
    let app = Router::new().route("/", post(async |body: String| body).route_layer(replay));
    for (key, body, result, replay) in [
        ("a", "x", "granted", Some("first")),
        ("a", "x", "recorded", Some("replayed")),
        ("a", "y", "recorded", Some("mismatch")),
        ("long", "1234", "granted", Some("first")),
        ("long", "1234", "recorded", Some("not_kept")),
        ("a b", "x", "invalid_idempotency_key", None),
    ] {
        let count = recorder.count();
        let request = Request::post("/").header("idempotency-key", key).body(Body::from(body)).expect("a request");
        app.clone().oneshot(request).await.expect("infallible");
        let seen = recorder.last();
        assert_eq!((&*seen["result"], seen.get("replay").map(String::as_str)), (result, replay), "{key} {body}");
        let shown = seen.get("idempotency_key").map(String::as_str);
        assert_eq!(shown, replay.map(|_| key));
        assert_eq!(recorder.count(), count + 1, "one span per request");
    }
    let replay =
        ReplayLayer::new(&locks.with_policy(LockPolicy::new().log_key(LogKey::Redacted)), key::fixed(("everyone",)));
    let app = Router::new().route("/", post(async || "done").route_layer(replay));
    let request = Request::post("/").header("idempotency-key", "ann@example.org").body(Body::empty());
    app.oneshot(request.expect("a request")).await.expect("infallible");
    let seen = recorder.last();
    assert!(seen["key"].starts_with("+replay:~") && !seen.contains_key("idempotency_key"), "{seen:?}");
}

/// A reader of the logs cannot free a lock with their content.
#[tokio::test(start_paused = true)]
async fn spans_never_show_acquisition_ids() {
    let (recorder, _guard) = Recorder::start();
    let locks = LockManager::in_memory();
    let app = Router::new().route("/", post(|| async {}).route_layer(LockLayer::new(&locks, key::from_fn(|| ("k",)))));
    post_json(&app, "/", "").await;
    let owner_like = recorder.last().values().any(|value| value.contains(':'));
    assert!(!owner_like, "{:?}", recorder.last());
}

async fn warned() -> Vec<String> {
    // A paused clock advances when all reports are done.
    tokio::time::sleep(Duration::from_millis(1)).await;
    WARNED.with_borrow(|warned| std::mem::take(&mut *warned.lock().expect("whole")))
}

#[test]
fn abnormal_ends_are_logged_as_warnings() {
    let (_recorder, _guard) = Recorder::start();
    let warned = WARNED.with_borrow(Clone::clone);
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true).on_thread_start(move || WARNED.set(Arc::clone(&warned)));
    runtime.build().expect("a runtime").block_on(what_did_not_end_as_it_should());
}

async fn what_did_not_end_as_it_should() {
    let (store, locks) = store_and_locks();
    let s = Duration::from_secs;
    let layer = || LockLayer::new(&locks, one_key());
    let works = |seconds| axum::routing::get(async move || tokio::time::sleep(s(seconds)).await);
    let app = |layer, seconds| Router::new().route("/", works(seconds).route_layer(layer));

    fetch(&app(layer().max_hold(s(5)), 10), "/").await;
    let mut warnings = warned().await;
    warnings.sort();
    let [lost, aborted] = &warnings[..] else { panic!("the lock, and its request") };
    assert!(lost.contains("limit") && aborted.starts_with("request aborted: "), "{lost} {aborted}");
    tokio::time::sleep(s(1)).await;

    // Its lease ends before it does, and it may continue.
    fetch(&app(layer().on_lost(OnLost::Continue).lease(Lease::Fixed(s(5))), 10), "/").await;
    let late = warned().await;
    assert!(late.iter().any(|warned| warned.starts_with("lock was lost before it was released")), "{late:?}");
    tokio::time::sleep(s(1)).await;

    let endless = axum::routing::get(async || {
        let endless = futures_util::stream::pending::<Result<axum::body::Bytes, std::convert::Infallible>>();
        Body::from_stream(futures_util::StreamExt::chain(futures_util::stream::iter([Ok("x".into())]), endless))
    });
    let mut stalls = fetch(&Router::new().route("/", endless.route_layer(layer())), "/").await.into_body();
    tokio::time::sleep(s(11)).await;
    assert!(warned().await.iter().any(|warned| warned.contains("`body_idle_timeout`")), "{stalls:?}");
    assert!(http_body_util::BodyExt::frame(&mut stalls).await.expect("no end").is_err());
    tokio::time::sleep(s(1)).await;

    // No handler may detach: its client leaves, and it is dropped.
    let none = LockManager::builder(store.clone()).max_detached(0).build();
    let app = Router::new().route("/", works(60).route_layer(LockLayer::new(&none, key::from_parts(|_| ("alone",)))));
    let request = tokio::spawn(async move { fetch(&app, "/").await });
    settle().await;
    request.abort();
    let dropped = warned().await;
    assert!(
        matches!(&dropped[..], [one] if one.contains("of the 0 handlers") && one.contains("`LockManagerBuilder::max_detached`")),
        "{dropped:?}"
    );
    tokio::time::sleep(s(1)).await;

    // No call could wait for it.
    let held = locks.lock(("n", 1)).await.expect("free");
    let another = locks.clone();
    drop(locks);
    assert_eq!(warned().await, Vec::<String>::new());
    drop(another);
    assert!(warned().await.iter().any(|warned| warned.contains("the last `LockManager`")));
    drop(held);
    settle().await;
    assert_eq!(store.held_count(), 0);
}

/// A span of the service stays around the logs of its handler.
#[tokio::test(start_paused = true)]
async fn detached_handler_logs_into_its_own_span() {
    let (recorder, _guard) = Recorder::start();
    let (_store, locks) = store_and_locks();
    let handler = axum::routing::get(async || {
        tokio::time::sleep(Duration::from_secs(5)).await;
        tracing::info!("finished without its client");
    });
    let app = Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())));
    let request = tokio::spawn(async move { fetch(&app, "/").await });
    settle().await;
    request.abort();
    tokio::time::sleep(Duration::from_secs(6)).await;
    let span = recorder.last();
    assert_eq!((span["event"].as_str(), span["result"].as_str()), ("finished without its client", "granted"));
    assert!(number(&span, "hold_ms") >= 5000.0);
}

/// Without a span of the middleware, the span of the service goes along with the handler.
#[tokio::test(start_paused = true)]
async fn detached_handler_keeps_the_outer_span() {
    use tracing::Instrument;

    let (_recorder, _guard) = Recorder::start();
    let (_store, locks) = store_and_locks();
    let seen: Arc<Mutex<Vec<Option<&str>>>> = Arc::default();
    let sees = Arc::clone(&seen);
    let look =
        move || sees.lock().expect("whole").push(tracing::Span::current().metadata().map(tracing::Metadata::name));
    let handler = axum::routing::get(async move |_: Locked<Extension<Anything>>| {
        look();
        tokio::time::sleep(Duration::from_secs(5)).await;
        look();
    });
    let app = Router::new().route("/", handler).layer(LockManagerLayer::new(&locks)).layer(Extension(Anything));
    let visit = async move { fetch(&app, "/").await }.instrument(tracing::info_span!("visit"));
    let request = tokio::spawn(visit);
    settle().await;
    request.abort();
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(*seen.lock().expect("whole"), [Some("visit"); 2]);
}

#[derive(Clone)]
struct Anything;

impl HasLockKey for Anything {
    fn lock_key(&self) -> impl Into<LockKey> {
        ("k",)
    }
}

/// For event-based logging: one event per rejection, in the span of its request.
#[tokio::test(start_paused = true)]
async fn each_rejection_is_one_event_in_its_span() {
    #[derive(serde::Deserialize)]
    struct Claim {
        id: u64,
    }
    let (recorder, _recording) = Recorder::start();
    let (_store, locks) = store_and_locks();
    let key = key::from_fn(|axum::Json(claim): axum::Json<Claim>| ("k", claim.id));
    let layer = LockLayer::new(&locks, key);
    let json_id = key::json_field("id");
    let app = Router::new()
        .route("/refuses", post(|| async {}).route_layer(layer.clone()))
        .route("/waits", post(|| async {}).route_layer(layer.clone().wait(Duration::from_secs(2))))
        .route("/hides", post(|| async {}).route_layer(layer.log_key(LogKey::Redacted)))
        .route("/field", post(|| async {}).route_layer(LockLayer::new(&locks, key::from_fields("k", json_id))));
    let _held = locks.try_lock(("k", 7)).await.expect("free");
    for (path, body, result, wait_ms, says) in [
        ("/refuses", r#"{"id":7}"#, "locked", Some("0.0"), "held by another owner"),
        ("/hides", r#"{"id":7}"#, "locked", Some("0.0"), "held by another owner"),
        ("/waits", r#"{"id":7}"#, "timed_out", Some("2"), ""),
        ("/waits", r#"{"id":"x"}"#, "invalid_key", None, "extractor `Json<Claim>` of the key function rejected"),
        ("/field", r#"{"id":"07"}"#, "invalid_key", None, "rejected: JSON field `id` is a number in non-"),
    ] {
        post_json(&app, path, body).await;
        let span = recorder.last();
        assert_eq!(span.get("events").map(String::as_str), Some("1"), "{span:?}");
        assert_eq!(span.get("event.result").map(String::as_str), Some(result), "{span:?}");
        assert!(span["event"].starts_with("request rejected") && span["event"].contains(says), "{span:?}");
        if let Some(wait_ms) = wait_ms {
            assert!(span["event.wait_ms"].starts_with(wait_ms), "{span:?}");
            assert_eq!(span["key"] == "k:7", path != "/hides", "{span:?}");
        } else {
            let (cause, name) =
                if path == "/field" { ("event.field", "id") } else { ("event.extractor", "Json<Claim>") };
            assert_eq!((&span[cause][..], &span["event.status"][..]), (name, "422"));
        }
    }
    // An error of the service is one logged error that names the remedy.
    let by_function = LockLayer::new(&locks, key::from_fn(|Extension(id): Extension<u64>| ("k", id)));
    let by_field = |field| LockLayer::new(&locks, key::from_fields("k", field));
    for (layer, remedy) in [
        (post(|| async {}).route_layer(by_function), "inserts an extension must be outside of the lock layer"),
        (post(|| async {}).route_layer(by_field(key::extension::<u64>())), "no extension of type `u64` was found"),
        (post(|| async {}).route_layer(by_field(key::path_param("no"))), "this route has no parameter `{no}`"),
    ] {
        warned().await;
        assert_eq!(post_json(&Router::new().route("/{id}", layer), "/7", "{}").await.status(), 500);
        let (span, errors) = (recorder.last(), warned().await);
        assert_eq!((&span["level"][..], &span["result"][..]), ("ERROR", "invalid_key"), "{span:?}");
        assert!(span["event"].contains(remedy) && errors.len() == 1, "{errors:?}");
    }
}

/// A handler without its layer has no span.
#[tokio::test(start_paused = true)]
async fn missing_layer_is_logged_with_method_and_route() {
    let (_recorder, _guard) = Recorder::start();
    let locks = LockManager::in_memory();
    let locked = post(async |_: Locked<Extension<Anything>>| {});
    let held = post(async |_: HeldLock| {});
    let skipped = held.clone().route_layer(LockLayer::new(&locks, one_key()).skip(|_| true));
    for handler in [locked, held, skipped] {
        post_json(&Router::new().route("/pay/{id}", handler), "/pay/s3cret", "{}").await;
        let errors = warned().await;
        let [error] = &errors[..] else { panic!("{errors:?}") };
        assert!(error.ends_with(r#"{"method": "POST", "route": "/pay/{id}"}"#), "{error}");
    }
}
