//! Logs, spans and metrics.
//!
//! A subscriber and a recorder are code of the application: they may call into this crate, panic,
//! or block. Nothing here is called under a mutex of this crate, and their panics are contained.

pub(crate) mod metrics;
pub(crate) mod notice;
pub(crate) mod report;
pub(crate) mod throttle;
pub(crate) mod route;
pub(crate) mod span;
pub(crate) mod waits;

use self::report::Report;
use crate::background::isolated;

/// Counts and logs an observation of a background task.
pub(crate) fn process(report: &Report) {
    isolated(|| metrics::record(report));
    report.log();
}
