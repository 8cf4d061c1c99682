//! Metrics of the `metrics` facade. Without the feature `metrics` nothing of this remains.
//!
//! Labels are routes, results, operations and kinds of errors, never keys.

#[cfg(feature = "metrics")]
mod enabled {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicU32, Ordering},
        },
        time::Duration,
    };

    use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
    use tokio::time::Instant;

    use crate::{background::isolated, error::LockError, store::StoreErrorKind, telemetry::report::Report};

    /// One call for a lock, from its first poll to its result.
    #[derive(Debug)]
    pub(crate) struct AcquireMetrics {
        route: Arc<str>,
        /// By a replay layer, which counts its requests itself.
        is_claim: bool,
        started: Instant,
        is_recorded: bool,
    }

    /// One guard.
    #[derive(Debug)]
    pub(crate) struct GuardMetrics {
        /// `None`: of a claim, or of a further one of several keys.
        route: Option<Arc<str>>,
    }

    /// Counters of one section, which all of its guards share.
    #[derive(Debug, Default)]
    pub(crate) struct SectionMetrics {
        guards: AtomicU32,
    }

    /// The operations of a store that are counted if they fail.
    const STORE_OPERATIONS: [&str; 4] = ["acquire", "release", "renew", "yield"];
    const STORE_ERROR_KINDS: [&str; 6] = ["unavailable", "timeout", "overloaded", "refused", "failover", "protocol"];

    // Each metric and its description. The end of a name is its unit.

    const GAUGES: [(&str, &str); 6] = [
        ("tower_lock_waiting", "Calls that wait for a lock."),
        ("tower_lock_held", "Locks that are held."),
        ("tower_lock_permits", "Permits and reads that are held, by route."),
        ("tower_lock_detached", "Handlers that finish although their client has disconnected."),
        ("tower_lock_lease_seconds", "The lease of the manager that was built last."),
        (
            "tower_lock_max_detached",
            "How many handlers may finish without their client, of the manager that was built last.",
        ),
    ];

    const COUNTERS: [(&str, &str); 6] = [
        ("tower_lock_acquire_total", "Calls for a lock, by route and result."),
        ("tower_lock_lost_total", "Locks that were lost before they were released."),
        ("tower_lock_records_lost_total", "Records that the store had not confirmed when their lease had ended."),
        ("tower_lock_store_errors_total", "Calls of the store that failed or timed out, by operation and kind."),
        ("tower_lock_replay_total", "Requests with an idempotency key, by route and result."),
        (
            "tower_lock_blocked_milliseconds_total",
            "How long requests have waited for the section before theirs, by the route of that section.",
        ),
    ];

    const HISTOGRAMS: [(&str, &str); 3] = [
        (
            "tower_lock_wait_seconds",
            "How long a call waited before its lock was acquired or it was rejected, by route and result.",
        ),
        ("tower_lock_hold_seconds", "How long a lock was held, by route."),
        ("tower_lock_renew_margin_seconds", "How much of its lease was left when a lock was renewed."),
    ];

    /// Describes each metric to the recorder that is installed when a manager is built, and exports
    /// its settings and what is zero: `increase()` does not see the first event of a counter that
    /// begins with it.
    pub(crate) fn register(lease: Duration, max_detached: usize) {
        isolated(|| {
            counter!("tower_lock_lost_total").increment(0);
            counter!("tower_lock_records_lost_total").increment(0);
            for op in STORE_OPERATIONS {
                for kind in STORE_ERROR_KINDS {
                    counter!("tower_lock_store_errors_total", "op" => op, "kind" => kind).increment(0);
                }
            }
            // Not `set`: another manager of the process may hold locks already.
            gauge!("tower_lock_held").increment(0);
            gauge!("tower_lock_permits", "route" => "none").increment(0);
            gauge!("tower_lock_waiting").increment(0);
            gauge!("tower_lock_detached").increment(0);
            gauge!("tower_lock_lease_seconds").set(lease);
            gauge!("tower_lock_max_detached").set(max_detached as f64);
        });
        register_route("none");
        describe();
    }

    /// Exports the counters of a route that alerts use, with zero.
    pub(crate) fn register_route(route: &str) {
        isolated(|| {
            counter!("tower_lock_acquire_total", "route" => route.to_owned(), "result" => "queue_full").increment(0);
        });
    }

    fn describe() {
        let unit = |name: &str| if name.ends_with("_seconds") { Unit::Seconds } else { Unit::Count };
        isolated(|| {
            for (name, text) in GAUGES {
                describe_gauge!(name, unit(name), text);
            }
            for (name, text) in COUNTERS {
                describe_counter!(name, unit(name), text);
            }
            for (name, text) in HISTOGRAMS {
                describe_histogram!(name, unit(name), text);
            }
        });
    }

    /// Counts a request of a replay layer.
    pub(crate) fn count_replay(route: &str, result: &'static str) {
        isolated(|| counter!("tower_lock_replay_total", "route" => route.to_owned(), "result" => result).increment(1));
    }

    /// Counts the time that a call has waited for the section before.
    pub(crate) fn count_blocked(by: &str, ms: u64) {
        isolated(|| counter!("tower_lock_blocked_milliseconds_total", "by" => by.to_owned()).increment(ms));
    }

    /// Counts a handler that finishes without its client.
    pub(crate) fn detached_started() {
        isolated(|| gauge!("tower_lock_detached").increment(1));
    }

    pub(crate) fn detached_ended() {
        isolated(|| gauge!("tower_lock_detached").decrement(1));
    }

    impl AcquireMetrics {
        pub(crate) fn start(route: &str, is_claim: bool) -> Self {
            isolated(|| gauge!("tower_lock_waiting").increment(1));
            Self { route: route.into(), is_claim, started: Instant::now(), is_recorded: false }
        }

        /// Counts the hold of the call as that of this guard, the first one of its keys. Returns
        /// whether the permit is counted, too: that of a section counts once.
        pub(crate) fn granted(mut self, guard: &mut GuardMetrics, section: &SectionMetrics, is_permit: bool) -> bool {
            self.record("granted");
            guard.route = (!self.is_claim).then(|| Arc::clone(&self.route));
            let counts_permit = is_permit && section.guards.load(Ordering::Acquire) == 1;
            if counts_permit {
                isolated(|| gauge!("tower_lock_permits", "route" => Arc::clone(&self.route)).increment(1));
            }
            counts_permit
        }

        pub(crate) fn rejected(mut self, error: &LockError) {
            self.record(error.result());
        }

        pub(crate) fn recorded(mut self) {
            self.record("recorded");
        }

        fn record(&mut self, result: &'static str) {
            self.is_recorded = true;
            // A replayed request is no rejected one, and a request has one lock of its route.
            if self.is_claim && matches!(result, "granted" | "recorded" | "locked" | "timed_out") {
                return;
            }
            let waited = self.started.elapsed();
            isolated(|| {
                counter!("tower_lock_acquire_total", "route" => Arc::clone(&self.route), "result" => result)
                    .increment(1);
                histogram!("tower_lock_wait_seconds", "route" => Arc::clone(&self.route), "result" => result)
                    .record(waited);
            });
        }
    }

    impl Drop for AcquireMetrics {
        fn drop(&mut self) {
            if !self.is_recorded {
                self.record("cancelled");
            }
            isolated(|| gauge!("tower_lock_waiting").decrement(1));
        }
    }

    impl GuardMetrics {
        /// A guard that is counted as held, and not as a call.
        pub(crate) fn new(section: &SectionMetrics) -> Self {
            if section.guards.fetch_add(1, Ordering::AcqRel) == 0 {
                isolated(|| gauge!("tower_lock_held").increment(1));
            }
            Self { route: None }
        }

        /// Called once for each guard. The last guard of its section records how long it was held.
        pub(crate) fn finish(
            &self,
            section: &SectionMetrics,
            counts_permit: bool,
            held_for: impl FnOnce() -> Duration,
        ) {
            if let Some(route) = self.route.as_ref().filter(|_| counts_permit) {
                isolated(|| gauge!("tower_lock_permits", "route" => Arc::clone(route)).decrement(1));
            }
            if section.guards.fetch_sub(1, Ordering::AcqRel) == 1 {
                let held_for = held_for();
                isolated(|| {
                    if let Some(route) = &self.route {
                        histogram!("tower_lock_hold_seconds", "route" => Arc::clone(route)).record(held_for);
                    }
                    gauge!("tower_lock_held").decrement(1);
                });
            }
        }
    }

    /// Records a report of a background task.
    pub(crate) fn record(report: &Report) {
        match report {
            Report::Lost { .. } => counter!("tower_lock_lost_total").increment(1),
            Report::RecordLost { .. } => counter!("tower_lock_records_lost_total").increment(1),
            Report::Renewed { margins } => {
                let histogram = histogram!("tower_lock_renew_margin_seconds");
                margins.iter().for_each(|margin| histogram.record(*margin));
            }
            Report::StoreFailed { operation, kind } => {
                let kind = match kind {
                    StoreErrorKind::Unavailable => "unavailable",
                    StoreErrorKind::Timeout => "timeout",
                    StoreErrorKind::Overloaded => "overloaded",
                    StoreErrorKind::Refused => "refused",
                    StoreErrorKind::Failover => "failover",
                    StoreErrorKind::Protocol => "protocol",
                    // An error of the key, which a client may have chosen. The store has not
                    // failed.
                    StoreErrorKind::InvalidKey => return,
                    // An error of the caller.
                    StoreErrorKind::Unsupported => return,
                };
                counter!("tower_lock_store_errors_total", "op" => *operation, "kind" => kind).increment(1);
            }
            _ => {}
        }
    }
}

