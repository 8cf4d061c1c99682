//! Events of several keys, whose store calls are made together.
//!
//! The keys of one caller are requested and released in one step: a store with shared calls gets
//! one call for all of them, however many workers the runtime has.

use crate::{
    lock_key::LockKey,
    proto::calls::{Calls, Numbered},
    store::{AcquireRequest, ReleaseRequest},
};

/// The calls of several keys: the requests, each with its key and its number.
#[derive(Default)]
pub(super) struct Together {
    pub(super) releases: Vec<(LockKey, u64, ReleaseRequest)>,
    pub(super) acquires: Vec<(LockKey, u64, AcquireRequest)>,
}

impl Together {
    /// Takes the calls of one key, which are made later with those of the others.
    pub(super) fn take(&mut self, key: &LockKey, calls: &mut Calls) {
        let Calls { releases, acquires, yields: _ } = calls;
        self.releases.extend(of_key(key, releases.take()));
        self.acquires.extend(of_key(key, acquires.take()));
    }
}

fn of_key<T>(key: &LockKey, calls: Option<Numbered<T>>) -> impl Iterator<Item = (LockKey, u64, T)> {
    calls.into_iter().flatten().map(|(number, request)| (key.clone(), number, request))
}
