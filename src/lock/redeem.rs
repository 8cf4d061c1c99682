//! The calls that leave a key to a ticket, and take it back.

use std::{sync::Arc, time::Duration};

use super::{
    HeldLock, LockGuard, LockManager,
    acquire::LockParams,
    driver::Driver,
    driver_data::Section,
    ticket::{Keeping, Ticket, TicketError, TicketTerms, UNNAMED, check_gap},
};
use crate::{
    acquisition::AcquisitionId,
    error::LockError,
    lock_key::LockKey,
    proto::{GuardEnd, LockRequest, QUEUE, Redeemed, section::ReleaseOutcome},
    store::{AcquireReply, AcquireRequest, Demand, Heir, IfBusy, StoreError, StoreErrorKind},
};

/// A call in place of a ticket. If it is dropped before its reply, the key goes back to the ticket.
struct RedeemCall<'a> {
    driver: &'a Arc<Driver>,
    key: &'a LockKey,
    id: AcquisitionId,
    ticket: Arc<Heir>,
    is_known: bool,
}

impl HeldLock {
    /// Keeps the key after this section, for the holder of the ticket. The last call of a section
    /// counts.
    ///
    /// `gap` is how long the key waits for the next step: from 1 second to 24 hours. Under a
    /// [`LockLayer::tickets`](crate::LockLayer::tickets) it is at most the gap of the layer.
    ///
    /// The rest of a [`min_hold`](crate::LockPolicy::min_hold) does not apply to a key that is
    /// kept.
    ///
    /// Only an orderly end keeps the key: after a failure, a loss or a panic it is free as usual. A
    /// step that has redeemed a ticket and fails in order (a response with a status of 400 or
    /// higher, [`release_after_failure`](LockGuard::release_after_failure)) leaves the key to its
    /// ticket again, for the gap of the first step.
    ///
    /// # Errors
    ///
    /// Fails with [`StoreErrorKind::Unsupported`] if the store has no tickets (Redlock, ZooKeeper),
    /// if the key is [raw](LockKey::raw), or in a handler under a layer without
    /// [`tickets`](crate::LockLayer::tickets), or of a [`Locked`](crate::Locked): its response
    /// would not have the ticket, and the key would stay locked although no client can continue.
    ///
    /// # Panics
    ///
    /// Panics if `gap` is out of bounds.
    #[track_caller]
    pub fn keep(&self, gap: Duration) -> Result<Ticket, StoreError> {
        self.keep_as(UNNAMED, gap)
    }

    /// Returns whether this section has taken the place of a ticket: its work goes on.
    ///
    /// A request that sends no ticket takes a free key, as a first one does. So a later step
    /// refuses a section that is not redeemed: after the ticket expired, another client may have
    /// had the key.
    ///
    /// ```
    /// # use axum::http::StatusCode;
    /// # use tower_lock::HeldLock;
    /// async fn confirm(seat: HeldLock) -> StatusCode {
    ///     if !seat.is_redeemed() {
    ///         return StatusCode::CONFLICT;
    ///     }
    ///     // .. write, under seat.fencing_token()
    ///     StatusCode::OK
    /// }
    /// ```
    #[must_use]
    pub fn is_redeemed(&self) -> bool {
        self.section().data.keeping.lock().as_ref().is_some_and(|keeping| keeping.is_redeemed)
    }

    /// The same, with a name for listings.
    #[track_caller]
    pub(crate) fn keep_as(&self, label: &str, gap: Duration) -> Result<Ticket, StoreError> {
        check_gap(gap);
        self.driver().check_tickets("keep", self.key())?;
        let mut keeping = self.section().data.keeping.lock();
        // Of a request, whose response would lose the ticket.
        if self.request().is_some() && keeping.as_ref().is_none_or(|keeping| keeping.terms.is_none()) {
            return Err(unsupported("keep", "the layer has no tickets: `LockLayer::tickets` sends the header"));
        }
        let keeping = keeping.get_or_insert_default();
        keeping.keep_for = Some(gap);
        Ok(keeping.ticket.get_or_insert_with(|| Ticket::new(self.key().clone(), gap, label)).clone())
    }
}

impl LockGuard {
    /// Sets the bounds of a layer, before the work begins.
    pub(crate) fn set_ticket_terms(&self, terms: TicketTerms) {
        self.section().data.keeping.lock().get_or_insert_default().terms = Some(terms);
    }

