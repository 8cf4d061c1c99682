// The first definition of a link wins: here the pages are modules.
#![cfg_attr(
    all(doc, feature = "axum", feature = "memory"),
    doc = "[`docs/redis.md`]: docs::redis\n[`docs/comparison.md`]: docs::comparison\n[`docs/guarantees.md`]: docs::guarantees\n"
)]
// Its examples are tested with Redis alone.
#![cfg_attr(
    all(feature = "axum", feature = "memory", any(feature = "redis", not(doctest))),
    doc = include_str!("../README.md")
)]
#![cfg_attr(
    not(all(feature = "axum", feature = "memory", any(feature = "redis", not(doctest)))),
    doc = "Tower middleware and Axum extractors that serialize HTTP requests per key with a distributed lock."
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// Keys, the HTTP half, the lock half, stores.
pub mod key;
pub mod lock;
pub mod middleware;
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub mod extract;
pub mod store;
#[cfg(feature = "test-util")]
#[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
pub mod test_util;
#[cfg(feature = "__internals")]
#[doc(hidden)]
#[path = "internals.rs"]
pub mod __internals;

mod proto;
#[allow(unreachable_pub, reason = "public in `key`")]
mod key_source;
#[allow(unreachable_pub, reason = "public in `middleware` and in `key`")]
mod rejection;
#[allow(unreachable_pub, reason = "public in `middleware`")]
mod body;
mod telemetry;
mod policy;
mod owner;
mod error;
#[allow(unreachable_pub, reason = "public in `key`")]
mod lock_key;
#[allow(unreachable_pub, clippy::must_use_candidate, reason = "public in `store`")]
mod acquisition;
mod fencing;
mod process;
#[allow(
    unreachable_pub,
    clippy::must_use_candidate,
    reason = "in part public for the simulator alone: feature `__internals`"
)]
mod clock;
mod sync;
mod limits;
#[cfg(not(all(feature = "memory", feature = "test-util")))]
#[allow(unreachable_pub, reason = "in bounds of public functions")]
mod missing;

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use self::extract::{HasLockKey, Locked};
#[cfg(feature = "memory")]
#[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
pub use self::store::MemoryStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use self::store::RedisStore;
pub use self::{
    acquisition::AcquisitionId,
    error::{LockError, LockLost, RunError},
    fencing::FencingToken,
    lock::{HeldLock, LockGuard, LockManager, LockManagerBuilder, LockStatus},
    lock_key::LockKey,
    middleware::{LockLayer, LockManagerLayer},
    owner::Owner,
    policy::{LockPolicy, LogKey, OnDisconnect, OnLost, ReleaseAt, RequestBodyMode},
    proto::lease::Lease,
    rejection::Rejection,
};
/// The version of `deadpool_redis` whose types this crate uses.
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use deadpool_redis;

/// The pages of `docs/`.
#[cfg(any(doc, doctest))]
pub mod docs {
    #[doc = "[redis-failures]: self::redis#when-something-goes-wrong\n"]
    #[doc = include_str!("../docs/guarantees.md")]
    pub mod guarantees {}
    #[doc = include_str!("../docs/redis.md")]
    pub mod redis {}
    #[doc = include_str!("../docs/comparison.md")]
    pub mod comparison {}
    #[doc = "[`LockStore`]: crate::store::LockStore\n[`StoreErrorKind`]: crate::store::StoreErrorKind\n"]
    #[doc = include_str!("../docs/implementing-a-store.md")]
    pub mod implementing_a_store {}
}
