//! What an operator sees of one request: the span `lock`.
//!
//! Without the feature `tracing` nothing of it is left.

use std::{fmt::Display, time::Duration};

use http::StatusCode;

use super::route::Route;
use crate::{
    error::{LockError, LockLost},
    fencing::FencingToken,
    lock_key::LockKey,
};

/// The span of one request that needs a lock, from its key to the end of its section.
///
/// Dropped without a result, the client had left the line.
#[derive(Debug)]
pub(crate) struct LockSpan {
    #[cfg(feature = "tracing")]
    span: tracing::Span,
    #[cfg(feature = "tracing")]
    has_result: bool,
}

/// The span that is current where a future is made, for when it moves to a task.
#[derive(Debug)]
pub(crate) struct SpanAround(#[cfg(feature = "tracing")] tracing::Span);

impl SpanAround {
    pub(crate) fn current() -> Self {
        Self(
            #[cfg(feature = "tracing")]
            tracing::Span::current(),
        )
    }

    #[cfg(feature = "tracing")]
    pub(crate) fn around<F>(&self, future: F) -> tracing::instrument::Instrumented<F> {
        tracing::Instrument::instrument(future, self.0.clone())
    }

    #[cfg(not(feature = "tracing"))]
    #[expect(clippy::unused_self, reason = "the same call as with the feature")]
    pub(crate) fn around<F>(&self, future: F) -> F {
        future
    }
}

#[cfg(feature = "tracing")]
mod enabled {
    use std::future::Future;

    use tracing::{Instrument, field::Empty, instrument::Instrumented};

    use super::{Display, Duration, FencingToken, LockError, LockKey, LockLost, LockSpan, Route, StatusCode};

    impl LockSpan {
        pub(crate) fn waiting(route: &Route, key: &LockKey, shows_key: bool) -> Self {
            let span = open(route);
            if !span.is_disabled() {
                if shows_key {
                    span.record("key", key.as_str());
                } else {
                    span.record("key", key.redacted());
                }
            }
            Self { span, has_result: false }
        }

        /// The span of a request that was rejected before its lock was asked for.
        pub(crate) fn without_key(route: &Route, result: &'static str, status: StatusCode, extractor: Option<&str>) {
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

        pub(crate) fn granted(&mut self, waited: Duration, depth: impl FnOnce() -> u32, fence: FencingToken) {
            self.result("granted");
            if !self.span.is_disabled() {
                self.span.record("wait_ms", millis(waited)).record("depth", depth()).record("fence", fence.as_u64());
            }
        }

        pub(crate) fn turned_away(&mut self, error: &LockError, waited: Duration) {
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

        pub(crate) fn lost(&self, why: LockLost) {
            self.span.record("result", if why == LockLost::HoldLimitReached { "max_hold" } else { "lost" });
            tracing::warn!(target: "tower_lock", parent: &self.span, "a request was broken off: {why}");
        }

        /// The lock was lost before it was given back, and what ran under it has ended all the same.
        pub(crate) fn late(&self) {
            self.span.record("result", "lost");
            tracing::warn!(target: "tower_lock", parent: &self.span, "given back late: the lock was not ours any more");
        }

        pub(crate) fn unheard(&self) {
            self.span.record("result", "cancelled");
            tracing::debug!(target: "tower_lock", parent: &self.span, "its client had gone when the lock was granted");
        }

        pub(crate) fn stalled(&self, why: impl Display) {
            tracing::warn!(target: "tower_lock", parent: &self.span, "an answer was cut, its reader is too slow: {why}");
        }

        pub(crate) fn ended(&self, hold: Duration) {
            self.span.record("hold_ms", millis(hold));
        }

        /// Runs the handler inside the span: what it logs is known by route, key and fence.
        pub(crate) fn around<F: Future>(&self, f: impl FnOnce() -> F) -> Instrumented<F> {
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

    use super::{Display, Duration, FencingToken, LockError, LockKey, LockLost, LockSpan, Route, StatusCode};

    #[expect(clippy::unused_self, clippy::needless_pass_by_ref_mut, reason = "the same calls as with the span")]
    impl LockSpan {
        pub(crate) fn waiting(_: &Route, _: &LockKey, _: bool) -> Self {
            Self {}
        }

        pub(crate) fn without_key(_: &Route, _: &'static str, _: StatusCode, _: Option<&str>) {}

        pub(crate) fn granted(&mut self, _: Duration, _: impl FnOnce() -> u32, _: FencingToken) {}

        pub(crate) fn turned_away(&mut self, _: &LockError, _: Duration) {}

        pub(crate) fn lost(&self, _: LockLost) {}

        pub(crate) fn late(&self) {}

        pub(crate) fn unheard(&self) {}

        pub(crate) fn stalled(&self, _: impl Display) {}

        pub(crate) fn ended(&self, _: Duration) {}

        pub(crate) fn around<F: Future>(&self, f: impl FnOnce() -> F) -> F {
            f()
        }
    }
}
