//! Handlers that finish without their client.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use super::{core::Core, metrics};
use crate::defaults::DETACHED;

/// How many there are.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicUsize);

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
        core.detached.0.fetch_update(Relaxed, Relaxed, one_more).ok()?;
        Some(Self { core: Arc::clone(core), _counted: metrics::Detached::begins() })
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        self.core.detached.0.fetch_sub(1, Relaxed);
    }
}
