//! The log lines of background tasks: the feature `tracing`.
//!
//! They are for operators, and name no key, because a key may be redacted.

use tracing::warn;

use super::report::Report;
use crate::error::LockLost;

pub(crate) fn write(report: &Report) {
    match report {
        Report::Lost { fence, why } => {
            let reason = match why {
                LockLost::Revoked => "it was revoked (`force_release`), or the store has lost its data",
                LockLost::HoldLimitReached => "its hold limit was reached",
                _ => "its lease expired, and no renewal was confirmed",
            };
            warn!(target: "tower_lock", fence, "a lock is lost: {reason}");
        }
        Report::RenewalLate { fence } => warn!(
            target: "tower_lock",
            fence,
            "a lock is about to be lost: less than a third of its lease is left, and no renewal was confirmed",
        ),
        Report::StoreWarning { operation, suppressed, reason } => {
            warn!(target: "tower_lock", operation, suppressed, "{reason}");
        }
        Report::HandlerDropped { suppressed, max, route } => warn!(
            target: "tower_lock",
            route,
            suppressed,
            "the client disconnected and its handler was dropped: of the {max} handlers that may finish without a client \
             (`LockManagerBuilder::max_detached`), one route may have at most half of those that are free",
        ),
        Report::Abandoned { held } => warn!(
            target: "tower_lock",
            held,
            "the last `LockManager` was dropped while keys are held: `LockManager::shutdown` waits for them",
        ),
        Report::Renewed { .. } | Report::StoreFailed { .. } => {}
    }
}
