//! The log, the spans and the metrics.

mod span;
mod metrics;
mod alerts;
mod observers;
