//! Writes that count only when enough replicas have them. Pure.

use std::time::Duration;

use deadpool_redis::redis::{Cmd, cmd};

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
    /// Waits for all writes of this connection.
    pub(super) fn wait(self) -> Cmd {
        // Zero would wait without a limit.
        let ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX).max(1);
        let mut wait = cmd("WAIT");
        wait.arg(self.count).arg(ms);
        wait
    }

    /// `acknowledged`: the reply to `WAIT`.
    pub(super) fn check(self, acknowledged: i64) -> Result<(), NotReplicated> {
        let Self { count: required, .. } = self;
        if acknowledged >= i64::from(required) { Ok(()) } else { Err(NotReplicated { acknowledged, required }) }
    }
}
