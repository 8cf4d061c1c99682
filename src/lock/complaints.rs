//! Tells whoever operates the service what goes wrong all the time: now and then, and not each time.

use crate::{clock::Moment, store::StoreError};

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
    pub(super) fn store_failed(&self, now: Moment, operation: &'static str, error: &StoreError) {
        use std::error::Error;

        let Some(left_out) = self.due(now) else { return };
        let mut reason = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            reason += &format!(": {error}");
            source = error.source();
        }
        tracing::warn!(target: "tower_lock", operation, left_out, "{reason}");
    }

    pub(super) fn too_many_finish_alone(&self, now: Moment, max: usize, route: &str) {
        let Some(left_out) = self.due(now) else { return };
        tracing::warn!(
            target: "tower_lock",
            route,
            left_out,
            "a handler was dropped with its client: of at most {max} handlers that finish without theirs, a route may have as many as \
             are left (`LocksBuilder::max_detached`)",
        );
    }

    /// Whether one may be told now, and how many were not since the last one.
    fn due(&self, now: Moment) -> Option<u64> {
        use std::sync::atomic::Ordering::Relaxed;

        let last = self.last.load(Relaxed);
        let is_due = last == 0 || now.since(Moment::from_nanos(last)) >= crate::defaults::COMPLAINTS;
        if !is_due || self.last.compare_exchange(last, now.as_nanos().max(1), Relaxed, Relaxed).is_err() {
            self.left_out.fetch_add(1, Relaxed);
            return None;
        }
        Some(self.left_out.swap(0, Relaxed))
    }
}

#[cfg(not(feature = "tracing"))]
#[derive(Debug, Default)]
pub(super) struct Complaints(());

#[cfg(not(feature = "tracing"))]
#[expect(clippy::unused_self, reason = "the same calls as with the feature")]
impl Complaints {
    pub(super) fn store_failed(&self, _: Moment, _: &'static str, _: &StoreError) {}

    pub(super) fn too_many_finish_alone(&self, _: Moment, _: usize, _: &str) {}
}
