//! Locks without HTTP, on the memory store.

use std::{
    future::{Future, IntoFuture},
    pin::pin,
    task::{Context, Waker},
};

use allocation_counter::measure;
use tower_lock::{
    LockGuard, LockManager,
    lock::{LockBuilder, LockFuture},
};

use super::{Cost, now, runtime};

/// With the feature `metrics` a guard has the label of its route, and the labels of its metrics are
/// allocated.
const METRICS: bool = size_of::<LockGuard>() > 24;

/// The cost of a lock that is acquired and released by hand.
pub(super) fn cycle(locks: &LockManager) -> Cost {
    Cost::of(|| {
        let guard = now(locks.try_lock(("reward", 42_u64))).expect("free");
        now(guard.release()).expect("in memory");
    })
}

/// The cost of a lock that another owner holds.
pub(super) fn rejection(locks: &LockManager) -> Cost {
    Cost::of(|| drop(now(locks.try_lock(("reward", 42_u64))).expect_err("held")))
}

/// The text of the key, the grant and the section.
#[test]
fn uncontended_cycle_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let (allocations, bytes) = if METRICS { (7, 616) } else { (3, 344) };
    cycle(&locks).is_at_most(allocations, bytes);
}

/// The text of the key and the result of the request.
#[test]
fn rejection_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let _held = now(locks.try_lock(("reward", 42_u64))).expect("free");
    let (allocations, bytes) = if METRICS { (5, 328) } else { (2, 104) };
    rejection(&locks).is_at_most(allocations, bytes);
}

/// A waiter and its section: the grant is that of the first one. The queue is that of its table.
/// The first section that is delivered plans a check of its delivery, which is one action more.
#[test]
fn hand_off_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let lock = || locks.lock(("reward", 42_u64));
    let hand_off = Cost::of(|| {
        let first = now(lock()).expect("free");
        let mut second = pin!(lock().into_future());
        assert!(second.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(first.release());
        now(now(second).expect("its turn").release()).expect("in memory");
    });
    let (allocations, bytes) = if METRICS { (8, 800) } else { (4, 528) };
    (hand_off - cycle(&locks)).is_at_most(allocations, bytes);
}

#[test]
fn held_key_stays_within_its_bytes() {
    const KEYS: u64 = 100_000;
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let mut held = Vec::new();
    let used = measure(|| held.extend((0..KEYS).map(|n| now(locks.try_lock(("reward", n))).expect("free"))));
    let bytes = used.bytes_current / KEYS as i64;
    println!("{bytes} bytes");
    assert!(bytes <= if METRICS { 786 } else { 738 }, "{bytes} bytes");
}

/// The watchdog has the instants of the released ones until it looks for the first time.
#[test]
fn released_keys_use_little_memory() {
    const KEYS: u64 = 10_000;
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    let used = measure(|| {
        for n in 0..KEYS {
            now(now(locks.try_lock(("reward", n))).expect("free").release()).expect("in memory");
        }
    });
    let bytes = used.bytes_current / KEYS as i64;
    assert!(bytes <= 60, "{bytes} bytes");
}

#[test]
fn future_of_a_lock_stays_small() {
    let sizes = (size_of::<LockBuilder>(), size_of::<LockFuture>());
    assert!(sizes.0 <= 344 && sizes.1 <= 352, "{sizes:?}");
}
