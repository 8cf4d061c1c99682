//! How an id ends: given back once, asked for until the store has answered.

use std::{sync::Arc, time::Duration};

use super::LockEntry;
use crate::{
    clock::BootInstant,
    error::LockLost,
    proto::section::ReleaseOutcome,
    proto::{
        Action, DriverTypes, Env, StoreOp,
        attempt::{Attempt, State},
        in_flight::backoff,
        pending_release::PendingRelease,
        section::Section,
    },
    store::{AcquireReply, ReleaseReply, StoreError, StoreErrorKind},
};

impl<D: DriverTypes> LockEntry<D> {
    /// The attempt is over, in whatever state it is (I9: here, and nowhere else).
    pub(super) fn begin_release(
        &mut self,
        block_for: Duration,
        section: Option<Arc<Section<D>>>,
        env: &mut Env<'_, D>,
    ) {
        let Some(attempt) = self.attempt.take() else { return };
        let Attempt { id: owner, state, in_flight: calls, .. } = attempt;
        let expects = calls.number();
        let mut release = PendingRelease {
            in_doubt_until: calls.in_doubt_until,
            section,
            ..PendingRelease::new(owner, block_for, env.lease.longest, env.now())
        };
        match state {
            State::Requesting | State::Queued => release.awaited_acquire = expects,
            State::Holding(holding) | State::Yielding { holding, .. } => {
                // First of all: nobody here claims to have it any more.
                holding.grant.end(LockLost::Released);
                env.actions.push(Action::Untrack(holding.grant));
            }
        }
        self.blocking_release = Some(release.id.sequence());
        self.queue_release(release, env);
    }

    pub(super) fn queue_release(&mut self, mut release: PendingRelease<D>, env: &mut Env<'_, D>) {
        if release.awaited_acquire.is_none() {
            send_release(&mut release, env);
        }
        self.pending_releases.push(release);
    }

    /// An answer for an id that is over already: now it is known what there is to be given back.
    pub(super) fn on_late_reply(
        &mut self,
        number: u64,
        answer: &Result<AcquireReply, StoreError>,
        env: &mut Env<'_, D>,
    ) {
        let Some(release) = self.pending_releases.iter_mut().find(|release| release.awaited_acquire == Some(number))
        else {
            return;
        };
        release.awaited_acquire = None;
        if answer.is_err() {
            let void_at = env.now().saturating_add(env.call_timeout);
            release.in_doubt_until = Some(release.in_doubt_until.map_or(void_at, |earlier| earlier.max(void_at)));
        }
        send_release(release, env);
    }

    pub(super) fn on_release_reply(
        &mut self,
        number: u64,
        answer: Result<ReleaseReply, StoreError>,
        env: &mut Env<'_, D>,
    ) {
        let Some(at) = self.pending_releases.iter().position(|release| release.in_flight == Some(number)) else {
            return;
        };
        let release = &mut self.pending_releases[at];
        release.in_flight = None;
        if answer.is_ok() && self.blocking_release == Some(release.id.sequence()) {
            self.blocking_release = None;
        }
        if let Some(section) = release.section.take() {
            env.actions.push(Action::ReleaseOutcome(section, answer.clone().map(ReleaseOutcome::from)));
        }
        match answer {
            Ok(_) => match release.in_doubt_until.filter(|void_at| *void_at > release.sent_at) {
                // What got no answer may be done yet: once more, when it cannot (I8).
                Some(void_at) => {
                    release.block_for = Duration::ZERO;
                    release.retry_at = Some(void_at.max(env.now()).saturating_add(Duration::from_millis(1)));
                }
                None => {
                    self.pending_releases.remove(at);
                }
            },
            Err(_) if release.is_unclaimed_offer => {
                self.pending_releases.remove(at);
            }
            Err(error) => {
                release.failures += 1;
                release.retry_at = Some(env.now().saturating_add(backoff(release.failures, env.jitter())));
                *env.release_error = Some(error.clone());
                release.error = Some(error);
            }
        }
        self.start_attempt(env);
    }

    /// Nobody waits for a give-back that has had no answer for so long already: the store is asked whose the key is.
    pub(super) fn stop_blocking_after_timeout(&mut self, env: &Env<'_, D>) {
        let is_silent = |release: &PendingRelease<D>| {
            self.blocking_release == Some(release.id.sequence())
                && release.times_out_at(env.store_timeout()) <= env.now()
        };
        if self.pending_releases.iter().any(is_silent) {
            self.blocking_release = None;
        }
    }

    /// The store answers: what failed before is not to wait for its time.
    pub(super) fn retry_releases_now(&mut self, env: &mut Env<'_, D>) {
        for release in &mut self.pending_releases {
            if release.error.take().is_some() && release.retry_at.take().is_some() {
                send_release(release, env);
            }
        }
    }

    /// Why the release that the next attempt waits for has not reached the store.
    pub(super) fn blocking_release_error(&self) -> Option<StoreError> {
        let release =
            self.pending_releases.iter().find(|release| self.blocking_release == Some(release.id.sequence()))?;
        release.error.clone()
    }

    /// When those who wait for a give-back are told that nobody knows whose the key is.
    pub(super) fn blocking_release_timeout_at(&self, timeout: Duration) -> Option<BootInstant> {
        let release =
            self.pending_releases.iter().find(|release| self.blocking_release == Some(release.id.sequence()))?;
        (!self.queue.is_empty()).then(|| release.times_out_at(timeout))
    }

    /// What is to be repeated is; what is over anyway is forgotten; whoever waited for long enough is told.
    pub(super) fn retry_due_releases(&mut self, env: &mut Env<'_, D>) {
        let now = env.now();
        let mut silent = None;
        let closing = self.blocking_release;
        self.pending_releases.retain(|release| {
            let closes = closing == Some(release.id.sequence());
            let gives_up =
                release.expires_at() <= now && release.awaited_acquire.is_none() && release.in_flight.is_none();
            if closes && (gives_up || release.times_out_at(env.store_timeout()) <= now) {
                let no_answer = || StoreError::new("lock", "release", StoreErrorKind::Timeout);
                silent = Some(release.error.clone().unwrap_or_else(no_answer));
            }
            if release.retry_at.is_some_and(|at| at <= now) && !gives_up {
                release.retry_at = None;
                send_release(release, env);
            }
            !gives_up
        });
        if let Some(error) = silent {
            self.blocking_release = None;
            if error.is_failover() {
                // The store is there: those who wait ask it whose the key is, until it can say so.
                self.reject_non_waiting(env, |_, _| error.clone().into());
                return self.start_attempt(env);
            }
            // No call for this key was answered for so long.
            self.reject_all(env, |_| error.clone().into());
        }
    }
}

/// I1: names the id that it gives back.
pub(super) fn send_release<D: DriverTypes>(release: &mut PendingRelease<D>, env: &mut Env<'_, D>) {
    if release.in_flight.is_none() {
        let call = env.store_call(&release.id, StoreOp::Release { block_for: release.block_for });
        release.in_flight = Some(call.number);
        release.sent_at = env.now();
        env.actions.push(Action::Send(call));
    }
}
