use std::{future::Future, sync::Arc};

use super::{HeldLock, LockLost, hold::Hold, way_back::WayBack};
use crate::{
    key::LockKey,
    lease::FencingToken,
    store::{Released, StoreError},
};

/// The duty to give a lock back.
///
/// There is one guard per lock, and it cannot be cloned; [`view`](Self::view) can. Dropped, it gives the lock back without
/// waiting: at once in memory; else a task of the runtime it was taken in asks the store, and a request of this process that
/// comes in the meantime waits for the answer. (If that runtime has ended, the lease does.) [`release`](Self::release) is the polite form, which can be awaited and tells.
#[derive(Debug)]
#[must_use = "a guard that is dropped gives its lock back at once"]
pub struct LockGuard {
    way_back: WayBack,
    held: HeldLock,
}

impl LockGuard {
    pub(super) fn new(way_back: WayBack, hold: Arc<Hold>) -> Self {
        Self { way_back, held: HeldLock::new(hold) }
    }

    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.held.key()
    }

    /// The number to hand to whatever is written to under this lock.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.held.fencing_token()
    }

    /// What a handler sees of the lock: it can be cloned, and gives nothing back.
    #[must_use]
    pub fn view(&self) -> HeldLock {
        self.held.clone()
    }

    /// Runs a future as long as the lock is ours, and not one poll longer. See [`HeldLock::while_held`].
    ///
    /// ```
    /// # use tower_lock::{LockLost, Locks};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let locks = Locks::in_memory();
    /// let guard = locks.lock(("account", 7)).await?;
    /// let balance = guard.while_held(async { 42 }).await?;
    /// guard.release().await?;
    /// # assert_eq!(balance, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The lock was lost; the future was dropped where it stood.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output, LockLost> {
        self.held.while_held(work).await
    }

    /// Gives the lock back, and says what became of it. After this the next one in line has its turn, whatever the answer.
    ///
    /// # Errors
    ///
    /// The store did not answer, or not within a second. The key is then free at the end of its lease at the latest.
    ///
    /// # Cancel safety
    ///
    /// Dropped half-way, the lock is given back as if the guard had been dropped.
    pub async fn release(self) -> Result<Released, StoreError> {
        self.way_back.walk().await
    }
}
