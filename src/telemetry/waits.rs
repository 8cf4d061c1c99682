//! The causes of long waits.
//!
//! A request waits for the section before its own. The span of the request, the metrics and the
//! console show which one that was.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::time::Instant;
use tracing::Span;

use super::{metrics, route::Route};
#[cfg(feature = "console")]
use crate::limits::{LONG_WAIT_KEPT, MAX_LONG_WAITS};
use crate::{
    background::isolated,
    limits::{LONG_WAIT, MAX_BLOCKING_ROUTES},
    lock_key::LockKey,
    sync::Mutex,
    trace::{SectionTrace, Traces},
};

/// The route and the span of a call, which its wait is recorded with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller {
    route: Route,
    /// `None` if no traces are linked.
    span: Option<Box<Span>>,
}

/// A wait that has not ended.
#[derive(Debug)]
pub(crate) struct OpenWait {
    caller: Caller,
    started: Instant,
}

/// The waits of one manager.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    traces: Option<Arc<dyn Traces>>,
    /// The routes that have a counter (I11).
    routes: Mutex<HashSet<Box<str>>>,
    /// The longest ones: a bounded number, for a bounded time (I11).
    #[cfg(feature = "console")]
    longest: Mutex<Vec<LongWait>>,
}

/// A wait that has ended.
#[cfg(feature = "console")]
#[derive(Clone, Debug)]
pub(crate) struct LongWait {
    pub(crate) route: Route,
    pub(crate) key: LockKey,
    pub(crate) waited: Duration,
    pub(crate) result: &'static str,
    pub(crate) ended: Instant,
}

impl OpenWait {
    pub(crate) fn start(caller: Caller) -> Self {
        Self { caller, started: Instant::now() }
    }
}

impl Waits {
    pub(crate) fn new(traces: Option<Arc<dyn Traces>>) -> Self {
        Self { traces, ..Self::default() }
    }

    pub(crate) fn caller(&self, route: Route, span: impl FnOnce() -> Span) -> Caller {
        Caller { route, span: self.traces.as_ref().map(|_| Box::new(span())) }
    }

    /// The trace of the section that a call may get.
    pub(crate) fn trace_of(&self, caller: &Caller) -> Option<SectionTrace> {
        let (traces, span) = self.traces.as_ref().zip(caller.span.as_ref())?;
        let mut ids = None;
        isolated(|| ids = traces.ids(span));
        let (trace, id) = ids?;
        Some(SectionTrace::new(trace, id, caller.route.as_str()))
    }

    /// Records the end of a wait, if it was long. `after` is the section before, if the wait has
    /// ended with a section.
    pub(crate) fn ended(&self, wait: OpenWait, key: &LockKey, result: &'static str, after: Option<&SectionTrace>) {
        let OpenWait { caller, started } = wait;
        let ended = Instant::now();
        let waited = ended.saturating_duration_since(started);
        if waited < LONG_WAIT {
            return;
        }
        if let Some(after) = after {
            self.blocked(&caller, after, waited);
        }
        #[cfg(feature = "console")]
        self.insert(LongWait { route: caller.route, key: key.clone(), waited, result, ended });
        #[cfg(not(feature = "console"))]
        let _ = (key, result);
    }

    /// Links a wait to the section that it was for.
    fn blocked(&self, caller: &Caller, by: &SectionTrace, waited: Duration) {
        // The waiter may have waited for others before.
        let blocked_for = waited.min(by.held_for());
        let blocked_ms = u64::try_from(blocked_for.as_millis()).unwrap_or(u64::MAX);
        metrics::count_blocked(&self.label(by.route()), blocked_ms);
        if let Some((traces, span)) = self.traces.as_ref().zip(caller.span.as_ref()) {
            isolated(|| {
                span.record("blocked_by_route", by.route()).record("blocked_for_ms", blocked_ms);
                traces.link(span, by.trace_id(), by.span_id());
            });
        }
    }

    /// A route as a label. Another instance may have any number of them.
    fn label(&self, route: &str) -> Box<str> {
        let mut routes = self.routes.lock();
        if !routes.contains(route) {
            if routes.len() == MAX_BLOCKING_ROUTES {
                return "other".into();
            }
            routes.insert(route.into());
        }
        route.into()
    }
}

#[cfg(feature = "console")]
impl Waits {
    fn insert(&self, wait: LongWait) {
        let mut waits = self.longest.lock();
        waits.retain(|kept| wait.ended.saturating_duration_since(kept.ended) < LONG_WAIT_KEPT);
        let at = waits.partition_point(|kept| kept.waited >= wait.waited);
        waits.insert(at, wait);
        waits.truncate(MAX_LONG_WAITS);
    }

    /// The waits of the last minutes, the longest one first.
    pub(crate) fn list(&self) -> Vec<LongWait> {
        let now = Instant::now();
        let mut waits = self.longest.lock().clone();
        waits.retain(|kept| now.saturating_duration_since(kept.ended) < LONG_WAIT_KEPT);
        waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_blocking_routes_are_bounded() {
        let waits = Waits::default();
        for n in 0..MAX_BLOCKING_ROUTES {
            assert_eq!(*waits.label(&format!("/{n}")), *format!("/{n}"));
        }
        assert_eq!(&*waits.label("/one-more"), "other");
        assert_eq!(&*waits.label("/7"), "/7");
    }
}
