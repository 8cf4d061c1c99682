//! Observations of background tasks.

use std::time::Duration;

use tracing::warn;

use crate::{error::LockLost, fencing::FencingToken, lock_key::LockKey, store::StoreErrorKind};

/// An observation to log or to count.
#[derive(Debug)]
#[cfg_attr(not(feature = "metrics"), allow(dead_code, reason = "some are only counted"))]
pub(crate) enum Report {
    /// A section was lost before its last guard ended.
    Lost { key: LockKey, token: FencingToken, why: LockLost },
    /// A section has ended, and its lease before the store has confirmed its record.
    RecordLost { key: LockKey, token: FencingToken },
    /// A grant has not been renewed for two thirds of its lease.
    RenewalLate { key: LockKey, fence: u64 },
    /// Grants were renewed with this much of their leases left.
    Renewed { margins: Vec<Duration> },
    /// A call of the store failed or timed out.
    StoreFailed { operation: &'static str, kind: StoreErrorKind },
    /// The same with its reason, at most once in an interval.
    StoreWarning { operation: &'static str, suppressed: u64, reason: String },
    /// A handler was dropped with its client, because too many finish without theirs.
    HandlerDropped { suppressed: u64, max: usize, route: String },
    /// The last manager was dropped while keys are held.
    Abandoned { held: usize },
}

impl Report {
    /// Writes the log line of this report. The lines are for operators, and redact their keys.
    pub(super) fn log(&self) {
        match self {
            Self::Lost { key, token, why } => {
                let reason = match why {
                    LockLost::Revoked => "it was revoked (`force_release`), or the store has lost its data",
                    LockLost::HoldLimitReached => "its hold limit was reached (`max_hold` or a fixed lease)",
                    _ => {
                        "its lease expired, and no renewal was confirmed: the store did not reply, the process was stopped, or a \
                          handler blocked its thread"
                    }
                };
                warn!(
                    target: "tower_lock",
                    key = key.redacted(),
                    fence = token.as_u64(),
                    "a lock is lost: {reason}",
                );
            }
            Self::RecordLost { key, token } => warn!(
                target: "tower_lock",
                key = key.redacted(),
                fence = token.as_u64(),
                "a record may be lost: the lease ended before the store had confirmed it. Without the record the next request \
                 with this key runs",
            ),
            Self::RenewalLate { key, fence } => warn!(
                target: "tower_lock",
                key = key.redacted(),
                fence,
                "a lock is about to be lost: less than a third of its lease is left, and no renewal was confirmed",
            ),
            Self::StoreWarning { operation, suppressed, reason } => {
                warn!(target: "tower_lock", operation, suppressed, "{reason}");
            }
            Self::HandlerDropped { suppressed, max, route } => warn!(
                target: "tower_lock",
                route,
                suppressed,
                "the client disconnected and its handler was dropped: of the {max} handlers that may finish without a client \
                 (`LockManagerBuilder::max_detached`), one route may have at most half of those that are free, and one client a third of these",
            ),
            Self::Abandoned { held } => warn!(
                target: "tower_lock",
                held,
                "the last `LockManager` was dropped while keys are held: `LockManager::shutdown` waits for them",
            ),
            Self::Renewed { .. } | Self::StoreFailed { .. } => {}
        }
    }
}
