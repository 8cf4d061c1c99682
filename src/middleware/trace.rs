//! What an operator sees of one request: the span `lock`.
//!
//! Without the feature `tracing` nothing of it is left.

use std::{sync::Arc, time::Duration};

use http::{Extensions, StatusCode};

use super::pace::TooSlow;
use crate::{
    error::{LockError, LockLost},
    lock::LockGuard,
    lock_key::LockKey,
    policy::LockPolicy,
};

/// The span of one request that needs a lock, from its key to the end of its section.
///
/// Dropped without a result, the client had left the line.
#[derive(Debug)]
pub(super) struct LockSpan {
    #[cfg(feature = "tracing")]
    span: tracing::Span,
    #[cfg(feature = "tracing")]
    has_result: bool,
}

/// The span that is current where a future is made, for when it moves to a task.
#[derive(Debug)]
pub(super) struct SpanAround(#[cfg(feature = "tracing")] tracing::Span);

/// The route of a request: the path it matched, else the name the layer was given, else `none`. Never a path as the client
/// wrote it.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    #[cfg(feature = "axum")]
    matched: Option<axum::extract::MatchedPath>,
    name: Option<&'static str>,
}

impl Route {
    #[cfg_attr(not(feature = "axum"), expect(unused_variables, reason = "only a router knows what matched"))]
    pub(super) fn of(extensions: &Extensions, name: Option<&'static str>) -> Self {
        Self {
            #[cfg(feature = "axum")]
            matched: extensions.get().cloned(),
            name,
        }
    }

    /// What it is counted under.
    #[cfg(feature = "metrics")]
    #[expect(clippy::unnecessary_wraps, reason = "without the feature it is none")]
    pub(super) fn label(&self) -> Option<Arc<str>> {
        Some(self.as_str().into())
    }

    #[cfg(not(feature = "metrics"))]
    #[expect(clippy::unused_self, reason = "the same call as with the feature")]
    pub(super) fn label(&self) -> Option<Arc<str>> {
        None
    }

    pub(super) fn as_str(&self) -> &str {
        #[cfg(feature = "axum")]
        if let Some(matched) = &self.matched {
            return matched.as_str();
        }
        self.name.unwrap_or("none")
    }
}

impl SpanAround {
    pub(super) fn current() -> Self {
        Self(
            #[cfg(feature = "tracing")]
            tracing::Span::current(),
        )
    }

    #[cfg(feature = "tracing")]
    pub(super) fn around<F>(&self, future: F) -> tracing::instrument::Instrumented<F> {
        tracing::Instrument::instrument(future, self.0.clone())
    }

    #[cfg(not(feature = "tracing"))]
    #[expect(clippy::unused_self, reason = "the same call as with the feature")]
    pub(super) fn around<F>(&self, future: F) -> F {
        future
    }
}

#[cfg(feature = "tracing")]
mod enabled {
    use std::future::Future;

    use tracing::{Instrument, field::Empty, instrument::Instrumented};

    use super::{Duration, LockError, LockGuard, LockKey, LockLost, LockPolicy, LockSpan, Route, StatusCode, TooSlow};

    impl LockSpan {
        pub(in crate::middleware) fn waiting(route: &Route, key: &LockKey, policy: &LockPolicy) -> Self {
            let span = open(route);
            if !span.is_disabled() {
                if policy.shows_key() {
                    span.record("key", key.as_str());
                } else {
                    span.record("key", key.redacted());
                }
            }
            Self { span, has_result: false }
        }

        /// The span of a request that was rejected before its lock was asked for.
        pub(in crate::middleware) fn without_key(
            route: &Route,
            result: &'static str,
            status: StatusCode,
            extractor: Option<&str>,
        ) {
            let span = open(route);
            span.record("result", result);
            let status = status.as_u16();
            // So that a 422 of the key function is not looked for in the handler.
            match extractor {
                // The route lacks what the key function takes: a parameter of the path, an
                // extension.
                Some(extractor) if status >= 500 => tracing::error!(
                    target: "tower_lock",
                    parent: &span,
                    result,
                    status,
                    extractor,
                    "a request was rejected: no key could be derived for its lock",
                ),
                Some(extractor) => tracing::debug!(
                    target: "tower_lock",
                    parent: &span,
                    result,
                    status,
                    extractor,
                    "a request was rejected: no key could be derived for its lock",
                ),
                None => tracing::debug!(
                    target: "tower_lock",
                    parent: &span,
                    result,
                    status,
                    "a request was rejected before its lock was asked for",
                ),
            }
        }

