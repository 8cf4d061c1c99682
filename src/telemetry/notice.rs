//! Events about frequent mistakes in code that uses locks. Their keys are redacted.

use std::{sync::Arc, time::Duration};

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
            "a guard was dropped, and not released: its key, or its place among the permits of the key, stays blocked for the lock-delay. `let _ =` drops a guard at once",
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

/// A layer that keeps answers is inside of one that locks.
pub(crate) fn replay_inside_lock(route: &Route) {
    isolated(|| {
        tracing::warn!(
            target: "tower_lock",
            route = route.as_str(),
            "a `ReplayLayer` is inside of a `LockLayer`: a retry gets its answer only when the lock is free. Add the \
             `ReplayLayer` after it: `.route_layer(lock).route_layer(replay)`",
        );
    });
}

/// A layer that keeps answers has locks with a lease that is shorter than it needs.
pub(crate) fn short_lease(lease: Duration, call_timeout: Duration, needed: Duration) {
    isolated(|| {
        tracing::warn!(
            target: "tower_lock",
            "a `ReplayLayer` has locks with a lease of {lease:?}, and a call of the store may take {call_timeout:?}: after a \
             few calls without a reply a record is lost, and a retry runs again. Set a lease of at least {needed:?}",
        );
    });
}

/// Two namespaces whose keys are acquired in both orders, and the first route of each order. The
/// two are the same if keys of one namespace are.
pub(crate) struct BothOrders {
    pub(crate) names: [Arc<str>; 2],
    pub(crate) ascending: Arc<str>,
    pub(crate) descending: Arc<str>,
}

/// Requests can wait for each other.
pub(crate) fn both_orders(BothOrders { names: [first, second], ascending, descending }: &BothOrders) {
    const REMEDY: &str = "Two such requests can wait for each other until a timeout. Acquire the keys in one order, or \
                          together with `key::all` or `lock_all`";
    isolated(|| {
        if first == second {
            tracing::warn!(
                target: "tower_lock",
                namespace = &**first,
                "keys of one namespace are acquired in both orders: the route {ascending} holds the smaller one and waits for \
                 the greater one, and the route {descending} the other way round. {REMEDY}",
            );
        } else {
            tracing::warn!(
                target: "tower_lock",
                first = &**first,
                second = &**second,
                "keys of two namespaces are acquired in both orders: the route {ascending} holds a key of `{first}` and waits \
                 for one of `{second}`, and the route {descending} the other way round. {REMEDY}",
            );
        }
    });
}

/// The second manager of locks in memory on one runtime.
pub(crate) fn second_in_memory() {
    isolated(|| {
        tracing::warn!(
            target: "tower_lock",
            "a second `LockManager` in memory: its locks do not exclude those of the first one. Share one manager by its \
             clones, or use `LockManager::new(MemoryStore::new())` for locks of their own",
        );
    });
}
