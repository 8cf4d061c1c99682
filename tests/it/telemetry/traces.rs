//! A long wait is linked to the section that it was for.

use std::{
    collections::HashMap,
    future::IntoFuture,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, routing::get};
use tokio::{join, time::sleep};
use tower_lock::{
    LockError, LockLayer, LockManager, MemoryStore,
    test_util::TestStore,
    trace::{SectionTrace, Traces},
};
use tower_lock_testkit::{
    app::fetch,
    locks::{key, one_key},
};
use tracing::Span;

use super::span::{Fields, Recorder};

/// Each span has a trace of its own, by the number of its call.
#[derive(Clone, Debug, Default)]
pub(super) struct Numbered(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    calls: u64,
    /// By the id of the span.
    numbers: HashMap<u64, u64>,
    /// The number of the span that has waited, and that of the span before.
    links: Vec<[u64; 2]>,
    panics: bool,
}

impl Traces for Numbered {
    fn ids(&self, span: &Span) -> Option<(u128, u64)> {
        let mut state = self.0.lock().expect("whole");
        state.calls += 1;
        let number = state.calls;
        state.numbers.extend(span.id().map(|id| (id.into_u64(), number)));
        Some((u128::from(number) << 64, number))
    }

    fn link(&self, span: &Span, to_trace: u128, to_span: u64) {
        let mut state = self.0.lock().expect("whole");
        assert_eq!(to_trace, u128::from(to_span) << 64);
        let number = span.id().and_then(|id| state.numbers.get(&id.into_u64()).copied()).unwrap_or_default();
        state.links.push([number, to_span]);
        let panics = state.panics;
        drop(state);
        assert!(!panics, "as wanted");
    }
}

impl Numbered {
    pub(super) fn locks(&self, store: &TestStore) -> LockManager {
        LockManager::builder(store.clone()).traces(self.clone()).build()
    }

    fn links(&self) -> Vec<[u64; 2]> {
        self.0.lock().expect("whole").links.clone()
    }
}

/// A route of that name, whose handler works for this time.
fn app(locks: &LockManager, name: &'static str, works_for: u64) -> Router {
    let layer = LockLayer::new(locks, one_key()).wait(Duration::from_secs(9)).route_name(name);
    let handler = get(async move || sleep(Duration::from_millis(works_for)).await);
    Router::new().route(name, handler.route_layer(layer))
}

fn blocked(fields: &Fields) -> [Option<&str>; 3] {
    ["route", "blocked_by_route", "blocked_for_ms"].map(|name| fields.get(name).map(String::as_str))
}

#[tokio::test(start_paused = true)]
async fn long_wait_is_linked_to_the_section_before_it() {
    let (recorder, _guard) = Recorder::start();
    let (traces, store) = (Numbered::default(), TestStore::new());
    let (here, there) = (traces.locks(&store), traces.locks(&store));
    let (slow, next, last) = (app(&here, "/slow", 60), app(&here, "/next", 30), app(&there, "/last", 0));
    // The second one by a handoff in its process, the third one by the store.
    let replies = join!(fetch(&slow, "/slow"), fetch(&next, "/next"), fetch(&last, "/last"));
    assert!([replies.0, replies.1, replies.2].iter().all(|reply| reply.status() == 200));
    assert_eq!(traces.links(), [[2, 1], [3, 2]]);
    let seen = recorder.all();
    assert_eq!(blocked(&seen[0]), [Some("/slow"), None, None]);
    assert_eq!(blocked(&seen[1]), [Some("/next"), Some("/slow"), Some("60")]);
    assert_eq!(blocked(&seen[2]), [Some("/last"), Some("/next"), Some("30")], "and not the 90 ms that it waited");
}

#[tokio::test(start_paused = true)]
async fn batch_that_yields_links_the_other_process() {
    let (traces, store) = (Numbered::default(), TestStore::new());
    let (here, there) = (traces.locks(&store), traces.locks(&store));
    let (first, other) = (app(&here, "/first", 40), app(&there, "/other", 20));
    let apps = [&first, &other, &first, &first, &first, &first, &first, &first, &first];
    let calls = apps.map(|app| fetch(app, if std::ptr::eq(app, &raw const other) { "/other" } else { "/first" }));
    for reply in futures_util::future::join_all(calls).await {
        assert_eq!(reply.status(), 200);
    }
    let mut links = traces.links();
    assert_eq!(links.len(), 8, "each request but the first one has waited: {links:?}");
    // Each section is followed by one other.
    links.sort_unstable_by_key(|[_, before]| *before);
    links.dedup_by_key(|[_, before]| *before);
    assert_eq!(links.len(), 8, "{links:?}");
}

#[tokio::test(start_paused = true)]
async fn short_wait_and_cancelled_wait_have_no_link() {
    let (recorder, _guard) = Recorder::start();
    let (traces, store) = (Numbered::default(), TestStore::new());
    let locks = traces.locks(&store);
    let (short, next) = (app(&locks, "/short", 9), app(&locks, "/next", 0));
    join!(fetch(&short, "/short"), fetch(&next, "/next"));
    assert_eq!(blocked(&recorder.last()), [Some("/next"), None, None]);
    let slow = app(&locks, "/slow", 100);
    join!(fetch(&slow, "/slow"), async {
        drop(tokio::time::timeout(Duration::from_millis(50), fetch(&next, "/next")).await);
    });
    assert_eq!(traces.links(), [[0; 2]; 0]);
}

