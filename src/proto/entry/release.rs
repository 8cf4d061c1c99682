//! Releases, their retries, and replies to calls of ended attempts.

use std::{sync::Arc, time::Duration};

use super::LockEntry;
use crate::{
    clock::BootInstant,
    error::LockLost,
    limits::{MAX_HOLD, RECORD_WAIT},
    proto::{
        Action, DriverTypes, Env, QUEUE,
        attempt::{Attempt, State},
        calls::Numbered,
        in_flight::backoff,
        pending_release::{Leaves, PendingRelease},
        section::{ReleaseOutcome, Section},
    },
    store::{AcquireReply, Record, ReleaseReply, ReleaseRequest, StoreError},
};

impl<D: DriverTypes> LockEntry<'_, D> {
    /// Ends the attempt in any state and sends its release.
    pub(super) fn begin_release(
        &mut self,
        block_for: Duration,
        section: Option<Arc<Section<D>>>,
        env: &mut Env<'_, D>,
    ) {
        self.begin_release_with(block_for, Leaves::default(), section, env);
    }

    /// The same, with something to leave (I9: the only place that ends an attempt).
    pub(super) fn begin_release_with(
        &mut self,
        block_for: Duration,
        Leaves { record, heir }: Leaves,
        section: Option<Arc<Section<D>>>,
        env: &mut Env<'_, D>,
    ) {
        let Some(attempt) = self.attempt.take() else { return };
        let Attempt { id, state, in_flight, was_sent, .. } = attempt;
        let awaited_acquire = in_flight.number();
        if !was_sent && awaited_acquire.is_none() && matches!(state, State::Requesting) {
            // The store has nothing of this id.
            return self.start_attempt(env);
        }
        let mut release = PendingRelease {
            in_doubt_until: in_flight.in_doubt_until(),
            record: section.clone().zip(record),
            heir,
            section,
            ..PendingRelease::new(id, block_for, env.lease.longest, env.now())
        };
        match state {
            State::Requesting | State::Queued => release.awaited_acquire = awaited_acquire,
            State::Holding(holding) if release.record.is_some() => {
                // The section has ended, and its grant is renewed until the store has the record.
                holding.grant.keep_until(env.now().saturating_add(MAX_HOLD));
                release.grant = Some(holding.grant);
            }
            State::Holding(holding) | State::Yielding { holding, .. } => {
                // The grant ends before the release is sent: it must not count as held after that.
                holding.grant.end(LockLost::Released);
                env.actions.push(Action::Untrack(holding.grant));
            }
        }
        // I11
        if let Some((_, new)) = &mut release.record
            && new.record.body.as_ref().is_some_and(|body| body.len() > env.usage.max_record_body())
        {
            Arc::make_mut(new).record.body = None;
        }
        self.pending_releases.unblock();
        // A newer request asks as soon as the store has seen this one: their order says which one
        // is newer.
        release.is_blocking = !release.id.is_replaceable() || release.awaited_acquire.is_some();
        // I8: the acquire in doubt may be executed after the work of the ticket has ended. A
        // release that is sent after that would leave the key to the ticket again. So the only one
        // is sent after the doubt.
        if let Some(until) = release.in_doubt_until.take_if(|_| release.heir.is_some()).filter(|at| *at >= env.now()) {
            release.retry_at = Some(until.saturating_add(Duration::from_millis(1)));
            self.pending_releases.add(release);
            return;
        }
        self.queue_release(release, env);
    }

    /// Releases the key of a section that has ended, whose attempt is forgotten.
    pub(super) fn release_section(&mut self, section: Arc<Section<D>>, env: &mut Env<'_, D>) {
        let id = section.grant.id.clone();
        let release = PendingRelease {
            is_blocking: self.is_idle(),
            section: Some(section),
            ..PendingRelease::new(id, Duration::ZERO, env.lease.longest, env.now())
        };
        self.queue_release(release, env);
    }

    pub(super) fn queue_release(&mut self, release: PendingRelease<D>, env: &mut Env<'_, D>) {
        let release = self.pending_releases.add(release);
        if release.awaited_acquire.is_none() {
            send_release(release, env);
        }
    }

    /// Handles the reply to an acquire of an ended attempt. The release was waiting for it.
    pub(super) fn on_late_reply(
        &mut self,
        number: u64,
        reply: &Result<AcquireReply, StoreError>,
        env: &mut Env<'_, D>,
    ) {
        let Some(release) = self.pending_releases.iter_mut().find(|release| release.awaited_acquire == Some(number))
        else {
            return;
        };
        release.awaited_acquire = None;
        release.is_blocking &= reply.is_err() || !release.id.is_replaceable();
        if reply.as_ref().is_err_and(|error| !error.is_unsent()) {
            release.extend_doubt(env.now().saturating_add(env.lease.call_timeout));
        }
        send_release(release, env);
        self.start_attempt(env);
    }

    pub(super) fn on_release_reply(
        &mut self,
        number: u64,
        reply: Result<ReleaseReply, StoreError>,
        env: &mut Env<'_, D>,
    ) {
        let is_replied = |release: &PendingRelease<D>| release.in_flight == Some(number);
        let Some(at) = self.pending_releases.iter().position(is_replied) else { return };
        let release = &mut self.pending_releases[at];
        release.is_blocking &= reply.is_err();
        release.in_flight = None;
        // A guard that leaves a record waits for later calls, too.
        let is_awaited = release.record.is_some() && env.now() < release.times_out_at(RECORD_WAIT);
        if let Some(section) = release.section.take_if(|_| reply.is_ok() || !is_awaited) {
            env.actions.push(Action::ReleaseOutcome(section, reply.clone().map(ReleaseOutcome::from)));
        }
        match reply {
            Ok(reply) => {
                if let Some(grant) = release.stop_renewing(LockLost::Released, env.now()) {
                    env.actions.push(Action::Untrack(grant));
                }
                let mut record = release.record.take();
                if reply == ReleaseReply::NotHolder
                    && let Some((section, _)) = record.take()
                {
                    env.actions.push(Action::RecordLost(section));
                }
                match release.doubt_after_release() {
                    // The call in doubt may be executed after this release. The release is repeated
                    // when the call cannot be executed any more (I8).
                    Some(doubt_end) => {
                        release.block_for = Duration::ZERO;
                        release.retry_at = Some(doubt_end.max(env.now()).saturating_add(Duration::from_millis(1)));
                    }
                    None => drop(self.pending_releases.remove(at)),
                }
                if let Some((_, record)) = record {
                    self.answer_recorded(&Arc::new(record.record.clone()), env);
                    // A later attempt may exist if this release was without a reply for long.
                    self.abandon_if_unwanted(env);
                }
            }
            Err(_) if release.is_unclaimed_offer => drop(self.pending_releases.remove(at)),
            Err(error) => {
                release.failures += 1;
                release.retry_at = Some(env.now().saturating_add(backoff(release.failures, env.jitter())));
                env.usage.release_failed(&error);
                release.error = Some(error);
            }
        }
        self.start_attempt(env);
    }

    /// Answers all local requests for the record of the key. None of them calls the store.
    pub(super) fn answer_recorded(&mut self, record: &Arc<Record>, env: &mut Env<'_, D>) {
        while let Some(request) = self.queue.remove_answered() {
            env.actions.push(Action::Recorded(request.waiter, Arc::clone(record)));
        }
    }

    /// Lets the next attempt start if the blocking release has had no reply for the store timeout.
    /// The acquire then shows the state of the key.
    pub(super) fn stop_blocking_after_timeout(&mut self, env: &Env<'_, D>) {
        let timeout = env.store_timeout();
        if self.pending_releases.blocking().is_some_and(|release| release.times_out_at(timeout) <= env.now()) {
            self.pending_releases.unblock();
        }
    }

    /// Repeats the failed releases at once, because the store has replied to another call.
    pub(super) fn retry_releases_now(&mut self, env: &mut Env<'_, D>) {
        for release in self.pending_releases.iter_mut() {
            if release.error.take().is_some() && release.retry_at.take().is_some() {
                send_release(release, env);
            }
        }
    }

    /// Sends the release that has waited for longest until fewer are under way (I2).
    pub(super) fn send_waiting_release(&mut self, env: &mut Env<'_, D>) {
        if let Some(release) = self.pending_releases.iter_mut().find(|release| release.is_waiting) {
            release.is_waiting = false;
            send_release(release, env);
        }
    }

    /// The instant from which waiters do not wait for the blocking release any more.
    pub(super) fn blocking_release_timeout_at(&self, timeout: Duration) -> Option<BootInstant> {
        let release = self.pending_releases.blocking().filter(|_| !self.queue.is_empty())?;
        Some(release.times_out_at(timeout))
    }

    /// Repeats the releases that are due, and drops the expired ones. If the blocking release has
    /// had no reply for the store timeout, requests without a wait are rejected.
    pub(super) fn retry_due_releases(&mut self, env: &mut Env<'_, D>) {
        let (now, timeout) = (env.now(), env.store_timeout());
        let mut blocking_error = None;
        self.pending_releases.retain_mut(|release| {
            let has_expired =
                release.expires_at() <= now && release.awaited_acquire.is_none() && release.in_flight.is_none();
            if release.is_blocking && (has_expired || release.times_out_at(timeout) <= now) {
                let no_reply = || StoreError::no_reply("release");
                blocking_error = Some(release.error.clone().unwrap_or_else(no_reply));
            }
            if release.retry_at.is_some_and(|at| at <= now) && !has_expired {
                release.retry_at = None;
                send_release(release, env);
            }
            if has_expired && let Some((section, _)) = release.record.take() {
                env.actions.push(Action::RecordLost(section));
            }
            !has_expired
        });
        if let Some(error) = blocking_error {
            self.pending_releases.unblock();
            // Requests with a wait send an acquire, and repeat it.
            self.reject_non_waiting(env, |_| error.clone().into());
            self.start_attempt(env);
        }
    }
}

/// Sends the release (I1: it names the id that it releases), or has it wait while too many releases
/// of the process are under way (I2).
pub(super) fn send_release<D: DriverTypes>(release: &mut PendingRelease<D>, env: &mut Env<'_, D>) {
    if release.in_flight.is_some() || release.is_waiting {
        return;
    }
    if !env.usage.may_send_release() {
        release.is_waiting = true;
        return env.usage.push_waiting_release(env.key.clone());
    }
    let mut request = ReleaseRequest::new(env.key.clone(), release.id.clone(), release.block_for, QUEUE);
    request.record = release.record.as_ref().map(|(_, record)| Arc::clone(record));
    request.heir.clone_from(&release.heir);
    // After an error the section is gone: a release that is repeated leaves no trace.
    request.trace = release.section.as_ref().and_then(|section| section.ended_trace(release.created_at));
    let number = env.next_call();
    Numbered::push(&mut env.actions.calls.releases, env.key, number, request);
    release.in_flight = Some(number);
    release.sent_at = env.now();
}
