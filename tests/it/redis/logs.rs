//! Logs of the tasks of a store.

use std::{
    io,
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

use crate::support::{NAME, environment};

/// A log with a full pipe: it blocks at the warning about a lock without a TTL.
#[derive(Default)]
struct FullPipe {
    is_blocked: AtomicBool,
    is_drained: AtomicBool,
}

struct Log(Arc<FullPipe>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if String::from_utf8_lossy(bytes).contains("has no TTL") {
            self.0.is_blocked.store(true, SeqCst);
            while !self.0.is_drained.load(SeqCst) {
                thread::park_timeout(Duration::from_millis(5));
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Guarantee: G2.
#[test]
fn blocked_log_stops_no_call_of_redis() {
    let pipe = Arc::<FullPipe>::default();
    let (done, ended) = mpsc::channel::<()>();
    let of_test = Arc::clone(&pipe);
    let test = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let pipe = Arc::clone(&of_test);
        let log = tracing_subscriber::fmt().with_writer(move || Log(Arc::clone(&of_test)));
        let _log = tracing::subscriber::set_default(log.finish());
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
