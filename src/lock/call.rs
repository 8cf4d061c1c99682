use std::{
    future::{Future, IntoFuture},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use super::{LockError, LockGuard, acquire, locks::Core};
use crate::key::LockKey;

/// A lock to be taken; nothing happens before it is awaited.
///
/// # Errors
///
/// [`LockError`] says why there is no guard: held, waited in vain, no place in the line, or the store failed.
///
/// # Cancel safety
///
/// Dropped while it waits, it leaves the line and loses its place. What the store granted in the meantime is given back.
#[derive(Debug)]
#[must_use = "nothing is locked before the call is awaited"]
pub struct LockCall {
    core: Arc<Core>,
    key: LockKey,
    wait: Duration,
}

impl LockCall {
    pub(super) fn new(core: Arc<Core>, key: LockKey, wait: Duration) -> Self {
        Self { core, key, wait }
    }

    /// Waits at most this long, first come first served.
    pub fn wait(self, limit: Duration) -> Self {
        Self { wait: limit, ..self }
    }
}

impl IntoFuture for LockCall {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { acquire(&self.core, self.key, self.wait).await })
    }
}
