//! Tells whoever operates the service why the store does not answer: now and then, and not for each call.

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
    pub(super) fn tell(&self, now: Moment, operation: &'static str, error: &StoreError) {
        use std::{error::Error, sync::atomic::Ordering::Relaxed};

        use crate::defaults::COMPLAINTS;

        let last = self.last.load(Relaxed);
        let is_due = last == 0 || now.since(Moment::from_nanos(last)) >= COMPLAINTS;
        if !is_due || self.last.compare_exchange(last, now.as_nanos().max(1), Relaxed, Relaxed).is_err() {
            self.left_out.fetch_add(1, Relaxed);
            return;
        }
        let mut reason = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            reason += &format!(": {error}");
            source = error.source();
        }
        let left_out = self.left_out.swap(0, Relaxed);
        tracing::warn!(target: "tower_lock", operation, left_out, "{reason}");
    }
}

#[cfg(not(feature = "tracing"))]
#[derive(Debug, Default)]
pub(super) struct Complaints(());

#[cfg(not(feature = "tracing"))]
impl Complaints {
    #[expect(clippy::unused_self, reason = "the same call as with the feature")]
    pub(super) fn tell(&self, _: Moment, _: &'static str, _: &StoreError) {}
}
