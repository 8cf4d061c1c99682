use std::time::Duration;

use tokio::time::Instant;

use crate::{key::LockKey, lease::FencingToken};

/// A view of a lock that is held: what, under which token, for how long.
///
/// Clone it freely: it cannot give the lock back, and does not keep it. In a handler under a
/// [`LockLayer`](crate::LockLayer) it is an extractor (feature `axum`).
#[derive(Clone, Debug)]
pub struct HeldLock {
    key: LockKey,
    token: FencingToken,
    deadline: Instant,
}

impl HeldLock {
    pub(super) fn new(key: LockKey, token: FencingToken, deadline: Instant) -> Self {
        Self { key, token, deadline }
    }

    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// The number to hand to whatever is written to under this lock: it refuses a smaller one than it has seen.
    #[must_use]
    pub fn fencing_token(&self) -> FencingToken {
        self.token
    }

    /// How long the store keeps the lock for us at the least, if nobody gives it back. Zero: nothing can be
    /// counted on any more.
    ///
    /// Counted from before the store was asked, minus 1 % and 2 ms for clocks that do not run alike (I3, I4).
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}
