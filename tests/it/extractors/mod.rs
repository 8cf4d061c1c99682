//! The lock of a handler: `HeldLock` and `Locked`.

mod held_lock;
mod locked;
