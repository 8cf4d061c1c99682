//! Handlers that finish without their client.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use super::{complaints::Complaints, core::Core, metrics};
use crate::defaults::DETACHED;

/// How many there are.
#[derive(Debug, Default)]
pub(super) struct Count {
    now: AtomicUsize,
    complaints: Complaints,
}

/// A place among those that finish without their client, as long as it lives.
#[derive(Debug)]
pub(crate) struct Detached {
    core: Arc<Core>,
    _counted: metrics::Detached,
}

impl Detached {
    /// `None`: too many do already (I11).
    pub(crate) fn new(core: &Arc<Core>) -> Option<Self> {
        let one_more = |count| (count < DETACHED).then_some(count + 1);
        let Count { now, complaints } = &core.detached;
        if now.fetch_update(Relaxed, Relaxed, one_more).is_err() {
            if let Some(complaint) = complaints.too_many_finish_alone(core.clock.now()) {
                core.report(complaint);
            }
            return None;
        }
        Some(Self { core: Arc::clone(core), _counted: metrics::Detached::begins() })
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        self.core.detached.now.fetch_sub(1, Relaxed);
    }
}
