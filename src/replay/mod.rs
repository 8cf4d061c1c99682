//! Replay of answers: each retry of a request gets the first answer.
//!
//! A client repeats a request when it has received no answer. The first attempt may have run: a
//! second run would pay twice. [`ReplayLayer`] runs one attempt, and keeps its answer for the
//! others. The [guide](crate::guide::idempotency) shows how.

use crate::lock_key::LockKey;

// In the order in which a request reaches them.
mod layer;
mod config;
mod service;
pub(crate) mod idempotency_key;
pub(crate) mod fingerprint;
mod once;
mod recorder;
mod scope_usage;
mod keep;
mod headers;
pub(crate) mod answer;
mod docs_link;

#[cfg(feature = "axum")]
pub(crate) use self::once::Unrecorded;
pub use self::{
    keep::Keep,
    layer::ReplayLayer,
    once::{AnswerError, Once, OnceAnswer},
    service::ReplayService,
};

/// Returns the key of the lock and of the record that a [`ReplayLayer`] has for an idempotency key,
/// for an operator: `locks.inspect(key)` says whether its first attempt runs or is done.
///
/// `scope` is the key that the scope of the layer returns for the client. The name of the lock is a
/// hash, because idempotency keys may be personal data: `+replay:~` and 32 digits.
///
/// ```
/// # use tower_lock::{LockManager, replay, store::StoreError};
/// # async fn admin(locks: &LockManager) -> Result<(), StoreError> {
/// let key = replay::lock_key(("user", 7), "8e03978e-40d5-43dd-bc93-6894a57f9324");
/// println!("{}", locks.inspect(key).await?);
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn lock_key(scope: impl Into<LockKey>, idempotency_key: &str) -> LockKey {
    LockKey::replay(&scope.into(), idempotency_key)
}