    /// The ticket of a layer that the key is left to, if this guard ends now and is the last one.
    pub(crate) fn ticket_after(&self, end: &GuardEnd) -> Option<Ticket> {
        let keeping = self.section().data.keeping.lock();
        let keeping = keeping.as_ref().filter(|keeping| keeping.terms.is_some())?;
        // A lock that was lost has no ticket.
        keeping.heir(end).filter(|_| self.loss().is_none())?;
        keeping.ticket.clone()
    }

    /// Releases the lock, and keeps its key for the holder of the ticket: as
    /// [`HeldLock::keep`] and then [`release`](Self::release).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_lock::{LockManager, lock::TicketError};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), TicketError> {
    /// # let locks = LockManager::in_memory();
    /// let seat = locks.lock(("seat", "12F")).await?;
    /// let ticket = seat.into_ticket(Duration::from_secs(300)).await?;
    /// assert!(locks.try_lock(("seat", "12F")).await.is_err());
    ///
    /// // Perhaps minutes later, in another process:
    /// let seat = locks.redeem(&ticket).await?;
    /// // .. confirm, under seat.fencing_token()
    /// seat.release().await.map_err(tower_lock::LockError::Store)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Fails with [`TicketError::NotHeld`] if the lock was lost before. With another error the
    /// store has no tickets, and the lock is released, or the store did not reply, and the ticket
    /// may hold the key.
    ///
    /// # Panics
    ///
    /// Panics if `gap` is not from 1 second to 24 hours.
    ///
    /// # Cancel safety
    ///
    /// The release is sent when the future is created, and is repeated in the background if
    /// necessary.
    #[track_caller]
    pub fn into_ticket(self, gap: Duration) -> impl Future<Output = Result<Ticket, TicketError>> + Send {
        self.into_ticket_as(UNNAMED, gap)
    }

    #[track_caller]
    pub(crate) fn into_ticket_as(
        self,
        label: &str,
        gap: Duration,
    ) -> impl Future<Output = Result<Ticket, TicketError>> + Send + use<> {
        let ticket = self.held_lock().keep_as(label, gap);
        let release = self.release();
        async move {
            let (ticket, outcome) = (ticket.map_err(LockError::Store)?, release.await);
            match outcome.map_err(LockError::Store)? {
                ReleaseOutcome::NotHeld => Err(TicketError::NotHeld),
                _ => Ok(ticket),
            }
        }
    }
}

impl LockManager {
    /// Takes the key of a ticket back, in any process. The section has a larger fencing token than
    /// each one before.
    ///
    /// [`release`](LockGuard::release) ends the work, unless [`keep`](HeldLock::keep) was called:
    /// then the same ticket holds the key again.
    /// [`release_after_failure`](LockGuard::release_after_failure) leaves the key to the ticket,
    /// too. If the guard is dropped, or the process crashes, the key is free after the lock-delay,
    /// or the lease, and the work is over.
    ///
    /// Of two calls with one ticket one gets the key. The other one fails at once: it does not
    /// wait.
    ///
    /// # Errors
    ///
    /// Fails with [`TicketError::NotHeld`] if the ticket does not hold its key.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the key stays with the ticket, or goes back to it.
    pub async fn redeem(&self, ticket: &Ticket) -> Result<LockGuard, TicketError> {
        self.redeem_on(None, ticket).await
    }

    /// The same, on these terms.
    pub(crate) async fn redeem_on(
        &self,
        terms: Option<TicketTerms>,
        ticket: &Ticket,
    ) -> Result<LockGuard, TicketError> {
        let (driver, params) = self.call().into_params(Demand::new());
        redeem(&driver, ticket, params, terms).await
    }
}

/// Takes the key of a ticket, on the terms of a layer.
pub(crate) async fn redeem(
    driver: &Arc<Driver>,
    ticket: &Ticket,
    params: LockParams,
    terms: Option<TicketTerms>,
) -> Result<LockGuard, TicketError> {
    let keeping = Keeping { terms, ticket: Some(ticket.clone()), keep_for: None, is_redeemed: true };
    let guard = driver.redeem(ticket.key(), keeping.heir(&GuardEnd::ReleasedAfterFailure), params).await?;
    *guard.section().data.keeping.lock() = Some(Box::new(keeping));
    Ok(guard)
}

