//! Warnings that are repeated all the time, logged now and then.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::report::Report;
use crate::{clock::BootInstant, limits::WARN_INTERVAL, store::StoreError};

/// Lets one warning of its kind through in each interval, and counts those that it suppressed.
#[derive(Debug, Default)]
pub(crate) struct ThrottledLog {
    /// When the last one passed, in nanoseconds. Zero if none has.
    last: AtomicU64,
    suppressed: AtomicU64,
}

impl ThrottledLog {
    pub(crate) fn store_failed(&self, now: BootInstant, operation: &'static str, error: &StoreError) -> Option<Report> {
        let suppressed = self.pass(now)?;
        Some(Report::StoreWarning { operation, suppressed, reason: format!("{error:?}") })
    }

    pub(crate) fn detached_limit_reached(&self, now: BootInstant, max: usize, route: &str) -> Option<Report> {
        Some(Report::HandlerDropped { suppressed: self.pass(now)?, max, route: route.to_owned() })
    }

    /// `None`: too early. Otherwise the number of warnings that were suppressed since the last one.
    fn pass(&self, now: BootInstant) -> Option<u64> {
        let last = self.last.load(Relaxed);
        let is_due = last == 0 || now.saturating_duration_since(BootInstant::from_nanos(last)) >= WARN_INTERVAL;
        if !is_due || self.last.compare_exchange(last, now.as_nanos().max(1), Relaxed, Relaxed).is_err() {
            self.suppressed.fetch_add(1, Relaxed);
            return None;
        }
        Some(self.suppressed.swap(0, Relaxed))
    }
}
