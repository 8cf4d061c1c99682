//! Observations of background tasks.

use std::time::Duration;

use crate::{error::LockLost, store::StoreErrorKind};

/// An observation to log or to count.
#[derive(Debug)]
#[cfg_attr(
    not(all(feature = "tracing", feature = "metrics")),
    allow(dead_code, reason = "some are only logged, and some only counted")
)]
pub(crate) enum Report {
    /// A grant ended before its section was released.
    Lost { fence: u64, why: LockLost },
    /// A grant has not been renewed for two thirds of its lease.
    RenewalLate { fence: u64 },
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