        pub(in crate::middleware) fn granted(&mut self, guard: &LockGuard, waited: Duration) {
            self.result("granted");
            if !self.span.is_disabled() {
                self.span
                    .record("wait_ms", millis(waited))
                    .record("depth", guard.hold_count())
                    .record("fence", guard.fencing_token().as_u64());
            }
        }

        pub(in crate::middleware) fn turned_away(&mut self, error: &LockError, waited: Duration) {
            let result = match error {
                LockError::Busy { .. } | LockError::WouldDeadlock => "refused",
                LockError::TimedOut { .. } => "timed_out",
                LockError::QueueFull { .. } => "line_full",
                LockError::Store(_) => "store_unavailable",
                LockError::ShuttingDown => "shutting_down",
            };
            let wait_ms = millis(waited);
            self.result(result);
            self.span.record("wait_ms", wait_ms);
            tracing::debug!(target: "tower_lock", parent: &self.span, result, wait_ms, "a request was rejected: {error}");
        }

        pub(in crate::middleware) fn lost(&self, why: LockLost) {
            self.span.record("result", if why == LockLost::HoldLimitReached { "max_hold" } else { "lost" });
            tracing::warn!(target: "tower_lock", parent: &self.span, "a request was broken off: {why}");
        }

        /// The lock was lost before it was given back, and what ran under it has ended all the same.
        pub(in crate::middleware) fn late(&self) {
            self.span.record("result", "lost");
            tracing::warn!(target: "tower_lock", parent: &self.span, "given back late: the lock was not ours any more");
        }

        pub(in crate::middleware) fn unheard(&self) {
            self.span.record("result", "cancelled");
            tracing::debug!(target: "tower_lock", parent: &self.span, "its client had gone when the lock was granted");
        }

        pub(in crate::middleware) fn stalled(&self, why: TooSlow) {
            tracing::warn!(target: "tower_lock", parent: &self.span, "an answer was cut, its reader is too slow: {why}");
        }

        pub(in crate::middleware) fn ended(&self, hold: Duration) {
            self.span.record("hold_ms", millis(hold));
        }

        /// Runs the handler inside the span: what it logs is known by route, key and fence.
        pub(in crate::middleware) fn around<F: Future>(&self, f: impl FnOnce() -> F) -> Instrumented<F> {
            self.span.in_scope(f).instrument(self.span.clone())
        }

        fn result(&mut self, result: &'static str) {
            self.span.record("result", result);
            self.has_result = true;
        }
    }

    impl Drop for LockSpan {
        fn drop(&mut self) {
            if !self.has_result {
                self.span.record("result", "cancelled");
            }
        }
    }

    fn open(route: &Route) -> tracing::Span {
        tracing::info_span!(
            target: "tower_lock",
            "lock",
            route = route.as_str(),
            key = Empty,
            result = Empty,
            wait_ms = Empty,
            hold_ms = Empty,
            depth = Empty,
            fence = Empty,
        )
    }

    fn millis(duration: Duration) -> f64 {
        // To the microsecond: whoever reads it has seen enough digits.
        (duration.as_secs_f64() * 1e6).round() / 1e3
    }
}

#[cfg(not(feature = "tracing"))]
mod disabled {
    use std::future::Future;

    use super::{Duration, LockError, LockGuard, LockKey, LockLost, LockPolicy, LockSpan, Route, StatusCode, TooSlow};

    #[expect(clippy::unused_self, clippy::needless_pass_by_ref_mut, reason = "the same calls as with the span")]
    impl LockSpan {
        pub(in crate::middleware) fn waiting(_: &Route, _: &LockKey, _: &LockPolicy) -> Self {
            Self {}
        }

        pub(in crate::middleware) fn without_key(_: &Route, _: &'static str, _: StatusCode, _: Option<&str>) {}

        pub(in crate::middleware) fn granted(&mut self, _: &LockGuard, _: Duration) {}

        pub(in crate::middleware) fn turned_away(&mut self, _: &LockError, _: Duration) {}

        pub(in crate::middleware) fn lost(&self, _: LockLost) {}

        pub(in crate::middleware) fn late(&self) {}

        pub(in crate::middleware) fn unheard(&self) {}

        pub(in crate::middleware) fn stalled(&self, _: TooSlow) {}

        pub(in crate::middleware) fn ended(&self, _: Duration) {}

        pub(in crate::middleware) fn around<F: Future>(&self, f: impl FnOnce() -> F) -> F {
            f()
        }
    }
}
