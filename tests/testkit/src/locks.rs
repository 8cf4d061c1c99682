//! Keys and lock managers of the tests.

use tower_lock::{
    LockKey, LockManager,
    key::{self, KeySource},
    test_util::TestStore,
};

/// The key of most tests.
pub fn key() -> LockKey {
    LockKey::from(("k",))
}

/// [`key()`] for every request.
pub fn one_key() -> impl KeySource {
    key::from_parts(|_| ("k",))
}

/// A manager, and its store in memory.
pub fn store_and_locks() -> (TestStore, LockManager) {
    let store = TestStore::new();
    let locks = LockManager::new(store.clone());
    (store, locks)
}
