//! Responses that are incomplete when their head is sent, and how long they hold the key.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{Method, Request, Response, StatusCode, header},
    routing::{any, get},
};
use futures_util::stream;
use http_body::Body as HttpBody;
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep, timeout};
use tower_lock::{LockLayer, LockManagerLayer, OnLost, ReleaseAt, test_util::Fault};
use tower_lock_testkit::{
    app::{fetch, send},
    body::{ScriptedBody, Step, trailers},
    locks::{one_key, store_and_locks},
    wait::{settle, until},
};

const S: Duration = Duration::from_secs(1);

/// A route that responds with this, once.
fn once<K: tower_lock::key::KeySource>(layer: LockLayer<K>, response: Response<ScriptedBody>) -> Router {
    let response = Arc::new(std::sync::Mutex::new(Some(response.map(Body::new))));
    let handler = any(move || async move { response.lock().expect("whole").take().expect("once") });
    Router::new().route("/", handler.layer(layer))
}

/// Not the end of the inner body, which may come late, but the byte that completes the response for
/// the client.
/// Guarantee: G10.
#[tokio::test(start_paused = true)]
async fn last_byte_of_content_length_is_sent_after_the_release() {
    for (by_header, ends) in [(true, true), (true, false), (false, true), (false, false)] {
        let (store, locks) = store_and_locks();
        let (say, body) = ScriptedBody::fed();
        let body = if by_header { body } else { body.announce(6) };
        let is_dropped = body.is_dropped();
        let mut response = Response::new(body);
        if by_header {
            response.headers_mut().insert(header::CONTENT_LENGTH, 6.into());
        }
        let mut body = fetch(&once(LockLayer::new(&locks, one_key()), response), "/").await.into_body();
        say.send(Step::Text("abc")).expect("read");
        assert_eq!(body.frame().await.expect("one").expect("data").into_data().expect("data"), "abc");
        assert_eq!(store.held_count(), 1);
        say.send(Step::Text("def")).expect("read");
        let mut last = Box::pin(body.frame());
        let kept = Duration::from_millis(200);
        assert!(timeout(kept, &mut last).await.is_err(), "withheld: the body has not ended and may still commit");
        assert_eq!((store.held_count(), is_dropped.load(SeqCst)), (1, false));
        // But not for long.
        let lives_on = (!ends).then_some(say);
        assert_eq!(last.await.expect("one").expect("data").into_data().expect("data"), "def");
        assert_eq!((store.held_count(), locks.size(), is_dropped.load(SeqCst)), (0, (0, 0), true));
        assert!(body.frame().await.is_none());
        drop(lives_on);
    }
}

