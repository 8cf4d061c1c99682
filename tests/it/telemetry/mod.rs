//! The log, the spans and the metrics.

mod span;
mod traces;
mod metrics;
mod notices;
mod alerts;
mod observers;
