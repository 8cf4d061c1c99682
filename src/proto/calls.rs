//! The calls of the store that follow from one event.

use crate::store::{AcquireRequest, Many, ReleaseRequest, YieldRequest};

/// The calls of one event. The requests of one kind share a call.
///
/// The releases come first: one of them may free the key that an acquire asks for.
#[derive(Debug, Default)]
pub struct Calls {
    /// For `LockStore::release`.
    pub releases: Option<Numbered<ReleaseRequest>>,
    /// For `LockStore::acquire`.
    pub acquires: Option<Numbered<AcquireRequest>>,
    /// For `LockStore::yield_to_queue`. A key has one attempt, which yields once at a time.
    pub yields: Option<(u64, YieldRequest)>,
}

/// Requests, each with the number of its reply, which is never used twice.
#[derive(Debug)]
pub struct Numbered<T> {
    pub(crate) numbers: Many<u64>,
    pub(crate) requests: Many<T>,
}

impl Calls {
    pub(crate) fn is_empty(&self) -> bool {
        let Self { releases, acquires, yields } = self;
        releases.is_none() && acquires.is_none() && yields.is_none()
    }
}

impl<T> Numbered<T> {
    pub(super) fn push(calls: &mut Option<Self>, number: u64, request: T) {
        match calls {
            Some(calls) => {
                calls.numbers.push(number);
                calls.requests.push(request);
            }
            None => *calls = Some(Self { numbers: number.into(), requests: request.into() }),
        }
    }
}

impl<T> IntoIterator for Numbered<T> {
    type Item = (u64, T);
    type IntoIter = std::iter::Zip<<Many<u64> as IntoIterator>::IntoIter, <Many<T> as IntoIterator>::IntoIter>;

    fn into_iter(self) -> Self::IntoIter {
        self.numbers.into_iter().zip(self.requests)
    }
}
