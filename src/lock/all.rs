//! One call for the locks of several keys.

use std::{
    future::{Future, IntoFuture},
    pin::Pin,
    time::Duration,
};

use super::{
    LockGuards, LockManager,
    acquire::{AcquireFuture, Call},
    several::acquire_several,
};
use crate::{
    error::LockAllError,
    lock_key::{AllKeys, LockKey, several::all},
    owner::Owner,
    policy::{LockPolicy, call_setters, settings},
    store::Demand,
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
    keys: AllKeys,
    call: Call,
}

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
        LockAllBuilder { keys: all(keys), call: self.call() }
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
    pub fn policy(mut self, policy: LockPolicy) -> Self {
        self.call.policy = policy.or(self.call.policy);
        self
    }

    /// Sets the owner. Default: that of the [scope](Owner::scope) in which the call is awaited.
    /// Outside of a scope, a new owner.
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.call.owner = Some(owner.clone());
        self
    }
}

impl IntoFuture for LockAllBuilder {
    type Output = Result<LockGuards, LockAllError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let keys = self.keys.into_sorted()?;
            let (driver, params) = self.call.into_params(Demand::new());
            let acquired = match &*keys {
                [key] => {
                    let acquired = AcquireFuture::send(driver, key.clone(), params).await;
                    acquired.map(LockGuards::one).map_err(|why| (0, why))
                }
                keys => acquire_several(&driver, keys, params).await,
            };
            acquired.map_err(|(at, why)| LockAllError::NotAcquired { key: keys[at].clone(), source: why.into_error() })
        })
    }
}
