//! Acquire calls and their replies.

use std::{sync::Arc, time::Duration};

use super::LockEntry;
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::{LockError, PendingReleases, QueueBound},
    limits::{LOCK_DELAY, MAX_WAITERS_PER_PROCESS, RECHECK_GRACE, RECHECK_INTERVAL},
    proto::{
        DriverTypes, Env, QueuePosition,
        attempt::{Asking, Attempt, BLOCK_GRACE, State},
        calls::Numbered,
        pending_release::PendingRelease,
        queue_of_acquire,
    },
    store::{AcquireReply, AcquireRequest, IfBusy, StoreError, StoreErrorKind},
};

impl<D: DriverTypes> LockEntry<'_, D> {
    /// Starts an attempt if waiters are queued, and no attempt or blocking release exists. One
    /// attempt serves all waiters of the process.
    pub(super) fn start_attempt(&mut self, env: &mut Env<'_, D>) {
        self.stop_blocking_after_timeout(env);
        if self.attempt.is_some() || self.pending_releases.blocking().is_some() {
            return;
        }
        self.time_out_waiters(env);
        let Some(first) = self.queue.first() else { return };
        if !env.usage.may_acquire() {
            let error = StoreError::new("lock", "acquire", StoreErrorKind::Unavailable)
                .with_source(PendingReleases { last_error: env.usage.release_error() });
            return self.reject_all(env, |_| error.clone().into());
        }
        *self.attempt = Some(Attempt::new(first.sharing.next_id(env.cx.ids)));
        *self.asking = Asking::default();
        self.send_acquire(env);
    }

    pub(super) fn send_acquire(&mut self, env: &mut Env<'_, D>) {
        let (lease, lock_delay) = (self.requested_lease(env), self.requested_lock_delay());
        let Some(attempt) = &mut self.attempt else { return };
        attempt.wants_queue |= self.queue.has_waiting();
        (self.asking.lease, self.asking.lock_delay) = (lease, lock_delay);
        let first = self.queue.first();
        attempt.demand = first.map(|request| request.demand).unwrap_or_default();
        let trace = first.and_then(|request| request.trace.clone());
        let if_busy = if attempt.wants_queue { IfBusy::Enqueue } else { IfBusy::Fail };
        let (key, lease) = (env.key.clone(), lease.saturating_add(lock_delay));
        let queue = queue_of_acquire(env.lease.call_timeout);
        let request = AcquireRequest::new(key, attempt.id.clone(), lease, if_busy, queue, env.lease.call_timeout)
            .demand(attempt.demand)
            .repeated(attempt.was_sent);
        if attempt.was_sent {
            self.asking.next_recheck_at = env.now().saturating_add(RECHECK_INTERVAL);
        }
        let number = env.next_call();
        Numbered::push(&mut env.actions.calls.acquires, env.key, number, AcquireRequest { trace, ..request });
        attempt.in_flight.start(number, env.now());
        attempt.recheck_after_reply = false;
        attempt.freed_meanwhile = false;
        attempt.revoked_meanwhile = false;
        self.asking.retry_at = None;
    }

    /// The lease that the first waiter needs: a longer one would block the key for longer after a
    /// crash. Another waiter may be the first at the next acquire. The store keeps the longer lease
    /// of two acquires.
    pub(super) fn requested_lease(&self, env: &Env<'_, D>) -> Duration {
        self.queue.first().map_or(env.lease.longest, |request| request.limits.store_lease(env.lease))
    }

    /// I10: the longest lock-delay of all waiters.
    pub(super) fn requested_lock_delay(&self) -> Duration {
        self.queue.requests().map(|request| request.limits.lock_delay).fold(LOCK_DELAY, Duration::max)
    }

    pub(super) fn on_acquired(&mut self, number: u64, reply: Result<AcquireReply, StoreError>, env: &mut Env<'_, D>) {
        let sent_at = self.attempt.as_mut().and_then(|attempt| attempt.in_flight.finish(number));
        match sent_at {
            Some(sent_at) => self.on_acquire_reply(sent_at, reply, env),
            None => self.on_late_reply(number, &reply, env),
        }
    }

    /// Handles a reply to the attempt that is still active.
    pub(super) fn on_acquire_reply(
        &mut self,
        sent_at: BootInstant,
        reply: Result<AcquireReply, StoreError>,
        env: &mut Env<'_, D>,
    ) {
        let Some(attempt) = &mut self.attempt else { return };
        attempt.was_sent |= !reply.as_ref().is_err_and(StoreError::is_unsent);
        if reply.is_ok() {
            attempt.in_flight.succeeded();
            self.retry_releases_now(env);
        }
        let Some(attempt) = &mut self.attempt else { return };
        match reply {
            // I7: a grant that may have been revoked is confirmed by another acquire before its
            // first section starts.
            Ok(AcquireReply::Granted { .. }) if attempt.revoked_meanwhile && !attempt.is_verified => {
                attempt.is_verified = true;
                self.send_acquire(env);
            }
            Ok(AcquireReply::Granted { fence, after }) => {
                let must_verify = attempt.revoked_meanwhile;
                attempt.is_verified = false;
                self.on_granted(sent_at, fence, after, env);
                if must_verify {
                    self.verify(env);
                }
            }
            Ok(AcquireReply::Queued { lease_left, poll_in, held_by, ahead: _ }) => {
                // The first request of each key sends an acquire even if the process is full,
                // because the key may be free. If the key is busy, the bound applies to this
                // request, too.
                if matches!(attempt.state, State::Requesting) && env.usage.waiting() > MAX_WAITERS_PER_PROCESS {
                    let bound = QueueBound::Process;
                    self.reject_all(env, |ahead| LockError::QueueFull { ahead, bound });
                    return self.begin_release(Duration::ZERO, None, env);
                }
                attempt.state = State::Queued;
                self.asking.last_reply_at = env.now();
                self.asking.held_by = held_by;
                self.asking.holder_expires_at = env.now().saturating_add(lease_left);
                self.asking.schedule_poll(env.now(), poll_in, lease_left, env.jitter());
                // The reply may be older than messages that were lost.
                let must_recheck =
                    attempt.recheck_after_reply || env.lagged_at.is_some_and(|lagged_at| sent_at < lagged_at);
                let was_freed = attempt.freed_meanwhile;
                self.reject_non_waiting(env, QueuePosition::busy_error);
                self.abandon_if_unwanted(env);
                if must_recheck {
                    self.send_acquire(env);
                } else if was_freed {
                    self.on_freed(env);
                }
            }
            // The release ends its queue entry, or the offer that it has got meanwhile.
            Ok(AcquireReply::Superseded) if attempt.id.is_replaceable() => {
                self.reject_replaced(None, env);
                self.begin_release(Duration::ZERO, None, env);
            }
            // The attempt holds nothing, and is not in the queue.
            Ok(AcquireReply::Recorded(record)) if attempt.demand.takes_record() => {
                self.answer_recorded(&Arc::new(record), env);
                self.finish_attempt(sent_at, env);
            }
            // The store must enqueue this acquire, and must not reply with a record that was not
            // asked for. A retry would get the same reply again and again.
            Ok(AcquireReply::Recorded(_) | AcquireReply::Superseded) => {
                self.fail_attempt(&StoreError::new("lock", "acquire", StoreErrorKind::Protocol), sent_at, env);
            }
            Ok(AcquireReply::Busy { .. }) if attempt.wants_queue => {
                self.fail_attempt(&StoreError::new("lock", "acquire", StoreErrorKind::Protocol), sent_at, env);
            }
            Ok(AcquireReply::Busy { lease_left, held_by }) => {
                self.asking.held_by = held_by;
                self.asking.holder_expires_at = env.now().saturating_add(lease_left);
                // A request beside more holders may get the key.
                let max_holders = attempt.id.max_holders();
                self.reject_non_waiting_up_to(max_holders, env, QueuePosition::busy_error);
                if self.is_unwanted() {
                    self.finish_attempt(sent_at, env);
                } else {
                    // A request with a wait has joined since the call was sent.
                    self.send_acquire(env);
                }
            }
            Ok(AcquireReply::QueueFull { waiting, .. }) => {
                let bound = QueueBound::Store;
                self.reject_all(env, |ahead| LockError::QueueFull { ahead: waiting + ahead, bound });
                self.finish_attempt(sent_at, env);
            }
            Err(error) if error.is_transient() => {
                let retry_at =
                    attempt.in_flight.failed(&error, sent_at, env.lease.call_timeout, env.now(), env.jitter());
                self.asking.retry_at = Some(retry_at);
            }
            Err(error) => self.fail_attempt(&error, sent_at, env),
        }
    }

    pub(super) fn fail_attempt(&mut self, error: &StoreError, sent_at: BootInstant, env: &mut Env<'_, D>) {
        if let Some(attempt) = &mut self.attempt {
            attempt.in_flight.failed(error, sent_at, env.lease.call_timeout, env.now(), 0.0);
        }
        self.reject_all(env, |_| error.clone().into());
        self.begin_release(Duration::ZERO, None, env);
    }

    /// Ends an attempt that has left nothing in the store. If an earlier call is in doubt, the
    /// attempt is released all the same.
    pub(super) fn finish_attempt(&mut self, sent_at: BootInstant, env: &mut Env<'_, D>) {
        if self.attempt.as_ref().is_some_and(|attempt| {
            attempt.in_flight.in_doubt_until().is_some_and(|in_doubt_until| in_doubt_until > sent_at)
        }) {
            return self.begin_release(Duration::ZERO, None, env);
        }
        *self.attempt = None;
        self.start_attempt(env);
    }

    /// I7: an offer is a hint. The attempt sends an acquire before a section starts.
    pub(super) fn on_offer(&mut self, id: &AcquisitionId, env: &mut Env<'_, D>) {
        match &self.attempt {
            Some(attempt) if attempt.id == *id => self.recheck(env),
            Some(Attempt { state: State::Yielding { next_id, .. }, .. }) if **next_id == *id => {
                if let Some(attempt) = &mut self.attempt {
                    attempt.recheck_after_reply = true;
                }
            }
            _ if self.pending_releases.has_id(id) || self.share_with(|grant| grant.id == *id).is_some() => {}
            // The id has ended long ago. Its release lets the store offer the key to the next
            // waiter at once. Offers can be forged, so the number of these releases has a bound.
            _ if env.usage.can_release_unclaimed_offer() => {
                let release = PendingRelease {
                    is_unclaimed_offer: true,
                    ..PendingRelease::new(id.clone(), Duration::ZERO, env.lease.longest, env.now())
                };
                self.queue_release(release, env);
            }
            _ => {}
        }
    }

    /// I7: the message may be forged, and need not name an acquisition. A queued attempt asks the
    /// store again: the first time at once, and then at most once in each [`RECHECK_INTERVAL`].
    pub(super) fn on_freed(&mut self, env: &mut Env<'_, D>) {
        let Some(attempt) = &mut self.attempt else { return };
        if attempt.in_flight.number().is_some() {
            attempt.freed_meanwhile = true;
            return;
        }
        if !matches!(attempt.state, State::Queued) {
            return;
        }
        if self.asking.next_recheck_at <= env.now() {
            self.send_acquire(env);
            // With jitter: processes that have asked together must not do so again and again.
            let jitter = RECHECK_INTERVAL.mul_f64(0.25 * env.jitter());
            self.asking.next_recheck_at = self.asking.next_recheck_at.saturating_add(jitter);
            return;
        }
        // A message after that instant causes the acquire at once. If the key is freed and locked
        // again and again, it is more likely free then than at any other time.
        let due_at = self.asking.next_recheck_at.saturating_add(RECHECK_GRACE);
        self.asking.retry_at = Some(self.asking.retry_at.map_or(due_at, |retry_at| retry_at.min(due_at)));
    }

    /// Has a queued attempt ask when a block has ended: the store sends no message then.
    pub(super) fn poll_after(&mut self, block_for: Duration, env: &Env<'_, D>) {
        let Some(attempt) = self.attempt.as_ref().filter(|attempt| matches!(attempt.state, State::Queued)) else {
            return;
        };
        if attempt.in_flight.number().is_none() {
            let at = env.now().saturating_add(block_for).saturating_add(BLOCK_GRACE);
            self.asking.retry_at = Some(self.asking.retry_at.map_or(at, |retry_at| retry_at.min(at)));
        }
    }

    pub(super) fn recheck(&mut self, env: &mut Env<'_, D>) {
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.is_pending()) else { return };
        if attempt.in_flight.number().is_some() {
            attempt.recheck_after_reply = true;
        } else {
            self.send_acquire(env);
        }
    }
}