#[tokio::test(start_paused = true)]
async fn rejection_names_the_section_that_holds_the_key() {
    let (recorder, _guard) = Recorder::start();
    let (traces, store) = (Numbered::default(), TestStore::new());
    let (here, there) = (traces.locks(&store), traces.locks(&store));
    let (slow, layer) = (app(&here, "/slow", 100), LockLayer::new(&there, one_key()));
    let at_once = Router::new().route("/at-once", get(|| async {}).route_layer(layer));
    join!(fetch(&slow, "/slow"), async {
        assert_eq!(fetch(&at_once, "/at-once").await.status(), 409);
        let seen = recorder.last();
        assert_eq!((&*seen["route"], &*seen["event.held_by_route"]), ("/at-once", "/slow"));
        assert_eq!(seen["event.held_by_trace"], format!("{:032x}", 1_u128 << 64));
        // Without HTTP, by the entry of the process, and after a wait.
        for locks in [&here, &there] {
            let error = locks.try_lock(key()).await.expect_err("held");
            let LockError::Busy { held_by, .. } = error else { panic!("{error}") };
            assert_eq!(held_by.as_ref().map(SectionTrace::route), Some("/slow"));
        }
        let error = there.lock(key()).wait(Duration::from_millis(20)).await.expect_err("held");
        let LockError::TimedOut { held_by, .. } = error else { panic!("{error}") };
        assert_eq!(held_by.map(|by| by.span_id()), Some(1));
    });
}

/// Each of the keys names the whole request.
#[tokio::test(start_paused = true)]
async fn request_for_several_keys_is_linked_and_links() {
    let (traces, store) = (Numbered::default(), TestStore::new());
    let (here, there) = (traces.locks(&store), traces.locks(&store));
    let both = || [key(), ("other",).into()];
    let guards = here.lock_all(both()).await.expect("free");
    let works = async {
        sleep(Duration::from_millis(50)).await;
        guards.release().await.expect("up");
    };
    let (next, ()) = join!(there.lock_all(both()).wait(Duration::from_secs(9)).into_future(), works);
    drop(next.expect("free").release());
    assert_eq!(traces.links(), [[0, 1]], "the first key was waited for");
}

/// A store in memory grants a free key without a call.
#[tokio::test(start_paused = true)]
async fn section_of_a_free_key_in_memory_has_a_trace() {
    let (_recorder, _guard) = Recorder::start();
    let (traces, store) = (Numbered::default(), Arc::new(MemoryStore::new()));
    let [here, there] = [(); 2].map(|()| LockManager::builder(Arc::clone(&store)).traces(traces.clone()).build());
    let (slow, next) = (app(&here, "/slow", 60), app(&here, "/next", 0));
    join!(fetch(&slow, "/slow"), fetch(&next, "/next"), async {
        let error = there.try_lock(key()).await.expect_err("held");
        let LockError::Busy { held_by, .. } = error else { panic!("{error}") };
        assert_eq!(held_by.as_ref().map(SectionTrace::route), Some("/slow"));
    });
    assert_eq!(traces.links(), [[2, 1]]);
}

/// After a local handoff, the store knows an earlier section of the process; after a yield, the new
/// one.
#[tokio::test(start_paused = true)]
async fn rejection_names_the_section_after_a_yield() {
    let (traces, store) = (Numbered::default(), TestStore::new());
    let (here, there) = (traces.locks(&store), traces.locks(&store));
    let (long, next) = (app(&here, "/long", 150), app(&here, "/next", 100));
    join!(fetch(&long, "/long"), fetch(&next, "/next"), async {
        sleep(Duration::from_millis(200)).await;
        let error = there.try_lock(key()).await.expect_err("held");
        let LockError::Busy { held_by, .. } = error else { panic!("{error}") };
        assert_eq!(held_by.as_ref().map(SectionTrace::route), Some("/next"));
    });
}

#[tokio::test(start_paused = true)]
async fn wait_for_a_step_with_a_ticket_is_linked_to_it() {
    let (traces, store) = (Numbered::default(), TestStore::new());
    let (here, there) = (traces.locks(&store), traces.locks(&store));
    let ticket = here.lock(key()).await.expect("free").into_ticket(Duration::from_secs(9)).await.expect("kept");
    let step = here.redeem(&ticket).await.expect("it holds the key");
    let works = async {
        sleep(Duration::from_millis(50)).await;
        let error = there.try_lock(key()).await.expect_err("held");
        let LockError::Busy { held_by, .. } = error else { panic!("{error}") };
        assert_eq!(held_by.map(|by| by.span_id()), Some(2));
        step.release().await.expect("up");
    };
    let (next, ()) = join!(there.lock(key()).wait(Duration::from_secs(9)).into_future(), works);
    drop(next.expect("it is free").release());
    assert_eq!(traces.links(), [[0, 2]], "the first call without a span has waited for the second one");
}

#[tokio::test(start_paused = true)]
async fn panic_in_traces_changes_no_lock() {
    let traces = Numbered::default();
    traces.0.lock().expect("whole").panics = true;
    let locks = traces.locks(&TestStore::new());
    let (slow, next) = (app(&locks, "/slow", 100), app(&locks, "/next", 0));
    let (first, second) = join!(fetch(&slow, "/slow"), fetch(&next, "/next"));
    assert_eq!((first.status().as_u16(), second.status().as_u16()), (200, 200));
    assert_eq!(traces.links().len(), 1);
    assert_eq!(locks.inspect(key()).await.expect("up").holder(), None);
}
