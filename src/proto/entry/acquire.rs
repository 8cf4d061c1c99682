//! What the store is asked, and what its word means.

use std::time::Duration;

use super::{LockEntry, queue_ops::busy_error};
use crate::{
    acquisition::AcquisitionId,
    clock::BootInstant,
    error::{LockError, PendingReleases, QueueBound},
    limits::{LOCK_DELAY, MAX_WAITERS_PER_PROCESS},
    proto::{
        Action, DriverTypes, Env, StoreOp,
        attempt::{Attempt, State},
        pending_release::PendingRelease,
    },
    store::{AcquireReply, IfBusy, StoreError, StoreErrorKind},
};

impl<D: DriverTypes> LockEntry<D> {
    /// Single flight: one attempt, however many want the key. A client that saw its own answer end waits for that give-back.
    pub(super) fn start_attempt(&mut self, env: &mut Env<'_, D>) {
        self.stop_blocking_after_timeout(env);
        if self.attempt.is_some() || self.blocking_release.is_some() {
            return;
        }
        self.time_out_waiters(env);
        if self.queue.is_empty() {
            return;
        }
        if !env.can_reserve_release {
            let error = StoreError::new("lock", "acquire", StoreErrorKind::Unavailable)
                .with_source(PendingReleases { last_error: env.release_error.clone() });
            return self.reject_all(env, |_| error.clone().into());
        }
        self.attempt = Some(Attempt::new(env.ids.next()));
        self.send_acquire(env);
    }

    pub(super) fn send_acquire(&mut self, env: &mut Env<'_, D>) {
        let (lease, lock_delay) = (self.requested_lease(env), self.requested_lock_delay());
        let Some(attempt) = &mut self.attempt else { return };
        attempt.wants_queue |= self.queue.has_waiting();
        attempt.lease = lease;
        attempt.lock_delay = lock_delay;
        let if_held = if attempt.wants_queue { IfBusy::Enqueue } else { IfBusy::Fail };
        let lease = lease.saturating_add(lock_delay);
        let call = env.store_call(&attempt.id, StoreOp::Acquire { if_busy: if_held, lease });
        attempt.in_flight.start(call.number, env.now());
        attempt.recheck_after_reply = false;
        attempt.revoked_meanwhile = false;
        attempt.retry_at = None;
        env.actions.push(Action::Send(call));
    }

    /// The lease that the first waiter needs, so that a crash of it costs no more. The first waiter
    /// may be another one at the next acquire. Of two acquires the store keeps the longer lease.
    pub(super) fn requested_lease(&self, env: &Env<'_, D>) -> Duration {
        self.queue.first().map_or(env.lease.longest, |request| request.limits.store_lease(env.lease))
    }

    /// I10: as long as the longest of those who wait want it.
    pub(super) fn requested_lock_delay(&self) -> Duration {
        self.queue.requests().map(|request| request.limits.lock_delay).fold(LOCK_DELAY, Duration::max)
    }

    pub(super) fn on_acquired(&mut self, number: u64, answer: Result<AcquireReply, StoreError>, env: &mut Env<'_, D>) {
        let ours = self.attempt.as_mut().and_then(|attempt| attempt.in_flight.finish(number));
        match ours {
            Some(asked) => self.on_acquire_reply(asked, answer, env),
            None => self.on_late_reply(number, &answer, env),
        }
    }

