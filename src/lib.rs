#![cfg_attr(all(feature = "axum", feature = "memory"), doc = include_str!("../README.md"))]
#![cfg_attr(
    not(all(feature = "axum", feature = "memory")),
    doc = "Gives each HTTP request exclusive use of what it is about to change."
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// In the order in which a newcomer reads them: the words, the HTTP half, what a handler takes, the lock half, where locks are kept.
pub mod key;
mod lease;
mod middleware;
#[cfg(feature = "axum")]
mod extract;
mod lock;
pub mod store;
mod defaults;

#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use self::extract::MissingLock;
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub use self::middleware::{Answer, By, KeyFn, by, by_with_state};
#[cfg(feature = "memory")]
#[cfg_attr(docsrs, doc(cfg(feature = "memory")))]
pub use self::store::MemoryStore;
pub use self::{
    key::{KeyPart, KeyTuple, LockKey, PartWriter},
    lease::{FencingToken, OwnerId},
    lock::{HeldLock, KeyInLogs, LockCall, LockError, LockGuard, LockLost, Locks, Policy},
    middleware::{
        ByParts, IntoLockKey, KeyError, KeySource, KeySourceFor, LockLayer, LockService, LocksLayer, LocksService,
        Rejection, RejectionBody, ResponseBody, ResponseFuture, by_parts,
    },
    store::{LockStore, Released, StoreError, StoreErrorKind},
};