/// It would look complete.
#[tokio::test(start_paused = true)]
async fn body_that_fails_after_its_last_byte_does_not_send_it() {
    let (store, locks) = store_and_locks();
    let (say, body) = ScriptedBody::fed();
    let body = body.announce(3);
    let mut body = fetch(&once(LockLayer::new(&locks, one_key()), Response::new(body)), "/").await.into_body();
    say.send(Step::Text("abc")).expect("read");
    settle().await;
    say.send(Step::Error("the commit failed")).expect("read");
    let error = body.frame().await.expect("an error").expect_err("an error");
    assert!(format!("{error:?}").contains("the commit failed"), "{error:?}");
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn trailers_after_the_last_byte_are_sent() {
    let (store, locks) = store_and_locks();
    let (say, body) = ScriptedBody::fed();
    let body = body.announce(3);
    let body = fetch(&once(LockLayer::new(&locks, one_key()), Response::new(body)), "/").await.into_body();
    let collected = tokio::spawn(body.collect());
    say.send(Step::Text("abc")).expect("read");
    settle().await;
    say.send(Step::Trailers).expect("read");
    let collected = collected.await.expect("no panic").expect("whole");
    assert_eq!(collected.trailers(), Some(&trailers()));
    assert_eq!((collected.to_bytes(), store.held_count()), ("abc".into(), 0));
}

/// The body is not polled: a server stops polling when its client does not read.
/// Guarantee: G10.
#[tokio::test(start_paused = true)]
async fn stalled_reader_frees_the_key_after_the_lock_delay() {
    for reads_first in [false, true] {
        let (store, locks) = store_and_locks();
        let (say, body) = ScriptedBody::fed();
        let is_dropped = body.is_dropped();
        let app = once(LockLayer::new(&locks, one_key()).body_idle_timeout(5 * S), Response::new(body));
        let mut body = fetch(&app, "/").await.into_body();
        let mut began = Instant::now();
        if reads_first {
            // The body waits for its own frames for longer than the reader may; that is not a stall
            // of the reader.
            sleep(3 * S).await;
            let frame = tokio::spawn(async move { (body.frame().await.is_some(), body) });
            sleep(30 * S).await;
            say.send(Step::Text("abc")).expect("read");
            let (some, back) = frame.await.expect("no panic");
            assert!(some && store.held_count() == 1);
            (body, began) = (back, Instant::now());
        }
        say.send(Step::Text("abc")).expect("not cut yet");
        let guard = locks.lock(("k",)).await.expect("a grant");
        assert!(is_dropped.load(SeqCst), "the data of the body is dropped before");
        let waited = began.elapsed();
        assert!(waited >= 6 * S && waited < 6 * S + Duration::from_millis(50), "{waited:?}");
        let error = body.frame().await.expect("no end that looks complete").expect_err("cut");
        assert!(format!("{error:?}").contains("Idle"), "{error:?}");
        assert!(body.frame().await.is_none());
        guard.release().await.expect("up");
        assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
    }
}

/// Guarantee: G8.
#[tokio::test(start_paused = true)]
async fn unread_stream_is_aborted_when_its_lock_is_lost() {
    for lost in [false, true] {
        let (store, locks) = store_and_locks();
        let (_say, body) = ScriptedBody::fed();
        let is_dropped = body.is_dropped();
        let layer = LockLayer::new(&locks, one_key()).body_idle_timeout(3600 * S).max_hold(20 * S);
        let body = fetch(&once(layer, Response::new(body)), "/").await.into_body();
        if lost {
            store.fault_all(Fault::Fail);
            sleep(20 * S).await;
        } else {
            sleep(19 * S).await;
            assert!(!is_dropped.load(SeqCst));
            sleep(S).await;
        }
        settle().await;
        assert!(is_dropped.load(SeqCst), "the data of the body");
        drop(body);
    }
}

/// Guarantee: G10.
#[tokio::test(start_paused = true)]
async fn release_at_head_happens_before_the_head_is_sent() {
    let (store, locks) = store_and_locks();
    let (say, body) = ScriptedBody::fed();
    let app = once(LockLayer::new(&locks, one_key()).release_at(ReleaseAt::ResponseHead), Response::new(body));
    let mut body = fetch(&app, "/").await.into_body();
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
    sleep(60 * S).await;
    say.send(Step::Text("abc")).expect("read");
    assert!(body.frame().await.expect("one").is_ok(), "not aborted");

    // A router may add this size.
    let (_say, body) = ScriptedBody::fed();
    let app = once(LockLayer::new(&locks, one_key()), Response::new(body))
        .layer(LockManagerLayer::new(&locks).release_at(ReleaseAt::ResponseHead));
    let _body = fetch(&app, "/").await;
    assert_eq!(store.held_count(), 0);
}

/// Guarantee: G10.
#[tokio::test(start_paused = true)]
async fn tunnel_holds_no_lock() {
    for (method, status, holds) in [
        (Method::GET, StatusCode::SWITCHING_PROTOCOLS, false),
        (Method::CONNECT, StatusCode::OK, false),
        (Method::CONNECT, StatusCode::BAD_GATEWAY, true),
        (Method::GET, StatusCode::OK, true),
    ] {
        let (store, locks) = store_and_locks();
        let (_say, body) = ScriptedBody::fed();
        let mut response = Response::new(body);
        *response.status_mut() = status;
        let app = once(LockLayer::new(&locks, one_key()), response);
        let request = Request::builder().method(method.clone()).uri("/").body(Body::empty()).expect("a request");
        let response = send(&app, request).await;
        assert_eq!((response.status(), store.held_count() == 1), (status, holds), "{method}");
    }
}

/// It may continue, because its writes check the fence; but not forever.
/// Guarantee: G1.
#[tokio::test(start_paused = true)]
async fn on_lost_continue_runs_until_max_hold() {
    for (works, status) in [(40, StatusCode::OK), (70, StatusCode::SERVICE_UNAVAILABLE)] {
        let (store, locks) = store_and_locks();
        let handler = get(move |lock: tower_lock::HeldLock| async move {
            sleep(works * S).await;
            assert!(lock.ensure_remaining(Duration::ZERO).is_err());
            "done"
        });
        let layer = LockLayer::new(&locks, one_key()).on_lost(OnLost::Continue).max_hold(60 * S);
        let app = Router::new().route("/", handler.route_layer(layer));
        let request = tokio::spawn(async move { fetch(&app, "/").await });
        settle().await;
        store.fault_all(Fault::Fail);
        assert_eq!(request.await.expect("no panic").status(), status);
    }
    // The same for its stream.
    let (store, locks) = store_and_locks();
    let (say, body) = ScriptedBody::fed();
    let is_dropped = body.is_dropped();
    let layer =
        LockLayer::new(&locks, one_key()).on_lost(OnLost::Continue).max_hold(60 * S).body_idle_timeout(3600 * S);
    let mut body = fetch(&once(layer, Response::new(body)), "/").await.into_body();
    store.fault_all(Fault::Fail);
    sleep(50 * S).await;
    say.send(Step::Text("abc")).expect("read");
    assert!(body.frame().await.expect("one").is_ok());
    sleep(10 * S).await;
    assert!(body.frame().await.expect("no end").is_err() && is_dropped.load(SeqCst));
}

/// A proxied body, a ticker: hyper sends what was announced, and so does this crate.
/// Guarantee: G10.
#[tokio::test(start_paused = true)]
async fn body_longer_than_announced_ends_as_announced() {
    for pause in [Duration::ZERO, Duration::from_millis(100)] {
        let (store, locks) = store_and_locks();
        let more = stream::unfold(0_u32, move |n| async move {
            if n < 2 || !pause.is_zero() {
                sleep(pause.max(Duration::from_millis(10))).await;
            }
            Some((Ok::<_, std::convert::Infallible>("0123456789"), n + 1))
        });
        let more = Arc::new(std::sync::Mutex::new(Some(Body::from_stream(more))));
        let handler = get(move || async move {
            let more = more.lock().expect("whole").take().expect("once");
            ([(header::CONTENT_LENGTH, "10")], more)
        });
        let app = Router::new().route("/", handler.route_layer(LockLayer::new(&locks, one_key())));
        let mut body = fetch(&app, "/").await.into_body();
        assert_eq!(body.frame().await.expect("one").expect("data").into_data().expect("data"), "0123456789");
        assert!(body.frame().await.is_none());
        assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
    }
}

/// The size hint of a body counts before it is read, as in hyper.
#[tokio::test(start_paused = true)]
async fn size_hint_is_the_announced_rest() {
    let (_store, locks) = store_and_locks();
    // Never less, for any progress.
    let (say, body) = ScriptedBody::fed();
    let body = body.announce(6);
    say.send(Step::Text("abc")).expect("read");
    let app = once(LockLayer::new(&locks, one_key()), Response::new(body));
    let mut body = fetch(&app, "/").await.into_body();
    assert_eq!(body.size_hint().exact(), Some(6));
    assert!(body.frame().await.expect("one").is_ok());
    assert_eq!(body.size_hint().exact(), Some(3));
    say.send(Step::Text("def")).expect("read");
    drop(say);
    assert!(body.frame().await.expect("one").is_ok());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(body.frame().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn body_whose_drop_panics_is_aborted() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            if !std::thread::panicking() {
                std::panic::panic_any("planned: a body that cannot be dropped");
            }
        }
    }
    let (store, locks) = store_and_locks();
    let handler = get(async || {
        let bomb = Bomb;
        Body::from_stream(stream::poll_fn(move |_| {
            let _in_here = &bomb;
            Poll::<Option<Result<Bytes, std::convert::Infallible>>>::Pending
        }))
    });
    let layer = LockLayer::new(&locks, one_key()).max_hold(5 * S);
    let mut body = fetch(&Router::new().route("/", handler.route_layer(layer)), "/").await.into_body();
    let began = Instant::now();
    let last = timeout(60 * S, body.frame()).await.expect("the error");
    assert!(began.elapsed() < 10 * S, "when it is cut");
    assert!(last.expect("no end that looks complete").is_err());
    sleep(S).await;
    assert_eq!((store.held_count(), locks.size()), (0, (0, 0)));
}

