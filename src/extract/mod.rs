//! Axum extractors.

mod held_lock;
mod locked;
mod once;

pub use self::{
    held_lock::MissingLock,
    locked::{HasLockKey, Locked},
    once::MissingOnce,
};
