//! Many requests, few keys: nobody overlaps, everybody is answered, nothing is left.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Path, State},
    http::{Request, StatusCode},
    routing::post,
};
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tower_lock::{HeldLock, LockLayer, Locks, MemoryStore, by};

use crate::support::serve;

const REQUESTS: usize = 10_000;
const KEYS: usize = 50;
const AT_ONCE: usize = 200;

#[derive(Default)]
struct Subject {
    inside: AtomicI64,
    last_token: AtomicI64,
    visits: AtomicUsize,
}

#[derive(Default)]
struct Seen {
    subjects: Vec<Subject>,
    overlaps: AtomicUsize,
    stale_tokens: AtomicUsize,
}

async fn visit(lock: HeldLock, State(seen): State<Arc<Seen>>, Path(id): Path<usize>) -> String {
    let subject = &seen.subjects[id];
    if subject.inside.fetch_add(1, SeqCst) != 0 {
        seen.overlaps.fetch_add(1, SeqCst);
    }
    if subject.last_token.swap(lock.fencing_token().as_i64(), SeqCst) >= lock.fencing_token().as_i64() {
        seen.stale_tokens.fetch_add(1, SeqCst);
    }
    // Some sections are over at once, some give others the word.
    for _ in 0..id % 4 {
        tokio::task::yield_now().await;
    }
    subject.visits.fetch_add(1, SeqCst);
    subject.inside.fetch_sub(1, SeqCst);
    format!("{}", lock.fencing_token())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_thousand_requests_over_fifty_keys() {
    let store = Arc::new(MemoryStore::new());
    let locks = Locks::new(Arc::clone(&store));
    let seen = Arc::new(Seen { subjects: (0..KEYS).map(|_| Subject::default()).collect(), ..Seen::default() });
    let layer = || LockLayer::new(&locks, by(|Path(id): Path<usize>| ("subject", id)));
    let app = Router::new()
        .route("/refuse/{id}", post(visit).route_layer(layer()))
        .route("/wait/{id}", post(visit).route_layer(layer().wait(Duration::from_secs(60))))
        .with_state(Arc::clone(&seen));
    let server = serve(app).await;
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let tasks_before = tokio::runtime::Handle::current().metrics().num_alive_tasks();

    let answers = stream::iter(0..REQUESTS).map(|n| {
        let (how, id) = (if n % 2 == 0 { "wait" } else { "refuse" }, (n / 2) % KEYS);
        let request = Request::post(format!("http://{server}/{how}/{id}")).body(Body::empty()).expect("a request");
        let client = client.clone();
        async move {
            let answer = client.request(request).await.expect("an answer");
            let status = answer.status();
            answer.into_body().collect().await.expect("to its end");
            (how, status)
        }
    });
    let answers: Vec<_> = answers.buffer_unordered(AT_ONCE).collect().await;

    let count = |how, status| answers.iter().filter(|answer| **answer == (how, status)).count();
    let (waited, ran, refused) =
        (count("wait", StatusCode::OK), count("refuse", StatusCode::OK), count("refuse", StatusCode::CONFLICT));
    assert_eq!(waited, REQUESTS / 2, "who waits has a turn");
    assert_eq!(ran + refused, REQUESTS / 2, "who does not is told");
    let visits: usize = seen.subjects.iter().map(|subject| subject.visits.load(SeqCst)).sum();
    assert_eq!(visits, waited + ran, "a handler runs once for each 200, and for nothing else");
    assert_eq!((seen.overlaps.load(SeqCst), seen.stale_tokens.load(SeqCst)), (0, 0));

    assert_eq!(store.held(), 0, "nothing is left in the store");
    for id in 0..KEYS {
        drop(locks.try_lock(("subject", id)).await.expect("nor in a line"));
    }
    // Connections end when their client does. Nothing else was started but the watchdog, which goes in its own time.
    drop(client);
    crate::support::soon("no task left over", async {
        while tokio::runtime::Handle::current().metrics().num_alive_tasks() > tasks_before + 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}
