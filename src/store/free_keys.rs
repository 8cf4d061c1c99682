//! Keys that a store grants without a call.

use std::{fmt, time::Duration};

use crate::{acquisition::AcquisitionId, lock_key::LockKey};

/// The free keys of a store that is memory of this process.
///
/// Most keys are free when they are requested. For such a key a call, its reply, a waiter and the
/// delivery to it are only cost.
///
/// The methods run no code of others, and send no event.
pub trait FreeKeys: fmt::Debug {
    /// Grants the key if it is neither held, blocked nor waited for. Returns the fence. `None`:
    /// nothing has changed, and an acquire decides.
    fn acquire(&self, key: &LockKey, id: &AcquisitionId, lease: Duration) -> Option<u64>;

    /// Frees the key if this acquisition holds it and nothing waits for it. `false`: nothing has
    /// changed, and a release decides.
    fn release(&self, key: &LockKey, id: &AcquisitionId) -> bool;
}
