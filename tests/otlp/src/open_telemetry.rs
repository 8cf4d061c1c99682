use opentelemetry::trace::{SpanContext, TraceContextExt, TraceFlags, TraceState};
use tower_lock::trace::Traces;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// For `LockManagerBuilder::traces`.
#[derive(Debug)]
pub struct OpenTelemetry;

impl Traces for OpenTelemetry {
    fn ids(&self, span: &Span) -> Option<(u128, u64)> {
        let context = span.context();
        let span = context.span().span_context().clone();
        let ids = (u128::from_be_bytes(span.trace_id().to_bytes()), u64::from_be_bytes(span.span_id().to_bytes()));
        span.is_sampled().then_some(ids)
    }

    fn link(&self, span: &Span, to_trace: u128, to_span: u64) {
        let (trace, to) = (to_trace.into(), to_span.into());
        span.add_link(SpanContext::new(trace, to, TraceFlags::SAMPLED, true, TraceState::NONE));
    }
}