    /// The store's word for the attempt that goes on.
    pub(super) fn on_acquire_reply(
        &mut self,
        asked: BootInstant,
        answer: Result<AcquireReply, StoreError>,
        env: &mut Env<'_, D>,
    ) {
        let Some(attempt) = &mut self.attempt else { return };
        if answer.is_ok() {
            attempt.in_flight.succeeded();
            self.retry_releases_now(env);
        }
        let Some(attempt) = &mut self.attempt else { return };
        match answer {
            // What was taken away meanwhile is not begun: the store says whether it was this (I7).
            Ok(AcquireReply::Granted { .. }) if attempt.revoked_meanwhile && !attempt.is_verified => {
                attempt.is_verified = true;
                self.send_acquire(env);
            }
            Ok(AcquireReply::Granted { fence }) => {
                let doubted = attempt.revoked_meanwhile;
                self.on_granted(asked, fence, env);
                if doubted {
                    self.verify(env);
                }
            }
            Ok(AcquireReply::Queued { lease_left, ahead: _ }) => {
                // The first caller of each key asks the store though the process is full: the key may
                // be free. If it is not, the bound holds for it, too.
                if matches!(attempt.state, State::Requesting) && env.waiting > MAX_WAITERS_PER_PROCESS {
                    let bound = QueueBound::Process;
                    self.reject_all(env, |ahead| LockError::QueueFull { ahead, bound });
                    return self.begin_release(Duration::ZERO, None, env);
                }
                attempt.state = State::Queued;
                attempt.last_reply_at = env.now();
                attempt.holder_expires_at = env.now().saturating_add(lease_left);
                attempt.schedule_poll(env.now(), lease_left, env.jitter());
                // Where it was asked before a gap, what it was told since may be lost.
                let hinted = attempt.recheck_after_reply || env.lagged_at.is_some_and(|gap_at| asked < gap_at);
                self.reject_non_waiting(env, busy_error);
                self.abandon_if_unwanted(env);
                if hinted {
                    self.send_acquire(env);
                }
            }
            // It was asked for a place: asked again and again, it would say the same for ever.
            Ok(AcquireReply::Busy { .. }) if attempt.wants_queue => {
                self.fail_attempt(&StoreError::new("lock", "acquire", StoreErrorKind::Protocol), asked, env);
            }
            Ok(AcquireReply::Busy { lease_left }) => {
                attempt.holder_expires_at = env.now().saturating_add(lease_left);
                self.reject_non_waiting(env, busy_error);
                if self.queue.is_empty() {
                    self.finish_attempt(asked, env);
                } else {
                    // Somebody who waits has come meanwhile.
                    self.send_acquire(env);
                }
            }
            Ok(AcquireReply::QueueFull { waiting, .. }) => {
                let bound = QueueBound::Store;
                self.reject_all(env, |ahead| LockError::QueueFull { ahead: waiting + ahead, bound });
                self.finish_attempt(asked, env);
            }
            Err(error) if error.is_transient() => {
                let again = attempt.in_flight.failed(&error, asked, env.call_timeout, env.now(), env.jitter());
                attempt.retry_at = Some(again);
            }
            Err(error) => self.fail_attempt(&error, asked, env),
        }
    }

    pub(super) fn fail_attempt(&mut self, error: &StoreError, asked: BootInstant, env: &mut Env<'_, D>) {
        if let Some(attempt) = &mut self.attempt {
            attempt.in_flight.failed(error, asked, env.call_timeout, env.now(), 0.0);
        }
        self.reject_all(env, |_| error.clone().into());
        self.begin_release(Duration::ZERO, None, env);
    }

    /// The attempt is over, and the store has nothing of it; unless something is still under way.
    pub(super) fn finish_attempt(&mut self, asked: BootInstant, env: &mut Env<'_, D>) {
        if self
            .attempt
            .as_ref()
            .is_some_and(|attempt| attempt.in_flight.in_doubt_until.is_some_and(|void_at| void_at > asked))
        {
            return self.begin_release(Duration::ZERO, None, env);
        }
        self.attempt = None;
        self.start_attempt(env);
    }

    /// A hint concerns this owner: it asks before anything runs (I7).
    pub(super) fn on_offer(&mut self, owner: &AcquisitionId, env: &mut Env<'_, D>) {
        match &self.attempt {
            Some(attempt) if attempt.id == *owner => self.recheck(env),
            Some(Attempt { state: State::Yielding { next_id: next, .. }, .. }) if next == owner => {
                if let Some(attempt) = &mut self.attempt {
                    attempt.recheck_after_reply = true;
                }
            }
            _ if self.pending_releases.iter().any(|release| release.id == *owner) => {}
            // Long forgotten: what was offered to it is not to wait for its end. A few at a time, because anybody can send offers.
            _ if env.can_release_unclaimed_offer => {
                let stray = PendingRelease {
                    is_unclaimed_offer: true,
                    ..PendingRelease::new(owner.clone(), Duration::ZERO, env.lease.longest, env.now())
                };
                self.queue_release(stray, env);
            }
            _ => {}
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
