//! Writes that count only when enough replicas have them. Pure.

use std::time::Duration;

/// The replicas that must have a write before it counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct MinReplicas {
    pub(super) count: u32,
    /// How long a call waits for them.
    pub(super) timeout: Duration,
}

/// Too few replicas have a write. It may survive a failover nevertheless.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("{acknowledged} of {required} replicas have acknowledged the write in time")]
pub(super) struct NotReplicated {
    acknowledged: i64,
    required: u32,
}

impl MinReplicas {
    /// `acknowledged`: the reply to `WAIT`.
    pub(super) fn check(self, acknowledged: i64) -> Result<(), NotReplicated> {
        let Self { count: required, .. } = self;
        if acknowledged >= i64::from(required) { Ok(()) } else { Err(NotReplicated { acknowledged, required }) }
    }
}
