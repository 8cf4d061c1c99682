//! How long the owner of a request can re-enter its locks.

use std::sync::Arc;

use crate::owner::Owner;

/// As long as one of these lives the request is who it is; then nothing re-enters as its owner. Each layer has one until its part of the answer is
/// over: a handler or a stream may outlive the layer that has named the owner.
pub(super) struct Tenure(Owner);

impl Tenure {
    pub(super) fn begin() -> (Owner, Option<Arc<Self>>) {
        let owner = Owner::new();
        (owner.clone(), Some(Arc::new(Self(owner))))
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        self.0.close();
    }
}
