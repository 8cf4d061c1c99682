//! The store calls of one attempt: one at a time, and in doubt after a failure.

use std::time::Duration;

use crate::{
    clock::BootInstant,
    limits::{RETRY_MAX, RETRY_MIN},
    store::StoreError,
};

/// The call in flight of one attempt, and the failures of earlier ones.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    /// The number of the call in flight, and the instant at which it was sent (I3).
    call: Option<(u64, BootInstant)>,
    /// Most attempts have none.
    failures: Option<Box<Failures>>,
}

/// The calls of one attempt that had no reply.
#[derive(Debug, Default)]
struct Failures {
    /// A failed call may still be executed until this instant.
    in_doubt_until: Option<BootInstant>,
    /// The instant of the first call without a reply since the last success.
    unanswered_since: Option<BootInstant>,
    /// The number since the last success.
    count: u32,
    /// The last error since then.
    error: Option<StoreError>,
}

impl InFlight {
    pub(super) fn start(&mut self, number: u64, now: BootInstant) {
        self.call = Some((number, now));
        if let Some(failures) = &mut self.failures {
            failures.unanswered_since.get_or_insert(now);
        }
    }

    pub(super) fn number(&self) -> Option<u64> {
        self.call.map(|(number, _)| number)
    }

    /// Whether the call in flight was sent at least this long ago.
    pub(super) fn is_overdue(&self, now: BootInstant, limit: Duration) -> bool {
        self.call.is_some_and(|(_, sent_at)| now.saturating_duration_since(sent_at) >= limit)
    }

    /// Ends the call with this number, and returns the instant at which it was sent. Returns `None`
    /// for a call of another attempt.
    pub(super) fn finish(&mut self, number: u64) -> Option<BootInstant> {
        let (_, sent_at) = self.call.take_if(|(in_flight, _)| *in_flight == number)?;
        Some(sent_at)
    }

    /// Records a reply. A failed call stays in doubt.
    pub(super) fn succeeded(&mut self) {
        if let Some(failures) = &mut self.failures {
            **failures = Failures { in_doubt_until: failures.in_doubt_until, ..Failures::default() };
        }
    }

    /// A failed call may still be executed until this instant.
    pub(super) fn in_doubt_until(&self) -> Option<BootInstant> {
        self.failures.as_ref()?.in_doubt_until
    }

    /// The error of the last call, if it has failed.
    pub(super) fn error(&self) -> Option<&StoreError> {
        self.failures.as_ref()?.error.as_ref()
    }

    /// The instant at which requests without a wait are rejected. `None` before the first failure.
    pub(super) fn fails_at(&self, timeout: Duration) -> Option<BootInstant> {
        let failures = self.failures.as_ref().filter(|failures| failures.error.is_some())?;
        Some(failures.unanswered_since?.saturating_add(timeout))
    }

    /// The error to reject them with at `now`, if that instant has come.
    pub(super) fn failure_at(&self, now: BootInstant, timeout: Duration) -> Option<StoreError> {
        self.error().filter(|_| self.fails_at(timeout).is_some_and(|at| at <= now)).cloned()
    }

    /// Records a failure: a call that was sent is in doubt. Returns the instant of the retry.
    pub(super) fn failed(
        &mut self,
        error: &StoreError,
        sent_at: BootInstant,
        call_timeout: Duration,
        now: BootInstant,
        jitter: f64,
    ) -> BootInstant {
        let failures = self.failures.get_or_insert_default();
        failures.error = Some(error.clone());
        if !error.is_unsent() {
            let until = sent_at.saturating_add(call_timeout);
            failures.in_doubt_until = Some(failures.in_doubt_until.map_or(until, |earlier| earlier.max(until)));
        }
        failures.unanswered_since.get_or_insert(sent_at);
        failures.count += 1;
        now.saturating_add(backoff(failures.count, jitter))
    }
}

/// The delay after this number of failures in a row: doubled each time, with jitter.
pub(super) fn backoff(failures: u32, jitter: f64) -> Duration {
    let doubled = RETRY_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(RETRY_MAX).mul_f64(1.0 + jitter).min(RETRY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreErrorKind;

    const START: BootInstant = BootInstant::from_nanos(1 << 40);
    const CALL_TIMEOUT: Duration = Duration::from_millis(500);
    const TIMEOUT: Duration = Duration::from_secs(1);

    fn at(ms: u64) -> BootInstant {
        START.saturating_add(Duration::from_millis(ms))
    }

    fn fail(calls: &mut InFlight, kind: StoreErrorKind, sent_at: BootInstant) -> BootInstant {
        calls.start(1, sent_at);
        let sent_at = calls.finish(1).expect("in flight");
        calls.failed(&StoreError::new("test", "acquire", kind), sent_at, CALL_TIMEOUT, sent_at, 0.0)
    }

    #[test]
    fn only_the_call_in_flight_is_finished() {
        let mut calls = InFlight::default();
        calls.start(1, at(0));
        assert_eq!((calls.finish(2), calls.number()), (None, Some(1)));
        assert_eq!((calls.finish(1), calls.number()), (Some(at(0)), None));
    }

    #[test]
    fn a_failed_call_stays_in_doubt_for_the_limit_of_a_call() {
        let mut calls = InFlight::default();
        fail(&mut calls, StoreErrorKind::Unavailable, at(100));
        fail(&mut calls, StoreErrorKind::Unavailable, at(50));
        assert_eq!(calls.in_doubt_until(), Some(at(600)), "the doubt never shrinks");
        calls.succeeded();
        assert_eq!(calls.in_doubt_until(), Some(at(600)), "a later reply does not end it");
    }

    #[test]
    fn the_timeout_counts_from_the_first_call_without_a_reply() {
        let mut calls = InFlight::default();
        calls.start(1, at(0));
        assert_eq!(calls.fails_at(TIMEOUT), None, "no call has failed");
        fail(&mut calls, StoreErrorKind::Unavailable, at(0));
        fail(&mut calls, StoreErrorKind::Failover, at(300));
        assert_eq!(calls.fails_at(TIMEOUT), Some(at(1_000)));
        assert!(calls.failure_at(at(999), TIMEOUT).is_none());
        let error = calls.failure_at(at(1_000), TIMEOUT).expect("the last one");
        assert_eq!(error.kind(), StoreErrorKind::Failover);
        calls.succeeded();
        assert!(calls.failure_at(at(9_000), TIMEOUT).is_none());
    }

    #[test]
    fn the_backoff_is_doubled_up_to_its_bound() {
        let mut calls = InFlight::default();
        let retry_at = fail(&mut calls, StoreErrorKind::Unavailable, at(0));
        assert_eq!(retry_at, at(0).saturating_add(RETRY_MIN));
        assert_eq!(backoff(2, 0.0), RETRY_MIN * 2);
        assert_eq!((backoff(1_000, 0.0), backoff(1_000, 1.0)), (RETRY_MAX, RETRY_MAX));
        assert!(backoff(1, 0.5) > backoff(1, 0.0), "jitter");
    }
}
