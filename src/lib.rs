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
    doc = "Gives each HTTP request exclusive use of what it is about to change."
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// In the order in which a newcomer reads them: the words, the HTTP half, what a handler takes, the lock half, where locks are kept.
pub mod key;
#[allow(unreachable_pub, reason = "public in `key`")]
mod lock_key;
#[allow(
    unreachable_pub,
    clippy::must_use_candidate,
    reason = "in part reached by simulators alone: feature `test-util`"
)]
mod acquisition;
mod fencing;
mod process;
#[allow(unreachable_pub, clippy::must_use_candidate, reason = "reached by tests alone: feature `test-util`")]
mod clock;
mod middleware;
#[cfg(feature = "axum")]
mod extract;
mod lock;
mod proto;
mod owner;
mod sync;
mod error;
pub mod store;
#[cfg(feature = "test-util")]
#[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
pub mod test_util;
mod limits;
#[cfg(not(all(feature = "memory", feature = "test-util")))]
#[allow(unreachable_pub, reason = "in bounds of public functions")]
mod missing;

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use self::extract::{Lockable, Locked, MissingLock};
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use self::middleware::{Answer, By, KeyFn, by, by_with_state, form_field, json_field, path_param};
#[cfg(feature = "memory")]
#[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
pub use self::store::MemoryStore;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use self::store::{RedisConnectError, RedisStore, RedisStoreBuilder};
pub use self::{
    acquisition::OwnerId,
    error::{LockError, LockLost, QueueBound, RunError},
    fencing::FencingToken,
    lock::{
        ClientGone, HeldLock, Hold, KeyInLogs, LockCall, LockFuture, LockGuard, LockState, Locks, LocksBuilder, OnLost,
        Policy, Release, RequestBodyMode, TimeoutStatus,
    },
    lock_key::{
        LockKey,
        part::{KeyPart, KeyTuple, PartWriter},
    },
    middleware::{
        ByFields, ByParts, ClientConnection, Constant, Field, FieldError, FieldProblem, Fields, IntoLockKey, KeyError,
        KeySource, LockLayer, LockService, LocksLayer, LocksService, Rejection, RejectionBody, RequestBody,
        ResponseBody, ResponseFuture, by_fields, by_parts, constant, extension, header, query_param,
    },
    owner::Owner,
    proto::lease::Lease,
    store::{ForceReleaseReply, LockStore, Released, StoreError, StoreErrorKind},
};
/// The library that connects to Redis, as this crate's types have it.
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use deadpool_redis;

/// The pages of `docs/`, for those who run it.
#[cfg(any(doc, doctest))]
pub mod docs {
    #[doc = "[redis-troubles]: self::redis#when-something-goes-wrong\n"]
    #[doc = include_str!("../docs/guarantees.md")]
    pub mod guarantees {}
    #[doc = include_str!("../docs/redis.md")]
    pub mod redis {}
    #[doc = include_str!("../docs/comparison.md")]
    pub mod comparison {}
}
