//! The trace of a section, for the requests that wait for it.
//!
//! A request that waits for a lock waits for the work of another one, perhaps of another process.
//! Its trace shows a gap, and not whose work filled it. So a section leaves its trace and its route
//! with its release, and the store passes them to the next one.

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use tracing::Span;

use crate::limits::MAX_TRACE_ROUTE_BYTES;

/// How the spans of this crate get their traces: the layer for `tracing` that exports them knows.
///
/// [The guide](crate::guide::observability#whose-work-did-a-request-wait-for) has this trait for
/// `tracing-opentelemetry`. The methods are called in the task of the request, at its start and at
/// the end of a wait of 10 ms or longer.
pub trait Traces: fmt::Debug + Send + Sync + 'static {
    /// Returns the id of the trace and of the span. `None`: the span is not exported.
    fn ids(&self, span: &Span) -> Option<(u128, u64)>;

    /// Adds a link to the span, to another trace and one of its spans.
    fn link(&self, span: &Span, to_trace: u128, to_span: u64);
}

/// The trace and the route of a section.
///
/// The text ([`Display`](fmt::Display), [`FromStr`]) is for stores: they keep it, and do not read
/// it.
#[derive(Clone, PartialEq, Eq)]
pub struct SectionTrace(Arc<Parts>);

/// Error of a text that is no [`SectionTrace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the text is no trace of a section")]
#[non_exhaustive]
pub struct InvalidTrace;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts {
    trace: u128,
    span: u64,
    held_ms: u64,
    route: Box<str>,
}

impl SectionTrace {
    /// Creates the trace of a section that has not ended. Of the route, 64 bytes are kept.
    #[must_use]
    pub fn new(trace_id: u128, span_id: u64, route: &str) -> Self {
        let end = (0..=MAX_TRACE_ROUTE_BYTES).rev().find(|end| route.is_char_boundary(*end));
        let route = &route[..end.unwrap_or_default()];
        Self(Arc::new(Parts { trace: trace_id, span: span_id, held_ms: 0, route: route.into() }))
    }

    /// Returns the same trace, of a section that has ended after this time.
    #[must_use]
    pub fn ended(&self, after: Duration) -> Self {
        let held_ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
        Self(Arc::new(Parts { held_ms, ..Parts::clone(&self.0) }))
    }

    /// Returns the id of the trace.
    #[must_use]
    pub fn trace_id(&self) -> u128 {
        self.0.trace
    }

    /// Returns the id of the span.
    #[must_use]
    pub fn span_id(&self) -> u64 {
        self.0.span
    }

    /// Returns the route of the request: the path that it matched, or the name of its layer.
    #[must_use]
    pub fn route(&self) -> &str {
        &self.0.route
    }

    /// Returns how long the section has held the lock, in whole milliseconds. Zero before its end.
    #[must_use]
    pub fn held_for(&self) -> Duration {
        Duration::from_millis(self.0.held_ms)
    }
}

impl fmt::Display for SectionTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parts { trace, span, held_ms, route } = &*self.0;
        write!(f, "{trace:032x}-{span:016x} {held_ms} {route}")
    }
}

impl fmt::Debug for SectionTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SectionTrace({self})")
    }
}

impl FromStr for SectionTrace {
    type Err = InvalidTrace;

    /// Another program may have written the text.
    fn from_str(text: &str) -> Result<Self, InvalidTrace> {
        let parse = || {
            let mut parts = text.splitn(3, ' ');
            let (trace, span) = parts.next()?.split_once('-')?;
            let (held_ms, route) = (parts.next()?.parse().ok()?, parts.next()?);
            let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| *trace > 0)?;
            let section = Self::new(trace, u64::from_str_radix(span, 16).ok()?, route);
            let is_plain = section.route() == route && !route.chars().any(char::is_control);
            is_plain.then(|| section.ended(Duration::from_millis(held_ms)))
        };
        parse().ok_or(InvalidTrace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_trace_is_read_again() {
        let trace = SectionTrace::new(0xab, 7, "/rewards/{reward}").ended(Duration::from_micros(12_900));
        assert_eq!(trace.to_string(), "000000000000000000000000000000ab-0000000000000007 12 /rewards/{reward}");
        assert_eq!(trace.to_string().parse(), Ok(trace.clone()));
        assert_eq!((trace.trace_id(), trace.span_id(), trace.held_for().as_millis()), (0xab, 7, 12));
        let spaces = SectionTrace::new(1, 0, "a job, by hand");
        assert_eq!(spaces.to_string().parse(), Ok(spaces));
    }

    #[test]
    fn route_of_a_trace_is_cut_at_64_bytes() {
        assert_eq!(SectionTrace::new(1, 1, &"a".repeat(99)).route().len(), 64);
        assert_eq!(SectionTrace::new(1, 1, &"ö".repeat(99)).route(), "ö".repeat(32));
        assert_eq!(SectionTrace::new(1, 1, &format!("a{}", "ö".repeat(99))).route().len(), 63);
    }

    #[test]
    fn foreign_text_is_no_trace() {
        let long = format!("ab-1 0 {}", "a".repeat(65));
        for text in ["", "ab", "ab-1", "ab-1 5", "0-1 5 /a", "x-1 5 /a", "ab-1 x /a", "ab-1 5 a\nb", &long] {
            assert_eq!(text.parse::<SectionTrace>(), Err(InvalidTrace), "{text}");
        }
    }
}
