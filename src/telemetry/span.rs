//! The span `lock` of one request.

use std::{
    borrow::Cow,
    fmt::Display,
    future::Future,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use http::StatusCode;
use tokio::time::Instant;
use tracing::{Instrument, Level, Span, field::Empty, instrument::Instrumented};

use super::route::Route;
use crate::{
    error::{LockError, LockLost},
    fencing::FencingToken,
    lock_key::LockKey,
    trace::SectionTrace,
};

/// The span of one request that needs a lock, from its key to its release.
///
/// It has one result, and the last one of a request that was granted: its lock may be lost. Dropped
/// without a result, the request was cancelled while it waited.
#[derive(Debug)]
pub(crate) struct LockSpan {
    span: Span,
    is_granted: bool,
    has_result: AtomicBool,
    /// `None` if nothing shows how long the request waits.
    started: Option<Instant>,
}

/// Why a request was rejected before its handler. The part of a key source is named, so that the
/// rejection is not attributed to the handler.
#[derive(Default)]
pub(crate) struct RejectionCause<'a> {
    /// An extractor of the key function.
    pub(crate) extractor: Option<&'a str>,
    /// A named field.
    pub(crate) field: Option<&'a str>,
    pub(crate) text: Cow<'static, str>,
}

impl RejectionCause<'_> {
    pub(crate) fn of(text: impl Into<Cow<'static, str>>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }
}

impl LockSpan {
    pub(crate) fn start(route: &Route, keys: &[LockKey], idempotency_key: Option<&str>, shows_key: bool) -> Self {
        let span = open(route);
        if !span.is_disabled() {
            match keys {
                [key] if shows_key => span.record("key", key.as_str()),
                keys => span.record("key", shown(keys, shows_key)),
            };
            if keys.len() > 1 {
                span.record("keys", keys.len());
            }
            if let Some(idempotency_key) = idempotency_key.filter(|_| shows_key) {
                span.record("idempotency_key", idempotency_key);
            }
        }
        let is_shown = !span.is_disabled() || tracing::enabled!(target: "tower_lock", Level::DEBUG);
        Self { span, is_granted: false, has_result: AtomicBool::new(false), started: is_shown.then(Instant::now) }
    }

    /// Records a request that was rejected before its lock was requested.
    pub(crate) fn rejected_before_lock(
        route: &Route,
        result: &'static str,
        status: StatusCode,
        cause: Option<RejectionCause<'_>>,
    ) {
        let span = open(route);
        span.record("result", result);
        let why = if cause.is_some() { ": " } else { " before its lock was requested" };
        let (is_mistake, status) = (cause.is_some() && status.is_server_error(), status.as_u16());
        let RejectionCause { extractor, field, text } = cause.unwrap_or_default();
        if is_mistake {
            // Of the service: the request has no such parameter or extension.
            tracing::error!(
                target: "tower_lock",
                parent: &span,
                result,
                status,
                extractor,
                field,
                "request rejected{why}{text}",
            );
        } else {
            tracing::debug!(
                target: "tower_lock",
                parent: &span,
                result,
                status,
                extractor,
                field,
                "request rejected{why}{text}",
            );
        }
    }

    /// Records that the request holds its key as one of at most this number.
    pub(crate) fn limit(&self, max_holders: u16) {
        self.span.record("limit", max_holders);
    }

    /// `depth_and_fence` are those of a request for one key. Only a request that holds its key
    /// alone has a fence.
    pub(crate) fn granted(&mut self, depth_and_fence: impl FnOnce() -> Option<(u32, Option<FencingToken>)>) {
        self.is_granted = true;
        if !self.span.is_disabled() {
            self.span.record("wait_ms", self.wait_ms());
            if let Some((depth, fence)) = depth_and_fence() {
                self.span.record("depth", depth).record("fence", fence.map(FencingToken::as_u64));
            }
        }
    }

    /// Which one of several keys was not acquired.
    pub(crate) fn not_acquired(&self, key: &LockKey, shows_key: bool) {
        let key = shown(std::slice::from_ref(key), shows_key);
        tracing::debug!(target: "tower_lock", parent: &self.span, key, "one of the keys of a request was not acquired");
    }

    /// `page` is that of the console about the key, relative to its address.
    pub(crate) fn rejected(&self, error: &LockError, page: Option<&str>) {
        let result = error.result();
        let wait_ms = self.wait_ms();
        self.result(result);
        self.span.record("wait_ms", wait_ms);
        let held_by = error.held_by();
        tracing::debug!(
            target: "tower_lock",
            parent: &self.span,
            result,
            wait_ms,
            page,
            held_by_route = held_by.map(SectionTrace::route),
            // The grant may be used by several sections of its process, one after another.
            held_by_trace = held_by.map(|by| format!("{:032x}", by.trace_id())),
            "request rejected: {error}",
        );
    }

