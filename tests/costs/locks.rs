//! Locks without HTTP, on the memory store.

use tower_lock::LockManager;

use super::{Cost, now, runtime};

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

/// With the feature `metrics` the labels of its metrics are allocated, too.
#[test]
fn uncontended_cycle_stays_within_its_allocations() {
    let (runtime, locks) = (runtime(), LockManager::in_memory());
    let _runtime = runtime.enter();
    cycle(&locks).is_at_most(22, 2000);
}
