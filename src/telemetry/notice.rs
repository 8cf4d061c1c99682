//! Events about frequent mistakes in code that uses locks. Their keys are redacted.

use tracing::debug;

use crate::{background::isolated, fencing::FencingToken, lock_key::LockKey, telemetry::route::Route};

/// A call for a lock was dropped before its first poll.
pub(crate) fn dropped_unpolled(key: &LockKey) {
    isolated(|| {
        debug!(target: "tower_lock", key = key.redacted(), "a call for a lock was dropped before it was awaited: nothing was locked");
    });
}

/// A guard was dropped while it held its lock.
pub(crate) fn dropped_guard(key: &LockKey, fence: FencingToken) {
    isolated(|| {
        debug!(
            target: "tower_lock",
            key = key.redacted(),
            fence = fence.as_u64(),
            "a guard was dropped, and not released: its key stays blocked for the lock-delay",
        );
    });
}

/// A key function that has returned `None` for so many requests in a row.
pub(crate) fn without_key(route: &Route, count: u32) {
    isolated(|| {
        tracing::warn!(
            target: "tower_lock",
            route = route.as_str(),
            "a key function has returned `None` for {count} requests in a row, which ran without a lock",
        );
    });
}

/// The second manager of `LockManager::in_memory` on one runtime.
#[cfg(feature = "memory")]
pub(crate) fn second_in_memory() {
    isolated(|| {
        tracing::warn!(
            target: "tower_lock",
            "a second `LockManager::in_memory`: its locks do not exclude those of the first one. Share one manager by its \
             clones, or use `LockManager::new(MemoryStore::new())` for locks of their own",
        );
    });
}
