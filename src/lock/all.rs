use std::{
    fmt,
    future::{Future, IntoFuture},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use super::{
    LockGuards, LockManager,
    acquire::{HandleSettings, effective_settings},
    driver::Driver,
    several::{SeveralParams, acquire_all},
};
use crate::{
    error::LockAllError,
    lock_key::{
        LockKey,
        several::{AllKeys, all},
    },
    owner::Owner,
    policy::{LockPolicy, call_setters, settings},
};

/// Builder of a call for several locks. Nothing happens before it is awaited.
///
/// Created by [`LockManager::lock_all`] and [`LockManager::try_lock_all`]. Awaiting it returns
/// [`LockGuards`].
///
/// # Errors
///
/// Fails with [`LockAllError::Keys`] if there is no key, or if there are more than 64. Fails with
/// [`LockAllError::NotAcquired`] for the reasons for which a [`LockBuilder`](super::LockBuilder)
/// fails.
///
/// # Cancel safety
///
/// If the future is dropped, it loses its position in the queues, and the keys that it has acquired
/// are free at once.
#[derive(Debug)]
#[must_use = "nothing is locked before the call is awaited"]
pub struct LockAllBuilder {
    driver: Arc<Driver>,
    keys: AllKeys,
    policy: LockPolicy,
    owner: Option<Owner>,
    handle: HandleSettings,
}

/// Future of a [`LockAllBuilder`]. Returns [`LockGuards`].
#[must_use = "futures do nothing unless you `.await` or poll them"]
pub struct LockAllFuture(Pin<Box<dyn Future<Output = Result<LockGuards, LockAllError>> + Send>>);

impl LockManager {
    /// Acquires the locks of all these keys together, or none of them. Waits up to 30 seconds by
    /// default, as [`lock`](Self::lock) does.
    ///
    /// The keys may be in any order. Duplicates count once, and 64 keys are the most. Callers that
    /// acquire the same keys in two calls of `lock` can wait for each other until their timeout, if
    /// one of them begins with the other key. Callers of `lock_all` cannot.
    ///
    /// ```
    /// # use tower_lock::{LockManager, lock::LockAllError};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockAllError> {
    /// # let locks = LockManager::in_memory();
    /// let (from, to) = (8, 7);
    /// let guards = locks.lock_all([("account", from), ("account", to)]).await?;
    /// let token = guards.get(("account", from)).map(|lock| lock.fencing_token());
    /// // .. write under the token of each account
    /// guards.release().await.ok();
    /// # assert!(token.is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// If all keys are free, they cost one call of the store. If one is busy, the smaller ones are
    /// kept, in the order of their texts, and the greater ones are released. Then the call waits
    /// for the busy key, and goes on with the rest. The loss of one key is the loss of all.
    /// [`max_hold`](LockAllBuilder::max_hold), [`min_hold`](LockAllBuilder::min_hold) and a fixed
    /// lease count from the last grant. So a crash during a wait may block a key with a fixed lease
    /// for the rest of that wait longer.
    ///
    /// Run the work with [`LockGuards::while_held`], which ends it when a lock is lost, and then
    /// release the guards. An owner re-enters those of the keys that it holds.
    pub fn lock_all<K: Into<LockKey>>(&self, keys: impl IntoIterator<Item = K>) -> LockAllBuilder {
        let handle = self.handle_settings();
        LockAllBuilder {
            driver: Arc::clone(self.driver()),
            keys: all(keys),
            policy: LockPolicy::new(),
            owner: None,
            handle,
        }
    }

    /// Acquires the locks of all these keys if they are free. Does not wait while another owner
    /// holds one of them.
    ///
    /// Two calls with common keys can refuse each other: both then fail with
    /// [`LockError::Busy`](crate::LockError::Busy).
    pub fn try_lock_all<K: Into<LockKey>>(&self, keys: impl IntoIterator<Item = K>) -> LockAllBuilder {
        self.lock_all(keys).wait(Duration::ZERO)
    }
}

impl LockAllBuilder {
    settings!(call_setters);

    /// Sets each setting that this policy sets.
    pub fn policy(self, policy: LockPolicy) -> Self {
        Self { policy: policy.or(self.policy), ..self }
    }

    /// Sets the owner. Default: that of the [scope](Owner::scope) in which the call is awaited.
    /// Outside of a scope, a new owner.
    pub fn owner(self, owner: &Owner) -> Self {
        Self { owner: Some(owner.clone()), ..self }
    }
}

impl IntoFuture for LockAllBuilder {
    type Output = Result<LockGuards, LockAllError>;
    type IntoFuture = LockAllFuture;

    fn into_future(self) -> LockAllFuture {
        LockAllFuture(Box::pin(async move {
            let Self { driver, keys, policy, owner, handle } = self;
            let keys = keys.into_sorted()?;
            let (wait, limits) = effective_settings(policy, handle.policy);
            let parent = handle.parent.get();
            let params = SeveralParams { keys, wait, limits, owner, parent, route: None };
            acquire_all(driver, params).await.map_err(|(key, source)| LockAllError::NotAcquired { key, source })
        }))
    }
}

impl Future for LockAllFuture {
    type Output = Result<LockGuards, LockAllError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for LockAllFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockAllFuture").finish_non_exhaustive()
    }
}
