//! Held locks for the unit tests of handlers.

use std::sync::Arc;

use crate::{FencingToken, HeldLock, LockKey, LockManager, MemoryStore, proto::section::Section};

impl HeldLock {
    /// Creates a view of a lock that is never lost, for tests of a handler. Needs the feature
    /// `test-util`.
    ///
    /// Pass it to the handler as an argument, or in the extensions of the request
    /// (`.layer(Extension(lock))`).
    ///
    /// ```
    /// # use tower_lock::HeldLock;
    /// async fn claim(lock: HeldLock) -> String {
    ///     format!("{} under {}", lock.key().as_str(), lock.fencing_token())
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let lock = HeldLock::for_test(("reward", 7), 42);
    /// assert_eq!(claim(lock).await, "reward:7 under 42");
    /// # }
    /// ```
    ///
    /// For a lock that *is* lost, acquire one in a [`TestStore`](crate::test_util::TestStore), and
    /// let that store fail.
    ///
    /// # Panics
    ///
    /// Panics if the token does not fit into 63 bits.
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    #[must_use]
    pub fn for_test(key: impl Into<LockKey>, token: u64) -> Self {
        let token = FencingToken::from_raw(token).expect("a token of 63 bits");
        let driver = Arc::clone(LockManager::new(MemoryStore::new()).driver());
        let section = Section::detached(key.into(), token, driver.ids[0].next());
        Self::new(Arc::new(section), driver)
    }
}
