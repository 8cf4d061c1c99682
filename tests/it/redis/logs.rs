//! Logs of the tasks of a store.

use std::{
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};

use tokio::runtime::Builder;
use tower_lock::LockError;
use tower_lock_testkit::{limits, locks::key, wait::until};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::support::{NAME, environment};

/// A log with a full pipe: it blocks at the warning about a lock without a TTL.
#[derive(Default)]
struct FullPipe {
    is_blocked: AtomicBool,
    is_drained: AtomicBool,
}

struct Log(Arc<FullPipe>);

struct Message<'a>(&'a FullPipe);

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target() == "tower_lock"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Message(&self.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

impl Visit for Message<'_> {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        if format!("{value:?}").contains("has no TTL") {
            self.0.is_blocked.store(true, SeqCst);
            while !self.0.is_drained.load(SeqCst) {
                thread::park_timeout(Duration::from_millis(5));
            }
        }
    }
}

/// Guarantee: G2.
#[test]
fn blocked_log_stops_no_call_of_redis() {
    let pipe = Arc::<FullPipe>::default();
    let (done, ended) = mpsc::channel::<()>();
    let log = Log(Arc::clone(&pipe));
    let test = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let pipe = Arc::clone(&log.0);
        let _log = tracing::subscriber::set_default(log);
        runtime.block_on(async {
            let Some(environment) = environment().await else { return };
            let locks = environment.direct_instance("a").await;
            // Another program wrote it.
            environment.command(&["HSET", NAME, "foreign", "1"]).await;
            assert!(matches!(locks.try_lock(key()).await, Err(LockError::Busy { .. })));
            until("the log blocks", async || pipe.is_blocked.load(SeqCst)).await;
            for n in 0..10 {
                locks.try_lock(("other", n)).await.expect("free").release().await.expect("held");
            }
            pipe.is_drained.store(true, SeqCst);
        });
        drop(done);
    });
    let has_ended = ended.recv_timeout(limits::BROKEN) != Err(mpsc::RecvTimeoutError::Timeout);
    pipe.is_drained.store(true, SeqCst);
    test.join().expect("no panic");
    assert!(has_ended, "the calls wait for the log");
}