/// In a test, or another executor.
#[test]
fn stream_can_be_read_without_a_runtime() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("one");
    let (store, locks) = store_and_locks();
    for announced in [None, Some(6)] {
        let (say, body) = ScriptedBody::fed();
        let body = if let Some(size) = announced { body.announce(size) } else { body };
        let app = once(LockLayer::new(&locks, one_key()), Response::new(body));
        let body = runtime.block_on(fetch(&app, "/")).into_body();
        say.send(Step::Text("abc")).expect("read");
        say.send(Step::Text("def")).expect("read");
        drop(say);
        let read = std::thread::spawn(move || futures_util::FutureExt::now_or_never(body.collect()));
        let read = read.join().expect("no panic").expect("the body is complete").expect("whole").to_bytes();
        assert_eq!(read, "abcdef");
        runtime.block_on(until("released", async || store.held_count() == 0));
    }
}

/// I6: trailers are not polled after the lock is lost, and the response is then not complete.
#[tokio::test(start_paused = true)]
async fn trailers_are_not_polled_past_the_deadline() {
    let (_store, locks) = store_and_locks();
    let (polls, kept) = (Arc::new(AtomicUsize::new(0)), Duration::from_millis(100));
    let counts = Arc::clone(&polls);
    let handler = get(move || async move {
        let began = Instant::now();
        let mut timer = Box::pin(sleep(2 * kept));
        let mut is_first = true;
        let body = stream::poll_fn(move |cx| {
            if std::mem::take(&mut is_first) {
                return Poll::Ready(Some(Ok::<_, std::convert::Infallible>("abc")));
            }
            if began.elapsed() >= kept {
                counts.fetch_add(1, SeqCst);
            }
            std::future::Future::poll(timer.as_mut(), cx).map(|()| None)
        });
        ([(header::CONTENT_LENGTH, "3")], Body::from_stream(body))
    });
    let layer = LockLayer::new(&locks, one_key()).max_hold(kept);
    let response = fetch(&Router::new().route("/", handler.route_layer(layer)), "/").await;
    assert_eq!((response.status(), polls.load(SeqCst)), (StatusCode::SERVICE_UNAVAILABLE, 0));
}
