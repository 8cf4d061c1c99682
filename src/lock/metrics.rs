//! What an operator counts of locks: the feature `metrics`. Without it nothing of this is left.
//!
//! Labels are routes and verbs, never keys.

#[cfg(feature = "metrics")]
mod enabled {
    use std::{sync::Arc, time::Duration};

    use metrics::{counter, gauge, histogram};
    use tokio::time::Instant;

    use crate::{
        lock::LockError,
        store::{StoreError, StoreErrorKind},
    };

    /// One call, from its question to its answer.
    #[derive(Debug)]
    pub(in crate::lock) struct Waiting {
        route: Arc<str>,
        began: Instant,
        is_told: bool,
    }

    /// One section, as long as it runs.
    #[derive(Debug)]
    pub(in crate::lock) struct Holding {
        began: Instant,
    }

    /// One handler that finishes without its client.
    #[derive(Debug)]
    pub(in crate::lock) struct Detached(());

    impl Waiting {
        pub(in crate::lock) fn begins(route: Option<&Arc<str>>) -> Self {
            gauge!("tower_lock_waiting").increment(1);
            Self { route: route.cloned().unwrap_or_else(|| "none".into()), began: Instant::now(), is_told: false }
        }

        pub(in crate::lock) fn granted(&mut self) {
            self.ends("granted");
            histogram!("tower_lock_wait_seconds").record(self.began.elapsed());
        }

        pub(in crate::lock) fn refused(&mut self, error: &LockError) {
            self.ends(match error {
                LockError::Held { .. } | LockError::HeldByParentRequest => "refused",
                LockError::TimedOut { .. } => "timed_out",
                LockError::LineFull { .. } => "line_full",
                LockError::Store(_) => "store_unavailable",
                LockError::ShuttingDown => "shutting_down",
            });
        }

        fn ends(&mut self, result: &'static str) {
            self.is_told = true;
            counter!("tower_lock_acquire_total", "route" => self.route.to_string(), "result" => result).increment(1);
        }
    }

    impl Drop for Waiting {
        fn drop(&mut self) {
            if !self.is_told {
                self.ends("cancelled");
            }
            gauge!("tower_lock_waiting").decrement(1);
        }
    }

    impl Holding {
        pub(in crate::lock) fn begins() -> Self {
            gauge!("tower_lock_held").increment(1);
            Self { began: Instant::now() }
        }

        /// Once.
        pub(in crate::lock) fn ends(&self) {
            histogram!("tower_lock_hold_seconds").record(self.began.elapsed());
            gauge!("tower_lock_held").decrement(1);
        }
    }

    impl Detached {
        pub(in crate::lock) fn begins() -> Self {
            gauge!("tower_lock_detached").increment(1);
            Self(())
        }
    }

    impl Drop for Detached {
        fn drop(&mut self) {
            gauge!("tower_lock_detached").decrement(1);
        }
    }

    pub(in crate::lock) fn lost() {
        counter!("tower_lock_lost_total").increment(1);
    }

    /// With how much of its lease left a grant was renewed.
    pub(in crate::lock) fn renewed(left: Duration) {
        histogram!("tower_lock_renew_margin_seconds").record(left);
    }

    pub(in crate::lock) fn store_answered<T>(verb: &'static str, answer: &Result<T, StoreError>) {
        if let Err(error) = answer {
            let kind = match error.kind() {
                StoreErrorKind::Unavailable => "unavailable",
                StoreErrorKind::Timeout => "timeout",
                StoreErrorKind::Refused => "refused",
                StoreErrorKind::Protocol => "protocol",
                StoreErrorKind::Failover => "failover",
                // The fault of a key, which a client may have chosen: no failure of the store.
                StoreErrorKind::InvalidKey => return,
            };
            counter!("tower_lock_store_errors_total", "op" => verb, "kind" => kind).increment(1);
        }
    }
}

#[cfg(not(feature = "metrics"))]
#[expect(clippy::unused_self, clippy::needless_pass_by_ref_mut, reason = "the same calls as with the feature")]
mod disabled {
    use std::{sync::Arc, time::Duration};

    use crate::{lock::LockError, store::StoreError};

    #[derive(Debug)]
    pub(in crate::lock) struct Waiting(());

    #[derive(Debug)]
    pub(in crate::lock) struct Holding(());

    #[derive(Debug)]
    pub(in crate::lock) struct Detached(());

    impl Waiting {
        pub(in crate::lock) fn begins(_: Option<&Arc<str>>) -> Self {
            Self(())
        }

        pub(in crate::lock) fn granted(&mut self) {}

        pub(in crate::lock) fn refused(&mut self, _: &LockError) {}
    }

    impl Holding {
        pub(in crate::lock) fn begins() -> Self {
            Self(())
        }

        pub(in crate::lock) fn ends(&self) {}
    }

    impl Detached {
        pub(in crate::lock) fn begins() -> Self {
            Self(())
        }
    }

    pub(in crate::lock) fn lost() {}

    pub(in crate::lock) fn renewed(_: Duration) {}

    pub(in crate::lock) fn store_answered<T>(_: &'static str, _: &Result<T, StoreError>) {}
}

#[cfg(not(feature = "metrics"))]
pub(super) use disabled::*;
#[cfg(feature = "metrics")]
pub(super) use enabled::*;
