//! The calls of the store that follow from events.

use crate::{
    lock_key::LockKey,
    store::{AcquireRequest, Many, ReleaseRequest, YieldRequest},
};

/// The calls of one event, or of events of several keys. The requests of one kind share a call.
///
/// The releases come first: one of them may free the key that an acquire asks for.
#[derive(Debug, Default)]
pub struct Calls {
    /// For `LockStore::release`.
    pub releases: Option<Numbered<ReleaseRequest>>,
    /// For `LockStore::acquire`.
    pub acquires: Option<Numbered<AcquireRequest>>,
    /// For `LockStore::yield_to_queue`, each in a call of its own.
    pub yields: Option<Numbered<YieldRequest>>,
}

/// Requests, each with its key and the number of its reply, which is never used twice for a key.
#[derive(Debug)]
pub struct Numbered<T> {
    pub(crate) targets: Many<(LockKey, u64)>,
    pub(crate) requests: Many<T>,
}

impl Calls {
    pub(crate) fn is_empty(&self) -> bool {
        let Self { releases, acquires, yields } = self;
        releases.is_none() && acquires.is_none() && yields.is_none()
    }
}

impl<T> Numbered<T> {
    pub(super) fn push(calls: &mut Option<Self>, key: &LockKey, number: u64, request: T) {
        let target = (key.clone(), number);
        match calls {
            Some(calls) => {
                calls.targets.push(target);
                calls.requests.push(request);
            }
            None => *calls = Some(Self { targets: target.into(), requests: request.into() }),
        }
    }

    /// The requests, each with its key and its number.
    pub fn into_requests(self) -> impl Iterator<Item = ((LockKey, u64), T)> {
        self.targets.into_iter().zip(self.requests)
    }
}
