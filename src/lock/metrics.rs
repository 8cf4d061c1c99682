//! What an operator counts of locks: the feature `metrics`. Without it nothing of this is left.
//!
//! Labels are routes and verbs, never keys.

#[cfg(feature = "metrics")]
mod enabled {
    use std::{sync::Arc, time::Duration};

    use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
    use tokio::time::Instant;

    use crate::{
        clock::BootInstant,
        error::LockError,
        lock::{
            attached::{Section, SectionData},
            reports::{Report, quietly},
        },
        store::StoreErrorKind,
    };

    /// One call, from its question to its answer.
    #[derive(Debug)]
    pub(in crate::lock) struct Waiting {
        route: Arc<str>,
        began: Instant,
        is_told: bool,
    }

    /// One guard, as long as somebody has it.
    #[derive(Debug)]
    pub(in crate::lock) struct Holding {
        route: Arc<str>,
    }

    /// One handler that finishes without its client.
    #[derive(Debug)]
    pub(in crate::lock) struct Detached(());

    /// Says what each of them means, to the recorder that is there when a handle is made.
    pub(in crate::lock) fn describe() {
        quietly(|| {
            describe_gauge!("tower_lock_waiting", Unit::Count, "Calls that wait for a lock.");
            describe_counter!("tower_lock_acquire_total", Unit::Count, "Calls for a lock, by route and result.");
            describe_histogram!(
                "tower_lock_wait_seconds",
                Unit::Seconds,
                "How long a call waited before its lock was acquired or it was rejected, by route and result."
            );
            describe_gauge!("tower_lock_held", Unit::Count, "Locks that are held.");
            describe_histogram!("tower_lock_hold_seconds", Unit::Seconds, "How long a lock was held, by route.");
            describe_counter!("tower_lock_lost_total", Unit::Count, "Locks that were lost before they were released.");
            describe_histogram!(
                "tower_lock_renew_margin_seconds",
                Unit::Seconds,
                "How much of its lease was left when a lock was renewed."
            );
            describe_counter!(
                "tower_lock_store_errors_total",
                Unit::Count,
                "Calls of the store that had no answer, by operation and kind."
            );
            describe_gauge!("tower_lock_detached", Unit::Count, "Handlers that finish though their client has left.");
        });
    }

    impl Waiting {
        pub(in crate::lock) fn begins(route: Option<&Arc<str>>) -> Self {
            quietly(|| gauge!("tower_lock_waiting").increment(1));
            Self { route: route.cloned().unwrap_or_else(|| "none".into()), began: Instant::now(), is_told: false }
        }

        pub(in crate::lock) fn granted(mut self, section: &Section) -> Holding {
            self.ends("granted");
            if section.data.add_guard() {
                quietly(|| gauge!("tower_lock_held").increment(1));
            }
            Holding { route: Arc::clone(&self.route) }
        }

        pub(in crate::lock) fn refused(mut self, error: &LockError) {
            self.ends(match error {
                LockError::Busy { .. } | LockError::WouldDeadlock => "refused",
                LockError::TimedOut { .. } => "timed_out",
                LockError::QueueFull { .. } => "line_full",
                LockError::Store(_) => "store_unavailable",
                LockError::ShuttingDown => "shutting_down",
            });
        }

        fn ends(&mut self, result: &'static str) {
            self.is_told = true;
            let waited = self.began.elapsed();
            quietly(|| {
                counter!("tower_lock_acquire_total", "route" => Arc::clone(&self.route), "result" => result)
                    .increment(1);
                histogram!("tower_lock_wait_seconds", "route" => Arc::clone(&self.route), "result" => result)
                    .record(waited);
            });
        }
    }

    impl Drop for Waiting {
        fn drop(&mut self) {
            if !self.is_told {
                self.ends("cancelled");
            }
            quietly(|| gauge!("tower_lock_waiting").decrement(1));
        }
    }

    impl Holding {
        /// Once. The last guard of its section counts it.
        pub(in crate::lock) fn ends(&self, section: &Section, now: BootInstant) {
            lost(section);
            if section.data.remove_guard() {
                let held = now.saturating_duration_since(section.began);
                quietly(|| {
                    histogram!("tower_lock_hold_seconds", "route" => Arc::clone(&self.route)).record(held);
                    gauge!("tower_lock_held").decrement(1);
                });
            }
        }
    }

    impl Detached {
        pub(in crate::lock) fn begins() -> Self {
            quietly(|| gauge!("tower_lock_detached").increment(1));
            Self(())
        }
    }

    impl Drop for Detached {
        fn drop(&mut self) {
            quietly(|| gauge!("tower_lock_detached").decrement(1));
        }
    }

    /// Counts a section that is lost, once: where it is noticed by whoever works under it, and not where locks are kept.
    pub(in crate::lock) fn lost(section: &Section) {
        if SectionData::loss_to_count(section) {
            quietly(|| counter!("tower_lock_lost_total").increment(1));
        }
    }

    /// What is counted in the background.
    pub(in crate::lock) fn report(report: &Report) {
        match report {
            Report::Renewed(left) => renewed(*left),
            Report::StoreFailed { operation, kind } => {
                let kind = match kind {
                    StoreErrorKind::Unavailable => "unavailable",
                    StoreErrorKind::Timeout => "timeout",
                    StoreErrorKind::Refused => "refused",
                    StoreErrorKind::Failover => "failover",
                    StoreErrorKind::Protocol => "protocol",
                    // The fault of a key, which a client may have chosen: no failure of the store.
                    StoreErrorKind::InvalidKey => return,
                };
                counter!("tower_lock_store_errors_total", "op" => *operation, "kind" => kind).increment(1);
            }
            _ => {}
        }
    }

    fn renewed(left: Duration) {
        histogram!("tower_lock_renew_margin_seconds").record(left);
    }
}

#[cfg(not(feature = "metrics"))]
#[expect(clippy::unused_self, reason = "the same calls as with the feature")]
mod disabled {
    use std::sync::Arc;

    use crate::{clock::BootInstant, error::LockError, lock::attached::Section};

    #[derive(Debug)]
    pub(in crate::lock) struct Waiting(());

    #[derive(Debug)]
    pub(in crate::lock) struct Holding(());

    #[derive(Debug)]
    pub(in crate::lock) struct Detached(());

    pub(in crate::lock) fn describe() {}

    impl Waiting {
        pub(in crate::lock) fn begins(_: Option<&Arc<str>>) -> Self {
            Self(())
        }

        pub(in crate::lock) fn granted(self, _: &Section) -> Holding {
            Holding(())
        }

        pub(in crate::lock) fn refused(self, _: &LockError) {}
    }

    impl Holding {
        pub(in crate::lock) fn ends(&self, _: &Section, _: BootInstant) {}
    }

    impl Detached {
        pub(in crate::lock) fn begins() -> Self {
            Self(())
        }
    }

    pub(in crate::lock) fn lost(_: &Section) {}
}

#[cfg(not(feature = "metrics"))]
pub(super) use disabled::*;
#[cfg(feature = "metrics")]
pub(super) use enabled::*;
