//! The cost of locks without HTTP: on the memory store, in one process.
//!
//! ```sh
//! cargo bench -p tower-lock-benches --bench locks
//! ```
//!
//! Times depend on the machine and include the counting of allocations: compare them within one
//! run. Allocations and their bytes are exact. One iteration is
//!
//! - one cycle of acquire and release, or one rejection;
//! - in `hold_100_000`: the acquisition of 100,000 locks, whose bytes are the memory that they use.

#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "measured against")]

use std::{
    future::{Future, IntoFuture},
    pin::pin,
    sync::LazyLock,
    task::{Context, Poll, Waker},
};

use divan::{AllocProfiler, Bencher};
use tokio::{runtime::Runtime, sync::Mutex};
use tower_lock::{LockGuard, LockKey, LockManager};

#[global_allocator]
static ALLOCATOR: AllocProfiler = AllocProfiler::system();

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime"));

const MANY: u64 = 100_000;

fn main() {
    divan::main();
}

fn key() -> LockKey {
    LockKey::from(("reward", 42_u64, "gold"))
}

/// Polls once, without a scheduler, so that the cost of one is not measured.
fn now<F: IntoFuture>(future: F) -> F::Output {
    let future = pin!(future.into_future());
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("not ready, in memory and without contention"),
    }
}

fn hold(locks: &LockManager, keys: u64) -> Vec<LockGuard> {
    (0..keys).map(|n| now(locks.try_lock(("held", n))).expect("free")).collect()
}

#[divan::bench]
fn tokio_mutex_uncontended(bencher: Bencher<'_, '_>) {
    let mutex = Mutex::new(());
    bencher.bench_local(|| drop(now(mutex.lock())));
}

#[divan::bench(args = [1, 1_000, MANY])]
fn acquire_and_release_with_keys_held(bencher: Bencher<'_, '_>, held: u64) {
    let _runtime = RUNTIME.enter();
    let (locks, key) = (LockManager::in_memory(), key());
    let _held = hold(&locks, held - 1);
    bencher.bench_local(|| now(now(locks.try_lock(key.clone())).expect("free").release()).expect("in memory"));
}

#[divan::bench]
fn rejected(bencher: Bencher<'_, '_>) {
    let _runtime = RUNTIME.enter();
    let (locks, key) = (LockManager::in_memory(), key());
    let _held = now(locks.try_lock(key.clone())).expect("free");
    bencher.bench_local(|| now(locks.try_lock(key.clone())).is_err());
}

#[divan::bench(sample_count = 5, sample_size = 1)]
fn hold_100_000(bencher: Bencher<'_, '_>) {
    let _runtime = RUNTIME.enter();
    bencher.with_inputs(LockManager::in_memory).bench_local_values(|locks| (hold(&locks, MANY), locks));
}
