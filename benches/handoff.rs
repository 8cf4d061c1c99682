//! Local handoff of a key within a process, compared with a bare `tokio::sync::Mutex`.
//!
//! ```sh
//! cargo bench -p tower-lock-benches --bench handoff
//! ```
//!
//! 64 tasks on two workers acquire one key, 100 sections each: one iteration is 6,400 handoffs.
//! Compare the two with each other. (The mutex has no wait limit; a lock has a timer for each of
//! its waiters.)

#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "measured against")]

use std::sync::{Arc, LazyLock};

use divan::Bencher;
use tokio::{runtime::Runtime, sync::Mutex, task::yield_now};
use tower_lock::{LockKey, LockManager};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().expect("a runtime")
});

const WAITERS: usize = 64;
const SECTIONS: usize = 100;

fn main() {
    divan::main();
}

/// A section that yields once, so that all others are queued when it ends.
fn contend<F: Future<Output = ()> + Send + 'static>(section: impl Fn() -> F) {
    RUNTIME.block_on(async {
        let tasks: Vec<_> = (0..WAITERS).map(|_| tokio::spawn(section())).collect();
        for task in tasks {
            task.await.expect("no panic");
        }
    });
}

#[divan::bench(sample_count = 200)]
fn tokio_mutex(bencher: Bencher<'_, '_>) {
    let mutex = Arc::new(Mutex::new(()));
    bencher.bench_local(|| {
        contend(|| {
            let mutex = Arc::clone(&mutex);
            async move {
                for _ in 0..SECTIONS {
                    let guard = mutex.lock().await;
                    yield_now().await;
                    drop(guard);
                }
            }
        });
    });
}

#[divan::bench(sample_count = 200)]
fn lock(bencher: Bencher<'_, '_>) {
    let (locks, key) = (LockManager::in_memory(), LockKey::from(("reward", 42_u64, "gold")));
    bencher.bench_local(|| {
        contend(|| {
            let (locks, key) = (locks.clone(), key.clone());
            async move {
                for _ in 0..SECTIONS {
                    let guard = locks.lock(key.clone()).await.expect("a grant");
                    yield_now().await;
                    drop(guard.release());
                }
            }
        });
    });
}
