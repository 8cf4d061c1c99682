//! The functions of this module without the features `metrics` and `tracing`: they do nothing.

#[cfg(not(feature = "metrics"))]
pub(crate) use self::metrics::*;
#[cfg(not(any(feature = "tracing", feature = "metrics")))]
pub(crate) use self::reports::*;

#[cfg(not(feature = "metrics"))]
#[expect(clippy::unused_self, reason = "the signatures are those with the feature")]
mod metrics {
    use std::{sync::Arc, time::Duration};

    use crate::error::LockError;

    #[derive(Debug)]
    pub(crate) struct AcquireMetrics(());

    #[derive(Debug)]
    pub(crate) struct GuardMetrics(());

    #[derive(Debug, Default)]
    pub(crate) struct SectionMetrics(());

    #[derive(Debug)]
    pub(crate) struct DetachedMetrics(());

    pub(crate) fn describe() {}

    pub(crate) fn count_replay(_: Option<Arc<str>>, _: &'static str) {}

    impl AcquireMetrics {
        pub(crate) fn start(_: Option<&Arc<str>>) -> Self {
            Self(())
        }

        pub(crate) fn granted(self, _: &SectionMetrics) -> GuardMetrics {
            GuardMetrics(())
        }

        pub(crate) fn rejected(self, _: &LockError) {}

        pub(crate) fn recorded(self) {}
    }

    impl GuardMetrics {
        pub(crate) fn finish(&self, _: &SectionMetrics, _: impl FnOnce() -> Duration) {}
    }

    impl SectionMetrics {
        pub(crate) fn record_loss(&self) {}
    }

    impl DetachedMetrics {
        pub(crate) fn start() -> Self {
            Self(())
        }
    }
}

#[cfg(not(any(feature = "tracing", feature = "metrics")))]
mod reports {
    use tokio::runtime::Handle;

    use crate::telemetry::report::Report;

    #[derive(Debug, Default)]
    pub(crate) struct Reports(());

    impl Reports {
        #[expect(clippy::unused_self, reason = "the signature is that with a feature")]
        pub(crate) fn send(&self, _: Report, _: Option<&Handle>) {}
    }
}
