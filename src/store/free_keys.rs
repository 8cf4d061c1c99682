//! Keys that a store grants without a call.

use std::{fmt, time::Duration};

use crate::{acquisition::AcquisitionId, lock_key::LockKey, trace::SectionTrace};

/// The free keys of a store that is memory of this process.
///
/// Most keys are free when they are requested. For such a key a call, its reply, a waiter and the
/// delivery to it are only cost.
///
/// The methods run no code of others, and send no event.
pub trait FreeKeys: fmt::Debug {
    /// Grants the key if it is neither held, blocked nor waited for. Returns the fence. `None`:
    /// nothing has changed, and an acquire decides. `trace` is as that of an
    /// [acquire](super::AcquireRequest::trace).
    fn acquire(&self, key: &LockKey, id: &AcquisitionId, lease: Duration, trace: Option<&SectionTrace>) -> Option<u64>;

    /// Frees the key if this acquisition holds it and nothing waits for it. `false`: nothing has
    /// changed, and a release decides.
    fn release(&self, key: &LockKey, id: &AcquisitionId) -> bool;
}