/// The same functions without the feature: they do nothing.
#[cfg(not(feature = "metrics"))]
#[expect(clippy::unused_self, reason = "the signatures are those with the feature")]
mod disabled {
    use std::time::Duration;

    use crate::{error::LockError, telemetry::report::Report};

    #[derive(Debug)]
    pub(crate) struct AcquireMetrics(());

    #[derive(Debug)]
    pub(crate) struct GuardMetrics(());

    #[derive(Debug, Default)]
    pub(crate) struct SectionMetrics(());

    pub(crate) fn register(_: Duration, _: usize) {}

    pub(crate) fn register_route(_: &str) {}

    pub(crate) fn record(_: &Report) {}

    pub(crate) fn count_replay(_: &str, _: &'static str) {}

    pub(crate) fn count_blocked(_: &str, _: u64) {}

    pub(crate) fn detached_started() {}

    pub(crate) fn detached_ended() {}

    impl AcquireMetrics {
        pub(crate) fn start(_: &str, _: bool) -> Self {
            Self(())
        }

        pub(crate) fn granted(self, _: &mut GuardMetrics, _: &SectionMetrics, _: bool) -> bool {
            false
        }

        pub(crate) fn rejected(self, _: &LockError) {}

        pub(crate) fn recorded(self) {}
    }

    impl GuardMetrics {
        pub(crate) fn new(_: &SectionMetrics) -> Self {
            Self(())
        }

        pub(crate) fn finish(&self, _: &SectionMetrics, _: bool, _: impl FnOnce() -> Duration) {}
    }
}

#[cfg(not(feature = "metrics"))]
pub(crate) use disabled::*;
#[cfg(feature = "metrics")]
pub(crate) use enabled::*;
