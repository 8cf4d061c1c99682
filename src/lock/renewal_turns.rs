//! The order in which a server gets the renewals that are due.
//!
//! A server may be too slow for all of them at once. The renewal whose lease ends first is sent
//! first, and one that cannot have its reply in time is sent last: otherwise each of them would be
//! a little too late, and all locks would be lost in place of a few.

use std::{sync::Arc, time::Duration};

use super::driver_data::Grant;
use crate::{
    clock::BootInstant,
    limits::{MAX_RENEWAL_CALLS, MAX_RENEWALS_PER_CALL},
    sync::Mutex,
};

/// The renewals at one server that wait for their turn.
#[derive(Debug, Default)]
pub(super) struct RenewalTurns(Mutex<Turns>);

#[derive(Debug, Default)]
struct Turns {
    /// Since when each renewal is due, in no order.
    waiting: Vec<(BootInstant, Arc<Grant>)>,
    /// Tasks that send calls, one after another.
    callers: usize,
    /// How long the last call took that had a reply.
    latency: Duration,
}

/// The renewals of one call.
pub(super) struct Turn {
    pub(super) grants: Vec<Arc<Grant>>,
    /// The longest wait of all renewals at this server, also of those that go on waiting.
    pub(super) waited: Duration,
}

impl RenewalTurns {
    /// Adds a renewal that is due.
    pub(super) fn push(&self, now: BootInstant, grant: Arc<Grant>) {
        self.0.lock().waiting.push((now, grant));
    }

    /// How many tasks to start. Each of them calls [`next`](Self::next) until there is nothing.
    pub(super) fn missing_callers(&self) -> usize {
        let mut turns = self.0.lock();
        let calls = turns.waiting.len().div_ceil(MAX_RENEWALS_PER_CALL);
        let missing = calls.min(MAX_RENEWAL_CALLS - turns.callers);
        turns.callers += missing;
        missing
    }

    /// The renewals of the next call. `None`: nothing waits, and the task ends.
    pub(super) fn next(&self, now: BootInstant) -> Option<Turn> {
        let mut turns = self.0.lock();
        // Released or lost while it waited.
        turns.waiting.retain(|(_, grant)| !grant.remaining(now).is_zero());
        if turns.waiting.is_empty() {
            turns.callers -= 1;
            return None;
        }
        let Turns { waiting, latency, .. } = &mut *turns;
        let waited = waiting.iter().map(|(since, _)| now.saturating_duration_since(*since)).max().unwrap_or_default();
        let urgency = |(_, grant): &(BootInstant, Arc<Grant>)| {
            let remaining = grant.remaining(now);
            (remaining <= *latency, remaining)
        };
        let count = waiting.len().min(MAX_RENEWALS_PER_CALL);
        waiting.select_nth_unstable_by_key(count - 1, urgency);
        let grants = waiting.drain(..count).map(|(_, grant)| grant).collect();
        Some(Turn { grants, waited })
    }

    /// Notes how long a call took.
    pub(super) fn replied_after(&self, latency: Duration) {
        self.0.lock().latency = latency;
    }

    /// A task was dropped with its runtime.
    pub(super) fn caller_dropped(&self) {
        self.0.lock().callers -= 1;
    }
}

impl Drop for RenewalTurns {
    fn drop(&mut self) {
        // Dropped with the watchdog: another one sends them.
        for (since, grant) in &self.0.lock().waiting {
            grant.renewal_finished(*since);
        }
    }
}
