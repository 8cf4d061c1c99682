//! The data that the driver keeps with each grant and each section of the state machine.

use std::sync::{Arc, atomic::AtomicUsize};

use tokio::sync::Notify;

use super::ticket::Keeping;
use crate::{
    error::LockError,
    lock_key::LockKey,
    owner::OwnedLock,
    proto::{DriverTypes, GuardEnd, grant, section, section::ReleaseOutcome},
    store::{Record, StoreError, StoreErrorKind},
    sync::{Mutex, oneshot::Oneshot},
    telemetry::metrics::SectionMetrics,
};

/// A grant with the data of the driver.
pub(crate) type Grant = grant::Grant<TokioDriver>;
/// A section with the data of the driver.
pub(crate) type Section = section::Section<TokioDriver>;
/// Receives the result of a request.
pub(crate) type Waiter = Arc<Oneshot<Result<Arc<Section>, NotGranted>>>;

/// The result of a request that gets no section.
#[derive(Debug)]
pub(crate) enum NotGranted {
    /// The request was rejected.
    Rejected(LockError),
    /// The key has this record, and the request asked for it.
    Recorded(Arc<Record>),
}

/// The types of the driver.
#[derive(Debug)]
pub(crate) enum TokioDriver {}

impl DriverTypes for TokioDriver {
    type Waiter = Waiter;
    type GrantData = GrantData;
    type SectionData = SectionData;
}

/// Kept with each grant.
#[derive(Debug, Default)]
pub(crate) struct GrantData {
    /// The place of the grant in its list of the watchdog, counted from one. Zero: it is in none.
    /// Used under the mutex of that list.
    pub(super) place: AtomicUsize,
}

/// Kept with each section.
#[derive(Debug, Default)]
pub(crate) struct SectionData {
    /// Notified when the section has ended, or a newer request waits for its end.
    pub(super) ended: Notify,
    /// The result of the release, for the guard that waits for it.
    pub(super) release_outcome: Oneshot<Result<ReleaseOutcome, StoreError>>,
    pub(crate) metrics: SectionMetrics,
    /// Of a section that a ticket may follow.
    pub(super) keeping: Mutex<Option<Box<Keeping>>>,
}

impl SectionData {
    /// The end of a guard, with the ticket that the key is left to.
    pub(super) fn end(&self, end: GuardEnd) -> GuardEnd {
        match &*self.keeping.lock() {
            Some(keeping) => keeping.end(end),
            None => end,
        }
    }
}

impl OwnedLock for Section {
    fn key(&self) -> &LockKey {
        &self.grant.key
    }

    fn is_held(&self) -> bool {
        self.end_reason().is_none()
    }
}

impl NotGranted {
    /// The error of a request that asked for no record: a store that replies with one all the same
    /// violates its contract.
    pub(crate) fn into_error(self) -> LockError {
        match self {
            Self::Rejected(error) => error,
            Self::Recorded(_) => StoreError::new("lock", "acquire", StoreErrorKind::Protocol).into(),
        }
    }
}

impl From<LockError> for NotGranted {
    fn from(error: LockError) -> Self {
        Self::Rejected(error)
    }
}
