//! The longest waits of the last minutes, for the console. Without the feature `console` nothing of
//! this remains.

#[cfg(feature = "console")]
mod enabled {
    use std::time::Duration;

    use tokio::time::Instant;

    use crate::{
        limits::{LONG_WAIT, LONG_WAIT_KEPT, MAX_LONG_WAITS},
        lock_key::LockKey,
        sync::Mutex,
        telemetry::route::Route,
    };

    /// The route of a call, which its wait is recorded with.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct CallRoute(Route);

    /// A wait that has not ended.
    #[derive(Debug)]
    pub(crate) struct OpenWait {
        route: CallRoute,
        started: Instant,
    }

    /// A wait that has ended.
    #[derive(Clone, Debug)]
    pub(crate) struct LongWait {
        pub(crate) route: Route,
        pub(crate) key: LockKey,
        pub(crate) waited: Duration,
        pub(crate) result: &'static str,
        pub(crate) ended: Instant,
    }

    /// The longest waits of one manager: a bounded number, for a bounded time (I11).
    #[derive(Debug, Default)]
    pub(crate) struct LongWaits(Mutex<Vec<LongWait>>);

    impl CallRoute {
        pub(crate) fn of(route: &Route) -> Self {
            Self(route.clone())
        }
    }

    impl OpenWait {
        pub(crate) fn start(route: CallRoute) -> Self {
            Self { route, started: Instant::now() }
        }
    }

    impl LongWaits {
        /// Records the end of a wait, if it was long.
        pub(crate) fn ended(&self, wait: OpenWait, key: &LockKey, result: &'static str) {
            let (ended, route) = (Instant::now(), wait.route.0);
            let waited = ended.saturating_duration_since(wait.started);
            if waited >= LONG_WAIT {
                self.insert(LongWait { route, key: key.clone(), waited, result, ended });
            }
        }

        fn insert(&self, wait: LongWait) {
            let mut waits = self.0.lock();
            waits.retain(|kept| wait.ended.saturating_duration_since(kept.ended) < LONG_WAIT_KEPT);
            let at = waits.partition_point(|kept| kept.waited >= wait.waited);
            waits.insert(at, wait);
            waits.truncate(MAX_LONG_WAITS);
        }

        /// The waits of the last minutes, the longest one first.
        pub(crate) fn list(&self) -> Vec<LongWait> {
            let now = Instant::now();
            let mut waits = self.0.lock().clone();
            waits.retain(|kept| now.saturating_duration_since(kept.ended) < LONG_WAIT_KEPT);
            waits
        }
    }
}

/// The same without the feature: nothing is recorded.
#[cfg(not(feature = "console"))]
mod disabled {
    use crate::{lock_key::LockKey, telemetry::route::Route};

    #[derive(Clone, Debug, Default)]
    pub(crate) struct CallRoute(());

    #[derive(Debug)]
    pub(crate) struct OpenWait(());

    #[derive(Debug, Default)]
    pub(crate) struct LongWaits(());

    impl CallRoute {
        pub(crate) fn of(_: &Route) -> Self {
            Self(())
        }
    }

    impl OpenWait {
        pub(crate) fn start(_: CallRoute) -> Self {
            Self(())
        }
    }

    impl LongWaits {
        #[expect(
            clippy::unused_self,
            clippy::needless_pass_by_value,
            reason = "the signature is that with the feature"
        )]
        pub(crate) fn ended(&self, _: OpenWait, _: &LockKey, _: &'static str) {}
    }
}

#[cfg(not(feature = "console"))]
pub(crate) use disabled::*;
#[cfg(feature = "console")]
pub(crate) use enabled::*;
