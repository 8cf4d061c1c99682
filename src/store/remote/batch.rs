//! Which requests share the next call of a script or a function of the server. Pure.

use std::time::Duration;

use crate::{
    acquisition::AcquisitionId,
    limits::MAX_WAITING_REQUESTS,
    lock_key::{KeyMap, LockKey},
    store::{AcquireReply, AcquireRequest, QueueConfig, ReleaseReply, ReleaseRequest, StoreError, StoreErrorKind},
};

/// The most requests in one call. Redis executes one call after the other, and PostgreSQL locks the
/// rows of a call until its end: this bounds how long another call waits.
pub const MAX_REQUESTS_PER_CALL: usize = 64;

/// A request that can share a call with others.
pub trait Shareable: Clone + Send + Sync + 'static {
    /// The reply to the request.
    type Reply: Send + Unpin + 'static;
    /// The name of the operation, for errors.
    const OPERATION: &'static str;
    /// The most requests that wait for a call. Further ones fail.
    const MAX_WAITING: usize;

    /// Its key.
    fn key(&self) -> &LockKey;
    /// Its acquisition.
    fn id(&self) -> &AcquisitionId;
    /// The terms that all requests of a call have in common.
    fn terms(&self) -> &QueueConfig;
    /// What the request needs of the store.
    fn needs(&self) -> Needs;
    /// How long the request may wait before it is sent. Otherwise it fails.
    fn may_wait(&self) -> Option<Duration>;
    /// The reply without a call, for this reason.
    fn refused(error: StoreError) -> Result<Self::Reply, StoreError>;

    /// Whether it has a call of its own: because of its record or its ticket, because others may
    /// hold its key with it, or because a raw key has messages to other programs.
    fn is_alone(&self) -> bool {
        self.needs() != Needs::Nothing || self.id().max_holders() > 1 || self.key().is_raw()
    }
}

/// An optional part of the contract that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    Nothing,
    Record,
    Ticket,
}

impl Needs {
    pub(crate) fn of(record: bool, ticket: bool) -> Self {
        match (record, ticket) {
            (_, true) => Self::Ticket,
            (true, _) => Self::Record,
            _ => Self::Nothing,
        }
    }
}

impl Shareable for AcquireRequest {
    type Reply = AcquireReply;

    const OPERATION: &'static str = "acquire";
    const MAX_WAITING: usize = MAX_WAITING_REQUESTS;

    fn key(&self) -> &LockKey {
        &self.key
    }

    fn id(&self) -> &AcquisitionId {
        &self.id
    }

    fn terms(&self) -> &QueueConfig {
        &self.queue
    }

    fn needs(&self) -> Needs {
        Needs::of(self.demand.takes_record(), self.in_place_of.is_some())
    }

    /// The rest of its validity is left for the call.
    fn may_wait(&self) -> Option<Duration> {
        Some(self.valid_for / 2)
    }

    fn refused(error: StoreError) -> Result<AcquireReply, StoreError> {
        Err(error)
    }
}

impl Shareable for ReleaseRequest {
    type Reply = ReleaseReply;

    const OPERATION: &'static str = "release";
    /// A release is not refused: each was reserved before its acquire.
    const MAX_WAITING: usize = usize::MAX;

    fn key(&self) -> &LockKey {
        &self.key
    }

    fn id(&self) -> &AcquisitionId {
        &self.id
    }

    fn terms(&self) -> &QueueConfig {
        &self.queue
    }

    fn needs(&self) -> Needs {
        Needs::of(self.record.is_some(), self.heir.is_some())
    }

    fn may_wait(&self) -> Option<Duration> {
        None
    }

    /// No lock can have an invalid name, and the caller would repeat the release for a lease.
    fn refused(error: StoreError) -> Result<ReleaseReply, StoreError> {
        if error.kind() == StoreErrorKind::InvalidKey { Ok(ReleaseReply::NotHolder) } else { Err(error) }
    }
}

/// The number of requests, from the first one on, that the next call has. Their keys are different:
/// two requests of one key would both find it free.
pub fn next_call<'a, R: Shareable + 'a>(requests: impl IntoIterator<Item = &'a R>) -> usize {
    let mut requests = requests.into_iter().peekable();
    let Some(first) = requests.next() else { return 0 };
    if first.is_alone() || requests.peek().is_none() {
        return 1;
    }
    let mut keys = KeyMap::default();
    keys.insert(first.key().clone(), ());
    let joins = |request: &&R| {
        !request.is_alone() && request.terms() == first.terms() && keys.insert(request.key().clone(), ()).is_none()
    };
    1 + requests.take(MAX_REQUESTS_PER_CALL - 1).take_while(joins).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        acquisition::AcquisitionIds,
        store::{Demand, IfBusy, Record},
    };

    const TERMS: QueueConfig = QueueConfig::new(Duration::from_secs(3), Duration::from_secs(10), 9);

    fn acquire(key: usize) -> AcquireRequest {
        let (id, second) = (AcquisitionIds::new("a", 1).next(), Duration::from_secs(1));
        AcquireRequest::new(LockKey::from(("n", key)), id, second, IfBusy::Fail, TERMS, second)
    }

    fn release(key: usize) -> ReleaseRequest {
        ReleaseRequest::new(LockKey::from(("n", key)), AcquisitionIds::new("a", 1).next(), Duration::ZERO, TERMS)
    }

    #[test]
    fn different_keys_share_a_call_up_to_its_bound() {
        let requests: Vec<_> = (0..100).map(acquire).collect();
        assert_eq!(next_call(&requests), MAX_REQUESTS_PER_CALL);
        assert_eq!(next_call(&requests[..3]), 3);
        assert_eq!(next_call(&requests[..0]), 0);
    }

    #[test]
    fn one_key_occurs_once_in_a_call() {
        assert_eq!(next_call(&[1, 2, 3, 2, 4].map(acquire)), 3);
        assert_eq!(next_call(&[1, 1].map(release)), 1);
    }

    #[test]
    fn request_with_a_record_has_a_call_of_its_own() {
        let recorded = || acquire(9).demand(Demand::new().unless_recorded());
        assert_eq!(next_call(&[recorded(), acquire(1)]), 1);
        assert_eq!(next_call(&[acquire(1), acquire(2), recorded()]), 2);
        let leaves_record = release(9).record(Record::new("head", None), Duration::from_secs(60));
        assert_eq!(next_call(&[release(1), leaves_record, release(2)]), 1);
    }

    #[test]
    fn raw_key_has_a_call_of_its_own() {
        let key = LockKey::raw("myLock").expect("a name");
        let raw = AcquireRequest { key: key.clone(), ..acquire(9) };
        assert_eq!(next_call(&[raw.clone(), acquire(1)]), 1);
        assert_eq!(next_call(&[acquire(1), acquire(2), raw]), 2);
        let raw = ReleaseRequest { key, ..release(9) };
        assert_eq!(next_call(&[release(1), raw, release(2)]), 1);
    }

    #[test]
    fn requests_with_other_terms_have_another_call() {
        let other =
            AcquireRequest { queue: QueueConfig::new(Duration::from_secs(1), TERMS.entry_ttl, 9), ..acquire(2) };
        assert_eq!(next_call(&[acquire(1), other]), 1);
    }
}
