//! The time in which a request re-enters its own locks.

use std::sync::Arc;

use crate::owner::Owner;

/// Keeps the owner of a request open: locks can be re-entered until the last clone is dropped.
/// Each layer keeps one until its part of the response has ended, because a handler or a stream may
/// outlive the layer that created the owner.
pub(super) struct OwnerLifetime(Owner);

impl OwnerLifetime {
    pub(super) fn start() -> (Owner, Option<Arc<Self>>) {
        let owner = Owner::new();
        (owner.clone(), Some(Arc::new(Self(owner))))
    }
}

impl Drop for OwnerLifetime {
    fn drop(&mut self) {
        self.0.close();
    }
}