/// Takes the key of a ticket of which only the id is known, as of one that an operator sees. `gap`
/// is for how long the ticket keeps the key if this call fails.
#[cfg(feature = "axum")]
pub(crate) async fn take_over(
    locks: &LockManager,
    key: &LockKey,
    ticket: &AcquisitionId,
    gap: Duration,
) -> Result<LockGuard, TicketError> {
    let (driver, params) = locks.call().into_params(Demand::new());
    driver.redeem(key, Some(Heir::new(ticket.clone(), gap)), params).await
}

impl Driver {
    /// Fails if the store cannot keep this key for a ticket.
    pub(crate) fn check_tickets(&self, operation: &'static str, key: &LockKey) -> Result<(), StoreError> {
        self.tickets_refused(key.is_raw()).map_or(Ok(()), |why| Err(unsupported(operation, why)))
    }

    /// Why the store has no tickets. `None`: it has.
    pub(crate) fn tickets_refused(&self, is_raw: bool) -> Option<&'static str> {
        if !self.store.traits().tickets {
            return Some("it has no tickets: `MemoryStore`, `RedisStore`, `PostgresStore` and `MysqlStore` have them");
        }
        is_raw.then_some("a raw key has no tickets, which other programs do not know")
    }

    /// Takes a key in the place of its ticket. `None`: the time of all its steps is over.
    async fn redeem(
        self: &Arc<Self>,
        key: &LockKey,
        ticket: Option<Heir>,
        params: LockParams,
    ) -> Result<LockGuard, TicketError> {
        let LockParams { mut request, metrics, caller } = params;
        request.trace = self.waits.trace_of(&caller);
        let done = match ticket {
            Some(ticket) => self.redeem_section(key, Arc::new(ticket), &request).await,
            None => Err(TicketError::NotHeld),
        };
        let error = match done {
            Ok(section) => return Ok(LockGuard::of_call(Arc::clone(self), section, request.owner, metrics)),
            Err(error) => error,
        };
        match (metrics, &error) {
            (Some(metrics), TicketError::NotHeld) => metrics.rejected(&LockError::busy(Duration::ZERO, 1)),
            (Some(metrics), TicketError::Lock(error)) => metrics.rejected(error),
            (None, _) => {}
        }
        Err(error)
    }

    async fn redeem_section(
        self: &Arc<Self>,
        key: &LockKey,
        ticket: Arc<Heir>,
        request: &LockRequest<()>,
    ) -> Result<Arc<Section>, TicketError> {
        self.check_tickets("redeem", key).map_err(LockError::Store)?;
        if self.rejects_all() {
            return Err(LockError::ShuttingDown.into());
        }
        let (id, sent_at, timeout) = (self.ids_of(key).next(), self.now(), self.lease.call_timeout);
        let (owner, limits, trace) = (request.owner.clone(), request.limits, request.trace.clone());
        let (lease, lock_delay) = limits.lease_and_lock_delay(self.lease);
        let lease = lease.saturating_add(lock_delay);
        let request = AcquireRequest::new(key.clone(), id.clone(), lease, IfBusy::Fail, QUEUE, timeout)
            .in_place_of(Some(ticket.id.clone()));
        let request = AcquireRequest { trace: trace.clone(), ..request };
        let mut call = RedeemCall { driver: self, key, id, ticket, is_known: false };
        let reply = self.acquire_at_once(request).await;
        call.is_known = reply.as_ref().err().is_none_or(StoreError::is_unsent);
        let AcquireReply::Granted { fence, .. } = reply.map_err(LockError::Store)? else {
            return Err(TicketError::NotHeld);
        };
        let redeemed = Redeemed { id: call.id.clone(), fence, sent_at, owner, limits, trace };
        let section = self.hold_redeemed(key, redeemed, &call.ticket);
        section.ok_or_else(|| LockError::Store(StoreError::no_reply("redeem")).into())
    }
}

fn unsupported(operation: &'static str, why: &'static str) -> StoreError {
    StoreError::new("lock", operation, StoreErrorKind::Unsupported).with_source(why)
}

impl Drop for RedeemCall<'_> {
    fn drop(&mut self) {
        if !self.is_known {
            self.driver.leave_to_ticket(self.key, self.id.clone(), &self.ticket);
        }
    }
}