    /// The ticket of the request does not hold the key.
    pub(crate) fn ticket_not_held(&self) {
        self.result("ticket_not_held");
        tracing::debug!(target: "tower_lock", parent: &self.span, result = "ticket_not_held", "request rejected");
    }

    pub(crate) fn recorded(&self) {
        self.result("recorded");
        self.span.record("wait_ms", self.wait_ms());
    }

    /// Records the result of a replay layer.
    pub(crate) fn replay(&self, result: &'static str) {
        self.span.record("replay", result);
    }

    /// The request was granted its lock, and the record of its key answers it.
    pub(crate) fn rejected_by_record(&self, reason: &dyn Display) {
        tracing::debug!(target: "tower_lock", parent: &self.span, "request rejected: {reason}");
    }

    pub(crate) fn lost(&self, why: LockLost) {
        self.result(match why {
            LockLost::HoldLimitReached => "hold_limit_reached",
            LockLost::Superseded => "superseded",
            _ => "lost",
        });
        if why == LockLost::Superseded {
            tracing::debug!(target: "tower_lock", parent: &self.span, "request replaced: {why}");
        } else {
            tracing::warn!(target: "tower_lock", parent: &self.span, "request aborted: {why}");
        }
    }

    /// The lock was lost before it was released, and the work under it was completed.
    pub(crate) fn released_late(&self) {
        self.result("lost");
        tracing::warn!(target: "tower_lock", parent: &self.span, "lock was lost before it was released");
    }

    pub(crate) fn disconnected(&self) {
        self.result("cancelled");
        tracing::debug!(target: "tower_lock", parent: &self.span, "client had disconnected when the lock was granted");
    }

    pub(crate) fn stalled(&self, why: impl Display) {
        tracing::warn!(target: "tower_lock", parent: &self.span, "response aborted, its reader is too slow: {why}");
    }

    pub(crate) fn ended(&self, hold: Duration) {
        self.span.record("hold_ms", millis(hold));
    }

    pub(crate) fn to_tracing(&self) -> Span {
        self.span.clone()
    }

    pub(crate) fn is_enabled(&self) -> bool {
        !self.span.is_disabled()
    }

    /// Runs the handler inside the span, so that its logs have the route, the key and the
    /// fence.
    pub(crate) fn instrument_handler<F: Future>(&self, f: impl FnOnce() -> F) -> Instrumented<F> {
        self.span.in_scope(f).instrument(self.span.clone())
    }

    fn wait_ms(&self) -> f64 {
        millis(self.started.map_or(Duration::ZERO, |started| started.elapsed()))
    }

    /// Only the first one: a subscriber may print each value that a field gets.
    fn result(&self, result: &'static str) {
        if !self.has_result.swap(true, Relaxed) {
            self.span.record("result", result);
        }
    }
}

impl Drop for LockSpan {
    fn drop(&mut self) {
        self.result(if self.is_granted { "granted" } else { "cancelled" });
    }
}

/// Whether the event of a rejected request is logged.
#[cfg(feature = "console")]
pub(crate) fn logs_rejections() -> bool {
    tracing::enabled!(target: "tower_lock", Level::DEBUG)
}

fn open(route: &Route) -> Span {
    tracing::info_span!(
        target: "tower_lock",
        "lock",
        route = route.as_str(),
        key = Empty,
        keys = Empty,
        idempotency_key = Empty,
        result = Empty,
        wait_ms = Empty,
        blocked_by_route = Empty,
        blocked_for_ms = Empty,
        hold_ms = Empty,
        depth = Empty,
        fence = Empty,
        limit = Empty,
        replay = Empty,
    )
}

/// The keys of one request, as far as the log may show them.
fn shown(keys: &[LockKey], shows_key: bool) -> String {
    /// A span of 64 long keys would be larger than the rest of the log.
    const MOST: usize = 8;
    let text = |key: &LockKey| if shows_key { key.as_str().to_owned() } else { key.redacted() };
    let mut shown = keys.iter().take(MOST).map(text).collect::<Vec<_>>().join(", ");
    if keys.len() > MOST {
        shown.push_str(", ..");
    }
    shown
}

fn millis(duration: Duration) -> f64 {
    // Rounded to the microsecond.
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
