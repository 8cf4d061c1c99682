//! The store calls of one attempt: one at a time, and in doubt after a failure.

use std::time::Duration;

use crate::{
    clock::BootInstant,
    limits::{RETRY_MAX, RETRY_MIN},
    store::StoreError,
};

/// The calls of one attempt: at most one is under way at a time, and each ends: with an answer, or without one in time.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    /// Its number, and when it was made (I3).
    call: Option<(u64, BootInstant)>,
    /// What got no answer may still be done until this moment.
    pub(super) in_doubt_until: Option<BootInstant>,
    /// Since when the store has not answered, though it was asked.
    unanswered_since: Option<BootInstant>,
    /// The same for waiters: a failover error restarts it, because the store is there.
    unavailable_since: Option<BootInstant>,
    failures: u32,
    pub(super) error: Option<StoreError>,
}

impl InFlight {
    pub(super) fn start(&mut self, number: u64, now: BootInstant) {
        self.call = Some((number, now));
        self.unanswered_since.get_or_insert(now);
        self.unavailable_since.get_or_insert(now);
    }

    /// The number of the call that is under way.
    pub(super) fn number(&self) -> Option<u64> {
        self.call.map(|(number, _)| number)
    }

    /// When the call with this number was made; it is under way no longer. `None`: it is not ours.
    pub(super) fn finish(&mut self, number: u64) -> Option<BootInstant> {
        let (_, asked) = self.call.take_if(|(under_way, _)| *under_way == number)?;
        Some(asked)
    }

    /// There was an answer.
    pub(super) fn succeeded(&mut self) {
        self.unanswered_since = None;
        self.unavailable_since = None;
        self.failures = 0;
        self.error = None;
    }

    /// When it is not worth to ask on, after a first failure: for a request that waits, or for one
    /// that does not.
    pub(super) fn fails_at(&self, waits: bool, timeout: Duration) -> Option<BootInstant> {
        self.error.as_ref()?;
        let since = if waits { self.unavailable_since } else { self.unanswered_since };
        Some(since?.saturating_add(timeout))
    }

    /// Why it is not worth to ask on, at this moment.
    pub(super) fn failure_at(&self, now: BootInstant, waits: bool, timeout: Duration) -> Option<StoreError> {
        self.error.clone().filter(|_| self.fails_at(waits, timeout).is_some_and(|at| at <= now))
    }

    /// There was none, so that it may still be done. When to ask again.
    pub(super) fn failed(
        &mut self,
        error: &StoreError,
        asked: BootInstant,
        call_timeout: Duration,
        now: BootInstant,
        die: f64,
    ) -> BootInstant {
        self.error = Some(error.clone());
        let void_at = asked.saturating_add(call_timeout);
        self.in_doubt_until = Some(self.in_doubt_until.map_or(void_at, |earlier| earlier.max(void_at)));
        self.unanswered_since.get_or_insert(asked);
        if error.is_failover() {
            self.unavailable_since = None;
        } else {
            self.unavailable_since.get_or_insert(asked);
        }
        self.failures += 1;
        now.saturating_add(backoff(self.failures, die))
    }
}

/// How long to wait after so many failures in a row: doubled each time, and spread.
pub(super) fn backoff(failures: u32, die: f64) -> Duration {
    let doubled = RETRY_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(RETRY_MAX).mul_f64(1.0 + die).min(RETRY_MAX)
}
