//! Axum extractors.

mod held_lock;
mod locked;
mod once;

pub use self::{
    held_lock::MissingLock,
    locked::{HasLockKey, HasLockKeys, LockView, Locked},
    once::MissingOnce,
};
