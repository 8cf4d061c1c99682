//! Axum extractors.

mod held_lock;
mod locked;

pub use self::{
    held_lock::MissingLock,
    locked::{HasLockKey, Locked},
};
