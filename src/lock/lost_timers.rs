//! Timers that ended with their runtime before they fired.

use std::{
    collections::HashSet,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{lock_key::LockKey, sync::Mutex};

/// The keys of lost timers. The next call from a living runtime fires them.
#[derive(Debug, Default)]
pub(super) struct LostTimers {
    keys: Mutex<HashSet<LockKey>>,
    /// Spares the mutex where no timer was lost, which is nearly always.
    is_any: AtomicBool,
}

impl LostTimers {
    pub(super) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }

    pub(super) fn insert(&self, key: LockKey) {
        self.keys.lock().insert(key);
        self.is_any.store(true, Ordering::Release);
    }

    pub(super) fn take(&self) -> HashSet<LockKey> {
        self.is_any.store(false, Ordering::Release);
        std::mem::take(&mut *self.keys.lock())
    }
}
