//! Tells whoever operates the service what goes wrong all the time: now and then, and not each time.

use super::reports::Report;
#[cfg(feature = "tracing")]
use crate::error::LockLost;
use crate::{clock::BootInstant, store::StoreError};

/// When it was told last, and how much was not told since.
#[cfg(feature = "tracing")]
#[derive(Debug, Default)]
pub(super) struct Complaints {
    /// Nanoseconds; zero: never.
    last: std::sync::atomic::AtomicU64,
    left_out: std::sync::atomic::AtomicU64,
}

#[cfg(feature = "tracing")]
impl Complaints {
    pub(super) fn store_failed(&self, now: BootInstant, operation: &'static str, error: &StoreError) -> Option<Report> {
        use std::error::Error;

        let left_out = self.due(now)?;
        let mut reason = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            reason += &format!(": {error}");
            source = error.source();
        }
        Some(Report::StoreComplaint { operation, left_out, reason })
    }

    pub(super) fn too_many_finish_alone(&self, now: BootInstant, max: usize, route: &str) -> Option<Report> {
        Some(Report::Dropped { left_out: self.due(now)?, max, route: route.to_owned() })
    }

    /// Whether one may be told now, and how many were not since the last one.
    fn due(&self, now: BootInstant) -> Option<u64> {
        use std::sync::atomic::Ordering::Relaxed;

        let last = self.last.load(Relaxed);
        let is_due =
            last == 0 || now.saturating_duration_since(BootInstant::from_nanos(last)) >= crate::limits::WARN_INTERVAL;
        if !is_due || self.last.compare_exchange(last, now.as_nanos().max(1), Relaxed, Relaxed).is_err() {
            self.left_out.fetch_add(1, Relaxed);
            return None;
        }
        Some(self.left_out.swap(0, Relaxed))
    }
}

/// To whoever operates the service; without a key, which may be redacted.
#[cfg(feature = "tracing")]
pub(super) fn report(report: &Report) {
    use tracing::warn;

    match report {
        Report::Lost { fence, why } => {
            let what = match why {
                LockLost::Revoked => "it was revoked (`force_release`), or the store has forgotten it",
                LockLost::HoldLimitReached => "its section has reached its limit",
                _ => "its lease is over, and no renewal was answered",
            };
            warn!(target: "tower_lock", fence, "a lock is lost: {what}");
        }
        Report::Late { fence } => {
            warn!(
                target: "tower_lock",
                fence,
                "a lock is about to be lost: less than a third of its lease is left, and the store does not answer",
            );
        }
        Report::StoreComplaint { operation, left_out, reason } => {
            warn!(target: "tower_lock", operation, left_out, "{reason}");
        }
        Report::Dropped { left_out, max, route } => warn!(
            target: "tower_lock",
            route,
            left_out,
            "the client disconnected and its handler was dropped: of the {max} handlers that may finish without a client \
             (`LockManagerBuilder::max_detached`), one route may have at most half of those that are free",
        ),
        Report::Abandoned { held } => warn!(
            target: "tower_lock",
            held,
            "the last `LockManager` was dropped while keys are held: `LockManager::shutdown` waits for them",
        ),
        Report::Renewed(_) | Report::StoreFailed { .. } => {}
    }
}

#[cfg(not(feature = "tracing"))]
#[derive(Debug, Default)]
pub(super) struct Complaints(());

#[cfg(not(feature = "tracing"))]
#[expect(clippy::unused_self, reason = "the same calls as with the feature")]
impl Complaints {
    pub(super) fn store_failed(&self, _: BootInstant, _: &'static str, _: &StoreError) -> Option<Report> {
        None
    }

    pub(super) fn too_many_finish_alone(&self, _: BootInstant, _: usize, _: &str) -> Option<Report> {
        None
    }
}
