//! Held locks for the unit tests of handlers.

use std::sync::Arc;

use crate::{FencingToken, HeldLock, HeldLocks, LockKey, LockManager, MemoryStore, proto::section::Section};

/// Creates a view of a lock that is never lost, for tests of a handler.
///
/// Pass it to the handler as an argument, or in the extensions of the request
/// (`.layer(Extension(lock))`).
///
/// ```
/// # use tower_lock::{HeldLock, test_util::held_lock};
/// async fn claim(lock: HeldLock) -> String {
///     format!("{} under {}", lock.key().as_str(), lock.fencing_token())
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// assert_eq!(claim(held_lock(("reward", 7), 42)).await, "reward:7 under 42");
/// # }
/// ```
///
/// For a lock that *is* lost, acquire one in a [`TestStore`](super::TestStore), and let that store
/// fail.
///
/// # Panics
///
/// Panics if the token does not fit into 63 bits.
#[must_use]
pub fn held_lock(key: impl Into<LockKey>, token: u64) -> HeldLock {
    let token = FencingToken::from_raw(token).expect("a token of 63 bits");
    let driver = Arc::clone(LockManager::new(MemoryStore::new()).driver());
    let section = Section::detached(key.into(), token, driver.ids[0].next());
    HeldLock::new(Arc::new(section), driver)
}

/// Creates views of several locks that are never lost, as [`held_lock`] does for one. They are in
/// the order of their keys, as those of a layer.
///
/// ```
/// # use tower_lock::test_util::{held_lock, held_locks};
/// let locks = held_locks([held_lock(("account", 2), 43), held_lock(("account", 1), 42)]);
/// let keys: Vec<_> = locks.iter().map(|lock| lock.key().as_str()).collect();
/// assert_eq!(keys, ["account:1", "account:2"]);
/// ```
#[must_use]
pub fn held_locks(locks: impl IntoIterator<Item = HeldLock>) -> HeldLocks {
    let mut locks = Vec::from_iter(locks);
    locks.sort_unstable_by(|a, b| a.key().cmp(b.key()));
    HeldLocks::new(locks)
}
