//! What the user said of one route.

use std::sync::Arc;

use http::request::Parts;

use crate::{
    lock::LockManager,
    policy::LockPolicy,
    rejection::{OnReject, retry_after::UsualHold},
};

pub(super) type Skip = dyn Fn(&Parts) -> bool + Send + Sync;

/// What a layer and all its services share.
pub(super) struct Config<K> {
    pub(super) locks: LockManager,
    pub(super) key: K,
    /// What the route says; what it does not say is found with the request.
    pub(super) policy: LockPolicy,
    pub(super) skip: Option<Arc<Skip>>,
    pub(super) on_reject: OnReject,
    pub(super) name: Option<&'static str>,
    pub(super) usual_hold: Arc<UsualHold>,
}

/// For a layer that is changed after it was cloned: it stands on another route, and has measured nothing there.
impl<K: Clone> Clone for Config<K> {
    fn clone(&self) -> Self {
        Self {
            locks: self.locks.clone(),
            key: self.key.clone(),
            policy: self.policy,
            skip: self.skip.clone(),
            on_reject: self.on_reject.clone(),
            name: self.name,
            usual_hold: Arc::default(),
        }
    }
}
