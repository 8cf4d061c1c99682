//! The optional parts of the contract.

#[cfg(doc)]
use super::{AcquireReply, AcquireRequest, Demand, LockStore, QueueConfig, ReleaseRequest, StoreErrorKind, StoreEvent};

/// Optional abilities of a store. Returned by [`LockStore::traits`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreTraits {
    /// The store sends events when they happen, so a waiter learns at once that a key was offered
    /// to it, and a holder that its key was revoked.
    ///
    /// Without them, a waiter learns it by its next poll, and a holder by its next renewal.
    pub events: bool,
    /// The store notices a process that has ended, and skips its waiters.
    ///
    /// Without it, such a waiter is offered the key, which delays the next one by
    /// [`QueueConfig::offer_ttl`].
    pub receivers_counted: bool,
    /// The store keeps records: [`ReleaseRequest::record`], [`Demand::unless_recorded`] and
    /// [`LockStore::delete_record`].
    ///
    /// Without it, such a request fails with [`StoreErrorKind::Unsupported`], and nothing changes.
    pub records: bool,
    /// Waiters are served in the order in which they came: the store keeps a queue for each key.
    ///
    /// Without it, the store replies [`Queued`](AcquireReply::Queued) to a waiter and keeps
    /// nothing. A free key goes to the first acquire that comes. Waiters ask again when
    /// [`poll_in`](AcquireReply::Queued::poll_in) says so, or after a [`StoreEvent::Freed`].
    pub ordered: bool,
    /// Several acquisitions can hold a key: those with a
    /// [`max_holders`](crate::AcquisitionId::max_holders) above one.
    ///
    /// Without it, no such acquisition is made.
    pub shares: bool,
    /// A release can leave a key to another acquisition, and an acquire can take its place:
    /// [`ReleaseRequest::heir`] and [`AcquireRequest::in_place_of`]. Raw keys have neither.
    ///
    /// Without it, such a request fails with [`StoreErrorKind::Unsupported`], and nothing changes.
    pub tickets: bool,
    /// The store keeps the traces of sections, and passes them to those that wait:
    /// [`AcquireRequest::trace`] and [`ReleaseRequest::trace`].
    ///
    /// Without it, they are ignored.
    pub traces: bool,
    /// The store tells a [replaceable](crate::AcquisitionId::is_replaceable) acquisition that a
    /// newer one waits, with [`AcquireReply::Superseded`] and
    /// [`RenewReply::Superseded`](super::RenewReply::Superseded). Where it sends
    /// [events](Self::events), each acquire of the newer one sends [`StoreEvent::Revoked`] to the
    /// nearest older one, which asks.
    ///
    /// Without it, no such acquisition is made.
    pub supersedes: bool,
}

// === impl StoreTraits ===

impl StoreTraits {
    /// Creates the traits of a store without optional abilities.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            events: false,
            receivers_counted: false,
            records: false,
            ordered: false,
            shares: false,
            tickets: false,
            traces: false,
            supersedes: false,
        }
    }

    /// Sets [`events`](Self::events).
    #[must_use]
    pub const fn events(mut self, events: bool) -> Self {
        self.events = events;
        self
    }

    /// Sets [`receivers_counted`](Self::receivers_counted).
    #[must_use]
    pub const fn receivers_counted(mut self, receivers_counted: bool) -> Self {
        self.receivers_counted = receivers_counted;
        self
    }

    /// Sets [`records`](Self::records).
    #[must_use]
    pub const fn records(mut self, records: bool) -> Self {
        self.records = records;
        self
    }

    /// Sets [`ordered`](Self::ordered).
    #[must_use]
    pub const fn ordered(mut self, ordered: bool) -> Self {
        self.ordered = ordered;
        self
    }

    /// Sets [`shares`](Self::shares).
    #[must_use]
    pub const fn shares(mut self, shares: bool) -> Self {
        self.shares = shares;
        self
    }

    /// Sets [`tickets`](Self::tickets).
    #[must_use]
    pub const fn tickets(mut self, tickets: bool) -> Self {
        self.tickets = tickets;
        self
    }

    /// Sets [`traces`](Self::traces).
    #[must_use]
    pub const fn traces(mut self, traces: bool) -> Self {
        self.traces = traces;
        self
    }

    /// Sets [`supersedes`](Self::supersedes).
    #[must_use]
    pub const fn supersedes(mut self, supersedes: bool) -> Self {
        self.supersedes = supersedes;
        self
    }
}
