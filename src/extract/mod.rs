//! What a handler takes.

mod held;
mod locked;

pub use self::{
    held::MissingLock,
    locked::{HasLockKey, Locked},
};
